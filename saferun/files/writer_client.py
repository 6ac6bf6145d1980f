"""The writer process as the supervisor has it: the only one that touches the files of a launch.

What is to be written goes through a ring in shared memory, which the writer is woken for now and then. What finds no
room there waits in the supervisor's memory, up to a bound. While the writer merely is slow, ranks' output is not read,
so that the ranks wait a little, as they would for a disk; where it does not come back from the file system, output goes
to the console alone, and what the files miss is counted and noted in them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from saferun.errors import suppress
from saferun.files.file_stream import WHOLE, FileStream, OnAnswer, WriterAnswer, read_answer, report
from saferun.files.inbox import Inbox, Outbox
from saferun.files.ring import ASK, DATA, END, STREAMS, RecordQueue
from saferun.linux.bare_socket import Socket
from saferun.linux.children import KILLED_S, await_exits
from saferun.linux.helper import Helper, PartBase
from saferun.linux.poller import Poller
from saferun.linux.procfs import mount_of, own_mounts, read_stat
from saferun.model import JsonObject

# Small enough to stay in a processor's cache, and large enough for the writer to write in large pieces.
RING_BYTES = 2 << 20
# What is shown to the writer at once, at the latest after so long.
_BELL_BYTES = 512 << 10
_BELL_S = 0.02
# A writer that sleeps uninterruptibly for so long hangs; one in another state is given more time.
STALL_S = 3.0
_STARVED_S = 15.0
_CHECK_S = 1.0
# A file system that takes less than this is not worth waiting for.
_LEAST_BYTES_PER_S = 1 << 20
# How long the end of a launch waits for a writer that does nothing.
_PATIENCE_S = 5.0
_MOST_WRITERS = 2
# How often a file system that comes and goes is reported.
_MOST_REPORTED = 3


def _nothing(*_arguments: object) -> None:
    """No one wants to know."""


class _OpenFiles:
    """The open files by their numbers, and those of which the writer may not know yet that they are closed."""

    def __init__(self, queue: RecordQueue) -> None:
        self._queue = queue
        self._streams: dict[int, tuple[FileStream, int]] = {}  # number -> (stream, how it was opened)
        self._closing: dict[int, tuple[str, int | None]] = {}  # number -> (path, where the ring says that it is closed)
        self._last = 0
        self._missing_in_closed: list[int] = []  # bytes, since note_gaps

    def __len__(self) -> int:
        return len(self._streams)

    def free_number(self) -> int:
        """One that neither an open file has nor one that the writer still closes; 0: there is none left."""
        ring = self._queue.ring
        if not self._queue and ring.tail == ring.head:
            self._closing.clear()
        self._closing = {
            number: (path, end) for number, (path, end) in self._closing.items() if end is None or end > ring.tail
        }
        for _ in range(STREAMS - 1):
            self._last = self._last % (STREAMS - 1) + 1
            if self._last not in self._streams and self._last not in self._closing:
                return self._last
        return 0

    def add(self, number: int, stream: FileStream, how: int) -> None:
        """A file is open."""
        self._streams[number] = (stream, how)

    def close(self, number: int) -> None:
        """A file has been closed. Its number is free, and the file forgotten, once the writer knows that."""
        stream, how = self._streams.pop(number)
        if missing := stream.note_gap():
            self._missing_in_closed.append(missing)
        # What is half written of a file that appears as a whole is lost with its writer.
        self._closing[number] = stream.path if how != WHOLE else "", self._queue.ring.head if not self._queue else None

    def path(self, number: int) -> str:
        """The path of an open file; empty: it is none."""
        return self._streams[number][0].path if number in self._streams else ""

    def note_gaps(self) -> list[int]:
        """Have each file say where bytes are missing in it. Returns how many those are since the last time."""
        closed, self._missing_in_closed = self._missing_in_closed, []
        return [*closed, *(stream.note_gap() for stream, _ in self._streams.values())]

    def to_reopen(self) -> list[tuple[int, str]]:
        """Number and path of those that a writer which takes over opens again."""
        opened = [(number, stream.path) for number, (stream, how) in self._streams.items() if how != WHOLE]
        return [*opened, *((number, path) for number, (path, _) in self._closing.items() if path)]


class HeldUp:
    """For how long ranks' output has not been read because the writer is slow, and what was written meanwhile."""

    def __init__(self) -> None:
        self.begin(0.0, 0)

    def begin(self, now: float, written_bytes: int) -> None:
        """Forget what was. ``now`` is in monotonic seconds, and ``written_bytes`` what has ever been written."""
        self._since, self._since_bytes, self._noted_at, self._held_s = now, written_bytes, now, 0.0

    def note(self, now: float, *, is_held: bool) -> None:
        """Whether ranks' output has not been read since the last time."""
        if is_held:
            self._held_s += now - self._noted_at
        self._noted_at = now

    def is_too_slow(self, now: float, written_bytes: int) -> bool:
        """Whether ranks wait for a file system that takes too little to be waited for. Asked when it took something."""
        if self._held_s < STALL_S:
            return False
        is_too_slow = written_bytes - self._since_bytes < _LEAST_BYTES_PER_S * (now - self._since)
        self.begin(now, written_bytes)
        return is_too_slow


