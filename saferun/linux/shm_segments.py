"""Removal of shared-memory segments in /dev/shm that killed ranks leave behind.

Such segments keep their memory, and ranks of a restart die of a bus error when /dev/shm is full.

Only segments that libraries make for the lifetime of a process are removed, recognised by their names. A data set that
was copied there, or anything else, is the user's.

Sources: shm_overview(7); proc_pid_maps(5); torch (``torch_<pid>_…``), NCCL and RCCL (``nccl-…``), Python's
multiprocessing (``psm_…``, ``sem.mp-…``, ``pym-<pid>-…``), loky (``loky-<pid>-…``), CUDA
(``cuda.shm.<uid>.<pid>.…``, in hexadecimal), LLVM's OpenMP (``__KMP_REGISTERED_LIB_<pid>_…``),
UCX (``ucx_shm_posix_…``), Open MPI (``vader_segment.…``, ``sm_segment.…``).
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator

from saferun.linux.container import INITIAL_PID_NAMESPACE
from saferun.linux.small_files import has_own_processes, list_directory, read_link

SHM = "/dev/shm"  # noqa: S108 - where the C library puts shared memory

# Names of segments that are of no use once the processes that map them have exited. Whole names: a user's own file may
# well begin like one of them, such as torch_cache.bin.
_TRANSIENT = (
    *(r"torch_\d+_\d+(_\d+)?", r"nccl-\w{6}", r"psm_[0-9a-f]{8}", r"sem\.mp-\w{8}", r"pym-\d+-\w+"),
    *(r"(sem\.)?loky-\d+-\w+", r"cuda\.shm\.[0-9a-f]+\.[0-9a-f]+\.[0-9a-f]+", r"__KMP_REGISTERED_LIB_\d+(_\d+)?"),
    *(r"ucx_shm_posix_[0-9a-f]+", r"(vader|sm)_segment\.[\w.-]+"),
)
# Prefixes that are followed by the creator's pid, the base of that number, and the character after it.
_WITH_PID = (
    ("torch_", 10, "_"),
    ("pym-", 10, "-"),
    ("loky-", 10, "-"),
    ("sem.loky-", 10, "-"),
    ("__KMP_REGISTERED_LIB_", 10, "_"),
    (f"cuda.shm.{os.getuid():x}.", 16, "."),
)
# File timestamps may lag by a clock tick: 10 ms at most.
_CLOCK_S = 0.02
_DELETED = " (deleted)"


def segments_of(pids: Iterable[int], *, shm: str = SHM, deadline_s: float = 2.0) -> frozenset[str]:
    """The paths of files in /dev/shm that these processes have mapped or open.

    A process in another mount namespace may have another /dev/shm: only paths that are the same file here count.

    Args:
        pids: ranks and their descendants. Those that have exited, or are not readable, are skipped.
        shm: the directory of shared memory.
        deadline_s: after this many seconds, what was found by then is returned.
    """
    if not has_own_processes():
        return frozenset()
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
    """Remove what the ranks of an attempt left in /dev/shm: these paths, and files named after a dead rank's pid.

    A file is removed only if its name is that of a library's transient segment, it belongs to this user, it is not
    older than the attempt, and no living process of this user maps it or has it open. Nothing is raised.

    Args:
        paths: the result of :func:`segments_of` while the ranks were alive.
        dead_pids: the ranks and their descendants. Files with the pid of a living process are kept.
        since: when the ranks were started, in seconds since the epoch. Files that were last changed before that are
            kept: caches that the ranks only read, or files of an earlier job's rank with the same pid.
        shm: the directory of shared memory.
        deadline_s: if scanning all processes takes longer, in seconds, nothing is removed.

    Returns:
        The removed paths, sorted.
    """
    if not has_own_processes():
        return ()
    deadline = time.monotonic() + deadline_s
    candidates = {path for path in paths if _is_transient(path, shm)}
    # Containers may share /dev/shm but not pids: there, a file with a dead rank's pid may be another process's.
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
        # Check again: the name may have been reused for another file meanwhile.
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
    return directory == shm and any(re.fullmatch(pattern, name) for pattern in _TRANSIENT)


def _named_after(pids: set[int], shm: str) -> Iterator[str]:
    """The files with one of the pids in the name."""
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
    """Device and inode of a regular file of this user that changed since then; None for anything else."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_ctime >= since - _CLOCK_S
    return (status.st_dev, status.st_ino) if is_own else None


def _files_in_use(shm: str, wanted: set[tuple[int, int]], deadline: float) -> set[tuple[int, int]] | None:
    """The files of ``wanted`` that living processes map or have open; None if not all processes could be scanned.

    Processes that this user may not inspect are other users', who have no access to this user's segments, or root's.
    """
    used: set[tuple[int, int]] = set()
    # By inode, so that a path is recognised even from another mount namespace.
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
    """Paths that a process uses, and whether each is the same file in this mount namespace."""
    for path, number in {*_mapped(pid, shm), *_opened(pid, shm)}:
        key = _own_file(path)
        yield path, key is not None and (number < 0 or key[1] == number)


def _mapped(pid: int, shm: str) -> Iterator[tuple[str, int]]:
    """Paths in /dev/shm that a process maps, with their inodes."""
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
    """Paths in /dev/shm that a process has open, with their inodes."""
    directory = f"/proc/{pid}/fd"
    for name in list_directory(directory):
        try:
            path = os.readlink(f"{directory}/{name}")
            if path.startswith(f"{shm}/") and not path.endswith(_DELETED):
                yield path, os.stat(f"{directory}/{name}").st_ino
        except OSError:
            continue
