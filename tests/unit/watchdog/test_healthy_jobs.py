"""The watchdog, fed with what was recorded of healthy jobs: none of them may alarm it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from saferun.captures.inspection_values import Connection, JobInspection, RankInspection, Thread
from saferun.watchdog.detector import HangDetector, sampling_interval_s
from saferun.watchdog.samples import JobSample, RankSample
from tests.unit.watchdog.simulated_jobs import (
    EVALUATES,
    HUNG_IN_GLOO,
    POLLS_EVERY_MS,
    QUIET,
    SPINS,
    TIMEOUTS_S,
    TRAINS,
    WAITS_FOR_CHILD,
    WRITES_CHECKPOINT,
    Child,
    Job,
    Process,
    Rates,
    beside,
    every,
    kinds,
)


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
@pytest.mark.parametrize(
    "does",
    [
        pytest.param((TRAINS, TRAINS, TRAINS), id="training"),
        pytest.param((WRITES_CHECKPOINT, HUNG_IN_GLOO), id="one writes a checkpoint"),
        pytest.param((Rates(io=100e3, state="D"), HUNG_IN_GLOO), id="one reads from a slow disk"),
        pytest.param(
            (Rates(faults=0.9, state="D"), Rates(faults=0.9, state="D")), id="importing from a slow file system"
        ),
        pytest.param((Rates(main=0.011, wakes=2.6), HUNG_IN_GLOO), id="long steps"),
        pytest.param((Rates(main=0.95, state="R", new_pages=5000), HUNG_IN_GLOO), id="one builds something"),
        pytest.param((SPINS, SPINS), id="all burn, and none waits"),
        pytest.param((Rates(traced=True), HUNG_IN_GLOO), id="one is being debugged"),
        pytest.param((Rates(state="t"), HUNG_IN_GLOO), id="one stands at a breakpoint"),
    ],
)
def test_whoever_works_keeps_the_whole_job_from_being_called_hung(timeout_s: float, does: tuple[Rates, ...]) -> None:
    """A rank that waits for one that works looks exactly like one that hangs."""
    assert Job(timeout_s, *does).run(6) == []


@pytest.mark.parametrize(
    ("does", "numbers", "is_quiet"),
    [
        ((QUIET, HUNG_IN_GLOO), None, True),
        ((SPINS, HUNG_IN_GLOO), {"0": (5, 4)}, True),  # waits in NCCL
        ((SPINS, HUNG_IN_GLOO), None, False),  # may be working
        ((EVALUATES, HUNG_IN_GLOO), None, False),
        ((TRAINS, TRAINS), {"0": (5, 4)}, False),
    ],
)
def test_how_long_nothing_has_moved_is_known_long_before_a_verdict(
    does: tuple[Rates, ...], numbers: dict[str, tuple[int, int]] | None, is_quiet: bool
) -> None:
    """Whoever cancels a job wants to know; in doubt its ranks work."""
    job = Job(300.0, *does, numbers=lambda _rank, _at: numbers)
    assert job.run(0.4) == []
    assert (job.watchdog.idle_s > 60) is is_quiet
    assert job.watchdog.idle_s <= job.elapsed_s


@pytest.mark.parametrize(
    ("does", "is_still"),
    [
        (QUIET, True),
        (WAITS_FOR_CHILD, True),
        (Rates(main=0.0015, wakes=100), True),
        (POLLS_EVERY_MS, False),
        (Rates(main=0.015, wakes=150), False),
    ],
    ids=["quiet", "every 50 ms", "every 10 ms", "every ms", "light work"],
)
def test_whoever_uses_a_percent_of_a_core_is_not_said_to_make_no_progress(does: Rates, is_still: bool) -> None:
    """Its verdict is a hang, since loops that wait use as much; but it gets a signal at once, for it may be working."""
    job = Job(300.0, does, HUNG_IN_GLOO)
    assert job.run(0.4) == []
    assert job.watchdog.idle_s > 60
    assert (job.watchdog.strict_idle_s > 60) is is_still
    waits = Job(300.0, SPINS, HUNG_IN_GLOO, numbers=lambda _rank, _at: {"0": (5, 4)})
    assert waits.run(0.4) == []
    assert waits.watchdog.strict_idle_s == waits.watchdog.idle_s > 60


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_a_core_that_is_being_written_is_waited_for_but_not_for_ever(timeout_s: float) -> None:
    """It may be written to a file server that is gone, and the job would wait all night without a word."""
    job = Job(timeout_s, Rates(core_dumping=True, io=0), HUNG_IN_GLOO)
    assert job.run(2.9) == []
    found = job.run(12.0)
    assert kinds(found)[:1] == ["quiescent"]
    assert not any(verdict.certain for verdict in found)
    assert found[0].overdue.startswith("the core of rank 0 is still being written after ")
    debugged = Job(timeout_s, Rates(traced=True), HUNG_IN_GLOO)
    assert debugged.run(12.0) == []


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_steps_that_are_long_and_light_are_work(timeout_s: float) -> None:
    """2 s of sleep and 22 ms of work: nine samples of ten are quiet."""
    interval_s = sampling_interval_s(timeout_s)
    steps = every(timeout_s * 0.8, interval_s, Rates(main=0.022 / interval_s, wakes=5 / interval_s))
    assert Job(timeout_s, steps, HUNG_IN_GLOO).run(6) == []


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_a_slow_loader_is_work(timeout_s: float) -> None:
    """3 ms and 33 bytes a batch is all that such a job does."""
    interval_s = sampling_interval_s(timeout_s)
    batches = every(
        timeout_s * 0.7, interval_s, Rates(main=0.003 / interval_s, wakes=1.5 / interval_s, io=33 / interval_s)
    )
    assert Job(timeout_s, batches, batches).run(6) == []


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_a_rank_that_evaluates_while_the_others_wait_is_at_work(timeout_s: float) -> None:
    """It burns and nothing else; only its stacks tell it from a loop that waits."""

    def stack(_pid: int, at: float) -> str:
        return f"main:3 evaluate:{int(at * 100) % 40}"

    assert Job(timeout_s, EVALUATES, HUNG_IN_GLOO, stack=stack).run(6) == []


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_whoever_burns_unseen_is_at_work(timeout_s: float) -> None:
    """Without stacks nothing speaks against it: no py-spy, or one that may not look."""
    assert Job(timeout_s, SPINS, HUNG_IN_GLOO, can_dump=False).run(6) == []
    assert Job(timeout_s, SPINS, HUNG_IN_GLOO, stack=lambda _pid, _at: "").run(6) == []


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_a_rank_whose_main_thread_waits_for_others_at_work_is_at_work(timeout_s: float) -> None:
    """Threads of Python are looked at; those of libraries cannot be, and count as work."""

    def python_threads(_pid: int, at: float) -> str:
        return f"join:3|evaluate:{int(at * 100) % 40}"

    def library_threads(_pid: int, _at: float) -> str:
        return "backward:3"

    does = Rates(thread=0.9)
    assert Job(timeout_s, does, HUNG_IN_GLOO, stack=python_threads).run(6) == []
    assert Job(timeout_s, does, HUNG_IN_GLOO, stack=library_threads, active=False).run(6) == []
    assert kinds(Job(timeout_s, does, HUNG_IN_GLOO, stack=lambda _pid, _at: "join:3|spin:7").run(1.6)) == ["spinning"]


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_output_sequence_numbers_and_heartbeats_are_signs_of_life(timeout_s: float) -> None:
    """Each of them alone is enough, and each now and then."""
    for sign in ("output", "beats", "numbers"):
        moves = [0]

        def numbers(_rank: int, _at: float, moves: list[int] = moves) -> dict[str, tuple[int, int]]:
            return {"0": (moves[0], moves[0])}

        job = Job(timeout_s, QUIET, QUIET, numbers=numbers)
        for _ in range(8):
            job.run(0.7)
            moves[0] += 1
            if sign != "numbers":
                getattr(job, sign)[0] += 1
        assert job.told == [], sign


# ------------------------------------------------------------------------------------------------------- inspections


def downloads(at: float, bytes_per_s: float = 50e3, **of_rank: Any) -> JobInspection:
    """Rank 0 receives something."""
    moments_s = tuple(at + number for number in range(4))
    connection = Connection(7, False, tuple(int(bytes_per_s * moment_s) for moment_s in moments_s), (0, 0, 0, 0))
    rank = RankInspection(0, (connection,), ())._replace(**of_rank)
    return JobInspection(moments_s, (rank, RankInspection(1, (), ())))


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_what_a_closer_look_finds_keeps_the_job_from_being_called_hung(timeout_s: float) -> None:
    """Until it is over. The look is rare: nobody pays for it who works."""
    job = Job(timeout_s, QUIET, HUNG_IN_GLOO, look=downloads)
    assert job.run(6) == []
    assert len(job.looked) <= 6 / 0.2
    job.look = lambda _at: JobInspection((0.0, 1.0), (RankInspection(0, (), ()), RankInspection(1, (), ())))
    assert kinds(job.run(1.6)) == ["quiescent"]
    assert job.told[0][1].certain


def test_a_download_is_progress_also_between_two_looks() -> None:
    """Its ranks get a signal at once; those of a job that hangs are captured before."""
    job = Job(300.0, QUIET, HUNG_IN_GLOO, look=downloads)
    job.run(0.3)
    assert job.watchdog.idle_s == 0.0
    job.look = lambda _at: JobInspection((0.0, 1.0), (RankInspection(0, (), ()), RankInspection(1, (), ())))
    job.run(0.5)
    assert job.watchdog.idle_s > 60


@pytest.mark.parametrize("does", [TRAINS, WRITES_CHECKPOINT])
def test_a_job_whose_samples_show_work_is_not_inspected(does: Rates) -> None:
    job = Job(300.0, does, HUNG_IN_GLOO)
    job.run(6)
    assert job.looked == []


def test_a_look_is_taken_just_before_a_verdict() -> None:
    """Much may have begun since the last one."""
    job = Job(300.0, QUIET, QUIET)
    job.run(1.6)
    [(told_at, _)] = job.told
    assert 0 <= told_at - max(at for at in job.looked if at <= told_at) <= 20


def test_a_thread_that_may_work_makes_a_verdict_uncertain() -> None:
    """It is new, and so it is not known whether it does so always."""

    def look(at: float) -> JobInspection:
        thread = Thread(12, 100, at, "python3", False, int(at * 9e8), (0, 0), 0, 0, 0, ())
        return JobInspection((at - 1, at), (RankInspection(0, (), (thread,)),))

    [verdict] = Job(30.0, QUIET, HUNG_IN_GLOO, look=look).run(1.6)
    assert not verdict.certain


def certainties(job: Job, timeouts: float) -> set[bool]:
    return {verdict.certain for verdict in job.run(timeouts)}


def test_a_slow_transfer_is_work_for_some_timeouts_and_then_a_doubt() -> None:
    """A server may as well send its heartbeats forever: that would hide a hang."""
    job = Job(30.0, QUIET, HUNG_IN_GLOO, look=lambda at: downloads(at, 1000))
    assert job.run(4) == []
    assert certainties(job, 30) == {False}


def test_a_frozen_control_group_is_no_certain_hang() -> None:
    """Who has frozen it may thaw it."""
    assert certainties(Job(30.0, QUIET, HUNG_IN_GLOO, look=lambda at: downloads(at, 0, is_frozen=True)), 30) == {False}


def test_a_job_that_waits_for_one_disk_write_is_no_certain_hang() -> None:
    """An fsync may take longer than the timeout and shows nothing meanwhile. Nor may any other thread's."""
    job = Job(30.0, Rates(state="D"), HUNG_IN_GLOO)
    assert certainties(job, 30) == {False}
    writes = Thread(12, 100, 100.0, "python3", False, 0, (1, 1, 1, 1), 0, 0, 4, ())
    assert certainties(Job(30.0, QUIET, QUIET, look=lambda at: downloads(at, 0, threads=(writes,))), 30) == {False}
    dead = Job(30.0, QUIET, QUIET, look=lambda at: downloads(at, 0, threads=(writes._replace(in_disk_waits=2),)))
    assert certainties(dead, 30) == {True}


