"""The preflight checks beside the loop: those that the ranks wait for, and those that run beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from saferun.config import LaunchConfig
from saferun.errors import EXIT_USAGE, SaferunError
from saferun.launch.guarded_poller import GuardedPoller
from saferun.linux.process_room import may_be_short_of_processes
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.actions import ProbeHosts
from saferun.supervisor.events import (
    ChecksAsked,
    ChecksOver,
    ChecksPassed,
    ProbesPassed,
    StartFailed,
)
from saferun.supervisor.machine import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.job_values import Assignment
    from saferun.launch.launch_context import LaunchContext
    from saferun.launch.rank import AttemptPlan
    from saferun.preflight.check_process import CheckProcess
    from saferun.preflight.checks.context import CheckContext
    from saferun.preflight.driver import PreflightFailure, PreflightOutcome, PreflightRun
    from saferun.supervisor.events import Event

# Checks that no rank waits for begin with this delay, to leave the processors to the ranks that are being started.
_BESIDE_DELAY_S = 0.1
# How long to wait for the leader's verdict: less than the phase may last, whose end would end the launch.
_VERDICT_S = 50.0
# The leader hears its own go-ahead, which is in the job's log, within this time; PROBING has 60 s in all.
_HEARD_S = 5.0
_GLOO_IFNAME = "GLOO_SOCKET_IFNAME"
# If one of these exists, a retry waits for GPU memory that ranks of the previous attempt have not freed yet.
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")


def ranks_wait(config: LaunchConfig, environ: Mapping[str, str], attempt: int = 0) -> bool:
    """Whether the ranks have to wait for the checks.

    On one host hardly any check can refuse the launch: saferun binds the port, and needs no name resolution. The
    settings and /proc show beforehand whether another one may. So in most launches no rank waits, and the checks run
    beside the ranks.

    Args:
        config: the launch.
        environ: the environment that the ranks inherit.
        attempt: from 0.
    """
    checks = config.checks
    if config.hosts.spans_hosts or checks.preflight == "only" or checks.collective or checks.nics:
        return True
    if checks.health == "full":
        return True  # the checks compute, and would compete with the ranks
    if attempt and any(map(os.path.exists, _GPU_NODES)):
        return True
    names = filter(None, environ.get(_GLOO_IFNAME, "").split(","))
    if any(not os.path.exists(f"/sys/class/net/{name[:64]}") for name in names):
        return True
    return may_be_short_of_processes(config.nproc_per_node)


class _EarlyChecks:
    """Checks that were begun while a retry waits."""

    def __init__(self, attempt: int, environ: Mapping[str, str]) -> None:
        self.attempt = attempt
        self.environ = environ
        self._outcome: PreflightOutcome | None = None
        self._take: Callable[[PreflightOutcome], None] | None = None

    def counts_for(self, attempt: int, environ: Mapping[str, str]) -> bool:
        """Whether these checks need not be repeated. Failed ones are: the fault may have passed during the wait."""
        is_well = self._outcome is None or self._outcome.preflight.verdict in {"ok", "skipped"}
        return is_well and (self.attempt, self.environ) == (attempt, environ)

    def on_checked(self, outcome: PreflightOutcome) -> None:
        """The checks are over."""
        self._outcome = outcome
        if self._take is not None:
            self._take(outcome)

    def take(self, take: Callable[[PreflightOutcome], None]) -> None:
        """Hand over the result, now or when they are over."""
        self._take = take
        if self._outcome is not None:
            take(self._outcome)


class PreflightPart:
    """The checks of a launch. Their modules are imported when they are needed, which most starts do not.

    Args:
        context: the launch.
        process: the check process, where it has been forked already.
    """

    def __init__(self, context: LaunchContext, process: CheckProcess | None) -> None:
        self._context = context
        self._config = context.config
        self._process = process
        self._run: PreflightRun | None = None
        self._plan: AttemptPlan | None = None  # of ranks beside which the checks are to be made
        self._begin_at: float | None = None
        self._environ: Mapping[str, str] | None = None  # of the ranks, as it was checked last
        self._early: _EarlyChecks | None = None
        self._is_imported = False
        self._is_awaited = True  # the ranks wait for the checks
        self._is_probed = False  # the leader has found nothing that keeps the ranks from being started
        self._is_broken = False  # the checks themselves have failed: the launch goes on without them
        self._without: Callable[[], None] | None = None  # what makes it go on
        self._verdict_by: float | None = None  # when the launch goes on without the leader's verdict

    @property
    def is_wanted(self) -> bool:
        """Whether there are to be checks, and this process is the one of its host that makes them."""
        return self._config.checks_here

    def _opened(self) -> PreflightRun:
        if self._run is None:
            from saferun.preflight.driver import PreflightRun

            context = self._context
            self._run = PreflightRun(
                context.config,
                GuardedPoller(context.poller, self._succeeds),
                job=context.job,
                environ=context.environ,
                print_message=context.screen.print_message,
                warn=context.warn,
                process=self._process,
                succeeds=self._succeeds,
                can_replace=context.supervisor.can_replace,
            )
        return self._run

    def _succeeds(self, call: Callable[..., object], *arguments: object) -> bool:
        """Take a step of the checks; returns whether it succeeded. If not, the launch goes on without them."""
        if self._config.checks.preflight == "only":
            call(*arguments)  # nothing runs that could go on
            return True
        if self._is_broken:
            return False
        if self._context.succeeds("check this host", call, *arguments):
            return True
        self._is_broken = True
        without, self._without = self._without, None
        if without is not None:
            without()
        return False

    def _post(self, event: Event) -> None:
        self._without = None
        self._context.post(event)

    # ----------------------------------------------------------------------------------------------------------------
    # Before the ranks

    def check(self, attempt: int, environ: Mapping[str, str]) -> None:
        """Check this host, where the ranks have to wait for that; ChecksPassed, ChecksOver or StartFailed follows.

        Args:
            attempt: from 0.
            environ: the environment of the ranks, but for what differs between them.
        """
        self._without = lambda: self._context.post(ChecksPassed(time.monotonic(), attempt))
        if self._is_broken:
            self._without()
        else:
            self._succeeds(self._check, attempt, environ)

    def _check(self, attempt: int, environ: Mapping[str, str]) -> None:
        self._is_awaited = ranks_wait(self._config, environ, attempt)
        self._environ = environ
        early, self._early = self._early, None
        if not self._is_awaited:
            self._post(ChecksPassed(time.monotonic(), attempt))
            return
        if early is not None and early.counts_for(attempt, environ):
            self._context.post(ChecksAsked(time.monotonic(), attempt))
            early.take(lambda outcome: self._on_checked(attempt, outcome))
            return
        context = _check_context(self._context, environ, attempt)
        self._context.post(ChecksAsked(time.monotonic(), attempt))
        self._opened().check(context, lambda outcome: self._on_checked(attempt, outcome))

    def check_early(self, attempt: int) -> None:
        """Check this host for the next attempt while that waits; ``check`` then uses the result.

        Nothing is done where its ranks would not wait for the checks.
        """
        environ = self._environ
        if self.is_wanted and not self._is_broken and environ is not None:
            self._succeeds(self._check_early, attempt, environ)

    def _check_early(self, attempt: int, environ: Mapping[str, str]) -> None:
        if ranks_wait(self._config, environ, attempt):
            early = _EarlyChecks(attempt, environ)
            self._opened().check(_check_context(self._context, environ, attempt), early.on_checked)
            self._early = early

    def _on_checked(self, attempt: int, outcome: PreflightOutcome) -> None:
        """The checks of this host alone are over. In a job of several hosts the leader decides what follows."""
        now = time.monotonic()
        if self._config.hosts.spans_hosts:
            self._post(ChecksPassed(now, attempt))
            return
        self._context.investigation.log.set_preflight(outcome.preflight, outcome.infos)
        if self._config.checks.preflight == "only":
            self._post(ChecksOver(now, attempt, _show(self._context, outcome)))
            return
        _note_bad_hosts(self._context, attempt, outcome)
        self._opened().print_own()
        if outcome.failure is not None:
            self._start_failed(attempt, outcome.failure)
        else:
            self._post(ChecksPassed(now, attempt))

    def host_info(self) -> tuple[str, str]:
        """What this host sends the others about itself at the rendezvous, and where they can probe it."""
        return (self._run.info, self._run.endpoint) if self._run is not None else ("", "")

    def probe(self, action: ProbeHosts) -> None:
        """Have the hosts probe each other; ProbesPassed, ChecksOver or StartFailed follows."""
        assignment = self._context.current.assignment
        if self._config.checks.preflight != "only" and not self._config.checks.collective:
            self._verdict_by = time.monotonic() + _VERDICT_S
        if self.is_wanted and assignment is not None:
            self._without = lambda: self._go_on_unprobed(action.attempt)
            if self._is_broken:
                self._without()
            else:
                self._succeeds(self._probe, action.attempt, assignment)
        elif self._is_probed:
            self._context.post(ProbesPassed(time.monotonic(), action.attempt))

    def _probe(self, attempt: int, assignment: Assignment) -> None:
        self._opened().probe(assignment, lambda outcome: self._on_probed(attempt, outcome))

    def _go_on_unprobed(self, attempt: int) -> None:
        """The checks of this host are broken: no verdict of a leader is waited for."""
        if self._context.job.leads:
            from saferun.preflight.leader_messages import go_ahead_message

            self._context.job.broadcast_preflight(go_ahead_message(()))  # which this host receives like the others
        elif self._is_probed:
            self._context.post(ProbesPassed(time.monotonic(), attempt))

    def _on_probed(self, attempt: int, outcome: PreflightOutcome) -> None:
        now = time.monotonic()
        if self._context.job.leads:
            self._context.investigation.log.set_preflight(outcome.preflight, outcome.infos)
            _note_bad_hosts(self._context, attempt, outcome)
        _use_nics(self._context, outcome.nics)
        if self._config.checks.preflight == "only":
            self._post(ChecksOver(now, attempt, _show(self._context, outcome)))
        elif outcome.replaced:
            self._post(_hosts_at_fault(now, attempt, outcome))
        elif outcome.failure is not None:
            self._start_failed(attempt, outcome.failure)
        else:
            self._post(ProbesPassed(now, attempt))

    def _start_failed(self, attempt: int, failure: PreflightFailure) -> None:
        error = SaferunError(failure.what, failure.hint, EXIT_USAGE, class_name=failure.class_name)
        self._without = None
        self._context.start_failed(attempt, error)

    def begin_attempt(self, *, probes: bool) -> None:
        """The hosts have met: they have not probed each other since. ``probes``: whether this one will."""
        self._is_probed = False
        if not probes and self._run is not None and self._config.hosts.spans_hosts:
            self._succeeds(self._run.close)  # no other host wants to reach its process, a spare's for instance

    def take_message(self, message: JsonObject) -> None:
        """Take in a message of the leader's about the checks."""
        # It may come before ``probe`` is called, and count if that fails.
        self._is_probed = self._is_probed or bool(message.get("ok"))
        if self.is_wanted and self._succeeds(lambda: self._opened().hear(message)):
            return
        if message.get("ok"):
            self._context.post(ProbesPassed(time.monotonic(), self._context.attempt))

    # ----------------------------------------------------------------------------------------------------------------
    # Beside the ranks

    def imported(self) -> None:
        """The modules of the checks beside the ranks have been imported, so that these can begin."""
        self._is_imported = True

    def begin_beside(self, plan: AttemptPlan) -> None:
        """Check this host beside these ranks, after a moment, if they did not wait for the checks."""
        if self.is_wanted and not self._is_awaited:
            self._plan = plan
            self._begin_at = time.monotonic() + _BESIDE_DELAY_S

    def _check_beside(self, plan: AttemptPlan) -> None:
        context = _check_context(self._context, plan.environs[0], plan.attempt)
        self._opened().check(context, self._on_checked_beside, beside=True)

    def _on_checked_beside(self, outcome: PreflightOutcome) -> None:
        self._context.investigation.log.set_preflight(outcome.preflight, outcome.infos)
        _note_bad_hosts(self._context, self._context.attempt, outcome)
        self._context.investigation.log.write_preflight()
        self._opened().print_own()

    def settle(self) -> None:
        """The launch is over: what has been found so far counts."""
        self._begin_at = None
        if self._run is not None:
            self._run.settle()

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        if self._is_broken:
            return self._verdict_by
        run = self._run.deadline if self._run is not None else None
        begin_at = self._begin_at if self._is_imported else None
        moments = (run, begin_at, self._verdict_by)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._verdict_by is not None and self._verdict_by <= now:
            self._verdict_by = None
            self._do_without_verdict(now)
        self._succeeds(self._tick, now)

    def _do_without_verdict(self, now: float) -> None:
        """Start the ranks, as a launcher without checks would have long ago."""
        context = self._context
        if context.supervisor.state is not State.PROBING:
            return
        if self._is_broken and self._is_probed:
            # The leader does not even hear its own go-ahead: a slow coordinator is no reason to end the job.
            context.post(ProbesPassed(now, context.attempt))
            return
        context.warn(f"preflight checks between the hosts: no verdict within {_VERDICT_S:g} s; the job goes on")
        self._is_broken = self._is_probed = True
        self._go_on_unprobed(context.attempt)
        if context.job.leads:
            self._verdict_by = now + _HEARD_S

    def _tick(self, now: float) -> None:
        if self._is_imported and self._begin_at is not None and self._begin_at <= now:
            self._begin_at = None
            if self._plan is not None:
                self._check_beside(self._plan)
        if self._run is not None:
            self._run.tick(now)

    @property
    def pids(self) -> set[int]:
        """Processes of the checks' own."""
        return self._run.pids if self._run is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was one of the checks' own."""
        return self._run is not None and self._run.on_exit(pid, status)

    def close(self) -> None:
        """End the check process, and what is tried."""
        self._begin_at = None
        if self._run is not None:
            self._run.close()
        elif self._process is not None:
            self._process.discard()


