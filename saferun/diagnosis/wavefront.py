"""Which ranks hold up all others, from the calls that each rank waits in: those that wait for no other. Pure.

On a GPU calls are only queued: a rank whose GPU hangs goes on calling, and a rank that is held up has several pending
calls. The first of them counts, in the order in which the rank made them. It waits for the members that have not made
the call, and for those that have but are still in an earlier one. A hang begins where the waits end:

* at a rank in no call, which has not reached the one that others are in;
* at a call that all members have made and that is the first pending one of each: a GPU, a network, or calls that do not
  match each other;
* at ranks that wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from saferun.diagnosis.mismatched_calls import elements_of
from saferun.diagnosis.process_groups import Group, Stream
from saferun.evidence.job_evidence import CollectiveCall, RankCollectives
from saferun.model import Value

_UNKNOWN_ORDER = 1 << 62
_ONE_AND_THE_REST = 2
_Sizes = dict[tuple[int, int], list[int]]
"""The ranks that hand in and get so many elements."""


class Op(Value):
    """A collective, or a send and its receive.

    ``group``: the index of its group. ``number``: of a collective its sequence number, of a transfer its index among
    those of the two ranks; -1: unknown. ``source`` and ``target`` are -1 for a collective.
    """

    group: int
    number: int
    source: int = -1
    target: int = -1


class Root(Value):
    """Where a hang began.

    Attributes:
        kind: ``absent`` (``ranks`` are in no call, and others wait for them), ``stuck`` (``op`` has been called by all
            of its members and ends on none of ``ranks``), ``circle`` (``ranks`` wait for each other).
        ranks: see ``kind``.
        op: if ``stuck``, that call; if not, one that others wait in.
        ended: if ``stuck``, the members on which the call has ended.
        suspects: those of ``ranks`` that may be the cause.
        is_complete: whether nothing is unknown about the members.
        never_ends: if ``stuck``, whether the sizes on its members cannot belong together.
    """

    kind: str
    ranks: tuple[int, ...]
    op: Op
    ended: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    is_complete: bool = True
    never_ends: bool = False


class _PendingCall(Value):
    """A call of a rank that has not ended. ``batch``: the same for calls of one batch; -1: it is in none."""

    order: int
    batch: int
    op: Op


class _Members(Value):
    """The members of a call: those that it waits for, those in it, and those on which it has ended."""

    awaited: tuple[int, ...]
    here: tuple[int, ...]
    ended: tuple[int, ...]
    is_complete: bool


Node = int | Op


class Wavefront:
    """Which calls each rank waits in, and which ranks wait for which.

    Args:
        groups: of the job.
        known: the recorders that answered, by rank.
    """

    def __init__(self, groups: Sequence[Group], known: Mapping[int, RankCollectives]) -> None:
        self._groups = groups
        self._known = known
        self._of_rank: dict[int, list[Group]] = {}
        for group in groups:
            for rank in group.ranks:
                self._of_rank.setdefault(rank, []).append(group)
        self.first: dict[int, frozenset[Op]] = {}
        for rank, opened in self._open_calls().items():
            earliest = min(opened)
            first = [
                one for one in opened if one.order == earliest.order or (one.batch >= 0 and one.batch == earliest.batch)
            ]
            self.first[rank] = frozenset(one.op for one in first)
        ops = dict.fromkeys(op for rank in sorted(self.first) for op in sorted(self.first[rank]))
        self._members = {op: self._members_of(op) for op in ops}
        self._hold_batches()

    # -------------------------------------------------------------------------------------------------- what is open

    def _open_calls(self) -> dict[int, list[_PendingCall]]:
        """Per rank, the first pending call of each of its streams."""
        found: dict[int, list[_PendingCall]] = {}
        for index, group in enumerate(self._groups):
            for rank, seq in group.waits_in.items():
                call = group.call(rank, seq)
                found.setdefault(rank, []).append(_PendingCall(_order(call), -1, Op(index, seq)))
            for rank, streams in group.streams.items():
                for stream, calls in streams.items():
                    call = _first_open(calls)
                    if call is not None and stream[1] >= 0:
                        op = _transfer(index, rank, stream, call.nth)
                        batch = index << 40 | call.seq
                        found.setdefault(rank, []).append(_PendingCall(_order(call), batch, op))
        return found

    # ------------------------------------------------------------------------------------------------ who is waited for

    def _members_of(self, op: Op) -> _Members:
        return self._of_collective(op) if op.source < 0 else self._of_transfer(op)

    def _of_collective(self, op: Op) -> _Members:
        group = self._groups[op.group]
        awaited, here, ended = [], [], []
        for rank, progress in group.ranks.items():
            if op in self.first.get(rank, ()):
                here.append(rank)
            elif progress.completed >= op.number:
                ended.append(rank)
            else:
                awaited.append(rank)
        is_complete = group.members_known and not group.unknown
        return _Members(tuple(sorted(awaited)), tuple(sorted(here)), tuple(sorted(ended)), is_complete)

    def _of_transfer(self, op: Op) -> _Members:
        ends = {rank: self.state_of(rank, op) for rank in (op.source, op.target)}
        return _Members(
            tuple(rank for rank, state in ends.items() if state in {"absent", "behind"}),
            tuple(rank for rank, state in ends.items() if state == "here"),
            tuple(rank for rank, state in ends.items() if state == "ended"),
            "unknown" not in ends.values(),
        )

    def state_of(self, rank: int, op: Op) -> str:
        """Where a rank stands at a transfer that it is one end of.

        ``absent``: it has not called; ``behind``: it has, but is still in an earlier call; ``here``: it waits in the
        transfer; ``ended``: that is over for it; ``unknown``: it has no recorder that answered.
        """
        if rank not in self._known:
            return "unknown"
        if op in self.first.get(rank, ()):
            return "here"
        stream = ("send", op.target) if rank == op.source else ("recv", op.source)
        streams = self._groups[op.group].streams.get(rank, {})
        calls = streams.get(stream, [])
        is_counted = not calls or calls[-1].nth >= 0
        if op.number < 0 or not is_counted:
            return "behind" if _first_open(calls) is not None else "absent"
        if not calls or calls[-1].nth < op.number:
            return "absent"
        call = next((call for call in calls if call.nth == op.number), None)
        return "ended" if call is None or call.retired else "behind"

    def _hold_batches(self) -> None:
        """Make batches wait as a whole: a batch ends when all its calls do.

        A rank that waits in one call of a batch keeps the other calls from ending, also those that all members have
        made: these wait for that rank. That may block further batches, so it is repeated until nothing changes.
        """
        todo = [rank for rank, ops in self.first.items() if len(ops) > 1]
        has_changed = True
        while has_changed:
            has_changed = False
            for rank in todo:
                ops = self.first[rank]
                if any(self._members[op].awaited for op in ops):
                    for op in ops:
                        members = self._members[op]
                        if not members.awaited and rank in members.here:
                            has_changed = True
                            here = tuple(one for one in members.here if one != rank)
                            self._members[op] = members._replace(awaited=(rank,), here=here)

    def awaited(self, rank: int) -> list[tuple[Op, tuple[int, ...]]]:
        """The calls that a rank waits in, each with the ranks that it waits for there."""
        return [(op, self._members[op].awaited) for op in sorted(self.first.get(rank, ())) if self._members[op].awaited]

    # ------------------------------------------------------------------------------------------------------------ roots

    def roots(self) -> list[Root]:
        """Where the hang began."""
        found: list[Root] = []
        idle: dict[int, Op] = {}
        for component in _sinks([*self.first], self._next):
            ranks = tuple(sorted(node for node in component if isinstance(node, int)))
            ops = sorted(node for node in component if not isinstance(node, int))
            if not ranks:
                members = self._members[ops[0]]
                sizes = _sizes({rank: self.call(rank, ops[0]) for rank in members.here})
                never_ends = members.is_complete and not members.ended and _surplus(sizes) != 0
                suspects = self._suspects(ops[0], members, _alone(sizes) if never_ends or _is_even(sizes) else ())
                known = (members.ended, suspects, members.is_complete, never_ends)
                found.append(Root("stuck", members.here, ops[0], *known))
            elif ops:
                found.append(Root("circle", ranks, ops[0], (), self._odd_ones(ranks, ops)))
            else:
                idle[ranks[0]] = self._wanted(ranks[0])
        idle.update(self._idle())
        return [*(Root("absent", (rank,), op, (), (rank,)) for rank, op in sorted(idle.items())), *found]

    def _idle(self) -> dict[int, Op]:
        """Ranks that are in no call, and have not made one that others wait in."""
        found = {}
        for index, group in enumerate(self._groups):
            if not group.waits_in:
                continue
            newest = max(progress.enqueued for rank, progress in group.ranks.items() if rank in group.waits_in)
            for rank, progress in group.ranks.items():
                if rank not in self.first and progress.enqueued < newest and rank not in found:
                    found[rank] = Op(index, max(progress.enqueued, 0) + 1)
        return found

    def _next(self, node: Node) -> Iterable[Node]:
        if isinstance(node, int):
            ops = self.first.get(node, frozenset())
            held = [op for op in ops if self._members[op].awaited and self._members[op].awaited != (node,)]
            return sorted(held or ops)
        return self._members[node].awaited

    def _wanted(self, rank: int) -> Op:
        """A call that waits for this rank."""
        return next((op for op, members in self._members.items() if rank in members.awaited), Op(-1, -1))

    def _suspects(self, op: Op, members: _Members, of_other_size: tuple[int, ...]) -> tuple[int, ...]:
        """Of the members of a call that all have made, those that may be the cause."""
        ranks = list(members.here)
        failing = [rank for rank in ranks if self._known[rank].has_failed]
        if failing:
            return tuple(failing)
        begun = [rank for rank in ranks if self.has_started(rank, op)]
        if begun and len(begun) < len(ranks):
            return tuple(rank for rank in ranks if rank not in begun)
        return of_other_size or self._least_advanced(op, ranks) or tuple(ranks)

    def _least_advanced(self, op: Op, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those that have completed less in another group than the other ranks, though all have queued the same there.

        A GPU that works goes on with its other groups until everything left depends on this call.
        """
        if op.source >= 0 or len(ranks) < 2:  # noqa: PLR2004 - the two ends of a send do different things
            return ()
        by_description: dict[str, dict[int, tuple[int, int]]] = {}
        for rank in ranks:
            for group in self._of_rank.get(rank, ()):
                if group is not self._groups[op.group] and group.size < len(self._known):
                    progress = group.ranks[rank]
                    by_description.setdefault(group.description, {})[rank] = (progress.enqueued, progress.completed)
        for stands in by_description.values():
            completed = {done for _, done in stands.values()}
            if len(stands) == len(ranks) and len({called for called, _ in stands.values()}) == 1 and len(completed) > 1:
                return tuple(rank for rank in ranks if stands[rank][1] == min(completed))
        return ()

    def call(self, rank: int, op: Op) -> CollectiveCall | None:
        """What a rank has called; of a transfer, the first to or from that peer that is not over."""
        group = self._groups[op.group]
        if op.source < 0:
            return group.call(rank, op.number)
        stream: Stream = ("send", op.target) if rank == op.source else ("recv", op.source)
        return _first_open(group.streams.get(rank, {}).get(stream, []))

    def has_started(self, rank: int, op: Op) -> bool:
        """Whether the kernel of a call is known to have begun; of a coalesced one only the last entry may tell."""
        if op.source >= 0:
            call = self.call(rank, op)
            return call is not None and call.started
        return any(call.started for call in self._groups[op.group].calls.get(rank, {}).get(op.number, ()))

    def _odd_ones(self, ranks: Sequence[int], ops: Sequence[Op]) -> tuple[int, ...]:
        """Of ranks that wait for each other in a circle, those that call in another order than the rest.

        If most members of a call are in it, the missing ones are odd; if few are in it, those few are. After a tie: the
        ranks that have not made the calls in which most wait. After another tie: all.
        """
        odd = dict.fromkeys(ranks, 0.0)
        absent = dict.fromkeys(ranks, 0)
        for op in ops:
            members = self._members[op]
            waiting, awaited = len(members.here), len(members.awaited)
            weight = abs(waiting - awaited) / (waiting + awaited)
            for rank in members.awaited if waiting > awaited else members.here:
                if rank in odd:
                    odd[rank] += weight
            for rank in members.awaited:
                if rank in absent and not self._has_called(rank, op):
                    absent[rank] += waiting
        return _largest(odd) or _largest(absent) or tuple(ranks)

    def _has_called(self, rank: int, op: Op) -> bool:
        if op.source < 0:
            return self._groups[op.group].ranks[rank].enqueued >= op.number
        return self.state_of(rank, op) != "absent"


