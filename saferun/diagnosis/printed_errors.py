"""What ranks that hang have printed of errors before. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from saferun.diagnosis.causes.failure import shortened
from saferun.diagnosis.frames import UserCode
from saferun.diagnosis.tracebacks import clean_lines, find_python_error
from saferun.evidence import Evidence

_TRACEBACK = "Traceback (most recent call last):"
_THREAD = "Exception in thread "
_LONGEST_NAME = 60
_LONGEST_MESSAGE = 160


def raising(evidence: Evidence) -> Iterable[str]:
    """Ranks that have failed but not finished their traceback: Python reads the source for each line of a traceback."""
    for rank, lines in _outputs(evidence):
        begins = [index for index, line in enumerate(lines) if line == _TRACEBACK]
        if begins and all(line.startswith("  ") for line in lines[begins[-1] + 1 :]):
            yield f"rank {rank} has raised an exception, and its traceback is not complete: Python reads the source"


def dead_threads(evidence: Evidence, ranks: Collection[int]) -> Iterable[str]:
    """The threads of these ranks that an exception has ended: what others wait for may have been their work."""
    user = UserCode(evidence.script, evidence.cwd)
    for rank, lines in _outputs(evidence):
        clean = clean_lines(lines) if rank in ranks else []
        start = next((index for index in range(len(clean) - 1, -1, -1) if clean[index].startswith(_THREAD)), None)
        error = find_python_error(clean[start + 1 :]) if start is not None else None
        if start is None or error is None or not error.last.message or error.blocks[0].start:
            continue  # none, or another error came after it
        name = shortened(clean[start].removeprefix(_THREAD).rstrip(":"), _LONGEST_NAME)
        message = shortened(error.last.message[0], _LONGEST_MESSAGE)
        place = error.location(user)
        yield f"rank {rank}: an exception ended thread {name}: {message}{f', at {place}' if place else ''}"


def _outputs(evidence: Evidence) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The last lines of the ranks that live."""
    ended = {end.rank for end in evidence.ends}
    for output in evidence.outputs:
        rank = output.rank if output.rank >= 0 else output.local_rank
        if rank not in ended:
            yield rank, output.last_lines
