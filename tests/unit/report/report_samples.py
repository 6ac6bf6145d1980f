"""Diagnoses that tests of the report's rooms start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saferun.evidence import (
    Capture,
    CaptureNote,
    Cause,
    CollectiveCall,
    CoreDump,
    Diagnosis,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    ProcessSnapshot,
    RankCollectives,
    RankOutput,
    StackDump,
    StackNode,
    ThreadStack,
    Traceback,
    WaitGroup,
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
ERR_LOG = "saferun_runs/7/node1/attempt_0/rank_2/stderr.log"
FILES = "saferun_runs/7"


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


def without(rank: int, count: int) -> tuple[int, ...]:
    """All of ``count`` ranks but one."""
    return tuple(other for other in range(count) if other != rank)


def diagnosis_of(headline: str = "it failed", **fields: object) -> Diagnosis:
    """A diagnosis that says nothing but this."""
    return Diagnosis(headline, None, None, (), (), ())._replace(**fields)  # type: ignore[arg-type]


def sleeping(count: int) -> Diagnosis:
    """Rank 3 of some ranks sleeps, the others wait for it."""
    others = without(3, count)
    return diagnosis_of(
        f"rank 3 (node1) sleeps while {count - 1} other ranks wait for it in all_reduce",
        cause=Cause(
            "hang_sleep",
            f"sleeps while {count - 1} other ranks wait for it in all_reduce",
            (3,),
            "time.sleep at train.py:47",
            "look at what load_batch waits for at train.py:47",
            "train.py:47 in load_batch",
        ),
        groups=(
            WaitGroup("collective", "all_reduce", others, "train.py:52 in step"),
            WaitGroup("sleep", "time.sleep", (3,), "train.py:47 in load_batch"),
        ),
        tree=merged({rank: IN_LOAD if rank == 3 else IN_ALL_REDUCE for rank in range(count)}),
        findings=("all_reduce 5 of group 0: rank 3 has enqueued 4, the others 5",),
    )


QUIET = HangVerdict("quiescent", tuple(range(8)), 300.4, certain=True)

MISMATCH = diagnosis_of(
    "ranks 0-2 (node1) are in all_reduce while rank 3 is in broadcast, both as collective 5 of group 0",
    cause=Cause(
        "mismatched_collectives",
        "the ranks called different collectives",
        (3,),
        "rank 3: 5 broadcast [[4]]; ranks 0-2: 5 all_reduce [[1024, 1024]]",
        "every rank must call the same collectives in the same order: compare train.py:52 with train.py:61",
        "train.py:61 in share",
    ),
    groups=(
        WaitGroup("collective", "all_reduce", (0, 1, 2), "train.py:52 in step"),
        WaitGroup("collective", "broadcast", (3,), "train.py:61 in share"),
    ),
    tree=merged(
        {
            **dict.fromkeys(range(3), IN_ALL_REDUCE),
            3: (MODULE, MAIN, Frame("share", TRAIN, 61), Frame("broadcast", ALL_REDUCE.file, 2900)),
        }
    ),
)

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

SEGFAULT = diagnosis_of(
    "rank 2 (node1, local rank 2, pid 4002) failed first at 03:15:33, 31.4 s after the start: segmentation fault in "
    "at::native::embedding_lookup",
    first_failure=dead(2, signum=11),
    output=RankOutput(
        2,
        (
            "step 99  loss 2.31",
            "Fatal Python error: Segmentation fault",
            "",
            "Current thread 0x00007f3a4b5c6740 (most recent call first):",
            f'  File "{SITE}/nn/functional.py", line 2210 in embedding',
            '  File "train.py", line 52 in step',
            '  File "train.py", line 80 in main',
            '  File "train.py", line 88 in <module>',
            "",
            "Extension modules: numpy._core._multiarray_umath, torch._C (total: 14)",
        ),
        ERR_LOG,
        "",
        0.0,
    ),
    also_failed=(dead(3, code=1),),
    stopped=(0, 1),
    cause=Cause(
        "segmentation_fault",
        "segmentation fault in at::native::embedding_lookup",
        (2,),
        "Fatal Python error: Segmentation fault",
        "check the indices and dtypes that go into embedding() at train.py:52",
        "train.py:52 in step",
    ),
    victims=(3,),
    groups=(
        WaitGroup("dead", "killed by SIGSEGV", (2,), ""),
        WaitGroup("collective", "all_reduce", (0, 1), "train.py:52 in step"),
    ),
    tree=merged({0: IN_ALL_REDUCE, 1: IN_ALL_REDUCE}),
    core=CORE,
)

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in <module>',
    "    main()",
    '  File "train.py", line 52, in step',
    '    loss = model(batch["labels"])',
    "KeyError: 'labels'",
)

EXCEPTION_EVERYWHERE = diagnosis_of(
    "ranks 0-7 (node1) all raised KeyError: 'labels' at train.py:52 in step, 2.0 s after the start",
    first_failure=dead(5, code=1),
    output=RankOutput(5, TRACEBACK, ERR_LOG, "", 0.0),
    also_failed=tuple(dead(rank, code=1) for rank in without(5, 8)),
    cause=Cause(
        "python_exception",
        "KeyError: 'labels'",
        tuple(range(8)),
        "KeyError: 'labels'",
        "all ranks fail alike: it is the script or its input, not a host",
        "train.py:52 in step",
    ),
    groups=(WaitGroup("dead", "exit code 1", tuple(range(8)), ""),),
    tracebacks=(Traceback(tuple(range(8)), TRACEBACK),),
)

OUT_OF_MEMORY = diagnosis_of(
    "rank 2 (node1, local rank 2, pid 4002) failed first at 03:15:33, 31.4 s after the start: killed by the kernel's "
    "OOM killer (cgroup limit 64 GiB, rank used 61 GiB)",
    first_failure=dead(2, signum=9),
    output=RankOutput(2, ("step 99  loss 2.31",), ERR_LOG, "", 0.0),
    stopped=(0, 1, 3),
    cause=Cause(
        "host_oom",
        "killed by the kernel's OOM killer (cgroup limit 64 GiB, rank used 61 GiB)",
        (2,),
        "oom_kill went from 0 to 1 in /sys/fs/cgroup/memory.events",
        "give the job more memory, or lower the number of data-loader workers and what they prefetch",
    ),
    groups=(
        WaitGroup("dead", "killed by SIGKILL", (2,), ""),
        WaitGroup("collective", "all_reduce", (0, 1), "train.py:52 in step"),
        WaitGroup("data_loading", "the data loader", (3,), "train.py:47 in load_batch"),
    ),
    tree=merged({0: IN_ALL_REDUCE, 1: IN_ALL_REDUCE, 3: IN_LOAD}),
)


def thread_of(frames: Iterable[Frame]) -> ThreadStack:
    """A main thread; the frames are given outermost first."""
    return ThreadStack("MainThread", 1, is_main=True, active=False, owns_gil=False, frames=tuple(frames)[::-1])


def evidence_of(count: int = 8) -> Evidence:
    """What led to ``sleeping(count)``."""
    looks = tuple(
        ProcessSnapshot(
            rank,
            4000 + rank,
            4999,
            True,
            "python",
            "python train.py --lr 0.1 --api-key abc123 TOKEN=abc123",
            "S",
            "futex_wait",
            "futex",
            12,
            0,
            False,
            1 << 30,
            "a connection to 10.0.0.2:29500 (ESTABLISHED)",
            12.5,
        )
        for rank in range(count)
    )
    stacks = tuple(
        StackDump(rank, 4000 + rank, True, "python", "py-spy", (thread_of(IN_LOAD if rank == 3 else IN_ALL_REDUCE),))
        for rank in range(count)
    )
    call = CollectiveCall(5, "all_reduce", "[[1024, 1024]]", retired=False, is_p2p=False, created_ns=0)
    return Evidence(
        host="node1",
        started_at=98.0,
        ends=(),
        outputs=(),
        abandoned=(),
        stop_signum=None,
        ranks=tuple(range(count)),
        capture=Capture(
            processes=looks,
            stacks=(*stacks, StackDump(4, 4100, False, "pt_data_worker", "py-spy", (), "ptrace was denied")),
            collectives=(
                RankCollectives(0, (GroupProgress("0", "default", tuple(range(count)), 5, -1, 4, (call,)),)),
                RankCollectives(3, (), "no answer within 2 s"),
            ),
            host_lines=("GPU 0: 40 GiB of 80 GiB in use",),
            notes=(
                CaptureNote("py_spy", 0, 4000, "saferun_runs/7/node1/attempt_0/hang_1/rank_0.py_spy.json", 0.03),
                CaptureNote("gpu", -1, 0, "", 0.2, "no NVIDIA driver"),
            ),
            timed_out=("strace of rank 5",),
            elapsed_s=0.4,
        ),
        hang=QUIET,
        kernel_lines=("oom-kill: nothing of the kind",),
    )
