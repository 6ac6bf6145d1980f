"""Failures and hangs of jobs on several hosts: the host, the rank and the kind of fault are named."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from saferun.cluster.evidence import HostPart, LostHost, merge_parts
from saferun.diagnosis import diagnose
from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence import (
    AbortReason,
    Capture,
    Cause,
    CoreDump,
    Diagnosis,
    Evidence,
    HangVerdict,
    HostView,
    OomKill,
    StuckLink,
    ThreadStack,
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


def cause_of(found: Diagnosis) -> Cause:
    assert found.cause is not None, found.headline
    return found.cause


def stopped(host: int, nproc: int = 2, **fields: object) -> Evidence:
    """A host whose ranks saferun stopped."""
    ends = [
        ended(rank, nproc, after_s=33.0, signum=signal.SIGTERM, stopped=True)
        for rank in range(host * nproc, (host + 1) * nproc)
    ]
    return host_evidence(host, nproc, ends=ends, capture=captured(host, nproc), **fields)  # type: ignore[arg-type]


def lost_peer(host: int, peer: int, after_s: float = 31.6, message: str = RESET) -> Evidence:
    """A host whose ranks lost their connections to another one."""
    ranks = (2 * host, 2 * host + 1)
    return host_evidence(
        host,
        ends=[ended(rank, 2, after_s=after_s, code=1) for rank in ranks],
        said={rank: traceback_of(message.format(host=peer + 1)) for rank in ranks},
    )


# --------------------------------------------------------------------------------------------------------------- ranks


def test_a_killed_rank_is_the_cause_and_its_peers_are_not() -> None:
    """Four hosts each see one of their ranks fail first; three of them are wrong."""
    killed = host_evidence(2, ends=[ended(4, 2, after_s=31.5, signum=9), ended(5, 2, signum=15, stopped=True)])
    evidence = job(
        {0: lost_peer(0, 2, 31.3), 1: lost_peer(1, 2), 2: killed, 3: lost_peer(3, 2)},
        trouble=AbortReason("failure", "node1", "exit code 1", 0),
    )
    found = diagnose(evidence)
    assert found.headline.startswith(
        "rank 4 (node3, local rank 0, pid 4000) failed first at 03:15:33, 31.5 s after the"
    )
    assert "SIGKILL" in found.headline
    assert cause_of(found).class_name == "killed_from_outside"
    assert found.victims == (0, 1, 2, 3, 6, 7)
    assert found.stopped == (5,)
    assert found.first_failure is not None
    assert found.first_failure.rank == 4


def test_an_exception_on_another_host_is_shown_with_its_output() -> None:
    """Local ranks repeat: the output shown is that of the rank, not of the leader's rank in the same place."""
    bad = host_evidence(2, ends=[ended(5, 2, code=1)], said={5: traceback_of("ValueError: bad batch", 47)})
    evidence = job({0: lost_peer(0, 2), 1: stopped(1), 2: bad, 3: stopped(3)})
    found = diagnose(evidence)
    assert cause_of(found).message == "ValueError: bad batch"
    assert found.output is not None
    assert found.output.stderr_path == "node3:saferun_runs/7/node3/attempt_0/rank_5/stderr.log"
    assert found.tracebacks[0].ranks == (5,)


def test_ranks_that_fail_alike_on_several_hosts_are_one_failure() -> None:
    """The same traceback on four hosts is printed once."""
    evidence = job(
        {
            host: host_evidence(
                host,
                ends=[ended(rank, 2, after_s=31 + rank / 10, code=1) for rank in (2 * host, 2 * host + 1)],
                said={rank: traceback_of("KeyError: 'labels'") for rank in (2 * host, 2 * host + 1)},
            )
            for host in range(4)
        }
    )
    found = diagnose(evidence)
    assert "rank 0 (node1" in found.headline
    assert found.headline.endswith("ranks 1-7 (node1, node2, node3, node4) failed alike")
    assert [traceback.ranks for traceback in found.tracebacks] == [tuple(range(8))]


def test_who_told_first_decides_where_clocks_cannot() -> None:
    """Two hosts' clocks differ by milliseconds; the job's log has an order."""
    one = host_evidence(1, ends=[ended(2, 2, after_s=31.40, code=1)], said={2: traceback_of("ValueError: follows")})
    two = host_evidence(2, ends=[ended(4, 2, after_s=31.45, code=1)], said={4: traceback_of("KeyError: 'first'", 47)})
    evidence = job({0: stopped(0), 1: one, 2: two, 3: stopped(3)}, trouble=AbortReason("failure", "node3", "", 4))
    assert diagnose(evidence).headline.startswith("rank 4 (node3")
    assert diagnose(evidence._replace(abort_reason=None)).headline.startswith("rank 2 (node2")


