"""When a hang is reported again, when it is over, and which time does not count."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.watchdog.verdicts import AT_ONCE
from tests.unit.watchdog.simulated_jobs import EVALUATES, HUNG_IN_GLOO, QUIET, TRAINS, Job, Rates, kinds


def test_a_hang_is_told_again_at_growing_intervals_until_it_is_over() -> None:
    """After T, T, 2T, 4T and so on, and at least once an hour, so that the log of a long night shows that it lasts."""
    job = Job(30.0, QUIET, QUIET)
    job.run(500)
    moments = [at / 30 for at, _ in job.told]
    gaps = [round(later - earlier) for earlier, later in zip([0.0, *moments], moments, strict=False)]
    assert gaps == [1, 1, 2, 4, 8, 16, 32, 64, 120, 120, 120]
    rare = Job(7200.0, QUIET, QUIET)
    rare.run(4.5)
    assert [round(at / 7200) for at, _ in rare.told] == [1, 2, 3, 4]


def test_what_moves_again_is_told_once_and_watched_on() -> None:
    """With how long it lasted."""
    job = Job(30.0, lambda at: QUIET if at < 45 or at > 90 else TRAINS, HUNG_IN_GLOO)
    job.run(2.9)
    [(recovered_at, lasted_s)] = job.recovered
    assert 45 <= recovered_at <= 45 + 5 * job.interval_s
    assert lasted_s == pytest.approx(45, abs=5 * job.interval_s)
    assert len(job.told) == 1
    job.run(1.5)
    assert kinds([verdict for _, verdict in job.told]) == ["quiescent", "quiescent"]
    assert len(job.recovered) == 1


def test_a_single_sign_of_life_is_no_recovery() -> None:
    """Some threads wake up once an hour."""
    job = Job(30.0, lambda at: Rates(io=1e6) if 45 <= at < 46.4 else QUIET)
    job.run(2.3)
    assert job.recovered == []
    assert len(job.told) == 1


def test_a_stopped_rank_that_goes_on_has_recovered() -> None:
    job = Job(30.0, lambda at: Rates(state="T") if at < 10 else TRAINS, TRAINS)
    job.run(1)
    assert kinds([verdict for _, verdict in job.told]) == ["stopped"]
    [(_, lasted_s)] = job.recovered
    assert lasted_s == pytest.approx(10, abs=2 * job.interval_s)


def test_suspicions_do_not_use_up_the_verdicts() -> None:
    """A job that was stopped by hand many times can still hang."""
    job = Job(30.0, lambda at: QUIET if at > 300 else Rates(state="T") if at % 20 < 6 else TRAINS, HUNG_IN_GLOO)
    assert kinds(job.run(10)) == ["stopped"] * 7
    assert kinds(job.run(1.5)) == ["quiescent"]


@pytest.mark.parametrize("timeouts", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_hangs_that_come_and_go_are_told_at_growing_intervals_too(timeouts: int) -> None:
    """A rank is stopped and continued for days: four times in a row that is news."""
    job = Job(30.0, lambda at: Rates(state="T") if at % 20 < 6 else TRAINS, TRAINS)
    job.run(timeouts)
    moments = [at / 30 for at, _ in job.told]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert all(gap < 1 for gap in gaps[: AT_ONCE - 1])
    assert gaps[3:9] == pytest.approx([1, 2, 4, 8, 16, 32], abs=1)
    assert len(gaps) < timeouts / 100 + 15


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """The whole host may have stood still; after a long time all begin anew."""
    job = Job(30.0, QUIET, QUIET)
    job.run(0.5)
    job.step(14.0)
    assert job.run(0.3) == []
    job.step(10_000.0)
    assert job.run(0.9) == []
    assert kinds(job.run(0.5)) == ["quiescent"]


def test_a_debugger_stops_the_clock() -> None:
    """When it has gone, what is left of the timeout is left to the job."""
    job = Job(30.0, lambda at: Rates(traced=True) if 15 < at < 900 else QUIET, QUIET)
    assert job.run(30) == []
    assert job.run(0.4) == []
    assert kinds(job.run(0.5)) == ["quiescent"]


def test_when_a_rank_ends_the_others_have_time_to_notice() -> None:
    """And a job whose first rank went away with 0 while the others wait for it hangs."""
    job = Job(30.0, EVALUATES, QUIET, QUIET, stack=lambda _pid, at: f"evaluate:{int(at * 10) % 40}")
    assert job.run(3) == []
    job.end(0)
    assert job.run(0.9) == []
    [verdict] = job.run(0.5)
    assert verdict[:2] == ("quiescent", (1, 2))


def test_our_own_question_is_no_work_of_the_rank() -> None:
    """Answering it keeps one of its threads busy for a while."""
    job = Job(2.0, lambda _at: HUNG_IN_GLOO, QUIET)
    busy = {"until": 0.0}

    def does(at: float) -> Rates:
        return Rates(thread=0.4) if at <= busy["until"] else HUNG_IN_GLOO

    def numbers(rank: int, at: float) -> dict[str, tuple[int, int]]:
        if rank == 0:
            busy["until"] = at + job.interval_s * 1.01
        return {"0": (6, 5)}

    job.does[0] = does
    job.numbers = numbers
    assert kinds(job.run(1.4)) == ["quiescent"]


@given(
    st.lists(
        st.builds(
            Rates,
            main=st.floats(0, 1),
            wakes=st.floats(0, 1e4),
            io=st.floats(0, 1e9),
            thread=st.floats(0, 8),
            thread_io=st.just(0.0),
            faults=st.just(0.0),
            new_pages=st.floats(0, 1e4),
            children=st.floats(0, 8),
            core_dumping=st.just(value=False),
            state=st.sampled_from("RSDTtI"),
            traced=st.booleans(),
        ),
        min_size=1,
        max_size=40,
    ),
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
)
def test_no_history_leads_to_a_verdict_about_what_was_not_quiet_for_long_enough(
    history: list[Rates], pauses_s: list[float]
) -> None:
    """Whatever happens: what may be acted upon has lasted, and few are told."""
    job = Job(2.0, QUIET, QUIET)
    for number in range(120):
        rates = history[number % len(history)]
        job.does[0] = lambda _at, rates=rates: rates
        job.step(pauses_s[number % len(pauses_s)] if number % 7 == 0 else None)
    certain = [verdict for _, verdict in job.told if verdict.certain]
    assert all(verdict.lasted_s >= 2.0 for verdict in certain)
    # A clock of at most 24 s: four new ones at once, then rarely, and each goes on for some of the time.
    assert len(certain) <= 12
    assert len(job.told) <= 24


# ----------------------------------------------------------------------------------- hangs that their captures doubt


def test_a_hang_that_is_doubted_is_captured_again_when_it_is_to_be_certain() -> None:
    """At the usual intervals until then, at the moment itself, and at the usual intervals after it."""
    job = Job(30.0, QUIET, HUNG_IN_GLOO)
    job.doubt_lasts_s = 170.0
    job.run(16)
    moments = [round(at) for at, _ in job.told]
    assert moments[:4] == pytest.approx([30, 60, 120, 170], abs=9), moments
    assert [verdict.lasted_s >= 170.0 for _, verdict in job.told][:4] == [False, False, False, True]
    assert len(moments) == 5, "240 s later it is reported again"


def test_the_next_capture_of_a_doubted_hang_is_told() -> None:
    job = Job(30.0, QUIET, QUIET)
    job.doubt_lasts_s = 50.0
    [verdict] = job.run(1.2)
    assert job.watchdog.repeat(verdict).next_s == pytest.approx(50.0 - verdict.lasted_s)


def test_a_deadlock_after_hangs_that_were_doubted_is_captured_at_once() -> None:
    """A job that waits for a server now and then can still hang: the first wait takes nothing from it."""
    job = Job(30.0, lambda at: QUIET if at < 50 or at > 90 else TRAINS, HUNG_IN_GLOO)
    job.doubt_lasts_s = 1200.0
    job.run(3)
    assert len(job.told) == 1
    assert len(job.recovered) == 1
    job.doubt_lasts_s = 0.0
    [verdict] = job.run(1.3)
    assert verdict.certain
    assert verdict.lasted_s < 30 + 2 * job.interval_s


def test_what_moved_a_little_since_it_was_doubted_is_captured_again_at_once() -> None:
    """It may have gone from a query into a deadlock without being at work for long enough to have recovered."""
    job = Job(30.0, lambda at: Rates(io=1e6) if 75 <= at < 76.4 else QUIET, HUNG_IN_GLOO)
    job.doubt_lasts_s = 1200.0
    job.run(2.4)
    assert len(job.told) == 2
    job.run(1.3)
    assert job.recovered == []
    assert len(job.told) == 3
    assert job.told[-1][0] == pytest.approx(76.4 + 30, abs=4)


def test_a_job_of_many_doubted_waits_is_captured_less_and_less() -> None:
    """Each capture stops the ranks for a moment. A deadlock is found all the same, after a longer quiet."""
    job = Job(30.0, lambda at: QUIET if at % 60 < 40 and at < 3000 else QUIET if at >= 3000 else TRAINS, HUNG_IN_GLOO)
    job.doubt_lasts_s = 1200.0
    job.run(99)
    assert len(job.told) == AT_ONCE
    job.doubt_lasts_s = 0.0
    job.run(4)
    assert len(job.told) == AT_ONCE + 1
    assert job.told[-1][0] == pytest.approx(3000 + 60, abs=8)
