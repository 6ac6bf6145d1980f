"""Shared memory in /dev/shm that ranks leave behind when they are killed, and the end of it.

Such segments are memory that nobody gives back, and a restart that finds /dev/shm full dies of a bus error.

Only what libraries put there for the life of a process is ever removed, known by its name. A data set that was copied
there, or anything else whose name tells nothing, is the user's.

Sources: shm_overview(7); proc_pid_maps(5); torch (``torch_<pid>_…``), NCCL and RCCL (``nccl-…``), Python's
multiprocessing (``psm_…``, ``sem.mp-…``, ``pym-<pid>-…``), loky (``loky-<pid>-…``), CUDA
(``cuda.shm.<uid>.<pid>.…``, in hexadecimal), LLVM's OpenMP (``__KMP_REGISTERED_LIB_<pid>_…``),
UCX (``ucx_shm_posix_…``), Open MPI (``vader_segment.…``, ``sm_segment.…``).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator

from saferun.linux.container import INITIAL_PID_NAMESPACE
from saferun.linux.small_files import list_directory, read_link

SHM = "/dev/shm"  # noqa: S108 - where the C library puts shared memory

# Beginnings of the names of what lives no longer than the processes that map it.
_TRANSIENT = (
    *("torch_", "nccl-", "psm_", "sem.mp-", "pym-", "loky-", "sem.loky-", "cuda.shm.", "__KMP_REGISTERED_LIB_"),
    *("ucx_shm_posix_", "vader_segment.", "sm_segment."),
)
# Beginnings behind which stands the pid of the maker, in what base, and what ends it.
_WITH_PID = (
    ("torch_", 10, "_"),
    ("pym-", 10, "-"),
    ("loky-", 10, "-"),
    ("sem.loky-", 10, "-"),
    ("__KMP_REGISTERED_LIB_", 10, "_"),
    (f"cuda.shm.{os.getuid():x}.", 16, "."),
)
# The kernel's clock for files is a tick behind: 10 ms at most.
_CLOCK_S = 0.02
_DELETED = " (deleted)"


def segments_of(pids: Iterable[int], *, shm: str = SHM, deadline_s: float = 2.0) -> frozenset[str]:
    """The files in /dev/shm that these processes have mapped or open at this moment, as paths.

    A process in another mount namespace may have another /dev/shm: only what is the same file here counts.

    Args:
        pids: ranks and what descends from them. Those that are gone, or may not be looked at, have none.
        shm: where shared memory is.
        deadline_s: how long it may take; what was found by then is told.
    """
    deadline = time.monotonic() + deadline_s
    found: set[str] = set()
    for pid in pids:
        if time.monotonic() > deadline:
            break
        found.update(path for path, is_same in _used_by(pid, shm) if is_same)
    return frozenset(found)


def remove_orphans(
    paths: Iterable[str], dead_pids: Iterable[int], *, since: float = 0.0, shm: str = SHM, deadline_s: float = 5.0
) -> tuple[str, ...]:
    """Remove what the ranks of an attempt left in /dev/shm: those of these paths, and what carries a dead rank's pid.

    A file is removed only if its name is one that libraries give to what lives no longer than its processes, it
    belongs to this user, it is no older than the attempt, and no living process of this user maps it or has it open.
    Nothing is raised.

    Args:
        paths: what :func:`segments_of` told of the ranks while they lived.
        dead_pids: the ranks, and what descended from them. Names with the pid of one that lives (again) stay.
        since: when the ranks were started, in seconds since the epoch. What was last changed before was there before
            them: a cache that they only read, or what a rank of an earlier job with the same pid has left.
        shm: where shared memory is.
        deadline_s: how long all processes may take to be looked at; beyond it nothing is removed.

    Returns:
        The paths that were removed, sorted.
    """
    deadline = time.monotonic() + deadline_s
    candidates = {path for path in paths if _is_transient(path, shm)}
    # Containers may share /dev/shm and not their pids: there, a name with a dead rank's pid can be a stranger's.
    if read_link("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE:
        candidates.update(_named_after({pid for pid in dead_pids if not os.path.exists(f"/proc/{pid}")}, shm))
    files = {path: key for path in candidates if (key := _own_file(path, since)) is not None}
    if not files:
        return ()
    used = _files_in_use(shm, set(files.values()), deadline)
    if used is None:
        return ()
    removed = []
    for path in sorted(files):
        # Looked at again: nothing keeps a name from being given to another file meanwhile.
        if files[path] in used or _own_file(path) != files[path]:
            continue
        try:
            os.unlink(path)
        except OSError:
            continue
        removed.append(path)
    return tuple(removed)


def _is_transient(path: str, shm: str) -> bool:
    directory, _, name = path.rpartition("/")
    return directory == shm and name.startswith(_TRANSIENT)


def _named_after(pids: set[int], shm: str) -> Iterator[str]:
    """The files whose names carry one of the pids."""
    for name in list_directory(shm) if pids else ():
        for beginning, base, end in _WITH_PID:
            digits, found, _ = name.removeprefix(beginning).partition(end)
            if name.startswith(beginning) and found and digits.isalnum():
                try:
                    pid = int(digits, base)
                except ValueError:
                    continue
                if pid in pids:
                    yield f"{shm}/{name}"


def _own_file(path: str, since: float = 0.0) -> tuple[int, int] | None:
    """Device and number of a regular file of this user's, changed since then; None where it is anything else."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_ctime >= since - _CLOCK_S
    return (status.st_dev, status.st_ino) if is_own else None


