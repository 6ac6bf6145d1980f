"""How long the diagnosis of a hang of many ranks takes, and how much memory.

Usage: python benchmarks/diagnosis.py [RANKS [HOSTS]]

The job is a simulated one of the tests (a pipeline whose layers are split, with a stage that sleeps): the Flight
Recorders of all ranks as torch has them, a stack of each main thread, packed by each host and unpacked by the leader,
as between hosts; then diagnosed. Memory is what the process has more at the peak than before the parts arrive.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from saferun.captures.recorder_content import read_groups
from saferun.cluster.evidence.packing import decode_part, encode_part
from saferun.diagnosis import diagnose
from saferun.evidence.job_evidence import (
    Capture,
    Evidence,
    Frame,
    HangVerdict,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    ThreadStack,
)
from tests.unit.diagnosis.nccl_job import Fault, Job, Recorder, dump
from tests.unit.diagnosis.nccl_meshes import SHAPES

_PART_BYTES = 4 << 20
_SLEEPER = 421
_C10D = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def parts_of(ranks: int, hosts: int) -> list[str]:
    """What each host hands to the leader."""
    mesh, programs = SHAPES["pipeline"](Random(7), ranks)  # noqa: S311 - no secret
    job = Job(mesh, programs, [Fault(_SLEEPER % ranks, "stops", 12)])
    recorder = Recorder(names="salted")
    parts = []
    for host in range(hosts):
        own = range(host * ranks // hosts, (host + 1) * ranks // hosts)
        collectives = tuple(
            RankCollectives(rank, read_groups(dump(job, rank, recorder), "dump_nccl_trace_json")) for rank in own
        )
        capture = Capture(
            processes=tuple(_process(rank) for rank in own),
            stacks=tuple(_stack(rank, rank == _SLEEPER % ranks) for rank in own),
            collectives=collectives,
        )
        parts.append(encode_part(_evidence(host, tuple(own), capture), _PART_BYTES))
    return parts


def _process(rank: int) -> ProcessSnapshot:
    return ProcessSnapshot(
        rank, 1000 + rank, 1, True, "python3", "train.py", "S", "", "", 40, 0, False, 1 << 30, "", 9.0
    )


def _stack(rank: int, sleeps: bool) -> StackDump:  # noqa: FBT001 - one of two stacks
    step = Frame("train_step", "/job/train.py", 120)
    library = [
        Frame(f"call_{number}", "/opt/venv/lib/python3.11/site-packages/model.py", number) for number in range(24)
    ]
    inner = Frame("load", "/job/data.py", 33) if sleeps else Frame("wait", _C10D, 900)
    thread = ThreadStack("MainThread", 1000 + rank, True, False, False, (inner, *library, step))
    return StackDump(rank, 1000 + rank, True, "python3", "py-spy", (thread,))


def _evidence(host: int, ranks: tuple[int, ...], capture: Capture) -> Evidence:
    verdict = HangVerdict("stuck_collective", ranks, 300.0, certain=True, busy=ranks)
    return Evidence(
        host=f"node{host}",
        started_at=0.0,
        ends=(),
        outputs=(),
        abandoned=(),
        stop_signum=None,
        ranks=ranks,
        capture=capture,
        hang=verdict,
        script="/job/train.py",
        cwd="/job",
    )


def merged(parts: list[str]) -> Evidence:
    """The evidence of all hosts, as the leader has it."""
    every = [part for part in map(decode_part, parts) if part is not None]
    first = every[0]
    capture = Capture(
        processes=tuple(one for part in every for one in part.capture.processes),
        stacks=tuple(one for part in every for one in part.capture.stacks),
        collectives=tuple(one for part in every for one in part.capture.collectives),
    )
    ranks = tuple(rank for part in every for rank in part.ranks)
    return first._replace(ranks=ranks, capture=capture, world_size=len(ranks))


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure once, in a process that has done nothing else but make the parts."""
    import os
    import pickle
    import tempfile

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    hosts = int(sys.argv[2]) if len(sys.argv) > 2 else max(1, ranks // 8)
    with tempfile.TemporaryFile() as file:
        pid = os.fork()
        if not pid:
            pickle.dump(parts_of(ranks, hosts), file)
            file.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        file.seek(0)
        parts = pickle.load(file)  # noqa: S301 - our own child's
    before_mib, began, began_cpu = peak_mib(), time.monotonic(), time.process_time()
    evidence = merged(parts)
    unpacked = time.process_time()
    diagnosis = diagnose(evidence)
    ended = time.process_time()
    size_kib = sum(map(len, parts)) / 1024
    print(f"{ranks} ranks of {hosts} hosts: {size_kib:.0f} KiB of parts")
    print(f"  unpacked in {unpacked - began_cpu:.2f} s, diagnosed in {ended - unpacked:.2f} s of processor time")
    print(f"  {time.monotonic() - began:.2f} s in all, {peak_mib() - before_mib:.0f} MiB more than before")
    print(f"  {diagnosis.headline}")


if __name__ == "__main__":
    main()
