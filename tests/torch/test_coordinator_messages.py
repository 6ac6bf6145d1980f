"""The coordinators of several hosts: what they tell each other, until the goodbye."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.torch.coordinating import (
    DECISION,
    TROUBLE,
    Host,
    Line,
    count_operations,
    hosts,
    join_all,
    joining,
    port_of,
    ranks_store,
    states_until,
    until,
    until_words,
)


def test_a_host_that_ended_while_others_were_waited_for_is_waited_for_again() -> None:
    """Its record alone would make the job start without it."""
    with hosts("node1", "node2", "node3", "node2") as (first, gone, last, again):
        fields = {"most": 3, "master": ["127.0.0.1", [port_of(first.ranks)]], "report_every_s": 0.5}
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
            host.send("append", attempt=0, message={"kind": "news", "n": f"{host.name}-{n}"})
        told = [[host.expect("entry", k=k)["message"]["n"] for k in range(60)] for host in job]
        assert told[0] == told[1] == told[2]
        for host in job:
            assert [n for n in told[0] if n.startswith(host.name)] == [f"{host.name}-{n}" for n in range(20)]


def test_of_many_troubles_the_first_is_told_and_no_other() -> None:
    """Each host that was not first learns who was by the same question."""
    with hosts("node1", "node2", "node3", "node4") as job:
        join_all(job, probe_after_s=60.0)
        states_until(job[0], {f"{host}/0": {"s": "run"} for host in range(4)})
        operations = [count_operations(host) for host in job]
        for host in job:
            host.send("append", attempt=0, message={**TROUBLE, "host": host.name})
        job[0].send("append", attempt=0, message=DECISION)
        told = [[host.expect("entry", k=k)["message"] for k in range(2)] for host in job]
        assert [message["kind"] for message in told[0]] == ["abort", "decision"]
        assert all(messages == told[0] for messages in told)
        for host, before in zip(job, operations, strict=True):
            host.send("ack", attempt=0)
            # One to say it, for each of two entries one to wait and one to read, and four for each of four looks at the
            # leader's clock; the rest are beats and states.
            assert host is job[0] or count_operations(host) - before < 12 + 4 * 4, host.name
        job[0].send("goodbye")
        job[0].wait_closed()
        assert not [message for host in job[1:] for message in host.read_all() if message["op"] == "entry"]


def test_messages_of_another_attempt_are_moot() -> None:
    """Late words of the last attempt would end the next one."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[1].send("append", attempt=7, message=TROUBLE)
        job[1].send("append", attempt=0, message={"kind": "news"})
        assert job[0].expect("entry")["message"]["kind"] == "news"


def test_what_others_write_is_bounded_and_may_be_nonsense() -> None:
    """JSON of the right form, or it is dropped; what comes after it arrives."""
    with hosts("node1", "node2") as job:
        joined = join_all(job)
        control = json.loads(ranks_store(joined[0]).get("saferun/control"))
        store = ranks_store({"master_addr": "127.0.0.1", "master_port": control["control_port"]})
        for k, nonsense in enumerate(
            ["", "[", "[[[" * 5000, '{"m": 7}', '{"m": {"kind": "hang", "x": "%s"}}' % ("x" * 70000)]
        ):
            store.set(f"a0/log/{k}", nonsense or "null")
        for key in ("heartbeat/1", "state/1", "missing"):
            store.set(f"a0/{key}", "\xff not a number")
        job[1].send("append", attempt=0, message=TROUBLE)
        for host in job:
            assert host.expect("entry")["message"] == {**TROUBLE, "host": 1}
        states_until(job[0], {"0/0": {"s": "run"}})
        job[1].send("append", attempt=0, message={**TROUBLE, "x": "x" * 70000})
        job[1].send("garbage")
        job[1].socket.sendall(b"no json\n[1]\n" + b'{"op": "join"}\n{"op": "append", "attempt": 0}\n')
        job[1].send("append", attempt=0, message=DECISION)
        job[0].send("append", attempt=0, message={**DECISION, "exit_code": 7})
        assert job[1].expect("entry")["message"] == {**DECISION, "exit_code": 7}


