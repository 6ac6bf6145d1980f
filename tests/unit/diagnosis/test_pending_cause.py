"""Whether a living rank may still show why another one failed."""

from __future__ import annotations

import pytest

from saferun.diagnosis.pending_cause import is_shown, is_victim, ranks_that_may_show_it
from saferun.evidence.job_evidence import AbortReason, Capture, Evidence, Frame, RankOutput, StackDump, ThreadStack
from saferun.model import RankEnd
from tests.unit.diagnosis.failed_jobs import said
from tests.unit.samples import end_of

TORCH = "/x/torch/distributed/distributed_c10d.py"
VICTIM = said(0, "gloo_peer_closed")
LATE = said(0, "gloo_timeout")
OWN = said(0, "key_error")
CLEANING_UP = (
    Frame("destroy_process_group", TORCH, 2000),
    Frame("main", "train.py", 9),
)
IN_BARRIER = (Frame("barrier", TORCH, 4000), Frame("main", "train.py", 7))


def stack(rank: int, *frames: Frame) -> StackDump:
    thread = ThreadStack("MainThread", 0, is_main=True, active=False, owns_gil=False, frames=frames)
    return StackDump(rank, 4000 + rank, is_rank=True, name="python", tool="py-spy", threads=(thread,))


def job(*ends: RankEnd, outputs: tuple[RankOutput, ...], stacks: tuple[StackDump, ...], reason: str = "") -> Evidence:
    """Three ranks of one host."""
    return Evidence(
        "node3",
        90.0,
        ends,
        outputs,
        (),
        None,
        ranks=(0, 1, 2),
        capture=Capture(stacks=stacks),
        abort_reason=AbortReason(reason, "node4", "rank 5: exit code 1", 5) if reason else None,
        script="train.py",
        cwd="/home/user/job",
    )


STACKS = (stack(1, *IN_BARRIER), stack(2, *CLEANING_UP))


@pytest.mark.parametrize("output", [VICTIM, LATE])
def test_the_rank_that_does_not_wait_may_show_it(output: RankOutput) -> None:
    evidence = job(end_of(0, code=1), outputs=(output,), stacks=STACKS)
    assert is_victim(evidence, 0)
    assert ranks_that_may_show_it(evidence) == (2,)
    assert not is_shown(evidence, (2,))


def test_a_rank_of_which_nothing_is_seen_may_show_it() -> None:
    assert ranks_that_may_show_it(job(end_of(0, code=1), outputs=(VICTIM,), stacks=())) == (1, 2)


def test_where_all_wait_nobody_can_show_anything() -> None:
    evidence = job(end_of(0, code=1), outputs=(VICTIM,), stacks=(stack(1, *IN_BARRIER), stack(2, *IN_BARRIER)))
    assert ranks_that_may_show_it(evidence) == ()


def test_a_failure_of_its_own_is_shown_already() -> None:
    evidence = job(end_of(0, code=1), outputs=(OWN,), stacks=STACKS)
    assert not is_victim(evidence, 0)
    assert is_shown(evidence)
    assert ranks_that_may_show_it(evidence) == ()


def test_what_another_rank_has_shown_meanwhile_is_enough() -> None:
    ends = (end_of(0, code=1), end_of(2, code=1, at=101.0))
    evidence = job(*ends, outputs=(VICTIM, OWN._replace(local_rank=2)), stacks=STACKS)
    assert is_shown(evidence, (1, 2))
    assert ranks_that_may_show_it(evidence) == ()


def test_one_more_victim_shows_nothing_until_the_last_suspect_is_gone() -> None:
    ends = (end_of(0, code=1), end_of(1, code=1, at=101.0))
    evidence = job(*ends, outputs=(VICTIM, VICTIM._replace(local_rank=1)), stacks=STACKS)
    assert not is_shown(evidence, (1, 2))
    assert is_shown(evidence, (1,))


def test_a_rank_that_ended_well_while_others_needed_it_is_the_cause() -> None:
    ends = (end_of(1, code=0, at=99.0), end_of(0, code=1))
    assert ranks_that_may_show_it(job(*ends, outputs=(VICTIM,), stacks=STACKS)) == ()


def test_one_that_ended_well_long_before_hides_no_other() -> None:
    """An evaluator that was through; the rank at fault is still to show its error."""
    ends = (end_of(3, code=0, at=100.0), end_of(0, code=1, at=10000.0))
    assert ranks_that_may_show_it(job(*ends, outputs=(VICTIM,), stacks=STACKS)) == (2,)


def test_the_victim_may_be_on_another_host() -> None:
    assert ranks_that_may_show_it(job(outputs=(), stacks=STACKS, reason="victim")) == (0, 2)
    assert ranks_that_may_show_it(job(outputs=(), stacks=STACKS, reason="failure")) == ()
    assert ranks_that_may_show_it(job(outputs=(), stacks=STACKS, reason="signal")) == ()