def _check_context(context: LaunchContext, environ: Mapping[str, str], attempt: int) -> CheckContext:
    from saferun.preflight.driver import context_of

    ended = context.ended_attempt
    return context_of(
        context.config,
        environ,
        bound=context.job.bound_ports(),
        attempt=attempt,
        old_pids=[rank.child.pid for rank in ended.ranks] if ended is not None else [],
        is_endpoint_here=context.job.is_endpoint_here,
    )


def _note_bad_hosts(context: LaunchContext, attempt: int, outcome: PreflightOutcome) -> None:
    """Note the hosts that the checks have found bad; what ends a launch is decided elsewhere."""
    if outcome.faults and context.config.checks.preflight != "only":
        from saferun.launch.bad_hosts import note_bad_hosts

        note_bad_hosts(context, outcome.faults, attempt=attempt, found_by="checks")


def _hosts_at_fault(now: float, attempt: int, outcome: PreflightOutcome) -> StartFailed:
    """No rank is started with hosts that spares replace."""
    from saferun.preflight.outcome import reason_of

    failure, first, reason = outcome.failure, outcome.replaced[0], reason_of(outcome)
    what, hint = f"{first.label}: {first.why}", reason.hint if reason is not None else ""
    if failure is not None:
        what, hint = failure.what, failure.hint
    failed = StartFailed(now, attempt, what, hint, EXIT_USAGE if failure is not None else 1)
    class_name = failure.class_name if failure is not None else ""
    return failed._replace(class_name=class_name, faulty=outcome.replaced, may_go_on=failure is None)


def _use_nics(context: LaunchContext, names: Sequence[str]) -> None:
    """Set what makes gloo, NCCL and UCX use these interfaces, for the ranks that are started next."""
    plan = context.current.plan
    if not names or plan is None:
        return
    from saferun.launch.nic_variables import chosen_line
    from saferun.linux.netlink import read_nics
    from saferun.preflight.default_nics import nic_environ

    chosen = nic_environ(names, read_nics(), context.environ)
    for environ in plan.environs:
        environ.update(chosen)
    if context.job.leads:
        context.report(chosen_line(names, chosen, auto=True))


def _show(context: LaunchContext, outcome: PreflightOutcome) -> int:
    """Print all that was found, and return the exit code."""
    from saferun.preflight.findings_text import show

    context.screen.print_output(show(outcome.preflight, outcome.infos, as_json=context.config.checks.as_json))
    return EXIT_USAGE if outcome.failure is not None else 0