def _sizes(calls: Mapping[int, CollectiveCall | None]) -> _Sizes:
    """Of ranks in an all_to_all, how many elements they hand in and get; empty where that is not known of all."""
    sizes: _Sizes = {}
    for rank, call in calls.items():
        if call is None or not call.op.startswith("all_to_all"):
            return {}
        given, taken = _total(call.elements, call.sizes), _total(call.output_elements, call.output_sizes)
        if given < 0 or taken < 0:
            return {}
        sizes.setdefault((given, taken), []).append(rank)
    return sizes


def _total(elements: int, sizes: str) -> int:
    if elements >= 0:
        return elements
    counts = elements_of(sizes)
    return sum(counts) if counts is not None else -1


def _surplus(sizes: _Sizes) -> int:
    """How many elements more ranks in an all_to_all hand in than they get; other than 0 in all: the call never ends.

    Each rank may legally hand in and get another number of elements, as with a last batch that is short.
    """
    return sum((given - taken) * len(ranks) for (given, taken), ranks in sizes.items())


def _is_even(sizes: _Sizes) -> bool:
    """Whether each rank gets as many as it hands in: an all_to_all without split sizes, most likely.

    That has equal sizes on all ranks. A halo exchange with split sizes has not.
    """
    return all(given == taken for given, taken in sizes)


