"""Where a launch stands: its state, the limits of each phase, and what is known of the attempt at hand. Pure."""

from __future__ import annotations

import signal
from enum import Enum

from saferun.model import Value
from saferun.supervisor.actions import Action, BroadcastAbort, BroadcastCause, Finish
from saferun.supervisor.ending import Ending, Failed, Leave, NotStarted, Regroup, Stopped, prevailing
from saferun.supervisor.policy import AttemptPolicy, HangPolicy, JobPolicy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.evidence.job_evidence import HangVerdict
    from saferun.model import AbortKind, Placement
    from saferun.supervisor.events import JobDecided, SignalReceived


class State(Enum):
    """Where the launch stands."""

    NEW = "new"
    CHECKING = "checking"
    JOINING = "joining"
    PROBING = "probing"  # the hosts probe each other
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"  # this host's ranks are done, others' are not
    CAPTURING = "capturing"
    STOPPING = "stopping"
    DIAGNOSING = "diagnosing"
    BACKOFF = "backoff"
    DONE = "done"


class Limits(Value):
    """How long each phase may last, in seconds. RUNNING lasts as long as its ranks, WAITING as other hosts' do."""

    checks_s: float = 60.0
    join_s: float = 600.0
    awaited_s: float = 0.0  # how long the hosts may be waited for after a sign of the coordinator that does; 0: join_s
    probe_s: float = 60.0
    start_s: float = 1860.0  # longer than the part that starts ranks waits for their programs
    capture_s: float = 20.0
    cause_s: float = 10.0  # how long ranks are left alive, after a victim's failure, to show its cause
    grace_s: float = 30.0
    kill_s: float = 10.0
    sweep_term_s: float = 2.0
    sweep_s: float = 10.0
    orphans_s: float = 600.0  # processes that work on after ranks that ended well
    dump_s: float = 60.0  # by how much a core dump in progress may put SIGKILL off
    tools_s: float = 300.0  # by how much a tool that a rank ran under may put SIGKILL off, to write what it has found
    diagnose_s: float = 30.0
    unreachable_s: float = 300.0  # how long a host whose ranks ended well waits for hosts that cannot be reached


class CutOff(Value):
    """This host is on its own from now on: the others cannot be reached, or know nothing of the attempt.

    Attributes:
        what: what happened; empty where there is nothing to report.
        hint: what to do about it.
        class_name: ``store_lost`` where the store of the leader is gone, which may serve another.
        is_final: there is to be no other attempt.
    """

    what: str = ""
    hint: str = ""
    class_name: str = ""
    is_final: bool = False


class Stopping:
    """How far the ranks of an attempt have been stopped.

    ``stage``: they have been sent nothing; or a signal, and have their grace; or SIGKILL; or they are gone, and the
    processes that they left behind are being ended.
    """

    def __init__(self) -> None:
        self.stage: Literal["none", "signalled", "killed", "sweeping"] = "none"
        self.signum = 0  # that the ranks were sent last, unless it was SIGKILL
        self.kill_at = 0.0
        self.scheduler_kill_at: float | None = None  # when a scheduler that asked for the end would kill them itself
        self.capture_at: float | None = None  # when ranks that were sent a signal, and are still there, are captured
        self.core_dump_deadline = 0.0  # when SIGKILL waits for no core dump any more
        self.tools_deadline = 0.0  # when SIGKILL waits for no tool any more
        self.awaits_tools = False  # it waits for one
        self.awaits_orphans = False  # all ranks ended well, and processes of theirs work on
        self.late_signal: SignalReceived | None = None  # came while those were waited for; obeyed after the sweep
        self.obey_at: float | None = None  # when that signal ends the job, if it is not done by then
        self.abandoned: tuple[int, ...] = ()  # ranks that SIGKILL did not end
        self.is_hurried = False  # a signal came during the diagnosis


