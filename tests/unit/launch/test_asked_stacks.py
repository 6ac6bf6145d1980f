"""The stacks that a user asks for, collected of all hosts."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saferun.cluster.job_values import EvidenceChunk
from saferun.launch import asked_stacks
from saferun.launch.asked_stacks import AskedStacks, longest_s
from saferun.launch.host_stacks import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable

FOR_EVER = 1e12
STACKS = Wanted("stacks")
STACKS_JSON = {"kind": "stacks"}


class Examiner:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.done: list[Callable[[bytes], None]] = []
        self.is_lost = False
        self.closed = 0

    def answer(self, *arguments: Any, **_options: Any) -> Any:
        if self.is_lost:
            raise OSError(0, "there is no examiner")
        self.asked.append(arguments[3])
        self.done.append(arguments[5])
        return SimpleNamespace(close=lambda: setattr(self, "closed", self.closed + 1))


class Surroundings:
    """A launch with the stacks that are asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, leads: bool = True, world_size: int = 2) -> None:
        self.examiner = Examiner()
        monkeypatch.setattr(asked_stacks, "Answer", self.examiner.answer)
        self.collecting: dict[str, Callable[[list[EvidenceChunk]], None]] = {}
        self.requests: list[int] = []
        self.shared: list[tuple[str, str]] = []
        self.wanted: list[Callable[[int, object], None]] = []
        self.elsewhere: list[Callable[..., None]] = []
        self.asked_leader: list[dict[str, Any]] = []
        self.answered: list[tuple[dict[str, Any], dict[str, Any]]] = []
        reports = SimpleNamespace(
            subscribe_asked=self._subscribe,
            ask_ranks=self._ask,
            ask_leader=self.asked_leader.append,
            share_asked=lambda wanted, answer: self.answered.append((wanted, answer)),
        )
        self.job = job = SimpleNamespace(
            leads=leads,
            leader="node0",
            host=0,
            peers={
                0: SimpleNamespace(host=0, label="node0", base_rank=0, ranks=1),
                1: SimpleNamespace(host=1, label="node1", base_rank=1, ranks=1),
            },
            chunk_limit_bytes=1000,
            reports=reports,
            collect=lambda name, _timeout_s, on_done: self.collecting.update({name: on_done}),
            share=lambda name, stacks: self.shared.append((name, stacks)),
        )
        assignment = SimpleNamespace(rank=0)
        self.ranks = [SimpleNamespace(assignment=assignment, child=SimpleNamespace(pid=42), pid=42)]
        self.investigation = SimpleNamespace(
            is_capturing=False,
            hook=SimpleNamespace(prefix=lambda attempt, rank: f"/hook/a{attempt}r{rank}"),
            log=SimpleNamespace(host="node0"),
        )
        plan = SimpleNamespace(placement=SimpleNamespace(world_size=world_size))
        context: Any = SimpleNamespace(
            job=job,
            config=SimpleNamespace(
                hosts=SimpleNamespace(spans_hosts=True, task=None), command=SimpleNamespace(name="train.py")
            ),
            current=SimpleNamespace(living=lambda: self.ranks, plan=plan),
            investigation=self.investigation,
            examiner=None,
            guarded_poller=None,
            attempt=0,
        )
        self.stacks = AskedStacks(context, lambda call: call)
        self.answers: list[dict[str, Any]] = []

    def _subscribe(self, on_asked: Callable[[int, object], None], *on_elsewhere: Callable[..., None]) -> None:
        self.wanted.append(on_asked)
        self.elsewhere += on_elsewhere

    def _ask(self, number: int, wanted: dict[str, Any]) -> None:
        self.requests.append(number)
        self.wanted[0](number, json.loads(json.dumps(wanted)))

    def request(self, wanted: Wanted = STACKS) -> None:
        self.stacks.request(wanted, self.answers.append)

    def others(self, number: int, stacks: str = "theirs") -> None:
        chunk = EvidenceChunk(1, 0, "node1", 0.0, moved=False, stopped=False, evidence=stacks)
        self.collecting[f"asked-{number}"]([chunk] if stacks else [])


def test_the_answer_has_the_stacks_of_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch)
    there.request(Wanted("stacks", native=True))
    assert there.examiner.asked[0]["targets"] == ((0, 42, "/hook/a0r0"),)
    assert there.examiner.asked[0]["wanted"].native
    there.examiner.done[0](b"ours")
    assert there.answers == []
    there.others(1)
    (answer,) = there.answers
    assert answer["parts"] == [[0, 0, "node0", "ours"], [1, 0, "node1", "theirs"]]
    assert answer["peers"] == [[0, "node0", 0, 1], [1, "node1", 1, 1]]
    assert there.stacks.deadline is None


def test_who_asks_meanwhile_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch)
    there.request()
    there.request()
    there.others(1)
    there.examiner.done[0](b"ours")
    assert len(there.answers) == 2
    assert there.requests == [1]
    there.request()
    assert there.requests == [1, 2]


