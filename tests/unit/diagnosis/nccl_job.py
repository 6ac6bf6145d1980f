"""A small simulator of jobs on GPUs: what NCCL does with what ranks call, and what torch's Flight Recorder has of it.

It knows nothing of how saferun judges. What it takes from CUDA, NCCL and torch:

* A rank's CPU enqueues, and waits only where the program reads a value from the GPU (``sync``). Its GPU has a stream
  for the model's kernels, one for each process group, and one for each pair of ranks that send to each other outside of
  a batch. A call begins when its stream has come to it and the kernels that were enqueued before it are over; where the
  program waits for it, the kernels behind it wait on the GPU.
* The k-th collective that a rank begins on a communicator meets the k-th of each other member, whatever it is. It ends
  when all have begun it, and never if they are not the same: then all of them hang.
* The k-th send of a rank to another meets the k-th receive there. A small send may end before the receive is there.
* The recorder keeps the last N calls in the order in which they were enqueued; collectives and sends are numbered each
  for themselves by group; members of a batch never end, the ``coalesced`` entry behind them does; the status of a group
  has the number of whatever came last.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, FlightRecorderDetail.hpp (torch 2.13); issues 137969, 137974,
189073 of pytorch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# ------------------------------------------------------------------------------------------------------------ programs


class Mesh(NamedTuple):
    """The process groups of a job: members and description of each, and those that a rank is in."""

    world: int
    groups: tuple[tuple[int, ...], ...]
    descriptions: tuple[str, ...]
    dimension: tuple[int, ...]


class Step(NamedTuple):
    """What a program does.

    ``do``: ``kernel``, ``sync``, ``call`` (a collective), ``send``, ``recv``, ``batch``. ``waits``: whether the kernels
    behind it wait for it on the GPU. ``parts``: of a batch, ``(send or recv, peer)``. ``root``: of a scatter or gather.
    """

    do: str
    group: int = -1
    op: str = ""
    size: int = 0
    peer: int = -1
    waits: bool = True
    dtype: str = "BFloat16"
    parts: tuple[tuple[str, int], ...] = ()
    root: int = -1


class Fault(NamedTuple):
    """What goes wrong on a rank.

    ``kind``: ``stops`` (the CPU comes to step ``at`` and no further: asleep, a held GIL, an endless loop), ``gpu`` (the
    GPU does nothing more after it has finished ``at`` things), ``kernel`` (the kernel ``at`` never ends, and the other
    streams go on), ``skips`` (step ``at`` is left out), ``dtype``, ``size``, ``op`` (it is another one).
    ``others_finish``: where the GPU dies within a collective to which it had given its part.
    """

    rank: int
    kind: str
    at: int
    others_finish: bool = False


Programs = Sequence[Sequence[Step]]
# In each of its turns a rank's CPU does so many steps, and each stream of its GPU one: all ranks go at a like pace.
_CPU_STEPS = 6


# ------------------------------------------------------------------------------------------------------------- running


class Meeting:
    """A collective, or a send and its receive, or a batch: who has begun it."""

    __slots__ = ("begun", "ended", "kinds", "members")

    def __init__(self, members: int) -> None:
        self.members = members
        self.begun: dict[int, Call] = {}
        self.ended: set[int] = set()
        self.kinds: set[tuple[object, ...]] = set()


class Call:
    """What a rank has enqueued on a stream of its GPU."""

    __slots__ = ("after", "begun", "is_over", "number", "opposite", "p2p_number", "record", "step", "stream")

    def __init__(self, step: Step, stream: tuple[int, int], after: int) -> None:
        self.step = step
        self.stream = stream
        self.after = after
        self.begun = self.is_over = False
        self.number = self.p2p_number = self.record = -1
        self.opposite: list[tuple[tuple[int, int, int, int], bool]] = []


class Rank:
    """One rank: how far its CPU is, what its GPU has to do."""

    def __init__(self, number: int, program: Sequence[Step]) -> None:
        self.number = number
        self.program = program
        self.next_step = 0
        self.kernels: list[Call | None] = []  # of the model's stream: a kernel, or a call to wait for
        self.kernels_over = 0
        self.streams: dict[tuple[int, int], deque[Call]] = {}
        self.calls: list[Call] = []
        self.things_over = 0
        self.seq: dict[int, int] = {}
        self.p2p_seq: dict[int, int] = {}
        self.launched: dict[int, int] = {}
        self.transfers: dict[tuple[int, int, int, int], int] = {}
        self.last_over: dict[int, int] = {}


class Job:
    """A job that runs until it is over or nothing moves.

    Args:
        mesh: its process groups.
        programs: what each rank does.
        faults: what goes wrong.
        eager_bytes: sends up to this size end before the receive is there.
        pair_streams: whether single sends have a stream for each pair; else they run on the group's.
    """

    def __init__(
        self,
        mesh: Mesh,
        programs: Programs,
        faults: Iterable[Fault] = (),
        *,
        eager_bytes: int = 0,
        pair_streams: bool = True,
    ) -> None:
        self.mesh = mesh
        self.faults = {fault.rank: fault for fault in faults}
        self._eager = eager_bytes
        self._pair_streams = pair_streams
        self.groups_of: dict[int, list[int]] = {}
        for group, members in enumerate(mesh.groups):
            for member in members:
                self.groups_of.setdefault(member, []).append(group)
        self.ranks = [Rank(number, self._changed(number, program)) for number, program in enumerate(programs)]
        self._collectives: dict[tuple[int, int], Meeting] = {}
        self._ends: dict[tuple[int, int, int, int], dict[str, tuple[int, Call]]] = {}
        self._todo: deque[int] = deque(range(mesh.world))
        self._waiting = set(range(mesh.world))
        while self._todo:
            number = self._todo.popleft()
            self._waiting.discard(number)
            self._run(self.ranks[number])

    def _changed(self, number: int, program: Sequence[Step]) -> Sequence[Step]:
        fault = self.faults.get(number)
        if fault is None or fault.kind not in {"skips", "dtype", "size", "op"}:
            return program
        changed = list(program)
        step = changed[fault.at]
        if fault.kind == "skips":
            del changed[fault.at]
        elif fault.kind == "dtype":
            changed[fault.at] = step._replace(dtype="Float")
        elif fault.kind == "size":
            changed[fault.at] = step._replace(size=step.size + 1)
        else:
            changed[fault.at] = step._replace(op="broadcast" if step.op != "broadcast" else "all_reduce")
        return changed

    @property
    def is_over(self) -> bool:
        """Whether every rank has come to its end."""
        return all(
            rank.next_step == len(rank.program) and all(call.is_over for call in rank.calls) for rank in self.ranks
        )

    def _wake(self, number: int) -> None:
        if number not in self._waiting:
            self._waiting.add(number)
            self._todo.append(number)

    def _run(self, rank: Rank) -> None:
        """A rank's turn: its CPU does some steps, its GPU a little."""
        moves = self._advance_cpu(rank)
        moves = self._advance_kernels(rank) or moves
        for stream in list(rank.streams.values()):
            moves = self._advance_stream(rank, stream) or moves
        if moves:
            self._wake(rank.number)

    def _finish(self, rank: Rank) -> bool:
        """Whether the GPU does one thing more."""
        fault = self.faults.get(rank.number)
        if fault is not None and fault.kind == "gpu" and rank.things_over >= fault.at:
            return False
        rank.things_over += 1
        return True

    # ------------------------------------------------------------------------------------------------------------- CPU

    def _advance_cpu(self, rank: Rank) -> bool:
        fault = self.faults.get(rank.number)
        stops_at = fault.at if fault is not None and fault.kind == "stops" else len(rank.program)
        before = rank.next_step
        while rank.next_step < min(len(rank.program), stops_at, before + _CPU_STEPS):
            step = rank.program[rank.next_step]
            if step.do == "sync" and rank.kernels_over < len(rank.kernels):
                break
            rank.next_step += 1
            if step.do == "kernel":
                rank.kernels.append(None)
            elif step.do != "sync":
                self._enqueue(rank, step)
        return rank.next_step > before

    def _enqueue(self, rank: Rank, step: Step) -> None:
        group = step.group
        stream = (group, -1)
        if step.do in {"send", "recv"} and self._pair_streams:
            stream = (group, step.peer)
        call = Call(step, stream, len(rank.kernels))
        if step.do == "call":
            rank.seq[group] = rank.seq.get(group, 0) + 1
        else:
            rank.p2p_seq[group] = rank.p2p_seq.get(group, 0) + 1
            parts = step.parts or ((step.do, step.peer),)
            for do, peer in parts:
                source, target = (rank.number, peer) if do == "send" else (peer, rank.number)
                key = (group, source, target)
                kind = (*key, 0 if do == "send" else 1)
                count = rank.transfers[kind] = rank.transfers.get(kind, 0) + 1
                call.opposite.append(((*key, count), do == "send"))
        call.number = rank.seq.get(group, 0)
        call.p2p_number = rank.p2p_seq.get(group, 0)
        rank.calls.append(call)
        rank.streams.setdefault(stream, deque()).append(call)
        if step.waits:
            rank.kernels.append(call)

    # ------------------------------------------------------------------------------------------------------------- GPU

    def _advance_kernels(self, rank: Rank) -> bool:
        fault = self.faults.get(rank.number)
        before = rank.kernels_over
        while rank.kernels_over < min(len(rank.kernels), before + 1):
            waited_for = rank.kernels[rank.kernels_over]
            if waited_for is not None:
                if not waited_for.is_over:
                    break
            else:
                never_ends = fault is not None and fault.kind == "kernel" and rank.kernels_over >= fault.at
                if never_ends or not self._finish(rank):
                    break
            rank.kernels_over += 1
        return rank.kernels_over > before

    def _advance_stream(self, rank: Rank, stream: deque[Call]) -> bool:
        moved = False
        while stream:
            call = stream[0]
            if call.is_over:
                stream.popleft()
                moved = True
                continue
            if not call.begun:
                if rank.kernels_over < call.after or self._is_dead(rank):
                    break
                call.begun = moved = True
                self._begin(rank, call)
            if not call.is_over:
                break
        return moved

    def _is_dead(self, rank: Rank) -> bool:
        fault = self.faults.get(rank.number)
        return fault is not None and fault.kind == "gpu" and rank.things_over >= fault.at

    def _begin(self, rank: Rank, call: Call) -> None:
        if call.step.do == "call":
            self._begin_collective(rank, call)
        else:
            self._begin_transfer(rank, call)

    def _begin_collective(self, rank: Rank, call: Call) -> None:
        group = call.step.group
        number = rank.launched[group] = rank.launched.get(group, 0) + 1
        meeting = self._collectives.get((group, number))
        if meeting is None:
            meeting = self._collectives[group, number] = Meeting(len(self.mesh.groups[group]))
        meeting.begun[rank.number] = call
        meeting.kinds.add((call.step.op, call.step.size, call.step.dtype, call.step.root))
        if len(meeting.begun) < meeting.members or len(meeting.kinds) > 1:
            return
        dying = [
            fault
            for member in meeting.begun
            if (fault := self.faults.get(member)) is not None
            and fault.kind == "gpu"
            and self.ranks[member].things_over >= fault.at - 1
        ]
        if dying and not all(fault.others_finish for fault in dying):
            for fault in dying:
                self.ranks[fault.rank].things_over = fault.at
            return
        for member, theirs in meeting.begun.items():
            is_dying = any(fault.rank == member for fault in dying)
            if is_dying:
                self.ranks[member].things_over = self.faults[member].at
            elif self._finish(self.ranks[member]):
                self._end(member, theirs)

    def _begin_transfer(self, rank: Rank, call: Call) -> None:
        for key, is_send in call.opposite:
            self._ends.setdefault(key, {})["send" if is_send else "recv"] = (rank.number, call)
        touched = {(rank.number, id(call)): (rank.number, call)}
        for key, is_send in call.opposite:
            other = self._ends[key].get("recv" if is_send else "send")
            if other is not None:
                touched[other[0], id(other[1])] = other
        for number, theirs in touched.values():
            if not theirs.is_over and self._has_met(theirs) and self._finish(self.ranks[number]):
                self._end(number, theirs)

    def _has_met(self, call: Call) -> bool:
        """Whether all its parts have met their other ends, and those are able to move the data."""
        for key, is_send in call.opposite:
            other = self._ends[key].get("recv" if is_send else "send")
            if other is None:
                if not (is_send and call.step.size <= self._eager):
                    return False
            elif self._is_dead(self.ranks[other[0]]) and not other[1].is_over:
                return False
        return True

    def _end(self, number: int, call: Call) -> None:
        call.is_over = True
        step = call.step
        self.ranks[number].last_over[step.group] = call.number if step.do in {"call", "batch"} else call.p2p_number
        self._wake(number)


