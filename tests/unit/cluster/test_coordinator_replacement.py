"""A coordinator that has been killed, and the one that takes its place, as this host's job sees them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from saferun.cluster.coordinator_client import KILLED_HINT
from saferun.supervisor.actions import JoinHosts
from saferun.supervisor.events import JobAborted, JobLost
from tests.unit.cluster.listening_job import JOINED, Listening

REASON = "the coordinator of node1 ended (killed by SIGKILL)"
FOLLOWER = {**JOINED, "host": 1, "leader": False, "base_rank": 2, "label": "node1", "peers": []}


@pytest.fixture
def other() -> Listening:
    """A job on the second host, while an attempt is under way."""
    listening = Listening()
    listening.job.client.serves_timers = False
    listening.job.join(JoinHosts(0))
    listening.hear(**FOLLOWER)
    listening.hear(op="resumable", attempt=0, text="all that it takes")
    return listening


def die(listening: Listening) -> Any:
    return listening.job._replace_coordinator(REASON)


def entry(k: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"op": "entry", "attempt": 0, "k": k, "message": json.loads(json.dumps(message))}


def aborts(listening: Listening) -> list[JobAborted]:
    return [event for event in listening.events if isinstance(event, JobAborted)]


def test_a_successor_gets_what_it_takes_and_reads_nothing_into_the_job_twice(other: Listening) -> None:
    """It reads the log from the beginning."""
    cause = {"kind": "abort", "host": 0, "task": 0, "label": "node0", "reason": "failure", "text": "rank 0 died"}
    other.hear(**entry(0, cause))
    message = die(other)
    assert (message["op"], message["text"]) == ("resume", "all that it takes")
    assert message["request"]["node_rank"] == 0
    assert "op" not in message["request"]
    other.hear(op="resumed", attempt=0)
    other.hear(**entry(0, cause))
    assert len(aborts(other)) == 1
    assert any(line.endswith("another one has taken its place, and the job goes on") for line in other.said)
    assert other.job.deadline is None or other.job._replacement.deadline is None


def test_what_the_one_before_may_not_have_written_is_written_by_its_successor(other: Listening) -> None:
    other.job.abort_attempt("failure", "rank 2 died", ranks=[2])
    lost = other.channel.sent[-1]["message"]
    other.job.broadcast_cause()
    seen = other.channel.sent[-1]["message"]
    other.hear(**entry(0, {**seen, "host": 1}))
    assert die(other) is not None
    other.channel.sent.clear()
    other.hear(op="resumed", attempt=0)
    repeated = [message for message in other.channel.sent if message["op"] == "append"]
    assert [(message["message"], message["repeated"]) for message in repeated] == [(lost, True)]
    assert other.channel.sent[-1]["op"] == "state"


@pytest.mark.parametrize(
    "message", [{"op": "resume_failed", "attempt": 0, "text": "refused"}, None], ids=["no", "late"]
)
def test_one_that_cannot_take_over_ends_the_attempt_with_the_reason(
    other: Listening, message: dict[str, Any] | None
) -> None:
    """Of the one before it, which is what happened."""
    assert die(other) is not None
    if message is not None:
        other.hear(**message)
    else:
        other.job.tick(time.monotonic() + 3600)
    lost = [event for event in other.events if isinstance(event, JobLost)]
    assert [(event.what, event.hint) for event in lost] == [(REASON, KILLED_HINT)]


@pytest.mark.parametrize("message", [{"op": "resume_failed", "attempt": 0, "text": "refused"}, None])
def test_one_that_has_yet_to_take_over_ends_no_later_attempt(other: Listening, message: dict[str, Any] | None) -> None:
    """The user has had the job started again meanwhile: the hosts meet, and it has nothing to take over any more."""
    assert die(other) is not None
    other.attempt = 1
    other.job.join(JoinHosts(1))
    if message is not None:
        other.hear(**message)
    other.job.tick(time.monotonic() + 3600)
    assert other.events == []


def test_one_that_is_killed_again_and_again_has_no_more_successors(other: Listening) -> None:
    for _ in range(3):
        assert die(other) is not None
        other.hear(op="resumed", attempt=0)
    assert die(other) is None


def test_one_that_dies_before_it_has_taken_over_has_no_successor(other: Listening) -> None:
    assert die(other) is not None
    assert die(other) is None


def test_there_is_none_between_attempts_and_where_the_coordinator_offered_nothing(other: Listening) -> None:
    other.attempt = 1
    assert die(other) is None
    first = Listening()
    first.join()
    first.job.client.serves_timers = False
    assert die(first) is None


def test_another_task_of_the_host_asks_the_successor_to_have_it_again(other: Listening) -> None:
    """It has lost its connection, and has nothing that the coordinator could go on from."""
    request = other.channel.sent[0]
    other.job._replacement.joins({**request, "task": 1})
    other.hear(op="resumable", attempt=0, text="")
    assert die(other) == {"op": "rejoin", "task": 1}
