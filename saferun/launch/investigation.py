"""Everything that looks at the ranks of a launch: the watchdog, the captures, the diagnosis and the report.

Nothing in here can fail a launch, and nothing in here is loaded before something is to be looked at.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from saferun.captures.client import CaptureRun
from saferun.config import LaunchConfig
from saferun.errors import printable, suppress
from saferun.files.run_dir import RunDirectory
from saferun.launch.incidents import IncidentLog
from saferun.launch.ranks import Rank, RankGroup
from saferun.linux.core_limits import RankPreparation, plan_preparation
from saferun.linux.core_saving import CoreWatch
from saferun.linux.file_systems import is_in_memory
from saferun.linux.hook_copy import copied_hook
from saferun.linux.poller import Poller
from saferun.linux.procfs import main_thread_run_s
from saferun.linux.scratch import current_directory
from saferun.model import Value
from saferun.supervisor.actions import (
    CaptureEvidence,
    Diagnose,
    ReportDecision,
    ReportFailure,
    ReportHang,
)
from saferun.supervisor.events import (
    Diagnosed,
    Event,
    EvidenceCaptured,
    HangSuspected,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.captures.client import Examiner
    from saferun.captures.wire import CaptureReader
    from saferun.cluster.evidence_exchange import EvidenceExchange
    from saferun.cluster.job import Job
    from saferun.evidence import Capture, Diagnosis, Evidence, HangVerdict, OomKill
    from saferun.linux.cgroups import MemoryState
    from saferun.model import ExitStatus, JsonObject
    from saferun.preflight.results import HostInfo, Preflight
    from saferun.supervisor.policy import Decision, FailureFacts
    from saferun.watchdog.monitor import Watch, WatchedRank

INJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inject")
# How often is looked whether what it takes to watch can be read by now.
_IMPORTS_S = 30.0
# Cores are watched for from then on: what runs for a shorter time is not to pay for it.
_CORES_DELAY_S = 0.1
# How long copying the hook into memory may take whoever does it.
_COPY_S = 60.0
# Ranks that are done by then were not worth watching.
_WATCH_DELAY_S = 0.5
# How long the cores of dead ranks may be read; gdb takes half a minute where nothing is in the cache.
CORE_BUDGET_S = 60.0
# What the drivers of NVIDIA and AMD leave in /dev.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# Being looked at costs a rank's main thread a few milliseconds at most.
_SIGN_OF_LIFE_S = 0.05
# The longest path of a Unix socket, less what the hook appends.
_LONGEST_PREFIX = 107 - len(".4194304.sock")


class _GuardedPoller(Poller):
    """The loop's poller for handlers that may fail, which an ordinary handler may not: its exception ends the launch.

    Args:
        poller: the loop's.
        guarded: calls a handler, and says in one line that it has failed.
    """

    def __init__(self, poller: Poller, guarded: Callable[[Callable[[], None]], bool]) -> None:
        self._poller = poller
        self._guarded = guarded

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """As the poller's; a handler that fails is called no more."""

        def call() -> None:
            if not self._guarded(handler):
                # What it has left unread would be told again, and again. Who owns it has a deadline.
                self._poller.unwatch(fd)

        self._poller.watch(fd, call, events)

    def unwatch(self, fd: int) -> None:
        """As the poller's."""
        self._poller.unwatch(fd)

    def is_watched(self, fd: int) -> bool:
        """As the poller's."""
        return self._poller.is_watched(fd)


class _Pulse(Value):
    """How much a rank has said and worked so far."""

    output_bytes: int
    run_s: float


class _Undiagnosed(Value):
    """Stands for a ``Diagnosis`` where the file that has those could not be read."""

    headline: str
    first_failure: None = None
    output: None = None
    also_failed: tuple[()] = ()
    stopped: tuple[()] = ()
    abandoned: tuple[int, ...] = ()
    hint: str = ""
    cause: None = None
    victims: tuple[()] = ()
    groups: tuple[()] = ()
    tree: tuple[()] = ()
    tracebacks: tuple[()] = ()
    core: None = None
    findings: tuple[()] = ()
    abandoned_ranks: tuple[()] = ()
    hosts: tuple[()] = ()
    start: str = ""


def _told(decision: Decision | None) -> str:
    """What is said of a decision: nothing, where nobody could have expected another."""
    return decision.message if decision is not None and not decision.is_plain else ""


def _pulse(rank: Rank) -> _Pulse:
    return _Pulse(rank.output_bytes(), main_thread_run_s(rank.child.pid))


