"""Coordinators that meet through torch's rendezvous handlers: c10d, elastic jobs, and handlers that others register."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.coordinator import torch_store
from tests.torch.coordinating import DECISION, TROUBLE, Host, cut_connections, listening, port_of, until

# What torch waits for more hosts once there are enough; its own default is 30 s.
LAST_CALL_S = 1


@contextlib.contextmanager
def c10d_job(
    *names: str, endpoint_last: bool = False, environ: dict[str, str] | None = None
) -> Iterator[tuple[list[Host], dict[str, Any]]]:
    """Hosts with torch's c10d rendezvous, its store on the first (or the last); and the fields of a join."""
    endpoint: socket.socket = listening()
    owner = len(names) - 1 if endpoint_last else 0
    started = [
        Host(name, endpoint=endpoint if number == owner else None, torch_parts="c10d", environ=environ)
        for number, name in enumerate(names)
    ]
    fields = {
        "backend": "c10d",
        "address": ["127.0.0.1", port_of(endpoint)],
        "master": ["127.0.0.1", [port_of(endpoint)]],
        "node_rank": None,
        "least": len(names),
        "most": len(names),
        "conf": {"last_call_timeout": LAST_CALL_S},
        "report_every_s": 0.5,
    }
    try:
        yield started, fields
    finally:
        for host in started:
            host.close()


def by_host(hosts: list[Host], joined: list[Any]) -> list[Host]:
    """The hosts in the order that the rendezvous gave them."""
    order = sorted(range(len(hosts)), key=lambda i: joined[i]["host"])
    return [hosts[i] for i in order]


# Imported by each interpreter at its start: torch is as it is but for its rendezvous without the rest of it.
NEEDS_MORE = """
import os, sys

class NeedsMore:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.elastic.rendezvous.dynamic_rendezvous":
            is_whole = hasattr(sys.modules["torch"], "__version__")
            with open(os.environ["IMPORTS_FILE"], "a") as file:
                file.write("whole\\n" if is_whole else "part\\n")
            if not is_whole:
                raise AttributeError("something of torch")

sys.meta_path.insert(0, NeedsMore())
"""


def test_hosts_meet_again_and_again_by_a_file_that_they_share(tmp_path: Path) -> None:
    """Torch's c10d rendezvous with ``--rdzv-conf store_type=file``: there is no address, and no port."""
    job = [Host(name, torch_parts="c10d") for name in ("node1", "node2")]
    fields = {"backend": "c10d", "endpoint": str(tmp_path / "rendezvous"), "conf": {"store_type": "file"}}
    try:
        for attempt in range(2):
            for host in job:
                host.join(**fields, node_rank=None, least=2, most=2, attempt=attempt, restarts=attempt)
            joined = [host.expect("joined") for host in job]
            assert sorted(message["host"] for message in joined) == [0, 1]
            leader, follower = by_host(job, joined)
            follower.send("append", attempt=attempt, message=TROUBLE)
            leader.send("append", attempt=attempt, message={**DECISION, "next": "restart"})
            for host in job:
                host.expect("entry", attempt=attempt)
                host.expect("entry", attempt=attempt)
                host.send("ack", attempt=attempt)
    finally:
        for host in job:
            host.close()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With the options that name it."""
    host = Host("node1", torch_parts="c10d")
    try:
        path = str(tmp_path / "missing" / "rendezvous")
        conf = {"store_type": "file"}
        host.join(backend="c10d", endpoint=path, conf=conf, node_rank=None, least=2, most=2, timeout_s=4.0)
        assert path in host.expect("waiting")["text"]
        failed = host.expect("join_failed")
        assert path in failed["what"]
        assert "--rdzv-endpoint" in failed["hint"]
    finally:
        host.close()


@pytest.mark.slow
def test_a_rendezvous_that_needs_more_of_torch_gets_it(tmp_path: Path) -> None:
    """The process begins again, with all of torch."""
    (tmp_path / "sitecustomize.py").write_text(NEEDS_MORE, encoding="utf-8")
    imports = tmp_path / "imports"
    environ = {"PYTHONPATH": str(tmp_path), "IMPORTS_FILE": str(imports)}
    with c10d_job("node1", "node2", environ=environ) as (job, fields):
        for host in job:
            host.join(**fields)
        joined = [host.expect("joined", timeout_s=60.0) for host in job]
        assert sorted(message["host"] for message in joined) == [0, 1]
    assert sorted(imports.read_text(encoding="utf-8").split()) == ["part", "part", "whole", "whole"]


def test_the_rendezvous_of_a_newer_torch_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has seen yet what it needs; so has a torch whose version cannot be read."""
    before = dict(sys.modules)
    for version in ("99.0.0+cpu", "unknown"):
        monkeypatch.setattr(torch_store, "_version", lambda _, version=version: version)
        with pytest.raises(ImportError, match=f"torch {re.escape(version)}"):
            torch_store.import_store_class("c10d")
    assert sys.modules.get("torch") is before.get("torch")


