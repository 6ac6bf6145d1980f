"""Where the kernel writes cores, and which of the files there belong to a run.

A core is identified by the process in its notes, never by its name: names repeat, and pids in them may be those of
another pid namespace.

Source: core(5); Linux, fs/coredump.c.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from saferun.linux.container import in_container
from saferun.linux.core_notes import CoreError, CoreNotes, open_regular, read_core_notes
from saferun.linux.core_pattern import RENAMED_PREFIX, CorePattern, file_in_place, room_for_core, takes_files
from saferun.linux.ownership import Identity, identity, open_directory
from saferun.model import Value

HANDLER_DIRECTORIES = ("/var/lib/systemd/coredump", "/var/lib/apport/coredump")
"""Where core handlers keep cores. Source: systemd-coredump(8); apport's fileutils."""
_COMPRESSED = (".zst", ".lz4", ".xz", ".gz")
_ENTRIES_LIMIT = 50_000
_DIRECTORIES_LIMIT = 2_000
_SEARCH_S = 3.0
_DEPTH = 4
# Timestamps of a file system may lag a little behind.
_CLOCK_SLACK_S = 2.0
_NUMBERS = frozenset("pPiIugdstcCF")


class CoreFile(Value):
    """A core. ``notes`` are those read by a search; None if the file is compressed.

    ``is_managed``: a core handler keeps it, and will delete it.
    """

    path: str
    notes: CoreNotes | None
    inode: tuple[int, int]
    is_managed: bool = False

    @property
    def is_compressed(self) -> bool:
        """Whether it must be decompressed before it can be read."""
        return self.path.endswith(_COMPRESSED)


def name_pattern(pattern: CorePattern) -> re.Pattern[str]:
    """A pattern of the names of core files, without their directories."""
    suffix = r"\.\d+" if pattern.uses_pid and "p" not in pattern.specifiers else ""
    return re.compile(_expression(os.path.basename(pattern.text)) + suffix)


def _expression(component: str) -> str:
    return "".join(_expand(piece) for piece in re.findall(r"%.|[^%]", component))


def _expand(piece: str) -> str:
    if not piece.startswith("%"):
        return re.escape(piece)
    if piece == "%%":
        return "%"
    if piece[1] in _NUMBERS:
        return r"\d+"
    # Slashes in these are replaced by exclamation marks, so that they stay one component.
    return "[^/]*" if piece[1] in "heEf" else ""


def core_directories(pattern: CorePattern, cwds: Iterable[str]) -> list[str]:
    """The directories that may hold the cores of processes that died in one of ``cwds``."""
    if not pattern.is_file:
        # Handlers may also write one to the process's directory.
        return [*HANDLER_DIRECTORIES, *dict.fromkeys(cwds)]
    directories = list(dict.fromkeys(cwds)) if pattern.is_relative else ["/"]
    for component in os.path.dirname(pattern.text).split("/"):
        if "%" not in component:
            directories = [os.path.join(directory, component) if component else directory for directory in directories]
            continue
        wanted = re.compile(_expression(component))
        directories = [
            entry.path
            for directory in directories
            for entry in _entries(directory)
            if wanted.fullmatch(entry.name) and _is_directory(entry)
        ]
    return directories


def find_cores(pattern: CorePattern, cwds: Sequence[str], since: float) -> list[CoreFile]:
    """All cores that were finished since then, of any process.

    Args:
        pattern: where the kernel writes them.
        cwds: directories in which the processes may have died.
        since: seconds since the epoch.
    """
    found: dict[tuple[int, int], CoreFile] = {}
    for directory in core_directories(pattern, cwds):
        for core in _cores_in(directory, pattern, since):
            found.setdefault(core.inode, core)
    return list(found.values())


def find_cores_below(
    pattern: CorePattern,
    cwds: Sequence[str],
    since: float,
    *,
    within_s: float = _SEARCH_S,
    avoided: Collection[str] = (),
) -> list[CoreFile]:
    """As :func:`find_cores`, in directories below ``cwds`` that have changed since then.

    A program that changes its directory mostly enters one for its output.

    Args:
        pattern: where the kernel writes them.
        cwds: not searched themselves.
        since: seconds since the epoch.
        within_s: how long directories are searched for.
        avoided: directories that are not entered.
    """
    if not pattern.is_relative:
        return []
    return find_cores(pattern, _changed_below(cwds, since - _CLOCK_SLACK_S, within_s, avoided), since)


def _changed_below(roots: Sequence[str], since: float, within_s: float, avoided: Collection[str]) -> list[str]:
    deadline = time.monotonic() + within_s
    changed: list[str] = []
    waiting = [(root, 0) for root in roots]
    for directory, depth in waiting:
        if len(waiting) > _DIRECTORIES_LIMIT or time.monotonic() > deadline:
            break
        for entry in _entries(directory):
            if not _is_directory(entry) or entry.name == ".git" or entry.path in avoided:
                continue
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime >= since:
                    changed.append(entry.path)
            if depth + 1 < _DEPTH:
                waiting.append((entry.path, depth + 1))
    return changed


