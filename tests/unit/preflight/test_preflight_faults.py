"""Each fault between hosts gives the sentence that names the host and the interface at fault."""

from __future__ import annotations

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.fault_text import hint_of
from saferun.preflight.judge import judge
from saferun.preflight.results import HostInfo, Preflight, Probe
from tests.unit.preflight.preflight_samples import Change, infos_of, judged, lines, probes_of, told, where

NICS = ("eth0", "eth1")
SEVERAL = [3, 4, 16, 64]


@pytest.mark.parametrize("hosts", SEVERAL)
def test_a_cut_interface_is_that_of_the_one_host_that_nobody_reaches_and_that_reaches_nobody(hosts: int) -> None:
    bad = hosts - 1
    verdict = judged(infos_of(hosts), probes_of(hosts, NICS, where(touching=bad, nic="eth0", kind="timeout")))
    tried = len([p for p in probes_of(hosts, ("eth0",)) if p.target == bad])
    assert lines(verdict) == [
        f"fail node{bad}: eth0 does not answer (timeout) from {tried} of {tried} hosts; its eth1 does"
    ]
    hint = told(verdict)[0].hint
    assert f"node{bad}'s eth0" in hint
    assert hint.endswith("or run with --nic eth1")


@pytest.mark.parametrize("hosts", SEVERAL)
def test_an_interface_that_no_rank_needs_is_a_warning(hosts: int) -> None:
    """The job runs over eth0: a cut eth1 is worth a word, and no reason to stop."""
    verdict = judged(infos_of(hosts), probes_of(hosts, NICS, where(touching=1, nic="eth1", kind="timeout")))
    assert verdict.verdict == "warn"
    assert [line.split(":")[0] for line in lines(verdict)] == ["warn node1"]


@pytest.mark.parametrize("gloo", [("gre1",), ("lo",), ()])
def test_a_host_whose_ranks_use_what_was_not_tried_is_not_known_to_be_cut_off(gloo: tuple[str, ...]) -> None:
    """A tunnel, an address that a routing protocol announces: between hosts it may be the only way."""
    infos = {}
    for host, info in infos_of(4).items():
        address = f"10.99.0.{host}"
        routed = Nic("lo", ("127.0.0.1", address), kind="loopback")
        names = ((info.label, address),)
        infos[host] = info._replace(gloo=gloo, probed=("eth0",), nics=(routed, *info.nics), names=names)
    for fits in ({"nic": "eth0"}, {"touching": 1}, {"source": 0, "target": 1}):
        verdict = judged(infos, probes_of(4, ("eth0",), where(**fits, kind="timeout")))
        assert [line.split()[0] for line in lines(verdict)] == ["warn"]


@pytest.mark.parametrize("hosts", [2, *SEVERAL])
@pytest.mark.parametrize("gloo", [("gre1",), ("eth1",), ()])
def test_a_host_is_reached_over_what_its_own_ranks_use_and_not_over_what_the_others_use(
    hosts: int, gloo: tuple[str, ...]
) -> None:
    """Its name leads to a tunnel or to another network, and a firewall closes the one that it does not listen on."""
    infos = infos_of(hosts)
    infos[0] = infos[0]._replace(gloo=gloo)
    closed = judged(infos, probes_of(hosts, NICS, where(target=0, nic="eth0", kind="timeout")))
    assert closed.verdict == "warn"
    assert judged(infos, probes_of(hosts, NICS, where(source=0, nic="eth0", kind="timeout"))).verdict == "fail"
    assert judged(infos, probes_of(hosts, NICS, where(touching=0, nic="eth0", kind="timeout"))).verdict == "fail"


@pytest.mark.parametrize("hosts", SEVERAL)
def test_an_interface_that_leads_nowhere_is_a_failure_where_some_hosts_use_it(hosts: int) -> None:
    infos = infos_of(hosts)
    infos[0] = infos[0]._replace(gloo=("gre1",))
    assert judged(infos, probes_of(hosts, ("eth0",), where(nic="eth0", kind="timeout"))).verdict == "fail"


