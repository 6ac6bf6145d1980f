"""Samples of the ranks at one moment. Counters only grow; what matters is how far they moved since the last sample."""

from __future__ import annotations

from typing import TypeAlias

from saferun.evidence.job_evidence import HangVerdict
from saferun.model import Value
from saferun.text.script_state import ScriptState

Numbers: TypeAlias = dict[str, tuple[int, int]]
"""Process group -> sequence numbers of the collectives (last enqueued, last completed); -1: none yet."""


class ProcessSample(Value):
    """One process.

    Attributes:
        pid: its number.
        start_ticks: when it started, in clock ticks since boot; tells two processes of the same number apart.
        age_s: how long it has lived.
        forked: whether it runs its parent's program (forked, and no exec since), as data-loader workers do.
        comm: its name.
        state: of its main thread, the letter of proc(5).
        main_run_ns: CPU time of its main thread.
        main_wait_ns: how long its main thread was ready to run and had no processor.
        main_wakes: how often its main thread was put on a processor.
        main_io_bytes: what its main thread read and wrote, through system calls and from and to disks.
        major_faults: of its main thread: pages that had to be read from a disk.
        minor_faults: of its main thread: pages that were new to it.
        cpu_ns: CPU time of all its threads.
        io_bytes: what all its threads read and wrote.
        children_cpu_ns: CPU time of its children that have ended.
        busy_thread_ns: how long the busiest of its other threads ran since the sample before; -1: not sampled.
        traced: whether it is being debugged.
        core_dumping: whether the kernel is writing its core.
    """

    pid: int
    start_ticks: int
    age_s: float
    forked: bool
    comm: str
    state: str
    main_run_ns: int
    main_wait_ns: int
    main_wakes: int
    main_io_bytes: int
    major_faults: int
    minor_faults: int
    cpu_ns: int
    io_bytes: int
    children_cpu_ns: int
    busy_thread_ns: int = -1
    traced: bool = False
    core_dumping: bool = False


class RankSample(Value):
    """One rank.

    Attributes:
        local_rank: its number on this host.
        rank: its number in the job.
        process: the process that does the rank's work: the rank itself, or where that is a shell script or the like,
            the Python that it runs.
        others: all other processes of the rank; None: not sampled.
        is_wrapper: whether the rank is no Python and runs none.
        output_bytes: how much it has written to stdout and stderr.
        heartbeat_ns: modification time of its heartbeat file; 0: no heartbeat yet.
        script: what its script has reported; None: nothing.
    """

    local_rank: int
    rank: int
    process: ProcessSample
    others: tuple[ProcessSample, ...] | None
    is_wrapper: bool
    output_bytes: int
    heartbeat_ns: int
    script: ScriptState | None = None


class JobSample(Value):
    """All ranks of this host that live. ``at`` is in monotonic seconds, ``planned_s`` is the planned interval.

    ``is_held``: a rank waits for what a user types, or is still being started, and the others may wait for it.
    """

    at: float
    planned_s: float
    ranks: tuple[RankSample, ...]
    is_held: bool = False


class SampleResult(Value):
    """What follows from a sample.

    Attributes:
        verdict: the ranks hang, or it looks like it. No more samples are wanted before ``HangDetector.resume``.
        recovered_s: a hang that was reported is over, after so many seconds.
        numbers_wanted: local ranks whose sequence numbers are wanted; each is to be answered, see
            ``HangDetector.take_numbers``.
        read_descendants: local ranks whose other processes are to be in the next sample.
        is_urgent: a verdict waits for nothing but those numbers, an inspection and one more sample.
        inspection_wanted: an inspection of all ranks is wanted; ``HangDetector.take_inspection`` takes the answer.
    """

    verdict: HangVerdict | None = None
    recovered_s: float | None = None
    numbers_wanted: tuple[int, ...] = ()
    read_descendants: frozenset[int] = frozenset()
    is_urgent: bool = False
    inspection_wanted: bool = False
