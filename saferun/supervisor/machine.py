"""The state machine of one host's share of a launch. Pure: events in, actions out; it does nothing itself.

ARCHITECTURE.md draws the machine; the arrows stand here as comments where they are taken.
"""

from __future__ import annotations

import signal
from enum import Enum

from saferun.model import Value, signal_name
from saferun.supervisor.events import (
    Action,
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
    HangSuspected,
    HostsDone,
    HostsJoined,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    JobDecided,
    JobLost,
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
    StoreUnavailable,
    SweepOrphans,
)
from saferun.supervisor.policy import AttemptPolicy, FailureFacts, HangPolicy, JobPolicy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from saferun.evidence import Diagnosis, HangVerdict
    from saferun.model import Placement


class State(Enum):
    """Where the launch stands."""

    NEW = "new"
    CHECKING = "checking"
    JOINING = "joining"
    PROBING = "probing"  # the hosts look at each other
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"  # this host's ranks are done, others' are not
    CAPTURING = "capturing"
    STOPPING = "stopping"
    DIAGNOSING = "diagnosing"
    BACKOFF = "backoff"
    DONE = "done"


class Stage(Enum):
    """How far STOPPING has come."""

    ASKED = "asked"  # the ranks have been told to stop and have their grace
    KILLED = "killed"  # they have been sent SIGKILL
    SWEEPING = "sweeping"  # they are gone; what they left behind is being ended


_UNKNOWN = FailureFacts("unknown")
# A job in which nothing has moved for so long hangs, as far as a signal from outside is concerned: its stacks are what
# the user will ask for, and nothing is lost by taking them first, if that does not take long.
_HUNG_S = 10.0
_FIRST_LOOK_S = 2.0
# Ranks that were working are told to stop at once, and looked at if they are still there after this part of their
# grace. What is seen must be there before they are killed.
_LATE_LOOK = 0.5
_LATE_LOOK_SHARE = 0.8
# Troubles that this host tells of without having acted: what it has heard of others.
_HEARD = frozenset({"membership", "lost", "task_lost"})
# Where the other hosts know of this attempt, and it is not on its way out yet.
_TOGETHER = frozenset({State.PROBING, State.STARTING, State.RUNNING, State.CAPTURING, State.WAITING})
# Where somebody's answer is waited for. The ranks' grace and the wait before a restart go by the clock alone.
_LASTS_ANEW = frozenset(
    {State.CHECKING, State.JOINING, State.PROBING, State.STARTING, State.CAPTURING, State.DIAGNOSING}
)
# How soon a rank that is being dumped is looked at again.
_LOOK_AGAIN_S = 0.2


class Limits(Value):
    """How long each phase may last, in seconds. RUNNING lasts as long as its ranks, WAITING as other hosts' do."""

    checks_s: float = 60.0
    join_s: float = 600.0
    probe_s: float = 60.0
    start_s: float = 120.0
    capture_s: float = 20.0
    grace_s: float = 30.0
    kill_s: float = 10.0
    sweep_term_s: float = 2.0
    sweep_s: float = 10.0
    leftovers_s: float = 600.0  # what works on after ranks that ended well
    dump_s: float = 60.0  # by how much a core dump in progress may put SIGKILL off
    diagnose_s: float = 30.0
    unheard_s: float = 300.0  # for how long a host whose ranks ended well waits for hosts of which nothing is heard


