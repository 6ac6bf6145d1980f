"""The event loop, the only one: carries out the supervisor's actions and feeds what happens back as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from saferun.errors import suppress
from saferun.launch.launch_context import LaunchContext
from saferun.linux.children import reap
from saferun.linux.procfs import is_core_dumping
from saferun.supervisor import events
from saferun.supervisor.actions import Finish, SignalRanks
from saferun.supervisor.machine import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.launch.console_part import ConsolePart
    from saferun.linux.part import Part
    from saferun.model import ExitStatus

# The ranks have the signal before anything else is done about these.
_ENDING = (events.SignalReceived, events.StopRequested, events.JobAborted)
# No busy machine is this late: who wakes up so long after a deadline was stopped, suspended or held up.
_STALL_S = 1.0
# The loop pauses for so long where a module is missing.
_MISSING_S = 0.02


class EventLoop:
    """Hands events to the supervisor, carries out what it decides, and waits for the next thing to happen.

    Args:
        context: the launch.
        console: where lines go.
        parts: what lives beside the loop, in the order in which it is woken and asked whose child has ended.
        watching: those of them that watch, capture and report: one that fails is not woken any more.
    """

    def __init__(
        self, context: LaunchContext, console: ConsolePart, parts: tuple[Part, ...], watching: tuple[Part, ...] = ()
    ) -> None:
        self.parts = parts
        self._watching = frozenset(map(id, watching))
        self._failed: set[int] = set()  # of those
        self._is_recording = True
        self.is_interrupted = False  # a signal came that is obeyed before all else that is ready
        self._context = context
        self._supervisor = context.supervisor
        self._console = console
        self._alive_at = 0.0  # the last moment before the deadline at which this loop is known to have run
        self._finish: Finish | None = None

    def add_watching(self, part: Part) -> None:
        """One more part that lives beside the loop, and is left alone if it fails."""
        self.parts = (*self.parts, part)
        self._watching |= {id(part)}

    def run(self, actions: Mapping[type, Callable[[Any], object]]) -> Finish:
        """Run until the supervisor finishes the launch. ``actions``: what carries out each kind of action."""
        while True:
            self._handle_events(actions)
            # Before the end too: the user need not wait for what other hosts still have to report.
            self._console.flush()
            if self._finish is not None:
                return self._finish
            self._wait()

    def _handle_events(self, actions: Mapping[type, Callable[[Any], object]]) -> None:
        while self._context.events and self._finish is None:
            event = self._context.events.popleft()
            before = self._supervisor.state
            decided = self._supervisor.handle(event)
            if isinstance(event, _ENDING):
                # The ranks of a job that is stopped have the signal before anything else is done about it.
                for action in decided:
                    if isinstance(action, SignalRanks):
                        self._call(actions[SignalRanks], action)
                decided = [action for action in decided if not isinstance(action, SignalRanks)]
            self._record(event, before)
            for action in decided:
                self._call(actions[type(action)], action)
                if isinstance(action, Finish):
                    self._finish = action

    def _wait(self) -> None:
        """Wait for the next thing to happen and take it in."""
        now = time.monotonic()
        deadlines = [self._supervisor.deadline, self._console.deadline, *self._deadlines()]
        due = min((deadline for deadline in deadlines if deadline is not None), default=None)
        deadline = self._supervisor.deadline
        alive_at = now if deadline is None or now < deadline else self._alive_at
        self._call(self._context.poller.wait, None if due is None else max(due - now, 0.0))
        if self.is_interrupted:
            self.is_interrupted = False
            self._alive_at = alive_at
            return
        now = time.monotonic()
        self._console.tick(now)
        self._tick(now)
        self._check_deadline(now, alive_at)

    # Each time that anything happens, all parts are asked: without a call around each.
    def _deadlines(self) -> list[float | None]:
        found = []
        for part in self.parts:
            if id(part) not in self._failed:
                try:
                    found.append(part.deadline)
                except Exception as error:
                    if not self._disable_if_watching(part, error):
                        raise
        return found

    def _tick(self, now: float) -> None:
        for part in self.parts:
            if id(part) not in self._failed:
                try:
                    part.tick(now)
                except ImportError as error:
                    if not self._tolerates(error):
                        raise
                except Exception as error:
                    if not self._disable_if_watching(part, error):
                        raise

    @property
    def pids(self) -> set[int]:
        """The processes of all parts."""
        pids = set[int]()
        for part in self.parts:
            with suppress(Exception):  # what is broken has been reported
                pids |= part.pids
        return pids

    def _of_part(self, part: Part, call: Callable[[Part], Any]) -> Any:  # noqa: ANN401 - of any call
        """What a call of a part returns, also of one that is left alone; None if it fails, and is left alone then."""
        try:
            return call(part)
        except Exception as error:
            if id(part) not in self._failed and not self._disable_if_watching(part, error):
                raise
            return None

    def _disable_if_watching(self, part: Part, error: Exception) -> bool:
        """Call a part that has failed no more, if the launch can do without it. Returns whether it can.

        Its processes are reaped, and it is closed at the end.
        """
        if id(part) not in self._watching or isinstance(error, ImportError):
            return False
        self._failed.add(id(part))
        name = type(part).__name__
        self._context.warn(f"{name}: {type(error).__name__}: {error}: the launch goes on without it")
        return True

    def _record(self, event: events.Event, before: State) -> None:
        """Write an event to the launch's own log, which ends nothing."""
        try:
            if self._is_recording:
                self._context.log.record(event, before, self._supervisor.state)
        except Exception as error:
            self._is_recording = False
            self._context.warn(f"events.jsonl ends here: {type(error).__name__}: {error}")

    def _check_deadline(self, now: float, alive_at: float) -> None:
        """Post that the supervisor's deadline is over, if it is. ``alive_at``: when this loop ran last before it."""
        deadline, attempt = self._supervisor.deadline, self._context.attempt
        is_over = deadline is not None and deadline <= now
        if is_over and self._context.events:
            self._alive_at = alive_at  # what has happened comes first
            return
        self._alive_at = now
        if deadline is None or not is_over:
            return
        is_stopping = self._supervisor.state is State.STOPPING
        if is_stopping and self._is_core_dumping():
            self._context.post(events.CoreDumpSeen(now, attempt))
        elif is_stopping and (tools := self._tools_at_work()):
            self._context.post(events.ToolAtWork(now, attempt, tools))
        elif now - deadline > _STALL_S and alive_at < deadline:
            self._context.post(events.LoopStalled(now, attempt, deadline - alive_at))
        elif is_stopping and (awaited_until := self._context.ranks.orphans.awaited_until) > now:
            # It was stopped before the deadline, and what the ranks left behind has that time again.
            self._context.post(events.LoopStalled(now, attempt, awaited_until - now))
        else:
            self._context.setup.post_expired(now)

    def _is_core_dumping(self) -> bool:
        return any(is_core_dumping(rank.pid) for rank in self._context.current.by_pid.values())

    def _tools_at_work(self) -> tuple[int, ...]:
        if self._context.wrapped is None:
            return ()
        return self._context.guarded("see whether tools are at work", self._context.wrapped.tools_at_work) or ()

    def reap(self) -> None:
        """Take in which children have ended. One that no part knows is the console's, or was a rank's orphan.

        Parts that are left alone are asked as well: at the end they kill what they take for their processes.
        """
        failure: Exception | None = None
        for pid, status in reap():
            # It has been reaped: no later call would hear of it.
            try:
                if not any(self._of_part(part, partial(_on_exit, pid, status)) for part in self.parts):
                    self._console.on_exit(pid)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _call(self, call: Callable[..., object], *arguments: object) -> None:
        """Call; no module that is missing may end a launch whose ranks run."""
        try:
            call(*arguments)
        except ImportError as error:
            if not self._tolerates(error):
                raise

    def _tolerates(self, error: ImportError) -> bool:
        """Whether the launch goes on without a module that is missing; if so, that is said in one line."""
        if not self._context.imports.is_sealed:
            return False
        self._context.warn(f"{error}: the launch goes on without it")
        # What asks for it again at once shall not take a whole processor.
        time.sleep(_MISSING_S)
        return True


def _on_exit(pid: int, status: ExitStatus, part: Part) -> bool:
    return part.on_exit(pid, status)
