"""The store's socket and whoever stands behind it, with a coordinator that does nothing."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster import store_askers
from saferun.cluster.job_values import Assignment, JobCallbacks
from saferun.cluster.solo_job import SoloJob
from saferun.cluster.store_askers import GREETING
from saferun.errors import SaferunError
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.actions import BroadcastDecision, JoinHosts
from saferun.supervisor.events import (
    Event,
    StartFailed,
    StoreServed,
    StoreUnavailable,
)
from tests.unit.cluster.silent_link import NO_PID, SilentLink
from tests.unit.samples import CONFIG


class Launch:
    """A job of one host with its surroundings."""

    def __init__(self, **changes: Any) -> None:
        self.attempt = 0
        self.events: list[Event] = []
        self.ready = 0
        self.answer: JsonObject = {}
        self.refused: list[SaferunError] = []
        self.assigned: list[Assignment] = []
        self.torch: list[str] = []
        self.hangs: list[int] = []
        self.preflight: list[JsonObject] = []
        self.links: list[SilentLink] = []
        self.poller = Poller()
        config = CONFIG._replace(rendezvous=CONFIG.rendezvous._replace(master_port=None), **changes)
        self.job = SoloJob(
            config,
            {},
            self.poller,
            JobCallbacks(
                post=self.events.append,
                attempt=lambda: self.attempt,
                on_assigned=self.assigned.append,
                on_prepared=self._on_prepared,
                on_prepare_failed=self.refused.append,
                on_preflight=self.preflight.append,
                on_torch=self.torch.append,
                on_stderr=lambda _: None,
                print_line=lambda _: None,
                ranks=lambda: (),
            ),
            open_link=self._open_link,
        )
        self.job.reports.subscribe(lambda _: None, lambda _, number: self.hangs.append(number))
        self.job.bind()

    def _open_link(self, *arguments: Any, **more: Any) -> Any:
        self.links.append(SilentLink(*arguments, **more))
        return self.links[-1]

    def _on_prepared(self, answer: JsonObject) -> None:
        self.answer = answer
        self.ready += 1

    @property
    def link(self) -> SilentLink:
        return self.links[-1]

    def ask(self) -> None:
        """A rank connects, as torch's client of the store does, and the loop has its turn."""
        with self.connect() as connection:
            self.turn()
            for part in (GREETING[:2], GREETING[2:] + b"\x0d1234"):
                connection.sendall(part)
                self.turn()

    def connect(self) -> socket.socket:
        """Somebody connects to the port of the store."""
        (port,) = self.job.bound_ports()
        return socket.create_connection(("127.0.0.1", port), timeout=5.0)

    def turn(self) -> None:
        """The loop takes what there is."""
        for _ in range(3):
            self.poller.wait(0.0)

    def hear(self, **message: Any) -> None:
        """The coordinator says something, and the loop has its turn."""
        self.link.say(**message)
        self.poller.wait(0.0)
        os.read(self.link.fd, 1)

    def is_served(self) -> None:
        """The coordinator says that it serves the store."""
        self.hear(op="serving", attempt=self.attempt, torch="2.0")
        assert isinstance(self.events.pop(), StoreServed)

    def lose(self) -> None:
        """The coordinator is killed."""
        assert self.job.on_exit(NO_PID, ExitStatus(None, signal.SIGKILL))


@pytest.fixture(name="launch")
def _launch() -> Iterator[Launch]:
    launch = Launch()
    yield launch
    launch.job.close()
    launch.poller.close()


def test_a_rank_that_asks_for_a_store_that_is_lost_is_noticed(launch: Launch) -> None:
    """It would wait forever."""
    launch.job.serve()
    launch.is_served()
    launch.lose()
    assert launch.events == []  # ranks that never ask go on
    launch.ask()
    (missed,) = launch.events
    assert isinstance(missed, StoreUnavailable)
    assert "killed by SIGKILL" in missed.what


