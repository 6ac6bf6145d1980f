"""What tests of what ranks wait in share."""

from __future__ import annotations

from saferun.diagnosis.rank_waits import wait_groups
from saferun.evidence.diagnosis_values import WaitGroup
from saferun.evidence.job_evidence import (
    Capture,
    CollectiveCall,
    Frame,
    GroupProgress,
    HangVerdict,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    ThreadStack,
)
from tests.unit.diagnosis.recorded_hangs import (
    CWD,
    SCRIPT,
    dump_of,
)

STEP = Frame("step", "/job/train.py", 52)
CONNECTION = "a connection to 10.0.0.2:80 (ESTABLISHED)"


def one(
    *frames: Frame,
    look: ProcessSnapshot | None = None,
    looks: tuple[ProcessSnapshot, ...] = (),
    dumps: tuple[StackDump, ...] = (),
    collectives: tuple[RankCollectives, ...] = (),
    active: bool = False,
    hang: HangVerdict | None = None,
    ranks: tuple[int, ...] = (0,),
) -> WaitGroup:
    """What rank 0 waits in: frames innermost first."""
    capture = Capture(
        processes=((look,) if look is not None else ()) + looks,
        stacks=((dump_of(0, *frames, active=active),) if frames else ()) + dumps,
        collectives=collectives,
    )
    groups = wait_groups(capture, ranks=ranks, dead={}, hang=hang, script=SCRIPT, cwd=CWD)
    (found,) = [group for group in groups if 0 in group.ranks]
    return found


def recorded(rank: int, enqueued: int, completed: int, op: str = "all_reduce") -> RankCollectives:
    """A Flight Recorder of one group."""
    calls = tuple(
        CollectiveCall(seq, op, "[[4]]", seq <= completed, is_p2p=False, created_ns=seq)
        for seq in range(1, enqueued + 1)
    )
    return RankCollectives(rank, (GroupProgress("0", "default_pg", (0, 1), enqueued, -1, completed, calls),))


def thread(name: str, *frames: Frame, is_main: bool = False, active: bool = False) -> ThreadStack:
    return ThreadStack(name, 0, is_main, active, owns_gil=False, frames=frames)
