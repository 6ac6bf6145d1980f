"""Whether the job hangs: what the tasks of all hosts say of their ranks, put together on the host that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from saferun.evidence import HangVerdict
from saferun.watchdog.job import combine, verdict_from
from saferun.watchdog.verdicts import AT_MOST, Verdicts, pause_s

# What a capture stirs up settles by then.
_SETTLE_S = 1.0


class JobWatch:
    """No rank is judged alone, and no host either: one that waits looks like one that hangs.

    Args:
        timeout_s: how long nothing may move; a hang that goes on is captured again after so long, then twice that.
        on_hang: told of a hang of the whole job, and which one it is, counted from 1.
        on_recovery: told how many seconds one has lasted that is over.
    """

    def __init__(
        self, timeout_s: float, *, on_hang: Callable[[HangVerdict, int], None], on_recovery: Callable[[float], None]
    ) -> None:
        self.deadline: float | None = None
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._on_recovery = on_recovery
        self._verdicts = Verdicts(timeout_s)
        self._states: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._told = 0
        self._looks_from = 0.0

    def feed(self, states: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """How the ranks do, by task. ``now``: monotonic seconds."""
        for task, state in states.items():
            known = self._states.get(task)
            if known is None or known[1] != state:
                self._states[task] = (now, state)
        self.tick(now)

    def captured(self, now: float) -> None:
        """A hang that was told has been captured."""
        self._looks_from = now + _SETTLE_S
        self.deadline = self._looks_from

    def tick(self, now: float) -> None:
        """Conclude."""
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
        if now < self._looks_from:
            return
        verdict = self._verdict(now)
        if verdict is None:
            for told in self._verdicts.open:
                lasted_s = self._verdicts.close(told.kind, now)
                if lasted_s is not None:
                    self._on_recovery(lasted_s)
            return
        if not self._verdicts.may_tell(verdict, now):
            self.deadline = self.deadline or now + self._timeout_s / 4
            return
        self._verdicts.tell(verdict, now)
        self._told += 1
        # Until it has been captured nothing more is told; the bound is for a capture that never ends.
        self._looks_from = now + self._timeout_s
        self.deadline = self._looks_from
        self._on_hang(verdict, self._told)

    def _verdict(self, now: float) -> HangVerdict | None:
        states = {
            i: {**state, "quiet_s": _number(state.get("quiet_s")) + now - since}
            for i, (since, state) in enumerate(self._states.values())
        }
        whole = combine(states)
        if whole is not None:
            return whole
        # What stands out by itself is told, and not acted upon.
        for state in states.values():
            verdict = verdict_from(state) if state.get("s") == "quiet" and not state.get("certain") else None
            if verdict is not None and verdict.ranks and not verdict.certain:
                return verdict
        return None

    def next_capture_s(self) -> float | None:
        """How long a hang must go on to be captured again; None: it has been captured often enough."""
        return pause_s(self._timeout_s, max(self._told, 1)) if self._told < AT_MOST else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0  # noqa: PLR0124 - NaN
