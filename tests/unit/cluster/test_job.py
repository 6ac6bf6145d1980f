"""What this host hears from others, and what it makes of it. The channel is a list."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from saferun.cluster.evidence_collection import EvidenceCollection
from saferun.cluster.job_values import EvidenceChunk
from saferun.cluster.join_messages import HostInfoText, HostsPart, Peer, SecretSharing, parts_of
from saferun.cluster.roster import Roster
from saferun.cluster.silence import Progress
from saferun.config import HostsConfig
from saferun.model import RANKS_DONE, RANKS_LEFT_OVER, JsonObject
from saferun.supervisor.actions import BroadcastDecision, Finish, JoinHosts
from saferun.supervisor.events import (
    HostsAwaited,
    HostsDone,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    JobDecided,
    JobLost,
    StartFailed,
    StopRequested,
)
from tests.unit.cluster.listening_job import DECISION, JOINED, Listening, piece
from tests.unit.operations import operations
from tests.unit.samples import CONFIG


def test_the_hosts_agreement_becomes_a_placement(listening: Listening) -> None:
    """Ranks count from this host's first one."""
    listening.join()
    (assignment,) = listening.assignments
    assert assignment.leads
    assert assignment.placement.world_size == 4
    assert [one.rank for one in assignment.placement.ranks] == [0, 1]


@pytest.mark.parametrize(
    ("message", "known"),
    [
        ({}, {"10.0.0.2"}),
        ({"host": 1, "base_rank": 2, "leader": False, "leader_addresses": ["10.0.0.1"], "peers": []}, {"10.0.0.1"}),
        ({"local_world_size": 4}, {"10.0.0.2", "127.0.0.1", "::1"}),
    ],
    ids=["the leader", "another host", "several on this host"],
)
def test_where_other_ranks_are_is_known_as_far_as_it_is_told(
    listening: Listening, message: dict[str, Any], known: set[str]
) -> None:
    """What goes there may be the ranks' own: a hang does not have to stop it."""
    listening.job.join(JoinHosts(0))
    assert listening.job.other_addresses == ()
    listening.hear(**JOINED | message)
    found: set[str] = set(listening.job.other_addresses)
    own = set(listening.channel.sent[-1]["record"].addresses) if "local_world_size" in message else set()
    assert found == known | own


@pytest.mark.parametrize("times", [1, 2])
def test_very_many_hosts_come_in_parts(listening: Listening, times: int) -> None:
    """A message of all of them may be longer than any that is read. The coordinator may end before it has sent all."""
    peers = [Peer(host, f"node{host}", (f"10.0.0.{host}",), 2 * host, 2) for host in range(5)]
    infos = [HostInfoText(str(host) * 100, "") for host in range(5)]
    *earlier, last = parts_of(peers, infos, part_bytes=250, all_bytes=450)
    assert [len(part.peers) for part in earlier] == [2]
    listening.job.join(JoinHosts(0))
    for part in earlier * times:
        listening.hear(op="hosts", attempt=0, **json.loads(json.dumps(part._asdict())))
    listening.hear(**JOINED | json.loads(json.dumps(last._asdict())))
    assert list(listening.job.peers.values()) == peers
    told = [info.host_info for info in listening.assignments[0].host_infos]
    assert told == [*(str(host) * 100 for host in range(4)), ""]
    assert parts_of([], []) == [HostsPart()]


def test_work_for_a_chunk_does_not_grow_with_the_hosts() -> None:
    """The leader of ten thousand gets one from each."""

    def work(hosts: int) -> int:
        roster = Roster(0, 0, has_tasks=False, label="a", peers=[Peer(n, f"n{n}", (), n, 1) for n in range(hosts)])
        chunks = EvidenceCollection(roster, lambda _host, _task: True, lambda _hosts, _patient: None)
        chunks.collect("end", 60.0, lambda _: None, None)
        for host in range(1, hosts - 1):
            chunks.add({"host": host, "task": 0, "name": "end", "text": piece()})
        last = {"host": hosts - 1, "task": 0, "name": "other", "text": piece()}
        return operations(lambda: chunks.add(last))

    work(20)  # what is imported or cached at the first time
    assert work(200) < work(20) + 20


def test_pieces_are_waited_for_until_all_are_there(listening: Listening) -> None:
    """And those of a host that is lost are waited for no more."""
    listening.join()
    got: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, got.append)
    assert got == []
    listening.hear(op="chunk", attempt=0, name="end", host=1, task=0, text=piece())
    assert [(found.host, found.label, found.offset_s) for found in got[0]] == [(1, "node1", 0.0)]
    listening.job.collect("other", 60.0, got.append)
    listening.hear(op="lost", attempt=0, host=1, label="node1", why="gone", text="it is gone")
    assert got[1] == []
    assert listening.job.lost[1].ranks == (2, 3)


