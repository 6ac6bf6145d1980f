"""Who failed first, and what became of the others."""

from __future__ import annotations

import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.diagnosis import diagnose
from saferun.model import Evidence, ExitStatus, RankEnd, RankOutput, signal_name
from tests.unit.samples import end_of


def evidence(
    *ends: RankEnd,
    outputs: tuple[RankOutput, ...] = (),
    stop_signum: int | None = None,
    trouble: str = "",
    abandoned: tuple[int, ...] = (),
) -> Evidence:
    hint = "look there" if trouble else ""
    return Evidence("node3", 90.0, ends, outputs, (), abandoned, stop_signum, trouble, hint)


def recorded(rank: int, seconds: float) -> RankOutput:
    """An error file whose exception was raised at this time (``at`` of ``end_of``)."""
    return RankOutput(rank, (), "", "ValueError: no", 1.7e9 + seconds)


def test_the_first_failure_is_named_with_place_time_and_status() -> None:
    """Which rank, on which host, when, and how."""
    found = diagnose(evidence(end_of(1, code=3, at=101.0), end_of(0, signum=11, at=100.5)))
    assert found.first is not None
    assert found.first.rank == 0
    assert found.headline == (
        "rank 0 (node3, local rank 0, pid 4000) failed first, 10.5 s after the start: killed by SIGSEGV"
    )
    assert [end.rank for end in found.also_failed] == [1]


def test_ranks_that_saferun_stopped_are_victims() -> None:
    """They ended by SIGTERM or SIGKILL because another one failed."""
    found = diagnose(
        evidence(
            end_of(0, signum=15, at=99.0, stopped=True),
            end_of(1, code=1, at=100.0),
            end_of(2, code=0, at=98.0),
            end_of(3, code=0, at=98.0, stopped=True),
        )
    )
    assert found.first is not None
    assert found.first.rank == 1
    assert found.also_failed == ()
    assert found.stopped == (0, 3)


def test_the_exception_that_was_raised_first_comes_first() -> None:
    """A rank with much to clean up ends after those that its failure took down."""
    outputs = (recorded(0, 95.0), recorded(1, 99.0))
    found = diagnose(evidence(end_of(1, code=1, at=100.0), end_of(0, code=1, at=130.0), outputs=outputs))
    assert found.first is not None
    assert found.first.rank == 0
    assert found.output == outputs[0]


def test_error_files_know_whole_seconds_only() -> None:
    """Within the rounding the kernel's order counts."""
    outputs = (recorded(0, 100.0), recorded(1, 100.9))
    found = diagnose(evidence(end_of(1, code=1, at=100.2), end_of(0, code=1, at=100.5), outputs=outputs))
    assert found.first is not None
    assert found.first.rank == 1


@pytest.mark.parametrize("nonsense", [0.0, -5.0, math.nan, math.inf, -math.inf, 1e300])
def test_a_time_that_makes_no_sense_is_not_believed(nonsense: float) -> None:
    """A rank may write what it likes into its error file."""
    output = RankOutput(0, (), "", "boom", nonsense)
    found = diagnose(evidence(end_of(0, code=1, at=105.0), end_of(1, code=1, at=100.0), outputs=(output,)))
    assert found.first is not None
    assert found.first.rank == 1


def test_a_time_before_the_attempt_is_not_believed() -> None:
    """A stale file, or a clock that is not set, must not put a victim first."""
    output = RankOutput(0, (), "", "boom", 86_400.0)
    found = diagnose(evidence(end_of(0, code=1, at=105.0), end_of(1, signum=9, at=100.0), outputs=(output,)))
    assert found.first is not None
    assert found.first.rank == 1


def test_a_trouble_of_saferuns_own_is_the_headline() -> None:
    """The ranks can do nothing about a missing store."""
    found = diagnose(evidence(end_of(0, signum=15, stopped=True), trouble="the store's process ended"))
    assert found.headline == "the store's process ended"
    assert found.hint == "look there"
    assert found.first is None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_launch_that_was_asked_to_stop_says_so(signum: int) -> None:
    """It did not fail."""
    found = diagnose(evidence(end_of(0, code=0, stopped=True), stop_signum=signum))
    assert found.headline == f"stopped by {signal_name(signum)}"
    assert found.first is None


def test_unknown_is_an_honest_answer() -> None:
    """Better than a wrong one."""
    found = diagnose(evidence(end_of(0, code=0), abandoned=(1,)))
    assert found.first is None
    assert found.output is None
    assert "no rank" in found.headline
    assert found.abandoned == (1,)


@given(
    st.lists(
        st.builds(
            end_of,
            st.integers(0, 7),
            code=st.one_of(st.none(), st.integers(0, 3)),
            signum=st.sampled_from([9, 11, 15]),
            at=st.floats(90, 200),
            stopped=st.booleans(),
        ),
        max_size=8,
        unique_by=lambda end: end.rank,
    )
)
def test_every_rank_that_did_not_end_well_has_one_part(ends: list[RankEnd]) -> None:
    """First, also failed, or stopped; and without error files the order is the kernel's."""
    found = diagnose(evidence(*ends))
    failed = [end for end in (found.first, *found.also_failed) if end is not None]
    assert failed == sorted(failed, key=lambda end: end.time)
    assert {end.rank for end in failed} == {end.rank for end in ends if not end.status.ok and not end.stopped_by_us}
    assert set(found.stopped) == {end.rank for end in ends if end.stopped_by_us}


@pytest.mark.parametrize(
    ("status", "words", "returncode"),
    [
        (ExitStatus(0, None), "exit code 0", 0),
        (ExitStatus(3, None), "exit code 3", 3),
        (ExitStatus(None, 11, core_dumped=True), "killed by SIGSEGV (core dumped)", -11),
        (ExitStatus(None, 9), "killed by SIGKILL", -9),
        (ExitStatus(None, 33), "killed by signal 33", -33),
    ],
)
def test_a_status_in_words(status: ExitStatus, words: str, returncode: int) -> None:
    """A person reads SIGSEGV, not -11."""
    assert status.words == words
    assert status.returncode == returncode
    assert status.ok == (returncode == 0)
