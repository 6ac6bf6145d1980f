"""What single calls, threads and children of a rank wait for."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis.rank_waits import wait_groups
from saferun.evidence.diagnosis_values import WaitGroup
from saferun.evidence.job_evidence import Capture, Frame, HangVerdict, RankCollectives, StackDump, ThreadStack
from tests.unit.diagnosis.recorded_hangs import (
    C10D,
    CWD,
    SCRIPT,
    SITE,
    dump_of,
    look_of,
    native,
)
from tests.unit.diagnosis.waiting_steps import (
    CONNECTION,
    STEP,
    one,
    recorded,
    thread,
)

AT_STEP = "train.py:52 in step"
LIB = "/usr/local/lib/python3.11"

FUTURE = (
    Frame("Condition.wait", f"{LIB}/threading.py", 9),
    Frame("Future.result", f"{LIB}/concurrent/futures/_base.py", 9),
)

CPP_EXTENSION = f"{SITE}/torch/utils/cpp_extension.py"
DISTRIBUTED = f"{SITE}/torch/distributed"
LOADER = f"{SITE}/torch/utils/data/dataloader.py"
TORCH_CPU = f"{SITE}/torch/lib/libtorch_cpu.so"


# --------------------------------------------------------------------------------------------------------- single calls


@pytest.mark.parametrize(
    ("frames", "kind", "what"),
    [
        # Collectives by Python's calls.
        ([Frame("wait_tensor", f"{DISTRIBUTED}/_functional_collectives.py", 9)], "collective", "wait_tensor"),
        ([Frame("_sync_module_states", f"{DISTRIBUTED}/utils.py", 9)], "collective", "DDP's sync of parameters"),
        ([Frame("synchronize", f"{SITE}/horovod/torch/mpi_ops.py", 9)], "collective", "Horovod"),
        (
            [Frame("barrier", C10D, 9), Frame("new_group", C10D, 8)],
            "network",
            "the rendezvous store (new_group)",
        ),
        (
            [Frame("_wait", f"{DISTRIBUTED}/elastic/utils/store.py", 9)],
            "network",
            "the rendezvous store",
        ),
        # By native ones.
        ([native("c10d::ProcessGroupGloo::allreduce", TORCH_CPU)], "collective", "all_reduce"),
        ([native("c10d::ProcessGroupNCCL::WorkNCCL::synchronizeInternal", TORCH_CPU)], "collective", "a collective"),
        ([native("ncclCommInitRankConfig", "libnccl.so.2")], "collective", "the start of NCCL"),
        ([native("gloo::rendezvous::PrefixStore::wait", TORCH_CPU)], "network", "the rendezvous store"),
        ([native("MPI_Allreduce", "libmpi.so")], "collective", "all_reduce"),
        ([native("MPI_Barrier", "libmpi.so")], "collective", "barrier"),
        ([native("cudaStreamSynchronize", "libcudart.so")], "gpu", "cudaStreamSynchronize"),
        ([Frame("synchronize", f"{SITE}/torch/cuda/__init__.py", 9)], "gpu", "synchronize"),
        # Locks.
        ([Frame("wait", f"{SITE}/torch/utils/file_baton.py", 9)], "lock", "a lock file"),
        ([Frame("acquire", f"{SITE}/filelock/_api.py", 9)], "lock", "a lock file (filelock)"),
        ([Frame("Thread._wait_for_tstate_lock", f"{LIB}/threading.py", 9)], "lock", "another thread to end"),
        ([*FUTURE], "lock", "a future"),
        ([Frame("Lock.__enter__", f"{LIB}/multiprocessing/synchronize.py", 9)], "lock", "a lock between processes"),
        ([Frame("Barrier.wait", f"{LIB}/threading.py", 9)], "lock", "a barrier between threads"),
        ([native("PyThread_acquire_lock_timed", "libpython3.12.so")], "lock", "a lock"),
        ([native("take_gil", "libpython3.12.so")], "lock", "the GIL, which another thread holds"),
        ([native("pthread_mutex_lock")], "lock", "a lock"),
        # Compilers.
        ([Frame("compile", f"{SITE}/triton/compiler/compiler.py", 9)], "compile", "torch.compile"),
        ([Frame("_run_ninja_build", CPP_EXTENSION, 9)], "compile", "the build of an extension"),
        # Debuggers.
        ([Frame("interaction", f"{LIB}/pdb.py", 9)], "debugger", "pdb"),
        ([Frame("do_wait_suspend", f"{SITE}/debugpy/_vendored/pydevd/pydevd.py", 9)], "debugger", "debugpy"),
        # Data loading.
        ([Frame("_MultiProcessingDataLoaderIter._try_get_data", LOADER, 9)], "data_loading", "its workers"),
        # Files and sockets.
        ([Frame("load", f"{SITE}/torch/serialization.py", 9)], "file_io", "a file"),
        ([Frame("SSLSocket.read", f"{LIB}/ssl.py", 9)], "network", "a connection"),
    ],
)  # fmt: skip
def test_a_call_tells_what_is_waited_for(frames: list[Frame], kind: str, what: str) -> None:
    found = one(*frames, STEP, look=look_of(0, syscall="", wchan=""))
    assert (found.kind, found.detail, found.location) == (kind, what, AT_STEP)


@pytest.mark.parametrize(
    ("look", "kind", "what"),
    [
        ({"syscall": "clock_nanosleep"}, "sleep", "time.sleep"),
        ({"syscall": "futex"}, "lock", "a lock"),
        ({"syscall": "flock", "waits_on": "a lock on the file /x"}, "lock", "a lock on the file /x"),
        ({"syscall": "fcntl", "waits_on": "a lock on a file"}, "lock", "a lock on a file"),
        ({"syscall": "openat", "wchan": "wait_for_partner"}, "file_io", "a FIFO to be opened at its other end"),
        ({"syscall": "read", "waits_on": "the FIFO /tmp/x"}, "file_io", "the FIFO /tmp/x"),
        ({"syscall": "read", "waits_on": "the file /nfs/x"}, "file_io", "the file /nfs/x"),
        ({"syscall": "read", "waits_on": "the terminal /dev/pts/0"}, "file_io", "the terminal /dev/pts/0"),
        ({"syscall": "fsync", "waits_on": "the file /nfs/x"}, "file_io", "the file /nfs/x"),
        ({"syscall": "read", "waits_on": CONNECTION}, "network", CONNECTION),
        ({"syscall": "poll", "waits_on": CONNECTION}, "network", CONNECTION),
        ({"syscall": "accept4", "waits_on": "connections to 0.0.0.0:80"}, "network", "connections to 0.0.0.0:80"),
        ({"syscall": "wait4", "waits_on": "process 12 (sh) to end"}, "subprocess", "a child process"),
        ({"syscall": "", "state": "R"}, "user_code", ""),
        ({"syscall": "ioctl"}, "user_code", ""),
    ],
)  # fmt: skip
def test_where_the_user_s_line_blocks_the_kernel_tells_in_what(look: dict[str, Any], kind: str, what: str) -> None:
    """A Python stack ends at the line that called into C."""
    found = one(STEP, look=look_of(0, **{"wchan": "", **look}))
    assert (found.kind, found.detail, found.location) == (kind, what, AT_STEP)


def test_only_a_python_sleeps_in_time_sleep() -> None:
    """A rank may be ``/bin/sleep``, or a program of another language."""
    dump = StackDump(0, 4000, True, "sleep", "py-spy", (), failure="sleep is not a Python process")
    found = one(look=look_of(0, syscall="clock_nanosleep"), dumps=(dump,))
    assert (found.kind, found.detail) == ("sleep", "sleep")


@pytest.mark.parametrize("compiler", ["nvcc", "ptxas", "cc1plus", "ninja"])
def test_a_compiler_below_a_rank_says_that_it_compiles(compiler: str) -> None:
    """The rank itself may stand anywhere in the compiler's driver."""
    child = look_of(0, pid=300, name=compiler)
    found = one(Frame("Popen.wait", f"{LIB}/subprocess.py", 9), STEP, look=look_of(0, syscall="wait4"), looks=(child,))
    assert (found.kind, found.detail) == ("compile", compiler)


