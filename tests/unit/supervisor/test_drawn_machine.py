"""The table of states in ARCHITECTURE.md, and the machine: each shows what the other does."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

from saferun.supervisor import events
from saferun.supervisor.machine import TRANSITIONS, Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, HangPolicy, JobPolicy
from tests.unit.supervisor.fake_world import DIAGNOSIS, FAILED, HANG, OK, SUSPICION, placement_of

DOCUMENT = Path(__file__).parents[3] / "ARCHITECTURE.md"
WALKS = 12000
STEPS = 40
REASONS = (
    "failure",
    "victim",
    "hang",
    "signal",
    "parent",
    "request",
    "restart",
    "lost",
    "task_lost",
    "start",
    "membership",
    "leave",
)
ONWARD = (
    *(events.ChecksPassed, events.HostsJoined, events.ProbesPassed, events.RanksStarted, events.RankExited),
    *(events.OrphansGone, events.Diagnosed, events.LaunchRequested),
    *(events.EvidenceCaptured, events.CauseShown, events.CoreDumpSeen, events.ToolAtWork),
)
Edge = tuple[State, str, State]


def more_fields(kind: type, chance: random.Random, ranks: int, *, spans_hosts: bool) -> dict[str, Any]:
    """What an event has beside its time and attempt, drawn at random."""
    is_even = chance.random() < 0.5
    some: dict[str, dict[str, Any]] = {
        "ChecksOver": {"exit_code": chance.choice((0, 2))},
        "HostsJoined": {
            "placement": placement_of(0 if spans_hosts and chance.random() < 0.2 else ranks),
            "leads": is_even,
            "may_leave": chance.random() < 0.5,
            "probes": chance.random() < 0.5,
        },
        "RanksStarted": {"pids": tuple(range(1000, 1000 + ranks))},
        "StartFailed": {
            "what": "no such program",
            "hint": "check the path",
            "exit_code": 1,
            "started": tuple(range(chance.randint(0, ranks))),
            "class_name": chance.choice(("", "store_lost")),
        },
        "RankExited": {"local_rank": chance.randrange(ranks), "status": chance.choice((OK, OK, OK, FAILED))},
        "StoreUnavailable": {"what": "the store is gone", "hint": "look"},
        "SignalReceived": {
            "signum": chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
            "idle_s": chance.choice((0.0, 300.0)),
        },
        "StopRequested": {
            "by": "saferunctl stop",
            "at_once": is_even,
            "ours": chance.random() < 0.7,
            "idle_s": chance.choice((0.0, 300.0)),
        },
        "RestartRequested": {"by": "saferunctl restart", "idle_s": chance.choice((0.0, 300.0))},
        "CheckpointRequested": {"by": "saferunctl stop", "signum": signal.SIGUSR1, "ours": is_even},
        "HangSuspected": {"verdict": chance.choice((HANG, SUSPICION))},
        "EvidenceCaptured": {"moved": chance.random() < 0.2, "suspects": (0,) if is_even else ()},
        "JobAborted": {
            "reason": chance.choice(REASONS),
            "message": "words",
            "host": "node2",
            "ours": is_even,
            "signum": chance.choice((0, 0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
        },
        "JobDecided": {
            "next_step": chance.choice(("restart", "finish")),
            "exit_code": chance.choice((0, 1)),
            "wait_s": 1.0,
            "restarts": 1,
        },
        "HostsUnreachable": {"message": "node2"},
        "SpareLost": {"host": "node9", "why": "it does not answer"},
        "JobLost": {"what": "gone", "hint": "look"},
        "OrphansGone": {"pids": ()},
        "ToolAtWork": {"local_ranks": (0,) if is_even else ()},
        "Diagnosed": {"diagnosis": DIAGNOSIS, "stopped": chance.random() < 0.2},
        "LoopStalled": {"left_s": 1.0},
    }
    return some.get(kind.__name__, {})


def walk(seed: int) -> set[Edge]:
    """The changes of state of one launch to which anything happens that the table has."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    ranks = chance.randint(1, 2)
    spans_hosts = chance.random() < 0.7
    supervisor = Supervisor(
        AttemptPolicy(max_restarts=chance.randint(0, 2), wait=lambda _: 1.0),
        Limits(),
        HangPolicy(chance.choice(("report", "stop", "restart"))),
        JobPolicy(spans_hosts=spans_hosts, outlives_leader=chance.random() < 0.5),
    )
    edges: set[Edge] = set()
    now = 100.0
    for _ in range(STEPS):
        before = supervisor.state
        if before is State.DONE:
            break
        kinds = sorted(TRANSITIONS[before], key=lambda one: one.__name__)
        # Without it few walks would get far.
        onward = [kind for kind in kinds if kind in ONWARD]
        kind = chance.choice(onward if onward and chance.random() < 0.6 else kinds)
        now += 1.0
        if kind in {events.DeadlineExpired, events.LoopStalled}:
            now = max(now, supervisor.deadline or now)
        supervisor.handle(kind(now, supervisor.attempt, **more_fields(kind, chance, ranks, spans_hosts=spans_hosts)))
        if supervisor.state is not before:
            edges.add((before, kind.__name__, supervisor.state))
    return edges


