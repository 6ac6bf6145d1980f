"""The cores of dead ranks: found, read, and then deleted or kept.

Only a core that is provably of this run is ever deleted or moved: the process in its notes is a rank that died or one
of its descendants, and it was written after the start.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from saferun.captures.capture_files import files_of_this_process
from saferun.captures.core_reading import CoreJob, CoreReading, core_headline, read_cores, stack_lines
from saferun.captures.tools import Steps, Tool, call_in_child, find_tool, responds, run_steps
from saferun.captures.wire import DEAD_FILE_SYSTEM, NOT_READ, CoreRequest, CoresFound, DeadProcess, LibraryLog
from saferun.evidence.job_evidence import CoreDump, OomKill
from saferun.files.trees import make_directories
from saferun.linux.cgroups import parse_oom_lines
from saferun.linux.core_files import (
    HANDLER_DIRECTORIES,
    CoreFile,
    delete_core,
    find_cores,
    find_cores_below,
    handler_has_directory,
    move_core,
    names_process,
    open_core,
    why_none,
)
from saferun.linux.core_limits import core_limit, room_bytes
from saferun.linux.core_notes import CoreError, CoreNotes, read_core_notes
from saferun.linux.core_pattern import CorePattern, read_core_pattern, room_for_core
from saferun.linux.procfs import is_core_dumping, mount_of, own_mounts
from saferun.linux.scratch import current_directory
from saferun.model import Value
from saferun.text.evidence_redaction import threads_without_secrets
from saferun.text.redaction import redacted_text

# The signals whose default action leaves a core. Source: signal(7).
CORE_SIGNALS = frozenset(
    {
        *(signal.SIGQUIT, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE),
        *(signal.SIGSEGV, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS),
    }
)
# The part of the budget that is kept for reporting.
_WRAP_UP_S = 1.0
# A core handler continues after the process has exited.
_HANDLER_S = 5.0
_POLL_S = 0.1
_BATCH = 4
_UNPACK_S = 60.0
_UNPACKED_FACTOR = 20
# How long a file system may take: to stat a directory, to delete a core, to move one (without copying).
_ANSWER_S = 1.5
_DELETE_S = 5.0
_MOVE_S = 5.0
_FAILED = "\0"  # no path holds it
_GROUP_FRAMES = 3
_SHARED_FRAMES = frozenset({"raise", "abort", "gsignal", "???"})


class Unwritten(Value):
    """A file that will not be written, by its name."""

    name: str


class _Find(Value):
    """A core of this run. ``unpacked`` is a descriptor of its decompressed content; -1: it is not compressed."""

    rank: int
    core: CoreFile
    unpacked: int
    notes: CoreNotes
    is_rank: bool
    executable: str


def examine_cores(request: CoreRequest) -> Iterator[CoreDump | CoresFound | LibraryLog | OomKill | Unwritten | str]:
    """Examine ranks that a signal killed: lines of the kernel log, NCCL's warnings, OOM kills, their cores.

    For a rank whose signal leaves no core, or that was not killed by one, only the cores of its descendants count, such
    as data loaders.

    Args:
        request: whose cores, and what to do with them.
    """
    deadline = time.monotonic() + max(request.budget_s - _WRAP_UP_S, request.budget_s / 2)
    limits = core_limit()
    yield from _from_kernel_log(request)
    yield from _from_nccl(request)
    pattern = read_core_pattern()
    silent = _silent_file_system(request, pattern)
    if silent:
        message = f"no core can be looked for: {DEAD_FILE_SYSTEM}{silent} does not answer"
        yield from _coreless(request, set(), lambda _: message)
        return
    with ExitStack() as stack:

        def unpack(core: CoreFile) -> int:
            # Only made if needed: the file system of the run directory may not respond.
            if request.directory:
                make_directories(request.directory)
            return stack.enter_context(_unpacked(core, request.directory or tempfile.gettempdir(), deadline)).fileno()

        finds, others = _find(request, pattern, limits, deadline, unpack)
        found = {find.notes.pid for find in finds}

        def why(dead: DeadProcess) -> str:
            return why_none(pattern, dead.cwd or current_directory(), limits, others, is_raised=request.may_delete)

        yield from _coreless(request, found, why)
        # The reading may be cut off at any moment, and what it has not come to stays on the disk.
        yield from map(_unread, finds)
        groups: set[tuple[object, ...]] = set()
        for start in range(0, len(finds), _BATCH):
            batch = finds[start : start + _BATCH]
            ranks = sorted({find.rank for find in batch})
            yield CoresFound(tuple(ranks), sum(find.notes.size_bytes for find in batch))
            for find, reading in zip(batch, _readings(batch, deadline, gdb=request.gdb), strict=True):
                # Where cores were switched on before saferun was started, they are the user's.
                dump = _conclude(request, find, reading, groups, may_delete=request.may_delete and limits[0] == 0)
                yield dump
                if unwritten := _write(request, find, dump, reading, deadline):
                    yield Unwritten(unwritten)


def _readings(batch: Sequence[_Find], deadline: float, *, gdb: bool) -> list[CoreReading]:
    """Read each core, from the file that was found, even if its name has been reused."""
    readings = [CoreReading(failure="the file was replaced") for _ in batch]
    with ExitStack() as stack:
        jobs: dict[int, CoreJob] = {}
        for index, find in enumerate(batch):
            fd = find.unpacked
            if fd < 0:
                with suppress(CoreError, OSError):
                    fd = open_core(find.core)
                    stack.callback(os.close, fd)
            if fd >= 0:
                jobs[index] = CoreJob(fd, find.notes, find.notes.executable or find.executable)
        for index, reading in zip(jobs, read_cores(list(jobs.values()), deadline, gdb=gdb), strict=True):
            readings[index] = reading
    return readings


def _unread(find: _Find) -> CoreDump:
    """The entry for a core until it has been read."""
    notes, path = find.notes, find.core.path
    sender_pid, address = notes.sender_pid, notes.address
    return CoreDump(
        find.rank, notes.pid, notes.signum, path, notes.size_bytes, True, "", (), sender_pid, address, NOT_READ
    )


def _coreless(request: CoreRequest, found: set[int], why: Callable[[DeadProcess], str]) -> Iterator[CoreDump]:
    """Entries for processes that should have left a core and have none."""
    for dead in request.dead:
        if dead.signum in CORE_SIGNALS and dead.pid not in found:
            failure = why(dead)
            yield CoreDump(dead.rank, dead.pid, dead.signum, "", 0, kept=False, tool="", threads=(), failure=failure)


def _working_directories(request: CoreRequest) -> list[str]:
    """The directories in which the processes were started, as far as they are known and exist."""
    return list(dict.fromkeys(filter(None, (*(dead.cwd for dead in request.dead), current_directory()))))


def _silent_file_system(request: CoreRequest, pattern: CorePattern) -> str:
    """The mount point of a file system that does not respond and is needed to find cores; empty: all respond."""
    cwds = _working_directories(request)
    paths = cwds if pattern.is_file else [*HANDLER_DIRECTORIES, *cwds]
    if pattern.is_file and not pattern.is_relative:
        paths = [os.path.dirname(pattern.text.partition("%")[0])]
    # The interpreter reads the cores, too.
    for path in dict.fromkeys([*paths, sys.executable]):
        if not responds(path, _ANSWER_S):
            return mount_of(path, own_mounts()) or path
    return ""


# --------------------------------------------------------------------------------------------------------- kernel log


def _from_kernel_log(request: CoreRequest) -> Iterator[OomKill | str]:
    lines: list[str] = []
    with suppress(Exception):  # cores are found even if the log cannot be read
        from saferun.captures.kernel_log import read_kernel_lines

        lines = read_kernel_lines(request.since)
    yield from lines
    killed = {dead.pid for dead in request.dead if dead.signum == signal.SIGKILL}
    for kill in parse_oom_lines(lines):
        if kill.pid in killed:
            scope = "cgroup" if kill.is_cgroup else "host"
            yield OomKill(scope, kill.limit_bytes, kill.rss_bytes, (kill.pid,), 1, "kernel log")
            return


def _from_nccl(request: CoreRequest) -> Sequence[LibraryLog]:
    with suppress(Exception):  # cores are found even without
        from saferun.captures.nccl_log import nccl_warnings

        return nccl_warnings(request.dead)
    return ()


# ------------------------------------------------------------------------------------------------------------- finding


def _find(
    request: CoreRequest,
    pattern: CorePattern,
    limits: tuple[int, int],
    deadline: float,
    unpack: Callable[[CoreFile], int],
) -> tuple[list[_Find], list[CoreFile]]:
    """The cores of dead ranks and their descendants, ranks first; and other processes' cores in their place."""
    cwds = _working_directories(request)
    expected = {dead.pid for dead in request.dead if dead.signum in CORE_SIGNALS}
    cores = find_cores(pattern, cwds, request.since)
    if pattern.handler:
        give_up_at = min(deadline, time.monotonic() + (_HANDLER_S if handler_has_directory() else 0))
        while not all(any(_is_of(core, pid) for core in cores) for pid in expected) and time.monotonic() < give_up_at:
            time.sleep(_POLL_S)
            cores = find_cores(pattern, cwds, request.since)
    elif limits[1] != 0 and not expected <= {core.notes.pid for core in cores if core.notes is not None}:
        seen = {core.inode for core in cores}
        cores += [core for core in find_cores_below(pattern, cwds, request.since) if core.inode not in seen]
    finds: list[_Find] = []
    others: list[CoreFile] = []
    for core in cores:
        dead = _whose(request.dead, core)
        if dead is None:
            others.append(core)
            continue
        _await_dump(core, deadline)
        with suppress(CoreError, OSError):
            unpacked = unpack(core) if core.is_compressed else -1
            notes = _notes_of(core) if unpacked < 0 else read_core_notes(unpacked)
            if core.is_compressed and notes.pid != dead.pid:
                continue
            is_rank = notes.pid == dead.pid
            finds.append(_Find(dead.rank, core, unpacked, notes, is_rank, dead.executable if is_rank else ""))
    finds.sort(key=lambda find: (not find.is_rank, find.rank, find.notes.pid))
    return finds, others


