"""A terminal that one rank has for itself for a while."""

from __future__ import annotations

import os
import pty
from typing import TYPE_CHECKING

import pytest

from saferun.console import target
from saferun.console.held_output import HeldOutput
from saferun.console.pane import Pane
from saferun.console.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pane(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pane, int]]:
    """A pane on a terminal, and the terminal's other end."""
    monkeypatch.setattr(target, "_is_own_terminal", lambda _fd: True)
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    yield Pane(Target(slave, skipping=True, where=lambda: "")), master
    os.close(master)
    os.close(slave)


def shown(pane: tuple[Pane, int]) -> bytes:
    """What has been written to the terminal since the last call."""
    pane[0].target.flush()
    return os.read(pane[1], 1 << 20)


def test_lines_of_others_wait_and_messages_stand_above_the_prompt(pane: tuple[Pane, int]) -> None:
    held = HeldOutput(pane[0], lambda: True)
    held.show("out", b"(Pdb) ")
    assert pane[0].put(b"[0] other\n")
    pane[0].put_message(b"saferun: hello\n")
    assert shown(pane) == b"(Pdb) \r\x1b[Ksaferun: hello\r\n(Pdb) "
    held.show("out", b"c\r\n")
    held.release("")
    assert shown(pane) == b"c\r\r\n[0] other\r\n"


def test_an_open_line_ends_before_others_follow(pane: tuple[Pane, int]) -> None:
    held = HeldOutput(pane[0], lambda: True)
    held.show("out", b"(Pdb) ")
    pane[0].put(b"[0] other\n")
    held.release("")
    assert shown(pane) == b"(Pdb) \r\n[0] other\r\n"


def test_the_newest_lines_are_kept_and_the_others_counted(pane: tuple[Pane, int]) -> None:
    held = HeldOutput(pane[0], lambda: True)
    kept = [pane[0].put(b"%-1023d\n" % number) for number in range(1034)]
    assert kept == [True] * 1024 + [False] * 10
    pane[0].target.put = lambda text: written.append(bytes(text))  # type: ignore[method-assign]
    written: list[bytes] = []
    held.release("they are in the files")
    text = b"".join(written)
    assert b"saferun: 10 lines of other ranks are not shown; they are in the files\n" in text
    assert b"%-1023d\n" % 10 in text
    assert b"%-1023d\n" % 9 not in text


def test_lines_that_are_nowhere_else_are_shown_rather_than_dropped(pane: tuple[Pane, int]) -> None:
    held = HeldOutput(pane[0], lambda: False)
    held.show("out", b"(Pdb) ")
    written: list[bytes] = []
    pane[0].target.put = lambda text: written.append(bytes(text))  # type: ignore[method-assign]
    assert all(pane[0].put(b"%-1023d\n" % number) for number in range(1034))
    assert written == [b"\r\x1b[K%-1023d\n(Pdb) " % number for number in range(10)]
    held.release("")
    assert b"".join(written).count(b"\n") == 1034 + 1  # and the end of the prompt's line
    assert b"not shown" not in b"".join(written)
