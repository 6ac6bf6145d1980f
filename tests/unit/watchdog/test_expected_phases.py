"""Long phases that scripts announce: no hang before they are over, and one that is over its time at once."""

from __future__ import annotations

import pytest

from saferun.text.script_state import ReportedPhase, ScriptState
from saferun.watchdog.job_verdicts import combine, packed, verdict_from
from tests.unit.watchdog.simulated_jobs import QUIET, TRAINS, Job, Rates, kinds

TIMEOUT_S = 30.0


def expecting(job: Job, seconds: float, what: str = "saving", mark: str = "1.1") -> ScriptState:
    return ScriptState(mark, phase=ReportedPhase(what, job.at, job.at + seconds))


def test_no_hang_is_reported_while_a_rank_is_expected_to_take_its_time() -> None:
    """Neither of it, nor of those that wait for it, also by a heartbeat that is missing or a disk that is slow."""
    job = Job(TIMEOUT_S, QUIET, Rates(state="D"), QUIET)
    job.beats = {0: 1, 1: 1, 2: 0}
    job.scripts[0] = expecting(job, 10 * TIMEOUT_S)
    assert job.run(9.5) == []


def test_after_it_the_ranks_have_the_whole_timeout() -> None:
    """Those that waited have not moved for much longer."""
    job = Job(TIMEOUT_S, QUIET, QUIET)
    job.beats = {0: 1, 1: 1}
    job.scripts[0] = expecting(job, 10 * TIMEOUT_S)
    assert job.run(5) == []
    job.scripts[0] = ScriptState("1.2")
    left_at = job.elapsed_s
    assert job.run(0.9) == []
    job.run(0.4)
    assert job.told
    assert job.told[0][0] >= left_at + TIMEOUT_S


def test_a_phase_that_takes_longer_is_a_hang_at_once_and_named() -> None:
    """All that a verdict takes is known by then."""
    job = Job(TIMEOUT_S, QUIET, QUIET)
    job.scripts[1] = expecting(job, 4 * TIMEOUT_S, "saving the checkpoint")
    assert job.run(3.9) == []
    job.run(0.4)
    (at, verdict), *_ = job.told
    assert verdict.kind == "quiescent"
    assert verdict.certain
    assert verdict.overdue == "rank 1 has been in 'saving the checkpoint' longer than the expected 120 s"
    assert at <= 4 * TIMEOUT_S + 4 * job.interval_s


@pytest.mark.parametrize(
    ("count", "more"), [(2, " (1 other rank is late, too)"), (4, " (3 other ranks are late, too)")]
)
def test_of_several_late_ranks_one_is_named_and_the_others_are_counted(count: int, more: str) -> None:
    job = Job(TIMEOUT_S, *[QUIET] * count)
    for rank in range(count):
        job.scripts[rank] = expecting(job, 4 * TIMEOUT_S, "saving")
    job.run(4.3)
    assert job.told[0][1].overdue == f"rank 0 has been in 'saving' longer than the expected 120 s{more}"


def test_a_rank_that_works_for_longer_than_it_has_said_is_only_suspected() -> None:
    """It may have underestimated its work; it is reported all the same, and as over when it is."""
    job = Job(TIMEOUT_S, TRAINS, TRAINS)
    job.scripts[0] = expecting(job, TIMEOUT_S / 2)
    assert kinds(job.run(1.0)) == ["overdue"]
    ((at, verdict),) = job.told
    assert not verdict.certain
    assert verdict[:2] == ("overdue", (0,))
    assert "'saving'" in verdict.overdue
    assert at <= TIMEOUT_S / 2 + 2 * job.interval_s
    job.scripts[0] = ScriptState("1.2")
    job.run(0.2)
    assert job.recovered


def test_a_clock_of_another_host_is_ignored() -> None:
    """A phase that begins in the future would put off every verdict."""
    job = Job(TIMEOUT_S, QUIET, QUIET)
    job.scripts[0] = ScriptState("1.1", phase=ReportedPhase("x", job.at + 1e6, job.at + 1e6 + 60))
    assert kinds(job.run(1.3)) == ["quiescent"]


def test_steps_are_progress_and_need_no_heartbeats_beside() -> None:
    job = Job(TIMEOUT_S, QUIET, QUIET)
    job.beats = {0: 1, 1: 0}
    for number in range(300):
        for rank in (0, 1):
            job.scripts[rank] = ScriptState(f"1.{number}", number)
        job.step()
    assert job.told == []


def test_the_phase_travels_between_hosts() -> None:
    """What another host sends is cut, and has no control characters."""
    job = Job(TIMEOUT_S, TRAINS, TRAINS)
    job.scripts[0] = expecting(job, TIMEOUT_S / 2)
    (verdict,) = job.run(1.0)
    assert verdict_from(packed(verdict)) == verdict
    assert combine({0: {"s": "quiet", **packed(verdict)}, 1: {"s": "run"}}) == verdict
    hostile = verdict_from({**packed(verdict), "overdue": "\x1b" * 9999})
    assert hostile is not None
    assert len(hostile.overdue) <= 200
    assert "\x1b" not in hostile.overdue
    wrong = verdict_from({**packed(verdict), "overdue": 7})
    assert wrong is not None
    assert wrong.overdue == ""
