"""Core limits and ptrace permission of ranks, so that hangs and crashes can be inspected."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.cgroups import memory_limit_bytes
from saferun.linux.container import in_container
from saferun.linux.core_pattern import CorePattern, file_in_place, read_core_pattern, takes_files
from saferun.linux.file_systems import kind_of
from saferun.linux.memory_file import shared_memory_file
from saferun.linux.prctl import allow_ptrace_by
from saferun.linux.procfs import children_of, descendants_of, read_environ_entry
from saferun.linux.small_files import own_directory
from saferun.model import Value

_FILTER = "/proc/self/coredump_filter"
# Bits of the filter: 0 private anonymous memory, 1 shared anonymous, 4 ELF headers, 5 private huge pages.
_DEFAULT_FILTER, _WITHOUT_SHARED_MEMORY = 0x33, b"0x31"

# One byte of each rank.
_RAISED, _NOT_RAISED = b"+", b"-"
_NOTES_BYTES = 1 << 16

# A process may fork before its turn comes.
_LOWERED_AT_MOST = 4
_SEARCH_S = 0.2

# How much of a disk is always left free: checkpoints go there too.
_RESERVE_BYTES, _RESERVE_SHARE = 1 << 30, 0.05


class RankPreparation(Value):
    """What is done in a rank's process before its program starts. Decided in the supervisor, once for all ranks.

    ``tracer_pid``: the process whose descendants may trace the rank; 0: none. ``core_directory``: where the cores go;
    the core limit is raised only if that has room for ``cores_bytes``; empty: not checked. ``core_name``: nor is it
    raised from 0 if there is a file there that has this name (:attr:`CorePattern.repeated_name`), the user's own.
    ``note_path``: the :class:`LimitNotes` in which it is noted; empty: it is noted nowhere.
    """

    raise_core_limit: bool
    drop_shared_memory: bool
    tracer_pid: int
    core_directory: str = ""
    cores_bytes: int = 0
    core_name: str = ""
    note_path: str = ""


class LimitNotes:
    """In memory: whether the ranks of an attempt have raised their limit on cores, which they decide themselves.

    Where they have not, a core is that of a script that raised the limit itself, and is the user's.

    Raises:
        OSError: there is no memory for it.

    Attributes:
        fd: a helper process that inherits it can ask :func:`have_raised`.
        path: where ranks open it.
        were_kept: whether a rank of an earlier attempt has not raised its limit.
    """

    def __init__(self) -> None:
        self.were_kept = False
        self.fd = shared_memory_file("saferun-core-limits")
        self.path = f"{own_directory()}/fd/{self.fd}"

    def begin_attempt(self) -> None:
        """Ranks are going to be started; those of earlier attempts have ended."""
        self.were_kept |= _NOT_RAISED in _read_notes(self.fd)
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Forget them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def have_raised(fd: int) -> bool:
    """Whether ranks have raised their limit, and none has refrained from it.

    Args:
        fd: of :class:`LimitNotes`; -1: none.
    """
    notes = _read_notes(fd)
    return _RAISED in notes and _NOT_RAISED not in notes


def _read_notes(fd: int) -> bytes:
    with suppress(OSError):
        return os.pread(fd, _NOTES_BYTES, 0) if fd >= 0 else b""
    return b""


def lower_limits(owner_pid: int, notes_fd: int, run_entry: str) -> None:
    """Have the ranks that run, and their descendants, leave no core any more: it would cost the user a file.

    From then on no core is saferun's, which is noted.

    Args:
        owner_pid: the parent of the ranks.
        notes_fd: of :class:`LimitNotes`.
        run_entry: what all processes of the run have in their environment; other descendants were there before it.

    Source: prlimit(2).
    """
    name, _, run_id = run_entry.partition("=")
    for _ in range(_LOWERED_AT_MOST):
        found = [pid for pid in descendants_of(owner_pid) if read_environ_entry(pid, name) == run_id]
        if not [pid for pid in found if _lower_limit(pid)]:
            break
    _is_noted(f"/proc/self/fd/{notes_fd}", _NOT_RAISED)


def lower_limits_of(pids: Sequence[int]) -> None:
    """Have processes and their descendants leave no core when a signal ends them. No memory of theirs is read.

    The signal waits for it: descendants that are not found within ``_SEARCH_S`` keep their limits.
    """
    # Before its children are listed: those that it forks later inherit the lower limit.
    for pid in pids:
        _lower_limit(pid)
    waiting, found = list(pids), set(pids)
    give_up_at = time.monotonic() + _SEARCH_S
    while waiting and time.monotonic() < give_up_at:
        new = [child for child in children_of(waiting.pop()) if child not in found]
        for child in new:
            _lower_limit(child)
        waiting += new
        found.update(new)


def _lower_limit(pid: int) -> bool:
    """Returns whether the limit was above 0, and is 0 now."""
    with suppress(OSError, ValueError):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
        if soft != 0:
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, hard))
            return True
    return False


def plan_preparation(cwd: str, ranks: int, *, cores: bool, tracer_pid: int, asked: bool = False) -> RankPreparation:
    """Decide what ranks that are about to be started get. Reads no file systems but /proc and cgroupfs.

    The limit is left as it is where an absolute pattern leads to a server, which may not answer: a rank that looked
    there would wait before its program starts. The directory in which it starts is needed in any case.

    Args:
        cwd: the directory in which they start.
        ranks: how many there will be on this host.
        cores: whether cores are wanted at all; False changes nothing about them.
        tracer_pid: the process whose descendants may trace them.
        asked: whether the user asked for cores.
    """
    if not cores:
        return RankPreparation(raise_core_limit=False, drop_shared_memory=False, tracer_pid=tracer_pid)
    pattern = read_core_pattern()
    return RankPreparation(
        not _why_no_limit(pattern, asked=asked) and (not pattern.text.startswith("/") or _is_at_hand(pattern, cwd)),
        # A filter that is not the kernel's default was set on purpose and is kept, and so is what is in the cores of a
        # user who has switched them on. Shared memory of data loaders and ranks would be repeated in each core.
        _read_filter() == _DEFAULT_FILTER and cores_are_off(),
        tracer_pid,
        pattern.directory(cwd),
        _cores_bytes(ranks),
        pattern.repeated_name,
    )


def _is_at_hand(pattern: CorePattern, cwd: str) -> bool:
    from saferun.linux.answering_files import is_at_hand

    return is_at_hand(pattern.directory(cwd))


def prepare_rank(preparation: RankPreparation) -> None:
    """In a rank's process between fork and exec: set limits, filter and tracer. Raises nothing; failures are ignored.

    The file system that cores go to is checked here, because it may not respond: then this process waits, as it would
    for its program, and not the supervisor.

    Source: getrlimit(2), RLIMIT_CORE; core(5), coredump_filter; prctl(2), PR_SET_PTRACER.
    """
    directory = preparation.core_directory
    if preparation.raise_core_limit:
        is_refused = directory and (
            _why_replaced(directory, preparation.core_name) or _why_no_room(directory, preparation.cores_bytes)
        )
        # One that is not known to be saferun's would never be deleted.
        if _is_noted(preparation.note_path, _NOT_RAISED if is_refused else _RAISED) and not is_refused:
            _raise_limit(drop_shared_memory=preparation.drop_shared_memory)
    if preparation.tracer_pid:
        allow_ptrace_by(preparation.tracer_pid)


def _raise_limit(*, drop_shared_memory: bool) -> None:
    """All or nothing: no tool can read a truncated core. Where that fails, what is in a core is not changed either."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        if drop_shared_memory:
            fd = os.open(_FILTER, os.O_WRONLY)
            try:
                os.write(fd, _WITHOUT_SHARED_MEMORY)
            finally:
                os.close(fd)


