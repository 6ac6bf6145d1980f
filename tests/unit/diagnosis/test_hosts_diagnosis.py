"""Failures and hangs of jobs on several hosts: the host, the rank and the kind of fault are named."""

from __future__ import annotations

import pytest

from saferun.cluster.evidence import LostHost
from saferun.diagnosis import diagnose
from saferun.evidence.job_evidence import AbortReason, CoreDump, OomKill, ThreadStack
from tests.unit.diagnosis.jobs_of_hosts import (
    cause_of,
    lost_peer,
    stopped,
)
from tests.unit.host_samples import (
    IN_LOAD,
    ended,
    host_evidence,
    job,
    traceback_of,
)

# --------------------------------------------------------------------------------------------------------------- ranks


def test_what_to_do_about_a_host_that_could_not_start_is_that_hosts_word() -> None:
    """The one that judges does not know better, and would send the reader to another console."""
    trouble = AbortReason("start", "node3", "there is no such tool", hint="install it")
    found = diagnose(job({host: stopped(host) for host in range(4)}, trouble=trouble))
    assert found.headline == "node3 could not start its ranks: there is no such tool"
    assert found.cause is not None
    assert found.cause.advice == "on node3: install it"


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
    assert found.output.stderr_path == "node3:saferun-runs/7/node3/attempt_0/rank_5/stderr.log"
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
    assert found.headline.endswith("ranks 1-7 (node1, node2, node3, node4) failed in the same way")
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
    assert "no evidence from node3" in found.headline
    assert cause_of(found).advice.startswith("look at node3")
    assert "[10.0.0.3]:40123 [node3]" in cause_of(found).proof


def test_what_another_host_told_counts_where_its_evidence_does_not_come() -> None:
    """The part was too large, or too late; that a rank failed there is known."""
    trouble = AbortReason("failure", "node3", "exit code 1", 5)
    found = diagnose(job({0: lost_peer(0, 2), 1: stopped(1), 3: stopped(3)}, trouble=trouble))
    assert found.headline == "rank 5 (node3): exit code 1"
    assert cause_of(found).ranks == (5,)
    assert found.victims == (0, 1)
    assert "no evidence from node3 (ranks 4-5)" in found.findings


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


def test_a_signal_to_this_host_is_why_it_ends_though_the_others_may_go_on() -> None:
    """As where a user ends all pods of a job: nothing goes on then."""
    trouble = AbortReason("leave", "node2", "SIGTERM")
    evidence = job({host: stopped(host) for host in range(4)}, trouble=trouble)._replace(stop_signum=15)
    assert cause_of(diagnose(evidence)).class_name == "stopped_by_signal"


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
