"""Signs of life of one rank: what two samples of it say about the interval between them.

A rank *moves* if something went on that no hang does: output, reading and writing, pages from a disk, work in bursts, a
child at work. It is *busy* if it uses CPU time all the time, or one of its threads or children does: that may be work,
and it may be a loop that waits (NCCL waits like that). Otherwise it is *quiet*. Waiting with a timeout is quiet too:
``queue.get(timeout=5)``, ``Popen.wait(timeout=…)`` and ``while not done: time.sleep(0.001)`` wake up often and do next
to nothing each time.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from saferun.model import Value
from saferun.watchdog.samples import ProcessSample, RankSample

MainThreadSigns: TypeAlias = Literal["moves", "busy", "quiet"]

# A wait that polls needs 10 to 60 µs of CPU time a poll (measured), more if the caches are cold; real work needs
# milliseconds.
WAKE_NS = 100_000
BLINK_NS = 1_000_000
_POLL_SHARE = 0.05
# A loop that waits and sleeps 10 ms each time uses less (0.4 % on a slow machine). One that sleeps 1 ms (1 to 2 %) may
# as well work.
_STIR_SHARE = 0.005
# The main thread had work all the time. Less than all, because the kernel accounts running and waiting in portions, and
# what a virtual machine does not get is not accounted at all; then its state at both ends counts.
_ALL_THE_TIME = 0.7
_MOST_OF_THE_TIME = 0.3
# A loop that waits touches the same pages again and again; one that builds something does not.
_NEW_PAGES = 20
_NEW_PAGES_PER_S = 50
# Such as the content of a flag file that is polled.
_DRIP_BYTES = 256
# Gloo's threads use 0.3-0.6 % each, whether anything goes on or not. Threads that watch the host read /proc.
_THREAD_SHARE = 0.05
_THREAD_IO_BYTES_PER_S = 16_384
_WORKER_SHARE = 0.01
_SERVICE_SHARE = 0.05
_SERVICE_IO_BYTES_PER_S = 65_536
# Below that a service that does what it has always done is not work that the rank waits for.
_STEADY_SHARE = 0.2
_STEADY_FACTOR = 1.5
_TASK_SHARE = 0.003
# Many short-lived children together: compilers use whole cores; ``nvidia-smi`` every ten seconds does not.
_CHURN_SHARE = 0.25
# A child that the rank has worked beside for so many intervals is not what it waits for.
_BESIDE = 5
_SEEN_ENOUGH = 3
_DATA_WORKER = "pt_data_worker"
DOUBTED = 3
"""For how many times as long as weak signs count they leave a verdict uncertain."""


class Signs(Value):
    """What one interval showed.

    Attributes:
        moved: something went on.
        busy_pids: processes, the rank or its children, that may be working or busy-looping.
        main_is_busy: whether the main thread of the rank is.
        may_work: whether a child shows weak signs of work, but the rank has waited for it for longer than such signs
            count.
        is_slightly_active: whether the main thread used more CPU than a slow polling loop, but too little to count as
            work.
    """

    moved: bool
    busy_pids: frozenset[int] = frozenset()
    main_is_busy: bool = False
    may_work: bool = False
    is_slightly_active: bool = False


class _Rate:
    """An amount per second, averaged over about so many seconds, so that a burst now and then weighs little."""

    __slots__ = ("per_s",)

    def __init__(self) -> None:
        self.per_s = 0.0

    def add(self, amount: float, interval_s: float, window_s: float) -> float:
        self.per_s += (max(0.0, amount) / interval_s - self.per_s) * interval_s / (interval_s + window_s)
        return self.per_s


class _Other:
    """One child of a rank, or child's child."""

    __slots__ = ("baseline", "beside", "cpu", "io", "seen", "was_there", "work_then")

    def __init__(self, sample: ProcessSample, *, was_there: bool, work_then: int) -> None:
        self.baseline = sample
        self.cpu = _Rate()
        self.io = _Rate()
        self.seen = 1
        self.was_there = was_there
        self.work_then = work_then
        self.beside = sample.cpu_ns / 1e9 / max(sample.age_s, 1.0)