def test_a_host_that_hands_in_nothing_is_knocked_at_and_not_waited_for_for_ever(listening: Listening) -> None:
    """Its saferun may have been killed a moment ago."""
    listening.join()
    got: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, got.append)
    assert listening.job.deadline is not None
    listening.job.tick(time.monotonic() + 2.0)
    assert listening.channel.sent[-1]["op"] == "probe"
    listening.hear(op="probed", host=1, why="reached", text="it answers")
    assert got == []
    listening.job.tick(time.monotonic() + 61.0)
    assert got == [[]]


@pytest.mark.parametrize(("name", "is_patient"), [("probes-1", True), ("hang-2", True), ("end", False)])
def test_a_host_is_waited_for_with_patience_where_the_attempt_goes_on(
    listening: Listening, name: str, *, is_patient: bool
) -> None:
    """While the hosts probe each other, or a hang is captured that may only be reported, none is lost in seconds."""
    listening.join()
    listening.job.collect(name, 60.0, lambda _: None)
    listening.job.tick(time.monotonic() + 2.0)
    probe = listening.channel.sent[-1]
    assert (probe["op"], probe["hosts"], probe["patient"]) == ("probe", [1], is_patient)


def test_a_piece_of_the_largest_size_that_is_allowed_fits_with_its_wrapping(listening: Listening) -> None:
    """The coordinator drops what is larger than the host that decides wants to read."""
    listening.join()
    listening.job.share("end", "x" * listening.job.chunk_limit_bytes, moved=False, stopped=False)
    assert len(listening.channel.sent[-1]["text"]) <= JOINED["chunk_limit_bytes"]


def test_what_a_user_asks_for_is_not_in_the_way_of_the_evidence_of_a_failure(listening: Listening) -> None:
    """It is collected apart, kept only while it is waited for, and makes no host suspect."""
    listening.join()
    asked: list[list[EvidenceChunk]] = []
    failed: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, failed.append)
    listening.job.collect("asked-7", 60.0, asked.append)
    for name in ("asked-6", "asked-7", "asked-7"):
        listening.hear(op="chunk", attempt=0, name=name, host=1, task=0, text=piece(name))
    assert [[chunk.evidence for chunk in found] for found in asked] == [["asked-7"]]
    assert failed == []
    listening.hear(op="chunk", attempt=0, name="end", host=1, task=0, text=piece("cause"))
    assert [[chunk.evidence for chunk in found] for found in failed] == [["cause"]]
    listening.job.collect("asked-8", 60.0, asked.append)
    listening.job.tick(time.monotonic() + 59.0)
    assert all(sent["op"] != "probe" for sent in listening.channel.sent)
    listening.job.tick(time.monotonic() + 61.0)
    assert asked[1:] == [[]]


def test_evidence_of_an_attempt_that_is_over_is_neither_sent_nor_waited_for(listening: Listening) -> None:
    """What the current one waits for goes on to be waited for."""
    listening.join()
    found: list[list[EvidenceChunk]] = []
    late: list[list[EvidenceChunk]] = []
    listening.job.collect("probes-1", 60.0, found.append, attempt=0)
    listening.job.collect("end", 60.0, late.append, attempt=-1)
    listening.job.share("end", "of another attempt", attempt=-1)
    assert (found, late) == ([], [[]])
    assert all(sent["op"] != "chunk" for sent in listening.channel.sent)
    listening.hear(op="chunk", attempt=0, name="probes-1", host=1, task=0, text=piece("probes"))
    assert [[chunk.evidence for chunk in chunks] for chunks in found] == [["probes"]]
    listening.job.share("end", "of this one", attempt=0)
    assert listening.channel.sent[-1]["op"] == "chunk"


def test_all_hosts_are_asked_for_stacks_by_the_leader_alone(listening: Listening) -> None:
    listening.join()
    wanted: list[tuple[int, object]] = []
    answers: list[tuple[object, object]] = []
    elsewhere: list[object] = []
    listening.job.reports.subscribe_asked(
        lambda number, what: wanted.append((number, what)), elsewhere.append, lambda *answer: answers.append(answer)
    )
    listening.job.reports.ask_ranks(3, {"kind": "stacks"})
    message = listening.channel.sent[-1]["message"]
    listening.hear(op="entry", attempt=0, k=0, message={**message, "host": 0})
    listening.hear(op="entry", attempt=0, k=1, message={**message, "host": 1})
    listening.hear(op="entry", attempt=0, k=2, message={**message, "host": 0, "n": "many"})
    assert wanted == [(3, {"kind": "stacks"})]
    assert listening.job.ignored.count == 2
    # Any host may ask the leader, which alone answers.
    listening.job.reports.ask_leader({"kind": "stacks"})
    message = listening.channel.sent[-1]["message"]
    listening.hear(op="entry", attempt=0, k=3, message={**message, "host": 1})
    assert elsewhere == [{"kind": "stacks"}]
    listening.job.reports.share_asked({"kind": "stacks"}, {"ok": True})
    message = listening.channel.sent[-1]["message"]
    listening.hear(op="entry", attempt=0, k=4, message={**message, "host": 1})
    listening.hear(op="entry", attempt=0, k=5, message={**message, "host": 0})
    assert answers == [({"kind": "stacks"}, {"ok": True})]


