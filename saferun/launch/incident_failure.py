"""One failed attempt: what its dead ranks left, the evidence of all hosts, the diagnosis and the report."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial

from saferun.captures.wire import CaptureReader, CoreRequest, DeadCalls, DeadProcess, RecorderFile
from saferun.cluster.evidence_exchange import abort_reason_of
from saferun.cluster.job_values import EvidenceChunk
from saferun.diagnosis import diagnose
from saferun.diagnosis.diverging_calls import with_last_calls
from saferun.diagnosis.host_fault import host_faults
from saferun.diagnosis.start_stage import read_store_stage, stage_by_time, start_stage
from saferun.errors import printable
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import AbortReason, Evidence, OomKill, RankCollectives, RankOutput
from saferun.launch.attempt_record import CORE_BUDGET_S, ENDED_BY_HANG, NO_TIME, AttemptRecord, InvestigationContext
from saferun.launch.bad_hosts import note_bad_hosts
from saferun.launch.live_capture import new_directory, note_gaps, start_capture
from saferun.launch.rank import Rank
from saferun.linux.cgroups import oom_kill_between, read_memory_state
from saferun.linux.scratch import current_directory
from saferun.linux.start_marks import ranks_with_group
from saferun.report.console_text import failure_text, peer_text
from saferun.report.shown_traceback import is_above
from saferun.supervisor.actions import Diagnose, ReportFailure
from saferun.supervisor.ending import Hung, Leave, Stopped
from saferun.supervisor.events import Diagnosed
from saferun.supervisor.machine import State
from saferun.supervisor.policy import Decision, FailureFacts
from saferun.supervisor.policy.decision_row import DecisionRow
from saferun.supervisor.policy.facts import facts_from, progress_of

_ASK_KERNEL = ("killed by signal", "CUDA", "NCCL", "RCCL", "HIP ", "HSA_", "cuda", "ncclRemoteError")
"""What a rank that exited by itself may have printed where the kernel log knows more."""

# Of hosts that are left out at once.
_MOST_NAMED = 16
# Ranks that were captured so shortly before one failed were where they still are then.
_SAME_MOMENT_S = 1.0
# How long files of the Flight Recorder may be read where there is no core.
_RECORDERS_S = 10.0
# torch appends the rank; what they name without being set is another job's as well.
_RECORDER_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class FailureIncident:
    """The end of a failed attempt, from the cores to the diagnosis. It answers Diagnosed.

    Args:
        context: of the launch.
        record: of the attempt.
        action: how the attempt ended.
    """

    def __init__(self, context: InvestigationContext, record: AttemptRecord, action: Diagnose) -> None:
        self._context = context
        self._record = record
        self._action = action
        self._cores = context.launch.cores
        self._is_concluded = False

    def begin(self) -> None:
        """Read the cores, if any; then gather, diagnose and answer."""
        record, action = self._record, self._action
        if record.concluded_attempt == action.attempt and record.evidence is not None:
            # The evidence is complete; but since then the leader has been lost.
            record.evidence = record.evidence._replace(
                error=action.error,
                error_hint=action.error_hint,
                abort_reason=abort_reason_of(self._context.launch.job),
            )
            self._post(stopped=False)
            return
        if action.hung and record.capture is None:
            # The leader has ended the job because of the hang that was captured last.
            record.capture, record.verdict = record.last_hang
        wants_cores = self._context.launch.config.watch.cores != "off"
        dead = (self._context.launch.guarded("look for cores", self._dead) or []) if wants_cores else []
        recorders = self._context.launch.guarded("look for Flight Recorders", self._recorders) or ()
        calls = self._context.launch.guarded("look for last calls", self._dead_calls) or ()
        if dead or recorders or calls:
            self._context.launch.guarded("read what dead ranks left", self._read_remains, dead, recorders, calls)
        if self._record.running is None and not self._is_concluded:
            self._conclude(None, "")

    # ----------------------------------------------------------------------------------------------------------------
    # Cores

    def _dead(self) -> list[Rank]:
        """The ranks that may have left a core, or whose children may have, and those that others killed."""
        group = self._record.group
        has_saved = self._cores.watch is not None and self._cores.watch.has_saved
        outputs = group.outputs() if group is not None else ()
        by_rank = dict(zip((rank.assignment.rank for rank in self._record.ranks), outputs, strict=False))
        dead = []
        for rank in self._record.ranks:
            end = rank.end
            if end is None or end.status.ok:
                continue
            if end.status.signum is not None:
                wanted = not end.stopped_by_us or end.status.signum == signal.SIGABRT
            else:
                output = by_rank.get(rank.assignment.rank)
                lines = output.last_lines if output is not None else ()
                # The kernel log is read with the cores, and says what a GPU or a memory limit had to do with it.
                wanted = has_saved or any(term in line for line in lines for term in _ASK_KERNEL)
            if wanted:
                dead.append(rank)
        self._cores.hand_over([rank.pid for rank in dead])
        return dead

    def _recorders(self) -> tuple[RecorderFile, ...]:
        """Where ranks that were not captured may have written their Flight Recorders."""
        group, capture = self._record.group, self._record.capture
        if group is None:
            return ()
        captured = {one.rank for one in capture.collectives if not one.failure} if capture is not None else set()
        files = []
        for rank in self._record.ranks:
            if rank.end is not None and not rank.end.status.ok and rank.assignment.rank not in captured:
                environ = group.plan.environs[group.plan.position(rank.assignment)]
                prefix = next((environ[name] for name in _RECORDER_PREFIXES if environ.get(name)), "")
                if prefix.startswith("/"):
                    files.append(RecorderFile(rank.assignment.rank, rank.pid, f"{prefix}{rank.assignment.rank}"))
        return tuple(files)

    def _dead_calls(self) -> tuple[DeadCalls, ...]:
        """The ranks that have recorded their last calls and were not captured while they lived."""
        context, capture = self._context, self._record.capture
        if not context.launch.config.watch.trace_calls:
            return ()
        captured = {one.rank for one in capture.calls} if capture is not None else set()
        found = []
        for rank in self._record.ranks:
            prefix = context.hook.memory_prefix(context.launch.attempt, rank.assignment.rank)
            if rank.end is not None and prefix and rank.assignment.rank not in captured:
                found.append(DeadCalls(rank.assignment.rank, rank.pid, prefix, rank.end.at))
        return tuple(found)

    def _read_remains(
        self, dead: Sequence[Rank], recorders: Sequence[RecorderFile], calls: Sequence[DeadCalls]
    ) -> None:
        context, watching = self._context, self._context.launch.config.watch
        others = [name for name, found in (("Flight Recorders", recorders), ("last calls", calls)) if found]
        what = "cores" if dead else " and ".join(others)

        def conclude(reader: CaptureReader | None, failure: str) -> None:
            self._conclude(reader, f"{what}: {failure}" if failure else "")

        budget_s = min(CORE_BUDGET_S if dead else _RECORDERS_S, self._record.read_until - time.monotonic())
        if budget_s <= 0:
            conclude(None, NO_TIME)
            return
        cwd = current_directory()
        request = CoreRequest(
            tuple(
                DeadProcess(
                    r.assignment.rank,
                    r.pid,
                    r.end.status.signum or 0,
                    cwd,
                    directory=context.launch.run_dir.rank_path(context.launch.attempt, r.assignment.rank) or "",
                )
                for r in dead
                if r.end
            ),
            directory=new_directory(context, self._record, "cores") if dead else "",
            mode=watching.cores,
            keep=watching.keep_cores,
            gdb=watching.gdb,
            budget_s=budget_s,
            since=self._record.started_time,
            recorders=tuple(recorders),
            calls=tuple(calls),
            may_delete=self._cores.has_raised_limit,
        )
        start_capture(
            context,
            self._record,
            request,
            conclude,
            lambda found: context.launch.screen.print_message(f"saferun: {printable(found.message)}"),
        )

    # ----------------------------------------------------------------------------------------------------------------
    # Evidence

    def _conclude(self, reader: CaptureReader | None, failure: str) -> None:
        record, guarded = self._record, self._context.launch.guarded
        self._is_concluded = True
        if self._is_over:
            return
        record.concluded_attempt = self._action.attempt
        record.evidence = guarded("gather the evidence", self._gather, reader, failure)
        if self._action.alone or not self._context.launch.succeeds("share the evidence", self._share):
            self._post(stopped=False)

    def _share(self) -> None:
        """Hand in this host's evidence; the leader waits for that of the others."""
        context, stopped = self._context, self._action.stop_signum is not None

        def on_done(evidence: Evidence | None, chunks: Sequence[EvidenceChunk]) -> None:
            self._record.evidence = evidence
            self._post(stopped=any(chunk.stopped for chunk in chunks) if context.launch.job.leads else stopped)

        context.exchange().share(
            "end", self._record.evidence, context.others_s, on_done, attempt=self._action.attempt, stopped=stopped
        )

    def _gather(self, reader: CaptureReader | None, failure: str) -> Evidence:
        record, action, guarded = self._record, self._action, self._context.launch.guarded
        evidence = record.gather(record.verdict if action.hung else None)._replace(
            abandoned=action.abandoned,
            stop_signum=action.stop_signum,
            error=action.error,
            error_hint=action.error_hint,
            is_checked=action.by_checks,
        )
        if action.stopped_by and evidence.abort_reason is None:
            # A job of one host announces nothing, and its report has the same words.
            evidence = evidence._replace(abort_reason=AbortReason("request", message=action.stopped_by))
        if reader is not None:
            note_gaps(self._context, reader, record.directory)
            capture = evidence.capture
            evidence = evidence._replace(
                cores=reader.cores,
                outputs=_with_logs(evidence.outputs, reader),
                kernel_lines=tuple(dict.fromkeys((*evidence.kernel_lines, *reader.kernel_lines))),
                capture=capture._replace(
                    collectives=_with_recorders(capture.collectives, reader.capture.collectives),
                    calls=capture.calls + reader.capture.calls,
                    notes=capture.notes + reader.capture.notes,
                ),
            )
        if failure:
            capture = evidence.capture
            evidence = evidence._replace(capture=capture._replace(timed_out=(*capture.timed_out, failure)))
        evidence = evidence._replace(oom=guarded("read the OOM counters", self._read_oom, evidence))
        return evidence._replace(start=guarded("see how far the start came", self._own_stage, evidence) or "")

    def _read_oom(self, evidence: Evidence) -> OomKill | None:
        killed = [end for end in evidence.ends if end.status.signum == signal.SIGKILL and not end.stopped_by_us]
        if self._cores.memory is None or not killed:
            return None
        sizes = {process.pid: process.rss_bytes for process in evidence.capture.processes}
        return oom_kill_between(
            self._cores.memory,
            read_memory_state(),
            max(sizes.get(end.pid, 0) for end in killed),
            evidence.kernel_lines,
            [end.pid for end in killed],
        )

    def _own_stage(self, evidence: Evidence) -> str:
        """How far the ranks of this host came in their start, as far as that is known."""
        hook, attempt = self._context.hook, self._context.launch.attempt
        ranks = [rank.assignment.rank for rank in self._record.ranks]
        marked = ranks_with_group({rank: hook.memory_prefix(attempt, rank) for rank in ranks})
        return start_stage(evidence, marked=marked)

    # ----------------------------------------------------------------------------------------------------------------
    # Diagnosis

    @property
    def _is_over(self) -> bool:
        """Whether the diagnosis is not waited for any more: the hosts meet again, or it took too long."""
        return not self._context.launch.is_in(State.DIAGNOSING, self._action.attempt)

    def _post(self, *, stopped: bool) -> None:
        if self._is_over:
            return
        record, action, guarded = self._record, self._action, self._context.launch.guarded
        record.diagnosis = guarded("find the cause", self._diagnose) or record.undiagnosed(action)
        if not stopped and self._context.launch.job.leads:
            guarded("judge the hosts", self._judge_hosts, record.diagnosis)
        facts = guarded("judge whether to try again", self._facts, record.diagnosis)
        self._context.post(Diagnosed(time.monotonic(), action.attempt, record.diagnosis, stopped, facts))

    def _diagnose(self) -> Diagnosis | None:
        record = self._record
        if record.evidence is None:
            return None
        staged = self._context.launch.guarded("see how far the start came", self._staged, record.evidence)
        record.evidence = staged or record.evidence
        found = diagnose(record.evidence)
        if line := self._context.launch.guarded("see when the others were captured", self._stood_still, found):
            found = found._replace(findings=(*found.findings, line))
        if not record.evidence.capture.calls:
            return found
        guarded = self._context.launch.guarded
        return guarded("compare the last calls", with_last_calls, found, record.evidence) or found

    def _stood_still(self, found: Diagnosis) -> str:
        """A line where the ranks were captured for a hang, and one failed meanwhile; empty: it was not so."""
        record, action, first = self._record, self._action, found.first_failure
        is_another_end = isinstance(action.ending, Hung | Stopped | Leave) or bool(action.error)
        if record.verdict is None or record.capture is None or record.evidence is None or first is None:
            return ""
        dead = {first.rank, *(end.rank for end in found.also_failed)}
        stacks = record.evidence.capture.stacks  # of all hosts
        others = (dump for dump in stacks if dump.rank not in dead)
        if is_another_end or not any(one.frames for dump in others for one in dump.threads):
            return ""  # the report shows where no other rank was
        line = f"a hang of {record.verdict.lasted_s:.0f} s was being captured: where the others were is of that moment"
        own = next((rank.end for rank in record.ranks if rank.assignment.rank == first.rank), None)
        if own is None:
            return line  # the clock of another host
        before_s = own.at - record.captured_at
        return f"{line}, {before_s:.0f} s before rank {first.rank} failed" if before_s >= _SAME_MOMENT_S else ""

    def _staged(self, evidence: Evidence) -> Evidence:
        """The evidence of the whole job, with how far its start came."""
        if self._record.group is None:
            return evidence._replace(start="before")  # no rank was started
        answer = self._context.launch.job.start_stage
        stage = stage_by_time(
            start_stage(evidence, store=read_store_stage(answer) if answer else None),
            elapsed_s=self._lived_s(evidence),
            window_s=self._context.launch.config.retry.start_window_s,
            has_progressed=self._has_heartbeat(),
        )
        return evidence._replace(start=stage)

    def _judge_hosts(self, diagnosis: Diagnosis) -> None:
        """Find the hosts whose own hardware or system is at fault, and note them."""
        record = self._record
        if record.evidence is not None:
            record.host_faults = host_faults(record.evidence, diagnosis)
            note_bad_hosts(self._context.launch, record.host_faults, attempt=self._action.attempt, found_by="failure")

    def _facts(self, diagnosis: Diagnosis) -> FailureFacts:
        config, evidence, progress = self._context.launch.config, self._record.evidence, None
        if evidence is not None:
            window_s = config.retry.start_window_s
            progress = progress_of(
                evidence, lived_s=self._lived_s(evidence), window_s=window_s, has_sent_heartbeat=self._has_heartbeat()
            )
        rendezvous = config.rendezvous
        # Only a port that rank 0 is to serve can be lost between two attempts; on one host it is saferun's choice.
        free = not config.hosts.spans_hosts and rendezvous.master_port is None and not rendezvous.agent_store
        facts = facts_from(
            diagnosis,
            error_class=self._action.error_class,
            port_is_free=free,
            progress=progress,
            script=evidence.script if evidence is not None else "",
        )
        guarded = self._context.launch.guarded
        if config.retry.by_progress:
            step = guarded("see how far the job came", self._last_step)
            facts = facts._replace(step=-1 if step is None else step)
        if evidence is not None and config.hosts.spans_hosts:
            from saferun.launch.hosts_at_fault import faulty_hosts

            faulty = guarded("see whether a host is at fault", faulty_hosts, self._record.host_faults, evidence.hosts)
            facts = facts._replace(faulty=faulty or ())
        return facts

    def _last_step(self) -> int:
        """The last step that a rank of this host has reported in this attempt; -1: none has."""
        hook, attempt = self._context.hook, self._context.launch.attempt
        states = [hook.script_state(attempt, rank.assignment.rank) for rank in self._record.ranks]
        return max((state.step for state in states if state is not None), default=-1)

    def _lived_s(self, evidence: Evidence) -> float:
        """How long the ranks of the attempt lived; 0 where none was started."""
        if self._record.group is None:
            return 0.0
        return max((end.at for end in evidence.ends), default=time.monotonic()) - self._record.started_at

    def _has_heartbeat(self) -> bool:
        return self._context.hook.has_heartbeat(
            self._context.launch.attempt, (rank.assignment.rank for rank in self._record.ranks)
        )


