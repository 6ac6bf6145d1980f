"""The only loop: carries out the supervisor's actions and feeds what happens back as events."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from saferun.captures.client import Examiner
from saferun.cluster.solo_job import SoloJob
from saferun.config import LaunchConfig
from saferun.console.intake import Intake
from saferun.console.screen import Screen
from saferun.env.apply import apply
from saferun.env.profiles import Resolution
from saferun.env.profiles.text import launch_lines
from saferun.errors import EXIT_USAGE, SaferunError, printable, suppress
from saferun.files.log_files import LogDirectory
from saferun.files.run_dir import RunDirectory
from saferun.launch.checks import Checks, ranks_wait
from saferun.launch.idle_imports import BEFORE_SEVERAL_HOSTS, FOR_SEVERAL_HOSTS, MODULES, IdleImports
from saferun.launch.investigation import Investigation
from saferun.launch.lint import Lint, worth_a_look
from saferun.launch.orphans import Leftovers
from saferun.launch.passed_signals import PassedSignals
from saferun.launch.rank_start import RankStart
from saferun.launch.ranks import AttemptPlan, Rank, RankGroup, plan_environs
from saferun.launch.shared_memory import Segments
from saferun.launch.torchelastic_error import Handover
from saferun.linux.children import reap
from saferun.linux.poller import Poller
from saferun.linux.procfs import is_core_dumping
from saferun.linux.reaper import Reaper
from saferun.linux.scratch import current_directory
from saferun.model import JsonObject, LogDestinations, Placement, RankAssignment, signal_name
from saferun.supervisor.events import (
    BroadcastAbort,
    BroadcastDecision,
    CaptureEvidence,
    ChecksAsked,
    ChecksOver,
    ChecksPassed,
    CoreDumpSeen,
    DeadlineExpired,
    Diagnose,
    Diagnosed,
    Event,
    EvidenceCaptured,
    Finish,
    HostsJoined,
    JobAborted,
    JoinHosts,
    LaunchRequested,
    LoopStalled,
    NotifyDone,
    OrphansGone,
    PrintLine,
    ProbeHosts,
    ProbesPassed,
    RankExited,
    RanksStarted,
    ReportDecision,
    ReportFailure,
    ReportHang,
    RunChecks,
    ServeStore,
    SignalRanks,
    SignalReceived,
    StartFailed,
    StartRanks,
    SweepOrphans,
)
from saferun.supervisor.machine import State, Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.cluster.job import Job
    from saferun.cluster.job_values import Assignment
    from saferun.cluster.secret import JobSecret
    from saferun.evidence import Diagnosis, HangVerdict
    from saferun.files.writer import Writer
    from saferun.launch.part import Part
    from saferun.launch.retry_waits import RetryWaits
    from saferun.linux.spares import Spares
    from saferun.preflight.checks.context import CheckContext
    from saferun.preflight.client import CheckProcess
    from saferun.preflight.driver import Failure, Outcome, PreflightRun

# The lint waits until the ranks are on their way; ranks that are done by then had no use for it.
_LINT_DELAY_S = 0.25
# So does the examiner, which is forked at once where something is to be looked at before.
_EXAMINER_DELAY_S = 0.1
# The checks that no rank waits for leave the ranks the processors until they run.
_CHECKS_DELAY_S = 0.1
# So late a busy machine is not: who wakes up this long after a deadline was stopped, suspended or held up.
_STALL_S = 1.0
# A reader of the console that does not read is waited for this long at the end, where files keep everything.
_DRAIN_S = 60.0
# Processes that got SIGKILL are gone within milliseconds, unless they sleep uninterruptibly.
_HELPERS_S, _LOOK_AGAIN_S = 0.5, 0.001
# Of more retries than that the waits are those of the policy itself.
_MOST_WAITS = 64
# Of what is said here, what other hosts are told.
_LONGEST_TOLD = 300
# A pause of the loop's where a module is missing.
_MISSING_S = 0.02
# How often the end looks whether a file has taken something.
_CONSOLE_S = 0.1


class Runtime:
    """Carries out one launch on this host.

    Args:
        config: the launch.
        environ: the environment that the ranks inherit.
        supervisor: decides.
        screen: the console.
        run_dir: the files.
        host: the host's short name.
        run_id: marks the processes of this run.
        resolution: what env profiles, --env and --unset come to.
        older_children: children that this process had before the launch.
        reaper: ends the run if this process cannot.
        peers_s: how long other hosts' evidence is waited for after a failure.
        checks: the check process, where it has been forked already.
        witness: the process that gets the signals that the ranks get, and the pipe on which it says which.
        writer: the process that writes the files; None: nobody does.
        spares: processes that may become ranks.
        secret: the job's.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        supervisor: Supervisor,
        *,
        screen: Screen,
        run_dir: RunDirectory,
        host: str,
        run_id: str,
        resolution: Resolution,
        older_children: frozenset[int],
        reaper: Reaper,
        peers_s: float = 0.0,
        checks: CheckProcess | None = None,
        witness: tuple[int, int] = (0, -1),
        writer: Writer | None = None,
        spares: Spares | None = None,
        secret: JobSecret | None = None,
    ) -> None:
        self._config = config
        self._environ = environ
        self._writer = writer
        self._spares, self._secret = spares, secret
        self._supervisor = supervisor
        self._screen = screen
        self._run_dir = run_dir
        self._host = host
        self._run_id = run_id
        self._reaper = reaper
        self._resolution = resolution
        self._peers_s = peers_s
        self._poller = Poller()
        self._events: deque[Event] = deque()
        self._finish: Finish | None = None
        self._number = 0  # the job's number of the attempt
        self._placement: Placement | None = None
        self._place: Assignment | None = None
        self._plan: AttemptPlan | None = None
        self._group: RankGroup | None = None
        self._finished: list[Rank] = []
        self._started_at = self._alive_at = 0.0
        self._stop_signum: int | None = None
        self._is_bound = self._is_described = False
        self._waits_for_checks = True
        self._is_probed = False  # the host that leads has found nothing that keeps the ranks from being started
        self._waits: RetryWaits | None = None
        self._waiting_for_room, self._warned = set[int](), set[str]()
        self._wake_read, self._is_told_to_stop, self._is_urgent = -1, False, False
        own_environ = {**environ, "SAFERUN_RUN_ID": run_id, "OMP_NUM_THREADS": "1"}
        wanted = MODULES + (FOR_SEVERAL_HOSTS if config.hosts.together else ())
        self._imports = self._open_imports(wanted)
        self._examiner = self._open_examiner(own_environ, wanted)
        self._lint = Lint(self._examiner, self._poller, screen.say)
        self._job = self._open_job(own_environ) if config.hosts.together else None
        self._store = self._open_store(own_environ)
        self._investigation = self._open_investigation()
        self._logs = LogDirectory(config.logs, run_dir)
        self._handover = Handover(config, (self._job or self._store).client)
        self._checks = self._open_checks(checks)
        self._segments = Segments()
        self._leftovers = self._open_leftovers(older_children)
        self._rank_start = RankStart(
            self._poller, on_started=self._on_ranks_started, on_failed=self._on_ranks_failed, warn=self._warn
        )
        self._intake = Intake(self._poller, time.monotonic)
        self._passed = PassedSignals(self._poller, *witness, living=self._living, say=screen.say)
        if writer is not None:
            writer.attach(self._poller)
        self._parts = self._in_order()
        self._actions = self._by_action()

    # ----------------------------------------------------------------------------------------------------------------
    # What lives beside the loop

    def _open_imports(self, wanted: Sequence[str]) -> IdleImports:
        return IdleImports(
            self._environ.get("PYTHONPATH", ""),
            self._on_imported,
            poller=self._poller,
            ask=lambda names, budget_s: self._examiner.ask("code", list(names), budget_s, is_urgent=False)[1],
            wanted=wanted,
        )

    def _open_examiner(self, environ: Mapping[str, str], wanted: Sequence[str]) -> Examiner:
        writer = self._writer
        return Examiner(
            environ,
            self._poller,
            warn=self._warn,
            wanted=wanted,
            on_loaded=self._imports.begin,
            on_ready=lambda: self._note("ExaminerReady"),
            outbox=(lambda: writer.outbox) if writer is not None else None,
        )

    def _open_store(self, environ: Mapping[str, str]) -> SoloJob:
        return SoloJob(
            self._config,
            environ,
            self._poller,
            post=self._events.append,
            attempt=lambda: self._supervisor.attempt,
            on_assigned=self._on_assigned,
            on_prepared=self._on_prepared,
            on_hang=self._on_job_hang,
            on_preflight=self._on_preflight,
            on_torch=self._write_run_json,
            on_stderr=self._screen.err.say,
        )

    def _open_investigation(self) -> Investigation:
        return Investigation(
            self._config,
            self._poller,
            run_dir=self._run_dir,
            host=self._host,
            run_id=self._run_id,
            say=self._screen.say,
            warn=self._warn,
            post=self._take_investigated,
            attempt=lambda: self._supervisor.attempt,
            store_stage=lambda: (self._job or self._store).start_stage,
            job=self._job,
            peers_s=self._peers_s,
            examiner=self._examiner,
        )

    def _open_leftovers(self, older_children: frozenset[int]) -> Leftovers:
        return Leftovers(
            self._run_id,
            not_ours=older_children | {self._reaper.pid},
            exempt=self._own_pids,
            on_gone=self._on_leftovers_gone,
            say=self._say_leftovers,
            warn=self._warn,
        )

    def _in_order(self) -> tuple[Part, ...]:
        """The parts, in the order in which they are woken, asked whose child has ended, and closed."""
        beside = (
            *(self._writer, self._intake, self._rank_start, self._passed, self._investigation),
            *(self._checks, self._store, self._job, self._lint, self._segments),
            *(self._imports, self._examiner, self._leftovers),
        )
        return tuple(part for part in beside if part is not None)

    def _by_action(self) -> dict[type, Callable[[Any], None]]:
        """What carries out each kind of action."""
        return {
            RunChecks: self._run_checks,
            JoinHosts: self._join_hosts,
            ProbeHosts: self._probe_hosts,
            StartRanks: self._start_ranks,
            ServeStore: lambda _: None if self._job is not None else self._store.serve_soon(),
            CaptureEvidence: self._capture,
            ReportHang: self._investigation.report_hang,
            SignalRanks: self._signal_ranks,
            SweepOrphans: self._sweep_leftovers,
            Diagnose: self._diagnose,
            ReportFailure: self._report_failure,
            BroadcastAbort: self._tell_trouble,
            NotifyDone: self._tell_done,
            BroadcastDecision: self._tell_decision,
            ReportDecision: self._report_decision,
            PrintLine: lambda action: self._screen.say(f"saferun: {printable(action.text)}"),
            Finish: self._on_finish,
        }

    # ----------------------------------------------------------------------------------------------------------------
    # The loop

    def run(self) -> Finish:
        """Carry the launch out. Returns how saferun is to end."""
        self._open_wakeup()
        if self._config.hosts.stop_with_parent:
            from saferun.linux.starters import Starters

            self._starters = Starters(self._poller, self._on_starter_gone)
        self._events.append(LaunchRequested(time.monotonic(), 0))
        try:
            while True:
                self._handle_events()
                # Before the end too: the user need not wait for what other hosts still have to say.
                self._screen.flush()
                if self._finish is not None:
                    return self._finish
                self._wait()
        finally:
            self._end()

    def _handle_events(self) -> None:
        while self._events and self._finish is None:
            event = self._events.popleft()
            before = self._supervisor.state
            actions = self._supervisor.handle(event)
            after = self._supervisor.state
            if isinstance(event, SignalReceived | JobAborted):
                # The ranks of a job that is stopped have the signal before anything else is done about it.
                for action in actions:
                    if isinstance(action, SignalRanks):
                        self._signal_ranks(action)
                actions = [action for action in actions if not isinstance(action, SignalRanks)]
            self._record(event, before, after)
            for action in actions:
                self._unless_missing(self._actions[type(action)], action)

    def _unless_missing(self, call: Callable[..., object], *arguments: object) -> None:
        """Go on without what cannot be imported: no module that is missing may end a launch."""
        try:
            call(*arguments)
        except ImportError as error:
            if not self._imports.is_sealed:
                raise
            self._warn(f"{error}: the launch goes on without it")
            # What asks for it again at once shall not take a whole processor.
            time.sleep(_MISSING_S)

    def _wait(self) -> None:
        """Wait for the next thing to happen and take it in."""
        self._watch_for_room()
        self._screen.allow_skipping(self._run_dir.keeps_all)
        now = time.monotonic()
        moments = [self._supervisor.deadline, self._screen.deadline(), *(part.deadline for part in self._parts)]
        due = min((moment for moment in moments if moment is not None), default=None)
        # The last moment before the deadline at which this loop is known to have run.
        deadline = self._supervisor.deadline
        alive_at = now if deadline is None or now < deadline else self._alive_at
        self._unless_missing(self._poller.wait, None if due is None else max(due - now, 0.0))
        if self._is_urgent:
            self._is_urgent = False
            self._alive_at = alive_at
            return
        now = time.monotonic()
        self._screen.tick(now)
        for part in self._parts:
            self._unless_missing(part.tick, now)
        deadline = self._supervisor.deadline
        if deadline is not None and deadline <= now and self._events:
            self._alive_at = alive_at  # what has happened comes first
            return
        self._alive_at = now
        if deadline is not None and deadline <= now:
            attempt = self._supervisor.attempt
            if self._dumps_core():
                self._events.append(CoreDumpSeen(now, attempt))
            elif now - deadline > _STALL_S and alive_at < deadline:
                self._events.append(LoopStalled(now, attempt, deadline - alive_at))
            else:
                self._events.append(DeadlineExpired(now, attempt))

    def _dumps_core(self) -> bool:
        """Whether the kernel is writing the core of a rank that is being stopped."""
        if self._supervisor.state is not State.STOPPING or self._group is None:
            return False
        return any(is_core_dumping(pid) for pid in self._group.by_pid)

    def _watch_for_room(self) -> None:
        """Be woken when a console that was full takes bytes again."""
        for pane in self._screen.panes:
            target = pane.target
            waiting = target.fd in self._waiting_for_room
            wanted = target.waits_for_room
            if waiting and not wanted:
                self._poller.unwatch(target.fd)
                self._waiting_for_room.discard(target.fd)
            elif wanted and not waiting:
                with suppress(OSError):  # EPERM: a file that is always ready
                    self._poller.watch(target.fd, _nothing, select.EPOLLOUT)
                    self._waiting_for_room.add(target.fd)

    # ----------------------------------------------------------------------------------------------------------------
    # Signals

    def _open_wakeup(self) -> None:
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._poller.watch_first(self._wake_read, self._on_wakeup)
        signal.signal(signal.SIGCHLD, _ignore)
        if any(pane.target.is_terminal for pane in self._screen.panes):
            signal.signal(signal.SIGWINCH, _ignore)
        if signal.SIGINT not in self._config.signals and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            # As any Python program has it: the ranks are ended on the way out.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for signum in self._config.signals:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # started under nohup: the terminal's end is none of our business
            try:
                signal.signal(signum, _ignore)
            except (OSError, ValueError):
                self._warn(f"{signal_name(signum)} cannot be handled")
        self._passed.open(self._config.signals)

    def _on_wakeup(self) -> bool:
        """Take in the signals that have come. Returns whether nothing else is to be done before they are obeyed."""
        for signum in os.read(self._wake_read, 4096):
            if signum == signal.SIGCHLD:
                self._reap()
            elif signum == signal.SIGWINCH:
                if self._group is not None:
                    self._group.resize()
            elif signum in self._config.signals:
                self._stop_by(signum)
            else:
                self._passed.take(signum, time.monotonic())
        return self._is_urgent

    def _living(self) -> list[Rank]:
        return [rank for rank in self._group.ranks if rank.end is None] if self._group is not None else []

    def _on_starter_gone(self, words: str) -> None:
        """Ranks without anybody who could stop them would train on for ever."""
        self._stop_by(signal.SIGTERM, words)

    def _stop_by(self, signum: int, why: str = "") -> None:
        # The first one: whoever sends them without end does not keep the loop from its work.
        self._is_urgent = not self._is_told_to_stop
        self._is_told_to_stop = True
        quiet_s = self._investigation.quiet_s()
        self._events.append(SignalReceived(time.monotonic(), self._supervisor.attempt, signum, why, quiet_s))

    def _take_from_job(self, event: Event) -> None:
        """Take in what happened on other hosts."""
        if isinstance(event, JobAborted) and event.signum:
            event = event._replace(quiet_s=self._investigation.quiet_s())
        self._events.append(event)

    def _reap(self) -> None:
        for pid, status in reap():
            now = time.monotonic()
            if self._group is not None and self._rank_start.failed(pid):
                dropped = self._group.by_pid[pid]
                self._poller.unwatch(dropped.child.pidfd)
                for stream in dropped.streams:
                    self._intake.remove(stream)
                self._group.drop(dropped)
                self._reaper.note_ended(pid)
                continue
            if any(part.on_exit(pid, status) for part in self._parts) or self._screen.on_exit(pid):
                continue
            rank = self._group.by_pid.get(pid) if self._group is not None else None
            if self._group is None or rank is None:
                continue  # an orphan of a rank's, handed to this process
            self._poller.unwatch(rank.child.pidfd)
            self._group.note_exit(rank, status, at=now, time=time.time())
            self._reaper.note_ended(pid)
            self._investigation.rank_ended(rank)
            if not status.ok and self._job is None:
                # Before anything of this attempt is taken out of the store.
                self._store.ask_start_stage(len(self._group.ranks))
            self._events.append(RankExited(now, self._supervisor.attempt, rank.place.local_rank, status))
        if self._leftovers.deadline is not None:
            self._leftovers.sweep(time.monotonic())

    # ----------------------------------------------------------------------------------------------------------------
    # Before the ranks

    def _open_checks(self, process: CheckProcess | None) -> Checks | None:
        """The checks, where they are wanted and this process is the one of its host that makes them."""
        if not self._config.checks_here:
            return None

        def open_run() -> PreflightRun:
            from saferun.preflight.driver import PreflightRun

            return PreflightRun(
                self._config,
                self._poller,
                job=self._job,
                environ=self._environ,
                say=self._screen.say,
                warn=self._warn,
                process=process,
            )

        checks = Checks(open_run)
        if process is not None:
            checks.opened()  # which ends the process, whatever comes
        return checks

    def _run_checks(self, action: RunChecks) -> None:
        if self._job is not None and not self._is_bound:
            # A name server may have to say whose the endpoint's name is.
            self._job.find_endpoint(lambda: self._check_host(action))
        else:
            self._check_host(action)

    def _check_host(self, action: RunChecks) -> None:
        if self._supervisor.state is not State.CHECKING or self._supervisor.attempt != action.attempt:
            return  # the launch has been ended meanwhile
        try:
            if not self._is_bound:
                self._bind()
                self._is_bound = True
        except SaferunError as error:
            self._start_failed(action.attempt, error)
            return
        if self._checks is None:
            self._events.append(ChecksPassed(time.monotonic(), action.attempt))
            return
        # As the ranks will have it, but for what differs between them.
        environ = dict(self._environ)
        first = RankAssignment(0, 0, 0)
        apply(self._resolution, environ, first, host=self._host, world_size=1, run_dir=None, rank_dir=None)
        self._waits_for_checks = ranks_wait(self._config, environ, action.attempt)
        if not self._waits_for_checks:
            self._events.append(ChecksPassed(time.monotonic(), action.attempt))
            return
        context = self._check_context(environ, action.attempt)
        self._events.append(ChecksAsked(time.monotonic(), action.attempt))
        self._checks.opened().check(context, lambda outcome: self._on_checked(action.attempt, outcome))

    def _check_context(self, environ: Mapping[str, str], attempt: int) -> CheckContext:
        from saferun.preflight.driver import context_of

        old_pids = [rank.child.pid for rank in self._finished]
        return context_of(
            self._config,
            environ,
            bound=self._bound_ports(),
            attempt=attempt,
            old_pids=old_pids,
            is_endpoint_here=self._job is not None and self._job.is_endpoint_here,
        )

    def _check_beside(self, plan: AttemptPlan) -> None:
        """Check this host while the ranks, which are being started, do not need it."""
        if self._checks is None or self._waits_for_checks:
            return

        def begin(run: PreflightRun) -> None:
            run.check(self._check_context(plan.environs[0], plan.attempt), on_checked, beside=True)

        def on_checked(outcome: Outcome) -> None:
            self._investigation.note_preflight(outcome.preflight, outcome.cards)
            self._investigation.write_preflight()
            if self._checks is not None:
                self._checks.opened().tell_own()

        self._checks.begin_at(time.monotonic() + _CHECKS_DELAY_S, begin)

    def _bind(self) -> None:
        """Bind every port of this host, before anything else starts.

        Raises:
            SaferunError: one cannot be had.
        """
        (self._job or self._store).bind()

    def _bound_ports(self) -> list[int]:
        return (self._job or self._store).bound_ports()

    def _on_checked(self, attempt: int, outcome: Outcome) -> None:
        """This host by itself is checked. Of several hosts the one that leads decides, so that all learn of it."""
        now = time.monotonic()
        if self._job is not None:
            self._events.append(ChecksPassed(now, attempt))
            return
        self._investigation.note_preflight(outcome.preflight, outcome.cards)
        assert self._checks is not None  # noqa: S101 - they say so
        if self._config.checks.preflight == "only":
            self._events.append(ChecksOver(now, attempt, self._show_checks(outcome)))
            return
        self._checks.opened().tell_own()
        if outcome.failure is not None:
            self._events.append(_start_failure(now, attempt, outcome.failure))
        else:
            self._events.append(ChecksPassed(now, attempt))

    def _probe_hosts(self, action: ProbeHosts) -> None:
        if self._checks is not None and self._place is not None:
            self._checks.opened().probe(self._place, lambda outcome: self._on_probed(action.attempt, outcome))
        elif self._is_probed:
            self._events.append(ProbesPassed(time.monotonic(), action.attempt))

    def _on_probed(self, attempt: int, outcome: Outcome) -> None:
        now = time.monotonic()
        if self._place is not None and self._place.leads:
            self._investigation.note_preflight(outcome.preflight, outcome.cards)
        self._use_nics(outcome.nics)
        if outcome.failure is not None and self._config.checks.preflight != "only":
            self._events.append(_start_failure(now, attempt, outcome.failure))
        elif self._config.checks.preflight == "only":
            self._events.append(ChecksOver(now, attempt, self._show_checks(outcome)))
        else:
            self._events.append(ProbesPassed(now, attempt))

    def _use_nics(self, names: Sequence[str]) -> None:
        """Set what makes gloo, NCCL and UCX use these interfaces, for the ranks that are started next."""
        if not names or self._plan is None:
            return
        from saferun.launch.nic import told
        from saferun.linux.nics import read_nics
        from saferun.preflight.interfaces import nic_environ

        chosen = nic_environ(names, read_nics(), self._environ)
        for environ in self._plan.environs:
            environ.update(chosen)
        if self._job is None or self._job.leads:
            self._screen.say(told(names, chosen, auto=True))

    def _on_preflight(self, message: JsonObject) -> None:
        """The host that leads has said something of the checks."""
        if self._checks is not None:
            self._checks.opened().hear(message)
        elif message.get("ok"):
            self._is_probed = True
            self._events.append(ProbesPassed(time.monotonic(), self._supervisor.attempt))

    def _show_checks(self, outcome: Outcome) -> int:
        """Print all that was found, and return the exit code."""
        from saferun.preflight.text import show

        text = show(outcome.preflight, outcome.cards, as_json=self._config.checks.as_json)
        self._screen.answer(text)
        return EXIT_USAGE if outcome.failure is not None else 0

    def _join_hosts(self, action: JoinHosts) -> None:
        self._number = action.attempt
        if self._job is not None:
            run = self._checks.opened() if self._checks is not None else None
            card, door = (run.card, run.door) if run is not None else ("", "")
            self._job.join(action, card, door)
            self._imports.import_now(BEFORE_SEVERAL_HOSTS)  # the other hosts take longer
        else:
            self._store.join(action)

    def _preparation(self) -> JsonObject:
        """What only torch can answer about an attempt."""
        assert self._placement is not None  # noqa: S101 - CHECKING, or the meeting, has set it
        logs = self._config.logs
        preparation: JsonObject = {
            "numa": self._config.numa_binding,
            "nproc": self._config.nproc_per_node,
            "run_id": self._config.rendezvous.run_id,
            "environs": [],
            "logs": None,
        }
        if logs.logs_specs is not None:
            preparation["environs"] = plan_environs(self._config, self._placement, {})
            preparation["logs"] = {
                "name": logs.logs_specs,
                "log_dir": logs.log_dir,
                "redirects": logs.redirects,
                "tee": logs.tee,
                "local_ranks_filter": sorted(logs.local_ranks_filter),
            }
        return preparation

    def _on_prepared(self, answer: JsonObject) -> None:
        """Everything is known that the ranks are started with. ``answer``: what only torch could tell."""
        placement, attempt = self._placement, self._number
        assert placement is not None  # noqa: S101 - CHECKING has set it
        try:
            environs = plan_environs(self._config, placement, self._environ)
        except SaferunError as error:
            self._start_failed(attempt, error)
            return
        if "logs" in answer:
            destinations, changed = _destinations_from(answer)
            self._investigation.prepare()
            self._run_dir.open(
                lambda: self._on_destinations(attempt, placement, environs, destinations, answer, changed)
            )
            return

        def on_ready(found: LogDestinations | OSError) -> None:
            if self._number != attempt or self._supervisor.state is not State.JOINING:
                return  # the launch has been ended meanwhile
            if isinstance(found, OSError):
                what = f"log files cannot be made: {found.filename or ''}: {found.strerror}"
                self._start_failed(attempt, SaferunError(what, "pass another --log-dir, or make room there"))
            else:
                self._on_destinations(attempt, placement, environs, found, answer, [])

        self._logs.destinations(placement, attempt, on_ready)
        # While the directories are made:
        self._investigation.prepare()
        self._describe()

    def _on_destinations(
        self,
        attempt: int,
        placement: Placement,
        environs: tuple[dict[str, str], ...],
        destinations: LogDestinations,
        answer: JsonObject,
        changed: Sequence[Mapping[str, str]],
    ) -> None:
        """The directories of the attempt are there, as far as they are going to be."""
        if self._run_dir.refusal is not None:
            self._start_failed(attempt, self._run_dir.refusal)
            return
        # Nothing that is asked for is impossible: from here on the launch leaves files.
        self._describe()
        own = self._own_environ()
        for environ, error_file in zip(environs, destinations.error_files, strict=True):
            environ.update(own, TORCHELASTIC_ERROR_FILE=error_file)
        for environ, more in zip(environs, changed, strict=False):
            environ.update(more)
        self._apply_profiles(attempt, placement, environs)
        for place, environ in zip(placement.ranks, environs, strict=True):
            environ.update(self._investigation.hook_environ(attempt, place.rank, environ))
        if answer.get("timer_file"):
            for environ in environs:
                environ["TORCHELASTIC_TIMER_FILE"] = answer["timer_file"]
        numactl = answer.get("numactl")
        prefixes = tuple(map(tuple, numactl)) if numactl else ((),) * len(placement.ranks)
        self._plan = AttemptPlan(attempt, placement, destinations, environs, prefixes)
        self._post_joined(placement)

    def _post_joined(self, placement: Placement) -> None:
        # What torchrun's two events tell takes no time of its own here.
        for state in ("RENDEZVOUS", "ASSIGN_WORKER_RANKS"):
            known = placement if self._group is not None or self._finished else None
            self._handover.hand_on_own(state, self._supervisor.attempt, known, 0.0)
        joined = HostsJoined(time.monotonic(), self._supervisor.attempt, placement)
        if self._job is not None:
            may_leave = placement.group_world_size > self._config.hosts.least
            probes = self._place is not None and self._place.checked
            joined = joined._replace(number=self._number, leads=self._job.leads, may_leave=may_leave, probes=probes)
        self._events.append(joined)

    def _apply_profiles(self, attempt: int, placement: Placement, environs: Sequence[dict[str, str]]) -> None:
        """Env profiles and --env have the last word about what a rank is told."""
        run_dir = self._run_dir.path
        for place, environ in zip(placement.ranks, environs, strict=True):
            apply(
                self._resolution,
                environ,
                place,
                host=self._host,
                world_size=placement.world_size,
                run_dir=run_dir,
                rank_dir=self._run_dir.rank_path(attempt, place.rank) if run_dir is not None else None,
            )
        if attempt == 0:
            for line in launch_lines(self._resolution, has_run_dir=run_dir is not None):
                self._screen.say(f"saferun: {printable(line)}")

    def _lint_soon(self, plan: AttemptPlan) -> None:
        """Look at the environment of the ranks, beside them, in a process of its own."""
        python = self._environ.get("PYTHON_EXEC", sys.executable)
        # Without the hook: the lint is no rank, and nobody looks into it.
        environ = {name: value for name, value in plan.environs[0].items() if name != "SAFERUN_HOOK"}
        self._lint.begin_at(time.monotonic() + _LINT_DELAY_S, environ, python, str(self._config.command.name))

    def _own_environ(self) -> dict[str, str]:
        """Saferun's own variables of the ranks. Runs within runs remember all that are around them."""
        own = {"SAFERUN_RUN_ID": self._run_id}
        outer = [self._environ.get("SAFERUN_OUTER_RUNS"), self._environ.get("SAFERUN_RUN_ID")]
        if any(outer):
            own["SAFERUN_OUTER_RUNS"] = ":".join(filter(None, outer))
        if self._run_dir.path is not None:
            own["SAFERUN_RUN_DIR"] = self._run_dir.path
        return own

    def _start_failed(self, attempt: int, error: SaferunError, started: tuple[int, ...] = ()) -> None:
        failed = StartFailed(time.monotonic(), attempt, error.what, error.hint, error.exit_code, started)
        self._events.append(failed._replace(class_name=error.class_name))

    # ----------------------------------------------------------------------------------------------------------------
    # The ranks

    def _start_ranks(self, _action: StartRanks) -> None:
        assert self._plan is not None  # noqa: S101 - JOINING has set it
        self._started_at = time.monotonic()
        self._leftovers.begin_attempt()
        self._group = RankGroup(
            self._config,
            self._plan,
            screen=self._screen,
            run_dir=self._run_dir,
            host=self._host,
            warn=self._warn,
            preparation=self._investigation.preparation,
            spares=self._spares,
            reaper=self._reaper,
        )
        forked, failure = self._group.start()
        self._investigation.ranks_started(self._group, self._started_at)
        for rank in self._group.ranks:
            self._leftovers.note_rank(rank.child.pid, rank.place.rank)
            if rank.child.pidfd >= 0:
                self._poller.watch(rank.child.pidfd, self._reap)
            for stream in rank.streams:
                self._intake.add(stream)
        self._imports.seal()
        self._rank_start.begin(forked, failure)
        self._examiner.begin_at(time.monotonic() + _EXAMINER_DELAY_S)

    def _on_ranks_started(self) -> None:
        """Every rank has become its program."""
        assert self._group is not None  # noqa: S101 - it has been started
        self._hand_on_starts(self._group)
        pids = tuple(rank.child.pid for rank in self._group.ranks)
        attempt = self._supervisor.attempt
        self._check_beside(self._group.plan)
        self._events.append(RanksStarted(time.monotonic(), attempt, pids))
        if self._config.environ.lint and attempt == 0 and worth_a_look(self._environ, self._config.environ):
            self._lint_soon(self._group.plan)

    def _hand_on_starts(self, group: RankGroup) -> None:
        for rank in group.ranks:
            self._handover.hand_on(rank, group.plan, "START", self._supervisor.attempt)

    def _on_ranks_failed(self, error: SaferunError, running: tuple[int, ...]) -> None:
        """A rank did not become its program; these do run, or may come to."""
        assert self._group is not None  # noqa: S101 - it has been started
        self._hand_on_starts(self._group)
        self._start_failed(self._supervisor.attempt, error, running)

    def _capture(self, action: CaptureEvidence) -> None:
        if action.verdict is None:
            self._note_segments()
        # What has not become its program is still saferun itself: there is nothing to be seen in it.
        ranks = tuple(rank for rank in action.local_ranks if rank not in self._rank_start.waiting)
        if not ranks:
            self._events.append(EvidenceCaptured(time.monotonic(), action.attempt))
            return
        action = action._replace(local_ranks=ranks)
        # CAPTURING, or STOPPING, where ranks do not end: what waits for the imports must still be wanted then.
        self._when_imported(self._supervisor.state, lambda: self._investigation.capture(action))

    def _when_imported(self, state: State, call: Callable[[], None]) -> None:
        """Call when what it takes to look at ranks is in memory, unless the launch has got on without it."""
        attempt = self._supervisor.attempt

        def call_in_time() -> None:
            if (self._supervisor.attempt, self._supervisor.state) == (attempt, state):
                call()

        self._imports.need(call_in_time)

    def _note_segments(self) -> None:
        """The ranks are about to be ended."""
        if self._group is not None:
            since = time.time() - (time.monotonic() - self._started_at)
            self._segments.note([rank.child.pid for rank in self._group.ranks if rank.end is None], since)

    def _signal_ranks(self, action: SignalRanks) -> None:
        if self._group is None:
            return
        # A rank that handles the signal lives on for a moment, in which its memory can still be looked at; one that
        # does not may be gone at once.
        handling = self._group.signal(action.local_ranks, action.signum, only_handled=not self._segments.is_noted)
        self._note_segments()
        others = [local_rank for local_rank in action.local_ranks if local_rank not in handling]
        if others:
            self._group.signal(others, action.signum)

    # ----------------------------------------------------------------------------------------------------------------
    # Other hosts

    def _open_job(self, environ: Mapping[str, str]) -> Job:
        from saferun.cluster.job import Job

        return Job(
            self._config,
            environ,
            self._poller,
            run_dir=self._run_dir,
            post=self._take_from_job,
            attempt=lambda: self._supervisor.attempt,
            on_assigned=self._on_assigned,
            on_prepared=self._on_prepared,
            on_hang=self._on_job_hang,
            on_preflight=self._on_preflight,
            say=self._screen.say,
            on_stderr=self._screen.err.say,
            ranks=lambda: self._investigation.watched_ranks(),  # noqa: PLW0108 - made after this
            secret=self._secret,
        )

    def _on_assigned(self, place: Assignment) -> None:
        """The hosts have met."""
        self._placement = place.placement
        self._place = place
        self._is_probed = False
        self._number = place.number
        self._host = place.placement.host or self._host
        task = self._config.hosts.task
        self._run_dir.join(
            place.files,
            host=self._host,
            is_part=not place.leads,
            task=task.local_rank if task is not None else 0,
        )
        self._investigation.joined(self._host)
        (self._job or self._store).prepare(self._preparation())

    def _on_job_hang(self, verdict: HangVerdict, number: int) -> None:
        self._investigation.job_hangs(verdict, number)

    def _tell_trouble(self, action: BroadcastAbort) -> None:
        if self._job is None:
            return
        words, ranks = action.message, tuple(self._job.blamed)
        if action.reason == "failure":
            first = next((rank for rank in self._ended_badly()), None)
            words = words or (f"rank {first.place.rank}: {first.end.status.description}" if first and first.end else "")
            ranks = (first.place.rank,) if first is not None else ()
        self._job.abort_attempt(action.reason, words or action.reason, ranks=ranks, signum=action.signum)

    def _ended_badly(self) -> list[Rank]:
        ranks = self._group.ranks if self._group is not None else []
        failed = [rank for rank in ranks if rank.end is not None and not rank.end.status.ok]
        return sorted(failed, key=lambda rank: rank.end.at if rank.end is not None else 0.0)

    def _tell_done(self, _action: NotifyDone) -> None:
        if self._job is not None:
            self._job.set_state({"s": "done"})

    def _tell_decision(self, action: BroadcastDecision) -> None:
        if self._job is not None:
            words: list[str] = []
            if action.diagnosis is not None:
                restarting = action.next_step == "restart"
                words = self._investigation.decision_words(
                    action.diagnosis, restarting=restarting, decision=action.decision
                )
            self._job.broadcast_decision(action, words)

    def _report_decision(self, action: ReportDecision) -> None:
        self._investigation.report_decision(action)
        self._forget_group()

    # ----------------------------------------------------------------------------------------------------------------
    # What the ranks left behind

    def _sweep_leftovers(self, action: SweepOrphans) -> None:
        if action.leave:
            self._leftovers.leave()
            return
        if action.wait_s > 0 and self._job is not None:
            # Its ranks are done; nothing of them moves any more, and that is no hang.
            self._job.set_state({"s": "leftovers"})
        self._leftovers.begin(time.monotonic(), action.term_s, wait_s=action.wait_s, idle_s=action.idle_s)

    def _say_leftovers(self, text: str) -> None:
        self._screen.say(f"saferun: {printable(text)}")
        if self._job is not None and self._supervisor.state is State.STOPPING and text.startswith("waiting for "):
            # The host that leads says so as well: it waits for this one.
            self._job.set_state({"s": "leftovers", "words": text[:_LONGEST_TOLD]})

    def _on_leftovers_gone(self, pids: tuple[int, ...]) -> None:
        now = time.monotonic()
        self._end_attempt(now)
        self._segments.sweep()
        self._events.append(OrphansGone(now, self._supervisor.attempt, pids))

    def _own_pids(self) -> set[int]:
        """Processes of saferun's own, and ranks that were given up: they are in an uninterruptible sleep."""
        pids: set[int] = set().union(self._screen.pids, *(part.pids for part in self._parts))
        return pids.union(self._group.by_pid) if self._group is not None else pids

    def _end_attempt(self, now: float) -> None:
        """The ranks are gone: take in what is left in their streams, and close those."""
        self._leftovers.end()
        self._rank_start.close()
        self._investigation.attempt_ended()
        self._store.attempt_ended()
        self._lint.cancel()
        group = self._group
        if group is None or group.is_closed:
            return
        for rank in group.ranks:
            if rank.end is None:
                self._poller.unwatch(rank.child.pidfd)
            for stream in rank.streams:
                self._intake.remove(stream)
        self._finished = group.ranks
        group.close(now)

    # ----------------------------------------------------------------------------------------------------------------
    # Diagnosis and report

    def _diagnose(self, action: Diagnose) -> None:
        self._stop_signum = action.stop_signum
        self._end_attempt(time.monotonic())
        group = self._group

        def look_into_it() -> None:
            self._draw_up_waits()
            self._investigation.diagnose(action)

        def diagnose() -> None:
            self._when_imported(State.DIAGNOSING, look_into_it)

        if group is None:
            diagnose()
        else:
            group.when_read(lambda: diagnose() if self._group is group else None)

    def _draw_up_waits(self) -> None:
        """Something has failed: have the waits before retries drawn up, once a launch."""
        retry = self._config.retry
        count = min(retry.start_retries + self._config.max_restarts, _MOST_WAITS)
        if self._waits is not None or count <= 0 or retry.wait_s <= 0:
            return
        with suppress(ImportError):
            from saferun.launch.retry_waits import RetryWaits

            self._waits = RetryWaits(
                self._poller,
                lambda budget_s: self._examiner.ask("waits", [retry.wait_s, count], budget_s, is_urgent=False)[1],
                self._supervisor.take_waits,
            )
            self._parts += (self._waits,)

    def _take_investigated(self, event: Event) -> None:
        """Take in what was found out. A start that is tried again waits a second anyway: it can wait for the waits."""
        if isinstance(event, Diagnosed) and self._waits is not None:
            facts = event.facts
            if facts is not None and facts.started is False and facts.is_transient:
                self._waits.need(lambda: self._events.append(event))
                return
        self._events.append(event)

    def _report_failure(self, action: ReportFailure) -> None:
        self._investigation.report_failure(action)
        if action.decision is not None and action.decision.new_port:
            self._store.release()
            self._is_bound = False
        if not action.restarting:
            self._write_error_file(action.diagnosis)
        self._forget_group()

    def _forget_group(self) -> None:
        if self._group is not None:
            self._leftovers.given_up.update(self._group.by_pid)
        self._group = None

    def _write_error_file(self, diagnosis: Diagnosis) -> None:
        """The launcher's own error file, for the program that started it: the root cause, as under torchrun."""
        path = self._environ.get("TORCHELASTIC_ERROR_FILE")
        if not path:
            return
        first = diagnosis.first_failure
        message, source, returncode = diagnosis.headline, "", 0
        if self._stop_signum is not None:
            # The words of torchrun's exception, which programs that read this file may know.
            message = f"SignalException: Process {os.getpid()} got signal: {self._stop_signum}"
        elif first is not None and self._plan is not None:
            own = next((place for place in self._plan.placement.ranks if place.rank == first.rank), None)
            if own is not None:
                source = self._plan.destinations.error_files[self._plan.position(own)]
                returncode = first.status.returncode

        def on_answer(answer: JsonObject | None) -> None:
            if answer is None:
                self._warn(f"TORCHELASTIC_ERROR_FILE {path}: the file system does not answer")
            elif "error" in answer:
                self._warn(f"TORCHELASTIC_ERROR_FILE {path}: {answer['error'][1]}")

        self._run_dir.files.ask("write_error", [path, message, source, returncode], on_answer)

    def _on_finish(self, action: Finish) -> None:
        # By a signal to this host, or to another one of the job.
        told = self._job.abort_reason if self._job is not None else None
        stopped = self._stop_signum is not None or (told is not None and told.reason in {"signal", "parent"})
        if action.reraise is None:
            self._handover.end(self._finished, self._plan, self._supervisor.attempt, stopped=stopped)
        if self._job is not None:
            self._job.leaves = action.leaves
        if self._checks is not None:
            self._checks.settle()
        self._investigation.finish(action.exit_code, stopped=stopped)
        self._finish = action

    def _warn(self, text: str) -> None:
        """One line about something that could not be written or done; never twice the same."""
        if text not in self._warned:
            self._warned.add(text)
            self._screen.say(f"saferun: {printable(text)}")

    def _record(self, event: Event, before: State, after: State) -> None:
        entry: JsonObject = {"event": type(event).__name__, "time": time.time(), **_as_json(event)}
        if before is not after:
            entry["state"] = after.value
        self._run_dir.write_event(entry)

    def _on_imported(self) -> None:
        """No file is opened by this process any more."""
        with suppress(ImportError):
            from saferun.linux.locked_code import lock_code

            lock_code()
        self._note("ModulesImported")
        self._investigation.imported()
        if self._checks is not None:
            self._checks.imported()

    def _note(self, name: str) -> None:
        """One line of the story that no decision follows from."""
        now = time.monotonic()
        self._run_dir.write_event({"event": name, "time": time.time(), "at": now, "attempt": self._supervisor.attempt})

    def _describe(self) -> None:
        """Write run.json, unless that has been done."""
        if not self._is_described and self._run_dir.path is not None:
            self._is_described = True
            self._write_run_json(None)

    def _write_run_json(self, torch_version: str | None) -> None:
        if not self._is_described:
            return  # there is no run directory
        from saferun.report.run_json import run_description

        self._run_dir.write_json(
            "run.json",
            run_description(
                self._config,
                cwd=current_directory(),
                run_id=self._run_id,
                python_version=sys.version.split()[0],
                torch_version=torch_version,
            ),
        )

    # ----------------------------------------------------------------------------------------------------------------
    # The end

    def _end(self) -> None:
        """Whatever the reason for the end: no process of ours lives on, and the console has everything.

        No step that fails keeps the next ones from being taken. The reaper ends what is left after such a failure.
        """
        self._reaper.is_needed = True
        helpers: set[int] = set().union(*(part.pids for part in self._parts))
        steps: list[tuple[str, Callable[[], object]]] = [
            ("the last attempt", lambda: self._end_attempt(time.monotonic())),
            *((type(part).__name__, part.close) for part in self._parts),
        ]
        has_failed = False
        for name, step in steps:
            has_failed |= not self._is_done(name, step)
        # With processes that are to be left there is nothing that the reaper may end.
        self._reaper.is_needed = has_failed and not self._leftovers.is_left
        self._is_done("the files", self._finish_files)
        self._is_done("the console", self._drain_console)
        self._is_done("signals", lambda: signal.set_wakeup_fd(-1))
        self._is_done("the poller", self._poller.close)
        self._is_done("the helper processes", lambda: _await_end(helpers))

    def _is_done(self, name: str, step: Callable[[], object]) -> bool:
        """Take one step of the end. Returns whether it could be taken; if not, that is said."""
        try:
            step()
        except Exception as error:
            with suppress(Exception):
                words = f"{name}: {type(error).__name__}: {error}"
                self._screen.say(f"saferun: the end of the run: {printable(words)}")
            return False
        return True

    def _finish_files(self) -> None:
        """Have everything written; a file system that does not answer is left to itself."""
        self._run_dir.close()
        if self._writer is not None:
            self._events.clear()
            self._writer.finish(self._poller, self._is_hurried, self._screen.flush)

    def _is_hurried(self) -> bool:
        return any(isinstance(event, SignalReceived) for event in self._events)

    def _drain_console(self) -> None:
        """Wait for a slow reader: while it reads, and a while longer where files keep everything.

        A file that takes nothing (its disk is full, its file system hangs) is given that while as well: it may take
        the verdict yet.
        """
        self._screen.release()
        give_up_at = time.monotonic() + _DRAIN_S
        unwritten_bytes = 0
        while True:
            before, unwritten_bytes = unwritten_bytes, self._screen.unwritten_bytes
            if self._screen.flush() or unwritten_bytes != before:
                give_up_at = time.monotonic() + _DRAIN_S
            if self._screen.is_empty:
                self._screen.finish()
                if self._screen.is_finished:
                    break
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 and (self._run_dir.path is not None or self._screen.is_stuck):
                break
            if self._is_hurried() or self._wait_for_console(max(left_s, _CONSOLE_S)):
                break
        self._screen.close()

    def _wait_for_console(self, timeout_s: float) -> bool:
        """Wait until the console can be written. Returns whether somebody does not want that any more."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        waits_for_time = False
        for pane in self._screen.panes:
            if pane.target.waits_for_room:
                poll.register(pane.target.fd, select.POLLOUT)
            if pane.target.file is not None:
                waits_for_time = True
                if pane.target.file.end_fd >= 0:
                    poll.register(pane.target.file.end_fd, select.POLLIN)
            if pane.target.retry_at is not None:
                waits_for_time = True
                timeout_s = min(timeout_s, max(pane.target.retry_at - time.monotonic(), 0.0))
        ready = poll.poll((min(timeout_s, _CONSOLE_S) if waits_for_time else timeout_s) * 1000)
        return any(fd == self._wake_read for fd, _ in ready) and any(
            signum in self._config.signals for signum in os.read(self._wake_read, 4096)
        )


def _await_end(pids: set[int]) -> None:
    """Reap helper processes that were ended, so that none is seen after saferun; one that hangs is left to itself."""
    give_up_at = time.monotonic() + _HELPERS_S
    while pids:
        for pid in tuple(pids):
            try:
                is_gone = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:
                is_gone = True  # reaped before
            if is_gone:
                pids.discard(pid)
        if not pids or time.monotonic() >= give_up_at:
            return
        time.sleep(_LOOK_AGAIN_S)


def _as_json(value: Any) -> Any:  # noqa: ANN401
    """Named tuples as objects, all the way down."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is not None:
            return {name: _as_json(item) for name, item in zip(fields, value, strict=True)}
        return [_as_json(item) for item in value]
    return value


def _destinations_from(message: JsonObject) -> tuple[LogDestinations, list[dict[str, str]]]:
    """What a logs-specs entry point decided, as the coordinator reports it."""
    logs = message["logs"]
    destinations = LogDestinations(
        tuple(logs["stdouts"]),
        tuple(logs["stderrs"]),
        frozenset(logs["tee_stdouts"]),
        frozenset(logs["tee_stderrs"]),
        tuple(logs["error_files"]),
        logs["filtered_stdout"],
        logs["filtered_stderr"],
    )
    return destinations, message["environs"]


def _start_failure(now: float, attempt: int, failure: Failure) -> StartFailed:
    return StartFailed(now, attempt, failure.what, failure.hint, EXIT_USAGE, class_name=failure.class_name)


def _nothing() -> None:
    """Woken up: the loop looks for itself."""


def _ignore(_signum: int, _frame: object) -> None:
    """The wake-up pipe tells the loop."""
