"""Actions: all output of the supervisor. Each orders something; most are answered by an event."""

from __future__ import annotations

from saferun.model import Placement, Value
from saferun.supervisor.ending import Ending, Hung, NotStarted, Stopped, StoreLost, explanation, signum_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    # A launch that goes well never makes one, and does not pay for them.
    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.evidence.job_evidence import HangVerdict
    from saferun.model import AbortKind
    from saferun.supervisor.policy import Decision


class RunChecks(Value):
    """Bind the store's port, if it is not, and check what can be checked alone.

    Answer ChecksPassed, StartFailed, or ChecksOver where nothing else is wanted.
    """

    attempt: int


class JoinHosts(Value):
    """Rendezvous with the other hosts and empty the store of the previous attempt; answer HostsJoined.

    ``restarts``: how many failures the job has recovered from. ``left_out``: the number of the host that was
    left out, in the previous attempt; -1: none; 0: a spare leads from now on.
    """

    attempt: int
    restarts: int = 0
    left_out: int = -1


class ProbeHosts(Value):
    """Have the hosts probe each other; answer ProbesPassed, StartFailed or ChecksOver."""

    attempt: int


class StartRanks(Value):
    """Start every rank of this host; answer RanksStarted or StartFailed."""

    attempt: int
    placement: Placement


class ServeStore(Value):
    """Have the coordinator serve the store of this attempt."""

    attempt: int


class CaptureEvidence(Value):
    """Capture the ranks that still run, before any of them is signalled; answer EvidenceCaptured.

    ``verdict``: the hang that asks for it, with its ``number``; None: a failure or a signal.
    """

    attempt: int
    local_ranks: tuple[int, ...]
    budget_s: float
    verdict: HangVerdict | None = None
    number: int = 0


class AwaitCause(Value):
    """A victim has failed: wait for one of these ranks to show the cause; answer CauseShown.

    ``limit_s``: after which the ranks are stopped without it.
    """

    attempt: int
    local_ranks: tuple[int, ...]
    limit_s: float


class ReportHang(Value):
    """Report the hang that has been captured, and what follows."""

    attempt: int
    next_step: Literal["report", "stop", "restart"]


class SignalRanks(Value):
    """Send a signal to the process groups of these ranks."""

    attempt: int
    local_ranks: tuple[int, ...]
    signum: int


class SweepOrphans(Value):
    """End the processes that the ranks left behind, or wait for their end; answer OrphansGone.

    Attributes:
        term_s: seconds between SIGTERM and SIGKILL.
        wait_s: how long processes that work are waited for before they are ended; 0: all are ended at once.
        idle_s: how long a process that is waited for may do nothing before it is ended.
        leave: they are left as they are.
        ends_all: those that have left their rank's session are ended as well; otherwise they are left as they are,
            unless they are waited for.
        signum: that the ranks were sent because the job is to end; 0: it is not, or their grace is over.
        grace_s: seconds before SIGKILL for processes that handle this signal: what is left of the ranks' grace.
    """

    attempt: int
    term_s: float
    wait_s: float = 0.0
    idle_s: float = 0.0
    leave: bool = False
    ends_all: bool = False
    signum: int = 0
    grace_s: float = 0.0


class Diagnose(Value):
    """Find the cause of an attempt's end; answer Diagnosed.

    Attributes:
        ending: why it ended, as far as this host knows.
        abandoned: local ranks that SIGKILL did not end.
        alone: other hosts have no part in it.
        lost: how the other hosts were lost; empty: they were not.
        lost_hint: what to do about that.
    """

    attempt: int
    ending: Ending
    abandoned: tuple[int, ...] = ()
    alone: bool = False
    lost: str = ""
    lost_hint: str = ""

    @property
    def stop_signum(self) -> int | None:
        """The signal to this host that ended the attempt, if one did."""
        return signum_of(self.ending)

    @property
    def stopped_by(self) -> str:
        """Who asked for the end, if it was by saferunctl; else empty."""
        return self.ending.by if isinstance(self.ending, Stopped) else ""

    @property
    def hung(self) -> bool:
        """Whether the ranks were ended because they hung."""
        return isinstance(self.ending, Hung)

    @property
    def error(self) -> str:
        """What happened, if it was not a rank's failure; empty if the ranks show more."""
        return explanation(self.ending)[0] or self.lost

    @property
    def error_hint(self) -> str:
        """What to do about ``error``."""
        error, hint = explanation(self.ending)
        return hint if error else self.lost_hint

    @property
    def error_class(self) -> str:
        """The class of ``error``, if it has one."""
        if isinstance(self.ending, NotStarted):
            return self.ending.class_name
        return "store_lost" if isinstance(self.ending, StoreLost) else ""

    @property
    def by_checks(self) -> bool:
        """Whether the preflight checks of all hosts found it."""
        return isinstance(self.ending, NotStarted) and self.ending.by_checks


