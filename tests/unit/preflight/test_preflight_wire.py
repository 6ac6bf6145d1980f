"""What hosts tell each other arrives as it was, bounded, without secrets, and nothing that is sent does any harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.coordinator.assignments import chunk_limit_bytes, partners
from saferun.linux.nic import Nic
from saferun.preflight.host_messages import (
    INFO_LIMIT_BYTES,
    KINDS,
    decode_endpoint,
    decode_host_info,
    decode_probes,
    encode_endpoint,
    encode_host_info,
    encode_probes,
    left_out_of,
)
from saferun.preflight.judge import judge
from saferun.preflight.results import CheckResult, HostInfo, Probe, ProbeEndpoint
from saferun.preflight.slowness import again
from saferun.text.typed_json import fit
from tests.unit.preflight.preflight_samples import infos_of, probes_from, probes_of, where

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=40,
)
TEXT = st.text(max_size=30)
NAME = st.sampled_from(["eth0", "eth1", "docker0", "lo", ""]) | TEXT
NUMBER = st.floats(allow_nan=True, allow_infinity=True)
WORDS = st.lists(TEXT, max_size=3).map(tuple)
PAIRS = st.lists(st.tuples(TEXT | st.sampled_from(["driver", "nccl", "torch"]), TEXT), max_size=4).map(tuple)
NIC = st.builds(
    Nic,
    name=NAME,
    addresses=WORDS,
    networks=WORDS,
    is_up=st.booleans(),
    mtu=st.integers(-5, 9000),
    kind=NAME,
    speed_bits_s=st.integers(-5, 9000),
    labels=st.just(()),
    rdma=st.just(()),
)
RESULT = st.builds(
    CheckResult,
    name=TEXT,
    verdict=st.sampled_from(["ok", "warn", "fail", "odd"]),
    message=TEXT,
    hint=st.just(""),
    facts=st.just(()),
    duration_s=st.just(0.0),
    class_name=st.sampled_from(["", "network_interface"]),
    transient=st.booleans(),
    host=TEXT,
)
CARD = st.builds(
    HostInfo,
    label=TEXT,
    time=NUMBER,
    nics=st.lists(NIC, max_size=3).map(tuple),
    gloo=st.lists(NAME, max_size=2).map(tuple),
    nccl=st.lists(NAME, max_size=2).map(tuple),
    probed=st.lists(NAME, max_size=3).map(tuple),
    versions=PAIRS,
    script=TEXT,
    environ=PAIRS,
    names=st.lists(WORDS, max_size=2).map(tuple),
    results=st.lists(RESULT, max_size=2).map(tuple),
)
# Mostly of hosts that there are.
PROBE = st.builds(
    Probe,
    st.integers(-1, 6),
    st.integers(-1, 6),
    NAME,
    TEXT,
    NAME,
    st.sampled_from([*KINDS, "odd", ""]),
    NUMBER,
    NUMBER,
    TEXT,
    st.integers(-9, 9999),
    st.integers(-9, 9999),
    NUMBER,
)


def test_a_card_arrives_as_it_was() -> None:
    info = infos_of(1)[0]._replace(
        environ=(("NCCL_ALGO", "Ring"),),
        results=(CheckResult("limits", "warn", "few", "more", (("soft", "1024"),), 0.25, "", transient=True),),
    )
    assert decode_host_info(encode_host_info(info)) == info


def test_a_door_arrives_as_it_was() -> None:
    endpoint = ProbeEndpoint(40123, "0123456789abcdef" * 2, (("eth0", "10.0.0.1"), ("eth1", "fe80::1")))
    assert decode_endpoint(encode_endpoint(endpoint)) == endpoint
    closed = ProbeEndpoint(0, "0" * 32, ())
    assert decode_endpoint(encode_endpoint(closed)) == closed


def test_probes_arrive_as_they_were() -> None:
    probes = [p._replace(latency_s=2e-4, bytes_s=1e9, clock_s=0.25) for p in probes_of(4) if p.source == 1]
    assert decode_probes(encode_probes(probes), 1) == tuple(probes)


@pytest.mark.parametrize(
    ("hosts", "tasks", "full"), [(128, 8, True), (256, 1, True), (1024, 8, False), (1100, 1, True)]
)
@pytest.mark.parametrize("bad", [0, 1, 40])
def test_probes_that_find_no_room_are_cut_and_not_lost(hosts: int, tasks: int, full: bool, bad: int) -> None:
    """A host whose message is too long for the job sends what fails first, and of the rest an even part."""
    nics = tuple(f"eth{number}" for number in range(9))
    limit_bytes = chunk_limit_bytes(hosts * tasks) - 256
    failing = partners(5, hosts, full=full)[-bad:] if bad else ()
    changes = [where(target=target, nic="eth1", kind="timeout", message="no answer in 2 s") for target in failing]
    found = probes_from(5, hosts, nics, *changes, full=full)
    text = encode_probes(found, limit_bytes)
    assert len(json.dumps(text)) <= limit_bytes
    kept = decode_probes(text, 5)
    assert left_out_of(text) == len(found) - len(kept)
    whole = encode_probes(found[:1000])
    assert (left_out_of(whole), len(decode_probes(whole, 5))) == (0, min(1000, len(found)))
    targets = {probe.target for probe in kept}
    assert all(sum(probe.target == target for probe in kept) == len(nics) for target in targets)
    sound = len(targets.difference(failing))
    assert sound or len(failing) == len(partners(5, hosts, full=full))
    # As many as find room, and neither kind leaves out the other.
    assert len(targets & {*failing}) >= min(len(failing), len(targets) // 2)


def test_what_is_left_out_is_spread_over_all_targets() -> None:
    """Hosts are numbered by rack: the next ones alone would tell nothing of the way between racks."""
    found = probes_from(0, 1024, ("eth0",), full=True)
    targets = [probe.target for probe in decode_probes(encode_probes(found, 8000), 0)]
    assert 30 < len(targets) < 100
    gaps = [later - earlier for earlier, later in zip(targets, [*targets[1:], 1024], strict=True)]
    assert max(gaps) <= 4 * min(gaps)


def test_one_target_that_finds_no_room_is_cut_too() -> None:
    """Of many interfaces, each with a long message: something is better than silence."""
    found = [Probe(0, 1, f"eth{i}", f"10.0.{i}.1", kind="broken", message="x" * 600) for i in range(64)]
    text = encode_probes(found, 2000)
    kept = decode_probes(text, 0)
    assert len(json.dumps(text)) <= 2000
    assert [probe.nic for probe in kept] == ["eth0", "eth1"]
    assert left_out_of(text) == 62
    assert left_out_of(encode_probes(found, 100)) == 64


def test_a_leader_that_knows_of_no_cut_reads_the_probes_all_the_same() -> None:
    """How many are left out looks like a probe that cannot be read."""
    found = [Probe(0, target, "eth0", "10.0.0.1") for target in range(1, 50)]
    items = json.loads(encode_probes(found, 1500))
    for item in items[:-1]:
        fit(Probe, item)
    with pytest.raises(TypeError):
        fit(Probe, items[-1])


@pytest.mark.parametrize(
    "text", ["", "[]", '[{"left_out":-1}]', '[{"left_out":9999999999}]', '{"left_out":1}', "\u0661}]"]
)
def test_what_names_no_number_has_left_out_nothing(text: str) -> None:
    """Any host may write anything."""
    assert left_out_of(text) == 0


def test_a_host_speaks_for_itself_only() -> None:
    assert decode_probes(encode_probes([Probe(1, 2, "eth0", "10.0.0.3", kind="timeout")]), 3) == ()
    assert decode_probes(encode_probes([Probe(1, 1, "eth0", "10.0.0.2")]), 1) == ()


def test_secrets_stay_at_home() -> None:
    environ = (
        ("NCCL_ALGO", "Ring"),
        ("HF_TOKEN", "hf_1"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("NCCL_X", "http://me:pw1@proxy"),
    )
    text = encode_host_info(HostInfo(environ=environ))
    assert "hf_1" not in text
    assert "SECRET" not in text
    assert "pw1" not in text
    assert "Ring" in text


def test_what_a_host_says_is_one_line_that_no_terminal_obeys() -> None:
    """A info is shown on the console of another host."""
    info = decode_host_info(json.dumps(["\x1b[2Jnode\n1\u202e"]))
    assert info is not None
    assert info.label.isprintable()


def test_a_card_that_is_too_large_loses_what_tells_least() -> None:
    nics = tuple(Nic(f"eth{i}", tuple(f"10.0.{i}.{j}" for j in range(16))) for i in range(200))
    results = tuple(CheckResult("c", "warn", "w" * 600, "h" * 600, (("f", "v" * 500),) * 32) for _ in range(64))
    environ = tuple((f"NCCL_{i}", "v" * 500) for i in range(256))
    text = encode_host_info(HostInfo(label="n", nics=nics, results=results, environ=environ, probed=("eth0",)))
    assert len(text) <= INFO_LIMIT_BYTES
    info = decode_host_info(text)
    assert info is not None
    assert info.probed == ("eth0",)
    assert info.nics[0].name == "eth0"


def test_what_is_no_door_opens_nothing() -> None:
    good = ProbeEndpoint(40123, "0" * 32, (("eth0", "10.0.0.1"),))
    for bad in (
        good._replace(port=-1),
        good._replace(port=65536),
        good._replace(token="short"),  # noqa: S106 - of a test
        good._replace(token="0" * 31 + "\n"),
    ):
        assert decode_endpoint(json.dumps(bad)) is None
    named = decode_endpoint(json.dumps(good._replace(routes=(("eth0", "evil.example"), ("eth0", "10.0.0.1")))))
    assert named is not None
    assert named.routes == (("eth0", "10.0.0.1"),)


@given(JSON)
def test_whatever_is_sent_is_a_value_or_nothing(raw: object) -> None:
    for text in (json.dumps(raw), json.dumps([raw]), json.dumps([[0, 1, raw]])):
        info = decode_host_info(text)
        assert info is None or len(encode_host_info(info)) <= INFO_LIMIT_BYTES
        endpoint = decode_endpoint(text)
        assert endpoint is None or 0 <= endpoint.port < 65536
        for probe in decode_probes(text, 0):
            assert probe.source == 0
            assert probe.kind in KINDS


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_what_is_no_json_is_nothing(text: str | bytes) -> None:
    for decoded in (decode_host_info(text), decode_endpoint(text)):
        assert decoded is None or text.strip()[:1] in {"[", "{", b"[", b"{"}
    assert decode_probes(text, 0) == ()


def test_deep_json_and_much_of_it_are_nothing() -> None:
    assert decode_host_info("[" * 60_000) is None
    assert decode_host_info("[" + '"x",' * 40_000 + '"x"]') is None
    assert decode_probes("[" * 100_000, 0) == ()


@given(st.dictionaries(st.integers(0, 5), CARD, max_size=5), st.lists(PROBE, max_size=30), st.booleans())
def test_no_nonsense_brings_the_judge_down(infos: dict[int, HostInfo], probes: list[Probe], remeasured: bool) -> None:
    missing = dict.fromkeys(list(infos)[:1], "gone") | {9: "never there"}
    verdict = judge(infos, probes, missing=missing, nics=(), remeasured=remeasured, duration_s=1.0)
    assert verdict.verdict in {"ok", "skipped", "warn", "fail"}
    assert all(source in infos and target in infos for source, target in verdict.again)


# -------------------------------------------------------------------------------------------------------------- rounds


@given(st.integers(1, 300))
def test_in_each_round_every_host_is_probed_once(hosts: int) -> None:
    rounds = [partners(host, hosts) for host in range(hosts)]
    assert {len(own) for own in rounds} == {(hosts - 1).bit_length()}
    for targets in zip(*rounds, strict=True):
        assert sorted(targets) == list(range(hosts))
    assert all(len(set(own)) == len(own) and host not in own for host, own in enumerate(rounds))


@given(st.integers(1, 60))
def test_in_full_each_host_probes_all_others(hosts: int) -> None:
    for host in range(hosts):
        assert sorted(partners(host, hosts, full=True)) == [other for other in range(hosts) if other != host]


@given(
    st.lists(st.integers(0, 19), unique=True, max_size=12),
    st.sets(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=40),
    st.sets(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=60),
)
def test_little_is_measured_again(
    suspects: list[int], pairs: set[tuple[int, int]], measured: set[tuple[int, int]]
) -> None:
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    chosen = again(suspects, pairs, range(20), measured | pairs)
    assert len(chosen) <= 64
    assert len(set(chosen)) == len(chosen)
    assert all(source != target for source, target in chosen)