def _with_recorders(
    captured: Sequence[RankCollectives], written: Sequence[RankCollectives]
) -> tuple[RankCollectives, ...]:
    """Those of living ranks, and of dead ones what they wrote before."""
    of_dead = {one.rank for one in written}
    return (*(one for one in captured if one.rank not in of_dead), *written)


# ---------------------------------------------------------------------------------------------------------- the report


def report_failure(context: InvestigationContext, record: AttemptRecord, action: ReportFailure) -> None:
    """Report why the attempt failed, and what happens next."""
    lines = context.launch.guarded("report the failure", _failure_lines, context, record, action)
    lines = lines if lines is not None else [f"saferun: {action.diagnosis.headline}"]
    if printed := context.launch.lines_to_print(lines, action.diagnosis.headline):
        context.print_lines(printed)
    record.add_failure(action.diagnosis, lines, restarting=action.restarting)
    # After the failure that it follows from: that is the order of the report and of --on-event.
    if action.decision is not None:
        context.launch.guarded("note the decision", _note_decision, context, action.decision, action.diagnosis)


def peer_lines(
    context: InvestigationContext,
    record: AttemptRecord,
    diagnosis: Diagnosis,
    decision: Decision | None,
    *,
    restarting: bool,
) -> list[str]:
    """What the other hosts report to their users of the failed attempt."""
    return peer_text(
        diagnosis,
        leader=context.log.host,
        files=context.launch.run_dir.path,
        restarting=restarting,
        attempt=record.restarts,
        max_restarts=context.launch.config.max_restarts,
        decided=_decided(decision),
    )