class OtherHosts:
    """What an attempt knows of the other hosts."""

    def __init__(self) -> None:
        self.may_leave = False  # the job can go on without this host
        self.is_announced = False  # all hosts know that the attempt is to end
        self.announced_signum = 0  # because of a signal to one of them
        self.culprits: tuple[int, ...] = ()  # local ranks that the leader blames for the hang that ends the attempt
        self.cause_wanted = False  # a victim failed on some host; a host that finds the cause announces it
        self.is_stopped = False  # the user or the scheduler stopped the job on some host
        self.unreachable = ""  # the hosts that are, and how, while the job goes on
        self.cut_off: CutOff | None = None
        self.decision: JobDecided | None = None


class Attempt:
    """What is known of one attempt. Each has an object of its own, so nothing of an earlier one is left in it."""

    def __init__(self) -> None:
        self.placement: Placement | None = None
        self.running: set[int] = set()  # local ranks
        self.has_failed_rank = False  # a rank of this host failed, or could not be ended
        self.ending: Ending | None = None
        self.verdict: HangVerdict | None = None  # of the hang that is being captured
        self.has_moved = False  # the job made progress during that
        self.is_captured = False  # the ranks have been captured at least once
        self.awaits_cause = False  # CAPTURING lasts for that: ranks are left alive to show the cause of the failure
        self.is_cause_shown = False  # it is not waited for
        self.awaits_signal = False  # CAPTURING lasts for that: other hosts leave the job by one that may come here, too
        self.stopping = Stopping()
        self.others = OtherHosts()
        self.own_diagnosis: Diagnosis | None = None  # while the leader's decision is waited for

    @property
    def ranks(self) -> tuple[int, ...]:
        """The local ranks that run."""
        return tuple(sorted(self.running))


