"""The watch of an attempt's ranks, as the loop calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.hang_watch import HangWatch, JobHangWatch, _Ticks


class Broken:
    """A watch that fails before it has noted that its work is done."""

    deadline = 10.0

    def __init__(self) -> None:
        self.calls = 0

    def tick(self, _now: float) -> None:
        self.calls += 1
        raise ValueError


WATCHED = [(HangWatch, "_watch"), (JobHangWatch, "_watch"), (JobHangWatch, "_detector")]


@pytest.mark.parametrize(("kind", "name"), WATCHED)
def test_what_fails_is_not_due_again_at_once(kind: type[HangWatch], name: str) -> None:
    """The loop would take a whole processor for the rest of the job."""
    said: list[str] = []

    def succeeds(what: str, call: Any, *arguments: object) -> bool:
        try:
            call(*arguments)
        except ValueError:
            said.append(what)
            return False
        return True

    broken, watch = Broken(), kind.__new__(kind)
    launch = SimpleNamespace(succeeds=succeeds, guarded=lambda _what, call, *arguments: call(*arguments))
    context: Any = SimpleNamespace(launch=launch)
    watch.__dict__.update(_context=context, _ticks=_Ticks(context), _watch=None, _watch_at=None, _slow=None)
    watch.__dict__.update(_warn_of_numbers=lambda: None, _step_notes=None, _detector=None, _report_quiet_at=None)
    watch.__dict__[name] = broken
    assert watch.deadline == 10.0
    watch.tick(10.0)
    assert watch.deadline == 11.0
    watch.tick(10.5)
    assert (broken.calls, len(said)) == (1, 1)
    watch.tick(11.0)
    assert (broken.calls, watch.deadline) == (2, 12.0)
