"""The last Python calls of ranks, living or dead, from the files in which their hooks record them.

The files are in memory and in a private directory of saferun's. The process does nothing for it.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable

from saferun.captures.call_rings import NAMES_BYTES, SIZE_BYTES, THREADS_BYTES, decode_calls
from saferun.captures.scene import Emit, Scene
from saferun.captures.wire import DeadCalls
from saferun.evidence.call_evidence import RankCalls, ThreadCalls
from saferun.linux.ownership import CAREFULLY
from saferun.linux.small_files import list_directory

_MOST_PROCESSES = 4


def capture_last_calls(scene: Scene) -> None:
    """The last calls of each living rank, and of Pythons that a program around it has started."""
    ranks = {process.pid: process for process in scene.processes if process.is_rank}
    for target in scene.request.targets:
        if not target.hook_prefix or not scene.left_s:
            continue
        key = target.rank, target.pid
        started_at = time.monotonic()
        scene.begin("last_calls", key)
        found = read_calls(target.rank, target.pid, target.hook_prefix)
        for calls in found:
            scene.emit("calls", calls)
        path = ""
        process = ranks.get(target.pid)
        if found and process is not None:
            text = "\n".join(calls_lines(found)) + "\n"
            path = scene.write("last_calls", text.encode(errors="replace"), "txt", process)
        failure = next((calls.failure for calls in found if calls.failure), "") if found else "it has recorded none"
        scene.note("last_calls", key, started_at, path=path, failure=failure)


def read_dead(ranks: Iterable[DeadCalls], emit: Emit) -> None:
    """The last calls of ranks that have ended."""
    for rank in ranks:
        for calls in read_calls(rank.rank, rank.pid, rank.hook_prefix, ended_at=rank.ended_at):
            emit("calls", calls)


def read_calls(rank: int, pid: int, prefix: str, *, ended_at: float | None = None) -> list[RankCalls]:
    """What a rank and its Pythons have recorded; empty where there is nothing.

    Args:
        rank: the rank.
        pid: its process.
        prefix: what the paths of its hook's files begin with.
        ended_at: when it ended, in monotonic seconds; None: it lives.
    """
    directory, stem = os.path.split(prefix)
    pids = []
    for name in list_directory(directory):
        if name.startswith(f"{stem}.") and name.endswith(".calls"):
            number = name[len(stem) + 1 : -len(".calls")]
            if number.isascii() and number.isdecimal() and len(number) < 10:  # noqa: PLR2004 - a pid
                pids.append(int(number))
    own_first = sorted(pids, key=lambda number: (number != pid, number))
    found = (_read(rank, number, f"{prefix}.{number}.calls", ended_at) for number in own_first[:_MOST_PROCESSES])
    return [calls for calls in found if calls is not None]


def _read(rank: int, pid: int, path: str, ended_at: float | None) -> RankCalls | None:
    is_dead = ended_at is not None
    try:
        fd = os.open(path, os.O_RDONLY | CAREFULLY)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return RankCalls(rank, pid, is_dead=is_dead, failure="its file is not one of this user")
            at_ns = int(ended_at * 1e9) if ended_at is not None else time.monotonic_ns()
            content = os.pread(fd, SIZE_BYTES + 1, 0)
            afterwards = os.pread(fd, NAMES_BYTES - THREADS_BYTES, THREADS_BYTES)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        return RankCalls(rank, pid, is_dead=is_dead, failure=f"its file cannot be read: {error.strerror}")
    return decode_calls(content, afterwards, rank=rank, pid=pid, at_ns=at_ns, is_dead=is_dead)


def calls_lines(found: Iterable[RankCalls]) -> list[str]:
    """All that is known, for the capture's file."""
    lines = []
    for calls in found:
        lines.append(f"rank {calls.rank}, pid {calls.pid}{f': {calls.note}' if calls.note else ''}{calls.failure}")
        for thread in calls.threads:
            lines += ["", f"{'main thread' if thread.is_main else 'thread'} {thread.tid}, event {thread.total}"]
            lines += _thread_lines(calls, thread)
    return lines


def _thread_lines(calls: RankCalls, thread: ThreadCalls) -> list[str]:
    lines = []
    for event in thread.events:
        function = calls.function(event)
        name = f"{function.name}  {function.file}:{event.line or function.line}" if function is not None else "?"
        lines.append(f"{-event.before_s:14.6f} s  {event.kind:6}  {name}")
    return lines
