"""What each rank waits in, from recorded stacks and from single calls, system calls and states."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis.collectives import compare
from saferun.diagnosis.frames import UserCode
from saferun.diagnosis.rank_waits import rank_waits, wait_groups
from saferun.evidence import (
    Capture,
    CollectiveCall,
    Frame,
    GroupProgress,
    HangVerdict,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    ThreadStack,
    WaitGroup,
)
from tests.unit.diagnosis.recorded_hangs import (
    C10D,
    CWD,
    NAMES,
    RANKS,
    SCRIPT,
    SITE,
    capture_of,
    dump_of,
    ends_of,
    look_of,
    native,
)

STEP = Frame("step", "/job/train.py", 52)
AT_STEP = "train.py:52 in step"
LIB = "/usr/local/lib/python3.11"
FUTURE = (
    Frame("Condition.wait", f"{LIB}/threading.py", 9),
    Frame("Future.result", f"{LIB}/concurrent/futures/_base.py", 9),
)
CPP_EXTENSION = f"{SITE}/torch/utils/cpp_extension.py"
DISTRIBUTED = f"{SITE}/torch/distributed"
CONNECTION = "a connection to 10.0.0.2:80 (ESTABLISHED)"
LOADER = f"{SITE}/torch/utils/data/dataloader.py"
TORCH_CPU = f"{SITE}/torch/lib/libtorch_cpu.so"


def groups_of(name: str, **how: bool) -> list[tuple[str, str, tuple[int, ...], str]]:
    dead = {end.rank: end.status.description for end in ends_of(name)}
    groups = wait_groups(capture_of(name, **how), ranks=RANKS, dead=dead, script=SCRIPT, cwd=CWD)
    return [(group.kind, group.detail, group.ranks, group.location) for group in groups]


def one(
    *frames: Frame,
    look: ProcessSnapshot | None = None,
    looks: tuple[ProcessSnapshot, ...] = (),
    dumps: tuple[StackDump, ...] = (),
    collectives: tuple[RankCollectives, ...] = (),
    active: bool = False,
    hang: HangVerdict | None = None,
    ranks: tuple[int, ...] = (0,),
) -> WaitGroup:
    """What rank 0 waits in: frames innermost first."""
    capture = Capture(
        processes=((look,) if look is not None else ()) + looks,
        stacks=((dump_of(0, *frames, active=active),) if frames else ()) + dumps,
        collectives=collectives,
    )
    groups = wait_groups(capture, ranks=ranks, dead={}, hang=hang, script=SCRIPT, cwd=CWD)
    (found,) = [group for group in groups if 0 in group.ranks]
    return found


def recorded(rank: int, enqueued: int, completed: int, op: str = "all_reduce") -> RankCollectives:
    """A Flight Recorder of one group."""
    calls = tuple(
        CollectiveCall(seq, op, "[[4]]", seq <= completed, is_p2p=False, created_ns=seq)
        for seq in range(1, enqueued + 1)
    )
    return RankCollectives(rank, (GroupProgress("0", "default_pg", (0, 1), enqueued, -1, completed, calls),))


# ----------------------------------------------------------------------------------------------------------- recordings

IN_ALL_REDUCE = ("collective", "all_reduce", (0, 2), "train.py:36 in reduce_loss")


@pytest.mark.parametrize(
    ("name", "kind", "what", "place"),
    [
        ("sleep", "sleep", "time.sleep", "train.py:41 in bad_sleep"),
        ("poll", "sleep", "time.sleep", "train.py:45 in bad_poll"),
        ("c_holding_the_gil", "sleep", "sleep", "train.py:64 in bad_cgil"),
        ("lock", "lock", "a lock", "train.py:49 in bad_lock"),
        ("event", "lock", "an event", "train.py:141 in bad_event"),
        ("queue", "lock", "a queue", "train.py:53 in bad_queue"),
        ("process_queue", "lock", "a queue between processes", "train.py:56 in bad_mpqueue"),
        ("fifo", "file_io", "the FIFO /scratch/fifo", "train.py:68 in bad_fifo"),
        ("fifo_save", "file_io", "the FIFO /scratch/ckpt.pt", "train.py:73 in bad_fifosave"),
        ("stopped", "stopped", "state T", "train.py:76 in bad_stop"),
        ("uninterruptible", "uninterruptible", "vfork in kernel_clone", "train.py:81 in bad_dstate"),
        ("subprocess", "subprocess", "sleep 100000", "train.py:84 in bad_subprocess"),
        ("system", "subprocess", "sh -c sleep 100000", "train.py:87 in bad_system"),
        ("forked_child", "subprocess", "a forked child", "train.py:138 in bad_fork"),
        ("process_pool", "subprocess", "a process pool", "train.py:130 in bad_mppool"),
        ("network", "network", "a connection to 127.0.0.1:41235 (ESTABLISHED)", "train.py:93 in bad_network"),
        ("connect", "network", "a connection to 127.0.0.1:41235 (SYN_SENT)", "train.py:98 in bad_connect"),
        ("store_wait", "network", "the rendezvous store", "train.py:108 in bad_store"),
        ("debugger", "debugger", "pdb", "train.py:144 in bad_pdb"),
        ("mismatched", "collective", "broadcast", "train.py:101 in bad_broadcast"),
        ("spin", "user_code", "", "train.py:60 in bad_spin"),
        ("thread", "sleep", "time.sleep, in another thread", "train.py:41 in bad_sleep"),
        ("thread_pool", "sleep", "time.sleep, in another thread", "train.py:45 in bad_poll"),
        (
            "loader_deadlocked",
            "data_loading",
            "a lock at dataset.py:15 in a worker",
            "train.py:111 in bad_loader",
        ),
    ],
)
def test_the_rank_that_stays_away_and_those_that_wait_for_it(name: str, kind: str, what: str, place: str) -> None:
    """Each way to hang is told by its own kind, and the others are seen to be in the collective."""
    assert groups_of(name) == [IN_ALL_REDUCE, (kind, what, (1,), place)]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        (
            "init_missing_rank",
            [
                ("network", "the rendezvous store (init_process_group)", (0, 2), "train.py:215 in main"),
                ("sleep", "time.sleep", (1,), "train.py:214 in main"),
            ],
        ),
        (
            "early_exit",
            [
                ("network", "the rendezvous store (init_process_group)", (0, 2), "train.py:215 in main"),
                ("dead", "exit code 0", (1,), ""),
            ],
        ),
        (
            "evaluating",
            [
                ("user_code", "", (0,), "train.py:24 in forward"),
                ("collective", "barrier", (1, 2), "train.py:180 in evaluate_and_barrier"),
            ],
        ),
        (
            "ddp_backward",
            [
                ("collective", "all_reduce in DDP's backward", (0, 2), "train.py:172 in ddp"),
                ("sleep", "time.sleep", (1,), "train.py:169 in ddp"),
            ],
        ),
        (
            "ddp_forward",
            [
                ("collective", "all_reduce in DDP's backward", (0, 2), "train.py:172 in ddp"),
                ("sleep", "time.sleep", (1,), "train.py:31 in forward"),
            ],
        ),
        (
            "async_wait",
            [
                ("collective", "all_reduce", (0, 2), "train.py:189 in many"),
                ("sleep", "time.sleep", (1,), "train.py:187 in many"),
            ],
        ),
        ("all_asleep", [("sleep", "time.sleep", (0, 1, 2), "train.py:41 in bad_sleep")]),
        ("all_in_lock", [("lock", "a lock", (0, 1, 2), "train.py:49 in bad_lock")]),
    ],
)
def test_other_recorded_hangs(name: str, groups: list[tuple[str, str, tuple[int, ...], str]]) -> None:
    assert groups_of(name) == groups


@pytest.mark.parametrize("op", ["all_gather", "all_gather_object", "monitored_barrier", "recv"])
def test_a_collective_is_called_what_the_user_called(op: str) -> None:
    """``all_gather_object`` is made of others, which nobody would find in the script."""
    assert groups_of(op)[0][:3] == ("collective", op, (0, 2))


@pytest.mark.parametrize(
    "name",
    sorted({*NAMES} - {"store_wait", "thread", "thread_pool"}),
)
@pytest.mark.parametrize("recorder", [True, False])
def test_native_calls_and_the_flight_recorder_are_a_help_and_no_condition(name: str, recorder: bool) -> None:
    """With many ranks, or under a strict kernel, neither is there; Python's calls and the system call are."""
    with_all = {group[2]: group[0] for group in groups_of(name)}
    with_less = {group[2]: group[0] for group in groups_of(name, native=False, recorder=recorder)}
    if name == "async_wait" and not recorder:
        with_all[0, 2] = "lock"  # all that can be seen
    assert with_less == with_all