def test_what_does_not_come_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An examiner that says nothing, and hosts that were asked in an attempt that is over."""
    there = Surroundings(monkeypatch)
    there.request()
    there.stacks.tick(FOR_EVER)
    assert there.examiner.closed == 1
    assert there.answers[0]["parts"] == [[0, 0, "node0", ""]]
    there.others(1)  # too late
    there.request()
    there.examiner.done[1](b"ours")
    there.others(2)
    assert there.answers[1]["parts"] == [[0, 0, "node0", "ours"], [1, 0, "node1", "theirs"]]


@pytest.mark.parametrize("why", ["it captures", "no ranks", "no examiner"])
def test_without_stacks_of_its_own_it_answers_all_the_same(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    there = Surroundings(monkeypatch)
    there.investigation.is_capturing = why == "it captures"
    there.examiner.is_lost = why == "no examiner"
    if why == "no ranks":
        there.ranks.clear()
    there.request()
    there.others(1)
    assert there.answers[0]["parts"] == [[0, 0, "node0", ""], [1, 0, "node1", "theirs"]]
    assert there.examiner.asked == []


def test_a_capture_ends_what_users_have_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can have one debugger: the evidence of a failure comes first."""
    there = Surroundings(monkeypatch)
    there.request(Wanted("stacks", native=True))
    there.others(1)
    assert there.answers == []
    there.investigation.is_capturing = True
    assert there.stacks.deadline == 0.0
    there.stacks.tick(time.monotonic())
    assert there.examiner.closed == 1
    assert there.answers[0]["parts"] == [[0, 0, "node0", ""], [1, 0, "node1", "theirs"]]
    assert there.stacks.deadline is None


def test_a_recording_goes_on_beside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It attaches to no process."""
    there = Surroundings(monkeypatch)
    there.request(Wanted("recording", seconds=60.0))
    there.investigation.is_capturing = True
    there.stacks.tick(time.monotonic())
    assert there.examiner.closed == 0
    assert there.stacks.deadline is not None
    assert there.stacks.deadline > time.monotonic() + 60.0


def test_another_host_hands_in_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that it has none: nobody has to wait for it."""
    there = Surroundings(monkeypatch, leads=False)
    there.wanted[0](5, STACKS_JSON)
    there.wanted[0](6, STACKS_JSON)
    there.examiner.done[0](b"ours")
    there.ranks.clear()
    there.wanted[0](7, STACKS_JSON)
    assert there.shared == [("asked-5", "ours"), ("asked-7", "")]
    assert len(there.examiner.asked) == 1


def test_asked_on_another_host_the_leader_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait for the same; and whoever waits for something else goes on waiting."""
    there = Surroundings(monkeypatch, leads=False)
    there.request()
    there.request(Wanted("recording", seconds=5.0))
    assert [wanted["kind"] for wanted in there.asked_leader] == ["stacks", "recording"]
    assert there.examiner.asked == []
    _, on_answer = there.elsewhere
    on_answer({"kind": "recording", "seconds": 9.0}, {"ok": True})
    on_answer(STACKS_JSON, ["no object"])
    assert there.answers == []
    on_answer(STACKS_JSON, {"ok": True, "parts": []})
    assert there.answers == [{"ok": True, "parts": []}]
    there.stacks.tick(FOR_EVER)
    assert there.answers[1:] == [{"error": "node0 does not answer", "hint": "see saferunctl status"}]
    assert there.stacks.deadline is None


def test_the_leader_answers_all_hosts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is too much for the job's log."""
    there = Surroundings(monkeypatch)
    on_elsewhere, _ = there.elsewhere
    on_elsewhere(STACKS_JSON)
    on_elsewhere(STACKS_JSON)
    there.examiner.done[0](b"ours")
    there.others(1)
    ((wanted, answer),) = there.answered
    assert wanted["kind"] == "stacks"
    assert len(answer["parts"]) == 2
    assert there.examiner.asked[0]["limit_bytes"] == 1000  # as of all evidence of this job
    on_elsewhere(STACKS_JSON)
    there.examiner.done[1](b"o" * 60_000)
    there.others(2)
    assert there.answered[1][1]["error"] == "there is too much for this host; ask on node0"


