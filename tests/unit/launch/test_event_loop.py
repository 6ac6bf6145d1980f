"""The loop: what is carried out first, what a deadline leads to, and what it goes on without."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.launch import event_loop
from saferun.launch.attempt_setup import AttemptSetup
from saferun.launch.event_loop import EventLoop
from saferun.launch.launch_context import HostAttempt, LaunchContext
from saferun.linux.helper import PartBase
from saferun.model import ExitStatus
from saferun.supervisor.actions import Action, Finish, NotifyDone, SignalRanks
from saferun.supervisor.events import DeadlineExpired, Event, LaunchRequested, LoopStalled, SignalReceived
from saferun.supervisor.machine import State


class Decisions:
    """A supervisor that answers each event with what is next in a list, and finishes in the end."""

    def __init__(self, *answers: list[Action]) -> None:
        self.state = State.RUNNING
        self.attempt = 0
        self.deadline: float | None = None
        self.heard: list[Event] = []
        self._answers = deque(answers)

    def handle(self, event: Event) -> list[Action]:
        self.heard.append(event)
        return self._answers.popleft() if self._answers else [Finish(0)]


class Console(PartBase):
    """Nothing to be written."""

    deadline: float | None = None

    def flush(self) -> None: ...

    def tick(self, now: float) -> None: ...


class Missing(Console):
    """A part whose module cannot be imported."""

    deadline = 0.0

    def tick(self, now: float) -> None:
        del now
        raise ImportError("saferun.never is not in memory")

    def close(self) -> None: ...


class Launch:
    """What a loop takes of a launch."""

    def __init__(self, supervisor: Decisions, on_wait: Callable[[Launch], None] = lambda _: None) -> None:
        self.supervisor = supervisor
        self.events: deque[Event] = deque([LaunchRequested(0.0, 0)])
        self.current = HostAttempt()
        self.recorded: list[Event] = []
        self.warned: list[str] = []
        self.waits = 0
        self.is_sealed = True
        self.watching: tuple[Any, ...] = ()
        self.ranks: Any = None
        self.wrapped: Any = None
        self.setup = AttemptSetup.__new__(AttemptSetup)
        self.setup.__dict__["_context"] = self
        self.log = self.poller = self.imports = self
        self._on_wait = on_wait

    @property
    def attempt(self) -> int:
        return self.supervisor.attempt

    def record(self, event: Event, _before: State, _after: State) -> None:
        self.recorded.append(event)

    def wait(self, _timeout_s: float | None) -> None:
        self.waits += 1
        self._on_wait(self)

    def post(self, event: Event) -> None:
        self.events.append(event)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def loop(self, *parts: Any) -> EventLoop:
        return EventLoop(cast("LaunchContext", self), cast("Any", Console()), parts, self.watching)


def test_the_ranks_of_a_job_that_is_stopped_have_the_signal_first() -> None:
    """Before anything is written, said or forked."""
    order: list[object] = []
    stop: list[Action] = [NotifyDone(0), SignalRanks(0, (0,), signal.SIGTERM), Finish(0)]
    launch = Launch(Decisions(stop))
    launch.events = deque([SignalReceived(0.0, 0, signal.SIGTERM)])
    launch.record = lambda event, _before, _after: order.append(type(event))  # type: ignore[method-assign]
    kinds: tuple[type, ...] = (NotifyDone, SignalRanks, Finish)
    actions = {kind: lambda action: order.append(type(action)) for kind in kinds}
    launch.loop().run(actions)
    assert order == [SignalRanks, SignalReceived, NotifyDone, Finish]


@pytest.mark.parametrize(
    ("late_s", "expected"), [(0.0, DeadlineExpired), (60.0, LoopStalled)], ids=["in time", "long stopped"]
)
def test_a_deadline_is_over_or_this_process_was_stopped(late_s: float, expected: type) -> None:
    """A process that was suspended has not given anybody the time that has passed."""
    supervisor = Decisions([])
    launch = Launch(supervisor)
    loop = launch.loop()
    supervisor.deadline = time.monotonic() - late_s
    loop.run({Finish: lambda _: None})
    assert [type(event) for event in supervisor.heard] == [LaunchRequested, expected]


@pytest.mark.parametrize(("awaited_s", "expected"), [(-1.0, DeadlineExpired), (60.0, LoopStalled)])
def test_orphans_that_were_suspended_before_the_deadline_have_that_time_again(awaited_s: float, expected: type) -> None:
    supervisor = Decisions([])
    supervisor.state = State.STOPPING
    launch = Launch(supervisor)
    launch.ranks = SimpleNamespace(orphans=SimpleNamespace(awaited_until=time.monotonic() + awaited_s))
    supervisor.deadline = time.monotonic()
    launch.loop().run({Finish: lambda _: None})
    (event,) = supervisor.heard[1:]
    assert isinstance(event, expected)
    if isinstance(event, LoopStalled):
        assert event.left_s == pytest.approx(awaited_s, abs=5.0)


def test_what_has_happened_comes_before_a_deadline() -> None:
    """An answer that came in the same moment is in time."""

    def answer(launch: Launch) -> None:
        launch.post(SignalReceived(0.0, 0, signal.SIGTERM))

    supervisor = Decisions([], [Finish(0)])
    supervisor.deadline = 0.0
    Launch(supervisor, answer).loop().run({Finish: lambda _: None})
    assert [type(event) for event in supervisor.heard] == [LaunchRequested, SignalReceived]


def test_an_order_to_stop_is_obeyed_before_anything_else_that_is_due() -> None:
    """Parts that are due, and a deadline that is over, wait for the next turn."""

    def stop(launch: Launch) -> None:
        launch.post(SignalReceived(0.0, 0, signal.SIGTERM))
        loop.is_interrupted = True

    launch = Launch(Decisions([], [Finish(0)]), stop)
    loop = launch.loop(Missing())
    loop.run({Finish: lambda _: None})
    assert (launch.waits, launch.warned) == (1, [])


def test_a_part_that_cannot_be_imported_ends_nothing_while_ranks_run() -> None:
    launch = Launch(Decisions([]), lambda launch: launch.post(LaunchRequested(0.0, 0)))
    assert launch.loop(Missing()).run({Finish: lambda _: None}) == Finish(0)
    assert launch.warned == ["saferun.never is not in memory: the launch goes on without it"]


def test_before_the_ranks_it_is_an_error_like_any_other() -> None:
    launch = Launch(Decisions([]))
    launch.is_sealed = False
    with pytest.raises(ImportError, match="never"):
        launch.loop(Missing()).run({})


class Failing(Console):
    """A part with a defect, in its tick or before."""

    def __init__(self, *, in_deadline: bool) -> None:
        self.calls = 0
        self._in_deadline = in_deadline

    @property
    def deadline(self) -> float | None:  # type: ignore[override]
        if self._in_deadline:
            self._fail()
        return 0.0

    def tick(self, now: float) -> None:
        del now
        self._fail()

    def _fail(self) -> None:
        self.calls += 1
        raise KeyError("rank 7")


def three_events(launch: Launch) -> None:
    if launch.waits < 3:
        launch.post(LaunchRequested(0.0, 0))
    else:
        launch.post(DeadlineExpired(0.0, 0))


@pytest.mark.parametrize("in_deadline", [False, True])
def test_a_part_that_only_watches_and_fails_is_left_alone(*, in_deadline: bool) -> None:
    """Whatever is wrong with it, the ranks run, and it is said once."""
    launch = Launch(Decisions([], [], []), three_events)
    part = Failing(in_deadline=in_deadline)
    launch.watching = (part,)
    launch.loop(part).run({Finish: lambda _: None})
    assert launch.waits == 3
    assert part.calls == 1
    assert launch.warned == ["Failing: KeyError: 'rank 7': the launch goes on without it"]


@pytest.mark.parametrize("in_deadline", [False, True])
def test_a_part_that_the_launch_needs_ends_it(*, in_deadline: bool) -> None:
    """Without its ranks there is no launch."""
    launch = Launch(Decisions([], [], []), three_events)
    with pytest.raises(KeyError):
        launch.loop(Failing(in_deadline=in_deadline)).run({Finish: lambda _: None})


def test_an_event_that_cannot_be_written_down_is_acted_upon() -> None:
    """The log ends there, with one line."""
    launch = Launch(Decisions([], [], []), three_events)

    def fail(event: Event, _before: State, _after: State) -> None:
        launch.recorded.append(event)
        raise RecursionError("too deep")

    launch.record = fail  # type: ignore[method-assign]
    launch.loop().run({Finish: lambda _: None})
    assert len(launch.supervisor.heard) == 4
    assert len(launch.recorded) == 1
    assert launch.warned == ["events.jsonl ends here: RecursionError: too deep"]


class Ended(Console):
    """A part that hears of the ends of children, and cannot deal with the first of them."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        del status
        self.heard.append(pid)
        if pid == 1:
            raise ImportError("saferun.never is not in memory")
        return True