# --------------------------------------------------------------------------------------------------------------- dumps


class Recorder(NamedTuple):
    """How the recorders of a job are set, and which torch writes them.

    ``size``: how many calls they keep. ``names``: ``numbers`` (the same everywhere, one for each group), ``dimension``
    (torch 2.5 to 2.12: all groups of a mesh's dimension have one), ``salted`` (2.13: different on each rank).
    ``backend``: ``nccl`` or ``nccl2``. ``has_starts``: TORCH_NCCL_ENABLE_TIMING.
    """

    size: int = 2000
    names: str = "numbers"
    backend: str = "nccl"
    has_starts: bool = False


def dump(job: Job, number: int, recorder: Recorder) -> dict[str, Any]:
    """The Flight Recorder of one rank, as the JSON of torch's worker server has it."""
    mesh, rank = job.mesh, job.ranks[number]
    own = job.groups_of[number]
    ids = {group: index for index, group in enumerate(own)}
    names = {group: _name(mesh, group, number, recorder) for group in own}
    entries: list[dict[str, Any]] = []
    for call in rank.calls:
        entries += _entries(mesh, number, call, recorder, ids, names)
    for record, entry in enumerate(entries):
        entry["record_id"] = record
        entry["time_created_ns"] = 1_795_000_000_000_000_000 + record
    status = {}
    for group in own:
        calls = [call for call in rank.calls if call.step.group == group]
        if calls:
            last = calls[-1]
            status[str(ids[group])] = {
                "last_enqueued_collective": str(last.number if last.step.do != "send" else last.p2p_number),
                "last_started_collective": "-1",
                "last_completed_collective": str(rank.last_over.get(group, -1)),
            }
    config = {
        names[group]: {
            "name": names[group],
            "desc": mesh.descriptions[group],
            "ranks": "[" + ", ".join(map(str, mesh.groups[group])) + "]",
        }
        for group in own
    }
    return {"entries": entries[-recorder.size :], "pg_config": config, "pg_status": status, "version": "2.10"}