def test_an_interface_that_the_ranks_are_told_to_use_is_a_failure() -> None:
    probes = probes_of(4, ("eth1",), where(touching=1, nic="eth1", kind="timeout"))
    verdict = judged(infos_of(4), probes, nics=("eth1",))
    assert lines(verdict) == ["fail node1: eth1 does not answer (timeout) from 2 of 2 hosts"]
    assert told(verdict)[0].class_name == "network_between_hosts"


def test_between_two_hosts_nobody_can_say_whose_cable_it_is() -> None:
    verdict = judged(infos_of(2), probes_of(2, NICS, where(nic="eth0", kind="timeout")))
    assert lines(verdict) == ["fail node0 and node1 do not reach each other over eth0 (timeout); eth1 works"]


@pytest.mark.parametrize("hosts", SEVERAL)
@pytest.mark.parametrize(
    ("kind", "does"), [("timeout", "does not answer (timeout)"), ("refused", "refuses connections")]
)
def test_a_host_that_reaches_others_and_is_not_reached_has_a_firewall(hosts: int, kind: str, does: str) -> None:
    verdict = judged(infos_of(hosts), probes_of(hosts, NICS, where(target=2, nic="eth0", kind=kind)))
    (line,) = lines(verdict)
    assert line.startswith(f"fail node2: eth0 {does} from ")
    assert "while it reaches others itself" in line
    assert "a firewall on node2" in told(verdict)[0].hint


@pytest.mark.parametrize("hosts", SEVERAL)
def test_a_host_that_is_reached_and_reaches_nobody_is_told_so(hosts: int) -> None:
    (line,) = lines(judged(infos_of(hosts), probes_of(hosts, NICS, where(source=2, nic="eth0", kind="timeout"))))
    assert line.startswith("fail node2: does not reach ")
    assert "over eth0 (timeout), while others reach it" in line


@pytest.mark.parametrize("hosts", [2, 3, 4, 16])
def test_one_direction_of_one_pair_is_told_as_such(hosts: int) -> None:
    (result,) = told(
        judged(infos_of(hosts), probes_of(hosts, NICS, where(source=0, target=1, nic="eth0", kind="timeout")))
    )
    assert result.message.startswith("node0 does not reach node1 over eth0 (timeout)")
    assert ("the other way round works" in result.message) == (hosts < 4)
    assert "node1 (incoming)" in result.hint
    assert "node0 (outgoing)" in result.hint
    assert not result.host


@pytest.mark.parametrize("hosts", SEVERAL)
def test_a_black_hole_is_told_apart_from_silence(hosts: int) -> None:
    change = where(touching=1, nic="eth0", kind="black_hole")
    (result,) = told(judged(infos_of(hosts), probes_of(hosts, NICS, change)))
    assert result.host == "node1"
    assert "lets small messages from" in result.message
    assert "no large ones" in result.message
    assert "MTU" in result.hint


def test_a_black_hole_names_the_mtus_that_differ() -> None:
    infos = infos_of(4)
    infos[1] = infos[1]._replace(nics=tuple(nic._replace(mtu=9000) for nic in infos[1].nics))
    (result,) = told(judged(infos, probes_of(4, NICS, where(touching=1, nic="eth0", kind="black_hole"))))
    assert "9000 on node1, 1500 on the others" in result.hint


@pytest.mark.parametrize("hosts", SEVERAL)
def test_a_stranger_is_told_with_the_address_at_which_it_answers(hosts: int) -> None:
    (result,) = told(judged(infos_of(hosts), probes_of(hosts, NICS, where(target=2, nic="eth0", kind="stranger"))))
    assert result.host == "node2"
    assert result.message.startswith("another machine or program answers at 10.0.0.3, the address of its eth0, to ")