def test_ranks_stuck_in_a_collective_may_wait_for_one_that_works_unseen() -> None:
    """They busy-loop in NCCL for rank 0, of which it is not known whether it works."""
    numbers = {0: (5, 5), 1: (6, 5)}

    def job(look: Callable[[float], JobInspection | None]) -> Job:
        return Job(30.0, QUIET, SPINS, numbers=lambda rank, _at: {"0": numbers[rank]}, look=look)

    assert certainties(job(lambda at: downloads(at, 1000)), 30) == {False}
    assert certainties(job(lambda at: downloads(at, 0)), 30) == {True}


def test_a_missing_heartbeat_is_not_held_against_a_rank_that_downloads() -> None:
    """Others move, so that nothing else would have had it inspected."""
    job = Job(30.0, QUIET, TRAINS, look=downloads)
    job.beats = {0: 1, 1: 0}
    assert certainties(job, 3) == {False}


def test_a_rank_that_cannot_be_read_is_at_work() -> None:
    """As far as anything is known: saferun may have no descriptor left to read /proc with."""
    watchdog = HangDetector(2.0)
    first, second = Process(100), Process(101)
    at = 0.0
    for number in range(100):
        at += 0.1
        ranks = [RankSample(0, 0, first.live(QUIET, 0.1), (), False, 0, 0)]
        if number < 5:
            ranks.append(RankSample(1, 1, second.live(TRAINS, 0.1), (), False, 0, 0))
        outcome = watchdog.feed(JobSample(at, 0.1, tuple(ranks)))
        assert outcome.verdict is None
        for rank in outcome.numbers_wanted:
            watchdog.take_numbers(rank, None)
        if outcome.inspection_wanted:
            watchdog.take_inspection(None)


