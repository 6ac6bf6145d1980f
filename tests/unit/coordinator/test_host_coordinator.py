"""What a host's tasks ask of its coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator.attempt import CoordinatorAttempt
from saferun.coordinator.host_coordinator import HostCoordinator


@pytest.mark.parametrize("is_head", [False, True])
def test_a_host_leaves_the_meeting_with_its_head_and_with_no_other_task(*, is_head: bool) -> None:
    """One of several saferuns of a host ends while the ranks of the others train."""
    left: list[str] = []
    nothing: Any = SimpleNamespace()
    coordinator = HostCoordinator(nothing, nothing, -1)
    rendezvous: Any = SimpleNamespace(leave=lambda: left.append("left"))
    coordinator._rendezvous = rendezvous
    connection: Any = SimpleNamespace(is_head=is_head, task=0 if is_head else 1)
    coordinator.handle(connection, {"op": "leave"})
    if coordinator._closing is not None:
        coordinator._closing.join()
    assert left == (["left"] if is_head else [])


def test_a_leader_that_can_start_no_thread_ends_the_attempt_with_the_reason() -> None:
    """It would watch over nobody, and its ranks would wait for a decision that cannot come."""
    sent: list[dict[str, Any]] = []
    attempt: Any = object.__new__(CoordinatorAttempt)
    attempt.is_leader, attempt.number, attempt._closed = True, 3, False
    attempt.log = SimpleNamespace(has=lambda _kind: False)
    attempt._tasks = SimpleNamespace(send_all=sent.append)

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    attempt.client, attempt._liveness, attempt._cannot_work = SimpleNamespace(another=refuse), object(), False
    attempt.open()
    text = "the coordinator of this host cannot work: can't start new thread"
    assert sent == [{"op": "store_lost", "attempt": 3, "why": "unknown", "text": text, "again": False}]
