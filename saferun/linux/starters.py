"""What started saferun: the srun step, the mpirun daemon or the ssh session that it runs under."""

from __future__ import annotations

import os
from collections.abc import Callable

from saferun.linux.poller import Poller
from saferun.linux.procfs import read_cmdline, read_stat

# They run for the sake of one command: what matters is who started them.
_GO_BETWEENS = frozenset(
    {"sh", "bash", "dash", "zsh", "ksh", "fish", "tcsh", "csh", "busybox", "env", "nice", "timeout", "time", "numactl"}
    | {"taskset", "stdbuf", "setsid", "sudo", "su", "runuser", "xargs", "make", "uv", "conda", "micromamba", "tini"}
)
_DEEPEST = 32


class Starters:
    """The process that started saferun, and the shells in between. Each is watched, by a pidfd where there are any.

    Args:
        poller: the loop's.
        on_gone: told once, in words, that one of them has ended.
    """

    def __init__(self, poller: Poller, on_gone: Callable[[str], None]) -> None:
        self._poller = poller
        self._on_gone = on_gone
        self._watched: list[int] = []
        for pid, name in starters_of(os.getpid()):
            words = f"parent process {name} (pid {pid}) exited"
            self._watched.append(pid)
            poller.watch_process(pid, lambda words=words: self._gone(words))  # type: ignore[misc]

    def _gone(self, words: str) -> None:
        if self._watched:
            self.close()
            self._on_gone(words)

    def close(self) -> None:
        """Watch no more."""
        for pid in self._watched:
            self._poller.unwatch_process(pid)
        self._watched.clear()


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
