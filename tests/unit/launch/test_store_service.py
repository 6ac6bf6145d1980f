"""The store's socket and whoever stands behind it, with a coordinator that does nothing."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from saferun.launch import store
from saferun.launch.store import StoreService
from saferun.linux.children import Child
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.events import Event, StoreUnavailable
from tests.unit.samples import CONFIG

NO_PID = 1 << 22  # one above the largest that Linux gives


class SilentLink:
    """Stands in for a coordinator: it takes every message and answers none."""

    def __init__(self, listen_fd: int, environ: Mapping[str, str], *, whole_torch: bool, poller: Poller) -> None:
        del listen_fd, environ, poller
        self.fd, self._other = os.pipe()
        self.stderr_fd, self._stderr = os.pipe()
        self.child = Child(NO_PID, -1)
        self.whole_torch = whole_torch
        self.serving: int | None = None
        self.sent: list[JsonObject] = []

    def send(self, message: JsonObject) -> None:
        self.sent.append(message)

    def read_stderr(self) -> bytes | None:
        return None

    def last_line(self) -> str:
        return ""

    def close(self) -> None:
        for fd in (self.fd, self._other, self.stderr_fd, self._stderr):
            os.close(fd)


class Launch:
    """A store service with its surroundings."""

    def __init__(self) -> None:
        self.attempt = 0
        self.events: list[Event] = []
        self.ready = 0
        self.poller = Poller()
        config = CONFIG._replace(rendezvous=CONFIG.rendezvous._replace(master_port=None))
        self.service = StoreService(
            config,
            {},
            self.poller,
            post=self.events.append,
            attempt=lambda: self.attempt,
            on_ready=self._on_ready,
            on_torch=lambda _: None,
            on_words=lambda _: None,
        )
        self.port = self.service.bind()

    def _on_ready(self, answer: JsonObject) -> None:
        assert answer == {}
        self.ready += 1

    @property
    def link(self) -> SilentLink:
        link: Any = self.service._link
        assert isinstance(link, SilentLink)
        return link

    def ask(self) -> None:
        """A rank connects, and the loop has its turn."""
        with socket.create_connection(("127.0.0.1", self.port)):
            self.poller.wait(0.0)


@pytest.fixture(name="launch")
def _launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr(store, "CoordinatorLink", SilentLink)
    launch = Launch()
    yield launch
    launch.service.close()
    launch.poller.close()


def test_a_rank_that_asks_for_a_store_that_is_lost_is_noticed(launch: Launch) -> None:
    """It would wait for ever."""
    launch.service.serve()
    launch.link.serving = 0
    launch.service.on_exit(NO_PID, ExitStatus(None, signal.SIGKILL))
    assert launch.events == []  # ranks that never ask go on
    launch.ask()
    (missed,) = launch.events
    assert isinstance(missed, StoreUnavailable)
    assert "killed by SIGKILL" in missed.what


def test_the_first_coordinator_that_fails_is_replaced_by_one_with_all_of_torch(launch: Launch) -> None:
    """Perhaps only the short cut to the store is to blame; the second failure is final."""
    launch.service.serve()
    first = launch.link
    launch.service.on_exit(NO_PID, ExitStatus(1, None))
    assert (first.whole_torch, launch.link.whole_torch) == (False, True)
    assert launch.link.sent == [{"op": "serve", "attempt": 0}]
    launch.ask()
    assert launch.events == []
    launch.service.on_exit(NO_PID, ExitStatus(1, None))
    launch.ask()
    assert [type(event) for event in launch.events] == [StoreUnavailable]


def test_the_store_of_the_next_attempt_is_not_missed_because_the_one_before_was_lost(launch: Launch) -> None:
    """Its ranks ask while the new coordinator comes up; that is how it always is, and no reason to stop them."""
    launch.service.serve()
    launch.link.serving = 0
    launch.service.on_exit(NO_PID, ExitStatus(None, signal.SIGKILL))
    launch.attempt = 1
    launch.service.prepare({})
    assert launch.ready == 1
    launch.service.serve()
    launch.ask()
    assert launch.events == []


def test_between_attempts_a_rank_that_asks_is_nobodys_news(launch: Launch) -> None:
    """Ranks of the new attempt are started before the store is served: they wait in the backlog."""
    launch.service.serve()
    launch.link.serving = 0
    launch.service.on_exit(NO_PID, ExitStatus(None, signal.SIGKILL))
    launch.attempt = 1
    launch.service.prepare({})
    launch.service.serve_soon()
    launch.ask()
    assert launch.events == []


def test_an_attempt_that_lost_its_coordinator_while_it_was_prepared_goes_on(launch: Launch) -> None:
    """The old store is gone, which is what was wanted of it."""
    launch.service.serve()
    launch.link.serving = 0
    launch.attempt = 1
    launch.service.prepare({})
    assert launch.link.sent[-1] == {"op": "drop"}
    assert launch.ready == 0
    launch.service.on_exit(NO_PID, ExitStatus(None, signal.SIGKILL))
    assert launch.ready == 1
    assert launch.events == []


def test_ranks_that_are_done_at_once_never_cost_a_coordinator(launch: Launch) -> None:
    """It gets going a moment after the ranks."""
    launch.service.prepare({})
    launch.service.serve_soon()
    assert launch.service.deadline is not None
    assert launch.service.pids == set()
