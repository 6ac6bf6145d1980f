"""``saferunctl env explain``: what is known of a variable, whether a profile sets it or not. Pure."""

from __future__ import annotations

from collections.abc import Collection

from saferun.env.lint.documented import DOCUMENTED
from saferun.env.lint.families import family_of
from saferun.env.lint.knowledge import ADVICE
from saferun.env.lint.near_miss import closest, under_a_mended_prefix, under_another_prefix
from saferun.env.lint.purposes import PURPOSES
from saferun.env.lint.settings import SETTINGS
from saferun.env.lint.undocumented import UNDOCUMENTED

_INDENT = " " * 4
_NAMED_OWNERS = 3


def explanation(name: str) -> list[str]:
    """What is known of a variable: what it is for, who reads it, what is wrong with it; none: nothing is known."""
    advice, setting = ADVICE.get(name), SETTINGS.get(name)
    is_known = name in DOCUMENTED or name in UNDOCUMENTED or name in PURPOSES
    if not (is_known or advice or setting):
        return []
    purpose = PURPOSES.get(name, "")
    lines = [f"{name}: {purpose}" if purpose else name]
    family = family_of(name)
    if (is_known or setting) and family is not None:
        owners = ", ".join(owner.removesuffix(".so") for owner in family.owners[:_NAMED_OWNERS])
        lines.append(f"{_INDENT}read by {family.name}" + (f" ({owners})" if owners else ""))
    if name in UNDOCUMENTED:
        lines.append(f"{_INDENT}no documentation names it: it may change with any release")
    if advice is not None:
        lines += [f"{_INDENT}{advice.sentence}", f"{_INDENT}hint: {advice.hint}", f"{_INDENT}source: {advice.source}"]
    elif setting is not None:
        lines += [f"{_INDENT}a value that is not valid: {setting.consequence}", f"{_INDENT}source: {setting.source}"]
    return lines


def probably_meant(name: str, others: Collection[str]) -> str:
    """The variable that was probably meant by a name that is none; empty: none is similar.

    Args:
        name: what was asked for.
        others: names besides those that software documents: of profiles.
    """
    documented = DOCUMENTED | PURPOSES.keys() | SETTINGS.keys() | set(others)
    upper = name.strip().upper().replace("-", "_")
    if upper != name and (upper in documented or upper in UNDOCUMENTED):
        return upper
    mended = under_a_mended_prefix(upper)
    return (
        under_another_prefix(upper, lambda other: other in documented)
        or (mended if mended in documented else "")
        or closest(upper, documented, UNDOCUMENTED)
    )
