"""A regular file behind stdout or stderr: a process of its own writes it.

A write to a file may wait for ever (a file system that hangs), or fail for a while (a full disk, a quota), and the loop
waits for neither. So there is a piece of memory that is shared with a process that does nothing but carry its bytes
into the file: what the file system does not take now stays there, in order, and is tried again. The memory outlives the
process; should that be killed, another one goes on where it was.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import time
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.pidfd import open_pidfd
from saferun.linux.prctl import set_name

_QUEUE_BYTES = 1 << 20
# What is written at once. Of a process that is killed within a write, the next one writes as much a second time.
_WRITE_BYTES = 256 << 10
_BELLS_BYTES = 4096
_AGAIN_S = 0.5
# Without a supervisor, or with one that wants to end, a file that takes nothing is given up after so long.
_ALONE_S = 60.0
_MOST_PROCESSES = 3


class ByteQueue:
    """Bytes on their way from one process to another, in memory that both share. It never waits.

    Args:
        size_bytes: how many it holds.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        view = memoryview(mmap.mmap(-1, size_bytes + mmap.PAGESIZE))
        self._bytes = view[mmap.PAGESIZE :]
        # How many bytes have ever been put, and taken; each is changed by one side alone.
        self._put = view[:8].cast("Q")
        self._taken = view[8:16].cast("Q")

    def __len__(self) -> int:
        return self._put[0] - self._taken[0]

    def put(self, blocks: Sequence[bytes | memoryview]) -> int:
        """Put as many bytes as there is room for. Returns how many."""
        size, head = self._size, self._put[0]
        room = size - (head - self._taken[0])
        first = head
        for block in blocks:
            view = memoryview(block)[: room - (head - first)]
            while view:
                start = head % size
                piece = view[: size - start]
                self._bytes[start : start + len(piece)] = piece
                head += len(piece)
                view = view[len(piece) :]
        self._put[0] = head
        return head - first

    def peek(self, most_bytes: int) -> memoryview:
        """The next bytes, which stay where they are until ``drop``; not all where they are in two pieces."""
        tail = self._taken[0]
        start = tail % self._size
        return self._bytes[start : min(start + min(self._put[0] - tail, most_bytes), self._size)]

    def drop(self, count: int) -> None:
        """So many bytes have been dealt with."""
        self._taken[0] += count


class ConsoleFile:
    """The supervisor's end.

    Args:
        file_fd: the descriptor of the file; its open file is shared with whoever else has it.

    Raises:
        OSError: there can be no pipe, or no process.
    """

    def __init__(self, file_fd: int) -> None:
        self._file_fd = file_fd
        self._queue = ByteQueue(_QUEUE_BYTES)
        # What comes through the pipe is a bell: there are bytes in the queue. Its end is theirs.
        self._read_end, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self.pid = 0
        self._pidfd = -1
        self._started = 0
        try:
            self._start()
        except OSError:
            os.close(self._read_end)
            os.close(self._bell)
            raise

    def _start(self) -> None:
        read_end, write_end, file_fd, queue = self._read_end, self._bell, self._file_fd, self._queue

        def carry() -> None:
            set_name("sr-console")
            if write_end >= 0:
                os.close(write_end)
            close_all_but(read_end, file_fd, low=0)
            os.chdir("/")
            carry_bytes(queue, read_end, file_fd)

        self._started += 1
        self.pid = fork(carry)
        self._pidfd = open_pidfd(self.pid)

    @property
    def end_fd(self) -> int:
        """A descriptor that is readable when the process has ended; -1: there is none."""
        return self._pidfd

    @property
    def is_alive(self) -> bool:
        """Whether there is a process; one that has been reaped, or waits for that, is none."""
        if self._pidfd < 0:
            with suppress(OSError):
                os.waitpid(self.pid, os.WNOHANG)
            with suppress(OSError):
                os.kill(self.pid, 0)
                return True
            return False
        return not select.select([self._pidfd], [], [], 0)[0]

    def keep_alive(self) -> bool:
        """Start another process, if there is none. Returns whether there is one."""
        if self.is_alive:
            return True
        if self._started >= _MOST_PROCESSES:
            return False
        self._close_pidfd()
        try:
            self._start()
        except OSError:
            return False
        return True

    def write(self, blocks: Sequence[bytes | memoryview]) -> int:
        """Hand bytes over. Returns how many there was room for.

        Raises:
            BlockingIOError: there was none.
        """
        count = self._queue.put(blocks)
        with suppress(OSError):  # EAGAIN: there are bells enough
            os.write(self._bell, b"\0")
        if not count:
            raise BlockingIOError
        return count

    @property
    def waiting_bytes(self) -> int:
        """What has been handed over, and is not in the file."""
        return len(self._queue)

    def take_back(self) -> bytes:
        """The same bytes, where no process is left that could write them."""
        pieces = []
        while len(self._queue):
            pieces.append(bytes(self._queue.peek(_QUEUE_BYTES)))
            self._queue.drop(len(pieces[-1]))
        return b"".join(pieces)

    def finish(self) -> None:
        """No more bytes will come: the process ends when everything is in the file."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def close(self) -> None:
        """End the process, whatever it has not written; one that sleeps uninterruptibly is left."""
        self.finish()
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with suppress(OSError):
            os.waitpid(self.pid, os.WNOHANG)
        self._close_pidfd()
        os.close(self._read_end)

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def carry_bytes(queue: ByteQueue, bell: int, file_fd: int) -> None:
    """Carry a queue's bytes into a file until nobody puts any more and it is empty, whatever the file says meanwhile.

    Args:
        queue: of the bytes.
        bell: a pipe from which something comes when there are bytes; at its end no more will come.
        file_fd: the file.
    """
    supervisor_pid = os.getppid()
    alone_at: float | None = None
    has_ended = False
    while True:
        block = queue.peek(_WRITE_BYTES)
        if not block:
            if has_ended:
                return
            has_ended = not os.read(bell, _BELLS_BYTES)
            continue
        try:
            queue.drop(os.write(file_fd, block))
        except OSError as error:
            if error.errno in {errno.EBADF, errno.EPIPE}:
                return
            # No room, no quota, an error of the device: there may be room later.
            now = time.monotonic()
            if alone_at is None and os.getppid() != supervisor_pid:
                alone_at = now
            if alone_at is not None and now - alone_at > _ALONE_S:
                return
            time.sleep(_AGAIN_S)
