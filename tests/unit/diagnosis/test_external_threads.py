"""Waits that lead out of the job by way of threads and of other processes, also in evidence of another host."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.cluster.evidence import decode_part, encode_part
from saferun.cluster.evidence.sizes import REDUCTIONS
from saferun.diagnosis.external_waits import external_ranks
from saferun.diagnosis.hang import diagnose_hang
from saferun.diagnosis.rank_view import first_found
from saferun.evidence.job_evidence import Evidence, Frame, StackDump, ThreadStack
from saferun.evidence.wait_evidence import ThreadWait
from tests.unit.diagnosis.recorded_hangs import C10D, SITE, dump_of, native
from tests.unit.diagnosis.test_external_waits import (
    CHILD,
    EVENT,
    FORKED,
    FUTURE,
    IN_STEP,
    LIBRARY,
    LOAD,
    MP_QUEUE,
    PID,
    QUEUE,
    SLEEP,
    THREADING,
    WAIT,
    WAIT4,
    child,
    external,
    job,
    thread_of,
    waits,
)

TID = 777
IN_POOL = (
    Frame("_WorkItem.run", f"{LIBRARY}/concurrent/futures/thread.py", 58),
    Frame("_worker", f"{LIBRARY}/concurrent/futures/thread.py", 83),
)
IN_LOOP = (
    Frame("EpollSelector.select", f"{LIBRARY}/selectors.py", 468),
    Frame("BaseEventLoop._run_once", f"{LIBRARY}/asyncio/base_events.py", 1884),
    Frame("Runner.run", f"{LIBRARY}/asyncio/runners.py", 118),
    LOAD,
)
MAP = (THREADING, Frame("MapResult.get", f"{LIBRARY}/multiprocessing/pool.py", 768), LOAD)
JOIN = (Frame("Thread.join", f"{LIBRARY}/threading.py", 1119), LOAD)
SAVES = (
    Frame("all_gather_object", C10D, 3100),
    Frame("save", f"{SITE}/torch/distributed/checkpoint/state_dict_saver.py", 150),
    *IN_POOL,
)
SLEEPER = ThreadWait(TID, outside=True)
DOWNLOAD = ThreadWait(TID, addresses=("10.9.9.9:443",))
SERVER = ThreadWait(TID, outside=True, timed=True, by_descriptor=True)
SERVES = (
    Frame("_PollLikeSelector.select", f"{LIBRARY}/selectors.py", 415),
    Frame("BaseServer.serve_forever", f"{LIBRARY}/socketserver.py", 232),
)
LOADER = Frame("_try_get_data", f"{SITE}/torch/utils/data/dataloader.py", 1000)
WORKER = (*MP_QUEUE[:2], Frame("_worker_loop", f"{SITE}/torch/utils/data/_utils/worker.py", 3))


def with_thread(*frames: Frame, thread: tuple[Frame, ...], wait: ThreadWait | None, **look: Any) -> Evidence:
    """Rank 1 does what its frames say, and has another thread."""
    own = (ThreadWait(PID), *((wait,) if wait is not None else ()))
    return job(*frames, waits=own, threads=(thread_of(TID, *thread),), **look)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(with_thread(*FUTURE, thread=IN_POOL, wait=SLEEPER), id="pool.submit(time.sleep)"),
        pytest.param(with_thread(*JOIN, thread=IN_POOL, wait=DOWNLOAD), id="a thread of a library"),
        pytest.param(with_thread(*MAP, thread=IN_POOL, wait=SLEEPER), id="a pool of threads"),
        pytest.param(with_thread(*IN_LOOP, thread=IN_POOL, wait=SLEEPER, syscall="epoll_wait"), id="to_thread"),
        pytest.param(with_thread(*QUEUE, thread=IN_POOL, wait=DOWNLOAD), id="a queue that a library's download feeds"),
        pytest.param(with_thread(*QUEUE, thread=SERVES, wait=SERVER), id="a queue that a server's thread feeds"),
        pytest.param(with_thread(*EVENT, thread=SERVES, wait=SERVER), id="an event beside a server's thread"),
        pytest.param(
            job(LOAD, waits=(ThreadWait(PID), DOWNLOAD)), id="a call in C whose own threads have a connection"
        ),
    ],
)
def test_threads_of_libraries_count_where_they_are_waited_for(found: Evidence) -> None:
    """``pool.submit(boto.download, …)`` has no line of the user's in its thread."""
    assert external(found) == (1,)