def test_the_stacks_of_many_hosts_are_shortened_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to where nothing would be left of them."""
    there = Surroundings(monkeypatch)
    there.job.chunk_limit_bytes = 1 << 20
    for host in range(2, 20):
        there.job.peers[host] = SimpleNamespace(host=host, label=f"node{host}", base_rank=host, ranks=1)
    there.elsewhere[0](STACKS_JSON)
    assert there.examiner.asked[0]["limit_bytes"] == 60_000 // 20 - 500
    there.stacks.tick(FOR_EVER)
    for host in range(20, 100):
        there.job.peers[host] = SimpleNamespace(host=host, label=f"node{host}", base_rank=host, ranks=1)
    there.elsewhere[0](STACKS_JSON)
    assert there.answered[1][1]["error"] == "there are too many hosts; ask on node0"


def test_a_host_that_does_not_lead_leaves_it_to_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch, leads=False)
    there.elsewhere[0](STACKS_JSON)
    assert there.requests == []


def test_an_answer_has_room_for_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch)
    monkeypatch.setattr(asked_stacks, "_MOST_BYTES", 8)
    there.request()
    there.examiner.done[0](b"ours")
    there.others(1)
    assert [part[3] for part in there.answers[0]["parts"]] == ["ours", ""]


def test_after_the_end_nothing_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch)
    there.request()
    there.stacks.close()
    assert there.stacks.deadline is None
    there.others(1)
    assert there.answers == []


def test_who_asks_for_something_else_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch)
    recording = Wanted("recording", seconds=60.0)
    there.request(recording)
    there.request()
    assert there.answers[0]["error"] == "the ranks of this job are being read for another saferunctl"
    assert there.stacks.deadline is not None
    assert longest_s(recording) > 60.0
    there.others(1)
    there.examiner.done[0](b"ours")
    assert len(there.answers) == 2


def test_a_recording_of_a_large_job_is_of_named_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever host is asked; stacks are of all ranks."""
    for leads in (True, False):
        there = Surroundings(monkeypatch, leads=leads, world_size=1024)
        there.request(Wanted("recording"))
        assert there.answers == [{"error": "the job has 1024 ranks: name 64 at most with --rank", "hint": ""}]
        there.request(Wanted("recording", ranks=(1000,)))
        there.request(Wanted("recording"))
        assert len(there.answers) == 2
        assert there.requests == ([1] if leads else [])


def test_a_recording_is_of_those_ranks_that_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has none of them answers at once."""
    there = Surroundings(monkeypatch, leads=False)
    there.wanted[0](1, {"kind": "recording", "ranks": [3, 4]})
    assert there.shared == [("asked-1", "")]
    there.wanted[0](2, {"kind": "recording", "ranks": [0, 4]})
    assert [target.rank for target in there.examiner.asked[0]["targets"]] == [0]


RECORDING = Wanted("recording", seconds=600.0)


def take_nothing(_answer: dict[str, Any]) -> None:
    """Of a saferunctl that is interrupted."""


def test_a_recording_ends_with_the_last_one_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all hosts: who presses Ctrl-C wants no more of it, and the next one need not wait for its end."""
    there = Surroundings(monkeypatch)
    there.stacks.request(RECORDING, take_nothing)
    there.request(RECORDING)
    there.stacks.forget(take_nothing)
    assert (there.requests, there.examiner.closed) == ([1], 0)
    there.stacks.forget(there.answers.append)
    assert (there.requests, there.examiner.closed) == ([1, 1], 1)
    assert there.stacks.deadline is None
    there.request()
    assert there.requests == [1, 1, 2]
    there.examiner.done[1](b"ours")
    there.others(2)
    assert there.answers[0]["parts"] == [[0, 0, "node0", "ours"], [1, 0, "node1", "theirs"]]
    there.stacks.forget(take_nothing)
    assert len(there.requests) == 3


def test_stacks_are_taken_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a moment, and the next one who asks gets them."""
    there = Surroundings(monkeypatch)
    there.stacks.request(STACKS, take_nothing)
    there.stacks.forget(take_nothing)
    assert (there.requests, there.examiner.closed) == ([1], 0)


def test_another_host_ends_a_recording_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch, leads=False)
    there.wanted[0](4, {"kind": "recording"})
    there.wanted[0](3, {"kind": "end"})  # of an earlier one
    assert there.examiner.closed == 0
    there.wanted[0](4, {"kind": "end"})
    there.wanted[0](4, {"kind": "end"})
    assert there.examiner.closed == 1
    assert there.shared == [("asked-4", "")]
    there.stacks.request(RECORDING, take_nothing)
    there.stacks.forget(take_nothing)
    assert [asked["kind"] for asked in there.asked_leader] == ["recording", "end"]
    assert there.stacks.deadline is None


def test_the_leader_ends_a_recording_for_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Surroundings(monkeypatch)
    asked = json.loads(json.dumps(RECORDING._asdict()))
    there.elsewhere[0](asked)
    there.elsewhere[0]({**asked, "kind": "end"})
    assert there.examiner.closed == 1
    assert "error" in there.answered[0][1]
    there.elsewhere[0]({**asked, "kind": "end"})
    assert len(there.answered) == 1
    there.elsewhere[0](asked)
    assert there.requests == [1, 1, 2]


@pytest.mark.parametrize("wanted", [None, [], {}, "stacks", {"kind": 7}, {"kind": "recording", "seconds": 1e300}])
def test_what_another_host_asks_for_may_be_anything(monkeypatch: pytest.MonkeyPatch, wanted: object) -> None:
    """An exception would close the control socket of this host for good."""
    there = Surroundings(monkeypatch)
    on_elsewhere, on_answer = there.elsewhere
    there.request()
    there.wanted[0](9, wanted)
    on_elsewhere(wanted)
    there.job.leads = False
    there.request()
    on_answer(wanted, {})
    assert there.answers == []
    assert len(there.examiner.asked) == 1