def test_native_calls_of_one_rank_speak_for_those_that_stand_in_the_same_line() -> None:
    """They are taken of one of many alike."""
    capture = capture_of("async_wait", recorder=False)
    stacks = tuple(dump for dump in capture.stacks if "native" not in dump.tool or dump.rank == 0)
    groups = wait_groups(capture._replace(stacks=stacks), ranks=RANKS, dead={}, script=SCRIPT, cwd=CWD)
    assert [group[:3] for group in groups] == [("collective", "a collective", (0, 2)), ("sleep", "time.sleep", (1,))]


def test_a_rank_without_python_code_on_its_stack_is_starting_or_ending() -> None:
    """Survivors of a crash are often looked at while their interpreter shuts down; they do answer."""
    bare = ThreadStack("MainThread", 7, is_main=True, active=True, owns_gil=True, frames=())
    dump = StackDump(0, 7, is_rank=True, name="python", tool="py-spy", threads=(bare,))
    (group,) = wait_groups(Capture(stacks=(dump,)), ranks=[0], dead={}, script=SCRIPT, cwd=CWD)
    assert group.kind == "interpreter"
    (group,) = wait_groups(Capture(stacks=(dump._replace(failure="denied"),)), ranks=[0], dead={})
    assert group[:2] == ("unanswering", "denied")


