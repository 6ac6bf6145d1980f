"""Ranks whose exception is older than another one's end: the order of failures is that of what was raised."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import RankOutput
from tests.unit.diagnosis.failed_jobs import class_of, evidence, said
from tests.unit.samples import end_of

TIME = 1.7e9
HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
LOAD = '  File "/home/user/job/train.py", line 9, in load'
OWN = RankOutput(1, (HEAD, STEP, "ValueError: bad batch"), "", "", 0.0, raised=True, uncaught_time=TIME + 97.0)
OTHER = RankOutput(0, (HEAD, LOAD, "RuntimeError: no answer from rank 1"), "", "", 0.0, uncaught_time=TIME + 99.9)


def failed_first(own: RankOutput = OWN, other: RankOutput = OTHER) -> Diagnosis:
    """Rank 0 has ended by an exception; rank 1 was stopped, and had raised one before, as far as that is known."""
    ends = (end_of(0, code=1, at=100.0), end_of(1, signum=15, at=100.5, stopped=True))
    return diagnose(evidence(*ends, outputs=(other, own)))


def test_a_rank_that_had_raised_before_the_first_one_ended_has_failed_first() -> None:
    """Its atexit handlers take long."""
    found = failed_first()
    assert found.headline == (
        "rank 1 (node3, local rank 1, pid 4001) failed first, 7.0 s after the start: ValueError: bad batch, at "
        "train.py:52 in step; stopped before its process had ended"
    )
    assert found.cause is not None
    assert (found.cause.ranks, found.victims, found.stopped) == ((1,), (), ())
    assert [end.rank for end in found.also_failed] == [0]


@pytest.mark.parametrize(
    "own",
    [
        OWN._replace(uncaught_time=0.0),  # handled, of a thread, or of another process
        OWN._replace(uncaught_time=TIME + 99.95),  # after the other one's
        OWN._replace(uncaught_time=TIME + 80.0),  # before the start
        OWN._replace(raised=False),  # it went on to write
        OWN._replace(last_lines=(HEAD, LOAD, "RuntimeError: no answer from rank 1")),  # the same
    ],
)
def test_else_the_one_that_has_ended_is_the_first(own: RankOutput) -> None:
    found = failed_first(own)
    assert found.headline.startswith("rank 0 (node3, local rank 0, pid 4000) failed first, 10.0 s after the start")


def test_of_ranks_that_have_ended_the_one_that_raised_first_is_the_first() -> None:
    ends = (end_of(0, code=1, at=100.0), end_of(1, code=1, at=102.0))
    found = diagnose(evidence(*ends, outputs=(OTHER, OWN._replace(raised=False))))
    assert found.headline.startswith("rank 1 (node3, local rank 1, pid 4001) failed first")


def test_what_a_rank_lost_before_another_one_had_ended_is_still_that_ones_end() -> None:
    """A rank closes its connections some time before its process is gone."""
    lost = said(0, "gloo_peer_closed")._replace(uncaught_time=TIME + 99.0)
    found = diagnose(evidence(end_of(0, code=1, at=100.0), end_of(1, code=0, at=99.5), outputs=(lost,)))
    assert class_of(found) == "early_exit"
