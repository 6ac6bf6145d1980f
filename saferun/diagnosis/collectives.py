"""The Flight Recorders of all ranks compared: which ranks called something else, which did not call. Pure.

A process group numbers its collectives. Ranks that belong together give the same number to the same call, so that a
rank that took another path through the code shows in the first number where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from saferun.evidence import CollectiveCall, GroupProgress, RankCollectives
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
_LONGEST_SIZES = 4096
_DEFAULT_GROUP = "default_pg"
_NAMELESS = {"", "undefined"}
_SIZES_SHOWN = 60


# ------------------------------------------------------------------------------------------------------------- findings


class Mismatch(Value):
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


class Missing(Value):
    """Ranks that have not called a collective that others wait in.

    ``op`` is empty where the call is not known. ``behind``: how many calls the one that is furthest has made since.
    ``elsewhere`` are those of ``ranks`` that wait in a collective of another group.
    """

    group: str
    seq: int
    op: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    behind: int
    elsewhere: tuple[int, ...]
    message: str


class Stuck(Value):
    """A collective that all known ranks have called, and that does not end on ``waiting``.

    ``unknown`` are members of the group whose recorder did not answer; ``completed`` those on which it has ended.
    """

    group: str
    seq: int
    op: str
    waiting: tuple[int, ...]
    completed: tuple[int, ...]
    unknown: tuple[int, ...]
    message: str


class Unpaired(Value):
    """A rank that waits in a ``send`` or ``recv`` of which the other end, ``peer``, knows nothing."""

    group: str
    rank: int
    peer: int
    op: str
    message: str


class Waiting(Value):
    """The collective that a rank is in: the first that it has called and that has not ended. ``op`` as in Missing."""

    rank: int
    group: str
    seq: int
    op: str


class GroupStand(Value):
    """How far the ranks of one process group are: ``(rank, enqueued, completed)`` each, -1 for nothing yet.

    ``unknown`` are members whose recorder did not answer; ``members_known`` is whether all are known.
    """

    group: str
    progress: tuple[tuple[int, int, int], ...]
    unknown: tuple[int, ...]
    members_known: bool


class CollectiveFindings(Value):
    """What :func:`compare` has found. ``unavailable`` are ranks of whose collectives nothing is known."""

    groups: tuple[GroupStand, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    missing: tuple[Missing, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    unpaired: tuple[Unpaired, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    unavailable: tuple[int, ...] = ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that hold up the others: who called something else; else who did not call.

        One that did not call because it waits in another group is held up itself, unless all of them are.
        """
        odd = {rank for mismatch in self.mismatched for rank in mismatch.ranks}
        absent = {rank for missing in self.missing for rank in missing.ranks}
        held_up = {rank for missing in self.missing for rank in missing.elsewhere}
        return tuple(sorted(odd or absent - held_up or absent or {wait.peer for wait in self.unpaired}))

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each finding, the most important first."""
        return (
            *(mismatch.message for mismatch in self.mismatched),
            *(missing.message for missing in self.missing),
            *(unpaired.message for unpaired in self.unpaired),
            *(stuck.message for stuck in self.stuck),
        )


# ------------------------------------------------------------------------------------------------------------ comparing


def compare(collectives: Sequence[RankCollectives], world: Sequence[int]) -> CollectiveFindings:
    """What keeps ranks waiting in collectives.

    It is a picture of one moment: while a job is well, ranks are apart by a few calls too. Ask once nothing moves.

    Args:
        collectives: what is known, of some ranks or all.
        world: all ranks of the job that may take part.
    """
    known = {one.rank: one for one in collectives if not one.failure}
    unavailable = tuple(sorted({*world} - {*known}))
    names: dict[str, str] = {}
    for one in known.values():
        for progress in one.groups:
            names.setdefault(progress.group, progress.description)
    # Where one name means several, the group's number and the backend distinguish them.
    bare = [_bare_name(group, description) for group, description in names.items()]
    groups = [
        _Group(group, name if bare.count(name) == 1 else f"{name} ({group})", known, world)
        for (group, _), name in zip(names.items(), bare, strict=True)
    ]
    waiting = tuple(sorted(wait for group in groups for wait in group.waiting()))
    mismatched = tuple(mismatch for group in groups for mismatch in group.mismatched())
    first_mismatch = {mismatch.group: mismatch.seq for mismatch in reversed(mismatched)}
    limits = {group.name: first_mismatch.get(group.name) for group in groups}
    return CollectiveFindings(
        groups=tuple(group.stand() for group in groups),
        mismatched=mismatched,
        missing=tuple(missing for group in groups for missing in group.missing(waiting, limits[group.name])),
        stuck=tuple(stuck for group in groups for stuck in group.stuck(limits[group.name])),
        unpaired=tuple(unpaired for group in groups for unpaired in group.unpaired()),
        waiting=waiting,
        unavailable=unavailable,
    )


def _bare_name(group: str, description: str) -> str:
    return group.partition(":")[2] if description in _NAMELESS and ":" in group else description or group


class _Group:
    """One process group, as all ranks together show it."""

    def __init__(self, group: str, name: str, known: Mapping[int, RankCollectives], world: Sequence[int]) -> None:
        self.name = name
        self.ranks: dict[int, GroupProgress] = {}
        members: set[int] = set()
        self._position_to_rank: tuple[int, ...] = ()
        for rank in sorted(known):
            for progress in known[rank].groups:
                if progress.group == group and rank not in self.ranks:
                    self.ranks[rank] = progress
                    members.update(progress.ranks)
                    self._position_to_rank = self._position_to_rank or progress.ranks
        is_default = any(progress.description == _DEFAULT_GROUP for progress in self.ranks.values())
        self.members_known = is_default or bool(members)
        if is_default:
            members.update(world)
            self._position_to_rank = self._position_to_rank or tuple(sorted(members))
        # One that has not called anything here does not know the group.
        nothing = GroupProgress(group, "", (), -1, -1, -1, ())
        for rank in members & {*known}:
            self.ranks.setdefault(rank, nothing)
        self.unknown = tuple(sorted(members - {*known}))
        self._calls = {rank: _by_seq(progress.calls) for rank, progress in self.ranks.items()}
        self._waits_in = {
            rank: _next_known(progress.completed, self._calls[rank])
            for rank, progress in self.ranks.items()
            if progress.completed < progress.enqueued
        }

    def stand(self) -> GroupStand:
        progress = tuple((rank, p.enqueued, p.completed) for rank, p in sorted(self.ranks.items()))
        return GroupStand(self.name, progress, self.unknown, self.members_known)

    def waiting(self) -> list[Waiting]:
        return [Waiting(rank, self.name, seq, self._op(seq, [rank])) for rank, seq in self._waits_in.items()]

    # ------------------------------------------------------------------------------------ the same number, not the same

    def mismatched(self) -> list[Mismatch]:
        """The first number under which different calls were made; what follows it is out of step anyway."""
        if not self._waits_in:
            return []  # whatever they called, it has worked
        for seq in sorted({seq for calls in self._calls.values() for seq in calls}):
            made = {rank: calls[seq] for rank, calls in self._calls.items() if seq in calls}
            if len(made) < 2 or any(len(calls) > 1 for calls in made.values()):  # noqa: PLR2004 - a pair
                continue  # a coalesced call has several members
            kinds: dict[tuple[object, ...], list[int]] = {}
            sized = self._sized(made.values())
            for rank, calls in sorted(made.items()):
                kinds.setdefault(_kind(calls[0], sized), []).append(rank)
            if len(kinds) > 1:
                return self._mismatches(seq, sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks)), made)
        return []

    @staticmethod
    def _sized(made: Iterable[Sequence[CollectiveCall]]) -> bool:
        """Whether all made the same call, and it is one whose sizes can be compared on every rank."""
        calls = [calls[0] for calls in made]
        same = len({call.op for call in calls}) == 1
        return same and calls[0].op in _EQUAL_SIZES and all(_elements(call.sizes) is not None for call in calls)

    def _mismatches(
        self, seq: int, parties: list[list[int]], made: Mapping[int, Sequence[CollectiveCall]]
    ) -> list[Mismatch]:
        calls = tuple((tuple(ranks), made[ranks[0]][0]) for ranks in parties)
        if len(parties[0]) == len(parties[1]):
            message = " and ".join(f"{ranks_text(ranks)} called {_call_text(call)}" for ranks, call in calls)
            all_ranks = tuple(sorted(rank for ranks in parties for rank in ranks))
            return [
                Mismatch(self.name, seq, all_ranks, True, calls, f"{message} as collective {seq} of group {self.name}")
            ]
        usual_ranks, usual = calls[0]
        return [
            Mismatch(
                self.name,
                seq,
                ranks,
                False,
                calls,
                f"{ranks_text(ranks)} called {_call_text(call)} as collective {seq} of group {self.name} "
                f"where {ranks_text(usual_ranks)} called {_call_text(usual)}",
            )
            for ranks, call in calls[1:]
        ]

    # ----------------------------------------------------------------------------------------------- who has not called

    def missing(self, waiting: Sequence[Waiting], mismatch_seq: int | None) -> list[Missing]:
        furthest = max((progress.enqueued for progress in self.ranks.values()), default=-1)
        laggards: dict[int, list[int]] = {}
        for rank, progress in self.ranks.items():
            if rank not in self._waits_in:
                laggards.setdefault(progress.enqueued, []).append(rank)
        found = []
        for enqueued, ranks in sorted(laggards.items()):
            ahead = {rank: seq for rank, seq in self._waits_in.items() if seq > enqueued}
            seq = min(ahead.values(), default=-1)
            if not ahead or (mismatch_seq is not None and seq > mismatch_seq):
                continue
            found.append(self._missing(sorted(ranks), seq, sorted(ahead), self._count(enqueued, furthest), waiting))
        return found

    def _missing(
        self, ranks: list[int], seq: int, ahead: list[int], behind: int, waiting: Sequence[Waiting]
    ) -> Missing:
        op = self._op(seq, ahead)
        other = {wait.rank: wait for wait in reversed(waiting) if wait.rank in ranks and wait.group != self.name}
        message = (
            f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} not called {_named(seq, op)} of group "
            f"{self.name} that {ranks_text(ahead)} {_wait(ahead)} in; {'it is' if len(ranks) == 1 else 'they are'} "
            f"{behind} behind"
        )
        if other:
            wait = other[min(other)]
            there = [rank for rank, its in other.items() if its[1:] == wait[1:]]
            subject = "it" if len(ranks) == 1 else ranks_text(there)
            message += f"; {subject} {_wait(there)} in {_named(wait.seq, wait.op)} of group {wait.group}"
        return Missing(self.name, seq, op, tuple(ranks), tuple(ahead), behind, tuple(sorted(other)), message)

    def _count(self, enqueued: int, furthest: int) -> int:
        """How many calls lie between; some numbers are used up by calls that are not recorded."""
        seqs = {seq for calls in self._calls.values() for seq in calls}
        first = max(enqueued, 0) + 1
        if any(calls and min(calls) <= first and max(calls) == furthest for calls in self._calls.values()):
            return len([seq for seq in seqs if seq > enqueued])
        return max(1, furthest - max(enqueued, 0))

    # -------------------------------------------------------------------------------------------- all called, none ends

    def stuck(self, mismatch_seq: int | None) -> list[Stuck]:
        if not self._waits_in:
            return []
        seq = min(self._waits_in.values())
        if any(progress.enqueued < seq for progress in self.ranks.values()):
            return []  # a rank is missing
        if mismatch_seq is not None and mismatch_seq <= seq:
            return []
        waiting = tuple(sorted(rank for rank, its_seq in self._waits_in.items() if its_seq == seq))
        completed = tuple(sorted(rank for rank, progress in self.ranks.items() if progress.completed >= seq))
        op = self._op(seq, waiting)
        message = f"{ranks_text(waiting)} {_wait(waiting)} in {_named(seq, op)} of group {self.name}"
        if completed:
            message += f", which has ended on {ranks_text(completed)}"
        elif not self.unknown and self.members_known:
            message += ", which all members have called and none has completed"
        if self.unknown:
            message += f"; nothing is known of {ranks_text(self.unknown)}"
        elif not self.members_known:
            message += "; who else belongs to the group is not known"
        return [Stuck(self.name, seq, op, waiting, completed, self.unknown, message)]

    # ----------------------------------------------------------------------------------------------- sends and receives

    def unpaired(self) -> list[Unpaired]:
        open_ends = {rank: _open_ends(progress.calls) for rank, progress in self.ranks.items()}
        found = []
        for rank, ends in open_ends.items():
            for op, position in ends:
                if position >= len(self._position_to_rank):
                    continue
                peer = self._position_to_rank[position]
                if peer not in open_ends or peer == rank:
                    continue  # nothing is known of it
                opposite = "recv" if op == "send" else "send"
                if any(other == opposite and self._rank_at(back) == rank for other, back in open_ends[peer]):
                    continue
                preposition = "to" if op == "send" else "from"
                message = (
                    f"rank {rank} waits in a {op} {preposition} rank {peer} in group {self.name}, "
                    f"and rank {peer} is in no {opposite} {'from' if op == 'send' else 'to'} it"
                )
                found.append(Unpaired(self.name, rank, peer, op, message))
        return found

    def _rank_at(self, position: int) -> int:
        return self._position_to_rank[position] if position < len(self._position_to_rank) else -1

    def _op(self, seq: int, ranks: Iterable[int]) -> str:
        """What the ranks called under that number; of a coalesced call, the first."""
        for rank in ranks:
            for call in self._calls[rank].get(seq, ()):
                return call.op
        return ""


# ---------------------------------------------------------------------------------------------------------------- calls


def _by_seq(calls: Iterable[CollectiveCall]) -> dict[int, list[CollectiveCall]]:
    found: dict[int, list[CollectiveCall]] = {}
    for call in calls:
        if not call.is_p2p:
            found.setdefault(call.seq, []).append(call)
    return found


def _next_known(completed: int, calls: Mapping[int, object]) -> int:
    """The first call after those that are complete; some numbers are used up by calls that are not recorded."""
    return min((seq for seq in calls if seq > completed), default=completed + 1)


def _open_ends(calls: Sequence[CollectiveCall]) -> list[tuple[str, int]]:
    """The sends and receives that a rank is in: ``("send", position of the other in the group)``.

    Members of a batch are never marked as complete; one that has a completed call behind it is taken for complete.
    """
    ends = []
    for call in reversed(calls):
        if call.retired:
            break
        op, _, positions = call.op.partition(" ")
        _, arrow, other = positions.partition("->" if op == "send" else "<-")
        if call.is_p2p and op in {"send", "recv"} and arrow and other.isascii() and other.isdecimal():
            ends.append((op, int(other[:9])))
    return list(dict.fromkeys(ends))


def _kind(call: CollectiveCall, sized: bool) -> tuple[object, ...]:  # noqa: FBT001 - a part of the key or not
    return (call.op, _elements(call.sizes)) if sized else (call.op,)


def _elements(sizes: str) -> tuple[int, ...] | None:
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


# ------------------------------------------------------------------------------------------------------------- messages


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _named(seq: int, op: str) -> str:
    return f"collective {seq} ({op})" if op else f"collective {seq}"


def _call_text(call: CollectiveCall) -> str:
    sizes = call.sizes if len(call.sizes) <= _SIZES_SHOWN else call.sizes[:_SIZES_SHOWN] + "…"
    return f"{call.op} {sizes}" if call.sizes not in {"", "[]"} else call.op
