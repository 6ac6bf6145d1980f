"""The coordinators of several hosts: how they meet, and meet again."""

from __future__ import annotations

import json
import time

import pytest

from tests.torch.coordinating import (
    DECISION,
    TROUBLE,
    Host,
    connections_to,
    hosts,
    join_all,
    joining,
    listening,
    port_of,
    ranks_store,
    silence,
    until,
    until_words,
)


def test_hosts_meet_and_get_contiguous_ranks() -> None:
    """By node rank, as torchrun does it; the leader alone is told of all hosts."""
    with hosts("node1", "node2", "node3") as job:
        joined = join_all(job)
        assert [message["host"] for message in joined] == [0, 1, 2]
        assert [message["base_rank"] for message in joined] == [0, 2, 4]
        assert {message["world_size"] for message in joined} == {6}
        assert {message["leader_name"] for message in joined} == {"node1"}
        assert {message["files"] for message in joined} == {"/runs/node1"}
        assert {message["master_port"] for message in joined} == {port_of(job[0].ranks)}
        assert [message["leader"] for message in joined] == [True, False, False]
        assert [peer[:2] for peer in joined[0]["peers"]] == [[0, "node1"], [1, "node2"], [2, "node3"]]
        assert joined[1]["peers"] == []


def test_a_late_host_is_waited_for_and_named_meanwhile() -> None:
    """On every host that waits, not only on the first; by the scheduler's name where there is one."""
    with hosts("node1", "node2", "node3") as job:
        fields = {"most": 3, "least": 3, "report_every_s": 0.5, "master": ["127.0.0.1", [port_of(job[0].ranks)]]}
        names = ["node1", "node2", "node3"]
        job[0].join(node_rank=0, expected=names, **fields)
        job[1].join(node_rank=1, expected=names, **fields)
        until_words(job[0], "waiting for 1 of 3 hosts: node3")
        until_words(job[1], "waiting for 1 of 3 hosts: node3")
        job[2].join(node_rank=2, **fields)
        assert [host.expect("joined")["host"] for host in job] == [0, 1, 2]


def test_missing_hosts_are_named_on_every_host_in_the_end() -> None:
    """Without names from a scheduler, by node rank."""
    with hosts("node1", "node2") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        # The second one is up, whatever else the machine has to do, before the time of the first begins.
        job[1].join(node_rank=1, most=4, timeout_s=60.0, master=master, report_every_s=0.5)
        job[1].expect("waiting")
        job[0].join(node_rank=0, most=4, timeout_s=2.6, master=master)
        for host in job:
            failed = host.expect("join_failed")
            assert failed["what"] == "2 of 4 hosts did not come within 3 s: node rank 2, node rank 3"
            assert failed["hint"]


def test_a_host_waits_for_a_first_host_that_comes_later() -> None:
    """Hosts start in any order."""
    with hosts("node1", "node2") as job:
        ranks = job[0].ranks
        port = port_of(ranks)
        job[1].join(node_rank=1, most=2, master=["127.0.0.1", [port]], report_every_s=0.5)
        said = until_words(job[1], f"something listens on 127.0.0.1:{port} and does not answer as a store")
        assert said.endswith("s)")
        job[0].join(node_rank=0, most=2)
        assert job[1].expect("joined")["host"] == 1


def test_a_first_host_that_cannot_be_reached_is_named_with_the_reason() -> None:
    """While it is waited for, and at the end."""
    with hosts("node2") as (host,):
        closed = listening()
        port = port_of(closed)
        closed.close()
        host.join(node_rank=1, most=2, master=["127.0.0.1", [port]], report_every_s=0.5, timeout_s=2.0)
        until_words(host, f"127.0.0.1:{port} refuses connections")
        failed = host.expect("join_failed")
        assert failed["what"] == f"127.0.0.1:{port} refuses connections from node2, for 2 s"
        assert "--master-port" in failed["hint"]


def test_a_name_that_nobody_knows_is_said_to_be_one() -> None:
    """A number of an error would not help."""
    with hosts("node2") as (host,):
        host.join(node_rank=1, most=2, master=["no-such-host.invalid", [29500]], timeout_s=1.0)
        assert "the name no-such-host.invalid cannot be resolved" in host.expect("join_failed")["what"]