def test_a_collective_that_waits_is_not_taken_for_what_it_is_made_of() -> None:
    """Waiting ranks of NCCL burn their processors, gloo's sleep in locks and sockets."""
    look = look_of(0, state="R", syscall="", wchan="")
    assert one(Frame("barrier", C10D, 9), STEP, look=look, active=True).kind == "collective"
    look = look_of(0, syscall="recvfrom", waits_on=CONNECTION)
    assert one(Frame("recv", C10D, 9), STEP, look=look).kind == "collective"


def test_a_gpu_that_waits_for_others_is_in_their_collective() -> None:
    """NCCL's calls return at once; the rank then waits wherever it needs the result."""
    wait = native("cudaStreamSynchronize", "libcudart.so")
    ahead, behind = recorded(0, 3, 2), recorded(1, 2, 2)
    look = look_of(0, state="R", syscall="", wchan="")
    assert one(wait, STEP, look=look, collectives=(ahead, behind), ranks=(0, 1)).detail == "all_reduce"
    without = one(wait, STEP, look=look, collectives=(recorded(0, 2, 2), recorded(1, 3, 2)), ranks=(0, 1))
    assert without.kind == "gpu"


def test_a_stuck_collective_explains_a_line_that_burns() -> None:
    """Without native calls ``loss.item()`` is the user's line, and a running one."""
    verdict = HangVerdict("stuck_collective", (0, 1), 300.0, certain=True, busy=(0,))
    recorders = (recorded(0, 3, 2), recorded(1, 2, 2))
    look = look_of(0, state="R", syscall="", wchan="")
    found = one(STEP, look=look, active=True, collectives=recorders, hang=verdict, ranks=(0, 1))
    assert (found.kind, found.detail) == ("collective", "all_reduce")


