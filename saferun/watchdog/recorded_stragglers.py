"""Which rank that uses a GPU the others wait for, by what their Flight Recorders say. Pure.

What is compared is as in ``watchdog.stragglers``: the share of the time for which each rank waits, which its host
counts for itself (``captures.recorder_waits``). What differs: a report comes every few minutes and has what a recorder
holds, so that ranks are named by four reports at least; and the stages of a pipeline are compared each for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from saferun.text.decoding import MALFORMED, number
from saferun.watchdog.stragglers import REPORTS, Straggler, Stragglers, WaitCount, counts_from

_FIELDS = 7  # before the groups
_MOST_GROUPS = 4
_REPORTS_AT_LEAST = 4
_LEAST_FACTOR = 3.0
_LEAST_APART = 0.05


def recorded_rows(raw: object) -> list[list[object]]:
    """Those rows of a report that come from Flight Recorders."""
    return [row for row in raw if isinstance(row, list) and len(row) >= _FIELDS] if isinstance(raw, list) else []


class RecordedStragglers(Stragglers):
    """Compares the ranks of the whole job.

    Args:
        interval_s: between two reports of a host.
        ranks: how many there are.
    """

    def __init__(self, interval_s: float, ranks: int) -> None:
        # The shortest window has the last four reports and a little more: hosts report at different moments.
        super().__init__(interval_s * (_REPORTS_AT_LEAST + 0.5), ranks, report_s=interval_s)
        self._groups: dict[int, tuple[int, ...]] = {}
        self._measured: dict[int, bool] = {}

    def take_rows(self, host: str, raw: Sequence[list[object]], own: Collection[int], now: float) -> None:
        """Take a host's report. ``own``: the ranks that it may report."""
        counts = counts_from([row[: _FIELDS - 1] for row in raw], own)
        known = {count.rank for count in counts}
        for row in raw:
            try:
                rank, *groups = (number(value) for value in [row[0], *row[_FIELDS:][:_MOST_GROUPS]])
            except MALFORMED:
                continue
            if rank in known:
                self._groups[rank] = tuple(groups)
                self._measured[rank] = row[_FIELDS - 1] == 1
        self.take(host, counts, now)

    @property
    def by(self) -> str:
        """What ranks are compared by: durations, where those were measured on all GPUs."""
        return "durations" if all(self._measured.values()) else "calls"

    def _parts(self, counts: Sequence[WaitCount]) -> Iterable[list[WaitCount]]:
        """Ranks that have the same part in the job: those that share groups, directly or by others."""
        first: dict[int, int] = {}  # of a group: the part that it is in
        parts: dict[int, list[WaitCount]] = {}
        for count in counts:
            groups = self._groups.get(count.rank, ())
            joined = sorted({first[group] for group in groups if group in first})
            own = [count, *(member for part in joined for member in parts.pop(part))]
            name = count.rank if groups else -1
            if not groups:
                own = [*parts.pop(-1, []), count]
            parts[name] = own
            for group, part in first.items():
                if part in joined:
                    first[group] = name
            first |= dict.fromkeys(groups, name)
        return [sorted(part, key=lambda count: (count.share, count.rank)) for part in parts.values()]

    def _is_enough(self, slow: Sequence[WaitCount], rest: Sequence[WaitCount]) -> bool:
        """Whether each of the last reports alone shows the same.

        Ranks whose CPUs run ahead of their GPUs may be behind the others for some seconds at random, while nothing
        waits for them in the end. The rank that is always last waits next to never.
        """
        behind, ahead = ([self.last_of(count.rank, _REPORTS_AT_LEAST) for count in part] for part in (slow, rest))
        if any(len(reports) < _REPORTS_AT_LEAST for reports in (*behind, *ahead)):
            return False
        for index in range(_REPORTS_AT_LEAST):
            highest = max(reports[index].share for reports in behind)
            others = sorted(reports[index].share for reports in ahead)
            if highest * _LEAST_FACTOR > others[len(others) // 2] or highest + _LEAST_APART > others[0]:
                return False
        return True


__all__ = ["REPORTS", "RecordedStragglers", "Straggler", "recorded_rows"]