def _name(mesh: Mesh, group: int, number: int, recorder: Recorder) -> str:
    if len(mesh.groups[group]) == mesh.world and group == 0:
        return "0"
    if recorder.names == "dimension":
        return f"mesh:{mesh.dimension[group]}"
    if recorder.names == "salted":
        return f"{(group * 7919 + number * 104_729) % 1_000_003:x}"
    return str(group)


def _entries(
    mesh: Mesh, number: int, call: Call, recorder: Recorder, ids: dict[int, int], names: dict[int, str]
) -> list[dict[str, Any]]:
    step, group = call.step, call.step.group
    members = mesh.groups[group]
    is_hook = recorder.backend == "nccl2"

    def entry(op: str, *, is_p2p: bool, tells: bool) -> dict[str, Any]:
        is_over = call.is_over and tells
        elements = step.size * (len(members) if op == "_all_gather_base" else 1)
        taken = step.size * (len(members) if op == "_reduce_scatter_base" else 1)
        inputs = [[taken]] if step.size else []
        outputs = [[elements]] if step.size else []
        if step.root >= 0 and not is_hook:
            # The lists of both are outputs to torch, and an undefined tensor stands in for that of any other rank.
            outputs = outputs * len(members) if step.root == number else [[0]]
        elif step.root >= 0 and step.root != number:
            inputs, outputs = ([], outputs) if op == "scatter" else (inputs, [])
        return {
            "collective_seq_id": call.number,
            "p2p_seq_id": call.p2p_number,
            "is_p2p": is_p2p,
            "pg_id": ids[group],
            "process_group": [names[group], mesh.descriptions[group]],
            "profiling_name": f"{recorder.backend}:{op}",
            "input_sizes": inputs,
            "output_sizes": outputs,
            "input_dtypes": [step.dtype],
            "output_dtypes": [step.dtype],
            "retired": is_over,
            "state": "completed" if is_over and not is_hook else _unfinished(call, recorder, tells=tells),
        }

    if step.do == "call":
        return [entry(step.op, is_p2p=False, tells=True)]
    index = members.index(number)
    parts = step.parts or ((step.do, step.peer),)
    texts = [f"{do} {index}{'->' if do == 'send' else '<-'}{members.index(peer)}" for do, peer in parts]
    if step.do != "batch" or is_hook:
        return [entry(op, is_p2p=True, tells=True) for op in texts]
    own = [entry(op, is_p2p=True, tells=False) for op in texts]
    return [*own, entry("coalesced", is_p2p=False, tells=True) | {"input_sizes": [], "output_sizes": []}]


def _unfinished(call: Call, recorder: Recorder, *, tells: bool) -> str:
    return "started" if recorder.has_starts and tells and call.begun and recorder.backend == "nccl" else "scheduled"


def open_calls(job: Job, number: int) -> list[Call]:
    """What a rank has called and what is not over, in the order in which it was called."""
    return [call for call in job.ranks[number].calls if not call.is_over]


def same_evidence(one: Job, other: Job) -> bool:
    """Whether the recorders of two jobs hold the same, whoever is the cause in each."""
    return all(
        len(a.calls) == len(b.calls)
        and all(x.is_over == y.is_over and x.step == y.step for x, y in zip(a.calls, b.calls, strict=True))
        for a, b in zip(one.ranks, other.ranks, strict=True)
    )
