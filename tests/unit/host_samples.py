"""Evidence of jobs on several hosts that tests start from: node1, node2, …, with the same number of ranks each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saferun.cluster.evidence import HostPart, HostPeer, LostHost, decode_part, encode_part, merge_parts
from saferun.evidence.job_evidence import (
    AbortReason,
    Capture,
    CaptureNote,
    CollectiveCall,
    CoreDump,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    OomKill,
    ProcessSnapshot,
    RankCollectives,
    RankOutput,
    StackDump,
    ThreadStack,
)
from saferun.model import ExitStatus, RankEnd

SITE = "/home/me/.venv/lib/python3.11/site-packages/torch"
TRAIN = "/home/me/project/train.py"
MODULE = Frame("<module>", TRAIN, 88)
STEP = Frame("step", TRAIN, 52)
ALL_REDUCE = Frame("all_reduce", f"{SITE}/distributed/distributed_c10d.py", 3205)
IN_ALL_REDUCE = (ALL_REDUCE, Frame("wrapper", f"{SITE}/distributed/c10d_logger.py", 83), STEP, MODULE)
IN_LOAD = (Frame("load_batch", TRAIN, 47), MODULE)
NOTHING = Capture()
START = 1_700_000_000.0
STARTED_AT = 500.0
RESET = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [10.0.0.{host}]:40123: "
    "Connection reset by peer"
)
TIMED_OUT = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv "
    "operation to complete"
)


def traceback_of(message: str, line: int = 52) -> tuple[str, ...]:
    """What a rank prints that raises in train.py."""
    return (
        "Traceback (most recent call last):",
        f'  File "{TRAIN}", line 88, in <module>',
        "    main()",
        f'  File "{TRAIN}", line {line}, in step',
        "    dist.all_reduce(loss)",
        message,
    )


def ended(
    rank: int,
    nproc: int,
    *,
    after_s: float = 31.4,
    code: int | None = None,
    signum: int | None = None,
    stopped: bool = False,
    offset_s: float = 0.0,
) -> RankEnd:
    """How a rank ended: in the clocks of its own host, which are behind the leader's by ``offset_s``."""
    host_clock = STARTED_AT * (1 + rank // nproc)  # each host has been up for another time
    return RankEnd(
        rank % nproc,
        rank,
        4000 + rank % nproc,  # numbers repeat across hosts
        ExitStatus(code, signum),
        host_clock + after_s,
        START + after_s - offset_s,
        stopped,
        "03:15:33",
    )


def look_of(rank: int, nproc: int, state: str = "S", waits_on: str = "", syscall: str = "futex") -> ProcessSnapshot:
    """What /proc shows of a rank."""
    return ProcessSnapshot(
        rank, 4000 + rank % nproc, 3000, True, "python", "python train.py", state, "", syscall, 12, 0, False,
        1 << 30, waits_on, 31.0,
    )  # fmt: skip


def dump_of(rank: int, nproc: int, frames: Sequence[Frame] = IN_ALL_REDUCE, failure: str = "") -> StackDump:
    """The stacks of a rank."""
    pid = 4000 + rank % nproc
    threads = () if failure else (ThreadStack("MainThread", pid, True, False, False, tuple(frames)),)
    return StackDump(rank, pid, True, "python", "py-spy", threads, failure)


def recorder_of(rank: int, enqueued: int = 7, completed: int = 6, op: str = "all_reduce") -> RankCollectives:
    """A Flight Recorder that has so many calls of the default group."""
    calls = tuple(
        CollectiveCall(seq, op, "[[1024, 1024]]", seq <= completed, False, 1_700_000_000_000_000_000 + rank + seq)
        for seq in range(max(1, enqueued - 8), enqueued + 1)
    )
    return RankCollectives(rank, (GroupProgress("0:default_pg", "default_pg", (), enqueued, -1, completed, calls),))


def host_evidence(
    host: int,
    nproc: int = 2,
    *,
    ends: Iterable[RankEnd] = (),
    said: Mapping[int, Sequence[str]] | None = None,
    capture: Capture = NOTHING,
    cores: tuple[CoreDump, ...] = (),
    hang: HangVerdict | None = None,
    **fields: object,
) -> Evidence:
    """What host ``host`` knows of its own ranks."""
    ranks = tuple(range(host * nproc, (host + 1) * nproc))
    told = said or {}
    return Evidence(
        host=f"node{host + 1}",
        started_at=STARTED_AT * (1 + host),
        ends=tuple(ends),
        outputs=tuple(
            RankOutput(
                rank - ranks[0],
                tuple(told.get(rank, ())),
                f"saferun-runs/7/node{host + 1}/attempt_0/rank_{rank}/stderr.log",
                "",
                0.0,
            )
            for rank in ranks
        ),
        abandoned=(),
        stop_signum=None,
        ranks=ranks,
        capture=capture,
        hang=hang,
        cores=cores,
        supervisor_pid=3000,
        script="train.py",
        cwd="/home/me/project",
        store_port=29500,
        started_time=START,
    )._replace(**fields)  # type: ignore[arg-type]


def captured(
    host: int,
    nproc: int = 2,
    frames: Mapping[int, Sequence[Frame]] | None = None,
    states: Mapping[int, str] | None = None,
    numbers: Mapping[int, int] | None = None,
) -> Capture:
    """What was seen of a host's ranks: in all_reduce, but for those named in ``frames`` and ``states``."""
    ranks = range(host * nproc, (host + 1) * nproc)
    return Capture(
        processes=tuple(look_of(rank, nproc, (states or {}).get(rank, "S")) for rank in ranks),
        stacks=tuple(dump_of(rank, nproc, (frames or {}).get(rank, IN_ALL_REDUCE)) for rank in ranks),
        collectives=tuple(recorder_of(rank, (numbers or {}).get(rank, 7)) for rank in ranks),
        notes=(CaptureNote("stacks", -1, 0, "/tmp/x/stacks.json", 0.2),),
        elapsed_s=0.5 + host,
    )


def peers_of(hosts: int, nproc: int = 2) -> tuple[HostPeer, ...]:
    """The hosts of a job; each has two addresses."""
    return tuple(
        HostPeer(
            host,
            f"node{host + 1}",
            tuple(range(host * nproc, (host + 1) * nproc)),
            (f"10.0.0.{host + 1}", f"192.168.0.{host + 1}"),
        )
        for host in range(hosts)
    )


def job(
    evidences: Mapping[int, Evidence],
    *,
    hosts: int = 4,
    nproc: int = 2,
    lost: Iterable[LostHost] = (),
    limit_bytes: int = 65536,
    hang: HangVerdict | None = None,
    trouble: AbortReason | None = None,
) -> Evidence:
    """All parts as they come to the leader, host 0: packed, sent, read and laid together."""
    parts = []
    for host, evidence in evidences.items():
        sent = decode_part(encode_part(evidence, limit_bytes))
        assert sent is not None
        parts.append(HostPart(host, 0, f"node{host + 1}", 0.0, evidence if host == 0 else sent))
    return merge_parts(
        parts, lost, world_size=hosts * nproc, peers=peers_of(hosts, nproc), hang=hang, abort_reason=trouble
    )


def failed() -> Evidence:
    """Rank 5 on node3 raises, saferun stops the others; node3's rank 4 cannot be killed; node2 has had an OOM kill."""
    bad = host_evidence(
        2,
        ends=[ended(5, 2, code=1)],
        said={5: traceback_of("ValueError: bad batch", 47)},
        capture=captured(2),
        abandoned=(0,),
    )
    parts = {
        host: host_evidence(
            host,
            ends=[ended(rank, 2, after_s=33.0, signum=15, stopped=True) for rank in (2 * host, 2 * host + 1)],
            capture=captured(host),
            oom=OomKill("host", 0, 0, (99,), 1, "kernel log") if host == 1 else None,
        )
        for host in (0, 1, 3)
    }
    return job({**parts, 2: bad}, trouble=AbortReason("failure", "node3", "exit code 1", 5))
