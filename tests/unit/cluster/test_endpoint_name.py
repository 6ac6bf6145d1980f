"""How long it is waited for the name of the endpoint, and what is reported meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster import endpoint_name as endpoint_name_module
from saferun.cluster.endpoint_name import EndpointName
from saferun.config import RendezvousConfig
from saferun.linux.poller import Poller

C10D = RendezvousConfig("c10d", "job", None, None, None, endpoint="node1:29400", address=("node1", 29400))


class Question:
    """Stands in for ``OwnName``: the test answers."""

    deadline: float | None = None
    reason = "the name node1 cannot be resolved on node3"
    is_unknown = True
    pids = frozenset({17})
    is_closed = False

    def __init__(
        self, name: str, _poller: Poller, on_answer: Callable[[bool], None], on_doubt: Callable[[], None]
    ) -> None:
        self.name = name
        self.began_at = 1000.0
        self.answer = on_answer
        self.doubt = on_doubt

    def tick(self, now: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class World:
    """The name, and what is heard of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rendezvous: RendezvousConfig = C10D) -> None:
        self.events: list[Any] = []
        self.known: bool | None = None  # what can be told without a name service
        monkeypatch.setattr(endpoint_name_module, "known_at_once", lambda _: self.known)
        monkeypatch.setattr(endpoint_name_module, "OwnName", Question)
        monkeypatch.setattr(endpoint_name_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
        self.name = EndpointName(
            rendezvous,
            Poller(),
            on_late=lambda: self.events.append("late"),
            on_waiting=self.events.append,
            on_given_up=self.events.append,
        )

    def find(self) -> None:
        self.name.find(lambda: self.events.append("found"))

    @property
    def question(self) -> Any:
        return self.name._question


@pytest.mark.parametrize("known", [True, False])
def test_what_needs_no_name_service_is_known_at_once(monkeypatch: pytest.MonkeyPatch, *, known: bool) -> None:
    world = World(monkeypatch)
    world.known = known
    world.find()
    assert (world.events, world.name.is_here, world.name.is_awaited) == (["found"], known, False)
    assert world.question is None


@pytest.mark.parametrize(
    ("rendezvous", "is_here"),
    [
        (C10D._replace(backend="static"), False),
        (C10D._replace(conf=(("store_type", "file"),)), False),
        (C10D._replace(conf=(("is_host", "Yes"),)), True),
        (C10D._replace(conf=(("is_host", "0"),)), False),
        (C10D._replace(address=None), False),
    ],
)
def test_no_name_is_asked_for_where_the_options_say_who_serves_it(
    monkeypatch: pytest.MonkeyPatch, rendezvous: RendezvousConfig, *, is_here: bool
) -> None:
    """Nor where there is no endpoint, or no store that is served: torch reads is_host likewise."""
    world = World(monkeypatch, rendezvous)
    world.find()
    assert (world.events, world.name.is_here, world.question) == (["found"], is_here, None)


def test_an_answer_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.find()
    assert world.events == []
    assert world.name.is_awaited
    world.question.answer(True)
    assert (world.events, world.name.is_here, world.name.is_awaited) == (["found"], True, False)


def test_the_start_goes_on_without_an_answer_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of this host need not wait for it, but the coordinator does."""
    world = World(monkeypatch)
    world.find()
    world.question.doubt()
    assert (world.events, world.name.is_awaited) == (["found"], True)
    world.question.answer(True)
    assert (world.events, world.name.is_here, world.name.is_awaited) == (["found", "late"], True, False)
    assert world.name.deadline is None


def test_what_is_waited_for_is_reported_at_times_and_given_up_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a coordinator would that waits for hosts."""
    world = World(monkeypatch)
    world.find()
    world.question.doubt()
    world.name.limit(40.0)
    for second in range(60):
        world.name.tick(1000.0 + second)
    reason = Question.reason
    hint = endpoint_name_module._NAME_HINT
    assert world.events == [
        "found",
        {"op": "waiting", "text": reason, "waited_s": 3},
        {"op": "waiting", "text": reason, "waited_s": 33},
        {"op": "join_failed", "what": f"{reason}, for 40 s", "hint": hint},
    ]
    assert world.name.deadline is None


def test_another_backend_s_coordinator_waits_for_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of etcd is there without any host."""
    world = World(monkeypatch, C10D._replace(backend="etcd-v2"))
    world.find()
    world.question.doubt()
    assert not world.name.is_awaited
    world.name.tick(2000.0)
    assert world.events == ["found"]


def test_at_the_end_nothing_is_asked_or_reported_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.find()
    world.question.doubt()
    world.name.limit(40.0)
    world.name.close()
    world.name.tick(2000.0)
    assert world.question.is_closed
    assert (world.events, world.name.deadline, world.name.is_awaited) == (["found"], None, False)
