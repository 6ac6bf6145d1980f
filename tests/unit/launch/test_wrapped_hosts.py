"""Hosts that ``--wrap host:NAME:...`` names."""

from __future__ import annotations

import pytest

from saferun.cli.wrap_option import read_wraps
from saferun.config import HostsConfig
from saferun.launch.wrapped_hosts import missing_host_lines, with_own_name

ONE = HostsConfig()
NODES = HostsConfig(3, 3, node_rank=1, names=("node1", "node2", "node3"))


def own(name: str, hosts: HostsConfig = ONE, host: str = "node2", host_name: str = "node2.cluster") -> bool:
    """Whether a name is this host's."""
    (wrap,) = with_own_name(read_wraps([f"host:{name}:nice"]), hosts, host, host_name)
    return wrap.ranks.host == host


@pytest.mark.parametrize("name", ["node2", "node2.cluster", "NODE2", "node2.other-network", "localhost", "127.0.0.1"])
def test_a_job_on_one_host_has_all_these_names(name: str) -> None:
    assert own(name)


def test_the_schedulers_name_and_that_of_the_job_are_a_hosts_own() -> None:
    aliases = NODES._replace(names=("nid1", "nid2", "nid3"))
    assert own("nid2", aliases)
    assert own("nid2.fabric", aliases)
    assert own("node2", aliases)
    assert own("10.0.0.2", NODES._replace(names=("10.0.0.1", "10.0.0.2", "10.0.0.3")))
    assert own("pod-0", ONE, host="pod-0", host_name="pod-0.service")
    assert not own("localhost", NODES._replace(names=())), "each of the hosts has that name"


def test_hosts_with_the_same_name_have_numbers_in_the_job() -> None:
    """The name without a number is that of all of them."""
    several = HostsConfig(2, 2, node_rank=0)
    assert own("vm.0", several, host="vm.0", host_name="vm")
    assert own("vm", several, host="vm.0", host_name="vm")
    assert not own("vm.1", several, host="vm.0", host_name="vm")
    wraps = read_wraps(["host:vm:nice", "host:vm.1:nice", "host:vm.2:nice"])
    assert len(missing_host_lines(wraps, {"vm.0", "vm.1"})) == 1


@pytest.mark.parametrize("name", ["typo", "node", "node22", "10.0.0.2"])
def test_no_other_name_is_a_hosts_own(name: str) -> None:
    """Nor is it refused: the host may have it, though saferun does not know."""
    assert not own(name)
    assert not own(name, NODES)


def test_when_the_hosts_have_met_a_line_names_the_tool_that_no_rank_runs_under() -> None:
    wraps = read_wraps(["host:node1.cluster:nice", "host:typo:perf", "0:strace"])
    assert missing_host_lines(wraps, {"node1", "node2"}) == [
        "--wrap: no rank runs under perf: typo is none of the hosts node[1-2]"
    ]
