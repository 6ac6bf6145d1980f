"""Captures of the ranks that still run, and the files that captures leave."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from saferun.captures.capture_query import CaptureQuery
from saferun.captures.missing_files import NAME, missing_text
from saferun.captures.wire import (
    DEAD_FILE_SYSTEM,
    EVERYTHING,
    CaptureReader,
    CaptureRequest,
    CaptureTarget,
    CoreRequest,
    CoresFound,
)
from saferun.evidence.job_evidence import Capture
from saferun.launch.attempt_record import AttemptRecord, InvestigationContext
from saferun.launch.rank import Rank
from saferun.supervisor.actions import CaptureEvidence
from saferun.supervisor.events import EvidenceCaptured

# What the drivers of NVIDIA and AMD leave in /dev.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class LiveCapture:
    """A capture of the ranks that still run when an attempt is about to end. It answers EvidenceCaptured.

    Args:
        context: of the launch.
        record: of the attempt.
        action: which ranks, and within what time.
    """

    def __init__(self, context: InvestigationContext, record: AttemptRecord, action: CaptureEvidence) -> None:
        self._context = context
        self._record = record
        self._action = action
        self._is_over = False

    def begin(self) -> None:
        """Start the capture, and post the answer at once where it cannot be started."""
        action, config = self._action, self._context.launch.config
        ranks = [rank for rank in self._record.living if rank.assignment.local_rank in action.local_ranks]
        budget_s = min(action.budget_s, config.watch.capture_budget_s)
        if budget_s <= 0 or not ranks:
            self._captured(None, "--capture-budget is 0" if ranks else "")
            return
        self._record.capture, self._record.captured_at = None, time.monotonic()
        self._context.launch.guarded("capture", self._start, ranks, budget_s)
        if self._record.running is None and not self._is_over:
            self._captured(None, "the capture cannot be started")

    def _start(self, ranks: Sequence[Rank], budget_s: float) -> None:
        context, action = self._context, self._action
        context.log.captures += 1
        watching, verdict = context.launch.config.watch, action.verdict
        is_hang = verdict is not None
        has_gpus = any(map(os.path.exists, _GPU_DEVICES))
        request = CaptureRequest(
            tuple(
                CaptureTarget(rank.assignment.rank, rank.pid, context.hook.prefix(action.attempt, rank.assignment.rank))
                for rank in ranks
            ),
            directory=new_directory(context, self._record, "hang" if is_hang else "failure"),
            budget_s=budget_s,
            native=watching.native,
            strace=watching.strace and is_hang,
            gpu=has_gpus,
            since=self._record.started_time,
            nccl=has_gpus and is_hang,
            is_certain=verdict is not None and verdict.certain,
            calls=bool(watching.trace_calls),
        )
        start_capture(context, self._record, request, self._captured)

    def _captured(self, reader: CaptureReader | None, failure: str) -> None:
        self._is_over = True
        capture = reader.capture if reader is not None else Capture()
        if reader is not None:
            self._context.launch.guarded(
                "list what the capture lacks", note_gaps, self._context, reader, self._record.directory
            )
        self._warn_of_file_systems(capture)
        if failure and reader is not None:
            named = (name for name in capture.timed_out if name != EVERYTHING)
            capture = capture._replace(timed_out=(*named, failure))
        self._conclude(capture, failure)

    def _warn_of_file_systems(self, capture: Capture) -> None:
        """A file system that does not answer is a warning about this host, and no reason to end anything."""
        for failure in dict.fromkeys(note.failure for note in capture.notes):
            if failure.startswith(DEAD_FILE_SYSTEM):
                self._context.launch.warn(f"{failure}: the stacks are those that the ranks write themselves")

    def _conclude(self, capture: Capture, _failure: str) -> None:
        self._record.capture = capture
        suspects = self._context.launch.guarded("find ranks that may have caused the failure", self._suspects) or ()
        self._context.post(EvidenceCaptured(time.monotonic(), self._action.attempt, suspects=suspects))

    def _suspects(self) -> tuple[int, ...]:
        """The local ranks that may yet show the cause of a victim's failure."""
        from saferun.diagnosis.pending_cause import ranks_that_may_show_it

        return self._record.local_ranks(ranks_that_may_show_it(self._record.gather(None)))


def start_capture(
    context: InvestigationContext,
    record: AttemptRecord,
    request: CaptureRequest | CoreRequest,
    on_done: Callable[[CaptureReader, str], None],
    on_cores_found: Callable[[CoresFound], None] | None = None,
) -> None:
    """Start a capture, which is then the one that runs.

    Args:
        context: of the launch.
        record: of the attempt.
        request: what to capture.
        on_done: takes the evidence, and in one line why it is not complete; called once, perhaps at once.
        on_cores_found: called with the cores that are about to be read.
    """

    def end(reader: CaptureReader, failure: str) -> None:
        run, record.running = record.running, None
        if run is not None:
            run.close()
        on_done(reader, failure)

    record.running = CaptureQuery(
        request,
        context.launch.examiner,
        context.launch.guarded_poller,
        deadline=time.monotonic() + request.budget_s,
        on_done=end,
        on_cores_found=on_cores_found,
    )
    record.running.begin()


def keep_running(context: InvestigationContext, record: AttemptRecord) -> None:
    """End the capture that runs, if any; what it has seen of the ranks is kept.

    They have ended before it was over: only the list of missing files names what it lacks.
    """
    run, record.running = record.running, None
    reader = run.abort() if run is not None else None
    if reader is None or record.capture is not None:
        return
    note_gaps(context, reader, record.directory)
    capture = reader.capture
    if capture.processes or capture.stacks:
        record.capture = capture._replace(timed_out=())


def new_directory(context: InvestigationContext, record: AttemptRecord, reason: str) -> str:
    """A directory for the files of a capture; empty where there is no run directory."""
    record.directory = ""
    if context.launch.run_dir.host_path is None:
        return ""
    record.directory = os.path.join(
        context.launch.run_dir.host_path, f"attempt_{context.launch.attempt}", f"{reason}_{next(context.numbers)}"
    )
    context.launch.run_dir.make_directory(record.directory)
    return record.directory


def note_gaps(context: InvestigationContext, reader: CaptureReader, directory: str) -> None:
    """Write what a capture lacks into its directory."""
    unwritten = reader.unwritten
    text = missing_text(unwritten, reader.capture.timed_out)
    if not directory or not text:
        return
    context.launch.run_dir.write_text(os.path.join(directory, NAME), text)
    if unwritten:
        context.launch.warn(
            f"{len(unwritten)} files of a capture found no room in memory: {directory}/{NAME} names them"
        )