def _cores_in(directory: str, pattern: CorePattern, since: float) -> Iterator[CoreFile]:
    is_managed = directory in HANDLER_DIRECTORIES
    wanted = name_pattern(pattern) if pattern.is_file else re.compile(r"core(\..*)?")
    for entry in _entries(directory):
        if not wanted.fullmatch(entry.name) and not entry.name.startswith(RENAMED_PREFIX):
            continue
        with suppress(OSError, CoreError):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_mtime < since - _CLOCK_SLACK_S:
                continue
            is_compressed = is_managed and entry.name.endswith(_COMPRESSED)
            fd = open_regular(entry.path)
            try:
                notes = None if is_compressed else read_core_notes(fd, whole=False)
                yield CoreFile(entry.path, notes, identity(fd), is_managed)
            finally:
                os.close(fd)


def handler_has_directory() -> bool:
    """Whether a core handler keeps cores on this host."""
    return any(map(os.path.isdir, HANDLER_DIRECTORIES))


def names_process(core: CoreFile, pid: int) -> bool:
    """Whether a compressed core's name holds this pid: ``core.python.1000.BOOT.PID.TIME.zst``."""
    return core.is_compressed and str(pid) in os.path.basename(core.path).split(".")[3:]


def open_core(core: CoreFile) -> int:
    """Open exactly the file that was found, for reading.

    Raises:
        CoreError: its path now leads to another file, or it cannot be opened.
    """
    fd = open_regular(core.path)
    if identity(fd) != core.inode:
        os.close(fd)
        raise CoreError("the file was replaced")
    return fd


def delete_core(core: CoreFile) -> str:
    """Delete a core if it is still the file that was found. Returns an error message, empty on success."""
    try:
        folder, name = os.path.split(core.path)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if core.is_managed or (status.st_dev, status.st_ino) != core.inode or status.st_uid != os.geteuid():
                return "it is not this user's to delete"
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def move_core(core: CoreFile, path: str) -> str:
    """Move a core to a path on the same file system. Returns its path afterwards: the new one, or the old one."""
    with suppress(OSError):
        folder, name = os.path.split(path)
        fd = open_directory(folder, mapped=True)
        try:
            if core.is_managed or name in os.listdir(fd) or _identity_of(os.lstat(core.path)) != core.inode:
                return core.path
            os.rename(core.path, name, dst_dir_fd=fd)
            if _identity_of(os.stat(name, dir_fd=fd, follow_symlinks=False)) == core.inode:
                return path
            # Another process has replaced it meanwhile. Move that file back: it is no core.
            os.rename(name, core.path, src_dir_fd=fd)
        finally:
            os.close(fd)
    return core.path


def _identity_of(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def why_none(
    pattern: CorePattern,
    cwd: str,
    limits: tuple[int, int],
    others: Sequence[CoreFile],
    *,
    is_raised: bool = False,
) -> str:
    """Why a process that should have left a core has none, in one line.

    Args:
        pattern: what the kernel does with cores.
        cwd: where the process was started; empty if that directory was deleted.
        limits: soft and hard RLIMIT_CORE before anything was raised; -1: none.
        others: cores of other processes where its own would be.
        is_raised: whether saferun has raised the soft limit.
    """
    if not pattern.is_file:
        return _why_none_handled(pattern)
    if limits[1] == 0:
        return "no core: the hard limit on cores is 0 (ulimit -H -c)"
    directory = pattern.directory(cwd)
    if pattern.is_relative and not cwd:
        return "no core: the working directory of the process, to which the kernel writes it, was deleted"
    if pattern.is_shared_name and others:
        return f"no core: that of pid {_pid_text(others[-1])} took its place: {pattern.description()}"
    is_off = limits[0] == 0 and not is_raised
    in_place = file_in_place(directory, pattern.repeated_name) if is_off else ""
    if in_place:
        return f"no core: it would have replaced {in_place}"
    reason = room_for_core(directory, 0)
    if reason:
        return f"no core: {reason}"
    soft = _how_to_raise(pattern) if is_off else ""
    elsewhere = " or below it (a process may change its directory)" if pattern.is_relative else ""
    return f"no core in {directory}{elsewhere}{soft}"


def _how_to_raise(pattern: CorePattern) -> str:
    """What the user has to do where the soft limit is 0 and saferun has left it so, as ``core_limits`` has it."""
    where = "where a local disk has room for the cores of all ranks"
    if in_container(os.environ):
        where = f"in a container only if --cores backtrace is passed, and {where}"
    elif takes_files(pattern):
        where = f"as cores have one name here, only if --cores backtrace is passed, and {where}"
    return f"; the soft limit is 0 (ulimit -c); saferun raises it {where}"


def _why_none_handled(pattern: CorePattern) -> str:
    if not pattern.handler:
        return f"no core: {pattern.description()}"
    if not handler_has_directory():
        return f"the core was piped to {pattern.handler}, not reachable here"
    return f"the core was piped to {pattern.handler}, which has none that may be read here"


def _pid_text(core: CoreFile) -> str:
    return str(core.notes.pid) if core.notes is not None else "another process"


def _entries(directory: str) -> list[os.DirEntry[str]]:
    entries: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(directory) as scan:
        for entry in scan:
            entries.append(entry)
            if len(entries) >= _ENTRIES_LIMIT:
                break
    return entries


def _is_directory(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_dir(follow_symlinks=False)
    return False
