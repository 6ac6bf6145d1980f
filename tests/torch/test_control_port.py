"""Where the messages of a job go: to a port of their own, at any address; else to that of the ranks' store."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from saferun.coordinator.prefix_store import prefix_class
from saferun.coordinator.store_client import StoreClient
from tests.torch.coordinating import DECISION, TROUBLE, Host, Message, listening, port_of

ELSEWHERE = {"record": {"addresses": ["127.0.0.9"]}}


@contextlib.contextmanager
def job_behind_one_port() -> Iterator[tuple[list[Host], dict[str, Any]]]:
    """Three hosts; at the address that the others have of the first one, only the port of the ranks' store answers."""
    # S104: it is the loopback network that has the two addresses.
    ranks = listening("0.0.0.0")  # noqa: S104
    started = [Host("node1", ranks=ranks), Host("node2", serves=False), Host("node3", serves=False)]
    try:
        yield started, {"least": 3, "most": 3, "master": ["127.0.0.2", [port_of(ranks)]]}
    finally:
        for host in started:
            host.close()


def store_of(message: Message, *, own: bool = False) -> StoreClient:
    """A connection to the ranks' store, or to the part of it that is the job's own."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    kind = prefix_class(TCPStore) if own else TCPStore
    return StoreClient.connect(kind, (message["master_addr"], message["master_port"]))


def talk(job: list[Host], attempt: int) -> None:
    """A host reports a trouble, the leader decides, and all hear of both."""
    job[2].send("append", attempt=attempt, message={**TROUBLE, "text": "x" * 1000})
    assert [host.expect("entry", attempt=attempt)["message"]["kind"] for host in job] == ["abort"] * 3
    job[1].send("chunk", attempt=attempt, name="p", text="evidence")
    assert job[0].expect("chunk")["text"] == "evidence"
    job[0].send("append", attempt=attempt, message={**DECISION, "next": "restart"})
    for host in job:
        assert host.expect("entry", attempt=attempt)["message"]["kind"] == "decision"
        host.send("ack", attempt=attempt)


@pytest.mark.parametrize("asked_for", [True, False], ids=["asked_for", "found_out"])
def test_one_port_is_enough_for_ranks_and_messages(*, asked_for: bool) -> None:
    """Through restarts, of which each has a store without the keys of the one before."""
    with job_behind_one_port() as (job, fields):
        for attempt in range(3):
            for rank, host in enumerate(job):
                host.join(node_rank=rank, attempt=attempt, restarts=attempt, one_port=asked_for, **fields)
            joined = [host.expect("joined", attempt=attempt) for host in job]
            assert [message["host"] for message in joined] == [0, 1, 2]
            ranks = store_of(joined[1])
            assert ranks.find("mine") is None
            ranks.set("mine", f"{attempt}")
            assert ranks.find("mine") == b"%d" % attempt
            assert ranks.find("saferun/job") is None
            assert store_of(joined[1], own=True).find("saferun/job") is not None
            talk(job, attempt)
        for host in job:
            assert not [message for message in host.read_all() if message["op"] in {"store_lost", "lost", "task_lost"}]


def test_a_host_that_is_stopped_while_the_others_move_to_the_next_store_meets_them() -> None:
    """It has handed in its record, so that it is counted in; the store in which it waits for its answer is gone."""
    with job_behind_one_port() as (job, fields):
        for rank, host in enumerate(job):
            host.join(node_rank=rank, one_port=True, **fields)
        for host in job:
            host.expect("joined", attempt=0)
        talk(job, 0)
        again = {"attempt": 1, "restarts": 1, "one_port": True, **fields}
        stopped = job[1]
        job[0].join(node_rank=0, **again)
        stopped.join(node_rank=1, **again, report_every_s=0.5)
        while "node rank 2" not in stopped.expect("waiting")["text"]:
            pass
        os.kill(stopped.process.pid, signal.SIGSTOP)
        job[2].join(node_rank=2, **again)
        joined = [host.expect("joined", attempt=1) for host in (job[0], job[2])]
        os.kill(stopped.process.pid, signal.SIGCONT)
        assert [message["host"] for message in (*joined, stopped.expect("joined", attempt=1))] == [0, 2, 1]
        talk(job, 1)


def test_hosts_that_reach_the_control_port_move_along_with_one_that_does_not() -> None:
    """The first host decides for all."""
    with job_behind_one_port() as (job, fields):
        near = {**fields, "master": ["127.0.0.1", fields["master"][1]]}
        job[0].join(node_rank=0, **near)
        job[1].join(node_rank=1, **near, report_every_s=0.5)
        while "node rank 2" not in job[1].expect("waiting")["text"]:
            pass  # it has handed in its record at the control port
        job[2].join(node_rank=2, **fields)
        joined = [host.expect("joined") for host in job]
        assert store_of(joined[1], own=True).find("saferun/job") is not None
        talk(job, 0)


def test_the_control_store_is_looked_for_at_every_address_of_its_host() -> None:
    """Where the master's address is one that leads to the port of the ranks' store only."""
    with job_behind_one_port() as (job, fields):
        for rank, host in enumerate(job):
            host.join(node_rank=rank, **fields, **(ELSEWHERE if rank else {}))
        joined = [host.expect("joined") for host in job]
        assert store_of(joined[1], own=True).find("saferun/job") is None
        talk(job, 0)


@pytest.mark.slow
@pytest.mark.parametrize("asked_for", [True, False], ids=["asked_for", "found_out"])
def test_one_port_is_enough_for_the_hosts_of_a_c10d_rendezvous(*, asked_for: bool) -> None:
    """Beside the rendezvous' own, which the hosts reach."""
    endpoint = listening()
    # At the address that the hosts know of each other, only the ranks' store answers. S104: it is loopback's.
    ranks = [listening("0.0.0.0"), listening("0.0.0.0")]  # noqa: S104
    job = [
        Host("node1", endpoint=endpoint, ranks=ranks[0], torch_parts="c10d"),
        Host("node2", ranks=ranks[1], torch_parts="c10d"),
    ]
    where = {"backend": "c10d", "address": ["127.0.0.1", port_of(endpoint)], "node_rank": None}
    fields: dict[str, Any] = {
        **where,
        "master": ["127.0.0.1", [port_of(endpoint)]],
        "least": 2,
        "most": 2,
        "one_port": asked_for,
    }
    fields = {**fields, "local_addr": "127.0.0.2", "record": {"addresses": ["127.0.0.2"]}}
    try:
        for attempt in range(2):
            for host in job:
                host.join(**fields, attempt=attempt, restarts=attempt)
            joined = [host.expect("joined", attempt=attempt) for host in job]
            assert store_of(joined[0], own=True).find("saferun/job") is not None
            leader, follower = sorted(job, key=lambda host: joined[job.index(host)]["host"])
            follower.send("append", attempt=attempt, message=TROUBLE)
            assert leader.expect("entry", attempt=attempt)["message"]["kind"] == "abort"
            leader.send("append", attempt=attempt, message={**DECISION, "next": "restart"})
            for host in job:
                host.expect("entry", attempt=attempt, k=1)
                host.send("ack", attempt=attempt)
    finally:
        for host in job:
            host.close()