def _decided(decision: Decision | None) -> str:
    """The lines about a decision; none if it was the only one to be expected."""
    return decision.message if decision is not None and not decision.is_plain else ""


def _failure_lines(context: InvestigationContext, record: AttemptRecord, action: ReportFailure) -> list[str]:
    diagnosis = action.diagnosis
    if record.evidence is not None and record.evidence.hang is not None:
        # The picture has been shown.
        diagnosis = diagnosis._replace(headline=ENDED_BY_HANG, cause=None, groups=(), tree=(), findings=())
    folding = context.launch.screen.folding
    lines = failure_text(
        diagnosis,
        files=context.log.files,
        attempt=record.restarts,
        max_restarts=context.launch.config.max_restarts,
        restarting=action.restarting,
        decided=_decided(action.decision),
        is_above=partial(is_above, folding.whole_on_console) if folding is not None else None,
        calls=record.evidence.capture.calls if record.evidence is not None else (),
    )
    decided = _decided(action.decision)
    before, context.log.reported = context.log.reported, tuple(lines[:-1])
    # A start that fails as in the previous attempt: the decision has the reason, and the user has seen the advice.
    is_repeated = diagnosis.first_failure is None and before == context.log.reported and diagnosis.headline in decided
    if not is_repeated:
        return lines
    same = f": {diagnosis.headline}"
    return [lines[-1].replace(same, ": the same again") if action.restarting else lines[-1]]