def test_a_job_that_is_suspended_does_not_hang() -> None:
    """All of its ranks are stopped; whoever did that may continue them."""
    job = Job(30.0, Rates(state="T"), Rates(state="T"))
    assert set(kinds(job.run(8))) == {"stopped"}
    one = Job(30.0, Rates(state="T"), QUIET)
    assert "quiescent" in kinds(one.run(8))


# ------------------------------------------------------------------------------------------------ children, services


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
@pytest.mark.parametrize(
    "child",
    [
        pytest.param({"rates": SPINS, "comm": "gzip", "age_s": 0.0}, id="busy"),
        pytest.param({"rates": SPINS, "comm": "python3", "age_s": 0.0}, id="busy Python"),
        pytest.param({"rates": Rates(main=0.01, wakes=50, io=30e3), "comm": "curl", "age_s": 0.0}, id="slow download"),
        pytest.param({"rates": Rates(main=0.005, wakes=50, io=30e6), "comm": "cp", "age_s": 999.0}, id="copies"),
        pytest.param({"rates": Rates(faults=1.0, main=0.02, wakes=50), "forked": True}, id="loader on a slow disk"),
        pytest.param({"rates": Rates(main=0.3, wakes=50), "comm": "pt_data_worker"}, id="loader"),
    ],
)
def test_a_child_at_work_is_work(timeout_s: float, child: dict[str, Any]) -> None:
    """The rank itself waits, in all samples."""

    def stack(_pid: int, at: float) -> str:
        return f"collate:{int(at * 100) % 40}"

    job = Job(timeout_s, WAITS_FOR_CHILD, HUNG_IN_GLOO, children={0: [beside(**child)]}, stack=stack)
    assert job.run(3.5) == []


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_compilers_that_come_and_go_are_work(timeout_s: float) -> None:
    """None of them lives long enough to be seen twice; the rank's account of dead children grows."""
    assert Job(timeout_s, Rates(children=0.9), HUNG_IN_GLOO).run(6) == []


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
@pytest.mark.parametrize(
    "child",
    [
        pytest.param({"rates": QUIET, "forked": True}, id="idle loader"),
        pytest.param({"rates": Rates(main=0.012, wakes=20, io=2e3), "comm": "wandb-core"}, id="experiment tracker"),
        pytest.param({"rates": Rates(main=0.09, wakes=300, io=9e3), "comm": "nvitop"}, id="monitor as ever"),
        pytest.param({"rates": Rates(main=0.003, wakes=2, io=4e3), "forked": True}, id="forked monitor"),
    ],
)
def test_a_service_that_goes_on_does_not_hide_a_hang(timeout_s: float, child: dict[str, Any]) -> None:
    """Trackers and monitors do a little all the time, whether the rank does or not."""
    process = Process(500, age_s=0.0, **{name: value for name, value in child.items() if name != "rates"})
    process.live(child["rates"], 1000.0)
    service = Child(process, lambda _at: child["rates"])
    job = Job(timeout_s, HUNG_IN_GLOO, HUNG_IN_GLOO, children={0: [service]})
    assert kinds(job.run(1.6)) == ["quiescent"]


