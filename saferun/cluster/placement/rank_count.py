"""How many ranks this host has."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from saferun.errors import UsageError

_MOST_RANKS = 4096


def count_ranks(value: str, environ: Mapping[str, str]) -> int:
    """The number of ranks that ``--nproc-per-node`` asks for.

    Raises:
        SaferunError: it is none, or the devices of this host cannot be counted.
    """
    try:
        count = int(value)
    except ValueError:
        # Only words that ask for a count of this host's devices pay for the import.
        from saferun.linux.gpus import resolve_nproc_per_node

        # By the launcher's own torch, as under torchrun: PYTHON_EXEC may be anything that runs a script.
        return resolve_nproc_per_node(value, sys.executable, environ)
    return checked_ranks(count, f"--nproc-per-node {value}")


def checked_ranks(count: int, what: str) -> int:
    """The same number, if a host may have so many; ``what`` begins the complaint about it."""
    if not 1 <= count <= _MOST_RANKS:
        raise UsageError(f"{what} is not between 1 and {_MOST_RANKS}", "one rank for each GPU is usual")
    return count
