"""Events and actions: all that goes into the supervisor and all that comes out of it.

Every event carries ``at`` (monotonic seconds) and the attempt that it belongs to.
"""

from __future__ import annotations

from saferun.model import ExitStatus, Placement, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    # A launch that goes well never makes one, and does not pay for them.
    from saferun.evidence import Diagnosis, HangVerdict
    from saferun.supervisor.policy import Decision, FailureFacts

# --------------------------------------------------------------------------------------------------------------------
# Events: something happened.


class LaunchRequested(Value):
    """The launcher is ready; nothing has been started yet."""

    at: float
    attempt: int


class ChecksAsked(Value):
    """The check process has been asked: the time that the checks may take begins."""

    at: float
    attempt: int


class ChecksPassed(Value):
    """What can be known before the hosts meet is in order; the store's port is bound."""

    at: float
    attempt: int


class ProbesPassed(Value):
    """What the hosts found out about each other is in order."""

    at: float
    attempt: int


class ChecksOver(Value):
    """Nothing but checks was wanted, and they are done."""

    at: float
    attempt: int
    exit_code: int


class HostsJoined(Value):
    """All hosts of the job have met, and this host knows its place.

    Attributes:
        placement: this host's place.
        number: the job's number of the attempt, where this host did not know it; -1: it is ``attempt``.
        leads: whether this host decides for the job.
        may_leave: whether the job goes on without this host.
        probes: whether the hosts look at each other before the ranks are started.
    """

    at: float
    attempt: int
    placement: Placement
    number: int = -1
    leads: bool = True
    may_leave: bool = False
    probes: bool = False


class RanksStarted(Value):
    """Every rank of this host runs; ``pids`` are in order of local rank."""

    at: float
    attempt: int
    pids: tuple[int, ...]


class StartFailed(Value):
    """The attempt could not be started.

    Attributes:
        exit_code: what saferun ends with for it.
        started: the local ranks that run all the same.
        class_name: the class of the cause, where another try may help; empty: it would not.
    """

    at: float
    attempt: int
    what: str
    hint: str
    exit_code: int
    started: tuple[int, ...] = ()
    class_name: str = ""


class RankExited(Value):
    """A rank has ended, for whatever reason."""

    at: float
    attempt: int
    local_rank: int
    status: ExitStatus


class StoreServed(Value):
    """The coordinator serves the store of this attempt."""

    at: float
    attempt: int


class StoreUnavailable(Value):
    """A rank asks for the store, and there is nobody to serve it."""

    at: float
    attempt: int
    what: str
    hint: str


class SignalReceived(Value):
    """The user or the scheduler sent saferun a signal.

    ``why``: what happened instead, where it only counts as one: what had started saferun is gone.
    ``quiet_s``: for how long no rank of this host has moved; 0 where they work, or nobody knows.
    """

    at: float
    attempt: int
    signum: int
    why: str = ""
    quiet_s: float = 0.0


class HangSuspected(Value):
    """Nothing has moved for too long."""

    at: float
    attempt: int
    verdict: HangVerdict


class EvidenceCaptured(Value):
    """The ranks that run have been looked at.

    ``culprits``: the local ranks that a hang is blamed on. ``moved``: the job came to life while it was looked at.
    """

    at: float
    attempt: int
    culprits: tuple[int, ...] = ()
    moved: bool = False


class JobAborted(Value):
    """The job's attempt is to end; all hosts are told the same.

    Attributes:
        reason: ``failure``, ``hang``, ``signal``, ``parent``, ``lost``, ``task_lost``, ``start``: something went wrong;
            ``membership``, ``leave``: other hosts form the job from now on.
        message: what happened, in a few words.
        host: the host that told it, or that it is about.
        ours: whether this process told it.
        signum: the signal, where it was one; 0: none.
        culprits: local ranks of this process that a hang is blamed on.
        quiet_s: for how long no rank of this host has moved, where it was a signal.
    """

    at: float
    attempt: int
    reason: str
    message: str
    host: str
    ours: bool = False
    signum: int = 0
    culprits: tuple[int, ...] = ()
    quiet_s: float = 0.0


class JobDecided(Value):
    """The host that decides has decided what follows.

    ``messages``: lines for the user. ``restarts``: how many there have been, this one included. ``excluded``: the
    number of a host that is left out from now on; -1: none.
    """

    at: float
    attempt: int
    next_step: Literal["restart", "finish"]
    exit_code: int
    wait_s: float
    restarts: int
    messages: tuple[str, ...] = ()
    excluded: int = -1


class HostsDone(Value):
    """Every rank of every host has ended with exit code 0."""

    at: float
    attempt: int


class HostsUnreachable(Value):
    """Hosts are not heard of, and the job goes on all the same.

    Where this host leads, those are the only ones that have not ended well.
    """

    at: float
    attempt: int
    message: str


class HostsReachable(Value):
    """They are heard of again."""

    at: float
    attempt: int


class JobLost(Value):
    """The other hosts cannot be reached any more: this one is on its own.

    ``class_name``: ``store_lost`` where the store of the host that leads is gone, which may serve another.
    """

    at: float
    attempt: int
    what: str
    hint: str
    class_name: str = ""


class CoreDumpSeen(Value):
    """A rank that should be gone by now is being dumped by the kernel."""

    at: float
    attempt: int


class OrphansGone(Value):
    """No process of the attempt is left but the ranks that were given up; ``pids`` had to be ended."""

    at: float
    attempt: int
    pids: tuple[int, ...]


