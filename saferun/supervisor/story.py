"""The story of a launch: the last events, what the supervisor made of them, and the states between. Pure.

Noting is one tuple and happens at every event; texts are made only when the story is wanted: when something has failed.
"""

from __future__ import annotations

from collections import deque

from saferun.supervisor.actions import ReportDecision, ReportFailure, ReportHang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from saferun.model import JsonObject
    from saferun.supervisor.actions import Action
    from saferun.supervisor.events import Event
    from saferun.supervisor.launch_state import State

_ENTRIES = 200
_LONGEST_TEXT = 300
_MOST_ITEMS = 16
_DEEPEST = 3
# Actions after which it is worth to be read.
_WRONG = frozenset({ReportDecision, ReportFailure, ReportHang})


class Story:
    """The last 200 events of a launch, oldest first. ``is_wanted``: something has gone wrong since it was written."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._entries: deque[tuple[State, Event, Sequence[Action], State, str]] = deque(maxlen=_ENTRIES)

    def note(self, before: State, event: Event, actions: Sequence[Action], after: State, remark: str) -> None:
        """Keep one event. ``remark``: why nothing followed from it; empty where something could."""
        self._entries.append((before, event, actions, after, remark))
        self.is_wanted = self.is_wanted or any(type(action) in _WRONG for action in actions)

    def entries(self, clock_s: float) -> list[JsonObject]:
        """What is written to story.jsonl, one object an event; every text is bounded.

        Args:
            clock_s: seconds from the monotonic clock to the time of day.
        """
        return [
            {
                "time": event.at + clock_s,
                "attempt": event.attempt,
                "before": before.value,
                "event": _named(event, without=("at", "attempt")),
                "actions": [_named(action, without=("attempt",)) for action in actions],
                "after": after.value,
                **({"remark": remark} if remark else {}),
            }
            for before, event, actions, after, remark in self._entries
        ]


def _named(value: Event | Action, without: tuple[str, ...]) -> JsonObject:
    fields = value._asdict()
    shown = {name: _brief(item, _DEEPEST) for name, item in fields.items() if name not in without}
    return {"name": type(value).__name__, **shown}


def _brief(value: object, depth: int) -> object:
    """A value as JSON has it, without what makes it long."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple) and depth:
        items = [_brief(item, depth - 1) for item in value[:_MOST_ITEMS]]
        fields = getattr(value, "_fields", None)
        return items if fields is None else dict(zip(fields, items, strict=False))
    text = value if isinstance(value, str) else type(value).__name__
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
