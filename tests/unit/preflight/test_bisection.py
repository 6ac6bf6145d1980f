"""The search for bad parts, on simulated clusters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from saferun.preflight.bisect import (
    LOOPBACK,
    BisectFinding,
    Bisection,
    FailingSet,
    Group,
    Member,
    Trial,
    TrialResult,
    check_results,
)
from saferun.preflight.bisect.halving import judge_pairs, rounds
from saferun.text.decoding import loads
from saferun.text.typed_json import fit

Fails = Callable[[Group, str], bool]


def run(
    fails: Fails, hosts: int | Mapping[int, Sequence[int]], interfaces: Sequence[str] = (), gpus: int = 2
) -> tuple[BisectFinding, list[Trial]]:
    """Search a cluster in which the groups fail that ``fails`` says. Checks what holds for every search."""
    if isinstance(hosts, int):
        hosts = {host: range(gpus) for host in range(hosts)}
    search = Bisection(hosts, {host: f"node{host}" for host in hosts}, interfaces)
    everybody = {Member(host, gpu) for host, parts in hosts.items() for gpu in parts}
    trials: list[Trial] = []
    while trial := search.next_trial():
        trials.append(trial)
        members = [member for group in trial.groups for member in group]
        assert len(members) == len(set(members)), "groups are disjoint"
        assert set(members) <= everybody
        assert all(trial.groups)
        assert trial.number == len(trials) <= search.limit
        outcomes = []
        for group in trial.groups:
            kind = "timeout" if fails(group, trial.interface) else "ok"
            outcomes += [TrialResult(member, kind, where="" if kind == "ok" else "in barrier") for member in group]
        search.feed(trial, outcomes)
    finding = search.finding()
    assert finding.trials == len(trials)
    return finding, trials


def hosts_of(group: Group) -> set[int]:
    return {member.host for member in group}


def only(finding: BisectFinding) -> FailingSet:
    assert finding.is_complete
    assert len(finding.sets) == 1, finding
    return finding.sets[0]


def bad_host(*bad: int, interface: str = "") -> Fails:
    """Hosts whose network over one interface is cut."""
    return lambda group, over: over == interface and len(hosts_of(group)) > 1 and bool(hosts_of(group) & set(bad))


def test_trials_and_outcomes_travel_as_json() -> None:
    """The leader tells the hosts what to try, and they tell it what came of it."""
    trial = Bisection({0: [0, 1], 3: [0]}, interfaces=["eth0"]).next_trial()
    assert fit(Trial, loads(json.dumps(trial))) == trial
    outcomes = (TrialResult(Member(3, 0), "timeout", "", "in barrier"), TrialResult(Member(0, 1), "ok"))
    assert fit(tuple[TrialResult, ...], loads(json.dumps(outcomes))) == outcomes


def test_hosts_that_share_a_machine_are_searched_over_loopback() -> None:
    """Several tasks of one machine can be hosts to each other."""
    finding, _ = run(bad_host(2, interface=LOOPBACK), 4, [LOOPBACK])
    assert only(finding).host == "node2"
    finding, _ = run(lambda group, _over: Member(0, 1) in group, 1, [LOOPBACK])
    assert only(finding).members == (Member(0, 1),)


# -------------------------------------------------------------------------------------------------------------- healthy


def test_it_is_done_when_all_work() -> None:
    """A healthy cluster costs one trial."""
    finding, trials = run(lambda _group, _over: False, 4)
    assert len(trials) == 1
    assert (finding.verdict, finding.message, finding.hint) == ("ok", "all 4 hosts (8 GPUs) work together", "")
    assert [result.verdict for result in check_results(finding)] == ["ok"]


def test_every_named_interface_is_tried_with_all() -> None:
    """``--nic a,b`` asks for both."""
    finding, trials = run(lambda _group, _over: False, 4, ["a", "b"])
    assert [trial.interface for trial in trials] == ["a", "b"]
    assert finding.message == "all 4 hosts (8 GPUs) work together over a, b"


def test_one_member_alone_is_enough_for_a_trial() -> None:
    """A laptop has one host and one rank."""
    finding, trials = run(lambda _group, _over: False, 1, gpus=1)
    assert finding.message == "the only GPU works"
    assert len(trials) == 1


def test_nothing_is_known_before_the_first_trial() -> None:
    """An interrupted search says so."""
    finding = Bisection({0: [0]}).finding()
    assert (finding.verdict, finding.is_complete) == ("unknown", False)
    assert check_results(finding)[0].verdict == "skipped"


# ---------------------------------------------------------------------------------------------------------------- hosts


@given(st.integers(3, 70).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count - 1))))
def test_any_single_bad_host_is_found(case: tuple[int, int]) -> None:
    """Whichever it is, and with a number of trials that grows with the logarithm of the number of hosts."""
    count, bad = case
    finding, trials = run(bad_host(bad), count)
    found = only(finding)
    assert (found.kind, hosts_of(found.members), found.host) == ("network", {bad}, f"node{bad}")
    assert not found.sometimes
    assert len(trials) <= 2 * (7 + 2 * count.bit_length())
    assert "without the bad ones" in finding.message or count == 2


@given(
    st.integers(4, 40).flatmap(
        lambda count: st.sets(st.integers(0, count - 1), min_size=2, max_size=2).map(lambda bad: (count, bad))
    )
)
def test_two_bad_hosts_are_found(case: tuple[int, set[int]]) -> None:
    """One bad host does not hide the other."""
    count, bad = case
    finding, _ = run(bad_host(*bad), count)
    assert finding.is_complete
    assert {found.kind for found in finding.sets} == {"network"}
    assert sorted(found.host for found in finding.sets) == sorted(f"node{host}" for host in bad)


@given(
    st.integers(3, 40).flatmap(
        lambda count: st.sets(st.integers(0, count - 1), min_size=2, max_size=2).map(lambda pair: (count, pair))
    )
)
def test_a_pair_that_fails_although_each_works_with_others_is_found(case: tuple[int, set[int]]) -> None:
    """A firewall rule between two hosts is nobody's host fault."""
    count, pair = case
    finding, trials = run(lambda group, _over: pair <= hosts_of(group), count)
    found = only(finding)
    assert (found.kind, hosts_of(found.members), found.host) == ("pair", pair, "")
    assert len(trials) <= 2 * (7 + 4 * count.bit_length())