class Row(NamedTuple):
    """One of the table: in each of these states each of these events leads to one of the next ones."""

    states: frozenset[State]
    events: frozenset[str]
    following: frozenset[State]

    def has(self, edge: Edge) -> bool:
        state, event, following = edge
        return state in self.states and event in self.events and following in self.following


def drawn() -> list[Row]:
    """The rows of the table in the document."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("| in | event |")[2].partition("\n\n")[0]
    rows = []
    for line in table.splitlines()[2:]:
        states, kinds, _, following = (cell.strip().split(", ") for cell in line.strip("|").split(" | "))
        rows.append(Row(frozenset(State[one] for one in states), frozenset(kinds), frozenset(map(_state, following))))
    return rows


def _state(name: str) -> State:
    return State[name.strip(" |")]


def unlike(rows: list[Row], edges: set[Edge]) -> list[str]:
    """What only one of the two has: the table, or the machine."""
    found = [
        f"not in the table: {state.name}, {event} -> {following.name}"
        for state, event, following in sorted(edges, key=str)
        if not any(row.has((state, event, following)) for row in rows)
    ]
    for row in rows:
        seen = {edge for edge in edges if row.has(edge)}
        for state in row.states:
            mine = [edge for edge in seen if edge[0] is state]
            missing = row.events - {edge[1] for edge in mine}
            found += [f"not in the machine: {state.name}, {event}" for event in sorted(missing)]
            unreached = row.following - {edge[2] for edge in mine}
            found += [f"not in the machine: {state.name} -> {one.name} by {sorted(row.events)}" for one in unreached]
    return found


def test_the_document_draws_what_the_machine_does() -> None:
    """Whoever changes a transition changes the table that others read."""
    edges = set().union(*map(walk, range(WALKS)))
    rows = drawn()
    assert len(rows) > 20
    assert not unlike(rows, edges), "\n".join(unlike(rows, edges))


def test_a_row_too_many_or_too_few_is_found() -> None:
    """The test above would pass on a table that it cannot read."""
    edges: set[Edge] = {(State.NEW, "LaunchRequested", State.CHECKING), (State.BACKOFF, "SignalReceived", State.DONE)}
    launched = Row(frozenset({State.NEW}), frozenset({"LaunchRequested"}), frozenset({State.CHECKING}))
    ended = Row(frozenset({State.BACKOFF}), frozenset({"SignalReceived"}), frozenset({State.DONE}))
    assert not unlike([launched, ended], edges)
    assert unlike([launched], edges) == ["not in the table: BACKOFF, SignalReceived -> DONE"]
    assert unlike([launched, ended], edges - {(State.NEW, "LaunchRequested", State.CHECKING)})
    assert unlike([launched, ended._replace(following=frozenset({State.DONE, State.CHECKING}))], edges)
    assert unlike([launched, ended._replace(states=ended.states | {State.DIAGNOSING})], edges)
