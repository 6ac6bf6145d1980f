"""Whether the job hangs: the states of all hosts' ranks, merged on the leader. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from saferun.evidence.job_evidence import HangVerdict
from saferun.model import RANKS_HELD, RANKS_QUIET
from saferun.watchdog.job_verdicts import combine, seconds, verdict_from
from saferun.watchdog.verdicts import Repeat, Verdicts

# The effects of a capture on the ranks are over by then.
_SETTLE_S = 1.0
# A capture takes longer than a short timeout, and what is reported meanwhile would be another report of the same hang.
_LONGEST_CAPTURE_S = 60.0


class JobDetector:
    """No rank is judged alone, and no host either: one that waits looks like one that hangs.

    Args:
        timeout_s: how long nothing may move; a hang that goes on is captured again after so long, then twice that.
        on_hang: takes a hang of the whole job, and its number, counted from 1.
        on_recovery: takes how many seconds a hang lasted that is over.
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
        self._ranks_of: Mapping[str, Collection[int]] | None = None
        self._number = 0
        self._paused_until = 0.0

    def feed(
        self, states: Mapping[str, Mapping[str, Any]], now: float, ranks_of: Mapping[str, Collection[int]] | None = None
    ) -> None:
        """Take the states of the ranks, by task.

        Args:
            states: the last state of each task.
            now: monotonic seconds.
            ranks_of: the ranks that each of them may name; None: any.
        """
        self._ranks_of = ranks_of
        for task, state in states.items():
            known = self._states.get(task)
            if known is None or known[1] != state:
                self._states[task] = (now, state)
        self.tick(now)

    def captured(self, now: float) -> None:
        """A hang that was reported has been captured."""
        self._paused_until = now + _SETTLE_S
        self.deadline = self._paused_until

    def tick(self, now: float) -> None:
        """Report a hang, or that one is over."""
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
        if now < self._paused_until or any(state.get("s") == RANKS_HELD for _, state in self._states.values()):
            return  # nothing is judged while a rank is held in a debugger
        verdict = self._verdict(now)
        if verdict is None:
            for reported in self._verdicts.open:
                lasted_s = self._verdicts.close(reported.kind, now)
                if lasted_s is not None:
                    self._on_recovery(lasted_s)
            return
        if not self._verdicts.may_report(verdict, now):
            self.deadline = self.deadline or now + self._timeout_s / 4
            return
        self._verdicts.report(verdict, now)
        self._number += 1
        # Until it has been captured nothing else is reported; the bound is for a capture that never ends.
        self._paused_until = now + max(self._timeout_s, _LONGEST_CAPTURE_S)
        self.deadline = self._paused_until
        self._on_hang(verdict, self._number)

    def _verdict(self, now: float) -> HangVerdict | None:
        states = {
            task: {**state, "quiet_s": seconds(state.get("quiet_s")) + now - since}
            for task, (since, state) in self._states.items()
        }
        whole = combine(states, ranks_of=self._ranks_of)
        if whole is not None:
            return whole
        # A suspected hang of single ranks is reported, and not acted upon.
        for task, state in states.items():
            own = self._ranks_of.get(task, ()) if self._ranks_of is not None else None
            is_suspected = state.get("s") == RANKS_QUIET and not state.get("certain")
            verdict = verdict_from(state, own=own) if is_suspected else None
            if verdict is not None and verdict.ranks:
                return verdict
        return None

    def downgrade_to_suspected(self, verdict: HangVerdict, certain_after_s: float) -> None:
        """Treat a verdict just reported as suspected only, until nothing has moved for ``certain_after_s``."""
        self._verdicts.downgrade_to_suspected(verdict.kind, certain_after_s)

    def repeat(self, verdict: HangVerdict) -> Repeat:
        """How often a verdict of this kind has been reported, and when it is next."""
        return self._verdicts.repeat(verdict)
