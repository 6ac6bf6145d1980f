"""One hang of the job: its evidence, its diagnosis and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from saferun.cluster.job_values import EvidenceChunk
from saferun.diagnosis.call_timeouts import raised_timeout_s
from saferun.diagnosis.diverging_calls import with_last_calls
from saferun.diagnosis.external_waits import (
    EXTERNAL_WAIT,
    GROUP_TIMEOUT,
    external_ranks,
    suspected,
    unreadable_processes,
    worded_as_suspicion,
)
from saferun.diagnosis.hang import diagnose_hang
from saferun.errors import printable
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, Evidence, HangVerdict, StackDump
from saferun.launch.attempt_record import AttemptRecord, InvestigationContext
from saferun.launch.live_capture import LiveCapture
from saferun.launch.rank import Rank
from saferun.linux.procfs import main_thread_run_s
from saferun.model import ExitStatus, Value
from saferun.report.console_text import hang_goes_on_text, hang_text, suspected_hang_text
from saferun.supervisor.actions import CaptureEvidence, ReportHang
from saferun.supervisor.events import EvidenceCaptured
from saferun.watchdog.verdicts import Repeat

# A capture costs a rank's main thread a few milliseconds at most.
_SIGN_OF_LIFE_S = 0.05
# How long the leader waits for the other hosts' evidence: they capture at the same time, within the same budget.
_OTHERS_S = 10.0
_OUTCOMES = {"report": "continued", "stop": "stopped", "restart": "restarted"}


class _Progress(Value):
    """How much a rank has written and worked so far."""

    output_bytes: int
    run_s: float


class _Judgement(Value):
    """What the leader has found out. ``headline``: empty where that is not known."""

    headline: str
    certain: bool


def _progress(rank: Rank) -> _Progress:
    return _Progress(rank.output_bytes(), main_thread_run_s(rank.pid))


def _end_of(rank: Rank) -> ExitStatus | None:
    """How a rank has ended, or its script where its tool has not."""
    if rank.end is not None:
        return rank.end.status
    return rank.wrapped.status if rank.wrapped is not None else None


class HangIncident(LiveCapture):
    """A hang, from the capture to the report.

    Args:
        context: of the launch.
        record: of the attempt.
        action: which ranks are to be captured, the verdict, and the hang's number.
        verdict: the same.
        on_doubt: takes the verdict where the capture shows that the hang is only suspected, and after how many seconds
            without progress it is certain.
    """

    def __init__(
        self,
        context: InvestigationContext,
        record: AttemptRecord,
        action: CaptureEvidence,
        verdict: HangVerdict,
        on_doubt: Callable[[HangVerdict, float], None],
    ) -> None:
        super().__init__(context, record, action)
        self._verdict = verdict
        self._number = action.number
        self._on_doubt = on_doubt
        self._certain_after_s = 0.0  # where it is only suspected until then
        self._moved_on = False  # it was certain, and the ranks made progress during the capture
        self._before: dict[int, _Progress] = {}  # by local rank, when the capture began
        self._judgement: _Judgement | None = None  # the leader's, on the other hosts
        self._part: tuple[Diagnosis | None, Evidence | None] | None = None  # what is reported when that has come
        if not context.launch.job.leads:
            context.launch.job.reports.subscribe_judgement(self._take_judgement)

    def _start(self, ranks: Sequence[Rank], budget_s: float) -> None:
        # A tool that goes on after its script is no rank at work.
        self._before = {rank.assignment.local_rank: _progress(rank) for rank in ranks if rank.receiver is not None}
        super()._start(ranks, budget_s)

    # ----------------------------------------------------------------------------------------------------------------
    # Diagnosis

    def _conclude(self, capture: Capture, failure: str) -> None:
        self._record.capture = self._explained(capture, failure)
        if not self._context.launch.succeeds("share the evidence", self._share):
            self._context.post(EvidenceCaptured(time.monotonic(), self._action.attempt))

    def _explained(self, capture: Capture, failure: str) -> Capture:
        """The capture, with the reason in place of each rank's stacks that it lacks."""
        failures = (note.failure for note in capture.notes if note.capture == "stacks" and note.failure)
        failure = failure or next(failures, "")
        captured = {dump.rank for dump in capture.stacks if dump.is_rank}
        missing = tuple(
            StackDump(rank.assignment.rank, rank.pid, is_rank=True, name="", tool="", threads=(), failure=failure)
            for rank in self._record.ranks
            if failure
            and rank.assignment.local_rank in self._action.local_ranks
            and rank.assignment.rank not in captured
        )
        return capture._replace(stacks=capture.stacks + missing)

    def _share(self) -> None:
        """Hand in this host's evidence; the leader waits for that of the others."""
        evidence, moved = self._record.gather(self._verdict), self._has_moved()

        def on_done(evidence: Evidence | None, chunks: Sequence[EvidenceChunk]) -> None:
            self._diagnose(evidence, moved=moved or any(chunk.moved for chunk in chunks))

        self._context.exchange().share(
            f"hang-{self._number}", evidence, _OTHERS_S, on_done, attempt=self._action.attempt, moved=moved
        )

    def _diagnose(self, evidence: Evidence | None, *, moved: bool) -> None:
        record = self._record
        record.evidence = evidence
        record.diagnosis = self._context.launch.guarded("diagnose the hang", diagnose_hang, evidence)
        if record.diagnosis is not None and evidence is not None and evidence.capture.calls:
            with_calls = self._context.launch.guarded(
                "compare the last calls", with_last_calls, record.diagnosis, evidence
            )
            record.diagnosis = with_calls or record.diagnosis
        cause = record.diagnosis.cause if record.diagnosis is not None else None
        culprits = cause.ranks if cause is not None else ()
        self._context.launch.job.blamed = culprits
        if moved:
            self._context.launch.guarded("see that the ranks make progress", self._take_back)
        doubted = self._context.launch.guarded("see what the ranks wait for", self._downgrade_if_external_wait) or False
        if self._context.launch.job.leads:
            self._context.launch.guarded("notify the other hosts", self._broadcast)
        self._context.post(
            EvidenceCaptured(
                time.monotonic(), self._action.attempt, record.local_ranks(culprits), moved, doubted=doubted
            )
        )

    def _broadcast(self) -> None:
        """Let the other hosts report what is known here: only this one has the evidence of all."""
        headline = self._record.diagnosis.headline if self._record.diagnosis is not None else ""
        self._context.launch.job.reports.broadcast_judgement(self._number, headline, certain=self._verdict.certain)

    def _take_back(self) -> None:
        """The ranks have gone on since the verdict: it was none, whatever the stacks of some of them show by now."""
        record = self._record
        self._moved_on = self._verdict.certain
        self._set_verdict(self._verdict._replace(certain=False))
        if record.evidence is not None:
            record.evidence = record.evidence._replace(hang=self._verdict)
        if record.diagnosis is not None:
            record.diagnosis = worded_as_suspicion(record.diagnosis)

    def _downgrade_if_external_wait(self) -> bool:
        """Only suspect the hang, where a rank waits for something outside the job, and not for long yet.

        Returns whether the hang was certain until now, and is not any more.
        """
        record, verdict = self._record, self._verdict
        diagnosis, evidence = record.diagnosis, record.evidence
        if diagnosis is None or evidence is None:
            return False
        limit_s, by = self._limit(evidence)
        if not (verdict.certain and self._context.launch.job.leads and verdict.lasted_s < limit_s):
            return False
        ranks = external_ranks(evidence, diagnosis.cause)
        if not ranks:
            return False
        doubted = verdict._replace(certain=False)
        diagnosis = suspected(diagnosis, ranks, limit_s, unreadable_processes(evidence), by=by)
        self._on_doubt(verdict, limit_s)
        # From here on nothing can fail: all that is known of the hang changes at once.
        self._set_verdict(doubted)
        record.evidence, record.diagnosis = evidence._replace(hang=doubted), diagnosis
        self._certain_after_s = limit_s
        return True

    def _limit(self, evidence: Evidence) -> tuple[float, str]:
        """After how many seconds a hang that may end by itself is certain, and what sets that time."""
        watch, record = self._context.launch.config.watch, self._record
        # A recorder may answer the first time and never again.
        record.raised_timeout_s = max(record.raised_timeout_s, raised_timeout_s(evidence.capture.collectives))
        is_due = watch.external_wait_asked or self._verdict.kind == "heartbeat"
        if is_due or record.raised_timeout_s <= watch.external_wait_s:
            return watch.external_wait_s, EXTERNAL_WAIT
        return record.raised_timeout_s, GROUP_TIMEOUT

    def _set_verdict(self, verdict: HangVerdict) -> None:
        if self._record.verdict is self._verdict:
            # Else the hang has been reported: what the ranks do by now may be another one, or none.
            self._record.verdict = verdict
        self._verdict = verdict

    def _has_moved(self) -> bool:
        """Whether there is no hang, or it is over: a rank has worked, written or ended well during the capture."""
        for rank in self._record.ranks:
            before = self._before.get(rank.assignment.local_rank)
            if before is None:
                continue
            status = _end_of(rank)
            if status is not None and status.ok:
                return True
            if rank.receiver is None or status is not None:
                continue
            now = _progress(rank)
            # A rank that busy-loops in a hang goes on doing so.
            works = now.run_s - before.run_s > _SIGN_OF_LIFE_S and rank.assignment.rank not in self._verdict.busy
            if works or now.output_bytes != before.output_bytes:
                return True
        return False

    # ----------------------------------------------------------------------------------------------------------------
    # Report

    def report(self, action: ReportHang, repeat: Repeat) -> None:
        """Report the hang; ``repeat``: how often that has been done, and when it is next."""
        diagnosis = self._record.diagnosis
        if not self._context.launch.job.leads:
            self._part = (diagnosis, self._record.evidence)
            if self._judgement is not None:
                self.finish()
        elif diagnosis is not None:
            self._context.launch.guarded("report the hang", self._report, action, diagnosis, repeat)
        else:
            self._context.print_verdict(self._verdict)

    def _take_judgement(self, number: int, headline: str, certain: bool) -> None:  # noqa: FBT001 - as it is heard
        if number == self._number and self._judgement is None:
            self._judgement = _Judgement(headline, certain)
            self._context.launch.guarded("report the hang", self.finish)

    def finish(self) -> None:
        """Report this host's part if that still waits for what the leader says, which may not come."""
        part, self._part = self._part, None
        if part is not None:
            self._report_part(*part, self._judgement)

    def _report_part(
        self, diagnosis: Diagnosis | None, evidence: Evidence | None, judgement: _Judgement | None
    ) -> None:
        """The leader reports the hang; the report of this host keeps its own evidence."""
        context, lines = self._context, []
        if judgement is not None:
            nothing = "no rank on any host makes progress" if judgement.certain else "the job may hang"
            lines = [f"saferun: {judgement.headline or nothing}; {context.launch.job.leader} has the report"]
            known = self._record.reported_hang
            is_new = not known or (judgement.certain and known != (True,))
            if is_new and context.launch.job.is_head and not context.launch.another_host_prints:
                context.launch.screen.print_message(printable(lines[0]))
                self._record.hang_shown = lines[0].partition("; ")[0]
            self._record.reported_hang = (judgement.certain,)
        if diagnosis is None:
            return
        if judgement is not None and self._verdict.certain and not judgement.certain:
            diagnosis = worded_as_suspicion(diagnosis)
            evidence = evidence._replace(hang=self._verdict._replace(certain=False)) if evidence is not None else None
        context.launch.guarded("report", self._record.add_incident, "hang", diagnosis, "continued", lines, evidence)

    def _report(self, action: ReportHang, diagnosis: Diagnosis, repeat: Repeat) -> None:
        verdict, log = self._verdict, self._context.log
        step, count, next_s = action.next_step, repeat.times, repeat.next_s
        calls = self._record.evidence.capture.calls if self._record.evidence is not None else ()
        lines = hang_text(
            diagnosis,
            verdict,
            host=log.host,
            files=log.files,
            on_hang=step,
            count=count,
            next_s=next_s,
            calls=calls,
        )
        is_alive = self._moved_on and step == "report"
        if is_alive:
            lines[-1] = "saferun: job left running: it made progress during the capture"
        seen = _seen(verdict, diagnosis)
        is_counted = False
        if verdict.certain:
            # On a terminal one line counts how long it goes on.
            since = time.monotonic() - verdict.lasted_s if step == "report" else 0.0
            is_counted = self._context.launch.screen.set_status("hang", "the job hangs" if since else None, since=since)
        if count > 1 and seen == self._record.reported_hang and not is_alive:
            # The report has it whole.
            if not is_counted:
                again = hang_goes_on_text(diagnosis, verdict, on_hang=step, count=count, next_s=next_s)
                self._context.print_lines(again)
        elif verdict.certain or is_alive or log.files is None:
            self._context.print_lines(lines)
        else:
            lasts_s, wanted = self._certain_after_s, self._context.launch.config.watch.on_hang
            short = suspected_hang_text(diagnosis, files=log.files, certain_after_s=lasts_s, on_hang=wanted)
            self._context.print_lines(short)
        self._record.reported_hang = seen
        self._record.add_incident("hang", diagnosis, _OUTCOMES[step], lines)


def _seen(verdict: HangVerdict, diagnosis: Diagnosis) -> tuple[object, ...]:
    """What a hang that is reported again has in common with the one that was reported before."""
    cause = diagnosis.cause
    return verdict.kind, *((cause.class_name, cause.ranks, cause.location) if cause is not None else ())