def test_a_host_that_reads_no_ranks_for_saferunctl_hands_in_nothing_at_once(listening: Listening) -> None:
    """Its control socket has failed, or is not open yet: a user would wait half a minute for it."""
    listening.join()
    listening.hear(
        op="entry", attempt=0, k=0, message={"kind": "asked", "n": 3, "wanted": {"kind": "stacks"}, "host": 0}
    )
    (chunk,) = [sent for sent in listening.channel.sent if sent["op"] == "chunk"]
    assert chunk["name"] == "asked-3"
    assert json.loads(chunk["text"])["evidence"] == ""


def test_clocks_that_differ_are_set_right(listening: Listening) -> None:
    """A host whose clock is an hour behind did not fail an hour before the others."""
    listening.join()
    got: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, got.append)
    listening.hear(op="chunk", attempt=0, name="end", host=1, task=0, text=piece(at=time.time() - 3600))
    assert got[0][0].offset_s == pytest.approx(3600, abs=5)
    assert not got[0][0].measured


def test_a_clock_that_was_measured_counts_as_measured(listening: Listening) -> None:
    """However small the difference is, and whenever the chunk comes."""
    listening.join()
    got: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, got.append)
    text = json.dumps({**json.loads(piece(at=time.time() - 3600)), "behind_s": -0.012})
    listening.hear(op="chunk", attempt=0, name="end", host=1, task=0, text=text)
    assert (got[0][0].offset_s, got[0][0].measured) == (-0.012, True)


def test_a_host_sends_how_far_its_clock_is_behind(listening: Listening) -> None:
    """By its monotonic clock, at the moment at which it hands in its evidence; what is too inexact is not sent."""
    listening.join()
    listening.job.share("end", "evidence")
    leader_s = time.time() - time.monotonic() + 7.0
    for error_s in (0.5, 0.001):
        listening.hear(op="clock", attempt=0, leader_s=leader_s, error_s=error_s)
        listening.job.share("end", "evidence")
    sent = [json.loads(one["text"]) for one in listening.channel.sent if one["op"] == "chunk"]
    assert ["behind_s" in one for one in sent] == [False, False, True]
    assert sent[2]["behind_s"] == pytest.approx(7.0, abs=0.5)


SECRET = "ghp_" + "a1B2" * 9


@pytest.mark.parametrize("is_missing", [False, True])
def test_what_a_host_tells_others_holds_no_secret(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, *, is_missing: bool
) -> None:
    """Also where the module that knows them cannot be imported: the message is told, without its words then."""
    listening.join()
    if is_missing:
        monkeypatch.setitem(sys.modules, "saferun.text.redaction", None)
    said = f"rank 3: RuntimeError: push to https://me:{SECRET}@example.org failed, token {SECRET}"
    listening.job.abort_attempt("failure", said, ranks=(3,))
    listening.job.broadcast_decision(BroadcastDecision(0, "finish", 1), [f"saferun: {said}", "hint: look"])
    trouble, decision = (sent["message"] for sent in listening.channel.sent[-2:])
    assert SECRET not in json.dumps([trouble, decision])
    assert (trouble["ranks"], decision["exit_code"]) == ([3], 1)
    assert trouble["text"].startswith("rank 3: RuntimeError: push to") is not is_missing
    assert decision["text"][1] == ("" if is_missing else "hint: look")


def test_what_the_log_tells_becomes_events(listening: Listening) -> None:
    """In its order."""
    listening.join()
    trouble = {"kind": "abort", "host": 1, "task": 0, "label": "node1", "reason": "failure", "text": "rank 2 died"}
    listening.hear(op="entry", attempt=0, k=0, message=trouble)
    listening.hear(op="entry", attempt=0, k=1, message=DECISION)
    first, second = listening.events
    assert isinstance(first, JobAborted)
    assert (first.reason, first.host, first.ours) == ("failure", "node1", False)
    assert isinstance(second, JobDecided)
    assert (second.next_step, second.messages) == ("restart", ("why",))
    assert listening.channel.sent[-1]["op"] == "ack"


