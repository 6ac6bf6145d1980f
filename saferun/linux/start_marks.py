"""Which ranks have a process group: their hook opens a socket when the first one is registered."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from saferun.errors import suppress

__all__ = ["group_times", "ranks_with_group"]


def ranks_with_group(prefixes: Mapping[int, str]) -> frozenset[int]:
    """The ranks that have, or had before they exited, a process group, in themselves or in a descendant.

    The sockets outlive their processes, so that ranks that have exited count too. One directory is read for any number
    of ranks. A rank that is missing may still have one: it may not run Python, or have no room for another thread.

    Args:
        prefixes: the beginning of the socket paths of each rank's hook, by rank; empty if it has no hook.
    """
    return frozenset(rank for rank, _ in _sockets(prefixes))


def group_times(prefixes: Mapping[int, str]) -> dict[int, float]:
    """When the ranks had their first process group, in seconds since the epoch; those of which that is known.

    Args:
        prefixes: as of ``ranks_with_group``.
    """
    times: dict[int, float] = {}
    for rank, path in _sockets(prefixes):
        with suppress(OSError):
            # Nothing writes to a socket's inode after it has been made.
            made_at = os.stat(path, follow_symlinks=False).st_mtime
            times[rank] = min(made_at, times.get(rank, made_at))
    return times


def _sockets(prefixes: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    names: dict[str, list[str]] = {}
    for rank, prefix in prefixes.items():
        directory, _, stem = prefix.rpartition("/")
        if not directory:
            continue
        if directory not in names:
            try:
                names[directory] = [name for name in os.listdir(directory) if name.endswith(".sock")]
            except OSError:
                names[directory] = []
        # a0r1.4711.sock, and not a0r11.4711.sock
        for name in names[directory]:
            if name.startswith(f"{stem}."):
                yield rank, f"{directory}/{name}"