def _notes_of(core: CoreFile) -> CoreNotes:
    fd = open_core(core)
    try:
        return read_core_notes(fd)
    finally:
        os.close(fd)


def _is_of(core: CoreFile, pid: int) -> bool:
    return core.notes.pid == pid if core.notes is not None else names_process(core, pid)


def _whose(dead: Sequence[DeadProcess], core: CoreFile) -> DeadProcess | None:
    """The rank that a core is of, itself or a descendant: a rank leads a session, which its descendants share."""
    for one in dead:
        if _is_of(core, one.pid):
            return one
    notes = core.notes
    return next((one for one in dead if notes is not None and one.pid in {notes.sid, notes.ppid}), None)


def _await_dump(core: CoreFile, deadline: float) -> None:
    """Wait for a core that is still being written. A rank's own is complete once the rank has been reaped."""
    give_up_at = (time.monotonic() + deadline) / 2  # the other half is for reading it
    while core.notes is not None and time.monotonic() < give_up_at and is_core_dumping(core.notes.pid):
        time.sleep(_POLL_S)


@contextmanager
def _unpacked(core: CoreFile, directory: str, deadline: float) -> Iterator[IO[bytes]]:
    """A compressed core's content, in an unlinked file in a directory.

    Raises:
        CoreError: it cannot be decompressed.
        OSError: likewise.
    """
    reason = room_for_core(directory, os.path.getsize(core.path) * _UNPACKED_FACTOR)
    if reason:
        raise CoreError(reason)
    extension = os.path.splitext(core.path)[1]
    module = {".xz": "lzma", ".gz": "gzip"}.get(extension)
    if module:
        program = f"import {module},shutil,sys; shutil.copyfileobj({module}.open(sys.stdin.buffer),sys.stdout.buffer)"
        argv: tuple[str, ...] = (sys.executable, "-P", "-c", program)
    else:
        name = {".zst": "zstd", ".lz4": "lz4"}[extension]
        program = find_tool(name)
        if not program:
            raise CoreError(f"{name} is not installed")
        argv = (program, "-q", "-d", "-c")
    packed = open_core(core)
    with os.fdopen(packed, "rb"), tempfile.TemporaryFile(prefix="saferun-core-", dir=directory) as unpacked:
        # Pages of zeros take no room in the compressed core.
        most_bytes = room_bytes(directory)

        def steps() -> Steps:
            yield Tool(argv, _UNPACK_S, stdin=packed, stdout=unpacked.fileno(), file_bytes=most_bytes)

        run_steps([steps()], at_once=1, deadline=deadline)
        if os.fstat(unpacked.fileno()).st_size >= most_bytes:
            raise CoreError(f"{directory} has no room for it, decompressed")
        yield unpacked