@pytest.mark.parametrize("hosts", [2, 4, 16])
def test_a_bridge_with_the_same_address_everywhere_matters_only_where_it_is_used(hosts: int) -> None:
    nics = ("eth0", "docker0")
    probes = probes_of(hosts, nics, where(nic="docker0", kind="self"))
    assert told(judged(infos_of(hosts, nics, gloo="eth0"), probes)) == []
    (result,) = told(judged(infos_of(hosts, nics, gloo="docker0"), probes))
    assert result.verdict == "fail"
    assert "docker0" in result.message
    assert "172.17.0.1" in result.message
    assert "--nic eth0" in result.hint


def test_a_bridge_that_would_be_used_and_was_not_tried_is_told_from_what_the_hosts_say() -> None:
    (result,) = told(judged(infos_of(4, gloo="docker0"), probes_of(4)))
    assert result.verdict == "fail"
    assert result.message.startswith("docker0 has the same address (172.17.0.1) on node0, node1, … (4 hosts)")


def test_several_hosts_of_a_job_may_be_one_machine() -> None:
    """Two launches on one machine share all addresses, and reach each other: nothing is wrong."""
    infos = infos_of(2, gloo="docker0")
    infos[1] = infos[0]._replace(label="node1")
    assert told(judged(infos, [])) == []


@pytest.mark.parametrize("hosts", [3, 4, 16, 64])
def test_a_network_that_reaches_nobody_is_told_once_and_only_if_it_is_used(hosts: int) -> None:
    """Many hosts have a management or USB network that leads to no other host."""
    assert told(judged(infos_of(hosts), probes_of(hosts, NICS, where(nic="eth1", kind="timeout")))) == []
    verdict = judged(infos_of(hosts), probes_of(hosts, NICS, where(nic="eth0", kind="timeout")))
    assert lines(verdict) == ["fail no host reaches another over eth0 (timeout); eth1 works"]


def test_groups_of_hosts_that_are_cut_off_from_each_other_are_named() -> None:
    def cut(probe: Probe) -> Probe:
        crosses = (probe.source < 3) != (probe.target < 3)
        return probe._replace(kind="timeout") if crosses and probe.nic == "eth0" else probe

    (result,) = told(judged(infos_of(8), probes_of(8, NICS, cut)))
    assert "some groups of hosts do not reach each other over eth0 (timeout)" in result.message
    assert "node0, node1 and node2" in result.message


def test_two_hosts_with_two_faults_are_told_one_by_one() -> None:
    changes = where(touching=3, nic="eth0", kind="timeout"), where(target=9, nic="eth0", kind="refused")
    found = lines(judged(infos_of(16), probes_of(16, NICS, *changes)))
    assert [line.split(" ")[1] for line in found] == ["node3:", "node9:"]
    assert "does not answer (timeout)" in found[0]
    assert "refuses connections" in found[1]


@pytest.mark.parametrize("hosts", [16, 64])
def test_however_much_is_broken_a_person_can_still_read_it(hosts: int) -> None:
    def broken(probe: Probe) -> Probe:
        return probe._replace(kind="timeout") if (probe.source * 7 + probe.target * 3) % 4 == 0 else probe

    assert 0 < len(told(judged(infos_of(hosts), probes_of(hosts, NICS, broken)))) <= 20


def test_of_several_addresses_of_an_interface_the_first_one_counts() -> None:
    """The libraries take the first; that a host has an IPv6 address which leads nowhere harms nobody."""
    infos = infos_of(2)
    for host, info in infos.items():
        nics = tuple(nic._replace(addresses=(*nic.addresses, f"fd00::{host}:{nic.name[-1]}")) for nic in info.nics)
        infos[host] = info._replace(nics=nics)
    probes = probes_of(2)
    second = [p._replace(address=f"fd00::{p.target}:{p.nic[-1]}", kind="timeout") for p in probes]
    assert told(judged(infos, second + probes)) == []


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_way_that_works_once_works(fails_first: bool) -> None:
    good, bad = probes_of(4), probes_of(4, NICS, where(touching=3, kind="timeout"))
    assert told(judged(infos_of(4), bad + good if fails_first else good + bad)) == []


