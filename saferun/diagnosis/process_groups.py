"""The process groups of a job, as the Flight Recorders of all ranks together show them. Pure.

The name of a group does not say which one it is: up to torch 2.12 all groups of a mesh's dimension have one name, since
2.13 a group's name may differ between its ranks. So a group is its backend, its members and its description; names only
separate groups that are alike in all of that, where they are the same on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from saferun.evidence.job_evidence import CollectiveCall, GroupProgress, RankCollectives
from saferun.text.wording import ranks_text

DEFAULT_GROUP = "default_pg"
OF_GPUS = frozenset("nccl nccl2 nccl-lazy nccl-legacy ncclx rccl rcclx xccl hccl mccl".split())
"""Backends whose calls are queued on a GPU: the collectives of a group end in the order of their numbers."""
_NAMELESS = frozenset({"", "undefined"})
_BATCH = "coalesced"
_Likeness = tuple[str, ...] | tuple[str, tuple[int, ...], str]
Stream = tuple[str, int]
"""``send`` or ``recv``, and the other rank; -1: any."""


class Group:
    """One process group.

    Attributes:
        name: to be shown.
        backend: of its calls: ``nccl``.
        ranks: how far each known member is; one that has not called anything has nothing.
        unknown: members whose recorder did not answer.
        members_known: whether all members are known.
        size: how many there are, as far as is known.
        waits_in: the first collective of each rank that has begun and not ended.
        calls: the collectives of each rank by their number; a coalesced one has several.
        streams: the sends and receives of each rank, oldest first.
        description: as torch has it; the groups of one dimension of a mesh share it.
    """

    def __init__(
        self,
        name: str,
        description: str,
        ranks: Mapping[int, GroupProgress],
        known: Mapping[int, RankCollectives],
        world: Sequence[int],
    ) -> None:
        self.name = name
        self.description = description
        self.ranks = dict(ranks)
        self.backend = next((progress.group.partition(":")[0] for progress in ranks.values()), "")
        members: set[int] = set()
        positions: tuple[int, ...] = ()
        for progress in ranks.values():
            if progress.ranks and progress.ranks != positions:
                members.update(progress.ranks)
                positions = positions or progress.ranks
        is_default = description == DEFAULT_GROUP
        self.members_known = is_default or bool(members)
        if is_default:
            members.update(world)
            positions = positions or tuple(sorted(members))
        self._positions = positions
        nothing = GroupProgress("", "", (), -1, -1, -1, ())
        for rank in members - {*self.ranks}:
            if rank in known:
                self.ranks[rank] = nothing
        self.unknown = tuple(sorted(members - {*known}))
        self.size = len(members) or len(self.ranks)
        self.calls: dict[int, dict[int, list[CollectiveCall]]] = {}
        self.streams: dict[int, dict[Stream, list[CollectiveCall]]] = {}
        for rank, progress in self.ranks.items():
            self._sort(rank, progress.calls)
        if any(self.streams.values()):
            self._without_statuses()
        self.waits_in = {
            rank: _next_known(progress.completed, self.calls[rank])
            for rank, progress in self.ranks.items()
            if progress.completed < progress.enqueued
        }

    def _sort(self, rank: int, calls: Iterable[CollectiveCall]) -> None:
        collectives: dict[int, list[CollectiveCall]] = {}
        streams: dict[Stream, list[CollectiveCall]] = {}
        for call in calls:
            if not call.is_p2p:
                collectives.setdefault(call.seq, []).append(call)
                continue
            stream = self._stream(call.op)
            if stream is not None:
                streams.setdefault(stream, []).append(call)
        self.calls[rank] = collectives
        self.streams[rank] = streams

    def _without_statuses(self) -> None:
        """Where there are sends, a rank's status without its calls has the numbers of whatever came last."""
        for rank, progress in self.ranks.items():
            if not self.calls[rank] and progress.enqueued >= 0:
                self.ranks[rank] = progress._replace(enqueued=-1, completed=-1)

    def _stream(self, op: str) -> Stream | None:
        do, _, positions = op.partition(" ")
        _, arrow, other = positions.partition("->" if do == "send" else "<-")
        if do not in {"send", "recv"} or not arrow:
            return None
        position = int(other[:9]) if other.isascii() and other.isdecimal() else len(self._positions)
        return do, self._positions[position] if position < len(self._positions) else -1

    def call(self, rank: int, seq: int) -> CollectiveCall | None:
        """What a rank called under a number; of a coalesced call, the first."""
        calls = self.calls.get(rank, {}).get(seq)
        return calls[0] if calls else None

    def op(self, seq: int, ranks: Iterable[int]) -> str:
        """What the ranks called under that number; empty where it is not known."""
        return next((call.op for rank in ranks if (call := self.call(rank, seq)) is not None), "")

    def is_open(self, rank: int, seq: int) -> bool:
        """Whether a rank has begun a collective that has not ended."""
        return self.ranks[rank].completed < seq <= self.ranks[rank].enqueued


