"""What is typed for a rank that has the keyboard."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.launch import keyboard_session
from saferun.launch.keyboard_session import TypedKeys


class Terminal:
    """A terminal with room for so many bytes."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.typed = b""

    def write(self, typed: bytes) -> int:
        count = min(len(typed), self.room)
        self.room -= count
        self.typed += typed[:count]
        return count


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals to the rank."""
    sent: list[int] = []
    monkeypatch.setattr(keyboard_session, "signal_child", lambda _child, signum: sent.append(signum))
    return sent


def keys(terminal: Terminal, stops: list[int] | None) -> TypedKeys:
    rank: Any = SimpleNamespace(receiver=None, child=None, end=None)
    return TypedKeys(rank, terminal, stops.append if stops is not None else None)  # type: ignore[arg-type]


def test_ctrl_c_is_a_signal_and_drops_what_has_not_been_typed(interrupts: list[int]) -> None:
    terminal, stops = Terminal(room=2), list[int]()
    one = keys(terminal, stops)
    one.take(b"abcd\x03ef")
    assert interrupts == [signal.SIGINT]
    terminal.room = 100
    one.flush()
    assert terminal.typed == b"ef"
    assert stops == []


def test_a_rank_that_has_ended_gets_no_signal(interrupts: list[int]) -> None:
    """Its number may be another process's by now."""
    one = keys(Terminal(), None)
    one._rank.end = cast("Any", "ended")
    one.take(b"\x03")
    assert interrupts == []


def test_ctrl_c_twice_and_ctrl_backslash_stop_the_launch(interrupts: list[int]) -> None:
    stops = list[int]()
    one = keys(Terminal(), stops)
    one.take(b"\x03\x03")
    one.take(b"a\x1c")
    assert interrupts == [signal.SIGINT]
    assert stops == [signal.SIGINT, signal.SIGQUIT]


def test_from_another_shell_no_key_stops_the_launch(interrupts: list[int]) -> None:
    terminal = Terminal()
    keys(terminal, None).take(b"\x03\x03\x1cx")
    assert interrupts == [signal.SIGINT] * 2
    assert terminal.typed == b"\x1cx"


def test_keys_without_room_wait_up_to_a_limit(interrupts: list[int]) -> None:
    terminal = Terminal(room=0)
    one = keys(terminal, None)
    one.take(b"x" * 100_000)
    assert one.has_waiting
    terminal.room = 1 << 20
    one.flush()
    assert terminal.typed == b"x" * (64 << 10)
    assert not interrupts
    assert not one.has_waiting
