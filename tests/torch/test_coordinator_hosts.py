"""The coordinators of several hosts: how they meet, tell each other things, and miss each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.breadth import slow_but
from tests.torch.coordinating import (
    DECISION,
    TROUBLE,
    Host,
    Line,
    Message,
    hosts,
    join_all,
    joining,
    listening,
    port_of,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def ranks_store(joined: Message) -> Any:
    """A client of the ranks' store, as a rank has one."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        joined["master_addr"],
        joined["master_port"],
        is_master=False,
        timeout=timedelta(seconds=10),
        wait_for_workers=False,
    )


def states_until(leader: Host, wanted: dict[str, Any]) -> dict[str, Any]:
    """All states that the leader has been told of, once the wanted ones are among them."""
    seen: dict[str, Any] = {}
    while any(seen.get(task) != state for task, state in wanted.items()):
        seen |= leader.expect("states")["changed"]
    return seen


# -------------------------------------------------------------------------------------------------------------- meeting


def test_hosts_meet_and_get_contiguous_ranks() -> None:
    """By node rank, as torchrun does it; the leader alone is told of all hosts."""
    with hosts("node1", "node2", "node3") as job:
        joined = join_all(job)
        assert [message["host"] for message in joined] == [0, 1, 2]
        assert [message["base_rank"] for message in joined] == [0, 2, 4]
        assert {message["world_size"] for message in joined} == {6}
        assert {message["leader_name"] for message in joined} == {"node1"}
        assert {message["files"] for message in joined} == {"/runs/node1"}
        assert {message["master_port"] for message in joined} == {port_of(job[0].ranks)}
        assert [message["leader"] for message in joined] == [True, False, False]
        assert [peer[:3] for peer in joined[0]["peers"]] == [
            [0, "node1", "node1"],
            [1, "node2", "node2"],
            [2, "node3", "node3"],
        ]
        assert "peers" not in joined[1]


def test_a_late_host_is_waited_for_and_named_meanwhile() -> None:
    """On every host that waits, not only on the first; by the scheduler's name where there is one."""
    with hosts("node1", "node2", "node3") as job:
        fields = {"most": 3, "least": 3, "tell_every_s": 0.5, "master": ["127.0.0.1", [port_of(job[0].ranks)]]}
        names = ["node1", "node2", "node3"]
        job[0].join(node_rank=0, expected=names, **fields)
        job[1].join(node_rank=1, expected=names, **fields)
        until_words(job[0], "waiting for 1 of 3 hosts: node3")
        until_words(job[1], "waiting for 1 of 3 hosts: node3")
        job[2].join(node_rank=2, **fields)
        assert [host.expect("joined")["host"] for host in job] == [0, 1, 2]


def until_words(host: Host, words: str) -> str:
    """The first ``waiting`` that says this."""
    while True:
        said: str = host.expect("waiting")["words"]
        if words in said:
            return said


def test_missing_hosts_are_named_on_every_host_in_the_end() -> None:
    """Without names from a scheduler, by node rank."""
    with hosts("node1", "node2") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        # The second one is up, whatever else the machine has to do, before the time of the first begins.
        job[1].join(node_rank=1, most=4, timeout_s=60.0, master=master, tell_every_s=0.5)
        job[1].expect("waiting")
        job[0].join(node_rank=0, most=4, timeout_s=2.6, master=master)
        for host in job:
            failed = host.expect("join_failed")
            assert failed["what"] == "2 of 4 hosts did not come within 3 s: node rank 2, node rank 3"
            assert failed["hint"]


def test_a_host_waits_for_a_first_host_that_comes_later() -> None:
    """Hosts start in any order."""
    with hosts("node1", "node2") as job:
        ranks = job[0].ranks
        port = port_of(ranks)
        job[1].join(node_rank=1, most=2, master=["127.0.0.1", [port]], tell_every_s=0.5)
        said = until_words(job[1], f"something listens on 127.0.0.1:{port} and does not answer as a store")
        assert said.endswith("s)")
        job[0].join(node_rank=0, most=2)
        assert job[1].expect("joined")["host"] == 1


