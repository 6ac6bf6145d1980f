"""Evidence, and what the diagnosis makes of it, for tests of the report's rooms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Diagnosis, StackNode
from saferun.evidence.job_evidence import (
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
MAIN = Frame("main", TRAIN, 80)
STEP = Frame("step", TRAIN, 52)
LOAD = Frame("load_batch", TRAIN, 47)
ALL_REDUCE = Frame("all_reduce", f"{SITE}/distributed/distributed_c10d.py", 3205)
IN_ALL_REDUCE = (MODULE, MAIN, STEP, Frame("wrapper", f"{SITE}/distributed/c10d_logger.py", 83), ALL_REDUCE)
IN_LOAD = (MODULE, MAIN, LOAD)
IN_LOADER = (*IN_LOAD, Frame("_try_get_data", f"{SITE}/utils/data/dataloader.py", 1275))
FILES = "saferun-runs/7"


def dead(rank: int, *, code: int | None = None, signum: int | None = None) -> RankEnd:
    """A rank that ended by itself; its local rank is its rank."""
    return RankEnd(
        rank, rank, 4000 + rank, ExitStatus(code, signum), 100.0, 1.7e9, stopped_by_us=False, clock="03:15:33"
    )


def merged(stacks: Mapping[int, Sequence[Frame]]) -> tuple[StackNode, ...]:
    """Stacks of ranks, outermost call first, as the tree that a diagnosis holds."""
    by_frame: dict[Frame, dict[int, Sequence[Frame]]] = {}
    for rank, frames in stacks.items():
        if frames:
            by_frame.setdefault(frames[0], {})[rank] = frames[1:]
    return tuple(StackNode(frame, tuple(sorted(below)), merged(below)) for frame, below in by_frame.items())


def stopped(rank: int) -> RankEnd:
    """A rank that saferun ended because of another one."""
    return dead(rank, signum=15)._replace(stopped_by_us=True, at=101.0)


def without(rank: int, count: int) -> tuple[int, ...]:
    """All of ``count`` ranks but one."""
    return tuple(other for other in range(count) if other != rank)


def diagnosis_of(headline: str = "it failed", **fields: object) -> Diagnosis:
    """A diagnosis that says nothing but this."""
    return Diagnosis(headline, None, None, (), (), ())._replace(**fields)  # type: ignore[arg-type]


QUIET = HangVerdict("quiescent", tuple(range(8)), 300.4, certain=True)


def thread_of(frames: Iterable[Frame]) -> ThreadStack:
    """A main thread; the frames are given outermost first."""
    return ThreadStack("MainThread", 1, is_main=True, active=False, owns_gil=False, frames=tuple(frames)[::-1])


def snapshot_of(rank: int, syscall: str = "futex", wchan: str = "futex_wait", waits_on: str = "") -> ProcessSnapshot:
    """A rank that sleeps in the kernel."""
    command = "python train.py --lr 0.1 --api-key abc123 TOKEN=abc123"
    return ProcessSnapshot(
        rank, 4000 + rank, 4999, True, "python", command, "S", wchan, syscall, 12, 0, False, 1 << 30, waits_on, 12.5
    )


def dump_of(rank: int, frames: Iterable[Frame]) -> StackDump:
    """A rank's stacks; the frames are given outermost first."""
    return StackDump(rank, 4000 + rank, True, "python", "py-spy", (thread_of(frames),))


def recorder_of(rank: int, enqueued: int, count: int, completed: int = 4, op: str = "all_reduce") -> RankCollectives:
    """The Flight Recorder of a rank that has made so many calls; ``op`` is the last one."""
    sizes = "[[1024, 1024]]"
    calls = tuple(
        CollectiveCall(seq, op if seq == enqueued else "all_reduce", sizes, seq <= completed, False, created_ns=0)
        for seq in range(1, enqueued + 1)
    )
    group = GroupProgress("0", "default_pg", tuple(range(count)), enqueued, -1, completed, calls)
    return RankCollectives(rank, (group,))


def evidence_with(count: int, **fields: object) -> Evidence:
    """Evidence of ``count`` ranks on node1, with what is given."""
    bare = Evidence(
        host="node1",
        started_at=100.0 - 31.4,
        ends=(),
        outputs=(),
        abandoned=(),
        stop_signum=None,
        ranks=tuple(range(count)),
        script=TRAIN,
        cwd="/home/me/project",
    )
    return bare._replace(**fields)  # type: ignore[arg-type]


def evidence_of(count: int = 8) -> Evidence:
    """Rank 3 of some ranks sleeps in load_batch, the others wait for it in all_reduce."""
    store = "a connection to 10.0.0.2:29500 (ESTABLISHED)"
    sleeper = snapshot_of(3, "clock_nanosleep", "hrtimer_nanosleep")
    return evidence_with(
        count,
        capture=Capture(
            processes=tuple(sleeper if rank == 3 else snapshot_of(rank, waits_on=store) for rank in range(count)),
            stacks=(
                *(dump_of(rank, IN_LOAD if rank == 3 else IN_ALL_REDUCE) for rank in range(count)),
                StackDump(4, 4100, False, "pt_data_worker", "py-spy", (), "ptrace was denied"),
            ),
            collectives=tuple(recorder_of(rank, 4 if rank == 3 else 5, count) for rank in range(count)),
            host_lines=("GPU 0: 40 GiB of 80 GiB in use",),
            notes=(
                CaptureNote("py_spy", 0, 4000, "saferun-runs/7/node1/attempt_0/hang_1/rank_0.py_spy.json", 0.03),
                CaptureNote("gpu", -1, 0, "", 0.2, "no NVIDIA driver"),
            ),
            timed_out=("strace of rank 5",),
            elapsed_s=0.4,
        ),
        hang=QUIET._replace(ranks=tuple(range(count))),
        kernel_lines=("oom-kill: nothing of the kind",),
    )


