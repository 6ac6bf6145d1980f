"""What the supervisor may need once the ranks run, imported at a quiet moment after their start.

While ranks run the supervisor opens no file of saferun's or Python's: the file system that holds them may hang, and the
supervisor would hang with it. At the start nothing is imported that a launch without faults does not need, since every
launch would wait for it. So it is imported in between: a child of the examiner imports all of it beside the ranks,
sends the code, and exits; the supervisor imports that from memory, a moment later and one module at a time.

Code that needs the modules earlier (a rank has failed at once) makes that child hurry, and is called when they have
come. If they do not come, nothing waits for them: imports fail, and the features that need them are missing, with one
line.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from saferun.errors import suppress
from saferun.linux.helper import NoHelperError, NoHelperLeftError, PartBase
from saferun.linux.procfs import runnable_per_processor
from saferun.linux.search_path import search_theirs_last

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.held_code import HeldModules
    from saferun.linux.poller import Poller

MODULES = (
    # To watch the ranks
    "saferun.evidence.job_evidence",
    "saferun.evidence.diagnosis_values",
    "saferun.captures.inspection_values",
    "saferun.text.typed_json",
    "saferun.text.script_state",
    "saferun.launch.step_notes",
    "saferun.text.master_port",
    "saferun.watchdog.monitor",
    "saferun.watchdog.verdicts",
    "saferun.watchdog.job_verdicts",
    "saferun.watchdog.stragglers",
    "saferun.watchdog.wait_watch",
    "saferun.linux.stuck",
    "saferun.linux.locked_code",
    "saferun.linux.heap",
    # To capture them, and to read the captures
    "saferun.captures.wire",
    "saferun.captures.missing_files",
    "saferun.linux.cgroups",
    "saferun.linux.core_saving",
    "saferun.linux.core_files",
    "saferun.linux.core_notes",
    "saferun.linux.handled_cores",
    "saferun.linux.left_output",
    "saferun.linux.connections",
    "saferun.linux.shm_segments",
    "saferun.linux.start_marks",
    "saferun.diagnosis",
    "saferun.diagnosis.crash",
    "saferun.diagnosis.pending_cause",
    "saferun.diagnosis.hang",
    "saferun.diagnosis.external_waits",
    "saferun.diagnosis.diverging_calls",
    "saferun.diagnosis.start_stage",
    "saferun.preflight.results",
    "saferun.diagnosis.host_fault",
    "saferun.launch.bad_hosts",
    "saferun.supervisor.policy.facts",
    "saferun.launch.retry_waits",
    # To check this host beside the ranks
    "saferun.preflight.driver",
    # To report it
    "saferun.console.drawing",
    "saferun.console.folding",
    "saferun.console.message_style",
    "saferun.console.open_colors",
    "saferun.console.rows",
    "saferun.console.log_rows",
    "saferun.console.status_line",
    "saferun.report.shown_traceback",
    "saferun.report.console_text",
    "saferun.captures.capture_query",
    "saferun.launch.live_capture",
    "saferun.launch.cause_wait",
    "saferun.cluster.job_values",
    "saferun.cluster.evidence_exchange",
    "saferun.launch.incident_hang",
    "saferun.launch.slow_ranks",
    "saferun.launch.recorder_rounds",
    "saferun.watchdog.recorded_stragglers",
    "saferun.launch.incident_failure",
    "saferun.text.redaction",
    "saferun.report.report_json",
    "saferun.report.report_text",
    "saferun.report.slow_text",
    "saferun.preflight.json_report",
    "saferun.preflight.findings_text",
    "textwrap",
    "saferun.env.lint.findings",
    # To give a rank the keyboard, in another attempt
    "saferun.linux.terminal_mode",
    "saferun.launch.rank_terminals",
    # To answer saferunctl
    "saferun.supervisor.requests",
    "saferun.linux.control_socket",
    "saferun.report.run_json",
    "saferun.launch.live_status",
    "saferun.launch.host_stacks",
    "saferun.launch.asked_stacks",
    "saferun.launch.attached_viewer",
    "saferun.launch.debugged_ranks",
    "saferun.launch.control_part",
    # For a writer that takes the place of one that was lost
    "saferun.files.writer_process",
)
"""In the order in which they are needed."""
FOR_SEVERAL_HOSTS = ("saferun.watchdog.job_detector", "saferun.cluster.evidence", "saferun.launch.hosts_at_fault")
"""What a job of several hosts needs in addition."""
BEFORE_SEVERAL_HOSTS = (
    "saferun.watchdog.job_verdicts",
    "saferun.watchdog.monitor",
    "saferun.watchdog.job_detector",
    "saferun.watchdog.wait_watch",
    "saferun.linux.stuck",
    "saferun.text.redaction",
    "saferun.env.lint.findings",
    "saferun.supervisor.requests",
)
"""Those of them that messages of other hosts may need as soon as the ranks run: imported while the hosts meet."""
# After each module the processor is left to the ranks for so many times as long as its import took.
_PAUSE_FACTOR = 3.0
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
# The process that reads the code has so long for all of it, and is asked again after a while.
_BUDGET_S = 600.0
_AGAIN_S = 5.0
# If nothing has come for so long, callers that wait are called without it; longer if the machine is so busy that the
# process that reads the code may only wait for a processor, and longest if that process is seen to run.
_PATIENCE_S = 5.0
_BUSY_PATIENCE_S = 30.0
_RUNNING_PATIENCE_S = 90.0
_BUSY_PER_PROCESSOR = 2.0
_RECHECK_S = 1.0
# How long the loop itself waits for a module that is missing in these lists.
_FETCH_S = 2.0
_READ_BYTES = 1 << 16


class IdleImports(PartBase):
    """Imports modules in the supervisor, one at a time, without opening a file.

    Args:
        python_path: the user's PYTHONPATH.
        on_imported: called once, when all of them are there.
        poller: the loop's.
        ask: has code read by another process: takes the modules and a time limit, and returns a descriptor to read
            what :class:`saferun.linux.held_code.ImportRecorder` writes from. Raises OSError where no process can read
            now, NoHelperError where none ever could, and NoHelperLeftError where none will.
        hurry: has the process that reads do so without pauses from now on.
        reader_runs: whether that process has run since the last call, or is ready to.
        wanted: the modules, in the order in which they are needed.
    """

    def __init__(
        self,
        python_path: str,
        on_imported: Callable[[], None],
        *,
        poller: Poller,
        ask: Callable[[Sequence[str], float], int],
        hurry: Callable[[], None],
        reader_runs: Callable[[], bool],
        wanted: Sequence[str] = (),
    ) -> None:
        self._python_path = python_path
        self._on_imported = on_imported
        self._poller = poller
        self._ask = ask
        self._hurry = hurry
        self._reader_runs = reader_runs
        self._wanted = tuple(wanted)
        self._names: deque[str] = deque()
        self._has_begun = False
        self._import_at: float | None = None
        self._ask_at: float | None = None
        self._held: HeldModules | None = None
        self._fd = -1
        self._is_there = False
        self._is_patient = True
        self._may_block = True
        self._is_closed = False
        self._waiting: deque[Callable[[], None]] = deque()
        self._give_up_at = self._needed_at = 0.0

    # ----------------------------------------------------------------------------------------------- beside the loop

    @property
    def is_sealed(self) -> bool:
        """Whether ranks have been started, so that no file is opened for an import."""
        return self._held is not None

    def seal(self) -> None:
        """The ranks have been started: no file is opened for an import any more."""
        if self._held is None:
            from saferun.linux.held_code import HeldModules

            self._held = HeldModules(self._fetch)
            self._held.seal()

    def import_now(self, names: Iterable[str]) -> None:
        """Import modules from their files, unless the ranks have been started."""
        for name in () if self.is_sealed else names:
            with suppress(Exception):  # what needs it reports what is wrong with it
                __import__(name)

    def begin(self) -> None:
        """The ranks have had their moment: have the modules read, and import them."""
        search_theirs_last(self._python_path)
        self._has_begun = True
        self.seal()
        if self._is_there:
            self._import_at = 0.0
        else:
            self._request()

    def need(self, call: Callable[[], None]) -> None:
        """Call back when the modules can be imported: at once if they can be, or if nothing is sealed yet.

        Where they do not come they are absent, and the call is made all the same.
        """
        if self._held is None or self._is_there or not self._is_patient or self._is_closed:
            call()
            return
        if not self._waiting:
            self._needed_at = time.monotonic()
            self._give_up_at = self._needed_at + _PATIENCE_S
        self._waiting.append(call)
        self._request()

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds; None: not by time."""
        moments = [moment for moment in (self._import_at, self._ask_at) if moment is not None]
        if self._waiting:
            moments.append(self._give_up_at)
        return min(moments, default=None)

    def tick(self, now: float) -> None:
        """Import the next module, ask again, or go on without, whichever is due."""
        try:
            self._tick(now)
        except Exception:
            self._is_patient = False
            self._call_all()  # nothing more will come
            raise

    def _tick(self, now: float) -> None:
        if self._ask_at is not None and self._ask_at <= now:
            self._request()
        if self._waiting and self._give_up_at <= now:
            if self._may_come(now - self._needed_at):
                self._give_up_at = now + _RECHECK_S
            else:
                self._is_patient = False
                self._call_all()
        if self._import_at is not None and self._import_at <= now:
            self._import_next()

    def _may_come(self, waited_s: float) -> bool:
        """Whether what has not come in that time is late for want of processors, and not of a file."""
        if self._reader_runs():
            return waited_s < _RUNNING_PATIENCE_S
        return waited_s < _BUSY_PATIENCE_S and runnable_per_processor() > _BUSY_PER_PROCESSOR

    def close(self) -> None:
        """Modules that have not come are no longer needed."""
        self._import_at = self._ask_at = None
        self._is_closed = True
        self._waiting.clear()
        self._drop()

    # ------------------------------------------------------------------------------------------------------ the code

    def _request(self) -> None:
        self._ask_at = None
        held = self._held
        if self._is_closed or held is None or self._is_there:
            return
        if self._fd < 0:
            self._have_read(held)
        if self._waiting and self._fd >= 0:
            self._hurry()

    def _have_read(self, held: HeldModules) -> None:
        held.begin()
        try:
            self._fd = self._ask(self._wanted, _BUDGET_S)
        except NoHelperError:
            # No other process can read it, so this one has to: no launch would have captures and reports otherwise.
            held.unseal()
            self._have(self._wanted)
            return
        except NoHelperLeftError:
            # What ended each of the processes that were to read it may end, or hang, this one.
            self._is_patient = False
            self._call_all()
            return
        except OSError:
            # The process that read it has been lost, perhaps to the file system on which the code lies.
            self._ask_at = time.monotonic() + _AGAIN_S
            return
        self._poller.watch(self._fd, partial(self._on_readable, held))

    def _on_readable(self, held: HeldModules) -> None:
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if chunk:
            held.feed(chunk)
            self._give_up_at = time.monotonic() + _PATIENCE_S
            return
        self._drop()
        if held.order is not None:
            self._have(held.order)
        else:
            self._ask_at = time.monotonic() + _AGAIN_S

    def _drop(self) -> None:
        if self._fd >= 0:
            self._poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _have(self, names: Iterable[str]) -> None:
        """All can be imported. ``names``: in an order in which each depends on those before it."""
        self._names = deque(names)
        self._is_there = self._is_patient = self._may_block = True
        if self._has_begun:
            self._import_at = 0.0
        self._call_all()

    def _call_all(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _fetch(self, name: str) -> bool | None:
        """Have a module read that is missing in the lists. The loop waits for it briefly, and only once."""
        if self._held is None or self._is_closed or not self._is_patient or not self._may_block:
            return False
        try:
            fd = self._ask([name], _FETCH_S)
        except NoHelperError:
            return None
        except OSError:
            return False
        give_up_at = time.monotonic() + _FETCH_S
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        content = b""
        try:
            while poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
                chunk = os.read(fd, _READ_BYTES)
                content += chunk
                if not chunk:
                    self._held.feed_apart(content)
                    return True
            self._may_block = False
            self._is_patient = self._reader_runs()
        finally:
            os.close(fd)
        return False

    def _import_next(self) -> None:
        names = self._names
        while names and names[0] in sys.modules:
            names.popleft()
        if not names:
            self._import_at = None
            if self._held is not None:
                self._held.forget()
            self._on_imported()
            return
        began = time.monotonic()
        with suppress(Exception):  # what needs it reports what is wrong with it
            __import__(names.popleft())
        ended = time.monotonic()
        self._import_at = ended + min(max((ended - began) * _PAUSE_FACTOR, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)
