"""The console: lines of many ranks on one stdout and one stderr, whole, prefixed, with unfinished lines readable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from saferun.console.lines import LineAssembler, prefixed
from saferun.console.target import Target
from saferun.errors import printable_lines, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.folding import Folding
    from saferun.console.raw_pane import RawPane

# An unfinished line (a prompt, a progress bar) appears on a terminal after this time, and on a pipe at most this often.
_TERMINAL_REFRESH_S = 0.1
_PIPE_REFRESH_S = 1.0
# The most rows of unfinished lines at the bottom of a terminal.
_MOST_ROWS = 16
# Lines up to this size are joined; larger ones are not worth a copy.
_SMALL_BYTES = 4 << 10


class Screen:
    """saferun's stdout and stderr.

    Args:
        stdout: descriptor; ``stderr`` likewise. If both are the same file they share one queue, so that a line of one
            never lands within a line of the other.
        skipping: whether lines may be skipped for a slow reader (they are kept in files).
        where: returns where skipped lines can be read.
        raw: whether the ranks' bytes pass unchanged, unless they go to a terminal (``--prefix none``).
        carries: whether regular files are written by separate processes.
    """

    def __init__(
        self,
        stdout: int,
        stderr: int,
        *,
        skipping: bool,
        where: Callable[[], str],
        raw: bool = False,
        carries: bool = False,
    ) -> None:
        self._raw = raw

        def pane(fd: int) -> Pane:
            target = Target(fd, skipping=skipping and not raw, where=where, carries=carries)
            if not raw or target.is_terminal:
                return Pane(target)
            from saferun.console.raw_pane import RawPane

            return RawPane(target)

        self.out = pane(stdout)
        out_stat, err_stat = os.fstat(stdout), os.fstat(stderr)
        same = (out_stat.st_dev, out_stat.st_ino, out_stat.st_rdev) == (
            err_stat.st_dev,
            err_stat.st_ino,
            err_stat.st_rdev,
        )
        self.err = self.out if same else pane(stderr)
        self.panes = (self.out,) if same else (self.out, self.err)
        self.folding: Folding | None = None  # of tracebacks; it only ever sees stderr

    def allow_skipping(self, allowed: bool) -> None:  # noqa: FBT001 - the name says what it is
        """Whether lines may be skipped for a slow reader from now on: only while files keep all of them."""
        for pane in self.panes:
            # Unchanged output has no gaps; its ranks wait for the reader, as they would without a launcher.
            pane.target.skipping = allowed and not self._raw
        if not allowed and self.folding is not None:
            # What is held back may be nowhere else.
            try:
                held = self.folding.release()
            except Exception:
                self.abandon_folding(0.0)
                return
            for stream, text in held:
                stream.show(text, 0.0)

    def print_message(self, text: str) -> None:
        """Print one or more lines of saferun itself to stderr."""
        self._note_folded(None)
        self.err.put_message(printable_lines(text).encode(errors="backslashreplace") + b"\n")

    def print_output(self, text: str) -> None:
        """Print the result that the user asked for to stdout."""
        self.out.put_message(printable_lines(text).encode(errors="backslashreplace"))

    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        dues = [due for pane in self.panes for due in (pane.due, pane.target.retry_at)]
        if self.folding is not None:
            try:
                dues.append(self.folding.deadline)
            except Exception:
                self.abandon_folding(0.0)
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now: float) -> None:
        """Show unfinished lines that have waited long enough."""
        for pane in self.panes:
            if pane.due is not None and pane.due <= now:
                pane.show_unfinished(now)
        if self.folding is not None:
            self._fold(now)

    def _fold(self, now: float) -> None:
        """Show what has been held back for long enough."""
        folding = self.folding
        if folding is None:
            return
        held: list[tuple[ConsoleStream, bytes]] = []
        try:
            held = folding.held()
            shown = folding.tick(now)
        except Exception:
            self._stop_folding()
            shown = held
        for stream, text in shown:
            stream.show(text, now)
        self._note_folded(now)

    def fold(self, stream: ConsoleStream, chunk: bytes, now: float | None) -> bytes:
        """What to show now of more bytes of a stream; with no time, at its end."""
        folding = self.folding
        if folding is None:
            return chunk
        held: list[tuple[ConsoleStream, bytes]] = []
        try:
            held = folding.held()
            if now is None:
                return folding.end(stream, time.monotonic())
            return folding.feed(stream, stream.rank, chunk, now, at_line_start=not stream.is_within_line)
        except Exception:
            self._stop_folding()
            for other, text in held:
                if other is stream:
                    chunk = text + chunk
                else:
                    other.show(text, now or 0.0)
            return chunk

    def _note_folded(self, now: float | None) -> None:
        """Name the ranks whose tracebacks have been folded; with a time only if that is due."""
        if self.folding is None:
            return
        try:
            notes = self.folding.notes(now)
        except Exception:
            self.folding = None
            notes = ["the same traceback of other ranks is not shown; it is in their stderr.log"]
        for note in notes:
            self.err.put_message(printable_lines(f"saferun: {note}").encode(errors="backslashreplace") + b"\n")

    def abandon_folding(self, now: float) -> None:
        """It has failed between two chunks: show what it holds back, and from now on everything as it is."""
        folding = self.folding
        self._stop_folding()
        held: list[tuple[ConsoleStream, bytes]] = []
        with suppress(Exception):
            held = folding.held() if folding is not None else held
        for stream, text in held:
            stream.show(text, now)

    def _stop_folding(self) -> None:
        """It has failed: from now on everything is shown as it is."""
        self._note_folded(None)
        self.folding = None

    def flush(self) -> bool:
        """Write what can be written without waiting. Returns whether anything was written."""
        wrote = False
        for pane in self.panes:
            wrote = pane.target.flush() or wrote
        return wrote

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written, or queued for the process that writes it."""
        return all(pane.target.is_empty for pane in self.panes)

    @property
    def pids(self) -> frozenset[int]:
        """The processes that write files for it."""
        return frozenset(pane.target.file.pid for pane in self.panes if pane.target.file is not None)

    def on_exit(self, pid: int) -> bool:
        """A child has been reaped. Returns whether it wrote a file; if so, it is replaced."""
        for pane in self.panes:
            file = pane.target.file
            if file is not None and file.pid == pid:
                file.keep_alive()
                return True
        return False

    def release(self) -> None:
        """All streams have ended: write what waits for the end of a line."""
        for pane in self.panes:
            if pane.raw is not None:
                pane.raw.release()
        self._note_folded(None)

    def finish(self) -> None:
        """No more output will come: the processes that write files exit when they have written everything."""
        for pane in self.panes:
            pane.target.finish()

    @property
    def is_finished(self) -> bool:
        """Whether everything has reached its destination."""
        return all(pane.target.is_finished for pane in self.panes)

    @property
    def is_stuck(self) -> bool:
        """Whether a file accepts nothing, rather than a slow reader."""
        pending = (pane.target for pane in self.panes if not (pane.target.is_empty and pane.target.is_finished))
        return all(target.is_file for target in pending)

    @property
    def unwritten_bytes(self) -> int:
        """How many bytes the processes that write files have not written."""
        return sum(pane.target.unwritten_bytes for pane in self.panes)

    def close(self) -> None:
        """Drop what has not been written."""
        for pane in self.panes:
            pane.target.close()


