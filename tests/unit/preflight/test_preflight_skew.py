"""What should be the same on all hosts and is not is told by host; what may differ is not."""

from __future__ import annotations

import pytest

from saferun.preflight.results import CheckResult, HostInfo, Pairs
from tests.unit.preflight.preflight_samples import VERSIONS, address_of, infos_of, judged, lines, probes_of, told, where


def changed(pairs: Pairs, name: str, value: str | None) -> Pairs:
    kept = tuple(pair for pair in pairs if pair[0] != name)
    return kept if value is None else (*kept, (name, value))


def found(infos: dict[int, HostInfo]) -> list[str]:
    return lines(judged(infos, probes_of(len(infos))))


@pytest.mark.parametrize("hosts", [3, 4, 16, 64])
def test_the_host_with_another_version_is_named(hosts: int) -> None:
    infos = infos_of(hosts)
    infos[2] = infos[2]._replace(versions=changed(VERSIONS, "torch", "2.4.0"))
    assert found(infos) == ["warn node2: torch 2.4.0, where the others have torch 2.13.0"]


def test_all_that_differs_on_a_host_is_one_sentence() -> None:
    infos = infos_of(4)
    infos[2] = infos[2]._replace(versions=changed(changed(VERSIONS, "torch", "2.4.0"), "nccl", None))
    assert found(infos) == ["warn node2: nccl none, torch 2.4.0, where the others have nccl 2.27.3, torch 2.13.0"]


def test_of_two_hosts_nobody_knows_which_one_is_right() -> None:
    infos = infos_of(2)
    infos[1] = infos[1]._replace(versions=changed(VERSIONS, "torch", "2.4.0"))
    assert found(infos) == ["warn torch differs between the hosts: 2.13.0 on node0, 2.4.0 on node1"]


def test_another_nccl_is_told_where_there_are_gpus() -> None:
    """NCCL compares the versions of all ranks, and refuses."""
    infos = {host: info._replace(versions=(*VERSIONS, ("driver", "570.1"))) for host, info in infos_of(4).items()}
    infos[1] = infos[1]._replace(versions=changed(infos[1].versions, "nccl", "2.20.5"))
    assert found(infos) == ["warn node1: nccl 2.20.5, where the others have nccl 2.27.3"]


def test_a_script_that_is_another_one_is_named_by_its_host() -> None:
    infos = infos_of(4)
    infos[3] = infos[3]._replace(script="0" * 64)
    assert found(infos) == ["warn node3: its training script is not that of the others"]
    infos = infos_of(2)
    infos[1] = infos[1]._replace(script="0" * 64)
    assert found(infos) == ["warn the training script differs between the hosts: 5c1f5c1f on node0; 00000000 on node1"]


ALICE = (("user", "alice"), ("script", "train.py"))


@pytest.mark.parametrize(
    ("theirs", "content", "is_other"),
    [
        ((("user", "alice"), ("script", "other.py")), "0" * 64, True),
        ((("user", "bob"), ("script", "train.py")), "0" * 64, True),
        # What may be one job: a script that lags, a copy by another name, users by their numbers.
        (ALICE, "0" * 64, False),
        ((("user", "1000"), ("script", "train.py")), "", False),
        ((("user", "1000"), ("script", "copy.py")), "5c1f" * 16, False),
        ((), "0" * 64, False),
        ((("user",), ("script", "a", "b")), "0" * 64, True),
    ],
)
@pytest.mark.parametrize("hosts", [2, 4])
def test_two_jobs_that_meet_at_the_default_port_do_not_mix(
    hosts: int, theirs: Pairs, content: str, *, is_other: bool
) -> None:
    """They are told from each other by user and script, where it is certain."""
    infos = {host: info._replace(launch=ALICE) for host, info in infos_of(hosts).items()}
    infos[1] = infos[1]._replace(launch=theirs, script=content)
    failures = [result for result in judged(infos, probes_of(hosts)).results if result.verdict == "fail"]
    assert [result.host for result in failures] == ["node1"] * is_other
    for result in failures:
        assert result.message.startswith("another job (script ")
        assert result.message.endswith(" connects to this job's port on node0 (script train.py of user alice)")
        assert "--rdzv-id" in result.hint


@pytest.mark.parametrize("host", [0, 1])
def test_where_the_hosts_were_given_a_port_or_an_id_they_are_one_job(host: int) -> None:
    """Such hosts say nothing about their launch."""
    infos = {host: info._replace(launch=ALICE) for host, info in infos_of(2).items()}
    infos[1] = infos[1]._replace(launch=(("user", "bob"), ("script", "other.py")), script="0" * 64)
    infos[host] = infos[host]._replace(launch=())
    assert found(infos) == ["warn the training script differs between the hosts: 5c1f5c1f on node0; 00000000 on node1"]