def _alone(sizes: _Sizes) -> tuple[int, ...]:
    """The only rank with other sizes than those of the rest, if all of these have the same."""
    alone = [ranks for ranks in sizes.values() if len(ranks) == 1]
    return tuple(alone[0]) if len(sizes) == _ONE_AND_THE_REST and len(alone) == 1 else ()


def _largest(scores: Mapping[int, float]) -> tuple[int, ...]:
    """Those with the highest score; none if all have the same."""
    most = max(scores.values())
    return tuple(rank for rank, score in scores.items() if score == most) if most > min(scores.values()) else ()


def _order(call: CollectiveCall | None) -> int:
    return call.order if call is not None and call.order >= 0 else _UNKNOWN_ORDER


def _first_open(calls: Iterable[CollectiveCall]) -> CollectiveCall | None:
    """The first pending call. A call before one that has ended counts as ended."""
    found = None
    for call in calls:
        if call.retired:
            found = None
        elif found is None:
            found = call
    return found


def _transfer(group: int, rank: int, stream: Stream, nth: int) -> Op:
    do, peer = stream
    return Op(group, nth, rank, peer) if do == "send" else Op(group, nth, peer, rank)


def _sinks(starts: Sequence[Node], following: Callable[[Node], Iterable[Node]]) -> list[list[Node]]:
    """The strongly connected components of a graph from which no edge leads out (Tarjan), without recursion."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    component: dict[Node, int] = {}
    position: dict[Node, int] = {}
    stack: list[Node] = []
    sinks: list[list[Node]] = []
    for start in starts:
        if start in index:
            continue
        index[start] = low[start] = len(index)
        position[start] = len(stack)
        stack.append(start)
        work = [(start, iter(following(start)))]
        while work:
            node, rest = work[-1]
            other = next(rest, None)
            if other is not None:
                if other not in index:
                    index[other] = low[other] = len(index)
                    position[other] = len(stack)
                    stack.append(other)
                    work.append((other, iter(following(other))))
                elif other not in component:
                    low[node] = min(low[node], index[other])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                part = stack[position[node] :]
                del stack[position[node] :]
                component.update(dict.fromkeys(part, index[node]))
                if all(component[other] == index[node] for one in part for other in following(one)):
                    sinks.append(part)
    return sinks