ALARM = (Frame("Event.wait", f"{LIBRARY}/threading.py", 629), Frame("Timer.run", f"{LIBRARY}/threading.py", 1366))
CONDITION = (Frame("Condition.wait_for", f"{LIBRARY}/threading.py", 355), LOAD)
SEMAPHORE = (Frame("Semaphore.acquire", f"{LIBRARY}/threading.py", 468), LOAD)
BARRIER = (Frame("Barrier.wait", f"{LIBRARY}/threading.py", 668), LOAD)
BACKS_OFF = (Frame("fetch", "/job/data.py", 12),)
ASLEEP = ThreadWait(TID, outside=True, timed=True, sleeps=True)
TIMED = ThreadWait(TID, timed=True)
GIVEN = {
    "event": EVENT,
    "condition": CONDITION,
    "queue": QUEUE,
    "semaphore": SEMAPHORE,
    "barrier": BARRIER,
    "lock": (LOAD,),
}


@pytest.mark.parametrize("stack", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize(
    ("thread", "wait", "expected"),
    [
        pytest.param(BACKS_OFF, ASLEEP, (1,), id="time.sleep"),
        pytest.param(BACKS_OFF, TIMED, (1,), id="a wait with a timeout"),
        pytest.param(ALARM, TIMED, (1,), id="threading.Timer"),
        pytest.param((native("PyThread_acquire_lock_timed"), *ALARM), TIMED, (1,), id="threading.Timer, with C"),
        pytest.param(BACKS_OFF, None, (), id="a lock"),
        pytest.param(ALARM, None, (), id="an event that nothing sets"),
        pytest.param(IN_POOL, TIMED, (), id="a library's wait with a timeout"),
    ],
)
def test_a_thread_that_only_sleeps_may_give_what_is_waited_for(
    stack: tuple[Frame, ...], thread: tuple[Frame, ...], wait: ThreadWait | None, expected: tuple[int, ...]
) -> None:
    """One that backs off before it asks a server again; two threads that wait for each other's locks never end."""
    assert external(with_thread(*stack, thread=thread, wait=wait)) == expected


@pytest.mark.parametrize(
    ("wait", "expected"),
    [(ASLEEP, (1,)), (TIMED, ()), (ThreadWait(TID, outside=True, timed=True), ())],
    ids=["asleep", "in a lock with a timeout", "in a poll with a timeout"],
)
def test_a_thread_in_c_that_sleeps_may_hold_what_c_waits_for(wait: ThreadWait, expected: tuple[int, ...]) -> None:
    """``pthread_join`` looks like a lock. Libraries of GPUs always have threads that poll."""
    assert external(job(LOAD, waits=(ThreadWait(PID), wait))) == expected
    # Which of the threads that Python knows sleep is known.
    assert external(with_thread(LOAD, thread=IN_POOL, wait=wait)) == ()


@pytest.mark.parametrize("tid", [0, 3], ids=["without numbers", "of a namespace"])
def test_where_the_numbers_of_threads_are_not_known_one_that_sleeps_is_enough(tid: int) -> None:
    """It may be the one that gives what is waited for."""
    for wait, expected in ((ASLEEP, (1,)), (TIMED, ())):
        found = with_thread(*EVENT, thread=BACKS_OFF, wait=wait)
        stacks = tuple(
            dump._replace(threads=(dump.threads[0]._replace(tid=1), thread_of(tid, *BACKS_OFF)))
            if dump.rank == 1
            else dump
            for dump in found.capture.stacks
        )
        assert external(found._replace(capture=found.capture._replace(stacks=stacks))) == expected


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(with_thread(*FUTURE, thread=EVENT, wait=None), id="a thread in a lock"),
        pytest.param(with_thread(*QUEUE, thread=IN_POOL, wait=SLEEPER), id="a queue beside a library's that sleeps"),
        pytest.param(with_thread(*EVENT, thread=IN_POOL, wait=SLEEPER), id="an event beside a library's that sleeps"),
        pytest.param(with_thread(*IN_LOOP, thread=EVENT, wait=None, syscall="epoll_wait"), id="a loop without work"),
        pytest.param(job(*FUTURE, waits=waits()), id="a future that nobody computes"),
        pytest.param(
            job(*QUEUE, waits=(ThreadWait(PID), SERVER)), id="a queue beside a thread in C that listens, as gloo's does"
        ),
    ],
)
def test_threads_that_are_not_waited_for_and_locks_change_nothing(found: Evidence) -> None:
    assert external(found) == ()


