"""Which of the ranks that ask for input has the keyboard."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch import keyboard_session, rank_terminals
from saferun.launch.rank_terminals import RankTerminal, RankTerminals
from saferun.supervisor.machine import State


class Stdin:
    """The terminal of a rank, which waits for input as long as it shall."""

    fd = -1
    is_edited = False

    def __init__(self) -> None:
        self.asks = True
        self.typed = b""

    def has_reader(self, _pid: int) -> bool:
        return self.asks

    def write(self, typed: bytes) -> int:
        self.typed += typed
        return len(typed)

    def resize(self, _columns: int, _rows: int) -> None:
        pass


class Keyboard:
    """saferun's own."""

    fd = -1
    is_gone = False
    is_in_foreground = True

    def __init__(self) -> None:
        self.typed = b""

    def read(self) -> bytes:
        typed, self.typed = self.typed, b""
        return typed

    def take(self) -> None:
        pass

    def give_back(self) -> None:
        pass


class Launch:
    """A launch whose ranks have terminals."""

    def __init__(self, count: int, attach: str | int) -> None:
        self.said: list[str] = []
        context: Any = SimpleNamespace(
            config=SimpleNamespace(
                output=SimpleNamespace(attach=attach), watch=SimpleNamespace(pdb=False, pdb_timeout_s=0.0)
            ),
            supervisor=SimpleNamespace(state=State.RUNNING),
            investigation=SimpleNamespace(hangs=SimpleNamespace(hold=lambda *_: None)),
            current=SimpleNamespace(plan=SimpleNamespace(placement=SimpleNamespace(world_size=count))),
            screen=SimpleNamespace(panes=()),
            poller=SimpleNamespace(is_watched=lambda _fd: True),
            report=self.said.append,
        )
        self.keyboard = Keyboard()
        self.stdins = [Stdin() for _ in range(count)]
        self.part = RankTerminals(context)
        self.part.__dict__["_keyboard"] = self.keyboard
        for number, stdin in enumerate(self.stdins):
            rank: Any = SimpleNamespace(
                assignment=SimpleNamespace(rank=number), pid=1, child=SimpleNamespace(pid=1), streams=(), end=None
            )
            self.part._terminals[number] = RankTerminal(rank, stdin)  # type: ignore[arg-type]
        self.now = time.monotonic()
        self.look()

    def look(self, after_s: float = 0.0) -> None:
        """See after so many seconds who asks."""
        self.now += after_s
        for terminal in self.part._terminals.values():
            self.part._check(terminal, self.now)
        self.part._give_keyboard(self.now)

    def type(self, typed: bytes) -> None:
        """The user types."""
        self.keyboard.typed = typed
        self.part._on_keys()

    @property
    def holder(self) -> int | None:
        """The rank that has the keyboard."""
        session = self.part._session
        return session.rank.assignment.rank if session is not None else None


@pytest.fixture
def launch_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Make a launch of so many ranks, all of which ask."""
    monkeypatch.setattr(rank_terminals, "descendants_of", lambda _pid: [])
    monkeypatch.setattr(keyboard_session, "signal_child", lambda *_: None)
    return lambda count, attach="auto": Launch(count, attach)


@pytest.mark.parametrize("busy", [0, 1], ids=["that has the keyboard", "that waits for its turn"])
def test_one_look_at_a_rank_in_a_signal_handler_is_not_the_end_of_its_prompt(
    launch_of: Callable[..., Launch], busy: int
) -> None:
    """It handles SIGWINCH when it gets the keyboard; on a busy host saferun had last looked long before."""
    launch = launch_of(2)
    launch.stdins[busy].asks = False
    launch.look(after_s=1.0)
    assert launch.holder == 0
    launch.type(b"\x1d")
    assert launch.holder == 1


def test_a_rank_that_goes_on_gives_the_keyboard_to_the_next_one(launch_of: Callable[..., Launch]) -> None:
    launch = launch_of(2)
    launch.stdins[0].asks = False
    launch.look()
    assert launch.holder == 0
    launch.look(after_s=0.5)
    assert launch.holder == 1


def test_the_key_typed_twice_at_once_passes_two_ranks_and_reaches_none(launch_of: Callable[..., Launch]) -> None:
    launch = launch_of(3)
    launch.type(b"a\x1d\x1db")
    assert launch.holder == 2
    assert [stdin.typed for stdin in launch.stdins] == [b"a", b"", b"b"]
    launch.type(b"\x1d")
    assert launch.holder == 0


def test_the_key_is_remembered_until_another_rank_asks(launch_of: Callable[..., Launch]) -> None:
    """After a step over a collective the other ranks ask a moment later."""
    launch = launch_of(2)
    launch.stdins[1].asks = False
    launch.look()
    launch.look(after_s=1.0)
    launch.type(b"\x1d\x1d")
    assert launch.holder == 0
    assert launch.said[-1] == "no other rank waits for input; the next one that does gets the keyboard"
    assert launch.said[-1] not in launch.said[:-1]
    launch.stdins[1].asks = True
    launch.look(after_s=60.0)
    assert launch.holder == 1
    launch.look(after_s=1.0)
    assert launch.holder == 1
    launch.type(b"\x1d")
    assert launch.holder == 0


def test_the_key_is_forgotten_when_the_user_goes_on_with_the_rank(launch_of: Callable[..., Launch]) -> None:
    launch = launch_of(2)
    launch.stdins[1].asks = False
    launch.look()
    launch.look(after_s=1.0)
    launch.type(b"\x1d")
    launch.type(b"n")
    launch.stdins[1].asks = True
    launch.look(after_s=1.0)
    assert launch.holder == 0
    assert launch.stdins[0].typed == b"n"


@pytest.mark.parametrize(("count", "attach"), [(1, "auto"), (2, 0)], ids=["one rank", "a chosen rank"])
def test_where_no_other_rank_can_have_the_keyboard_the_key_does_nothing(
    launch_of: Callable[..., Launch], count: int, attach: str | int
) -> None:
    launch = launch_of(count, attach)
    launch.type(b"\x1d")
    launch.look(after_s=1.0)
    assert launch.holder == 0
    assert not any("no other rank" in line for line in launch.said)