class Pane:
    """One target and its unfinished lines. ``raw``: it gets bytes unchanged."""

    raw: RawPane | None = None

    def __init__(self, target: Target) -> None:
        self.target = target
        self.due: float | None = None
        self._unfinished: dict[ConsoleStream, bytes] = {}
        self._since: dict[ConsoleStream, float] = {}  # when each of these lines began
        self._rows = 0
        target.shape_note = self._above_the_rows

    def put(self, text: bytes) -> bool:
        """Write lines of a rank. Returns whether they are not skipped because the reader is too slow."""
        if self.target.has_room(len(text)):
            self.target.put(self._above_the_rows(text))
            return True
        self.target.skip(text.count(b"\n"))
        return False

    def put_pieces(self, pieces: Sequence[bytes | memoryview]) -> bool:
        """The same for lines in several pieces."""
        size = sum(map(len, pieces))
        if self._rows or size <= _SMALL_BYTES or not self.target.has_room(size):
            return self.put(b"".join(pieces))
        for piece in pieces:
            self.target.put(piece)
        return True

    def put_message(self, text: bytes) -> None:
        """Write lines that are never skipped."""
        self.target.put(self._above_the_rows(text))

    def _above_the_rows(self, text: bytes) -> bytes:
        # The rows at the bottom are erased and drawn again below the new lines.
        return self._erase() + text + self._draw() if self._rows else text

    def _redraw(self) -> None:
        # If a slow terminal has no room for them, they are drawn later.
        if self.target.has_room(0):
            self.target.put(self._erase() + self._draw())

    def note_unfinished(self, stream: ConsoleStream, now: float) -> None:
        """Record that the stream's unfinished line is new or has changed."""
        if self.due is None:
            self.due = now + (_TERMINAL_REFRESH_S if self.target.is_terminal else _PIPE_REFRESH_S)
        if stream not in self._unfinished:
            self._unfinished[stream] = b""
            self._since[stream] = now

    def forget(self, stream: ConsoleStream) -> None:
        """Its unfinished line has been completed."""
        self._since.pop(stream, None)
        if self._unfinished.pop(stream, None) is not None and self._rows:
            self._redraw()

    def show_unfinished(self, now: float) -> None:
        """Show the unfinished lines that are due."""
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
                self._refresh_at(now + _PIPE_REFRESH_S)
            elif stream.is_held():
                # The rank may have written its end long ago.
                self._since[stream] = now
                self._refresh_at(now + _PIPE_REFRESH_S)
            elif now < self._since[stream] + _PIPE_REFRESH_S:
                # The line is newer than the one that this refresh was due for.
                self._refresh_at(self._since[stream] + _PIPE_REFRESH_S)
            else:
                # Plain text without an end: it is written as a line, and what follows begins another.
                self.put(prefixed(stream.prefix, stream.take_unfinished()))
                del self._unfinished[stream], self._since[stream]

    def _refresh_at(self, at: float) -> None:
        self.due = at if self.due is None else min(self.due, at)

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
        # Without line wrapping each of them is one row, whatever its width.
        return b"\x1b[?7l" + b"\n".join(shown) + b"\x1b[?7h"


