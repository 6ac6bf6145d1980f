"""The end of an attempt on this host: diagnosis, report, messages to the other hosts, the end of the launch."""

from __future__ import annotations

import os
import time
from functools import partial

from saferun.errors import suppress
from saferun.launch.launch_context import LaunchContext
from saferun.model import ABORT_ORDERS, RANKS_DONE
from saferun.supervisor import actions, events
from saferun.supervisor.machine import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.files.file_stream import WriterAnswer
    from saferun.launch.retry_waits import RetryWaits
    from saferun.report.report_json import Outcome

# Of more retries than that the waits are those of the policy itself.
_MOST_WAITS = 64
# A wait that is counted down on a terminal; a shorter one is over at once.
_SHOWN_WAIT_S = 2.0


class AttemptEnd:
    """Ends the attempts of a launch on this host, one after the other.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._stop_signum: int | None = None
        self._waits: RetryWaits | None = None
        self._cause_sent_in = -1
        self._diagnosed: events.Diagnosed | None = None  # what this host has found out last

    # ----------------------------------------------------------------------------------------------------------------
    # Diagnosis and report

    def diagnose(self, action: actions.Diagnose) -> None:
        """Find the cause; Diagnosed follows."""
        self._stop_signum = action.stop_signum
        self._context.ranks.close()
        group = self._context.current.group

        def diagnose_now() -> None:
            context = self._context
            context.guarded("compute the waits before retries", self._draw_up_waits)
            if not context.succeeds("find the cause", context.investigation.diagnose, action):
                unknown: Any = actions.Undiagnosed(action.error or actions.ATTEMPT_FAILED, abandoned=action.abandoned)
                context.post(events.Diagnosed(time.monotonic(), action.attempt, unknown))

        def diagnose() -> None:
            if self._context.current.group is group:
                self._context.ranks.when_imported(State.DIAGNOSING, diagnose_now)

        if group is None:
            diagnose()
        else:
            group.left_files.when_read(diagnose)

    def _draw_up_waits(self) -> None:
        """Something has failed: have the waits before retries drawn up, once a launch."""
        config = self._context.config
        wait_s = config.retry.wait_s
        count = min(config.retry.start_retries + config.max_restarts, _MOST_WAITS)
        if self._waits is not None or count <= 0 or wait_s <= 0:
            return
        with suppress(ImportError):
            from saferun.launch.retry_waits import RetryWaits

            self._waits = RetryWaits(
                self._context.guarded_poller,
                lambda budget_s: self._context.examiner.ask("waits", [wait_s, count], budget_s, is_urgent=False)[1],
                self._context.supervisor.take_waits,
            )
            self._context.loop.add_watching(self._waits)

    def post_investigated(self, event: events.Event) -> None:
        """Post what was found out. A start that is tried again waits a second anyway: it can wait for the waits."""
        if isinstance(event, events.Diagnosed):
            self._diagnosed, facts = event, event.facts
            if self._waits is not None and facts is not None and facts.is_start_over is False and facts.is_transient:
                self._waits.need(lambda: self._context.post(event))
                return
        self._context.post(event)

    def report_failure(self, action: actions.ReportFailure) -> None:
        """Report why the attempt failed, and what follows."""
        context = self._context
        action = action._replace(diagnosis=context.investigation.completed(action.diagnosis))
        if not context.succeeds("report the failure", context.investigation.report_failure, action):
            context.report(action.diagnosis.headline)
        if action.restarting and action.decision is not None and action.decision.wait_s >= _SHOWN_WAIT_S:
            self._context.screen.set_status("retry", "starting again", until=time.monotonic() + action.decision.wait_s)
        if action.decision is not None and action.decision.new_port:
            self._context.setup.release_port()
        if not action.restarting:
            self._write_error_file(action, action.diagnosis.headline, action.diagnosis)
        self._context.ranks.forget()
        if action.restarting and not (action.decision is not None and action.decision.new_port):
            context.guarded("check this host", context.checks.check_early, context.attempt + 1)

    # ----------------------------------------------------------------------------------------------------------------
    # Other hosts

    def post_from_job(self, event: events.Event) -> None:
        """Post what happened on other hosts; the end of an attempt that this host still prepares waits for that."""
        current = self._context.current
        is_met = current.assignment is not None  # else it is of the previous attempt
        is_early = self._context.supervisor.state is State.JOINING and is_met and not current.has_joined
        if is_early and isinstance(event, events.JobAborted | events.JobDecided):
            current.held.append(event)
            return
        if isinstance(event, events.StopRequested) or (
            isinstance(event, events.JobAborted) and (event.signum or event.reason == "membership")
        ):
            event = event._replace(idle_s=self._context.investigation.hangs.strict_idle_s())
        self._context.post(event)

    def broadcast_abort(self, action: actions.BroadcastAbort) -> None:
        """Have the attempt end on all hosts, by an entry in the job's log; each of them gets JobAborted for it."""
        message, ranks = action.message, tuple(self._context.job.blamed)
        if action.reason == "failure":
            first = self._context.current.first_failure()
            ranks = (first.assignment.rank,) if first is not None else ()
            if first is not None and self._context.investigation.is_victim(first.assignment.rank):
                action = action._replace(reason="victim")
            if first is not None and first.end is not None:
                message = message or f"rank {first.assignment.rank}: {first.end.status.description}"
        self._context.job.abort_attempt(
            action.reason, message or action.reason, hint=action.hint, ranks=ranks, signum=action.signum
        )

    def broadcast_request(self, action: actions.BroadcastRequest) -> None:
        """Have all other hosts end the job too: the user has asked this one."""
        self._context.job.broadcast_request(action.by, at_once=action.at_once)

    def broadcast_checkpoint(self, action: actions.BroadcastCheckpoint) -> None:
        """Have the ranks of all other hosts save a checkpoint and end."""
        self._context.job.broadcast_checkpoint(action.by, action.signum)

    def report_restart(self, action: actions.ReportRestart) -> None:
        """Report that a user has all ranks started again."""
        context = self._context
        message = f"starting again at once, as {action.by} asked"
        context.report(message)
        if context.job.leads:
            context.investigation.note_restart(message)

    def broadcast_cause(self, action: actions.BroadcastCause) -> None:
        """Have the hosts that wait for the cause of a victim's failure wait no more, if a rank here has shown it."""
        if self._cause_sent_in != action.attempt and self._context.investigation.is_cause_shown():
            self._cause_sent_in = action.attempt
            self._context.job.broadcast_cause()

    def notify_done(self, _action: actions.NotifyDone) -> None:
        """Report to the leader that every rank here has ended with exit code 0."""
        self._context.job.reports.set_state({"s": RANKS_DONE})

    def broadcast_decision(self, action: actions.BroadcastDecision) -> None:
        """Send all hosts what follows."""
        lines: list[str] = []
        if action.diagnosis is not None:
            restarting, investigation = action.next_step == "restart", self._context.investigation
            diagnosis = investigation.completed(action.diagnosis)
            lines = investigation.decision_text(diagnosis, restarting=restarting, decision=action.decision)
        self._context.job.broadcast_decision(action, lines)

    def report_decision(self, action: actions.ReportDecision) -> None:
        """Report what the leader has decided."""
        context = self._context
        context.guarded("report the failure", context.investigation.report_decision, action)
        if not action.restarting:
            what = action.messages[0] if action.messages else "the job has failed; see the report of its leader"
            self._write_error_file(action, what.removeprefix("saferun: "))
        context.ranks.forget()
        if action.restarting:
            context.guarded("check this host", context.checks.check_early, context.attempt + 1)

    def _write_error_file(
        self, action: actions.ReportFailure | actions.ReportDecision, message: str, diagnosis: Diagnosis | None = None
    ) -> None:
        diagnosed, own = self._diagnosed, None
        if diagnosed is not None and diagnosed.attempt == action.attempt:
            own = diagnosed.diagnosis
        self._context.guarded(
            "write TORCHELASTIC_ERROR_FILE",
            _write_error_file,
            self._context,
            message,
            (diagnosis, own),
            action.stop_signum,
        )

    # ----------------------------------------------------------------------------------------------------------------
    # The end of the launch

    def finish(self, action: actions.Finish) -> None:
        """The launch is over, but for the end of the run."""
        # By a signal to this host, or to another one of the job.
        reason = self._context.job.abort_reason
        in_attempt = self._stop_signum is not None or (reason is not None and reason.reason in ABORT_ORDERS)
        stopped = in_attempt or bool(action.by)
        if action.reraise is None:
            self._context.torchrun_events.launch_ended(
                self._context.ended_attempt, self._context.attempt, stopped=stopped
            )
        self._context.job.end = action
        if action.exit_code:
            self._context.guarded("make the run directory again", self._context.run_dir.restore)
        self._context.guarded("end the checks", self._context.checks.settle)
        self._context.guarded("write how the launch has ended", partial(self._write_end, action, stopped=stopped))

    def _write_end(self, action: actions.Finish, *, stopped: bool) -> None:
        incidents = self._context.investigation.log
        outcome: Outcome = "left" if action.leaves else "succeeded" if action.exit_code == 0 else "failed"
        if stopped:
            outcome = "stopped"  # perhaps all hosts got the signal
        incidents.finish(action.exit_code, outcome)
        self._context.log.finish(action.exit_code, outcome, headline=incidents.last_headline)


