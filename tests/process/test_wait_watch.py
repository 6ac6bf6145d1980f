"""What is sampled and reported of the ranks of a host, by the moments at which the loop would wake the watch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from saferun.launch.hang_watch import HangWatch
from saferun.launch.slow_ranks import SlowRankWatch
from saferun.watchdog import wait_watch
from saferun.watchdog.stragglers import Stragglers, counts_from
from saferun.watchdog.wait_sampler import WaitSampler, uses_gpu
from saferun.watchdog.wait_watch import SampledRank, WaitWatch
from tests.descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WINDOW_S = 60.0
Rows = list[list[int]]


@pytest.fixture(autouse=True)
def _samples_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often the watch samples depends on what a sample costs, and that on the machine."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)


def watch_of(
    monkeypatch: pytest.MonkeyPatch,
    reports: list[Rows],
    *,
    ranks: int = 2,
    waits: Callable[[int], bool | None] = lambda _pid: False,
    has_run: Callable[[int], bool] = lambda _pid: True,
    gpus: Callable[[int], bool] = lambda _pid: False,
    most_rows: int = 1 << 20,
    is_alone: bool = True,
) -> WaitWatch:
    """A watch of ranks whose processes are called as they are; no process is read."""
    monkeypatch.setattr(wait_watch, "uses_gpu", gpus)
    watch = WaitWatch(WINDOW_S, ranks, is_alone=is_alone, on_report=reports.append, most_rows=most_rows)
    monkeypatch.setattr(watch, "_sampler", _Sampler(waits, has_run))
    watch.begin(0.0, {rank: SampledRank(rank, lambda rank=rank: rank) for rank in range(ranks)})  # type: ignore[misc]
    return watch


class _Sampler:
    def __init__(self, waits: Callable[[int], bool | None], has_run: Callable[[int], bool]) -> None:
        self.waits, self.has_run = waits, has_run
        self.read: list[int] = []

    def drop(self, pid: int) -> None:
        """No descriptor is open."""

    def close(self) -> None:
        """None is."""


def run(watch: WaitWatch, until_s: float) -> list[float]:
    """Wake it whenever it is due. Returns when that was."""
    at = []
    while watch.deadline is not None and watch.deadline < until_s:
        at.append(watch.deadline)
        watch.tick(watch.deadline)
    return at


def test_what_was_counted_of_a_rank_that_turns_out_to_use_a_gpu_is_never_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It spins while it waits, so it seems never to wait: the rank that the others wait for."""
    reports: list[Rows] = []
    run(watch_of(monkeypatch, reports, gpus=lambda pid: pid == 1), 300.0)
    assert reports
    assert all(not any(row[1:]) for rows in reports for row in rows)


def test_what_the_leader_knows_of_ranks_that_begin_to_use_a_gpu_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that takes a minute to load the first reports have no GPU."""
    reports: list[Rows] = []
    waits, is_used = {0: True, 1: False}, False
    watch = watch_of(
        monkeypatch, reports, waits=lambda pid: waits[pid] and len(reports) % 2 > 0, gpus=lambda _: is_used
    )
    run(watch, 50.0)
    leader = Stragglers(WINDOW_S, 2)
    for number, rows in enumerate(reports):
        leader.take("node0", counts_from(rows, range(2)), number * 15.0)
    assert len(leader.counts(50.0, WINDOW_S)) == 2
    is_used = True
    before = len(reports)
    run(watch, 300.0)
    assert reports[before:]
    for rows in reports[before:]:
        leader.take("node0", counts_from(rows, range(2)), 60.0)
    assert leader.counts(60.0, WINDOW_S) == {}


def test_the_one_rank_that_begins_to_use_a_gpu_is_noticed_within_eight_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no report reads the descriptors of all ranks but the first: that costs more than all samples between."""
    for late in range(8):
        reports: list[Rows] = []
        read: list[list[int]] = [[]]

        def gpus(pid: int, *, late: int = late, reports: list[Rows] = reports, read: list[list[int]] = read) -> bool:
            read[-1].append(pid)
            return pid == late and len(reports) > 0

        watch = watch_of(monkeypatch, reports, ranks=8, gpus=gpus)
        while len(reports) < 9:
            before = len(reports)
            assert watch.deadline is not None
            watch.tick(watch.deadline)
            if len(reports) > before:
                read.append([])
        assert [len(ranks) for ranks in read[:2]] == [8, 1]
        assert not any(any(row[1:]) for row in reports[8])


