"""What started saferun: the srun step, the mpirun daemon or the ssh session that it runs under."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from saferun.host.poller import Poller
from saferun.host.procfs import read_cmdline, read_stat

# They run for the sake of one command: what matters is who started them.
_GO_BETWEENS = frozenset(
    {"sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh", "csh", "busybox", "env", "nice", "timeout", "time", "numactl"}
    | {"taskset", "stdbuf", "setsid", "sudo", "su", "runuser", "xargs", "make", "uv", "conda", "micromamba", "tini"}
)
_DEEPEST = 32


class Starters:
    """The process that started saferun, and the shells in between. Each is watched by a pidfd; nothing is polled.

    Args:
        poller: the loop's.
        on_gone: told once, in words, that one of them has ended.
    """

    def __init__(self, poller: Poller, on_gone: Callable[[str], None]) -> None:
        self._poller = poller
        self._on_gone = on_gone
        self._pidfds: dict[int, str] = {}
        for pid, name in starters_of(os.getpid()):
            with suppress(OSError):
                pidfd = os.pidfd_open(pid)
                self._pidfds[pidfd] = f"{name} (pid {pid}), which had started saferun, is gone"
                poller.watch(pidfd, lambda pidfd=pidfd: self._gone(pidfd))  # type: ignore[misc]

    def _gone(self, pidfd: int) -> None:
        words = self._pidfds[pidfd]
        self.close()
        self._on_gone(words)

    def close(self) -> None:
        """Watch no more."""
        for pidfd in self._pidfds:
            self._poller.unwatch(pidfd)
            os.close(pidfd)
        self._pidfds.clear()


def starters_of(pid: int) -> list[tuple[int, str]]:
    """The ancestors of a process up to the first that is more than a shell, each with its name.

    The first process of a host or container is none: it goes away with everything else.
    """
    found: list[tuple[int, str]] = []
    while len(found) < _DEEPEST:
        stat = read_stat(pid)
        if stat is None or stat.ppid <= 1:
            break
        pid = stat.ppid
        cmdline = read_cmdline(pid)
        name = os.path.basename(cmdline[0]).lstrip("-").rstrip(":") if cmdline and cmdline[0] else "a process"
        found.append((pid, name))
        if name not in _GO_BETWEENS:
            break
    return found