def _write_error_file(
    context: LaunchContext, message: str, diagnoses: Sequence[Diagnosis | None], stop_signum: int | None
) -> None:
    """Have TORCHELASTIC_ERROR_FILE written, if it is set: for the program that started saferun, as under torchrun.

    Each host writes what the first of its own ranks that failed has recorded, if it has recorded anything.

    Args:
        context: the launch.
        message: why the attempt that is over has failed.
        diagnoses: of the job and of this host, as far as there are any.
        stop_signum: the signal that ended the attempt; None: it ended otherwise.
    """
    path = context.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    current, source, returncode, since = context.current, "", 0, 0.0
    first = current.own_failure(*diagnoses)
    own = current.plan.placement.ranks if current.plan is not None else ()
    assignment = next((one for one in own if first is not None and one.rank == first.rank), None)
    if stop_signum is not None:
        # The text of torchrun's exception, which programs that read this file may know.
        message = f"SignalException: Process {os.getpid()} got signal: {stop_signum}"
    elif first is not None and current.plan is not None and assignment is not None:
        source = current.plan.destinations.error_files[current.plan.position(assignment)]
        returncode = first.status.returncode
    elif context.config.hosts.spans_hosts:
        # Several saferuns of the job may have one file in common: what a rank of another has recorded says more.
        since = current.started_time

    def on_answer(answer: WriterAnswer | None) -> None:
        if answer is None:
            context.warn(f"TORCHELASTIC_ERROR_FILE {path}: the file system does not answer")
        elif answer.error is not None:
            context.warn(f"TORCHELASTIC_ERROR_FILE {path}: {answer.error.strerror}")

    context.run_dir.files.ask("write_error", [path, message, source, returncode, since], on_answer)