def test_a_first_host_that_cannot_be_reached_is_named_with_the_reason() -> None:
    """While it is waited for, and at the end."""
    with hosts("node2") as (host,):
        closed = listening()
        port = port_of(closed)
        closed.close()
        host.join(node_rank=1, most=2, master=["127.0.0.1", [port]], tell_every_s=0.5, timeout_s=2.0)
        until_words(host, f"127.0.0.1:{port} refuses connections")
        failed = host.expect("join_failed")
        assert failed["what"] == f"127.0.0.1:{port} refuses connections, for 2 s"
        assert "--master-port" in failed["hint"]


def test_a_name_that_nobody_knows_is_said_to_be_one() -> None:
    """A number of an error would not help."""
    with hosts("node2") as (host,):
        host.join(node_rank=1, most=2, master=["no-such-host.invalid", [29500]], timeout_s=1.0)
        assert "the name no-such-host.invalid cannot be resolved" in host.expect("join_failed")["what"]


def test_a_store_of_another_job_is_recognised() -> None:
    """Both run ids are said."""
    with hosts("node1", "node2") as job:
        job[0].join(node_rank=0, most=2, run_id="job7")
        job[1].join(node_rank=1, most=2, run_id="job8", master=["127.0.0.1", [port_of(job[0].ranks)]])
        what = job[1].expect("join_failed")["what"]
        assert "'job7'" in what
        assert "'job8'" in what


def test_the_right_one_of_several_ports_is_found() -> None:
    """The first host took the first that was free: others may refuse, be silent, or belong to another job."""
    with hosts("other", "node1", "node2") as (other, first, second):
        silent, refusing = listening(), listening()
        ports = [port_of(silent), port_of(refusing), port_of(other.ranks), port_of(first.ranks)]
        refusing.close()
        with silent:
            join_all([other], run_id="job8")
            first.join(node_rank=0, most=2, master=["127.0.0.1", ports])
            second.join(node_rank=1, most=2, master=["127.0.0.1", ports])
            assert first.expect("joined")["master_port"] == ports[3]
            assert second.expect("joined")["master_port"] == ports[3]


def test_two_hosts_with_one_node_rank_fail_with_both_names() -> None:
    """On all hosts: a job without the right one cannot start."""
    with hosts("node1", "node2", "node3") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        job[0].join(node_rank=0, most=3, master=master)
        job[1].join(node_rank=1, most=3, master=master)
        job[2].join(node_rank=1, most=3, master=master)
        for host in job:
            what = host.expect("join_failed")["what"]
            assert what.startswith("two hosts have the node rank 1: ")
            assert "node2" in what
            assert "node3" in what


def test_a_host_that_was_started_again_takes_its_own_place() -> None:
    """What it had said before it ended is no second host."""
    with hosts("node1", "node2", "node2") as (first, gone, second):
        master = ["127.0.0.1", [port_of(first.ranks)]]
        first.join(node_rank=0, most=3, master=master, tell_every_s=0.5)
        gone.join(node_rank=1, most=3, master=master)
        until_words(first, "1 of 3 hosts: node rank 2")
        gone.vanish()
        second.join(node_rank=1, most=3, master=master, tell_every_s=0.5)
        until_words(second, "1 of 3 hosts: node rank 2")
        first.read_all()
        assert not [message for message in second.read_all() if message["op"] == "join_failed"]


def test_different_numbers_of_hosts_are_both_said() -> None:
    """--nnodes differs."""
    with hosts("node1", "node2") as job:
        job[0].join(node_rank=0, most=3)
        job[1].join(node_rank=1, most=2, master=["127.0.0.1", [port_of(job[0].ranks)]])
        for host in job:
            what = host.expect("join_failed")["what"]
            assert "for 2 hosts" in what
            assert "for 3" in what


def test_a_host_that_leaves_during_the_meeting_ends_it_for_all() -> None:
    """Nobody waits ten minutes for somebody who has gone home."""
    with hosts("node1", "node2", "node3") as job:
        fields = {"most": 4, "master": ["127.0.0.1", [port_of(job[0].ranks)]], "tell_every_s": 0.5}
        for rank, host in enumerate(job):
            host.join(node_rank=rank, **fields)
        for host in job:
            until_words(host, "1 of 4 hosts: node rank 3")
        job[1].send("goodbye")
        job[1].wait_closed()
        assert job[0].expect("join_failed")["what"] == "node2 left while the hosts of the job met"
        assert job[2].expect("join_failed")["what"] == "node2 left while the hosts of the job met"