def _is_noted(path: str, note: bytes) -> bool:
    """Note what becomes of the limit. Returns whether that is noted wherever it is to be."""
    if not path:
        return True
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(fd, note) == len(note)
    except OSError:
        return False
    finally:
        os.close(fd)


def cores_are_off() -> bool:
    """Whether processes leave no cores unless their limit is raised. Those of a user who has them on are the user's."""
    return core_limit()[0] == 0


def core_limit() -> tuple[int, int]:
    """The soft and the hard limit on cores; 0 where a sandbox refuses to tell (prlimit(2))."""
    try:
        return resource.getrlimit(resource.RLIMIT_CORE)
    except OSError:
        return 0, 0


def why_no_cores(cwd: str, ranks: int, pattern: CorePattern | None = None, *, asked: bool = False) -> str:
    """Why the core limit should not be raised, in one line; empty: it may be.

    If cores are piped to a program, the limit hardly matters, and the disk that they would fill is that program's
    concern.

    Args:
        cwd: the directory in which the ranks start.
        ranks: how many there will be on this host. They may all crash at once, as when a library aborts them all.
        pattern: what the kernel does with cores; None: as it is now.
        asked: whether the user asked for cores.
    """
    pattern = pattern or read_core_pattern()
    directory = pattern.directory(cwd)
    return (
        _why_no_limit(pattern, asked=asked)
        or _why_replaced(directory, pattern.repeated_name)
        or _why_no_room(directory, _cores_bytes(ranks))
    )