def test_process_numbers_and_the_oom_killer_are_a_hosts_own() -> None:
    """Pid 4000 was killed for its memory on node3; node2's pid 4000 was killed by somebody."""
    oom = OomKill("cgroup", 1 << 30, 1 << 29, (4000,), 1, "memory.events")
    first = host_evidence(1, ends=[ended(2, 2, signum=9)])
    second = host_evidence(2, ends=[ended(4, 2, after_s=31.0, signum=9)], oom=oom)
    evidence = job({0: stopped(0), 1: first, 2: second, 3: stopped(3)})
    found = diagnose(evidence)
    assert cause_of(found).class_name == "host_oom_kill"
    assert "rank 4 (node3" in found.headline
    alone = diagnose(job({0: stopped(0), 1: first, 2: stopped(2, oom=oom), 3: stopped(3)}))
    assert cause_of(alone).class_name == "killed_from_outside"


def test_a_core_belongs_to_the_rank_and_not_to_its_process_number() -> None:
    """Two hosts have a process of the same number, and both crashed."""
    calls = ThreadStack("MainThread", 4000, True, True, True, IN_LOAD)
    cores = {
        host: (CoreDump(2 * host, 4000, 11, f"/cores/{host}", 5, kept=True, tool="pystack", threads=(calls,)),)
        for host in (1, 2)
    }
    parts = {
        host: host_evidence(host, ends=[ended(2 * host, 2, after_s=31.4 - host / 10, signum=11)], cores=cores[host])
        for host in (1, 2)
    }
    found = diagnose(job({0: stopped(0), **parts, 3: stopped(3)}))
    assert found.core is not None
    assert (found.core.rank, found.core.path) == (4, "node3:/cores/2")


def test_a_rank_that_ended_early_on_another_host_is_named() -> None:
    """It ended well, and the others failed of it a moment later, by clocks that are not the same."""
    early = host_evidence(3, ends=[ended(6, 2, after_s=31.5, code=0), ended(7, 2, signum=15, stopped=True)])
    evidence = job({0: lost_peer(0, 3, 31.4), 1: lost_peer(1, 3, 31.6), 2: stopped(2), 3: early})
    found = diagnose(evidence)
    assert cause_of(found).class_name == "early_exit"
    assert found.headline.startswith("rank 6 (node4, local rank 0, pid 4000) ended")


def test_the_other_end_of_a_lost_connection_is_named() -> None:
    """An address means nothing to the reader; a host's name does."""
    evidence = job({0: lost_peer(0, 2), 1: stopped(1), 3: stopped(3)})
    found = diagnose(evidence)
    assert "lost its connection to a rank of node3" in found.headline
    assert "nothing has come from node3" in found.headline
    assert cause_of(found).advice.startswith("look at node3")
    assert "[10.0.0.3]:40123 [node3]" in cause_of(found).proof


def test_what_another_host_told_counts_where_its_evidence_does_not_come() -> None:
    """The part was too large, or too late; that a rank failed there is known."""
    trouble = AbortReason("failure", "node3", "exit code 1", 5)
    found = diagnose(job({0: lost_peer(0, 2), 1: stopped(1), 3: stopped(3)}, trouble=trouble))
    assert found.headline == "rank 5 (node3): exit code 1"
    assert cause_of(found).ranks == (5,)
    assert found.victims == (0, 1)
    assert "nothing has come from node3 (ranks 4-5)" in found.findings


# --------------------------------------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("why", "class_name", "word"),
    [
        ("gone", "host_lost", "killed"),
        ("unreachable", "host_lost", "power"),
        ("frozen", "host_lost", "SIGSTOP"),
        ("cut", "network_cut", "network"),
        ("unknown", "host_lost", "no heartbeat is received"),
        ("something new", "host_lost", "no heartbeat is received"),
    ],
)
def test_a_lost_host_is_named_and_beats_lost_connections(why: str, class_name: str, word: str) -> None:
    """Its peers' errors come first, the heartbeats' verdict up to half a minute later."""
    lost = [LostHost(2, "node3", why, "no heartbeat for 30 s; 10.0.0.3:4000 refuses connections", (4, 5))]
    evidence = job({0: lost_peer(0, 2), 1: lost_peer(1, 2), 3: stopped(3)}, lost=lost)
    for trouble in (
        None,
        AbortReason("lost", "node1", "node3 is lost"),
        AbortReason("failure", "node1", "exit code 1", 0),
    ):
        found = diagnose(evidence._replace(abort_reason=trouble))
        assert found.headline.startswith("node3 is lost (ranks 4-5): ")
        assert word in found.headline
        assert cause_of(found).class_name == class_name
        assert cause_of(found).ranks == (4, 5)
        assert "no heartbeat for 30 s" in cause_of(found).proof
        assert "node3" in cause_of(found).advice
        assert found.victims == (0, 1, 2, 3)
        assert found.stopped == (6, 7)


