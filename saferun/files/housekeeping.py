"""What is done beside a launch about the runs of this user: the index of runs, how many there are, ``--keep-runs``.

So are temporary directories of runs that were killed together with their reapers.

The writer process has a fork do it, at a moment when there is nothing to be written: the home directory may be on
another file system than the run directory, one that hangs. What cannot be done is left out.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping

from saferun.errors import suppress
from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.prctl import die_with_parent, set_name
from saferun.model import JsonObject, Value

BEAT_S = 60.0
"""How often the writer process of a launch sets the time of its events.jsonl: it lives."""
_BEGIN_AFTER_S = 0.5
# At the end of a short launch; removal of what was asked for may take longer than a check.
_LAST_S = 0.5
_LAST_REMOVAL_S = 3.0
_COUNTING_S = 10.0
_MOST_BYTES = 4096


class Housework(Value):
    """What is to be done.

    Attributes:
        run_id: the run's; empty: it is not for the index.
        path: its directory.
        base: the directory of runs; empty: the user chose another place.
        keep_runs: how many runs are kept there; 0: all.
    """

    run_id: str
    path: str
    base: str
    keep_runs: int


class Housekeeper:
    """Has it done by a fork, in the writer process.

    Args:
        on_found: takes what ``do_housework`` returned.
    """

    def __init__(self, on_found: Callable[[JsonObject], None]) -> None:
        self._on_found = on_found
        self._work: Housework | None = None
        self._begin_at: float | None = None
        self._beat_at = time.monotonic() + BEAT_S
        self._pid = 0
        self._fd = -1

    @property
    def due(self) -> float:
        """When ``step`` is due, in monotonic seconds."""
        return self._beat_at if self._begin_at is None else min(self._beat_at, self._begin_at)

    def step(self, poll: select.poll, ready: Mapping[int, int], beat: Callable[[], None]) -> None:
        """Do what is due.

        Args:
            poll: what the process waits with.
            ready: descriptors that it has found ready.
            beat: shows other hosts that this one lives.
        """
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            beat()
        if self._begin_at is not None and now >= self._begin_at and not ready:
            self._begin(_COUNTING_S)
            if self._fd >= 0:
                poll.register(self._fd, select.POLLIN)
        elif self._fd in ready:
            poll.unregister(self._fd)
            self._take()

    def plan(self, work: Housework) -> None:
        """Do this, soon. Only the first time counts."""
        if self._work is None:
            self._work = work
            self._begin_at = time.monotonic() + _BEGIN_AFTER_S

    def finish(self) -> None:
        """The launch is over: what has not been done is done now, if that is quick."""
        if self._begin_at is not None:
            self._begin(0.0)
        if self._fd < 0:
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        removes = self._work is not None and self._work.keep_runs
        if not poll.poll((_LAST_REMOVAL_S if removes else _LAST_S) * 1000):
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            return
        self._take()

    def _begin(self, counting_s: float) -> None:
        self._begin_at = None
        work = self._work
        if work is None:
            return
        with suppress(OSError):
            fd, theirs = os.pipe()
            parent_pid = os.getpid()

            def run() -> None:
                die_with_parent(parent_pid)
                set_name("sr-runs")
                close_all_but(theirs)
                found = do_housework(work, os.environ, counting_s)
                os.write(theirs, json.dumps(found).encode())

            try:
                self._pid = fork(run)
                self._fd = fd
            finally:
                os.close(theirs)
                if self._fd < 0:
                    os.close(fd)

    def _take(self) -> None:
        found = None
        with suppress(OSError, ValueError):
            found = json.loads(os.read(self._fd, _MOST_BYTES))
        os.close(self._fd)
        self._fd = -1
        with suppress(OSError):
            os.waitpid(self._pid, 0)
        if isinstance(found, dict):
            self._on_found(found)


def do_housework(work: Housework, environ: Mapping[str, str], counting_s: float) -> JsonObject:
    """Do it.

    Args:
        work: what.
        environ: says where the index of runs is.
        counting_s: how long sizes may be counted for.

    Returns:
        ``runs``: how many runs there are; ``size_bytes``: how large they are, as far as that was counted; ``removed``:
        how many runs were removed.
    """
    from saferun.files.run_index import index_path, note_run
    from saferun.linux.abandoned_scratch import remove_abandoned

    remove_abandoned()
    index = index_path(environ)
    if index and work.run_id:
        with suppress(OSError):
            note_run(index, work.run_id, work.path)
    if not work.base:
        return {"runs": 0, "size_bytes": 0, "removed": 0}
    from saferun.files.run_removal import keep_newest, open_base, run_names, size_of

    removed, total = 0, 0
    try:
        fd = open_base(work.base)
    except OSError:
        return {"runs": 0, "size_bytes": 0, "removed": 0}
    if work.keep_runs:
        removed = keep_newest(fd, work.keep_runs)
    names = run_names(fd)
    until = time.monotonic() + counting_s
    for name in names:
        if time.monotonic() >= until:
            break
        total += size_of(fd, name, until)
    os.close(fd)
    return {"runs": len(names), "size_bytes": total, "removed": removed}
