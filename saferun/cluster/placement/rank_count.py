"""How many ranks this host has."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from saferun.console.stderr import print_error
from saferun.errors import UsageError, printable

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
        return resolve_nproc_per_node(value, sys.executable, environ, _WaitLines(value).print_next)
    return checked_ranks(count, f"--nproc-per-node {value}")


class _WaitLines:
    """What the user reads while torch is asked for the number of ranks that ``value`` means: it may take minutes."""

    def __init__(self, value: str) -> None:
        self._value = value
        self._is_first = True

    def print_next(self, waited_s: float) -> None:
        """Print how long it has taken so far, and the first time what to do about it."""
        what = f"how many ranks --nproc-per-node {self._value} means"
        print_error(f"saferun: waiting for torch to report {printable(what)} ({waited_s:.0f} s)")
        if self._is_first:
            self._is_first = False
            command = f"{sys.executable} -c 'import torch; torch.cuda.is_available()'"
            print_error(
                f"hint: see whether `{printable(command)}` ends (slow file system, hanging driver), or give "
                "--nproc-per-node as a number"
            )


def checked_ranks(count: int, what: str) -> int:
    """The same number, if a host may have so many; ``what`` begins the complaint about it."""
    if not 1 <= count <= _MOST_RANKS:
        raise UsageError(f"{what} is not between 1 and {_MOST_RANKS}", "one rank for each GPU is usual")
    return count
