"""Pipes and pseudo-terminals for the ranks' streams."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct

from saferun.errors import suppress
from saferun.linux.descriptors import close_on_error, open_null

_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032
_LARGEST_PIPE_BYTES = 1 << 20

_USER_LIMIT = "/proc/sys/fs/pipe-user-pages-soft"
_USUAL_LIMIT_BYTES = 64 << 20
# Of the limit: what the pipes may take as they are opened, and what they may grow by.
_OPENED_SHARE, _GROWTH_SHARE = 4, 8
_MOST_GROWTH_BYTES = 8 << 20
_GROWTH_FACTOR = 4
_SMALLEST_PIPE_BYTES, _USUAL_PIPE_BYTES = 16 << 10, 64 << 10


class RankPipes:
    """The pipes of an attempt's ranks, which take only a small share of what the user may have in pipes.

    The kernel counts the pipes of all processes of a user. Beyond a limit each new one holds 8 KiB, and any program of
    the user that fills one before it reads it waits forever. So a pipe becomes larger only once its rank has filled it.

    Args:
        streams: how many pipes the attempt opens.

    Source: pipe(7), /proc/sys/fs/pipe-user-pages-soft.
    """

    def __init__(self, streams: int) -> None:
        limit = _user_limit_bytes()
        self._growth_bytes = min(_MOST_GROWTH_BYTES, limit // _GROWTH_SHARE)
        share = max(limit // _OPENED_SHARE // max(streams, 1), _SMALLEST_PIPE_BYTES)
        self._most_at_first = 1 << (share.bit_length() - 1)  # the kernel rounds up to a power of two

    def open(self) -> tuple[int, int]:
        """A pipe for a rank's stream: (reading end, non-blocking; writing end)."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        with suppress(OSError):
            if fcntl.fcntl(write_end, _F_GETPIPE_SZ) > self._most_at_first:
                fcntl.fcntl(write_end, _F_SETPIPE_SZ, self._most_at_first)
        return read_end, write_end

    def size_of(self, fd: int) -> int:
        """How many bytes a stream holds; of a pseudo-terminal, what a pipe usually does."""
        try:
            return fcntl.fcntl(fd, _F_GETPIPE_SZ)
        except OSError:
            return _USUAL_PIPE_BYTES

    def enlarge(self, fd: int) -> int:
        """Give a loud rank a larger pipe, as far as there is room: fewer wake-ups, and it can write while it is read.

        Returns:
            How many bytes the pipe holds now; 0: it is none.
        """
        size = 0
        with suppress(OSError):  # EPERM: beyond a limit of this user
            size = fcntl.fcntl(fd, _F_GETPIPE_SZ)
            wanted = min(size * _GROWTH_FACTOR, _LARGEST_PIPE_BYTES)
            if size < wanted <= size + self._growth_bytes:
                enlarged = fcntl.fcntl(fd, _F_SETPIPE_SZ, wanted)
                self._growth_bytes -= enlarged - size
                return enlarged
        return size


def _user_limit_bytes() -> int:
    pages = 0
    with suppress(OSError, ValueError), open(_USER_LIMIT, "rb") as file:
        pages = int(file.read())
    return pages * os.sysconf("SC_PAGE_SIZE") or _USUAL_LIMIT_BYTES  # 0: there is none


def has_writers(fd: int) -> bool:
    """Whether any process can still write to a pipe or a pseudo-terminal, of which this is the reading end.

    Source: poll(2), POLLHUP, which comes without being asked for.
    """
    poll = select.poll()
    poll.register(fd, 0)
    return not poll.poll(0)


def enlarge_pipe(fd: int, more_bytes: int) -> None:
    """Make room for more bytes in a pipe, as far as the kernel lets this user. A terminal or socket stays as it is."""
    with suppress(OSError):
        size = fcntl.fcntl(fd, _F_GETPIPE_SZ)
        wanted = min(size + more_bytes, _LARGEST_PIPE_BYTES)
        while wanted > size:
            with suppress(OSError):  # EPERM: beyond a limit of this user
                fcntl.fcntl(fd, _F_SETPIPE_SZ, wanted)
                return
            wanted //= 2


def open_terminal(columns: int, rows: int) -> tuple[int, int]:
    """A pseudo-terminal for a rank's stream: (master, non-blocking; slave). Output passes through it unchanged.

    Raises:
        OSError: no pseudo-terminal is available.
    """
    import termios

    master, slave = os.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    os.set_blocking(master, False)
    resize_terminal(master, columns, rows)
    return master, slave


def resize_terminal(master: int, columns: int, rows: int) -> None:
    """Set the size of a pseudo-terminal."""
    import termios

    with suppress(OSError, ValueError):  # it has been closed
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", max(rows, 1), max(columns, 1), 0, 0))


def terminal_size(fd: int) -> tuple[int, int]:
    """Columns and rows of a terminal; 80 x 24 if unknown."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return 80, 24
    return columns or 80, rows or 24


def is_in_background(fd: int) -> bool:
    """Whether another process group has a terminal: the shell's, while its background jobs run.

    0 is no group, or one of another PID namespace: then this is not known.
    """
    try:
        return os.tcgetpgrp(fd) not in {0, os.getpgrp()}
    except OSError:
        return False


def open_own_terminal() -> int:
    """Open this session's terminal, also one of another user, to write to it without waiting: an open file of its own.

    Raises:
        OSError: the session has none, or it has no name here.

    Source: tty(4).
    """
    fd = os.open("/dev/tty", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with close_on_error(fd):
        os.tcgetpgrp(fd)  # in some containers it is no terminal
    return fd


def leave_keyboard() -> int:
    """In a background job: give this process a terminal of its own as stdin, which has no keyboard.

    A shell stops its background jobs when they read from the terminal. Ranks are in sessions of their own, which it
    cannot stop: they would take what is typed at the shell. So they wait, as if stopped, and still have a terminal.

    Returns:
        The other end of that terminal; -1: the job is in the foreground, or stdin is no terminal.
    """
    try:
        if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
            return -1
        master, slave = open_terminal(*terminal_size(0))
    except OSError:  # not the terminal of this session, or there is no other one
        return -1
    os.dup2(slave, 0)
    os.close(slave)
    return master


def ensure_standard_descriptors() -> None:
    """Open /dev/null for every standard stream that is closed, so that no other file takes its number."""
    for fd in (0, 1, 2):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)  # unlike fstat, it asks no file system
        except OSError:
            null = open_null()
            os.dup2(null, fd)
            if null != fd:
                os.close(null)
            os.set_inheritable(fd, True)


def is_own_output(fd: int) -> bool:
    """Whether a descriptor is a regular file, or the terminal that this process was started on.

    Pipes, sockets and other pseudo-terminals lead to a program that may put the output of many processes together.
    """
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return True
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True
