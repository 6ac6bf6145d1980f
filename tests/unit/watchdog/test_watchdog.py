"""The watchdog, fed with what was recorded of real jobs: healthy ones must not alarm it, those that hang must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.look_values import Connection, JobLook, RankLook, Thread
from saferun.evidence import Frame, HangVerdict, ThreadStack
from saferun.watchdog.detector import Watchdog, sampling_interval_s
from saferun.watchdog.py_spy_json import threads_from
from saferun.watchdog.samples import JobSample, Outcome, ProcessSample, RankSample
from saferun.watchdog.signs import main_thread_signs

TIMEOUTS_S = (2.0, 30.0, 300.0)


class Rates(NamedTuple):
    """What a process does in a second.

    ``main`` and ``thread`` are processor time of its main thread and of the busiest of the others, in seconds.
    """

    main: float = 0.0
    wakes: float = 0.0
    io: float = 0.0
    thread: float = 0.0
    thread_io: float = 0.0
    faults: float = 0.0
    new_pages: float = 0.0
    children: float = 0.0
    state: str = "S"
    traced: bool = False
    core_dumping: bool = False


QUIET = Rates()
# Measured: gloo's threads at work for nothing, 95 wake-ups and 0.3-0.6 % a second.
HUNG_IN_GLOO = Rates(thread=0.006)
# Measured: a wait that looks again and again.
POLLS_EVERY_MS = Rates(main=0.0108, wakes=900)
WAITS_FOR_CHILD = Rates(main=0.0008, wakes=20)
WAITS_FOR_LOADER = Rates(main=0.00008, wakes=0.2)
SPINS = Rates(main=0.98, state="R")
SPINS_ON_A_BUSY_MACHINE = Rates(main=0.40, state="R")
TRAINS = Rates(main=0.34, wakes=230, thread_io=34e6)
EVALUATES = Rates(main=0.73, state="R")
WRITES_CHECKPOINT = Rates(main=0.61, wakes=6, io=302e6)


class Process:
    """The counters of one process."""

    def __init__(self, pid: int, *, forked: bool = False, comm: str = "python3", age_s: float = 1000.0) -> None:
        self.sample = ProcessSample(
            pid=pid,
            start_ticks=pid,
            age_s=age_s,
            forked=forked,
            comm=comm,
            state="S",
            main_run_ns=0,
            main_wait_ns=0,
            main_wakes=0,
            main_io_bytes=0,
            major_faults=0,
            minor_faults=0,
            cpu_ns=0,
            io_bytes=0,
            children_cpu_ns=0,
        )
        self._left = dict.fromkeys(Rates._fields, 0.0)

    def live(self, rates: Rates, seconds: float) -> ProcessSample:
        amount = {}
        for name, rate in rates._asdict().items():
            if isinstance(rate, float | int) and not isinstance(rate, bool):
                # What is less than one stays until it is one.
                self._left[name] += rate * seconds * (1e9 if name in {"main", "thread", "children"} else 1)
                amount[name] = int(self._left[name])
                self._left[name] -= amount[name]
        before = self.sample
        self.sample = before._replace(
            age_s=before.age_s + seconds,
            state=rates.state,
            main_run_ns=before.main_run_ns + amount["main"],
            main_wait_ns=before.main_wait_ns,
            main_wakes=before.main_wakes + amount["wakes"],
            main_io_bytes=before.main_io_bytes + amount["io"],
            major_faults=before.major_faults + amount["faults"],
            minor_faults=before.minor_faults + amount["new_pages"],
            cpu_ns=before.cpu_ns + amount["main"] + amount["thread"],
            io_bytes=before.io_bytes + amount["io"] + amount["thread_io"],
            children_cpu_ns=before.children_cpu_ns + amount["children"],
            busy_thread_ns=amount["thread"],
            traced=rates.traced,
            core_dumping=rates.core_dumping,
        )
        return self.sample


class Child(NamedTuple):
    """A descendant of a rank and what it does."""

    process: Process
    rates: Callable[[float], Rates]


class Job:
    """Ranks that do as they are told, under the eyes of a watchdog.

    ``does`` tells for each rank what it does at a time, ``stack`` the stack of a process and ``numbers`` the sequence
    numbers of a rank.
    """

    def __init__(
        self,
        timeout_s: float,
        *does: Callable[[float], Rates] | Rates,
        numbers: Callable[[int, float], dict[str, tuple[int, int]] | None] = lambda _rank, _at: None,
        stack: Callable[[int, float], str] = lambda _pid, _at: "spin:7",
        children: dict[int, list[Child]] | None = None,
        can_dump: bool = True,
        is_wrapper: bool = False,
        active: bool = True,
        look: Callable[[float], JobLook | None] = lambda _at: None,
    ) -> None:
        self.active = active
        self.look = look
        self.looked: list[float] = []
        self.timeout_s = timeout_s
        self.interval_s = sampling_interval_s(timeout_s)
        self.watchdog = Watchdog(timeout_s, can_dump=can_dump)
        self.at = 1000.0
        self.began = self.at
        self.does = {
            rank: (lambda _at, r=does_: r) if isinstance(does_, Rates) else does_ for rank, does_ in enumerate(does)
        }
        self.processes = {rank: Process(100 + rank) for rank in self.does}
        self.output = dict.fromkeys(self.does, 0)
        self.beats = dict.fromkeys(self.does, 0)
        self.numbers = numbers
        self.stack = stack
        self.children = children or {}
        self.is_wrapper = is_wrapper
        self.told: list[tuple[float, HangVerdict]] = []
        self.recovered: list[tuple[float, float]] = []
        self.asked: list[tuple[float, int]] = []
        self._below: frozenset[int] = frozenset(self.does)
        self._live(0.0)

    @property
    def elapsed_s(self) -> float:
        return self.at - self.began

    def run(self, timeouts: float) -> list[HangVerdict]:
        """Let so much time go by, in timeouts; what was told in it."""
        before = len(self.told)
        until = self.at + timeouts * self.timeout_s
        while self.at < until:
            self.step()
        return [verdict for _, verdict in self.told[before:]]

    def step(self, seconds: float | None = None) -> Outcome:
        """One sample, and what it leads to."""
        outcome = self._live(self.interval_s if seconds is None else seconds)
        # Between samples stacks are looked at as often as wanted.
        looks = 8
        for look in range(looks):
            at = self.at + self.interval_s * look / looks
            for pid in self.watchdog.wanted_dumps(at):
                self.watchdog.dump_begun(pid, at)
                threads = threads_of(self.stack(pid, at - self.began))
                self.watchdog.take_dump(pid, at, [one._replace(active=one.active and self.active) for one in threads])
        return outcome

    def _live(self, seconds: float) -> Outcome:
        self.at += seconds
        ranks = []
        for rank, does in self.does.items():
            process = self.processes[rank].live(does(self.elapsed_s), seconds)
            others = tuple(
                child.process.live(child.rates(self.elapsed_s), seconds) for child in self.children.get(rank, [])
            )
            below = others if rank in self._below else None
            ranks.append(RankSample(rank, rank, process, below, self.is_wrapper, self.output[rank], self.beats[rank]))
        outcome = self.watchdog.feed(JobSample(self.at, self.interval_s, tuple(ranks)))
        self._below = outcome.read_descendants
        for rank in outcome.numbers_wanted:
            self.asked.append((self.elapsed_s, rank))
            self.watchdog.take_numbers(rank, self.numbers(rank, self.elapsed_s))
        if outcome.look_wanted:
            self.looked.append(self.elapsed_s)
            self.watchdog.take_look(self.look(self.elapsed_s))
        if outcome.recovered_s is not None:
            self.recovered.append((self.elapsed_s, outcome.recovered_s))
        if outcome.verdict is not None:
            self.told.append((self.elapsed_s, outcome.verdict))
            self.watchdog.captured()
        return outcome

    def end(self, rank: int) -> None:
        del self.does[rank]
        self.watchdog.rank_ended(rank)


def threads_of(stack: str) -> tuple[ThreadStack, ...]:
    """``main:3 step:7`` with the innermost call last; an empty one is a look that failed.

    A second thread stands behind a bar, and is the active one then.
    """
    if "|" in stack:
        main, _, other = stack.partition("|")
        [waits], [works] = threads_of(main), threads_of(other)
        return (waits._replace(active=False), works._replace(tid=2, is_main=False))
    frames = tuple(
        Frame(call.partition(":")[0], "train.py", int(call.partition(":")[2])) for call in reversed(stack.split())
    )
    return (ThreadStack("MainThread", 1, is_main=True, active=True, owns_gil=True, frames=frames),) if frames else ()


def kinds(verdicts: Sequence[HangVerdict]) -> list[str]:
    return [verdict.kind for verdict in verdicts]


def every(period_s: float, interval_s: float, rates: Rates, rest: Rates = QUIET) -> Callable[[float], Rates]:
    """Bursts: in the one interval of each period that it falls into, a process does that."""
    return lambda at: rates if at % period_s < interval_s else rest


# ------------------------------------------------------------------------------------------------------- healthy jobs


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
        pytest.param((Rates(core_dumping=True, io=0), HUNG_IN_GLOO), id="one dumps its core"),
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
    assert (job.watchdog.quiet_s > 60) is is_quiet
    assert job.watchdog.quiet_s <= job.elapsed_s


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


# ------------------------------------------------------------------------------------------------------- closer looks


def downloads(at: float) -> JobLook:
    """Rank 0 receives 1 kB/s."""
    moments_s = tuple(at + number for number in range(4))
    connection = Connection(7, False, tuple(int(1000 * moment_s) for moment_s in moments_s), (0, 0, 0, 0))
    return JobLook(moments_s, (RankLook(0, (connection,), ()), RankLook(1, (), ())))


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_what_a_closer_look_finds_keeps_the_job_from_being_called_hung(timeout_s: float) -> None:
    """Until it is over. The look is rare: nobody pays for it who works."""
    job = Job(timeout_s, QUIET, HUNG_IN_GLOO, look=downloads)
    assert job.run(6) == []
    assert len(job.looked) <= 6 / 0.2
    job.look = lambda _at: JobLook((0.0, 1.0), (RankLook(0, (), ()), RankLook(1, (), ())))
    assert kinds(job.run(1.6)) == ["quiescent"]
    assert job.told[0][1].certain


def test_a_download_is_progress_also_between_two_looks() -> None:
    """Its ranks get a signal at once; those of a job that hangs are captured before."""
    job = Job(300.0, QUIET, HUNG_IN_GLOO, look=downloads)
    job.run(0.3)
    assert job.watchdog.quiet_s == 0.0
    job.look = lambda _at: JobLook((0.0, 1.0), (RankLook(0, (), ()), RankLook(1, (), ())))
    job.run(0.5)
    assert job.watchdog.quiet_s > 60


@pytest.mark.parametrize("does", [TRAINS, WRITES_CHECKPOINT])
def test_a_job_whose_samples_show_work_is_not_looked_at_closer(does: Rates) -> None:
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

    def look(at: float) -> JobLook:
        thread = Thread(12, 100, at, "python3", False, int(at * 9e8), (0, 0), 0, 0, 0, ())
        return JobLook((at - 1, at), (RankLook(0, (), (thread,)),))

    [verdict] = Job(30.0, QUIET, HUNG_IN_GLOO, look=look).run(1.6)
    assert not verdict.certain


def test_a_job_that_is_suspended_does_not_hang() -> None:
    """All of its ranks are stopped; whoever did that may continue them."""
    job = Job(30.0, Rates(state="T"), Rates(state="T"))
    assert set(kinds(job.run(8))) == {"stopped"}
    one = Job(30.0, Rates(state="T"), QUIET)
    assert "quiescent" in kinds(one.run(8))


# ------------------------------------------------------------------------------------------------ children, services


def _beside(rates: Rates | Callable[[float], Rates], **process: Any) -> Child:
    return Child(Process(500, **process), (lambda _at: rates) if isinstance(rates, Rates) else rates)


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

    job = Job(timeout_s, WAITS_FOR_CHILD, HUNG_IN_GLOO, children={0: [_beside(**child)]}, stack=stack)
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
    child = _beside(Rates(main=0.012, wakes=20, io=2e3), comm="wandb-core", age_s=0.0)
    job = Job(30.0, HUNG_IN_GLOO, HUNG_IN_GLOO, children={0: [child]})
    assert job.run(3.5) == []
    assert {(verdict.kind, verdict.certain) for verdict in job.run(2.5)} == {("quiescent", False)}
    assert {(verdict.kind, verdict.certain) for verdict in job.run(8.0)} == {("quiescent", False), ("quiescent", True)}


def test_the_child_of_a_wrapper_is_believed_for_ever() -> None:
    """``saferun --no-python ./run.sh``: the shell does nothing, and what it runs is the rank."""
    child = _beside(Rates(main=0.011, wakes=2.6, io=3e3), comm="trainer", age_s=0.0)
    assert Job(30.0, QUIET, HUNG_IN_GLOO, children={0: [child]}, is_wrapper=True).run(9) == []


# --------------------------------------------------------------------------------------------------------------- hangs


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
@pytest.mark.parametrize("does", [QUIET, HUNG_IN_GLOO, POLLS_EVERY_MS, WAITS_FOR_CHILD, WAITS_FOR_LOADER])
def test_ranks_that_only_wait_hang(timeout_s: float, does: Rates) -> None:
    """Waiting with a time limit, again and again, is waiting."""
    job = Job(timeout_s, does, HUNG_IN_GLOO)
    job.run(1.5)
    [(at, verdict)] = job.told
    assert verdict[:2] == ("quiescent", (0, 1))
    assert verdict.certain
    assert verdict.quiet_s >= timeout_s
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
    child = _beside(SPINS, forked=True)
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
    watchdog = Watchdog(2.0)
    process = Process(100)
    asked: list[int] = []
    looks = 0
    at = 0.0
    for _ in range(40):
        at += 0.1
        outcome = watchdog.feed(JobSample(at, 0.1, (RankSample(0, 0, process.live(QUIET, 0.1), (), False, 0, 0),)))
        assert outcome.verdict is None
        asked.extend(outcome.numbers_wanted)
        looks += outcome.look_wanted
    assert asked == [0]
    assert looks == 1
    watchdog.take_numbers(0, None)
    watchdog.take_look(None)
    told = []
    for _ in range(4):
        at += 0.1
        outcome = watchdog.feed(JobSample(at, 0.1, (RankSample(0, 0, process.live(QUIET, 0.1), (), False, 0, 0),)))
        told.append(outcome.verdict)
        for rank in outcome.numbers_wanted:
            watchdog.take_numbers(rank, None)
    assert [verdict.kind for verdict in told if verdict] == ["quiescent"]


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
    job = Job(30.0, QUIET, TRAINS)
    job.beats = {0: 1, 1: 0}
    assert kinds(job.run(1.3)) == ["heartbeat"]
    assert job.told[0][1][1] == (0,)
    assert job.told[0][1].certain

    job = Job(30.0, WRITES_CHECKPOINT, TRAINS)
    job.beats = {0: 1, 1: 0}
    assert kinds(job.run(1.3)) == ["heartbeat"]
    assert not job.told[0][1].certain


# ----------------------------------------------------------------------------------------------------- time and repeats


def test_a_hang_is_told_again_at_growing_intervals_and_a_few_times_only() -> None:
    """After T, T, 2T and 4T, and no more."""
    job = Job(30.0, QUIET, QUIET)
    job.run(40)
    moments = [at / 30 for at, _ in job.told]
    assert [round(later - earlier) for earlier, later in zip([0.0, *moments], moments, strict=False)] == [1, 1, 2, 4]


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
    assert kinds(job.run(10)) == ["stopped"] * 4
    assert kinds(job.run(1.5)) == ["quiescent"]


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
    """Whatever happens: what may be acted upon has lasted, and at most four are told of each kind of certainty."""
    job = Job(2.0, QUIET, QUIET)
    for number in range(120):
        rates = history[number % len(history)]
        job.does[0] = lambda _at, rates=rates: rates
        job.step(pauses_s[number % len(pauses_s)] if number % 7 == 0 else None)
    certain = [verdict for _, verdict in job.told if verdict.certain]
    assert all(verdict.quiet_s >= 2.0 for verdict in certain)
    assert len(certain) <= 4
    assert len(job.told) <= 8


# ---------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("interval_s", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (QUIET, "quiet"),
        (POLLS_EVERY_MS, "quiet"),
        (WAITS_FOR_CHILD, "quiet"),
        (WAITS_FOR_LOADER, "quiet"),
        (SPINS, "busy"),
        (SPINS_ON_A_BUSY_MACHINE, "busy"),
        (Rates(main=0.09, wakes=8000), "busy"),
        (TRAINS, "moves"),
        (WRITES_CHECKPOINT, "moves"),
        (Rates(main=0.02, wakes=3), "moves"),
    ],
)
def test_the_same_is_seen_at_short_intervals_and_at_long_ones(rates: Rates, expected: str, interval_s: float) -> None:
    """A timeout of two seconds must see what one of five minutes sees."""
    process = Process(1)
    process.live(rates, 10.0)
    before = process.live(rates, interval_s)
    assert main_thread_signs(before, process.live(rates, interval_s), interval_s) == expected


def test_what_py_spy_says_is_read() -> None:
    text = b"""[
    {"pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": true, "owns_gil": false,
     "frames": [{"name": "wait", "filename": "a.py", "line": 3, "locals": null},
                {"name": "main", "filename": "b.py", "line": 9}]},
    {"pid": 7, "thread_id": 99, "thread_name": null, "os_thread_id": null, "active": false, "frames": []}]"""
    main, other = threads_from(text, 7)
    assert main.is_main
    assert main.frames == (Frame("wait", "a.py", 3), Frame("main", "b.py", 9))
    assert (other.is_main, other.tid, other.frames) == (False, 99, ())


@pytest.mark.parametrize(
    "text", [b"", b"Error: no such process", b"{}", b"[1]", b'[{"frames": 3}]', b"[" * 100_000, b"\xff", b"null"]
)
def test_what_is_no_answer_of_py_spy_is_none(text: bytes) -> None:
    """The names in it are the rank's."""
    assert threads_from(text, 7) == ()