def sleeping(count: int) -> Diagnosis:
    """What follows from ``evidence_of(count)``."""
    return diagnose(evidence_of(count))


IN_BROADCAST = (MODULE, MAIN, Frame("share", TRAIN, 61), Frame("broadcast", ALL_REDUCE.file, 2900))
MISMATCH = diagnose(
    evidence_with(
        4,
        capture=Capture(
            processes=tuple(map(snapshot_of, range(4))),
            stacks=tuple(dump_of(rank, IN_BROADCAST if rank == 3 else IN_ALL_REDUCE) for rank in range(4)),
            collectives=(
                *(recorder_of(rank, 5, 4) for rank in range(3)),
                recorder_of(3, 5, 4, op="broadcast"),
            ),
        ),
        hang=HangVerdict("stuck_collective", tuple(range(4)), 300.4, certain=True),
    )
)
"""Rank 3 calls a different collective."""

CORE = CoreDump(
    2,
    4002,
    11,
    "",
    180_355_072,
    kept=False,
    tool="pystack",
    threads=(
        ThreadStack(
            "python",
            4002,
            is_main=True,
            active=True,
            owns_gil=True,
            frames=(
                Frame(
                    "at::native::(anonymous namespace)::embedding_lookup<float, at::Tensor const&>(at::Tensor const&)",
                    f"{SITE}/lib/libtorch_cpu.so",
                    0,
                    native=True,
                ),
                Frame("THPVariable_embedding(_object*, _object*)", f"{SITE}/lib/libtorch_python.so", 0, native=True),
                Frame("cfunction_call", "/usr/lib/libpython3.11.so", 0, native=True),
                Frame("embedding", f"{SITE}/nn/functional.py", 2210),
                Frame("forward", f"{SITE}/nn/modules/sparse.py", 190),
                Frame("_call_impl", f"{SITE}/nn/modules/module.py", 1784),
                Frame("_wrapped_call_impl", f"{SITE}/nn/modules/module.py", 1773),
                STEP,
                MAIN,
                MODULE,
            ),
        ),
    ),
    address="0x10",
)

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in <module>',
    "    main()",
    '  File "train.py", line 52, in step',
    '    loss = model(batch["labels"])',
    "KeyError: 'labels'",
)
FATAL = (
    "step 99  loss 2.31",
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007f3a4b5c6740 (most recent call first):",
    f'  File "{SITE}/nn/functional.py", line 2210 in embedding',
    f'  File "{TRAIN}", line 52 in step',
    f'  File "{TRAIN}", line 80 in main',
    f'  File "{TRAIN}", line 88 in <module>',
    "",
    "Extension modules: numpy._core._multiarray_umath, torch._C (total: 14)",
)
LOST = ("RuntimeError: [gloo/transport/tcp/pair.cc:538] Read error [10.0.0.2]:40123: Connection reset by peer",)


def output_of(rank: int, lines: Sequence[str]) -> RankOutput:
    """What a rank wrote to stderr."""
    path = f"saferun-runs/7/node1/attempt_0/rank_{rank}/stderr.log"
    return RankOutput(rank, tuple(lines), path, "", 0.0)


SEGFAULT = diagnose(
    evidence_with(
        4,
        ends=(dead(2, signum=11), dead(3, code=1), *(stopped(rank) for rank in (0, 1))),
        outputs=tuple(output_of(rank, {2: FATAL, 3: (*TRACEBACK[:-1], *LOST)}.get(rank, ())) for rank in range(4)),
        capture=Capture(
            processes=tuple(map(snapshot_of, range(2))), stacks=tuple(dump_of(rank, IN_ALL_REDUCE) for rank in range(2))
        ),
        cores=(CORE,),
    )
)
"""Rank 2 crashes, rank 3 loses its connection to it."""

EXCEPTION_EVERYWHERE = diagnose(
    evidence_with(
        8,
        ends=tuple(dead(rank, code=1) for rank in (5, *without(5, 8))),
        outputs=tuple(output_of(rank, TRACEBACK) for rank in range(8)),
    )
)
"""All ranks raise the same exception."""

OUT_OF_MEMORY = diagnose(
    evidence_with(
        4,
        ends=(dead(2, signum=9), *(stopped(rank) for rank in (0, 1, 3))),
        outputs=tuple(output_of(rank, ("step 99  loss 2.31",) if rank == 2 else ()) for rank in range(4)),
        capture=Capture(
            processes=tuple(map(snapshot_of, (0, 1, 3))),
            stacks=(*(dump_of(rank, IN_ALL_REDUCE) for rank in range(2)), dump_of(3, IN_LOADER)),
        ),
        oom=OomKill("cgroup", 64 << 30, 61 << 30, (4002,), 1, "/sys/fs/cgroup/memory.events"),
    )
)
"""The OOM killer ends rank 2 while rank 3 waits for its data loader."""