def test_a_pending_collective_of_another_group_does_not_explain_a_lock() -> None:
    """A rank that has not come to one group may have left a call of another behind it, and stand in a lock."""

    def both(rank: int, enqueued: int) -> RankCollectives:
        (default,) = recorded(rank, enqueued, 2).groups
        (other,) = recorded(rank, 1, 0, "broadcast").groups
        return RankCollectives(rank, (default, other._replace(group="1", description="tensor_parallel")))

    behind = one(STEP, look=look_of(0), collectives=(both(0, 2), both(1, 3)), ranks=(0, 1))
    assert (behind.kind, behind.detail) == ("lock", "a lock")
    level = one(STEP, look=look_of(0), collectives=(both(0, 2), both(1, 2)), ranks=(0, 1))
    assert (level.kind, level.detail) == ("collective", "broadcast")


def test_only_the_verdict_can_call_a_running_rank_spinning() -> None:
    """One glance cannot tell a loop from work."""
    look = look_of(0, state="R", syscall="", wchan="")
    assert one(STEP, look=look, active=True).kind == "user_code"
    verdict = HangVerdict("spinning", (0,), 300.0, certain=False)
    assert one(STEP, look=look, active=True, hang=verdict).kind == "spinning"
    other = HangVerdict("spinning", (1,), 300.0, certain=False)
    assert one(STEP, look=look, active=True, hang=other).kind == "user_code"


def test_a_dataset_in_the_rank_itself_is_data_loading_unless_more_is_known() -> None:
    """Without workers the dataset runs in the rank."""
    inside = [
        Frame("Images.__getitem__", "/job/data.py", 7),
        Frame("_SingleProcessDataLoaderIter._next_data", LOADER, 9),
    ]
    assert one(*inside, STEP, look=look_of(0, state="R", syscall="", wchan="")).kind == "data_loading"
    asleep = one(*inside, STEP, look=look_of(0, syscall="clock_nanosleep"))
    assert (asleep.kind, asleep.location) == ("sleep", "data.py:7 in __getitem__")


# ---------------------------------------------------------------------------------------------------- threads, children


def threads_of(*threads: ThreadStack) -> StackDump:
    return StackDump(0, 100, True, "python", "py-spy", threads)


JOIN = thread("MainThread", Frame("Thread.join", f"{LIB}/threading.py", 9), STEP, is_main=True)


def test_a_thread_in_a_collective_speaks_for_the_rank() -> None:
    """Whatever else its threads do, that is what other ranks have to do with."""
    works = thread("a", Frame("evaluate", "/job/eval.py", 3), active=True)
    reduces = thread("b", Frame("all_reduce", C10D, 9), Frame("train", "/job/loop.py", 4))
    found = one(look=look_of(0), dumps=(threads_of(JOIN, works, reduces),))
    assert found == WaitGroup("collective", "all_reduce", (0,), "loop.py:4 in train")


