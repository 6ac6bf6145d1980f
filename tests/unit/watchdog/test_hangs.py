"""The watchdog, fed with what was recorded of jobs that hang, and of single ranks that do."""

from __future__ import annotations

import pytest

from saferun.captures.inspection_values import JobInspection, RankInspection, Thread
from saferun.evidence.job_evidence import HangVerdict
from saferun.watchdog.detector import HangDetector, sampling_interval_s
from saferun.watchdog.samples import JobSample, RankSample
from tests.unit.watchdog.simulated_jobs import (
    HUNG_IN_GLOO,
    POLLS_EVERY_MS,
    QUIET,
    SPINS,
    SPINS_ON_A_BUSY_MACHINE,
    TIMEOUTS_S,
    TRAINS,
    WAITS_FOR_CHILD,
    WAITS_FOR_LOADER,
    WRITES_CHECKPOINT,
    Job,
    Process,
    Rates,
    beside,
    every,
    kinds,
)


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
@pytest.mark.parametrize("does", [QUIET, HUNG_IN_GLOO, POLLS_EVERY_MS, WAITS_FOR_CHILD, WAITS_FOR_LOADER])
def test_ranks_that_only_wait_hang(timeout_s: float, does: Rates) -> None:
    """Waiting with a time limit, again and again, is waiting."""
    job = Job(timeout_s, does, HUNG_IN_GLOO)
    job.run(1.5)
    [(at, verdict)] = job.told
    assert verdict[:2] == ("quiescent", (0, 1))
    assert verdict.certain
    assert verdict.lasted_s >= timeout_s
    assert at <= timeout_s + 3 * job.interval_s


def test_one_rank_alone_can_hang() -> None:
    """A job of one rank is a job."""
    assert kinds(Job(30.0, QUIET).run(1.3)) == ["quiescent"]


def test_the_loader_of_a_hung_job_polls_every_five_seconds() -> None:
    """That poll is one wake-up of 0.4 ms, and neither work at long intervals nor at short ones."""
    for timeout_s in TIMEOUTS_S:
        interval_s = sampling_interval_s(timeout_s)
        poll = every(5.0, interval_s, Rates(main=0.0004 / interval_s, wakes=1.1 / interval_s))
        assert kinds(Job(timeout_s, poll, HUNG_IN_GLOO).run(1.5)) == ["quiescent"]


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
@pytest.mark.parametrize("spins", [SPINS, SPINS_ON_A_BUSY_MACHINE])
def test_one_that_spins_while_the_others_wait_is_a_suspicion(timeout_s: float, spins: Rates) -> None:
    """It may be a long call all the same, so nothing is done about it."""
    job = Job(timeout_s, HUNG_IN_GLOO, spins, HUNG_IN_GLOO)
    assert kinds(job.run(1.5)) == ["spinning"]
    verdict = job.told[0][1]
    assert (verdict.ranks, verdict.busy, verdict.certain) == ((1,), (1,), False)


def test_a_loop_of_a_few_lines_is_a_loop() -> None:
    """The innermost line moves; that it moves further, or that another calls it, is work."""
    assert kinds(
        Job(30.0, HUNG_IN_GLOO, SPINS, stack=lambda _pid, at: f"main:3 wait:{5 + int(at * 7) % 4}").run(1.5)
    ) == ["spinning"]
    assert Job(30.0, HUNG_IN_GLOO, SPINS, stack=lambda _pid, at: f"main:3 wait:{5 + int(at * 7) % 5}").run(4) == []
    assert Job(30.0, HUNG_IN_GLOO, SPINS, stack=lambda _pid, at: f"main:{3 + int(at) % 2} wait:5").run(4) == []


def test_a_loader_that_spins_is_a_suspicion() -> None:
    """A worker runs the rank's own code, which can be looked at."""
    child = beside(SPINS, forked=True)
    job = Job(30.0, WAITS_FOR_LOADER, HUNG_IN_GLOO, children={0: [child]})
    assert kinds(job.run(1.6)) == ["spinning"]
    assert job.told[0][1].ranks == (0,)


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_burning_in_a_collective_is_waiting(timeout_s: float) -> None:
    """NCCL's ranks spin while they wait; their sequence numbers carry the verdict."""
    numbers = {0: (5, 5), 1: (6, 5), 2: (6, 5)}
    job = Job(timeout_s, HUNG_IN_GLOO, SPINS, SPINS, numbers=lambda rank, _at: {"0": numbers[rank]})
    assert kinds(job.run(1.5)) == ["stuck_collective"]
    verdict = job.told[0][1]
    assert (verdict.ranks, verdict.busy, verdict.certain) == ((1, 2), (1, 2), True)


def test_all_burn_in_a_collective() -> None:
    """Mismatched collectives: everybody is in one, and none is in the same."""
    job = Job(30.0, SPINS, SPINS, numbers=lambda _rank, _at: {"0": (6, 5)})
    assert kinds(job.run(1.5)) == ["stuck_collective"]
    assert job.told[0][1].ranks == (0, 1)
    # Also where their stacks cannot be had.
    job = Job(30.0, SPINS, SPINS, numbers=lambda _rank, _at: {"0": (6, 5)}, can_dump=False)
    assert kinds(job.run(1.5)) == ["stuck_collective"]