def test_samples_that_cost_much_are_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it takes to wake up for them; what else the loop does meanwhile does not count."""
    clock, cost_s, between_s = [0.0], 0.0, 0.0

    def waits(_pid: int) -> bool:
        clock[0] += cost_s / 2
        return False

    def thread_time() -> float:
        return clock[0]

    def interval_s() -> float:
        watch = watch_of(monkeypatch, [], waits=waits, is_alone=False)
        moments: list[float] = []
        while len(moments) < 200:
            assert watch.deadline is not None
            moments.append(watch.deadline)
            clock[0] += between_s
            watch.tick(watch.deadline)
        return (moments[-1] - moments[100]) / 99

    monkeypatch.setattr(time, "thread_time", thread_time)
    usual_s = interval_s()
    cost_s, between_s = 80e-6, 60e-6
    assert interval_s() * 0.0004 >= cost_s + between_s
    assert usual_s < interval_s() < 3 * usual_s
    busy_s = interval_s()
    between_s = 1.0
    assert interval_s() < 1.3 * busy_s


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_slow_rank_is_named_within_the_window_though_samples_cost_much(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """On a slow machine a sample and its wake-up take 0.25 ms. What was saved before is spent, and no more."""
    clock, now, spent = [0.0], [0.0], []

    def waits(pid: int) -> bool:
        clock[0] += 125e-6 / 4
        spent.append((now[0], 2 * 125e-6 / 4))
        return pid != 2 and now[0] % 0.065 > 0.05

    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    reports: list[Rows] = []
    leader, found = Stragglers(WINDOW_S, 4), []
    watch = watch_of(monkeypatch, reports, ranks=4, waits=waits, is_alone=is_alone)
    while now[0] < 3600.0:
        assert watch.deadline is not None
        now[0] = watch.deadline
        clock[0] += 1.0  # the loop has done something else
        watch.tick(now[0])
        if reports:
            leader.take("node0", counts_from(reports.pop(), range(4)), now[0])
            found += [(now[0], one.ranks) for one in [leader.judge(now[0])] if one is not None]
    assert found
    assert found[0][1] == (2,)
    assert found[0][0] <= WINDOW_S + 3.0
    for begin in range(0, 3600, 600):
        assert sum(cost for at, cost in spent if begin <= at < begin + 600) <= 0.0005 * 600


def test_where_no_rank_waits_nothing_saved_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def waits(_pid: int) -> bool:
        clock[0] += 125e-6
        return False

    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    watch = watch_of(monkeypatch, [], waits=waits)
    run(watch, 60.0)
    assert len(run(watch, 660.0)) * 250e-6 <= 0.0003 * 600


def test_ranks_that_use_gpus_are_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop wakes up every two minutes, to see whether they still do."""
    reports: list[Rows] = []
    at = run(watch_of(monkeypatch, reports, gpus=lambda _: True), 3600.0)
    assert sum(moment > 30.0 for moment in at) <= 30


def test_ranks_that_do_not_wait_are_sampled_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closer look is worth its cost where one waits: at twice as many moments at least."""
    counts = []
    for is_waiting in (False, True):
        phase = [False]

        def waits(pid: int, *, phase: list[bool] = phase, is_waiting: bool = is_waiting) -> bool:
            phase[0] ^= pid == 0
            return is_waiting and pid == 0 and phase[0]

        counts.append(len(run(watch_of(monkeypatch, [], waits=waits), 600.0)))
    assert counts[1] > 2 * counts[0]


def test_where_there_are_other_hosts_samples_are_never_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that they wait for may be the only one here, and then nothing shows."""
    counts = [len(run(watch_of(monkeypatch, [], is_alone=alone), 600.0)) for alone in (True, False)]
    assert counts[1] > 2 * counts[0]


def test_ranks_that_rest_are_sampled_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wake-up of the loop costs more than what it is for."""
    at = run(watch_of(monkeypatch, [], has_run=lambda _pid: False), 600.0)
    assert len(at) < 150
    assert round(max(late - early for early, late in itertools.pairwise(at)), 6) == 6.0


def test_that_a_rest_is_over_is_noticed_within_an_eighth_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And from then on the ranks are sampled as ever."""
    for rest_s in (8.0, 20.0, 39.0, 3600.0):
        end_s, is_resting = rest_s, True
        watch = watch_of(monkeypatch, [], has_run=lambda pid: pid == 1 and not is_resting)  # noqa: B023 - as it is then
        run(watch, end_s)
        is_resting = False
        at = run(watch, end_s + 20.0)
        assert at[0] - end_s <= min(rest_s / 8, 6.0)
        assert len(at) >= 20