def test_a_thread_of_a_library_that_waits_for_other_ranks_is_no_lock() -> None:
    """Rank 2 saves a checkpoint in a thread of torch's, which waits for rank 1, which sleeps."""
    saving = dump_of(2, *FUTURE)
    saving = saving._replace(threads=(*saving.threads, thread_of(TID, *SAVES)))
    found = job(LOAD, **SLEEP, waits=waits(outside=True), others={2: ()})
    found = found._replace(capture=found.capture._replace(stacks=(*found.capture.stacks, saving)))
    cause = diagnose_hang(found).cause
    assert cause is not None
    assert cause.ranks == (1,)
    assert external(found) == (1,)


@pytest.mark.parametrize(
    ("tid", "pid", "expected"),
    [(TID, PID, (1,)), (0, PID, (1,)), (3, 1, (1,)), (TID + 1, PID, ())],
    ids=["known", "without numbers", "of a namespace", "another thread"],
)
def test_threads_whose_numbers_a_tool_does_not_know_count_by_what_any_of_them_does(
    tid: int, pid: int, expected: tuple[int, ...]
) -> None:
    """Faulthandler has no numbers, and py-spy has those that a process itself sees."""
    found = with_thread(*FUTURE, thread=IN_POOL, wait=SLEEPER)

    def change(dump: StackDump) -> StackDump:
        main, *others = dump.threads
        return dump._replace(threads=(main._replace(tid=pid), *(thread._replace(tid=tid) for thread in others)))

    stacks = tuple(change(dump) if dump.rank == 1 else dump for dump in found.capture.stacks)
    assert external(found._replace(capture=found.capture._replace(stacks=stacks))) == expected


# ------------------------------------------------------------------------------------------------- evidence from afar


def far(found: Evidence, reductions: int = 1) -> Evidence:
    """What the leader gets of it, after so many reductions."""
    for reduce in REDUCTIONS[:reductions]:
        found = reduce(found)
    came = decode_part(encode_part(found, 1 << 20))
    assert came is not None
    return came._replace(ranks=found.ranks, hang=found.hang)


@pytest.mark.parametrize("reductions", [1, 3, 5, 6])
def test_what_a_thread_waits_for_reaches_the_leader(reductions: int) -> None:
    """A rank on the second host that waits for a thread of its pool is no more certain than one on the first."""
    gloo = (ThreadWait(5000 + number, addresses=(f"10.0.0.2:{40000 + number}",)) for number in range(60))
    found = job(*FUTURE, waits=(ThreadWait(PID), *gloo, SLEEPER), threads=(thread_of(TID, *IN_POOL),))
    assert external(far(found, reductions)) == (1,)
    idle = job(*FUTURE, waits=(ThreadWait(PID), SLEEPER), threads=(thread_of(TID + 1, *EVENT),))
    assert external(far(idle, reductions)) == ()


def test_alike_ranks_travel_once_whatever_the_numbers_of_their_threads_are() -> None:
    """Their threads' numbers differ, and what they wait for is said of each."""
    stacked = [dump_of(rank, *FUTURE) for rank in range(64)]
    stacks = tuple(
        dump._replace(threads=(*dump.threads, thread_of(TID + dump.rank, *IN_POOL * 20))) for dump in stacked
    )
    found = job(*FUTURE, waits=waits())
    look = found.capture.processes[1]
    processes = tuple(
        look._replace(rank=rank, pid=100 + rank, waits=(ThreadWait(TID + rank, outside=True),)) for rank in range(64)
    )
    found = found._replace(capture=found.capture._replace(stacks=stacks, processes=processes), ranks=tuple(range(64)))
    assert len(encode_part(found, 1 << 20)) < 8000
    came = far(found)
    assert [dump.threads[1].tid for dump in came.capture.stacks] == [TID + rank for rank in range(64)]


def test_processes_that_were_left_out_may_wait_for_anything() -> None:
    """Evidence of many hosts is sent without the children of ranks."""
    asleep = (child(**FORKED),)
    read: dict[str, Any] = {"syscall": "read", "waits": waits(pids=(CHILD,))}
    found = job(*MP_QUEUE, **read, children=asleep, dumps=(dump_of(1, LOAD, pid=CHILD),))
    assert external(found) == (1,)
    assert external(far(found, 6)) == (1,)