def test_what_torch_does_only_every_second_is_where_it_is_looked_for() -> None:
    """What is shortened must exist in this torch: else nothing gets faster, and no other test would notice."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    settings: Any = None
    holder = dynamic_rendezvous._BackendRendezvousStateHolder(settings, settings)
    assert holder._cache_duration == 1
    assert callable(vars(dynamic_rendezvous)["_delay"])


def test_c10d_hosts_meet_again_and_again() -> None:
    """The first host of each round serves a store of its own, away from the rendezvous' port."""
    with c10d_job("node1", "node2") as (job, fields):
        for attempt in range(2):
            for host in job:
                host.join(**fields, attempt=attempt, restarts=attempt)
            joined = [host.expect("joined") for host in job]
            assert sorted(message["host"] for message in joined) == [0, 1]
            assert {message["attempt"] for message in joined} == {attempt}
            assert {message["world_size"] for message in joined} == {4}
            leader, follower = by_host(job, joined)
            assert {message["master_port"] for message in joined} == {port_of(leader.ranks)}
            follower.send("append", attempt=attempt, message=TROUBLE)
            leader.send("append", attempt=attempt, message={**DECISION, "next": "restart"})
            for host in job:
                assert host.expect("entry", attempt=attempt)["k"] == 0
                host.expect("entry", attempt=attempt)
                host.send("ack", attempt=attempt)
        for host in job:
            host.send("close")
            host.send("goodbye")
        for host in job:
            host.wait_closed()
            assert not [message for message in host.read_all() if message["op"] in {"store_lost", "lost"}]


@pytest.mark.slow
def test_missing_hosts_of_a_c10d_rendezvous_are_named() -> None:
    """Torch's handler knows numbers only; the names are noted beside its state."""
    with c10d_job("node1", "node2") as ((first, second), fields):
        first.join(**fields, expected=["node1", "node2"])
        while "waiting for 1 of 2 hosts: node2" not in first.expect("waiting")["text"]:
            pass
        second.join(**(fields | {"run_id": "job8", "timeout_s": 3.0}), expected=["node1", "node2"])
        failed = second.expect("join_failed")
        assert "did not come to the rendezvous 'job8'" in failed["what"]
        assert "1 of 2 hosts: node1" in failed["what"]


def test_a_connection_that_breaks_while_the_store_is_there_is_not_taken_for_its_end() -> None:
    """A firewall or a proxy has reset it: the others wait on, and this host may come again."""
    with c10d_job("node1", "node2", "node3") as ((first, second, _), fields):
        fields["endpoint"] = f"127.0.0.1:{fields['address'][1]}"
        for host in (first, second):
            host.join(**fields)
        while "at least 2 of 3" not in (text := second.expect("waiting")["text"]) and "1 of 3" not in text:
            pass
        where = f"the rendezvous 'job7' at {fields['endpoint']}"
        cut_connections(second.process.pid, fields["address"][1])
        failed = second.expect("join_failed")
        what = rf"this host's connection to {re.escape(where)} broke \(DistNetworkError: .*\), though its store answers"
        assert re.fullmatch(what, failed["what"], re.DOTALL), failed
        assert failed["hint"].startswith("start saferun on this host again while the others wait there")
        assert "join_failed" not in {message["op"] for message in first.read_all()}


def test_an_elastic_job_takes_in_a_host_and_lets_one_go() -> None:
    """The newcomer adopts the attempt; the rest goes on without whoever left, at once."""
    with c10d_job("node1", "node2") as ((first, second), fields):
        elastic = fields | {"least": 1, "most": 2, "elastic": True}
        first.join(**elastic, attempt=0)
        alone = first.expect("joined")
        assert (alone["hosts"], alone["world_size"], alone["leader"]) == (1, 2, True)

        second.join(**elastic, attempt=0)
        membership = first.expect("membership")
        assert membership["attempt"] == 0
        assert membership["text"] == "1 host waits to join: node2"
        first.send("append", attempt=0, message={**DECISION, "next": "restart"})
        first.expect("entry")
        first.join(**elastic, attempt=1)
        joined = [host.expect("joined") for host in (first, second)]
        assert {(message["attempt"], message["hosts"]) for message in joined} == {(1, 2)}

        leader, _ = by_host([first, second], joined)
        second.send("append", attempt=1, message={**TROUBLE, "reason": "leave"})
        leader.send("append", attempt=1, message={**DECISION, "next": "restart"})
        for host in (first, second):
            host.expect("entry", k=1)
            host.send("ack", attempt=1)
        second.send("leave")
        second.send("goodbye")
        second.wait_closed()
        first.join(**elastic, attempt=2)
        again = first.expect("joined")
        assert (again["attempt"], again["hosts"], again["leader"]) == (2, 1, True)


