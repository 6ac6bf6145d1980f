"""Whose Flight Recorders a report has, where there is not room for those of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from saferun.evidence.job_evidence import GroupProgress, RankCollectives


def telling_first(recorders: Sequence[RankCollectives], culprits: Collection[int]) -> list[RankCollectives]:
    """The ranks in the order in which they say something new.

    First those that are blamed, then each rank in which a process group stands where no rank before it stood: so all
    groups are there as soon as possible, with every place that their ranks have come to. Then the others.

    Args:
        recorders: in order of rank.
        culprits: the ranks that are blamed.
    """
    blamed = [one for one in recorders if one.rank in culprits]
    seen = {state for one in blamed for state in _states(one)}
    telling: list[RankCollectives] = []
    others: list[RankCollectives] = []
    for one in recorders:
        if one.rank in culprits:
            continue
        states = {*_states(one)}
        (telling if states - seen else others).append(one)
        seen |= states
    return [*blamed, *telling, *others]


def _states(recorder: RankCollectives) -> Iterator[tuple[object, ...]]:
    """Where a rank stands in each of its groups."""
    return (_state(group) for group in recorder.groups)


def _state(group: GroupProgress) -> tuple[object, ...]:
    last = group.calls[-1] if group.calls else None
    call = (last.seq, last.op, last.sizes, last.retired, last.failed) if last is not None else None
    return group.group, group.enqueued, group.started, group.completed, call
