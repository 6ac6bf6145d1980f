"""What comes before the ranks of an attempt: checks, the meeting of the hosts, environment, log files.

The environment of a rank, in this order, of which the last one wins: what saferun itself has, what torchrun adds (RANK,
MASTER_ADDR: ``supervisor/topology``), saferun's own variables, the --logs-specs plugin, env profiles with --env and
--unset (``env/apply``), and the start-up hook (``rank_hook``).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence

from saferun.env.apply import apply, without_logs
from saferun.env.profiles import Resolution
from saferun.env.profiles.profile_text import launch_lines
from saferun.errors import SaferunError
from saferun.files.log_files import LogDirectory
from saferun.launch.idle_imports import BEFORE_SEVERAL_HOSTS
from saferun.launch.launch_context import HostAttempt, LaunchContext
from saferun.launch.rank import AttemptPlan
from saferun.model import JsonObject, LogDestinations, Placement, RankAssignment
from saferun.supervisor.actions import JoinHosts, RunChecks
from saferun.supervisor.events import ChecksPassed, DeadlineExpired, HostsJoined
from saferun.supervisor.machine import State
from saferun.supervisor.topology import apply_changes, plugin_environs, rank_environs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.job_values import Assignment
    from saferun.launch.wrapping import Wrapper


class AttemptSetup:
    """Prepares the attempts of a launch on this host, one after the other.

    Each step leads to the next: ``check`` (names, ports, this host), ``join`` (the other hosts), what only torch can
    answer, the environment and the files of the ranks. The last posts HostsJoined; any may post StartFailed.

    Args:
        context: the launch.
        resolution: what env profiles, --env and --unset come to.
    """

    def __init__(self, context: LaunchContext, resolution: Resolution) -> None:
        self._context = context
        self._config = context.config
        self._resolution = resolution
        self._log_files = LogDirectory(self._config.logs, context.run_dir)
        self._is_bound = False

    # ----------------------------------------------------------------------------------------------------------------
    # Checks

    def check(self, action: RunChecks) -> None:
        """Bind every port and check this host; ChecksPassed, ChecksOver or StartFailed follows."""
        self._context.guarded("begin a new record of the ranks", self._context.investigation.attempt_begins)
        if self._is_bound:
            self._check_host(action.attempt)
        else:
            # The endpoint's name may have to be resolved by a name server.
            self._context.job.find_endpoint(lambda: self._check_host(action.attempt))

    def _check_host(self, attempt: int) -> None:
        if not self._context.is_in(State.CHECKING, attempt):
            return  # the launch has been ended meanwhile
        if not self._is_bound:
            try:
                self._context.job.bind()
            except SaferunError as error:
                self._context.start_failed(attempt, error)
                return
            self._is_bound = True
        if not self._context.checks.is_wanted:
            self._context.post(ChecksPassed(time.monotonic(), attempt))
            return
        # As the ranks will have it, but for what differs between them.
        environ = dict(self._context.environ)
        first = RankAssignment(0, 0, 0)
        apply(self._resolution, environ, first, host=self._context.host, world_size=1, run_dir=None, rank_dir=None)
        self._context.checks.check(attempt, environ)

    def release_port(self) -> None:
        """The next attempt is to have another port."""
        self._context.job.release()
        self._is_bound = False

    # ----------------------------------------------------------------------------------------------------------------
    # The meeting

    def join(self, action: JoinHosts) -> None:
        """Meet the other hosts; HostsJoined or StartFailed follows."""
        context = self._context
        context.ranks.forget()
        context.current = HostAttempt(action.attempt)
        context.job.join(action, *context.checks.host_info())
        if self._config.hosts.spans_hosts:
            context.imports.import_now(BEFORE_SEVERAL_HOSTS)  # the other hosts take longer
            # Now, because what holds up a hung job may hold up who reads its interfaces, too.
            context.bridges = context.guarded("read the interfaces", _read_bridges) or ()

    def on_assigned(self, assignment: Assignment) -> None:
        """The hosts have met: this process knows its ranks."""
        context, placement, task = self._context, assignment.placement, self._config.hosts.task
        context.current = HostAttempt(assignment.number, assignment)
        context.host = placement.host or context.host
        context.checks.begin_attempt(probes=assignment.checked and bool(placement.ranks))
        local_rank, tasks = (task.local_rank, task.local_world_size) if task is not None else (0, 1)
        context.run_dir.join(
            assignment.files,
            host=context.host,
            is_part=not assignment.leads,
            task=local_rank,
            tasks=tasks,
            hosts=(*(peer.label for peer in context.job.peers.values()), *assignment.spares),
            is_late=assignment.has_begun,
        )
        context.investigation.log.host = context.host
        if assignment.replacements:
            context.guarded("report which spares have a place", _note_replacements, context, assignment)
        if not placement.ranks:
            self._wait_as_spare(assignment)
            return
        try:
            preparation = self._preparation(placement)
        except SaferunError as error:
            self._post_failed(assignment, error)
            return
        context.job.prepare(preparation)

    def _wait_as_spare(self, assignment: Assignment) -> None:
        """Start no ranks in this attempt, but answer saferunctl."""
        context = self._context

        def describe() -> None:
            context.log.plan_description()
            context.log.describe()

        context.run_dir.open(lambda: context.guarded("write run.json", describe))
        context.guarded("begin the examiner", context.examiner.begin_at, time.monotonic())
        context.post(self._joined(assignment))
        self._post_held()

    def _preparation(self, placement: Placement) -> JsonObject:
        """What only torch can answer about an attempt.

        Raises:
            UsageError: the environment and the options contradict each other.
        """
        logs = self._config.logs
        local_ranks = [rank_assignment.local_rank for rank_assignment in placement.ranks]
        preparation: JsonObject = {
            "numa": self._config.numa_binding,
            "local_ranks": local_ranks,
            "run_id": self._config.rendezvous.run_id,
            "environs": [],
            "logs": None,
        }
        if logs.logs_specs is not None:
            preparation["environs"] = plugin_environs(self._config, placement, self._context.environ)
            preparation["logs"] = {
                "name": logs.logs_specs,
                "log_dir": logs.log_dir,
                # A plugin counts the ranks of this process from 0, whichever of the host's they are.
                "redirects": [logs.redirects[local_rank] for local_rank in local_ranks],
                "tee": [logs.tee[local_rank] for local_rank in local_ranks],
                "local_ranks_filter": sorted(local_rank - local_ranks[0] for local_rank in logs.local_ranks_filter),
            }
        return preparation

    # ----------------------------------------------------------------------------------------------------------------
    # Environment and files

    def on_prepare_failed(self, error: SaferunError) -> None:
        """What only torch could answer is not to be had."""
        assignment = self._context.current.assignment
        if assignment is not None:
            self._post_failed(assignment, error)

    def on_prepared(self, answer: JsonObject) -> None:
        """Everything is known for the start of the ranks. ``answer``: what only torch could answer."""
        current = self._context.current
        assignment = current.assignment
        if assignment is None or current.has_joined:
            return  # the answer has come too late
        placement = assignment.placement
        try:
            environs = rank_environs(self._config, placement, self._context.environ)
        except SaferunError as error:
            self._post_failed(assignment, error)
            return
        if "logs" in answer:
            found, changed = _destinations_from(answer)
            self._prepare_for_cores()
            self._context.run_dir.open(lambda: self._finish_plan(current, assignment, environs, found, answer, changed))
            return

        def on_ready(found: LogDestinations | OSError) -> None:
            if self._context.current is not current or self._context.supervisor.state is not State.JOINING:
                return  # the launch has been ended meanwhile
            if isinstance(found, OSError):
                what = f"log files cannot be made: {found.filename or ''}: {found.strerror}"
                hint = "pass a --log-dir that can be written"
                if found.errno in {errno.ENOSPC, errno.EDQUOT}:
                    hint = "pass another --log-dir, or make room there"
                self._post_failed(assignment, SaferunError(what, hint))
            else:
                self._finish_plan(current, assignment, environs, found, answer, ())

        self._log_files.destinations(placement, current.number, on_ready)
        # While the directories are made:
        self._prepare_for_cores()
        self._context.guarded("write run.json", self._context.log.plan_description)

    def _prepare_for_cores(self) -> None:
        self._context.guarded("prepare for cores", self._context.cores.prepare)

    def _finish_plan(
        self,
        current: HostAttempt,
        assignment: Assignment,
        environs: tuple[dict[str, str], ...],
        destinations: LogDestinations,
        answer: JsonObject,
        changed: Sequence[Mapping[str, str | None]],
    ) -> None:
        """Complete the ranks' environments, keep the plan, and post HostsJoined or StartFailed.

        The directories of the attempt have been made by then, as far as that was possible.
        """
        run_dir, placement = self._context.run_dir, assignment.placement
        if run_dir.refusal is not None:
            self._post_failed(assignment, run_dir.refusal)
            return
        # Everything that the user asked for is possible: from here on the launch leaves files.
        self._context.guarded("write run.json", self._context.log.plan_description)
        own = self._own_environ()
        for environ, error_file in zip(environs, destinations.error_files, strict=True):
            environ.update(own, TORCHELASTIC_ERROR_FILE=error_file)
        for environ, more in zip(environs, changed, strict=False):
            apply_changes(environ, more, self._context.environ)
        self._apply_profiles(current.number, placement, environs)
        hook, guarded = self._context.investigation.hook, self._context.guarded
        for rank_assignment, environ in zip(placement.ranks, environs, strict=True):
            environ.update(
                guarded("prepare the start-up hook", hook.environ, current.number, rank_assignment.rank, environ) or {}
            )
            if answer.get("timer_file"):
                environ["TORCHELASTIC_TIMER_FILE"] = answer["timer_file"]
        if current.number == 0:
            guarded("see whether options name ranks", self._warn_of_missing_ranks, placement)
            if cost := guarded("report the cost of the start-up hook", lambda: hook.cost):
                self._context.report(cost)
        numactl = answer.get("numactl")
        prefixes = tuple(map(tuple, numactl)) if numactl else ((),) * len(placement.ranks)
        wrappers: tuple[tuple[Wrapper, ...], ...] = ()
        if self._config.wraps:
            try:
                wrappers = self._wrappers(current.number, assignment, environs)
            except SaferunError as error:
                self._post_failed(assignment, error)
                return
        current.plan = AttemptPlan(current.number, placement, destinations, environs, prefixes, wrappers)
        self._post_joined(assignment)

    def _warn_of_missing_ranks(self, placement: Placement) -> None:
        """Say once in a job that an option names a rank that the job does not have."""
        if not any(rank_assignment.rank == 0 for rank_assignment in placement.ranks):
            return
        named = {"--attach": self._config.output.attach, "--trace-lines": self._config.watch.trace_lines}
        for option, rank in named.items():
            if isinstance(rank, int) and rank >= placement.world_size:
                self._context.warn(f"{option} {rank}: there is no such rank; the world size is {placement.world_size}")

    def _wrappers(
        self, attempt: int, assignment: Assignment, environs: Sequence[Mapping[str, str]]
    ) -> tuple[tuple[Wrapper, ...], ...]:
        """The tools that ranks run under.

        Raises:
            UsageError: they cannot.
        """
        from saferun.launch.wrapped_hosts import missing_host_lines, with_own_name
        from saferun.launch.wrapping import cost_lines, usable_wrappers, with_own_tools, wrappers_of

        context, run_dir, placement = self._context, self._context.run_dir, assignment.placement
        has_files = run_dir.path is not None
        rank_dirs = [
            run_dir.rank_path(attempt, rank_assignment.rank) if has_files else None
            for rank_assignment in placement.ranks
        ]
        wraps = with_own_name(self._config.wraps, self._config.hosts, context.host, os.uname().nodename)
        command = self._config.command
        if attempt > 0:
            # Elastic jobs may have fewer ranks now; what was right at first is no mistake.
            found = [wrap._replace(ranks=wrap.ranks._replace(may_miss=True)) for wrap in wraps]
            return with_own_tools(wrappers_of(found, placement, context.host, rank_dirs, command), environs)
        wrappers = usable_wrappers(wraps, placement, context.host, rank_dirs, command, environs)
        for line in cost_lines(wraps, placement, context.host):
            context.report(line)
        if context.job.leads:
            met = {context.host, *(peer.label for peer in context.job.peers.values())}
            for line in missing_host_lines(wraps, {*met, *assignment.spares, *self._config.hosts.names}):
                context.warn(line)
        return wrappers

    def _apply_profiles(self, attempt: int, placement: Placement, environs: Sequence[dict[str, str]]) -> None:
        """Apply env profiles and --env, which override the rest of a rank's environment."""
        run_dir = self._context.run_dir
        resolution = without_logs(self._resolution) if run_dir.is_silent else self._resolution
        for rank_assignment, environ in zip(placement.ranks, environs, strict=True):
            apply(
                resolution,
                environ,
                rank_assignment,
                host=self._context.host,
                world_size=placement.world_size,
                run_dir=run_dir.path,
                rank_dir=run_dir.rank_path(attempt, rank_assignment.rank) if run_dir.path is not None else None,
            )
        if attempt == 0:
            for line in launch_lines(self._resolution, has_run_dir=run_dir.path is not None):
                self._context.report(line)

    def _own_environ(self) -> dict[str, str]:
        """Saferun's own variables of the ranks. Runs within runs remember all that are around them."""
        environ = self._context.environ
        own = {"SAFERUN_RUN_ID": self._context.run_id}
        outer = [environ.get("SAFERUN_OUTER_RUNS"), environ.get("SAFERUN_RUN_ID")]
        if any(outer):
            own["SAFERUN_OUTER_RUNS"] = ":".join(filter(None, outer))
        if self._context.run_dir.path is not None:
            own["SAFERUN_RUN_DIR"] = self._context.run_dir.path
        return own

    def _post_joined(self, assignment: Assignment) -> None:
        attempt, placement = self._context.attempt, assignment.placement
        self._context.torchrun_events.hosts_joined(
            placement if self._context.ended_attempt is not None else None, attempt
        )
        self._context.post(self._joined(assignment))
        self._post_held()

    def _post_failed(self, assignment: Assignment, error: SaferunError) -> None:
        """This host cannot start its ranks, for which the others wait."""
        self._context.start_failed(self._context.attempt, error, joined=self._joined(assignment))
        self._post_held()

    def post_expired(self, now: float) -> None:
        """Post that the supervisor's phase has lasted as long as it may. Hosts that have met count on the ranks."""
        current, attempt = self._context.current, self._context.attempt
        is_preparing = self._context.supervisor.state is State.JOINING and not current.has_joined
        if is_preparing and current.assignment is not None:
            self._context.post(DeadlineExpired(now, attempt, self._joined(current.assignment)))
            self._post_held()
        else:
            self._context.post(DeadlineExpired(now, attempt))

    def _joined(self, assignment: Assignment) -> HostsJoined:
        return HostsJoined(
            time.monotonic(),
            self._context.attempt,
            assignment.placement,
            number=assignment.number,
            leads=assignment.leads,
            may_leave=assignment.may_leave,
            probes=assignment.checked,
            spares=assignment.spares,
            needed=assignment.needed,
        )

    def _post_held(self) -> None:
        current = self._context.current
        current.has_joined = True
        held, current.held = current.held, []
        for event in held:
            self._context.attempt_end.post_from_job(event)


def _read_bridges() -> tuple[str, ...]:
    from saferun.linux.netlink import bridge_addresses

    return tuple(bridge_addresses())


def _note_replacements(context: LaunchContext, assignment: Assignment) -> None:
    """Hosts have lost their places to spares without a decision: a line for each, and a row of the report."""
    from saferun.supervisor.policy.decision_row import DecisionRow

    for one in assignment.replacements:
        message = f"{one.host} is left out ({one.why}); {one.by}, a spare, takes its place"
        context.report(message)
        row = DecisionRow(max(assignment.number - 1, 0), time.time(), "replace", message, host=one.host, spare=one.by)
        context.investigation.log.add_decision(row)


def _destinations_from(message: JsonObject) -> tuple[LogDestinations, list[dict[str, str | None]]]:
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
    return destinations, message["changes"]