@pytest.mark.slow
def test_a_host_too_many_waits_through_a_restart_of_the_others_and_takes_the_next_place() -> None:
    """The one that is too many after it may be another one: torch has that wait as if hosts were missing.

    It would give up, and close the rendezvous of a job that runs.
    """
    with c10d_job("node1", "node2", "node3") as (job, fields):
        conf = {"last_call_timeout": LAST_CALL_S, "join_timeout": 5}
        fields |= {"least": 2, "most": 2, "conf": conf}
        first, second, third = job
        for host in (first, second):
            host.join(**fields)
        for host in (first, second):
            host.expect("joined")
        third.join(**fields)
        third.expect("waiting")
        first.join(**fields, attempt=1, restarts=1)
        first.expect("waiting")  # by then the third one has seen that there is room
        second.join(**fields, attempt=1, restarts=1)
        heard: list[list[str]] = [[] for _ in job]

        def are_there() -> bool:
            for host, ops in zip(job, heard, strict=True):
                ops += [message["op"] for message in host.read_all()]
            return sum("joined" in ops for ops in heard) == 2

        until(are_there, "two of the hosts meet")
        # The first one serves torch's rendezvous.
        stays, goes = [host for host, ops in zip(job, heard, strict=True) if "joined" in ops]
        waits = next(host for host, ops in zip(job, heard, strict=True) if "joined" not in ops)
        while waits.expect("waiting", timeout_s=30.0)["waited_s"] < 6:
            pass
        goes.send("leave")
        goes.send("goodbye")
        goes.wait_closed()
        stays.join(**fields, attempt=2, restarts=2)
        assert {host.expect("joined")["hosts"] for host in (stays, waits)} == {2}
        assert not [op for ops in heard for op in ops if op == "join_failed"]


@contextlib.contextmanager
def counted_in(fields: dict[str, Any]) -> Iterator[threading.Event]:
    """A host that torch's rendezvous counts in, and of which nothing follows. Set once the rendezvous is complete."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, c10d_rendezvous_backend, dynamic_rendezvous

    host, port = fields["address"]
    # Its name is the last in order, so that it does not lead.
    place = ("c10d", f"{host}:{port}", "job7", fields["least"], fields["most"], "~")
    parameters = RendezvousParameters(*place, is_host="false", join_timeout=60, **fields["conf"])
    backend, store = c10d_rendezvous_backend.create_backend(parameters)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    is_complete = threading.Event()

    def meet() -> None:
        handler.next_rendezvous()
        is_complete.set()

    thread = threading.Thread(target=meet)
    thread.start()
    try:
        yield is_complete
    finally:
        thread.join(60.0)
        handler._stop_heartbeats()


@pytest.mark.slow
def test_hosts_meet_again_without_one_that_leaves_when_torchs_rendezvous_is_complete() -> None:
    """It has handed in its record, and a fourth host has yet to do so; torch misses that one after 15 s."""
    with c10d_job("node1", "node2", "node3") as (job, fields):
        fields |= {"least": 2, "most": 4, "elastic": True, "conf": {"last_call_timeout": 10}}
        for number, host in enumerate(job):
            host.join(**fields, local_addr=f"127.0.0.{number + 1}")
        with counted_in(fields) as is_complete:
            assert is_complete.wait(60.0)
            for host in job:
                while host.expect("waiting")["text"] != "waiting for 1 of 4 hosts: node rank 3":
                    pass
            job[2].send("leave")
            job[2].send("goodbye")
            job[2].wait_closed()
            for host in job[:2]:
                failed = host.expect("join_failed")
                assert (failed["what"], failed["gone"]) == ("node3 left while the hosts of the job met", True)
        for host in job[:2]:
            host.join(**fields, attempt=1)
        joined = [host.expect("joined") for host in job[:2]]
        assert {(one["attempt"], one["hosts"], one["has_begun"]) for one in joined} == {(1, 2, False)}


@pytest.mark.slow
def test_a_host_that_comes_after_the_end_is_told_so() -> None:
    """A closed rendezvous is no time-out."""
    with c10d_job("node1", "node2") as ((first, second), fields):
        alone = fields | {"least": 1, "most": 1}
        first.join(**alone)
        first.expect("joined")
        first.send("close")
        second.join(**alone)
        assert "is closed" in second.expect("join_failed")["what"]


@pytest.mark.parametrize(("is_between_attempts", "endpoint_last"), [(False, False), (True, False), (True, True)])
def test_a_host_that_waits_to_join_is_told_who_has_ended_the_job(
    *, is_between_attempts: bool, endpoint_last: bool
) -> None:
    """Before the rendezvous' store goes with the host that has it."""
    with c10d_job("node1", "node2", endpoint_last=endpoint_last) as ((first, second), fields):
        least, most = (3, 4) if is_between_attempts else (1, 1)
        first.join(**fields | {"least": least, "most": most, "elastic": True})
        if is_between_attempts:
            first.expect("waiting")
        else:
            first.expect("joined")
        second.join(**fields | {"least": least, "most": most, "elastic": True})
        while "node2" not in second.expect("waiting")["text"]:
            pass
        note = {"by": "saferunctl kill by ada on node1", "at_once": True}
        first.send("close", note=note)
        first.send("goodbye")
        ended = second.expect("job_ended")
        assert {name: ended[name] for name in note} == note
        first.wait_closed()
        assert not [message for message in second.read_all() if message["op"] == "join_failed"]