def test_unequal_hosts_and_roles_are_numbered_by_host() -> None:
    """Torchrun's rules."""
    with hosts("node1", "node2", "node3") as job:
        records = [{"nproc": 2, "role": "actor"}, {"nproc": 1, "role": "learner"}, {"nproc": 3, "role": "actor"}]
        for rank, (host, record) in enumerate(zip(job, records, strict=True)):
            host.join(node_rank=rank, most=3, master=["127.0.0.1", [port_of(job[0].ranks)]], record=record)
        joined = [host.expect("joined") for host in job]
        assert [message["base_rank"] for message in joined] == [0, 2, 3]
        assert [message["role_base"] for message in joined] == [0, 0, 2]
        assert [message["role_world_size"] for message in joined] == [5, 1, 5]


def test_ipv6_addresses_work() -> None:
    """As literal, with or without the brackets of a URL."""
    ranks, control = listening("::1"), listening("::1")
    with control:
        first = Host("node1", ranks=ranks, control=control)
        second = Host("node2")
        try:
            first.join(node_rank=0, most=2, master=["::1", [port_of(ranks)]])
            second.join(node_rank=1, most=2, master=["[::1]", [port_of(ranks)]])
            assert second.expect("joined")["master_addr"] == "::1"
        finally:
            first.close()
            second.close()


# -------------------------------------------------------------------------------------------------------- the job's log


def test_a_host_that_ended_while_others_were_waited_for_is_waited_for_again() -> None:
    """Its record alone would make the job start without it."""
    with hosts("node1", "node2", "node3", "node2") as (first, gone, last, again):
        fields = {"most": 3, "master": ["127.0.0.1", [port_of(first.ranks)]], "tell_every_s": 0.5}
        first.join(node_rank=0, **fields)
        gone.join(node_rank=1, **fields)
        # Long enough for the record to be old.
        while not re.search(r"\(([4-9]|\d\d+) s\)$", until_words(first, "1 of 3 hosts: node rank 2")):
            pass
        gone.vanish()
        last.join(node_rank=2, **fields)
        until_words(first, "1 of 3 hosts: node rank 1")
        until_words(last, "1 of 3 hosts: node rank 1")
        again.join(node_rank=1, **fields)
        assert [host.expect("joined")["host"] for host in (first, again, last)] == [0, 1, 2]


def test_what_one_host_tells_all_hosts_learn_in_the_same_order() -> None:
    """Whatever the order in which they said it."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job)
        for n, host in itertools.product(range(20), job):
            host.send("tell", attempt=0, message={"kind": "news", "n": f"{host.name}-{n}"})
        told = [[host.expect("told", k=k)["message"]["n"] for k in range(60)] for host in job]
        assert told[0] == told[1] == told[2]
        for host in job:
            assert [n for n in told[0] if n.startswith(host.name)] == [f"{host.name}-{n}" for n in range(20)]


def test_of_many_troubles_the_first_is_told_and_no_other() -> None:
    """Each host that was not first learns who was by the same question."""
    with hosts("node1", "node2", "node3", "node4") as job:
        join_all(job, host_timeout_s=60.0)
        states_until(job[0], {f"{host}/0": {"s": "run"} for host in range(4)})
        operations = [count_operations(host) for host in job]
        for host in job:
            host.send("tell", attempt=0, message={**TROUBLE, "host": host.name})
        job[0].send("tell", attempt=0, message=DECISION)
        told = [[host.expect("told", k=k)["message"] for k in range(2)] for host in job]
        assert [message["kind"] for message in told[0]] == ["trouble", "decision"]
        assert all(messages == told[0] for messages in told)
        for host, before in zip(job, operations, strict=True):
            host.send("ack", attempt=0)
            # One to say it, and for each of two entries one to wait and one to read; the rest are beats and states.
            assert host is job[0] or count_operations(host) - before < 12, host.name
        job[0].send("goodbye")
        job[0].wait_closed()
        assert not [message for host in job[1:] for message in host.read_all() if message["op"] == "told"]


def count_operations(host: Host) -> int:
    host.send("counts")
    operations: int = host.expect("counts")["operations"]
    return operations


def test_messages_of_another_attempt_are_moot() -> None:
    """Late words of the last attempt would end the next one."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[1].send("tell", attempt=7, message=TROUBLE)
        job[1].send("tell", attempt=0, message={"kind": "news"})
        assert job[0].expect("told")["message"]["kind"] == "news"