def test_two_hosts_that_fail_together_are_a_pair() -> None:
    """With two hosts nobody can say which one it is."""
    finding, _ = run(bad_host(1), 2)
    found = only(finding)
    assert (found.kind, found.host) == ("pair", "")
    assert found.message == "node0 and node1 fail together, though each works by itself (timeout in barrier)"


@given(st.integers(4, 40).flatmap(lambda count: st.tuples(st.just(count), st.integers(2, count - 2))))
def test_two_sides_that_do_not_reach_each_other_are_told(case: tuple[int, int]) -> None:
    """A cut between two switches is no fault of any host, and no list of pairs."""
    count, cut = case
    finding, _ = run(lambda group, _over: len({host < cut for host in hosts_of(group)}) > 1, count)
    assert finding.is_complete
    if count <= 6 or cut == count // 2:
        found = only(finding)
        assert found.kind == "parted"
        assert f"node{cut}" in found.message
    assert all(found.kind in {"parted", "pair", "network"} for found in finding.sets)


def test_nobody_works_with_anybody() -> None:
    """A network on which no two hosts talk."""
    for count in (3, 5, 8, 33):
        finding, trials = run(lambda group, over: over == "" and len(hosts_of(group)) > 1, count)
        assert only(finding).kind == "no_pair"
        assert len(trials) <= 30


def test_what_fails_only_with_all_is_said_to() -> None:
    """A lack that shows with many hosts only."""
    for count in (4, 16):
        finding, _ = run(lambda group, _over, count=count: len(hosts_of(group)) == count, count)  # type: ignore[misc]
        found = only(finding)
        assert found.kind == "together"
        assert hosts_of(found.members) == set(range(count))


@given(st.data())
def test_any_mixture_ends_within_the_bound(data: st.DataObject) -> None:
    """Whatever fails, and however inconsistently, the search ends and names something."""
    count = data.draw(st.integers(1, 20))
    chance = data.draw(st.sampled_from([0.05, 0.3, 0.7, 1.0]))
    random = data.draw(st.randoms(use_true_random=False))
    finding, _ = run(
        lambda _group, _over: random.random() < chance, count, data.draw(st.sampled_from([(), ("a", "b")]))
    )
    assert finding.verdict in {"ok", "fail", "sometimes"}
    assert finding.message
    if finding.verdict != "ok":
        assert finding.sets or not finding.is_complete or "nothing smaller" in finding.message


@given(st.data())
def test_many_bad_hosts_and_pairs_at_once_end_and_blame_no_healthy_host(data: st.DataObject) -> None:
    """What fails is decided by the members: then whoever is blamed as a host is bad."""
    count = data.draw(st.integers(3, 24))
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=count))
    finding, _ = run(bad_host(*bad), count)
    assert finding.is_complete
    for found in finding.sets:
        if found.kind == "network":
            assert hosts_of(found.members) <= bad
        # What could not be tried, for want of hosts that work, is told as that.
        assert found.kind == "untried" or hosts_of(found.members) & bad


# ----------------------------------------------------------------------------------------------------------------- GPUs