def test_a_store_of_another_job_is_recognised() -> None:
    """Both run ids are said."""
    with hosts("node1", "node2") as job:
        job[0].join(node_rank=0, most=2, run_id="job7")
        job[1].join(node_rank=1, most=2, run_id="job8", master=["127.0.0.1", [port_of(job[0].ranks)]])
        what = job[1].expect("join_failed")["what"]
        assert "'job7'" in what
        assert "'job8'" in what


def test_a_host_of_another_job_is_told_that_this_one_has_begun() -> None:
    """Both have the default port: the scripts show whose mistake it is, and the job that runs is left alone."""
    with hosts("node1", "node2", "node2") as (first, second, other):
        join_all([first, second], script="train.py")
        port = port_of(first.ranks)
        master = {"address": "127.0.0.1", "ports": [port], "source": "default"}
        other.join(node_rank=1, most=2, master=master, report_every_s=0.5, timeout_s=3.0, script="eval.py")
        begun = f"the job at 127.0.0.1:{port} (script train.py) has begun without node2 (script eval.py)"
        until_words(other, f"{begun}; waiting for its next attempt (")
        failed = other.expect("join_failed")
        assert failed["what"] == f"{begun}, and did not begin another attempt within 3 s"
        default = f"this is the default port {port}, because no --master-port was given"
        hint = f"if that is another job, pass a free --master-port to all hosts: {default}, or give each job an"
        assert failed["hint"] == f"{hint} --rdzv-id of its own"
        first.send("append", attempt=0, message=TROUBLE)
        assert second.expect("entry")["attempt"] == 0


def test_a_leader_that_accepts_connections_is_waited_for_a_little_longer() -> None:
    """It may still import torch, and this host does not."""
    ranks = listening()
    with hosts("node2", serves=False) as (second,):
        second.join(node_rank=1, most=2, least=2, master=["127.0.0.1", [port_of(ranks)]], timeout_s=1.0)
        time.sleep(2.0)
        with hosts("node1", ranks=ranks) as (first,):
            first.join(node_rank=0, most=2, least=2)
            assert first.expect("joined")["world_size"] == second.expect("joined")["world_size"] == 4


def test_the_right_one_of_several_ports_is_found() -> None:
    """The first host took the first that was free: others may refuse, be silent, or belong to another job."""
    with hosts("other") as (other,), hosts("node1", "node2") as (first, second):
        silent, refusing = listening(), listening()
        ports = [port_of(silent), port_of(refusing), port_of(other.ranks), port_of(first.ranks)]
        refusing.close()
        with silent:
            join_all([other], run_id="job8")
            first.join(node_rank=0, most=2, master=["127.0.0.1", ports])
            second.join(node_rank=1, most=2, master=["127.0.0.1", ports])
            assert first.expect("joined")["master_port"] == ports[3]
            assert second.expect("joined")["master_port"] == ports[3]


def test_two_hosts_with_one_node_rank_fail_with_both_names() -> None:
    """On all hosts: a job without the right one cannot start."""
    with hosts("node1", "node2", "node3") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        job[0].join(node_rank=0, most=3, master=master)
        job[1].join(node_rank=1, most=3, master=master)
        job[2].join(node_rank=1, most=3, master=master)
        for host in job:
            what = host.expect("join_failed")["what"]
            assert what.startswith("two hosts have the node rank 1: ")
            assert "node2" in what
            assert "node3" in what


def test_a_host_that_was_started_again_takes_its_own_place() -> None:
    """What it had said before it ended is no second host."""
    with hosts("node1", "node2", "node2") as (first, gone, second):
        master = ["127.0.0.1", [port_of(first.ranks)]]
        first.join(node_rank=0, most=3, master=master, report_every_s=0.5)
        gone.join(node_rank=1, most=3, master=master)
        until_words(first, "1 of 3 hosts: node rank 2")
        gone.vanish()
        second.join(node_rank=1, most=3, master=master, report_every_s=0.5)
        until_words(second, "1 of 3 hosts: node rank 2")
        first.read_all()
        assert not [message for message in second.read_all() if message["op"] == "join_failed"]