class Supervisor:
    """One host's share of a launch.

    ``handle`` takes an event and returns the actions to be carried out, in order. ``deadline`` is the moment
    (monotonic seconds) at which a DeadlineExpired is due, or None.
    """

    def __init__(
        self,
        policy: AttemptPolicy,
        limits: Limits,
        hang_policy: HangPolicy | None = None,
        job: JobPolicy | None = None,
        *,
        leftovers: Literal["wait", "end", "leave"] = "wait",
    ) -> None:
        self.state = State.NEW
        self.attempt = 0
        self.deadline: float | None = None
        self._policy = policy
        self._hang_policy = hang_policy or HangPolicy()
        self._job = job or JobPolicy()
        self._limits = limits
        self._leftovers = leftovers
        self._restarts = 0  # failures that the job has got over; retries of a start are not among them
        self._leads = True
        self._stop_signum: int | None = None  # the user's or scheduler's, once there was one
        self._cause_signum: int | None = None  # the same, where it came before any failure
        self._is_final = False  # there is to be no other attempt
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._placement: Placement | None = None
        self._running: set[int] = set()
        self._stage = Stage.ASKED
        self._failed = False
        self._verdict: HangVerdict | None = None  # of the hang that is being captured
        self._moved = False  # the job came to life during that
        self._has_looked = False  # at the ranks of this attempt
        self._hung = False  # the ranks are ended because they hang
        self._dumped_by = 0.0
        self._killed_by: float | None = None  # when the ranks must be gone, where there is somebody who would do it
        self._kill_at = 0.0
        self._look_at: float | None = None  # when ranks that were told to stop, and are still there, are looked at
        self._abandoned: tuple[int, ...] = ()
        self._awaits_leftovers = False  # all ranks ended well, and something of theirs works on
        self._trouble = ""
        self._trouble_hint = ""
        self._trouble_exit_code = 1
        self._trouble_class = ""
        self._missed_store = False
        self._is_checked = False  # the trouble is what the checks of all hosts found
        self._lost_store = False  # the store of the host that leads was lost, and it may serve another
        # What follows is about jobs of several hosts.
        self._may_leave = False
        self._told = False  # all hosts know that the attempt is to end
        self._told_signum = 0  # because of a signal to one of them
        self._regroup_words = ""
        self._regroups = False  # it ends because other hosts form the job from now on
        self._leaves = False  # this one is not among them
        self._job_stopped = False  # somebody stopped the job on another host
        self._alone = False  # the others cannot be reached
        self._unheard = ""  # hosts that are not heard of while the job goes on
        self._decision: JobDecided | None = None
        self._own_diagnosis: Diagnosis | None = None

    # ----------------------------------------------------------------------------------------------------------------

    def take_waits(self, waits_s: Sequence[float]) -> None:
        """The waits before retries, as they have been drawn up beside the launch."""
        self._policy.take_waits(waits_s)

    def handle(self, event: Event) -> list[Action]:  # noqa: C901 - one flat table of the machine's inputs
        """React to an event. Events of an attempt that is over are dropped here, and only here."""
        if event.attempt != self.attempt or self.state is State.DONE:
            return []
        match event:
            case SignalReceived():
                return self._on_signal(event)
            case RankExited():
                return self._on_rank_exited(event)
            case DeadlineExpired():
                return self._on_deadline(event)
            case LoopStalled():
                return self._on_stall(event)
            case StartFailed():
                return self._on_start_failed(event)
            case LaunchRequested() if self.state is State.NEW:
                # NEW -> CHECKING
                self._enter(State.CHECKING, event.at + self._limits.checks_s)
                return [RunChecks(self.attempt)]
            case ChecksAsked() if self.state is State.CHECKING:
                # What came before, names that had to be looked up for one, is no part of the checks' time.
                self._enter(State.CHECKING, event.at + self._limits.checks_s)
                return []
            case ChecksPassed() if self.state is State.CHECKING:
                # CHECKING -> JOINING
                self._enter(State.JOINING, event.at + self._limits.join_s)
                return [JoinHosts(self.attempt, self._restarts)]
            case HostsJoined() if self.state is State.JOINING:
                return self._on_joined(event)
            case ProbesPassed() if self.state is State.PROBING:
                return self._start(event.at)
            case ChecksOver() if self.state in {State.CHECKING, State.PROBING}:
                # CHECKING | PROBING -> DONE: nothing else was wanted.
                tells = self.state is State.PROBING and self._leads
                told: list[Action] = [BroadcastDecision(self.attempt, "finish", event.exit_code)] if tells else []
                return [*told, *self._finish(event.exit_code)]
            case RanksStarted() if self.state is State.STARTING:
                # STARTING -> RUNNING
                self._enter(State.RUNNING, None)
                return []
            case StoreUnavailable() if self.state is State.RUNNING or self._verdict is not None:
                self._trouble, self._trouble_hint = event.what, event.hint
                self._failed = self._missed_store = True
                return self._fail(event.at) if self.state is State.RUNNING else []
            case JobAborted():
                return self._on_trouble(event)
            case JobDecided() if not self._leads:
                return self._on_decided(event)
            case JobLost():
                return self._on_job_lost(event)
            case HostsDone() if self.state is State.WAITING and self._leads:
                # WAITING -> DONE: every rank of the job ended with exit code 0.
                return [BroadcastDecision(self.attempt, "finish", 0), *self._finish(0)]
            case HostsUnreachable() | HostsReachable():
                self._unheard = event.message if isinstance(event, HostsUnreachable) else ""
                return self._wait_for_others(event.at) if self.state is State.WAITING else []
            case HangSuspected() if self.state is State.RUNNING:
                return self._capture(event.at, event.verdict)
            case EvidenceCaptured() if self.state is State.CAPTURING:
                self._moved = self._moved or event.moved
                return self._after_capture(event.at, event.culprits)
            case CoreDumpSeen() if self.state is State.STOPPING and self._stage is not Stage.SWEEPING:
                return self._on_core_dump(event.at)
            case OrphansGone() if self.state is State.STOPPING:
                return self._after_sweep(event.at)
            case Diagnosed() if self.state is State.DIAGNOSING:
                return self._on_diagnosed(event)
        return []

    def _enter(self, state: State, deadline: float | None) -> None:
        self.state = state
        self.deadline = deadline

    # ----------------------------------------------------------------------------------------------------------------

    def _on_joined(self, event: HostsJoined) -> list[Action]:
        if event.number >= 0:
            self.attempt, self._restarts = event.number, event.placement.restarts
        self._leads, self._may_leave = event.leads, event.may_leave
        self._placement = event.placement
        if not event.probes:
            return self._start(event.at)
        # JOINING -> PROBING
        self._enter(State.PROBING, event.at + self._limits.probe_s)
        return [ProbeHosts(self.attempt)]

    def _start(self, at: float) -> list[Action]:
        # JOINING | PROBING -> STARTING. The ranks first: they import torch while the coordinator does.
        assert self._placement is not None  # noqa: S101 - the hosts have met
        self._enter(State.STARTING, at + self._limits.start_s)
        self._running = {place.local_rank for place in self._placement.ranks}
        return [StartRanks(self.attempt, self._placement), ServeStore(self.attempt)]

    def _on_rank_exited(self, event: RankExited) -> list[Action]:
        self._running.discard(event.local_rank)
        if self.state is State.STARTING:
            # Ranks that end before the last one runs: judged in RUNNING's terms, which begin with the first rank.
            self.state, self.deadline = State.RUNNING, None
        if self.state is State.RUNNING:
            if not event.status.ok:
                return self._fail(event.at)
            if not self._running:
                # RUNNING -> STOPPING: every rank is done; only what they left behind is to be ended.
                return self._sweep(event.at)
        elif self.state is State.CAPTURING:
            # A rank may also fail while the others are looked at because they hang.
            told: list[Action] = []
            if self._verdict is not None:
                self._moved = True
                self._failed = self._failed or not event.status.ok
                told = self._tell("failure") if self._failed else []
            if not self._running:
                # CAPTURING -> STOPPING: nobody is left to be looked at.
                return [*told, *self._sweep(event.at)]
            return told
        elif self.state is State.STOPPING and self._stage is not Stage.SWEEPING and not self._running:
            return self._sweep(event.at)
        return []

    def _fail(self, at: float) -> list[Action]:
        """A rank failed, or the ranks cannot go on. Evidence comes before signals."""
        self._failed = True
        told = self._tell("failure")
        if not self._running:
            return [*told, *self._sweep(at)]
        return [*told, *self._capture(at)]

    def _tell(self, reason: str, words: str = "", signum: int = 0) -> list[Action]:
        """All hosts are to know that this attempt ends."""
        if not self._job.together or self._told or self._alone:
            return []
        self._told = True
        return [BroadcastAbort(self.attempt, reason, words, signum)]

    def _capture(self, at: float, verdict: HangVerdict | None = None, at_most_s: float = float("inf")) -> list[Action]:
        # RUNNING -> CAPTURING
        self._verdict = verdict
        self._moved = False
        budget_s = min(self._limits.capture_s, at_most_s)
        self._enter(State.CAPTURING, at + budget_s)
        return [CaptureEvidence(self.attempt, tuple(sorted(self._running)), budget_s, verdict)]

    def _after_capture(self, at: float, culprits: tuple[int, ...]) -> list[Action]:
        verdict, self._verdict = self._verdict, None
        self._has_looked = True
        if verdict is None or self._failed or self._regroups or self._stop_signum is not None:
            return self._stop(at, self._stop_signum or signal.SIGTERM)
        next_step = self._hang_policy.next_step(certain=verdict.certain and not self._moved and self._leads)
        if next_step == "restart" and not self._policy.may_restart(self._restarts):
            next_step = "stop"
        report = ReportHang(self.attempt, next_step)
        if next_step == "report":
            # CAPTURING -> RUNNING: the job goes on, and may well come to life again.
            self._enter(State.RUNNING, None)
            return [report]
        self._is_final = self._is_final or next_step == "stop"
        self._failed = self._hung = True
        aborted = tuple(rank for rank in culprits if rank in self._running) if self._hang_policy.abort_culprits else ()
        return [report, *self._tell("hang"), *self._stop(at, signal.SIGTERM, aborted)]

    def _stop(self, at: float, signum: int, aborted: tuple[int, ...] = ()) -> list[Action]:
        # RUNNING | CAPTURING -> STOPPING
        if not self._running:
            return self._sweep(at)
        kill_at = at + self._limits.grace_s
        if self._killed_by is not None:
            kill_at = max(min(kill_at, self._killed_by), at)
        self._kill_at = kill_at
        self._enter(State.STOPPING, kill_at if self._look_at is None else min(self._look_at, kill_at))
        self._stage = Stage.ASKED
        self._dumped_by = at + self._limits.grace_s + self._limits.dump_s
        asked = tuple(sorted(self._running.difference(aborted)))
        return [
            *([SignalRanks(self.attempt, aborted, signal.SIGABRT)] if aborted else []),
            *([SignalRanks(self.attempt, asked, signum)] if asked else []),
        ]

    def _stop_for(self, at: float, signum: int, quiet_s: float) -> list[Action]:
        """Somebody outside wants the ranks to end; they get ``signum``.

        Ranks that work need their grace, for a checkpoint say, and get the signal at once. Where nothing has moved for
        long, a job that hangs is being cancelled.
        """
        if quiet_s >= _HUNG_S:
            return self._capture(at, at_most_s=_FIRST_LOOK_S)
        if self._limits.grace_s > 0:
            self._look_at = at + self._limits.grace_s * _LATE_LOOK
        return self._stop(at, signum)

    def _late_look(self, at: float) -> list[Action]:
        """Ranks that were told to stop are still there after half of their grace: what do they do?"""
        self._look_at = None
        self._has_looked = True
        budget_s = min(self._limits.capture_s, (self._kill_at - at) * _LATE_LOOK_SHARE)
        self._enter(State.STOPPING, self._kill_at)
        return [CaptureEvidence(self.attempt, tuple(sorted(self._running)), budget_s)]

    def _on_core_dump(self, at: float) -> list[Action]:
        """SIGKILL would end the dump: the phase goes on for as long as the kernel writes, within bounds."""
        if self.deadline is None or at < self.deadline or at >= self._dumped_by:
            return self._on_deadline(DeadlineExpired(at, self.attempt))
        self._enter(State.STOPPING, min(at + _LOOK_AGAIN_S, self._dumped_by))
        return []

    def _kill(self, at: float) -> list[Action]:
        self._enter(State.STOPPING, at + self._limits.kill_s)
        self._stage = Stage.KILLED
        return [SignalRanks(self.attempt, tuple(sorted(self._running)), signal.SIGKILL)]

    def _sweep(self, at: float) -> list[Action]:
        limits = self._limits
        self._stage = Stage.SWEEPING
        if not (self._failed or self._regroups or self._alone or self._stop_signum is not None):
            return self._sweep_well(at)
        self._awaits_leftovers = False
        self._enter(State.STOPPING, at + limits.sweep_s)
        return [SweepOrphans(self.attempt, limits.sweep_term_s)]

    def _sweep_well(self, at: float) -> list[Action]:
        """All ranks ended well: what they have left to work on is the user's."""
        limits = self._limits
        wait_s = limits.leftovers_s if self._leftovers == "wait" else 0.0
        self._awaits_leftovers = self._leftovers != "leave"
        self._enter(State.STOPPING, at + wait_s + limits.grace_s + limits.sweep_s)
        if self._leftovers == "leave":
            return [SweepOrphans(self.attempt, 0.0, leave=True)]
        return [SweepOrphans(self.attempt, limits.grace_s, wait_s, limits.grace_s)]

    def _hurry_leftovers(self, at: float) -> list[Action]:
        """They are not waited for any longer."""
        if not self._awaits_leftovers:
            return []
        self._awaits_leftovers = False
        self._enter(State.STOPPING, at + self._limits.sweep_s)
        return [SweepOrphans(self.attempt, self._limits.sweep_term_s)]

    def _after_sweep(self, at: float) -> list[Action]:
        if self._stage is not Stage.SWEEPING:
            return []
        self._awaits_leftovers = False
        if self._regroups and self._stop_signum is None:
            # STOPPING -> BACKOFF: no failure, and none of the restarts is used up.
            self._enter(State.BACKOFF, at)
            return [PrintLine(f"{self._regroup_words}: starting all ranks again with the hosts that are there")]
        if not self._failed and self._stop_signum is None:
            if not self._job.together:
                # STOPPING -> DONE: every rank ended with exit code 0.
                return self._finish(0)
            if self._alone:
                return self._end_unheard(self._trouble)
            # STOPPING -> WAITING: and others' have not yet.
            waits = self._wait_for_others(at)
            if self._decision is not None:
                return self._follow(self._decision, at)
            return [NotifyDone(self.attempt), *waits]
        return self._diagnose(at)

    def _wait_for_others(self, at: float) -> list[Action]:
        """Without end, unless they cannot be heard."""
        self._enter(State.WAITING, at + self._limits.unheard_s if self._unheard else None)
        if not self._unheard:
            return []
        limit_s = self._limits.unheard_s
        return [
            PrintLine(f"{self._unheard}; all ranks that are known of ended well; waiting for {limit_s:g} s at most")
        ]

    def _diagnose(self, at: float) -> list[Action]:
        # STOPPING | WAITING -> DIAGNOSING
        others_s = 0.0
        if self._job.together and not self._alone and not self._leaves:
            # The one that decides waits for the others, and they for it.
            others_s = self._job.peers_s * (1 if self._leads else 2)
        self._enter(State.DIAGNOSING, at + self._limits.diagnose_s + others_s)
        return [
            Diagnose(
                self.attempt,
                self._cause_signum,
                self._abandoned,
                self._trouble,
                self._trouble_hint,
                self._hung,
                alone=self._alone or self._leaves,
                trouble_class=self._trouble_class or ("store_lost" if self._missed_store else ""),
                is_checked=self._is_checked,
            )
        ]

    def _on_diagnosed(self, event: Diagnosed) -> list[Action]:
        if self._unheard and not self._leads and self._decision is None:
            # No decision can come.
            self._alone = self._is_final = True
        if self._job.together and not self._leads and not self._alone and not self._leaves:
            self._own_diagnosis = event.diagnosis
            return self._follow(self._decision, event.at) if self._decision is not None else []
        self._job_stopped = self._job_stopped or event.stopped
        return self._decide(event.at, event.diagnosis, event.facts)

    def _decide(self, at: float, diagnosis: Diagnosis, facts: FailureFacts | None) -> list[Action]:
        hosts = self._placement.group_world_size if self._placement is not None else 1
        decision = self._policy.decide(
            self._completed(facts), restarts=self._restarts, hosts=hosts, least_hosts=self._job.least_hosts
        )
        finishes = decision.next_step == "finish"
        actions: list[Action] = [ReportFailure(self.attempt, diagnosis, not finishes, decision)]
        tells = self._job.together and self._leads and not self._alone and not self._leaves
        if finishes:
            # DIAGNOSING -> DONE
            if tells:
                code = self._trouble_exit_code
                actions.append(
                    BroadcastDecision(self.attempt, "finish", code, 0.0, self._restarts, diagnosis, decision)
                )
            return [*actions, *self._finish(self._trouble_exit_code)]
        # DIAGNOSING -> BACKOFF
        self._restarts += decision.next_step == "restart"
        if tells:
            excluded = -1 if decision.exclude is None else decision.exclude
            told = BroadcastDecision(
                self.attempt, "restart", 1, decision.wait_s, self._restarts, diagnosis, decision, excluded
            )
            actions.append(told)
        self._enter(State.BACKOFF, at + decision.wait_s)
        return actions

    def _completed(self, facts: FailureFacts | None) -> FailureFacts:
        """What is known of a failure, and what only this machine knows of it."""
        facts = facts or _UNKNOWN
        if self._trouble_class:
            facts = facts._replace(class_name=self._trouble_class, started=False, transient=True, message=self._trouble)
        if self._lost_store:
            # Each host decides for itself, and all the same: the one that leads can serve another store.
            facts = facts._replace(class_name="store_lost", transient=True, message=self._trouble, host=None)
        why = ""
        if self._stop_signum is not None or self._job_stopped:
            why = f"stopped by {signal_name(self._stop_signum)}" if self._stop_signum is not None else "stopped"
        elif self._leaves:
            why = "this host leaves the job"
        elif self._alone and not (self._job.outlives_leader or self._trouble_class or self._lost_store):
            why = "the other hosts cannot be reached"
        elif self._is_final:
            why = facts.message or "it is not worth another attempt"
        return facts._replace(restarting_allowed=False, stop_reason=why) if why else facts

    def _follow(self, decision: JobDecided, at: float) -> list[Action]:
        """Do what the host that decides has decided."""
        restarting = decision.next_step == "restart" and self._stop_signum is None
        actions: list[Action] = []
        # Where nothing but checks was wanted, the host that leads shows what they found.
        if (decision.exit_code != 0 or decision.messages) and self.state is not State.PROBING:
            actions.append(ReportDecision(self.attempt, decision.messages, restarting))
        if restarting and self._placement is not None and decision.excluded == self._placement.group_rank:
            # DIAGNOSING -> DONE: the others go on without this host.
            self._leaves = True
            return [*actions, *self._finish(1)]
        if restarting:
            # DIAGNOSING | WAITING -> BACKOFF
            self._restarts = decision.restarts
            self._enter(State.BACKOFF, at + decision.wait_s)
            return actions
        # DIAGNOSING | WAITING -> DONE
        return [*actions, *self._finish(decision.exit_code)]

    def _finish(self, exit_code: int, reraise: int | None = None) -> list[Action]:
        self._enter(State.DONE, None)
        return [Finish(exit_code, reraise, leaves=self._leaves)]

    # ----------------------------------------------------------------------------------------------------------------
    # Other hosts

    def _hurry(self, at: float) -> None:
        """A signal was sent that SIGKILL will follow."""
        if self._job.hurries and self._killed_by is None:
            self._killed_by = at + self._limits.grace_s

    def _on_trouble(self, event: JobAborted) -> list[Action]:
        """All hosts end this attempt, for the same reason: the first that any of them told."""
        self._told = True
        if event.signum:
            self._told_signum = event.signum
            self._hurry(event.at)
        if event.reason in {"membership", "leave"}:
            # What this host saw of it are ranks that others have left.
            self._regroups = not self._leaves
            self._regroup_words = f"{event.host} leaves the job" if event.reason == "leave" else event.message
            self._failed = self._failed and self._leaves
        elif event.reason in {"signal", "parent"}:
            self._job_stopped = True
        if event.ours and event.reason not in _HEARD:
            return []  # this host acts already
        if self.state in {State.STARTING, State.RUNNING}:
            self._failed = not self._regroups
            return self._end_running(event)
        if self.state in {State.WAITING, State.PROBING}:
            if self._regroups:
                # WAITING | PROBING -> BACKOFF
                self._enter(State.BACKOFF, event.at)
                return []
            self._failed = True
            return self._diagnose(event.at)
        if self.state in {State.CAPTURING, State.STOPPING}:
            self._failed = self._failed or not self._regroups
        return self._hurry_leftovers(event.at)

    def _end_running(self, event: JobAborted) -> list[Action]:
        if event.reason == "hang":
            self._hung = True
            if not self._has_looked:
                return self._capture(event.at)
            # RUNNING -> STOPPING: it has just been captured on all hosts.
            aborted = tuple(rank for rank in event.culprits if rank in self._running)
            return self._stop(event.at, signal.SIGTERM, aborted if self._hang_policy.abort_culprits else ())
        if event.signum == signal.SIGINT:
            return self._stop(event.at, event.signum)
        if event.signum:
            return self._stop_for(event.at, signal.SIGTERM, event.quiet_s)
        return self._capture(event.at)

    def _on_decided(self, event: JobDecided) -> list[Action]:
        if event.next_step == "finish" and event.exit_code == 0 and (self._running or self._failed):
            # Nobody else can say that all went well here.
            event = event._replace(exit_code=1)
        self._decision = event
        waits = self.state in {State.WAITING, State.PROBING}
        if waits or (self.state is State.DIAGNOSING and self._own_diagnosis is not None):
            return self._follow(event, event.at)
        if self.state is State.RUNNING:
            # It was decided without this host, which had not been heard of for long.
            self._failed = True
            return self._capture(event.at)
        return self._hurry_leftovers(event.at)

    def _on_job_lost(self, event: JobLost) -> list[Action]:
        """What nobody else can tell this host any more it decides for itself."""
        if self._alone or self._decision is not None or self.state is State.CHECKING:
            return []
        self._alone = True
        self._lost_store = event.class_name == "store_lost"
        self._trouble = self._trouble or event.what
        self._trouble_hint = self._trouble_hint or event.hint
        match self.state:
            case State.STARTING | State.RUNNING:
                return self._fail(event.at)
            case State.WAITING if self._may_end_unheard(event):
                return self._end_unheard(event.what)
            case State.WAITING | State.PROBING:
                self._failed = True
                return self._diagnose(event.at)
            case State.CAPTURING:
                self._failed = self._failed or not self._regroups
            case State.STOPPING if self._stage is Stage.SWEEPING and not self._failed:
                # As in WAITING, where it would be next.
                self._failed = not self._regroups and not self._may_end_unheard(event)
                return self._hurry_leftovers(event.at)
            case State.DIAGNOSING if self._own_diagnosis is not None:
                # DIAGNOSING -> DIAGNOSING: its ranks may have failed only because that host was gone.
                self._own_diagnosis = None
                return self._diagnose(event.at)
        return []

    def _may_end_unheard(self, event: JobLost) -> bool:
        """Whether ranks that ended well are the end of it here, though it was not heard what the leader decided."""
        others_suffice = self._job.outlives_leader and self._may_leave  # they form the job anew
        return not (others_suffice or event.class_name)

    def _end_unheard(self, what: str) -> list[Action]:
        # WAITING | STOPPING -> DONE: as under torchrun, whose exit barrier ends then.
        return [PrintLine(f"{what}; all ranks of this host ended well"), *self._finish(0)]

    # ----------------------------------------------------------------------------------------------------------------

    def _on_start_failed(self, event: StartFailed) -> list[Action]:
        if self.state in {State.NEW, State.DIAGNOSING, State.BACKOFF}:
            return []
        # There is no other try of what cannot be, unless it may pass.
        self._is_final = self._is_final or not event.class_name
        self._failed = True
        self._trouble, self._trouble_hint, self._trouble_exit_code = event.what, event.hint, event.exit_code
        self._trouble_class = event.class_name
        self._running.intersection_update(event.started)
        if self.state in {State.CHECKING, State.JOINING}:
            # CHECKING | JOINING -> DIAGNOSING: nothing had been started, and no other host knows of this attempt.
            self._alone = self._job.together
            return self._diagnose(event.at)
        told = self._tell("start", event.what)
        if self.state is State.PROBING:
            # PROBING -> DIAGNOSING: nothing had been started.
            self._is_checked = True
            return [*told, *self._diagnose(event.at)]
        if self.state in {State.STARTING, State.RUNNING}:
            # STARTING -> CAPTURING | STOPPING: the ranks that do run are ended like those of any failed attempt.
            return [*told, *self._fail(event.at)]
        if not self._running and not (self.state is State.STOPPING and self._stage is Stage.SWEEPING):
            # A signal was quicker than the news that there is nobody to stop.
            return [*told, *self._sweep(event.at)]
        return told

    def _on_signal(self, event: SignalReceived) -> list[Action]:  # noqa: C901 - the same signal, state by state
        if self._stop_signum is not None:
            if event.signum == signal.SIGINT and self.state in {State.CAPTURING, State.STOPPING}:
                return self._impatient(event.at)
            return []
        if self.state is State.STOPPING and self._stage is Stage.SWEEPING and not self._failed:
            # Every rank is done and well; there is nothing left to stop, but what is waited for.
            say = PrintLine(f"{event.why or signal_name(event.signum)}: what the ranks left behind is not waited for")
            return [say, *hurry] if (hurry := self._hurry_leftovers(event.at)) else []
        self._stop_signum = event.signum
        self._hurry(event.at)
        if not self._failed:
            self._cause_signum = event.signum
        name = event.why or signal_name(event.signum)
        told: list[Action] = []
        if self.state in _TOGETHER and not self._regroups:
            self._leaves = self._may_leave and not self._failed
            reason = "leave" if self._leaves else "parent" if event.why else "signal"
            told = self._tell(reason, name, event.signum)
        match self.state:
            case State.NEW | State.CHECKING | State.JOINING:
                # -> DONE: nothing runs yet, so the signal ends saferun as it would end any program.
                return self._finish(1, reraise=event.signum)
            case State.STARTING | State.RUNNING:
                words = f"{name}: stopping {_ranks(len(self._running))}, SIGKILL follows in {self._limits.grace_s:g} s"
                if event.signum == signal.SIGINT:
                    # The user is at the keyboard and wants an end: the one signal that waits for no evidence.
                    return [PrintLine(words), *told, *self._stop(event.at, event.signum)]
                if event.quiet_s >= _HUNG_S:
                    words += f"; no progress for {event.quiet_s:.0f} s, so their stacks are taken first"
                return [PrintLine(words), *told, *self._stop_for(event.at, event.signum, event.quiet_s)]
            case State.WAITING | State.PROBING:
                return [*told, *self._diagnose(event.at)]
            case State.BACKOFF:
                # BACKOFF -> DONE
                return self._finish(1)
        # CAPTURING, STOPPING, DIAGNOSING: already on the way out; what follows sees the signal and does not restart.
        if self.state is State.CAPTURING and self.deadline is not None:
            # The time that is left belongs to the ranks.
            self._enter(State.CAPTURING, min(self.deadline, event.at + _FIRST_LOOK_S))
        if event.signum != signal.SIGINT or self.state not in {State.CAPTURING, State.STOPPING}:
            return told
        if self.state is State.CAPTURING and self._verdict is not None and not self._failed:
            # CAPTURING -> STOPPING: whoever is at the keyboard does not want to wait for the picture of a hang.
            return [*told, *self._stop(event.at, event.signum)]
        # A launcher sends one Ctrl-C to every host, and the news of another's may be quicker than one's own.
        is_another = self._failed and self._told_signum != signal.SIGINT
        return [*told, *(self._impatient(event.at) if is_another else [])]

    def _impatient(self, at: float) -> list[Action]:
        """A second Ctrl-C, or one while saferun is stopping the ranks already: no more grace."""
        if self._stage is Stage.SWEEPING and self.state is State.STOPPING:
            return [SweepOrphans(self.attempt, 0.0)]
        return [PrintLine(f"SIGINT: killing {_ranks(len(self._running))}"), *self._kill(at)]

    def _on_stall(self, event: LoopStalled) -> list[Action]:
        """What could not be done in time because this process did not run has its time again; a grace has not."""
        if self.deadline is None or event.at < self.deadline:
            return []
        if self.state in _LASTS_ANEW:
            self.deadline = event.at + event.left_s
            return []
        return self._on_deadline(DeadlineExpired(event.at, event.attempt))

    def _on_deadline(self, event: DeadlineExpired) -> list[Action]:
        if self.deadline is None or event.at < self.deadline:
            return []  # the expiry of a phase that ended at the same moment
        match self.state:
            case State.CHECKING | State.JOINING | State.PROBING | State.STARTING:
                return self._on_start_failed(
                    StartFailed(
                        event.at,
                        event.attempt,
                        f"{self.state.value} took longer than it may",
                        "look at events.jsonl in the run directory for the last thing that happened",
                        1,
                        tuple(sorted(self._running)),
                    )
                )
            case State.CAPTURING:
                # CAPTURING -> STOPPING | RUNNING: whatever is not there by now is not waited for.
                return self._after_capture(event.at, ())
            case State.WAITING:
                # WAITING -> DONE: the others' ranks are at work, or have ended well, as far as anybody knows.
                say = PrintLine(
                    f"{self._unheard} for {self._limits.unheard_s:g} s; all ranks that are known of ended well"
                )
                return [say, *([BroadcastDecision(self.attempt, "finish", 0)] if self._leads else []), *self._finish(0)]
            case State.STOPPING:
                return self._on_stopping_deadline(event.at)
            case State.DIAGNOSING if self._own_diagnosis is not None:
                # No word from the host that decides, and yet it is there: enough.
                self._alone = self._is_final = True
                return self._decide(event.at, self._own_diagnosis, None)
            case State.DIAGNOSING:
                tells = self._job.together and self._leads and not self._alone and not self._leaves
                decision = [BroadcastDecision(self.attempt, "finish", self._trouble_exit_code)] if tells else []
                return [*decision, *self._finish(self._trouble_exit_code)]
            case State.BACKOFF:
                # BACKOFF -> CHECKING: the store's port stays bound from attempt to attempt.
                self.attempt += 1
                self._begin_attempt()
                self._enter(State.CHECKING, event.at + self._limits.checks_s)
                return [RunChecks(self.attempt)]
        return []

    def _on_stopping_deadline(self, at: float) -> list[Action]:
        if self._stage is Stage.ASKED:
            if self._look_at is not None and at < self._kill_at:
                return self._late_look(at)
            return self._kill(at)
        if self._stage is Stage.KILLED:
            # A process in an uninterruptible sleep cannot be killed: name it and leave it.
            self._abandoned = tuple(sorted(self._running))
            self._failed = True
            return self._sweep(at)
        return self._after_sweep(at)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
