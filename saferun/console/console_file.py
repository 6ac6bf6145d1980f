"""A regular file behind stdout or stderr: a process of its own writes it.

A write to a file may wait for ever (a file system that hangs), or fail for a while (a full disk, a quota), and the loop
waits for neither. So there is a pipe to a process that does nothing but carry its bytes into the file: what the file
system does not take now stays in the pipe, in order, and is tried again. The pipe outlives the process; should that be
killed, another one goes on where it was.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import time

from saferun.errors import suppress
from saferun.host.children import fork, open_pidfd
from saferun.host.prctl import set_name
from saferun.linux.descriptors import close_all_but

__all__ = ["ConsoleFile"]

_PIPE_BYTES = 1 << 20
_COPY_BYTES = 64 << 10
_AGAIN_S = 0.5
# Without a supervisor, or with one that wants to end, a file that takes nothing is given up after so long.
_ALONE_S = 60.0
_FIONREAD = 0x541B
_MOST_PROCESSES = 3


class ConsoleFile:
    """The supervisor's end. ``fd`` is the pipe to write to, without waiting.

    Args:
        file_fd: the descriptor of the file; its open file is shared with whoever else has it.

    Raises:
        OSError: there can be no pipe, or no process.
    """

    def __init__(self, file_fd: int) -> None:
        self._file_fd = file_fd
        self._read_end, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        with suppress(OSError):  # EPERM: too many large pipes of this user
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.pid = 0
        self._pidfd = -1
        self._started = 0
        try:
            self._start()
        except OSError:
            os.close(self._read_end)
            os.close(self.fd)
            raise

    def _start(self) -> None:
        read_end, write_end, file_fd = self._read_end, self.fd, self._file_fd

        def carry() -> None:
            set_name("sr-console")
            if write_end >= 0:
                os.close(write_end)
            close_all_but(read_end, file_fd, low=0)
            os.chdir("/")
            carry_bytes(read_end, file_fd)

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

    @property
    def waiting_bytes(self) -> int:
        """What is in the pipe, and not in the file."""
        import struct

        left = fcntl.ioctl(self._read_end, _FIONREAD, b"\0" * 4)
        return int(struct.unpack("i", left)[0])

    def finish(self) -> None:
        """No more bytes will come: the process ends when everything is in the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

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


def carry_bytes(read_end: int, file_fd: int) -> None:
    """Carry a pipe's bytes into a file until the pipe has no writer and is empty, whatever the file says meanwhile.

    Args:
        read_end: of the pipe.
        file_fd: the file.
    """
    supervisor_pid = os.getppid()
    splices = hasattr(os, "splice")
    alone_at: float | None = None
    rest = b""
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    while True:
        try:
            if splices:
                # Not by waiting in splice(2): it would keep the file system from being frozen, for a snapshot, say.
                poll.poll()
                # Nothing is lost where it fails: what the file has not taken stays in the pipe.
                count = os.splice(read_end, file_fd, _PIPE_BYTES, flags=os.SPLICE_F_NONBLOCK)
            else:
                rest = rest or os.read(read_end, _COPY_BYTES)
                count = os.write(file_fd, rest) if rest else 0
                rest = rest[count:]
        except BlockingIOError:
            continue
        except OSError as error:
            if splices and error.errno in {errno.EINVAL, errno.ENOSYS, errno.EPERM}:
                splices = False  # a file that is appended to, or a file system that cannot; see splice(2)
                continue
            if error.errno in {errno.EBADF, errno.EPIPE}:
                return
            # No room, no quota, an error of the device: there may be room later.
            now = time.monotonic()
            if alone_at is None and os.getppid() != supervisor_pid:
                alone_at = now
            if alone_at is not None and now - alone_at > _ALONE_S:
                return
            time.sleep(_AGAIN_S)
            continue
        if count == 0 and not rest:
            return