def test_different_numbers_of_hosts_are_both_said() -> None:
    """--nnodes differs."""
    with hosts("node1", "node2") as job:
        job[0].join(node_rank=0, most=3)
        job[1].join(node_rank=1, most=2, master=["127.0.0.1", [port_of(job[0].ranks)]])
        for host in job:
            what = host.expect("join_failed")["what"]
            assert "for 2 hosts" in what
            assert "for 3" in what


def test_a_host_that_leaves_during_the_meeting_ends_it_for_all() -> None:
    """Nobody waits ten minutes for somebody who has gone home."""
    with hosts("node1", "node2", "node3") as job:
        fields = {"most": 4, "master": ["127.0.0.1", [port_of(job[0].ranks)]], "report_every_s": 0.5}
        for rank, host in enumerate(job):
            host.join(node_rank=rank, **fields)
        for host in job:
            until_words(host, "1 of 4 hosts: node rank 3")
        job[1].send("goodbye")
        job[1].wait_closed()
        assert job[0].expect("join_failed")["what"] == "node2 left while the hosts of the job met"
        assert job[2].expect("join_failed")["what"] == "node2 left while the hosts of the job met"


def test_a_host_that_leaves_during_the_meeting_of_a_job_with_spares_is_replaced() -> None:
    """As one whose saferun is killed is; the others need not wait until it is missed."""
    with hosts("node1", "node2", "node3", "node4") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        fields = {"most": 3, "least": 3, "spares": 1, "master": master, "report_every_s": 0.5}
        for rank, host in enumerate(job[:3]):
            host.join(node_rank=rank, **fields)
        for host in job[:3]:
            until_words(host, "1 of 4 hosts: node rank 3")
        job[1].send("goodbye")
        job[1].wait_closed()
        job[3].join(node_rank=3, **fields)
        joined = [host.expect("joined") for host in (job[0], job[2], job[3])]
        assert [message["host"] for message in joined] == [0, 2, 1]
        assert joined[0]["replacements"] == [["node rank 1", "node4", "node2 left while the hosts of the job met"]]


def test_unequal_hosts_and_roles_are_numbered_by_host() -> None:
    """Torchrun's rules."""
    with hosts("node1", "node2", "node3") as job:
        records = [{"nproc": 2, "role": "actor"}, {"nproc": 1, "role": "learner"}, {"nproc": 3, "role": "actor"}]
        for rank, (host, record) in enumerate(zip(job, records, strict=True)):
            host.join(node_rank=rank, most=3, master=["127.0.0.1", [port_of(job[0].ranks)]], record=record)
        joined = [host.expect("joined") for host in job]
        assert [message["base_rank"] for message in joined] == [0, 2, 3]
        assert [message["role_base"] for message in joined] == [0, 0, 2]
        assert [message["role_world_size"] for message in joined] == [5, 1, 5]


def test_ipv6_addresses_work() -> None:
    """As literal, with or without the brackets of a URL."""
    ranks, control = listening("::1"), listening("::1")
    with control:
        first = Host("node1", ranks=ranks, control=control)
        second = Host("node2", serves=False)
        try:
            first.join(node_rank=0, most=2, master=["::1", [port_of(ranks)]])
            second.join(node_rank=1, most=2, master=["[::1]", [port_of(ranks)]])
            assert second.expect("joined")["master_addr"] == "::1"
        finally:
            first.close()
            second.close()


def test_the_next_attempt_has_an_empty_ranks_store_on_the_same_port() -> None:
    """Nothing of the attempt before, gloo's addresses among it, may be found."""
    with hosts("node1", "node2") as job:
        first = join_all(job)
        ranks_store(first[1]).set("gloo/0", "127.0.0.1:1")
        job[0].send("append", attempt=0, message={**DECISION, "next": "restart"})
        for host in job:
            host.expect("entry")
            host.send("ack", attempt=0)
        second = join_all(job, attempt=1, restarts=1)
        assert [(message["attempt"], message["restarts"]) for message in second] == [(1, 1), (1, 1)]
        assert second[1]["master_port"] == first[1]["master_port"]
        assert not ranks_store(second[1]).check(["gloo/0"])
        # The log begins anew, and the old one is silent.
        job[1].send("append", attempt=0, message=TROUBLE)
        job[1].send("append", attempt=1, message=TROUBLE)
        assert [host.expect("entry")["attempt"] for host in job] == [1, 1]