def test_a_host_whose_interface_is_down_is_named_though_nobody_tries_it() -> None:
    infos = infos_of(4)
    nics = tuple(nic._replace(is_up=nic.name != "eth1") for nic in infos[2].nics)
    infos[2] = infos[2]._replace(nics=nics, probed=("eth0",))
    probes = [p for p in probes_of(4) if p.nic == "eth0" or 2 not in {p.source, p.target}]
    assert lines(judged(infos, probes)) == ["warn node2: eth1 is down, which is up on 3 other hosts"]


def test_an_interface_that_one_of_two_hosts_does_not_use_may_be_down() -> None:
    """A laptop's wireless info, a second port without a cable."""
    infos = infos_of(2)
    infos[0] = infos[0]._replace(nics=(*infos[0].nics, Nic("wlan0", is_up=False)))
    infos[1] = infos[1]._replace(
        probed=("eth0",), nics=tuple(n._replace(is_up=n.name != "eth1") for n in infos[1].nics)
    )
    assert told(judged(infos, [p for p in probes_of(2) if p.nic == "eth0"])) == []


# ----------------------------------------------------------------------------------------------------- missing reports


def test_a_host_that_says_nothing_and_that_nobody_reaches_is_told_once() -> None:
    probes = [p for p in probes_of(4, NICS, where(touching=3, kind="timeout")) if p.source != 3]
    verdict = judged(infos_of(4), probes, missing={3: "it sent no results"})
    assert all(result.host == "node3" for result in told(verdict))
    assert verdict.verdict == "fail"
    assert sum(result.message.startswith("it reported nothing") for result in told(verdict)) <= 1


def test_of_a_host_that_is_lost_as_it_measures_again_the_first_round_is_known() -> None:
    verdict = judged(infos_of(4), probes_of(4), missing={3: "its check process ended"})
    assert lines(verdict) == [
        "warn node3: it reported nothing of the other hosts the second time (its check process ended)"
    ]


def test_a_host_whose_checks_ended_early_refuses_and_that_is_no_firewall() -> None:
    """Its listener is gone with its check process; its ranks may be started all the same."""
    probes = [p for p in probes_of(4, NICS, where(target=3, kind="refused")) if p.source != 3]
    (result,) = told(judged(infos_of(4), probes, missing={3: "it sent no results"}))
    assert (result.verdict, result.host) == ("warn", "node3")
    assert "it sent no results" in result.message


def test_a_host_without_checks_is_left_out() -> None:
    infos = infos_of(4)
    infos[3] = HostInfo(label="node3")
    probes = [p for p in probes_of(4) if 3 not in {p.source, p.target}]
    verdict = judged(infos, probes, missing={3: "it was started without checks"})
    assert told(verdict) == []
    assert any(result.verdict == "skipped" and result.host == "node3" for result in verdict.results)


# ----------------------------------------------------------------------------------------------------- matrix and nics


def test_the_matrix_has_a_row_for_each_host_and_a_cell_for_each_interface() -> None:
    verdict = judged(infos_of(4), probes_of(4, NICS, where(touching=3, nic="eth1", kind="timeout")))
    assert [row.host for row in verdict.matrix] == ["node0", "node1", "node2", "node3"]
    cells = {(row.host, cell.nic): cell for row in verdict.matrix for cell in row.cells}
    assert (cells["node3", "eth1"].state, cells["node3", "eth1"].ok, cells["node3", "eth1"].total) == ("timeout", 0, 2)
    assert (cells["node1", "eth0"].state, cells["node1", "eth0"].ok, cells["node1", "eth0"].total) == ("ok", 2, 2)
    assert cells["node1", "eth0"].latency_s > 0
    assert cells["node1", "eth0"].bytes_s > 0