def test_whoever_scans_the_ports_of_a_host_ends_no_job(launch: Launch) -> None:
    """Only what torch's client sends says that a rank asks for the store."""
    launch.job.serve()
    launch.is_served()
    launch.lose()
    fds = len(os.listdir("/proc/self/fd"))
    for sent in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01", GREETING[:3], bytes(100)):
        with launch.connect() as connection:
            connection.sendall(sent)
            launch.turn()
        launch.turn()
    assert len(os.listdir("/proc/self/fd")) == fds
    silent = [launch.connect() for _ in range(100)]
    launch.turn()
    assert len(os.listdir("/proc/self/fd")) < fds + len(silent) + 40
    assert silent[0].recv(1) == b""
    assert launch.events == []
    launch.ask()
    assert [type(event) for event in launch.events] == [StoreUnavailable]
    launch.job.attempt_ended()
    for connection in silent:
        connection.close()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_host_without_descriptors_takes_whoever_connects_for_a_rank(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be asked again and again; and a rank that waits would wait forever."""

    def accept(_: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(store_askers, "accept_connection", accept)
    launch.job.serve()
    launch.is_served()
    launch.lose()
    with launch.connect():
        launch.turn()
    assert [type(event) for event in launch.events] == [StoreUnavailable]


def test_the_first_coordinator_that_fails_is_replaced_by_one_with_all_of_torch(launch: Launch) -> None:
    """Perhaps only the short cut to the store is to blame; the second failure is final."""
    launch.job.serve()
    first = launch.link
    launch.job.on_exit(NO_PID, ExitStatus(1, None))
    assert (first.torch_parts, launch.link.torch_parts) == ("store", "all")
    assert launch.link.sent == [{"op": "serve", "attempt": 0}]
    launch.ask()
    assert launch.events == []
    launch.job.on_exit(NO_PID, ExitStatus(1, None))
    launch.ask()
    assert [type(event) for event in launch.events] == [StoreUnavailable]


def test_the_store_of_the_next_attempt_is_not_missed_because_the_one_before_was_lost(launch: Launch) -> None:
    """Its ranks ask while the new coordinator comes up; that is how it always is, and no reason to stop them."""
    launch.job.serve()
    launch.is_served()
    launch.lose()
    launch.attempt = 1
    launch.job.prepare({})
    assert launch.ready == 1
    launch.job.serve()
    launch.ask()
    assert launch.events == []


def test_between_attempts_a_rank_that_asks_is_nobodys_news(launch: Launch) -> None:
    """Ranks of the new attempt are started before the store is served: they wait in the backlog."""
    launch.job.serve()
    launch.is_served()
    launch.lose()
    launch.attempt = 1
    launch.job.prepare({})
    launch.job.serve_soon()
    launch.ask()
    assert launch.events == []


def test_an_attempt_that_lost_its_coordinator_while_it_was_prepared_goes_on(launch: Launch) -> None:
    """The old store is gone, which is what was wanted of it."""
    launch.job.serve()
    launch.is_served()
    launch.attempt = 1
    launch.job.prepare({})
    assert launch.link.sent[-1] == {"op": "drop"}
    assert launch.ready == 0
    launch.lose()
    assert launch.ready == 1
    assert launch.events == []


def test_ranks_that_are_done_at_once_never_cost_a_coordinator(launch: Launch) -> None:
    """It gets going a moment after the ranks."""
    launch.job.prepare({})
    launch.job.serve_soon()
    assert launch.job.deadline is not None
    assert launch.job.pids == set()
    launch.job.attempt_ended()
    launch.ask()
    launch.job.tick(float("inf"))
    assert launch.links == []


def test_a_rank_that_connects_before_the_head_start_is_over_is_served_at_once(launch: Launch) -> None:
    """It need not wait for the rest of it."""
    launch.job.prepare({})
    launch.job.serve_soon()
    launch.ask()
    assert launch.job.deadline is None
    assert launch.link.sent == [{"op": "serve", "attempt": 0}]


def test_a_second_coordinator_that_is_on_its_way_lets_ranks_wait(launch: Launch) -> None:
    """The first one ended between two attempts, when nobody had asked it for anything."""
    launch.job.serve()
    launch.is_served()
    launch.attempt = 1
    launch.job.prepare({})
    launch.hear(op="dropped")
    launch.lose()
    launch.job.serve_soon()
    launch.job.tick(float("inf"))
    launch.ask()
    assert launch.events == []
    assert launch.link.sent == [{"op": "serve", "attempt": 1}]


def test_all_ranks_of_a_job_of_one_host_are_its_own(launch: Launch) -> None:
    """There is nobody to be met."""
    launch.job.join(JoinHosts(3, restarts=2))
    (assigned,) = launch.assigned
    assert (assigned.leads, assigned.number, assigned.checked) == (True, 3, False)
    placement = assigned.placement
    assert (placement.world_size, placement.group_world_size, placement.restarts) == (CONFIG.nproc_per_node, 1, 2)
    assert [placement.master_port] == launch.job.bound_ports()


def test_whoever_is_alone_hears_itself_and_waits_for_nobody(launch: Launch) -> None:
    """So that nothing beside it need know how many hosts there are."""
    chunks: list[list[Any]] = []
    found: list[str] = []
    job = launch.job
    job.find_endpoint(lambda: found.append("here"))
    job.collect("end", 60.0, chunks.append)
    job.broadcast_preflight({"ok": True})
    job.reports.broadcast_hang(SimpleNamespace(), 7)  # type: ignore[arg-type]
    job.abort_attempt("failure", "rank 0 failed")
    job.broadcast_decision(BroadcastDecision(0, "finish", 1), ["why"])
    job.reports.set_state({"s": "done"})
    job.share("end", "evidence")
    assert (chunks, found, launch.preflight, launch.hangs) == ([[]], ["here"], [{"ok": True}], [7])
    assert (job.leads, job.is_head, job.leader, job.abort_reason, launch.links) == (True, True, "", None, [])


@pytest.mark.parametrize("is_usage", [True, False])
def test_what_only_torch_can_tell_is_asked_before_the_ranks(*, is_usage: bool) -> None:
    """Of all of torch; where it cannot be told, the start fails, and no event goes to a handler that does not work."""
    launch = Launch(event_log_handler="console")
    launch.job.prepare({"nproc": 2})
    assert launch.link.torch_parts == "all"
    drop, asked = launch.link.sent
    assert drop == {"op": "drop"}
    assert (asked["op"], asked["handler"], asked["nproc"]) == ("prepare", "console", 2)
    launch.hear(op="prepared", numactl=None)
    assert launch.answer["op"] == "prepared"
    launch.job.client.forward_event({"source": "AGENT"})
    assert launch.link.sent[-1] == {"op": "event", "handler": "console", "source": "AGENT"}
    launch.job.prepare({})
    launch.hear(op="failed", what="no such handler", usage=is_usage)
    (refused,) = launch.refused
    assert (refused.what, refused.exit_code) == ("no such handler", 2 if is_usage else 1)
    assert not launch.job.client.forwards_events
    launch.job.close()
    launch.poller.close()


def test_a_coordinator_that_ends_while_torch_is_asked_fails_the_start() -> None:
    """It had all of torch: a second one would fare no better."""
    launch = Launch(event_log_handler="console")
    launch.job.prepare({})
    launch.lose()
    (failed,) = launch.events
    assert isinstance(failed, StartFailed)
    assert "the store's process ended (killed by SIGKILL)" in failed.what
    assert len(launch.links) == 1
    launch.job.close()
    launch.poller.close()


def test_an_attempt_is_asked_once_how_far_it_came(launch: Launch) -> None:
    """Every rank of it may fail."""
    launch.job.ask_start_stage(2)
    assert launch.job.start_stage == {}  # nobody can be asked
    launch.job.prepare({})
    launch.job.serve()
    launch.is_served()
    launch.job.ask_start_stage(2)
    launch.job.ask_start_stage(2)
    assert launch.link.sent[1:] == [{"op": "start_stage", "attempt": 0, "world_size": 2}]
    launch.hear(op="start_stage", attempt=0, stage="store")
    assert launch.job.start_stage is not None
    assert launch.job.start_stage["stage"] == "store"
