"""Ranks that have been forked but not started their programs, and errors of starting them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from errno import E2BIG, EMFILE, ENOEXEC

from saferun.errors import SaferunError
from saferun.linux.children import SpawnError


class ForkedRank:
    """A forked rank. ``report``: the descriptor of ``begin_spawn``; -1: its program has been started."""

    __slots__ = ("argv", "environ", "local_rank", "pid", "rank", "report")

    def __init__(
        self, local_rank: int, rank: int, pid: int, report: int, argv: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self.local_rank = local_rank
        self.rank = rank
        self.pid = pid
        self.report = report
        self.argv = argv
        self.environ = environ


def start_error(error: SpawnError, rank: int, argv: Sequence[str], environ: Mapping[str, str]) -> SaferunError:
    """The error that a rank cannot be started, with a hint. Source: execve(2)."""
    what = f"rank {rank} cannot be started: {argv[0]}: {error}"
    if error.where != "exec":
        if error.errno == EMFILE:
            return SaferunError(what, "check the limit on open files (ulimit -n)")
        return SaferunError(what, "check the limits on processes (ulimit -u) and memory")
    if error.errno == E2BIG:
        texts = {f"argument {i}": text for i, text in enumerate(argv)}
        texts |= {name: f"{name}={value}" for name, value in environ.items()}
        sizes = {name: len(os.fsencode(text)) + 1 for name, text in texts.items()}
        longest = max(sizes, key=lambda name: sizes[name])
        return SaferunError(
            f"{what}: the arguments and the environment are too long: {sum(sizes.values())} bytes",
            f"the longest is {longest} with {sizes[longest]} bytes; one may have 131072, and all together a quarter of "
            "the stack limit (ulimit -s)",
        )
    if error.errno == ENOEXEC:
        return SaferunError(
            what, f"it has no #! line, or was built for another architecture than this one ({os.uname().machine})"
        )
    return SaferunError(what, "check that the program exists and may be executed")
