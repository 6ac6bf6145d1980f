"""Jobs whose ranks do what was recorded of real ones, and a watchdog that is fed with their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from saferun.captures.inspection_values import JobInspection
from saferun.evidence.job_evidence import Frame, HangVerdict, ThreadStack
from saferun.text.script_state import ScriptState
from saferun.watchdog.detector import HangDetector, sampling_interval_s
from saferun.watchdog.samples import JobSample, ProcessSample, RankSample, SampleResult

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
        look: Callable[[float], JobInspection | None] = lambda _at: None,
    ) -> None:
        self.active = active
        self.look = look
        self.looked: list[float] = []
        self.timeout_s = timeout_s
        self.interval_s = sampling_interval_s(timeout_s)
        self.watchdog = HangDetector(timeout_s, can_dump=can_dump)
        self.at = 1000.0
        self.began = self.at
        self.does = {
            rank: (lambda _at, r=does_: r) if isinstance(does_, Rates) else does_ for rank, does_ in enumerate(does)
        }
        self.processes = {rank: Process(100 + rank) for rank in self.does}
        self.output = dict.fromkeys(self.does, 0)
        self.beats = dict.fromkeys(self.does, 0)
        self.scripts: dict[int, ScriptState] = {}
        self.numbers = numbers
        self.stack = stack
        self.children = children or {}
        self.is_wrapper = is_wrapper
        self.doubt_lasts_s = 0.0  # of hangs that their captures show to be only suspected
        self.told: list[tuple[float, HangVerdict]] = []
        self.recovered: list[tuple[float, float]] = []
        self.asked: list[tuple[float, int]] = []
        self._read_descendants: frozenset[int] = frozenset(self.does)
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

    def step(self, seconds: float | None = None) -> SampleResult:
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

    def _live(self, seconds: float) -> SampleResult:
        self.at += seconds
        ranks = []
        for rank, does in self.does.items():
            process = self.processes[rank].live(does(self.elapsed_s), seconds)
            others = tuple(
                child.process.live(child.rates(self.elapsed_s), seconds) for child in self.children.get(rank, [])
            )
            descendants = others if rank in self._read_descendants else None
            script = self.scripts.get(rank)
            ranks.append(
                RankSample(
                    rank, rank, process, descendants, self.is_wrapper, self.output[rank], self.beats[rank], script
                )
            )
        outcome = self.watchdog.feed(JobSample(self.at, self.interval_s, tuple(ranks)))
        self._read_descendants = outcome.read_descendants
        for rank in outcome.numbers_wanted:
            self.asked.append((self.elapsed_s, rank))
            self.watchdog.take_numbers(rank, self.numbers(rank, self.elapsed_s))
        if outcome.inspection_wanted:
            self.looked.append(self.elapsed_s)
            self.watchdog.take_inspection(self.look(self.elapsed_s))
        if outcome.recovered_s is not None:
            self.recovered.append((self.elapsed_s, outcome.recovered_s))
        if outcome.verdict is not None:
            self.told.append((self.elapsed_s, outcome.verdict))
            if outcome.verdict.certain and outcome.verdict.lasted_s < self.doubt_lasts_s:
                self.watchdog.downgrade_to_suspected(outcome.verdict, self.doubt_lasts_s)
            self.watchdog.resume()
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


def beside(rates: Rates | Callable[[float], Rates], **process: Any) -> Child:
    """A child of a rank."""
    return Child(Process(500, **process), (lambda _at: rates) if isinstance(rates, Rates) else rates)