def test_the_job_is_done_when_every_task_of_every_host_is(listening: Listening) -> None:
    """And not when some have said nothing yet."""
    listening.join()
    listening.hear(op="states", attempt=0, changed={"0/0": {"s": "done"}})
    assert listening.events == []
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": "done"}})
    assert isinstance(listening.events[0], HostsDone)


def test_states_of_an_attempt_that_the_supervisor_has_yet_to_count_are_kept(listening: Listening) -> None:
    """No state comes twice: without them the end of the job would be waited for without end."""
    listening.join()
    listening.attempt = -1
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": "done"}})
    listening.attempt = 0
    listening.hear(op="states", attempt=1, changed={"0/0": {"s": "done"}})
    assert listening.events == []
    listening.hear(op="states", attempt=0, changed={"0/0": {"s": "done"}})
    assert isinstance(listening.events[0], HostsDone)


def test_the_leader_of_an_attempt_that_its_supervisor_has_yet_to_count_is_listened_to() -> None:
    """A host that comes to a running elastic job may lead it: its coordinator ignored what it sent of another one."""
    listening = Listening("c10d")
    listening.job.join(JoinHosts(0))
    listening.hear(**{**JOINED, "attempt": 5})
    listening.hear(op="membership", attempt=5, text="a host waits")
    sent = [message for message in listening.channel.sent if message["op"] == "append"]
    assert [(message["attempt"], message["message"]["attempt"]) for message in sent] == [(5, 5)]
    listening.hear(op="entry", attempt=5, k=0, message={**sent[0]["message"], "host": 0})
    assert listening.job.current.is_ending


def test_a_host_that_cannot_be_heard_is_not_waited_for_while_the_job_goes_on(listening: Listening) -> None:
    """Neither for its ranks' end nor for its evidence; whether the job hangs is for the others to say."""
    listening.join()
    listening.hear(op="states", attempt=0, changed={"0/0": {"s": "run"}, "1/0": {"s": "run"}})
    watch = listening.job.current.silent_hosts._watch
    watch.begin(time.monotonic() - 1.0)
    watch._observation.moved_at = time.monotonic()
    listening.hear(op="silent", attempt=0, host=1, label="node1", why="unreachable", text="no answer")
    (warning,) = listening.said
    assert "no heartbeat received from node1" in warning
    assert not listening.job.lost
    listening.hear(op="states", attempt=0, changed={"0/0": {"s": "done"}})
    (silent,) = listening.events
    assert isinstance(silent, HostsUnreachable)
    assert silent.message == "no answer from node1"
    assert listening.states[-1] == {"0/0": {"s": "done"}, "1/0": {"s": "done"}}
    got: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, got.append)
    assert got == [[]]


@pytest.mark.parametrize(("op", "why"), [("silent", "frozen"), ("lost", "gone")])
def test_a_host_whose_ranks_have_ended_well_ends_no_job_by_its_silence(listening: Listening, op: str, why: str) -> None:
    """Nobody waits for it; torchrun would notice at the end, and not mind."""
    listening.join()
    listening.hear(op="states", attempt=0, changed={"0/0": {"s": "run"}, "1/0": {"s": "done"}})
    listening.hear(op=op, attempt=0, host=1, label="node1", why=why, text="node1 says nothing")
    assert not listening.events
    assert not listening.job.lost
    (warning,) = listening.said
    assert "node1 says nothing" in warning
    assert warning.endswith("have ended well, so the job goes on")
    got: list[list[EvidenceChunk]] = []
    listening.job.collect("end", 60.0, got.append)
    assert got == [[]]
    listening.hear(op="states", attempt=0, changed={"0/0": {"s": "done"}})
    assert isinstance(listening.events[-1], HostsDone)


@pytest.mark.parametrize("was_heard", [True, False])
def test_where_all_ranks_here_ended_well_a_host_that_falls_silent_is_waited_for(
    listening: Listening, was_heard: bool
) -> None:
    """Not forever, and also where nothing has ever been heard of it."""
    listening.join()
    states = {"0/0": {"s": "done"}, **({"1/0": {"s": "run"}} if was_heard else {})}
    listening.job.reports.set_state({"s": "done"})
    listening.hear(op="states", attempt=0, changed=states)
    listening.hear(op="silent", attempt=0, host=1, label="node1", why="unreachable", text="no answer")
    assert not listening.job.lost
    (silent,) = listening.events
    assert isinstance(silent, HostsUnreachable)
    assert listening.said == ["saferun: warning: no heartbeat received from node1 (no answer)"]
    listening.hear(op="returned", attempt=0, host=1)
    assert isinstance(listening.events[1], HostsReachable)
    listening.hear(op="states", attempt=0, changed={"1/0": {"s": "done"}})
    assert isinstance(listening.events[2], HostsDone)


