"""All that watches the ranks of a launch, captures them, and reports why they hang or fail.

Nothing in here can fail a launch. What only an incident takes is loaded while the ranks run (``launch.idle_imports``);
where it cannot be loaded, the supervisor gets its answers all the same, and the user a line without the cause.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import count

from saferun.launch.attempt_record import ENDED_BY_HANG, NO_TIME, AttemptRecord, InvestigationContext
from saferun.launch.hang_watch import HangWatch, JobHangWatch
from saferun.launch.incident_log import IncidentLog
from saferun.launch.launch_context import LaunchContext
from saferun.launch.rank_group import RankGroup
from saferun.launch.rank_hook import RankHook
from saferun.linux.helper import PartBase
from saferun.supervisor.actions import (
    ATTEMPT_FAILED,
    AwaitCause,
    CaptureEvidence,
    Diagnose,
    HurryDiagnosis,
    ReportDecision,
    ReportFailure,
    ReportHang,
)
from saferun.supervisor.events import CauseShown, Diagnosed, EvidenceCaptured

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.evidence.job_evidence import HangVerdict
    from saferun.launch.cause_wait import CauseWait
    from saferun.launch.incident_hang import HangIncident
    from saferun.supervisor.policy import Decision


class Investigation(PartBase):
    """Watches the ranks of a launch, and investigates its incidents. A part of the loop (``linux.part``).

    Args:
        launch: the launch, and its other parts.
        others_s: how long the evidence of other hosts is waited for after a failure.

    Attributes:
        hangs: the watch of the current attempt's ranks.
        log: the incidents so far.
        hook: the start-up hook of the ranks.
    """

    def __init__(self, launch: LaunchContext, others_s: float = 0.0) -> None:
        self._launch = launch
        self._guarded = launch.guarded
        self.log = IncidentLog(
            launch.config,
            launch.run_dir,
            host=launch.host,
            run_id=launch.run_id,
            guarded=launch.guarded,
            on_written=launch.page.request,
            notify=launch.on_event.notify if launch.on_event is not None else None,
        )
        self.hook = RankHook(launch)
        self._context = InvestigationContext(launch, self.hook, self.log, others_s, count(1))
        self._has_imported = False
        self._hang: HangIncident | None = None
        self._noted_groups_of = -1  # the number of the attempt
        self._cause_wait: CauseWait | None = None
        self._begin_attempt(AttemptRecord(self._context))

    def _begin_attempt(self, record: AttemptRecord) -> None:
        self._record = record
        watch = JobHangWatch if self._launch.config.hosts.spans_hosts else HangWatch
        self.hangs = watch(self._context, record, self._report_recovery)

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        if self.log.is_due:
            return 0.0
        running = self._record.running
        moments = [self.hangs.deadline, running.deadline if running is not None else None]
        moments.append(self._cause_wait.deadline if self._cause_wait is not None else None)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        self.log.write()
        record = self._record
        if record.running is not None and record.running.deadline <= now:
            record.running.expire(*([NO_TIME] if record.read_until <= now else []))
        self.hangs.tick(now)
        if self._cause_wait is not None and now >= self._cause_wait.deadline and self._is_shown(self._cause_wait, now):
            self._cause_wait = None
            self._context.post(CauseShown(now, self._launch.attempt))

    @property
    def is_capturing(self) -> bool:
        """Whether the ranks are captured now."""
        return self._record.running is not None

    def close(self) -> None:
        """End whatever runs."""
        self.attempt_ended()

    # ----------------------------------------------------------------------------------------------------------------
    # The ranks

    def attempt_begins(self) -> None:
        """Another attempt begins, without ranks so far: a start that fails has nothing to do with the previous ones."""
        if self._record.group is not None:
            self._begin_attempt(AttemptRecord(self._context))

    def ranks_started(self, group: RankGroup, now: float) -> None:
        """The ranks of an attempt run."""
        self._begin_attempt(AttemptRecord(self._context, group, now))
        self._guarded("mark the start in the kernel log", self._launch.examiner.ranks_started, now)
        self._guarded("watch the ranks", partial(self.hangs.begin, now, has_imported=self._has_imported))

    def imported(self) -> None:
        """All modules that an incident takes are in memory from now on."""
        self._has_imported = True
        self._guarded("watch the ranks", self.hangs.imported)
        self._guarded("keep the start-up hook", self.hook.copy_to_memory)

    def attempt_ended(self) -> None:
        """No rank is left, or none that could be captured."""
        self._guarded("note when the ranks had a process group", self._note_groups)
        self._cause_wait = None
        self._launch.screen.set_status("hang", None)
        self._guarded("end the watch", self.hangs.end)
        if self._hang is not None:
            self._guarded("report the hang", self._hang.finish)
        self._keep_running()

    def _note_groups(self) -> None:
        """Write an event of when the ranks of this attempt had their first process group, once it is known of all."""
        record, attempt = self._record, self._launch.attempt
        prefixes = {
            rank.assignment.rank: self.hook.memory_prefix(attempt, rank.assignment.rank) for rank in record.ranks
        }
        if self._noted_groups_of == attempt or not any(prefixes.values()):
            return
        if "saferun.linux.start_marks" not in sys.modules and self._launch.current.first_failure() is None:
            return  # the launch is shorter than the imports beside it, which its end does not wait for
        is_last = not record.living

        def write() -> None:
            from saferun.linux.start_marks import group_times

            times = group_times(prefixes)
            if len(times) == len(prefixes) or is_last:
                self._noted_groups_of = attempt
            if times:
                now = {"time": time.time(), "monotonic_s": time.monotonic(), "attempt": attempt}
                event = {"event": "RanksInitialized", **now, "ranks": list(times), "times": list(times.values())}
                self._launch.run_dir.write_event(event)

        self._launch.imports.need(partial(self._guarded, "note when the ranks had a process group", write))

    def _keep_running(self) -> None:
        if self._record.running is not None:
            from saferun.launch.live_capture import keep_running

            self._guarded("keep the evidence", keep_running, self._context, self._record)

    # ----------------------------------------------------------------------------------------------------------------
    # Hangs

    def capture(self, action: CaptureEvidence) -> None:
        """Capture the ranks that run; the answer is EvidenceCaptured."""
        self._guarded("pause the watch", self.hangs.pause)
        self._record.verdict = action.verdict or self._record.verdict
        if self._hang is not None:
            self._guarded("report the hang", self._hang.finish)
        self._hang = None
        if not self._launch.succeeds("capture", self._begin_capture, action):
            self._context.post(EvidenceCaptured(time.monotonic(), action.attempt))

    def _begin_capture(self, action: CaptureEvidence) -> None:
        from saferun.launch.incident_hang import HangIncident
        from saferun.launch.live_capture import LiveCapture

        if action.verdict is None:
            LiveCapture(self._context, self._record, action).begin()
        else:
            self._hang = HangIncident(
                self._context,
                self._record,
                action,
                action.verdict,
                self.hangs.downgrade_to_suspected,
            )
            self._hang.begin()

    def report_hang(self, action: ReportHang) -> None:
        """Report the hang that has just been captured."""
        self._guarded("note when the ranks had a process group", self._note_groups)
        record, now = self._record, time.monotonic()
        self._guarded("watch the ranks", self.hangs.captured, now)
        if record.verdict is not None:
            self._guarded("report the hang", self._report_verdict, action, record.verdict)
        record.last_hang = (record.capture, record.verdict)
        if action.next_step == "report":
            # This evidence is not about a later failure.
            record.capture = record.verdict = None
            self._guarded("watch the ranks", self.hangs.resume, now)

    def _report_verdict(self, action: ReportHang, verdict: HangVerdict) -> None:
        if self._hang is not None:
            self._hang.report(action, self.hangs.repeat(verdict))
        elif self._launch.job.leads:
            self._context.print_verdict(verdict)

    def _report_recovery(self, lasted_s: float) -> None:
        from saferun.report.console_text import recovery_text

        self._launch.screen.set_status("hang", None)
        self._launch.screen.print_message(recovery_text(lasted_s))
        self.log.note_recovery(lasted_s)

    # ----------------------------------------------------------------------------------------------------------------
    # Failures

    def diagnose(self, action: Diagnose) -> None:
        """Read what the dead ranks left, and find the cause; the answer is Diagnosed."""
        self._keep_running()
        if not self._launch.succeeds("find the cause", self._begin_diagnosis, action):
            diagnosis = self._record.undiagnosed(action)
            self._context.post(Diagnosed(time.monotonic(), action.attempt, diagnosis))

    def hurry_diagnosis(self, action: HurryDiagnosis) -> None:
        """A signal came meanwhile: what dead ranks left is not read to the end, also if that has not begun."""
        record = self._record
        record.read_until = min(record.read_until, time.monotonic() + action.within_s)
        if record.running is not None:
            record.running.deadline = min(record.running.deadline, record.read_until)

    def await_cause(self, action: AwaitCause) -> None:
        """A victim has failed: see whether one of these ranks shows the cause; the answer is CauseShown."""
        if not self._launch.succeeds("wait for the cause", self._begin_wait, action):
            self._context.post(CauseShown(time.monotonic(), action.attempt))

    def _begin_wait(self, action: AwaitCause) -> None:
        from saferun.launch.cause_wait import CauseWait

        self._cause_wait = CauseWait(self._context, self._record, action)

    def _is_shown(self, wait: CauseWait, now: float) -> bool:
        is_shown = self._guarded("wait for the cause", wait.poll, now)
        return is_shown is None or bool(is_shown)

    def is_victim(self, rank: int) -> bool:
        """Whether a rank that has failed is the victim of another, as far as that is known at once."""
        return self._has_imported and bool(self._guarded("find out why a rank failed", _is_victim, self._record, rank))

    def is_cause_shown(self) -> bool:
        """Whether a rank of this host has failed by itself, as far as that is known at once."""
        return self._has_imported and bool(self._guarded("find out why a rank failed", _is_cause_shown, self._record))

    def _begin_diagnosis(self, action: Diagnose) -> None:
        from saferun.launch.incident_failure import FailureIncident

        FailureIncident(self._context, self._record, action).begin()

    def completed(self, diagnosis: Diagnosis) -> Diagnosis:
        """A diagnosis; where none has come in time, what is known without one."""
        return self._guarded("see which rank failed first", _with_first_failure, self._record, diagnosis) or diagnosis

    def report_failure(self, action: ReportFailure) -> None:
        """Report why the attempt failed, and what happens next."""

        def report() -> None:
            from saferun.launch.incident_failure import report_failure

            report_failure(self._context, self._record, action)

        if not self._launch.succeeds("report the failure", report):
            self._context.print_lines([f"saferun: {action.diagnosis.headline}"])

    def report_decision(self, action: ReportDecision) -> None:
        """Report what the leader has decided, in its words; the report keeps the evidence of this host."""
        job, record = self._launch.job, self._record
        lines = list(action.messages) or [f"saferun: the job has failed; see {job.leader}'s report"]
        if job.is_head and not self._launch.another_host_prints:
            is_shown = record.hang_shown and lines[0].startswith(record.hang_shown)
            self._context.print_lines([f"saferun: {ENDED_BY_HANG}", *lines[1:]] if is_shown else lines)
        if record.diagnosis is not None:
            record.add_failure(record.diagnosis, lines, restarting=action.restarting)

    def note_restart(self, message: str) -> None:
        """A user has all ranks started again: a row of the report."""

        def note() -> None:
            from saferun.supervisor.policy.decision_row import DecisionRow

            self.log.add_decision(
                DecisionRow(self._launch.attempt, time.time(), "restart", message, class_name="request")
            )

        self._guarded("report the restart", note)

    def decision_text(self, diagnosis: Diagnosis, *, restarting: bool, decision: Decision | None = None) -> list[str]:
        """What the other hosts report to their users of a failed attempt."""

        def peer_lines() -> list[str]:
            from saferun.launch.incident_failure import peer_lines

            return peer_lines(self._context, self._record, diagnosis, decision, restarting=restarting)

        return self._guarded("notify the other hosts", peer_lines) or [f"saferun: {diagnosis.headline}"]


def _with_first_failure(record: AttemptRecord, diagnosis: Diagnosis) -> Diagnosis:
    is_none = diagnosis.headline == ATTEMPT_FAILED
    return diagnosis._replace(headline=record.first_failure or ATTEMPT_FAILED) if is_none else diagnosis


def _is_cause_shown(record: AttemptRecord) -> bool:
    from saferun.diagnosis.pending_cause import is_shown

    return is_shown(record.gather(None))


def _is_victim(record: AttemptRecord, rank: int) -> bool:
    from saferun.diagnosis.pending_cause import is_victim

    return is_victim(record.gather(None), rank)