class Investigation:
    """Looks at the ranks of a launch.

    Args:
        config: the launch.
        poller: the loop's.
        examiner: who looks at processes.
        run_dir: where files go.
        host: the host's short name.
        run_id: marks the processes of this run.
        say: takes whole lines for the user.
        warn: takes one line about something that could not be done.
        post: takes events.
        attempt: tells the number of the current attempt.
        store_stage: tells how far the ranks have come, as their store showed it; None: nobody asked.
        job: the other hosts; None: there are none.
        peers_s: how long their evidence is waited for after a failure.
    """

    def __init__(
        self,
        config: LaunchConfig,
        poller: Poller,
        *,
        examiner: Examiner,
        run_dir: RunDirectory,
        host: str,
        run_id: str,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        post: Callable[[Event], None],
        attempt: Callable[[], int],
        store_stage: Callable[[], JsonObject | None] = lambda: None,
        job: Job | None = None,
        peers_s: float = 0.0,
    ) -> None:
        self._config = config
        self._job = job
        self._watching = config.watch
        self._examiner = examiner
        self._poller = _GuardedPoller(poller, self._calls_well)
        self._run_dir = run_dir
        self._host = host
        self._run_id = run_id
        self._say = say
        self._warn = warn
        self._post = post
        self._attempt = attempt
        self._store_stage = store_stage
        self._watch: Watch | None = None
        self._watch_at: float | None = None
        self._core_watch: CoreWatch | None = None
        self._memory: MemoryState | None = None
        self.preparation: RankPreparation | None = None
        """What is to be done in each rank's process before its program starts."""
        self._hook_directory = ""
        self._reads_hook = False
        self._hook_attempt = -1
        self._run: CaptureRun | None = None
        self._has_imported = False
        self._captures = 0
        self._exchange = self._open_exchange(job, peers_s) if job is not None else None
        self._log = IncidentLog(config, run_dir, host=host, run_id=run_id, guarded=self._guarded)
        self._begin_attempt()

    def _open_exchange(self, job: Job, peers_s: float) -> EvidenceExchange:
        from saferun.cluster.evidence_exchange import EvidenceExchange

        task = self._config.hosts.task
        return EvidenceExchange(
            job,
            task.local_rank if task is not None else 0,
            hang_timeout_s=self._watching.hang_timeout_s,
            peers_s=peers_s,
            on_recovery=self._tell_recovery,
            guarded=self._guarded,
        )

    def _begin_attempt(self) -> None:
        self._group: RankGroup | None = None
        self._started_at = 0.0
        self._started_time = time.time()
        self._verdict: HangVerdict | None = None
        self._hangs: dict[str, int] = {}  # kind -> how often it was told
        self._capture: Capture | None = None
        self._capture_directory = ""
        self._diagnosis: Diagnosis | None = None
        self._evidence: Evidence | None = None
        self._concluded = False
        self._concluded_attempt = -1
        self._last_hang: tuple[Capture | None, HangVerdict | None] = (None, None)
        self._pulses: dict[int, _Pulse] = {}  # by local rank, when the capture began
        if self._exchange is not None:
            self._exchange.begin_attempt()

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        if self._log.is_due:
            return 0.0
        watch_at = self._watch.deadline if self._watch is not None else self._watch_at
        moments = [watch_at, self._run.deadline if self._run is not None else None]
        moments.append(self._exchange.deadline if self._exchange is not None else None)
        moments.append(self._core_watch.deadline if self._core_watch is not None else None)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        self._log.write()
        if self._run is not None and self._run.deadline <= now:
            self._run.expire()
        if self._core_watch is not None:
            self._core_watch.tick(now)
        if self._exchange is not None:
            self._exchange.tick(now)
        if self._watch_at is not None and self._watch_at <= now and not self._has_imported:
            self._watch_at = now + _IMPORTS_S  # nothing that it takes can be read
        elif self._watch_at is not None and self._watch_at <= now:
            self._watch_at = None
            self._guarded("watch the ranks", self._begin_watch, now)
        elif self._watch is not None and self._watch.deadline is not None and self._watch.deadline <= now:
            self._guarded("watch the ranks", self._watch.tick, now)

    @property
    def pids(self) -> set[int]:
        """The one that saves cores. What looks at processes is the examiner's."""
        return self._core_watch.pids if self._core_watch is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was this one."""
        return self._core_watch is not None and self._core_watch.on_exit(pid, status)

    def close(self) -> None:
        """End whatever runs."""
        self.attempt_ended()
        if self._core_watch is not None:
            self._core_watch.close()

    def _guarded(self, what: str, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - any call
        """What watches, captures or reports may fail only by saying so in one line."""
        try:
            return call(*arguments)
        except ModuleNotFoundError:
            # The ranks had just been started when it died.
            self._warn("the files of saferun cannot be read: failures and hangs are reported without their causes")
            return None
        except Exception as error:
            self._warn(f"cannot {what}: {type(error).__name__}: {error}")
            return None

    def _calls_well(self, handler: Callable[[], None]) -> bool:
        """Whether a handler of the loop's does what it is for; if not, that is said."""

        def call() -> bool:
            handler()
            return True

        return bool(self._guarded("take in what was seen", call))

    # ----------------------------------------------------------------------------------------------------------------
    # The ranks

    def hook_environ(self, attempt: int, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables that put the hook into a rank; empty where it cannot be put there.

        Args:
            attempt: the attempt's number.
            rank: the rank.
            environ: its environment so far.
        """
        prefix = self.hook_prefix(attempt, rank)
        if not prefix:
            return {}
        variables = {"SAFERUN_HEARTBEAT_FILE": f"{prefix}.heartbeat"}
        if self._watching.inject:
            path = environ.get("PYTHONPATH")
            hook = (copied_hook(self._hook_directory) if self._reads_hook else "") or INJECT
            variables |= {"SAFERUN_HOOK": prefix, "PYTHONPATH": f"{hook}{os.pathsep}{path}" if path else hook}
        return variables

    def hook_prefix(self, attempt: int, rank: int) -> str:
        """What the paths of a rank's hook begin with; empty where there is no room for them."""
        if self._hook_attempt != attempt:
            self._hook_attempt = attempt
            if not self._hook_directory or self._reads_hook:
                self._make_hook_directory()
        prefix = os.path.join(self._hook_directory, f"a{attempt}r{rank}") if self._hook_directory else ""
        return prefix if len(os.fsencode(prefix)) <= _LONGEST_PREFIX else ""

    def _make_hook_directory(self) -> None:
        try:
            # Asked for at each attempt: a cleaner of temporary directories may have deleted it.
            scratch = self._run_dir.scratch
            self._hook_directory = scratch.in_memory_path() if self._reads_hook else scratch.socket_path()
            self._reads_hook = is_in_memory(self._hook_directory)
        except OSError as error:
            self._hook_directory = ""
            self._warn(f"no private directory for the start-up hook: {error.filename}: {error.strerror}")

    def _read_prefix(self, attempt: int, rank: int) -> str:
        """The same for who looks at what the hook leaves there; empty where that is on a disk, which may be dead.

        Heartbeats and sequence numbers are not known then; a capture, which may be lost, sees what it can.
        """
        prefix = self.hook_prefix(attempt, rank)
        return prefix if self._reads_hook else ""

    def prepare(self) -> None:
        """Ranks are going to be started: find out and have at hand what is needed when they are."""
        if self.preparation is None:
            # Once: a later attempt finds nothing else, and must look at no file.
            self.preparation = self._guarded("prepare for cores", self._plan_preparation)
        self._guarded("read the memory limits", self._read_memory)
        if self._watching.cores != "off":
            self._guarded("watch for cores", self._watch_cores)

    def _plan_preparation(self) -> RankPreparation:
        watching = self._watching
        return plan_preparation(
            current_directory(),
            self._config.nproc_per_node,
            cores=watching.cores != "off",
            tracer_pid=os.getpid(),
            asked=watching.cores_asked,
        )

    def ranks_started(self, group: RankGroup, now: float) -> None:
        """The ranks of an attempt run."""
        self._begin_attempt()
        self._group = group
        self._started_at = now
        if self._core_watch is not None:
            self._core_watch.begin_at(now + _CORES_DELAY_S)
        if self._watching.hang_timeout_s > 0:
            self._watch_at = now + (_WATCH_DELAY_S if self._has_imported else _IMPORTS_S)

    def imported(self) -> None:
        """All that is needed is in memory from now on."""
        self._has_imported = True
        if self._watch_at is not None:
            self._watch_at = max(self._started_at + _WATCH_DELAY_S, 0.0)
        if self._watching.inject and self._reads_hook:
            # For restarts. Where it does not come, their ranks read the hook where it is.
            with suppress(OSError):
                _, fd = self._examiner.ask("hook", [INJECT, self._hook_directory], _COPY_S, is_urgent=False)
                os.close(fd)

    def _watch_cores(self) -> None:
        if self._core_watch is None:
            self._core_watch = CoreWatch(current_directory(), self._poller)

    def _read_memory(self) -> None:
        from saferun.linux.cgroups import read_memory_state

        self._memory = read_memory_state()

    def rank_ended(self, rank: Rank) -> None:
        """A rank has been reaped."""
        if self._watch is not None:
            self._guarded("watch the ranks", self._watch.rank_ended, rank.place.local_rank)

    def attempt_ended(self) -> None:
        """No rank is left, or none that could be looked at."""
        self._watch_at = None
        if self._watch is not None:
            self._guarded("end the watch", self._watch.end)
        self._watch = None
        self._guarded("keep what was seen", self._keep_seen)

    def _keep_seen(self) -> None:
        """The capture that runs, if any, ends here: of the ranks that it has seen something is known all the same."""
        run, self._run = self._run, None
        reader = run.break_off() if run is not None else None
        if reader is None or self._capture is not None:
            return
        self._note_gaps(reader, self._capture_directory)
        capture = reader.capture
        if capture.processes or capture.stacks:
            self._capture = capture._replace(timed_out=(*capture.timed_out, "the ranks ended before it was over"))

    def _drop_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _begin_watch(self, now: float) -> None:
        from saferun.watchdog.monitor import Watch

        self._log.write_preflight()
        assert self._group is not None  # noqa: S101 - ranks run
        self._watch = Watch(
            self._watching.hang_timeout_s,
            self._poller,
            on_verdict=self._on_verdict,
            on_recovery=self._on_recovery,
            examiner=self._examiner,
        )
        self._watch.begin(now, self.watched_ranks())

    def watched_ranks(self) -> list[WatchedRank]:
        """The ranks that run; none where what it takes cannot be read."""
        try:
            from saferun.watchdog.monitor import WatchedRank
        except ImportError:
            return []
        attempt = self._attempt()
        watched = []
        for rank in self._living():
            prefix = self._read_prefix(attempt, rank.place.rank)
            heartbeat = f"{prefix}.heartbeat" if prefix else ""
            place = rank.place
            watched.append(
                WatchedRank(place.local_rank, place.rank, rank.child.pid, rank.output_bytes, prefix, heartbeat)
            )
        return watched

    def _on_verdict(self, verdict: HangVerdict) -> None:
        now = time.monotonic()
        if self._exchange is None:
            self._post(HangSuspected(now, self._attempt(), verdict))
            return
        self._exchange.tell_quiet(verdict)
        if self._watch is not None:
            self._watch.captured(now)

    def quiet_s(self) -> float:
        """For how long no rank of this host has moved, in seconds; 0 where they work, or nobody knows."""
        if self._watch is None:
            return 0.0
        return self._guarded("see whether the ranks work", self._watch.quiet_s, time.monotonic()) or 0.0

    def job_hangs(self, verdict: HangVerdict, number: int) -> None:
        """All hosts are to capture a hang of the job."""
        if self._exchange is not None:
            self._exchange.hang_number = number
        self._post(HangSuspected(time.monotonic(), self._attempt(), verdict))

    def _on_recovery(self, lasted_s: float) -> None:
        if self._exchange is not None:
            self._exchange.tell_moving()
        else:
            self._tell_recovery(lasted_s)

    def _tell_recovery(self, lasted_s: float) -> None:
        from saferun.report.console_text import recovery_text

        self._say(recovery_text(lasted_s))
        self._log.note_recovery(lasted_s)

    # ----------------------------------------------------------------------------------------------------------------
    # Captures

    def capture(self, action: CaptureEvidence) -> None:
        """Look at the ranks that run; the answer is EvidenceCaptured."""
        if self._watch is not None:
            self._watch.pause()
        self._watch_at = None
        self._verdict = action.verdict or self._verdict
        ranks = [rank for rank in self._living() if rank.place.local_rank in action.local_ranks]
        budget_s = min(action.budget_s, self._watching.capture_budget_s)
        if budget_s <= 0 or not ranks:
            self._captured(action, None, "--capture-budget is 0" if ranks else "")
            return
        self._capture = None
        self._pulses = {rank.place.local_rank: _pulse(rank) for rank in ranks}
        self._guarded("capture", self._start_capture, action, ranks, budget_s)
        if self._run is None and self._capture is None:
            self._captured(action, None, "the capture cannot be started")

    def _living(self) -> list[Rank]:
        return [rank for rank in self._group.ranks if rank.end is None] if self._group is not None else []

    def _start_capture(self, action: CaptureEvidence, ranks: Sequence[Rank], budget_s: float) -> None:
        from saferun.captures.wire import Request, Target

        directory = self._new_directory("hang" if action.verdict is not None else "failure")
        targets = tuple(
            Target(rank.place.rank, rank.child.pid, self.hook_prefix(action.attempt, rank.place.rank)) for rank in ranks
        )
        request = Request(
            targets,
            directory=directory,
            budget_s=budget_s,
            native=self._watching.native,
            strace=self._watching.strace and action.verdict is not None,
            gpu=any(map(os.path.exists, _GPU_DEVICES)),
            since=self._log.launched_time,
        )
        self._run = CaptureRun(
            request,
            self._examiner,
            self._poller,
            deadline=time.monotonic() + budget_s,
            on_done=lambda reader, failure: self._captured(action, reader, failure),
        )
        self._run.begin()

    def _new_directory(self, reason: str) -> str:
        """A directory for the files of a capture; empty where there is no run directory."""
        self._capture_directory = ""
        if self._run_dir.host_path is None:
            return ""
        self._captures += 1
        path = os.path.join(self._run_dir.host_path, f"attempt_{self._attempt()}", f"{reason}_{self._captures}")
        self._run_dir.make_directory(path)
        self._capture_directory = path
        return path

    def _captured(self, action: CaptureEvidence, reader: CaptureReader | None, failure: str) -> None:
        self._drop_run()
        if reader is not None:
            self._guarded("note what is missing", self._note_gaps, reader, self._capture_directory)
        try:
            from saferun.evidence import Capture
        except ModuleNotFoundError:  # nothing was seen
            self._post(EvidenceCaptured(time.monotonic(), action.attempt))
            return
        capture = reader.capture if reader is not None else Capture()
        self._warn_of_file_systems(capture)
        if failure and reader is not None:
            from saferun.captures.wire import EVERYTHING

            named = (name for name in capture.timed_out if name != EVERYTHING)
            capture = capture._replace(timed_out=(*named, failure))
        self._capture = self._explained(capture, action, failure) if action.verdict is not None else capture
        if action.verdict is not None and self._job is not None:
            self._guarded("hand in what was seen", self._share_hang, action, action.verdict)
            return
        culprits: tuple[int, ...] = ()
        if action.verdict is not None:
            self._diagnosis = self._guarded("diagnose the hang", self._diagnose_hang, action.verdict)
            cause = self._diagnosis.cause if self._diagnosis is not None else None
            blamed = cause.ranks if cause is not None else ()
            culprits = tuple(rank.place.local_rank for rank in self._living() if rank.place.rank in blamed)
        self._post(EvidenceCaptured(time.monotonic(), action.attempt, culprits, self._has_moved(action.verdict)))

    def _note_gaps(self, reader: CaptureReader, directory: str) -> None:
        """What is missing in the directory of a capture is said there."""
        from saferun.captures.gaps import NAME, gaps_text

        if not directory:
            return
        unwritten = reader.unwritten
        text = gaps_text(unwritten, reader.capture.timed_out)
        if text:
            self._run_dir.write_text(os.path.join(directory, NAME), text)
        if unwritten:
            self._warn(f"{len(unwritten)} files of a capture found no room in memory: {directory}/{NAME} names them")

    def _warn_of_file_systems(self, capture: Capture) -> None:
        """What does not answer is a warning about this host, and no reason to end anything."""
        from saferun.captures.wire import DEAD_FILE_SYSTEM

        for failure in dict.fromkeys(note.failure for note in capture.notes):
            if failure.startswith(DEAD_FILE_SYSTEM):
                self._warn(f"{failure}: the stacks are those that the ranks write themselves")

    def _share_hang(self, action: CaptureEvidence, verdict: HangVerdict) -> None:
        assert self._exchange is not None  # noqa: S101 - there are other hosts
        self._evidence = self._gather(verdict)

        def on_done(evidence: Evidence, moved: bool) -> None:  # noqa: FBT001 - by the exchange
            self._evidence = evidence
            self._diagnosis = self._guarded("diagnose the hang", self._diagnose_seen)
            cause = self._diagnosis.cause if self._diagnosis is not None else None
            blamed = cause.ranks if cause is not None else ()
            if self._job is not None:
                self._job.blamed = blamed
            culprits = tuple(rank.place.local_rank for rank in self._living() if rank.place.rank in blamed)
            self._post(EvidenceCaptured(time.monotonic(), action.attempt, culprits, moved))

        moved = self._has_moved(verdict)
        self._exchange.share_hang(self._evidence, label=self._host, moved=moved, on_done=on_done)

    def _diagnose_seen(self) -> Diagnosis | None:
        from saferun.diagnosis.hang import diagnose_hang

        return diagnose_hang(self._evidence) if self._evidence is not None else None

    def _has_moved(self, verdict: HangVerdict | None) -> bool:
        """Whether a hang was none, or is over: a rank has worked or said something while it was looked at."""
        if verdict is None:
            return False
        for rank in self._living():
            before = self._pulses.get(rank.place.local_rank)
            now = _pulse(rank)
            if before is None:
                continue
            # What burns its processor in a hang goes on doing so.
            works = now.run_s - before.run_s > _SIGN_OF_LIFE_S and rank.place.rank not in verdict.busy
            if works or now.output_bytes != before.output_bytes:
                return True
        return False

    def _explained(self, capture: Capture, action: CaptureEvidence, failure: str) -> Capture:
        """A capture with the reason why it lacks the stacks of a rank in their place."""
        from saferun.evidence import StackDump

        whole = (note.failure for note in capture.notes if note.capture == "stacks" and note.failure)
        failure = failure or next(whole, "")
        ranks = self._group.ranks if self._group is not None else []
        seen = {dump.rank for dump in capture.stacks if dump.is_rank}
        unseen = tuple(
            StackDump(rank.place.rank, rank.child.pid, is_rank=True, name="", tool="", threads=(), failure=failure)
            for rank in ranks
            if failure and rank.place.local_rank in action.local_ranks and rank.place.rank not in seen
        )
        return capture._replace(stacks=capture.stacks + unseen)

    def _diagnose_hang(self, verdict: HangVerdict) -> Diagnosis:
        from saferun.diagnosis.hang import diagnose_hang

        self._evidence = self._gather(verdict)
        return diagnose_hang(self._evidence)

    def report_hang(self, action: ReportHang) -> None:
        """Tell of the hang that has just been captured."""
        verdict, diagnosis = self._verdict, self._diagnosis
        now = time.monotonic()
        if self._exchange is not None:
            self._exchange.hang_captured(now)
        if self._job is not None and not self._job.leads:
            self._note_hang()
        elif verdict is not None and diagnosis is not None:
            self._guarded("report the hang", self._tell_hang, action, verdict, diagnosis)
        elif verdict is not None:
            self._say(f"saferun: no progress for {verdict.quiet_s:.0f} s ({printable(verdict.kind)})")
        self._last_hang = (self._capture, self._verdict)
        if action.next_step == "report":
            # What was seen now says nothing about a failure that comes later.
            self._capture = self._verdict = None
            if self._watch is not None:
                self._guarded("watch the ranks", self._watch.captured, now)

    def _note_hang(self) -> None:
        """Another host has the whole picture and tells it; this one keeps its part."""
        leader = self._job.leader if self._job is not None else ""
        line = f"saferun: no rank on any host makes progress; {leader} has the report"
        if (
            self._exchange is not None
            and self._exchange.hang_number == 1
            and self._job is not None
            and self._job.is_head
        ):
            self._say(printable(line))
        if self._diagnosis is not None:
            self._guarded("report", self._log_incident, "hang", self._diagnosis, "continued", [line])

    def _tell_hang(self, action: ReportHang, verdict: HangVerdict, diagnosis: Diagnosis) -> None:
        from saferun.report.console_text import hang_text

        self._hangs[verdict.kind] = self._hangs.get(verdict.kind, 0) + 1
        lines = hang_text(
            diagnosis,
            verdict,
            host=self._host,
            files=self._log.files,
            on_hang=action.next_step,
            count=self._hangs[verdict.kind],
            next_s=self._next_capture_s(verdict.kind),
        )
        if verdict.certain and action.next_step == "report" != self._watching.on_hang:
            lines[-1] = "saferun: job left running: it made progress during the capture"
        self._say("\n".join(lines))
        followed = {"report": "continued", "stop": "stopped", "restart": "restarted"}[action.next_step]
        self._log_incident("hang", diagnosis, followed, lines)

    def _next_capture_s(self, kind: str) -> float | None:
        """How long a hang must go on to be captured again; None: it has been captured often enough."""
        from saferun.watchdog.verdicts import AT_MOST, pause_s

        if self._exchange is not None:
            return self._exchange.next_capture_s()
        told = self._hangs[kind]
        return pause_s(self._watching.hang_timeout_s, told) if sum(self._hangs.values()) < AT_MOST else None

    # ----------------------------------------------------------------------------------------------------------------
    # Failures

    def diagnose(self, action: Diagnose) -> None:
        """Read what the dead ranks left, and find the cause; the answer is Diagnosed."""
        self._guarded("keep what was seen", self._keep_seen)
        if self._concluded_attempt == action.attempt and self._evidence is not None:
            # All has been looked at; but since then the host that decides has been lost.
            self._evidence = self._evidence._replace(
                error=action.error,
                error_hint=action.error_hint,
                abort_reason=self._exchange.told_trouble() if self._exchange is not None else None,
            )
            self._post_diagnosis(action)
            return
        if action.hung and self._capture is None:
            # The host that decides has ended the job because of what was captured last.
            self._capture, self._verdict = self._last_hang
        dead = self._guarded("look for cores", self._dead) or []
        self._concluded = False
        if dead and self._watching.cores != "off":
            self._guarded("read the cores", self._start_cores, action, dead)
        if self._run is None and not self._concluded:
            self._conclude(action, None, "")

    def _dead(self) -> list[Rank]:
        """The ranks that may have left a core, or whose children may have, and those that somebody else killed."""
        group = self._group
        if group is None:
            return []
        cores_seen = self._core_watch is not None and self._core_watch.has_saved
        outputs = dict(zip((rank.place.rank for rank in group.ranks), group.outputs(), strict=False))
        dead = []
        for rank in group.ranks:
            end = rank.end
            if end is None or end.status.ok:
                continue
            if end.status.signum is not None:
                wanted = not end.stopped_by_us or end.status.signum == signal.SIGABRT
            else:
                output = outputs.get(rank.place.rank)
                wanted = cores_seen or (
                    output is not None and any("killed by signal" in line for line in output.last_lines)
                )
            if wanted:
                dead.append(rank)
        return dead

    def _start_cores(self, action: Diagnose, dead: Sequence[Rank]) -> None:
        from saferun.captures.wire import CoreRequest, DeadProcess

        cwd = current_directory()
        request = CoreRequest(
            tuple(DeadProcess(r.place.rank, r.child.pid, r.end.status.signum or 0, cwd) for r in dead if r.end),
            directory=self._new_directory("cores"),
            mode=self._watching.cores,
            keep=self._watching.keep_cores,
            gdb=self._watching.gdb,
            budget_s=CORE_BUDGET_S,
            since=self._started_time,
        )
        self._run = CaptureRun(
            request,
            self._examiner,
            self._poller,
            deadline=time.monotonic() + CORE_BUDGET_S,
            on_done=lambda reader, failure: self._conclude(action, reader, failure),
            on_cores_found=lambda found: self._say(f"saferun: {printable(found.words)}"),
        )
        self._run.begin()

    def _conclude(self, action: Diagnose, reader: CaptureReader | None, failure: str) -> None:
        self._drop_run()
        self._concluded = True
        self._concluded_attempt = action.attempt
        self._evidence = self._guarded("gather what was seen", self._seen, action, reader, failure)
        if self._exchange is not None and not action.alone and self._guarded("ask the others", self._share_end, action):
            return
        self._post_diagnosis(action)

    def _share_end(self, action: Diagnose) -> bool:
        """Hand in this host's part; a diagnosis follows when there is nothing to be waited for. Returns True."""
        assert self._exchange is not None  # noqa: S101 - there are other hosts

        def on_done(evidence: Evidence | None, stopped: bool) -> None:  # noqa: FBT001 - by the exchange
            self._evidence = evidence
            self._post_diagnosis(action, stopped=stopped)

        stopped = action.stop_signum is not None
        self._exchange.share_end(self._evidence, label=self._host, stopped=stopped, on_done=on_done)
        return True

    def _post_diagnosis(self, action: Diagnose, *, stopped: bool = False) -> None:
        diagnosis = self._guarded("find the cause", self._diagnosed)
        if diagnosis is None:
            diagnosis = self._undiagnosed(action)
        self._diagnosis = diagnosis
        facts = self._guarded("judge whether to try again", self._facts, action, diagnosis)
        self._post(Diagnosed(time.monotonic(), action.attempt, diagnosis, stopped, facts))

    def _undiagnosed(self, action: Diagnose) -> Diagnosis:
        """What is left to be said where nothing could be looked into."""
        headline = action.error or "the attempt failed"
        ranks = self._group.ranks if self._group is not None else []
        failed = [(rank.end.at, rank) for rank in ranks if rank.end is not None and not rank.end.stopped_by_us]
        failed = [(at, rank) for at, rank in failed if rank.end is not None and not rank.end.status.ok]
        if failed and not action.error and action.stop_signum is None:
            first = min(failed, key=lambda pair: pair[0])[1]
            headline = f"rank {first.place.rank} failed first: {first.end.status.description if first.end else ''}"
        elif action.stop_signum is not None:
            headline = f"stopped by {signal.Signals(action.stop_signum).name}"
        try:
            from saferun.evidence import Diagnosis
        except ModuleNotFoundError:
            return _Undiagnosed(headline, abandoned=action.abandoned)  # type: ignore[return-value]
        return Diagnosis(headline, None, None, (), (), action.abandoned)

    def _facts(self, action: Diagnose, diagnosis: Diagnosis) -> FailureFacts:
        from saferun.supervisor.policy.facts import facts_from, life_of

        life = None
        if self._evidence is not None:
            lived_s, window_s = self._lived_s(self._evidence), self._config.retry.start_window_s
            life = life_of(self._evidence, lived_s=lived_s, window_s=window_s, has_beaten=self._has_beaten())
        rendezvous = self._config.rendezvous
        # Only a port that rank 0 is to serve can be lost between two attempts; on one host it is saferun's choice.
        free = self._job is None and rendezvous.master_port is None and not rendezvous.agent_store
        return facts_from(diagnosis, trouble_class=action.error_class, port_is_free=free, life=life)

    def _lived_s(self, evidence: Evidence) -> float:
        """How long the ranks of the attempt lived; 0 where none was started."""
        if self._group is None:
            return 0.0
        return max((end.at for end in evidence.ends), default=time.monotonic()) - self._started_at

    def _has_beaten(self) -> bool:
        """Whether a rank of this host has called ``saferun.heartbeat``."""
        ranks = self._group.ranks if self._group is not None else []
        prefixes = [self._read_prefix(self._attempt(), rank.place.rank) for rank in ranks]
        return any(os.path.exists(f"{prefix}.heartbeat") for prefix in prefixes if prefix)

    def _diagnosed(self) -> Diagnosis | None:
        from saferun.diagnosis import diagnose

        if self._evidence is None:
            return None
        self._evidence = self._guarded("see how far the start had come", self._staged, self._evidence) or self._evidence
        return diagnose(self._evidence)

    def _staged(self, evidence: Evidence) -> Evidence:
        """The evidence of the whole job, with how far its start had come."""
        from saferun.diagnosis.start_stage import read_store_stage, stage_by_time, start_stage

        group = self._group
        if group is None:
            return evidence._replace(start="before")  # nothing has been started at all
        answer = self._store_stage()
        stage = start_stage(evidence, store=read_store_stage(answer) if answer else None)
        stage = stage_by_time(
            stage,
            elapsed_s=self._lived_s(evidence),
            window_s=self._config.retry.start_window_s,
            has_progressed=self._has_beaten(),
        )
        return evidence._replace(start=stage)

    def _own_stage(self, evidence: Evidence) -> str:
        """How far the ranks of this host had come, as far as they show it."""
        from saferun.diagnosis.start_stage import start_stage
        from saferun.linux.start_marks import ranks_with_group

        ranks = self._group.ranks if self._group is not None else []
        attempt = self._attempt()
        prefixes = {rank.place.rank: self._read_prefix(attempt, rank.place.rank) for rank in ranks}
        return start_stage(evidence, marked=ranks_with_group(prefixes))

    def _seen(self, action: Diagnose, reader: CaptureReader | None, failure: str) -> Evidence:
        evidence = self._gather(self._verdict if action.hung else None)._replace(
            abandoned=action.abandoned,
            stop_signum=action.stop_signum,
            error=action.error,
            error_hint=action.error_hint,
            is_checked=action.by_checks,
        )
        if reader is not None:
            seen = reader.capture
            self._note_gaps(reader, self._capture_directory)
            evidence = evidence._replace(
                cores=reader.cores,
                kernel_lines=reader.kernel_lines,
                capture=evidence.capture._replace(
                    notes=evidence.capture.notes + seen.notes,
                    timed_out=evidence.capture.timed_out + ((f"cores: {failure}",) if failure else ()),
                ),
            )
        evidence = evidence._replace(oom=self._guarded("read the OOM counters", self._read_oom, evidence))
        return evidence._replace(start=self._guarded("see how far it came", self._own_stage, evidence) or "")

    def _gather(self, verdict: HangVerdict | None) -> Evidence:
        from saferun.evidence import Capture, Evidence

        group = self._group
        ranks = group.ranks if group is not None else []
        return Evidence(
            host=self._host,
            started_at=self._started_at,
            ends=tuple(rank.end for rank in ranks if rank.end is not None),
            outputs=group.outputs() if group is not None else (),
            abandoned=(),
            stop_signum=None,
            ranks=tuple(rank.place.rank for rank in ranks),
            capture=self._capture or Capture(),
            hang=verdict,
            supervisor_pid=os.getpid(),
            script=self._config.command.name,
            cwd=current_directory(),
            store_port=group.plan.placement.master_port if group is not None else 0,
            started_time=self._started_time,
            world_size=group.plan.placement.world_size if group is not None and self._job is not None else 0,
            abort_reason=self._exchange.told_trouble() if self._exchange is not None else None,
        )

    def report_failure(self, action: ReportFailure) -> None:
        """Tell why the attempt failed, and what happens next."""
        if action.decision is not None:
            self._guarded("note the decision", self._note_decision, action.decision, action.diagnosis)
        lines = self._guarded("report the failure", self._failure_lines, action)
        lines = lines if lines is not None else [f"saferun: {action.diagnosis.headline}"]
        self._say("\n".join(lines))
        followed = "restarted" if action.restarting else "ended"
        self._guarded("report", self._log_incident, "failure", action.diagnosis, followed, lines)

    def _note_decision(self, decision: Decision, diagnosis: Diagnosis) -> None:
        from saferun.evidence import DecisionRow

        blamed = decision.exclude if decision.exclude is not None else -1
        row = DecisionRow(
            self._attempt(),
            time.time(),
            decision.next_step,
            decision.message,
            decision.wait_s,
            diagnosis.cause.class_name if diagnosis.cause is not None else "",
            next((host.label for host in diagnosis.hosts if host.host == blamed), ""),
        )
        self._run_dir.write_event({"event": "Decision", "at": time.monotonic(), **row._asdict()})
        self._log.add_decision(row)

    def report_decision(self, action: ReportDecision) -> None:
        """Tell what another host has decided, in its words; this host's part of the report stays here."""
        lines = list(action.messages) or [
            f"saferun: the job has failed; {self._job.leader if self._job else ''} knows why"
        ]
        if self._job is None or self._job.is_head:
            self._say("\n".join(lines))
        if self._diagnosis is not None:
            followed = "restarted" if action.restarting else "ended"
            self._guarded("report", self._log_incident, "failure", self._diagnosis, followed, lines)

    def decision_words(self, diagnosis: Diagnosis, *, restarting: bool, decision: Decision | None = None) -> list[str]:
        """What the other hosts tell their users of a failed attempt."""
        from saferun.report.console_text import peer_text

        words: list[str] | None = self._guarded(
            "notify the other hosts",
            lambda: peer_text(
                diagnosis,
                leader=self._host,
                files=self._run_dir.path,
                restarting=restarting,
                attempt=self._failures_before,
                max_restarts=self._config.max_restarts,
                decided=_told(decision),
            ),
        )
        return words or [f"saferun: {diagnosis.headline}"]

    @property
    def _failures_before(self) -> int:
        """How many failures this launch has got over: attempts count retries and meetings of hosts, too."""
        if self._group is None:
            return self._attempt()
        return self._group.plan.placement.restarts

    def note_preflight(self, preflight: Preflight, cards: Mapping[int, HostInfo]) -> None:
        """What the checks before the start found."""
        self._guarded("note what the checks found", self._log.set_preflight, preflight, cards)

    def write_preflight(self) -> None:
        """Write what the checks found, if it is not written yet."""
        self._guarded("write what the checks found", self._log.write_preflight)

    def joined(self, host: str) -> None:
        """The hosts of the job have met; ``host``: the name that they know this one by."""
        self._host = host
        self._log.host = host

    def _failure_lines(self, action: ReportFailure) -> list[str]:
        from saferun.report.console_text import failure_text

        diagnosis = action.diagnosis
        if self._evidence is not None and self._evidence.hang is not None:
            # The picture has been shown.
            headline = f"ended because of the hang: {diagnosis.headline.removeprefix('the job hangs: ')}"
            diagnosis = diagnosis._replace(headline=headline, cause=None, groups=(), tree=(), findings=())
        return failure_text(
            diagnosis,
            files=self._log.files,
            attempt=self._failures_before,
            max_restarts=self._config.max_restarts,
            restarting=action.restarting,
            decided=_told(action.decision),
        )

    def _read_oom(self, evidence: Evidence) -> OomKill | None:
        from saferun.linux.cgroups import oom_kill_between, read_memory_state

        killed = [end for end in evidence.ends if end.status.signum == signal.SIGKILL and not end.stopped_by_us]
        if self._memory is None or not killed:
            return None
        sizes = {look.pid: look.rss_bytes for look in evidence.capture.processes}
        return oom_kill_between(
            self._memory,
            read_memory_state(),
            max((sizes.get(end.pid, 0) for end in killed), default=0),
            evidence.kernel_lines,
            [end.pid for end in killed],
        )

    def _log_incident(self, kind: str, diagnosis: Diagnosis, followed: str, said: Sequence[str]) -> None:
        evidence = self._evidence or self._gather(None)
        self._log.add(
            kind,
            evidence,
            diagnosis,
            attempt=self._attempt(),
            outcome=followed,
            console_lines=said,
            directory=self._capture_directory,
        )

    def finish(self, exit_code: int, *, stopped: bool) -> None:
        """The launch is over; where something went wrong on the way, the report says how it ended."""
        self._log.finish(exit_code, stopped=stopped)
