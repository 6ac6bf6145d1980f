"""Messages of other hosts that make no sense, and more of them than there should be: nothing of this host breaks."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster.job_values import EvidenceChunk
from saferun.model import JsonObject
from saferun.supervisor.events import (
    HostsDone,
    JobAborted,
    JobDecided,
)
from tests.torch.coordinating import TROUBLE
from tests.unit.cluster.listening_job import DECISION, JOINED, Listening, piece

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HUGE = [float("inf"), float("-inf"), float("nan"), 10**400, -(10**400), 1e308, -1, "7", None, [], {}]


@pytest.mark.parametrize("field", ["exit_code", "wait_s", "restarts", "excluded", "text", "host"])
@pytest.mark.parametrize("value", HUGE, ids=lambda value: repr(value)[:12])
def test_a_decision_that_makes_no_sense_ends_nothing(listening: Listening, field: str, value: object) -> None:
    """Neither by an exception nor by a wait that no clock can count."""
    listening.join()
    listening.hear(op="entry", attempt=0, k=1, message={**DECISION, field: value})
    for event in listening.events:
        assert isinstance(event, JobDecided)
        assert 0 <= event.exit_code <= 255
        assert 0 <= event.wait_s < 1e7
    if value not in (None, [], {}, -1):
        assert (listening.events, listening.job.ignored.count) == ([], 1)


@pytest.mark.parametrize("field", ["host", "task", "signum", "ranks", "lost_task", "text", "label", "reason"])
@pytest.mark.parametrize("value", HUGE, ids=lambda value: repr(value)[:12])
def test_a_trouble_that_makes_no_sense_ends_nothing(listening: Listening, field: str, value: object) -> None:
    """It is ignored, and counted."""
    listening.join()
    listening.hear(op="entry", attempt=0, k=0, message={**TROUBLE, field: value})
    assert len(listening.events) + listening.job.ignored.count == 1
    listening.hear(op="entry", attempt=0, k=1, message=TROUBLE)
    assert isinstance(listening.events[-1], JobAborted)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"time": 1' + "0" * 400 + ', "evidence": ""}',
        '{"time": Infinity, "evidence": ""}',
        '{"time": 1e999, "evidence": ""}',
        '{"time": -1, "evidence": ""}',
        '{"time": 1, "evidence": []}',
        '{"time": 1, "evidence": "", "x": [' + "0," * 100_000 + "0]}",
        "",
        "7",
    ],
    ids=lambda text: text[:20],
)
def test_a_piece_of_evidence_that_makes_no_sense_ends_nothing(listening: Listening, text: str) -> None:
    """Nor does it shift times by an infinity."""
    listening.join()
    got: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, got.append)
    listening.hear(op="chunk", attempt=0, name="end", host=1, task=0, text=text)
    assert (got, listening.job.ignored.count) == ([], 1)
    listening.hear(op="chunk", attempt=0, name="end", host=1, task=0, text=piece())
    assert len(got[0]) == 1


def test_whatever_fails_because_of_a_message_is_ignored_and_counted(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line for the first one, the tenth, the hundredth."""
    listening.join()

    def fail(_message: object) -> None:
        raise RecursionError("so deep \x1b[2J")

    monkeypatch.setattr(listening.job.current._reported, "take", fail)
    for _ in range(100):
        listening.hear(op="states", attempt=0, changed={})
    assert listening.job.ignored.count == 100
    assert [line.partition(" (")[0] for line in listening.said] == [
        "saferun: warning: ignored an invalid message",
        "saferun: warning: ignored 10 invalid messages so far",
        "saferun: warning: ignored 100 invalid messages so far",
    ]
    assert all(line.isprintable() for line in listening.said)


@pytest.mark.parametrize("name", ["waits", "beside", "progress", "route", "text"])
@pytest.mark.parametrize(
    "part", [{"n": 1, "lines": [7], "rows": [7]}, {"n": 1}, {"n": 1e9}, {}, [], "x", 7, None, [[]]]
)
def test_a_part_of_a_state_that_makes_no_sense_hides_no_other_state(
    listening: Listening, name: str, part: object
) -> None:
    """A state comes once, when it changes: the job would never end on the leader."""
    listening.join()
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": "done", name: part}, "0/0": {"s": "done"}})
    assert [type(event) for event in listening.events] == [HostsDone]
    assert listening.job.ignored.count == 0


@pytest.mark.parametrize("word", [["done"], {"s": "done"}, None, 7], ids=repr)
def test_a_state_that_is_no_word_hides_no_other_state(listening: Listening, word: object) -> None:
    """Nor does it keep the job from its end later on."""
    listening.join()
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": word}, "0/0": {"s": "done"}})
    assert not listening.job.current.states.have_all_ended()
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": "done"}})
    assert [type(event) for event in listening.events] == [HostsDone]


@pytest.mark.parametrize("key", ["", "0", "1/0/0", "x/y", "1/" + "9" * 30])
def test_a_state_of_nobody_hides_no_other_state(listening: Listening, key: str) -> None:
    """It is counted, and the end of the job is seen all the same."""
    listening.join()
    listening.hear(op="states", attempt=0, changed={key: {"s": "run"}, "1/0": {"s": "done"}, "0/0": {"s": "done"}})
    assert [type(event) for event in listening.events] == [HostsDone]