def test_a_process_that_another_rank_has_started_counts_too() -> None:
    """Rank 0 starts a server for all, and rank 1 waits for its answer."""
    server = child(name="server", command="server")._replace(rank=0, ppid=100)
    found = job(LOAD, syscall="recvfrom", waits=waits(pids=(CHILD,)), children=(server,))
    assert external(found) == (1,)


# ---------------------------------------------------------------------------------------------------- many processes


def loader(workers: int) -> Evidence:
    """A rank that waits for its data loader, each of whose workers has the pipes of all others open."""
    pids = tuple(range(CHILD, CHILD + workers))
    poll: dict[str, Any] = {"syscall": "poll", "wchan": "poll_schedule_timeout"}
    children = tuple(
        child(
            pid,
            name="pt_data_worker",
            command="python train.py",
            **poll,
            waits=waits(pid, timed=True, pids=(PID, *(other for other in pids if other != pid))),
        )
        for pid in pids
    )
    dumps = tuple(dump_of(1, *WORKER, pid=pid, name="pt_data_worker") for pid in pids)
    return job(LOADER, LOAD, **poll, waits=waits(timed=True, pids=pids), children=children, dumps=dumps)


@pytest.mark.parametrize("workers", [4, 64])
def test_each_process_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Workers that wait for each other held up the leader for a quarter of a minute where there were eight of them."""
    found = loader(workers)
    cause = diagnose_hang(found).cause
    looks = 0

    def count(*arguments: Any) -> object:
        nonlocal looks
        looks += 1
        return first_found(*arguments)

    monkeypatch.setattr("saferun.diagnosis.external_waits.first_found", count)
    assert external_ranks(found, cause) == ()
    assert looks <= 4 * workers + 10


def test_one_worker_that_sleeps_is_found_among_those_that_wait() -> None:
    found = loader(8)
    processes = tuple(
        one._replace(syscall="clock_nanosleep", waits=waits(CHILD + 5, outside=True)) if one.pid == CHILD + 5 else one
        for one in found.capture.processes
    )
    assert external(found._replace(capture=found.capture._replace(processes=processes))) == (1,)


def test_a_chain_of_children_may_be_as_long_as_it_likes() -> None:
    """What another host sends may be anything."""
    shell: dict[str, Any] = {"name": "bash", "syscall": "wait4", "wchan": "do_wait"}
    last = CHILD + 2000
    chain = tuple(
        child(pid, pid - 1 if pid > CHILD else PID, **shell, waits=waits(pid, pids=(pid + 1,)))
        for pid in range(CHILD, last)
    )
    found = job(WAIT, LOAD, **WAIT4, waits=waits(pids=(CHILD,)), children=(*chain, child(last, last - 1)))
    assert external(found) == (1,)


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        ({"syscall": "epoll_wait", "wchan": "ep_poll"}, (1,)),
        ({"syscall": "system call 999", "wchan": ""}, (1,)),
        ({"syscall": "read", "wchan": "pipe_read", "waits": waits(CHILD, pids=(PID,))}, ()),
        ({"state": "T", "syscall": "read"}, ()),
    ],
    ids=["a loop of its own", "an unknown call", "its standard input", "stopped"],
)
def test_what_another_program_does_is_not_to_be_seen(look: dict[str, Any], expected: tuple[int, ...]) -> None:
    """But a program that waits for the rank, which waits for it, never ends."""
    own = {"waits": waits(CHILD), **look}
    found = job(WAIT, LOAD, **WAIT4, waits=waits(pids=(CHILD,)), children=(child(name="tool", **own),))
    assert external(found) == expected


# ------------------------------------------------------------------------------------------------------ file servers


@pytest.mark.parametrize(("outside", "expected"), [(True, (1,)), (False, ())], ids=["a file", "a driver"])
def test_a_file_server_may_answer_again_and_a_driver_is_not_to_be_seen(
    outside: bool, expected: tuple[int, ...]
) -> None:
    found = job(LOAD, state="D", syscall="write", wchan="nfs_wait", waits=waits(outside=outside))
    assert external(found) == expected


def test_a_thread_without_frames_is_no_failure() -> None:
    """Native threads have no frames of Python's."""
    bare = ThreadStack("", 0, is_main=False, active=False, owns_gil=False, frames=())
    assert external(job(*FUTURE, waits=waits(), threads=(bare,))) == ()
    assert external(job(*IN_STEP, threads=(bare,))) == ()
