"""The watch of an attempt's ranks, as the loop calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.hang_watch import HangWatch, JobHangWatch, _Ticks


class Watch:
    """A watch that is always due. ``fails``: whether its tick does."""

    deadline = 10.0

    def __init__(self, *, fails: bool) -> None:
        self.calls = 0
        self._fails = fails

    def tick(self, _now: float) -> None:
        self.calls += 1
        if self._fails:
            raise ValueError


def watching(kind: type[HangWatch], said: list[str], **watches: Watch) -> HangWatch:
    """The watch of an attempt with these, and what is said of their failures."""

    def succeeds(what: str, call: Any, *arguments: object) -> bool:
        try:
            call(*arguments)
        except ValueError:
            said.append(what)
            return False
        return True

    made = kind.__new__(kind)
    launch = SimpleNamespace(succeeds=succeeds, guarded=lambda _what, call, *arguments: call(*arguments))
    context: Any = SimpleNamespace(launch=launch)
    made.__dict__.update(_context=context, _ticks=_Ticks(context), _job_ticks=_Ticks(context))
    made.__dict__.update(_monitor=None, _watch_at=None, _slow=None)
    made.__dict__.update(_step_notes=None, _detector=None, _report_quiet_at=None)
    made.__dict__.update(_non_finite=SimpleNamespace(warn_once=lambda: None))
    made.__dict__.update(watches)
    return made


WATCHED = [(HangWatch, "_monitor"), (JobHangWatch, "_monitor"), (JobHangWatch, "_detector")]


@pytest.mark.parametrize(("kind", "name"), WATCHED)
def test_what_fails_is_not_due_again_at_once(kind: type[HangWatch], name: str) -> None:
    """The loop would take a whole processor for the rest of the job."""
    said: list[str] = []
    broken = Watch(fails=True)
    watch = watching(kind, said, **{name: broken})
    assert watch.deadline == 10.0
    watch.tick(10.0)
    assert watch.deadline == 11.0
    watch.tick(10.5)
    assert (broken.calls, len(said)) == (1, 1)
    watch.tick(11.0)
    assert (broken.calls, watch.deadline) == (2, 12.0)


def test_a_job_watch_that_fails_each_time_does_not_hold_up_the_watch_of_the_ranks() -> None:
    broken, sound = Watch(fails=True), Watch(fails=False)
    watch = watching(JobHangWatch, [], _detector=broken, _monitor=sound)
    for now in (10.0, 10.5, 11.0, 11.5):
        watch.tick(now)
    assert (broken.calls, sound.calls) == (2, 4)
