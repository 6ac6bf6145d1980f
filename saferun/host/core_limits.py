"""What a rank gets so that it can be looked at when it hangs and after it has crashed."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from saferun.host.cgroups import memory_limit_bytes
from saferun.host.core_pattern import CorePattern, read_core_pattern, room_for_core
from saferun.host.prctl import allow_ptrace_by
from saferun.model import Value

_FILTER = "/proc/self/coredump_filter"
# Bits of the filter: 0 private anonymous memory, 1 shared anonymous, 4 ELF headers, 5 private huge pages.
_DEFAULT_FILTER, _WITHOUT_SHARED_MEMORY = 0x33, b"0x31"


class RankPreparation(Value):
    """What is done in a rank's process before its program starts. Decided in the supervisor, once for all ranks.

    ``tracer_pid`` is the process whose descendants may look at the rank; 0: nobody's.
    """

    raise_core_limit: bool
    drop_shared_memory: bool
    tracer_pid: int


def plan_preparation(cwd: str, ranks: int, *, cores: bool, tracer_pid: int) -> RankPreparation:
    """What ranks that are about to be started get.

    Args:
        cwd: the directory that they start in.
        ranks: how many there will be on this host.
        cores: whether cores are wanted at all; False changes nothing about them.
        tracer_pid: the process whose descendants may look at them.
    """
    return RankPreparation(
        cores and cores_wanted(cwd, ranks),
        # A filter that is not the kernel's default was chosen by somebody: it stays as it is. Shared memory is what
        # data loaders and all ranks share, and would be in each core once more.
        cores and _read_filter() == _DEFAULT_FILTER,
        tracer_pid,
    )


def prepare_rank(preparation: RankPreparation) -> None:
    """In a rank's process between fork and exec: limits, filter, tracer. Raises nothing; what cannot be done is left.

    Source: getrlimit(2), RLIMIT_CORE; core(5), coredump_filter; prctl(2), PR_SET_PTRACER.
    """
    if preparation.raise_core_limit:
        with suppress(OSError, ValueError):
            hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
            # Never something in between: no tool can read a core that was cut off.
            resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    if preparation.drop_shared_memory:
        with suppress(OSError):
            fd = os.open(_FILTER, os.O_WRONLY)
            with suppress(OSError):
                os.write(fd, _WITHOUT_SHARED_MEMORY)
            os.close(fd)
    if preparation.tracer_pid:
        allow_ptrace_by(preparation.tracer_pid)


def cores_wanted(cwd: str, ranks: int) -> bool:
    """Whether a rank that crashes should leave a core: :func:`why_no_cores` has nothing against it."""
    return not why_no_cores(cwd, ranks)


def why_no_cores(cwd: str, ranks: int, pattern: CorePattern | None = None) -> str:
    """Why the limit on cores should be left alone, in one line; empty: it may be raised.

    Where cores are piped to a program the limit hardly matters, and what it would fill is not ours to watch.

    Args:
        cwd: the directory that the ranks start in.
        ranks: how many there will be on this host.
        pattern: what the kernel does with cores; None: as it is now.
    """
    pattern = pattern or read_core_pattern()
    if not pattern.is_file:
        return f"cores go to {pattern.handler}" if pattern.handler else pattern.words()
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard == 0:
        return "the hard limit on cores is 0"
    size_bytes = memory_limit_bytes() // max(ranks, 1)
    return room_for_core(
        pattern.directory(cwd), size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
    )


def _read_filter() -> int:
    try:
        with open(_FILTER, "rb") as file:
            return int(file.read(), 16)
    except (OSError, ValueError):
        return -1