def test_an_end_that_cannot_be_dealt_with_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have been reaped together, and no later call would hear of them: the job waited for ever."""
    monkeypatch.setattr(event_loop, "reap", lambda: [(pid, ExitStatus(3, None)) for pid in (1, 2, 3)])

    def wait(launch: Launch) -> None:
        launch.post(LaunchRequested(0.0, 0))
        loop.reap()

    launch, part = Launch(Decisions([]), wait), Ended()
    loop = launch.loop(part)
    assert loop.run({Finish: lambda _: None}) == Finish(0)
    assert part.heard == [1, 2, 3]
    assert launch.warned == ["saferun.never is not in memory: the launch goes on without it"]


class FailingParent(Failing):
    """A part with a defect that has two processes, and cannot deal with the end of the first one."""

    def __init__(self) -> None:
        super().__init__(in_deadline=False)
        self.processes = {1, 2}

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        del status
        self.processes.discard(pid)
        if pid == 1:
            raise KeyError(pid)
        return pid == 2


def test_a_part_that_is_left_alone_hears_which_of_its_processes_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the launch it killed what had got their numbers meanwhile: another process of the user's."""
    ended = [(1, ExitStatus(0, None))], [(2, ExitStatus(0, None)), (3, ExitStatus(0, None))]
    batches = iter(ended)
    monkeypatch.setattr(event_loop, "reap", lambda: next(batches))

    def wait(launch: Launch) -> None:
        three_events(launch)
        if launch.waits > 1:
            loop.reap()

    launch, part = Launch(Decisions([], [], []), wait), FailingParent()
    unknown = list[int]()
    monkeypatch.setattr(Console, "on_exit", lambda _self, pid, *_: unknown.append(pid))
    launch.watching = (part,)
    loop = launch.loop(part)
    loop.run({Finish: lambda _: None})
    assert part.calls == 1
    assert part.processes == set()
    assert unknown == [1, 3]
    assert launch.warned == ["FailingParent: KeyError: 'rank 7': the launch goes on without it"]