@pytest.mark.slow
def test_a_lost_host_of_an_elastic_job_is_missed_by_its_leader() -> None:
    """As in a static one."""
    with c10d_job("node1", "node2") as (job, fields):
        for host in job:
            host.join(**fields)
        leader, follower = by_host(job, [host.expect("joined") for host in job])
        follower.vanish()
        lost = leader.expect("lost")
        assert (lost["host"], lost["why"]) == (1, "gone")
        assert lost["label"] == follower.name


def test_an_endpoint_that_cannot_be_reached_is_named() -> None:
    """With the reason, meanwhile and at the end."""
    closed = listening()
    address = ["127.0.0.1", port_of(closed)]
    endpoint = f"127.0.0.1:{address[1]}"
    closed.close()
    host = Host("node2", torch_parts="c10d")
    try:
        host.join(backend="c10d", address=address, node_rank=None, most=2, least=2, timeout_s=4.0, report_every_s=0.2)
        assert f"{endpoint} refuses connections" in host.expect("waiting")["text"]
        assert f"{endpoint} refuses connections" in host.expect("join_failed")["what"]
    finally:
        host.close()


PLUGIN = '''
"""A rendezvous of files: the first to come waits for as many as there are to be."""

import os, time
from datetime import timedelta
from torch.distributed import FileStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo


class Files(RendezvousHandler):
    def __init__(self, parameters):
        self.parameters = parameters
        self.store = FileStore(parameters.endpoint, -1)
        self.round = 0

    def get_backend(self): return "files"
    def is_closed(self): return False
    def set_closed(self): pass
    def num_nodes_waiting(self): return 0
    def get_run_id(self): return self.parameters.run_id
    def shutdown(self): return True

    def next_rendezvous(self):
        store = PrefixStore(str(self.round), self.store)
        self.round += 1
        rank = store.add("hosts", 1) - 1
        store.set("here%d" % rank, "1")
        store.wait(["here%d" % i for i in range(self.parameters.max_nodes)], timedelta(seconds=30))
        return RendezvousInfo(store, rank, self.parameters.max_nodes, None)


def register():
    return Files
'''


@pytest.mark.slow
def test_a_registered_handler_of_somebody_else_works(tmp_path: Path) -> None:
    """Whatever the entry points of torch's registry name."""
    (tmp_path / "file_rendezvous.py").write_text(PLUGIN, encoding="utf-8")
    info = tmp_path / "file_rendezvous-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: file-rendezvous\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nfiles = file_rendezvous:register\n", encoding="utf-8")
    job = [Host(name, torch_parts="all", environ={"PYTHONPATH": str(tmp_path)}) for name in ("node1", "node2")]
    try:
        for host in job:
            endpoint = str(tmp_path / "rendezvous")
            host.join(backend="files", endpoint=endpoint, node_rank=None, least=2, most=2)
        joined = [host.expect("joined") for host in job]
        leader, follower = by_host(job, joined)
        follower.send("append", attempt=0, message=TROUBLE)
        assert leader.expect("entry")["message"]["kind"] == "abort"
    finally:
        for host in job:
            host.close()


def test_a_backend_that_nobody_has_registered_is_said_to_be_one() -> None:
    """With torch's own words."""
    host = Host("node1", torch_parts="all")
    try:
        host.join(backend="no-such-backend", endpoint="node1:1", node_rank=None)
        failed = host.expect("join_failed")
        assert "'no-such-backend'" in failed["what"]
        assert "--rdzv-backend" in failed["hint"]
    finally:
        host.close()
