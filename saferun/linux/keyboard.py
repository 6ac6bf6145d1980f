"""The terminal's keyboard, and pseudo-terminals that stand for it as the ranks' stdin.

Sources: tty_ioctl(4), termios(3), pty(7).
"""

from __future__ import annotations

import os
import select
import termios

from saferun.errors import suppress
from saferun.linux.procfs import may_wait_for_exec, read_stat
from saferun.linux.small_files import read_bytes, read_link
from saferun.linux.streams import resize_terminal
from saferun.linux.terminal_mode import COOKED, INPUT, LOCAL, OUTPUT, raw_mode
from saferun.linux.terminal_owner import own_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OPEN_KEYBOARD = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_READ_BYTES = 4096
_SELECTS = frozenset({"select", "pselect6"})
_EPOLLS = frozenset({"epoll_wait", "epoll_pwait", "epoll_pwait2"})
_LISTS = frozenset({"poll", "ppoll"})
_READS = frozenset({"read", "readv"})
_LAST_FD = 1 << 16
# Kernel functions in which a process waits for a terminal, where its system call may not be read.
_TERMINAL_WAITS = ("n_tty_read", "wait_woken", "do_select", "poll_schedule")


class Keyboard:
    """The keyboard of the terminal that is this process's stdin. It is read without ever blocking.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self) -> None:
        # An open file of its own: the mode of the shared one is that of the shell, too.
        self.fd = os.open("/proc/self/fd/0", _OPEN_KEYBOARD)
        self._before: list[Any] | None = None
        self._ours: list[Any] = []

    @property
    def is_in_foreground(self) -> bool:
        """Whether this process may use it: whoever reads in the background is stopped."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return False

    @property
    def is_gone(self) -> bool:
        """Whether the terminal has been hung up."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return bool(poll.poll(0))

    @property
    def is_taken(self) -> bool:
        """Whether keys come at once and unchanged, Ctrl-C as well."""
        return self._before is not None

    def take(self) -> None:
        """Have keys come at once and unchanged. What is written to the terminal is shown as before."""
        if not self.is_in_foreground:
            return
        with suppress(OSError, termios.error):
            now = termios.tcgetattr(self.fd)
            if self._before is not None and now == self._ours:
                return
            # A shell that had it in between leaves the modes that it gives to its jobs.
            self._before = now
            termios.tcsetattr(self.fd, termios.TCSANOW, raw_mode(now))
            self._ours = termios.tcgetattr(self.fd)

    def give_back(self) -> None:
        """Leave it as it was."""
        before, self._before = self._before, None
        if before is not None and self.is_in_foreground:
            with suppress(OSError, termios.error):
                if termios.tcgetattr(self.fd) == self._ours:
                    termios.tcsetattr(self.fd, termios.TCSANOW, before)

    def read(self) -> bytes | None:
        """What has been typed; empty: nothing yet; None: the terminal is gone."""
        try:
            typed = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            return None
        if typed:
            return typed
        # The end of the input at the beginning of a line: Ctrl-D.
        return None if self.is_gone else b"\x04"

    def close(self) -> None:
        """Give it back and close it."""
        if self.fd >= 0:
            self.give_back()
            os.close(self.fd)
            self.fd = -1


class StdinTerminal:
    """A pseudo-terminal that is the stdin of one rank.

    Attributes:
        fd: our end, non-blocking.
        path: the terminal's name.
        owner: the process that keeps the sessions of ranks from taking it (``terminal_owner``).
    """

    def __init__(self, columns: int, rows: int) -> None:
        """Open one.

        Args:
            columns: its width.
            rows: its height.

        Raises:
            OSError: no pseudo-terminal is available.
        """
        self.fd, self._slave = os.openpty()
        self.path = read_link(f"/proc/self/fd/{self._slave}") or os.ttyname(self._slave)
        os.set_blocking(self.fd, False)
        with suppress(OSError, termios.error):
            try:
                # The user's own keys to erase, and letters of several bytes.
                mode = termios.tcgetattr(0)
            except termios.error:
                mode = termios.tcgetattr(self._slave)
            mode[INPUT] |= termios.ICRNL
            mode[OUTPUT] &= ~termios.OPOST
            mode[LOCAL] |= COOKED
            termios.tcsetattr(self._slave, termios.TCSANOW, mode)
        self.resize(columns, rows)
        try:
            self.owner = own_terminal(self._slave)
        except OSError:
            self._close_ends()
            raise

    def take_slave(self) -> int:
        """The rank's end, which the caller closes once the rank has it."""
        slave, self._slave = self._slave, -1
        return slave

    def resize(self, columns: int, rows: int) -> None:
        """Set its size."""
        resize_terminal(self.fd, columns, rows)

    @property
    def is_edited(self) -> bool:
        """Whether a program has it in a mode in which it edits the line itself, as GNU readline does at a prompt."""
        try:
            return not termios.tcgetattr(self.fd)[LOCAL] & termios.ICANON
        except (OSError, termios.error):
            return False

    def write(self, typed: bytes) -> int:
        """Type; returns how many bytes there was room for."""
        try:
            return os.write(self.fd, typed)
        except BlockingIOError:
            return 0
        except OSError:
            return len(typed)  # no process has it open any more

    def read(self) -> bytes | None:
        """What the terminal echoes; empty: nothing now; None: no process has it open any more."""
        try:
            return os.read(self.fd, _READ_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def close(self) -> None:
        """Close our end, and end the owner, which the loop reaps."""
        self.owner.kill()
        self._close_ends()

    def _close_ends(self) -> None:
        for fd in (self.fd, self._slave):
            if fd >= 0:
                os.close(fd)
        self.fd = self._slave = -1

    def has_reader(self, pid: int) -> bool:
        """Whether a process waits for input from this terminal in its main thread. Never blocks.

        By its system call where that may be read (it takes the permission to trace the process), else by the kernel
        function that it sleeps in.
        """
        # After the ranks have been started: its tables take a while.
        from saferun.linux.syscalls import descriptor_of, read_syscall

        stat = read_stat(pid)
        if stat is None or may_wait_for_exec(pid, stat.state):
            return False
        call = read_syscall(pid)
        if call is None:
            if read_bytes(f"/proc/{pid}/syscall", 64):
                return False  # it runs
            wchan = read_bytes(f"/proc/{pid}/wchan", 64).decode(errors="replace")
            return wchan.startswith(_TERMINAL_WAITS) and (self.is_edited or wchan.startswith("n_tty_read"))
        if call.name in _READS:
            fd = descriptor_of(call)
            return fd is not None and self._is_it(pid, fd)
        if call.name in _SELECTS:
            # The lists are in the memory of the process, which is not read here; the highest descriptor is known.
            return 0 < call.arguments[0] <= _LAST_FD and self._is_it(pid, call.arguments[0] - 1)
        if call.name in _EPOLLS:
            watched = read_bytes(f"/proc/{pid}/fdinfo/{call.arguments[0]}", 1 << 14).split(b"tfd:")[1:]
            return any(self._is_it(pid, int(one.split()[0])) for one in watched[:16])
        return call.name in _LISTS and self.is_edited

    def _is_it(self, pid: int, fd: int) -> bool:
        return read_link(f"/proc/{pid}/fd/{fd}") == self.path


def may_get_keyboard() -> bool:
    """Whether stdin is the terminal that this process was started on: in the background a shell's ``fg`` gives it."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) > 0
    except OSError:
        return False


def can_open_keyboard() -> bool:
    """Whether this process may open the terminal that is its stdin: after ``su`` it is another user's."""
    try:
        os.close(os.open("/proc/self/fd/0", _OPEN_KEYBOARD))
    except OSError:
        return False
    return True


def has_keyboard() -> bool:
    """Whether stdin is the terminal that this process was started on, and it is in its foreground."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
