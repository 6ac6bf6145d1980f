"""Exceptions about a value without what they quote: words of a GPU error may stand in a log or in the data. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, wraps
from itertools import chain

from saferun.diagnosis.causes.failure import Failure, Rule, shortened
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

# What Python code raises of a wrong value; other exceptions that quote an error have wrapped it.
_OF_A_VALUE = ("KeyError: ", "ValueError: ", "TypeError: ", "AssertionError: ")
# The arguments of an exception that has several: its own words.
_ARGUMENTS = LazyPattern(r"(?!KeyError)\w{1,20}: \(['\"]")
# With what names it as an exception. Its last mark ends no word within; of a line that is cut it may be missing.
_QUOTED = LazyPattern(r"(\w(?:Error|Exception)\()?(?<!\w)(['\"`])(?:(.{0,500}?)(?:\2(?!\w)|$)|.{500}.{0,500}$)")
# A quoted piece of a program's data.
_NAMES_DATA = (
    r"\b(?:[Ss]ample|[Ll]ine|[Tt]ext|[Ss]tring|[Rr]ecord|[Rr]ow|[Dd]ocument|[Ee]xample|[Pp]rompt|[Ii]nput|[Tt]oken"
    r"|[Ii]tem)s?"
)
_DATA = LazyPattern(_NAMES_DATA + r"[ :#=\d]{1,12}$")
_PRINTS_DATA = LazyPattern(_NAMES_DATA + r"[ #\d]{0,12}[:=]")
# Who reports the error of a GPU or of another process says so, and quotes it.
_REPORTS = LazyPattern(
    r"\b(?:CUDA|HIP|ROCm|NCCL|NVIDIA|GPU|cuda|hip|gpu|nvidia|device|kernel|driver|[Ww]orker|[Ee]ngine|[Rr]ank)"
    r"|[Ff]ail|\b[Cc]rash|\b[Dd]ied\b|\b[Rr]aised\b|\b[Cc]aused\b|\b[Ee]rror\b|\b[Ee]xception\b|\bOOM\b|[Aa]borted"
    r"|\b[Cc]onnect|\b[Cc]ollective|\ball[-_ ]?(?:reduce|gather)|\bbarrier"
)
# The same as a key of what is quoted.
_REPORTS_AS_KEY = LazyPattern(r"['\"](?:[Ee]rror|[Ee]xception)['\"]: ?$")
_EXCEPTION = LazyPattern(r"(?:\w{1,60}\.){0,6}\w{0,60}(?:Error|Exception): ")
# The source in a traceback, also in one of rich's.
_SOURCE = LazyPattern(r"[\s│|❱>]")
# What a kernel prints of its own check, and what is raised of that.
_KERNEL_CHECK = LazyPattern(r"thread: \[.{0,200}?Assertion .{1,300}? failed")
_OF_KERNEL_CHECK = LazyPattern(r"device-side assert triggered|(?:cuda|hip)ErrorAssert\b|CUDA_ERROR_ASSERT")
# No message of a GPU is shorter; most keys are.
_SHORTEST = 9
_LONGEST_COMPARED = 60
_LONGEST_NAME = 40
# So many quotations of a failure are looked for in its output, and in so many characters of that for each character
# that rules search.
MOST_COMPARED = 200
SHOWN_PER_CHAR = 4


class Shown:
    """What an output shows as it is, and not as a quotation.

    Args:
        lines: its lines, first those that count most.
        most: how many characters of them are kept.
    """

    def __init__(self, lines: Iterable[str], most: int) -> None:
        self._left = MOST_COMPARED
        self.has_kernel_check = False
        exceptions: list[str] = []
        others: list[str] = []
        for line in lines:
            if most <= 0:
                break
            is_exception = _EXCEPTION.match(line) is not None and not line.startswith(_OF_A_VALUE)
            if not is_exception and _is_of_data(line):
                continue
            (exceptions if is_exception else others).append(line[:most])
            most -= len(line) + 1
            self.has_kernel_check = self.has_kernel_check or (
                "Assertion " in line and _KERNEL_CHECK.search(line) is not None
            )
        self.exceptions = "\n".join(exceptions)
        self.others = "".join(f" {line}\n" for line in others)

    def has(self, text: str) -> bool:
        """Whether an exception has this text, or another line has it outside of quotation marks."""
        self._left -= 1
        return self._left >= 0 and (text in self.exceptions or f" {text}" in self.others)


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
    if error is not None:
        parts: tuple[tuple[str, ...], ...] = (error.messages, error.context)
    else:
        parts = () if failure.messages else (failure.last_lines[::-1],)
    if not any(_may_quote(line) for part in parts for line in part):
        return failure, {}
    changed = _changes(parts, failure.lines, failure.most_chars)
    if not changed:
        return failure, {}
    originals = {shortened(new.strip()): shortened(old.strip()) for old, new in changed.items() if new}
    if error is None:
        return failure._replace(lines=_changed(failure.lines, changed)), originals
    blocks = tuple(block._replace(message=_changed(block.message, changed)) for block in error.blocks)
    return failure._replace(error=error._replace(blocks=blocks)), originals


@lru_cache(maxsize=4)
def _changes(parts: tuple[tuple[str, ...], ...], printed: tuple[str, ...], most: int) -> dict[str, str]:
    """Each of the lines that quotes something, and what is left of it. Each rule asks for them.

    Args:
        parts: lines of which the rules read no more than the first ``most`` characters of each part; of a line that
            stands after these nothing is left.
        printed: the output.
        most: see ``parts``.
    """
    shown = Shown((*chain.from_iterable(parts), *reversed(printed)), SHOWN_PER_CHAR * most)
    changes: dict[str, str] = {}
    for lines in parts:
        left = most
        for line in filter(_may_quote, lines):
            if line not in changes:
                changes[line] = _plain(line, shown) if left > 0 else ""
            left -= len(line)
    return {line: plain for line, plain in changes.items() if plain != line}


def _changed(lines: tuple[str, ...], changes: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(changes.get(line, line) for line in lines)


def _is_of_data(line: str) -> bool:
    """Whether it is source, a piece of data, or an exception about a value."""
    is_value = any(name in line for name in _OF_A_VALUE)
    return is_value or _SOURCE.match(line) is not None or _PRINTS_DATA.search(line) is not None


def _may_quote(line: str) -> bool:
    return line.startswith(_OF_A_VALUE) and any(mark in line for mark in "'\"`") and _ARGUMENTS.match(line) is None


def _plain(line: str, shown: Shown) -> str:
    """The line without the pieces of data that it quotes, and without what else it quotes where it reports nothing."""
    reports = _REPORTS.search(_QUOTED.sub("", line)) is not None

    def left(match: re.Match[str]) -> str:
        if len(match[0]) < _SHORTEST:
            return match[0]
        text = (match[3] or "")[:_LONGEST_COMPARED].strip()
        before = line[max(match.start() - _LONGEST_NAME, 0) : match.start()]
        is_printed = (reports and _DATA.search(before) is None) or _REPORTS_AS_KEY.search(before) is not None
        is_proved = shown.has_kernel_check and _OF_KERNEL_CHECK.search(match[0]) is not None
        is_kept = match[1] or is_printed or is_proved or (text and shown.has(text))
        return match[0] if is_kept else 2 * match[2]

    return _QUOTED.sub(left, line)
