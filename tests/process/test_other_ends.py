"""Whom the threads of real processes wait for: processes of the job, or what is outside it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.captures import other_ends
from saferun.captures.other_ends import OtherEnds
from saferun.captures.waiting import Ends
from saferun.evidence.wait_evidence import ThreadWait
from saferun.linux.procfs import children_of
from saferun.linux.small_files import read_bytes, read_link
from saferun.linux.syscalls import SystemCall
from tests.process.launching import read_stat, until

READY = "print('ready', flush=True)\n"
BEGIN = "import fcntl, os, select, signal, socket, subprocess, sys, threading, time\n"


@contextlib.contextmanager
def process(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready" and then waits."""
    command = [sys.executable, "-c", BEGIN + program, *arguments]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert found.stdout is not None
        assert found.stdout.readline() == "ready\n"
        yield found
    finally:
        for pid in children_of(found.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        found.kill()
        found.communicate()


def asleep(pid: int) -> None:
    """Wait until the main thread of a process that has said "ready" waits for what it is to wait for."""
    until(lambda: (stat := read_stat(pid)) is not None and stat.state == "S", "it waits")


def waits_of(pid: int, *others: int) -> tuple[ThreadWait, ...]:
    """Its waits, where these processes and its children are the job."""
    job = [(0, one, "") for one in (pid, *children_of(pid))] + [(1, one, "") for one in others]
    return OtherEnds(Ends(job)).of_process(pid, is_readable=True)


def main_wait(pid: int, *others: int) -> ThreadWait | None:
    """The wait of its main thread."""
    return next((wait for wait in waits_of(pid, *others) if wait.tid == pid), None)


@pytest.mark.parametrize(
    "program",
    [
        READY + "time.sleep(1000)",
        READY + "sys.stdin.read(1)",
        READY + "select.select([], [], [], 1000)",
        READY + "select.select([sys.stdin], [], [])",
        READY + "select.poll().poll(1000_000)",
        "listener = socket.create_server(('127.0.0.1', 0))\n" + READY + "listener.accept()",
        "import asyncio\n" + READY + "asyncio.run(asyncio.sleep(1000))",
        READY + "signal.sigtimedwait([signal.SIGUSR1], 1000)",
        READY + "signal.sigwait([signal.SIGUSR1])",
        "signal.signal(signal.SIGUSR1, print)\n" + READY + "signal.pause()",
        "path = sys.argv[1] + '/fifo'\nos.mkfifo(path)\n" + READY + "os.open(path, os.O_RDONLY)",
    ],
)
def test_clocks_and_pipes_and_sockets_of_others_are_outside(tmp_path: Path, program: str) -> None:
    """Whatever may end the wait is not of the job."""
    with process(program, str(tmp_path)) as one:
        until(lambda: (wait := main_wait(one.pid)) is not None and wait.outside, "it waits")


def test_whoever_has_the_message_queue_is_outside() -> None:
    libc = ctypes.CDLL(None)
    queue = libc.msgget(0, 0o600)
    try:
        waits = f"import ctypes\n{READY}ctypes.CDLL(None).msgrcv({queue}, ctypes.create_string_buffer(99), 9, 0, 0)"
        with process(waits) as one:
            until(lambda: (wait := main_wait(one.pid)) is not None and wait.outside, "it waits")
    finally:
        libc.msgctl(queue, 0, None)  # IPC_RMID


SEMAPHORE = """
import ctypes
libc, name = ctypes.CDLL(None), sys.argv[1].encode()
libc.sem_open.restype = ctypes.c_void_p
semaphore = ctypes.c_void_p(libc.sem_open(name, os.O_CREAT, 0o600, 0))
"""
AWAIT_IT = READY + "libc.sem_wait(semaphore)"


def test_any_process_can_post_a_semaphore_that_has_a_name() -> None:
    name = f"/saferun-test-{os.getpid()}"
    try:
        with process(SEMAPHORE + AWAIT_IT, name) as one:
            until(lambda: (wait := main_wait(one.pid)) is not None and wait.outside, "it waits")
            # It waits for the lock on its memory where that may block.
            waits = OtherEnds(Ends([(0, one.pid, "")])).of_process(one.pid, is_readable=False)
            assert not any(wait.outside for wait in waits)
    finally:
        ctypes.CDLL(None).sem_unlink(name.encode())


def test_only_processes_of_the_job_have_a_semaphore_without_a_name() -> None:
    """As those of multiprocessing are."""
    with process(SEMAPHORE + "libc.sem_unlink(name)\n" + AWAIT_IT, f"/saferun-test-{os.getpid()}") as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert not wait.outside


def test_memory_of_another_file_system_is_not_known_by_the_inode_of_a_semaphore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel numbers the files of each by itself."""
    maps = b"7f0000000000-7f0000001000 rw-s 00000000 00:01 42    %s (deleted)\n"
    monkeypatch.setattr(other_ends, "_inodes_of", lambda _: frozenset({42}))
    for name, is_outside in ((b"/dev/zero", False), (b"/dev/shm/sem.x", True)):
        monkeypatch.setattr(other_ends, "read_bytes", lambda *_, name=name: maps % name)
        call = SystemCall("futex", (0x7F0000000010, 0x109, 0, 0, 0, 0))
        assert OtherEnds(Ends([])).of_call(1, 1, call, is_readable=True).outside is is_outside


def test_a_thread_of_zeromq_receives_what_an_event_descriptor_is_for() -> None:
    """The sockets are that thread's, and it wakes the one that waits."""
    program = """
event = os.eventfd(0)
def receive():
    open("/proc/thread-self/comm", "w").write("ZMQbg/IO/0")
    time.sleep(1000)
threading.Thread(target=receive, daemon=True).start()
while "ZMQbg/IO/0\\n" not in [open(f"/proc/self/task/{tid}/comm").read() for tid in os.listdir("/proc/self/task")]:
    time.sleep(0.01)
print("ready", flush=True)
select.select([event], [], [])
"""
    with process(program) as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert wait.outside


@pytest.mark.parametrize(
    ("program", "leads"),
    [
        ("listener = socket.create_server(('127.0.0.1', 0))\n" + READY + "listener.accept()", True),
        (READY + "select.select([sys.stdin], [], [])", True),
        (READY + "time.sleep(1000)", False),
        (READY + "select.select([], [], [], 1000)", False),
        (READY + "signal.sigwait([signal.SIGUSR1])", False),
    ],
)
def test_a_descriptor_that_leads_outside_is_known_from_a_clock(program: str, leads: bool) -> None:
    with process(program) as one:
        until(lambda: (wait := main_wait(one.pid)) is not None and wait.outside, "it waits")
        wait = main_wait(one.pid)
        assert wait is not None
        assert wait.by_descriptor is leads


@pytest.mark.parametrize(
    "program",
    [
        "lock = threading.Lock()\nlock.acquire()\n" + READY + "lock.acquire()",
        "a, b = socket.socketpair()\n" + READY + "a.recv(1)",
        "a, b = os.pipe()\n" + READY + "os.read(a, 1)",
        "a, b = os.pipe()\n" + READY + "select.select([a], [], [])",
        READY + "signal.pause()",
        "event = os.eventfd(0)\n" + READY + "os.read(event, 8)",
    ],
)
def test_what_a_process_waits_for_of_itself_is_not(program: str) -> None:
    with process(program) as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert not wait.outside
        assert not wait.pids
        assert not wait.addresses


@pytest.mark.parametrize(
    "program",
    [
        "child = subprocess.Popen(['sleep', '1000'])\n" + READY + "child.wait()",
        "child = subprocess.Popen(['sleep', '1000'], stdout=subprocess.PIPE)\n" + READY + "child.stdout.read()",
        "child = subprocess.Popen(['sleep', '1000'], stdout=subprocess.PIPE)\n"
        + READY
        + "select.select([child.stdout], [], [])",
        "a, b = os.pipe()\nif os.fork() == 0:\n    os.close(a)\n    time.sleep(1000)\nos.close(b)\n"
        + READY
        + "os.read(a, 1)",
        "a, b = socket.socketpair()\nif os.fork() == 0:\n    a.close()\n    time.sleep(1000)\nb.close()\n"
        + READY
        + "a.recv(1)",
    ],
)
def test_a_child_at_the_other_end_is_named(program: str) -> None:
    with process(program) as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert wait.pids == tuple(children_of(one.pid))
        assert not wait.outside


def test_a_connection_leads_to_a_process_of_the_job_or_to_an_address() -> None:
    """A rank that waits for another one hangs with it; what a server does is not to be seen."""
    serve = "listener = socket.create_server(('127.0.0.1', 0))\nprint('ready', flush=True)\n"
    serve += "print(listener.getsockname()[1], flush=True)\nconnection, _ = listener.accept()\ntime.sleep(1000)"
    with process(serve) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        connect = f"connection = socket.create_connection(('127.0.0.1', {port}))\n"
        with process(connect + READY + "connection.recv(1)") as one:
            until(
                lambda: (wait := main_wait(one.pid, server.pid)) is not None and wait.pids == (server.pid,), "accepted"
            )
            wait = main_wait(one.pid)
            assert wait is not None
            assert wait.addresses == (f"127.0.0.1:{port}",)
            assert not wait.outside


def test_a_connection_by_ipv4_to_a_server_of_ipv6_leads_to_its_process() -> None:
    """The server's table has it as ::ffff:127.0.0.1."""
    serve = "listener = socket.create_server(('::', 0), family=socket.AF_INET6, dualstack_ipv6=True)\n"
    serve += (
        "print('ready', flush=True)\nprint(listener.getsockname()[1], flush=True)\nconnection, _ = listener.accept()\n"
    )
    with process(serve + "connection.recv(1)") as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        connect = f"connection = socket.create_connection(('127.0.0.1', {port}))\n"
        with process(connect + READY + "connection.recv(1)") as one:
            until(
                lambda: (wait := main_wait(one.pid, server.pid)) is not None and wait.pids == (server.pid,), "accepted"
            )
            until(lambda: (wait := main_wait(server.pid, one.pid)) is not None and wait.pids == (one.pid,), "it reads")


def test_a_connection_that_is_not_accepted_leads_to_who_listens() -> None:
    """A rank that no longer accepts connections hangs with those that wait for it."""
    serve = "listener = socket.create_server(('127.0.0.1', 0))\nprint('ready', flush=True)\n"
    serve += "print(listener.getsockname()[1], flush=True)\ntime.sleep(1000)"
    with process(serve) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        with process(f"connection = socket.create_connection(('127.0.0.1', {port}))\n{READY}connection.recv(1)") as one:
            asleep(one.pid)
            wait = main_wait(one.pid, server.pid)
            assert wait is not None
            assert (wait.pids, wait.addresses) == ((server.pid,), ())
            wait = main_wait(one.pid)
            assert wait is not None
            assert wait.addresses == (f"127.0.0.1:{port}",)


def test_the_ports_of_the_job_are_known() -> None:
    """By these a connection of another host is seen to lead to a rank."""
    program = "listener = socket.create_server(('127.0.0.1', 0))\n"
    program += "client = socket.create_connection(listener.getsockname())\n"
    program += "datagrams = socket.socket(type=socket.SOCK_DGRAM)\ndatagrams.bind(('127.0.0.1', 0))\n"
    tell = "print(*(one.getsockname()[1] for one in (listener, client, datagrams)), flush=True)\ntime.sleep(1000)"
    with process(program + READY + tell) as one:
        assert one.stdout is not None
        ports = sorted(map(int, one.stdout.readline().split()))
        assert Ends([(0, one.pid, "")]).ports() == (tuple(ports), True)
        # Of a process that is gone, or may not be read, nothing is known.
        assert Ends([(0, one.pid, ""), (1, 0, "")]).ports() == (tuple(ports), False)


def test_a_file_lock_is_held_by_a_process_of_the_job_or_by_another(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    take = f"file = open({str(path)!r}, 'w')\n"
    lock = "fcntl.flock(file, fcntl.LOCK_EX)\n"
    with process(take + lock + READY + "time.sleep(1000)") as holder, process(take + READY + lock) as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert wait.outside
        wait = main_wait(one.pid, holder.pid)
        assert wait is not None
        assert (wait.outside, wait.pids) == (False, (holder.pid,))
    twice = take + lock + "again = open(file.name, 'w')\n"
    with process(twice + READY + "fcntl.flock(again, fcntl.LOCK_EX)") as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert (wait.outside, wait.pids) == (False, ())


def test_a_file_lock_is_looked_up_again_while_a_tool_stops_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the kernel's table does not have the wait: now and then it was taken for a lock of another job."""
    tables = [b"", b"1: FLOCK  ADVISORY  WRITE 1 fd:01:1234 0 EOF\n"]
    monkeypatch.setattr(other_ends, "read_bytes", lambda *path: tables.pop() if tables else read_bytes(*path))
    take = f"file = open({str(tmp_path / 'lock')!r}, 'w')\n"
    lock = "fcntl.flock(file, fcntl.LOCK_EX)\n"
    with process(take + lock + READY + "time.sleep(1000)") as holder, process(take + READY + lock) as one:
        asleep(one.pid)
        wait = main_wait(one.pid, holder.pid)
        assert wait is not None
        assert (wait.outside, wait.pids) == (False, (holder.pid,))


@pytest.mark.parametrize(("wchan", "is_held"), [("ptrace_stop", True), ("0", False), ("", False)])
def test_a_thread_that_a_tool_holds_for_long_may_wait_for_anything(
    monkeypatch: pytest.MonkeyPatch, wchan: str, *, is_held: bool
) -> None:
    """On a busy host the tool that takes stacks does; a thread that slept was then taken for one of a deadlock.

    Where the kernel hides in what a thread stands, each that was once stopped would count as held.
    """
    monkeypatch.setattr(other_ends, "_wchan", lambda *_: wchan)
    monkeypatch.setattr(other_ends, "_call_of", lambda *_: SystemCall("restart_syscall", (1, 0)))
    monkeypatch.setattr(other_ends, "_TRACED_PAUSE_S", 0.0)
    (wait,) = waits_of(os.getpid())[:1]
    assert (wait.outside, wait.pids) == (is_held, ())


def test_other_threads_are_there_with_what_they_wait_for() -> None:
    program = "thread = threading.Thread(target=lambda: time.sleep(1000), daemon=True)\nthread.start()\n"
    with process(program + READY + "thread.join()") as one:
        asleep(one.pid)
        until(lambda: any(wait.outside for wait in waits_of(one.pid) if wait.tid != one.pid), "the thread sleeps")
        main = main_wait(one.pid)
        assert main is not None
        assert not main.outside


def test_a_process_that_is_gone_has_no_waits() -> None:
    assert OtherEnds(Ends()).of_process(0, is_readable=True) == ()


def test_the_other_end_is_found_among_thousands_of_descriptors() -> None:
    """A rank may have a connection to each other one, and what it opens later has larger numbers."""
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(2000)]
a, b = os.pipe()
if os.fork() == 0:
    os.close(a)
    time.sleep(1000)
os.close(b)
"""
    with process(program + READY + "os.read(a, 1)") as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert (wait.outside, wait.pids) == (False, tuple(children_of(one.pid)))


def test_when_the_time_is_over_the_main_thread_has_been_looked_at() -> None:
    """One process of thousands of threads must not take the time of all others."""
    program = "for _ in range(3): threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()\n"
    with process(program + READY + "time.sleep(1000)") as one:
        asleep(one.pid)
        found = OtherEnds(Ends()).of_process(one.pid, is_readable=True, deadline=0.0)
        assert [wait.tid for wait in found] == [one.pid]


POOL = """
pipes = [os.pipe() for _ in range(20)]
for _ in pipes:
    if not os.fork():
        time.sleep(1000)
poll = select.poll()
for read_end, _ in pipes:
    poll.register(read_end, select.POLLIN)
print("ready", flush=True)
poll.poll()
"""


def test_the_pipes_of_many_workers_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is open in every worker: with 64 of them it took longer than a capture may."""
    looked_up: list[str] = []

    def read(path: str) -> str:
        looked_up.append(path)
        return read_link(path)

    monkeypatch.setattr(other_ends, "read_link", read)
    with process(POOL) as one:
        asleep(one.pid)
        wait = main_wait(one.pid)
        assert wait is not None
        assert set(wait.pids) <= set(children_of(one.pid))
    assert wait.pids
    # 21 processes with 20 pipes each.
    assert len(looked_up) < 2000


def test_threads_that_wait_for_a_clock_are_told_from_those_that_wait_for_a_lock() -> None:
    """One that sleeps may give what the main thread waits for; one without a timeout waits for another."""
    program = """
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
threading.Timer(1000, print).start()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire, daemon=True).start()
"""
    with process(program + READY + "lock.acquire()") as found:
        until(lambda: len(waits_of(found.pid)) == 3, "all threads wait")
        main, *others = waits_of(found.pid)
    assert main == ThreadWait(found.pid)
    assert sorted((wait.outside, wait.timed, wait.sleeps) for wait in others) == [
        (False, True, False),
        (True, True, True),
    ]


def test_a_sleep_that_was_stopped_and_continued_is_one_still() -> None:
    """As by a tool that has taken stacks a minute ago: the kernel shows it under another name."""
    program = "ctypes.CDLL(None).sleep(1000)"
    with process("import ctypes\n" + READY + program) as found:
        asleep(found.pid)
        os.kill(found.pid, signal.SIGSTOP)
        until(lambda: (stat := read_stat(found.pid)) is not None and stat.state == "T", "stopped")
        os.kill(found.pid, signal.SIGCONT)
        asleep(found.pid)
        until(lambda: (wait := main_wait(found.pid)) is not None and wait.sleeps, "it sleeps")
