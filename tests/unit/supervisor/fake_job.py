"""Several hosts of one job, each with its supervisor, and the log between them. No process, no clock, no network."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from saferun.model import ExitStatus, Placement, RankAssignment
from saferun.supervisor.actions import (
    Action,
    AwaitCause,
    BroadcastAbort,
    BroadcastCause,
    BroadcastDecision,
    CaptureEvidence,
    Diagnose,
    Finish,
    JoinHosts,
    NotifyDone,
    ProbeHosts,
    RunChecks,
    SignalRanks,
    StartRanks,
    SweepOrphans,
)
from saferun.supervisor.ending import Regroup
from saferun.supervisor.events import (
    CauseShown,
    ChecksPassed,
    DeadlineExpired,
    Diagnosed,
    Event,
    EvidenceCaptured,
    HangSuspected,
    HostsDone,
    HostsJoined,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    JobDecided,
    JobLost,
    LaunchRequested,
    OrphansGone,
    ProbesPassed,
    RankExited,
    RanksStarted,
    SignalReceived,
    SpareLost,
    StartFailed,
)
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, FailureFacts, HangPolicy, JobPolicy
from saferun.supervisor.policy.faulty_hosts import FaultyHost
from tests.unit.supervisor.fake_world import DIAGNOSIS, FAILED, HANG, KILLED, OK

LIMITS = Limits()


class Host:
    """One host: its supervisor, and what has been asked of it."""

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        policy = JobPolicy(
            spans_hosts=True,
            outlives_leader=job.elastic,
            awaits_replacement_host=job.elastic,
            others_s=100.0,
            least_hosts=job.least,
            moves_leader=job.moves,
        )
        self.supervisor = Supervisor(
            AttemptPolicy(job.max_restarts, 1, by_progress=job.by_progress, wait=lambda _: 1.0),
            LIMITS,
            job.hang_policy,
            policy,
        )
        self.inbox: deque[Event] = deque()
        self.alive: set[int] = set()
        self.captured = False
        self.interrupted = False
        self.finish: Finish | None = None
        self.actions: list[Action] = []
        self.arrived: JoinHosts | None = None
        self.is_dead = False  # power off
        self.is_silent = False  # other hosts do not answer, as far as it was reported
        self.handed_in = False
        self.probed = -1  # the attempt
        self.waits_for_pieces: Diagnose | None = None
        self.deliver(LaunchRequested(job.now, 0))

    @property
    def state(self) -> State:
        return self.supervisor.state

    @property
    def runs(self) -> bool:
        return not self.is_dead and self.finish is None

    def deliver(self, event: Event) -> None:
        actions = self.supervisor.handle(event)
        if isinstance(event, HostsUnreachable | HostsReachable):
            self.is_silent = isinstance(event, HostsUnreachable)
        is_limited = self.is_silent or self.supervisor._launch.attempt.stopping.obey_at is not None
        without = {State.NEW, State.RUNNING, State.DONE} | (set() if is_limited else {State.WAITING})
        assert (self.supervisor.deadline is None) == (self.state in without), self.state
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:  # noqa: C901, PLR0915 - one flat table of the actions
        self.actions.append(action)
        job, now, attempt = self.job, self.job.now, self.supervisor.attempt
        match action:
            case RunChecks():
                self.inbox.append(ChecksPassed(now, attempt))
            case JoinHosts():
                self.captured = False
                self.handed_in = False
                self.arrived = action
                job.meet()
            case ProbeHosts():
                self.probed = attempt
                job.probe()
            case StartRanks():
                self.alive = {0, 1}
                self.inbox.append(RanksStarted(now, attempt, (1, 2)))
            case CaptureEvidence():
                self.captured = True
                self.inbox.append(EvidenceCaptured(now, attempt, suspects=action.local_ranks[: self.number % 2]))
            case AwaitCause():
                self.inbox.append(CauseShown(now, attempt))
            case SignalRanks():
                has_failed = not isinstance(self.supervisor._launch.attempt.ending, Regroup)
                needs_evidence = has_failed and not self.interrupted and not job.interrupted
                assert self.captured or not needs_evidence, "a signal before evidence"
                # One that has ended, and whose end has not been told yet, is signalled in vain.
                for rank in self.alive.intersection(action.local_ranks):
                    self.alive.discard(rank)
                    self.inbox.append(RankExited(now, attempt, rank, ExitStatus(None, action.signum)))
            case SweepOrphans():
                assert not self.alive
                self.inbox.append(OrphansGone(now, attempt, ()))
            case Diagnose():
                if action.alone:
                    self.inbox.append(Diagnosed(now, attempt, DIAGNOSIS))
                elif self is job.leader:
                    self.waits_for_pieces = action
                    job.collect()
                else:
                    self.handed_in = True
                    self.inbox.append(Diagnosed(now, attempt, DIAGNOSIS))
                    job.collect()
            case BroadcastAbort():
                # What fails first on an odd host is a victim.
                is_victim = action.reason == "failure" and self.number % 2
                job.trouble(action.attempt, "victim" if is_victim else action.reason, self, action.signum)
            case BroadcastCause():
                assert job.troubles[action.attempt] == "victim"
                for other in job.others(self):
                    other.inbox.append(CauseShown(now, attempt))
            case NotifyDone():
                job.done(self, attempt)
            case BroadcastDecision():
                assert self is job.leader
                job.decided(action, self)
            case Finish():
                self.finish = action
                # Others notice that a host is gone, and the store of a leader ends with it.
                is_done = self.number in job.done_hosts and self not in job.met[:1]
                is_expected = self in job.met and job.number not in job.decisions and not is_done
                if action.reraise is not None or is_expected:
                    job.vanished(self)
                job.meet()

    def exit(self, status: ExitStatus) -> None:
        if self.alive and self.runs and self.state in {State.RUNNING, State.CAPTURING, State.STARTING}:
            self.alive.discard(rank := min(self.alive))
            self.deliver(RankExited(self.job.now, self.supervisor.attempt, rank, status))

    def signal(self, signum: int) -> None:
        if self.runs:
            self.interrupted = True  # the ranks work, as far as anybody knows
            self.job.interrupted = self.job.interrupted or self.interrupted
            self.deliver(SignalReceived(self.job.now, self.supervisor.attempt, signum))

    def take(self) -> None:
        """The oldest thing that has come in."""
        if self.inbox and self.runs:
            self.deliver(self.inbox.popleft()._replace(at=self.job.now))

    def expire(self) -> None:
        """Time passes, on this host, to the deadline of its phase."""
        if self.runs and self.supervisor.deadline is not None:
            self.job.now = max(self.job.now, self.supervisor.deadline)
            self.deliver(DeadlineExpired(self.job.now, self.supervisor.attempt))


class Job:
    """The hosts and what is between them.

    Args:
        hosts: how many there are.
        max_restarts: of the policy.
        least: with how many the job goes on.
        bad_checks: attempts before which the host that leads finds something amiss.
        spares: how many of the hosts wait to take the place of one.
        moves: whether of the leader, too.
        hang_policy: what is done about hangs.
        handler: whether one of torch's handlers has the hosts meet, though their number is fixed.
        by_progress: whether restarts are limited by that.
    """

    def __init__(
        self,
        hosts: int,
        max_restarts: int = 0,
        least: int | None = None,
        hang_policy: HangPolicy | None = None,
        bad_checks: Container[int] = (),
        spares: int = 0,
        moves: bool = False,
        handler: bool = False,
        by_progress: bool = False,
    ) -> None:
        self.now = 100.0
        self.max_restarts, self.by_progress = max_restarts, by_progress
        self.spares, self.moves = spares, moves
        self.least = least if least is not None else hosts - spares
        self.elastic = handler or (not spares and self.least != hosts)
        self.order: list[Host] = []  # with spares: those that train, then the spares
        self.left_out: set[int] = set()
        self.faulty: dict[int, str] = {}  # hosts that are themselves at fault, and why
        self.is_link = False  # whether that may pass
        self.unfit: dict[int, str] = {}  # hosts of which the checks before the ranks find that, and why
        self.hang_policy = hang_policy
        self.bad_checks = bad_checks
        self.passing = False  # whether what they find may go away
        self.interrupted = False
        self.met: list[Host] = []  # who form the job now
        self.number = -1
        self.troubles: dict[int, str] = {}
        self.done_hosts: set[int] = set()
        self.decisions: set[int] = set()  # attempts whose leader has decided
        self.hosts: list[Host] = []
        for number in range(hosts):
            self.hosts.append(Host(self, number))

    @property
    def leader(self) -> Host:
        return self.met[0]

    def meet(self) -> None:
        """All who are to come have come: they learn their places."""
        if self.spares:
            self._meet_with_spares()
            return
        wanted = [host for host in self.hosts if host.runs]
        if len(self.hosts) < self.least or any(host.arrived is None for host in wanted) or len(wanted) < self.least:
            return
        self.met = wanted
        self.number = max(host.arrived.attempt for host in wanted if host.arrived)
        restarts = max(host.arrived.restarts for host in wanted if host.arrived)
        self.done_hosts = set()
        for i, host in enumerate(wanted):
            assignments = tuple(RankAssignment(rank, 2 * i + rank, 2 * i + rank) for rank in range(2))
            placement = Placement(i, len(wanted), 2 * len(wanted), 2 * len(wanted), assignments, "a", 1, "job")
            placement = placement._replace(restarts=restarts)
            expected = host.arrived.attempt if host.arrived else 0
            may_leave = len(wanted) > self.least
            joined = HostsJoined(self.now, expected, placement, self.number, i == 0, may_leave, probes=True)
            host.arrived = None
            host.waits_for_pieces = None
            host.inbox.append(joined)

    def _meet_with_spares(self) -> None:
        here = [host for host in self.hosts if host.runs and host.number not in self.left_out]
        if len(self.hosts) < self.least + self.spares or any(host.arrived is None for host in here):
            return
        leader = (self.order or self.hosts)[0]
        for host in [host for host in here if host.arrived is not None and host.arrived.left_out >= 0]:
            number = host.arrived.left_out if host.arrived is not None else -1
            if host is leader or number == 0:
                self.left_out.add(self.order[number].number)
        here = [host for host in here if host.number not in self.left_out]
        order = self.order or list(self.hosts)
        spares = [host for host in order[self.least :] if host in here]
        training = [host if host in here else spares.pop(0) if spares else None for host in order[: self.least]]
        if None in training or (leader not in here and not self.moves):
            return
        self.order = self.met = [host for host in training if host is not None] + spares
        self.number = max(host.arrived.attempt for host in self.met if host.arrived)
        restarts = max(host.arrived.restarts for host in self.met if host.arrived)
        self.done_hosts = {host.number for host in spares}
        names = tuple(f"node{host.number}" for host in spares)
        for i, host in enumerate(self.met):
            is_spare = i >= self.least
            first = 2 * i
            assignments = (
                () if is_spare else tuple(RankAssignment(rank, first + rank, first + rank) for rank in range(2))
            )
            placement = Placement(i, self.least, 2 * self.least, 2 * self.least, assignments, "a", 1, "job")
            placement = placement._replace(restarts=restarts, host=f"node{host.number}")
            expected = host.arrived.attempt if host.arrived else 0
            joined = HostsJoined(self.now, expected, placement, self.number, i == 0, spares=names)
            host.inbox.append(joined._replace(probes=bool(self.unfit)))
            host.arrived = host.waits_for_pieces = None

    def is_spare(self, host: Host) -> bool:
        """Whether a host has no ranks now."""
        return host in self.order[self.least :]

    def facts(self) -> FailureFacts | None:
        """What the leader knows of hosts that are at fault."""
        training = self.order[: self.least]
        found = [
            FaultyHost(i, f"node{host.number}", self.faulty[host.number], may_pass=self.is_link, is_lost=host.is_dead)
            for i, host in enumerate(training)
            if host.number in self.faulty
        ]
        return FailureFacts("unknown", is_start_over=True, faulty=tuple(found)) if self.spares else None

    def probe(self) -> None:
        """The leader has heard what all hosts found, and all hear what it makes of that."""
        training = [host for host in self.met if not self.is_spare(host)]
        if not self.leader.runs or any(host.probed != self.number for host in training if host.runs):
            return
        unfit = [
            FaultyHost(i, f"node{host.number}", self.unfit[host.number])
            for i, host in enumerate(training)
            if host.number in self.unfit
        ]
        if self.leader.supervisor.can_replace(unfit):
            what = f"{unfit[0].label}: {unfit[0].why}"
            failed = StartFailed(self.now, self.number, what, "", 1, faulty=tuple(unfit), may_go_on=True)
            self.leader.inbox.append(failed)
            return
        if self.number in self.bad_checks:
            class_name = "network_cut" if self.passing else ""
            failed = StartFailed(self.now, self.number, "node2: eth1 does not answer", "look", 2, class_name=class_name)
            self.leader.inbox.append(failed)
            return
        for host in self.met:
            if host.runs:
                host.inbox.append(ProbesPassed(self.now, self.number))

    def others(self, host: Host) -> list[Host]:
        return [other for other in self.met if other is not host and other.runs]

    def trouble(self, attempt: int, reason: str, host: Host, signum: int = 0) -> None:
        """The first that is told counts."""
        if attempt != self.number or attempt in self.troubles or not self.leader.runs:
            return
        self.troubles[attempt] = reason
        for other in self.met:
            if other.runs:
                event = JobAborted(self.now, attempt, reason, "words", "node", ours=other is host, signum=signum)
                other.inbox.append(event)

    def done(self, host: Host, attempt: int) -> None:
        if attempt == self.number:
            self.done_hosts.add(host.number)
            if all(other.number in self.done_hosts for other in self.met) and self.leader.runs:
                self.leader.inbox.append(HostsDone(self.now, attempt))

    def collect(self) -> None:
        """The leader has all pieces that can come."""
        leader = self.leader
        others = [other for other in self.others(leader) if not self.is_spare(other)]
        if leader.waits_for_pieces is not None and all(other.handed_in for other in others):
            leader.waits_for_pieces = None
            leader.inbox.append(Diagnosed(self.now, leader.supervisor.attempt, DIAGNOSIS, facts=self.facts()))

    def decided(self, action: BroadcastDecision, leader: Host) -> None:
        self.decisions.add(action.attempt)
        for other in self.others(leader):
            event = JobDecided(
                self.now, action.attempt, action.next_step, action.exit_code, action.wait_s, action.restarts, ("why",)
            )._replace(excluded=action.excluded, replaced=action.replaced)
            other.inbox.append(event)

    def hang(self) -> None:
        """The leader has seen that nothing moves on any host."""
        if self.number not in self.troubles and self.leader.runs:
            for host in self.met:
                if host.runs:
                    host.inbox.append(HangSuspected(self.now, self.number, HANG))

    def power_off(self, host: Host) -> None:
        """It is gone from one moment to the next; the others notice."""
        if host.is_dead or host.finish is not None:
            return
        host.is_dead = True
        self.vanished(host)
        self.meet()

    def vanished(self, host: Host) -> None:
        """A host says nothing any more."""
        if host not in self.met:
            return
        if self.is_spare(host):
            leader, name = self.leader, f"node{host.number}"
            leader.inbox.append(SpareLost(self.now, leader.supervisor.attempt, name, "it does not answer"))
            return
        if host.is_dead:
            self.faulty[host.number] = "it does not answer"
        if host is self.leader:
            for other in self.others(host):
                other.inbox.append(JobLost(self.now, other.supervisor.attempt, "gone", "look"))
        else:
            self.trouble(self.number, "lost", self.leader)
            self.collect()

    def settle(self) -> None:
        """Let everything happen that follows by itself; where nothing does, time passes."""
        for _ in range(2000):
            busy = [host for host in self.hosts if host.inbox and host.runs]
            if busy:
                for host in busy:
                    host.take()
                continue
            waiting = [host for host in self.hosts if host.runs and host.supervisor.deadline is not None]
            if not waiting:
                return
            min(waiting, key=lambda host: host.supervisor.deadline or 0.0).expire()
        raise AssertionError("it goes on forever: " + ", ".join(host.state.value for host in self.hosts))

    def run(self) -> None:
        """All hosts that are there meet and start their ranks."""
        for _ in range(1000):
            at_rest = {host: State.WAITING if self.is_spare(host) else State.RUNNING for host in self.hosts}
            if all(host.state is at_rest[host] for host in self.hosts if host.runs):
                return
            for host in self.hosts:
                host.take()
        raise AssertionError("they do not start")

    def next_attempt(self) -> None:
        """What is under way goes on until the hosts have met again."""
        before = self.number
        for _ in range(1000):
            if self.number != before:
                self.run()
                return
            for host in self.hosts:
                host.take()
                if host.state is State.BACKOFF:
                    host.expire()
        raise AssertionError("they do not meet again")


__all__ = ["FAILED", "HANG", "KILLED", "OK", "Host", "Job"]
