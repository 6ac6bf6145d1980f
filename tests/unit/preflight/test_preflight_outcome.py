"""What ends a launch is one sentence, however many hosts say it, and each in its words."""

from __future__ import annotations

import pytest

from saferun.preflight.outcome import message_lines, outcome_of
from saferun.preflight.results import CheckResult, Preflight
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
