"""What the supervisor may need once the ranks run, imported at a quiet moment after their start.

While ranks run the supervisor opens no file of saferun's or Python's: the file system that holds them may be the one
that hangs, and whoever opens a file there hangs with it. At the start nothing is imported that a launch in good order
can do without, because every launch would wait for it. So it is done in between: the examiner imports all of it first,
beside the ranks, and says so; only then, a moment later and one module at a time, does the supervisor.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable

from saferun.errors import suppress
from saferun.linux.search_path import search_theirs_last
from saferun.model import ExitStatus

MODULES = (
    # To watch the ranks
    "saferun.evidence",
    "saferun.watch_run",
    "saferun.watchdog.verdicts",
    "saferun.watchdog.job",
    "saferun.linux.stuck",
    # To have them looked at, and to know what was seen
    "saferun.captures.wire",
    "saferun.captures.gaps",
    "saferun.host.cgroups",
    "saferun.host.core_watch",
    "saferun.host.core_files",
    "saferun.host.core_notes",
    "saferun.host.shared_memory",
    "saferun.host.start_marks",
    "saferun.diagnosis",
    "saferun.diagnosis.crash",
    "saferun.diagnosis.hang",
    "saferun.diagnosis.start",
    "saferun.findings",
    "saferun.policy.facts",
    # To check this host beside the ranks
    "saferun.preflight_run",
    # To tell it
    "saferun.report.text",
    "saferun.report.redaction",
    "saferun.report.report_json",
    "saferun.report.report_text",
    "saferun.report.preflight_json",
    "saferun.report.preflight_text",
    "textwrap",
    "saferun.lint.findings",
)
"""In the order in which they are wanted."""
FOR_SEVERAL_HOSTS = ("saferun.job_watch", "saferun.exchange")
"""What a job of several hosts takes beside."""
# The processor is left to the ranks for three times as long as a module takes.
_PAUSE_FACTOR = 3.0
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


class IdleImports:
    """Imports modules in the supervisor, one at a time.

    Args:
        python_path: the user's PYTHONPATH.
        on_imported: told, once, when all of them are there.
    """

    def __init__(self, python_path: str, on_imported: Callable[[], None]) -> None:
        self.deadline: float | None = None
        self._python_path = python_path
        self._on_imported = on_imported
        self._names: deque[str] = deque()

    def begin(self, names: Iterable[str]) -> None:
        """Begin now. ``names``: in an order in which each depends on those before it, as far as possible."""
        search_theirs_last(self._python_path)
        self._names = deque(name for name in names if name not in sys.modules)
        self.deadline = 0.0

    def tick(self, now: float) -> None:
        """Import the next one, where that is due."""
        if self.deadline is None or self.deadline > now:
            return
        while self._names and self._names[0] in sys.modules:
            self._names.popleft()
        if not self._names:
            self.deadline = None
            self._on_imported()
            return
        began = time.monotonic()
        with suppress(Exception):  # who needs it says what is wrong with it
            __import__(self._names.popleft())
        ended = time.monotonic()
        self.deadline = ended + min(max((ended - began) * _PAUSE_FACTOR, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)

    @property
    def pids(self) -> set[int]:
        """It has no processes."""
        return set()

    def on_exit(self, _pid: int, _status: ExitStatus) -> bool:
        """A child has been reaped. It was none of these."""
        return False

    def close(self) -> None:
        """What is not there yet is not needed any more."""
        self.deadline = None
        self._names.clear()