def test_what_was_not_sampled_of_ranks_that_rest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what they do between their rests would seem to be all that they do."""
    totals = []
    for rests in (False, True):
        reports: list[Rows] = []
        run(watch_of(monkeypatch, reports, has_run=lambda _pid, rests=rests: not rests), 600.0)  # type: ignore[misc]
        totals.append(sum(row[1] for rows in reports for row in rows))
    assert abs(totals[1] - totals[0]) < 0.05 * totals[0]


@pytest.mark.parametrize(("rest_s", "step_s", "lag_s"), [(5.0, 1.0, 1.5), (10.0, 4.0, 2.5), (10.0, 1.0, 1.0)])
def test_a_slow_rank_is_named_as_soon_where_ranks_rest_in_each_step(
    monkeypatch: pytest.MonkeyPatch, rest_s: float, step_s: float, lag_s: float
) -> None:
    """In another report at most; and one that is not slow enough over all the time is not named either way."""
    named = []
    for rests in (False, True):
        now = [0.0]
        last: dict[int, tuple[str, float]] = {}

        def place(pid: int, *, now: list[float] = now) -> tuple[str, float]:
            """What its main thread does, and since which moment."""
            step, at = divmod(now[0], rest_s + step_s + lag_s)
            if at < rest_s:
                return "rests", step
            return ("runs", now[0]) if at < rest_s + step_s or pid == 0 else ("waits", step)

        def waits(pid: int, *, place: Callable[[int], tuple[str, float]] = place) -> bool:
            return place(pid)[0] == "waits"

        def has_run(
            pid: int,
            *,
            rests: bool = rests,
            last: dict[int, tuple[str, float]] = last,
            place: Callable[[int], tuple[str, float]] = place,
        ) -> bool:
            before, last[pid] = last.get(pid), place(pid)
            return not rests or last[pid] != before

        found: list[float] = []
        leader = Stragglers(WINDOW_S, 4)
        reports: list[Rows] = []
        watch = watch_of(monkeypatch, reports, ranks=4, waits=waits, has_run=has_run)
        while now[0] < 900.0 and watch.deadline is not None:
            now[0] = watch.deadline
            watch.tick(now[0])
            if reports:
                leader.take("node0", counts_from(reports.pop(), range(4)), now[0])
                found += [now[0]] if leader.judge(now[0]) is not None else []
        named.append(found[:1])
    assert [len(found) for found in named] in ([0, 0], [1, 1])
    assert bool(named[0]) == (lag_s > 0.15 * (rest_s + step_s + lag_s))
    assert all(abs(late - early) < 30.0 for early, late in zip(*named, strict=True))


def test_ranks_do_not_rest_while_one_waits_or_there_are_others_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long each wait lasts is what is counted, and whether ranks elsewhere rest is not known."""

    def count(*, waiting: set[int], is_alone: bool) -> int:
        watch = watch_of(
            monkeypatch, [], waits=lambda pid: pid in waiting, has_run=lambda _pid: False, is_alone=is_alone
        )
        return len(run(watch, 600.0))

    at_rest = count(waiting=set(), is_alone=True)
    for waiting, is_alone in (({0}, True), ({0, 1}, True), (set(), False)):
        assert count(waiting=waiting, is_alone=is_alone) > 5 * at_rest


def test_a_loop_that_is_awake_samples_ranks_that_rest_before_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wake-up for the samples of the watchdog and for these."""
    watch = watch_of(monkeypatch, [], has_run=lambda _pid: False)
    run(watch, 300.0)
    assert watch.earliest is not None
    assert watch.deadline is not None
    assert watch.earliest < watch.deadline
    at, due = watch.earliest, watch.deadline
    watch.tick(at - 0.1)
    assert watch.deadline == due
    watch.tick(at)
    assert watch.deadline > due


class _Every5s:
    """The watchdog, as far as the loop knows it."""

    def __init__(self) -> None:
        self.deadline = 0.0

    def tick(self, now: float) -> None:
        self.deadline = now + 5.0


def test_the_loop_wakes_up_once_for_both_kinds_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """From when on the ranks have rested for a while."""
    context = Mock()
    context.launch.guarded = context.launch.succeeds = lambda _what, call, *arguments: call(*arguments) or True
    hangs = HangWatch(context, Mock(), lambda _: None)
    samples = 0
    slow = Mock(spec=["deadline", "earliest", "tick"])

    def has_run(pid: int) -> bool:
        nonlocal samples
        samples += pid == 0
        return False

    watch = watch_of(monkeypatch, [], has_run=has_run)

    def tick(now: float) -> None:
        watch.tick(now)
        slow.deadline, slow.earliest = watch.deadline, watch.earliest

    slow.tick = tick
    tick(0.0)
    monkeypatch.setattr(hangs, "_monitor", _Every5s())
    monkeypatch.setattr(hangs, "_slow", slow)
    wake_ups = 0
    while hangs.deadline is not None and hangs.deadline < 660.0:
        if hangs.deadline < 60.0:
            samples = 0
        wake_ups += hangs.deadline >= 60.0
        hangs.tick(hangs.deadline)
    assert wake_ups <= 125
    assert samples >= 110


def test_a_pause_is_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks did while they were captured is not known."""
    reports: list[Rows] = []
    watch = watch_of(monkeypatch, reports, has_run=lambda _pid: False)
    run(watch, 300.0)
    watch.pause()
    before = len(reports)
    watch.resume(400.0)
    at = run(watch, 416.0)
    assert at[1] - at[0] < 1.0
    assert all(row[1] <= 30 for rows in reports[before:] for row in rows)