def test_a_variable_that_is_set_on_one_host_only_is_named() -> None:
    infos = infos_of(4)
    infos[1] = infos[1]._replace(environ=(("NCCL_ALGO", "Ring"),))
    assert found(infos) == ["warn node1: NCCL_ALGO=Ring, where the others have NCCL_ALGO=none"]


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"])
def test_variables_that_may_differ_are_not_told(name: str) -> None:
    infos = infos_of(4)
    infos[0] = infos[0]._replace(environ=((name, "x"),))
    assert found(infos) == []


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(300.0, "5 minutes ahead of"), (-1.6, "1.6 s behind"), (9e4, "25 hours ahead of")]
)
@pytest.mark.parametrize("hosts", [3, 4, 16])
def test_the_host_whose_clock_is_off_is_named(hosts: int, ahead_s: float, words: str) -> None:
    probes = probes_of(hosts)
    probes = [p._replace(clock_s=p.clock_s + ahead_s * ((p.target == 2) - (p.source == 2))) for p in probes]
    assert lines(judged(infos_of(hosts), probes)) == [f"warn node2: its clock is {words} the others'"]


def test_the_clocks_of_two_hosts_are_apart() -> None:
    probes = [p._replace(clock_s=p.clock_s + 300 * (p.target - p.source)) for p in probes_of(2)]
    assert lines(judged(infos_of(2), probes)) == ["warn the clocks of node0 and node1 are 5 minutes apart"]


def test_cards_are_written_at_different_times_and_that_is_no_clock() -> None:
    infos = {host: info._replace(time=1.8e9 + 30 * host) for host, info in infos_of(4).items()}
    assert found(infos) == []


def test_a_name_that_leads_elsewhere_on_one_host_is_told() -> None:
    infos = infos_of(4)
    infos[2] = infos[2]._replace(names=(("node0", "10.0.9.9"),))
    assert found(infos) == ["warn node2: node0 is 10.0.9.9 there, for the others it is 10.0.0.1"]


@pytest.mark.parametrize("wrong", ["10.0.0.0", "10.0.9.9"])
def test_of_two_hosts_the_one_is_right_that_names_an_address_of_the_other(wrong: str) -> None:
    """Each has an address of its own for the first host, which knows which of them it has."""
    infos = infos_of(2)
    infos[1] = infos[1]._replace(names=(("node0", wrong),))
    assert found(infos) == [f"warn node1: node0 is {wrong} there, for the others it is 10.0.0.1"]


def test_two_addresses_of_one_host_are_one_host() -> None:
    """A name server that knows a host by one interface, and a hosts file that knows it by another."""
    infos = infos_of(4)
    infos[2] = infos[2]._replace(names=(("node0", "10.1.0.1"),))
    infos[0] = infos[0]._replace(names=(("node0", "127.0.1.1"),))
    assert found(infos) == []


def test_a_name_that_all_containers_have_leads_each_to_itself() -> None:
    """Gloo needs it so: resolved alike on all hosts, it would lead all but one to another host."""
    infos = infos_of(4)
    for host, info in infos.items():
        infos[host] = info._replace(names=(("trainer", address_of(host, "eth0")), *info.names))
    assert found(infos) == []
    infos[2] = infos[2]._replace(names=(infos[2].names[0], ("node0", address_of(2, "eth0"))))
    assert found(infos) == ["warn node2: node0 is 10.0.0.3 there, for the others it is 10.0.0.1"], "it is another's"


def test_what_a_host_found_at_home_is_told_with_its_name_and_the_worst_first() -> None:
    infos = infos_of(3)
    infos[0] = infos[0]._replace(results=(CheckResult("shared_memory", "warn", "/dev/shm has only 64 MiB", "more"),))
    infos[2] = infos[2]._replace(
        results=(CheckResult("limits", "fail", "too few files", "ulimit"), CheckResult("cpus", "ok", "8"))
    )
    verdict = judged(infos, probes_of(3))
    assert lines(verdict) == ["fail node2: too few files", "warn node0: /dev/shm has only 64 MiB"]
    assert verdict.verdict == "fail"


def test_a_host_without_checks_differs_in_nothing() -> None:
    infos = infos_of(4)
    infos[3] = HostInfo(label="node3")
    probes = [p for p in probes_of(4) if 3 not in {p.source, p.target}]
    assert told(judged(infos, probes, missing={3: "it was started without checks"})) == []


def test_hosts_that_do_not_reach_each_other_are_compared_all_the_same() -> None:
    infos = infos_of(4)
    infos[2] = infos[2]._replace(versions=changed(VERSIONS, "torch", "2.4.0"))
    names = [result.name for result in told(judged(infos, probes_of(4, ("eth0",), where(touching=1, kind="timeout"))))]
    assert names == ["links", "versions"]