@pytest.mark.parametrize("timeout_s", [30.0, 300.0])
def test_a_monitor_that_is_started_again_and_again_does_not_hide_a_hang(timeout_s: float) -> None:
    """``nvidia-smi`` every ten seconds takes a few percent of a core."""
    interval_s = sampling_interval_s(timeout_s)
    job = Job(timeout_s, every(10.0, interval_s, Rates(children=0.3 / interval_s)), HUNG_IN_GLOO)
    assert kinds(job.run(1.6)) == ["quiescent"]


def test_weak_signs_of_a_child_are_not_believed_for_ever() -> None:
    """A tracker that was started just before the hang looks like a child that the rank waits for."""
    child = beside(Rates(main=0.012, wakes=20, io=2e3), comm="wandb-core", age_s=0.0)
    job = Job(30.0, HUNG_IN_GLOO, HUNG_IN_GLOO, children={0: [child]})
    assert job.run(3.5) == []
    assert {(verdict.kind, verdict.certain) for verdict in job.run(2.5)} == {("quiescent", False)}
    assert {(verdict.kind, verdict.certain) for verdict in job.run(8.0)} == {("quiescent", False), ("quiescent", True)}


def test_the_child_of_a_wrapper_is_believed_for_ever() -> None:
    """``saferun --no-python ./run.sh``: the shell does nothing, and what it runs is the rank."""
    child = beside(Rates(main=0.011, wakes=2.6, io=3e3), comm="trainer", age_s=0.0)
    assert Job(30.0, QUIET, HUNG_IN_GLOO, children={0: [child]}, is_wrapper=True).run(9) == []