class RankSigns:
    """What each interval says about one rank. ``window_s``: over how long rates are averaged."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._before: RankSample | None = None
        self._others: dict[tuple[int, int], _Other] = {}
        self._had_descendants = False
        self._threads = _Rate()
        self._thread_io = _Rate()
        self._churn = _Rate()
        self._intervals_of_work = 0
        self._idle_s = 0.0

    def rebase(self) -> None:
        """Compare nothing with the last sample: what happened since is not the rank's doing."""
        self._before = None
        self._had_descendants = False

    def take(self, sample: RankSample, interval_s: float, *, disturbed: bool, patience_s: float) -> Signs:
        """What the interval that this sample ends shows.

        Args:
            sample: the rank now.
            interval_s: how long ago the sample before was.
            disturbed: a thread of the rank has worked for saferun in between; the average of its threads is kept.
            patience_s: how long the weak signs of a child that the rank waits for count.
        """
        before, self._before = self._before, sample
        if before is None:
            self._descendant_signs(sample, interval_s, patience_s)
            return Signs(moved=False)
        if _is_another(before.process, sample.process):
            self._descendant_signs(sample, interval_s, patience_s)
            return Signs(moved=True)
        main = main_thread_signs(before.process, sample.process, interval_s)
        moved = (
            main == "moves"
            or sample.output_bytes != before.output_bytes
            or sample.heartbeat_ns != before.heartbeat_ns
            or _mark(sample) != _mark(before)
            or self._thread_io_moves(before.process, sample.process, interval_s)
        )
        busy_pids = {sample.process.pid} if main == "busy" else set()
        if self._threads_busy(before.process, sample.process, interval_s, disturbed=disturbed):
            busy_pids.add(sample.process.pid)
        works = moved or bool(busy_pids)
        descendants = self._descendant_signs(sample, interval_s, patience_s)
        self._intervals_of_work += works
        self._idle_s = 0.0 if works else self._idle_s + interval_s
        is_slightly_active = sample.process.main_run_ns - before.process.main_run_ns > interval_s * 1e9 * _STIR_SHARE
        return Signs(
            moved or descendants.moved,
            frozenset(busy_pids | descendants.busy_pids),
            main == "busy",
            descendants.may_work,
            is_slightly_active,
        )

    # ----------------------------------------------------------------------------------------------------- its threads

    def _thread_io_moves(self, before: ProcessSample, now: ProcessSample, interval_s: float) -> bool:
        io_bytes = (now.io_bytes - now.main_io_bytes) - (before.io_bytes - before.main_io_bytes)
        return self._thread_io.add(io_bytes, interval_s, self._window_s) > _THREAD_IO_BYTES_PER_S

    def _threads_busy(self, before: ProcessSample, now: ProcessSample, interval_s: float, *, disturbed: bool) -> bool:
        """Whether one of the other threads is at work, perhaps while the main thread waits for it."""
        ran_ns = now.busy_thread_ns
        if ran_ns < 0:
            ran_ns = (now.cpu_ns - before.cpu_ns) - (now.main_run_ns - before.main_run_ns)
        if not disturbed:
            self._threads.add(ran_ns / 1e9, interval_s, self._window_s)
        return self._threads.per_s > _THREAD_SHARE

    # ---------------------------------------------------------------------------------------------------- its children

    def _descendant_signs(self, sample: RankSample, interval_s: float, patience_s: float) -> Signs:
        if sample.others is None:
            self._had_descendants = False
            return Signs(moved=False)
        compare, self._had_descendants = self._had_descendants, True
        known, self._others = self._others, {}
        moved = may_work = False
        busy_pids: set[int] = set()
        churn_ns = 0
        for process in sample.others:
            other = known.get((process.pid, process.start_ticks))
            if other is None:
                was_there = process.age_s > self._idle_s + interval_s * _SEEN_ENOUGH and not sample.is_wrapper
                other = _Other(process, was_there=was_there, work_then=self._intervals_of_work)
                churn_ns += process.cpu_ns if compare and process.age_s <= interval_s * 2 else 0
            elif compare:
                other.seen += 1
                churn_ns += process.children_cpu_ns - other.baseline.children_cpu_ns
                signs = self._child_signs(other, process, sample, interval_s, patience_s)
                moved = moved or signs.moved
                may_work = may_work or signs.may_work
                busy_pids |= signs.busy_pids
            other.baseline = process
            self._others[process.pid, process.start_ticks] = other
        before = known.get((sample.process.pid, sample.process.start_ticks))
        if compare and before is not None:
            churn_ns += sample.process.children_cpu_ns - before.baseline.children_cpu_ns
        rank_itself = before or _Other(sample.process, was_there=True, work_then=0)
        rank_itself.baseline = sample.process
        self._others[sample.process.pid, sample.process.start_ticks] = rank_itself
        churns = compare and self._churn.add(churn_ns / 1e9, interval_s, self._window_s) > _CHURN_SHARE
        return Signs(moved or churns, frozenset(busy_pids), may_work=may_work)

    def _child_signs(
        self, other: _Other, now: ProcessSample, rank: RankSample, interval_s: float, patience_s: float
    ) -> Signs:
        before = other.baseline
        share = other.cpu.add((now.cpu_ns - before.cpu_ns) / 1e9, interval_s, self._window_s)
        io_bytes_per_s = other.io.add(now.io_bytes - before.io_bytes, interval_s, self._window_s)
        faults = now.major_faults > before.major_faults
        does_the_ranks_work = now.forked or now.comm == _DATA_WORKER
        if does_the_ranks_work:
            limit, io_limit, weak = _WORKER_SHARE, _THREAD_IO_BYTES_PER_S, faults
        elif other.was_there or self._intervals_of_work - other.work_then > _BESIDE:
            # A service, such as those of experiment trackers: it goes on whether the rank does or not.
            limit, io_limit, weak = _SERVICE_SHARE, _SERVICE_IO_BYTES_PER_S, False
            if share < _STEADY_SHARE and share <= other.beside * _STEADY_FACTOR:
                return Signs(moved=io_bytes_per_s > io_limit)
        else:
            # The rank has done nothing since it started this child: it waits for it.
            limit, io_limit, weak = _SERVICE_SHARE, _SERVICE_IO_BYTES_PER_S, False
            if other.seen >= _SEEN_ENOUGH:
                weak = faults or share > _TASK_SHARE or io_bytes_per_s > _DRIP_BYTES
            if weak and not rank.is_wrapper and self._idle_s >= patience_s:
                weak = False
                if io_bytes_per_s <= io_limit and share <= limit:
                    return Signs(moved=False, may_work=self._idle_s < patience_s * DOUBTED)
        if weak or io_bytes_per_s > io_limit:
            return Signs(moved=True)
        if share <= limit:
            return Signs(moved=False)
        # A busy program of another kind is work; the rank's own may busy-loop, which its stacks show.
        is_busy_looping = does_the_ranks_work and share > _SERVICE_SHARE
        return Signs(not is_busy_looping, frozenset({now.pid}) if is_busy_looping else frozenset())


