"""What an inspection of quiet ranks finds: many sockets, many threads, frozen control groups, processes that end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from saferun.captures import inspection
from saferun.captures.inspection import inspect_ranks
from saferun.captures.inspection_values import RankInspection
from saferun.linux.procfs import descendants_of, read_stat
from saferun.watchdog.quiet_work import inspection_from
from tests.process.launching import until
from tests.process.watch_jobs import SLEEPS, TIMEOUT_S, Job

INTERVAL_S = 0.05


@contextlib.contextmanager
def child(program: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs a program and has said that it is ready."""
    ready = "print('ready', flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import os, socket, sys, threading, time\n" + program.replace("READY\n", ready)]
        + [str(argument) for argument in arguments],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def sender(port: int = 0) -> Iterator[socket.socket]:
    """A server that sends the connections that ask for it 1 kB every 10 ms."""

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if connection.recv(1):
                while True:
                    connection.send(bytes(1000))
                    time.sleep(0.01)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)


def inspected(pid: int, *addresses: str) -> RankInspection:
    """What is found of one process, as the supervisor reads it."""
    found = inspection_from(json.dumps(inspect_ranks([(0, pid, pid)], 0, INTERVAL_S, addresses)).encode())
    assert found is not None
    return found.ranks[0]


CONNECTS = """
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(40)]
os.dup2(connections[30].fileno(), 1020)
last = socket.socket(fileno=1020)
connections[30].close()
last.send(b"x")
READY
while True: last.recv(1 << 16)
"""


def test_of_many_connections_those_that_carry_most_are_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor reads it between other things. A descriptor with a high number counts like any other."""
    monkeypatch.setattr(inspection, "_ANSWERED_CONNECTIONS", 5)
    with sender() as listener, child(CONNECTS, listener.getsockname()[1]) as rank:

        def bytes_of_the_first() -> int:
            found = inspected(rank.pid).connections
            assert len(found) == 5
            return found[0].taken[-1] - found[0].taken[0]

        # On a busy machine nothing may be sent between two looks.
        until(lambda: bytes_of_the_first() >= 1000, "the one that carries most is the first")


def test_all_descriptors_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the first thousand are enough."""
    asked = []

    def list_fds(_pid: int, limit: int = 0) -> list[int]:
        asked.append(limit)
        return []

    monkeypatch.setattr(inspection, "list_fds", list_fds)
    inspect_ranks([(0, os.getpid(), os.getpid())], 0, 0.0)
    assert min(asked) >= 100_000


def test_of_many_threads_those_that_run_most_are_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the main one always."""
    monkeypatch.setattr(inspection, "_ANSWERED_THREADS", 5)
    runs = """
for _ in range(200): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
def run():
    while True: sum(range(1000))
thread = threading.Thread(target=run, daemon=True)
thread.start()
print("ready", flush=True)
print(thread.native_id, flush=True)
time.sleep(1000)
"""
    with child(runs) as rank:
        assert rank.stdout is not None
        tid = int(rank.stdout.readline())
        found = inspected(rank.pid).threads
        assert len(found) == 5
        assert {rank.pid, tid} <= {one.tid for one in found}


@pytest.mark.parametrize("is_reaped", [True, False])
@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_rank_that_ends_meanwhile_is_no_error(
    monkeypatch: pytest.MonkeyPatch, moment: int, *, is_reaped: bool
) -> None:
    """Nor are its threads and its children that do."""
    program = """
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
if os.fork():
    READY
    time.sleep(1000)
time.sleep(1000)
"""
    with child(program.replace("    READY\n", "    print('ready', flush=True)\n")) as rank:
        slept = []

        def sleep(_seconds: float) -> None:
            slept.append(1)
            if len(slept) == moment:
                for pid in (*descendants_of(rank.pid), rank.pid):
                    os.kill(pid, signal.SIGKILL)
                if is_reaped:
                    rank.wait()
                else:
                    until(lambda: (stat := read_stat(rank.pid)) is None or stat.state == "Z", "it has ended")

        monkeypatch.setattr(inspection, "time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
        assert inspected(rank.pid).local_rank == 0
        assert len(slept) == 3


def test_on_a_slow_host_there_are_fewer_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes too late is none, and a job that downloads would be called hung."""
    monkeypatch.setattr(inspection, "_LONG_ENOUGH_S", 0.0)
    with child("READY\ntime.sleep(1000)") as rank:
        found = inspected(rank.pid)
        assert {len(one.wakes) for one in found.threads} == {2}


def service_port() -> int:
    """A free port below those that the kernel chooses."""
    first = inspection._ephemeral_ports()[0]
    for port in range(first - 1, first - 2000, -1):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def test_connections_to_hosts_of_the_job_may_be_the_ranks_own_unless_they_are_to_a_service() -> None:
    """Ranks listen on ports that the kernel has chosen; services have ports that others know."""
    for port, addresses, expected in (
        (0, ["127.0.0.1"], True),
        (service_port(), ["127.0.0.1"], False),
        (0, ["10.9.8.7", "no address", "", "::1", "fe80::1%eth0"], False),
        (0, [], False),
    ):
        with sender(port) as listener, child(CONNECTS, listener.getsockname()[1]) as rank:
            found = inspected(rank.pid, *addresses).connections
            assert {one.may_be_internal for one in found} == {expected}


@contextlib.contextmanager
def frozen(name: str, *pids: int) -> Iterator[None]:
    """Processes in a control group that is frozen."""
    for parent, file, on, off in (
        ("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED"),
        ("/sys/fs/cgroup", "cgroup.freeze", "1", "0"),
    ):
        group = Path(parent) / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / file).exists():
                continue
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
            (group / file).write_text(on)
            yield
            return
        finally:
            with contextlib.suppress(OSError):
                (group / file).write_text(off)
            for pid in pids:
                with contextlib.suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(str(pid))
            group.rmdir()
    pytest.skip("no control group can be frozen here")


def test_ranks_in_a_frozen_control_group_are_suspected_to_hang_and_no_more(tmp_path: Path) -> None:
    """Who has frozen them may thaw them: container engines pause, and schedulers suspend."""
    works = "while True:\n    time.sleep(0.05)\n    burn(0.01)\n"
    with (
        contextlib.closing(Job(tmp_path, works, SLEEPS)) as job,
        frozen(f"saferun-test-{os.getpid()}", job.ranks[0].pid),
    ):
        job.begin()
        assert not job.until_told().certain
        job.run(2 * TIMEOUT_S)
        assert not any(verdict.certain for verdict in job.verdicts)
