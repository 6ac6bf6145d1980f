"""The console: lines of many ranks on one stdout and one stderr, whole, prefixed, with unfinished lines readable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from saferun.console.pane import Pane
from saferun.console.target import Target
from saferun.errors import printable_lines, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.console_stream import ConsoleStream
    from saferun.console.folding import Folding


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

            target.may_return = False  # unchanged output has no gaps
            return RawPane(target)

        self.out = pane(stdout)
        same = os.path.samestat(os.fstat(stdout), os.fstat(stderr))
        self.err = self.out if same else pane(stderr)
        self.panes = (self.out,) if same else (self.out, self.err)
        self._has_reported_gap = False
        self.folding: Folding | None = None  # of tracebacks; it only ever sees stderr

    def allow_skipping(self, allowed: bool, *, teed: bool = False) -> None:  # noqa: FBT001 - the name says what it is
        """Whether lines may be skipped for a slow reader from now on: only while files keep all of them.

        ``teed``: whether those may of streams that log files of ``-t`` keep.
        """
        for pane in self.panes:
            # Unchanged output has no gaps; its ranks wait for the reader, as they would without a launcher.
            pane.target.skipping = allowed and not self._raw
            pane.target.skips_teed = teed and not self._raw
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
        if self.err.raw is not None or (text is not None and not self.err.draws):
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
        dues = [due for pane in self.panes for due in (pane.due, pane.target.retry_at, pane.target.judged_at)]
        if self.folding is not None:
            try:
                dues.append(self.folding.deadline)
            except Exception:
                self.abandon_folding(0.0)
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now: float) -> None:
        """Show unfinished lines that have waited long enough, and find out who reads slowly."""
        for pane in self.panes:
            pane.target.judge()
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

    def forget_rows(self) -> None:
        """This process was stopped and goes on: a shell may have written below what was drawn."""
        for pane in self.panes:
            pane.forget_rows()

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
        """All streams have ended: write what waits for the end of a line. A reader that has gone may be back."""
        for pane in self.panes:
            if pane.target.is_away:
                pane.target.retry_at = 0.0
            if pane.raw is not None:
                pane.raw.release()
            for key in list(pane.statuses):
                self.set_status(key, None)
        self._note_folded(None)

    def enlarge(self) -> None:
        """No more output will come: a caller that reads once saferun has ended finds what waits in its pipe."""
        from saferun.linux.streams import enlarge_pipe

        for pane in self.panes:
            if pane.target.waits_for_room:
                enlarge_pipe(pane.target.fd, pane.target.waiting_bytes)

    def finish(self) -> bool:
        """No more output will come: the processes that write files exit when they have written everything.

        stderr's comes last: it says what stdout has not taken. Returns whether everything has reached its destination.
        """
        out, err = self.out.target, self.err.target
        out.finish()
        if not out.is_finished or self.print_unwritten():
            return False
        err.finish()
        return err.is_finished

    @property
    def is_awaited(self) -> bool:
        """Whether a reader that exists has not read what is nowhere else."""
        return any(pane.target.is_awaited for pane in self.panes)

    @property
    def awaits_file(self) -> bool:
        """Whether a file has not taken everything yet."""
        targets = [pane.target for pane in self.panes if pane.target.is_file]
        return any(target.unwritten_bytes or not target.is_empty for target in targets)

    def print_unread(self) -> bool:
        """Print to stderr how much of stdout has not been read, unless both are the same. Returns whether it did."""
        text = self.out.target.unread_text
        if not text or self.err is self.out or self.out.target.is_file:
            return False
        refusal = self.out.target.refusal
        what = f"could not be written ({refusal})" if refusal else "was not read to its end"
        self.print_message(f"saferun: stdout {what}: {text}")
        return True

    def print_unwritten(self) -> bool:
        """Print to stderr, once, how much a file behind stdout has not taken. Returns whether it did."""
        text = self.out.target.unread_text
        if not text or self.err is self.out or not self.out.target.is_file or self._has_reported_gap:
            return False
        self._has_reported_gap = True
        self.print_message(f"saferun: stdout could not be written to its end: {text}")
        return True

    def print_waiting(self, left_s: float) -> None:
        """Print to stderr that the end waits for a file behind stdout."""
        if self.out.target.is_file and self.out.target.unread_text and self.err is not self.out:
            more = f"waiting {left_s:.0f} s more unless it takes something"
            self.print_message(f"saferun: stdout cannot be written: {more}; Ctrl-C stops waiting")

    @property
    def unwritten_bytes(self) -> int:
        """How many bytes the processes that write files have not written."""
        return sum(pane.target.unwritten_bytes for pane in self.panes)

    def close(self) -> None:
        """Drop what has not been written."""
        for pane in self.panes:
            pane.target.close()