# ---------------------------------------------------------------------------------------------------------- concluding


def _conclude(
    request: CoreRequest, find: _Find, reading: CoreReading, groups: set[tuple[object, ...]], *, may_delete: bool
) -> CoreDump:
    """Delete or keep the core, and describe it."""
    notes, core = find.notes, find.core
    path, is_kept, failure = core.path, True, reading.failure
    if reading.is_taken:
        group = failure_group(notes.signum, reading)
        is_wanted = request.mode == "keep" and group not in groups and len(groups) < request.keep
        if is_wanted:
            groups.add(group)
            if request.directory:
                path, failure = _moved(core, os.path.join(request.directory, _file_name(find, "core")))
        elif may_delete and not core.is_managed:
            error = call_in_child(lambda: delete_core(core), _DELETE_S)
            error = "its file system does not answer" if error is None else error
            is_kept = bool(error)
            failure = failure or (f"it cannot be deleted: {error}" if error else "")
    elif not failure:
        failure = "no tool could read it"
    return CoreDump(
        find.rank,
        notes.pid,
        notes.signum,
        path,
        notes.size_bytes,
        is_kept,
        reading.tool,
        reading.threads,
        notes.sender_pid,
        notes.address,
        failure,
    )


def _moved(core: CoreFile, path: str) -> tuple[str, str]:
    """Move a core to a path. Returns its path afterwards, and why it was not moved."""

    def move() -> str:
        try:
            make_directories(os.path.dirname(path))
        except OSError as error:
            return f"{_FAILED}{error.strerror or error}"
        return move_core(core, path)

    moved = call_in_child(move, _MOVE_S)
    if moved is None:
        moved = f"{_FAILED}the file system of the run directory does not answer"
    if moved.startswith(_FAILED):
        return core.path, f"it stays where it is: {moved.removeprefix(_FAILED)}"
    return moved, ""


