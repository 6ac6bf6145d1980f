"""What attempts that have ended leave in the coordinator's memory."""

from __future__ import annotations

import gc
import weakref

import pytest

from saferun.coordinator.ended_attempts import EndedAttempts


class Attempt:
    """Refers to itself, as an attempt does by its callbacks."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def attempts() -> list[weakref.ref[Attempt]]:
    """Some that only the collector frees, which does not run by itself."""
    gc.collect()
    return [weakref.ref(Attempt()) for _ in range(3)]


@pytest.mark.parametrize(("ended", "waited_s", "left"), [(1, 129, 3), (1, 131, 0), (3, 1, 3), (4, 1, 0)])
def test_they_are_freed_after_a_while_or_when_they_are_many(
    attempts: list[weakref.ref[Attempt]], ended: int, waited_s: float, left: int
) -> None:
    gc.disable()
    try:
        kept = EndedAttempts()
        for _ in range(ended):
            kept.add(object())
        kept.tick(waited_s)
        assert sum(attempt() is not None for attempt in attempts) == left
    finally:
        gc.enable()


def test_where_none_has_ended_the_collector_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops all threads for a moment."""
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("nothing has ended"))
    kept = EndedAttempts()
    kept.add(None)
    kept.tick(1000.0)