class LaunchState:
    """What the transitions read and change. ``number``: of the attempt."""

    def __init__(
        self,
        policy: AttemptPolicy,
        limits: Limits,
        hang_policy: HangPolicy,
        job: JobPolicy,
        orphans: Literal["wait", "end", "leave"],
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.hang_policy = hang_policy
        self.job = job
        self.orphans = orphans
        self.state = State.NEW
        self.deadline: float | None = None
        self.number = 0
        self.attempt = Attempt()
        self.restarts = 0  # failures that the job has recovered from; retries of a start are not among them
        self.leads = True
        self.stop_signum: int | None = None  # that the user or the scheduler sent to this host
        self.interrupted_at: float | None = None  # when a SIGINT came of which another launcher may repeat the same
        self.stopped_by = ""  # who asked for the end of the job, if it was by saferunctl
        self.failure_code = 1  # the exit code of a launch that fails, or that saferunctl stops
        self.is_request_ours = False  # whether saferunctl has asked this host
        self.spares: tuple[str, ...] = ()  # on the leader: the hosts that can take the place of one
        self.needed: tuple[int, ...] = ()  # on the leader: the hosts without which the others cannot meet again
        self.has_been_spare = False  # this host, when the hosts met last
        self.left_out = -1  # on the leader: the number of the host that was left out last, until the hosts meet again

    def enter(self, state: State, deadline: float | None) -> None:
        """Change the state."""
        self.state = state
        self.deadline = deadline

    def is_due(self, at: float) -> bool:
        """Whether the phase has lasted as long as it may."""
        return self.deadline is not None and at >= self.deadline

    def add_ending(self, ending: Ending) -> None:
        """There is one more reason for which the attempt ends."""
        self.attempt.ending = prevailing(self.attempt.ending, ending)

    def note_request(self, by: str, signum: int, *, ours: bool) -> None:
        """The user asked for the end of the job by saferunctl, on this host or another one."""
        self.stopped_by, self.is_request_ours = by, ours
        # 128 + signal number, as a shell reports it.
        self.failure_code = 128 + signum

    @property
    def is_spare(self) -> bool:
        """Whether this host has no ranks in this attempt, and waits to take the place of another."""
        placement = self.attempt.placement
        return placement is not None and not placement.ranks

    @property
    def signum_for_ranks(self) -> int:
        """What ranks that are stopped get: the signal that this host got, or another one of the job, else SIGTERM.

        Another host chooses only among the signals that stop this launch. The ranks of a job that goes on without it
        are not meant.
        """
        others = self.attempt.others
        if self.stop_signum is not None:
            return self.stop_signum
        is_meant = others.announced_signum in self.job.stop_signals and not isinstance(self.attempt.ending, Regroup)
        return others.announced_signum if is_meant else signal.SIGTERM

    def for_ranks(self, signum: int) -> int:
        """What ranks get of a signal to this host: SIGTERM for SIGINT if ``--signals-to-handle`` leaves that out.

        torchrun then ends like any Python program at Ctrl-C, and sends its ranks SIGTERM on the way out.
        """
        is_handled = signum != signal.SIGINT or signum in self.job.stop_signals
        return signum if is_handled else signal.SIGTERM

    @property
    def is_to_end(self) -> bool:
        """Whether a signal keeps this host from another attempt, which the others can begin without it."""
        return self.stop_signum is not None or (
            self.job.outlives_leader and self.attempt.stopping.late_signal is not None
        )

    @property
    def may_end_alone(self) -> bool:
        """Whether the others need nothing of this host once its ranks have ended well."""
        return self.job.spans_hosts and not (self.leads or self.job.serves_tasks)

    @property
    def may_restart(self) -> bool:
        """Whether there are restarts left, as far as this host can tell."""
        return self.policy.may_restart(self.restarts, leads=self.leads)

    @property
    def answers_to_job(self) -> bool:
        """Whether other hosts take part in how this attempt is judged."""
        attempt = self.attempt
        return self.job.spans_hosts and attempt.others.cut_off is None and not isinstance(attempt.ending, Leave)

    def broadcast_abort(self, reason: AbortKind, message: str = "", signum: int = 0, hint: str = "") -> list[Action]:
        """Have the attempt end on all hosts, unless they know of it, or this host is on its own."""
        others = self.attempt.others
        if not self.job.spans_hosts or others.is_announced or others.cut_off is not None:
            return []
        others.is_announced = True
        return [BroadcastAbort(self.number, reason, message, signum, hint)]

    def broadcast_cause(self) -> list[Action]:
        """A rank has failed here. If all hosts wait for the cause, which this may be, have them know of it."""
        others = self.attempt.others
        is_awaited = others.cause_wanted and others.cut_off is None and isinstance(self.attempt.ending, Failed)
        return [BroadcastCause(self.number)] if is_awaited else []

    def to_be_aborted(self, culprits: tuple[int, ...]) -> tuple[int, ...]:
        """The local ranks among the culprits of a hang that get SIGABRT, for a core."""
        if not self.hang_policy.abort_culprits:
            return ()
        return tuple(rank for rank in culprits if rank in self.attempt.running)

    @property
    def _leaves_job(self) -> bool:
        """Whether the others may form the job again without this host: it ends, and the job need not."""
        ending, others = self.attempt.ending, self.attempt.others
        if isinstance(ending, Leave) or others.cut_off is None:
            return isinstance(ending, Leave)
        has_given_up_place = isinstance(ending, NotStarted) and others.may_leave
        return has_given_up_place or self.leaves_by_signal

    @property
    def leaves_by_signal(self) -> bool:
        """Whether the signal that this host got is no end of the job, where the others are about to meet again."""
        is_signalled = self.stop_signum is not None and not self.stopped_by
        may_leave = self.attempt.others.may_leave or self.stop_signum != signal.SIGINT
        return self.job.spans_hosts and self.job.outlives_leader and is_signalled and may_leave

    def finish(self, exit_code: int, reraise: int | None = None, *, leaves: bool = False) -> list[Action]:
        """The launch is over."""
        self.enter(State.DONE, None)
        end = Finish(exit_code, reraise, leaves=leaves or self._leaves_job)
        if self.stop_signum is not None and self.stopped_by:
            at_once = self.stop_signum == signal.SIGKILL
            end = end._replace(by=self.stopped_by, at_once=at_once, ours=self.is_request_ours)
        ending = self.attempt.ending
        # Between attempts the others learn of a Ctrl-C by the end of the rendezvous alone.
        is_signalled = self.stop_signum not in {None, signal.SIGINT} or (isinstance(ending, Stopped) and not ending.by)
        if self.job.spans_hosts and is_signalled and not self.stopped_by and not end.leaves:
            end = end._replace(by_signal=True)
        return [end]
