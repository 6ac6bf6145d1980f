"""How far the ranks are, for the timeline of the page: which of the steps that they report become events. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.model import JsonObject
from saferun.text.script_state import ScriptState

_AT_LEAST_S = 5.0
# Of the time since the start: a week has some two hundred notes.
_GROWTH = 0.05
_MOST_RANKS = 1024


class StepNotes:
    """Of one attempt on this host.

    Args:
        now: when it began, in monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._next_at = now
        self._noted: dict[int, int] = {}

    def take(self, states: Mapping[int, ScriptState], now: float, *, at_once: bool = False) -> JsonObject:
        """What is to be noted now: ``ranks``, their ``steps``, and ``times`` in monotonic seconds; empty: nothing.

        Args:
            states: what the ranks have reported last.
            now: in monotonic seconds.
            at_once: whether this is a moment to be noted, such as a failure, and not one of many.
        """
        if not at_once and now < self._next_at:
            return {}
        new = {rank: state for rank, state in states.items() if state.step >= 0 and self._noted.get(rank) != state.step}
        if not new:
            return {}
        self._next_at = now + max(_AT_LEAST_S, _GROWTH * (now - self._began_at))
        rows = sorted(new.items())[:_MOST_RANKS]
        self._noted.update((rank, state.step) for rank, state in rows)
        return {
            "ranks": [rank for rank, _ in rows],
            "steps": [state.step for _, state in rows],
            "times": [state.step_at for _, state in rows],
        }