def main_thread_signs(before: ProcessSample, now: ProcessSample, interval_s: float) -> MainThreadSigns:
    """What the main thread of a process did between two samples."""
    interval_ns = interval_s * 1e9
    ran_ns = now.main_run_ns - before.main_run_ns
    wakes = now.main_wakes - before.main_wakes
    if now.major_faults > before.major_faults:
        return "moves"
    if now.main_io_bytes - before.main_io_bytes > _DRIP_BYTES * (1 + interval_s):
        return "moves"
    if now.state == "D" and wakes > 1:
        # One uninterruptible sleep after the other: it waits for a slow disk.
        return "moves"
    ready_ns = ran_ns + now.main_wait_ns - before.main_wait_ns
    runs = before.state == now.state == "R"
    # The kernel accounts a wait for a processor when it is over.
    is_starved = runs and wakes == 0
    if is_starved or ready_ns >= interval_ns * (_MOST_OF_THE_TIME if runs else _ALL_THE_TIME):
        new_pages = now.minor_faults - before.minor_faults
        return "moves" if new_pages > max(_NEW_PAGES, _NEW_PAGES_PER_S * interval_s) else "busy"
    if ran_ns <= BLINK_NS + WAKE_NS * wakes:
        return "busy" if ran_ns > interval_ns * _POLL_SHARE else "quiet"
    return "moves"


def _is_another(before: ProcessSample, now: ProcessSample) -> bool:
    return (before.pid, before.start_ticks) != (now.pid, now.start_ticks)


def _mark(sample: RankSample) -> str:
    return sample.script.mark if sample.script is not None else ""
