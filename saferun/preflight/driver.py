"""The preflight checks of a launch, as its loop drives them: this host's own, the probes between hosts, trials.

The checks themselves are in ``preflight/checks/``, one file each, and in its tuple of all. What they find ends a
launch only where ``outcome`` says so; what breaks in here is reported in one line, and the launch goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from saferun.config import LaunchConfig
from saferun.errors import printable
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from saferun.preflight.check_process import CheckProcess, HostChecks
from saferun.preflight.checks.context import CheckContext, context_of
from saferun.preflight.host_probing import HostProbing, LeaderProbing, unguarded
from saferun.preflight.outcome import (
    PreflightFailure,
    PreflightOutcome,
    bad_hosts,
    message_lines,
    outcome_of,
    problems,
    reason_of,
    unusable_hosts,
)
from saferun.preflight.results import SEVERITY, CheckResult, HostInfo, Pairs, Preflight

if TYPE_CHECKING:
    from saferun.cluster.job_interface import JobPort
    from saferun.cluster.job_values import Assignment
    from saferun.preflight.bisect.trial_driver import TrialShare
    from saferun.preflight.bisect.trial_process import TrialPlace
    from saferun.preflight.leader_messages import GoAhead
    from saferun.supervisor.policy.faulty_hosts import FaultyHost

__all__ = ["PreflightFailure", "PreflightOutcome", "PreflightRun", "context_of"]


class _Attempt:
    """One attempt's checks, and how far they have come."""

    def __init__(self, own: HostChecks, *, beside: bool) -> None:
        self.own = own
        self.beside = beside
        self.parts: list[HostChecks | TrialShare] = [own]
        self.assignment: Assignment | None = None
        self.probing: HostProbing | None = None
        self.trials: TrialShare | None = None
        self.judged: Preflight | None = None
        self.infos: Mapping[int, HostInfo] = {}
        self.go_ahead: GoAhead | None = None
        self.on_over: Callable[[PreflightOutcome], None] | None = None


