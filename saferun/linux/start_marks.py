"""Which ranks have a process group: the hook opens a socket in them when the first one is registered."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["ranks_with_group"]


def ranks_with_group(prefixes: Mapping[int, str]) -> frozenset[int]:
    """The ranks that have, or had before they ended, a process group, in themselves or in a process below them.

    The sockets stay when their processes end, so that the dead are counted too. One directory is read, whatever the
    number of ranks. A rank that is not among them need not be without: it may run no Python, or too many threads for
    one more.

    Args:
        prefixes: what the paths of each rank's hook begin with, by rank; empty where there is none.
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