def test_a_rank_that_failed_before_a_host_was_lost_is_the_cause() -> None:
    """The host went away while the job was being stopped."""
    bad = host_evidence(1, ends=[ended(2, 2, code=1)], said={2: traceback_of("ValueError: bad")})
    lost = [LostHost(2, "node3", "gone", "refuses connections", (4, 5))]
    evidence = job({0: stopped(0), 1: bad, 3: stopped(3)}, lost=lost, trouble=AbortReason("failure", "node2", "", 2))
    found = diagnose(evidence)
    assert found.headline.startswith("rank 2 (node2")
    assert found.findings[0] == "lost: node3: refuses connections"


def test_several_lost_hosts_are_counted() -> None:
    """A switch takes more than one."""
    lost = [LostHost(n, f"node{n + 1}", "unreachable", "", (2 * n, 2 * n + 1)) for n in (1, 2)]
    found = diagnose(job({0: stopped(0), 3: stopped(3)}, lost=lost))
    assert found.headline.startswith("2 hosts are lost (node2, node3): of each: none of its addresses answers")
    assert cause_of(found).ranks == (2, 3, 4, 5)


def test_a_host_that_reaches_nobody_is_itself_cut_off() -> None:
    """Three hosts do not lose their power at the same moment."""
    lost = [LostHost(n, f"node{n + 1}", "unreachable", "no answer", (2 * n, 2 * n + 1)) for n in (1, 2, 3)]
    found = diagnose(job({0: stopped(0)}, lost=lost))
    assert found.headline == "node1 reaches none of the other 3 hosts any more: its own network is cut"
    assert cause_of(found).class_name == "network_cut"


@pytest.mark.parametrize(
    ("why", "class_name"), [("gone", "store_host_lost"), ("cut", "network_cut"), ("unknown", "store_host_lost")]
)
def test_the_hosts_that_are_left_say_that_the_stores_is_lost(why: str, class_name: str) -> None:
    """Nobody collects their evidence then: each tells by itself."""
    evidence = lost_peer(1, 0)._replace(
        error="node1 does not answer", abort_reason=AbortReason("store_lost", "node1", "no answer for 30 s", None, why)
    )
    found = diagnose(evidence)
    assert found.headline.startswith("node1, which had the job's store, is lost: ")
    assert cause_of(found).class_name == class_name
    assert cause_of(found).proof == "no answer for 30 s"


def test_a_host_whose_own_interface_is_cut_names_itself() -> None:
    """Not the first host, which is well."""
    told = AbortReason("store_lost", "node1", "eth0 has no carrier", None, "nic")
    evidence = lost_peer(1, 0)._replace(error="eth0 has no carrier", abort_reason=told)
    found = diagnose(evidence)
    own = f"{evidence.host}: eth0 has no carrier: it does not reach node1, which has the job's store, any more"
    assert found.headline == own
    assert cause_of(found).class_name == "network_cut"
    assert evidence.host in cause_of(found).advice


def test_a_host_that_is_stopped_by_a_signal_is_named() -> None:
    """A scheduler sends its signal to one host first."""
    found = diagnose(job({host: stopped(host) for host in range(4)}, trouble=AbortReason("signal", "node2", "SIGTERM")))
    assert found.headline == "stopped by SIGTERM on node2"
    assert cause_of(found).class_name == "stopped_by_signal"
    own = job({host: stopped(host) for host in range(4)})._replace(stop_signum=15)
    assert diagnose(own).headline == "stopped by SIGTERM on node1"


def test_a_time_limit_in_another_hosts_output_is_found() -> None:
    """The scheduler says why on one host only."""
    words = "slurmstepd: error: *** STEP 7.0 ON node3 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
    hosts = {host: stopped(host, said={4: (words,)} if host == 2 else {}) for host in range(4)}
    found = diagnose(job(hosts, trouble=AbortReason("signal", "node3", "SIGTERM"))._replace(stop_signum=15))
    assert cause_of(found).class_name == "scheduler_timeout"


