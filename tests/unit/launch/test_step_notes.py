"""Which of the steps that ranks report become events."""

from __future__ import annotations

from unittest.mock import Mock

from saferun.launch.step_notes import StepNotes
from saferun.text.script_state import ScriptState


def at(step: int, when: float = 1.0) -> ScriptState:
    return ScriptState("m", step, when)


def test_what_has_changed_is_noted_rank_by_rank() -> None:
    notes = StepNotes(Mock(), 100.0)
    assert notes.due({0: at(3, 99.0), 1: at(-1)}, 100.0) == {"ranks": [0], "steps": [3], "times": [99.0]}
    assert notes.due({0: at(3), 1: at(0, 111.0)}, 112.0) == {"ranks": [1], "steps": [0], "times": [111.0]}
    assert notes.due({0: at(3), 1: at(0)}, 130.0) == {}


def test_at_a_failure_or_a_hang_it_is_noted_at_once() -> None:
    notes = StepNotes(Mock(), 100.0)
    assert notes.due({0: at(3)}, 100.0)
    assert notes.due({0: at(4)}, 100.1) == {}
    assert notes.due({0: at(4)}, 100.1, at_once=True)["steps"] == [4]


def test_a_week_of_steps_is_some_two_hundred_notes() -> None:
    """The file of events is on a disk that others use, too."""
    notes = StepNotes(Mock(), 0.0)
    week = range(0, 7 * 86400, 5)
    assert 100 < sum(bool(notes.due({0: at(second)}, float(second))) for second in week) < 250