class PreflightRun:
    """The checks of a launch, attempt by attempt. A Part of the loop.

    Args:
        config: the launch.
        poller: the loop's.
        job: the hosts of the job.
        print_message: takes whole lines for the user.
        environ: the environment that the ranks inherit.
        warn: takes one line about something that could not be done.
        process: a check process that has been forked already.
        succeeds: calls what may fail, and says whether it did not.
        can_replace: whether spares can take the places of these hosts.
    """

    def __init__(
        self,
        config: LaunchConfig,
        poller: Poller,
        *,
        job: JobPort,
        environ: Mapping[str, str],
        print_message: Callable[[str], None],
        warn: Callable[[str], None],
        process: CheckProcess | None = None,
        succeeds: Callable[..., bool] = unguarded,
        can_replace: Callable[[Sequence[FaultyHost]], bool] = lambda _: False,
    ) -> None:
        self._succeeds = succeeds
        self._can_replace = can_replace
        self._config = config
        self._environ = environ
        self._poller = poller
        self._job = job
        self._print_message = print_message
        self._warn = warn
        self._forked = process
        self._counted: tuple[Pairs, float] = ((), 0.0)  # what interfaces had counted before, and when that was
        self._ended: list[CheckProcess | HostChecks | TrialShare] = []  # whose processes have not been reaped yet
        self._hosts: frozenset[str] = frozenset()
        self._last_hosts: frozenset[str] = frozenset()  # of the previous attempt
        self._had_go_ahead = False  # the ranks of an attempt have been started, as far as the checks were concerned
        self._attempt = _Attempt(HostChecks(poller, on_done=lambda: None, warn=warn), beside=False)

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = (part.deadline for part in self._attempt.parts)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for part in tuple(self._attempt.parts):
            part.tick(now)

    @property
    def pids(self) -> set[int]:
        """Processes of the checks, which are no orphans of the ranks."""
        return set[int]().union(*(part.pids for part in self._with_processes()))

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was one of the checks' own."""
        return any(part.on_exit(pid, status) for part in self._with_processes())

    def close(self) -> None:
        """End the check process and the trials."""
        if self._forked is not None:
            self._forked.kill()
            self._ended.append(self._forked)
            self._forked = None
        for part in self._attempt.parts:
            part.close()

    def _with_processes(self) -> list[CheckProcess | HostChecks | TrialShare]:
        forked = [self._forked] if self._forked is not None else []
        return [*forked, *self._attempt.parts, *self._ended]

    # ----------------------------------------------------------------------------------------------------------------
    # This host

    def check(
        self, context: CheckContext, on_checked: Callable[[PreflightOutcome], None], *, beside: bool = False
    ) -> None:
        """Check this host, in a new attempt; ``on_checked`` follows, with what was found here.

        Args:
            context: the launch.
            on_checked: takes the outcome.
            beside: whether the ranks have been started: whatever is found is a warning then.
        """
        forked, self._forked = self._forked, None
        self.close()
        earlier, since = self._counted
        context = context._replace(earlier=earlier, since=since, beside=beside)
        self._ended = [part for part in (*self._ended, *self._attempt.parts) if part.pids]
        own = HostChecks(self._poller, on_done=lambda: self._checked(attempt, on_checked), warn=self._warn)
        self._attempt = attempt = _Attempt(own, beside=beside)
        own.start(context, forked, is_probed=self._config.hosts.spans_hosts, beside=beside)

    def _checked(self, attempt: _Attempt, on_checked: Callable[[PreflightOutcome], None]) -> None:
        own = attempt.own
        counted = next((result.facts for result in own.results if result.name == "nic_errors"), ())
        self._counted = (counted or self._counted[0], time.time())
        own.results.sort(key=lambda result: (-SEVERITY[result.verdict], result.name))

        def on_over(found: Sequence[CheckResult]) -> None:
            own.results[:0] = found
            on_checked(self._outcome(Preflight(tuple(own.results), duration_s=own.duration_s)))

        if self._config.hosts.spans_hosts:
            on_over(())
        elif self._config.checks.collective:
            self._search({0: range(self._config.nproc_per_node)}, {0: ""}, on_over)
        else:
            own.close()
            on_over(())

    def settle(self) -> None:
        """The launch is over: what has been found so far counts, where that is not known yet."""
        if self._attempt.beside:
            self._attempt.own.settle()

    def print_own(self) -> None:
        """Print what is wrong with this host."""
        self._print(self._attempt.own.results)

    @property
    def info(self) -> str:
        """What other hosts learn of this one, encoded; empty: nothing."""
        return self._attempt.own.info

    @property
    def endpoint(self) -> str:
        """Where other hosts can probe this one, encoded; empty: nowhere."""
        return self._attempt.own.endpoint

    # ----------------------------------------------------------------------------------------------------------------
    # Between hosts

    def probe(self, assignment: Assignment, on_over: Callable[[PreflightOutcome], None]) -> None:
        """Probe the other hosts, hand in what was found, and wait for the verdict; ``on_over`` follows.

        Its outcome has everything on the leader; on the others it only says whether to go on, and of a failure they
        learn in another way.
        """
        attempt, job = self._attempt, self._job
        attempt.assignment, attempt.on_over = assignment, on_over
        self._last_hosts = self._hosts
        self._hosts = frozenset(peer.label for peer in job.peers.values())
        if attempt.go_ahead is not None:
            self._end(attempt)
        elif job.is_head:
            attempt.probing = probing = self._probing(attempt, assignment, job)
            probing.begin()

    def _probing(self, attempt: _Attempt, assignment: Assignment, job: JobPort) -> HostProbing:
        if not assignment.leads:
            return HostProbing(assignment, attempt.own, job)
        nics = self._config.checks.nics
        probing = LeaderProbing(
            assignment,
            attempt.own,
            job,
            nics=nics,
            on_judged=lambda found: self._judged(attempt, found),
            succeeds=self._succeeds,
        )
        attempt.infos = probing.infos
        return probing

    def _judged(self, attempt: _Attempt, preflight: Preflight) -> None:
        """The leader knows all that will be known."""
        if not self._config.checks.collective:
            self._conclude(attempt, preflight)
            return

        def on_over(found: Sequence[CheckResult]) -> None:
            self._conclude(attempt, preflight._replace(results=(*found, *preflight.results)))

        peers = self._job.peers.values()
        self._search(
            {peer.host: range(peer.ranks) for peer in peers}, {peer.host: peer.label for peer in peers}, on_over
        )

    def _conclude(self, attempt: _Attempt, preflight: Preflight) -> None:
        """Let all hosts know what follows."""
        attempt.judged = preflight
        outcome = self._outcome(preflight)
        is_all = self._config.checks.preflight == "only"
        if not is_all:
            outcome = outcome._replace(replaced=self._replaced(outcome))
            reason = reason_of(outcome)  # which is printed as such
            self._print([result for result in preflight.results if result is not reason])
        if outcome.replaced:
            self._over(attempt, outcome)
            return
        if outcome.failure is None and not is_all:
            from saferun.preflight.leader_messages import go_ahead_message

            self._job.broadcast_preflight(go_ahead_message(outcome.nics))
            return  # which this host hears like the others
        self._over(attempt, outcome)

    def _replaced(self, outcome: PreflightOutcome) -> tuple[FaultyHost, ...]:
        """The hosts whose places spares take before any rank is started."""
        if not (outcome.faults and self._config.hosts.spares) or self._config.checks.preflight == "warn":
            return ()
        found = unusable_hosts(outcome)
        return found if self._can_replace(found) else ()

    def hear(self, message: JsonObject) -> None:
        """The leader has said something to all hosts."""
        attempt = self._attempt
        if "again" in message:
            if attempt.probing is not None:
                from saferun.preflight.leader_messages import pairs_from

                attempt.probing.probe_again(pairs_from(message))
        elif "trial" in message:
            if attempt.assignment is not None and not attempt.assignment.leads:
                self._share_trials(attempt).hear(message["trial"])
        else:
            from saferun.preflight.leader_messages import go_ahead_from

            attempt.go_ahead = go_ahead_from(message)
            self._had_go_ahead = True
            self._end(attempt)

    def _end(self, attempt: _Attempt) -> None:
        """The verdict is there; the other hosts are no longer needed."""
        nics = attempt.go_ahead.nic if attempt.go_ahead is not None else ()
        own = Preflight(tuple(attempt.own.results), duration_s=attempt.own.duration_s)
        found = attempt.judged or own
        self._over(attempt, PreflightOutcome(None, found, attempt.infos, nics, bad_hosts(found, attempt.infos)))

    def _over(self, attempt: _Attempt, outcome: PreflightOutcome) -> None:
        on_over, attempt.on_over = attempt.on_over, None
        if on_over is not None:
            self.close()
            on_over(outcome)

    # ----------------------------------------------------------------------------------------------------------------
    # Real collectives, for ``saferunctl doctor --collective``

    def _search(
        self,
        hosts: Mapping[int, Sequence[int]],
        labels: Mapping[int, str],
        on_over: Callable[[Sequence[CheckResult]], None],
    ) -> None:
        """Search for the hosts and GPUs that make a collective fail."""
        from saferun.preflight.bisect.trial_driver import TrialSearch

        self.close()
        checks = self._config.checks
        search = TrialSearch(
            self._trial_place(),
            self._environ,
            self._poller,
            hosts=hosts,
            labels=labels,
            interfaces=() if checks.nics == ("auto",) else checks.nics,
            timeout_s=checks.trial_timeout_s,
            job=self._job,
            print_message=self._print_message,
            on_over=on_over,
        )
        self._attempt.parts.append(search)
        search.begin(set(hosts))

    def _share_trials(self, attempt: _Attempt) -> TrialShare:
        if attempt.trials is None:
            from saferun.preflight.bisect.trial_driver import TrialShare

            self.close()
            attempt.trials = TrialShare(
                self._trial_place(), self._environ, self._poller, job=self._job, print_message=self._print_message
            )
            attempt.parts.append(attempt.trials)
        return attempt.trials

    def _trial_place(self) -> TrialPlace:
        from saferun.preflight.bisect.trial_process import TrialPlace

        backend = self._config.checks.backend
        if backend == "auto":
            backend = "gloo" if _vendor(self._config.environ.vendor) == "none" else "nccl"
        place = TrialPlace(self._job.host, backend)
        if self._attempt.assignment is None:
            return place
        placement = self._attempt.assignment.placement
        return place._replace(store_address=placement.master_addr, store_port=placement.master_port)

    # ----------------------------------------------------------------------------------------------------------------
    # The outcome

    @property
    def _only_warns(self) -> bool:
        return self._attempt.beside or self._config.checks.preflight == "warn" or self._is_under_way

    @property
    def _is_under_way(self) -> bool:
        """Whether ranks have run already in a job whose hosts come and go, which is not to end for a check then."""
        assignment, hosts = self._attempt.assignment, self._config.hosts
        if assignment is None or assignment.number == 0 or self._config.rendezvous.backend == "static":
            return False
        has_newcomers = not self._hosts <= self._last_hosts
        has_run = self._had_go_ahead or assignment.placement.restarts > 0
        return has_run or has_newcomers if hosts.least != hosts.most else has_run and has_newcomers

    def _outcome(self, preflight: Preflight) -> PreflightOutcome:
        nics = self._config.checks.nics
        return outcome_of(preflight, self._attempt.infos, nics=nics, only_warn=self._only_warns)

    def _print(self, results: Sequence[CheckResult]) -> None:
        for line in message_lines(problems(results, only_warn=self._only_warns)):
            self._print_message(printable(line))


def _vendor(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    from saferun.linux.gpus import gpu_vendor

    return gpu_vendor() or "none"
