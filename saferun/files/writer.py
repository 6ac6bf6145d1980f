"""The writer process as the supervisor has it: the only one that touches the files of a launch.

What is to be written goes through a ring in shared memory, of which the writer is told now and then. What finds no room
there waits in the supervisor's memory, up to a bound. While the writer merely is slow, ranks' output is not read, so
that the ranks wait a little, as they would for a disk; where it does not come back from the file system, output goes to
the console alone, and what the files miss is counted and noted in them.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

from saferun.errors import suppress
from saferun.files.inbox import Inbox, Outbox
from saferun.files.process import serve
from saferun.files.ring import ASK, DATA, END, STREAMS, Ring
from saferun.files.server import WHOLE
from saferun.files.streams import Answer, FileStream, report
from saferun.linux.helper import Helper
from saferun.linux.poller import Poller
from saferun.linux.procfs import read_stat
from saferun.model import ExitStatus, JsonObject

# Small enough to stay in a processor's cache, and large enough for the writer to write in large pieces.
RING_BYTES = 2 << 20
# What is shown to the writer at once, at the latest after so long.
_BELL_BYTES = 512 << 10
_BELL_S = 0.02
# What waits in memory while a file system does not answer; what must be written (the last bytes of ranks that have
# ended, events, reports) may come on top of it.
BACKLOG_BYTES = 8 << 20
_MUST_BYTES = 64 << 20
_LEAST_SHARE_BYTES = 1 << 20
# A writer that sleeps uninterruptibly for so long hangs; one in another state is given more time.
STALL_S = 3.0
_STARVED_S = 15.0
_LOOK_AGAIN_S = 1.0
# How long the end of a launch waits for a writer that does nothing.
_PATIENCE_S = 5.0
_MOST_WRITERS = 2
# A file system that comes and goes is told of so many times.
_MOST_TOLD = 3


def _weight(payload: bytes | memoryview) -> int:
    """What a record costs in memory, roughly; never nothing."""
    return len(payload) + 128


def _nothing(*_arguments: object) -> None:
    """Nobody wants to know."""


class Writer:
    """The writer process, replaced once if it dies. A Part of the loop.

    Args:
        say: told, in one line each, that files cannot be written, and that they can again.
        ring_bytes: the ring's size.
    """

    def __init__(self, say: Callable[[str], None], *, ring_bytes: int = RING_BYTES) -> None:
        self.on_failed: Callable[[str, OSError, bool], None] = _nothing
        self.on_written: Callable[[str, int], None] = _nothing
        self.place = ""
        """What the files are said to be in: the run directory."""
        self._say = say
        self._ring = Ring(mmap.mmap(-1, Ring.memory_bytes(ring_bytes)))
        self._inbox: Inbox | None = None
        with suppress(OSError):  # too few descriptors: captures have no files then
            self._inbox = Inbox()
        self._poller: Poller | None = None
        self._helper: Helper | None = None
        self._forked = 0
        self._backlog: deque[tuple[int, int, bytes | memoryview]] = deque()
        self._backlog_bytes = 0
        self._waiting: dict[int, int] = {}  # stream -> its bytes in the backlog
        self._streams: dict[int, tuple[FileStream, int]] = {}  # number -> (stream, how it was opened)
        self._closing: dict[int, tuple[str, int | None]] = {}  # number -> (path, where the ring says that it is closed)
        self._next_number = 0
        self._asked: dict[int, tuple[Answer | None, float]] = {}
        self._asked_count = 0
        self._bell_at: float | None = None
        self._tail = 0
        self._moved_at = 0.0  # when the writer was last seen to have done something, or had nothing to do
        self._looked_at = 0.0
        self._stalled_at: float | None = None
        self._told_stalls = 0
        self._given_up = False
        self._is_finishing = False
        self._fork()

    # ----------------------------------------------------------------------------------------------------------------
    # Files

    @property
    def is_stalled(self) -> bool:
        """Whether the writer hangs, or is gone for good."""
        return self._stalled_at is not None or self._given_up

    @property
    def outbox(self) -> Outbox:
        """How other processes hand in whole files."""
        return self._inbox.outbox if self._inbox is not None else Outbox(-1, -1, -1)

    def open(self, path: str, how: int) -> FileStream:
        """Open a file: see Files."""
        self._forget_closed()
        while True:
            self._next_number = self._next_number % (STREAMS - 1) + 1
            if self._next_number not in self._streams and self._next_number not in self._closing:
                break
        number = self._next_number
        stream = FileStream(path, number, self, how)
        self._streams[number] = (stream, how)
        return stream

    def ask(
        self, name: str, arguments: list[object], on_answer: Answer | None = None, *, timeout_s: float = STALL_S
    ) -> None:
        """Have an operation carried out: see Files. Where no answer comes in time, it may still be carried out."""
        if self._given_up:
            if on_answer is not None:
                on_answer(None)
            return
        self._asked_count += 1
        self._asked[self._asked_count] = on_answer, time.monotonic() + timeout_s
        self.put(ASK, 0, json.dumps([self._asked_count, name, arguments]).encode(), must=True)
        self._ring_bell()  # somebody waits

    def put(self, kind: int, stream: int, payload: bytes | memoryview, *, must: bool) -> bool:
        """Queue a record. Returns whether it has found room."""
        if self._given_up:
            return kind != DATA
        try:
            return self._put(kind, stream, payload, must=must)
        except Exception as error:
            self._break(error)
            return False

    def _put(self, kind: int, stream: int, payload: bytes | memoryview, *, must: bool) -> bool:
        if self._backlog:
            self._pump()
        if not self._backlog and self._ring.put(kind, stream, payload):
            if self._ring.head - self._ring.published >= _BELL_BYTES:
                self._ring_bell()
            return True
        size = _weight(payload)
        fits = self._fits(stream, size)
        if not fits and not (must and self._backlog_bytes + size <= _MUST_BYTES):
            return False
        self._ring.want_room()
        self._ring_bell()
        self._backlog.append((kind, stream, payload))
        self._backlog_bytes += size
        self._waiting[stream] = self._waiting.get(stream, 0) + size
        return True

    def has_room(self, stream: int, size_bytes: int) -> bool:
        """Whether so much would find room now."""
        return not self._given_up and self._fits(stream, size_bytes)

    def _fits(self, stream: int, size_bytes: int) -> bool:
        share = max(BACKLOG_BYTES // 2 // max(len(self._streams), 1), _LEAST_SHARE_BYTES)
        return self._backlog_bytes + size_bytes <= BACKLOG_BYTES and self._waiting.get(stream, 0) + size_bytes <= share

    def is_slow(self) -> bool:
        """Whether ranks' output should not be read for a moment."""
        return bool(self._backlog) and not self.is_stalled

    def give_back(self, number: int) -> None:
        """A stream has been closed. Its number is free, and its file forgotten, once the writer knows that."""
        stream, how = self._streams.pop(number)
        # What is half written of a file that appears as a whole is lost with its writer.
        self._closing[number] = stream.path if how != WHOLE else "", self._ring.head if not self._backlog else None

    def _forget_closed(self) -> None:
        tail = self._ring.tail
        if not self._backlog and tail == self._ring.head:
            self._closing.clear()
        for number in [number for number, (_, end) in self._closing.items() if end is not None and end <= tail]:
            del self._closing[number]

    def _pump(self) -> None:
        while self._backlog and self._ring.put(*self._backlog[0]):
            _, stream, payload = self._backlog.popleft()
            self._backlog_bytes -= _weight(payload)
            self._waiting[stream] -= _weight(payload)
            if not self._waiting[stream]:
                del self._waiting[stream]
        if self._backlog:
            self._ring.want_room()

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    def attach(self, poller: Poller) -> None:
        """Hear the writer from now on."""
        self._poller = poller
        if self._helper is not None:
            self._helper.attach(poller, self._on_message, self._on_lost)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        if self._given_up:
            return None
        if self._bell_at is None and self._ring.head != self._ring.published:
            self._bell_at = time.monotonic() + _BELL_S
        moments = [self._bell_at, *(due for _, due in self._asked.values())]
        if self._is_behind:
            moments.append(max(self._moved_at + STALL_S, self._looked_at + _LOOK_AGAIN_S))
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Ring the bell, and look whether the writer still comes along."""
        if self._given_up:
            return
        try:
            self._tick(now)
        except Exception as error:
            self._break(error)

    def _tick(self, now: float) -> None:
        self._look(now)
        if self._backlog:
            self._pump()
        if self._ring.head != self._ring.published:
            if self._bell_at is None:
                self._bell_at = now + _BELL_S
            elif self._bell_at <= now:
                self._ring_bell()
        for number in [number for number, (_, due) in self._asked.items() if due <= now]:
            on_answer, _ = self._asked.pop(number)
            if on_answer is not None:
                on_answer(None)

    @property
    def pids(self) -> set[int]:
        """The process, until it has been reaped."""
        return self._helper.pids if self._helper is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Whether it was the writer."""
        return self._helper is not None and self._helper.on_exit(pid, status)

    def close(self) -> None:
        """Nothing: it is ``finish`` that ends the writer, after all others have said their last."""

    def discard(self) -> None:
        """The launch fails before anything could be written: end the process, and wait for that."""
        pids = self.pids
        if self._helper is not None:
            self._helper.kill()
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    @property
    def _is_behind(self) -> bool:
        return self._ring.tail < self._ring.published

    def _ring_bell(self) -> None:
        self._bell_at = None
        if not self._is_behind:
            self._moved_at = time.monotonic()
        self._ring.publish()
        # One that hangs hears the first bell when it is back; the others would fill the line.
        if self._helper is not None and self._helper.is_open and self._helper.queued_bytes == 0:
            self._helper.send({})

    def _look(self, now: float) -> None:
        """See whether the writer hangs."""
        tail, self._looked_at = self._ring.tail, now
        if tail != self._tail or not self._is_behind:
            self._tail, self._moved_at = tail, now
            if self._stalled_at is not None:
                self._go_on(now)
        elif self._stalled_at is None and now - self._moved_at >= STALL_S and self._hangs(now):
            self._stalled_at = self._moved_at
            self._ring.want_room()
            self._told_stalls += 1
            path = self._path()
            self._tell_stall(
                f"{path}: the file system{_mount_point(path)} does not answer; the job goes on, and what is written to "
                "files waits in memory, as far as there is room"
            )

    def _hangs(self, now: float) -> bool:
        stat = next((read_stat(pid) for pid in self.pids), None)
        if stat is not None and stat.state == "D":
            return True
        if self._helper is not None and self._helper.is_open:
            self._helper.send({})  # should it have missed the bell
        return now - self._moved_at >= _STARVED_S

    def _go_on(self, now: float) -> None:
        lasted_s = now - (self._stalled_at or now)
        self._stalled_at = None
        lost = [stream.note_gap() for stream, _ in self._streams.values()]
        missing = sum(lost)
        what = (
            f"{missing} bytes of {sum(map(bool, lost))} streams are missing in files, which say where"
            if missing
            else ("the files have everything")
        )
        self._tell_stall(f"{self._path()}: the file system answers again after {lasted_s:.0f} s; {what}")

    def _tell_stall(self, text: str) -> None:
        if self._told_stalls <= _MOST_TOLD:
            self._say(text)

    def _path(self) -> str:
        stream = self._streams.get(self._ring.busy)
        return stream[0].path if stream is not None else self.place

    # ----------------------------------------------------------------------------------------------------------------
    # The process

    def _fork(self, opened: Sequence[tuple[int, str]] = ()) -> None:
        self._forked += 1
        ring, inbox = self._ring, self._inbox
        keep = inbox.fds if inbox is not None else ()
        try:
            self._helper = Helper(
                "sr-writer", lambda line: serve(line, ring, opened, inbox), keep=keep, dies_with_parent=False
            )
        except OSError as error:
            self._give_up(f"no process that writes files: {error.strerror}")
            return
        if self._poller is not None:
            self._helper.attach(self._poller, self._on_message, self._on_lost)

    def _give_up(self, words: str) -> None:
        self._given_up = True
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()
        self._backlog.clear()
        if self._inbox is not None:
            self._inbox.close()
        self._say(f"{words}; the job goes on, and what the ranks write goes to the console alone")
        asked, self._asked = self._asked, {}
        for on_answer, _ in asked.values():
            if on_answer is not None:
                on_answer(None)

    def _on_message(self, message: JsonObject) -> None:
        try:
            self._hear(message)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """A mistake of our own may cost the files, and not the job."""
        self._give_up(f"files: {type(error).__name__}: {error}")

    def _hear(self, message: JsonObject) -> None:
        if "answer" in message:
            on_answer, _ = self._asked.pop(message["answer"], (None, 0.0))
            if on_answer is not None:
                on_answer(message)
        elif "room" in message:
            self._look(time.monotonic())
            self._pump()
            self._ring_bell()
        else:
            report(self, message)

    def _on_lost(self) -> None:
        """The writer is gone, though perhaps nobody asked it to."""
        if self._given_up or (self._is_finishing and self._ring.tail == self._ring.head):
            return
        if self._forked >= _MOST_WRITERS:
            self._give_up(f"{self.place or 'files'}: the process that writes files was ended again")
            return
        self._say("the process that writes files was ended, and is replaced")
        self._stalled_at = None
        self._moved_at = time.monotonic()
        opened = [(number, stream.path) for number, (stream, how) in self._streams.items() if how != WHOLE]
        self._fork([*opened, *((number, path) for number, (path, _) in self._closing.items() if path)])
        self._ring_bell()

    # ----------------------------------------------------------------------------------------------------------------
    # The end

    def finish(self, poller: Poller, is_hurried: Callable[[], bool], on_wait: Callable[[], object] = _nothing) -> None:
        """Have everything written, and the writer end. One that does nothing for five seconds is left as it is.

        Args:
            poller: the loop's, which by now has nothing else to do.
            is_hurried: whether the user has asked again for the end.
            on_wait: called now and then while there is something to be waited for.
        """
        if self._given_up:
            return
        self._is_finishing = True
        self.put(END, 0, b"", must=True)
        self._ring_bell()
        began_at = self._moved_at = time.monotonic()
        while self._helper is not None and (self.pids or self._helper.is_open) and not self._given_up:
            now = time.monotonic()
            self.tick(now)
            quiet_s = now - max(self._moved_at if self._is_behind else began_at, began_at)
            if quiet_s >= _PATIENCE_S or (self.is_stalled and now - began_at >= STALL_S) or is_hurried():
                self._leave()
                return
            on_wait()
            poller.wait(0.1)

    def _leave(self) -> None:
        waiting = self._ring.head - self._ring.tail + self._backlog_bytes
        pid = next(iter(self.pids), None)
        captured = self._inbox.waiting_bytes() if self._inbox is not None else 0
        self._say(
            f"{self._path()}: the file system does not answer; {waiting} bytes are not written yet"
            + (f", nor are files of captures (at most {captured >> 10} KiB)" if captured else "")
            + (f", {self._backlog_bytes} of them never will be" if self._backlog_bytes else "")
            + (f"; process {pid} goes on with the rest when it answers" if pid is not None else "")
        )


def _mount_point(path: str) -> str:
    """`` at /lustre``: what a path is on, as far as /proc tells."""
    best = ""
    with suppress(OSError, IndexError), open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            mounted = line.split(b" ")[4].replace(b"\\040", b" ").decode(errors="replace")
            if path.startswith(mounted if mounted == "/" else f"{mounted}/") and len(mounted) > len(best):
                best = mounted
    return f" at {best}" if best else ""