def test_what_nobody_tried_is_untested() -> None:
    verdict = judged(infos_of(2), [])
    assert {cell.state for row in verdict.matrix for cell in row.cells} == {"untested"}
    assert told(verdict) == []


def test_one_host_alone_has_no_matrix() -> None:
    assert judged(infos_of(1), []).matrix == ()


def test_the_interface_that_reaches_everybody_is_suggested() -> None:
    probes = probes_of(4, NICS, where(touching=3, nic="eth0", kind="timeout"))
    assert judged(infos_of(4), probes).nic == ("eth1",)
    assert judged(infos_of(4), probes_of(4)).nic == ("eth0",)


def test_of_two_that_reach_everybody_the_clearly_faster_one_is_suggested() -> None:
    def fast(probe: Probe) -> Probe:
        return probe._replace(bytes_s=probe.bytes_s / (10 if probe.nic == "eth0" else 1))

    assert judged(infos_of(4), probes_of(4, NICS, fast)).nic == ("eth1",)
    infos = infos_of(4)
    for host, info in infos.items():
        speeds = {"eth0": 200 * 10**9, "eth1": 10**9}
        nics = tuple(nic._replace(speed_bits_s=speeds.get(nic.name, 0)) for nic in info.nics)
        infos[host] = info._replace(nics=nics)
    assert judged(infos, probes_of(4)).nic == ("eth0",)


def test_nothing_is_suggested_where_the_user_has_chosen() -> None:
    assert judged(infos_of(4), probes_of(4), nics=("eth1",)).nic == ()
    infos = {host: info._replace(environ=(("NCCL_SOCKET_IFNAME", "eth1"),)) for host, info in infos_of(4).items()}
    assert judged(infos, probes_of(4)).nic == ()
    assert judged(infos, probes_of(4), nics=("auto",)).nic == ("eth0",)


def test_a_host_that_nobody_reaches_over_any_interface_is_reported_once() -> None:
    """One firewall is the cause of it."""
    verdict = judged(infos_of(4), probes_of(4, NICS, where(target=2, kind="timeout")))
    (line,) = lines(verdict)
    assert line.endswith("while it reaches others itself; the same over eth1")


# ------------------------------------------------------------------------------- what may be away for some seconds only


def measured_twice(hosts: int, first: Change, second: Change | None = None) -> tuple[Preflight, Preflight]:
    """The leader's verdict of one round, and that with what it had measured again; ``second``: as that came out."""
    once = probes_of(hosts, NICS, first)
    before = judge(infos_of(hosts), once, missing={}, nics=(), remeasured=False, duration_s=0.1)
    changes = [second] if second is not None else []
    again = [p for p in probes_of(hosts, NICS, *changes) if (p.source, p.target) in before.again]
    after = judge(infos_of(hosts), [*once, *again], missing={}, nics=(), remeasured=True, duration_s=0.2)
    return before, after


@pytest.mark.parametrize("hosts", [2, *SEVERAL])
@pytest.mark.parametrize("kind", ["timeout", "no_route"])
def test_a_network_that_was_away_for_some_seconds_ends_no_launch(hosts: int, kind: str) -> None:
    """The ranks connect later. Whatever stays away ends it, with the words of a lasting fault."""
    away = where(touching=1, nic="eth0", kind=kind)
    before, after = measured_twice(hosts, away)
    assert {pair for pair in before.again if 1 in pair} == {
        (p.source, p.target) for p in probes_of(hosts) if 1 in {p.source, p.target}
    }
    assert lines(after) == []
    _, after = measured_twice(hosts, away, away)
    assert after.verdict == "fail"


