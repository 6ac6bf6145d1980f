"""Broken networks between hosts, and hangs of jobs of several hosts."""

from __future__ import annotations

from functools import partial

import pytest

from saferun.cluster.evidence import HostPart, LostHost, merge_parts
from saferun.diagnosis import diagnose
from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.job_evidence import Capture, Evidence, HangVerdict, HostView, StuckLink
from tests.unit.diagnosis.jobs_of_hosts import (
    cause_of,
    lost_peer,
    stopped,
)
from tests.unit.host_samples import (
    IN_LOAD,
    RESET,
    TIMED_OUT,
    captured,
    dump_of,
    ended,
    host_evidence,
    job,
    look_of,
    peers_of,
    recorder_of,
    traceback_of,
)
from tests.unit.operations import operations

GLOO = "RuntimeError: Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144]"
QUIET = HangVerdict("quiescent", tuple(range(8)), 300.0, certain=True)


# ------------------------------------------------------------------------------------------------------------- network


def timed_out(host: int, message: str = TIMED_OUT, links: tuple[StuckLink, ...] = ()) -> Evidence:
    """A host whose ranks waited too long in the same collective as everybody."""
    ranks = (2 * host, 2 * host + 1)
    return host_evidence(
        host,
        ends=[ended(rank, 2, after_s=90.0 + rank / 10, code=1) for rank in ranks],
        said={rank: traceback_of(message) for rank in ranks},
        capture=captured(host)._replace(links=links),
    )


def link(rank: int, peer: int, retries: int = 5) -> StuckLink:
    """A connection from a rank to a host that does not acknowledge."""
    return StuckLink(
        rank, f"10.0.0.{rank // 2 + 1}:4{rank}000", f"10.0.0.{peer + 1}:50123", "ESTABLISHED", 4096, retries
    )


def test_a_cut_network_interface_is_found_where_all_stuck_connections_meet() -> None:
    """Every rank timed out, and healthy ones first; node3 is at one end of all connections that stand still."""
    stuck = {0: (link(0, 2),), 1: (link(3, 2),), 2: (link(4, 0), link(5, 3)), 3: (link(6, 2),)}
    found = diagnose(job({host: timed_out(host, links=links) for host, links in stuck.items()}))
    assert cause_of(found).class_name == "network_cut"
    assert found.headline.startswith("nothing gets through between node3 and node1, node2, node4: its network is cut")
    assert cause_of(found).ranks == (4, 5)
    assert "4096 bytes unacknowledged, 5 retransmits" in cause_of(found).proof
    assert "node3" in cause_of(found).advice


def test_an_interface_that_its_own_host_has_seen_fail_is_named_with_it() -> None:
    """Whoever judges, and where there are but two hosts, of which either could be to blame."""
    stuck = {0: (link(0, 2),), 1: (link(3, 2),), 2: (link(4, 0), link(5, 3)), 3: (link(6, 2),)}
    parts = {host: timed_out(host, links=links) for host, links in stuck.items()}
    parts[2] = parts[2]._replace(nics=("eth1 has no carrier",))
    found = diagnose(job(parts))
    assert found.headline.startswith("node3: eth1 has no carrier; nothing gets through between node3 and node1")
    assert (cause_of(found).class_name, cause_of(found).ranks) == ("network_cut", (4, 5))
    pair: dict[int, tuple[StuckLink, ...]] = {0: (), 1: (link(3, 2),), 2: (link(4, 1),), 3: ()}
    parts = {host: timed_out(host, links=links) for host, links in pair.items()}
    parts[1] = parts[1]._replace(nics=("eth1 is down",))
    found = diagnose(job(parts))
    assert found.headline.startswith("node2: eth1 is down; the ranks of node2 and node3 do not reach each other")
    assert cause_of(found).ranks == (2, 3)
    assert "node2's interface" in cause_of(found).advice


def test_two_hosts_that_do_not_reach_each_other_are_named_both() -> None:
    """Others wait for them, and time out first."""
    stuck: dict[int, tuple[StuckLink, ...]] = {0: (), 1: (link(3, 2),), 2: (link(4, 1),), 3: ()}
    found = diagnose(job({host: timed_out(host, links=links) for host, links in stuck.items()}))
    assert cause_of(found).class_name == "network_between_hosts"
    assert found.headline.startswith("the ranks of node2 and node3 do not reach each other")