def test_other_hosts_are_asked_how_their_ranks_do_where_this_ones_have_ended(listening: Listening) -> None:
    """Whose progress shows that the job goes on without the host that is silent."""
    peers = [[host, f"node{host}", [f"10.0.0.{host}"], host, 1] for host in range(3)]
    listening.job.join(JoinHosts(0))
    listening.hear(**{**JOINED, "hosts": 3, "peers": peers})
    running = {"1/0": {"s": "run"}, "2/0": {"s": "run"}}
    listening.hear(op="states", attempt=0, changed={"0/0": {"s": "done"}, **running})
    listening.hear(op="late", attempt=0)
    sent = listening.channel.sent
    assert [sent[-1]["message"][name] for name in ("kind", "hosts")] == ["watch", [1, 2]]
    control = listening.job.current.silent_hosts
    before = time.monotonic() - 20.0
    control._others.end()
    control._others.begin(before)
    own = control._watch._observation
    own.began_at = own.moved_at = own.active_at = time.monotonic() - 20.0
    for told in ([1, 1], "nonsense", [1]):
        changed = {"1/0": {"s": "run", "progress": told}}
        listening.hear(op="states", attempt=0, changed=changed)
    listening.hear(op="silent", attempt=0, host=2, label="node2", why="unreachable", text="no answer")
    (warning,) = listening.said
    assert "no heartbeat received from node2 (no answer); the ranks make progress, so the job goes on" in warning
    assert not listening.job.lost