class WriterClient(PartBase):
    """The writer process, replaced once if it dies. A Part of the loop.

    Args:
        print_message: takes one line each: that files cannot be written, and that they can again.
        ring_bytes: the ring's size.
    """

    def __init__(self, print_message: Callable[[str], None], *, ring_bytes: int = RING_BYTES) -> None:
        self.on_failed: Callable[[str, OSError, bool], None] = _nothing
        self.on_written: Callable[[str, int], None] = _nothing
        self.directory = ""
        """What the files are said to be in: the run directory."""
        self.runs: JsonObject = {}
        """How many runs there are, as ``do_housework`` has counted them; empty: not known."""
        self._begun: list[object] = []
        self._print_message = print_message
        self._queue = RecordQueue(ring_bytes)
        self._ring = self._queue.ring
        self._files = _OpenFiles(self._queue)
        self._inbox: Inbox | None = None
        with suppress(OSError):  # too few descriptors: captures have no files then
            self._inbox = Inbox()
        self._poller: Poller | None = None
        self._forked = 0
        self._asked: dict[int, tuple[OnAnswer | None, float]] = {}
        self._asked_count = 0
        self._bell_at: float | None = None
        self._tail = 0
        self._moved_at = 0.0  # when the writer was last seen to have done something, or had nothing to do
        self._checked_at = 0.0
        self._stalled_at: float | None = None
        self.is_too_slow = False
        """Whether it is stalled only in so far as it is not waited for: it goes on writing, slowly."""
        self._held_up = HeldUp()
        self._reported_stalls = 0
        self._given_up = False
        self._has_refused = False  # there was no number for a file
        self._is_finishing = False
        self._fork()

    # ----------------------------------------------------------------------------------------------------------------
    # Files

    @property
    def is_stalled(self) -> bool:
        """Whether the writer hangs, is too slow to be waited for, or is gone for good."""
        return self._stalled_at is not None or self._given_up

    @property
    def outbox(self) -> Outbox:
        """How other processes hand in whole files."""
        return self._inbox.outbox if self._inbox is not None else Outbox(-1, -1, -1)

    def open(self, path: str, how: int) -> FileStream:
        """Open a file: see Files. One too many (the writer has hung for days) is closed at once, with one line."""
        number = self._files.free_number()
        if not (number or self._has_refused or self._given_up):
            self._has_refused = True
            waiting = "files wait for the file system; this one is lost, and so are others to come"
            self._print_message(f"{path}: {STREAMS - 1} {waiting}")
        stream = FileStream(path, number, self, how)
        if number:
            self._files.add(number, stream, how)
        return stream

    def ask(
        self, name: str, arguments: list[object], on_answer: OnAnswer | None = None, *, timeout_s: float = STALL_S
    ) -> None:
        """Have an operation carried out: see Files. Where no answer comes in time, it may still be carried out."""
        if self._given_up:
            if on_answer is not None:
                on_answer(None)
            return
        if name == "begin_run":
            self._begun = arguments  # for a writer that follows
        self._asked_count += 1
        self._asked[self._asked_count] = on_answer, time.monotonic() + timeout_s
        self.put(ASK, 0, json.dumps([self._asked_count, name, arguments]).encode(), must=True)
        try:
            self._ring_bell()  # a caller waits
        except Exception as error:
            self._break(error)

    def put(self, kind: int, stream: int, payload: bytes | memoryview, *, must: bool) -> bool:
        """Queue a record. Returns whether it has found room."""
        if self._given_up:
            return kind != DATA
        try:
            fits = self._queue.put(kind, stream, payload, must=must, streams=len(self._files))
            if fits and (self._queue or self._ring.head - self._ring.published >= _BELL_BYTES):
                self._ring_bell()
        except Exception as error:
            self._break(error)
            return False
        return fits

    def has_room(self, stream: int, size_bytes: int) -> bool:
        """Whether so much would find room now."""
        return not self._given_up and self._queue.has_room(stream, size_bytes, streams=len(self._files))

    def is_slow(self) -> bool:
        """Whether ranks' output should not be read for a moment."""
        return bool(self._queue) and not self.is_stalled

    def give_back(self, number: int) -> None:
        """A stream has been closed."""
        self._files.close(number)

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    def attach(self, poller: Poller) -> None:
        """Listen to the writer from now on."""
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
        if self._ring.is_behind:
            moments.append(max(self._moved_at + STALL_S, self._checked_at + _CHECK_S))
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Ring the bell, and check whether the writer still makes progress."""
        if self._given_up:
            return
        try:
            self._check_pace(now)
            self._queue.pump()
            if self._ring.head != self._ring.published:
                if self._bell_at is None:
                    self._bell_at = now + _BELL_S
                elif self._bell_at <= now:
                    self._ring_bell()
        except Exception as error:
            self._break(error)
        for number in [number for number, (_, due) in self._asked.items() if due <= now]:
            self._answer(number, None)

    def close(self) -> None:
        """Nothing: it is ``finish`` that ends the writer, after all others have said their last."""

    def discard(self) -> None:
        """The launch fails before anything could be written: end the process, and wait a moment for that."""
        if self._helper is not None:
            self._helper.kill()
        await_exits(self.pids, KILLED_S)

    def _ring_bell(self) -> None:
        self._bell_at = None
        if not self._ring.is_behind:
            self._moved_at = time.monotonic()
        self._ring.publish()
        # One that hangs hears the first bell when it is back; the others would fill the line.
        if self._helper is not None and self._helper.is_open and self._helper.queued_bytes == 0:
            self._helper.send({})

    def _check_pace(self, now: float) -> None:
        """Note whether the writer hangs, or goes on."""
        tail, self._checked_at, is_behind = self._ring.tail, now, self._ring.is_behind
        has_moved = tail != self._tail or not is_behind
        self._held_up.note(now, is_held=self.is_slow())
        if has_moved:
            self._tail, self._moved_at = tail, now
        if not is_behind:
            self._held_up.begin(now, tail)
        if self._stalled_at is not None:
            if has_moved and not (self.is_too_slow and (is_behind or self._queue)):
                self._go_on(now)
        elif has_moved and self._held_up.is_too_slow(now, tail):
            self._stall(now, f"takes less than {_LEAST_BYTES_PER_S >> 20} MiB a second", is_too_slow=True)
        elif now - self._moved_at >= STALL_S and self._hangs(now):
            self._stall(self._moved_at, "does not answer", is_too_slow=False)

    def _stall(self, since: float, what: str, *, is_too_slow: bool) -> None:
        self._stalled_at, self.is_too_slow = since, is_too_slow
        self._ring.want_room()
        self._reported_stalls += 1
        path = self._path()
        self._report_stall(
            f"{path}: the file system{_mount_point(path)} {what}; the job goes on, and output for files is kept in "
            "memory while there is room"
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
        self._held_up.begin(now, self._tail)
        verb, self.is_too_slow = "keeps up" if self.is_too_slow else "answers", False
        lost = self._files.note_gaps()
        self._report_stall(f"{self._path()}: the file system {verb} again after {lasted_s:.0f} s; {missing_text(lost)}")

    def _report_stall(self, text: str) -> None:
        if self._reported_stalls <= _MOST_REPORTED:
            self._print_message(text)

    def _path(self) -> str:
        return self._files.path(self._ring.busy) or self.directory

    # ----------------------------------------------------------------------------------------------------------------
    # The process

    def _fork(self, opened: Sequence[tuple[int, str]] = ()) -> None:
        self._forked += 1
        ring, inbox = self._ring, self._inbox

        def begin(line: Socket) -> None:
            from saferun.files.writer_process import serve  # beside the start of the supervisor

            serve(line, ring, opened, inbox, self._begun)

        keep = inbox.fds if inbox is not None else ()
        try:
            self._helper = Helper("sr-writer", begin, keep=keep, dies_with_parent=False)
        except OSError as error:
            self._give_up(f"no process that writes files: {error.strerror}")
            return
        if self._poller is not None:
            self._helper.attach(self._poller, self._on_message, self._on_lost)

    def _give_up(self, message: str) -> None:
        self._given_up = True
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()
        self._queue.clear()
        if self._inbox is not None:
            self._inbox.close()
        self._print_message(f"{message}; the job goes on, and output of the ranks goes to the console only")
        for number in list(self._asked):
            self._answer(number, None)

    def _on_message(self, message: JsonObject) -> None:
        if "answer" in message:
            # What an answer leads to is not the files' mistake.
            answer = None
            try:
                answer = read_answer(message)
            except Exception as error:
                self._break(error)
            self._answer(message["answer"], answer)
            return
        try:
            if "runs" in message:
                self.runs = message["runs"]
            elif "room" in message:
                self._check_pace(time.monotonic())
                self._queue.pump()
                self._ring_bell()
            else:
                report(self, message)
        except Exception as error:
            self._break(error)

    def _answer(self, number: int, answer: WriterAnswer | None) -> None:
        on_answer, _ = self._asked.pop(number, (None, 0.0))
        if on_answer is not None:
            on_answer(answer)

    def _break(self, error: Exception) -> None:
        """A mistake of our own may cost the files, and not the job."""
        self._give_up(f"files: {type(error).__name__}: {error}")

    def _on_lost(self) -> None:
        """The writer is gone, though perhaps it was not asked to."""
        if self._given_up or (self._is_finishing and self._ring.tail == self._ring.head):
            return
        if self._forked >= _MOST_WRITERS:
            self._give_up(f"{self.directory or 'files'}: the process that writes files was ended again")
            return
        self._print_message("the process that writes files was ended, and is replaced")
        self._stalled_at = None
        self._moved_at = time.monotonic()
        self._fork(self._files.to_reopen())
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
        began_at = time.monotonic()
        while self._asked and not (self._given_up or self.is_stalled or is_hurried()):
            # Whoever has asked writes more when it has the answer: a short launch ends before its directory is made.
            self.tick(time.monotonic())
            if time.monotonic() - began_at >= _PATIENCE_S:
                break
            on_wait()
            poller.wait(0.1)
        if self._given_up:
            return
        self._is_finishing = True
        self.put(END, 0, b"", must=True)
        self._ring_bell()
        self._moved_at = began_at
        while self._helper is not None and (self.pids or self._helper.is_open) and not self._given_up:
            now = time.monotonic()
            self.tick(now)
            quiet_s = now - max(self._moved_at if self._ring.is_behind else began_at, began_at)
            if quiet_s >= _PATIENCE_S or (self.is_stalled and now - began_at >= STALL_S) or is_hurried():
                self._leave()
                return
            on_wait()
            poller.wait(0.1)

    def _leave(self) -> None:
        waiting = self._ring.head - self._ring.tail + self._queue.backlog_bytes
        pid = next(iter(self.pids), None)
        captured = self._inbox.waiting_bytes() if self._inbox is not None else 0
        self._print_message(
            f"{self._path()}: the file system does not answer; {waiting} bytes are not written yet"
            + (f", nor are files of captures (at most {captured >> 10} KiB)" if captured else "")
            + (f", {self._queue.backlog_bytes} of them never will be" if self._queue.backlog_bytes else "")
            + (f"; process {pid} goes on with the rest when it answers" if pid is not None else "")
        )


def missing_text(lost: Sequence[int]) -> str:
    """What the files miss once a file system answers again. ``lost``: how many bytes of each stream."""
    missing, streams = sum(lost), sum(map(bool, lost))
    if not missing:
        return "the files have everything"
    of = f"{streams} stream{'' if streams == 1 else 's'}"
    what = f"1 byte of {of} is" if missing == 1 else f"{missing} bytes of {of} are"
    return f"{what} missing in files, which note where"


def _mount_point(path: str) -> str:
    """`` at /lustre``: what a path is on, as far as /proc says."""
    mount = mount_of(path, own_mounts())
    return f" at {mount}" if mount else ""
