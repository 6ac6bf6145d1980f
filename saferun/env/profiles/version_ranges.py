"""Ranges of versions in profiles: ``>=2.8,<2.11``. Pure.

A version is the numbers at its beginning: ``2.15.0a0+git1f0`` is 2.15.0, so a pre-release counts as its release (the
names it reads are the release's). A bound counts for all that begins with it: 2.9.1 is a 2.9, so ``==2.9`` and
``<=2.9`` hold for it, and ``>2.9`` does not.

Without regular expressions: this runs at every launch, and compiling one takes longer than the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

_OPERATORS = (">=", "<=", "==", "!=", ">", "<")
_DIGITS = "0123456789"
_LONGEST = 64


def is_range(text: str) -> bool:
    """Whether ``text`` is a range: clauses with ``>= <= == != > <``, separated by commas."""
    return len(text) <= _LONGEST and all(_parsed(clause) is not None for clause in text.split(","))


def numbers_of(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: ``2.13.0+cu130`` is (2, 13, 0)."""
    found: list[int] = []
    for part in version[:_LONGEST].strip().removeprefix("v").split("."):
        digits = part[: len(part) - len(part.lstrip(_DIGITS))]
        if digits:
            found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


def holds(version: str, wanted: str) -> bool:
    """Whether a version is in a range. A version without numbers is in none.

    Args:
        version: an installed version, ``2.13.0+cu130``.
        wanted: the range; it must satisfy ``is_range``.
    """
    have = numbers_of(version)
    return bool(have) and all(_clause_holds(have, clause) for clause in wanted.split(","))


def _parsed(clause: str) -> tuple[str, tuple[int, ...]] | None:
    clause = clause.strip()
    for operator in _OPERATORS:
        if clause.startswith(operator):
            bound = clause[len(operator) :].strip()
            parts = bound.split(".")
            if all(part and not part.strip(_DIGITS) for part in parts):
                return operator, tuple(int(part) for part in parts)
            return None
    return None


def _clause_holds(have: tuple[int, ...], clause: str) -> bool:
    parsed = _parsed(clause)
    if parsed is None:
        return False
    operator, bound = parsed
    width = max(len(have), len(bound))
    left, right = _padded(have, width), _padded(bound, width)
    same = left[: len(bound)] == bound
    return {
        ">=": left >= right,
        "<=": left < right or same,
        ">": left > right and not same,
        "<": left < right,
        "==": same,
        "!=": not same,
    }[operator]


def _padded(version: tuple[int, ...], width: int) -> tuple[int, ...]:
    return version + (0,) * (width - len(version))


def why_not(conditions: tuple[tuple[str, str], ...], versions: Mapping[str, str]) -> str | None:
    """Why the ranges of a variable do not all match; None if they do.

    A component of unknown version is in no range: a name for another version would have no effect.
    """
    for component, wanted in conditions:
        version = versions.get(component)
        if version is None:
            return f"it is for {component} {wanted}, and the version of {component} is not known"
        if not holds(version, wanted):
            return f"it is for {component} {wanted}, and {version} is installed"
    return None


def what_breaks(conditions: tuple[tuple[str, str], ...], versions: Mapping[str, str]) -> str | None:
    """The installed component that a variable is known to break with, for messages; None if there is none."""
    for component, wanted in conditions:
        version = versions.get(component)
        if version is not None and holds(version, wanted):
            return f"it is known to break with {component} {version}"
    return None