def test_the_system_call_of_the_main_thread_says_nothing_of_another() -> None:
    """The main thread's futex is the join."""
    works = thread("a", Frame("evaluate", "/job/eval.py", 3), active=True)
    found = one(look=look_of(0), dumps=(threads_of(JOIN, works),))
    assert (found.kind, found.detail, found.location) == ("user_code", "in another thread", "eval.py:3 in evaluate")


def test_a_thread_in_the_background_is_not_what_the_main_thread_waits_for() -> None:
    """A logger that sleeps between two lines says nothing of a main thread that waits for a queue."""
    main = thread("MainThread", Frame("Queue.get", f"{LIB}/queue.py", 9), STEP, is_main=True)
    logger = thread("logger", Frame("log_for_ever", "/job/log.py", 3))
    found = one(look=look_of(0), dumps=(threads_of(main, logger),))
    assert found == WaitGroup("lock", "a queue", (0,), AT_STEP)


WAITS_FOR_WORKERS = (Frame("_MultiProcessingDataLoaderIter._try_get_data", LOADER, 9), STEP)

WORKER_LOOP = (
    Frame("_worker_loop", f"{SITE}/torch/utils/data/_utils/worker.py", 374),
    Frame("BaseProcess._bootstrap", f"{LIB}/multiprocessing/process.py", 314),
    STEP,
)


def worker_dump(pid: int, *frames: Frame) -> StackDump:
    return dump_of(0, *frames, *WORKER_LOOP, pid=pid, name="pt_data_worker")


def test_a_worker_without_work_is_not_stuck() -> None:
    """It waits for the next index; the rank's calls below a fork are not the worker's."""
    idle = worker_dump(300, Frame("Queue.get", f"{LIB}/multiprocessing/queues.py", 113))
    stuck = worker_dump(301, Frame("Images.__getitem__", "/job/data.py", 7))
    looks = (look_of(0, pid=300, name="pt_data_worker"), look_of(0, pid=301, name="pt_data_worker"))
    found = one(*WAITS_FOR_WORKERS, look=look_of(0), looks=looks, dumps=(idle, stuck))
    assert found.detail == "a lock at data.py:7 in a worker"
    assert one(*WAITS_FOR_WORKERS, look=look_of(0), looks=looks[:1], dumps=(idle,)).detail == "its workers"


def test_a_worker_that_is_stopped_is_stuck_wherever_it_stands() -> None:
    looks = (look_of(0, pid=300, name="pt_data_worker", state="T"),)
    found = one(*WAITS_FOR_WORKERS, look=look_of(0), looks=looks)
    assert found.detail == "state T in a worker"


def test_workers_that_are_gone_are_missed() -> None:
    """Killed by the OOM killer, for one."""
    looks = (look_of(0, pid=400, name="resource_tracker"),)
    assert one(*WAITS_FOR_WORKERS, look=look_of(0), looks=looks).detail == "no worker of its data loader is left"


def test_the_child_that_is_waited_for_is_named_without_its_number() -> None:
    """Ranks that wait for children of the same name are one group."""
    looks = (
        look_of(0, syscall="wait4", waits_on="process 301 (sh) to end"),
        look_of(0, pid=300, name="pt_data_worker"),
        look_of(0, pid=301, name="sh", command="/bin/sh -c prepare"),
        look_of(0, pid=302, name="tail"),
    )
    assert one(STEP, looks=looks).detail == "sh -c prepare"


# --------------------------------------------------------------------------------------------------------------- groups


def test_ranks_that_wait_alike_are_one_group_and_every_rank_is_in_one() -> None:
    """Also those of which nothing came."""
    dumps = tuple(dump_of(rank, Frame("all_reduce", C10D, 9), STEP) for rank in (6, 0, 4))
    groups = wait_groups(Capture(stacks=dumps), ranks=range(8), dead={3: "exit code 0"}, script=SCRIPT, cwd=CWD)
    assert groups == (
        WaitGroup("collective", "all_reduce", (0, 4, 6), AT_STEP),
        WaitGroup("unanswering", "no stacks of it", (1, 2, 5, 7), ""),
        WaitGroup("dead", "exit code 0", (3,), ""),
    )
