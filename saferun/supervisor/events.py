"""Events: all input of the supervisor. Each says that something happened.

Every event carries ``at`` (monotonic seconds) and the attempt that it belongs to.
"""

from __future__ import annotations

import signal

from saferun.model import ExitStatus, Placement, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    # A launch that goes well never makes one, and does not pay for them.
    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.evidence.job_evidence import HangVerdict
    from saferun.supervisor.policy import FailureFacts
    from saferun.supervisor.policy.faulty_hosts import FaultyHost


class LaunchRequested(Value):
    """The launcher is ready; nothing has been started yet."""

    at: float
    attempt: int


class ChecksAsked(Value):
    """The check process has been asked: the time that the checks may take begins."""

    at: float
    attempt: int


class HostsAwaited(Value):
    """The coordinator of this host still waits for the hosts of the job."""

    at: float
    attempt: int


class ChecksPassed(Value):
    """The checks of this host found nothing that refuses the launch; the store's port is bound."""

    at: float
    attempt: int


class ProbesPassed(Value):
    """The hosts reach each other."""

    at: float
    attempt: int


class ChecksOver(Value):
    """Nothing but checks was wanted, and they are done."""

    at: float
    attempt: int
    exit_code: int


class HostsJoined(Value):
    """The rendezvous is complete, and this host knows its ranks.

    Attributes:
        placement: this host's ranks and their numbers.
        number: the job's number of the attempt, where this host did not know it; -1: it is ``attempt``.
        leads: whether this host is the leader, which decides for the job.
        may_leave: whether the job goes on without this host.
        probes: whether the hosts probe each other before the ranks are started.
        spares: the names of the hosts that can take the place of one; on the leader.
        needed: the numbers of the hosts without which the others cannot meet again; on the leader.
    """

    at: float
    attempt: int
    placement: Placement
    number: int = -1
    leads: bool = True
    may_leave: bool = False
    probes: bool = False
    spares: tuple[str, ...] = ()
    needed: tuple[int, ...] = ()


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
        class_name: the class of the cause, if another try may help; empty: it would not.
        joined: what the hosts had agreed on, if the supervisor does not know that yet; None: it does.
        faulty: hosts that are themselves at fault, whose places spares are to take before any rank is started.
        may_go_on: whether the ranks could also be started with the faulty hosts.
    """

    at: float
    attempt: int
    what: str
    hint: str
    exit_code: int
    started: tuple[int, ...] = ()
    class_name: str = ""
    joined: HostsJoined | None = None
    faulty: tuple[FaultyHost, ...] = ()
    may_go_on: bool = False


class RankExited(Value):
    """A rank has ended, for whatever reason."""

    at: float
    attempt: int
    local_rank: int
    status: ExitStatus


class StoreServed(Value):
    """The coordinator serves the store of this attempt, of a job of one host.

    It changes nothing, and is there for events.jsonl and the story.
    """

    at: float
    attempt: int


class StoreUnavailable(Value):
    """A rank asks for the store, and no process serves it."""

    at: float
    attempt: int
    what: str
    hint: str


class SignalReceived(Value):
    """The user or the scheduler sent saferun a signal.

    ``why``: what happened instead, if it only counts as a signal: the parent process of saferun is gone.
    ``idle_s``: for how long no rank of this host can have made progress; 0 if one may work, or it is unknown.
    """

    at: float
    attempt: int
    signum: int
    why: str = ""
    idle_s: float = 0.0


class StopRequested(Value):
    """The user wants the whole job to end, on all its hosts, by ``saferunctl stop`` or ``saferunctl kill``.

    Attributes:
        by: who asked: the verb, the user, and the host if it is another one.
        at_once: whether the ranks get SIGKILL now, and no grace.
        ours: whether this host got the request; if not, another one has announced it.
        idle_s: as in SignalReceived.
    """

    at: float
    attempt: int
    by: str
    at_once: bool = False
    ours: bool = True
    idle_s: float = 0.0

    @property
    def signum(self) -> int:
        """The signal that the ranks get."""
        return signal.SIGKILL if self.at_once else signal.SIGTERM


class RestartRequested(Value):
    """The user wants another attempt now, by ``saferunctl restart``. ``by`` and ``idle_s``: as in StopRequested."""

    at: float
    attempt: int
    by: str
    idle_s: float = 0.0


class CheckpointRequested(Value):
    """The user wants the ranks to save a checkpoint and to end, by ``saferunctl stop --after-checkpoint``.

    ``by`` and ``ours``: as in StopRequested, which follows if the ranks do not end. ``signum``: what ranks handle.
    """

    at: float
    attempt: int
    by: str
    signum: int
    ours: bool = True


class HangSuspected(Value):
    """There has been no progress for too long. ``number``: of the job's hangs, the same on all hosts."""

    at: float
    attempt: int
    verdict: HangVerdict
    number: int = 0


