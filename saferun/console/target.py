"""saferun's own stdout and stderr, written without ever blocking."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence

from saferun.console.console_file import ConsoleFile
from saferun.linux.bare_socket import MSG_DONTWAIT, Socket

# The most that is queued for a reader; beyond it the ranks' streams are not read until it has read some of it. If it is
# slow and the run directory has the lines, these are skipped instead.
MOST_WAITING_BYTES = 8 << 20
# A reader is slow if it has read less than this for so long while the most waited. `tee` reads a hundred times as much,
# and is not slow because a shared machine or a busy disk stops it for a second.
_SLOW_BYTES_A_S = 1 << 20
JUDGED_AFTER_S = 2.0
_LATE_S = 1.0
_ONE_WRITE_BYTES = 1 << 20
# A socket of messages that refuses even this is given up.
_LEAST_WRITE_BYTES = 4 << 10
_MOST_BLOCKS = 256
_PIPE_BUF = 4096
_LINE_END = ord("\n")
# Values of TERM without colours and cursor movements (terminfo(5)): such a terminal is written like a file.
_DUMB = frozenset({None, "", "dumb"})
# A reader that has gone stays so; a file that accepts nothing now may accept something later.
_GONE = frozenset({errno.EPIPE, errno.EBADF, errno.EINVAL})
# What a device answers that takes no bytes, as /dev/full does: nothing is written to it any more. EIO of a terminal
# means that it has gone, as a reader does.
_REFUSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
# The reader exists, but the kernel or the memory cgroup has no room for the bytes.
_SHORT = frozenset({errno.ENOMEM, errno.ENOBUFS})
_AGAIN_S = 1.0
# How often a pipe that has a name is searched for a reader that has come back.
_RETURN_S = 3.0
# How often the process that writes a file is tried again when it has no room.
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.256
# Files are not as slow as readers: one that accepts nothing for this long is full, or its file system hangs.
_STALLED_S = 5.0
# A file that accepts something is waited for, as a disk is: only if it has accepted nothing for this long are lines
# skipped that are kept elsewhere.
_SLOW_S = 0.5
_FILE_WAITING_BYTES = 1 << 20


class _Note(bytes):
    """A note of skipped lines, which remembers how many that are until it has been written."""

    lines = 0


class Target:
    """One open file behind stdout or stderr (or both), written without ever blocking.

    Args:
        fd: the descriptor; not changed, since other processes share its open file.
        skipping: whether lines may be skipped when the reader is too slow.
        where: returns where skipped lines can be read, for the note about them.
        carries: whether a regular file is written by a separate process, so that nothing here can hang on it.

    Attributes:
        file: that process.
        is_file: whether it is a regular file.
        waiting_bytes: how much is queued and has not been written.
        may_return: whether its reader may be started again (a pipe that has a name): what it misses is counted.
        is_away: whether it has gone.
        refusal: why a device took no more bytes: what it misses is counted; empty: it did not refuse any.
        retry_at: when to try a full target again, in monotonic seconds; None: when it has room.
    """

    def __init__(self, fd: int, *, skipping: bool, where: Callable[[], str], carries: bool = False) -> None:
        mode = os.fstat(fd).st_mode
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM") not in _DUMB and _is_own_terminal(fd)
        self.is_broken = False
        self.refusal = ""
        self._is_device = stat.S_ISCHR(mode) and not os.isatty(fd)
        self.fd = fd
        self.skipping = skipping
        self.skips_teed = False  # the same for streams of which log files of -t have a copy
        self._where = where
        self._waiting: deque[bytes | memoryview] = deque()
        self.waiting_bytes = 0
        self._skipped_lines = 0
        # Formats a note of skipped lines before it is queued.
        self.shape_note: Callable[[bytes], bytes] = bytes
        self._write: Callable[[Sequence[bytes | memoryview]], int]
        self.file: ConsoleFile | None = None
        self.retry_at: float | None = None
        self.is_away = False
        self.may_return = stat.S_ISFIFO(mode) and _has_name(fd)
        self._was_away = False  # while lines were skipped
        self._is_within_line = False  # the last byte that was written ends no line
        self.is_file = stat.S_ISREG(mode)
        self._one_write_bytes = _ONE_WRITE_BYTES
        self._pause_s = _PAUSE_S
        self._moved_at = 0.0  # when a file last accepted something, or nothing waited for it
        self._is_slow = False
        self._judged_from: float | None = None  # since when what a reader reads is counted; None: it keeps up
        self._read_bytes = 0  # since then
        self._write = self._write_plainly
        if not self.is_file:
            self._write = self._choose(mode)
        elif carries:
            self._carry()

    # ----------------------------------------------------------------------------------------------------------------

    def has_room(self, size_bytes: int, *, is_teed: bool = False) -> bool:
        """Whether lines of this size are to be queued; if not, they are skipped because the reader is too slow.

        When there is room again, a note about skipped lines is queued first.
        """
        if self.is_broken or self.is_away:
            return False
        may_skip = self._may_skip(is_teed=is_teed)
        skips_any = may_skip or self._may_skip(is_teed=True)
        if self._skipped_lines and (not skips_any or self.waiting_bytes < MOST_WAITING_BYTES // 2):
            self._queue_note()
        if not may_skip:
            return True
        # If nothing waits, a chunk of any size has room: then the reader has not been slow.
        return not self._waiting or (not self._skipped_lines and self.waiting_bytes + size_bytes <= MOST_WAITING_BYTES)

    def put(self, text: bytes | memoryview) -> None:
        """Queue bytes, whether there is room or not. Nothing is written before ``flush``."""
        if self.is_away or self.refusal:
            self.skip(bytes(text).count(b"\n"))
        elif text and not self.is_broken:
            if self.is_file and not self._waiting:
                self._moved_at = time.monotonic()
            self._waiting.append(text)
            self.waiting_bytes += len(text)
            if self._judged_from is None and self.waiting_bytes > MOST_WAITING_BYTES:
                self._judged_from, self._read_bytes = time.monotonic(), 0

    def skip(self, lines: int) -> None:
        """Count lines that are skipped because there was no room."""
        if not self.is_broken or self.refusal:
            self._skipped_lines += lines

    @property
    def is_full(self) -> bool:
        """Whether to pause reading the streams that lead here."""
        return self.is_full_for(is_teed=False)

    def is_full_for(self, *, is_teed: bool) -> bool:
        """Whether to pause reading a stream that leads here; ``is_teed``: a log file of ``-t`` has a copy."""
        if self.is_broken or self.waiting_bytes <= (_FILE_WAITING_BYTES if self.is_file else MOST_WAITING_BYTES):
            return False
        # Twice as much can only have come at once. A file takes it sooner or later; a slow reader may never read it.
        return not self._may_skip(is_teed=is_teed) or (self.is_file and self.waiting_bytes > 2 * MOST_WAITING_BYTES)

    def _may_skip(self, *, is_teed: bool) -> bool:
        """Whether lines without room are skipped; if not, their ranks wait."""
        is_kept = self.skipping or (is_teed and self.skips_teed)
        if self.is_file:
            return self.stalled_s >= (_SLOW_S if is_kept else _STALLED_S)
        if is_kept:
            self.judge()
        return is_kept and self._is_slow

    def judge(self) -> None:
        """Find out whether the reader is slow: what it has read while it had more to read than may wait."""
        now = time.monotonic()
        if self._judged_from is None or now < self._judged_from + JUDGED_AFTER_S:
            return
        # If saferun itself was stopped meanwhile, there was little to read.
        if now <= self._judged_from + JUDGED_AFTER_S + _LATE_S:
            self._is_slow = self._read_bytes <= (now - self._judged_from) * _SLOW_BYTES_A_S
        self._judged_from, self._read_bytes = now, 0

    @property
    def judged_at(self) -> float | None:
        """When to find out whether the reader is slow, in monotonic seconds; None: it keeps up, or is waited for."""
        if self.is_file or not (self.skipping or self.skips_teed) or self._judged_from is None:
            return None
        return self._judged_from + JUDGED_AFTER_S

    @property
    def stalled_s(self) -> float:
        """For how long a file has accepted nothing of what waits for it."""
        if not self.is_file or not self._waiting:
            return 0.0
        return time.monotonic() - self._moved_at

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting and (not self._skipped_lines or self.is_away or self.is_broken)

    @property
    def waits_for_room(self) -> bool:
        """Whether to try again when its descriptor becomes writable, rather than after a time."""
        return not self.is_file and self.retry_at is None and not self.is_empty

    def flush(self) -> bool:
        """Write as much as possible without waiting. Returns whether anything was written."""
        wrote = False
        if self.retry_at is not None:
            if time.monotonic() < self.retry_at:
                return False
            self.retry_at = time.monotonic() + _RETURN_S if self.is_away and not self._has_reader() else None
            self.is_away = self.retry_at is not None
        while not self.is_broken and not self.is_away:
            if not self._waiting:
                if not self._skipped_lines:
                    break
                self._queue_note()
            try:
                count = self._write(self._next_blocks())
            except OSError as error:
                if error.errno == errno.EMSGSIZE and self._one_write_bytes > _LEAST_WRITE_BYTES:
                    # A socket of messages (SOCK_SEQPACKET, SOCK_DGRAM) takes no larger ones.
                    self._one_write_bytes //= 2
                    continue
                self._on_error(error)
                break
            wrote = wrote or count > 0
            self._take(count)
            self._pause_s = _PAUSE_S
            if self.is_file:
                self._moved_at = time.monotonic()
        return wrote

    def _next_blocks(self) -> list[bytes | memoryview]:
        """The blocks for one write; they stay queued until they are written."""
        blocks: list[bytes | memoryview] = []
        size = 0
        for block in self._waiting:
            blocks.append(block)
            size += len(block)
            if size >= self._one_write_bytes or len(blocks) >= _MOST_BLOCKS:
                break
        if size > self._one_write_bytes < _ONE_WRITE_BYTES:
            blocks[-1] = memoryview(blocks[-1])[: self._one_write_bytes - size]
        return blocks

    def _take(self, count: int) -> None:
        """Remove ``count`` written bytes from the queue."""
        self.waiting_bytes -= count
        self._read_bytes += count
        while count:
            block = self._waiting.popleft()
            self._is_within_line = block[min(count, len(block)) - 1] != _LINE_END
            if len(block) > count:
                self._waiting.appendleft(memoryview(block)[count:])
                break
            count -= len(block)
        if not self._waiting:
            self._is_slow = False
        if not self._is_slow and self.waiting_bytes <= MOST_WAITING_BYTES // 2:
            self._judged_from = None

    def _on_error(self, error: OSError) -> None:
        """Handle a failed write: retry later, or give up on a reader that has gone."""
        if isinstance(error, BlockingIOError):
            if self.file is None:
                return
            if self.file.keep_alive():
                # It writes meanwhile; the longer it accepts nothing, the less often it is tried.
                self.retry_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            else:
                self._stop_carrying()
        elif error.errno in _SHORT or (self.is_file and error.errno not in _GONE):
            # No memory, no space, no quota, a device error: everything is kept and tried again.
            self.retry_at = time.monotonic() + _AGAIN_S
        else:
            # The reader or the terminal has gone. Ranks and files are not affected.
            if error.errno == errno.EPIPE and self.may_return:
                self._skipped_lines += self._waiting_lines
                self.is_away = self._was_away = True
                self.retry_at = time.monotonic() + _RETURN_S
            else:
                self.is_broken = True
                if self._is_device and error.errno in _REFUSING:
                    self.refusal = error.strerror or str(error)
                self._skipped_lines = self._skipped_lines + self._waiting_lines if self.refusal else 0
            self._waiting.clear()
            self.waiting_bytes = 0
            self._judged_from = None

    def _has_reader(self) -> bool:
        """Whether a pipe has one (poll(2): POLLERR)."""
        import select

        poll = select.poll()
        poll.register(self.fd, 0)
        return not poll.poll(0)

    def _queue_note(self) -> None:
        count, self._skipped_lines = self._skipped_lines, 0
        why = "this file could not be written for a while" if self.is_file else "this output is read too slowly"
        begin = b""
        if self._was_away:
            why, self._was_away = "this pipe had no reader for a while", False
            # The pipe may still have the first half of a line, whose rest is among those skipped.
            begin = b"\n" if self._is_within_line else b""
        text = f"saferun: {why}: {count} lines skipped here; {self._where()}\n"
        note = _Note(begin + self.shape_note(text.encode(errors="backslashreplace")))
        note.lines = count
        self.put(note)

    # ----------------------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        """Have another process write the file; if there can be none, write it from here."""
        try:
            self.file = ConsoleFile(self.fd)
        except OSError:
            return
        self._write = self.file.write

    def _stop_carrying(self) -> None:
        """No process can be started to write the file: write it from here."""
        if self.file is not None:
            rest = self.file.take_back()
            if rest:
                self._waiting.appendleft(rest)
                self.waiting_bytes += len(rest)
            self.file.close()
            self.file = None
            self._write = self._write_plainly

    @property
    def is_awaited(self) -> bool:
        """Whether a reader that exists has not read what is nowhere else."""
        return not (self.is_empty or self.is_file or self.skipping)

    @property
    def _waiting_lines(self) -> int:
        """How many lines wait, with those of which a note waits."""
        wholes = [(block, block.obj if isinstance(block, memoryview) else block) for block in self._waiting]
        return sum(whole.lines if isinstance(whole, _Note) else bytes(block).count(b"\n") for block, whole in wholes)

    @property
    def unread_text(self) -> str:
        """What a slow reader has not read, or a file not taken, and where it is; empty: nothing."""
        if self.is_file:
            count, things = self.waiting_bytes + self.unwritten_bytes, "bytes"
        else:
            count, things = self._skipped_lines + self._waiting_lines, "lines"
        return f"{count} {things} are missing there; {self._where()}" if count else ""

    @property
    def unwritten_bytes(self) -> int:
        """How many bytes another process has been given and has not written."""
        return self.file.waiting_bytes if self.file is not None else 0

    def finish(self) -> None:
        """No more output will come. A process that writes the file exits when it has written everything."""
        if self.file is not None:
            self.file.finish()

    @property
    def is_finished(self) -> bool:
        """Whether no process is writing any more."""
        file = self.file
        return file is None or not (file.is_alive or (file.waiting_bytes and file.keep_alive()))

    def close(self) -> None:
        """Drop what has not been written."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _choose(self, mode: int) -> Callable[[Sequence[bytes | memoryview]], int]:
        """A way to write that never blocks.

        Setting O_NONBLOCK on the descriptor itself would change it for every process that shares it (the shell, the
        other end of ``2>&1``), so the file is opened again.
        """
        if stat.S_ISSOCK(mode):
            sock = Socket(fileno=os.dup(self.fd))
            return lambda blocks: sock.sendmsg(blocks, (), MSG_DONTWAIT)
        try:
            self.fd = os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            if (terminal := _open_own_terminal(self.fd)) < 0:
                return self._write_carefully
            self.fd = terminal
        return self._write_plainly

    def _write_plainly(self, blocks: Sequence[bytes | memoryview]) -> int:
        return os.writev(self.fd, blocks)

    def _write_carefully(self, blocks: Sequence[bytes | memoryview]) -> int:
        """For what cannot be opened again, as a pipe of another user: small writes when it is writable.

        A terminal is writable while it has room for a byte, so that only the own one is never waited for.
        """
        import select

        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        piece = b""
        for block in blocks:
            piece += bytes(block[: _PIPE_BUF - len(piece)])
            if len(piece) == _PIPE_BUF:
                break
        return os.write(self.fd, piece)


def _has_name(fd: int) -> bool:
    """Whether a pipe was opened by its name (fifo(7)), as its next reader can do."""
    try:
        return not os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    except OSError:
        return False


def _is_own_terminal(fd: int) -> bool:
    """Whether a terminal is the one that this process was started on.

    Open MPI's daemons give their tasks pseudo-terminals that no user sees: the output goes to a pipe or a file,
    together with that of all other tasks.
    """
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True


def _open_own_terminal(fd: int) -> int:
    """Open the terminal that this process was started on, if this is it; after ``su`` it is another user's. -1: no."""
    if not _is_own_terminal(fd):
        return -1
    from saferun.linux.streams import open_own_terminal

    try:
        return open_own_terminal()
    except OSError:
        return -1
