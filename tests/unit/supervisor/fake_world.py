"""A host that does what the supervisor asks for: in time, late, twice, in part, or never. No process, no clock."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import HangVerdict
from saferun.model import ExitStatus, Placement, RankAssignment
from saferun.supervisor.actions import (
    Action,
    AwaitCause,
    CaptureEvidence,
    Diagnose,
    Finish,
    JoinHosts,
    ReportFailure,
    ReportHang,
    RunChecks,
    SignalRanks,
    StartRanks,
    SweepOrphans,
)
from saferun.supervisor.events import (
    CauseShown,
    CheckpointRequested,
    ChecksPassed,
    CoreDumpSeen,
    DeadlineExpired,
    Diagnosed,
    Event,
    EvidenceCaptured,
    HangSuspected,
    HostsJoined,
    JobAborted,
    LaunchRequested,
    OrphansGone,
    RankExited,
    RanksStarted,
    RestartRequested,
    SignalReceived,
    StartFailed,
    StopRequested,
    StoreUnavailable,
    ToolAtWork,
)
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, HangPolicy

OK = ExitStatus(0, None)
FAILED = ExitStatus(3, None)
KILLED = ExitStatus(None, signal.SIGKILL)
LIMITS = Limits()
DIAGNOSIS = Diagnosis("rank 0 failed first", None, None, (), (), ())
HANG = HangVerdict("quiescent", (0, 1), 300.0, certain=True)
SUSPICION = HangVerdict("spinning", (1,), 300.0, certain=False)
HUNG_S = 10.0  # what has not moved for so long hangs, to whoever wants to stop it
A = TypeVar("A", bound=Action)
STARTS = (ChecksPassed, HostsJoined, RanksStarted)
BEFORE_RANKS = {State.NEW, State.CHECKING, State.JOINING, State.PROBING}
WITHOUT_DEADLINE = {State.NEW, State.RUNNING, State.DONE}


def placement_of(ranks: int) -> Placement:
    assignments = tuple(RankAssignment(i, i, i) for i in range(ranks))
    return Placement(0, 1, ranks, ranks, assignments, "127.0.0.1", 29500, "job")


class Step(NamedTuple):
    """One thing that happens: its kind, and a number whose meaning depends on the kind."""

    kind: str
    number: int


class World:
    """Keeps the laws: every event goes through ``deliver``, which checks what comes back.

    Args:
        ranks: how many ranks this host has.
        max_restarts: of the policy.
        hang_policy: what is done about hangs.
    """

    def __init__(self, ranks: int = 2, max_restarts: int = 0, hang_policy: HangPolicy | None = None) -> None:
        self.now = 100.0
        self.ranks = ranks
        self.supervisor = Supervisor(AttemptPolicy(max_restarts), LIMITS, hang_policy)
        self.answers: list[Event] = []  # what has been asked for and not been answered yet
        self.given: list[Event] = []  # answers that were given and may come again
        self.alive: set[int] = set()
        self.statuses: dict[int, ExitStatus] = {}
        self.actions: list[Action] = []
        self.finish: Finish | None = None
        self.suspects = False  # whether what has been captured may yet show the cause of a failure
        self.captured = False  # in this attempt
        self.interrupted = False  # by the user's SIGINT, or by somebody's signal while the ranks worked
        self.told_to_stop = False  # while something was left to be stopped

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        return self.supervisor.attempt

    @property
    def state(self) -> State:
        return self.supervisor.state

    def deliver(self, event: Event) -> list[Action]:
        """Hand an event over and check everything that always holds."""
        is_old = event.attempt != self.attempt or self.state is State.DONE
        before = (self.state, self.attempt, self.supervisor.deadline)
        self._note(event, is_old=is_old)
        actions = self.supervisor.handle(event)
        if is_old:
            assert actions == []
            assert (self.state, self.attempt, self.supervisor.deadline) == before
        if self.state in WITHOUT_DEADLINE:
            assert self.supervisor.deadline is None
        else:
            assert self.supervisor.deadline is not None, f"{self.state} may last forever"
            assert self.supervisor.deadline in {before[2], max(self.supervisor.deadline, event.at)}
        for action in actions:
            self._do(action)
        assert (self.finish is not None) == (self.state is State.DONE)
        if self.finish is not None and actions:
            assert actions[-1] == self.finish
        return actions

    def _note(self, event: Event, *, is_old: bool) -> None:
        if is_old:
            return
        if isinstance(event, RestartRequested) or (isinstance(event, JobAborted) and event.signum):
            self.interrupted = self.interrupted or event.idle_s < HUNG_S
        if isinstance(event, SignalReceived | StopRequested):
            if event.signum in {signal.SIGINT, signal.SIGKILL} or event.idle_s < HUNG_S:
                self.interrupted = True
            all_well = len(self.statuses) == self.ranks and all(status.ok for status in self.statuses.values())
            self.told_to_stop = self.told_to_stop or not all_well

    def _do(self, action: Action) -> None:  # noqa: C901 - one flat table of the actions
        self.actions.append(action)
        match action:
            case RunChecks():
                self._begin_attempt()
                self.answers.append(ChecksPassed(self.now, action.attempt))
            case JoinHosts():
                self._begin_attempt()
                self.answers.append(HostsJoined(self.now, action.attempt, placement_of(self.ranks)))
            case StartRanks():
                self.alive = set(range(self.ranks))
                self.answers.append(RanksStarted(self.now, action.attempt, tuple(range(1000, 1000 + self.ranks))))
            case CaptureEvidence():
                self.captured = True
                assert set(action.local_ranks) == self.alive
                suspects = action.local_ranks if self.suspects else ()
                self.answers.append(EvidenceCaptured(self.now, action.attempt, suspects=suspects))
            case AwaitCause():
                assert set(action.local_ranks) <= self.alive, "the cause is awaited of a rank that has ended"
                assert self.captured, "the cause is awaited before evidence"
                self.answers.append(CauseShown(self.now, action.attempt))
            case ReportHang():
                assert self.captured, "a hang told before it was captured"
                assert (action.next_step == "report") == (self.state is State.RUNNING)
            case SignalRanks():
                assert self.captured or self.interrupted, "a signal before evidence"
                assert set(action.local_ranks) <= self.alive, "a rank that has ended was signalled"
                assert action.local_ranks, "a signal to nobody"
            case SweepOrphans():
                self.answers.append(OrphansGone(self.now, action.attempt, ()))
            case Diagnose():
                self.answers.append(Diagnosed(self.now, action.attempt, DIAGNOSIS))
            case Finish():
                assert self.finish is None, "a second Finish"
                self.finish = action
            case ReportFailure():
                assert action.restarting == (self.state is State.BACKOFF)

    def _begin_attempt(self) -> None:
        self.captured = False
        self.alive = set()
        self.statuses = {}

    # ----------------------------------------------------------------------------------------------------------------

    def launch(self) -> list[Action]:
        return self.deliver(LaunchRequested(self.now, 0))

    def answer(self) -> list[Action]:
        """The oldest thing that was asked for is done."""
        event = self.answers.pop(0)
        self.given.append(event)
        return self.deliver(event._replace(at=self.now))

    def answer_until(self, state: State) -> None:
        while self.state is not state:
            self.answer()

    def exit(self, local_rank: int, status: ExitStatus = OK) -> list[Action]:
        self.alive.discard(local_rank)
        self.statuses[local_rank] = status
        return self.deliver(RankExited(self.now, self.attempt, local_rank, status))

    def signal(self, signum: int, idle_s: float = 0.0) -> list[Action]:
        return self.deliver(SignalReceived(self.now, self.attempt, signum, idle_s=idle_s))

    def request(self, *, at_once: bool = False, idle_s: float = 0.0) -> list[Action]:
        return self.deliver(StopRequested(self.now, self.attempt, "saferunctl", at_once, idle_s=idle_s))

    def hang(self, verdict: HangVerdict = HANG) -> list[Action]:
        return self.deliver(HangSuspected(self.now, self.attempt, verdict))

    def expire(self) -> list[Action]:
        """Time passes until the phase's deadline."""
        assert self.supervisor.deadline is not None
        self.now = max(self.now, self.supervisor.deadline)
        return self.deliver(DeadlineExpired(self.now, self.attempt))

    def fail_start(self, started: int = 0) -> list[Action]:
        """What was asked for cannot be done; of the ranks only the first ``started`` could be started."""
        self.answers = [answer for answer in self.answers if not isinstance(answer, STARTS)]
        self.alive &= set(range(started))
        failed = StartFailed(self.now, self.attempt, "no such program", "check the path", 1, tuple(sorted(self.alive)))
        return self.deliver(failed)

    # ----------------------------------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:  # noqa: C901 - one flat table of what can happen
        """Let one thing happen, if it can happen now."""
        self.now += 0.125
        number = step.number
        match step.kind:
            case "answer" if self.answers:
                event = self.answers.pop(number % len(self.answers))
                self.given.append(event)
                self.deliver(event._replace(at=self.now))
            case "again" if self.given:
                self.deliver(self.given[number % len(self.given)]._replace(at=self.now))
            case "never" if self.answers:
                self.answers.pop(number % len(self.answers))
            case "old":
                self._old(number)
            case "exit" if self.alive:
                ranks = sorted(self.alive)
                self.exit(ranks[number % len(ranks)], (OK, OK, FAILED, KILLED)[number % 4])
            case "signal":
                self.signal((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[number % 3], (0.0, HUNG_S)[number // 3 % 2])
            case "request" if self.state is not State.NEW:
                self.request(at_once=number % 2 == 1, idle_s=(0.0, HUNG_S)[number // 2 % 2])
            case "restart" if self.state is not State.NEW:
                idle_s = (0.0, HUNG_S)[number % 2]
                self.deliver(RestartRequested(self.now, self.attempt, "saferunctl", idle_s=idle_s))
            case "checkpoint" if self.state is not State.NEW:
                self.deliver(CheckpointRequested(self.now, self.attempt, "saferunctl", signal.SIGUSR1))
            case "store" if self.state is not State.NEW:
                self.deliver(StoreUnavailable(self.now, self.attempt, "the store is gone", "look"))
            case "start fails" if any(isinstance(answer, STARTS) for answer in self.answers):
                self.fail_start(number % (self.ranks + 1))
            case "deadline" if self.supervisor.deadline is not None:
                self.expire()
            case "hang" if self.state not in BEFORE_RANKS:
                self.hang((HANG, SUSPICION)[number % 2])
            case "suspects":
                self.suspects = not self.suspects
            case "dump" if self.state is State.STOPPING and self.supervisor.deadline is not None:
                self.now = max(self.now, self.supervisor.deadline)
                self.deliver(CoreDumpSeen(self.now, self.attempt))
            case "tool" if self.state is State.STOPPING and self.supervisor.deadline is not None:
                self.now = max(self.now, self.supervisor.deadline)
                self.deliver(ToolAtWork(self.now, self.attempt, ((0,), (0, 1), ())[number % 3]))

    def _old(self, number: int) -> None:
        """Something of an attempt before, or after, comes in now."""
        attempt = self.attempt + (-1, 1, -2)[number % 3]
        events: tuple[Event, ...] = (
            RankExited(self.now, attempt, 0, FAILED),
            EvidenceCaptured(self.now, attempt, ()),
            CauseShown(self.now, attempt),
            OrphansGone(self.now, attempt, ()),
            Diagnosed(self.now, attempt, DIAGNOSIS),
            DeadlineExpired(self.now, attempt),
            StartFailed(self.now, attempt, "old", "old", 2),
            SignalReceived(self.now, attempt, signal.SIGTERM),
            StopRequested(self.now, attempt, "saferunctl"),
            HangSuspected(self.now, attempt, HANG),
            CoreDumpSeen(self.now, attempt),
            ToolAtWork(self.now, attempt, (0,)),
            StoreUnavailable(self.now, attempt, "old", "old"),
            HostsJoined(self.now, attempt, placement_of(self.ranks)),
            RanksStarted(self.now, attempt, ()),
        )
        self.deliver(events[number % len(events)])


def only(kind: type[A], actions: Iterable[Action]) -> A:
    """The one action of its kind."""
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def running(ranks: int = 2, max_restarts: int = 0, hang_policy: HangPolicy | None = None) -> World:
    world = World(ranks, max_restarts, hang_policy)
    world.launch()
    world.answer_until(State.RUNNING)
    return world


def fail_and_back_off(world: World) -> None:
    for rank in range(world.ranks):
        world.exit(rank, FAILED)
        while world.answers:
            world.answer()