def test_a_part_that_fails_over_the_states_of_one_host_hides_no_other_state(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error is counted when all states are taken in."""
    listening.join()

    def fail(*_: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(listening.job.reports, "take_state", fail)
    monkeypatch.setattr(listening.job.reports, "on_states", fail)
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": "done"}, "0/0": {"s": "done"}})
    assert [type(event) for event in listening.events] == [HostsDone]
    assert listening.job.ignored.count == 1


def test_only_the_host_that_leads_decides(listening: Listening) -> None:
    """Another host that says so, by a mistake or on purpose, is not believed."""
    listening.join()
    for kind, fields in {
        "decision": DECISION,
        "hang": {"verdict": {"kind": "quiescent"}, "n": 1},
        "preflight": {"ok": True},
        "notice": {"text": "so"},
        "watch": {"hosts": [0]},
    }.items():
        for host in (1, None, "0", [0]):
            listening.hear(op="entry", attempt=0, k=0, message={**fields, "kind": kind, "host": host})
    assert (listening.events, listening.hangs, listening.told) == ([], [], [])
    assert listening.job.ignored.count == 20
    assert listening.job.current.silent_hosts.deadline is None


def test_words_of_another_host_hold_nothing_that_a_terminal_obeys(listening: Listening) -> None:
    """A decision's words go to the console line by line; so do those of a lost host, a warning, what is waited for."""
    listening.join()
    evil = "W\x1b]0;owned\x07\x1b[2J\x1b[31m\n saferun: forged\u202e\udcff"
    listening.hear(op="entry", attempt=0, k=0, message={**DECISION, "text": [evil] * 30})
    listening.hear(op="entry", attempt=0, k=0, message={**TROUBLE, "text": evil, "label": evil, "reason": evil})
    listening.hear(op="warn", attempt=0, text=evil)
    listening.hear(op="waiting", text=evil)
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": "leftovers", "text": evil}})
    listening.hear(op="lost", attempt=0, host=1, why=evil, text=evil)
    decided, trouble, _awaited = listening.events
    assert isinstance(decided, JobDecided)
    assert isinstance(trouble, JobAborted)
    lost = listening.job.lost[1]
    texts = [*decided.messages, trouble.message, trouble.host, trouble.reason, *listening.said, lost.why, lost.message]
    assert (len(decided.messages), len(listening.said)) == (20, 3)
    assert [text for text in texts if not text.isprintable()] == []


def test_a_peer_fills_no_more_than_its_share_of_the_memory_of_the_host_that_leads(listening: Listening) -> None:
    """Names, tasks and hosts that nobody asked for are bounded; the newest pieces are kept."""
    listening.join()
    for i in range(1000):
        listening.hear(op="chunk", attempt=0, name=f"hang-{i}", host=1, task=0, text=piece())
        listening.hear(op="chunk", attempt=0, name="end", host=1, task=1 + i, text=piece())
        listening.hear(op="chunk", attempt=0, name="end", host=2 + i, task=0, text=piece())
        listening.hear(op="states", attempt=0, changed={f"1/{1 + i}": {"s": "run"}, f"{2 + i}/0": {"s": "gone"}})
    assert listening.job.current.chunks.names == ["hang-996", "hang-997", "hang-998", "hang-999"]
    assert listening.job.current.states.by_task == {}
    assert listening.job.current.lost_hosts._tasks == set()


OPS = st.sampled_from(
    [
        *("joined", "join_failed", "waiting", "entry", "states", "chunk", "probed", "lost", "store_lost", "task_lost"),
        *("membership", "prepared", "failed", "nonsense", "late", "silent", "returned", "warn"),
    ]
)
KNOWN = st.sampled_from(
    [
        *("attempt", "host", "task", "name", "text", "message", "changed", "why", "label", "peers", "what"),
        *("hint", "kind", "verdict", "n", "next", "exit_code", "wait_s", "restarts", "reason", "ranks", "signum"),
        *("hosts", "changed", "progress", "waited_s", "for_others"),
    ]
)


@given(op=OPS, fields=st.dictionaries(KNOWN, JSON, max_size=6), inner=st.dictionaries(KNOWN, JSON, max_size=6))
def test_nothing_that_another_host_says_can_break_this_one(op: str, fields: JsonObject, inner: JsonObject) -> None:
    """It may be another version, or an enemy."""
    listening = Listening()
    listening.join()
    listening.job.collect("end", 60.0, lambda _: None)
    kinds = ("abort", "cause", "hang", "decision", "notice", "watch")
    for message in (
        {**fields, "op": op},
        *({"op": "entry", "attempt": 0, "message": {**inner, "kind": k}} for k in kinds),
    ):
        listening.hear(**message)
    listening.hear(**{**JOINED, **fields, "op": "joined"})


@pytest.mark.parametrize("field", ["route", "text"])
def test_a_host_does_not_fill_the_console_of_the_one_that_leads(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Whatever it says, and however often that changes."""
    listening.join()
    monkeypatch.setattr("saferun.cluster.leader_routes._TOGETHER_S", 0.0)
    for i in range(200):
        state = {"s": "leftovers", field: f"waiting for process {i}"}
        listening.hear(op="states", attempt=0, changed={"1/0": state})
        listening.job.tick(time.monotonic() + 1.0)
    assert 0 < len(listening.said) <= 20
    assert "process 0" in listening.said[0]
