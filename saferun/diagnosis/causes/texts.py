"""Rules that recognize a failure by a message. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from saferun.diagnosis.causes.failure import Failure, cause
from saferun.diagnosis.causes.literals import first_match
from saferun.evidence import Cause
from saferun.model import Value


class TextRule(Value):
    """A message, and what it means.

    Attributes:
        class_name: the class of the cause.
        pattern: found in one line. It may not backtrack: no repetition within a repetition, all bounded. It is
            compiled with its module, at a quiet moment: when a rank has failed, others wait for the verdict.
        message: the cause in short; ``{0}`` is the pattern's first group. A function takes the failure and the
            match.
        advice: what to do.
        in_context: whether an exception during whose handling the last one was raised counts too.
        in_last_lines: whether the rank's last lines count where no exception explains the end.
    """

    class_name: str
    pattern: re.Pattern[str]
    message: str | Callable[[Failure, re.Match[str]], str]
    advice: str
    in_context: bool = False
    in_last_lines: bool = False


def by_text(failure: Failure, rules: Iterable[TextRule]) -> Cause | None:
    """The cause by the first rule that matches."""
    messages = failure.messages
    for rule in rules:
        found = first_line(rule.pattern, messages)
        if found is None and rule.in_context:
            found = first_line(rule.pattern, failure.context)
        if found is None and rule.in_last_lines:
            found = first_line(rule.pattern, failure.closing_lines)
        if found is not None:
            line, match = found
            message = rule.message
            text = message(failure, match) if callable(message) else message.format(*match.groups(""))
            return cause(failure, rule.class_name, text, rule.advice, proof=line)
    return None


def first_line(pattern: re.Pattern[str], lines: Iterable[str]) -> tuple[str, re.Match[str]] | None:
    """The first line in which the pattern is found."""
    if isinstance(lines, tuple):
        return first_match(pattern, lines)
    for line in lines:
        match = pattern.search(line)
        if match is not None:
            return line, match
    return None