def test_everybody_in_a_collective_that_does_not_end_is_the_network() -> None:
    """No connection tells where; that nobody is missing does."""
    found = diagnose(job({host: timed_out(host) for host in range(4)}))
    assert cause_of(found).class_name == "network_between_hosts"
    assert "all ranks have come to all_reduce (7 of group" in found.headline
    assert cause_of(found).ranks == ()


def test_who_did_not_come_is_the_cause_of_a_timeout_and_not_the_network() -> None:
    """A rank is behind: the network has nothing to do with it."""
    late = timed_out(2)._replace(capture=captured(2, frames={4: IN_LOAD}, numbers={4: 6}))
    parts = {0: timed_out(0), 1: timed_out(1), 2: late, 3: timed_out(3)}
    found = diagnose(job(parts))
    assert cause_of(found).class_name == "collective_timeout"
    assert cause_of(found).ranks == (4,)


@pytest.mark.parametrize(
    "message",
    [
        f"{GLOO} timed out connecting: SO_ERROR: Connection timed out, remote=[10.0.0.3]:14999",
        f"{GLOO} connect [10.0.0.3]:14999: No route to host",
        f"{GLOO} connect from [10.0.0.1]:5555 to [::ffff:10.0.0.3]:14999: Connection timed out",
    ],
)
def test_a_silent_address_in_a_message_names_its_host(message: str) -> None:
    """A firewall drops what comes to node3: the others say where they wanted to."""
    parts = {host: timed_out(host, message=message)._replace(capture=Capture()) for host in (0, 1, 3)}
    found = diagnose(job({**parts, 2: stopped(2)}))
    assert cause_of(found).class_name == "network_cut"
    assert found.headline.startswith("nothing gets through between node3 and node1, node2, node4")


def test_a_host_that_refuses_the_ranks_of_others_has_a_firewall() -> None:
    """Nobody listens, or a firewall rejects; that they could meet in the store shows that the host is up."""
    message = (
        "RuntimeError: Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] timed out connecting: "
        "SO_ERROR: Connection refused, remote=[10.0.0.3]:14999"
    )
    parts = {host: timed_out(host, message=message)._replace(capture=Capture()) for host in (0, 1, 3)}
    found = diagnose(job({**parts, 2: stopped(2)}))
    assert found.headline.startswith("node3 refuses the connections of node1, node2, node4")
    assert "firewall of node3" in cause_of(found).advice


def test_a_refusal_is_told_whatever_a_healthy_rank_was_doing_at_that_moment() -> None:
    """A rank that got through may already be in its own code, or on its way out, when it is looked at."""
    message = f"{GLOO} timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:14999"
    parts = {2: timed_out(2, message=message)._replace(capture=Capture()), 1: stopped(1), 3: stopped(3)}
    busy = stopped(0)._replace(capture=captured(0, frames={0: IN_LOAD})._replace(collectives=()))
    found = diagnose(job({**parts, 0: busy}))
    assert found.headline.startswith("node2 refuses the connections of node3")
    silent = message.replace("SO_ERROR: Connection refused, ", "")
    parts[2] = timed_out(2, message=silent)._replace(capture=Capture())
    assert cause_of(diagnose(job({**parts, 0: busy}))).class_name == "rendezvous_store_failure"


@pytest.mark.parametrize("error", ["111 - Connection refused", "110 - Connection timed out"])
def test_a_warning_of_torch_about_a_connection_is_no_evidence_of_what_ended_a_rank_hours_later(error: str) -> None:
    """Ranks that come before the store get it, try again, and print little more until NCCL's watchdog ends them."""
    warning = (
        "[W1012 08:00:13.112 socket.cpp:764] [c10d] The client socket has failed to connect to [::ffff:10.0.0.1]:29500 "
        f"(errno: {error})."
    )
    watchdog = (
        "[E1012 11:12:13.112 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=512, OpType=ALLREDUCE, NumelIn=1024, NumelOut=8192, Timeout(ms)=600000) ran for 600031 "
        "milliseconds before timing out."
    )
    parts = {}
    for host in range(4):
        ranks = (2 * host, 2 * host + 1)
        said = {rank: (*((warning,) if host else ()), f"[rank{rank}]:{watchdog.format(rank=rank)}") for rank in ranks}
        ends = [ended(rank, 2, after_s=9000.0 + rank / 10, signum=6) for rank in ranks]
        parts[host] = host_evidence(host, ends=ends, said=said)
    found = diagnose(job(parts))
    assert cause_of(found).class_name == "nccl_timeout"
    assert "refuse" not in found.headline