ATTEMPT_FAILED = "the attempt failed"
"""The headline of a failure of which the supervisor knows no more; its ranks may show more."""


class Undiagnosed(Value):
    """Stands for a ``Diagnosis`` that did not come in time, or whose module cannot be read."""

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
    lost_peers: tuple[()] = ()


class HurryDiagnosis(Value):
    """What dead ranks left is read for ``within_s`` more at most; Diagnosed then comes without the rest."""

    attempt: int
    within_s: float


class ReportFailure(Value):
    """Report why the attempt failed, and what happens next.

    ``decision``: what was decided, and why. ``stop_signum``: the signal to this host that ended the attempt, if one
    did; it may have come since Diagnose.
    """

    attempt: int
    diagnosis: Diagnosis
    restarting: bool
    decision: Decision | None = None
    stop_signum: int | None = None


class BroadcastAbort(Value):
    """Have this attempt end on all hosts. The fields are those of JobAborted, which every host gets for it.

    ``hint``: what to do about it, which the leader reports.

    ``AttemptEnd.broadcast_abort`` carries it out: ``cluster/job_sender`` hands an entry for the job's log to the
    coordinator, which appends it to the log in the control store; each host's ``cluster/job_attempt`` reads it there.
    """

    attempt: int
    reason: AbortKind
    message: str
    signum: int = 0
    hint: str = ""


class BroadcastRequest(Value):
    """Have all other hosts end the job, as a user has asked this one to by saferunctl. ``at_once``: by SIGKILL."""

    attempt: int
    by: str
    at_once: bool


class RequestCheckpoint(Value):
    """Send a signal to those ranks that handle it: their script saves a checkpoint, and ends."""

    attempt: int
    local_ranks: tuple[int, ...]
    signum: int
    by: str


class BroadcastCheckpoint(Value):
    """Have all other hosts do the same."""

    attempt: int
    by: str
    signum: int


class ReportRestart(Value):
    """Report that all ranks are started again because a user asked for it. ``by``: who."""

    attempt: int
    by: str


class BroadcastCause(Value):
    """A rank of this host failed by itself, as far as is known: hosts that wait for such a cause stop waiting.

    Not sent if that rank is a victim as well. Each host gets CauseShown for it.
    """

    attempt: int


class NotifyDone(Value):
    """Report to the leader that every rank of this host has ended with exit code 0."""

    attempt: int


class BroadcastDecision(Value):
    """Announce to all hosts what follows. ``diagnosis``: of a failed attempt; ``decision``: why.

    ``excluded``: the number of a host that is left out from now on; -1: none. ``replaced``: of the restarts, how many
    used up none.
    """

    attempt: int
    next_step: Literal["restart", "finish"]
    exit_code: int
    wait_s: float = 0.0
    restarts: int = 0
    diagnosis: Diagnosis | None = None
    decision: Decision | None = None
    excluded: int = -1
    replaced: int = 0


class ReportDecision(Value):
    """Show the user what the leader has decided, in its own lines. ``stop_signum``: as in ReportFailure."""

    attempt: int
    messages: tuple[str, ...]
    restarting: bool
    stop_signum: int | None = None


class PrintLine(Value):
    """One line for the user. ``of_signal``: about a signal to this host, which all hosts may have got."""

    text: str
    of_signal: bool = False


class Finish(Value):
    """The launch is over. With ``reraise`` saferun ends by that signal instead of by an exit code.

    ``leaves``: the job goes on without this host. ``by``: who has ended the job by saferunctl, which asked this host if
    it is ``ours``; ``at_once``: by SIGKILL. ``by_signal``: a signal has ended a job of several hosts, and all of them
    know it.
    """

    exit_code: int
    reraise: int | None = None
    leaves: bool = False
    by: str = ""
    at_once: bool = False
    ours: bool = False
    by_signal: bool = False


Action = (
    RunChecks
    | JoinHosts
    | ProbeHosts
    | StartRanks
    | ServeStore
    | CaptureEvidence
    | AwaitCause
    | HurryDiagnosis
    | ReportHang
    | SignalRanks
    | SweepOrphans
    | Diagnose
    | ReportFailure
    | BroadcastAbort
    | BroadcastCause
    | RequestCheckpoint
    | BroadcastCheckpoint
    | ReportRestart
    | BroadcastRequest
    | NotifyDone
    | BroadcastDecision
    | ReportDecision
    | PrintLine
    | Finish
)
