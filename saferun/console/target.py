"""Where the console's bytes go: saferun's own stdout and stderr, never waited for."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence

from saferun.console.console_file import ConsoleFile

# What may wait for a slow reader; beyond it whole lines are skipped (they stand in the run directory) or, where no
# files are kept, the ranks' streams are not read for a while.
MOST_WAITING_BYTES = 8 << 20
_ONE_WRITE_BYTES = 1 << 20
_MOST_BLOCKS = 256
_PIPE_BUF = 4096
# What says so, or says nothing, knows neither colours nor cursor movements (terminfo(5)): it is written like a file.
_DUMB = frozenset({None, "", "dumb"})
# A reader that is gone stays gone; a file that takes nothing now may take something later.
_GONE = frozenset({errno.EPIPE, errno.EBADF, errno.EINVAL})
# What a pipe or a socket says that is there, while the kernel, or the memory cgroup, has no room for its bytes.
_SHORT = frozenset({errno.ENOMEM, errno.ENOBUFS})
_AGAIN_S = 1.0
# A process that writes a file is asked so often whether it has room.
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.256
# No file is slow as a reader may be: one that takes nothing for so long has no room, or its file system hangs.
_STALLED_S = 5.0
# A file that takes something all the while is waited for, as a disk is: only one that has taken nothing for so long
# misses lines that are kept elsewhere.
_SLOW_S = 0.5
_FILE_WAITING_BYTES = 1 << 20


class Target:
    """One open file behind stdout or stderr (or both), written without ever blocking.

    Args:
        fd: the descriptor; left as it is, since others share its open file.
        skipping: whether lines may be skipped when the reader is too slow.
        where: tells where skipped lines can be read, for the note about them.
        carries: whether a regular file is written by a process of its own, so that nothing here can hang on it.

    Attributes:
        file: that process.
        is_file: whether it is a regular file.
        retry_at: when what took nothing is tried again, in monotonic seconds; None: when there is room.
    """

    def __init__(self, fd: int, *, skipping: bool, where: Callable[[], str], carries: bool = False) -> None:
        mode = os.fstat(fd).st_mode
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM") not in _DUMB and _is_own_terminal(fd)
        self.is_broken = False
        self.fd = fd
        self.skipping = skipping
        self._where = where
        self._waiting: deque[bytes | memoryview] = deque()
        self._waiting_bytes = 0
        self._skipped_lines = 0
        # Brings a note of skipped lines into the form in which it is queued.
        self.shape_note: Callable[[bytes], bytes] = bytes
        self._write: Callable[[Sequence[bytes | memoryview]], int]
        self.file: ConsoleFile | None = None
        self.retry_at: float | None = None
        self.is_file = stat.S_ISREG(mode)
        self._pause_s = _PAUSE_S
        self._moved_at = 0.0  # when a file last took something, or nothing waited for it
        self._write = self._write_plainly
        if not self.is_file:
            self._write = self._choose(mode)
        elif carries:
            self._carry()

    # ----------------------------------------------------------------------------------------------------------------

    def has_room(self, size_bytes: int) -> bool:
        """Whether lines of this size would be queued, or skipped because the reader is too slow.

        A note of what was skipped before is queued first, when there is room again.
        """
        if self.is_broken:
            return False
        may_skip = self._may_skip
        if self._skipped_lines and (not may_skip or self._waiting_bytes < MOST_WAITING_BYTES // 2):
            self._queue_note()
        if not may_skip:
            return True
        # However large, a chunk finds room where nothing waits: then the reader has not been slow.
        return not self._waiting or (not self._skipped_lines and self._waiting_bytes + size_bytes <= MOST_WAITING_BYTES)

    def put(self, text: bytes | memoryview) -> None:
        """Queue bytes, whether there is room or not. Nothing is written before ``flush``."""
        if text and not self.is_broken:
            if self.is_file and not self._waiting:
                self._moved_at = time.monotonic()
            self._waiting.append(text)
            self._waiting_bytes += len(text)

    def skip(self, lines: int) -> None:
        """Count lines that are not shown because there was no room."""
        if not self.is_broken:
            self._skipped_lines += lines

    @property
    def is_full(self) -> bool:
        """Whether the streams that lead here should not be read for now."""
        if self.is_broken or self._waiting_bytes <= (_FILE_WAITING_BYTES if self.is_file else MOST_WAITING_BYTES):
            return False
        return not self._may_skip or self._waiting_bytes > 2 * MOST_WAITING_BYTES

    @property
    def _may_skip(self) -> bool:
        """Whether a line for which there is no room is left out, rather than that its rank waits."""
        if self.is_file:
            return self.stalled_s >= (_SLOW_S if self.skipping else _STALLED_S)
        return self.skipping

    @property
    def stalled_s(self) -> float:
        """For how long a file has taken nothing of what waits for it."""
        if not self.is_file or not self._waiting:
            return 0.0
        return time.monotonic() - self._moved_at

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting and not self._skipped_lines

    @property
    def waits_for_room(self) -> bool:
        """Whether it is to be tried again when its descriptor takes bytes, rather than by time."""
        return not self.is_file and self.retry_at is None and not self.is_empty

    def flush(self) -> bool:
        """Write as much as goes without waiting. Returns whether something was written."""
        wrote = False
        if self.retry_at is not None:
            if time.monotonic() < self.retry_at:
                return False
            self.retry_at = None
        while not self.is_broken:
            if not self._waiting:
                if not self._skipped_lines:
                    break
                self._queue_note()
            try:
                count = self._write(self._next_blocks())
            except OSError as error:
                self._on_error(error)
                break
            wrote = wrote or count > 0
            self._take(count)
            self._pause_s = _PAUSE_S
            if self.is_file:
                self._moved_at = time.monotonic()
        return wrote

    def _next_blocks(self) -> list[bytes | memoryview]:
        """What is written at once; it still waits until it has been taken."""
        blocks: list[bytes | memoryview] = []
        size = 0
        for block in self._waiting:
            blocks.append(block)
            size += len(block)
            if size >= _ONE_WRITE_BYTES or len(blocks) >= _MOST_BLOCKS:
                break
        return blocks

    def _take(self, count: int) -> None:
        """So many bytes have been written."""
        self._waiting_bytes -= count
        while count:
            block = self._waiting.popleft()
            if len(block) > count:
                self._waiting.appendleft(memoryview(block)[count:])
                return
            count -= len(block)

    def _on_error(self, error: OSError) -> None:
        """What comes next could not be written now, or cannot be written at all."""
        if isinstance(error, BlockingIOError):
            if self.file is None:
                return
            if self.file.keep_alive():
                # It writes while something else is done; the longer it has taken nothing, the less often it is asked.
                self.retry_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            else:
                self._stop_carrying()
        elif error.errno in _SHORT or (self.is_file and error.errno not in _GONE):
            # No memory, no room, no quota, an error of the device: everything is kept, and tried again.
            self.retry_at = time.monotonic() + _AGAIN_S
        else:
            # The reader is gone, or the terminal is. The ranks do not care; the files go on.
            self.is_broken = True
            self._waiting.clear()
            self._waiting_bytes = 0
            self._skipped_lines = 0

    def _queue_note(self) -> None:
        count, self._skipped_lines = self._skipped_lines, 0
        why = "this file could not be written for a while" if self.is_file else "this output is read too slowly"
        note = f"saferun: {why}: {count} lines skipped here; {self._where()}\n"
        self.put(self.shape_note(note.encode(errors="backslashreplace")))

    # ----------------------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        """Have another process write the file. Without one it is written from here."""
        try:
            self.file = ConsoleFile(self.fd)
        except OSError:
            return
        self._write = self.file.write

    def _stop_carrying(self) -> None:
        """Nobody can be had who writes the file: it is written from here."""
        if self.file is not None:
            rest = self.file.take_back()
            self._waiting.appendleft(rest)
            self._waiting_bytes += len(rest)
            self.file.close()
            self.file = None
            self._write = self._write_plainly

    @property
    def unwritten_bytes(self) -> int:
        """What another process has been given to write and has not written."""
        return self.file.waiting_bytes if self.file is not None else 0

    def finish(self) -> None:
        """Nothing will come any more. Where another process writes, it ends when it has written everything."""
        if self.file is not None:
            self.file.finish()

    @property
    def is_finished(self) -> bool:
        """Whether nobody is writing any more."""
        file = self.file
        return file is None or not (file.is_alive or (file.waiting_bytes and file.keep_alive()))

    def close(self) -> None:
        """Nothing that has not been written will be."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def _choose(self, mode: int) -> Callable[[Sequence[bytes | memoryview]], int]:
        """A way to write that returns instead of waiting.

        Setting O_NONBLOCK on the descriptor itself would change it for every process that shares it (the shell, the
        other end of ``2>&1``), so the file is opened once more.
        """
        if stat.S_ISSOCK(mode):
            import socket

            sock = socket.socket(fileno=os.dup(self.fd))
            return lambda blocks: sock.sendmsg(blocks, (), socket.MSG_DONTWAIT)
        try:
            self.fd = os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return self._write_carefully
        return self._write_plainly

    def _write_plainly(self, blocks: Sequence[bytes | memoryview]) -> int:
        return os.writev(self.fd, blocks)

    def _write_carefully(self, blocks: Sequence[bytes | memoryview]) -> int:
        """For a pipe or terminal of another user, which cannot be opened again: small writes when there is room."""
        import select

        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self.fd, b"".join(blocks)[:_PIPE_BUF])


def _is_own_terminal(fd: int) -> bool:
    """Whether a terminal is the one that this process was started on.

    Open MPI's daemons give their tasks pseudo-terminals that nobody looks at: what comes out of them goes to a pipe or
    a file, with that of all other tasks.
    """
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True
