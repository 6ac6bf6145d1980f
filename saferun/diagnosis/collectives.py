"""The Flight Recorders of all ranks compared: which ranks called something else, which did not call. Pure.

A process group numbers its collectives. Ranks that belong together give the same number to the same call, so that a
rank that took another path through the code shows in the first number where they differ. Who of those that wait is held
up by whom is found in ``wavefront``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saferun.diagnosis.mismatched_calls import MismatchedCall, first_mismatch, groups_alike, left_out
from saferun.diagnosis.process_groups import OF_GPUS, Group, groups_of
from saferun.diagnosis.wavefront import Op, Root, Wavefront
from saferun.evidence.job_evidence import RankCollectives
from saferun.model import Value
from saferun.text.wording import ranks_text

# Calls are counted up to one that all members have made in one of so many groups.
_ANCHORS = 4
_LINES_SHOWN = 16
_STEPS_SHOWN = 4
# In these each rank needs something from each other; in an all_to_all it may get nothing from some.
_EXCHANGES = ("all_reduce", "allreduce", "all_gather", "barrier", "reduce_scatter")


# ------------------------------------------------------------------------------------------------------------- findings


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

    ``unknown`` are members of the group whose recorder did not answer; ``completed`` those on which it has ended;
    ``is_complete`` is whether nothing is unknown about the members, ``lasts`` whether it is known to be the
    call that does not end, and not what GPUs have to do before it.
    """

    group: str
    seq: int
    op: str
    waiting: tuple[int, ...]
    completed: tuple[int, ...]
    unknown: tuple[int, ...]
    message: str
    is_complete: bool = True
    lasts: bool = True


class Circle(Value):
    """Ranks that wait for each other, each in a call that the next has not made: groups entered in different orders."""

    ranks: tuple[int, ...]
    steps: str

    @property
    def message(self) -> str:
        """Who waits for whom."""
        return f"{ranks_text(self.ranks)} wait for each other: {self.steps}"


class Unpaired(Value):
    """A rank that waits in a ``send`` or ``recv`` of which the other end, ``peer``, knows nothing."""

    group: str
    rank: int
    peer: int
    op: str
    message: str


