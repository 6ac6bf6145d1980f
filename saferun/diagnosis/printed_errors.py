"""What ranks that hang have printed of errors before. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from saferun.diagnosis.asides import ASIDE
from saferun.diagnosis.causes.failure import shortened
from saferun.diagnosis.frames import Calls, UserCode, is_native
from saferun.diagnosis.merged_stacks import best_dumps
from saferun.diagnosis.rank_waits import IN_THREAD, Wait
from saferun.diagnosis.tracebacks import clean_lines, ends_with_traceback, find_python_error
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, Frame, StackDump
from saferun.model import Value
from saferun.text.wording import ranks_text

_TRACEBACK = "Traceback (most recent call last):"
_THREAD = "Exception in thread "
_LONGEST_NAME = 60
_LONGEST_MESSAGE = 160
_SHOWN_ERRORS = 4
_MOST_RANKS = 256
# Python waits for threads here when the script is through, whether by its end or by an exception.
_AT_END = Calls(
    ("/threading.py", ("_shutdown",)),
    ("/concurrent/futures/thread.py", ("_python_exit",)),
    ("/concurrent/futures/process.py", ("_python_exit",)),
    ("/multiprocessing/util.py", ("_exit_function",)),
)
_SCRIPT = "<module>"
# The interpreter's own calls: while it runs Python, and when it comes to its end.
_EVALUATES = "PyEval_"
_FINALIZES = ("Py_Finalize", "_Py_Finalize", "wait_for_thread_shutdown")
# What such a rank waits in explains itself.
_NOT_ENDING = frozenset({"dead", "debugger", "stopped"})
# Where an error that a rank has caught may be why it went another way.
_MAY_FOLLOW = frozenset(
    {
        "hang_early_exit",
        "hang_interpreter",
        "hang_lock",
        "hang_mismatched_collectives",
        "hang_missing_collective",
        "hang_unknown",
    }
)


class PrintedError(Value):
    """The traceback with which the stderr of a rank ends.

    Attributes:
        text: ``ValueError: bad batch, at train.py:8``.
        is_uncaught: whether torch's hook for uncaught exceptions has printed it.
        is_aside: whether it has ended something else than the main thread.
    """

    text: str
    is_uncaught: bool
    is_aside: bool


class LastErrors:
    """The errors with which ranks' stderr ends, ended ranks' among them; each is read when it is asked for."""

    def __init__(self, evidence: Evidence) -> None:
        self._user = UserCode(evidence.script, evidence.cwd)
        self._lines = dict(_outputs(evidence))
        self._known: dict[int, PrintedError | None] = {}

    def of(self, rank: int) -> PrintedError | None:
        """That of one rank; None where its stderr does not end with a traceback."""
        if rank not in self._known:
            self._known[rank] = self._read(self._lines.get(rank, ()))
        return self._known[rank]

    def _read(self, lines: tuple[str, ...]) -> PrintedError | None:
        if not any(_TRACEBACK in line for line in lines) or not ends_with_traceback(lines):
            return None
        error = find_python_error(lines)
        if error is None or not error.last.message:
            return None
        clean = clean_lines(lines)[: error.blocks[-1].start + 1]
        location = error.location(self._user)
        text = f"{shortened(error.last.message[0], _LONGEST_MESSAGE)}{f', at {location}' if location else ''}"
        # A log puts more than the rank before each line.
        is_uncaught = error.is_uncaught and clean[-1].startswith(_TRACEBACK)
        before = clean[max(error.blocks[0].start - 2, 0) : error.blocks[0].start]
        return PrintedError(text, is_uncaught, any(line.startswith(ASIDE) for line in before))


def after_errors(waits: Sequence[Wait], errors: LastErrors, evidence: Evidence) -> tuple[Wait, ...]:
    """The same waits, of which those of ranks that an exception ends say so.

    A rank whose script is over waits for nothing that others owe it: the exception keeps it from their collective.
    """
    dumps = best_dumps(evidence.capture.stacks)
    user = UserCode(evidence.script, evidence.cwd)
    changed = []
    for wait in waits:
        found, dump = wait.found, dumps.get(wait.rank)
        may_end = dump is not None and found.kind not in _NOT_ENDING and _is_at_its_end(dump, user)
        error = errors.of(wait.rank) if may_end else None
        if dump is None or error is None or error.is_aside or not (error.is_uncaught or _waits_for_threads(dump)):
            changed.append(wait)
            continue
        does = f"waits in {found.detail}" if found.of_peers else found.doing
        if IN_THREAD in found.detail:
            does = f"cannot end before a thread of it does, which {found.doing}"
        ended_by = found._replace(kind="raised", doing=f"has raised {error.text}, and {does}", of_peers=False)
        changed.append(wait._replace(found=ended_by))
    return tuple(changed)


def _is_at_its_end(dump: StackDump, user: UserCode) -> bool:
    """Whether the main thread runs nothing of the script any more."""
    frames = _main_frames(dump)
    return frames is not None and not any(frame.function == _SCRIPT or user.owns(frame) for frame in frames)


def _waits_for_threads(dump: StackDump) -> bool:
    """Whether it waits in Python's own end, or runs no Python any more."""
    frames = _main_frames(dump) or ()
    calls = [frame for frame in frames if not is_native(frame)]
    if calls:
        return any(frame in _AT_END for frame in calls)
    # The debugger may have seen the interpreter, but not what it runs.
    names = [frame.function for frame in frames]
    runs_python = any(_EVALUATES in name for name in names)
    return not runs_python or any(name.startswith(_FINALIZES) for name in names)


