"""Which ranks have a process group: their hook opens a socket when the first one is registered."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["ranks_with_group"]


def ranks_with_group(prefixes: Mapping[int, str]) -> frozenset[int]:
    """The ranks that have, or had before they exited, a process group, in themselves or in a descendant.

    The sockets outlive their processes, so that ranks that have exited count too. One directory is read for any number
    of ranks. A rank that is missing may still have one: it may not run Python, or have no room for another thread.

    Args:
        prefixes: the beginning of the socket paths of each rank's hook, by rank; empty if it has no hook.
    """
    names: dict[str, list[str]] = {}
    found = set()
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
        if any(name.startswith(f"{stem}.") for name in names[directory]):
            found.add(rank)
    return frozenset(found)