class CollectiveWait(Value):
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
    """What :func:`compare` has found. What tells of the cause comes first.

    Attributes:
        groups: how far each is.
        mismatched: different calls under one number.
        missing: who has not called what others are in.
        stuck: calls that all have made and that do not end.
        circles: ranks that wait for each other.
        unpaired: sends and receives without their other end.
        waiting: what each rank is in, the first of its calls first.
        unavailable: ranks of whose collectives nothing is known.
        culprits: the ranks that hold up the others: they called something else, or have not called, and wait for none.
        suspects: ranks on which a call does not end that all have made; the cause is among them, or in the network.
    """

    groups: tuple[GroupStand, ...] = ()
    mismatched: tuple[MismatchedCall, ...] = ()
    missing: tuple[Missing, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    circles: tuple[Circle, ...] = ()
    unpaired: tuple[Unpaired, ...] = ()
    waiting: tuple[CollectiveWait, ...] = ()
    unavailable: tuple[int, ...] = ()
    culprits: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each finding, the most important first."""
        return (
            *(mismatch.message for mismatch in self.mismatched),
            *(circle.message for circle in self.circles),
            *(missing.message for missing in self.missing),
            *(unpaired.message for unpaired in self.unpaired),
            *(stuck.message for stuck in self.stuck),
        )

    @property
    def shown_lines(self) -> tuple[str, ...]:
        """Those lines, as many of them as a reader takes in."""
        lines, more = self.lines, len(self.lines) - _LINES_SHOWN
        if more <= 0:
            return lines
        return (
            *lines[:_LINES_SHOWN],
            f"{more} more findings like these; report.txt lists the collectives of all ranks",
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
    groups = groups_of(known, world)
    front = Wavefront(groups, known)
    return _Comparison(groups, front, front.roots()).findings(tuple(sorted({*world} - {*known})))


class _Comparison:
    """What the groups of a job show.

    Args:
        groups: all of them.
        front: who waits for whom.
        roots: where it began.
    """

    def __init__(self, groups: Sequence[Group], front: Wavefront, roots: Sequence[Root]) -> None:
        self._groups = groups
        self._front = front
        self._roots = roots
        self._at_root = dict.fromkeys(root.op.group for root in roots if root.op.group >= 0)
        self._waits = self._waiting()

    def findings(self, unavailable: tuple[int, ...]) -> CollectiveFindings:
        """All of them."""
        alike = groups_alike(self._groups)
        by_group = {index: first_mismatch(group, alike.get(index, ())) for index, group in enumerate(self._groups)}
        # Only a mismatch that comes before what they wait in explains it.
        telling = {
            root.op.group: by_group[root.op.group]
            for root in self._roots
            if root.op.group >= 0 and any(found.seq <= root.op.number for found in by_group[root.op.group])
        }
        mismatched = _settled([mismatch for found in telling.values() for mismatch in found])
        culprits = {rank for mismatch in mismatched for rank in mismatch.ranks}
        suspects: set[int] = set()
        for root in self._roots:
            if root.op.group in telling:
                continue
            found = suspects if root.kind == "stuck" else culprits
            found.update((self._left_out(root, alike) if root.kind == "circle" else ()) or root.suspects)
        limits = {index: found[0].seq for index, found in by_group.items() if found}
        order = sorted(range(len(self._groups)), key=lambda index: index not in self._at_root)
        blamed = culprits | suspects
        missing = [one for index in order for one in self._missing(self._groups[index], limits.get(index))]
        stuck = [one for index in order for one in self._stuck(index, limits.get(index))]
        return CollectiveFindings(
            groups=tuple(_stand(group) for group in self._groups),
            mismatched=tuple(mismatched),
            missing=tuple(sorted(missing, key=lambda one: not blamed.intersection(one.ranks))),
            stuck=tuple(stuck),
            circles=tuple(
                self._circle(root) for root in self._roots if root.kind == "circle" and root.op.group not in telling
            ),
            unpaired=tuple(sorted(self._unpaired(), key=lambda one: one.peer not in blamed)),
            waiting=tuple(wait for _, waits in sorted(self._waits.items()) for wait in waits),
            unavailable=unavailable,
            culprits=tuple(sorted(culprits)),
            suspects=tuple(sorted(suspects - culprits)),
        )

    def _circle(self, root: Root) -> Circle:
        """Who waits for whom, from the first rank until it comes to one that has been before."""
        path: dict[int, str] = {}
        rank = root.ranks[0]
        while rank not in path:
            waits = ((op, other) for op, awaited in self._front.awaited(rank) for other in awaited if other != rank)
            op, other = next((one for one in waits if one[1] in root.ranks), (root.op, root.ranks[0]))
            wait = self._wait(rank, op)
            path[rank] = f"rank {rank} in {_wait_text(wait)} of group {wait.group} for rank {other}"
            rank = other
        steps = [path[one] for one in [*path][[*path].index(rank) :]]
        if len(steps) > _STEPS_SHOWN:
            steps[_STEPS_SHOWN - 1 : -1] = ["…"]
        return Circle(root.ranks, ", ".join(steps))

    def _left_out(self, root: Root, alike: Mapping[int, Sequence[Group]]) -> tuple[int, ...]:
        """Of ranks that wait for each other, those that have left out a call before, or made one more."""
        ranks = {*root.ranks}
        widest = sorted(self._groups, key=lambda group: -len(group.ranks))[:_ANCHORS]
        odd: set[int] = set()
        for index, group in enumerate(self._groups):
            if len(ranks.intersection(group.ranks)) > 1:
                odd.update(left_out(group, widest, alike.get(index, ())))
        return tuple(sorted(odd & ranks))

    def _waiting(self) -> dict[int, list[CollectiveWait]]:
        waits: dict[int, list[CollectiveWait]] = {}
        for rank, ops in self._front.first.items():
            waits[rank] = [self._wait(rank, op) for op in sorted(ops)]
        for group in self._groups:
            for rank, seq in group.waits_in.items():
                wait = CollectiveWait(rank, group.name, seq, group.op(seq, [rank]))
                if wait not in waits.setdefault(rank, []):
                    waits[rank].append(wait)
        return waits

    def _wait(self, rank: int, op: Op) -> CollectiveWait:
        group = self._groups[op.group]
        if op.source < 0:
            return CollectiveWait(rank, group.name, op.number, group.op(op.number, [rank]))
        return CollectiveWait(rank, group.name, op.number, "send" if rank == op.source else "recv")

    # ----------------------------------------------------------------------------------------------- who has not called

    def _missing(self, group: Group, mismatch_seq: int | None) -> list[Missing]:
        if not group.waits_in:
            return []
        furthest = max(progress.enqueued for progress in group.ranks.values())
        behind: dict[int, list[int]] = {}
        for rank, progress in group.ranks.items():
            if rank not in group.waits_in:
                behind.setdefault(progress.enqueued, []).append(rank)
        found = []
        for enqueued, ranks in sorted(behind.items()):
            ahead = {rank: seq for rank, seq in group.waits_in.items() if seq > enqueued}
            seq = min(ahead.values(), default=-1)
            if ahead and (mismatch_seq is None or seq <= mismatch_seq):
                count = _count(group, enqueued, furthest)
                found.append(self._missing_of(group, sorted(ranks), seq, sorted(ahead), count))
        return found

    def _missing_of(self, group: Group, ranks: list[int], seq: int, ahead: list[int], behind: int) -> Missing:
        op = group.op(seq, ahead)
        other = {rank: wait for rank in ranks for wait in self._waits.get(rank, ())[:1] if wait.group != group.name}
        message = (
            f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} not called {_named(seq, op)} of group "
            f"{group.name} that {ranks_text(ahead)} {_wait(ahead)} in; {'it is' if len(ranks) == 1 else 'they are'} "
            f"{behind} behind"
        )
        if other:
            wait = other[min(other)]
            there = [rank for rank, its in other.items() if its[1:] == wait[1:]]
            subject = "it" if len(ranks) == 1 else ranks_text(there)
            message += f"; {subject} {_wait(there)} in {_wait_text(wait)} of group {wait.group}"
        return Missing(group.name, seq, op, tuple(ranks), tuple(ahead), behind, tuple(sorted(other)), message)

    # -------------------------------------------------------------------------------------------- all called, none ends

    def _stuck(self, index: int, mismatch_seq: int | None) -> list[Stuck]:
        group = self._groups[index]
        found = [
            self._stuck_transfer(group, root) for root in self._roots if root.op.group == index and root.op.source >= 0
        ]
        stuck = [one for one in found if one is not None]
        if not group.waits_in:
            return stuck
        seq = min(group.waits_in.values())
        if any(progress.enqueued < seq for progress in group.ranks.values()):
            return stuck  # a rank is missing
        if mismatch_seq is not None and mismatch_seq <= seq:
            return stuck
        waiting = tuple(sorted(rank for rank, its_seq in group.waits_in.items() if its_seq == seq))
        completed = tuple(sorted(rank for rank, progress in group.ranks.items() if progress.completed >= seq))
        op = group.op(seq, waiting)
        message = f"{ranks_text(waiting)} {_wait(waiting)} in {_named(seq, op)} of group {group.name}"
        if completed:
            message += f", which has ended on {ranks_text(completed)}"
        elif not group.unknown and group.members_known:
            message += ", which all members have called and none has completed"
        if group.unknown:
            message += f"; nothing is known of {ranks_text(group.unknown)}"
        elif not group.members_known:
            message += "; who else belongs to the group is not known"
        is_complete = group.members_known and not group.unknown
        # On a rank it ends only when all others have begun it, unless data flows in one direction.
        lasts = group.backend not in OF_GPUS or bool(completed and op.startswith(_EXCHANGES))
        lasts = lasts or (is_complete and all(self._front.has_started(rank, Op(index, seq)) for rank in waiting))
        lasts = lasts or any(root.never_ends for root in self._roots if root.op == Op(index, seq))
        known = (group.name, seq, op, waiting, completed, group.unknown, message)
        return [*stuck, Stuck(*known, is_complete, lasts)]

    def _stuck_transfer(self, group: Group, root: Root) -> Stuck | None:
        if root.kind != "stuck" or not root.is_complete:
            return None
        source, target = root.op.source, root.op.target
        what = f"send from rank {source} to rank {target} in group {group.name}"
        message = f"{ranks_text(root.ranks)} {_wait(root.ranks)} in the {what}"
        if root.ended:
            message += f", which has ended on {ranks_text(root.ended)}"
        else:
            message += ", which both have called and neither has completed"
        lasts = group.backend not in OF_GPUS or all(self._front.has_started(rank, root.op) for rank in root.ranks)
        found = Stuck(group.name, root.op.number, "send", root.ranks, root.ended, (), message)
        return found._replace(lasts=lasts)

    # ----------------------------------------------------------------------------------------------- sends and receives

    def _unpaired(self) -> list[Unpaired]:
        found = []
        for rank, ops in sorted(self._front.first.items()):
            for op in sorted(ops):
                peer = op.target if rank == op.source else op.source
                if op.source < 0 or self._front.state_of(peer, op) != "absent":
                    continue
                name, to, opposite, back = (
                    ("send", "to", "recv", "from") if rank == op.source else ("recv", "from", "send", "to")
                )
                group = self._groups[op.group].name
                message = (
                    f"rank {rank} waits in a {name} {to} rank {peer} in group {group}, "
                    f"and rank {peer} is in no {opposite} {back} it"
                )
                found.append(Unpaired(group, rank, peer, name, message))
        return found


def _stand(group: Group) -> GroupStand:
    progress = tuple((rank, p.enqueued, p.completed) for rank, p in sorted(group.ranks.items()))
    return GroupStand(group.name, progress, group.unknown, group.members_known)


def _settled(mismatched: Iterable[MismatchedCall]) -> list[MismatchedCall]:
    """Where it does not show who is the odd one, it is one that is so elsewhere."""
    found = list(mismatched)
    odd = {rank for mismatch in found if not mismatch.is_tie for rank in mismatch.ranks}
    settled = []
    for mismatch in found:
        here = tuple(rank for rank in mismatch.ranks if rank in odd) if mismatch.is_tie else ()
        settled.append(mismatch._replace(ranks=here) if here else mismatch)
    return sorted(settled, key=lambda mismatch: mismatch.is_tie)


def _count(group: Group, enqueued: int, furthest: int) -> int:
    """How many calls lie between; some numbers are used up by calls that are not recorded."""
    seqs = {seq for calls in group.calls.values() for seq in calls}
    first = max(enqueued, 0) + 1
    if any(calls and min(calls) <= first and max(calls) == furthest for calls in group.calls.values()):
        return len([seq for seq in seqs if seq > enqueued])
    return max(1, furthest - max(enqueued, 0))


# ------------------------------------------------------------------------------------------------------------- messages


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _named(seq: int, op: str) -> str:
    return f"collective {seq} ({op})" if op else f"collective {seq}"


def _wait_text(wait: CollectiveWait) -> str:
    return f"a {wait.op}" if wait.op in {"send", "recv"} else _named(wait.seq, wait.op)