def test_a_main_thread_that_sleeps_has_not_run(tmp_path: Path) -> None:
    """Whatever its other threads do; and one that has been woken up has."""
    script = """if True:
        import sys, threading, time
        threading.Thread(target=lambda: [time.sleep(0.001) for _ in iter(int, 1)], daemon=True).start()
        for line in sys.stdin.buffer.raw: print(flush=True)
    """
    sampler = WaitSampler()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        deadline = time.monotonic() + 30
        while sampler.has_run(child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert sampler.has_run(child.pid)
        child.kill()
    assert sampler.has_run(child.pid)
    sampler.close()


def test_without_scheduling_statistics_no_rank_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds zeros there, whatever runs."""
    sampler = WaitSampler()
    monkeypatch.setattr(os, "pread", lambda *_: b"0 0 0\n")
    assert all(sampler.has_run(os.getpid()) for _ in range(3))
    sampler.close()


def test_more_ranks_than_a_report_may_have_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is reported as often as in a small launch, and nothing that was counted is lost."""
    reports: list[Rows] = []
    samples = [0]

    def waits(pid: int) -> bool:
        samples[0] += pid == 0
        return False

    run(watch_of(monkeypatch, reports, ranks=130, waits=waits, most_rows=56), 121.0)
    assert max(len(rows) for rows in reports) == 56
    counted = [sum(row[1] for rows in reports for row in rows if row[0] == rank) for rank in range(130)]
    assert min(counted) > 0.75 * samples[0]
    times = [sum(any(row[0] == rank for row in rows) for rows in reports) for rank in range(130)]
    assert min(times) >= 7


def test_a_descriptor_that_is_closed_meanwhile_hides_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"3": "/dev/null", "5": "/dev/nvidia0"}

    def readlink(path: str) -> str:
        if path.endswith("/4"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return targets[path.rpartition("/")[2]]

    monkeypatch.setattr(os, "listdir", lambda _path: ["3", "4", "5"])
    monkeypatch.setattr(os, "readlink", readlink)
    assert uses_gpu(1)


def test_of_very_many_descriptors_not_all_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a million connections costs no more than one with some thousands."""
    read: list[str] = []

    def readlink(path: str) -> str:
        read.append(path)
        return "socket:[7]"

    monkeypatch.setattr(os, "listdir", lambda _path: [str(fd) for fd in range(100_000)])
    monkeypatch.setattr(os, "readlink", readlink)
    assert not uses_gpu(1)
    assert len(read) == 4096


def test_a_comparison_that_is_given_up_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has two: where its main thread sleeps, and how long it has run."""
    before = len(open_descriptors())
    watch = WaitWatch(WINDOW_S, 1, is_alone=True, on_report=lambda _: None)
    watch.begin(0.0, {0: SampledRank(0, os.getpid)})
    watch.tick(0.0)
    assert len(open_descriptors()) == before + 2
    monkeypatch.setattr(SlowRankWatch, "__init__", lambda _: None)
    slow = SlowRankWatch()  # type: ignore[call-arg]
    slow._watch, slow._beside, slow._rounds = watch, None, None
    slow.disable()
    assert len(open_descriptors()) == before


@pytest.mark.parametrize("is_stalled", [False, True])
def test_the_table_is_written_only_while_files_are(*, is_stalled: bool) -> None:
    """Of a run directory that does not answer for days, thousands of tables waited in memory."""
    context = Mock()
    context.launch.config.watch.slow_window_s, context.launch.config.watch.slow_dumps_s = WINDOW_S, 0.0
    context.launch.run_dir.files.is_stalled = is_stalled
    SlowRankWatch(context, Mock())._write_table(Stragglers(WINDOW_S, 2))
    assert context.launch.run_dir.write_json.called is not is_stalled
