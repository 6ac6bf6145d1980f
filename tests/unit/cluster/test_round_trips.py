"""What one process of a job sends, another one reads: each message from its sender through JSON to its reader."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from saferun.cluster.join_messages import HostInfoText, Joined, JoinRequest, Master, Peer, ProbeTarget, SecretSharing
from saferun.cluster.messages import abort_from, chunk_from, decision_from, is_sound
from saferun.cluster.rendezvous_messages import assignment_from
from saferun.config import HostsConfig
from saferun.coordinator.job_log import LONGEST_MESSAGE_BYTES
from saferun.evidence.job_evidence import HangVerdict
from saferun.model import JsonObject
from saferun.supervisor.actions import BroadcastDecision, JoinHosts
from saferun.supervisor.events import HostsDone, JobAborted, JobDecided
from saferun.text.typed_json import fit
from saferun.watchdog.job_verdicts import combine, packed
from tests.unit.cluster.listening_job import JOINED, Listening
from tests.unit.samples import CONFIG

if TYPE_CHECKING:
    from saferun.model import AbortKind

KINDS = ("stopped", "uninterruptible", "heartbeat", "spinning", "stuck_collective", "quiescent")
REASONS: tuple[AbortKind, ...] = (
    *("failure", "victim", "hang", "start", "signal", "parent"),
    *("lost", "task_lost", "membership", "leave", "store_lost"),
)


def sent(message: JsonObject) -> JsonObject:
    """As it comes out of a socket, or out of the control store."""
    read: JsonObject = json.loads(json.dumps(message))
    return read


class Pair:
    """The leader, and host 1."""

    def __init__(self) -> None:
        self.leader, self.other = Listening(), Listening()
        self.leader.join()
        self.other.job.join(JoinHosts(0))
        own = {"host": 1, "leader": False, "base_rank": 2, "label": "node1", "peers": []}
        self.other.hear(**{**JOINED, **own})

    def relay(self) -> JsonObject:
        """What host 1 has sent last, as the coordinators hand it to the leader."""
        message = sent(self.other.channel.sent[-1])
        match message["op"]:
            case "append":
                self.leader.hear(op="entry", attempt=message["attempt"], message=message["message"])
            case "state":
                self.leader.hear(op="states", attempt=message["attempt"], changed={"1/0": message["state"]})
        assert self.leader.job.ignored.count == 0
        return message


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("reason", REASONS)
def test_an_abort_is_read_with_each_reason(pair: Pair, reason: AbortKind) -> None:
    """One that was not read would leave the other hosts' ranks waiting."""
    pair.other.job.abort_attempt(reason, "rank 2: killed by SIGSEGV", ranks=(2, 3), signum=15, lost_task=1, hint="look")
    message = pair.relay()["message"]
    assert is_sound(message)
    heard = abort_from(message)
    assert heard[:5] == (reason, "rank 2: killed by SIGSEGV", "node1", 1, 0)
    assert heard[6:] == (15, (2, 3), 1, "look")
    (aborted,) = (event for event in pair.leader.events if isinstance(event, JobAborted))
    # No host comes or goes in a job of a fixed number of hosts.
    assert aborted.reason == ("failure" if reason in {"membership", "leave"} else reason)
    assert (aborted.signum, aborted.host, aborted.ours) == (15, "node1", False)


def test_an_abort_says_as_little_as_it_may(pair: Pair) -> None:
    """No rank, no signal, no task."""
    pair.other.job.abort_attempt("start", "")
    assert abort_from(pair.relay()["message"])[6:] == (0, (), None, "")


