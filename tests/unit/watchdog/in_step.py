"""Jobs whose ranks work in step, simulated: who waits at which moment, as the watchdog would sample it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from saferun.watchdog.stragglers import REPORTS, Straggler, Stragglers, WaitCounter, counts_from, have_long_waits

WINDOW_S = 60.0
INTERVAL_S = 0.2
RELAXED = 3
_SPREAD = 0.6180339887498949


class Step(NamedTuple):
    """When a step begins, how long it takes, and when each rank works in it."""

    at: float
    lasts_s: float
    works: list[list[tuple[float, float]]]


def data_parallel(
    ranks: int,
    *,
    seed: int = 0,
    step_s: float = 0.3,
    jitter: float = 0.1,
    memory: float = 0.0,
    collective_s: float = 0.01,
    slow: Sequence[int] = (),
    factor: float = 1.3,
    breaks: Sequence[tuple[float, float]] = (),
) -> Iterator[Step]:
    """Every rank works, and then all wait for the last.

    Args:
        ranks: how many.
        seed: of what differs from step to step.
        step_s: how long a rank works.
        jitter: the standard deviation of that, as a share.
        memory: how much of the deviation is that of the rank's step before.
        collective_s: how long all of them wait in the end.
        slow: ranks that are slower.
        factor: how much slower.
        breaks: every so many seconds rank 0 works alone for so long.
    """
    chance, at, deviation = random.Random(seed), 0.0, [0.0] * ranks  # noqa: S311 - the same every time
    while True:
        lasts = []
        for rank in range(ranks):
            deviation[rank] = memory * deviation[rank] + math.sqrt(1 - memory**2) * chance.gauss(0, 1)
            lasts.append(step_s * max(0.1, 1 + jitter * deviation[rank]) * (factor if rank in slow else 1.0))
        lasts[0] += sum(length for every, length in breaks if int(at / every) != int((at - step_s) / every))
        length = max(lasts) + collective_s
        yield Step(at, length, [[(0.0, one)] for one in lasts])
        at += length


def pipeline(stages: int, batches: int, *, seed: int = 0, batch_s: float = 0.05, heavy: float = 1.0) -> Iterator[Step]:
    """Each stage works on every small batch after the stage before it, and then backwards. ``heavy``: the last one."""
    chance, at = random.Random(seed), 0.0  # noqa: S311 - the same every time
    while True:
        works: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
        free = [0.0] * stages
        for is_forward in (True, False):
            order = range(stages) if is_forward else range(stages - 1, -1, -1)
            for _ in range(batches):
                ready = 0.0
                for stage in order:
                    cost_s = batch_s * (1 if is_forward else 2) * (heavy if stage == stages - 1 else 1.0)
                    begins = max(ready, free[stage])
                    free[stage] = ready = begins + cost_s * max(0.1, chance.gauss(1, 0.1))
                    works[stage].append((begins, ready))
        yield Step(at, max(free) + 0.01, works)
        at += max(free) + 0.01


def named(
    steps: Iterator[Step], ranks: int, minutes: float, *, hosts: int = 1, silent: Sequence[int] = (), seed: int = 0
) -> list[tuple[float, Straggler]]:
    """The stragglers that are found, and when: every time, however often one was named. ``silent``: hosts."""
    counters = [WaitCounter(is_alone=hosts == 1) for _ in range(hosts)]
    stragglers = Stragglers(WINDOW_S, ranks)
    of_host = [range(host * ranks // hosts, (host + 1) * ranks // hosts) for host in range(hosts)]
    found: list[tuple[float, Straggler]] = []
    shows: set[int] = set()
    step, phase, sample, at, report_at = next(steps), random.Random(seed).random(), 0, 0.0, WINDOW_S / REPORTS  # noqa: S311
    while at < minutes * 60:
        sample += 1
        at = INTERVAL_S * (sample + (phase + sample * _SPREAD) % 1.0)
        while at >= step.at + step.lasts_s:
            step = next(steps)
        since = at - step.at
        waits = [not any(begin <= since < end for begin, end in spans) for spans in step.works]
        for host, (counter, own) in enumerate(zip(counters, of_host, strict=True)):
            if hosts > 1 or host in shows or sample % RELAXED == 0:
                counter.take({rank: waits[rank] for rank in own})
        if at >= report_at:
            report_at += WINDOW_S / REPORTS
            for host, (counter, own) in enumerate(zip(counters, of_host, strict=True)):
                rows = counter.report()
                (shows.add if have_long_waits(rows) else shows.discard)(host)
                if host not in silent:
                    stragglers.take(f"node{host}", counts_from(rows, own), at)
            one = stragglers.judge(at)
            if one is None and stragglers.slow:
                one = Straggler(stragglers.slow, 0.0, 0.0, 0.0)
            if one is not None:
                found.append((at, one))
    return found
