"""Files of a capture, written so that a file system that does not respond delays no capture.

A capture reports its findings through a pipe; its files are for later. During a job they are sent to the writer, which
writes them when the run directory's file system responds. Without a writer (``saferunctl stacks``) a thread writes
them: the capture waits for it for a bounded time, and then continues without the file.
"""

from __future__ import annotations

import os
import queue
import threading
import time

from saferun.files.hand_in import hand_in
from saferun.files.trees import open_parent
from saferun.linux.ownership import open_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.files.inbox import Outbox

# The share of a capture's remaining time that may be spent on waiting for files, in total.
_SHARE = 1 / 3
_MOST_S = 5.0
# The writer takes a thousand files a second; a slower one is not waited for.
_NO_ROOM_S = 0.5

_outbox: Outbox | None = None


def hand_files_to(outbox: Outbox) -> None:
    """Have all files of captures of this process and its forks written by the writer."""
    global _outbox  # noqa: PLW0603 - a process has one
    _outbox = outbox


class CaptureFiles:
    """The files that one process of a capture writes.

    Args:
        deadline: when the capture's time is over, in monotonic seconds.
    """

    def __init__(self, deadline: float) -> None:
        self._patience_s = min(_MOST_S, max(0.0, deadline - time.monotonic()) * _SHARE)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job] | None = None

    def write(self, path: str, content: bytes) -> str:
        """Write a file, or have the writer write it.

        Returns:
            Its path; empty if it cannot be written, or not in time, or if too much waits for the writer.
        """
        if _outbox is not None:
            return path if self._give(_outbox, path, content) else ""
        job = _Job(path, content)
        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(self._jobs,), daemon=True).start()
            self._jobs.put(job)
            patience_s = self._patience_s
        began_at = time.monotonic()
        is_done = job.done.wait(patience_s)
        with self._lock:
            # All files share the time: the first one that hangs takes all of it.
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_at))
        return job.written if is_done else ""

    def _give(self, outbox: Outbox, path: str, content: bytes) -> bool:
        began_at = time.monotonic()
        is_given = hand_in(outbox, path, content, min(self._patience_s, _NO_ROOM_S))
        with self._lock:
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_at))
        return is_given


class _Job:
    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self.content = content
        self.written = ""
        self.done = threading.Event()


def _serve(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        job = jobs.get()
        try:
            _write(job.path, job.content)
            job.written = job.path
        except OSError:
            pass
        job.done.set()


def _write(path: str, content: bytes) -> None:
    # Open files and command lines of a process are private to its user.
    parent, name, _ = open_parent(path)
    try:
        fd = open_ours(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=parent, mapped=True)
    finally:
        os.close(parent)
    with open(fd, "wb") as file:
        file.write(content)


_own: tuple[int, CaptureFiles] | None = None


def files_of_this_process(deadline: float) -> CaptureFiles:
    """The files of this process; each fork has its own."""
    global _own  # noqa: PLW0603 - a process has one
    if _own is None or _own[0] != os.getpid():
        _own = os.getpid(), CaptureFiles(deadline)
    return _own[1]
