"""The cores of dead ranks: found, read, and then deleted or kept.

Only what is provably a core of this run is ever deleted or moved: the process in its notes is a rank that died or one
of its family, and it was written after the start.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from saferun.captures.capture_files import files_of_this_process
from saferun.captures.core_reading import CoreJob, CoreReading, core_headline, read_cores, stack_lines
from saferun.captures.tools import Steps, Tool, answers, called_apart, find_tool, run_steps
from saferun.captures.wire import DEAD_FILE_SYSTEM, CoreRequest, CoresFound, DeadProcess
from saferun.evidence import CoreDump, OomKill
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
from saferun.linux.core_notes import CoreError, CoreNotes, read_core_notes
from saferun.linux.core_pattern import CorePattern, read_core_pattern, room_for_core
from saferun.linux.procfs import is_core_dumping
from saferun.linux.stuck import mount_of, mounts_of
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
# What is left of the budget for saying what has been found.
_WRAP_UP_S = 1.0
# A program that cores are piped to goes on after the process is gone.
_HANDLER_S = 5.0
_LOOK_AGAIN_S = 0.1
_BATCH = 4
_UNPACK_S = 60.0
_UNPACKED_FACTOR = 20
# How long a file system is waited for: to tell of a directory, to delete a core, to move one (which copies nothing).
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
    """A core of this run. ``unpacked`` is its content where it had to be unpacked; -1: it did not."""

    rank: int
    core: CoreFile
    unpacked: int
    notes: CoreNotes
    is_rank: bool
    executable: str


def examine_cores(request: CoreRequest) -> Iterator[CoreDump | CoresFound | OomKill | Unwritten | str]:
    """What is known of ranks that a signal killed: lines of the kernel log, the OOM killer's work, their cores.

    A rank whose signal makes no core, or that was killed by none, is looked at for the cores of its family alone, data
    loaders above all.

    Args:
        request: whose cores, and what is to become of them.
    """
    deadline = time.monotonic() + max(request.budget_s - _WRAP_UP_S, request.budget_s / 2)
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    yield from _from_kernel_log(request)
    pattern = read_core_pattern()
    silent = _silent_file_system(request, pattern)
    if silent:
        words = f"no core can be looked for: {DEAD_FILE_SYSTEM}{silent} does not answer"
        yield from _coreless(request, set(), lambda _: words)
        return
    with ExitStack() as stack:

        def unpack(core: CoreFile) -> int:
            # Made where it is wanted alone: the file system of the run directory may not answer.
            if request.directory:
                make_directories(request.directory)
            return stack.enter_context(_unpacked(core, request.directory or tempfile.gettempdir(), deadline)).fileno()

        finds, others = _find(request, pattern, limits, deadline, unpack)
        found = {find.notes.pid for find in finds}
        yield from _coreless(request, found, lambda dead: why_none(pattern, dead.cwd or os.getcwd(), limits, others))
        groups: set[tuple[object, ...]] = set()
        for start in range(0, len(finds), _BATCH):
            batch = finds[start : start + _BATCH]
            ranks = sorted({find.rank for find in batch})
            yield CoresFound(tuple(ranks), sum(find.notes.size_bytes for find in batch))
            for find, reading in zip(batch, _readings(batch, deadline, gdb=request.gdb), strict=True):
                look = _conclude(request, find, reading, groups)
                yield look
                if unwritten := _write(request, find, look, reading, deadline):
                    yield Unwritten(unwritten)


def _readings(batch: Sequence[_Find], deadline: float, *, gdb: bool) -> list[CoreReading]:
    """What is read of each, from the file that was found, whatever has its name by now."""
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


def _coreless(request: CoreRequest, found: set[int], why: Callable[[DeadProcess], str]) -> Iterator[CoreDump]:
    """Those of whom there should be a core, and is none."""
    for dead in request.dead:
        if dead.signum in CORE_SIGNALS and dead.pid not in found:
            failure = why(dead)
            yield CoreDump(dead.rank, dead.pid, dead.signum, "", 0, kept=False, tool="", threads=(), failure=failure)


def _silent_file_system(request: CoreRequest, pattern: CorePattern) -> str:
    """The mount point of a file system that does not answer, and without which no core is found; empty: all answer."""
    cwds = [*(dead.cwd for dead in request.dead if dead.cwd), os.getcwd()]
    places = cwds if pattern.is_file else [*HANDLER_DIRECTORIES, *cwds]
    if pattern.is_file and not pattern.is_relative:
        places = [os.path.dirname(pattern.text.partition("%")[0])]
    # The interpreter reads the cores, too.
    for place in dict.fromkeys([*places, sys.executable]):
        if not answers(place, _ANSWER_S):
            return mount_of(place, mounts_of(os.getpid())) or place
    return ""


# --------------------------------------------------------------------------------------------------------- kernel log


def _from_kernel_log(request: CoreRequest) -> Iterator[OomKill | str]:
    lines: list[str] = []
    with suppress(Exception):  # a log that cannot be read costs its own lines and nothing else
        from saferun.captures.kernel_log import read_kernel_lines

        lines = read_kernel_lines(request.since)
    yield from lines
    killed = {dead.pid for dead in request.dead if dead.signum == signal.SIGKILL}
    for kill in parse_oom_lines(lines):
        if kill.pid in killed:
            scope = "cgroup" if kill.is_cgroup else "host"
            yield OomKill(scope, kill.limit_bytes, kill.rss_bytes, (kill.pid,), 1, "kernel log")
            return


# ------------------------------------------------------------------------------------------------------------- finding


def _find(
    request: CoreRequest,
    pattern: CorePattern,
    limits: tuple[int, int],
    deadline: float,
    unpack: Callable[[CoreFile], int],
) -> tuple[list[_Find], list[CoreFile]]:
    """The cores of the dead and their families, the ranks' own first; and cores of others where theirs would be."""
    cwds = list(dict.fromkeys([*(dead.cwd for dead in request.dead if dead.cwd), os.getcwd()]))
    expected = {dead.pid for dead in request.dead if dead.signum in CORE_SIGNALS}
    cores = find_cores(pattern, cwds, request.since)
    if pattern.handler:
        give_up_at = min(deadline, time.monotonic() + (_HANDLER_S if handler_has_directory() else 0))
        while not all(any(_is_of(core, pid) for core in cores) for pid in expected) and time.monotonic() < give_up_at:
            time.sleep(_LOOK_AGAIN_S)
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
    """The rank that a core is of, or whose family it is of: a rank leads a session, and its children have it too."""
    for one in dead:
        if _is_of(core, one.pid):
            return one
    notes = core.notes
    return next((one for one in dead if notes is not None and one.pid in {notes.sid, notes.ppid}), None)


