"""Whether a program went on after an error that it had logged, and ended for another reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.diagnosis.causes.reasons import ENDS, gives_reason, has_level, only_ends
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.progress_bars import is_bar
from saferun.diagnosis.tracebacks import PythonError

# So many lines that are alike but for their numbers: steps, epochs.
_FEWEST_STEPS = 3
# Behind that stand values, which may be no numbers.
_ALIKE_CHARS = 60
_INFORMS = LazyPattern(r"(?<!=)\b(?:INFO|DEBUG)\b")
_DATE = LazyPattern(r"\[?\d{2,4}[-/]\d\d[-/]\d{2,4}[ T,]\d\d:\d\d:\d\d|\[?\d\d:\d\d:\d\d[ \],.]")
_MORE_THAN_INFORMS = LazyPattern(r"\b(?:WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
_NUMBER = LazyPattern(r"\d[\d.,:]{0,40}")
# What a program logs several times while it ends, or before it tries once more.
_OF_AN_END = LazyPattern(
    r"\b(?:shut|clos(?:e|ing)|sav(?:e[ds]?|ing)|stor(?:ed|ing)|writ(?:ing|ten)|upload|sync|flush|clean|finali[sz]|destroy"
    r"|terminat|stop|exit|abort|kill|releas|join|leav|dump|wait|retr(?:y|ies)|attempt|reconnect|tear|persist|remov|delet"
    r"|notif|restart|resum|push|emergency|tr(?:y|ie[ds])|consider|done|mem(?:ory)?\b|config)",
    re.IGNORECASE,
)
# Last words that are about the end alone: why it came stands above.
_NO_REASON = LazyPattern(
    r"\b(?:persist|remov|delet|notif|restart|resum|push(?:ed|ing)?\b|emergency|try\b|consider)"
    r"|\b(?:shut(?:ting)?[- ]?down|clos(?:ed|ing)|sav(?:ed|ing)|upload(?:ed|ing)?|clean(?:ed|ing)?[- ]?up"
    r"|tear(?:ing)?[- ]?down|exit(?:ed|ing)?,? (?:with|code|status)|exit ?code|destroy(?:ed|ing)|terminat(?:ed|ing)"
    r"|elapsed|took|(?:total|peak) \w{0,8} ?(?:time|mem\w{0,4})|attempts?|retries|tries|times|traceback"
    r"|see (?:the )?(?:logs?|above|traceback|error)|(?:above|previous|earlier)\b.{0,20}\b(?:error|exception)"
    r"|(?:run|job|experiment|training|trainer|main|workers?|process|script|program|task|evaluation|fit)\b"
    r".{0,40}\b(?:fail(?:ed|ure)|abort(?:ed)?|crash(?:ed)?|stopped|interrupted|cancell?ed))\b"
    r"|\b(?:failed|aborted|crashed|aborting|stopping|ending)\W{1,4}(?:the )?(?:run|job|experiment|training)\b",
    re.IGNORECASE,
)
# With these words a log says itself that the error ends the program.
_IS_FATAL = LazyPattern(r"\b(?:CRITICAL|FATAL)\b|\b[Ff]atal\b|\b[Uu]n(?:caught|handled)\b")
# How far a program has come, and what makes a sentence of a line that begins so.
_PROGRESS = LazyPattern(
    r"(?:\[[^\]]{1,60}\] ?){0,4}[\d:.,/ TZ+-]{0,40}(?:(?:[Rr]ank )?[\w.]{1,40} ?[:|-] ?){0,3}"
    r"(?:steps?|epochs?|iter(?:ation)?s?|batch)\b[ :=#(\[]{0,3}\d",
    re.IGNORECASE,
)
_SENTENCE = LazyPattern(
    r"\b(?:is|are|was|were|has|have|had|became|becomes|got|diverge[ds]?|diverging|non-?finite|worse|no improvement"
    r"|unrecognized|because|since)\b",
    re.IGNORECASE,
)
_WORD = LazyPattern(r"[^\W\d_]{1,40}")
_SHORTEST_NAME = 5
_COMPARED = 40


def went_on(error: PythonError, after: Sequence[str], last: str) -> bool:
    """Whether a program took steps after an error, and then gave a reason of its own why it ends.

    A program that ends because of an error logs as well how it shuts down; it may print last that it has failed.

    Args:
        error: what it had logged.
        after: the lines below that.
        last: the last of them that is the program's own.
    """
    if _IS_FATAL.search(error.before) or _repeats(error, last):
        return False
    if not gives_reason(last) or _NO_REASON.search(last):
        return False
    return takes_steps(after[: max(index for index, line in enumerate(after) if line == last)])


def takes_steps(after: Sequence[str]) -> bool:
    """Whether a program went on: several of these lines are alike but for their numbers, and of no end."""
    seen: dict[str, set[str]] = {}
    for line in after:
        if _is_step(line):
            kind = "bar" if is_bar(line) else _NUMBER.sub("0", line)[:_ALIKE_CHARS]
            seen.setdefault(kind, set()).add(line)
    return any(len(lines) >= _FEWEST_STEPS for lines in seen.values())


def _is_step(line: str) -> bool:
    """Whether a program that goes on logs such lines: with no level above INFO, or a date alone, or a bar."""
    if _OF_AN_END.search(line) or _MORE_THAN_INFORMS.search(line):
        return False
    return is_bar(line) or _INFORMS.search(line) is not None or _DATE.match(line) is not None


def _repeats(error: PythonError, line: str) -> bool:
    """Whether a line names the error, or has its words."""
    for block in error.blocks:
        name = block.exception.rpartition(".")[2]
        text = block.message[0].partition(": ")[2].strip()[:_COMPARED] if block.message else ""
        if any(len(part) >= _SHORTEST_NAME and part in line for part in (name, text)):
            return True
    return False


def is_progress(line: str) -> bool:
    """Whether a line shows how far a program has come, whatever its values are: ``step 7 loss 2.31 grad_norm inf``."""
    if _PROGRESS.match(line[:400]) is None or has_level(line) or _SENTENCE.search(line):
        return False
    return ENDS.isdisjoint(word.lower() for word in _WORD.findall(line))


def is_about_end(error: PythonError, line: str) -> bool:
    """Whether a line is about the end of a program alone, or about that error, which it had printed before."""
    if gives_reason(line):
        return False
    is_of_end = _OF_AN_END.search(line) or _NO_REASON.search(line)
    return bool(is_of_end) or only_ends(line) or _repeats(error, line)