def groups_of(known: Mapping[int, RankCollectives], world: Sequence[int]) -> list[Group]:
    """The groups of a job, in the order in which the first ranks have them.

    Args:
        known: the recorders that answered, by rank.
        world: all ranks of the job that may take part.
    """
    alike: dict[_Likeness, dict[int, list[GroupProgress]]] = {}
    for rank in sorted(known):
        for progress in known[rank].groups:
            alike.setdefault(_likeness(progress), {}).setdefault(rank, []).append(progress)
    separate = [ranks for by_rank in alike.values() for ranks in _separate(by_rank)]
    firsts = [next(iter(ranks.values())) for ranks in separate]
    names = [_bare_name(first) for first in firsts]
    counts = Counter(names)
    members = [(name, tuple(sorted(first.ranks))) for name, first in zip(names, firsts, strict=True)]
    alike_in_both = Counter(members)
    shown = [
        name if counts[name] == 1 else f"{name} ({_distinction(first, alike_in_both[name, ranks] == 1)})"
        for (name, ranks), first in zip(members, firsts, strict=True)
    ]
    return [
        Group(name, first.description, ranks, known, world)
        for name, first, ranks in zip(shown, firsts, separate, strict=True)
    ]


def _likeness(progress: GroupProgress) -> _Likeness:
    backend, colon, name = progress.group.partition(":")
    description = "" if progress.description in _NAMELESS else progress.description
    if description == DEFAULT_GROUP:
        return (backend, description)
    if progress.ranks and colon:
        return (backend, tuple(sorted(progress.ranks)), description)
    return (backend, colon, name, description)


def _separate(by_rank: dict[int, list[GroupProgress]]) -> list[dict[int, GroupProgress]]:
    """Groups of the same backend, members and description: by their names, or in the order in which they were made."""
    if all(len(groups) == 1 for groups in by_rank.values()):
        return [{rank: groups[0] for rank, groups in by_rank.items()}]
    most = max(len(groups) for groups in by_rank.values())
    names = {frozenset(group.group for group in groups) for groups in by_rank.values() if len(groups) == most}
    found: dict[object, dict[int, GroupProgress]] = {}
    for rank, groups in by_rank.items():
        for index, group in enumerate(sorted(groups, key=lambda one: one.number)):
            found.setdefault(group.group if len(names) == 1 else index, {}).setdefault(rank, group)
    return [*found.values()]


def _bare_name(progress: GroupProgress) -> str:
    if progress.description in _NAMELESS and ":" in progress.group:
        return progress.group.partition(":")[2]
    return progress.description or progress.group


def _distinction(progress: GroupProgress, by_members: bool) -> str:  # noqa: FBT001 - one way or the other
    """What distinguishes groups that are shown by one name: their members; else the group's own name and backend."""
    if by_members and progress.ranks and progress.description != DEFAULT_GROUP:
        return ranks_text(sorted(progress.ranks))
    return progress.group


def _next_known(completed: int, calls: Mapping[int, object]) -> int:
    """The first call after those that are complete; some numbers are used up by calls that are not recorded."""
    return min((seq for seq in calls if seq > completed), default=completed + 1)


def is_batch(call: CollectiveCall) -> bool:
    """Whether it only stands for the calls of a batch."""
    return call.op == _BATCH
