"""The coordinators of several hosts: how they miss each other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.torch.coordinating import (
    DECISION,
    TROUBLE,
    count_operations,
    cut_connections,
    hosts,
    join_all,
    port_of,
    states_until,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_host_whose_saferun_was_killed_is_gone() -> None:
    """It is up, and refuses connections."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job)
        job[1].vanish()
        lost = job[0].expect("lost")
        assert (lost["host"], lost["label"], lost["why"]) == (1, "node2", "gone")
        assert "node2" in lost["text"]


def test_a_frozen_host_is_told_apart_from_a_dead_one() -> None:
    """Its kernel accepts connections, and nothing more happens."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[1].process.send_signal(signal.SIGSTOP)
        assert job[0].expect("silent")["why"] == "frozen"
        job[1].process.send_signal(signal.SIGCONT)
        assert job[0].expect("returned")["host"] == 1


def test_a_stopped_supervisor_is_a_warning_while_its_coordinator_lives() -> None:
    """Its ranks work on, and it will go on where it was: somebody has pressed Ctrl-Z, or debugs it."""
    with subprocess.Popen(["sleep", "300"]) as supervisor, hosts("node1", "node2") as job:
        try:
            master = ["127.0.0.1", [port_of(job[0].ranks)]]
            job[0].join(node_rank=0, most=2, master=master)
            job[1].join(node_rank=1, most=2, master=master, record={"pid": supervisor.pid})
            job[0].expect("joined")
            supervisor.send_signal(signal.SIGSTOP)
            words = job[0].expect("warn")["text"]
            assert words == (
                f"saferun on node2 (pid {supervisor.pid}) is stopped (SIGSTOP); the job goes on; "
                f"kill -CONT {supervisor.pid} lets saferun go on"
            )
        finally:
            supervisor.kill()


def test_a_stopped_supervisor_of_the_leader_is_told_to_the_others() -> None:
    """It cannot say so itself."""
    with subprocess.Popen(["sleep", "300"]) as supervisor, hosts("node1", "node2") as job:
        try:
            master = ["127.0.0.1", [port_of(job[0].ranks)]]
            job[0].join(node_rank=0, most=2, master=master, record={"pid": supervisor.pid})
            job[1].join(node_rank=1, most=2, master=master)
            job[1].expect("joined")
            supervisor.send_signal(signal.SIGSTOP)
            message = job[1].expect("entry")["message"]
            assert message["kind"] == "notice"
            assert message["text"].startswith(f"saferun on node1 (pid {supervisor.pid}) is stopped (SIGSTOP)")
        finally:
            supervisor.kill()


# A process that sleeps uninterruptibly until its standard input is closed: the parent of a vfork without an exec.
_IN_STATE_D = """
import ctypes, os
if not ctypes.CDLL(None).syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x4000 | 17, 0, 0, 0, 0):
    os.read(0, 1)
    os._exit(0)