@pytest.mark.parametrize(("address", "advice"), [("127.0.1.1", "/etc/hosts"), ("172.17.0.1", "GLOO_SOCKET_IFNAME")])
def test_an_address_that_every_host_has_for_itself_is_the_wrong_interface(address: str, advice: str) -> None:
    """Ranks told the others how to reach them, and chose a loopback, or the bridge of containers."""
    message = (
        "RuntimeError: Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] timed out connecting: "
        f"SO_ERROR: Connection refused, remote=[{address}]:14999"
    )
    ends = [timed_out(host, message=message)._replace(bridges=("172.17.0.1",)) for host in range(4)]
    parts = [HostPart(host, 0, f"node{host + 1}", 0.0, evidence) for host, evidence in enumerate(ends)]
    found = diagnose(merge_parts(parts, world_size=8, peers=peers_of(4)))
    assert cause_of(found).class_name == "network_interface"
    assert address in found.headline
    assert advice in cause_of(found).advice


def test_the_first_connection_that_broke_tells_where() -> None:
    """All ranks lost connections, and nobody failed by himself: something between two hosts closed them."""
    parts = {0: lost_peer(0, 1, 33.0), 1: lost_peer(1, 2, 31.0), 2: lost_peer(2, 1, 31.2), 3: lost_peer(3, 2, 32.0)}
    found = diagnose(job(parts))
    assert cause_of(found).class_name == "network_between_hosts"
    assert found.headline.startswith("a connection between node2 and node3 broke first")


RDMA = (
    "RuntimeError: NET/IB : Got completion from peer 10.0.0.{host}<54862> with status=12 opcode=0 len=0 vendor err 129"
)


@pytest.mark.parametrize("status", ["status=12", "error 12", "status=IBV_WC_RETRY_EXC_ERR(12)"])
def test_a_host_that_does_not_answer_over_rdma_is_named_with_the_one_that_asked(status: str) -> None:
    """No rank has failed by itself: it is what lies between. Releases of NCCL write the status in different ways."""
    message = RDMA.replace("status=12", status)
    found = diagnose(job({0: lost_peer(0, 2, message=message), 1: stopped(1), 2: stopped(2), 3: stopped(3)}))
    assert cause_of(found).class_name == "network_between_hosts"
    assert "node1" in found.headline
    assert "node3" in found.headline


@pytest.mark.parametrize("length", [10**digits for digits in range(0, 12, 2)])
def test_of_an_rdma_request_the_peer_is_named_and_no_host_with_the_start_of_its_address(length: int) -> None:
    """What was read of the line ended within an address: 192.168.0.1 is another host than 192.168.0.13."""
    message = (
        f"RuntimeError: NET/IB : Got completion from peer 10.0.0.13<44206> with status=12 opcode=129 len={length} "
        "vendor err 129 (Recv) localGid ::ffff:192.168.0.2 remoteGids::ffff:192.168.0.13 hca mlx5_3"
    )
    parts = {host: lost_peer(host, 12, message=message) for host in (1, 2)}
    found = diagnose(job({**parts, **{host: stopped(host) for host in (0, *range(3, 13))}}, hosts=13))
    assert found.headline.startswith("nothing gets through between node13 and node2, node3: its network is cut")


@pytest.mark.parametrize("chars", range(80, 96))
def test_an_address_that_stands_before_or_behind_a_message_is_read_whole(chars: int) -> None:
    """So far from it, an address was cut, and meant another host."""
    for text in (f"Connection timed out, {'.' * chars} [10.0.0.13]:14999", f"10.0.0.13 {'.' * chars} No route to host"):
        parts = {host: timed_out(host, message=f"{GLOO} {text}")._replace(capture=Capture()) for host in (1, 2)}
        found = diagnose(job({**parts, **{host: stopped(host) for host in (0, *range(3, 13))}}, hosts=13))
        assert found.headline.startswith("nothing gets through between node13 and node2, node3: its network is cut")


