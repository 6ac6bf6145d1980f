"""The literals that a pattern needs: a text that has none of them need not be searched. Pure.

A job of a thousand ranks has a thousand outputs, each of which is searched for hundreds of messages; ``in`` is some
hundred times faster than a search. They are found in the parsed pattern, so that no rule has to name them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from saferun.model import Value

# Shorter ones are in every text.
_SHORTEST = 2
# Beyond that a longer literal leaves out no more, and few literals are found faster than many.
_LONG_ENOUGH = 6
# To parse a pattern takes as long as to search so many characters for it.
_WORTH_IT = 16_000


class _Literals(Value):
    """The literals of a pattern; it is kept, so that no other one can have its number."""

    pattern: re.Pattern[str]
    literals: tuple[str, ...]
    in_any_case: bool

    def may_be_in(self, text: str) -> bool:
        if not self.literals:
            return True
        if self.in_any_case:
            # Some letters beyond ASCII are other cases of letters in it.
            if not text.isascii():
                return True
            text = text.lower()
        return any(literal in text for literal in self.literals)


_spent: dict[int, int] = {}
_known: dict[int, _Literals] = {}


def first_match(pattern: re.Pattern[str], lines: tuple[str, ...]) -> tuple[str, re.Match[str]] | None:
    """The first line in which the pattern is found, and what is found there."""
    if not lines:
        return None
    literals = _literals_known(pattern, sum(map(len, lines)))
    if literals is not None and not literals.may_be_in(_joined(lines)):
        return None
    for line in lines:
        if literals is not None and not literals.may_be_in(line):
            continue
        match = pattern.search(line)
        if match is not None:
            return line, match
    return None


def is_found(pattern: re.Pattern[str], line: str) -> bool:
    """Whether the pattern is found in a line."""
    literals = _literals_known(pattern, len(line))
    return (literals is None or literals.may_be_in(line)) and pattern.search(line) is not None


def _literals_known(pattern: re.Pattern[str], chars: int) -> _Literals | None:
    """The literals of a pattern that was searched for often; none before."""
    known = _known.get(id(pattern))
    if known is None:
        spent = _spent.get(id(pattern), 0) + chars
        if spent < _WORTH_IT:
            _spent[id(pattern)] = spent
            return None
        known = _known[id(pattern)] = _Literals(pattern, literals_of(pattern), bool(pattern.flags & re.IGNORECASE))
    return known


@lru_cache(maxsize=4)
def _joined(lines: tuple[str, ...]) -> str:
    return "\n".join(lines)


def literals_of(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Literals of which each match of the pattern has at least one; none where nothing can be said.

    Where the pattern does not distinguish upper and lower case, they are in lower case.
    """
    try:
        parsed = re._parser.parse(pattern.pattern, pattern.flags)  # type: ignore[attr-defined]  # noqa: SLF001 - no other
        literals = _literals(parsed)
    except Exception:  # the parser is Python's own, and may be another one tomorrow
        return ()
    if pattern.flags & re.IGNORECASE:
        return tuple(sorted({literal.lower() for literal in literals})) if all(map(str.isascii, literals)) else ()
    return tuple(sorted(literals))


def _literals(parsed: Iterable[tuple[object, object]]) -> frozenset[str]:
    """The best set of literals of which a match of this sequence has one; empty where there is none."""
    found: list[frozenset[str]] = []
    run = ""
    for kind, argument in (*parsed, ("END", None)):
        if str(kind) == "LITERAL" and isinstance(argument, int):
            run += chr(argument)
            continue
        found.append(frozenset({run}))
        run = ""
        found.append(_literals_in(str(kind), argument))
    kept = [literals for literals in found if literals and min(map(len, literals)) >= _SHORTEST]
    return max(kept, key=lambda literals: (min(*map(len, literals), _LONG_ENOUGH), -len(literals)), default=frozenset())


def _literals_in(kind: str, argument: Any) -> frozenset[str]:  # noqa: ANN401 - each kind has another one
    match kind, argument:
        case "SUBPATTERN", (_, int(added), _, parsed) if not added & re.IGNORECASE:
            return _literals(parsed)
        case "BRANCH", (_, list(branches)):
            sets = [_literals(branch) for branch in branches]
            return frozenset().union(*sets) if all(sets) else frozenset()
        case (("MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT"), (int(least), _, parsed)) if least > 0:
            return _literals(parsed)
        case "ATOMIC_GROUP", parsed:
            return _literals(parsed)
    return frozenset()