def test_a_connection_to_the_store_is_known_by_its_port() -> None:
    """Without native frames Python's stack ends at the user's line."""
    look = ProcessSnapshot(0, 7, 1, True, "python", "", "S", "", "poll", 1, 0, False, 0, "", 0.0)
    asks = look._replace(waits_on="a connection to 10.0.0.2:29500 (ESTABLISHED)")
    frames = (Frame("evaluate", SCRIPT, 95),)
    thread = ThreadStack("MainThread", 7, is_main=True, active=False, owns_gil=False, frames=frames)
    dump = StackDump(0, 7, is_rank=True, name="python", tool="py-spy", threads=(thread,))
    capture = Capture(processes=(asks,), stacks=(dump,))
    user = UserCode(SCRIPT, CWD)
    findings = compare((), [0])
    for port, of_peers in ((29500, True), (2950, False), (0, False)):
        (wait,) = rank_waits(capture, findings, ranks=[0], dead={}, hang=None, user=user, store_port=port)
        assert wait.found.of_peers is of_peers


# --------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("look", "kind", "what"),
    [
        ({"state": "T"}, "stopped", "state T"),
        ({"state": "T", "tracer_pid": 7}, "debugger", "traced by process 7"),
        ({"state": "t", "tracer_pid": 7}, "debugger", "traced by process 7"),
        (
            {"state": "D", "syscall": "openat", "wchan": "nfs_wait", "waits_on": "the file /nfs/x"},
            "uninterruptible",
            "openat in nfs_wait, the file /nfs/x",
        ),
        ({"state": "D", "syscall": "", "wchan": ""}, "uninterruptible", "state D"),
    ],
)
def test_the_state_of_the_process_comes_before_what_it_calls(look: dict[str, Any], kind: str, what: str) -> None:
    """A rank that is stopped inside a collective does not wait for others: they wait for it."""
    found = one(Frame("all_reduce", C10D, 3), STEP, look=look_of(0, **look))
    assert (found.kind, found.detail) == (kind, what)


def test_a_busy_rank_in_state_d_reads_a_disk() -> None:
    """A glance may find anybody in D for a moment; the verdict has looked for longer."""
    verdict = HangVerdict("stuck_collective", (0,), 300.0, certain=True, busy=(0,))
    look = look_of(0, state="D", syscall="read", wchan="folio_wait", waits_on="the file /data/x")
    assert one(STEP, look=look, hang=verdict).kind == "file_io"


def test_a_rank_that_dumps_its_core_is_dead() -> None:
    found = one(look=look_of(0, core_dumping=True))
    assert (found.kind, found.detail) == ("dead", "the kernel writes its core")


@pytest.mark.parametrize("state", ["Z", "X", "?"])
def test_a_rank_that_ended_meanwhile_is_dead(state: str) -> None:
    assert one(look=look_of(0, state=state, syscall="", wchan="")).kind == "dead"


def test_a_rank_of_which_nothing_is_known_does_not_answer() -> None:
    """And is not forgotten."""
    assert one() == WaitGroup("unanswering", "no stacks of it", (0,), "")
    failed = StackDump(0, 100, True, "python", "", (), "ptrace is denied by Yama (scope 2)")
    look = look_of(0, syscall="", wchan="")
    assert one(look=look, dumps=(failed,)).detail == "ptrace is denied by Yama (scope 2)"


@pytest.mark.parametrize(
    ("look", "kind"),
    [
        ({"syscall": "clock_nanosleep", "wchan": "hrtimer_nanosleep"}, "sleep"),
        ({"syscall": "wait4", "wchan": "do_wait"}, "subprocess"),
        ({"syscall": "openat", "wchan": "wait_for_partner"}, "file_io"),
        (
            {"syscall": "recvfrom", "wchan": "wait_woken", "waits_on": CONNECTION},
            "network",
        ),
        ({"syscall": "futex"}, "lock"),
    ],
)
def test_without_stacks_the_system_call_tells(look: dict[str, Any], kind: str) -> None:
    """Where ptrace is denied, /proc is what is left."""
    assert one(look=look_of(0, **look)).kind == kind


def test_without_stacks_a_pending_collective_tells_more_than_a_futex() -> None:
    """The Flight Recorder needs no ptrace."""
    found = one(look=look_of(0), collectives=(recorded(0, 3, 2), recorded(1, 2, 2)))
    assert (found.kind, found.detail) == ("collective", "all_reduce")


def test_of_two_looks_at_a_process_the_later_counts() -> None:
    """The second one knows the command and the other end."""
    looks = (
        look_of(0, syscall="read", wchan="pipe_read"),
        look_of(0, syscall="read", wchan="pipe_read", waits_on="the FIFO /x"),
    )
    assert one(STEP, looks=looks).detail == "the FIFO /x"


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
        ([Frame("acquire", f"{SITE}/filelock/_api.py", 9)], "lock", "a lock file"),
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


def thread(name: str, *frames: Frame, is_main: bool = False, active: bool = False) -> ThreadStack:
    return ThreadStack(name, 0, is_main, active, owns_gil=False, frames=frames)


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