def _files_in_use(shm: str, wanted: set[tuple[int, int]], deadline: float) -> set[tuple[int, int]] | None:
    """Which of these files living processes map or have open, by device and number; None: not all could be looked at.

    Whom this user may not look at is somebody else, and a segment of this user's is open to no one else but root.
    """
    used: set[tuple[int, int]] = set()
    # By their numbers, so that a path that leads elsewhere in another mount namespace is recognised all the same.
    numbers = {number for _, number in wanted}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        if time.monotonic() > deadline:
            return None
        for path, number in (*_mapped(int(name), shm), *_opened(int(name), shm)):
            if number in numbers:
                used.update(file for file in wanted if file[1] == number)
            elif number < 0 and (key := _own_file(path)) is not None:
                used.add(key)
    return used


def _used_by(pid: int, shm: str) -> Iterator[tuple[str, bool]]:
    """Paths that a process uses, and whether they lead to the same file from here."""
    for path, number in {*_mapped(pid, shm), *_opened(pid, shm)}:
        key = _own_file(path)
        yield path, key is not None and (number < 0 or key[1] == number)


def _mapped(pid: int, shm: str) -> Iterator[tuple[str, int]]:
    """Paths in /dev/shm that a process maps, with the numbers of their files."""
    # 7f0a2b400000-7f0a2bd31000 rw-s 00000000 00:19 1234                       /dev/shm/nccl-Xa81bQ
    beginning = f"{shm}/".encode()
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        if beginning not in line:
            continue
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(beginning) and fields[4].isdigit():  # noqa: PLR2004 - proc_pid_maps(5)
            path = os.fsdecode(fields[5])
            if not path.endswith(_DELETED):
                yield path, int(fields[4])


def _opened(pid: int, shm: str) -> Iterator[tuple[str, int]]:
    """Paths in /dev/shm that a process has open, with the numbers of their files (-1: it is closed by now)."""
    directory = f"/proc/{pid}/fd"
    for name in list_directory(directory):
        try:
            path = os.readlink(f"{directory}/{name}")
            if path.startswith(f"{shm}/") and not path.endswith(_DELETED):
                yield path, os.stat(f"{directory}/{name}").st_ino
        except OSError:
            continue
