"""Which hangs may be none: a rank waits for something outside the job. All others are as certain as they were."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.captures.recorder_content import read_groups
from saferun.diagnosis.external_waits import GROUP_TIMEOUT, external_ranks, suspected, unreadable_processes
from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.gpu_evidence import NcclOutlier, NcclProcess
from saferun.evidence.job_evidence import (
    Capture,
    CollectiveCall,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    HostView,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    ThreadStack,
)
from saferun.evidence.wait_evidence import JobPorts, ThreadWait
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.recorded_hangs import C10D, SITE, dump_of, evidence, evidence_of, look_of, native
from tests.unit.diagnosis.test_hang_precedence import job as recorded
from tests.unit.diagnosis.test_hang_precedence import recorder

STEP = Frame("step", "/job/train.py", 52)
LOAD = Frame("load_batch", "/job/data.py", 47)
IN_STEP = (Frame("all_reduce", C10D, 3252), STEP)
LIBRARY = "/usr/lib/python3.11"
WAIT = Frame("Popen.wait", f"{LIBRARY}/subprocess.py", 1264)
THREADING = Frame("Condition.wait", f"{LIBRARY}/threading.py", 327)
EVENT = (THREADING, Frame("Event.wait", f"{LIBRARY}/threading.py", 629), LOAD)
QUEUE = (THREADING, Frame("Queue.get", f"{LIBRARY}/queue.py", 171), LOAD)
FUTURE = (THREADING, Frame("Future.result", f"{LIBRARY}/concurrent/futures/_base.py", 451), LOAD)
JOIN = (Frame("Thread._wait_for_tstate_lock", f"{LIBRARY}/threading.py", 1151), LOAD)
MP_QUEUE = (
    Frame("Connection._recv", f"{LIBRARY}/multiprocessing/connection.py", 395),
    Frame("Queue.get", f"{LIBRARY}/multiprocessing/queues.py", 103),
    LOAD,
)
PID, CHILD = 101, 201
STORE_PORT = 29500


def waits(tid: int = PID, **fields: Any) -> tuple[ThreadWait, ...]:
    return (ThreadWait(tid, **fields),)


def child(pid: int = CHILD, ppid: int = PID, name: str = "sleep", command: str = "", **fields: Any) -> ProcessSnapshot:
    own = {"syscall": "clock_nanosleep", "wchan": "hrtimer_nanosleep", "waits": waits(pid, outside=True), **fields}
    return look_of(1, pid=pid, name=name, command=command or f"{name} 40", **own)._replace(ppid=ppid)


FORKED: dict[str, Any] = {"name": "python", "command": "python train.py"}
FUTEX: dict[str, Any] = {"syscall": "futex", "wchan": "futex_do_wait", "waits": waits(CHILD)}


def job(
    *frames: Frame,
    children: tuple[ProcessSnapshot, ...] = (),
    dumps: tuple[StackDump, ...] = (),
    threads: tuple[ThreadStack, ...] = (),
    owns_gil: bool = False,
    ends: tuple[RankEnd, ...] = (),
    others: dict[int, tuple[Frame, ...]] | None = None,
    looks: dict[int, dict[str, Any]] | None = None,
    **look: Any,
) -> Evidence:
    """Ranks 0 and 2 wait in a collective, and rank 1 does what its stack and its look say."""
    stacks = {0: IN_STEP, 1: frames, 2: IN_STEP, **(others or {})}
    seen = {0: {}, 1: {"command": "python train.py", **look}, 2: {}, **(looks or {})}
    own = dump_of(1, *frames)
    main = own.threads[0]._replace(owns_gil=owns_gil)
    stacked = tuple(
        own._replace(threads=(main, *threads)) if rank == 1 else dump_of(rank, *stack)
        for rank, stack in stacks.items()
        if stack
    )
    ended = {end.rank for end in ends}
    capture = Capture(
        processes=(*(look_of(rank, **fields) for rank, fields in seen.items() if rank not in ended), *children),
        stacks=(*(dump for dump in stacked if dump.rank not in ended), *dumps),
    )
    return evidence(capture, ends=ends)._replace(store_port=STORE_PORT)


def thread_of(tid: int, *frames: Frame) -> ThreadStack:
    return ThreadStack("worker", tid, is_main=False, active=False, owns_gil=False, frames=frames)


def external(found: Evidence) -> tuple[int, ...]:
    return external_ranks(found, diagnose_hang(found).cause)


SLEEP: dict[str, Any] = {"syscall": "clock_nanosleep", "wchan": "hrtimer_nanosleep"}
RECV: dict[str, Any] = {"syscall": "recvfrom", "waits_on": "a connection to 10.9.9.9:5432 (ESTABLISHED)"}
FLOCK: dict[str, Any] = {"syscall": "flock", "waits_on": "a lock on the file /shared/lock"}
WAIT4: dict[str, Any] = {"syscall": "wait4", "waits_on": f"process {CHILD} (sleep) to end"}
PIPE: dict[str, Any] = {"syscall": "read", "waits_on": f"a pipe, shared with python (pid {CHILD}) of rank 1"}
POLL: dict[str, Any] = {"syscall": "poll", "waits_on": "a pipe"}


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(job(LOAD, **SLEEP, waits=waits(outside=True)), id="time.sleep"),
        pytest.param(job(LOAD, **SLEEP), id="a sleep of which only the call is known"),
        pytest.param(job(LOAD, syscall="", wchan="hrtimer_nanosleep"), id="a sleep of which only the kernel's part is"),
        pytest.param(job(LOAD, **RECV, waits=waits(addresses=("10.9.9.9:5432",))), id="a query"),
        pytest.param(job(LOAD, **RECV), id="a query, by its text"),
        pytest.param(job(LOAD, **FLOCK, waits=waits(outside=True)), id="a lock of another job"),
        pytest.param(
            job(Frame("acquire", f"{SITE}/filelock/_api.py", 300), LOAD, **SLEEP), id="a lock file that is polled"
        ),
        pytest.param(
            job(WAIT, LOAD, **WAIT4, waits=waits(pids=(CHILD,)), children=(child(),)), id="a child that sleeps"
        ),
        pytest.param(
            job(WAIT, LOAD, **WAIT4, waits=waits(pids=(CHILD,)), children=(child(name="rclone", **FUTEX),)),
            id="a program of its own threads",
        ),
        pytest.param(
            job(
                WAIT,
                LOAD,
                **WAIT4,
                waits=waits(pids=(CHILD,)),
                children=(
                    child(name="bash", syscall="wait4", wchan="do_wait", waits=waits(CHILD, pids=(202,))),
                    child(202, CHILD),
                ),
            ),
            id="a shell whose child sleeps",
        ),
        pytest.param(
            job(LOAD, **POLL, waits=waits(pids=(CHILD,), timed=True), children=(child(),)), id="poll of a child's pipe"
        ),
        pytest.param(job(LOAD, **POLL, waits=waits(outside=True)), id="poll of a pipe from outside"),
        pytest.param(
            job(
                *MP_QUEUE,
                **PIPE,
                waits=waits(pids=(CHILD,)),
                children=(child(**FORKED),),
                dumps=(dump_of(1, LOAD, pid=CHILD),),
            ),
            id="a queue that another process feeds",
        ),
        pytest.param(job(*EVENT, waits=waits(timed=True)), id="an event with a timeout"),
        pytest.param(job(*QUEUE, waits=waits(timed=True)), id="a queue with a timeout"),
        pytest.param(job(THREADING, LOAD, waits=waits(timed=True)), id="a condition with a timeout"),
        pytest.param(job(*FUTURE, waits=waits(timed=True)), id="a future with a timeout"),
        pytest.param(job(*JOIN, waits=waits(timed=True)), id="a thread that is joined with a timeout"),
        pytest.param(job(native("lock_PyThread_acquire_lock"), LOAD, waits=waits(timed=True)), id="a lock with one"),
        pytest.param(
            job(*FUTURE, waits=(ThreadWait(PID), ThreadWait(777, outside=True)), threads=(thread_of(777, LOAD),)),
            id="a thread of a pool that sleeps",
        ),
        pytest.param(
            job(
                *QUEUE,
                waits=(ThreadWait(PID), ThreadWait(777, addresses=("10.9.9.9:443",))),
                threads=(thread_of(777, LOAD),),
            ),
            id="a queue that a thread with a download feeds",
        ),
        pytest.param(
            job(THREADING, Frame("sync", f"{SITE}/fsspec/asyn.py", 91), LOAD, waits=waits()),
            id="a library's own thread",
        ),
        pytest.param(
            job(LOAD, **RECV, waits=waits(addresses=("10.9.9.9:27000",)), owns_gil=True),
            id="a server that C code with the GIL waits for",
        ),
        pytest.param(
            job(LOAD, **RECV, waits=waits(outside=True, by_descriptor=True), owns_gil=True),
            id="a pipe of another program that C code with the GIL reads",
        ),
        pytest.param(evidence_of("sleep"), id="recorded sleep"),
        pytest.param(evidence_of("poll", native=False, recorder=False), id="recorded poll"),
        pytest.param(evidence_of("subprocess"), id="recorded subprocess"),
        pytest.param(evidence_of("connect"), id="recorded connect"),
        pytest.param(evidence_of("network"), id="recorded network"),
        pytest.param(evidence_of("fifo"), id="recorded fifo"),
        pytest.param(evidence_of("init_missing_rank"), id="recorded start"),
        pytest.param(evidence_of("recv"), id="recorded recv"),
        pytest.param(evidence_of("async_wait"), id="recorded work"),
        pytest.param(evidence_of("ddp_backward"), id="recorded backward"),
        pytest.param(evidence_of("thread_pool"), id="recorded thread pool"),
        pytest.param(evidence_of("process_pool"), id="recorded process pool"),
    ],
)
def test_who_waits_for_something_outside_the_job_may_go_on(found: Evidence) -> None:
    """Nobody here can see whether it ends in a minute or never."""
    assert external(found) == (1,)


PEER = (ThreadWait(PID, pids=(100,)),)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(job(*IN_STEP), id="all in a collective"),
        pytest.param(job(native("c10d::TCPStore::wait"), LOAD, syscall="recvfrom"), id="the store"),
        pytest.param(
            job(LOAD, syscall="recvfrom", waits=waits(addresses=(f"127.0.0.1:{STORE_PORT}",))),
            id="the store, by its port",
        ),
        pytest.param(job(LOAD, waits=waits()), id="a lock"),
        pytest.param(job(native("lock_PyThread_acquire_lock"), LOAD, waits=waits()), id="a lock, by its native call"),
        pytest.param(job(*JOIN, waits=waits()), id="a thread that is joined"),
        # It looks at the GIL again every few milliseconds.
        pytest.param(job(native("take_gil"), LOAD, waits=waits(timed=True)), id="the GIL"),
        pytest.param(job(*EVENT, waits=waits()), id="an event without a timeout"),
        pytest.param(job(*QUEUE, waits=waits()), id="a queue that nobody feeds"),
        pytest.param(job(*MP_QUEUE, **POLL, waits=waits()), id="a queue between processes that nobody else has"),
        pytest.param(job(LOAD, **SLEEP, waits=waits(outside=True), owns_gil=True), id="a sleep that holds the GIL"),
        pytest.param(job(LOAD, **RECV, waits=PEER), id="another rank, by its process"),
        pytest.param(job(LOAD, **FLOCK, waits=PEER), id="a lock that another rank holds"),
        pytest.param(job(LOAD, **FLOCK, waits=waits()), id="a lock that it holds itself"),
        pytest.param(
            job(
                WAIT,
                LOAD,
                **WAIT4,
                waits=waits(pids=(CHILD,)),
                children=(child(**FORKED, **FUTEX),),
                dumps=(dump_of(1, *EVENT, pid=CHILD),),
            ),
            id="a forked child in a lock",
        ),
        pytest.param(
            job(WAIT, LOAD, **WAIT4, waits=waits(pids=(CHILD,)), children=(child(state="T"),)),
            id="a child that is stopped",
        ),
        pytest.param(
            job(LOAD, **SLEEP, others={2: (THREADING, LOAD)}, looks={2: {"waits": waits(102)}}),
            id="a lock of another rank beside a sleep",
        ),
        pytest.param(evidence_of("c_holding_the_gil"), id="recorded GIL"),
        pytest.param(evidence_of("lock"), id="recorded lock"),
        pytest.param(evidence_of("event"), id="recorded event"),
        pytest.param(evidence_of("queue"), id="recorded queue"),
        pytest.param(evidence_of("all_in_lock"), id="recorded lock of all"),
        pytest.param(evidence_of("loader_deadlocked"), id="recorded loader"),
        pytest.param(evidence_of("forked_child"), id="recorded fork"),
        pytest.param(evidence_of("mismatched"), id="recorded mismatch"),
        pytest.param(evidence_of("store_wait"), id="recorded store"),
        pytest.param(evidence_of("early_exit"), id="recorded exit"),
        pytest.param(evidence_of("spin"), id="recorded loop"),
        pytest.param(evidence_of("stopped"), id="recorded stop"),
        pytest.param(evidence(Capture()), id="nothing seen"),
    ],
)
def test_what_cannot_end_by_itself_is_as_certain_as_before(found: Evidence) -> None:
    """A deadlock that is only suspected costs the user a night."""
    assert external(found) == ()


def test_a_rank_that_has_exited_is_certain_and_beside_one_that_waits_outside_it_is_not() -> None:
    """The others may wait only for the second one: the first may have been done."""
    ends = (RankEnd(2, 2, 102, ExitStatus(0, None), 9.0, 9.0, stopped_by_us=False),)
    assert external(job(*IN_STEP, ends=ends)) == ()
    assert external(job(LOAD, **SLEEP, ends=ends)) == (1,)


HOSTS = (
    HostView(0, "node1", (0, 1), ("10.0.0.1",), "/job", "train.py", has_evidence=True),
    HostView(1, "node2", (2,), ("10.0.0.2",), "/job", "train.py", has_evidence=True),
)


def asks(address: str, *ports: JobPorts) -> tuple[int, ...]:
    """Whether rank 1 of node1, which waits for an answer, waits for something outside the job."""
    found = job(LOAD, **RECV, waits=waits(addresses=(address,)))._replace(hosts=HOSTS)
    return external(found._replace(capture=found.capture._replace(ports=ports)))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.2:41234", ()),
        ("10.0.0.2:5432", (1,)),
        ("10.9.9.9:41234", (1,)),
        (f"10.0.0.2:{STORE_PORT}", ()),
    ],
)
def test_a_port_of_the_kernels_may_be_a_rank_where_the_ports_of_its_host_are_not_known(
    address: str, expected: tuple[int, ...]
) -> None:
    """Ranks let the kernel choose their ports; databases do not."""
    assert asks(address) == expected
    assert asks(address, JobPorts((2,), (7777,))) == expected


@pytest.mark.parametrize(("kernels_from", "expected"), [(15000, ()), (32768, (1,))])
def test_where_the_kernels_ports_begin_is_known_of_each_host(kernels_from: int, expected: tuple[int, ...]) -> None:
    """Clusters with many connections give them most of the range."""
    ports = JobPorts((2,), (7777,), kernels_from=kernels_from)
    assert asks("10.0.0.2:20000", ports) == expected
    assert asks("10.0.0.2:20000", ports._replace(is_whole=True)) == (1,)


@pytest.mark.parametrize(
    ("port", "expected"),
    [(7777, ()), (41234, ()), (41235, (1,)), (5432, (1,))],
    ids=["own", "kernel's", "db", "low db"],
)
def test_of_several_hosts_who_has_a_port_decides(port: int, expected: tuple[int, ...]) -> None:
    """A service on a host of the job may have any port."""
    assert asks(f"10.0.0.2:{port}", JobPorts((2,), (7777, 41234), is_whole=True)) == expected
    assert asks(f"[::ffff:10.0.0.2]:{port}", JobPorts((2,), (7777, 41234), is_whole=True)) == expected
    # What another host has is of no use.
    assert asks(f"10.0.0.2:{port}", JobPorts((0, 1), (7777, 41234), is_whole=True)) == (() if port > 40000 else (1,))


@pytest.mark.parametrize("address", ["10.0.0.1:7777", "127.0.0.1:7777", "[::1]:7777"])
def test_a_rank_of_another_saferun_on_the_same_host_is_no_service(address: str) -> None:
    """Of one saferun per rank, each knows its own processes only."""
    own, other = JobPorts((1,), (41000,), is_whole=True), JobPorts((0,), (7777,), is_whole=True)
    assert asks(address, own, other) == ()
    assert asks(address, own) == (1,)


def test_ports_are_known_where_all_saferuns_of_a_host_know_theirs() -> None:
    known = JobPorts((0,), (7777,), is_whole=True)
    found = job(*IN_STEP, others={2: (LOAD,)}, looks={2: {**RECV, "waits": waits(102, addresses=("10.0.0.1:41234",))}})
    found = found._replace(hosts=HOSTS)

    def asked(*ports: JobPorts) -> tuple[int, ...]:
        return external(found._replace(capture=found.capture._replace(ports=ports)))

    assert asked(known) == asked(known, JobPorts((1,), (8888,))) == ()
    assert asked(known, JobPorts((1,), (41234,), is_whole=True)) == ()
    assert asked(known, JobPorts((1,), (8888,), is_whole=True)) == (2,)


def test_of_several_hosts_a_process_of_another_host_is_no_neighbour() -> None:
    """Each host has its own numbers: pid 102 of node2 is not the one that rank 1 waits for."""
    found = job(LOAD, **SLEEP, others={2: (LOAD,)}, looks={2: SLEEP})._replace(hosts=HOSTS)
    assert external(found) == (1, 2)


POLLS_WORK = ((LOAD,), (LOAD,), (LOAD,))
POLLING = dict.fromkeys(range(3), SLEEP)


@pytest.mark.parametrize(
    "ops",
    [("all_reduce", "all_reduce", "all_reduce"), ("all_reduce", "broadcast", "all_reduce")],
    ids=["stuck", "mismatch"],
)
def test_ranks_that_ask_in_a_loop_whether_a_collective_is_over_are_certain(ops: tuple[str, ...]) -> None:
    """They sleep between two questions, and the Flight Recorders show that it never will be."""
    recorders = tuple(recorder(rank, op, completed=0) for rank, op in enumerate(ops))
    assert external(recorded(*POLLS_WORK, looks=POLLING, recorders=recorders)) == ()
    # Rank 1 has not called it: that it sleeps is what the others wait for.
    late = (recorders[0], recorder(1, completed=0), recorder(2, "all_reduce", completed=0))
    assert external(recorded(*POLLS_WORK, looks=POLLING, recorders=late)) != ()


def test_all_ranks_may_wait_outside() -> None:
    """All of them ask one slow server."""
    assert external(evidence_of("all_asleep")) == (0, 1, 2)


def test_it_is_worded_as_a_suspicion() -> None:
    found = job(LOAD, **SLEEP)
    diagnosis = suspected(diagnose_hang(found), (1,), 1200.0)
    assert diagnosis.headline.startswith("the job may hang: rank 1 (node1) has not called")
    assert diagnosis.findings[0].startswith("rank 1 waits for something outside the job")
    assert "after 1200 s (--external-wait-timeout)" in diagnosis.findings[0]
    later = suspected(diagnose_hang(found), (1,), 7200.0, by=GROUP_TIMEOUT)
    assert later.findings[0].endswith(
        "after 7200 s (the timeout of the process group; --external-wait-timeout sets another time)"
    )


# Not dumpable, or denied by a security module: only its stack is known.
UNREADABLE: dict[str, Any] = {"syscall": "", "wchan": "", "unreadable": True}
READ = Frame("Connection._recv", f"{LIBRARY}/multiprocessing/connection.py", 395)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(job(READ, LOAD, **UNREADABLE), id="a read"),
        pytest.param(job(LOAD, **UNREADABLE), id="the user's code"),
        pytest.param(job(LOAD, **UNREADABLE, owns_gil=True), id="a call that holds the GIL"),
        pytest.param(job(**UNREADABLE), id="no stack at all"),
        pytest.param(job(LOAD, **UNREADABLE, state="D"), id="a disk, or a driver"),
        pytest.param(
            job(
                *MP_QUEUE,
                syscall="read",
                wchan="pipe_read",
                children=(child(**FORKED)._replace(**UNREADABLE, waits=()),),
                dumps=(dump_of(1, LOAD, pid=CHILD),),
            ),
            id="a child of which nothing can be read",
        ),
    ],
)
def test_a_rank_that_cannot_be_read_may_be_at_work(found: Evidence) -> None:
    """A healthy rank that wrote all the time seemed to hang: its I/O counts as none where it may not be read."""
    assert external(found) == (1,)


def test_a_rank_that_cannot_be_read_is_no_excuse_for_others() -> None:
    assert external(job(*IN_STEP, **UNREADABLE)) == ()
    assert external(job(LOAD, **{**UNREADABLE, "unreadable": False})) == ()
    assert external(job(LOAD, **UNREADABLE, state="T")) == ()


def test_what_cannot_be_read_is_said() -> None:
    found = job(LOAD, **UNREADABLE)
    diagnosis = suspected(diagnose_hang(found), (1,), 1200.0, unreadable_processes(found))
    assert diagnosis.findings[0].startswith(
        "rank 1 may be at work: its I/O and system calls cannot be read in /proc: the hang is certain after 1200 s"
    )


def test_a_child_that_cannot_be_read_is_not_taken_for_its_rank() -> None:
    """What the rank does can be read beside it: the line must not send the user to the wrong process."""
    ffmpeg = child(**FORKED)._replace(**UNREADABLE, waits=(), name="ffmpeg")
    found = job(*MP_QUEUE, syscall="read", wchan="pipe_read", children=(ffmpeg,))
    diagnosis = suspected(diagnose_hang(found), (1,), 1200.0, unreadable_processes(found))
    assert diagnosis.findings[0].startswith(
        f"rank 1 waits for something outside the job, or for ffmpeg (pid {CHILD}), which may be at work: its I/O and "
        "system calls cannot be read in /proc: the hang is certain after 1200 s"
    )
    both = job(*MP_QUEUE, syscall="read", wchan="pipe_read", children=(ffmpeg,), others={0: MP_QUEUE})
    line = suspected(diagnose_hang(both), (0, 1), 1200.0, {0: ffmpeg, 1: ffmpeg}).findings[0]
    assert line.startswith(
        "ranks 0-1 wait for something outside the job, or for processes below them, which may be at work: their I/O "
    )


def test_a_gpu_that_may_compute_is_the_reason_also_where_the_rank_cannot_be_read() -> None:
    found = with_recorder(job(*ON_GPU, **{**DRIVER, **UNREADABLE}))
    line = suspected(diagnose_hang(found), (1,), 1200.0, unreadable_processes(found)).findings[0]
    assert line.startswith("rank 1 waits for its GPU, which may still compute")


ON_GPU = (native("cudaStreamSynchronize"), LOAD)
DRIVER: dict[str, Any] = {"syscall": "poll", "waits_on": "/dev/nvidia0"}


def with_recorder(found: Evidence) -> Evidence:
    """Rank 1 waits in no collective, as its Flight Recorder has it."""
    return found._replace(capture=found.capture._replace(collectives=(recorder(1, completed=0),)))


def test_a_gpu_may_still_compute() -> None:
    found = with_recorder(job(*ON_GPU, **DRIVER))
    assert external(found) == (1,)
    line = suspected(diagnose_hang(found), (1,), 1200.0).findings[0]
    assert line.startswith("rank 1 waits for its GPU, which may still compute: the hang is certain after 1200 s")


def test_a_gpu_that_has_failed_computes_no_more() -> None:
    found = with_recorder(job(*ON_GPU, **DRIVER))._replace(
        kernel_lines=("NVRM: Xid (PCI:0000:43:00): 79, pid=101, GPU has fallen off the bus.",)
    )
    assert external(found) == ()


def test_a_gpu_of_another_job_on_the_host_says_nothing_of_the_rank_s_own() -> None:
    found = with_recorder(job(*ON_GPU, **DRIVER))._replace(
        kernel_lines=("NVRM: Xid (PCI:0000:ab:00): 79, pid=99999, GPU has fallen off the bus.",)
    )
    assert external(found) == (1,)


def test_a_collective_that_a_gpu_waits_in_is_none_of_its_computations() -> None:
    # Without a recorder it is not known whether it does.
    assert external(job(*ON_GPU, **DRIVER)) == ()
    stuck = (recorder(0, "all_reduce", completed=0), recorder(1, "all_reduce", completed=0))
    assert external(recorded(ON_GPU, ON_GPU, recorders=stuck)) == ()


def test_a_call_that_a_rank_only_has_posted_does_not_make_its_wait_for_a_server_certain() -> None:
    """Rank 0 has posted an ``irecv`` and asks a server; rank 1, which is to send, waits for it in a collective."""
    posted = CollectiveCall(1, "recv 0<-1", "[[4]]", retired=False, is_p2p=True, created_ns=1, nth=1)
    receives = GroupProgress("gloo:0", "default_pg", (0, 1), -1, -1, -1, (posted,))
    recorders = (RankCollectives(0, (receives,)), recorder(1, "all_reduce", completed=0, ranks=(0, 1)))

    def found(look: dict[str, Any]) -> tuple[int, ...]:
        return external(recorded((LOAD,), IN_STEP, looks={0: look}, recorders=recorders))

    assert found({**RECV, "waits": waits(100, addresses=("10.9.9.9:5432",))}) == (0,)
    assert found({**FLOCK, "waits": waits(100, outside=True)}) == (0,)
    # It may ask in a loop whether the call is over.
    assert found(SLEEP) == ()


def nccl(
    *, started: tuple[int, ...] = (), completed: tuple[int, ...] = (), op: str = "all_reduce"
) -> tuple[RankCollectives, ...]:
    """Three ranks that have called a collective of NCCL, which has begun on some and is over on others."""
    found = []
    for rank in range(3):
        one = recorder(rank, op, completed=int(rank in completed))
        (group,) = one.groups
        (call,) = group.calls
        group = group._replace(group="nccl:0", calls=(call._replace(started=rank in started),))
        found.append(one._replace(groups=(group,)))
    return tuple(found)


def dump_of_nccl(rank: int, *ops: tuple[str, str], last: str) -> RankCollectives:
    """A recorder as torch writes it: calls and their states, and the last one that torch has on its list."""
    entries = [
        {
            "record_id": seq,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": seq,
            "p2p_seq_id": 0,
            "profiling_name": f"nccl:{op}",
            "input_sizes": [[4]],
            "output_sizes": [[4]],
            "state": state,
            "retired": state == "completed",
            "is_p2p": False,
        }
        for seq, (op, state) in enumerate(ops, 1)
    ]
    status = {"last_enqueued_collective": last, "last_completed_collective": "-1"}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    content = {"entries": entries, "pg_status": {"0": status}, "pg_config": config}
    return RankCollectives(rank, read_groups(content, "dump_nccl_trace_json"))


@pytest.mark.parametrize("last", ["-1", "1", "2"])
def test_a_call_that_torch_does_not_have_on_its_list_yet_is_waited_in(last: str) -> None:
    """A blocking wait keeps it from the list, or the rank has not come out of the call."""
    first, second = ("all_reduce", "completed"), ("all_reduce", "scheduled")
    recorders = (
        dump_of_nccl(0, first, second, last=last),
        dump_of_nccl(1, first, last="1"),
        dump_of_nccl(2, first, second, last=last),
    )
    found = recorded(ON_GPU, (LOAD,), ON_GPU, looks={1: SLEEP}, recorders=recorders)
    assert diagnose_hang(found).headline.startswith("the job hangs: rank 1 (node1) has not called the all_reduce")
    assert external(found) == (1,)


ALL_ON_GPU = (ON_GPU, ON_GPU, ON_GPU)


def test_a_gpu_may_still_compute_before_a_collective_that_all_have_called() -> None:
    """Kernels of minutes, or CUDA graphs: calls are only queued behind them. Starts of calls are seldom recorded."""
    found = recorded(*ALL_ON_GPU, recorders=nccl())
    assert external(found) == (0, 1, 2)
    diagnosis = suspected(diagnose_hang(found), (0, 1, 2), 1200.0)
    assert diagnosis.headline.startswith("the job may hang: all ranks")
    assert diagnosis.findings[0] == (
        "ranks 0-2 wait for a call that all have made, before which their GPUs may still compute: "
        "the hang is certain after 1200 s (--external-wait-timeout)"
    )
    assert external(recorded(*ALL_ON_GPU, recorders=nccl(started=(0, 2)))) != ()
    # Who asks in a loop whether the call is over waits for it likewise.
    assert external(recorded(*POLLS_WORK, looks=POLLING, recorders=nccl())) == (0, 1, 2)


def test_members_of_a_coalesced_call_have_begun_once_the_entry_behind_them_has() -> None:
    recorders = []
    for one in nccl(started=(0, 1, 2)):
        (group,) = one.groups
        (last,) = group.calls
        member = last._replace(op="all_gather_into_tensor", started=False)
        calls = (member, member, last._replace(op="coalesced"))
        recorders.append(one._replace(groups=(group._replace(calls=calls),)))
    assert external(recorded(*ALL_ON_GPU, recorders=tuple(recorders))) == ()


def test_what_is_said_of_gpus_does_not_depend_on_what_else_ranks_do() -> None:
    """Some processes cannot be read, or one waits for its GPU and in no call."""
    found = recorded(*ALL_ON_GPU, looks={1: UNREADABLE}, recorders=nccl())
    line = suspected(diagnose_hang(found), (0, 1, 2), 1200.0, unreadable_processes(found)).findings[0]
    assert line.startswith("ranks 0-2 wait for a call that all have made, before which their GPUs may still compute")
    mixed = recorded(ON_GPU, ON_GPU, ON_GPU, recorders=(*nccl()[:2], recorder(2, completed=0)))
    line = suspected(diagnose_hang(mixed), (0, 1, 2), 1200.0).findings[0]
    assert line.startswith("ranks 0-2 wait for their GPUs, which may still compute")


def test_a_collective_that_has_begun_on_all_gpus_is_what_lasts() -> None:
    """Or that is over on one to which all have to contribute."""
    assert external(recorded(*ALL_ON_GPU, recorders=nccl(started=(0, 1, 2)))) == ()
    later = (IN_STEP, ON_GPU, ON_GPU)
    assert external(recorded(*later, recorders=nccl(completed=(0,)))) == ()
    assert external(recorded(*POLLS_WORK, looks=POLLING, recorders=nccl(started=(0, 1, 2)))) == ()
    # What is sent by one rank may have left it before the others have begun.
    assert external(recorded(*later, recorders=nccl(completed=(0,), op="broadcast"))) == (1, 2)
    # Split sizes may be zero.
    assert external(recorded(*later, recorders=nccl(completed=(0,), op="all_to_all"))) == (1, 2)


@pytest.mark.parametrize("sizes", [("[[8]]", "[[9]]"), ("[[9]]", "[[8]]")])
def test_an_all_to_all_whose_sizes_cannot_belong_together_never_ends(sizes: tuple[str, str]) -> None:
    """Whatever the GPUs have to do before it."""

    def found(*of_ranks: tuple[str, str]) -> tuple[int, ...]:
        recorders = []
        for one, (given, taken) in zip(nccl(op="all_to_all"), of_ranks, strict=True):
            (group,) = one.groups
            calls = (group.calls[0]._replace(sizes=given, output_sizes=taken),)
            recorders.append(one._replace(groups=(group._replace(calls=calls),)))
        return external(recorded(*ALL_ON_GPU, recorders=tuple(recorders)))

    equal = ("[[8]]", "[[8]]")
    assert found(equal, equal, sizes) == ()
    assert found(equal, equal, equal) == (0, 1, 2)
    assert found(("[[8]]", "[[7]]"), ("[[8]]", "[[8]]"), ("[[8]]", "[[9]]")) == (0, 1, 2)
    # A halo exchange: the rank in the middle has two neighbours.
    assert found(equal, ("[[16]]", "[[16]]"), equal) == (0, 1, 2)


def test_sizes_of_tensors_for_many_ranks_count_as_well() -> None:
    """The text of their sizes is cut."""
    recorders = []
    for rank in range(40):
        tensors = [[128 + (rank == 5), 64]] * 40
        entry = {
            "record_id": 1,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": 1,
            "profiling_name": "nccl:all_to_all",
            "input_sizes": tensors,
            "output_sizes": tensors,
            "state": "scheduled",
        }
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(40)])}}
        groups = read_groups({"entries": [entry], "pg_config": config}, "dump_nccl_trace_json")
        recorders.append(RankCollectives(rank, groups))
    found = recorded(*[ON_GPU] * 40, recorders=tuple(recorders))
    cause = diagnose_hang(found).cause
    assert cause is not None
    assert cause.ranks == (5,)
    assert external(found) == tuple(range(40))


def test_a_gpu_may_compute_before_a_collective_also_where_its_recorder_does_not_answer() -> None:
    silent = RankCollectives(2, (), "it does not answer")
    assert external(recorded(*ALL_ON_GPU, recorders=(*nccl()[:2], silent))) == (2,)
    assert external(recorded(*ALL_ON_GPU, recorders=(*nccl()[:2], silent._replace(has_failed=True)))) == ()
    on_processors = tuple(recorder(rank, "all_reduce", completed=0) for rank in range(2))
    assert external(recorded(*ALL_ON_GPU, recorders=(*on_processors, silent))) == ()


def test_what_shows_a_failure_makes_a_collective_that_all_have_called_certain() -> None:
    """The kernel log, a recorder whose CUDA has an error, or what NCCL knows of its processes; and heartbeats."""
    recorders = nccl()
    found = recorded(*ALL_ON_GPU, recorders=recorders)
    assert external(found._replace(kernel_lines=("NVRM: Xid (PCI:0000:43:00): 79, GPU has fallen off the bus.",))) == ()
    failed = (recorders[0]._replace(has_failed=True), *recorders[1:])
    assert external(recorded(*ALL_ON_GPU, recorders=failed)) == ()
    dead = NcclOutlier("a7", 3, "dead", (NcclProcess(1, "10.0.0.1", 101),), 1, is_timed=True)
    assert external(recorded(*ALL_ON_GPU, recorders=recorders, nccl=(dead,))) == ()
    behind = dead._replace(kind="behind", message="41 AllReduce, and others 42")
    assert external(recorded(*ALL_ON_GPU, recorders=recorders, nccl=(behind,))) == (0, 1, 2)
    late = HangVerdict("heartbeat", (0, 1, 2), 400.0, certain=True)
    assert external(recorded(*ALL_ON_GPU, recorders=recorders, verdict=late)) == ()


def test_a_collective_of_the_processors_waits_for_no_gpu() -> None:
    """Nor does one that a rank has not called."""
    called = tuple(recorder(rank, "all_reduce", completed=0) for rank in range(3))
    assert external(recorded(IN_STEP, IN_STEP, IN_STEP, recorders=called)) == ()
    late = (*nccl()[:2], recorder(2, completed=0))
    assert external(recorded(IN_STEP, IN_STEP, IN_STEP, recorders=late)) == ()
    ends = (RankEnd(2, 2, 102, ExitStatus(0, None), 9.0, 9.0, stopped_by_us=False),)
    assert external(recorded(*ALL_ON_GPU, recorders=nccl(), ends=ends)) == ()


def test_a_rank_that_has_ended_outside_the_group_of_a_call_does_not_make_it_certain() -> None:
    """It may have had nothing left to do: an evaluator, or a rank of another group."""
    ended = (RankEnd(3, 3, 103, ExitStatus(0, None), 9.0, 9.0, stopped_by_us=False),)

    def found_with(recorders: tuple[RankCollectives, ...], description: str = "trainers") -> Evidence:
        group = [one.groups[0]._replace(description=description) for one in recorders]
        recorders = tuple(one._replace(groups=(its,)) for one, its in zip(recorders, group, strict=True))
        return recorded(*ALL_ON_GPU, (), recorders=recorders, ends=ended)

    found = found_with(nccl())
    assert external(found) == (0, 1, 2)
    diagnosis = diagnose_hang(found)
    assert diagnosis.cause is not None
    assert diagnosis.cause.class_name == "hang_all_in_collective"
    assert "ranks 0-2" in diagnosis.headline
    assert diagnosis.headline.endswith("rank 3, which has ended (exit code 0), is not in their group")
    # One that has begun on all GPUs lasts, whoever has ended.
    assert external(found_with(nccl(started=(0, 1, 2)))) == ()
    # Of the default group all ranks are members, and what an ended one has called is not known.
    found = found_with(nccl(), "default_pg")
    assert external(found) == ()
    diagnosis = diagnose_hang(found)
    assert diagnosis.cause is not None
    assert diagnosis.cause.class_name == "hang_early_exit"
