"""A process whose session has a pseudo-terminal as its controlling terminal, so that no other session can take it.

A session leader without a controlling terminal gets the first terminal that it opens. bash, as a rank or started by one
in a session of its own, opens the terminal that is its stdin: it would get the signals of its keys, and its background
processes would be hung up when it ends. With torchrun that terminal belongs to the user's shell, and nothing of the
kind happens.

Sources: tty_ioctl(4), TIOCSCTTY; Linux, drivers/tty/tty_jobctrl.c.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import termios

from saferun.errors import suppress
from saferun.linux.bare_socket import Socket
from saferun.linux.helper import Helper, PartBase
from saferun.model import ExitStatus

_NAME = "sr-terminal"
_READY_MS = 1000


def own_terminal(slave: int) -> Helper:
    """Fork the owner of a pseudo-terminal, and wait until it is that. It lives until it is discarded or saferun ends.

    Args:
        slave: the end of the terminal that a rank is to get.

    Raises:
        OSError: it cannot be forked, or the terminal belongs to a session already.
    """
    ready_read, ready_write = os.pipe()

    def serve(connection: Socket) -> None:
        # The keys of the terminal that make a signal make it here. It is hung up when saferun closes its end.
        for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        # While any process has it open, the other end does not show that the rank has closed it.
        os.close(slave)
        os.write(ready_write, b"x")
        os.close(ready_write)
        connection.recv(1)

    try:
        owner = Helper(_NAME, serve, keep=(slave, ready_write))
    except OSError:
        os.close(ready_read)
        raise
    finally:
        os.close(ready_write)
    try:
        poll = select.poll()
        poll.register(ready_read, select.POLLIN)
        if not poll.poll(_READY_MS) or os.read(ready_read, 1) != b"x":
            with suppress(OSError):
                owner.discard()
            raise OSError("no process can own it")
    finally:
        os.close(ready_read)
    return owner


class TerminalOwners(PartBase):
    """The owners of the terminals of ranks, of earlier attempts as well, until they have been reaped."""

    def __init__(self) -> None:
        self._owners: list[Helper] = []

    @property
    def deadline(self) -> float | None:
        """None: nothing is due by time."""
        return None

    def tick(self, now: float) -> None:
        """Nothing is due."""

    def close(self) -> None:
        """End those that are left."""
        for owner in self._owners:
            owner.kill()

    def add(self, owner: Helper) -> None:
        """This process is not an orphan of a rank."""
        self._owners.append(owner)

    @property
    def pids(self) -> set[int]:
        """Those that have not been reaped."""
        return {pid for owner in self._owners for pid in owner.pids}

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was one of these."""
        owner = next((owner for owner in self._owners if owner.on_exit(pid, status)), None)
        if owner is not None:
            self._owners.remove(owner)
        return owner is not None
