"""How often torch's rendezvous reads its state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from saferun.coordinator import rendezvous_pace
from saferun.coordinator.rendezvous_pace import RendezvousPace

TORCHS_PAUSE_S = 1.0
TORCHS_FIRST_PAUSE_S = (0.0, 0.3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets: ``clock.now``, seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(rendezvous_pace, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize(("hosts", "expected_s"), [(1, 0.05), (2, 0.05), (20, 0.2), (100, 1.0), (10_000, 1.0)])
@pytest.mark.usefixtures("clock")
def test_the_more_hosts_the_less_often_each_of_them_asks(hosts: int, expected_s: float) -> None:
    """All of them together ask 100 times a second at most, and none less often than torch would."""
    assert RendezvousPace(hosts).pause(TORCHS_PAUSE_S) == pytest.approx(expected_s)


def test_hosts_that_are_waited_for_longer_are_asked_for_less_often(clock: SimpleNamespace) -> None:
    """In the end once a second, as torch has it; with the next round from the beginning."""
    pace = RendezvousPace(2)
    pauses = []
    for waited_s in (0.0, 1.0, 5.0, 10.0, 600.0):
        clock.now = 1000.0 + waited_s
        pauses.append(pace.pause(TORCHS_PAUSE_S))
    assert pauses == pytest.approx([0.05, 0.1, 0.5, 1.0, 1.0])
    pace.begin()
    assert pace.pause(TORCHS_PAUSE_S) == pytest.approx(0.05)


@pytest.mark.usefixtures("clock")
def test_no_pause_gets_longer() -> None:
    """Whatever torch asks for, random pauses included."""
    assert RendezvousPace(50).pause(0.1) == pytest.approx(0.1)
    assert RendezvousPace(2).pause(TORCHS_FIRST_PAUSE_S) == pytest.approx((0.0, 0.05))
    assert RendezvousPace(1000).pause(TORCHS_FIRST_PAUSE_S) == pytest.approx(TORCHS_FIRST_PAUSE_S)
    assert RendezvousPace(2).pause((0.2, 0.3)) == pytest.approx((0.2, 0.2))


@pytest.mark.usefixtures("clock")
def test_a_state_that_was_read_is_not_kept_for_longer_than_a_pause() -> None:
    """Else the shorter pauses would read nothing new; a handler of another kind is left as it is."""
    handler = SimpleNamespace(_state_holder=SimpleNamespace(_cache_duration=1))
    assert RendezvousPace(2).apply(handler) is handler
    assert handler._state_holder._cache_duration == pytest.approx(0.05)
    RendezvousPace(1000).apply(handler)
    assert handler._state_holder._cache_duration == pytest.approx(0.05)
    other = SimpleNamespace(_state_holder=object())
    assert RendezvousPace(2).apply(other) is other


@pytest.mark.usefixtures("clock")
def test_a_torch_that_pauses_otherwise_is_left_as_it_is() -> None:
    """There is nothing public to set, so what is set may be gone one day."""
    module = SimpleNamespace()
    RendezvousPace(2).install(module)
    assert vars(module) == {}
    asked: list[object] = []
    module = SimpleNamespace(_delay=asked.append)
    RendezvousPace(2).install(module)
    module._delay(TORCHS_PAUSE_S)
    module._delay(seconds=TORCHS_PAUSE_S)
    assert asked == pytest.approx([0.05, 0.05])