@pytest.mark.parametrize(
    ("trouble", "class_name", "headline"),
    [
        (AbortReason("parent", "node3", "srun"), "parent_gone", "saferun's parent process on node3 exited (srun)"),
        (AbortReason("parent", "node3"), "parent_gone", "saferun's parent process on node3 exited"),
        (
            AbortReason("start", "node3", "train.py: No such file or directory"),
            "start_failed",
            "node3 could not start its ranks: train.py: No such file or directory",
        ),
        (
            AbortReason("task_lost", "node3", "task 1 was killed"),
            "host_lost",
            "a saferun process of node3 is gone: task 1 was killed",
        ),
        (AbortReason("membership", "node1", "node5 waits to join"), "membership", "node5 waits to join"),
        (AbortReason("leave", "node4", "it leaves the job"), "membership", "node4: it leaves the job"),
    ],
)
def test_what_one_host_told_is_the_cause_on_all(trouble: AbortReason, class_name: str, headline: str) -> None:
    """No rank failed, and yet the job ended; each host says the same of it."""
    found = diagnose(job({host: stopped(host) for host in range(4)}, trouble=trouble))
    assert found.headline == headline
    assert cause_of(found).class_name == class_name


def test_trouble_of_the_judging_host_stays_in_its_own_words() -> None:
    """It could not start its ranks itself."""
    evidence = job({host: stopped(host) for host in range(4)}, trouble=AbortReason("start", "node1", "no such file"))
    found = diagnose(evidence._replace(error="cannot start rank 0: no such file", error_hint="check the path"))
    assert found.headline == "node1: cannot start rank 0: no such file"
    assert cause_of(found).advice == "check the path"


def test_ranks_that_could_not_be_killed_are_named_by_rank() -> None:
    """Local rank 1 is on four hosts."""
    parts = {host: stopped(host, abandoned=(1,) if host == 2 else ()) for host in range(4)}
    found = diagnose(job(parts))
    assert found.abandoned == ()
    assert found.abandoned_ranks == (5,)


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
    assert "4096 bytes wait, sent again 5 times" in cause_of(found).proof
    assert "node3" in cause_of(found).advice


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


@pytest.mark.parametrize(("address", "advice"), [("127.0.1.1", "/etc/hosts"), ("172.17.0.1", "GLOO_SOCKET_IFNAME")])
def test_an_address_that_every_host_has_for_itself_is_the_wrong_interface(address: str, advice: str) -> None:
    """Ranks told the others how to reach them, and chose a loopback, or the bridge of containers."""
    message = (
        "RuntimeError: Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] timed out connecting: "
        f"SO_ERROR: Connection refused, remote=[{address}]:14999"
    )
    peers = [peer._replace(addresses=(*peer.addresses, "172.17.0.1")) for peer in peers_of(4)]
    parts = [HostPart(host, 0, f"node{host + 1}", 0.0, timed_out(host, message=message)) for host in range(4)]
    found = diagnose(merge_parts(parts, world_size=8, peers=peers))
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


def test_a_host_that_does_not_answer_over_rdma_is_named_with_the_one_that_asked() -> None:
    """No rank has failed by itself: it is what lies between."""
    found = diagnose(job({0: lost_peer(0, 2, message=RDMA), 1: stopped(1), 2: stopped(2), 3: stopped(3)}))
    assert cause_of(found).class_name == "network_between_hosts"
    assert "node1" in found.headline
    assert "node3" in found.headline


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
    assert "no rank is seen to have failed before" in found.headline


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
    assert found.headline == (
        "the job hangs: nothing has come from node3 (ranks 4-5), and all others wait in all_reduce"
    )
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


def test_two_hundred_and_fifty_hosts_are_judged_by_as_much_work_as_there_are_ranks() -> None:
    """Everybody waits for this one host while it does it: its work must not grow with the square of the ranks."""
    few, many = _judge(50), _judge(250)
    assert all(much < 8 * little for little, much in zip(few, many, strict=True)), (few, many)


def test_a_signal_that_a_host_got_is_named_without_being_told() -> None:
    """The part of the host that got it says so."""
    parts = {host: stopped(host, stop_signum=15 if host == 2 else None) for host in range(4)}
    assert diagnose(job(parts)).headline == "stopped by SIGTERM on node3"
    everywhere = {host: stopped(host, stop_signum=15) for host in range(4)}
    assert diagnose(job(everywhere)).headline == "stopped by SIGTERM on node1, node2, node3, node4"