def _why_no_limit(pattern: CorePattern, *, asked: bool) -> str:
    if not pattern.is_file:
        return f"cores go to {pattern.handler}" if pattern.handler else pattern.description()
    soft, hard = core_limit()
    if hard == 0:
        return "the hard limit on cores is 0"
    if soft == 0 and not asked and in_container(os.environ):
        return "in this container the limit on cores is 0 (--cores backtrace raises it all the same)"
    if soft == 0 and not asked and takes_files(pattern):
        name = pattern.repeated_name
        return f"a core would replace any file called {name} (--cores backtrace raises the limit all the same)"
    return ""


def _why_replaced(directory: str, name: str) -> str:
    """Why the kernel would replace a file of the user's by a core, in one line; empty: it would not.

    Where cores were switched on before saferun was started, it does so in any case.
    """
    if not cores_are_off():
        return ""
    path = file_in_place(directory, name)
    return f"a core would replace {path}" if path else ""


def _cores_bytes(ranks: int) -> int:
    """The maximum size of the cores of all ranks together, bounded by memory and by the limit on one core."""
    hard = core_limit()[1]
    most = memory_limit_bytes()
    return most if hard == resource.RLIM_INFINITY else min(most, hard * max(ranks, 1))


def _why_no_room(directory: str, size_bytes: int) -> str:
    """Why cores should not be written to a directory, in one line; empty: they may be."""
    try:
        file_system = os.statvfs(directory)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} is not writable"
    kind = kind_of(directory)
    if kind:
        return f"{directory} is on {kind}"
    if room_bytes(directory) >= size_bytes:
        return ""
    free_bytes = file_system.f_bavail * file_system.f_frsize
    return (
        f"{directory} has {free_bytes / 1e9:.1f} GB free, and the cores of all ranks may take {size_bytes / 1e9:.1f} GB"
    )


def room_bytes(directory: str) -> int:
    """How much may be written to a file system so that enough is left for checkpoints and logs.

    Raises:
        OSError: it cannot be found out.
    """
    file_system = os.statvfs(directory)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    return max(free_bytes - max(_RESERVE_BYTES, int(file_system.f_blocks * file_system.f_frsize * _RESERVE_SHARE)), 0)


def _read_filter() -> int:
    try:
        with open(_FILTER, "rb") as file:
            return int(file.read(), 16)
    except (OSError, ValueError):
        return -1
