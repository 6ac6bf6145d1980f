"""Finding the processes of a launch by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from saferun.linux.procfs import waits_uninterruptibly

if TYPE_CHECKING:
    from collections.abc import Container

_READ_S = 1.0


def numbers_in_use() -> frozenset[str]:
    """The numbers of all processes that there are now."""
    return frozenset(filter(str.isdigit, os.listdir("/proc")))


def pids_whose_environ_has(entry: str, older: Container[str] = ()) -> list[int]:
    """Living processes that were started with ``NAME=value`` in their environment. One that has ended has none.

    Args:
        entry: what to look for.
        older: numbers of processes from before the first one with the entry, which are not looked at: a machine has
            hundreds of them, and tests look every few milliseconds. A number is given again only after all others.
    """
    wanted = entry.encode()
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and name not in older and wanted in environ_of(int(name)).split(b"\0")
    ]


def environ_of(pid: int) -> bytes:
    """The environment of a process; empty where it cannot be read.

    Of one in uninterruptible sleep, another test's perhaps, reading it may last as long as that sleep.
    """
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/environ").read_bytes())

    if waits_uninterruptibly(pid):
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(_READ_S)
    else:
        read()
    return found[0] if found else b""