def test_a_host_that_is_asked_reports_that_its_ranks_move(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its state, and only for a while."""
    listening.join()
    listening.hear(op="entry", attempt=0, k=0, message={"kind": "watch", "host": 0, "hosts": [1]})
    control = listening.job.current.silent_hosts
    assert control.deadline is None
    listening.hear(op="entry", attempt=0, k=0, message={"kind": "watch", "host": 0, "hosts": [0, 1]})
    moving = Progress(runs=True, watched_s=9.0, still_s=0.0, quiet_s=0.0)
    monkeypatch.setattr(control._watch, "progress", lambda _now, **_more: moving)
    control.tick(time.monotonic())
    sent = listening.channel.sent
    assert sent[-1]["state"] == {"s": "run", "progress": [1, 1]}
    control.tick(time.monotonic() + 1000.0)
    assert control.deadline is None


def test_what_cannot_be_judged_ends_nothing(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on as if nobody had looked, and that is said."""
    listening.join()

    def fail(_message: object) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(listening.job.current.silent_hosts, "hear", fail)
    listening.hear(op="silent", attempt=0, host=1, label="node1", why="unreachable", text="no answer")
    assert listening.events == []
    assert listening.said == ["saferun: warning: cannot judge whether other hosts are there: RuntimeError: no idea"]


def test_a_warning_of_the_coordinators_is_told(listening: Listening) -> None:
    """Nothing follows from it."""
    listening.join()
    listening.hear(op="warn", attempt=0, text="saferun on node1 (pid 7) waits for I/O (state D); the job goes on")
    assert listening.said == ["saferun: warning: saferun on node1 (pid 7) waits for I/O (state D); the job goes on"]
    assert listening.events == []


def test_the_supervisor_hears_that_the_coordinator_waits_for_hosts(listening: Listening) -> None:
    """A coordinator that says so is there."""
    listening.job.join(JoinHosts(0))
    listening.hear(op="waiting", text="waiting for 1 of 2 hosts: node2", waited_s=60)
    (awaited,) = listening.events
    assert isinstance(awaited, HostsAwaited)


def test_a_head_that_does_not_answer_is_named_and_not_waited_for_any_longer(listening: Listening) -> None:
    """Only a coordinator that answers may have a reason to keep a host for days."""
    events = len(listening.events)
    listening.hear(op="head_awaited", text="waiting for local rank 0 of this host", waited_s=30, for_others=True)
    assert listening.said == ["saferun: waiting for local rank 0 of this host (30 s)"]
    assert len(listening.events) == events


def test_what_is_waited_for_and_what_is_malformed_is_printed(listening: Listening) -> None:
    """As the coordinator puts it."""
    listening.hear(op="waiting", text="waiting for 1 of 2 hosts: node2", waited_s=30, for_others=True)
    listening.join()
    listening.hear(op="malformed", attempt=0, k=0, text="not a number")
    assert listening.said[0] == "saferun: waiting for 1 of 2 hosts: node2 (30 s)"
    assert "an entry of the job's log: not a number" in listening.said[1]


def test_a_meeting_that_fails_is_a_start_that_failed_and_a_store_that_is_lost_later_leaves_this_host_alone(
    listening: Listening,
) -> None:
    """There is nobody to be alone from before they have met."""
    listening.job.join(JoinHosts(0))
    listening.hear(op="join_failed", what="node1 is missing", hint="start it")
    assert isinstance(listening.events[0], StartFailed)
    listening.join()
    listening.hear(op="store_lost", attempt=0, why="gone", text="node0 is gone")
    assert isinstance(listening.events[1], JobLost)


@pytest.mark.parametrize(
    ("waited_for", "more", "is_join_failure_reported"),
    [
        ("", {}, False),
        ("", {"published": True}, True),
        ("", {"published": True, "usage": True}, True),
        ("node1 refuses connections from node3", {}, True),
        ("waiting for node2", {}, False),
    ],
)
def test_what_has_been_said_of_hosts_that_do_not_meet_is_known(
    listening: Listening, waited_for: str, more: dict[str, Any], *, is_join_failure_reported: bool
) -> None:
    """By whoever found it out, or by this host itself while it waited."""
    listening.job.join(JoinHosts(0))
    if waited_for:
        listening.hear(op="waiting", text=waited_for, waited_s=5)
    listening.hear(op="join_failed", what="node1 refuses connections from node3, for 15 s", hint="start it", **more)
    assert listening.job.is_join_failure_reported is is_join_failure_reported
    assert listening.job.is_refusal_printed is (more.get("usage", False))


@pytest.mark.parametrize(
    ("backend", "least", "changes", "more", "class_name"),
    [
        ("c10d", 1, {"max_restarts": 0}, {"gone": True}, "host_lost"),
        ("c10d", 1, {"in_batch_job": True}, {"gone": True}, "host_lost"),
        ("c10d", 1, {}, {}, ""),
        ("c10d", 1, {}, {"gone": "true"}, ""),
        ("c10d", 2, {"max_restarts": 0}, {"gone": True}, ""),
        ("c10d", 2, {"max_restarts": 1}, {"gone": True}, "host_lost"),
        ("c10d", 2, {"max_restarts": 1, "in_batch_job": True}, {"gone": True}, ""),
        ("static", 2, {"max_restarts": 1}, {"gone": True}, ""),
    ],
)
def test_hosts_meet_again_without_one_that_is_gone_where_the_others_or_another_one_may_be_enough(
    backend: str, least: int, changes: dict[str, Any], more: dict[str, Any], class_name: str
) -> None:
    """Else they would wait for it until the start timeout, and end then."""
    rendezvous = CONFIG.rendezvous._replace(backend=backend)
    listening = Listening(config=CONFIG._replace(hosts=HostsConfig(least, 2, 0), rendezvous=rendezvous, **changes))
    listening.job.join(JoinHosts(0))
    listening.hear(op="join_failed", what="node2 left while the hosts of the job met", hint="see there", **more)
    (failed,) = listening.events
    assert isinstance(failed, StartFailed)
    assert (failed.class_name, failed.exit_code) == (class_name, 1)


def test_who_waited_in_vain_for_hosts_that_a_scheduler_has_learns_how_to_be_alone() -> None:
    """``if [ $SLURM_NODEID = 0 ]; then saferun prepare.py``: torchrun would not have waited."""
    for detected, more, is_said in (
        ("Slurm step 4711.0", {"incomplete": True}, True),
        ("Slurm step 4711.0", {"incomplete": "true"}, False),
        (
            "Slurm step 4711.0",
            {},
            False,
        ),  # the hosts could not meet for another reason, or the host has an older release
        ("", {"incomplete": True}, False),
    ):
        listening = Listening(detected=detected)
        listening.job.join(JoinHosts(0))
        what = "3 of 4 hosts did not come within 600 s: node2, node3, node4"
        listening.hear(op="join_failed", what=what, hint="see there", **more)
        (failed,) = listening.events
        assert isinstance(failed, StartFailed)
        assert ("--standalone" in failed.hint) is is_said
        listening = Listening(detected=detected)
        for _ in range(2):
            others = {"waited_s": 5, "for_others": True}
            listening.hear(op="waiting", text="waiting for 3 of 4 hosts: node2, node3, node4", **others)
        assert ["--standalone" in line for line in listening.said] == [bool(detected), False]


def test_what_the_hosts_share_a_secret_by_goes_to_the_coordinator(listening: Listening) -> None:
    """Without files there is no directory to share it in."""
    listening.join()
    (join,) = [message for message in listening.channel.sent if message["op"] == "join"]
    assert join["sharing"] == SecretSharing("", required=False)


def test_the_directory_of_a_secret_is_removed_with_the_runs_own(listening: Listening) -> None:
    """By the writer, or by the reaper: the coordinator may have been killed."""
    noted: list[tuple[str, tuple[int, int]]] = []
    listening.run_dir.scratch.on_made = lambda path, which: noted.append((path, which))
    listening.join()
    listening.hear(op="made", path="/runs/.private-00", device=3, inode=4)
    assert noted == [("/runs/.private-00", (3, 4))]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"signed": "munge"}, ""),
        ({"signed": "", "unsigned_why": "there is no munge", "offered": ""}, ""),
        ({"signed": "", "unsigned_why": "node1 did not take the secret", "offered": "file"}, ""),
        (
            {"signed": "", "unsigned_why": "node1 did not\x1b take the secret", "offered": "munge"},
            "saferun: warning: messages between the hosts are not signed: node1 did not\\x1b take the secret",
        ),
    ],
)
def test_that_messages_are_not_signed_is_said_where_they_should_be(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], said: str
) -> None:
    """Hosts of one cluster all have munge or none of them has. Anything else is nothing unusual, and an event."""
    events: list[JsonObject] = []
    monkeypatch.setattr(listening.run_dir, "write_event", events.append)
    listening.job.join(JoinHosts(0))
    listening.hear(**{**JOINED, **told})
    assert [line for line in listening.said if "sign" in line] == ([said] if said else [])
    assert [event["event"] for event in events] == ["MessagesSigned"]
    assert events[0]["signed_by"] == told["signed"]
    assert len(listening.assignments) == 1


