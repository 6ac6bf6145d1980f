"""A job without its stores: it goes on while the ranks of each host make progress."""

from __future__ import annotations

import time
from typing import Any

import pytest

from saferun.cluster import storeless_job as storeless_job_module
from saferun.cluster.coordinator_client import KILLED_HINT
from saferun.cluster.storeless_job import StorelessJob
from saferun.linux.poller import Poller
from saferun.supervisor.actions import JoinHosts
from saferun.supervisor.events import Event, JobLost
from tests.unit.cluster.listening_job import JOINED, Listening
from tests.unit.cluster.test_silent_hosts import Ranks

LOST = JobLost(1000.0, 0, "the coordinator of node1 ended (killed by SIGKILL)", "see who", "store_lost")
TIMEOUT_S = 10.0


class World:
    """One host's part of such a job."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, started_by: float = 2000.0, hang_timeout_s: float = 60.0
    ) -> None:
        monkeypatch.setattr(storeless_job_module, "ProgressWatch", Ranks)
        self.posted: list[Event] = []
        self.said: list[str] = []
        self.blamed: list[str] = []
        self.noted: list[int] = []
        self.running: list[Any] = [object()]
        self.job = StorelessJob(
            LOST,
            lambda: self.running,
            Poller(),
            started_by=started_by,
            host_timeout_s=TIMEOUT_S,
            hang_timeout_s=hang_timeout_s,
            post=self.posted.append,
            note=lambda: self.noted.append(1),
            warn=self.said.append,
            on_lost=lambda: self.blamed.append("the coordinator"),
        )

    def tick(self, now: float, **seen: float) -> None:
        """The ranks are looked at."""
        watch: Any = self.job._watch
        watch.seen = watch.seen._replace(**seen)
        if watch.deadline is not None:
            watch.deadline = now
        self.job.tick(now)

    @property
    def lost(self) -> list[JobLost]:
        """What was posted."""
        return [event for event in self.posted if isinstance(event, JobLost)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_while_ranks_move_the_job_goes_on_and_says_so_once(world: World) -> None:
    for second in range(1, 40):
        world.tick(1000.0 + second, watched_s=float(second))
    (line,) = world.said
    assert line.startswith(f"{LOST.what}, and with it the job's store; ")
    assert "the job goes on" in line
    assert (world.noted, world.posted) == ([1], [])


def test_ranks_that_do_not_move_have_needed_it(world: World) -> None:
    """Soon after the start they may have yet to meet, and look for their store for long."""
    world.tick(1004.0, watched_s=4.0, still_s=4.0, quiet_s=4.0)
    assert world.posted == []
    world.tick(1006.0, watched_s=6.0, still_s=6.0, quiet_s=6.0)
    assert world.lost == [LOST._replace(at=world.lost[0].at)]
    assert world.blamed == ["the coordinator"]
    assert world.said == []
    world.job.conclude(False)
    assert len(world.posted) == 1


def quiet_for(seconds: float) -> dict[str, float]:
    return {"watched_s": seconds, "still_s": seconds, "quiet_s": seconds}


def test_ranks_that_have_met_may_show_nothing_for_as_long_as_before_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write a checkpoint, or wait for a rank of another host that does: the store is no reason to end them."""
    world = World(monkeypatch, started_by=900.0)
    for second in range(1, 60):
        world.tick(1000.0 + second, **quiet_for(second))
    (line,) = world.said
    assert "need it for new process groups only, so the job goes on" in line
    assert (world.noted, world.posted) == ([1], [])
    world.tick(1060.0, **quiet_for(0.0))
    world.tick(1119.0, **quiet_for(59.0))
    assert world.posted == []
    world.tick(1121.0, **quiet_for(61.0))
    assert len(world.lost) == 1
    assert world.blamed == ["the coordinator"]


def test_where_hangs_are_not_checked_ranks_that_have_met_are_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """--hang-timeout 0. What needs the store gets an error, and ends by itself."""
    world = World(monkeypatch, started_by=900.0, hang_timeout_s=0.0)
    for second in (10.0, 1000.0, 100_000.0):
        world.tick(1000.0 + second, **quiet_for(second))
    assert (len(world.said), world.posted) == (1, [])