def test_the_leader_learns_states() -> None:
    """The end of a job waits for them."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job, probe_after_s=60.0)
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
            host.send("chunk", attempt=0, name="hang-1", text="é" * 1000 + str(n))
        job[1].send("chunk", attempt=0, name="end", text="x" * limit)
        job[2].send("chunk", attempt=0, name="end", text="x" * (limit + 1))
        job[2].send("chunk", attempt=0, name="../end", text="x")
        for n in range(3):
            part = job[0].expect("chunk", host=n, name="hang-1")
            assert (part["task"], part["text"]) == (0, "é" * 1000 + str(n))
        assert len(job[0].expect("chunk", host=1, name="end")["text"]) == limit
        control = json.loads(ranks_store(joined[0]).get("saferun/control"))
        store = ranks_store({"master_addr": "127.0.0.1", "master_port": control["control_port"]})
        until(lambda: not store.check(["a0/chunk/1/0/end"]), "the part is deleted")
        assert not [message for message in job[0].read_all() if message["op"] == "chunk"]


def test_the_leader_stays_until_all_have_taken_in_the_decision() -> None:
    """Its end takes the store away."""
    with hosts("node1", "node2", "node3") as job:
        join_all(job)
        job[0].send("append", attempt=0, message=DECISION)
        for host in job:
            host.expect("entry")
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
        other = {"op": "append", "attempt": 0, "message": {"kind": "other"}}
        decision = {"op": "append", "attempt": 0, "message": DECISION}
        said = (*[other] * 900, decision, {"op": "ack", "attempt": 0}, {"op": "close"}, {"op": "goodbye"})
        job[0].socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in said))
        for host in job[1:]:
            while host.expect("entry")["message"]["kind"] != "decision":
                pass
            host.send("ack", attempt=0)
            host.send("goodbye")
            host.wait_closed()
        job[0].wait_closed()
        assert not any(message["op"] == "store_lost" for host in job for message in host.read_all())


def test_a_lost_host_is_not_waited_for() -> None:
    """It will not take in anything."""
    with hosts("node1", "node2") as job:
        join_all(job, probe_after_s=1.0)
        job[1].vanish()
        job[0].expect("lost")
        job[0].send("append", attempt=0, message=DECISION)
        job[0].expect("entry")
        job[0].send("ack", attempt=0)
        job[0].send("goodbye")
        job[0].wait_closed()


def test_tasks_of_a_host_share_its_coordinator(tmp_path: Path) -> None:
    """One saferun per rank: local ranks, states and words of each."""
    head = Host("node1", tasks_path=tmp_path / "tasks")
    with hosts("node2") as (other,):
        try:
            lines = [head, *connect(tmp_path / "tasks", 3)]
            for task, line in enumerate(lines):
                line.send("join", **joining(head, task=task, tasks=4, most=2, record={"nproc": 1, "pid": os.getpid()}))
            other.join(node_rank=1, most=2, master=["127.0.0.1", [port_of(head.ranks)]], record={"nproc": 3})
            joined = [line.expect("joined") for line in [*lines, other]]
            assert [message["base_rank"] for message in joined] == [0, 1, 2, 3, 4]
            assert [message["local_base"] for message in joined] == [0, 1, 2, 3, 0]
            assert [message["local_world_size"] for message in joined] == [4, 4, 4, 4, 3]
            assert [message["leader"] for message in joined] == [True, False, False, False, False]
            lines[2].send("state", attempt=0, state={"s": "done"})
            states_until(head, {"0/2": {"s": "done"}, "0/1": {"s": "run"}, "1/0": {"s": "run"}})
            lines[1].send("chunk", attempt=0, name="end", text="mine")
            assert head.expect("chunk", host=0, task=1)["text"] == "mine"
            lines[2].send("append", attempt=0, message={**TROUBLE, "task": 2})
            for line in [*lines, other]:
                assert line.expect("entry")["message"]["task"] == 2
            lines[2].socket.close()
            # Its ranks have ended well: nobody needs it, and the job goes on.
            assert "the saferun of task 2 of node1 is gone" in head.expect("warn")["text"]
            lines[3].socket.close()
            assert head.expect("task_lost") == lines[1].expect("task_lost") == {"op": "task_lost", "task": 3}
            lines[1].send("goodbye")
            lines[1].socket.close()
            assert count_operations(head) > 0
            assert not [message for message in head.read_all() if message["op"] == "task_lost"]
        finally:
            for line in lines[1:]:
                line.socket.close()
            head.close()


def test_a_task_that_is_killed_while_the_hosts_meet_ends_the_attempt_that_follows(tmp_path: Path) -> None:
    """Its ranks have a place among the others, which would wait for them in the first collective."""
    head = Host("node1", tasks_path=tmp_path / "tasks")
    with hosts("node2") as (other,):
        lines = [head, *connect(tmp_path / "tasks", 2)]
        try:
            record = {"nproc": 1, "pid": os.getpid()}
            for task, line in enumerate(lines):
                fields = {"task": task, "tasks": 3, "most": 2, "report_every_s": 0.5, "record": record}
                line.send("join", **joining(head, **fields))
            until_words(head, "waiting for 1 of 2 hosts")
            lines[2].socket.close()
            other.join(node_rank=1, most=2, master=["127.0.0.1", [port_of(head.ranks)]], record=record)
            joined = [line.expect("joined") for line in (head, lines[1], other)]
            assert [message["base_rank"] for message in joined] == [0, 1, 3]
            for line in lines[:2]:
                assert line.expect("task_lost") == {"op": "task_lost", "task": 2}
            lost = {**TROUBLE, "host": 0, "reason": "task_lost", "lost_task": 2}
            head.send("append", attempt=0, message=lost)
            assert other.expect("entry")["message"]["reason"] == "task_lost"
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
        head.join(tasks=3, timeout_s=3.0, report_every_s=0.5)
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
