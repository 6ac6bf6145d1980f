"""Jobs on GPUs in time: what the Flight Recorders of their ranks hold. Simulated: no GPU has been asked.

It runs the programs of ``nccl_meshes``. A rank's CPU enqueues kernels and calls, and waits where the program reads a
value from the GPU; its GPU has a stream for kernels and one for each group. A collective begins on a rank when its
stream has come to it, and ends everywhere a moment after the last rank has begun it. torch's watchdog sees that some
time later.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from saferun.captures.recorder_waits import calls_of, rows_of
from saferun.watchdog.recorded_stragglers import RecordedStragglers, recorded_rows
from tests.unit.diagnosis.nccl_job import Mesh, Step
from tests.unit.diagnosis.nccl_meshes import Shape

INTERVAL_S = 12.0
DUMPS = 4
_BASE_NS = 1_795_000_000_000_000_000


class Pace(NamedTuple):
    """How long things take, in seconds.

    ``kernel_s``: a kernel; ``cpu_s``: to enqueue one; ``comm_s``: a call, after the last rank has come; ``jitter``: the
    standard deviation of a kernel, as a share; ``slow``: ranks that are slower, by ``factor``; ``late_cpus``: ranks
    whose CPUs take twice as long, and not their GPUs; ``breaks``: every so many seconds rank 0 works alone for so long.
    """

    kernel_s: float = 0.05
    cpu_s: float = 0.0005
    comm_s: float = 0.004
    jitter: float = 0.05
    slow: tuple[int, ...] = ()
    factor: float = 1.3
    late_cpus: tuple[int, ...] = ()
    breaks: tuple[tuple[float, float], ...] = ()


CPU_BOUND = Pace(kernel_s=0.001, cpu_s=0.05)


class Recorders(NamedTuple):
    """How the recorders are set: ``size`` entries, with durations or not; and by how much the hosts' clocks are off."""

    is_measured: bool = True
    size: int = 2000
    clocks_s: tuple[float, ...] = (0.0,)


class _Call(NamedTuple):
    step: Step
    seq: int
    created_s: float
    began_s: float
    ended_s: float


class _Meeting:
    def __init__(self) -> None:
        self.began_s: dict[object, float] = {}


_Meetings = dict[tuple[object, ...], _Meeting]