def test_what_others_write_is_bounded_and_may_be_nonsense() -> None:
    """JSON of the right form, or it is dropped; what comes after it arrives."""
    with hosts("node1", "node2") as job:
        joined = join_all(job)
        control = json.loads(ranks_store(joined[0]).get("saferun/control"))
        store = ranks_store({"master_addr": "127.0.0.1", "master_port": control["port"]})
        for k, nonsense in enumerate(
            ["", "[", "[[[" * 5000, '{"m": 7}', '{"m": {"kind": "hang", "x": "%s"}}' % ("x" * 70000)]
        ):
            store.set(f"a0/log/{k}", nonsense or "null")
        for key in ("beat/1", "state/1", "missing"):
            store.set(f"a0/{key}", "\xff not a number")
        job[1].send("tell", attempt=0, message=TROUBLE)
        for host in job:
            assert host.expect("told")["message"] == {**TROUBLE, "host": 1}
        states_until(job[0], {"0/0": {"s": "run"}})
        job[1].send("tell", attempt=0, message={**TROUBLE, "x": "x" * 70000})
        job[1].send("garbage")
        job[1].socket.sendall(b"no json\n[1]\n" + b'{"op": "join"}\n{"op": "tell", "attempt": 0}\n')
        job[1].send("tell", attempt=0, message=DECISION)
        job[0].send("tell", attempt=0, message={**DECISION, "exit_code": 7})
        assert job[1].expect("told")["message"] == {**DECISION, "exit_code": 7}


# ----------------------------------------------------------------------------------------------------- states and parts


def test_the_leader_learns_states() -> None:
    """The end of a job waits for them."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job, host_timeout_s=60.0)
        states_until(job[0], {f"{host}/0": {"s": "run"} for host in range(3)})

        for quiet_s in (1.0, 2.0):
            quiet = {"s": "quiet", "kind": "quiescent", "quiet_s": quiet_s, "ranks": [4], "certain": True}
            job[1].send("state", attempt=0, state={"s": "done", "n": quiet_s})
            job[2].send("state", attempt=0, state=quiet)
            states_until(job[0], {"1/0": {"s": "done", "n": quiet_s}, "2/0": quiet})


def test_parts_reach_the_leader_and_leave_the_store() -> None:
    """Evidence of thousands of hosts does not stay in its memory."""
    with hosts("node1", "node2", "node3") as job:
        joined = join_all(job)
        limit = joined[0]["chunk_limit_bytes"]
        for n, host in enumerate(job):
            host.send("part", attempt=0, name="hang-1", text="é" * 1000 + str(n))
        job[1].send("part", attempt=0, name="end", text="x" * limit)
        job[2].send("part", attempt=0, name="end", text="x" * (limit + 1))
        job[2].send("part", attempt=0, name="../end", text="x")
        for n in range(3):
            part = job[0].expect("parts", host=n, name="hang-1")
            assert (part["task"], part["text"]) == (0, "é" * 1000 + str(n))
        assert len(job[0].expect("parts", host=1, name="end")["text"]) == limit
        control = json.loads(ranks_store(joined[0]).get("saferun/control"))
        store = ranks_store({"master_addr": "127.0.0.1", "master_port": control["port"]})
        until(lambda: not store.check(["a0/part/1/0/end"]), "the part is deleted")
        assert not [message for message in job[0].read_all() if message["op"] == "parts"]


# ----------------------------------------------------------------------------------------------------------- lost hosts


def test_a_host_whose_saferun_was_killed_is_gone() -> None:
    """It is up, and refuses connections."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job)
        job[1].vanish()
        lost = job[0].expect("lost")
        assert (lost["host"], lost["label"], lost["why"]) == (1, "node2", "gone")
        assert "node2" in lost["words"]


