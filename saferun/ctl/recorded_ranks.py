"""Recording the ranks that an argument of the command line means: by the saferun that leads their job, or here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.captures.recording import Recording, RecordOptions, record
from saferun.captures.wire import MOST_RECORDED
from saferun.ctl.job_stacks import read_job_recording
from saferun.ctl.live_stacks import find_asked_processes, read_processes, run_of
from saferun.errors import UsageError
from saferun.model import Value
from saferun.text.wording import ranks_text


class RecordedRanks(Value):
    """What was recorded.

    Attributes:
        name: of the run or the process, as a part of a file's name.
        recordings: each with the name of its host, empty for this one.
        remarks: what is missing, in lines.
    """

    name: str
    recordings: tuple[tuple[str, Recording], ...]
    remarks: tuple[str, ...] = ()


def record_ranks(
    target: str, ranks: Sequence[int], options: RecordOptions, *, on_begin: Callable[[], None]
) -> RecordedRanks:
    """Record them.

    Args:
        target: a process or a run.
        ranks: whose; empty: of all.
        options: how.
        on_begin: called when it is known whom to record.

    Raises:
        UsageError: there are no such ranks here.
    """
    directory = run_of(target)
    name = directory.resolve().name if directory is not None else f"pid-{target}"
    remarks: tuple[str, ...] = ()
    if directory is not None:
        job = read_job_recording(directory, ranks, options, on_begin=on_begin)
        if job.recordings is not None:
            return RecordedRanks(name, job.recordings, job.remarks)
        remarks = job.remarks
    asked = find_asked_processes(target, read_processes())
    targets = [one for one in asked.targets if not ranks or one.rank in ranks]
    if not targets:
        hint = f"this host has {ranks_text(one.rank for one in asked.targets)}"
        raise UsageError(f"{asked.title} has no {ranks_text(ranks)} here", hint)
    if len(targets) > MOST_RECORDED:
        raise UsageError(f"{asked.title} has {len(targets)} ranks here", f"name {MOST_RECORDED} at most with --rank")
    on_begin()
    return RecordedRanks(name, tuple(("", one) for one in record(targets, options)), remarks)
