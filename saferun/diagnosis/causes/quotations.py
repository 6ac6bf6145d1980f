"""Exceptions about a value without what they quote: words of a GPU error may stand in a log or in the data. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache, wraps

from saferun.diagnosis.causes.failure import Failure, Rule, shortened
from saferun.evidence.diagnosis_values import Cause

# What Python code raises of a wrong value; other exceptions that quote an error have wrapped it.
_OF_A_VALUE = ("KeyError: ", "ValueError: ", "TypeError: ", "AssertionError: ")
# The arguments of an exception that has several: its own words.
_ARGUMENTS = re.compile(r"(?!KeyError)\w{1,20}: \(['\"]")
# With what names it as an exception. Its last mark ends no word within; of a line that is cut it may be missing.
_QUOTED = re.compile(r"(\w(?:Error|Exception)\()?(?<!\w)(['\"`])(?:(.{0,500}?)(?:\2(?!\w)|$)|.{500}.{0,500}$)")
# A quoted piece of a program's data.
_DATA = re.compile(
    r"\b(?:[Ss]ample|[Ll]ine|[Tt]ext|[Ss]tring|[Rr]ecord|[Rr]ow|[Dd]ocument|[Ee]xample|[Pp]rompt|[Ii]nput|[Tt]oken"
    r"|[Ii]tem)s?[ :#=\d]{1,12}$"
)
# Who reports the error of a GPU or of another process says so, and quotes it.
_REPORTS = re.compile(
    r"\b(?:CUDA|HIP|ROCm|NCCL|NVIDIA|GPU|cuda|hip|gpu|nvidia|device|kernel|driver|[Ww]orker|[Ee]ngine|[Rr]ank)"
    r"|[Ff]ail|\b[Cc]rash|\b[Dd]ied\b|\b[Rr]aised\b|\b[Cc]aused\b"
)
_EXCEPTION = re.compile(r"(?:\w{1,60}\.){0,6}\w{0,60}(?:Error|Exception): ")
# No message of a GPU is shorter; most keys are.
_SHORTEST = 9
_LONGEST_COMPARED = 60
_LONGEST_NAME = 40


def without_quotations(rule: Rule) -> Rule:
    """A rule that does not read what exceptions about a value quote.

    What the same output shows as an exception of its own, and what the words around it report, is read all the same.
    """

    @wraps(rule)
    def judged(failure: Failure) -> Cause | None:
        plain, originals = _without_quotations(failure)
        found = rule(plain)
        # What proves it is the line as it was written.
        return found._replace(proof=originals.get(found.proof, found.proof)) if found is not None else None

    return judged


def _without_quotations(failure: Failure) -> tuple[Failure, dict[str, str]]:
    """The failure without quotations, and by each line that was changed the one that was written."""
    error = failure.error
    written = tuple(line for block in error.blocks for line in block.message) if error is not None else ()
    lines = written if error is not None or failure.messages else failure.lines
    if not any(map(_may_quote, lines)):
        return failure, {}
    changed = _changes(lines, failure.lines)
    if not changed:
        return failure, {}
    originals = {shortened(new.strip()): shortened(old.strip()) for old, new in changed.items()}
    if error is None:
        return failure._replace(lines=_changed(failure.lines, changed)), originals
    blocks = tuple(block._replace(message=_changed(block.message, changed)) for block in error.blocks)
    return failure._replace(error=error._replace(blocks=blocks)), originals


@lru_cache(maxsize=4)
def _changes(lines: tuple[str, ...], printed: tuple[str, ...]) -> dict[str, str]:
    """Each of the lines that quotes something, and what is left of it. Each rule asks for them."""
    shown = [line for line in (*lines, *printed) if _EXCEPTION.match(line) and not line.startswith(_OF_A_VALUE)]
    return {line: left for line in lines if _may_quote(line) and (left := _plain(line, shown)) != line}


def _changed(lines: tuple[str, ...], changes: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(changes.get(line, line) for line in lines)


def _may_quote(line: str) -> bool:
    return line.startswith(_OF_A_VALUE) and any(mark in line for mark in "'\"`") and _ARGUMENTS.match(line) is None


def _plain(line: str, shown: Collection[str]) -> str:
    """The line without the pieces of data that it quotes, and without what else it quotes where it reports nothing."""
    reports = _REPORTS.search(_QUOTED.sub("", line)) is not None

    def left(match: re.Match[str]) -> str:
        if len(match[0]) < _SHORTEST:
            return match[0]
        text = (match[3] or "")[:_LONGEST_COMPARED].strip()
        is_shown = bool(text) and any(text in other for other in shown)
        is_data = _DATA.search(line[max(match.start() - _LONGEST_NAME, 0) : match.start()]) is not None
        is_kept = match[1] or is_shown or (reports and not is_data)
        return match[0] if is_kept else 2 * match[2]

    return _QUOTED.sub(left, line)
