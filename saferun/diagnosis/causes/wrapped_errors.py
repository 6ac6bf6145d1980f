"""Exceptions whose first line has not the reason: it stands below, or in what they were raised from. Pure.

Sources: ``torch._dynamo.exc.BackendCompilerFailed``, ``torch.distributed.checkpoint.CheckpointException``,
``ray.exceptions.RayTaskError``, ``transformers.utils.import_utils``, ``hydra.errors.InstantiationException``,
``datasets.exceptions.DatasetGenerationError``.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.causes.failure import Failure, cause, shortened
from saferun.diagnosis.frames import location_text
from saferun.diagnosis.lazy_patterns import LazyPattern, first_match
from saferun.diagnosis.tracebacks import Block, PythonError
from saferun.evidence.diagnosis_values import Cause
from saferun.model import Value
from saferun.text.wording import ranks_text

_EXCEPTION = LazyPattern(r"(?:[A-Za-z_]\w{0,60}\.){0,8}([A-Za-z_]\w{0,100})(?::|$)")
# The class is named after the exception of the task.
_OF_TASK = LazyPattern(r"(?:ray\.exceptions\.)?RayTaskError\((?:\w{1,60}\.){0,8}(\w{1,100})\)")
_OF_CHECKPOINT = LazyPattern(r"[\w.]{1,100}: CheckpointException ranks:dict_keys\(\[")
# Of transformers, which imports its parts late.
_LATE_IMPORT = r"\b[Ff]ailed to import \S{1,200} because of the following error \(look up to see its traceback\):$"
# Of Hydra.
_REASON_IS_BELOW = LazyPattern(rf"{_LATE_IMPORT}|\bError in call to target '\S{{1,300}}':$")
# Of datasets.
_ONLY_WRAPS = LazyPattern(
    rf"{_LATE_IMPORT}|\bError in call to target '|\bAn error occurred while generating the dataset$"
)
_OF_RANK = "Traceback (most recent call last): (RANK "
_LONGEST = 200
_LONGEST_OF_TWO = 300
_LONGEST_ORIGIN = 160
_FEWEST, _COMPARED = 12, 60


class Headline(Value):
    """An exception in one line.

    Attributes:
        text: what it is, of bounded length.
        line: the line of its message that says so.
    """

    text: str
    line: str


def headline_of(message: Sequence[str]) -> Headline:
    """The exception with this message in one line, with the reason where that stands below the first line.

    Args:
        message: its lines, at least one.
    """
    first = message[0]
    if first.endswith(" raised:"):
        below = next(filter(None, message[1:]), "")
        return Headline(shortened(f"{first} {below}" if _EXCEPTION.match(below) else first, _LONGEST), first)
    below = message[1] if message[1:] else ""
    if below.strip() and _REASON_IS_BELOW.search(first):
        return Headline(shortened(f"{first} {below.strip()}", _LONGEST_OF_TWO), first)
    if _OF_CHECKPOINT.match(first):
        line = _first_of_ranks(message)
        if line:
            return Headline(f"{shortened(line, _LONGEST)} (CheckpointException of {_ranks_in(first)})", line)
    of_task = _OF_TASK.match(first)
    if of_task is not None:
        line = next((one for one in reversed(message[1:]) if _is_named(one, of_task[1])), "")
        if line:
            return Headline(f"{shortened(line, _LONGEST)} (in a Ray task)", line)
    return Headline(shortened(first, _LONGEST), first)


def exception_cause(failure: Failure, class_name: str, advice: str) -> Cause:
    """The cause that an uncaught exception names itself, with the one that it was raised from."""
    assert failure.error is not None  # noqa: S101 - all callers have asked
    innermost = failure.error.innermost
    message, line = headline_of(innermost.message or (innermost.exception,))
    if innermost.link == "nested" and "in DataLoader worker process" in "".join(failure.error.last.message[:1]):
        message += " (in a data-loader worker)"
    origin = origin_of(failure.error)
    if origin is None:
        return cause(failure, class_name, message, advice, proof=line)
    frame = next((frame for frame in reversed(origin.frames) if failure.user.owns(frame)), None)
    location = shortened(location_text(frame)) if frame is not None else ""
    is_wrapped = only_wraps(innermost.message)
    if not _tells_of(origin, (message, *innermost.message)):
        text = shortened(headline_of(origin.message).text, _LONGEST_ORIGIN)
        at = f" at {location}" if location not in {"", failure.location} and not is_wrapped else ""
        message += f" (raised from {text}{at})"
    return cause(failure, class_name, message, advice, proof=line, location=location if is_wrapped else "")


def origin_of(error: PythonError) -> Block | None:
    """The exception that the last one was raised from (``raise X from e``), less those that only wrap another one.

    None also where it is not known: other lines were printed into its traceback.
    """
    index = len(error.blocks) - 1
    while index and error.blocks[index].link == "direct":
        index -= 1
        if not only_wraps(error.blocks[index].message):
            break
    origin = error.blocks[index]
    return origin if index < len(error.blocks) - 1 and origin.message else None


def ranks_of_checkpoint(messages: tuple[str, ...]) -> frozenset[int]:
    """The ranks that a distributed checkpoint failed on, as torch numbers them; empty: none, or not known completely.

    Args:
        messages: of the exception that ended a rank.
    """
    found = first_match(_OF_CHECKPOINT, messages)
    ranks, is_whole = _numbers_in(found[0]) if found is not None else ([], False)
    return frozenset(ranks if is_whole else ())


def only_wraps(message: Sequence[str]) -> bool:
    """Whether an exception says where another one was raised, and nothing of its own."""
    return bool(message) and _ONLY_WRAPS.search(message[0]) is not None


def _tells_of(origin: Block, lines: Sequence[str]) -> bool:
    """Whether these lines have the words of that exception."""
    name = origin.exception.rpartition(".")[2]
    text = origin.message[0].partition(": ")[2][:_COMPARED]
    # Shorter ones may be a key, which gives no reason without its name.
    return any(f"{name}(" in line or (len(text) >= _FEWEST and text in line) for line in lines)


def _is_named(line: str, name: str) -> bool:
    """Whether a line names an exception of this class, with or without its module."""
    exception = _EXCEPTION.match(line)
    return exception is not None and exception[1] == name


def _first_of_ranks(message: Sequence[str]) -> str:
    """The exception of the first rank that a distributed checkpoint failed on; empty where it is not shown."""
    start = next((index for index, line in enumerate(message) if line.startswith(_OF_RANK)), len(message))
    line = next((line for line in message[start + 1 :] if line and not line[0].isspace()), "")
    return line if _EXCEPTION.match(line) and not line.startswith(_OF_RANK) else ""


def _ranks_in(line: str) -> str:
    """The ranks that it names; the line may be cut."""
    ranks, is_whole = _numbers_in(line)
    return f"{ranks_text(ranks)}{'' if is_whole else ' and others'}" if ranks else "some ranks"


def _numbers_in(line: str) -> tuple[list[int], bool]:
    """The ranks in a line, and whether that is not cut among them."""
    numbers, end, _ = line.partition("([")[2].partition("]")
    parts = numbers.split(",")
    return [int(part) for part in (parts if end else parts[:-1]) if part.strip().isdecimal()], bool(end)