@pytest.mark.parametrize("hosts", [3, 64])
def test_a_network_that_was_away_for_all_hosts_ends_no_launch(hosts: int) -> None:
    """Not all of their connections are tried again."""
    before, after = measured_twice(hosts, where(nic="eth0", kind="timeout"))
    assert before.verdict == "fail"
    assert 0 < len(before.again) <= 64
    assert after.verdict in {"ok", "warn"}


def test_what_is_certain_at_once_is_not_measured_again() -> None:
    """A firewall that rejects, a stranger: the user is told without delay. So is what no rank needs."""
    for change in (where(target=2, nic="eth0", kind="refused"), where(target=2, nic="eth0", kind="stranger")):
        before, after = measured_twice(4, change)
        assert (before.again, before.verdict, after.verdict) == ((), "fail", "fail")
    before, _ = measured_twice(4, where(touching=2, nic="eth1", kind="timeout"))
    assert (before.again, before.verdict) == ((), "warn")


@pytest.mark.parametrize("hosts", [2, *SEVERAL])
def test_a_listener_that_gets_no_processor_ends_no_launch(hosts: int) -> None:
    """The network carries what is sent, and the ranks are other processes than that of the checks."""
    starved = where(target=1, kind="silent")
    before, after = measured_twice(hosts, starved, starved)
    assert (before.again, before.verdict, after.verdict) == ((), "warn", "warn")
    assert "node1" in " ".join(lines(after))
    assert "no data is received" in " ".join(lines(after))


def test_a_host_that_answers_the_second_time_with_silence_ends_no_launch() -> None:
    """It was away, and then busy."""
    _, after = measured_twice(4, where(target=1, kind="timeout"), where(target=1, kind="silent"))
    assert after.verdict == "warn"


# ------------------------------------------------------------ a network that no rank uses, where the other is unknown

EMPTY = where(nic="eth1", kind="timeout")  # a second network that leads nowhere, as that of a management processor


@pytest.mark.parametrize("hosts", [2, *SEVERAL])
@pytest.mark.parametrize("kind", ["refused", "silent", "broken"])
def test_a_host_whose_check_process_is_lost_does_not_make_a_network_needed_that_no_rank_uses(
    hosts: int, kind: str
) -> None:
    """Its eth0 could not be measured, and leads to its ranks all the same: it answers."""
    bad = hosts - 1
    probes = [p for p in probes_of(hosts, NICS, EMPTY, where(target=bad, nic="eth0", kind=kind)) if p.source != bad]
    verdict = judged(infos_of(hosts), probes, missing={bad: "its check process ended"})
    (said,) = [line for line in lines(verdict) if "eth1" not in line]
    assert verdict.verdict == "warn"
    assert said == f"warn node{bad}: it reported nothing of the other hosts (its check process ended)"


@pytest.mark.parametrize("hosts", [2, *SEVERAL])
@pytest.mark.parametrize("starved", [{"target": 1}, {}])
def test_a_listener_that_gets_no_processor_does_not_make_a_network_needed_that_no_rank_uses(
    hosts: int, starved: dict[str, int]
) -> None:
    silent = where(nic="eth0", kind="silent", **starved)
    assert judged(infos_of(hosts), probes_of(hosts, NICS, EMPTY, silent)).verdict == "warn"


@pytest.mark.parametrize("hosts", [2, *SEVERAL])
@pytest.mark.parametrize("kind", ["timeout", "refused"])
def test_a_fault_that_lasts_and_an_interface_that_is_used_count_only_where_they_meet(hosts: int, kind: str) -> None:
    """A firewall on an interface that its host does not use, and a listener that gets no processor on another host."""
    infos = infos_of(hosts)
    infos[0] = infos[0]._replace(gloo=("eth1",))
    closed = where(target=0, nic="eth0", kind=kind)
    starved = where(source=0, target=1, nic="eth0", kind="silent")
    verdict = judged(infos, probes_of(hosts, NICS, closed, starved))
    assert verdict.verdict == "warn"
    refused = judged(infos_of(hosts), probes_of(hosts, NICS, closed, starved))
    assert refused.verdict == "fail", "all use it"
    if hosts == 2:
        reason = {"timeout": "timeout", "refused": "connection refused"}[kind]
        assert sorted(lines(verdict)) == [
            "warn node0 does not reach node1 over eth0 (connections are accepted, but no data is received); eth1 works",
            f"warn node1 does not reach node0 over eth0 ({reason}); eth1 works",
        ]
        assert [line.split()[0] for line in lines(refused)] == ["fail", "warn"]
        (silence,) = (one for one in told(verdict) if "no data" in one.message)
        assert silence.hint.startswith("another program may listen there, or saferun on node1 is stopped or starved")


