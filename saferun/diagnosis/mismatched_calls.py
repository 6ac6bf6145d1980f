"""Ranks that made different calls under the same number of a process group. Pure.

Who is the odd one is put to the vote: first of the group, and where that is a tie, of the groups that are made alike
(the other replicas of a tensor-parallel pair), which make the same calls under the same numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from saferun.diagnosis.process_groups import DEFAULT_GROUP, Group, is_batch
from saferun.evidence.job_evidence import CollectiveCall
from saferun.model import Value
from saferun.text.decoding import loads
from saferun.text.wording import ranks_text

_EQUAL_SIZES = frozenset(
    set(
        """
        all_reduce broadcast reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor
    """.split()
    )
)
"""In these every rank hands in as many elements as every other. In scatter, gather and all_to_all they need not."""
_ROOTED = {"gather": "output_sizes", "scatter": "sizes"}
"""In these only the root has tensors on that side, which shows who it is."""
_LIKE_NCCL = frozenset({"nccl", "rccl", "xccl"})
"""Backends that record what the root has as the output of both, and of the other ranks one undefined tensor there."""
_UNDEFINED = (0,)
_LONGEST_SIZES = 4096
_SIZES_SHOWN = 60
_Kind = tuple[object, ...]


class MismatchedCall(Value):
    """Ranks that made another call than the others under the same number.

    ``ranks`` are those in the minority. Where there is none, they are all that made any of the calls, and ``is_tie``.
    ``calls``: who made which, the most common first.
    """

    group: str
    seq: int
    ranks: tuple[int, ...]
    is_tie: bool
    calls: tuple[tuple[tuple[int, ...], CollectiveCall], ...]
    message: str


def first_mismatch(group: Group, alike: Iterable[Group] = ()) -> list[MismatchedCall]:
    """The first number under which different calls were made; what follows it is out of step anyway.

    Args:
        group: whose calls are compared.
        alike: groups that are made alike on other ranks.
    """
    if not group.waits_in:
        return []  # whatever they called, it has worked
    by_seq: dict[int, dict[int, CollectiveCall]] = {}
    for rank, calls in group.calls.items():
        for seq, members in calls.items():
            if len(members) == 1 and not is_batch(members[0]):  # a coalesced call has several members
                by_seq.setdefault(seq, {})[rank] = members[0]
    for seq, made in sorted(by_seq.items()):
        found = _roots_differ(group, seq, made) or _kinds_differ(group, seq, made, alike)
        if found:
            return found
    return []


def _kinds_differ(
    group: Group, seq: int, made: Mapping[int, CollectiveCall], alike: Iterable[Group]
) -> list[MismatchedCall]:
    if len({(call.op, call.sizes, call.output_sizes, call.dtypes) for call in made.values()}) < 2:  # noqa: PLR2004
        return []
    is_over = all(call.retired for call in made.values())
    how = _how_to_compare(made.values(), is_over=is_over)
    parties: dict[_Kind, list[int]] = {}
    for rank, call in sorted(made.items()):
        parties.setdefault(how(call), []).append(rank)
    if len(parties) < 2:  # noqa: PLR2004 - two sides
        return []
    votes = {kind: len(ranks) for kind, ranks in parties.items()}
    most = max(votes.values())
    if list(votes.values()).count(most) > 1:
        for other in alike:
            for calls in other.calls.values() if other is not group else ():
                theirs = calls.get(seq, ())
                kind = how(theirs[0]) if len(theirs) == 1 else ()
                if kind in votes:
                    votes[kind] += 1
        most = max(votes.values())
    ordered = sorted(parties, key=lambda kind: (-votes[kind], parties[kind]))
    is_tie = list(votes.values()).count(most) > 1
    return _mismatches(group, seq, [parties[kind] for kind in ordered], made, is_tie=is_tie)


class _Comparison:
    """What of a call counts.

    Args:
        with_sizes: whether the numbers of elements do.
        with_types: whether the types do.
    """

    def __init__(self, *, with_sizes: bool, with_types: bool) -> None:
        self._with_sizes = with_sizes
        self._with_types = with_types

    def __call__(self, call: CollectiveCall) -> _Kind:
        sizes = elements_of(call.sizes) if self._with_sizes else ()
        return (call.op, sizes, call.dtypes if self._with_types else "")


def _how_to_compare(calls: Iterable[CollectiveCall], *, is_over: bool) -> _Comparison:
    """Sizes count where all made the same call, and it is one in which they have to be equal; types likewise.

    Different types of the same size go through: then they are no reason to wait.
    """
    made = list(calls)
    is_same = len({call.op for call in made}) == 1
    sized = is_same and made[0].op in _EQUAL_SIZES and all(elements_of(call.sizes) is not None for call in made)
    typed = is_same and not is_over and made[0].op not in _ROOTED and all(call.dtypes for call in made)
    return _Comparison(with_sizes=sized, with_types=typed)


def _roots_differ(group: Group, seq: int, made: Mapping[int, CollectiveCall]) -> list[MismatchedCall]:
    """A gather or scatter of which not exactly one rank is the root."""
    ops = {call.op for call in made.values()}
    side = _ROOTED.get(next(iter(ops))) if len(ops) == 1 else None
    if side is None or len(made) < group.size or group.unknown or all(call.retired for call in made.values()):
        return []
    if not all(call.sizes and call.output_sizes for call in made.values()):
        return []  # sizes are not known
    if group.backend in _LIKE_NCCL:
        tensors = {rank: elements_of(call.output_sizes) for rank, call in made.items()}
        found = [rank for rank, elements in tensors.items() if elements not in {(), _UNDEFINED}]
        if None in tensors.values():
            return []
    else:
        found = [rank for rank, call in made.items() if getattr(call, side) not in {"", "[]"}]
    roots = tuple(sorted(found))
    if len(roots) == 1:
        return []
    op = next(iter(ops))
    who = f"{ranks_text(roots)} each call themselves" if roots else "no rank is"
    message = f"{who} the root of {op}, collective {seq} of group {group.name}"
    ranks = roots or tuple(sorted(made))
    return [MismatchedCall(group.name, seq, ranks, True, ((ranks, made[ranks[0]]),), message)]


def _mismatches(
    group: Group, seq: int, parties: list[list[int]], made: Mapping[int, CollectiveCall], *, is_tie: bool
) -> list[MismatchedCall]:
    calls = tuple((tuple(ranks), made[ranks[0]]) for ranks in parties)
    typed = len({(call.op, call.sizes) for _, call in calls}) < len(calls)
    if is_tie:
        message = " and ".join(f"{ranks_text(ranks)} called {_call_text(call, typed=typed)}" for ranks, call in calls)
        all_ranks = tuple(sorted(rank for ranks in parties for rank in ranks))
        return [
            MismatchedCall(
                group.name, seq, all_ranks, True, calls, f"{message} as collective {seq} of group {group.name}"
            )
        ]
    usual_ranks, usual = calls[0]
    return [
        MismatchedCall(
            group.name,
            seq,
            ranks,
            False,
            calls,
            f"{ranks_text(ranks)} called {_call_text(call, typed=typed)} as collective {seq} of group {group.name} "
            f"where {ranks_text(usual_ranks)} called {_call_text(usual, typed=typed)}",
        )
        for ranks, call in calls[1:]
    ]


def left_out(group: Group, others: Iterable[Group], alike: Iterable[Group]) -> tuple[int, ...]:
    """Members that have made another number of calls in a group before a call that all of them made elsewhere.

    Args:
        group: whose calls are counted.
        others: groups in which its members make calls as well.
        alike: groups that are made alike on other ranks.
    """
    for anchor in others:
        if anchor is group or not group.ranks.keys() <= anchor.ranks.keys():
            continue
        seq = min(anchor.ranks[rank].enqueued for rank in group.ranks)
        counts = {rank: _calls_before(group, anchor, rank, seq) for rank in group.ranks}
        parties: dict[int, list[int]] = {}
        for rank, count in sorted(counts.items()):
            parties.setdefault(count, []).append(rank)
        if -1 in parties or len(parties) < 2:  # noqa: PLR2004 - two sides
            continue
        votes = {count: len(ranks) for count, ranks in parties.items()}
        if list(votes.values()).count(max(votes.values())) > 1:
            for other in alike:
                for rank in other.ranks.keys() & anchor.ranks.keys() if other is not group else ():
                    count = _calls_before(other, anchor, rank, seq)
                    if count in votes:
                        votes[count] += 1
        most = max(votes.values())
        if list(votes.values()).count(most) == 1:
            return tuple(sorted(rank for count, ranks in parties.items() if votes[count] < most for rank in ranks))
    return ()


def _calls_before(group: Group, anchor: Group, rank: int, seq: int) -> int:
    """The last number of a group before a call in another; -1 where it is not known."""
    call = anchor.call(rank, seq)
    if call is None or call.order < 0:
        return -1
    own = [one for calls in group.calls[rank].values() for one in calls if one.order >= 0]
    before = [one.seq for one in own if one.order < call.order]
    if before:
        return max(before)
    if own:
        return min(one.seq for one in own) - 1
    is_young = any(1 in calls for calls in group.calls.values())
    return 0 if group.ranks[rank].enqueued < 0 and is_young else -1


def groups_alike(groups: Sequence[Group]) -> dict[int, list[Group]]:
    """For each group, by its index, all of the same description and size, itself among them."""
    by_kind: dict[tuple[str, int], list[int]] = {}
    for index, group in enumerate(groups):
        if group.description not in {"", "undefined", DEFAULT_GROUP}:
            by_kind.setdefault((group.description, group.size), []).append(index)
    alike: dict[int, list[Group]] = {}
    for indexes in by_kind.values():
        together = [groups[index] for index in indexes]
        alike.update(dict.fromkeys(indexes, together))
    return alike


@functools.lru_cache(maxsize=4096)
def elements_of(sizes: str) -> tuple[int, ...] | None:
    """How many elements each tensor has: ``[[2, 3], [4]]`` -> ``(6, 4)``; None where it is not known."""
    try:
        shapes = loads(sizes, longest=_LONGEST_SIZES)
        return tuple(math.prod(_dimension(size) for size in shape) for shape in shapes)
    except (ValueError, TypeError):
        return None


def _dimension(size: object) -> int:
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise ValueError("no size")
    return size


def _call_text(call: CollectiveCall, *, typed: bool) -> str:
    """``all_reduce of shape [4, 8], Float``."""
    types = call.dtypes.partition(" -> ")[0] if typed else ""
    if call.sizes in {"", "[]"}:
        return f"{call.op} of {types}" if types else call.op
    shapes = call.sizes if len(call.sizes) <= _SIZES_SHOWN else call.sizes[:_SIZES_SHOWN] + "…"
    is_one = shapes.startswith("[[") and shapes.endswith("]]") and shapes.count("[") == 2  # noqa: PLR2004 - and its list
    return f"{call.op} of {f'shape {shapes[1:-1]}' if is_one else f'shapes {shapes}'}{f', {types}' if types else ''}"