def test_a_frozen_host_is_told_apart_from_a_dead_one() -> None:
    """Its kernel accepts connections, and nothing more happens."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[1].process.send_signal(signal.SIGSTOP)
        assert job[0].expect("unheard")["why"] == "frozen"
        job[1].process.send_signal(signal.SIGCONT)
        assert job[0].expect("heard")["host"] == 1


def test_a_stopped_supervisor_is_a_warning_while_its_coordinator_lives() -> None:
    """Its ranks work on, and it will go on where it was: somebody has pressed Ctrl-Z, or debugs it."""
    with subprocess.Popen(["sleep", "300"]) as supervisor, hosts("node1", "node2") as job:
        try:
            master = ["127.0.0.1", [port_of(job[0].ranks)]]
            job[0].join(node_rank=0, most=2, master=master)
            job[1].join(node_rank=1, most=2, master=master, record={"pid": supervisor.pid})
            job[0].expect("joined")
            supervisor.send_signal(signal.SIGSTOP)
            words = job[0].expect("warn")["words"]
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
            message = job[1].expect("told")["message"]
            assert message["kind"] == "notice"
            assert message["words"].startswith(f"saferun on node1 (pid {supervisor.pid}) is stopped (SIGSTOP)")
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
            host.join(node_rank=rank, most=2, master=master, host_timeout_s=0.6, record=record)
        for host in job:
            host.expect("joined")
        if stalled:
            words = job[0].expect("warn")["words"]
        else:
            job[0].expect("told")
            message = job[1].expect("told")["message"]
            assert message["kind"] == "notice"
            words = message["words"]
        assert words == f"saferun on node{stalled + 1} (pid {pid}) waits for I/O (state D); the job goes on"
        before = count_operations(job[1])
        until(lambda: count_operations(job[1]) > before + 40, "forty beats")
        again = [message["op"] for host in job for message in host.read_all() if message["op"] != "states"]
        assert not again


def test_a_healthy_host_is_not_lost() -> None:
    """Over several times the time that a host may be silent."""
    with hosts("node1", "node2") as job:
        join_all(job, host_timeout_s=0.6)
        before = count_operations(job[1])
        until(lambda: count_operations(job[1]) > before + 40, "forty beats")
        assert not [message for host in job for message in host.read_all() if message["op"] in {"lost", "store_lost"}]


def test_the_leaders_end_is_noticed_at_once() -> None:
    """A broken connection needs no time-out."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job, host_timeout_s=60.0)
        states_until(job[0], {f"{host}/0": {"s": "run"} for host in range(3)})
        job[0].vanish()
        for host in job[1:]:
            lost = host.expect("store_lost")
            assert (lost["attempt"], lost["why"]) == (0, "gone")
            assert "node1" in lost["words"]


@pytest.mark.slow
def test_a_frozen_leader_is_noticed_by_its_silence() -> None:
    """Connections stay open, and nothing is answered."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[0].process.send_signal(signal.SIGSTOP)
        assert job[1].expect("unheard")["why"] == "frozen"
        job[0].process.send_signal(signal.SIGCONT)
        assert job[1].expect("heard")["host"] == 0


def test_the_leaders_end_after_its_decision_is_no_loss() -> None:
    """The job is over; there is nothing to be told."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[0].send("tell", attempt=0, message=DECISION)
        for host in job:
            host.expect("told")
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
        job[0].send("tell", attempt=0, message={"kind": "hang"})
        assert job[1].expect("told")["message"]["kind"] == "hang"
        job[1].send("tell", attempt=0, message=TROUBLE)
        assert job[0].expect("told", k=1)["message"]["kind"] == "trouble"
        assert not [message for message in job[1].read_all() if message["op"] == "store_lost"]


def cut_connections(pid: int, port: int) -> None:
    """Shut down all connections of a process to a port, from outside."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=_stolen(pidfd, int(name))) as connection:
                    if connection.getpeername()[1] == port:
                        connection.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):
                continue
    finally:
        os.close(pidfd)


def _stolen(pidfd: int, fd: int) -> int:
    import ctypes

    pidfd_getfd = 438
    stolen = ctypes.CDLL(None, use_errno=True).syscall(pidfd_getfd, pidfd, fd, 0)
    if stolen < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(stolen)


def test_the_leader_can_have_a_host_knocked_at() -> None:
    """One that answers is there."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[0].send("probe", attempt=0, hosts=[1])
        assert job[0].expect("probed", host=1)["why"] == "reached"
        job[1].vanish()
        job[0].send("probe", attempt=0, hosts=[1])
        assert job[0].expect("probed", host=1)["why"] == "gone"


