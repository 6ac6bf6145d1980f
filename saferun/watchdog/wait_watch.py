"""Samples which ranks of this host wait for others, some times a second, and reports the counts. Never waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from saferun.model import Value
from saferun.watchdog.sample_budget import SampleBudget
from saferun.watchdog.stragglers import REPORTS, WaitCounter, differ, empty_rows, have_long_waits
from saferun.watchdog.wait_sampler import WaitSampler, uses_gpu

_SAMPLES = 300  # in a window
_LONGEST_INTERVAL_S = 0.2
# While no rank waits there is nothing to compare: samples are rarer until one does. Not among several hosts, where the
# rank that the others wait for may be the only one of its host.
_RELAXED = 3.0
# Rarer still while all of them rest: no main thread runs, and none waits for another. That they have begun to run again
# is noticed after this part of the time that they have rested. What was not sampled then is known, and counts. The
# longest interval is longer than the watchdog's, so that one wake-up of the loop is enough for both.
_REST_SHARE = 0.125
_LONGEST_REST_S = 6.0
# Samples at equal distances might always meet the same part of a step.
_SPREAD = 0.6180339887498949
# In how many reports it is seen of each rank whether it has begun to use a GPU: of all in the first one, and of an
# equal part in each other, since it costs 0.3 ms a rank. Ranks of a job use GPUs all at once, so one of them shows it.
_GPU_EVERY = 8
# Larger jobs report less often, so that their leader has no more to read.
_RANKS_A_REPORT = 512


def report_interval_s(window_s: float, world_size: int) -> float:
    """How often a host of a job of so many ranks reports."""
    return window_s / REPORTS * max(1.0, world_size / _RANKS_A_REPORT)


class SampledRank(Value):
    """A rank of this host: its number in the job, and which process does its work, as far as is known."""

    rank: int
    pid: Callable[[], int]


class WaitWatch:
    """Samples the ranks of one attempt.

    Args:
        window_s: the shortest time over which ranks are compared.
        world_size: how many ranks the job has.
        is_alone: whether all of them are here.
        on_report: takes what :meth:`WaitCounter.report` counted since the last one.
        most_rows: how many ranks a report may have; more take turns, in reports that come as much faster.
    """

    def __init__(
        self,
        window_s: float,
        world_size: int,
        *,
        is_alone: bool,
        on_report: Callable[[list[list[int]]], None],
        most_rows: int = 1 << 20,
    ) -> None:
        self._interval_s = min(window_s / _SAMPLES, _LONGEST_INTERVAL_S)
        self._budget = SampleBudget(window_s)
        self._report_s = report_interval_s(window_s, world_size)
        self._on_report = on_report
        self._most_rows = most_rows
        self._sampler = WaitSampler()
        self._counter = WaitCounter(is_alone=is_alone)
        self._ranks: dict[int, SampledRank] = {}
        self._report_at = 0.0
        self._samples = self._reports = self._turns = 0
        self._ended_s = 0.0
        self._sampled_at = self._rested_since = 0.0
        self._is_alone = is_alone
        self._relaxed = self._pace = _RELAXED if is_alone else 1.0
        self._are_on_gpus = False
        self.deadline: float | None = None
        """When ``tick`` is due, in monotonic seconds."""
        self.earliest: float | None = None
        """From when on it does something: while the ranks rest before the deadline, for a loop that is awake anyway."""

    def begin(self, now: float, ranks: Mapping[int, SampledRank]) -> None:
        """Watch these ranks, by local rank."""
        self._ranks = dict(ranks)
        self.resume(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.earliest is None or now < self.earliest:
            return
        # Whatever happens below, the next one is not due at once.
        self.deadline = self.earliest = now + _LONGEST_INTERVAL_S
        before = self._sampled_at
        began_s = time.thread_time()
        if not self._are_on_gpus:
            self._sample(now)
        sample_s = time.thread_time() - began_s
        # What the loop has done meanwhile cannot be separated from what it takes to wake up, about as much as a sample.
        wake_up_s = min(began_s - self._ended_s, sample_s)
        self._budget.pay(sample_s + wake_up_s, now - before)
        self._samples += 1
        if self._report_at <= now:
            self._report_at = now + self._report_s / self._turns_of_a_report()
            self._report()
        if self._are_on_gpus:
            self.deadline = self.earliest = self._report_at = now + self._report_s * _GPU_EVERY
            return
        interval_s = self._usual_interval_s()
        rest_s = min((now - self._rested_since) * _REST_SHARE, _LONGEST_REST_S)
        if rest_s > interval_s:
            self.earliest, self.deadline = now + interval_s, now + rest_s
        else:
            self.deadline = self.earliest = now + interval_s * (0.5 + self._samples * _SPREAD % 1.0)
        self._ended_s = time.thread_time()

    def _usual_interval_s(self) -> float:
        return self._budget.interval_s(self._interval_s * self._pace)

    def _turns_of_a_report(self) -> int:
        return max(1, -(-len(self._ranks) // self._most_rows))

    def _sample(self, now: float) -> None:
        before, self._sampled_at = self._sampled_at, now
        rested_since, self._rested_since = self._rested_since, now
        waiting = {}
        for rank in self._ranks.values():
            waits = self._sampler.waits(rank.pid())
            if waits is None:
                return  # it is held, or has ended; that the others wait for it does not make it slow
            waiting[rank.rank] = waits
        times = 1
        if self._is_alone and not any(waiting.values()) and not self._have_run():
            self._rested_since = rested_since
            times = max(1, round((now - before) / self._usual_interval_s()))
        if waiting:
            self._counter.take(waiting, times)

    def _have_run(self) -> bool:
        return any(self._sampler.has_run(rank.pid()) for rank in self._ranks.values())

    def _report(self) -> None:
        """Report, unless a rank uses a GPU: then what has been counted of any is worth nothing."""
        ranks = list(self._ranks.values())
        if self._reports and not self._are_on_gpus:
            ranks = ranks[self._reports % _GPU_EVERY :: _GPU_EVERY]
        self._are_on_gpus = any(uses_gpu(rank.pid()) for rank in ranks)
        self._reports += 1
        if self._are_on_gpus:
            self._counter.forget()
            self._sampler.close()
            self._turns += 1
            first = self._turns % self._turns_of_a_report() * self._most_rows
            self._on_report(empty_rows([rank.rank for rank in self._ranks.values()][first:][: self._most_rows]))
            return
        rows = self._counter.report(self._most_rows)
        self._pace = 1.0 if have_long_waits(rows) else self._relaxed
        self._budget.spends = differ(rows, is_alone=self._is_alone)
        self._on_report(rows)

    def rank_ended(self, local_rank: int) -> None:
        """A rank is gone."""
        rank = self._ranks.pop(local_rank, None)
        if rank is not None:
            self._sampler.drop(rank.pid())
            self._counter.drop(rank.rank)
        if not self._ranks:
            self.pause()

    def pause(self) -> None:
        """Do nothing until ``resume``: what was counted until now is nothing to go by."""
        self.deadline = self.earliest = None
        self._counter.forget()

    def resume(self, now: float) -> None:
        """Watch on."""
        if self._ranks:
            self.deadline = self.earliest = self._sampled_at = self._rested_since = now
            self._report_at = now + self._report_s / self._turns_of_a_report()

    def end(self) -> None:
        """No rank is left."""
        self.pause()
        self._ranks.clear()
        self._sampler.close()


__all__ = ["SampledRank", "WaitWatch", "report_interval_s"]
