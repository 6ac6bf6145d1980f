"""Ranks that were stopped are told by what they had printed: the cause itself, or that they had lost it."""

from __future__ import annotations

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, RankOutput, StackDump
from tests.unit.diagnosis.failed_jobs import class_of, evidence, said
from tests.unit.diagnosis.test_diagnosis import first_rank
from tests.unit.samples import end_of

OWN = said(1, "key_error")
VICTIM = said(0, "gloo_peer_closed")
NO_PYTHON = "is not a Python process"


def stopped_as(output: RankOutput, *, raised: bool = True, stop_signum: int | None = None) -> Diagnosis:
    """Rank 0 has lost its connection to rank 1, which saferun then stopped."""
    ends = (end_of(0, code=1), end_of(1, signum=15, at=101.0, stopped=True))
    outputs = (VICTIM, output._replace(local_rank=1, raised=raised))
    return diagnose(evidence(*ends, outputs=outputs, stop_signum=stop_signum))


def test_a_rank_that_had_printed_its_own_traceback_when_it_was_stopped_is_the_cause() -> None:
    """Wherever it stood when it was looked at: its interpreter may have taken long to end."""
    found = stopped_as(OWN)
    assert first_rank(found) == 1
    assert found.cause is not None
    assert found.cause.ranks == (1,)
    assert found.stopped == ()
    assert found.victims == (0,)
    assert "KeyError" in found.headline


def test_a_traceback_that_came_after_the_signal_is_no_cause() -> None:
    """A handler of the signal may raise, on all ranks."""
    found = stopped_as(OWN, raised=False)
    assert found.cause is not None
    assert found.cause.ranks == ()
    assert found.stopped == (1,)


def test_a_traceback_that_was_got_over_is_no_cause() -> None:
    """What the rank printed later says that it went on."""
    caught = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: no")
    later = tuple(f"step {step}" for step in range(8))
    assert stopped_as(RankOutput(1, caught, "", "", 0.0)).victims == (0,)
    found = stopped_as(RankOutput(1, (*caught, *later), "", "", 0.0))
    assert found.cause is not None
    assert found.cause.ranks == ()


def test_what_a_signal_raises_is_nobodys_failure() -> None:
    lines = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "KeyboardInterrupt")
    assert stopped_as(RankOutput(1, lines, "", "", 0.0)).stopped == (1,)


def test_where_a_user_stopped_the_job_no_traceback_is_its_cause() -> None:
    assert class_of(stopped_as(OWN, stop_signum=15)) == ""


def test_a_stopped_rank_that_had_lost_its_connection_failed_because_of_it() -> None:
    """It is named with what it was doing, and not as a process that cannot be inspected."""
    ends = (end_of(1, code=1), end_of(0, signum=15, at=101.0, stopped=True))
    gone = StackDump(
        0, 4000, is_rank=True, name="python3", tool="py-spy", threads=(), failure="is not a Python process"
    )
    found = diagnose(evidence(*ends, outputs=(OWN, VICTIM))._replace(capture=Capture(stacks=(gone,))))
    assert first_rank(found) == 1
    assert found.victims == (0,)
    assert found.stopped == ()
    assert [group.ranks for group in found.groups] == [(1,)]
    (peers,) = found.lost_peers
    assert peers.ranks == (0,)
    assert "lost" in peers.message
    assert peers.call == "all_reduce"
    assert peers.location.startswith("train")


def test_a_rank_that_was_stopped_with_the_same_error_failed_in_the_same_way() -> None:
    """Its interpreter takes long to end, and then looks like one that cannot be inspected."""
    ends = (end_of(0, code=1), end_of(1, signum=15, at=101.0, stopped=True))
    outputs = (OWN._replace(local_rank=0, raised=True), OWN._replace(local_rank=1, raised=True))
    gone = StackDump(
        1, 4000, is_rank=True, name="python3", tool="py-spy", threads=(), failure="is not a Python process"
    )
    found = diagnose(evidence(*ends, outputs=outputs)._replace(capture=Capture(stacks=(gone,))))
    assert "rank 1 failed in the same way" in found.headline
    assert found.cause is not None
    assert found.cause.ranks == (0, 1)
    assert found.stopped == ()
    assert found.victims == ()
    assert [group.ranks for group in found.groups] == [(0,)]
    assert [traceback.ranks for traceback in found.tracebacks] == [(0, 1)]


def test_a_python_that_py_spy_finds_no_interpreter_in_is_starting_or_ending() -> None:
    """That a python is not a Python process says nothing to its user."""
    ends = (end_of(0, code=1), end_of(1, signum=15, at=101.0, stopped=True))
    why = "python3 is not a Python process"
    gone = StackDump(1, 4000, is_rank=True, name="python3", tool="py-spy", threads=(), failure=why)
    found = diagnose(evidence(*ends, outputs=(said(0, "key_error"),))._replace(capture=Capture(stacks=(gone,))))
    assert [group.kind for group in found.groups if group.ranks == (1,)] == ["interpreter"]
    other = gone._replace(name="trainer", failure="trainer is not a Python process")
    found = diagnose(evidence(*ends, outputs=(said(0, "key_error"),))._replace(capture=Capture(stacks=(other,))))
    assert [group.kind for group in found.groups if group.ranks == (1,)] == ["unanswering"]