@pytest.mark.parametrize("reason", ["membership", "leave"])
def test_a_job_of_a_fixed_number_of_hosts_takes_nobody_in(listening: Listening, reason: str) -> None:
    """Whoever says that somebody wants to join has it end as one that failed, and not begin again without end."""
    listening.join()
    trouble = {"kind": "abort", "host": 1, "task": 0, "label": "node1", "reason": reason, "text": "wants to join"}
    listening.hear(op="entry", attempt=0, k=0, message=trouble)
    (event,) = listening.events
    assert isinstance(event, JobAborted)
    assert event.reason == "failure"
    assert listening.job.abort_reason is not None
    assert (listening.job.abort_reason.reason, listening.job.abort_reason.message) == ("failure", "wants to join")


def test_a_host_may_leave_a_job_whose_hosts_meet_by_a_handler_of_torch_s() -> None:
    """There another one can take its place."""
    listening = Listening("c10d")
    listening.join()
    trouble = {"kind": "abort", "host": 1, "task": 0, "label": "node1", "reason": "leave", "text": "SIGTERM"}
    listening.hear(op="entry", attempt=0, k=0, message=trouble)
    (event,) = listening.events
    assert isinstance(event, JobAborted)
    assert event.reason == "leave"


@pytest.mark.parametrize("last", ["run", RANKS_LEFT_OVER, RANKS_DONE])
def test_a_job_whose_ranks_have_all_ended_well_takes_nobody_in(last: str) -> None:
    """What they left behind, an upload for instance, is not ended for a host that comes then."""
    listening = Listening("c10d")
    listening.join()
    states = {"0/0": {"s": RANKS_DONE}, "1/0": {"s": last}}
    listening.hear(op="states", attempt=0, changed=states)
    listening.channel.sent.clear()
    listening.hear(op="membership", attempt=0, text="a host wants to join")
    assert bool(listening.channel.sent) is (last == "run")


# --------------------------------------------------------------------------------------------------- between attempts

STOP: dict[str, Any] = {"kind": "request", "task": 0, "text": "saferunctl stop", "label": "node0", "at_once": False}


def between_attempts(listening: Listening, **more: Any) -> None:
    """The hosts have met for attempt 0, and not yet for the next one."""
    listening.job.join(JoinHosts(0))
    listening.hear(**JOINED | more)
    listening.attempt = 1
    listening.job.join(JoinHosts(1))
    listening.channel.sent.clear()


@pytest.mark.parametrize("host", [0, 1])
def test_between_attempts_a_host_ends_by_what_the_leader_says(listening: Listening, host: int) -> None:
    """In the log of the attempt before; the leader reads its own entry there."""
    between_attempts(listening, **({} if host == 0 else {"host": 1, "base_rank": 2, "leader": False, "peers": []}))
    listening.hear(op="entry", attempt=0, k=9, message={**STOP, "host": 0})
    (event,) = listening.events
    assert isinstance(event, StopRequested)
    assert (event.attempt, event.by, event.ours) == (1, "saferunctl stop", False)
    assert listening.channel.sent == []


