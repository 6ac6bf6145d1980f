"""Finds stragglers, ranks that the others wait for: samples of which ranks wait go in, a statistic comes out. Pure.

Ranks that work in step wait for the slowest. A rank that is slower than the others by a third hardly ever waits, while
each of the others waits for a quarter of the time; equally fast ranks wait equally long. So ranks are compared by the
share of samples in which they wait. That needs no common clock: each host counts by itself, and the leader compares.

Every wait is one observation, however long it lasts. The variance of a rank's waiting time is then the sum of the
squares of its waits: many short waits, one per step, are significant; a few long ones, while rank 0 evaluates or writes
a checkpoint, are not. Work that is harder now on one rank and then on another shows as variance between blocks of a few
seconds. The larger of the two variances counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from saferun.model import Value
from saferun.text.decoding import MALFORMED, number

SPANS = (1, 3, 10)
"""The windows over which ranks are compared, as multiples of the shortest: long steps need the longer ones."""
REPORTS = 4
"""How many reports a host makes in the shortest window."""
# The others must wait longer than the straggler by this share of the time. A tenth is usual if work differs from step
# to step, or if one rank also writes the log.
_LEAST_LAG = 0.15
# The difference must exceed so many standard deviations: ranks are compared four times a minute, for weeks.
_SIGMAS = 5.0
_LEAST_SAMPLES = 60
# The gap from the straggler to the next rank is at least this fraction of the gap to the median: the others are alike.
_CLEAR = 0.5
# At most one rank in so many is slow; if more are, they are a part of the job that does something else.
_SLOW_SHARE = 8
# Ranks are compared only if at least this share of them is known.
_KNOWN_SHARE = 0.9
# The same straggler is reported again after this time, then after twice as long, and so on up to so many times as long.
_REPEAT_S = 600.0
_REPEAT_AT_MOST = 16
# A rank that waits for a smaller share of its time than this is not worth a closer look.
_LITTLE = 0.1
_MOST_SAMPLES = 1 << 20
_BLOCK = 25
_FIELDS = len(("rank", "samples", "waits", "squares", "blocks", "block_squares"))


class WaitCount(Value):
    """How often one rank waited in the samples of some time.

    Attributes:
        rank: its number in the job.
        samples: in how many it was seen, without those of a wait that has not ended.
        waits: in how many of these it waited.
        squares: the sum of the squares of the lengths of its waits, in samples.
        blocks: into how many blocks the time is divided.
        block_squares: the sum of the squares of the samples in which it waited, per block.
    """

    rank: int
    samples: int
    waits: int
    squares: int
    blocks: int
    block_squares: int

    @property
    def share(self) -> float:
        """The share of the time for which it waited."""
        return self.waits / self.samples if self.samples else 0.0

    @property
    def variance(self) -> float:
        """Of the share."""
        if not self.samples:
            return 0.0
        between_blocks = self.block_squares - self.waits**2 / max(self.blocks, 1)
        return max(self.squares, between_blocks) / self.samples**2


class Straggler(Value):
    """Ranks that the others wait for.

    Attributes:
        ranks: they; all ranks of a host, where the host is slow.
        waited: the share of the time for which they waited themselves.
        others_waited: the same of the others, the median.
        window_s: over how long.
        by: what they were found by: ``samples`` of their main threads, or from their Flight Recorders ``durations`` of
            collectives, or when they made their ``calls``.
    """

    ranks: tuple[int, ...]
    waited: float
    others_waited: float
    window_s: float
    by: str = "samples"


class WaitCounter:
    """Counts the waits of this host's ranks.

    Args:
        is_alone: whether all ranks of the job are on this host. Then samples in which all of them wait do not count:
            that is the time of the collective itself. With ranks elsewhere it is unknown whether all wait.
    """

    def __init__(self, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        self._runs: dict[int, int] = {}  # the lengths of waits that have not ended
        self._counts: dict[int, _Counts] = {}
        self._block = 0  # how many samples are in the current block
        self._blocks = 0  # how many blocks have ended since the last report
        self._reported = -1  # the rank that was reported last

    def take(self, waiting: Mapping[int, bool], times: int = 1) -> None:
        """Take a sample: which ranks wait. ``times``: the weight of a sample in which no rank waits."""
        if self._is_alone and all(waiting.values()):
            return
        for rank, waits in waiting.items():
            if waits:
                self._runs[rank] = self._runs.get(rank, 0) + 1
                continue
            length = self._runs.pop(rank, 0) if self._runs else 0
            counts = self._counts.get(rank)
            if counts is None:
                counts = self._counts[rank] = _Counts()
            counts.total += times + length
            counts.squares_of_block += length * length
            counts.block += length
        self._block += times
        if self._block >= _BLOCK:
            self._end_block()

    def _end_block(self) -> None:
        self._block = 0
        self._blocks += 1
        for counts in self._counts.values():
            counts.end_block()

    def forget(self) -> None:
        """Drop what was counted since the last report."""
        self._runs.clear()
        self._counts.clear()

    def drop(self, rank: int) -> None:
        """A rank has ended."""
        self._runs.pop(rank, None)
        self._counts.pop(rank, None)

    def report(self, most: int = 1 << 20) -> list[list[int]]:
        """The counts since the last report of the same ranks, as ``counts_from`` reads them.

        Args:
            most: of how many ranks; if there are more, they take turns.
        """
        # A block of a few samples next to whole ones would look like work that is harder now and then.
        if self._block >= _BLOCK / 2 or not self._blocks:
            self._end_block()
        self._blocks = 0
        counted = (rank for rank, counts in self._counts.items() if counts.samples)
        ranks = sorted(counted, key=lambda rank: (rank <= self._reported, rank))[:most]
        self._reported = ranks[-1] if ranks else -1
        return [[rank, *self._counts[rank].report()] for rank in sorted(ranks)]


class _Counts:
    """The counts of a rank since the last report, up to the last whole block, and those of the current block."""

    __slots__ = ("block", "block_squares", "blocks", "samples", "squares", "squares_of_block", "total", "waits")

    def __init__(self) -> None:
        self.samples = self.waits = self.squares = self.blocks = self.block_squares = 0
        self.total = self.block = self.squares_of_block = 0

    def end_block(self) -> None:
        self.samples += self.total
        self.waits += self.block
        self.squares += self.squares_of_block
        self.block_squares += self.block * self.block
        self.blocks += 1
        self.total = self.block = self.squares_of_block = 0

    def report(self) -> list[int]:
        """What there is, which then counts no more."""
        found = [self.samples, self.waits, self.squares, self.blocks, self.block_squares]
        self.samples = self.waits = self.squares = self.blocks = self.block_squares = 0
        return found


def empty_rows(ranks: Iterable[int]) -> list[list[int]]:
    """A report that makes the leader forget earlier reports of these ranks: they cannot be compared."""
    return [[rank, *[0] * (_FIELDS - 1)] for rank in ranks]


def have_long_waits(rows: Iterable[Sequence[int]]) -> bool:
    """Whether a rank of a report waited long enough that counting more often is worth its cost."""
    return any(row[2] >= _LITTLE * row[1] for row in rows if row[1])


def differ(rows: Iterable[Sequence[int]], *, is_alone: bool) -> bool:
    """Whether some ranks of a report may wait for another one, which does not wait.

    Args:
        rows: of the report.
        is_alone: whether all ranks of the job are on this host. If not, the one that they wait for may be elsewhere.
    """
    shares = [row[2] / row[1] for row in rows if row[1]]
    if not shares:
        return False
    return max(shares) - min(shares) >= _LITTLE / 2 if is_alone else _LITTLE <= max(shares) <= 1.0 - _LITTLE


def counts_from(raw: object, own: Collection[int]) -> tuple[WaitCount, ...]:
    """The counts that a host has reported, without malformed ones.

    Args:
        raw: the report.
        own: the ranks that it may report.
    """
    if not isinstance(raw, list):
        return ()
    found: dict[int, WaitCount] = {}
    for row in raw[: len(own)]:
        if not isinstance(row, list) or len(row) != _FIELDS:
            continue
        try:
            count = WaitCount(*(number(value, 0, _MOST_SAMPLES**2) for value in row))
        except MALFORMED:
            continue
        if count.rank in own and count.waits <= count.samples <= _MOST_SAMPLES:
            # A sum of squares below the number of waits is impossible.
            found[count.rank] = count._replace(squares=max(count.squares, count.waits))
    return tuple(found.values())


class Stragglers:
    """Compares the ranks of the whole job.

    Args:
        window_s: the shortest time over which they are compared.
        ranks: how many there are.
        report_s: the time that one report of a host covers; None: a part of the window.
    """

    def __init__(self, window_s: float, ranks: int, *, report_s: float | None = None) -> None:
        self.window_s = window_s
        self._report_s = window_s / REPORTS if report_s is None else report_s
        self._ranks = ranks
        self._reports: dict[int, deque[tuple[float, WaitCount]]] = {}
        self._hosts: dict[int, str] = {}
        self._began = float("inf")
        self.slow: tuple[int, ...] = ()
        """Those that the others wait for, as ``judge`` found last."""
        self._named: tuple[int, ...] = ()
        self._times = 0
        self._quiet_until = float("-inf")

    @property
    def by(self) -> str:
        """What ranks are compared by: see ``Straggler.by``."""
        return "samples"

    def take(self, host: str, counts: Iterable[WaitCount], now: float) -> None:
        """Take a host's report. A rank without samples in it cannot be compared: its earlier reports are dropped."""
        self._began = min(self._began, now - self._report_s)
        for count in counts:
            if not count.samples:
                self._reports.pop(count.rank, None)
                continue
            reports = self._reports.setdefault(count.rank, deque(maxlen=REPORTS * SPANS[-1]))
            reports.append((now, count))
            self._hosts[count.rank] = host

    def forget(self) -> None:
        """The job hangs, or was stopped: drop what was counted until now."""
        self._reports.clear()
        self._began = float("inf")
        self.slow = ()

    def judge(self, now: float) -> Straggler | None:
        """The ranks that the others wait for, if it is time to name them."""
        compared = (self._compare(now, span * self.window_s) for span in SPANS)
        found = next((one for one in compared if one is not None), None)
        self.slow = found.ranks if found is not None else ()
        if found is None or now < self._quiet_until:
            return None
        self._times = min(self._times * 2, _REPEAT_AT_MOST) if found.ranks == self._named else 1
        self._named = found.ranks
        self._quiet_until = now + _REPEAT_S * self._times
        return found

    def counts(self, now: float, window_s: float) -> dict[int, WaitCount]:
        """The sums of each rank's counts in a window."""
        found = {}
        for rank, reports in self._reports.items():
            recent = [count for at, count in reports if at > now - window_s]
            if recent:
                found[rank] = WaitCount(rank, *(sum(values) for values in list(zip(*recent, strict=True))[1:]))
        return found

    def last_of(self, rank: int, most: int) -> list[WaitCount]:
        """The newest reports of a rank, the last one first."""
        return [count for _, count in list(self._reports.get(rank, ()))[: -most - 1 : -1]]

    def _compare(self, now: float, window_s: float) -> Straggler | None:
        counts = [count for count in self.counts(now, window_s).values() if count.samples >= _LEAST_SAMPLES]
        if len(counts) < max(2, self._ranks * _KNOWN_SHARE):
            return None
        counts.sort(key=lambda count: count.share)
        recent = self.counts(now, self.window_s)
        found = [one for part in self._parts(counts) if (one := self._slow_ones(part, recent)) is not None]
        if len(found) != 1:
            return None  # with several candidates it is unknown which one the others wait for
        ((slow, rest),) = found
        return Straggler(
            tuple(sorted(count.rank for count in slow)),
            max(count.share for count in slow),
            _median(rest).share,
            min(window_s, now - self._began),
            self.by,
        )

    def _parts(self, counts: Sequence[WaitCount]) -> Iterable[Sequence[WaitCount]]:
        """The groups in which ranks can be compared: one of all. Each is sorted by share, as the argument is."""
        return (counts,)

    def _is_enough(self, _slow: Sequence[WaitCount], _rest: Sequence[WaitCount]) -> bool:
        """Whether enough is known of these ranks to name the slow ones."""
        return True

    def _slow_ones(
        self, counts: Sequence[WaitCount], recent: Mapping[int, WaitCount]
    ) -> tuple[Sequence[WaitCount], Sequence[WaitCount]] | None:
        """The ranks that the others wait for, and the others; None: there are no such ranks."""
        for slow in self._candidates(counts) if len(counts) > 1 else ():
            rest = [count for count in counts if count not in slow]
            if _stands_out(slow, rest) and _is_so_still(slow, rest, recent) and self._is_enough(slow, rest):
                return slow, rest
        return None

    def _candidates(self, counts: Sequence[WaitCount]) -> list[list[WaitCount]]:
        """Sets of ranks that may be the slow ones: those that wait least, and all ranks of the host of the first."""
        most = max(1, len(counts) // _SLOW_SHARE)
        found = [list(counts[:size]) for size in range(1, most + 1)]
        lowest = self._hosts[counts[0].rank]
        of_host = [count for count in counts if self._hosts[count.rank] == lowest]
        if any(host != lowest for host in self._hosts.values()) and most < len(of_host) < len(counts):
            found.append(of_host)
        return found


def _stands_out(slow: Sequence[WaitCount], rest: Sequence[WaitCount]) -> bool:
    """Whether these ranks wait far less than all others, and the others about equally long."""
    typical, highest, next_one = _median(rest), max(slow, key=lambda count: count.share), rest[0]
    lag = typical.share - highest.share
    return (
        lag >= _LEAST_LAG
        and next_one.share - highest.share >= _CLEAR * lag
        and lag >= _SIGMAS * (typical.variance + highest.variance) ** 0.5
    )


def _is_so_still(slow: Sequence[WaitCount], rest: Sequence[WaitCount], recent: Mapping[int, WaitCount]) -> bool:
    """Whether what a longer window shows also holds for the most recent reports."""
    late = [recent[count.rank].share for count in slow if count.rank in recent]
    others = sorted(recent[count.rank].share for count in rest if count.rank in recent)
    return bool(late and others) and others[len(others) // 2] - max(late) >= _LEAST_LAG / 2


def _median(counts: Sequence[WaitCount]) -> WaitCount:
    """The median of counts that are sorted by share."""
    return counts[len(counts) // 2]