def test_a_rank_that_died_is_the_cause_and_not_the_rdma_requests_to_it() -> None:
    """A dead peer and a broken link look the same to the one that waits."""
    killed = host_evidence(2, ends=[ended(4, 2, after_s=31.5, signum=9), ended(5, 2, signum=15, stopped=True)])
    found = diagnose(job({0: lost_peer(0, 2, 31.3, message=RDMA), 1: stopped(1), 2: killed, 3: stopped(3)}))
    assert cause_of(found).class_name == "killed_from_outside"
    assert found.victims == (0, 1)


def test_hosts_without_addresses_are_not_guessed() -> None:
    """An address that belongs to nobody who is known names nobody."""
    parts = [HostPart(host, 0, f"node{host + 1}", 0.0, lost_peer(host, 9)) for host in range(2)]
    found = diagnose(merge_parts(parts, world_size=4))
    assert cause_of(found).class_name == "peer_lost"
    assert "no earlier rank failure is known" in found.headline


# --------------------------------------------------------------------------------------------------------------- hangs


def test_a_frozen_rank_on_one_host_is_named_while_all_wait_for_it() -> None:
    """Forever, in the baseline, with nothing said."""
    parts = {
        host: host_evidence(host, capture=captured(host, states={5: "T"} if host == 2 else None)) for host in range(4)
    }
    found = diagnose_hang(job(parts, hang=QUIET))
    assert "rank 5 (node3)" in found.headline
    assert "is stopped (state T)" in found.headline
    assert cause_of(found).class_name == "hang_stopped"
    assert cause_of(found).ranks == (5,)


def test_a_rank_that_sleeps_on_another_host_is_named() -> None:
    """The tree has one branch for it, and one for all others, whatever host they are on."""
    parts = {
        host: host_evidence(host, capture=captured(host, frames={4: IN_LOAD}, numbers={4: 6})) for host in range(4)
    }
    found = diagnose_hang(job(parts, hang=QUIET))
    assert "rank 4 (node3)" in found.headline
    assert [node.ranks for node in found.tree] == [tuple(range(8))]
    assert sorted(child.ranks for child in found.tree[0].children) == [(0, 1, 2, 3, 5, 6, 7), (4,)]


def test_all_ranks_of_a_host_are_named_by_their_host() -> None:
    """A host's file system hangs."""
    frames = {4: IN_LOAD, 5: IN_LOAD}
    parts = {
        host: host_evidence(host, capture=captured(host, frames=frames, numbers={4: 6, 5: 6})) for host in range(4)
    }
    found = diagnose_hang(job(parts, hang=QUIET))
    assert "all ranks of node3 (ranks 4-5)" in found.headline


def test_a_host_that_says_nothing_is_named_where_all_others_wait() -> None:
    """Its evidence does not come in time, because it is what hangs."""
    parts = {host: host_evidence(host, capture=captured(host)) for host in (0, 1, 3)}
    found = diagnose_hang(job(parts, hang=QUIET))
    assert found.headline == ("the job hangs: no evidence from node3 (ranks 4-5), and all others wait in all_reduce")
    assert cause_of(found).ranks == (4, 5)
    assert {rank for group in found.groups for rank in group.ranks} == {0, 1, 2, 3, 6, 7}


def test_a_lost_host_is_what_a_job_hangs_of() -> None:
    """Heartbeats know it before anybody times out."""
    parts = {host: host_evidence(host, capture=captured(host)) for host in (0, 1, 3)}
    lost = [LostHost(2, "node3", "frozen", "", (4, 5))]
    found = diagnose_hang(job(parts, hang=QUIET, lost=lost))
    assert found.headline.startswith("the job hangs: node3 is lost (ranks 4-5)")
    assert diagnose(job(parts, hang=QUIET, lost=lost)).headline.startswith("node3 is lost")


def test_a_hang_in_which_nobody_is_missing_is_the_networks() -> None:
    """Nothing is behind, nobody does anything else: what is between the hosts does not carry it."""
    stuck = {0: (link(0, 2),), 1: (link(3, 2),), 2: (link(4, 0),), 3: ()}
    parts = {host: host_evidence(host, capture=captured(host)._replace(links=links)) for host, links in stuck.items()}
    found = diagnose_hang(job(parts, hang=QUIET))
    assert cause_of(found).class_name == "network_cut"
    assert "node3" in found.headline
    plain = {host: host_evidence(host, capture=captured(host)) for host in range(4)}
    assert cause_of(diagnose_hang(job(plain, hang=QUIET))).class_name == "network_between_hosts"