def test_hosts_meet_again_after_a_firewall_has_forgotten_their_idle_connections() -> None:
    """Without a word: what is sent on such a connection is never answered. Others are kept alive by heartbeats."""
    with hosts("node1", "node2") as job:
        join_all(job)
        job[1].send("append", attempt=0, message={"kind": "checkpoint"})
        job[1].expect("entry")
        silent = 0
        for connection in connections_to(job[1].process.pid, job[0].control_port):
            silence(connection)
            silent += 1
        assert silent > 2
        job[0].send("append", attempt=0, message={**DECISION, "next": "restart"})
        for host in job:
            host.expect("entry")  # by the channel, which is made again
            host.send("ack", attempt=0)
        second = join_all(job, attempt=1, restarts=1, timeout_s=15.0)
        assert [message["attempt"] for message in second] == [1, 1]


def test_a_host_that_was_started_again_joins_the_next_attempt() -> None:
    """Where a scheduler starts it anew; it knows of no attempts."""
    with hosts("node1", "node2", "node2") as (first, gone, again):
        join_all([first, gone], attempt=4, restarts=1)
        gone.vanish()
        master = ["127.0.0.1", [port_of(first.ranks)]]
        again.join(node_rank=1, most=2, master=master, report_every_s=0.5)
        until_words(again, "has begun without node2; waiting for its next attempt")
        first.join(node_rank=0, most=2, master=master, attempt=5, restarts=2)
        assert [(m["attempt"], m["restarts"]) for m in (host.expect("joined") for host in (first, again))] == [
            (5, 2)
        ] * 2


@pytest.mark.parametrize("note", [None, {"by": "saferunctl kill by ada on node2", "at_once": True}])
def test_a_host_whose_coordinator_was_replaced_says_when_it_does_not_meet_the_others_again(
    note: dict[str, object] | None,
) -> None:
    """They would wait for it until the start timeout; and if a user has ended the job there, they print who."""
    with hosts("node1", "node2", "node2") as (first, killed, replacement):
        join_all([first, killed])
        offer = killed.expect("resumable")["text"]
        master = ["127.0.0.1", [port_of(first.ranks)]]
        request = joining(killed, node_rank=1, least=2, most=2, master=master)
        killed.process.kill()
        replacement.send("resume", request=request, text=offer)
        replacement.expect("resumed")
        first.send("append", attempt=0, message={**DECISION, "next": "restart"})
        for host in (first, replacement):
            host.expect("entry")
            host.send("ack", attempt=0)
        first.join(node_rank=0, least=2, most=2, master=master, attempt=1, restarts=1)
        replacement.send("close", note=note)
        replacement.send("goodbye")
        replacement.wait_closed()
        if note is None:
            assert first.expect("join_failed")["what"] == "node2 left while the hosts of the job met"
        else:
            ended = first.expect("job_ended")
            assert {name: ended[name] for name in note} == note


def test_many_attempts_leave_little_in_the_store() -> None:
    """A job may be restarted very often."""
    with hosts("node1", "node2") as job:
        sizes = []
        for attempt in range(6):
            joined = join_all(job, attempt=attempt)
            job[1].send("chunk", attempt=attempt, name="end", text="x")
            job[0].expect("chunk", attempt=attempt, host=1)
            job[0].send("append", attempt=attempt, message=DECISION)
            for host in job:
                host.expect("entry", attempt=attempt)
            control = json.loads(ranks_store(joined[0]).get("saferun/control"))
            store = ranks_store({"master_addr": "127.0.0.1", "master_port": control["control_port"]})
            if attempt >= 2:
                last = f"a{attempt - 2}/state/1"
                until(lambda: not store.check([last]), "the attempt before the last is forgotten")  # noqa: B023 - as it is then
            sizes.append(store.num_keys())
        assert sizes[5] - sizes[3] < 14


def test_all_hosts_take_the_highest_attempt_that_any_of_them_knows() -> None:
    """A host that was started anew knows of none."""
    with hosts("node1", "node2") as job:
        master = ["127.0.0.1", [port_of(job[0].ranks)]]
        job[0].join(node_rank=0, most=2, master=master, attempt=3, restarts=2)
        job[1].join(node_rank=1, most=2, master=master)
        assert [(m["attempt"], m["restarts"]) for m in (host.expect("joined") for host in job)] == [(3, 2), (3, 2)]