def test_what_ends_the_attempt_later_has_its_own_reason(world: World) -> None:
    """A rank has failed, say: the coordinator is not why."""
    world.tick(1001.0, watched_s=1.0)
    world.job.conclude(False)
    (lost,) = world.lost
    assert (lost.what, lost.hint, lost.class_name) == ("", "", "store_lost")
    assert world.blamed == []


def test_ranks_that_have_all_ended_well_are_the_end_of_it(world: World) -> None:
    """There is nobody to be waited for, and no other attempt."""
    world.job.conclude(True)
    (lost,) = world.lost
    assert (lost.what, lost.class_name) == (LOST.what, "")


def test_after_the_attempt_nothing_is_posted(world: World) -> None:
    """It would end the next one."""
    world.job.end()
    world.job.conclude(False)
    world.running = []
    world.tick(1010.0)
    assert world.posted == []


def test_where_nothing_can_be_made_of_the_ranks_the_job_goes_on(listening: Listening) -> None:
    """A mistake in what only watches ends no launch."""
    listening.ranks = (object(),)
    listening.join()
    listening.hear(op="store_lost", attempt=0, why="ended", text="the coordinator of node0 ended", again=True)
    listening.job.tick(time.monotonic() + 1.0)
    (line,) = listening.said
    assert line.startswith("saferun: warning: cannot judge whether the ranks make progress: AttributeError: ")
    assert listening.events == []
    assert listening.job.deadline is None
    listening.job.abort_attempt("failure", "rank 2 has failed")
    assert [event.class_name for event in listening.events if isinstance(event, JobLost)] == ["store_lost"]


@pytest.fixture
def training(listening: Listening) -> Listening:
    """The second host, whose ranks run."""
    listening.ranks = (object(),)
    listening.job.join(JoinHosts(0))
    listening.hear(**{**JOINED, "host": 1, "leader": False, "base_rank": 2, "label": "node1", "peers": []})
    return listening


def lose_coordinator(listening: Listening) -> None:
    listening.job._on_channel_lost("the coordinator of node1 ended (killed by SIGKILL)", KILLED_HINT, is_own=True)


def lose_store(listening: Listening) -> None:
    listening.hear(op="store_lost", attempt=0, why="ended", text="the coordinator of node0 ended", again=True)


def test_a_host_that_has_no_coordinator_any_more_trains_on(
    training: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successors were killed as well, or the file system of the Python environment does not answer."""
    monkeypatch.setattr(storeless_job_module, "ProgressWatch", Ranks)
    answers: list[int] = []
    monkeypatch.setattr(training.channel, "answer_end", lambda: answers.append(1))
    lose_coordinator(training)
    assert (training.events, answers) == ([], [1])
    watch: Any = training.job.storeless_job and training.job.storeless_job._watch
    watch.seen = watch.seen._replace(watched_s=1.0)
    training.job.tick(time.monotonic() + 1.0)
    (line,) = training.said
    assert "none takes its place; the job goes on, but this host and the others no longer hear of each other" in line
    training.job.reports.set_state({"s": "done"})
    (lost,) = training.events
    assert isinstance(lost, JobLost)
    assert (lost.class_name, bool(lost.what)) == ("", True)


def test_a_task_trains_on_where_the_first_one_of_its_host_is_done(training: Listening) -> None:
    """With one saferun per rank: the ranks of the first have ended well, and without the store it waits for no host."""
    training.channel.is_head = False
    lose_store(training)
    assert training.job.storeless_job is not None
    training.job._on_channel_lost("saferun of local rank 0 on this host is gone", "look at its last messages")
    assert training.events == []
    training.job.reports.set_state({"s": "done"})
    (lost,) = training.events
    assert isinstance(lost, JobLost)
    assert lost.what == "the coordinator of node0 ended"


@pytest.mark.parametrize("lose", [lose_coordinator, lose_store])
@pytest.mark.parametrize("is_own", [False, True])
def test_an_attempt_that_is_ending_goes_on_without_no_store(training: Listening, lose: Any, *, is_own: bool) -> None:
    """No decision can come, for which this host would wait for minutes."""
    if is_own:
        training.job.abort_attempt("failure", "rank 2 died")
    else:
        message = {"kind": "abort", "host": 0, "task": 0, "label": "node0", "reason": "failure", "text": "rank 0 died"}
        training.hear(op="entry", attempt=0, k=0, message=message)
    training.events.clear()
    lose(training)
    (lost,) = training.events
    assert isinstance(lost, JobLost)
    assert training.job.storeless_job is None
