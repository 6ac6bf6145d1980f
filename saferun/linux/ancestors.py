"""The parent processes of saferun: the srun step, the mpirun daemon or the ssh session that it runs under."""

from __future__ import annotations

import os
from collections.abc import Callable

from saferun.linux.poller import Poller
from saferun.linux.procfs import read_cmdline, read_stat

# They run one command: their own parent process is what matters.
_WRAPPERS = frozenset(
    {"sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh", "csh", "busybox", "env", "nice", "timeout", "time", "numactl"}
    | {"taskset", "stdbuf", "setsid", "sudo", "su", "runuser", "xargs", "make", "uv", "conda", "micromamba", "tini"}
)
_DEEPEST = 32


class Ancestors:
    """Watches the process that saferun runs under, and the shells in between.

    Args:
        poller: the loop's.
        on_gone: called once with a message when one of them has exited.
    """

    def __init__(self, poller: Poller, on_gone: Callable[[str], None]) -> None:
        self._poller = poller
        self._on_gone = on_gone
        self._watched: list[int] = []
        for pid, name in ancestors_of(os.getpid()):
            message = f"parent process {name} (pid {pid}) exited"
            self._watched.append(pid)
            poller.watch_process(pid, lambda message=message: self._gone(message))  # type: ignore[misc]

    def _gone(self, message: str) -> None:
        if self._watched:
            self.close()
            self._on_gone(message)

    def close(self) -> None:
        """End the watch."""
        for pid in self._watched:
            self._poller.unwatch_process(pid)
        self._watched.clear()


def ancestors_of(pid: int) -> list[tuple[int, str]]:
    """The ancestors of a process up to the first that is not a shell, each with its name.

    The first process of a host or container does not count: it outlives all others.
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
        if name not in _WRAPPERS:
            break
    return found
