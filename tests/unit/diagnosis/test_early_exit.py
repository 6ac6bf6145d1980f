"""Ranks that ended well: when they are the cause of what became of the others, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence import Capture, Diagnosis, Frame, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.failed_jobs import class_of, evidence, said
from tests.unit.diagnosis.recorded_hangs import C10D, dump_of, look_of, native
from tests.unit.diagnosis.recorded_hangs import evidence as evidence_of_hang
from tests.unit.samples import end_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
CONNECTION = '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 399, in _recv'
STORE = '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce'


def failed_late(*lines: str) -> Diagnosis:
    """Rank 0 failed 200 s after the others had ended well."""
    ends = (end_of(0, code=1, at=300.0), end_of(1, code=0, at=100.0), end_of(2, code=0, at=100.0))
    return diagnose(evidence(*ends, outputs=(RankOutput(0, lines, "", "", 0.0),)))


@pytest.mark.parametrize(
    "lines",
    [
        (HEAD, STEP, "    upload(checkpoint)", "ConnectionResetError: [Errno 104] Connection reset by peer"),
        (HEAD, STEP, "    table = manager.dict()", CONNECTION, "    raise EOFError", "EOFError"),
        (HEAD, STEP, "    client.send(result)", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("ssh: connect to host backup port 22: Connection refused",),
    ],
)
def test_ranks_that_had_ended_well_are_not_to_blame_for_a_connection_of_anothers_own(lines: tuple[str, ...]) -> None:
    """Nothing shows that it was to one of them."""
    found = failed_late(*lines)
    assert found.cause is not None
    assert found.cause.class_name in {"connection_lost", "ssh_unreachable"}
    assert found.cause.ranks == (0,)
    assert found.headline.startswith("rank 0 (node3, local rank 0, pid 4000) failed first"), found.headline
    assert found.victims == ()


def test_a_connection_that_is_lost_in_a_collective_is_one_to_the_ranks_that_had_ended() -> None:
    found = failed_late(HEAD, STEP, STORE, "RuntimeError: Connection reset by peer")
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("early_exit", (1, 2))
    ends = (end_of(0, code=1, at=300.0), end_of(1, code=0, at=100.0))
    assert class_of(diagnose(evidence(*ends, outputs=(said(0, "gloo_peer_closed"),)))) == "early_exit"


# ------------------------------------------------------------------------------------------------------------ in a hang

ALL_REDUCE = (Frame("all_reduce", C10D, 3252), Frame("step", "/job/train.py", 52))
AWAY = Frame("evaluate", "/job/train.py", 41)
SLEEPS: dict[str, Any] = {"syscall": "clock_nanosleep", "wchan": "hrtimer_nanosleep"}


def hang(*frames: Frame, **look: Any) -> Diagnosis:
    """Rank 3 has ended well, ranks 0 and 2 are in a collective, and rank 1 stands elsewhere."""
    stacks = (dump_of(0, *ALL_REDUCE), dump_of(1, *frames), dump_of(2, *ALL_REDUCE))
    looks = (look_of(0), look_of(1, **look), look_of(2))
    ended = RankEnd(3, 3, 103, ExitStatus(0, None), 9.0, 9.0, stopped_by_us=False)
    seen = Capture(processes=looks, stacks=stacks)
    return diagnose_hang(evidence_of_hang(seen, ends=(ended,), ranks=(0, 1, 2, 3)))


def test_a_living_rank_that_stays_away_is_named_with_the_one_that_has_ended() -> None:
    """Which of them the others need is not known: the one that ended may have had nothing left to do."""
    found = hang(AWAY, **SLEEPS)
    assert found.headline == (
        "the job hangs: rank 3 (node1) has ended (exit code 0), and ranks 0, 2 wait in all_reduce; rank 1 sleeps at "
        "train.py:41 in evaluate"
    )
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_early_exit", (1, 3))
    assert found.cause.location == "train.py:41 in evaluate"
    assert found.cause.advice.endswith("; else look at what keeps rank 1 away")


@pytest.mark.parametrize(
    ("frames", "look"),
    [
        ((native("cudaStreamSynchronize"), AWAY), {}),
        ((AWAY,), {"state": "R", "syscall": "", "wchan": ""}),
        ((), {"syscall": "ioctl", "wchan": ""}),
    ],
)
def test_one_that_may_wait_for_the_others_is_not_named_with_it(frames: tuple[Frame, ...], look: dict[str, Any]) -> None:
    """A call of NCCL's looks so."""
    found = hang(*frames, **look)
    assert found.headline.endswith("rank 3 (node1) has ended (exit code 0), and ranks 0, 2 wait in all_reduce")
    assert found.cause is not None
    assert found.cause.ranks == (3,)