def _main_frames(dump: StackDump) -> tuple[Frame, ...] | None:
    """The calls of the main thread, none where it runs no Python any more; None where they are not known."""
    if dump.failure or not dump.threads:
        return None
    main = [one for one in dump.threads if one.is_main or one.tid == dump.pid or one.name == "MainThread"]
    if main:
        return main[0].frames
    return None if any(one.frames for one in dump.threads) else ()


def printed_last(evidence: Evidence, errors: LastErrors, cause: Cause, headline: str) -> tuple[Cause, list[str]]:
    """What ranks that hold up the others have printed last, where it is an error: the reason, in most cases.

    Returns:
        the cause with advice about it, and lines for the report.
    """
    ended = {end.rank: end.status.description for end in evidence.ends if not end.stopped_by_us}
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(cause.ranks)[:_MOST_RANKS]:
        error = errors.of(rank)
        if error is not None and error.text not in headline and not error.is_aside:
            groups.setdefault((error.text, ended.get(rank, "")), []).append(rank)
    lines = []
    for (text, end), ranks in list(groups.items())[:_SHOWN_ERRORS]:
        names = ranks_text(ranks)
        how = f", which {'has' if len(ranks) == 1 else 'have'} ended ({end})," if end else ""
        lines.append(f"the stderr of {names}{how} ends with a traceback: {text}")
    if groups and cause.class_name in _MAY_FOLLOW:
        names = ranks_text(rank for ranks in groups.values() for rank in ranks)
        cause = cause._replace(advice=f"look at the error that {names} printed last; else {cause.advice}")
    return cause, lines


def raising(evidence: Evidence) -> Iterable[str]:
    """Ranks that have failed but not finished their traceback: Python reads the source for each line of a traceback."""
    ended = {end.rank for end in evidence.ends}
    for rank, lines in _outputs(evidence):
        if rank in ended:
            continue
        begins = [index for index, line in enumerate(lines) if line == _TRACEBACK]
        if begins and all(line.startswith("  ") for line in lines[begins[-1] + 1 :]):
            yield f"rank {rank} has raised an exception, and its traceback is not complete: Python reads the source"


def dead_threads(evidence: Evidence, ranks: Collection[int]) -> Iterable[str]:
    """The threads of these ranks that an exception has ended: what others wait for may have been their work."""
    user = UserCode(evidence.script, evidence.cwd)
    ended = {end.rank for end in evidence.ends}
    for rank, lines in _outputs(evidence):
        clean = clean_lines(lines) if rank in ranks and rank not in ended else []
        start = next((index for index in range(len(clean) - 1, -1, -1) if clean[index].startswith(_THREAD)), None)
        error = find_python_error(clean[start + 1 :]) if start is not None else None
        if start is None or error is None or not error.last.message or error.blocks[0].start:
            continue  # none, or another error came after it
        name = shortened(clean[start].removeprefix(_THREAD).rstrip(":"), _LONGEST_NAME)
        message = shortened(error.last.message[0], _LONGEST_MESSAGE)
        location = error.location(user)
        yield f"rank {rank}: an exception ended thread {name}: {message}{f', at {location}' if location else ''}"


def _outputs(evidence: Evidence) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The last lines of each rank's stderr."""
    for output in evidence.outputs:
        position = output.local_rank
        known = evidence.ranks[position] if position < len(evidence.ranks) else position
        yield output.rank if output.rank >= 0 else known, output.last_lines