def test_an_address_that_a_rank_waits_for_is_named_by_its_host() -> None:
    """A connection to 10.0.0.2 tells only those who know the addresses by heart."""
    capture = captured(2)
    waiting = look_of(4, 2, waits_on="a connection to 10.0.0.2:8080 (ESTABLISHED)", syscall="recvfrom")
    capture = capture._replace(
        processes=(waiting, capture.processes[1]), stacks=(dump_of(4, 2, IN_LOAD), capture.stacks[1]),
        collectives=(recorder_of(4, 6), recorder_of(5)),
    )  # fmt: skip
    parts = {host: host_evidence(host, capture=captured(host)) for host in (0, 1, 3)}
    found = diagnose_hang(job({**parts, 2: host_evidence(2, capture=capture)}, hang=QUIET))
    group = next(group for group in found.groups if group.ranks == (4,))
    assert group.kind == "network"
    assert "10.0.0.2:8080 [node2]" in group.detail


# ---------------------------------------------------------------------------------------------------------------- size


def _judge(hosts: int) -> tuple[int, int]:
    """A crash and a hang of as many hosts; how much work each was, in calls."""
    nproc = 8
    peers = peers_of(hosts, nproc)
    sights = tuple(HostView(peer.host, peer.label, peer.ranks, peer.addresses, has_evidence=True) for peer in peers)
    world = range(hosts * nproc)
    lines = traceback_of(RESET.format(host=3))
    base = host_evidence(0, hosts * nproc)
    evidence = base._replace(
        hosts=sights,
        ends=tuple(ended(rank, nproc, code=1) if rank != 377 else ended(rank, nproc, signum=9) for rank in world),
        outputs=tuple(output._replace(rank=rank, last_lines=lines) for rank, output in enumerate(base.outputs)),
    )
    found = diagnose(evidence)
    crash = operations(partial(diagnose, evidence))
    assert found.headline.startswith("rank 377 (node48")
    assert len(found.victims) == hosts * nproc - 1
    hanging = evidence._replace(
        ends=(),
        hang=QUIET,
        capture=Capture(
            stacks=tuple(
                dump_of(rank, nproc, IN_LOAD if rank == 377 else dump_of(0, 1).threads[0].frames) for rank in world
            ),
            processes=tuple(look_of(rank, nproc) for rank in world),
            collectives=tuple(recorder_of(rank, 6 if rank == 377 else 7) for rank in world),
        ),
    )
    assert "rank 377 (node48)" in diagnose_hang(hanging).headline
    return crash, operations(partial(diagnose_hang, hanging))


@pytest.mark.slow
def test_two_hundred_and_fifty_hosts_are_judged_by_as_much_work_as_there_are_ranks() -> None:
    """Everybody waits for this one host while it does it: its work must not grow with the square of the ranks."""
    few, many = _judge(50), _judge(250)
    assert all(much < 8 * little for little, much in zip(few, many, strict=True)), (few, many)


def test_a_signal_that_a_host_got_is_named_without_being_told() -> None:
    """The part of the host that got it says so."""
    parts = {host: stopped(host, stop_signum=15 if host == 2 else None) for host in range(4)}
    assert diagnose(job(parts)).headline == "stopped by SIGTERM on node3"
    everywhere = {host: stopped(host, stop_signum=15) for host in range(4)}
    assert diagnose(job(everywhere)).headline == "stopped by the scheduler (SIGTERM to all 4 hosts)"
    but_one = {host: stopped(host, stop_signum=15 if host else None) for host in range(4)}
    assert diagnose(job(but_one)).headline == "stopped by SIGTERM on node2, node3, node4"


def test_ranks_that_the_schedulers_signal_ended_were_stopped() -> None:
    """It sends the signal to them as well as to saferun, and they do not all wait."""
    parts = {
        host: host_evidence(host, ends=[ended(2 * host + rank, 2, signum=15) for rank in range(2)], stop_signum=15)
        for host in range(3)
    }
    found = diagnose(job(parts, hosts=3))
    assert found.headline == "stopped by the scheduler (SIGTERM to all 3 hosts)"
    assert (found.also_failed, found.victims, found.stopped) == ((), (), (0, 1, 2, 3, 4, 5))
