"""Rules that recognize a failure by a message. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from saferun.diagnosis.causes.failure import Failure, cause, own_lines
from saferun.diagnosis.causes.literals import first_match
from saferun.evidence import Cause
from saferun.model import Value

# What launchers and schedulers write below the reason, also in a line that they have broken.
_OF_A_TOOL = re.compile(
    r"(?:\d{1,6}: )?(?:slurmstepd|srun|prterun|mpirun|mpiexec|orterun)\b\S{0,80}: "
    r"|\[(?:mpiexec|proxy:\S{1,12})@\S{1,80}\] |ABORT {1,2}: |\S{1,120}\.[ch] at line \d"
    r"|(?:See|Run) '(?:docker|podman) "
)


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
        must_be_last: of these lines only those count after which the program has written nothing of its own: for
            what a program may get over, as a tool that it runs, or a library, reports it.
    """

    class_name: str
    pattern: re.Pattern[str]
    message: str | Callable[[Failure, re.Match[str]], str]
    advice: str
    in_context: bool = False
    in_last_lines: bool = False
    must_be_last: bool = False


def by_text(failure: Failure, rules: Iterable[TextRule]) -> Cause | None:
    """The cause by the first rule that matches."""
    messages = failure.messages
    for rule in rules:
        found = first_line(rule.pattern, messages)
        if found is None and rule.in_context:
            found = first_line(rule.pattern, failure.context)
        if found is None and rule.in_last_lines:
            found = first_line(rule.pattern, failure.closing_lines)
        if found is None and rule.must_be_last:
            found = first_line(rule.pattern, final_lines(failure))
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


def final_lines(failure: Failure) -> tuple[str, ...]:
    """Its very last lines, last line first, up to the last one of the program's own, which is among them."""
    return _up_to_own(failure.closing_lines)


@lru_cache(maxsize=4)
def _up_to_own(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Many rules ask for the same lines."""
    own = (index for index, line in enumerate(lines) if _OF_A_TOOL.match(line) is None and own_lines((line,)))
    end = next(own, len(lines))
    return lines[: end + 1]
