"""The console: lines of many ranks on one stdout and one stderr, whole, prefixed, with unfinished lines readable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from saferun.console.lines import closed_row, prefixed, shown_width
from saferun.console.target import Target
from saferun.errors import printable_lines, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.console_stream import ConsoleStream
    from saferun.console.drawing import DrawingBudget
    from saferun.console.folding import Folding
    from saferun.console.held_output import HeldOutput
    from saferun.console.raw_pane import RawPane
    from saferun.console.status_line import StatusLine

# An unfinished line (a prompt, a progress bar) appears on a terminal after this time, and on a pipe after this one.
_TERMINAL_REFRESH_S = 0.1
_PIPE_REFRESH_S = 1.0
# How often what has been drawn is searched for lines that will not change any more.
_REST_S = 1.0
# A line that counts seconds.
_STATUS_S = 1.0
# The most rows of unfinished lines at the bottom of a terminal, and how many rows of a lower one are left for lines.
_MOST_ROWS = 16
_LEAST_LINES = 4
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
        bar_interval_s: how often at most a progress bar is a line, where there is no terminal.
        color: whether saferun's own messages are coloured; auto: on a terminal, unless NO_COLOR is set.
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
        bar_interval_s: float = 30.0,
        color: str = "never",
    ) -> None:
        self._raw = raw
        self._color = color

        def pane(fd: int) -> Pane:
            target = Target(fd, skipping=skipping and not raw, where=where, carries=carries)
            if not raw or target.is_terminal:
                return Pane(target, bar_interval_s)
            from saferun.console.raw_pane import RawPane

            return RawPane(target)

        self.out = pane(stdout)
        same = os.path.samestat(os.fstat(stdout), os.fstat(stderr))
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
        self._put_own(printable_lines(text))

    def colors(self, pane: Pane) -> bool:
        """Whether to colour what saferun itself writes there."""
        if self._color != "auto":
            return self._color == "always"
        return pane.target.is_terminal and not os.environ.get("NO_COLOR")

    def _put_own(self, text: str) -> None:
        """Write lines of saferun itself to stderr; wrapped and coloured on a terminal."""
        pane = self.err
        with suppress(Exception):
            is_colored = self.colors(pane)
            if pane.target.is_terminal or is_colored:
                from saferun.console.message_style import styled

                text = styled(text, columns=pane.columns, is_colored=is_colored)
        pane.put_message(text.encode(errors="backslashreplace") + b"\n")

    def set_status(self, key: str, text: str | None, *, since: float = 0.0, until: float = 0.0) -> bool:
        """On a terminal, show what is going on in a line below all others that changes in place.

        Args:
            key: what it is about; a new text takes the place of the old one.
            text: None: it is over, and the line is removed.
            since: monotonic seconds: how long ago that is stands in the line.
            until: monotonic seconds: how long it takes until then stands in the line, which is removed at that time.

        Returns:
            Whether it is shown. Elsewhere, and where it fails, ordinary lines have to say it.
        """
        if not self.err.target.is_terminal or self.err.raw is not None:
            return False
        try:
            self.err.set_status(key, printable_lines(text) if text is not None else None, since=since, until=until)
        except Exception:
            return False
        return text is not None

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

    def show_no_more(self) -> None:
        """Something has failed: nothing but whole lines is shown from now on."""
        self.folding = None
        for pane in self.panes:
            pane.due = None

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
            self._put_own(printable_lines(f"saferun: {note}"))

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
            for key in list(pane.statuses):
                self.set_status(key, None)
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
    """One target and its unfinished lines. ``raw``: it gets bytes unchanged. ``held``: one rank has it for itself."""

    raw: RawPane | None = None
    held: HeldOutput | None = None

    def __init__(self, target: Target, bar_interval_s: float = 30.0) -> None:
        self.target = target
        self.due: float | None = None
        self.budget: DrawingBudget | None = None
        self.statuses: dict[str, StatusLine] = {}
        self._bar_interval_s = bar_interval_s
        self._unfinished: dict[ConsoleStream, tuple[bytes, ...]] = {}
        self._since: dict[ConsoleStream, float] = {}  # when each of these lines began
        self._rows = 0
        self._below = 0  # of these rows, how many are below the cursor
        self._cannot_draw = False  # rows at the bottom: that has failed
        target.shape_note = self._above_the_rows

    def put(self, text: bytes) -> bool:
        """Write lines of a rank. Returns whether they are not skipped because the reader is too slow."""
        if self.held is not None:
            return self.held.keep(text)
        if self.target.has_room(len(text)):
            self.target.put(self._above_the_rows(text))
            return True
        self.target.skip(text.count(b"\n"))
        return False

    def put_pieces(self, pieces: Sequence[bytes | memoryview]) -> bool:
        """The same for lines in several pieces."""
        size = sum(map(len, pieces))
        if self._rows or size <= _SMALL_BYTES or self.held is not None or not self.target.has_room(size):
            return self.put(b"".join(pieces))
        for piece in pieces:
            self.target.put(piece)
        return True

    def put_message(self, text: bytes) -> None:
        """Write lines that are never skipped."""
        if self.held is not None:
            self.target.put(self.held.beside(text))
            return
        # A terminal may show what was typed, a ^C for example, before the cursor.
        self.target.put(self._above_the_rows(text) if self._rows or not self.target.is_terminal else b"\r" + text)

    @property
    def columns(self) -> int:
        """The width of a terminal; 0 where there is none."""
        if not self.target.is_terminal:
            return 0
        from saferun.linux.streams import terminal_size

        return terminal_size(self.target.fd)[0]

    def hold(self, held: HeldOutput | None) -> None:
        """Hand to this what ranks write, and draw no rows; None: that is over."""
        self.target.put(self._erase())
        self.held = held
        self._refresh_at(time.monotonic() + _TERMINAL_REFRESH_S)

    def _above_the_rows(self, text: bytes) -> bytes:
        # The rows at the bottom are erased and drawn again below the new lines.
        return self._erase() + text + self._draw() if self._rows else text

    def _redraw(self) -> None:
        # If a slow terminal has no room for them, or one rank has it for itself, they are drawn later.
        if self.held is None and self.target.has_room(0):
            self.target.put(self._erase() + self._draw())

    def note_unfinished(self, stream: ConsoleStream, now: float) -> None:
        """Record that the stream's unfinished line is new or has changed."""
        self._refresh_at(now + (_TERMINAL_REFRESH_S if self.target.is_terminal else _PIPE_REFRESH_S))
        if stream not in self._unfinished:
            self._unfinished[stream] = ()
            self._since[stream] = now

    def forget(self, stream: ConsoleStream) -> None:
        """Its unfinished line has been completed."""
        self._since.pop(stream, None)
        if self._unfinished.pop(stream, None) is not None and self._rows:
            self._redraw()

    def update(self, stream: ConsoleStream) -> None:
        """Some of its rows have become lines: they are not drawn once more."""
        if self.target.is_terminal and self._unfinished.get(stream):
            self._unfinished[stream] = stream.live

    def show_unfinished(self, now: float) -> None:
        """Show the unfinished lines that are due."""
        self.due = None
        if self.target.is_terminal and not self._cannot_draw:
            self._show_rows(now)
            return
        for stream, shown in list(self._unfinished.items()):
            state = stream.live
            if state == shown:
                continue
            if stream.overwrites_itself:
                if shown and now < self._since[stream] + self._bar_interval_s:
                    self._refresh_at(self._since[stream] + self._bar_interval_s)
                    continue
                self._unfinished[stream] = state
                self._since[stream] = now
                self.put(b"".join(prefixed(stream.prefix, row) for row in state if row not in shown))
                self._refresh_at(now + self._bar_interval_s)
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

    def set_status(self, key: str, text: str | None, *, since: float, until: float) -> None:
        """Show, change or remove a line below all others."""
        if text is not None:
            from saferun.console.status_line import StatusLine

            self.statuses[key] = StatusLine(text, since, until)
            self._refresh_at(time.monotonic() + _STATUS_S)
        elif self.statuses.pop(key, None) is None:
            return
        self._redraw()
        if not self.target.has_room(0):
            self._refresh_at(time.monotonic() + _STATUS_S)

    def _status_rows(self) -> list[bytes]:
        """The lines that say what is going on; none where that fails."""
        try:
            from saferun.console.status_line import status_rows

            return status_rows(self.statuses, time.monotonic(), self.columns)
        except Exception:
            self.statuses.clear()
            return []

    def _show_rows(self, now: float) -> None:
        """Draw the newest rows of all streams at the bottom of the terminal."""
        if self.statuses:
            self._refresh_at(now + _STATUS_S)
        for stream in list(self._unfinished):
            if stream.settle(now):
                self._refresh_at(now + _REST_S)
        for stream in self._unfinished:
            self._unfinished[stream] = stream.live
        self._redraw()
        if self._cannot_draw:
            self._refresh_at(now + _PIPE_REFRESH_S)

    def _refresh_at(self, at: float) -> None:
        self.due = at if self.due is None else min(self.due, at)

    def _erase(self) -> bytes:
        rows, self._rows = self._rows, 0
        above, self._below = rows - 1 - self._below, 0
        if not rows:
            return b""
        return b"\r\x1b[%dA\x1b[J" % above if above else b"\r\x1b[J"

    def _draw(self) -> bytes:
        """The rows; where that fails, unfinished lines are shown as on a pipe from now on."""
        if self._cannot_draw:
            return b""
        try:
            return self._drawn()
        except Exception:
            self._cannot_draw = True
            self._rows = self._below = 0
            self._unfinished = dict.fromkeys(self._unfinished, ())
            return b""

    def _drawn(self) -> bytes:
        drawn = {stream: rows for stream, rows in self._unfinished.items() if rows}
        below = self._status_rows() if self.statuses else []
        if not drawn and not below:
            return b""
        from saferun.linux.streams import terminal_size

        # More rows than the terminal has could not be erased again.
        room = min(_MOST_ROWS, max(terminal_size(self.target.fd)[1] - _LEAST_LINES - len(below), 1))
        shown: list[bytes] = []
        cursor = None
        for place, (stream, rows) in enumerate(drawn.items()):
            # Each has the rows that the others leave; of what is higher, the rows nearest to its end.
            most = max((room - len(shown)) // (len(drawn) - place), 1)
            left_out = max(len(rows) - most, 0)
            at = stream.cursor
            if at is not None and left_out <= at[0] < len(rows):
                cursor = (len(shown) + at[0] - left_out, stream.prefix_columns + at[1])
            shown += [stream.prefix + closed_row(row) for row in rows[left_out:]]
        shown = shown[:room]
        if below and shown and (cursor is None or cursor[0] >= len(shown)):
            # Behind the last row, as without the lines below it: what is typed is shown there.
            cursor = (len(shown) - 1, shown_width(shown[-1]))
        elif cursor is not None and cursor[0] >= len(shown):
            cursor = None
        shown += below
        self._rows = len(shown)
        # Without line wrapping each of them is one row, whatever its width.
        text = b"\x1b[?7l" + b"\n".join(shown) + b"\x1b[?7h"
        if cursor is None:
            return text
        self._below = self._rows - 1 - cursor[0]
        return text + (b"\x1b[%dA" % self._below if self._below else b"") + b"\x1b[%dG" % (cursor[1] + 1)