"""


@contextlib.contextmanager
def in_state_d() -> Iterator[int]:
    """A process in state D."""
    with subprocess.Popen([sys.executable, "-c", _IN_STATE_D], stdin=subprocess.PIPE) as process:
        try:
            until(lambda: process_state(process.pid) == "D", "state D")
            yield process.pid
        finally:
            assert process.stdin is not None
            process.stdin.close()


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("stalled", slow_but([0, 1], "1"))
def test_a_supervisor_that_waits_for_a_file_system_is_a_warning(stalled: int) -> None:
    """Its coordinator beats, and its ranks need no supervisor: nobody is lost, however long it takes."""
    with in_state_d() as pid, hosts("node1", "node2") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        for rank, host in enumerate(job):
            record = {"pid": pid if rank == stalled else os.getpid()}
            host.join(node_rank=rank, most=2, master=master, probe_after_s=0.6, record=record)
        for host in job:
            host.expect("joined")
        if stalled:
            words = job[0].expect("warn")["text"]
        else:
            job[0].expect("entry")
            message = job[1].expect("entry")["message"]
            assert message["kind"] == "notice"
            words = message["text"]
        assert words == f"saferun on node{stalled + 1} (pid {pid}) waits for I/O (state D); the job goes on"
        before = count_operations(job[1])
        until(lambda: count_operations(job[1]) > before + 40, "forty beats")
        again = [
            message["op"]
            for host in job
            for message in host.read_all()
            if message["op"] not in {"states", "resumable", "clock"}
        ]
        assert not again


def test_a_healthy_host_is_not_lost() -> None:
    """Over several times the time that a host may be silent."""
    with hosts("node1", "node2") as job:
        join_all(job, probe_after_s=0.6)
        before = count_operations(job[1])
        until(lambda: count_operations(job[1]) > before + 40, "forty beats")
        assert not [message for host in job for message in host.read_all() if message["op"] in {"lost", "store_lost"}]


@pytest.mark.parametrize("which", slow_but(["leader", "other"], "leader"))
def test_a_healthy_host_is_not_lost_where_hosts_have_different_timeouts(which: str) -> None:
    """Each host beats often enough for the leader's limit and, to notice a store that does not answer, for its own."""
    with hosts("node1", "node2") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        limits = (0.6, 600.0) if which == "leader" else (600.0, 0.6)
        for rank, (host, limit_s) in enumerate(zip(job, limits, strict=True)):
            host.join(node_rank=rank, most=2, master=master, probe_after_s=limit_s)
        for host in job:
            host.expect("joined")
        before = count_operations(job[1])
        until(lambda: count_operations(job[1]) > before + 40, "forty beats", timeout_s=60.0)
        assert {message["op"] for host in job for message in host.read_all()} <= {"states", "resumable", "clock"}


def test_the_leaders_end_is_noticed_at_once() -> None:
    """A broken connection needs no time-out."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job, probe_after_s=60.0)
        states_until(job[0], {f"{host}/0": {"s": "run"} for host in range(3)})
        job[0].vanish()
        for host in job[1:]:
            lost = host.expect("store_lost")
            assert (lost["attempt"], lost["why"]) == (0, "gone")
            assert "node1" in lost["text"]


@pytest.mark.slow
def test_a_frozen_leader_is_noticed_by_its_silence() -> None:
    """Connections stay open, and nothing is answered."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[0].process.send_signal(signal.SIGSTOP)
        assert job[1].expect("silent")["why"] == "frozen"
        job[0].process.send_signal(signal.SIGCONT)
        assert job[1].expect("returned")["host"] == 0


def test_the_leaders_end_after_its_decision_is_no_loss() -> None:
    """The job is over; there is nothing to be told."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[0].send("append", attempt=0, message=DECISION)
        for host in job:
            host.expect("entry")
            host.send("ack", attempt=0)
        job[0].send("goodbye")
        job[0].wait_closed()
        job[0].vanish()
        job[1].send("goodbye")
        job[1].wait_closed()
        assert not [message for message in job[1].read_all() if message["op"] == "store_lost"]


def test_a_connection_that_something_between_has_cut_is_made_anew() -> None:
    """Firewalls forget connections that are quiet for long; both ends live."""
    with hosts("node1", "node2") as job:
        join_all(job)
        cut_connections(job[1].process.pid, job[0].control_port)
        job[0].send("append", attempt=0, message={"kind": "hang"})
        assert job[1].expect("entry")["message"]["kind"] == "hang"
        job[1].send("append", attempt=0, message=TROUBLE)
        assert job[0].expect("entry", k=1)["message"]["kind"] == "abort"
        assert not [message for message in job[1].read_all() if message["op"] == "store_lost"]


def test_the_leader_can_have_a_host_knocked_at() -> None:
    """One that answers is there."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[0].send("probe", attempt=0, hosts=[1])
        assert job[0].expect("probed", host=1)["why"] == "reached"
        job[1].vanish()
        job[0].send("probe", attempt=0, hosts=[1])
        assert job[0].expect("probed", host=1)["why"] == "gone"