class TimedJob:
    """A job that runs for a time.

    Args:
        shape: its process groups and the program of each rank, which is repeated.
        lasts_s: how long.
        pace: of its ranks.
        seed: of what differs.
    """

    def __init__(self, shape: Shape, lasts_s: float, pace: Pace, seed: int = 0) -> None:
        self.mesh: Mesh
        self.mesh, programs = shape
        self.calls: list[list[_Call]] = [[] for _ in programs]
        self._pace, self._lasts_s, self._seed = pace, lasts_s, seed
        meetings: _Meetings = {}
        # All of them run the program as often.
        times = self._times(programs)
        running = {rank: self._run(rank, program, times, meetings) for rank, program in enumerate(programs)}
        while running:
            for rank in list(running):
                if next(running[rank], None) is None:
                    del running[rank]

    def _times(self, programs: Sequence[Sequence[Step]]) -> int:
        kernels = max(sum(step.do == "kernel" for step in program) for program in programs)
        return math.ceil(self._lasts_s / (kernels * max(self._pace.kernel_s, self._pace.cpu_s))) + 1

    def _run(self, rank: int, program: Sequence[Step], times: int, meetings: _Meetings) -> Iterator[bool]:
        pace, chance = self._pace, Random(self._seed * 1009 + rank)  # noqa: S311 - the same every time
        factor = pace.factor if rank in pace.slow else 1.0
        cpu_s = model_s = 0.0
        free_s: dict[int, float] = {}
        seq: dict[int, int] = {}
        sent: dict[tuple[int, int, int, bool], int] = {}
        for step in [step for _ in range(times) for step in program]:
            if step.do == "sync":
                before, cpu_s = cpu_s, max(cpu_s, model_s)
                if rank == 0:
                    cpu_s += sum(length for every, length in pace.breaks if int(before / every) != int(cpu_s / every))
                continue
            if step.do == "kernel":
                spread = max(0.1, chance.gauss(1, pace.jitter)) * factor
                cpu_s += pace.cpu_s * spread * (2.0 if rank in pace.late_cpus else 1.0)
                model_s = max(model_s, cpu_s) + pace.kernel_s * spread
                continue
            created_s = cpu_s
            began_s = max(cpu_s, model_s, free_s.get(step.group, 0.0))
            seq[step.group] = seq.get(step.group, 0) + 1
            met = []
            if step.do == "call":
                met.append((meetings.setdefault((step.group, seq[step.group]), _Meeting()), rank))
            for do, peer in step.parts or (((step.do, step.peer),) if step.do != "call" else ()):
                key = (step.group, min(rank, peer), max(rank, peer), (do == "send") == (rank < peer))
                count = sent[key] = sent.get(key, 0) + 1
                met.append((meetings.setdefault((*key, count), _Meeting()), rank))
            for meeting, member in met:
                meeting.began_s[member] = began_s
            wanted = len(self.mesh.groups[step.group]) if step.do == "call" else 2
            while any(len(meeting.began_s) < wanted for meeting, _ in met):
                yield True
            ended_s = max(max(meeting.began_s.values()) for meeting, _ in met) + pace.comm_s
            free_s[step.group] = ended_s
            if step.waits:
                model_s = max(model_s, ended_s)
            self.calls[rank].append(_Call(step, seq[step.group], created_s, began_s, ended_s))

    def dump(self, rank: int, host: int, at_s: float, recorders: Recorders) -> dict[str, Any]:
        """What the recorder of a rank holds at a moment."""
        offset_ns = _BASE_NS + int(recorders.clocks_s[host % len(recorders.clocks_s)] * 1e9)
        phase_s = rank * 0.037 % 0.1
        own = [group for group, members in enumerate(self.mesh.groups) if rank in members]
        entries: list[dict[str, Any]] = []
        made = bisect(self.calls[rank], at_s, key=lambda call: call.created_s)
        for call in self.calls[rank][max(0, made - recorders.size) : made]:
            seen_s = math.ceil((call.ended_s - phase_s) / 0.1) * 0.1 + phase_s
            is_over = seen_s <= at_s
            entry: dict[str, Any] = {
                "collective_seq_id": call.seq,
                "p2p_seq_id": call.seq,
                "is_p2p": False,
                "pg_id": own.index(call.step.group),
                "process_group": [str(call.step.group), self.mesh.descriptions[call.step.group]],
                "profiling_name": f"nccl:{call.step.op}",
                "time_created_ns": offset_ns + int(call.created_s * 1e9),
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": offset_ns + int(seen_s * 1e9) if is_over else None,
                "retired": is_over,
                "state": "completed" if is_over else "scheduled",
            }
            if is_over and recorders.is_measured:
                entry["duration_ms"] = (call.ended_s - call.began_s) * 1e3
            members = self.mesh.groups[call.step.group]
            for do, peer in call.step.parts or (((call.step.do, call.step.peer),) if call.step.do != "call" else ()):
                name = f"nccl:{do} {members.index(rank)}{'->' if do == 'send' else '<-'}{members.index(peer)}"
                single = {"is_p2p": True, "profiling_name": name}
                if call.step.parts:
                    # Members of a batch never end.
                    single |= {"retired": False, "state": "scheduled", "time_discovered_completed_ns": None}
                    entries.append({key: value for key, value in entry.items() if key != "duration_ms"} | single)
                else:
                    entry |= single
            if call.step.parts:
                entry |= {"profiling_name": "nccl:coalesced"}
            entries.append(entry)
        config = {
            str(group): {
                "name": str(group),
                "desc": self.mesh.descriptions[group],
                "ranks": str(list(self.mesh.groups[group])),
            }
            for group in own
        }
        return {"entries": entries[-recorders.size :], "pg_config": config, "pg_status": {}, "version": "2.10"}


def named_of(job: TimedJob, recorders: Recorders, *, hosts: int = 1, dumps: int = DUMPS) -> set[tuple[int, ...]]:
    """The ranks that are named by some dumps, of one after the other every so often."""
    world = len(job.calls)
    stragglers = RecordedStragglers(INTERVAL_S, world)
    found = set()
    for number in range(1, dumps + 1):
        at_s = number * INTERVAL_S
        for host in range(hosts):
            own = range(host * world // hosts, (host + 1) * world // hosts)
            # One rank after the other.
            contents = {rank: job.dump(rank, host, at_s + 0.02 * (rank - own[0]), recorders) for rank in own}
            rows = rows_of({rank: calls_of(content) for rank, content in contents.items()})
            stragglers.take_rows(f"node{host}", recorded_rows(rows), own, at_s)
        one = stragglers.judge(at_s)
        if one is not None:
            found.add(one.ranks)
        elif stragglers.slow:
            found.add(stragglers.slow)
    return found