class Diagnosed(Value):
    """The failed attempt has a diagnosis. ``stopped``: on some host it was the user or the scheduler who ended it.

    ``facts``: what of it decides about another attempt.
    """

    at: float
    attempt: int
    diagnosis: Diagnosis
    stopped: bool = False
    facts: FailureFacts | None = None


class DeadlineExpired(Value):
    """The phase has lasted as long as it may."""

    at: float
    attempt: int


class LoopStalled(Value):
    """The phase's time is over, and the loop did not run when it ended: it was stopped, suspended, or held up.

    ``left_s``: what was left of the time when it last ran.
    """

    at: float
    attempt: int
    left_s: float


Event = (
    LaunchRequested
    | ChecksAsked
    | ChecksPassed
    | ProbesPassed
    | ChecksOver
    | HostsJoined
    | RanksStarted
    | StartFailed
    | RankExited
    | StoreServed
    | StoreUnavailable
    | SignalReceived
    | HangSuspected
    | EvidenceCaptured
    | JobAborted
    | JobDecided
    | HostsDone
    | HostsUnreachable
    | HostsReachable
    | JobLost
    | CoreDumpSeen
    | OrphansGone
    | Diagnosed
    | DeadlineExpired
    | LoopStalled
)

# --------------------------------------------------------------------------------------------------------------------
# Actions: the supervisor wants something done.


class RunChecks(Value):
    """Bind the store's port, if it is not, and check what can be checked alone.

    Answer ChecksPassed, StartFailed, or ChecksOver where nothing else is wanted.
    """

    attempt: int


class JoinHosts(Value):
    """Meet the other hosts and take away what the attempt before left in the store; answer HostsJoined.

    ``restarts``: how many failures the job has got over.
    """

    attempt: int
    restarts: int = 0


class ProbeHosts(Value):
    """Have the hosts look at each other; answer ProbesPassed, StartFailed or ChecksOver."""

    attempt: int


class StartRanks(Value):
    """Start every rank of this host; answer RanksStarted or StartFailed."""

    attempt: int
    placement: Placement


class ServeStore(Value):
    """Have the coordinator serve the store of this attempt."""

    attempt: int


class CaptureEvidence(Value):
    """Look at the ranks that still run, before any of them is signalled; answer EvidenceCaptured.

    ``verdict``: the hang that asks for it; None: a failure or a signal.
    """

    attempt: int
    local_ranks: tuple[int, ...]
    budget_s: float
    verdict: HangVerdict | None = None


class ReportHang(Value):
    """Tell the user of the hang that has been captured, and what is done about it."""

    attempt: int
    next_step: Literal["report", "stop", "restart"]


class SignalRanks(Value):
    """Send a signal to the process groups of these ranks."""

    attempt: int
    local_ranks: tuple[int, ...]
    signum: int


class SweepOrphans(Value):
    """End what the ranks left behind, or wait for its end; answer OrphansGone.

    Attributes:
        term_s: seconds between SIGTERM and SIGKILL.
        wait_s: how long processes that work are waited for before they are ended; 0: all are ended at once.
        idle_s: how long a process that is waited for may do nothing before it is ended.
        leave: they are left as they are.
    """

    attempt: int
    term_s: float
    wait_s: float = 0.0
    idle_s: float = 0.0
    leave: bool = False


class Diagnose(Value):
    """Find the cause of a failed attempt; answer Diagnosed. ``hung``: it was ended because it hung.

    ``alone``: other hosts have no part in it. ``trouble_class``: the class of the cause, where that is the trouble.
    ``is_checked``: the trouble is what the checks of all hosts found.
    """

    attempt: int
    stop_signum: int | None
    abandoned: tuple[int, ...]
    trouble: str
    trouble_hint: str
    hung: bool = False
    alone: bool = False
    trouble_class: str = ""
    is_checked: bool = False


class ReportFailure(Value):
    """Tell the user why the attempt failed, and what happens next.

    ``decision``: what was decided, and why.
    """

    attempt: int
    diagnosis: Diagnosis
    restarting: bool
    decision: Decision | None = None


class BroadcastAbort(Value):
    """Tell all hosts that this attempt is to end. The fields are those of JobAborted.

    ``culprits`` are local ranks here; those that a hang on other hosts is blamed on are known to who carries this out.
    """

    attempt: int
    reason: str
    message: str
    signum: int = 0


class NotifyDone(Value):
    """Tell the host that decides that every rank of this one has ended with exit code 0."""

    attempt: int


class BroadcastDecision(Value):
    """Tell all hosts what follows. ``diagnosis``: of a failed attempt; ``decision``: why.

    ``excluded``: the number of a host that is left out from now on; -1: none.
    """

    attempt: int
    next_step: Literal["restart", "finish"]
    exit_code: int
    wait_s: float = 0.0
    restarts: int = 0
    diagnosis: Diagnosis | None = None
    decision: Decision | None = None
    excluded: int = -1


class ReportDecision(Value):
    """Tell the user what another host has decided, in its own words."""

    attempt: int
    messages: tuple[str, ...]
    restarting: bool


class PrintLine(Value):
    """One line for the user."""

    text: str


class Finish(Value):
    """The launch is over. With ``reraise`` saferun ends by that signal instead of by an exit code.

    ``leaves``: the job goes on without this host.
    """

    exit_code: int
    reraise: int | None = None
    leaves: bool = False


Action = (
    RunChecks
    | JoinHosts
    | ProbeHosts
    | StartRanks
    | ServeStore
    | CaptureEvidence
    | ReportHang
    | SignalRanks
    | SweepOrphans
    | Diagnose
    | ReportFailure
    | BroadcastAbort
    | NotifyDone
    | BroadcastDecision
    | ReportDecision
    | PrintLine
    | Finish
)
