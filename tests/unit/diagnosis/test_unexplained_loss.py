"""Ranks that lost others, where no rank has failed of itself: what is said on one host, and on one of several."""

from __future__ import annotations

import signal

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.pending_cause import is_victim, ranks_that_may_show_it
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import Capture, Evidence, StackDump
from saferun.model import RankEnd
from tests.unit.diagnosis.failed_jobs import dump_of, evidence, said
from tests.unit.diagnosis.test_timeouts import SLEEPS
from tests.unit.samples import end_of

LOST = end_of(0, code=1, at=100.0)
CLOSES_EARLY = "a rank that calls destroy_process_group() or closes connections while others still call collectives"


def job(*ends: RankEnd, stacks: tuple[StackDump, ...] = (), name: str = "gloo_peer_closed") -> Evidence:
    """Rank 0 lost another rank of its host, and no rank failed of itself."""
    return evidence(*ends, outputs=(said(0, name),))._replace(capture=Capture(stacks=stacks))


def cause_of(found: Diagnosis) -> Cause:
    assert found.cause is not None
    return found.cause


def test_on_one_host_the_rank_that_was_in_no_collective_is_shown() -> None:
    """It has closed its process group and still saves: that it ends with exit code 0 later shows nothing else."""
    found = diagnose(job(LOST, end_of(1, code=0, at=103.0), stacks=(dump_of(1, SLEEPS),)))
    assert found.headline == (
        "rank 0 (node3, local rank 0, pid 4000) failed first, 10.0 s after the start: lost its connection to another "
        "rank, at train.py:129 in main; exit code 1; no earlier rank failure is known; meanwhile rank 1 sleeps at "
        "train.py:61 in pause"
    )
    cause = cause_of(found)
    assert cause.message == "lost its connection to another rank; no earlier rank failure is known"
    assert (cause.class_name, cause.ranks) == ("peer_lost", ())
    assert cause.advice == f"look at what rank 1 did before: {CLOSES_EARLY} breaks theirs"


def test_of_several_ranks_that_were_in_no_collective_all_are_named() -> None:
    ends = [LOST, *(end_of(rank, signum=15, at=111.0, stopped=True) for rank in (1, 2))]
    found = diagnose(job(*ends, stacks=(dump_of(1, SLEEPS), dump_of(2, SLEEPS))))
    assert found.headline.endswith(
        "; meanwhile rank 1 sleeps at train.py:61 in pause; rank 2 did not wait for another rank either"
    )
    assert cause_of(found).advice == f"look at what ranks 1-2 did before: {CLOSES_EARLY} breaks theirs"


def test_on_one_host_without_stacks_no_other_host_is_named() -> None:
    found = diagnose(job(LOST, end_of(1, code=0, at=103.0)))
    assert found.headline.endswith("; no earlier rank failure is known")
    assert "host" not in cause_of(found).advice
    assert cause_of(found).advice == f"look for {CLOSES_EARLY}: it breaks theirs"


def test_a_host_of_several_that_judges_alone_looks_at_the_others() -> None:
    """The evidence of the others has not come: the job has more ranks than this host."""
    alone = job(LOST, end_of(1, code=0, at=103.0), stacks=(dump_of(1, SLEEPS),))._replace(world_size=4)
    found = diagnose(alone)
    assert found.headline.endswith("; the cause is not among the ranks of this host")
    assert cause_of(found).advice.startswith("look at the other hosts")


def test_a_store_that_a_rank_of_one_host_has_lost_is_looked_for_there() -> None:
    found = diagnose(job(end_of(0, code=1, at=100.0), name="store_gone"))
    assert cause_of(found).class_name == "rendezvous_store_failure"
    assert "host" not in cause_of(found).advice
    assert "the store" in cause_of(found).advice


PIPE = end_of(1, signum=signal.SIGPIPE, at=100.0)


@pytest.mark.parametrize("world_size", [0, 4])
def test_a_pipe_without_a_reader_is_not_said_to_be_the_output(world_size: int) -> None:
    """Nor is it a connection to another host, nor waited for what another rank has to show."""
    given = evidence(PIPE)._replace(world_size=world_size, ranks=(0, 1))
    assert ranks_that_may_show_it(given) == ()
    assert ranks_that_may_show_it(job(LOST)._replace(ranks=(0, 1))) == (1,)
    found = diagnose(given)
    assert found.headline == (
        "rank 1 (node3, local rank 1, pid 4001) failed first, 10.0 s after the start: a pipe or socket that it wrote "
        "to had no reader (SIGPIPE)"
    )
    cause = cause_of(found)
    assert (cause.class_name, cause.ranks, found.victims) == ("broken_pipe", (1,), ())
    assert "host" not in cause.advice
    assert not is_victim(given, 1)


def test_a_pipe_without_a_reader_gives_way_to_a_rank_that_failed_of_itself() -> None:
    own = end_of(0, code=1, at=101.0)
    found = diagnose(evidence(PIPE, own, outputs=(said(0, "key_error"),)))
    assert (found.first_failure, found.victims) == (own, (1,))


def test_the_rank_that_lost_others_first_is_not_said_to_have_failed_because_of_itself() -> None:
    ends = (LOST, end_of(1, code=1, at=101.0))
    found = diagnose(evidence(*ends, outputs=(said(0, "gloo_peer_closed"), said(1, "gloo_peer_closed"))))
    assert (found.first_failure, found.victims) == (LOST, (1,))
    assert [peers.ranks for peers in found.lost_peers] == [(1,)]