def test_between_attempts_a_decision_is_acknowledged_to_the_attempt_that_it_is_of(listening: Listening) -> None:
    """The leader waits for that, and the coordinator drops what is of an attempt for which the hosts have not met."""
    between_attempts(listening, host=1, base_rank=2, leader=False, peers=[])
    listening.hear(op="entry", attempt=0, k=9, message={**DECISION, "next": "finish"})
    (event,) = listening.events
    assert isinstance(event, JobDecided)
    assert (event.attempt, event.next_step) == (1, "finish")
    assert listening.channel.sent == [{"op": "ack", "attempt": 0}]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_host_that_waits_to_join_ends_when_a_user_has_ended_the_job(listening: Listening, *, at_once: bool) -> None:
    """It was never in an attempt, whose log it could read."""
    listening.job.join(JoinHosts(0))
    listening.hear(op="job_ended", by="saferunctl stop on node1", at_once=at_once)
    (event,) = listening.events
    assert isinstance(event, StopRequested)
    assert (event.by, event.at_once, event.ours) == ("saferunctl stop on node1", at_once, False)
    listening.job.end = Finish(143, by=event.by, ours=event.ours)
    listening.channel.sent.clear()
    listening.job.close()
    assert listening.channel.sent == [{"op": "close", "note": {"by": event.by, "at_once": False}}]


@pytest.mark.parametrize(
    ("backend", "end", "has_met", "sent"),
    [
        ("c10d", Finish(143, by="saferunctl stop", ours=True), False, ["saferunctl stop on node0"]),
        ("c10d", Finish(143, by="saferunctl stop", ours=True), True, ["saferunctl stop on node0"]),
        ("c10d", Finish(1), False, None),
        ("c10d", Finish(1), True, [None]),
        ("static", Finish(143, by="saferunctl stop", ours=True), False, ["saferunctl stop on node0"]),
        ("static", Finish(1), False, None),
        ("static", Finish(0), True, [None]),
    ],
)
def test_only_a_user_ends_a_job_that_other_hosts_wait_to_join(
    backend: str, end: Finish, sent: list[str | None] | None, *, has_met: bool
) -> None:
    """A host that goes for another reason while it waits leaves the others to themselves."""
    listening = Listening(backend)
    listening.join()
    if not has_met:
        listening.job.join(JoinHosts(1))
    listening.channel.sent.clear()
    listening.job.end = end
    listening.job.close()
    closes = [message for message in listening.channel.sent if message["op"] == "close"]
    assert [message.get("note", {}).get("by") for message in closes] == (sent or [])


@pytest.mark.parametrize(
    ("backend", "end", "op"),
    [
        ("etcd-v2", Finish(1, by_signal=True), "leave"),
        ("etcd", Finish(1, by_signal=True), "leave"),
        ("mine", Finish(1, by_signal=True), "leave"),
        ("etcd-v2", Finish(1), "close"),
        ("etcd-v2", Finish(0), "close"),
        ("c10d", Finish(1, by_signal=True), "close"),
    ],
)
def test_a_signal_closes_no_rendezvous_that_outlives_the_job(backend: str, end: Finish, op: str) -> None:
    """A scheduler that has stopped the job starts it again, and it meets by the same id, as under torchrun."""
    listening = Listening(backend)
    listening.join()
    listening.channel.sent.clear()
    listening.job.end = end
    listening.job.close()
    assert [message["op"] for message in listening.channel.sent if message["op"] in {"leave", "close"}] == [op]


@pytest.mark.parametrize("host", [0, 1])
def test_between_attempts_the_leader_repeats_what_another_host_was_asked(listening: Listening, host: int) -> None:
    """Only that is the end: a host that has begun to meet the others may not leave them."""
    between_attempts(listening, **({} if host == 0 else {"host": 1, "base_rank": 2, "leader": False, "peers": []}))
    listening.hear(op="entry", attempt=0, k=9, message={**STOP, "host": 1, "label": "node1", "at_once": True})
    assert listening.events == []
    sent = [
        (message["attempt"], message["message"]["text"], message["message"]["at_once"])
        for message in listening.channel.sent
    ]
    assert sent == ([(0, "saferunctl stop", True)] if host == 0 else [])


def test_between_attempts_no_host_is_asked_for_a_checkpoint(listening: Listening) -> None:
    between_attempts(listening)
    listening.hear(op="entry", attempt=0, k=9, message={**STOP, "kind": "checkpoint", "signum": 10, "host": 0})
    assert listening.events == []


def test_between_attempts_a_request_goes_to_the_log_of_the_attempt_before(listening: Listening) -> None:
    between_attempts(listening)
    listening.job.broadcast_request("saferunctl stop by me", at_once=False)
    (message,) = listening.channel.sent
    assert (message["op"], message["attempt"], message["message"]["attempt"]) == ("append", 0, 0)
    assert message["message"]["text"] == "saferunctl stop by me on node0"
