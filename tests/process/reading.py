"""Pipes and terminals on their reading side."""

from __future__ import annotations

import os
import select
import threading
from typing import Self

from tests.process.launching import DEADLINE_S


class Reader:
    """Reads a pipe or terminal to its end, in a thread, and can be told to stop reading for a while."""

    def __init__(self, fd: int, *, paused: bool = False) -> None:
        self.fd = fd
        self._chunks: list[bytes] = []
        self._going = threading.Event()
        self._closed_wake, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if not paused:
            self._going.set()
        self._thread.start()

    def stop(self) -> None:
        """Read no more, and close the descriptor."""
        self.go_on()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self._thread.join(DEADLINE_S)
            os.close(self._closed_wake)
            os.close(self.fd)

    def go_on(self) -> None:
        """Read again."""
        self._going.set()

    def so_far(self) -> bytes:
        """What has been read."""
        return b"".join(list(self._chunks))

    def all(self) -> bytes:
        """Everything, once every writer has closed its end."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"somebody still holds the writing end; so far: {self.so_far()[-2000:]!r}"
        return self.so_far()

    def _read(self) -> None:
        self._going.wait()
        while True:
            ready, _, _ = select.select([self.fd, self._closed_wake], [], [])
            if self.fd not in ready:
                return
            try:
                chunk = os.read(self.fd, 1 << 16)
            except OSError:  # EIO: the last writer of a terminal is gone
                return
            if not chunk:
                return
            self._chunks.append(chunk)


class Pipe:
    """A pipe whose ends are closed once, by whoever is first: a number closed twice may be another's by then."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._readers: list[Reader] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_write_end()
        for reader in self._readers:
            reader.stop()
        self.close_read_end()

    def reader(self, *, paused: bool = False) -> Reader:
        """Read it to its end from now on."""
        reader = Reader(os.dup(self.read_end), paused=paused)
        self._readers.append(reader)
        self.close_read_end()
        return reader

    def close_write_end(self) -> None:
        """Leave the writing end to those who inherited it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close_read_end(self) -> None:
        """Read no more."""
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1
