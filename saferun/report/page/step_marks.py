"""How far the ranks were: the steps that they reported, for the timeline. Pure.

Events of the hosts have some of them, and the report has the last one of each rank, with its metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from saferun.model import Value
from saferun.report.page.contents import IncidentPart
from saferun.report.page.page_model import Mark
from saferun.report.page.run_contents import EventLine
from saferun.text.bounded_json import shown

_MOST_MARKS = 12
_MOST_OF_A_RANK = 1000
_HIGHEST_STEP = 1 << 53
# As text/script_state.py writes it.
_LAST_STEP = re.compile(r"(step ([0-9]{1,16})(?: \(.*\))?)(?:, ([0-9]{1,9}) s before)?\Z")


class ReportedStep(Value):
    """A step of a rank. ``time``: in seconds since the epoch, by the corrected clock."""

    time: float
    number: int
    text: str


class LastStep(Value):
    """The last step of ranks. ``before_s``: how long before the end of a rank, or the incident, it was reported."""

    ranks: tuple[int, ...]
    number: int
    text: str
    before_s: float


def steps_in(event: EventLine, at: float, ahead_s: float) -> Iterator[tuple[int, ReportedStep]]:
    """The ranks of an event of steps, and their steps.

    Args:
        event: the event.
        at: its time, by the corrected clock.
        ahead_s: how far the host's clock is ahead.
    """
    if len(event.ranks) == len(event.steps) == len(event.times):
        for rank, number, time in zip(event.ranks, event.steps, event.times, strict=True):
            if 0 <= number < _HIGHEST_STEP:
                yield rank, ReportedStep(min(time - ahead_s, at), number, f"step {number}")


def last_steps_of(incident: IncidentPart) -> Iterator[LastStep]:
    """The last steps that the report has."""
    for part in incident.last_steps:
        match = _LAST_STEP.match(part.text)
        if match is not None and int(match[2]) < _HIGHEST_STEP:
            yield LastStep(part.ranks, int(match[2]), shown(match[1], 200), float(match[3] or 0))


def add_step(steps: list[ReportedStep], step: ReportedStep) -> None:
    """Add a later step; one that is known already gets the text of this one."""
    if steps and steps[-1].number == step.number:
        steps[-1] = steps[-1]._replace(text=step.text)
    elif not steps or step.time >= steps[-1].time:
        if len(steps) >= _MOST_OF_A_RANK:
            del steps[::2]
        steps.append(step)


def step_marks(steps: Sequence[ReportedStep], begin: float, end: float, whose: str) -> tuple[Mark, ...]:
    """Some of the steps of a rank, spread over the time, and always the last one.

    Args:
        steps: in the order of time.
        begin: where the timeline begins.
        end: where it ends.
        whose: the rank, if it stands for others; else empty.
    """
    span = max(end - begin, 1e-3) / _MOST_MARKS
    last_in = {int((step.time - begin) / span): step for step in steps if begin <= step.time <= end}
    return tuple(Mark("step", step.time, f"{step.text}{whose}") for step in last_in.values())


def all_step_marks(steps: Sequence[ReportedStep]) -> tuple[Mark, ...]:
    """All steps of a rank that are known."""
    return tuple(Mark("step", step.time, step.text) for step in steps)


def last_steps_text(numbers: Sequence[int]) -> str:
    """``step 99``; ``steps 98-99``; empty where none is known. ``numbers``: the last one of each rank, -1 for none."""
    known = [number for number in numbers if number >= 0]
    if not known:
        return ""
    low, high = min(known), max(known)
    return f"step {high}" if low == high else f"steps {low}-{high}"
