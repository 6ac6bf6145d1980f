"""How far the ranks are, for the timeline of the page: some of the steps that they report become events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from saferun.launch.attempt_record import InvestigationContext
from saferun.model import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.text.script_state import ScriptState

_AT_LEAST_S = 5.0
# Of the time since the start: a week has some two hundred notes.
_GROWTH = 0.05
_MOST_RANKS = 1024


class StepNotes:
    """Of one attempt on this host.

    Args:
        context: of the investigation.
        now: when it began, in monotonic seconds.
    """

    def __init__(self, context: InvestigationContext, now: float) -> None:
        self._context = context
        self._began_at = now
        self._next_at = now
        self._noted: dict[int, int] = {}
        self._is_broken = False

    def note(self, now: float, *, at_once: bool = False) -> None:
        """Write an event of how far the ranks are, if it is time for one, by what has been read of them last.

        A failure costs the notes of this attempt, and one line.

        Args:
            now: in monotonic seconds.
            at_once: whether this is a moment to be noted, such as a failure, and not one of many.
        """
        if not self._is_broken:
            launch = self._context.launch
            self._is_broken = not launch.succeeds("note the steps", partial(self._write, at_once=at_once), now)

    def _write(self, now: float, *, at_once: bool) -> None:
        found = self.due(self._context.hook.states, now, at_once=at_once)
        if found:
            ahead_s = time.time() - time.monotonic()
            found["times"] = [round(at + ahead_s, 3) for at in found["times"]]
            at = {"time": ahead_s + now, "monotonic_s": now, "attempt": self._context.launch.attempt}
            self._context.launch.run_dir.write_event({"event": "StepsReported", **at, **found})

    def due(self, states: Mapping[int, ScriptState], now: float, *, at_once: bool = False) -> JsonObject:
        """What is to be noted now: ``ranks``, their ``steps``, and ``times`` in monotonic seconds; empty: nothing.

        Args:
            states: what the ranks have reported last.
            now: in monotonic seconds.
            at_once: as in ``note``.
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
