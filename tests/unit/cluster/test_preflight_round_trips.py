"""What hosts say of their checks and probes before the ranks start: from each sender through JSON to its reader."""

from __future__ import annotations

import json

from saferun.cluster.join_messages import HostInfoText, ProbeTarget
from saferun.cluster.messages import chunk_from
from saferun.coordinator.assignments import (
    HostAssignment,
    HostRecord,
    TaskRecord,
    assign,
    decode_assignment,
    decode_host_record,
    encode_assignment,
    encode_host_record,
)
from saferun.coordinator.job_log import LONGEST_MESSAGE_BYTES
from saferun.model import JsonObject
from saferun.preflight.bisect import Member, Trial, TrialResult
from saferun.preflight.bisect.trial_driver import decode_outcomes, decode_trial, encode_outcomes, encode_trial
from saferun.preflight.host_messages import (
    decode_endpoint,
    decode_host_info,
    decode_probes,
    encode_endpoint,
    encode_host_info,
    encode_probes,
)
from saferun.preflight.leader_messages import (
    GoAhead,
    PairAgain,
    again_message,
    go_ahead_from,
    go_ahead_message,
    pairs_from,
)
from saferun.preflight.results import HostInfo, Probe, ProbeEndpoint
from tests.unit.cluster.test_round_trips import Pair, sent

ENDPOINT = ProbeEndpoint(40123, "0123456789abcdef" * 2, (("eth0", "10.0.0.2"), ("ib0", "fd00::2")))
TRIAL = Trial(3, "all_reduce of 2 hosts", ((Member(0, 0), Member(0, 1), Member(1, 0)), (Member(1, 1),)), "ib0", 20.5)


def broadcast(message: JsonObject) -> JsonObject:
    """What the other hosts' checks take of a message of the leader's."""
    pair = Pair()
    pair.leader.job.broadcast_preflight(message)
    pair.other.hear(op="entry", attempt=0, message=sent(pair.leader.channel.sent[-1])["message"])
    assert pair.other.job.ignored.count == 0
    (heard,) = pair.other.told
    return heard


def shared(name: str, text: str) -> str:
    """What the leader takes of a chunk of another host's."""
    pair = Pair()
    pair.other.job.share(name, text)
    return chunk_from(pair.relay()["text"]).evidence


def test_host_info_and_endpoint_travel_with_the_record_to_the_leader_and_to_those_who_probe() -> None:
    """Through the record of the host, and the assignments of the others."""
    info = HostInfo("node1", 1.5)
    records = []
    for name in ("node0", "node1"):
        record = HostRecord(
            name,
            (TaskRecord(2, "default", 7),),
            host_info=encode_host_info(info),
            probe_endpoint=encode_endpoint(ENDPOINT),
        )
        read = decode_host_record(encode_host_record(record))
        assert read == record
        records.append(record)
    assignment = decode_assignment(encode_assignment(assign(records)[0]))
    assert isinstance(assignment, HostAssignment)
    assert assignment.checked
    (target,) = assignment.probe_endpoints
    assert isinstance(target, ProbeTarget)
    assert (target.host, target.label, decode_endpoint(target.endpoint)) == (1, "node1", ENDPOINT)
    (of_leader, _) = (HostInfoText(record.host_info, record.probe_endpoint) for record in records)
    assert decode_host_info(of_leader.host_info) == info


def test_an_endpoint_of_many_interfaces_fits_into_the_record() -> None:
    """A host whose record cannot be read never joins."""
    routes = tuple((f"enp{i}s0f0v12", f"fe80:1234:5678:9abc:def0:1234:5678:{i:x}%enp{i}s0f0v12") for i in range(200))
    text = encode_endpoint(ENDPOINT._replace(routes=routes))
    record = HostRecord("node0", (TaskRecord(2, "default", 7),), probe_endpoint=text)
    assert decode_host_record(encode_host_record(record)) == record
    endpoint = decode_endpoint(text)
    assert endpoint is not None
    assert endpoint.routes[:16] == routes[:16]


def test_probes_of_a_host_reach_the_leader() -> None:
    """Those of its own only."""
    good = Probe(1, 0, "eth0", "10.0.0.1", "ib0", latency_s=0.001, bytes_s=1e9, retransmits=3, segments=9, clock_s=0.25)
    probes = (good, Probe(1, 2, "eth0", "10.0.0.3", kind="timeout", message="no answer"))
    text = shared("probes-1", encode_probes((*probes, Probe(0, 1, "eth0", "10.0.0.2", kind="refused"))))
    assert decode_probes(text, 1) == probes


def test_pairs_to_be_measured_again_reach_all_hosts() -> None:
    """With the target's name, and how it is probed."""
    pairs = (PairAgain(1, 0, "node0", encode_endpoint(ENDPOINT)), PairAgain(0, 1, "node1", ""))
    assert pairs_from(broadcast(again_message(pairs))) == pairs


def test_more_pairs_than_a_message_holds_are_cut() -> None:
    """A message that is too long would be dropped, and all hosts would wait for it."""
    pairs = [PairAgain(i, i + 1, f"node{i + 1}", "x" * 4000) for i in range(64)]
    message = again_message(pairs)
    assert len(json.dumps({"kind": "preflight", **message, "label": "x" * 255})) < LONGEST_MESSAGE_BYTES
    assert pairs_from(broadcast(message)) == tuple(pairs[:12])
    assert len(pairs_from(broadcast(again_message(pair._replace(endpoint="") for pair in pairs * 2)))) == 64


def test_a_pair_that_makes_no_sense_is_left_out() -> None:
    """The others are measured."""
    rows = [["0", 1, "n", ""], [0, 1], None, [-1, 1, "n", ""], [0, 1, "n", ""]]
    assert pairs_from({"again": rows}) == (PairAgain(0, 1, "n", ""),)


def test_the_leaders_go_ahead_reaches_all_hosts() -> None:
    """With the interfaces that the ranks are to use, or without any."""
    assert go_ahead_from(broadcast(go_ahead_message(("ib0", "ib1")))) == GoAhead(("ib0", "ib1"))
    assert go_ahead_from(broadcast(go_ahead_message(()))) == GoAhead()
    assert go_ahead_from({"ok": True}) == GoAhead()


def test_a_trial_reaches_all_hosts_and_its_outcomes_the_leader() -> None:
    """Each host reports its own members."""
    assert decode_trial(broadcast({"trial": encode_trial(TRIAL)})["trial"]) == TRIAL
    assert broadcast({"trial": {}})["trial"] == {}
    outcomes = [TrialResult(Member(1, 0), "ok", "", ""), TrialResult(Member(1, 1), "error", "NCCL error", "all_reduce")]
    assert decode_outcomes(shared("trial-3", encode_outcomes(outcomes)), 1) == outcomes
