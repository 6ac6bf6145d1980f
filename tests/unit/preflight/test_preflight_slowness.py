"""Slow and lossy hosts are named, after a second measurement; healthy clusters on busy machines are left in peace."""

from __future__ import annotations

from functools import partial

import pytest

from saferun.preflight.results import Probe
from tests.unit.operations import operations
from tests.unit.preflight.preflight_samples import Change, infos_of, judged, lines, probes_of, told, where

NICS = ("eth0", "eth1")


def twice(hosts: int, *changes: Change, seed: int = 1) -> list[Probe]:
    """What is measured first, and what is measured again."""
    first = probes_of(hosts, NICS, *changes, seed=seed)
    again = set(judged(infos_of(hosts), first, remeasured=False).again)
    second = probes_of(hosts, NICS, *changes, full=True, seed=seed + 1000)
    return first + [probe for probe in second if (probe.source, probe.target) in again]


@pytest.mark.parametrize("hosts", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("seed", range(12))
def test_a_healthy_cluster_on_a_busy_machine_is_told_nothing(hosts: int, seed: int) -> None:
    """Latencies with a long tail, a throughput that is now and then a tenth, a segment lost here and there."""
    infos = infos_of(hosts)
    first = judged(infos, probes_of(hosts, seed=seed), remeasured=False)
    assert told(first) == []
    assert told(judged(infos, twice(hosts, seed=seed))) == []


@pytest.mark.parametrize("hosts", [3, 4, 16, 64])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (where(touching=2, nic="eth1", bytes_s=11.2e6), "eth1 is slow with"),
        (where(touching=2, nic="eth1", latency_s=0.1), "a round trip takes 100 ms, elsewhere 0.1 ms"),
        (where(touching=2, nic="eth1", retransmits=210), "eth1 loses packets with"),
    ],
)
def test_the_slow_host_is_found_and_not_the_pairs(hosts: int, change: Change, words: str) -> None:
    verdict = judged(infos_of(hosts), twice(hosts, change))
    (result,) = told(verdict)
    assert (result.verdict, result.host) == ("warn", "node2")
    assert words in result.message
    cells = {(row.host, cell.nic): cell.state for row in verdict.matrix for cell in row.cells}
    assert cells["node2", "eth1"] in {"slow", "lossy"}
    assert cells["node1", "eth1"] == "ok"


def test_what_was_measured_once_is_not_told() -> None:
    change = where(touching=2, nic="eth1", latency_s=0.1)
    first = probes_of(16, NICS, change)
    assert told(judged(infos_of(16), first, remeasured=False)) == []
    assert told(judged(infos_of(16), first, remeasured=True)) == []


def test_the_second_measurement_is_of_the_suspect_with_partners_that_it_has_not_met() -> None:
    change = where(touching=2, nic="eth1", latency_s=0.1)
    first = probes_of(16, NICS, change)
    again = judged(infos_of(16), first, remeasured=False).again
    assert 0 < len(again) <= 64
    met = {(probe.source, probe.target) for probe in first}
    assert {pair for pair in again if 2 in pair} & met
    assert {pair for pair in again if 2 in pair} - met
    assert len(set(again)) == len(again)


def test_what_is_well_the_second_time_is_not_told() -> None:
    """Somebody copied a file."""
    first = probes_of(16, NICS, where(touching=2, nic="eth1", bytes_s=5e6, retransmits=100))
    again = set(judged(infos_of(16), first, remeasured=False).again)
    second = [p for p in probes_of(16, NICS, full=True, seed=9) if (p.source, p.target) in again]
    assert told(judged(infos_of(16), first + second)) == []


def test_hosts_that_have_told_nothing_are_not_asked_again() -> None:
    first = probes_of(16, NICS, where(touching=2, nic="eth1", latency_s=0.1))
    again = judged(infos_of(16), first, missing={3: "gone", 6: "gone"}, remeasured=False).again
    assert again
    assert not [pair for pair in again if {3, 6} & set(pair)]


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_network_that_is_slow_for_all_is_no_fault(hosts: int) -> None:
    """100 Mbit/s everywhere, or two sites with an ocean between them: that is what they have."""
    changes = where(bytes_s=11e6), where(latency_s=0.08)
    assert told(judged(infos_of(hosts), twice(hosts, *changes))) == []


def test_differences_that_matter_to_nobody_are_no_fault() -> None:
    """A host that takes three times as long for a message: a third of a millisecond."""
    changes = where(touching=2, latency_s=4e-4), where(touching=2, bytes_s=3.5e8)
    assert told(judged(infos_of(4), twice(4, *changes))) == []


def test_packets_lost_between_two_hosts_are_told_of_the_two() -> None:
    changes = where(nic="eth0", retransmits=60), where(nic="eth0", bytes_s=2e6)
    (line,) = lines(judged(infos_of(2), twice(2, *changes)))
    assert line == "warn eth0 loses packets between node0 and node1: 8% was retransmitted"


@pytest.mark.parametrize("hosts", [3, 4, 16])
def test_connections_that_fail_where_packets_get_lost_are_no_second_fault(hosts: int) -> None:
    """A third of all packets is lost: now and then all three tries of a connection are, too."""

    def lossy(probe: Probe) -> Probe:
        if 2 not in {probe.source, probe.target} or probe.nic != "eth0":
            return probe
        if probe.source == 0:
            return probe._replace(kind="timeout", segments=0, retransmits=0, latency_s=0, bytes_s=0)
        return probe._replace(retransmits=230, segments=900, bytes_s=60e3, latency_s=0.2)

    (result,) = told(judged(infos_of(hosts), twice(hosts, lossy)))
    assert (result.verdict, result.host) == ("warn", "node2")
    assert result.message.startswith("eth0 loses packets with ")


def test_thousands_of_hosts_are_judged_by_as_much_work_as_there_are_probes() -> None:
    """Four times as many hosts: a little more than four times the work, not sixteen times."""
    work = []
    for hosts in (250, 1000):
        infos, probes = infos_of(hosts, ("eth0",)), probes_of(hosts, ("eth0",), where(touching=7, kind="timeout"))
        work.append(operations(partial(judged, infos, probes)) / len(probes))
    assert work[1] < 1.5 * work[0]
