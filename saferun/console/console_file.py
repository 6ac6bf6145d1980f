"""A regular file behind stdout or stderr, written by a separate process.

A write to a file may block forever (a hung file system) or fail for a while (a full disk, a quota); the loop must wait
for neither. So a separate process copies bytes from shared memory into the file: what the file system does not accept
now stays there, in order, and is retried. The memory outlives the process; if that is killed, another one continues
where it stopped.
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
# The most that one write takes. If a process is killed within a write, the next one may write as much a second time.
_WRITE_BYTES = 256 << 10
_BELLS_BYTES = 4096
_AGAIN_S = 0.5
# Without a supervisor, a file that accepts nothing is given up after this time.
_ALONE_S = 60.0
_MOST_PROCESSES = 3


class ByteQueue:
    """A byte queue between two processes, in shared memory. It never blocks.

    Args:
        size_bytes: its capacity.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        view = memoryview(mmap.mmap(-1, size_bytes + mmap.PAGESIZE))
        self._bytes = view[mmap.PAGESIZE :]
        # Total bytes put and taken; each counter has one writer.
        self._put = view[:8].cast("Q")
        self._taken = view[8:16].cast("Q")

    def __len__(self) -> int:
        return self._put[0] - self._taken[0]

    def put(self, blocks: Sequence[bytes | memoryview]) -> int:
        """Put as many bytes as fit. Returns how many."""
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
        """The next bytes, which stay in the queue until ``drop``; only the first part if they wrap around."""
        tail = self._taken[0]
        start = tail % self._size
        return self._bytes[start : min(start + min(self._put[0] - tail, most_bytes), self._size)]

    def drop(self, count: int) -> None:
        """Remove ``count`` bytes."""
        self._taken[0] += count


class ConsoleFile:
    """The supervisor's end.

    Args:
        file_fd: the descriptor of the file; other processes may share its open file.

    Raises:
        OSError: no pipe or no process can be made.
    """

    def __init__(self, file_fd: int) -> None:
        self._file_fd = file_fd
        self._queue = ByteQueue(_QUEUE_BYTES)
        # A byte in the pipe means that the queue has bytes; the pipe's end, that no more will come.
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
        """A descriptor that becomes readable when the process exits; -1: there is none."""
        return self._pidfd

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; a zombie does not count."""
        if self._pidfd < 0:
            with suppress(OSError):
                os.waitpid(self.pid, os.WNOHANG)
            with suppress(OSError):
                os.kill(self.pid, 0)
                return True
            return False
        poll = select.poll()  # `select` takes no descriptor beyond 1023
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def keep_alive(self) -> bool:
        """Start another process if none runs. Returns whether one runs."""
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
        """Queue bytes. Returns how many fitted.

        Raises:
            BlockingIOError: the queue is full.
        """
        count = self._queue.put(blocks)
        with suppress(OSError):  # EAGAIN: the pipe has notifications enough
            os.write(self._bell, b"\0")
        if not count:
            raise BlockingIOError
        return count

    @property
    def waiting_bytes(self) -> int:
        """How many queued bytes are not in the file yet."""
        return len(self._queue)

    def take_back(self) -> bytes:
        """Take back these bytes, if no process is left that could write them."""
        pieces = []
        while len(self._queue):
            pieces.append(bytes(self._queue.peek(_QUEUE_BYTES)))
            self._queue.drop(len(pieces[-1]))
        return b"".join(pieces)

    def finish(self) -> None:
        """No more bytes will come: the process exits when everything is in the file."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def close(self) -> None:
        """Kill the process, whatever it has not written; one in uninterruptible sleep is left behind."""
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


def _is_at_end(bell: int) -> bool:
    """Whether no more bytes will come, though some wait."""
    poll = select.poll()
    poll.register(bell, 0)
    return bool(poll.poll(0))


def carry_bytes(queue: ByteQueue, bell: int, file_fd: int) -> None:
    """Copy a queue's bytes into a file until no more will come and it is empty, despite errors of the file.

    A file that is as large as it may be (``ulimit -f``) is given up at the end: unlike a disk, a limit has no more room
    later.

    Args:
        queue: the bytes.
        bell: a pipe that is readable when there are bytes; at its end no more will come.
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
            if error.errno in {errno.EBADF, errno.EPIPE} or (error.errno == errno.EFBIG and _is_at_end(bell)):
                return
            # No space, no quota, a device error: a later attempt may succeed.
            now = time.monotonic()
            if alone_at is None and os.getppid() != supervisor_pid:
                alone_at = now
            if alone_at is not None and now - alone_at > _ALONE_S:
                return
            time.sleep(_AGAIN_S)