@given(st.integers(1, 5), st.sampled_from([1, 2, 4, 8]), st.data())
def test_any_single_bad_gpu_is_found(count: int, gpus: int, data: st.DataObject) -> None:
    """It fails alone, on a host that fails alone."""
    bad = Member(data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, gpus - 1)))
    finding, _ = run(lambda group, _over: bad in group, count, gpus=gpus)
    found = only(finding)
    assert found.members == (bad,)
    assert (found.kind, found.interface, found.host) == ("gpu" if gpus > 1 else "host", LOOPBACK, f"node{bad.host}")
    if gpus > 1:
        assert f"GPU {bad.local_rank} fails alone" in found.message


@given(st.integers(1, 3), st.integers(2, 8), st.data())
def test_any_pair_of_gpus_that_fails_together_is_found(count: int, gpus: int, data: st.DataObject) -> None:
    """A broken link between two GPUs shows only when both take part."""
    host = data.draw(st.integers(0, count - 1))
    pair = {Member(host, gpu) for gpu in data.draw(st.sets(st.integers(0, gpus - 1), min_size=2, max_size=2))}
    finding, _ = run(lambda group, _over: pair <= set(group), count, gpus=gpus)
    found = only(finding)
    assert (found.kind, set(found.members), found.host) == ("gpus", pair, f"node{host}")


def test_bad_gpus_of_several_hosts_are_searched_for_at_the_same_time() -> None:
    """Hosts do not wait for each other."""
    one, _ = run(lambda group, _over: Member(0, 5) in group, 4, gpus=8)
    both, _ = run(lambda group, _over: Member(0, 5) in group or Member(3, 1) in group, 4, gpus=8)
    assert {found.members for found in both.sets} == {(Member(0, 5),), (Member(3, 1),)}
    assert both.trials == one.trials


def test_a_bad_gpu_does_not_hide_a_bad_network() -> None:
    """What is found on a host is taken out, and the rest is tried on."""

    def fails(group: Group, over: str) -> bool:
        return Member(1, 1) in group or bad_host(3)(group, over)

    finding, _ = run(fails, 5)
    assert [(found.kind, found.host) for found in finding.sets] == [("gpu", "node1"), ("network", "node3")]
    assert "node0, node1, node2 and node4 work" in finding.message


def test_a_host_none_of_whose_gpus_works_is_named_as_a_whole() -> None:
    """Eight lines about one driver help nobody."""
    finding, _ = run(lambda group, _over: 2 in hosts_of(group), 3, gpus=8)
    found = only(finding)
    assert (found.kind, found.host) == ("host", "node2")
    assert found.message == "fails alone, over loopback too (timeout in barrier)"


def test_when_no_host_works_even_alone_it_is_said_once() -> None:
    """A broken installation is everybody's."""
    finding, trials = run(lambda _group, _over: True, 9)
    found = only(finding)
    assert (found.kind, found.host, found.interface) == ("no_pair", "", LOOPBACK)
    assert "the network is not the cause" in finding.hint
    assert len(trials) <= 8


# ----------------------------------------------------------------------------------------------------------- interfaces


@given(st.integers(3, 12), st.sampled_from(["hsn0", "hsn1", "eth0"]), st.data())
def test_an_interface_that_is_bad_on_one_host_is_found(count: int, nic: str, data: st.DataObject) -> None:
    """Its other interfaces work, and one of them is proposed."""
    bad = data.draw(st.integers(0, count - 1))
    finding, _ = run(bad_host(bad, interface=nic), count, ["hsn0", "hsn1", "eth0"])
    found = only(finding)
    assert (found.kind, found.host, found.interface) == ("network", f"node{bad}", nic)
    assert f"--nic {'hsn1' if nic == 'hsn0' else 'hsn0'}" in found.hint


@given(st.integers(1, 12), st.data())
def test_an_interface_that_a_host_does_not_have_is_found(count: int, data: st.DataObject) -> None:
    """There the host fails alone, and works over loopback."""
    bad = data.draw(st.integers(0, count - 1))
    finding, _ = run(lambda group, over: over == "ib0" and bad in hosts_of(group), count, ["ib0"])
    found = only(finding)
    assert (found.kind, found.host, found.interface) == ("interface", f"node{bad}", "ib0")
    assert "works over loopback and fails alone over ib0" in found.message


def test_an_interface_that_no_host_has_is_said_once() -> None:
    """A wrong name is the same everywhere."""
    finding, trials = run(lambda _group, over: over == "eht0", 20, ["eht0"])
    found = only(finding)
    assert (found.kind, found.host) == ("interface", "")
    assert "none of them alone over eht0" in found.message
    assert len(trials) <= 6


# ------------------------------------------------------------------------------------------------------------- outcomes


def test_a_failing_trial_is_repeated_with_what_failed() -> None:
    """What came through needs no second try."""
    _, trials = run(lambda group, _over: Member(2, 0) in group, 3, gpus=1)
    assert [trial.name for trial in trials[:4]] == [
        "all",
        "all, again",
        "each host alone over loopback",
        "each host alone over loopback, again",
    ]
    assert trials[3].groups == ((Member(2, 0),),)