@pytest.mark.parametrize("step", ["restart", "finish"])
def test_a_decision_is_read_by_all(pair: Pair, step: str) -> None:
    """Only the leader makes one."""
    action = BroadcastDecision(0, step, 137, 2.5, 3, excluded=1, replaced=2)  # type: ignore[arg-type]
    pair.leader.job.broadcast_decision(action, ["why", "what next"])
    message = sent(pair.leader.channel.sent[-1])["message"]
    assert is_sound(message)
    assert decision_from(message) == (step, 137, 2.5, 3, ("why", "what next"), 1, 2)
    pair.other.hear(op="entry", attempt=0, message=message)
    (decided,) = (event for event in pair.other.events if isinstance(event, JobDecided))
    assert (decided.next_step, decided.exit_code, decided.restarts, decided.replaced) == (step, 137, 3, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_is_read_by_all(pair: Pair, kind: str) -> None:
    """With its number: what is captured of the same hang has the same name on all hosts."""
    pair.leader.job.reports.broadcast_hang(HangVerdict(kind, (0, 1, 3), 30.5, certain=True, busy=(2,)), 7)
    pair.other.hear(op="entry", attempt=0, message=sent(pair.leader.channel.sent[-1])["message"])
    assert pair.other.hangs == [7]
    assert pair.other.job.ignored.count == 0


def test_a_hang_of_thousands_of_ranks_here_and_there_is_one_entry_of_the_log(pair: Pair) -> None:
    """Entries have a limit, and a host that is not told captures nothing."""
    ranks = tuple(range(0, 24_000, 2))
    pair.leader.job.reports.broadcast_hang(HangVerdict("stuck_collective", ranks, 300.0, certain=True, busy=ranks), 7)
    message = sent(pair.leader.channel.sent[-1])["message"]
    assert len(json.dumps(message)) < LONGEST_MESSAGE_BYTES
    pair.other.hear(op="entry", attempt=0, message=message)
    assert pair.other.hangs == [7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("certain", [True, False])
def test_a_state_in_which_nothing_moves_is_the_verdict_that_was_sent(pair: Pair, kind: str, *, certain: bool) -> None:
    """The leader combines those of all hosts."""
    verdict = HangVerdict(kind, (2, 3), 30.5, certain=certain, busy=(3,))
    pair.other.job.reports.set_state({"s": "quiet", **packed(verdict)})
    pair.relay()
    (states,) = pair.leader.states
    assert combine({"0/0": {"s": "done"}, **states}, ranks_of={"1/0": (2, 3)}) == verdict


@pytest.mark.parametrize(
    ("state", "is_at_work", "is_done"),
    [
        ({"s": "quiet"}, False, False),
        ({"s": "leftovers"}, False, False),
        ({"s": "leftovers", "text": "waiting for process 71"}, False, False),
        ({"s": "done"}, False, True),
    ],
)
def test_the_states_of_a_host_are_read(pair: Pair, state: JsonObject, *, is_at_work: bool, is_done: bool) -> None:
    """``rank_actions``, ``attempt_end`` and ``hang_watch`` send these. ``run`` is what a host begins with."""
    own = {"s": "done"}
    pair.leader.hear(op="states", attempt=0, changed={"0/0": own})
    pair.other.job.reports.set_state(state)
    pair.relay()
    states = pair.leader.job.current.states
    assert states.by_task["1/0"] == state
    assert (1 in states.running()) is (state["s"] == "quiet")
    assert states.is_done(1) is is_done
    assert any(isinstance(event, HostsDone) for event in pair.leader.events) is is_done
    assert (combine(states.by_task) is None) is (is_at_work or state["s"] != "quiet")
    assert any("process 71" in line for line in pair.leader.said) is ("text" in state)
    pair.other.job.reports.set_state({"s": "run"})
    pair.relay()
    assert 1 in states.running()


def test_progress_and_the_way_to_the_leader_travel_with_the_state(pair: Pair) -> None:
    """They say nothing of the ranks' own state."""
    pair.other.job.current.report.set_progress(3, 5)
    assert pair.relay()["state"] == {"s": "run", "progress": [3, 5]}
    pair.other.job.current.report.set_route("eth1 instead of eth0")
    assert pair.relay()["state"] == {"s": "run", "progress": [3, 5], "route": "eth1 instead of eth0"}
    assert pair.leader.job.current.states.by_task == {"1/0": {"s": "run"}}
    assert pair.leader.job.current.states.progress("1/0", [3, 6]) == (False, True)


@pytest.mark.parametrize("moved", [True, False])
def test_evidence_is_read_as_it_was_sent(pair: Pair, *, moved: bool) -> None:
    """With whether the ranks had moved, and whether the user stopped them."""
    pair.other.job.share("end", "a picture", moved=moved, stopped=not moved)
    message = pair.relay()
    chunk = chunk_from(message["text"])
    assert (chunk.evidence, chunk.moved, chunk.stopped) == ("a picture", moved, not moved)


@pytest.mark.parametrize("rank", [None, 3])
def test_a_request_to_join_is_what_the_coordinator_reads(rank: int | None) -> None:
    """All of it, whatever is unknown."""
    hosts = HostsConfig(1, 4, rank, names=("node0", "n\udcff"))
    listening = Listening(config=CONFIG._replace(hosts=hosts))
    listening.job.join(JoinHosts(4, restarts=2), "what it knows", "where it listens")
    message = listening.channel.sent[-1]
    request: JoinRequest = fit(JoinRequest, sent(message))
    assert request._asdict() == {name: message[name] for name in JoinRequest._fields}
    assert (request.attempt, request.restarts, request.node_rank, request.elastic) == (4, 2, rank, True)
    assert isinstance(request.master, Master)
    assert isinstance(request.sharing, SecretSharing)
    assert (request.record.host_info, request.record.probe_endpoint) == ("what it knows", "where it listens")


def test_a_host_that_joins_says_whether_it_has_met_the_others_before() -> None:
    """A start that failed before that is no meeting."""
    listening = Listening()
    requests = list[JoinRequest]()
    for attempt in (1, 2):
        listening.job.join(JoinHosts(attempt))
        requests.append(fit(JoinRequest, sent(listening.channel.sent[-1])))
        listening.hear(**{**JOINED, "attempt": attempt, "has_begun": attempt > 1})
    assert [request.has_met for request in requests] == [False, True]
    assert [assignment.has_begun for assignment in listening.assignments] == [False, True]


def test_what_the_hosts_agreed_on_is_what_each_of_them_reads() -> None:
    """Of ten thousand hosts, too: the leader has them all."""
    count = 10_000
    peers = tuple(Peer(host, f"node{host}", (f"10.0.{host >> 8}.{host & 255}",), host, 1) for host in range(count))
    joined = Joined(
        *(3, 1, 0, count),
        base_rank=0,
        world_size=count,
        role_base=0,
        role_world_size=count,
        master_addr="node0",
        master_port=29500,
        leader=True,
        leader_name="node0",
        label="node0",
        local_world_size=1,
        files="20260101-000000-abcdef",
        checked=True,
        leader_addresses=("10.0.0.1",),
        probe_endpoints=(ProbeTarget(1, "node1", "10.0.0.2 7 secret"),),
        host_infos=(HostInfoText("x" * 60_000, "10.0.0.1 7 secret"),) * 3,
        peers=peers,
        needed=(7,),
    )
    read: Joined = fit(Joined, sent({"op": "joined", **joined._asdict()}))
    assert read == joined
    assignment = assignment_from(CONFIG, read)
    assert (assignment.number, assignment.leads, assignment.placement.world_size) == (3, True, count)
    assert assignment.host_infos[0].host_info == "x" * 60_000
    assert assignment.needed == (7,)


def test_a_peer_that_makes_no_sense_is_left_out() -> None:
    """The others are needed."""
    rows = [[0, "node0", ["10.0.0.1"], 0, 2], [-1, "node1", [], 2, 2], ["x"], None, [2, "node2", "10.0.0.3", 2, 2]]
    read: Joined = fit(Joined, {**JOINED, "peers": rows})
    assert read.peers == (Peer(0, "node0", ("10.0.0.1",), 0, 2),)


def test_slow_ranks_are_named_to_all_hosts_and_what_is_seen_beside_them_comes_back(pair: Pair) -> None:
    """Each once, whatever else of a state changes after it."""
    slow: list[list[int]] = []
    waits: list[object] = []
    beside: list[list[str]] = []
    pair.other.job.reports.on_slow = lambda ranks: slow.append(list(ranks))
    pair.leader.job.reports.on_waits = lambda _host, ranks, rows: waits.append((list(ranks), rows))
    pair.leader.job.reports.on_beside = lambda _ranks, lines: beside.append(list(lines))
    pair.leader.job.reports.broadcast_slow((2,))
    pair.other.hear(op="entry", attempt=0, message=sent(pair.leader.channel.sent[-1])["message"])
    assert slow == [[2]]
    report = pair.other.job.current.report
    report.set_more("waits", {"n": 1, "rows": [[2, 0.5]]})
    pair.relay()
    report.set_more("beside", {"n": 1, "lines": ["GPU 2 is throttled"]})
    pair.relay()
    pair.other.job.reports.set_state({"s": "done"})
    pair.relay()
    assert waits == [([2, 3], [[2, 0.5]])]
    assert beside == [["GPU 2 is throttled"]]
    assert pair.leader.job.current.states.is_done(1)