@pytest.mark.parametrize("hosts", SEVERAL)
def test_a_listener_that_gets_no_processor_excuses_no_host_that_is_not_reached(hosts: int) -> None:
    """One of those that try it gets as far as its listener; all others are not let in."""
    closed = where(target=1, nic="eth0", kind="refused")
    starved = where(source=0, target=1, nic="eth0", kind="silent")
    assert judged(infos_of(hosts), probes_of(hosts, NICS, closed, starved)).verdict == "fail"
    infos = infos_of(hosts, backend="nccl")
    assert judged(infos, probes_of(hosts, NICS, closed, starved)).verdict == "fail"


def test_a_host_that_could_not_be_tried_over_what_its_ranks_use_is_not_cut_off_by_another_network() -> None:
    """It had no room for another socket."""
    probes = probes_of(4, NICS, where(target=2, nic="eth1", kind="timeout"))
    untried = [p for p in probes if p.nic == "eth1" or 2 not in {p.source, p.target}]
    assert judged(infos_of(4), untried).verdict == "warn"


def test_what_the_ranks_use_and_what_was_away_once_does_not_make_a_network_needed_that_no_rank_uses() -> None:
    """Eth0 was not tried again: of many connections only the first are."""
    probes = probes_of(4, NICS, where(target=2, kind="timeout"))
    again = [p for p in probes if p.nic == "eth1"]
    verdict = judge(infos_of(4), [*probes, *again], missing={}, nics=(), remeasured=True, duration_s=0.1)
    assert verdict.verdict == "warn"


def test_a_lost_host_that_is_not_reached_over_what_its_ranks_use_may_be_gone() -> None:
    probes = [p for p in probes_of(4, NICS, where(touching=3, kind="timeout")) if p.source != 3]
    verdict = judge(infos_of(4), probes, missing={3: "no answer"}, nics=(), remeasured=True, duration_s=0.1)
    (said,) = [line for line in lines(verdict) if "reported nothing" in line]
    assert said == "warn node3: it reported nothing of the other hosts (no answer), and none of them reaches it"


def test_an_interface_that_some_hosts_lack_is_not_the_best_for_all() -> None:
    """Two generations of servers: what one names ens3 is eth0 on the other, and gloo would find no such interface."""
    infos = infos_of(2)
    for host, name in ((0, "eth0"), (1, "ens3")):
        nics = tuple(nic._replace(name=name) for nic in infos[host].nics if nic.name == "eth0")
        infos[host] = infos[host]._replace(nics=nics, gloo=(name,), nccl=(name,), probed=(name,))
    probes = [
        Probe(0, 1, "ens3", "10.0.0.2", latency_s=1e-4, bytes_s=1e9),
        Probe(1, 0, "eth0", "10.0.0.1", latency_s=1e-4, bytes_s=1e9),
    ]
    found = judged(infos, probes, nics=("auto",))
    assert found.nic == ()


@pytest.mark.parametrize("direction", ["in", "pair", ""])
def test_no_firewall_is_blamed_where_connections_are_accepted(direction: str) -> None:
    """What is accepted has passed all firewalls."""
    hint = hint_of("silent", "eth0", "node2", "", direction=direction)
    assert hint == "another program may listen there, or saferun on node2 is stopped or starved"
