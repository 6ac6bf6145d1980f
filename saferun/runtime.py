"""The only loop: carries out the supervisor's actions and feeds what happens back as events."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from saferun import topology
from saferun.captures.process_state import capture_process_states
from saferun.config import LaunchConfig
from saferun.console.rank_stream import RankStream
from saferun.console.screen import Screen
from saferun.diagnosis import diagnose
from saferun.errors import SaferunError
from saferun.events import (
    Action,
    CaptureEvidence,
    ChecksPassed,
    DeadlineExpired,
    Diagnose,
    Diagnosed,
    Event,
    EvidenceCaptured,
    Finish,
    HostsJoined,
    JoinHosts,
    LaunchRequested,
    LeftoversGone,
    RankExited,
    RanksStarted,
    ReportFailure,
    RunChecks,
    Say,
    ServeStore,
    SignalRanks,
    SignalReceived,
    StartFailed,
    StartRanks,
    StoreMissed,
    StoreServed,
    SweepLeftovers,
)
from saferun.host.children import SpawnError, reap
from saferun.host.coordinator_link import CoordinatorLink
from saferun.host.error_files import copy_root_cause, read_error_file, write_launcher_error
from saferun.host.log_files import LogDirectory
from saferun.host.net import address_for_ranks, listen
from saferun.host.procfs import descendants_of
from saferun.host.run_dir import RunDirectory
from saferun.model import Evidence, JsonObject, LogDestinations, Placement, RankOutput, signal_name
from saferun.rank_group import AttemptPlan, Rank, RankGroup, plan_environs
from saferun.report.text import failure_text
from saferun.supervisor import State, Supervisor

_LAST_LINES = 12
_SWEEP_INTERVAL_S = 0.05
# A reader of the console that does not read is waited for this long at the end, where files keep everything.
_DRAIN_S = 60.0
_GOODBYE_S = 5.0
# The ranks get this head start. A rank that wants the store has torch to import first, which takes it much longer;
# ranks that are done sooner never wanted one, and then no coordinator is started at all.
_COORDINATOR_DELAY_S = 0.05


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
        not_ours: children of this process that have nothing to do with the launch.
    """

    def __init__(  # noqa: PLR0913
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        supervisor: Supervisor,
        *,
        screen: Screen,
        run_dir: RunDirectory,
        host: str,
        run_id: str,
        not_ours: frozenset[int],
    ) -> None:
        self._config = config
        self._environ = environ
        self._supervisor = supervisor
        self._screen = screen
        self._run_dir = run_dir
        self._host = host
        self._run_id = run_id
        self._not_ours = not_ours
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._events: deque[Event] = deque()
        self._finish: Finish | None = None
        self._listener: socket.socket | None = None
        self._link: CoordinatorLink | None = None
        self._link_attempts = 0
        self._needs_whole_torch = (
            config.numa_binding is not None
            or config.logs.logs_specs is not None
            or config.event_log_handler != "null"
        )
        self._logs = LogDirectory(config.logs, run_dir)
        self._placement: Placement | None = None
        self._plan: AttemptPlan | None = None
        self._group: RankGroup | None = None
        self._paused: list[RankStream] = []
        self._started_at = 0.0
        self._survivors: EvidenceCaptured | None = None
        self._swept: set[int] = set()
        self._sweep_at: float | None = None
        self._sweep_kill_at = 0.0
        self._serve_at: float | None = None
        self._waiting_for_room: set[int] = set()
        self._warned: set[str] = set()
        self._torch_version: str | None = None
        self._wake_read = -1
        self._actions: dict[type, Callable[..., None]] = {
            RunChecks: self._run_checks,
            JoinHosts: self._join_hosts,
            StartRanks: self._start_ranks,
            ServeStore: self._serve_store,
            CaptureEvidence: self._capture_evidence,
            SignalRanks: self._signal_ranks,
            SweepLeftovers: self._sweep_leftovers,
            Diagnose: self._diagnose,
            ReportFailure: self._report_failure,
            Say: self._say,
            Finish: self._on_finish,
        }

    # ----------------------------------------------------------------------------------------------------------------
    # The loop

    def run(self) -> Finish:
        """Carry the launch out. Returns how saferun is to end."""
        self._open_wakeup()
        self._post(LaunchRequested(time.monotonic(), 0))
        try:
            while True:
                self._handle_events()
                if self._finish is not None:
                    return self._finish
                self._screen.flush()
                self._wait()
        finally:
            self._end()

    def _post(self, event: Event) -> None:
        self._events.append(event)

    def _handle_events(self) -> None:
        while self._events and self._finish is None:
            event = self._events.popleft()
            before = self._supervisor.state
            actions = self._supervisor.handle(event)
            self._record(event, before, self._supervisor.state)
            for action in actions:
                self._do(action)

    def _do(self, action: Action) -> None:
        self._actions[type(action)](action)

    def _wait(self) -> None:
        """Wait for the next thing to happen and take it in."""
        self._watch_for_room()
        now = time.monotonic()
        dues = (self._supervisor.deadline, self._screen.deadline(), self._sweep_at, self._serve_at)
        due = min((moment for moment in dues if moment is not None), default=None)
        timeout = -1.0 if due is None else max(due - now, 0.0)
        for fd, _ in self._epoll.poll(timeout):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        now = time.monotonic()
        if self._paused:
            self._resume_streams()
        self._screen.tick(now)
        if self._sweep_at is not None and self._sweep_at <= now:
            self._sweep(now)
        if self._serve_at is not None and self._serve_at <= now:
            self._serve()
        deadline = self._supervisor.deadline
        if deadline is not None and deadline <= now and not self._events:
            self._post(DeadlineExpired(now, self._supervisor.attempt))

    def _watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def _watch_for_room(self) -> None:
        """Be woken when a console that was full takes bytes again."""
        for pane in self._screen.panes:
            target = pane.target
            if not target.can_wait:
                continue
            waiting = target.fd in self._waiting_for_room
            if waiting and target.is_empty:
                self._unwatch(target.fd)
                self._waiting_for_room.discard(target.fd)
            elif not waiting and not target.is_empty:
                with suppress(OSError):  # EPERM: a file that is always ready
                    self._watch(target.fd, _nothing, select.EPOLLOUT)
                    self._waiting_for_room.add(target.fd)

    # ----------------------------------------------------------------------------------------------------------------
    # Signals

    def _open_wakeup(self) -> None:
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._watch(self._wake_read, self._on_wakeup)
        signal.signal(signal.SIGCHLD, _ignore)
        if any(pane.target.is_terminal for pane in self._screen.panes):
            signal.signal(signal.SIGWINCH, _ignore)
        for signum in self._config.signals:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # started under nohup: the terminal's end is none of our business
            try:
                signal.signal(signum, _ignore)
            except (OSError, ValueError):
                self._warn(f"{signal_name(signum)} cannot be handled")

    def _on_wakeup(self) -> None:
        for signum in os.read(self._wake_read, 4096):
            if signum == signal.SIGCHLD:
                self._reap()
            elif signum == signal.SIGWINCH:
                if self._group is not None:
                    self._group.resize()
            elif signum in self._config.signals:
                self._post(SignalReceived(time.monotonic(), self._supervisor.attempt, signum))

    def _reap(self) -> None:
        for pid, status in reap():
            if self._link is not None and pid == self._link.child.pid:
                self._on_coordinator_gone(status.words)
                continue
            if self._group is None:
                continue
            now = time.monotonic()
            rank = self._group.by_pid.get(pid)
            if rank is not None and rank.child.pidfd >= 0:
                self._unwatch(rank.child.pidfd)
            rank = self._group.note_exit(pid, status, at=now, time=time.time())
            if rank is not None:
                self._post(RankExited(now, self._supervisor.attempt, rank.place.local_rank, status))
                self._tell_torch(rank)
        if self._sweep_at is not None:
            self._sweep(time.monotonic())

    # ----------------------------------------------------------------------------------------------------------------
    # Before the ranks

    def _run_checks(self, action: RunChecks) -> None:
        now = time.monotonic
        rendezvous = self._config.rendezvous
        try:
            self._listener = listen(rendezvous.master_port)
        except SaferunError as error:
            self._post(StartFailed(now(), action.attempt, error.what, error.hint, error.exit_code))
            return
        self._placement = topology.single_host(
            self._config.nproc_per_node,
            rendezvous.master_addr or rendezvous.local_addr or address_for_ranks(),
            self._listener.getsockname()[1],
            rendezvous.run_id,
        )
        if not rendezvous.agent_store:
            # The user wants rank 0 to serve the store itself, on a port that was free a moment ago.
            self._listener.close()
            self._listener = None
        self._post(ChecksPassed(now(), action.attempt))

    def _join_hosts(self, action: JoinHosts) -> None:
        if self._needs_whole_torch:
            self._open_link(whole_torch=True)
            if self._link is not None:
                self._link.send(self._preparation(action.attempt))
            return
        if self._link is not None and self._link.serving is not None:
            # Nothing of the attempt before may be found in the store: keys, or the addresses that gloo left there.
            self._link.serving = None
            self._link.send({"op": "drop"})
            return
        self._joined(action.attempt, None, None)

    def _preparation(self, attempt: int) -> JsonObject:
        assert self._placement is not None  # noqa: S101 - CHECKING has set it
        logs = self._config.logs
        environs = plan_environs(self._config, self._placement, attempt, None, {}, {})
        return {
            "op": "prepare",
            "attempt": attempt,
            "numa": self._config.numa_binding,
            "nproc": self._config.nproc_per_node,
            "environs": environs,
            "logs": None
            if logs.logs_specs is None
            else {
                "name": logs.logs_specs,
                "log_dir": logs.log_dir,
                "redirects": logs.redirects,
                "tee": logs.tee,
                "local_ranks_filter": sorted(logs.local_ranks_filter),
            },
        }

    def _joined(self, attempt: int, logs: JsonObject | None, numactl: list[list[str]] | None) -> None:
        """Everything is known that the ranks are started with."""
        placement = self._placement
        assert placement is not None  # noqa: S101 - CHECKING has set it
        now = time.monotonic()
        try:
            if logs is None:
                destinations = self._logs.destinations(placement, attempt)
                changed: list[dict[str, str]] = []
            else:
                destinations, changed = _destinations_from(logs)
            own = {"SAFERUN_RUN_ID": self._run_id}
            outer = ":".join(
                filter(None, (self._environ.get("SAFERUN_OUTER_RUNS"), self._environ.get("SAFERUN_RUN_ID")))
            )
            if outer:
                own["SAFERUN_OUTER_RUNS"] = outer
            if self._run_dir.path is not None:
                own["SAFERUN_RUN_DIR"] = self._run_dir.path
            environs = plan_environs(self._config, placement, attempt, destinations, self._environ, own)
            for environ, more in zip(environs, changed, strict=False):
                environ.update(more)
        except SaferunError as error:
            self._post(StartFailed(now, attempt, error.what, error.hint, error.exit_code))
            return
        except OSError as error:
            what = f"log files cannot be made: {error.filename or ''}: {error.strerror}"
            self._post(StartFailed(now, attempt, what, "pass another --log-dir, or make room there", 1))
            return
        prefixes = tuple(map(tuple, numactl)) if numactl else ((),) * len(placement.ranks)
        self._plan = AttemptPlan(attempt, placement, destinations, environs, prefixes)
        self._post(HostsJoined(now, attempt, placement))

    # ----------------------------------------------------------------------------------------------------------------
    # The ranks

    def _start_ranks(self, action: StartRanks) -> None:
        assert self._plan is not None  # noqa: S101 - JOINING has set it
        self._started_at = time.monotonic()
        self._survivors = None
        self._swept = set()
        self._group = RankGroup(
            self._config, self._plan, screen=self._screen, run_dir=self._run_dir, host=self._host, warn=self._warn
        )
        failure: SaferunError | None = None
        try:
            self._group.start()
        except SaferunError as error:
            failure = error
        for rank in self._group.ranks:
            if rank.child.pidfd >= 0:
                self._watch(rank.child.pidfd, self._reap)
            for stream in rank.streams:
                self._watch_stream(stream)
        now = time.monotonic()
        if failure is not None:
            self._post(StartFailed(now, action.attempt, failure.what, failure.hint, failure.exit_code))
        else:
            self._post(RanksStarted(now, action.attempt, tuple(rank.child.pid for rank in self._group.ranks)))

    def _watch_stream(self, stream: RankStream) -> None:
        def on_readable() -> None:
            if stream.is_full:
                # Nobody keeps a copy of this stream, so its rank waits for the console, as it would without us.
                self._unwatch(stream.fd)
                self._paused.append(stream)
            elif stream.read(time.monotonic()) == 0:
                self._unwatch(stream.fd)

        self._watch(stream.fd, on_readable)

    def _resume_streams(self) -> None:
        self._screen.flush()
        paused, self._paused = self._paused, []
        for stream in paused:
            if stream.is_full:
                self._paused.append(stream)
            else:
                self._watch_stream(stream)

    def _capture_evidence(self, action: CaptureEvidence) -> None:
        assert self._group is not None  # noqa: S101 - ranks are running
        pids = [
            (rank.place.local_rank, rank.child.pid)
            for rank in self._group.ranks
            if rank.place.local_rank in action.local_ranks and rank.end is None
        ]
        captured = EvidenceCaptured(time.monotonic(), action.attempt, capture_process_states(pids))
        self._survivors = captured
        self._post(captured)

    def _signal_ranks(self, action: SignalRanks) -> None:
        if self._group is not None:
            self._group.signal(action.local_ranks, action.signum)

    # ----------------------------------------------------------------------------------------------------------------
    # What the ranks left behind

    def _sweep_leftovers(self, action: SweepLeftovers) -> None:
        now = time.monotonic()
        self._sweep_kill_at = now + action.term_s
        self._sweep(now)

    def _sweep(self, now: float) -> None:
        """End what is left: SIGTERM once to each process, SIGKILL later, and look again until there is none."""
        leave_out = set(self._not_ours)
        if self._link is not None:
            leave_out.add(self._link.child.pid)
        if self._group is not None:
            leave_out.update(self._group.by_pid)  # given up: in an uninterruptible sleep
        pids = descendants_of(os.getpid(), frozenset(leave_out))
        if not pids:
            self._sweep_at = None
            swept = tuple(sorted(self._swept))
            self._end_attempt(now)
            self._post(LeftoversGone(now, self._supervisor.attempt, swept))
            return
        for pid in pids:
            killing = now >= self._sweep_kill_at
            if killing or pid not in self._swept:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if killing else signal.SIGTERM)
            self._swept.add(pid)
        self._sweep_at = now + _SWEEP_INTERVAL_S

    def _end_attempt(self, now: float) -> None:
        """Close the streams of the attempt: nobody writes to them any more."""
        self._serve_at = None
        self._paused.clear()
        if self._group is None:
            return
        for rank in self._group.ranks:
            if rank.child.pidfd >= 0:
                self._unwatch(rank.child.pidfd)
            for stream in rank.streams:
                self._unwatch(stream.fd)
        outputs = {rank.place.local_rank: self._output_of(rank) for rank in self._group.ranks}
        self._outputs = outputs
        self._group.close(now)

    # ----------------------------------------------------------------------------------------------------------------
    # Diagnosis and report

    def _output_of(self, rank: Rank) -> RankOutput:
        assert self._group is not None  # noqa: S101 - called for its ranks
        stderr = rank.stderr
        path = self._group.error_file(rank.place.local_rank)
        recorded = read_error_file(path) if path and rank.end is not None and not rank.end.status.ok else None
        return RankOutput(
            rank.place.local_rank,
            stderr.last_lines(_LAST_LINES) if stderr is not None else (),
            rank.stderr_path,
            recorded.message if recorded else "",
            recorded.time if recorded else 0.0,
        )

    def _diagnose(self, action: Diagnose) -> None:
        ranks = self._group.ranks if self._group is not None else []
        evidence = Evidence(
            host=self._host,
            started_at=self._started_at,
            ends=tuple(rank.end for rank in ranks if rank.end is not None),
            outputs=tuple(self._outputs.values()) if self._group is not None else (),
            survivors=self._survivors.survivors if self._survivors is not None else (),
            abandoned=action.abandoned,
            stop_signum=action.stop_signum,
            trouble=action.trouble,
            trouble_hint=action.trouble_hint,
        )
        self._post(Diagnosed(time.monotonic(), action.attempt, diagnose(evidence)))

    _outputs: dict[int, RankOutput] = {}  # noqa: RUF012 - replaced as a whole, never changed

    def _report_failure(self, action: ReportFailure) -> None:
        diagnosis = action.diagnosis
        lines = failure_text(
            diagnosis,
            files=_shorter(self._run_dir.path),
            attempt=action.attempt,
            max_restarts=self._config.max_restarts,
            restarting=action.restarting,
        )
        self._screen.say("\n".join(lines))
        self._group = None
        error_file = self._environ.get("TORCHELASTIC_ERROR_FILE")
        if action.restarting or not error_file:
            return
        try:
            first = diagnosis.first
            if first is None or self._supervisor.state is State.NEW:
                write_launcher_error(diagnosis.headline, error_file)
            elif self._plan is not None:
                recorded = read_error_file(self._plan.destinations.error_files[first.local_rank])
                if recorded is not None:
                    copy_root_cause(recorded, first.status.returncode, error_file)
        except OSError as error:
            self._warn(f"TORCHELASTIC_ERROR_FILE {error_file}: {error.strerror}")

    def _say(self, action: Say) -> None:
        self._screen.say(f"saferun: {action.text}")

    def _on_finish(self, action: Finish) -> None:
        self._finish = action

    def _warn(self, text: str) -> None:
        """One line about something that could not be written or done; never twice the same."""
        if text not in self._warned:
            self._warned.add(text)
            self._screen.say(f"saferun: {text}")

    def _record(self, event: Event, before: State, after: State) -> None:
        entry: JsonObject = {"event": type(event).__name__, "time": time.time()}
        entry.update(_as_json(event))
        if before is not after:
            entry["state"] = after.value
        self._run_dir.write_event(entry)

    # ----------------------------------------------------------------------------------------------------------------
    # The coordinator

    def _open_link(self, *, whole_torch: bool) -> None:
        if self._link is not None:
            return
        listen_fd = self._listener.fileno() if self._listener is not None else -1
        environ = {**self._environ, "SAFERUN_RUN_ID": self._run_id, "OMP_NUM_THREADS": "1"}
        self._link_attempts += 1
        try:
            self._link = CoordinatorLink(listen_fd, environ, whole_torch=whole_torch)
        except SpawnError as error:
            self._on_store_lost(f"the coordinator cannot be started: {error}")
            return
        self._watch(self._link.fd, self._on_link_readable)
        self._watch(self._link.stderr_fd, self._on_link_stderr)

    def _serve_store(self, action: ServeStore) -> None:
        del action  # the attempt is the supervisor's own
        if self._listener is not None:
            self._serve_at = time.monotonic() + (0.0 if self._link is not None else _COORDINATOR_DELAY_S)

    def _serve(self) -> None:
        self._serve_at = None
        self._open_link(whole_torch=self._needs_whole_torch)
        if self._link is not None:
            self._link.send({"op": "serve", "attempt": self._supervisor.attempt})

    def _on_link_readable(self) -> None:
        assert self._link is not None  # noqa: S101 - watched only while it is there
        messages = self._link.receive()
        if messages is None:
            # Its exit follows, and says more.
            self._unwatch(self._link.fd)
            return
        now = time.monotonic()
        attempt = self._supervisor.attempt
        for message in messages:
            match message.get("op"):
                case "serving" if message.get("attempt") == attempt:
                    self._link.serving = attempt
                    self._note_torch(str(message.get("torch")))
                    self._post(StoreServed(now, attempt))
                case "dropped":
                    self._joined(attempt, None, None)
                case "prepared":
                    self._joined(attempt, message if "logs" in message else None, message.get("numactl"))
                case "failed":
                    what = str(message.get("what"))
                    hint = "see the options --numa-binding and --logs-specs in saferun --help"
                    self._post(StartFailed(now, attempt, what, hint, 1))

    def _on_link_stderr(self) -> None:
        if self._link is not None and self._link.read_stderr() is None:
            self._unwatch(self._link.stderr_fd)

    def _on_coordinator_gone(self, words: str) -> None:
        link = self._link
        assert link is not None  # noqa: S101 - its pid was reaped
        while link.read_stderr():
            pass
        self._unwatch(link.fd)
        self._unwatch(link.stderr_fd)
        self._link = None
        reason = link.last_line()
        link.close()
        if link.serving is None and not link.whole_torch and self._link_attempts == 1:
            # Perhaps only the short cut to the store is to blame, or a passing lack of memory.
            self._open_link(whole_torch=True)
            if self._link is not None:
                self._link.send({"op": "serve", "attempt": self._supervisor.attempt})
            return
        self._on_store_lost(f"the store's process ended ({words}){f': {reason}' if reason else ''}")

    def _on_store_lost(self, what: str) -> None:
        """Nobody serves the store. Ranks that never ask for it go on; one that asks would wait for ever."""
        hint = "check that this works: python -c 'import torch.distributed'"
        attempt = self._supervisor.attempt
        if self._supervisor.state is State.JOINING:
            self._post(StartFailed(time.monotonic(), attempt, what, hint, 1))
            return
        listener = self._listener
        if listener is None or listener.fileno() in self._handlers:
            return

        def on_asked() -> None:
            self._unwatch(listener.fileno())
            self._post(StoreMissed(time.monotonic(), self._supervisor.attempt, what, hint))

        self._watch(listener.fileno(), on_asked)

    def _note_torch(self, version: str) -> None:
        if self._torch_version is None:
            self._torch_version = version
            self.write_run_json()

    def write_run_json(self) -> None:
        """Write what this launch was asked to do and with which versions."""
        import sys

        from saferun import __version__
        from saferun.report.redaction import redacted_arguments

        config = self._config
        self._run_dir.write_json(
            "run.json",
            {
                "command": redacted_arguments(config.argv),
                "rank_command": redacted_arguments(config.command.argv),
                "cwd": os.getcwd(),
                "run_id": self._run_id,
                "rendezvous_id": config.rendezvous.run_id,
                "nproc_per_node": config.nproc_per_node,
                "settings": {name: setting._asdict() for name, setting in config.settings.items()},
                "versions": {
                    "saferun": __version__,
                    "python": sys.version.split()[0],
                    "torch": self._torch_version,
                },
            },
        )

    def _tell_torch(self, rank: Rank) -> None:
        """Hand a rank's end to torch's event handlers, where the user named one."""
        if self._config.event_log_handler == "null" or self._link is None or rank.end is None:
            return
        end = rank.end
        state = "SUCCEEDED" if end.status.ok else "TERMINATED" if end.stopped_by_us else "FAILED"
        self._link.send(
            {
                "op": "event",
                "handler": self._config.event_log_handler,
                "source": "WORKER",
                "metadata": {
                    "run_id": self._config.rendezvous.run_id,
                    "global_rank": end.rank,
                    "group_rank": 0,
                    "worker_id": str(end.pid),
                    "role": self._config.role,
                    "state": state,
                    "total_run_time": int(end.at - self._started_at),
                    "rdzv_backend": self._config.rendezvous.backend,
                    "raw_error": None,
                    "metadata": "{}",
                    "agent_restarts": self._supervisor.attempt,
                },
            }
        )

    # ----------------------------------------------------------------------------------------------------------------
    # The end

    def _end(self) -> None:
        """Whatever the reason for the end: no process of ours lives on, and the console has everything."""
        now = time.monotonic()
        self._sweep_at = None
        self._end_attempt(now)
        if self._link is not None:
            self._close_link(self._link)
        for pid in descendants_of(os.getpid(), self._not_ours):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if self._listener is not None:
            self._listener.close()
        self._drain_console()
        signal.set_wakeup_fd(-1)
        self._epoll.close()

    def _close_link(self, link: CoordinatorLink) -> None:
        if self._config.event_log_handler == "null":
            os.kill(link.child.pid, signal.SIGKILL)
        else:
            # Events that are on their way are the user's.
            link.send({"op": "goodbye"})
            give_up_at = time.monotonic() + _GOODBYE_S
            while time.monotonic() < give_up_at and os.waitpid(link.child.pid, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        with suppress(ChildProcessError):
            if os.waitpid(link.child.pid, os.WNOHANG) == (0, 0):
                os.kill(link.child.pid, signal.SIGKILL)
                os.waitpid(link.child.pid, 0)
        link.close()

    def _drain_console(self) -> None:
        """Wait for a slow reader: while it reads, and a while longer where files keep everything."""
        patience_s = _DRAIN_S if self._run_dir.path is not None else None
        give_up_at = time.monotonic() + patience_s if patience_s is not None else None
        self._screen.tick(time.monotonic())
        self._handlers.clear()
        poll = select.poll()
        for pane in self._screen.panes:
            poll.register(pane.target.fd, select.POLLOUT)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            if self._screen.flush() and patience_s is not None:
                give_up_at = time.monotonic() + patience_s
            if self._screen.is_empty:
                return
            left_s = None if give_up_at is None else give_up_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            ready = poll.poll(None if left_s is None else left_s * 1000)
            if any(fd == self._wake_read for fd, _ in ready):
                signums = os.read(self._wake_read, 4096)
                if any(signum in self._config.signals for signum in signums):
                    return


def _as_json(value: object) -> Any:  # noqa: ANN401
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


def _shorter(path: str | None) -> str | None:
    """A path relative to the current directory, where that is shorter."""
    if path is None:
        return None
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) else path


def _nothing() -> None:
    """Woken up: the loop looks for itself."""


def _ignore(_signum: int, _frame: object) -> None:
    """The wake-up pipe tells the loop."""