def _note_decision(context: InvestigationContext, decision: Decision, diagnosis: Diagnosis) -> None:
    excluded = decision.exclude if decision.exclude is not None else -1
    left_out = [fault.label for fault in decision.faulty]
    left_out = left_out or [host.label for host in diagnosis.hosts if host.host == excluded]
    row = DecisionRow(
        attempt=context.launch.attempt,
        time=time.time(),
        next_step=decision.next_step,
        message=decision.message,
        wait_s=decision.wait_s,
        class_name=diagnosis.cause.class_name if diagnosis.cause is not None else "",
        host=", ".join(left_out[:_MOST_NAMED]),
        spare=", ".join(context.launch.supervisor.spares[: min(len(decision.faulty), _MOST_NAMED)]),
    )
    context.launch.run_dir.write_event({"event": "Decision", "monotonic_s": time.monotonic(), **row._asdict()})
    context.log.add_decision(row)


def _with_logs(outputs: Sequence[RankOutput], reader: CaptureReader) -> tuple[RankOutput, ...]:
    """NCCL writes its warnings to standard output, or to a file if one is set; those in a file count as output."""
    lines = {log.rank: log.lines for log in reader.library_logs}
    found = []
    for output in outputs:
        own = lines.get(output.rank if output.rank >= 0 else output.local_rank, ())
        found.append(output._replace(last_stdout_lines=(*output.last_stdout_lines, *own)))
    return tuple(found)