class ConsoleStream:
    """One stream of one rank on the console.

    Args:
        pane: where it is shown.
        prefix: of its lines.
        folder: the screen that folds its tracebacks, if any.
        rank: whose stream it is.
    """

    def __init__(self, pane: Pane, prefix: bytes, folder: Screen | None = None, rank: int = -1) -> None:
        self.prefix = prefix
        self.rank = rank
        self._folder = folder
        self._pane = pane
        self._lines = LineAssembler()
        self._noted = False
        self.is_held: Callable[[], bool] = lambda: self.is_full  # whether reading the rank is paused

    @property
    def is_full(self) -> bool:
        """Whether to pause reading this stream."""
        return self._pane.target.is_full

    @property
    def overwrites_itself(self) -> bool:
        """Whether the unfinished line is a progress bar."""
        return self._lines.overwrites_itself

    @property
    def unfinished(self) -> bytes:
        """The line that has no end yet, or the newest state of a progress bar."""
        return self._lines.unfinished

    def take_unfinished(self) -> bytes:
        """Take the unfinished line, which then counts as written."""
        self._noted = False
        return self._lines.take()

    @property
    def is_within_line(self) -> bool:
        """Whether a line has been begun and not ended."""
        return bool(self._lines)

    def feed(self, chunk: bytes, now: float) -> None:
        """Process more bytes from the rank."""
        folder = self._folder
        is_wanted = is_within = False
        if folder is not None and (folding := folder.folding) is not None:
            try:
                is_wanted = folding.wants(self, chunk)
                is_within = is_wanted and folding.is_within(self)
            except Exception:
                folder.abandon_folding(now)
        if folder is not None and is_wanted and folder.folding is not None:
            # Only while files keep all of it.
            if self._pane.target.skipping or is_within:
                if self._lines and not is_within:
                    # A header may come in several pieces.
                    self._forget()
                    chunk = self._lines.take_back() + chunk
                chunk = folder.fold(self, chunk, now)
            if not chunk:
                return
        self.show(chunk, now)

    def show(self, chunk: bytes, now: float) -> None:
        """Show bytes from the rank."""
        if self._pane.raw is not None:
            self._pane.raw.pass_on(self, chunk, now)
            return
        is_whole = True
        if self._pane.target.has_room(len(chunk)):
            pieces = self._lines.feed_prefixed(chunk, self.prefix)
            if pieces:
                self._forget()
                is_whole = self._pane.put_pieces(pieces)
        elif lines := self._lines.skip(chunk):
            self._forget()
            self._pane.target.skip(lines)
            is_whole = False
        if not is_whole and self._folder is not None and self._folder.folding is not None:
            try:
                self._folder.folding.spoil(self, self.rank)
            except Exception:
                self._folder.abandon_folding(now)
        if self._lines:
            self._pane.note_unfinished(self, now)
            self._noted = True

    def close(self) -> None:
        """The stream has ended: complete its unfinished line, unless bytes pass unchanged."""
        if self._pane.raw is not None:
            self._pane.raw.ended(self)
            return
        if self._folder is not None and (rest := self._folder.fold(self, b"", None)):
            self.show(rest, 0.0)
        self._forget()
        if self._lines:
            self._pane.put(prefixed(self.prefix, self._lines.take()))

    def _forget(self) -> None:
        """The unfinished line has been completed."""
        if self._noted:
            self._noted = False
            self._pane.forget(self)