# ---------------------------------------------------------------------------------------------------------- the goodbye


def test_the_leader_stays_until_all_have_taken_in_the_decision() -> None:
    """Its end takes the store away."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job)
        job[0].send("tell", attempt=0, message=DECISION)
        for host in job:
            host.expect("told")
        job[0].send("ack", attempt=0)
        job[1].send("ack", attempt=0)
        job[0].send("goodbye")
        # It answers questions, so it is there.
        assert count_operations(job[0]) > 0
        assert job[0].process.poll() is None
        job[2].send("ack", attempt=0)
        job[0].wait_closed()


def test_a_decision_reaches_all_hosts_though_the_leader_says_goodbye_in_the_same_breath() -> None:
    """It waits for nothing when the job is over: decision, its own answer and goodbye come in one piece."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job)
        # Much to be said before it, so that the goodbye is heard first.
        other = {"op": "tell", "attempt": 0, "message": {"kind": "other"}}
        decision = {"op": "tell", "attempt": 0, "message": DECISION}
        said = (*[other] * 900, decision, {"op": "ack", "attempt": 0}, {"op": "close"}, {"op": "goodbye"})
        job[0].socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in said))
        for host in job[1:]:
            while host.expect("told")["message"]["kind"] != "decision":
                pass
            host.send("ack", attempt=0)
            host.send("goodbye")
            host.wait_closed()
        job[0].wait_closed()
        assert not any(message["op"] == "store_lost" for host in job for message in host.read_all())


def test_a_lost_host_is_not_waited_for() -> None:
    """It will not take in anything."""
    with hosts("node1", "node2") as job:
        join_all(job, host_timeout_s=1.0)
        job[1].vanish()
        job[0].expect("lost")
        job[0].send("tell", attempt=0, message=DECISION)
        job[0].expect("told")
        job[0].send("ack", attempt=0)
        job[0].send("goodbye")
        job[0].wait_closed()


# --------------------------------------------------------------------------------------------------------- the next one


def test_the_next_attempt_has_an_empty_ranks_store_on_the_same_port() -> None:
    """Nothing of the attempt before, gloo's addresses among it, may be found."""
    with hosts("node1", "node2") as job:
        first = join_all(job)
        ranks_store(first[1]).set("gloo/0", "127.0.0.1:1")
        job[0].send("tell", attempt=0, message={**DECISION, "next": "restart"})
        for host in job:
            host.expect("told")
            host.send("ack", attempt=0)
        second = join_all(job, attempt=1, restarts=1)
        assert [(message["attempt"], message["restarts"]) for message in second] == [(1, 1), (1, 1)]
        assert second[1]["master_port"] == first[1]["master_port"]
        assert not ranks_store(second[1]).check(["gloo/0"])
        # The log begins anew, and the old one is silent.
        job[1].send("tell", attempt=0, message=TROUBLE)
        job[1].send("tell", attempt=1, message=TROUBLE)
        assert [host.expect("told")["attempt"] for host in job] == [1, 1]


def test_a_host_that_was_started_again_joins_the_next_attempt() -> None:
    """Where a scheduler starts it anew; it knows of no attempts."""
    with hosts("node1", "node2", "node2") as (first, gone, again):
        join_all([first, gone], attempt=4, restarts=1)
        gone.vanish()
        master = ["127.0.0.1", [port_of(first.ranks)]]
        again.join(node_rank=1, most=2, master=master, tell_every_s=0.5)
        until_words(again, "waiting for the first host to begin the next attempt")
        first.join(node_rank=0, most=2, master=master, attempt=5, restarts=2)
        assert [(m["attempt"], m["restarts"]) for m in (host.expect("joined") for host in (first, again))] == [
            (5, 2)
        ] * 2