class EvidenceCaptured(Value):
    """The ranks that run have been captured.

    Attributes:
        culprits: the local ranks that a hang is blamed on.
        moved: the job made progress during the capture.
        suspects: local ranks of which one may have caused the failure of a victim, and be about to show why.
        doubted: a hang that was certain is only suspected: a rank waits for something outside the job.
    """

    at: float
    attempt: int
    culprits: tuple[int, ...] = ()
    moved: bool = False
    suspects: tuple[int, ...] = ()
    doubted: bool = False


class CauseShown(Value):
    """The cause of a victim's failure has shown, here or on another host, or no rank is left to show it."""

    at: float
    attempt: int


class JobAborted(Value):
    """The job's attempt is to end; all hosts get the same news.

    Attributes:
        reason: one of ``model.AbortKind``, or what another release of saferun has beside these.
        message: what happened, in a few words.
        host: the host that announced it, or that it is about.
        ours: whether this process announced it.
        signum: the signal, if it was one; 0: none.
        culprits: local ranks of this process that a hang is blamed on.
        idle_s: after a signal, or where a host comes, for how long no rank of this host has made progress.
    """

    at: float
    attempt: int
    reason: str
    message: str
    host: str
    ours: bool = False
    signum: int = 0
    culprits: tuple[int, ...] = ()
    idle_s: float = 0.0


class JobDecided(Value):
    """The leader has decided what follows.

    ``messages``: lines for the user. ``restarts``: how many there have been, this one included. ``excluded``: the
    number of a host that is left out from now on; -1: none. ``replaced``: of the restarts, how many used up none.
    """

    at: float
    attempt: int
    next_step: Literal["restart", "finish"]
    exit_code: int
    wait_s: float
    restarts: int
    messages: tuple[str, ...] = ()
    excluded: int = -1
    replaced: int = 0


class HostsDone(Value):
    """Every rank of every host has ended with exit code 0."""

    at: float
    attempt: int


class HostsUnreachable(Value):
    """Hosts cannot be reached, and the job goes on all the same.

    On the leader: all other hosts have ended well.
    """

    at: float
    attempt: int
    message: str


class SpareLost(Value):
    """A host that waited to take the place of another one is gone. Only the leader gets this.

    ``host``: its name. ``why``: as a sentence.
    """

    at: float
    attempt: int
    host: str
    why: str


class HostsReachable(Value):
    """The hosts can be reached again."""

    at: float
    attempt: int


class JobLost(Value):
    """The other hosts cannot be reached any more: this one is on its own.

    ``class_name``: ``store_lost`` where the store of the leader is gone, which may serve another.
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


class ToolAtWork(Value):
    """The scripts of these local ranks have ended, and the tools that they ran under have not (``--wrap``)."""

    at: float
    attempt: int
    local_ranks: tuple[int, ...]


class OrphansGone(Value):
    """No process of the attempt is left but ranks that were given up; ``pids`` had to be ended."""

    at: float
    attempt: int
    pids: tuple[int, ...]


class Diagnosed(Value):
    """The failed attempt has a diagnosis. ``stopped``: on some host the user or the scheduler ended it.

    ``facts``: the part of it that decides about another attempt.
    """

    at: float
    attempt: int
    diagnosis: Diagnosis
    stopped: bool = False
    facts: FailureFacts | None = None


class DeadlineExpired(Value):
    """The phase has lasted as long as it may.

    ``joined``: what the hosts had agreed on, if the supervisor does not know that yet; None: it does.
    """

    at: float
    attempt: int
    joined: HostsJoined | None = None


class LoopStalled(Value):
    """The phase's time is over, and the loop did not run when it ended: it was stopped, suspended, or held up.

    Where orphans are waited for, it may also have been stopped earlier. ``left_s``: what was left of the time when it
    last ran, or for how long the orphans are still waited for.
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
    | StopRequested
    | RestartRequested
    | CheckpointRequested
    | HangSuspected
    | EvidenceCaptured
    | CauseShown
    | JobAborted
    | JobDecided
    | HostsAwaited
    | HostsDone
    | HostsUnreachable
    | HostsReachable
    | SpareLost
    | JobLost
    | CoreDumpSeen
    | ToolAtWork
    | OrphansGone
    | Diagnosed
    | DeadlineExpired
    | LoopStalled
)
