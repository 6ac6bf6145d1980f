"""The watch of an attempt's ranks, as the loop calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.hang_watch import _RUN_STATE, HangWatch, JobHangWatch, _Ticks
from saferun.linux.poller import Poller
from saferun.model import RANKS_QUIET
from saferun.supervisor.machine import State
from saferun.watchdog.monitor import RankMonitor, WatchedRank
from saferun.watchdog.samples import ProcessSample, RankSample


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


def watch_of_rank_in_exec(
    kind: type[HangWatch], monkeypatch: pytest.MonkeyPatch
) -> tuple[HangWatch, RankMonitor, SimpleNamespace, list[Any]]:
    """The watch of a rank in an uninterruptible sleep, its monitor, the state of the launch, and what is reported."""
    reported: list[Any] = []
    supervisor = SimpleNamespace(state=State.STARTING)
    watch = watching(kind, [])
    watch.__dict__.update(_holders=set(), _number=0)
    launch: Any = watch._context.launch
    launch.terminals, launch.supervisor = None, supervisor
    reports = SimpleNamespace(
        broadcast_hang=lambda verdict, _number: reported.append(verdict),
        set_state=lambda state: reported.append(state["s"]),
    )
    launch.job = SimpleNamespace(reports=reports)
    monitor = watch._monitor = RankMonitor(
        300.0, Poller(), on_verdict=watch._take_verdict, on_recovery=watch._take_recovery, is_held=watch._is_held
    )
    process = ProcessSample(57, 1, 1.0, False, "python", "D", 0, 0, 5, 0, 0, 0, 0, 0, 0)
    monkeypatch.setattr(monitor, "_read_ranks", lambda _now: [RankSample(0, 0, process, (), False, 0, 0, None)])
    monitor.rank_found(WatchedRank(0, 0, 57, int, "", ""), 0.0)
    return watch, monitor, supervisor, reported


def test_a_rank_whose_exec_takes_long_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor ignores a hang while ranks are being started: nothing would resume the watch after a verdict."""
    watch, monitor, supervisor, reported = watch_of_rank_in_exec(HangWatch, monkeypatch)
    for now in range(0, 200, 5):
        watch.tick(float(now))
    assert (reported, monitor.idle_s(195.0)) == ([], 0.0)
    assert monitor.deadline is not None
    supervisor.state = State.RUNNING
    for now in range(200, 300, 5):
        watch.tick(float(now))
    assert [verdict.kind for verdict in reported] == ["uninterruptible"]


def test_a_rank_whose_exec_takes_long_is_reported_to_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of other hosts wait for it: those hosts capture them."""
    watch, monitor, _, reported = watch_of_rank_in_exec(JobHangWatch, monkeypatch)
    watch.__dict__.update(_state=_RUN_STATE)
    for now in range(0, 200, 5):
        watch.tick(float(now))
    assert RANKS_QUIET in reported
    assert monitor.deadline is not None