def test_many_attempts_leave_little_in_the_store() -> None:
    """A job may be restarted very often."""
    with hosts("node1", "node2") as job:
        sizes = []
        for attempt in range(6):
            joined = join_all(job, attempt=attempt)
            job[1].send("part", attempt=attempt, name="end", text="x")
            job[0].expect("parts", attempt=attempt, host=1)
            job[0].send("tell", attempt=attempt, message=DECISION)
            for host in job:
                host.expect("told", attempt=attempt)
            control = json.loads(ranks_store(joined[0]).get("saferun/control"))
            store = ranks_store({"master_addr": "127.0.0.1", "master_port": control["port"]})
            if attempt >= 2:
                last = f"a{attempt - 2}/state/1"
                until(lambda: not store.check([last]), "the attempt before the last is forgotten")  # noqa: B023
            sizes.append(store.num_keys())
        assert sizes[5] - sizes[3] < 14


def test_all_hosts_take_the_highest_attempt_that_any_of_them_knows() -> None:
    """A host that was started anew knows of none."""
    with hosts("node1", "node2") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        job[0].join(node_rank=0, most=2, master=master, attempt=3, restarts=2)
        job[1].join(node_rank=1, most=2, master=master)
        assert [(m["attempt"], m["restarts"]) for m in (host.expect("joined") for host in job)] == [(3, 2), (3, 2)]


# ------------------------------------------------------------------------------------------------- many tasks on a host


def test_tasks_of_a_host_share_its_coordinator(tmp_path: Path) -> None:
    """One saferun a rank: local ranks, states and words of each."""
    head = Host("node1", tasks_path=tmp_path / "tasks")
    with hosts("node2") as (other,):
        try:
            lines = [head, *connect(tmp_path / "tasks", 2)]
            for task, line in enumerate(lines):
                line.send("join", **joining(head, task=task, tasks=3, most=2, record={"nproc": 1, "pid": os.getpid()}))
            other.join(node_rank=1, most=2, master=["127.0.0.1", [port_of(head.ranks)]], record={"nproc": 3})
            joined = [line.expect("joined") for line in [*lines, other]]
            assert [message["base_rank"] for message in joined] == [0, 1, 2, 3]
            assert [message["local_base"] for message in joined] == [0, 1, 2, 0]
            assert [message["local_world_size"] for message in joined] == [3, 3, 3, 3]
            assert [message["leader"] for message in joined] == [True, False, False, False]
            lines[2].send("state", attempt=0, state={"s": "done"})
            states_until(head, {"0/2": {"s": "done"}, "0/1": {"s": "run"}, "1/0": {"s": "run"}})
            lines[1].send("part", attempt=0, name="end", text="mine")
            assert head.expect("parts", host=0, task=1)["text"] == "mine"
            lines[2].send("tell", attempt=0, message={**TROUBLE, "task": 2})
            for line in [*lines, other]:
                assert line.expect("told")["message"]["task"] == 2
            lines[2].socket.close()
            assert head.expect("task_lost") == lines[1].expect("task_lost") == {"op": "task_lost", "task": 2}
            lines[1].send("goodbye")
            lines[1].socket.close()
            assert count_operations(head) > 0
            assert not [message for message in head.read_all() if message["op"] == "task_lost"]
        finally:
            for line in lines[1:]:
                line.socket.close()
            head.close()


def connect(path: Path, count: int) -> list[Line]:
    lines = []
    for _ in range(count):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        lines.append(Line(connection))
    return lines


def test_tasks_that_do_not_come_are_named(tmp_path: Path) -> None:
    """The scheduler has started fewer than it said."""
    head = Host("node1", tasks_path=tmp_path / "tasks")
    try:
        head.join(tasks=3, timeout_s=3.0, tell_every_s=0.5)
        until_words(head, "waiting for 2 of 3 tasks on this host: 1, 2")
        assert "task 1, 2" in head.expect("join_failed")["what"]
    finally:
        head.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as somebody else")
def test_nobody_else_may_connect_as_a_task() -> None:
    """A private directory is the first fence, the kernel's word on who it is the second."""
    path = Path(f"/tmp/coordinating-{os.getpid()}.tasks")
    head = Host("node1", tasks_path=path)
    try:
        path.chmod(0o777)
        program = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(len(s.recv(1)))"
        done = subprocess.run(
            ["/usr/bin/env", "python3", "-c", program, str(path)],
            user=65534,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == "0\n"
    finally:
        head.close()
        path.unlink()
