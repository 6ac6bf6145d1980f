"""The console: lines of many ranks on one stdout and one stderr, whole, prefixed, with unfinished lines readable."""

from __future__ import annotations

import os
from collections.abc import Callable

from saferun.console.lines import LineAssembler, prefixed
from saferun.console.target import Target

# An unfinished line (a prompt, a bar) appears on a terminal after this long, and on a pipe at most this often.
_TERMINAL_REFRESH_S = 0.1
_PIPE_REFRESH_S = 1.0
# No more rows of bars than this stand at the bottom of a terminal.
_MOST_ROWS = 16


class Screen:
    """saferun's stdout and stderr.

    Args:
        stdout: descriptor; ``stderr`` likewise. Where both lead to the same file they share one queue, so that a line
            of one never lands within a line of the other.
        skipping: whether lines may be skipped for a slow reader (they are kept in files).
        where: tells where skipped lines can be read.
    """

    def __init__(self, stdout: int, stderr: int, *, skipping: bool, where: Callable[[], str]) -> None:
        self.out = _Pane(Target(stdout, skipping=skipping, where=where))
        out_stat, err_stat = os.fstat(stdout), os.fstat(stderr)
        same = (out_stat.st_dev, out_stat.st_ino, out_stat.st_rdev) == (
            err_stat.st_dev,
            err_stat.st_ino,
            err_stat.st_rdev,
        )
        self.err = self.out if same else _Pane(Target(stderr, skipping=skipping, where=where))
        self.panes = (self.out,) if same else (self.out, self.err)

    def allow_skipping(self, allowed: bool) -> None:  # noqa: FBT001 - it is what the name says
        """Whether from now on lines may be skipped for a slow reader: only while files keep all of them."""
        for pane in self.panes:
            pane.target.skipping = allowed

    def say(self, text: str) -> None:
        """One or more lines of saferun's own on stderr."""
        self.err.say(text.encode(errors="backslashreplace") + b"\n")

    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        dues = [pane.due for pane in self.panes if pane.due is not None]
        return min(dues) if dues else None

    def tick(self, now: float) -> None:
        """Show unfinished lines that have waited long enough."""
        for pane in self.panes:
            if pane.due is not None and pane.due <= now:
                pane.show_unfinished(now)

    def flush(self) -> bool:
        """Write what can be written without waiting. Returns whether anything was written."""
        wrote = False
        for pane in self.panes:
            wrote = pane.target.flush() or wrote
        return wrote

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return all(pane.target.is_empty for pane in self.panes)


class _Pane:
    """One target with its unfinished lines."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.due: float | None = None
        self._unfinished: dict[ConsoleStream, bytes] = {}
        self._rows = 0
        target.shape_note = self._above_the_rows

    def put(self, text: bytes) -> None:
        """Lines of a rank; they may be skipped if the reader is too slow."""
        if self.target.has_room(len(text)):
            self.target.put(self._above_the_rows(text))
        else:
            self.target.skip(text.count(b"\n"))

    def say(self, text: bytes) -> None:
        """Lines that are never skipped."""
        self.target.put(self._above_the_rows(text))

    def _above_the_rows(self, text: bytes) -> bytes:
        # The rows at the bottom give way and come back below the new lines.
        return self._erase() + text + self._draw() if self._rows else text

    def _redraw(self) -> None:
        # Rows that a slow terminal has no room for are drawn when it has.
        if self.target.has_room(0):
            self.target.put(self._erase() + self._draw())

    def note_unfinished(self, stream: ConsoleStream, now: float) -> None:
        """The stream has an unfinished line, which is new or has changed."""
        if self.due is None:
            self.due = now + (_TERMINAL_REFRESH_S if self.target.is_terminal else _PIPE_REFRESH_S)
        self._unfinished.setdefault(stream, b"")

    def forget(self, stream: ConsoleStream) -> None:
        if self._unfinished.pop(stream, None) is not None and self._rows:
            self._redraw()

    def show_unfinished(self, now: float) -> None:
        self.due = None
        if self.target.is_terminal:
            for stream in self._unfinished:
                self._unfinished[stream] = stream.unfinished
            self._redraw()
            return
        for stream, shown in list(self._unfinished.items()):
            state = stream.unfinished
            if state == shown:
                continue
            if stream.overwrites_itself:
                self._unfinished[stream] = state
                self.put(prefixed(stream.prefix, state))
                self.due = now + _PIPE_REFRESH_S
            else:
                # Plain text that waits for its end: it goes out as a line, and what follows begins another.
                self.put(prefixed(stream.prefix, stream.take_unfinished()))
                del self._unfinished[stream]

    def _erase(self) -> bytes:
        rows, self._rows = self._rows, 0
        if not rows:
            return b""
        return b"\r\x1b[J" if rows == 1 else b"\r\x1b[%dA\x1b[J" % (rows - 1)

    def _draw(self) -> bytes:
        shown = [stream.prefix + state for stream, state in self._unfinished.items() if state][:_MOST_ROWS]
        if not shown:
            return b""
        self._rows = len(shown)
        # Without line wrapping each bar is one row, whatever its width.
        return b"\x1b[?7l" + b"\n".join(shown) + b"\x1b[?7h"


class ConsoleStream:
    """One stream of one rank on the console."""

    def __init__(self, pane: _Pane, prefix: bytes) -> None:
        self.prefix = prefix
        self._pane = pane
        self._lines = LineAssembler()
        self._noted = False

    @property
    def is_full(self) -> bool:
        """Whether this stream should not be read for now."""
        return self._pane.target.is_full

    @property
    def overwrites_itself(self) -> bool:
        """Whether what is unfinished is a bar."""
        return self._lines.overwrites_itself

    @property
    def unfinished(self) -> bytes:
        """The line that has no end yet, or the newest state of a bar."""
        return self._lines.unfinished

    def take_unfinished(self) -> bytes:
        """The unfinished line, which is then finished as far as the console is concerned."""
        self._noted = False
        return self._lines.take()

    def feed(self, chunk: bytes, now: float) -> None:
        """More bytes from the rank."""
        text = self._lines.feed(chunk)
        if text:
            if self._noted:
                self._noted = False
                self._pane.forget(self)
            self._pane.put(prefixed(self.prefix, text))
        if self._lines:
            self._pane.note_unfinished(self, now)
            self._noted = True

    def close(self) -> None:
        """The stream has ended; what is unfinished becomes a line."""
        if self._noted:
            self._noted = False
            self._pane.forget(self)
        if self._lines:
            self._pane.put(prefixed(self.prefix, self._lines.take()))