def test_whoever_is_elsewhere_and_busy_keeps_a_collective_from_being_stuck() -> None:
    """Rank 0 evaluates, with no stacks to be had or with some that change."""

    def numbers(rank: int, _at: float) -> dict[str, tuple[int, int]]:
        return {"0": (5, 5) if rank == 0 else (6, 5)}

    assert Job(30.0, SPINS, SPINS, SPINS, numbers=numbers, can_dump=False).run(5) == []

    def stack(pid: int, at: float) -> str:
        return f"evaluate:{int(at * 10) % 40}" if pid == 100 else "all_reduce:9"

    assert Job(30.0, SPINS, SPINS, SPINS, numbers=numbers, stack=stack).run(5) == []


@pytest.mark.parametrize("can_dump", [True, False])
def test_numbers_that_may_be_old_do_not_put_a_rank_into_a_collective(*, can_dump: bool) -> None:
    """Asked while its collective was ending, it had no processor to answer later on: it computes."""

    def numbers(rank: int, at: float) -> dict[str, tuple[int, int]] | None:
        if rank == 0:
            return {"0": (7, 6)}
        return {"0": (6, 5)} if at < 0.2 * 30.0 else None

    job = Job(30.0, HUNG_IN_GLOO, SPINS, numbers=numbers, can_dump=can_dump)
    assert kinds(job.run(1.5)) == (["spinning"] if can_dump else [])
    assert not any(verdict.certain for _, verdict in job.told)


def test_a_rank_that_answers_again_is_in_its_collective_again() -> None:
    """A busy host: it is asked until it answers."""

    def numbers(rank: int, at: float) -> dict[str, tuple[int, int]] | None:
        return None if rank == 1 and 0.2 * 30.0 < at < 0.9 * 30.0 else {"0": (7, 6)}

    job = Job(30.0, HUNG_IN_GLOO, SPINS, numbers=numbers)
    assert kinds(job.run(1.5)) == ["stuck_collective"]
    assert job.told[0][1].certain


@pytest.mark.parametrize("can_dump", [True, False])
@pytest.mark.parametrize("lost", [3, 5])
def test_an_answer_that_is_lost_now_and_then_puts_a_hang_off_and_hides_none(*, can_dump: bool, lost: int) -> None:
    """A starved host, a full backlog: that is no sign of work."""
    asked = 0

    def numbers(rank: int, _at: float) -> dict[str, tuple[int, int]] | None:
        nonlocal asked
        asked += rank == 0
        return None if rank == 0 and asked % lost == 0 else {"0": (5, 4)}

    job = Job(100.0, SPINS, SPINS, numbers=numbers, can_dump=can_dump)
    verdicts = job.run(2.0)
    assert [verdict for verdict in verdicts if verdict.kind == "stuck_collective" and verdict.certain], verdicts


def test_ranks_that_all_stop_to_answer_in_a_collective_are_suspected() -> None:
    """No rank is seen to wait for them, and none does anything else."""

    def numbers(_rank: int, at: float) -> dict[str, tuple[int, int]] | None:
        return {"0": (5, 4)} if at < 20.0 else None

    job = Job(100.0, SPINS, SPINS, numbers=numbers)
    assert kinds(job.run(2.0))[:1] == ["spinning"]
    assert not any(verdict.certain for _, verdict in job.told)


def test_a_rank_whose_collective_ended_after_a_later_send_is_not_in_one() -> None:
    """Sends are numbered for themselves: the calls tell whether the last of them is over."""

    def kinds_with(calls: tuple[int, int]) -> list[str]:
        numbers = {"numbers:0": (5, 900), "calls:0": calls}
        return kinds(Job(30.0, SPINS, HUNG_IN_GLOO, numbers=lambda _rank, _at: numbers, can_dump=False).run(1.5))

    assert kinds_with((9, 9)) == []
    assert kinds_with((9, 8)) == ["stuck_collective"]


def test_a_rank_that_computes_beside_a_collective_is_at_work() -> None:
    """The collective was begun and not waited for; the stacks move."""
    job = Job(
        30.0,
        SPINS,
        HUNG_IN_GLOO,
        numbers=lambda _rank, _at: {"0": (6, 5)},
        stack=lambda _pid, at: f"compute:{int(at * 10) % 40}",
    )
    assert job.run(5) == []


def test_collectives_that_advance_are_work_however_slowly() -> None:
    """Long steps on GPUs: the main threads spin, and nothing is read or written."""

    def numbers(_rank: int, at: float) -> dict[str, tuple[int, int]]:
        return {"0": (int(at / 250) + 1, int(at / 250))}

    assert Job(300.0, SPINS, SPINS, numbers=numbers).run(5) == []