def failure_group(signum: int, reading: CoreReading) -> tuple[object, ...]:
    """A key for cores of the same failure: the signal, and where the crashed thread was."""
    frames = reading.threads[0].frames if reading.threads else ()
    named = [frame for frame in frames if frame.function not in _SHARED_FRAMES and "pthread_kill" not in frame.function]
    return (signum, *((frame.function, os.path.basename(frame.file)) for frame in named[:_GROUP_FRAMES]))


def _file_name(find: _Find, suffix: str) -> str:
    process = "" if find.is_rank else f"pid_{find.notes.pid}."
    return f"rank_{find.rank}.{process}{suffix}"


def _write(request: CoreRequest, find: _Find, dump: CoreDump, reading: CoreReading, deadline: float) -> str:
    """Write the text file. Returns its name if it cannot be written, else empty."""
    if not request.directory:
        return ""
    lines = [core_headline(find.notes), *core_lines(dump), *stack_lines(threads_without_secrets(reading.threads))]
    text = redacted_text("\n".join(_tidy(lines)) + (f"\n\n{reading.output}" if reading.output else "") + "\n")
    name = _file_name(find, "core.txt")
    files = files_of_this_process(deadline)
    return "" if files.write(os.path.join(request.directory, name), text.encode(errors="replace")) else name


def core_lines(dump: CoreDump) -> list[str]:
    """The core's path and size, the tool that read it, and what failed."""
    size = f"{dump.size_bytes / 1e6:.1f} MB"
    lines = [f"core {dump.path} ({size}{'' if dump.kept else ', deleted after it was read'})"]
    lines += [f"read by {dump.tool}"] if dump.tool else []
    lines += [dump.failure] if dump.failure else []
    return lines


def _tidy(lines: Iterable[str]) -> Iterator[str]:
    return ("".join(char if char.isprintable() else "?" for char in line) for line in lines)