def test_what_works_at_the_second_try_fails_sometimes() -> None:
    """A flaky part is told as such."""
    seen: dict[tuple[Group, str], int] = {}

    def fails(group: Group, over: str) -> bool:
        seen[group, over] = seen.get((group, over), 0) + 1
        return bad_host(1)(group, over) and seen[group, over] % 2 == 1

    finding, _ = run(fails, 4)
    found = only(finding)
    assert (finding.verdict, found.host, found.sometimes) == ("sometimes", "node1", True)
    assert "3 of 6 times" in found.message
    assert [result.verdict for result in check_results(finding)] == ["warn"]


def test_all_failing_once_and_never_again_is_told_as_that() -> None:
    """The search ends and claims nothing more than it saw."""
    count = 0

    def fails(_group: Group, _over: str) -> bool:
        nonlocal count
        count += 1
        return count == 1

    finding, _ = run(fails, 4)
    found = only(finding)
    assert (finding.verdict, found.kind) == ("sometimes", "together")
    assert "comes and goes" in found.hint


def test_members_that_do_not_answer_have_failed() -> None:
    """A host that is gone says nothing."""
    search = Bisection({0: [0], 1: [0]})
    trial = search.next_trial()
    assert trial is not None
    search.feed(trial, [TrialResult(Member(0, 0), "ok"), TrialResult(Member(7, 0), "ok")])
    again = search.next_trial()
    assert again is not None
    assert again.name == "all, again"


def test_an_answer_to_another_trial_is_ignored() -> None:
    """A late answer moves nothing."""
    search = Bisection({0: [0], 1: [0]})
    trial = search.next_trial()
    assert trial is not None
    search.feed(trial._replace(number=7), [])
    assert search.next_trial() == trial


def test_the_words_tell_what_the_guilty_said() -> None:
    """Victims time out; the one who has a reason says it."""
    search = Bisection({host: [0] for host in range(4)}, {2: "nid2"}, part="rank")
    while trial := search.next_trial():
        outcomes = []
        for group in trial.groups:
            bad = any(member.host == 2 for member in group) and len(group) > 1
            for member in group:
                said = TrialResult(member, "error", "no route to host", "in init_process_group")
                waits = TrialResult(member, "timeout", "timed out", "in barrier")
                outcomes.append((said if member.host == 2 else waits) if bad else TrialResult(member, "ok"))
        search.feed(trial, outcomes)
    found = only(search.finding())
    assert found.line == (
        "nid2: works alone and fails with host 0, host 1 and host 3, which work without it"
        " (error in init_process_group: no route to host)"
    )


def test_results_carry_host_and_facts() -> None:
    """The tables of ``doctor`` show them like those of any other check."""
    finding, _ = run(bad_host(2, interface="a"), 4, ["a", "b"])
    [result] = check_results(finding)
    assert (result.name, result.verdict, result.host) == ("collective", "fail", "node2")
    assert ("interface", "a") in result.facts
    assert ("members", "2:0 2:1") in result.facts
    assert "--nic b" in result.hint


# ---------------------------------------------------------------------------------------------------------------- pairs


@given(st.integers(2, 20))
def test_the_rounds_are_all_pairs_once(count: int) -> None:
    """And nobody has two partners at a time."""
    seen: list[tuple[int, int]] = []
    for pairs in rounds(list(range(count))):
        busy = [one for pair in pairs for one in pair]
        assert len(busy) == len(set(busy))
        seen += [(min(pair), max(pair)) for pair in pairs]
    assert sorted(seen) == list(combinations(range(count), 2))


def test_hosts_that_could_not_be_tried_are_not_called_bad() -> None:
    """Where next to none works, there is nobody to try the others with."""
    finding, trials = run(bad_host(*range(60)), 62)
    assert finding.is_complete
    assert {found.kind for found in finding.sets} <= {"network", "untried"}
    assert all(hosts_of(found.members) <= set(range(60)) for found in finding.sets if found.kind == "network")
    assert len(trials) <= 60


def test_a_host_that_fails_with_most_is_bad_and_one_that_fails_with_one_is_not() -> None:
    """A flaky host comes through at times."""
    units: tuple[Group, ...] = tuple((Member(host, 0),) for host in range(5))
    bad = {frozenset((units[0], units[other])) for other in (1, 2, 3)}
    [blame] = judge_pairs(units, bad)
    assert (blame.kind, blame.units) == ("unit", (units[0],))
    [blame] = judge_pairs(units, {frozenset((units[0], units[4]))})
    assert (blame.kind, blame.units) == ("pair", (units[0], units[4]))
    assert judge_pairs(units, set()) == []