def test_no_verdict_before_the_numbers_have_been_seen() -> None:
    """Quiet main threads are no proof while the collectives still advance."""
    job = Job(30.0, QUIET, QUIET)
    job.run(1.5)
    [(told_at, _)] = job.told
    last_asked = max(at for at, _ in job.asked if at < told_at)
    assert 30.0 <= last_asked < told_at


def test_an_answer_that_does_not_come_holds_up_the_verdict_and_nothing_else() -> None:
    """Whoever asks has a deadline, and answers with nothing then."""
    watchdog = HangDetector(2.0)
    process = Process(100)
    asked: list[int] = []
    looks = 0
    at = 0.0
    for _ in range(40):
        at += 0.1
        outcome = watchdog.feed(JobSample(at, 0.1, (RankSample(0, 0, process.live(QUIET, 0.1), (), False, 0, 0),)))
        assert outcome.verdict is None
        asked.extend(outcome.numbers_wanted)
        looks += outcome.inspection_wanted
    assert asked == [0]
    assert looks == 1
    watchdog.take_numbers(0, None)
    watchdog.take_inspection(None)
    told = []
    for _ in range(4):
        at += 0.1
        outcome = watchdog.feed(JobSample(at, 0.1, (RankSample(0, 0, process.live(QUIET, 0.1), (), False, 0, 0),)))
        told.append(outcome.verdict)
        for rank in outcome.numbers_wanted:
            watchdog.take_numbers(rank, None)
    assert [verdict.kind for verdict in told if verdict] == ["quiescent"]


@pytest.mark.parametrize("answers_after_s", [1.0, 1.5, 2.2])
def test_a_verdict_waits_for_the_inspection_that_the_first_one_is_compared_with(answers_after_s: float) -> None:
    """What threads do shows only in the comparison of two, and a busy host may be slow with the first."""
    watchdog = HangDetector(2.0)
    process = Process(100)
    thread = Thread(12, 100, 1.0, "python3", False, 0, (1, 2), 0, 0, 0, ())
    asked: list[float] = []
    answered = 0
    told: list[HangVerdict] = []
    for step in range(1, 60):
        at = step / 10
        outcome = watchdog.feed(JobSample(at, 0.1, (RankSample(0, 0, process.live(QUIET, 0.1), (), False, 0, 0),)))
        for rank in outcome.numbers_wanted:
            watchdog.take_numbers(rank, None)
        asked += [at] * outcome.inspection_wanted
        if answered < len(asked) and at - asked[answered] >= answers_after_s:
            answered += 1
            ran = thread._replace(age_s=1.0 + at, run_ns=int(at * 20e6))
            found = RankInspection(0, (), (ran,))
            watchdog.take_inspection(JobInspection((at - 0.5, at), (found,)))
        told += [outcome.verdict] if outcome.verdict is not None else []
        if told:
            break
    assert not told
    assert answered >= 2


# --------------------------------------------------------------------------------------------------------- single ranks


def test_a_stopped_rank_is_told_at_once_and_the_hang_when_it_is_one() -> None:
    """In two samples, so that a stop that is over at once is none."""
    job = Job(300.0, Rates(state="T"), HUNG_IN_GLOO)
    job.run(1.3)
    (stopped_at, stopped), (hung_at, hung) = job.told
    assert stopped[:2] == ("stopped", (0,))
    assert not stopped.certain
    assert stopped_at <= 2 * job.interval_s
    assert hung[:2] == ("quiescent", (0, 1))
    assert hung_at >= 300.0

    blink = Job(300.0, lambda at: Rates(state="T") if 10 <= at < 15 else TRAINS, TRAINS)
    assert blink.run(1) == []


def test_an_uninterruptible_rank_is_told_after_a_minute() -> None:
    """Disks and networks take their time; one single sleep of a minute is too long."""
    job = Job(300.0, Rates(state="D"), TRAINS)
    job.run(0.5)
    [(at, verdict)] = job.told
    assert verdict[:2] == ("uninterruptible", (0,))
    assert not verdict.certain
    assert 60 <= at <= 60 + 2 * job.interval_s
    assert Job(300.0, Rates(state="D", wakes=1), TRAINS).run(1) == []


def test_a_heart_that_stops_beating_is_told() -> None:
    """It is acted upon where nothing else goes on; and a rank that never beat is not missed."""
    # It works for a while without a heartbeat, and has not been quiet for as long as a hang of all takes.
    job = Job(30.0, lambda at: TRAINS if at < 12.0 else QUIET, lambda at: TRAINS if at < 12.0 else QUIET)
    job.beats = {0: 1, 1: 0}
    assert kinds(job.run(1.3))[0] == "heartbeat"
    assert job.told[0][1][1] == (0,)
    assert job.told[0][1].certain

    # It may wait for the other one.
    job = Job(30.0, QUIET, TRAINS)
    job.beats = {0: 1, 1: 0}
    assert kinds(job.run(1.3)) == ["heartbeat"]
    assert not job.told[0][1].certain

    job = Job(30.0, WRITES_CHECKPOINT, TRAINS)
    job.beats = {0: 1, 1: 0}
    assert kinds(job.run(1.3)) == ["heartbeat"]
    assert not job.told[0][1].certain
