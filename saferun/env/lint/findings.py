"""What the lint says: findings, how bad they are, and how they are put on one line."""

from __future__ import annotations

from typing import Final, Literal

from saferun.errors import printable
from saferun.model import Value
from saferun.text.redaction import REDACTED, redacted_text
from saferun.text.secret_names import is_secret

Verdict = Literal[
    "known problem", "bad value", "contradiction", "misconception", "unknown name", "renamed", "cannot tell"
]

# Worst first.
VERDICTS: Final[tuple[Verdict, ...]] = (
    "known problem",
    "bad value",
    "contradiction",
    "misconception",
    "unknown name",
    "renamed",
    "cannot tell",
)

_SHOWN_CHARS = 80
_LINE_CHARS = 700


class Finding(Value):
    """One thing to be said of one variable.

    Args:
        variable: its name.
        value: its value as it may be shown: without secrets, printable, short.
        verdict: how it is judged.
        sentence: what is the matter.
        hint: what to do.
        source: where that is written, or what was searched.
        at_launch: worth a line at every launch; the others are for those who ask.
    """

    variable: str
    value: str
    verdict: Verdict
    sentence: str
    hint: str
    source: str
    at_launch: bool


def shown(name: str, value: str) -> str:
    """A value as it may be shown: nothing of a secret, no control characters, never long.

    Args:
        name: the variable's name, by which the value may be a secret.
        value: its value, which may hold anything that an environment can hold.
    """
    if is_secret(name):
        return REDACTED
    text = printable(redacted_text(value[: 2 * _SHOWN_CHARS]))
    return text if len(value) <= _SHOWN_CHARS and len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def one_line(finding: Finding) -> str:
    """A finding on one line of printable characters: ``NAME=value: what is the matter; what to do``."""
    hint = f"; {finding.hint}" if finding.hint else ""
    # Names of files and of packages stand in it, which may hold anything too.
    return printable(f"{finding.variable}={finding.value}: {finding.sentence}{hint}"[:_LINE_CHARS])


def by_severity(finding: Finding) -> tuple[int, str, str]:
    """The key to sort findings by: worst first, then by name."""
    return (VERDICTS.index(finding.verdict), finding.variable, finding.sentence)
