"""Consoles to write to, with the other end in the test's hand."""

from __future__ import annotations

import fcntl
import os
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from saferun.console.screen import Screen

_F_SETPIPE_SZ = 1031


class Reader:
    """The reading end of a console that the test owns; ``fd`` is what is given to the console.

    ``fd`` blocks, as a real stdout does: a write that would wait would hang the test.
    """

    def __init__(self, read_end: int, fd: int) -> None:
        os.set_blocking(read_end, False)
        self.fd = fd
        self.taken = b""
        self._read_end = read_end

    @classmethod
    def pipe(cls, size_bytes: int = 4096) -> Reader:
        read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, _F_SETPIPE_SZ, size_bytes)
        return cls(read_end, write_end)

    @classmethod
    def terminal(cls, rows: int = 0, columns: int = 0, *, raw: bool = False) -> Reader:
        master, slave = os.openpty()
        termios.tcsetwinsize(slave, (rows, columns))
        if raw:
            tty.setraw(slave)
        return cls(master, slave)

    def take(self, size_bytes: int) -> bytes:
        """Read at most so much; b"" where there is nothing."""
        try:
            chunk = os.read(self._read_end, size_bytes)
        except BlockingIOError:
            return b""
        self.taken += chunk
        return chunk

    def go_away(self) -> None:
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go_away()
        os.close(self.fd)


def prefix_of(stream: int) -> bytes:
    return b"[node%d:%d] " % (stream, stream)


def lines_of(shown: bytes, streams: int) -> list[bytes]:
    """What the console shows, taken apart again: the text of each stream. Fails on anything that is no whole line."""
    assert shown == b"" or shown.endswith(b"\n")
    texts = [b""] * streams
    for line in shown.split(b"\n")[:-1]:
        (owner,) = [i for i in range(streams) if line.startswith(prefix_of(i))]
        texts[owner] += line[len(prefix_of(owner)) :] + b"\n"
    return texts


@contextmanager
def console(stdout: Reader, stderr: Reader | None = None) -> Iterator[Screen]:
    screen = Screen(stdout.fd, (stderr or stdout).fd, skipping=False, where=str, bar_interval_s=1.0)
    for pane in screen.panes:
        # The tests were not started on it.
        pane.target.is_terminal = os.isatty(pane.target.fd)
    try:
        yield screen
    finally:
        for pane in screen.panes:
            if pane.target.fd not in {stdout.fd, (stderr or stdout).fd}:
                os.close(pane.target.fd)


def drain(screen: Screen, *readers: Reader) -> None:
    while True:
        wrote = screen.flush()
        took = [reader.take(1 << 16) for reader in readers]
        if screen.is_empty and not any(took):
            return
        assert wrote or any(took), "the console stands still"
