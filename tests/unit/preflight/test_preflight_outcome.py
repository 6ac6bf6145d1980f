"""What ends a launch is one sentence, however many hosts say it, and each in its words."""

from __future__ import annotations

import pytest

from saferun.preflight.outcome import message_lines, outcome_of, unusable_hosts
from saferun.preflight.results import UNUSABLE, CheckResult, HostInfo, Preflight
from tests.unit.preflight.preflight_samples import infos_of, judged, lines, probes_of, where

NICS = ("eth0", "eth1")
LOOPBACK = "gloo would listen on loopback, where no other host reaches it"
HINT = "give the host's name its address in /etc/hosts, or run with --nic eth0"


def own_name(host: str, message: str = "") -> CheckResult:
    """What a host says whose own name means loopback."""
    text = message or f"its own name {host} resolves to 127.0.1.1, so that {LOOPBACK}"
    return CheckResult("names", "fail", text, HINT, class_name="network_interface", host=host)


def reason(*results: CheckResult) -> str:
    """Why the launch ends."""
    failure = outcome_of(Preflight(results=results), {}, nics=(), only_warn=False).failure
    assert failure is not None
    return failure.what


def test_what_all_hosts_say_of_their_own_names_is_one_sentence() -> None:
    """Also where one of them knows less of it, and says the end of it only."""
    found = (own_name("node2"), own_name("node1", LOOPBACK), own_name("node3"))
    assert reason(*found) == (f"node1-node3 (3 hosts): its own name <host> resolves to 127.0.1.1, so that {LOOPBACK}")
    assert message_lines(found) == []


def test_what_one_host_says_is_said_as_it_says_it() -> None:
    assert reason(own_name("node3")) == f"node3: its own name node3 resolves to 127.0.1.1, so that {LOOPBACK}"


def test_another_failure_is_counted_and_printed_above() -> None:
    """It may be what matters."""
    other = CheckResult("limits", "fail", "a process may open 8 files", "raise the limit", host="node1")
    found = (own_name("node3"), other)
    assert reason(*found).endswith("(and 1 more, above)")
    assert message_lines(found)[0] == "saferun: node1: a process may open 8 files"


@pytest.mark.parametrize("nic", ["docker0", "eth1"])
def test_a_warning_about_an_interface_that_ends_the_launch_is_left_out(nic: str) -> None:
    """It would be advice twice."""
    infos = infos_of(3, (*NICS, nic), gloo=nic)
    warned = CheckResult("interfaces", "warn", f"gloo would use {nic} (the host's name leads there), which", "--nic")
    infos = {host: info._replace(results=(*info.results, warned)) for host, info in infos.items()}
    probes = probes_of(3, (*NICS, nic), where(nic=nic, kind="self"))
    found = [line for line in lines(judged(infos, probes)) if nic in line]
    assert len(found) == 1, found
    assert found[0].startswith("fail ")


# --------------------------------------------------------------------------------------- hosts that spares can replace

GPU_LOST = CheckResult(
    *("gpus", "warn", "GPU 3 fell off the bus", "reboot", ((UNUSABLE, "GPU 3"),)),
    class_name="gpu_hardware_error",
    host="node2",
)
DEAD_STORAGE = CheckResult(
    *("storage", "warn", "/scratch does not answer", "", ((UNUSABLE, "/scratch"),)), class_name="file_system_error"
)


def hindering(*results: CheckResult, hosts: int = 4, only_warn: bool = False) -> list[str]:
    infos = {number: HostInfo(label=f"node{number + 1}") for number in range(hosts)}
    outcome = outcome_of(Preflight(results=results), infos, nics=(), only_warn=only_warn)
    return [f"{one.label} ({one.host}): {one.why}" for one in unusable_hosts(outcome)]


def test_a_host_is_replaced_for_what_the_ranks_cannot_work_with_and_for_nothing_else() -> None:
    """Most of what is worth a repair does no harm to a job: rows to be remapped, errors that have been counted."""
    assert hindering(GPU_LOST) == ["node2 (1): GPU 3 fell off the bus"]
    assert hindering(GPU_LOST._replace(facts=(("gpus", "8"),))) == []
    assert hindering(GPU_LOST._replace(verdict="ok")) == []
    assert hindering(GPU_LOST._replace(host="somebody")) == []
    assert hindering(GPU_LOST._replace(class_name="gpu_busy")) == []


def test_what_several_hosts_have_alike_is_no_reason_to_replace_them() -> None:
    """A server that hangs hangs for the spares as well."""
    one, two = (DEAD_STORAGE._replace(host=name) for name in ("node2", "node3"))
    assert hindering(one) == ["node2 (1): /scratch does not answer"]
    assert hindering(one, two) == []
    assert hindering(one, hosts=1) == []


def test_a_host_that_would_end_the_launch_is_replaced_unless_another_one_would_end_it_as_well() -> None:
    cut_off = CheckResult(
        *("links", "fail", "other hosts cannot reach it over eth1", ""),
        class_name="network_between_hosts",
        host="node3",
    )
    assert hindering(cut_off) == ["node3 (2): other hosts cannot reach it over eth1"]
    forbidden = CheckResult("processes", "fail", "this user may start 2 more processes", "", host="node4")
    assert hindering(cut_off, forbidden) == []
    between = cut_off._replace(host="", message="the hosts do not reach each other")
    assert hindering(cut_off, between) == []


def test_memory_that_others_have_taken_is_no_reason_to_replace_a_host() -> None:
    """The script may have brought it about, or another host has as little."""
    full = CheckResult("memory", "fail", "the host has 20 MiB", "", class_name="host_out_of_memory", host="node2")
    assert hindering(full) == []