def _await_dump(core: CoreFile, deadline: float) -> None:
    """Wait for a core that is still being written. A rank's own is complete when its end is known."""
    give_up_at = (time.monotonic() + deadline) / 2  # what is left is for reading it
    while core.notes is not None and time.monotonic() < give_up_at and is_core_dumping(core.notes.pid):
        time.sleep(_LOOK_AGAIN_S)


@contextmanager
def _unpacked(core: CoreFile, directory: str, deadline: float) -> Iterator[IO[bytes]]:
    """A compressed core's content, in a file without a name that lies in a directory.

    Raises:
        CoreError: it cannot be had.
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

        def steps() -> Steps:
            yield Tool(argv, _UNPACK_S, stdin=packed, stdout=unpacked.fileno())

        run_steps([steps()], at_once=1, deadline=deadline)
        yield unpacked


# ---------------------------------------------------------------------------------------------------------- concluding


def _conclude(request: CoreRequest, find: _Find, reading: CoreReading, groups: set[tuple[object, ...]]) -> CoreDump:
    """Write what was read, and delete or keep the core."""
    notes, core = find.notes, find.core
    path, is_kept, failure = core.path, True, reading.failure
    if reading.is_taken:
        group = failure_group(notes.signum, reading)
        is_wanted = request.mode == "keep" and group not in groups and len(groups) < request.keep
        if is_wanted:
            groups.add(group)
            if request.directory:
                path, failure = _moved(core, os.path.join(request.directory, _file_name(find, "core")))
        elif not core.is_managed:
            trouble = called_apart(lambda: delete_core(core), _DELETE_S)
            trouble = "its file system does not answer" if trouble is None else trouble
            is_kept = bool(trouble)
            failure = failure or (f"it cannot be deleted: {trouble}" if trouble else "")
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
    """Where a core is that should be moved to a path, and what kept it from there."""

    def move() -> str:
        try:
            make_directories(os.path.dirname(path))
        except OSError as error:
            return f"{_FAILED}{error.strerror or error}"
        return move_core(core, path)

    moved = called_apart(move, _MOVE_S)
    if moved is None:
        moved = f"{_FAILED}the file system of the run directory does not answer"
    if moved.startswith(_FAILED):
        return core.path, f"it stays where it is: {moved.removeprefix(_FAILED)}"
    return moved, ""


def failure_group(signum: int, reading: CoreReading) -> tuple[object, ...]:
    """What cores of the same failure have in common: the signal, and where the crashed thread was."""
    frames = reading.threads[0].frames if reading.threads else ()
    told = [frame for frame in frames if frame.function not in _SHARED_FRAMES and "pthread_kill" not in frame.function]
    return (signum, *((frame.function, os.path.basename(frame.file)) for frame in told[:_GROUP_FRAMES]))


def _file_name(find: _Find, suffix: str) -> str:
    process = "" if find.is_rank else f"pid_{find.notes.pid}."
    return f"rank_{find.rank}.{process}{suffix}"


def _write(request: CoreRequest, find: _Find, look: CoreDump, reading: CoreReading, deadline: float) -> str:
    """Write the text. The name of its file, where that cannot be written; else empty."""
    if not request.directory:
        return ""
    lines = [core_headline(find.notes), *core_words(look), *stack_lines(threads_without_secrets(reading.threads))]
    text = redacted_text("\n".join(_tidy(lines)) + (f"\n\n{reading.output}" if reading.output else "") + "\n")
    name = _file_name(find, "core.txt")
    files = files_of_this_process(deadline)
    return "" if files.write(os.path.join(request.directory, name), text.encode(errors="replace")) else name


def core_words(look: CoreDump) -> list[str]:
    """Where the core is, how large, who read it, and what went wrong with it."""
    size = f"{look.size_bytes / 1e6:.1f} MB"
    lines = [f"core {look.path} ({size}{'' if look.kept else ', deleted after it had been read'})"]
    lines += [f"read by {look.tool}"] if look.tool else []
    lines += [look.failure] if look.failure else []
    return lines


def _tidy(lines: Iterable[str]) -> Iterator[str]:
    return ("".join(char if char.isprintable() else "?" for char in line) for line in lines)
