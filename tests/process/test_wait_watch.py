"""What is sampled and reported of the ranks of a host, by the moments at which the loop would wake the watch."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from saferun.launch.slow_ranks import SlowRankWatch
from saferun.watchdog import wait_watch
from saferun.watchdog.stragglers import Stragglers, counts_from
from saferun.watchdog.wait_sampler import uses_gpu
from saferun.watchdog.wait_watch import SampledRank, WaitWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

WINDOW_S = 60.0
Rows = list[list[int]]


def watch_of(
    monkeypatch: pytest.MonkeyPatch,
    reports: list[Rows],
    *,
    ranks: int = 2,
    waits: Callable[[int], bool | None] = lambda _pid: False,
    gpus: Callable[[int], bool] = lambda _pid: False,
    most_rows: int = 1 << 20,
    is_alone: bool = True,
) -> WaitWatch:
    """A watch of ranks whose processes are called as they are; no process is read."""
    monkeypatch.setattr(wait_watch, "uses_gpu", gpus)
    watch = WaitWatch(WINDOW_S, ranks, is_alone=is_alone, on_report=reports.append, most_rows=most_rows)
    monkeypatch.setattr(watch, "_sampler", _Sampler(waits))
    watch.begin(0.0, {rank: SampledRank(rank, lambda rank=rank: rank) for rank in range(ranks)})  # type: ignore[misc]
    return watch


class _Sampler:
    def __init__(self, waits: Callable[[int], bool | None]) -> None:
        self.waits = waits
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
    """Each rank has one."""
    before = len(os.listdir("/proc/self/fd"))
    watch = WaitWatch(WINDOW_S, 1, is_alone=True, on_report=lambda _: None)
    watch.begin(0.0, {0: SampledRank(0, os.getpid)})
    watch.tick(0.0)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    monkeypatch.setattr(SlowRankWatch, "__init__", lambda _: None)
    slow = SlowRankWatch()  # type: ignore[call-arg]
    slow._watch, slow._beside, slow._rounds = watch, None, None
    slow.disable()
    assert len(os.listdir("/proc/self/fd")) == before
