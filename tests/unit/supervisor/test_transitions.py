"""The table of transitions: what it has, and what becomes of an event that it has not."""

from __future__ import annotations

import contextlib
import json
import typing
from pathlib import Path

import pytest

from saferun.supervisor.events import (
    ChecksPassed,
    CoreDumpSeen,
    Diagnosed,
    Event,
    LaunchRequested,
    RankExited,
)
from saferun.supervisor.machine import IGNORED, TRANSITIONS, Limits, State, Supervisor, UnlistedError
from saferun.supervisor.policy import AttemptPolicy
from tests.transitions import assert_all_listed
from tests.unit.supervisor.fake_world import DIAGNOSIS, FAILED, LIMITS, running

EVENTS = set(typing.get_args(Event))


def test_the_table_has_a_row_for_every_state_and_knows_every_event() -> None:
    """A new event has to find its place in it."""
    assert set(TRANSITIONS) == set(IGNORED) == set(State)
    listed = {kind for row in TRANSITIONS.values() for kind in row}
    listed |= {kind for row in IGNORED.values() for kind in row}
    assert listed == EVENTS


@pytest.mark.parametrize("state", list(State))
def test_no_event_is_both_handled_and_ignored(state: State) -> None:
    assert not set(TRANSITIONS[state]) & set(IGNORED[state])


def test_a_state_that_has_a_deadline_says_what_happens_then() -> None:
    """All but those that last as long as others do."""
    expiring = {state for state, row in TRANSITIONS.items() if "DeadlineExpired" in {kind.__name__ for kind in row}}
    assert set(State) - expiring == {State.NEW, State.RUNNING, State.DONE}
    assert all({"DeadlineExpired", "LoopStalled"} <= {kind.__name__ for kind in TRANSITIONS[one]} for one in expiring)


def test_in_tests_an_event_that_the_table_lacks_is_an_error() -> None:
    """A wrong sequence would pass in silence."""
    world = running()
    with pytest.raises(UnlistedError, match="LaunchRequested in running"):
        world.supervisor.handle(LaunchRequested(world.now, 0))


def test_where_people_use_it_such_an_event_is_ignored_and_the_story_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No defect of this kind may cost a job."""
    monkeypatch.setattr(Supervisor, "is_strict", False)
    world = running()
    assert world.deliver(LaunchRequested(world.now, 0)) == []
    assert world.state is State.RUNNING
    (entry,) = world.supervisor.story.entries(0.0)[-1:]
    assert (entry["event"], entry["remark"]) == ({"name": "LaunchRequested"}, "unlisted")


def test_a_core_dump_does_not_keep_a_sweep_from_ending() -> None:
    """A rank that was given up may be dumped to a file system that does not answer, forever."""
    world = running(ranks=1)
    world.exit(0, FAILED)
    world.answers.clear()
    world.now += LIMITS.sweep_s
    world.deliver(CoreDumpSeen(world.now, 0))
    assert world.state is State.DIAGNOSING


# ---------------------------------------------------------------------------------------------------------------- story


def test_the_story_says_what_was_made_of_each_event() -> None:
    """In order, with the states before and after, whatever became of it."""
    supervisor = Supervisor(AttemptPolicy(), Limits())
    supervisor.handle(LaunchRequested(5.0, 0))
    supervisor.handle(ChecksPassed(6.0, 7))
    assert supervisor.story.entries(1000.0) == [
        {
            "time": 1005.0,
            "attempt": 0,
            "before": "new",
            "event": {"name": "LaunchRequested"},
            "actions": [{"name": "RunChecks"}],
            "after": "checking",
        },
        {
            "time": 1006.0,
            "attempt": 7,
            "before": "checking",
            "event": {"name": "ChecksPassed"},
            "actions": [],
            "after": "checking",
            "remark": "of another attempt",
        },
    ]


def test_the_story_keeps_the_last_events_and_bounds_every_text() -> None:
    """A launch may last for weeks, and a diagnosis may hold the output of a thousand ranks."""
    world = running(ranks=1)
    for number in range(500):
        world.now = number + 1000.0
        world.deliver(RankExited(world.now, 9, 0, FAILED))
    long = DIAGNOSIS._replace(headline="x" * 5000, abandoned=tuple(range(5000)))
    world.deliver(Diagnosed(2000.0, 9, long))
    entries = world.supervisor.story.entries(0.0)
    assert [entry["time"] for entry in entries] == [*map(float, range(1301, 1500)), 2000.0]
    diagnosis = entries[-1]["event"]["diagnosis"]
    assert (len(diagnosis["headline"]), len(diagnosis["abandoned"])) == (301, 16)


@pytest.mark.parametrize("remark", ["", "unlisted"])
def test_an_event_that_a_launch_of_a_test_has_ignored_is_found_in_its_files(tmp_path: Path, remark: str) -> None:
    """Of a job of several hosts each has a directory of its own below that of the run."""
    file = tmp_path / "saferun-runs" / "20260101" / "node1" / "events.jsonl"
    file.parent.mkdir(parents=True)
    rows = [{"event": "RankExited"}, {"event": "HostsDone", "remark": remark} if remark else {"event": "HostsDone"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "cut o')
    with pytest.raises(AssertionError, match="HostsDone") if remark else contextlib.nullcontext():
        assert_all_listed(tmp_path)
