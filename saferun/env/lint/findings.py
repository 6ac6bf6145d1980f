"""Findings of the lint: their severity, and how each is printed on one line."""

from __future__ import annotations

from typing import Final, Literal

from saferun.errors import printable
from saferun.model import Value
from saferun.text.redaction import REDACTED, redacted_text
from saferun.text.secret_names import is_secret

Verdict = Literal[
    "known problem", "bad value", "contradiction", "misconception", "unknown name", "renamed", "uncertain"
]

# Worst first.
VERDICTS: Final[tuple[Verdict, ...]] = (
    "known problem",
    "bad value",
    "contradiction",
    "misconception",
    "unknown name",
    "renamed",
    "uncertain",
)

_SHOWN_CHARS = 80
_LINE_CHARS = 700


class Finding(Value):
    """One finding about one variable.

    Args:
        variable: its name.
        value: its value for display: without secrets, printable, short.
        verdict: the kind of finding.
        sentence: what is wrong.
        hint: what to do.
        source: where that is documented, or what was searched.
        at_launch: whether it is printed at every launch, and not only on request.
    """

    variable: str
    value: str
    verdict: Verdict
    sentence: str
    hint: str
    source: str
    at_launch: bool


def shown(name: str, value: str) -> str:
    """A value for display: without secrets and control characters, and short.

    Args:
        name: the variable's name, which may mark the value as a secret.
        value: its value, which is untrusted.
    """
    if is_secret(name):
        return REDACTED
    text = printable(redacted_text(value[: 2 * _SHOWN_CHARS]))
    return text if len(value) <= _SHOWN_CHARS and len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def one_line(finding: Finding) -> str:
    """A finding as one printable line: ``NAME=value: what is wrong; what to do``."""
    hint = f"; {finding.hint}" if finding.hint else ""
    # Names of files and packages in it are untrusted.
    return printable(f"{finding.variable}={finding.value}: {finding.sentence}{hint}"[:_LINE_CHARS])


def by_severity(finding: Finding) -> tuple[int, str, str]:
    """The key to sort findings by: worst first, then by name."""
    return (VERDICTS.index(finding.verdict), finding.variable, finding.sentence)
