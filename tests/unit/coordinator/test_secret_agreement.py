"""Whether a job is signed with a secret that its first host has made: agreed upon in a store in which others write."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from saferun.cluster.join_messages import JoinRequest
from saferun.cluster.signed import CannotSealError, is_signed
from saferun.coordinator import secret_agreement
from saferun.coordinator.assignment_wait import await_assignment
from saferun.coordinator.assignments import (
    HostAssignment,
    HostRecord,
    TaskRecord,
    assign,
    encode_assignment,
    encode_host_record,
)
from saferun.coordinator.host_record_collection import HostRecordCollection, MovedError
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.secrecy import Secrecy
from saferun.coordinator.secret_agreement import OFFER_KEY, SecretAgreement
from saferun.coordinator.store_client import StoreClient
from saferun.text.typed_json import fit
from tests.unit.coordinator.memory_store import MemoryStore

DEADLINE_S = 30.0
NO = "it lies elsewhere"


class Channel:
    """A private channel between some hosts: an offer is a number, and the secret is here."""

    def __init__(self) -> None:
        self.secrets: dict[str, tuple[bytes, str, str]] = {}

    def of_host(self, *, is_there: bool = True, kind: str = "munge") -> Any:
        return _Sharing(self, is_there=is_there, kind=kind)


class _Sharing:
    """As ``SecretProcess`` on one host."""

    def __init__(self, channel: Channel, *, is_there: bool, kind: str) -> None:
        self._channel = channel
        self._is_there = is_there
        self._kind = kind
        self.withdrawn = 0

    def offer(self, secret: bytes, run_id: str, job: str, ttl_s: int, base: str) -> dict[str, Any]:
        del ttl_s, base
        if not self._is_there:
            return {"text": "", "why": "there is no munge; there is no run directory", "made": None}
        number = str(len(self._channel.secrets))
        self._channel.secrets[number] = secret, run_id, job
        return {"text": number, "made": ["/somewhere", 1, 2] if self._kind == "file" else None}

    def take(self, offer: str, run_id: str, job: str, base: str) -> tuple[bytes, str]:
        del base
        secret, *names = self._channel.secrets.get(offer, (b"", "", ""))
        if not self._is_there or names != [run_id, job]:
            return b"", NO
        return secret, ""

    def withdraw(self) -> None:
        self.withdrawn += 1


class Host:
    """A host with a pact, and its connection to the store."""

    def __init__(self, store: MemoryStore, sharing: Any, *, is_required: bool = False, job: str = "0123") -> None:
        self.secrecy = Secrecy()
        self.made: list[Any] = []
        self.agreement = SecretAgreement(
            sharing,
            "job7",
            job,
            name="this host",
            base="/runs",
            is_required=is_required,
            secrecy=self.secrecy,
            on_made=self.made.append,
        )
        self.client: StoreClient = store.client(self.agreement)

    def ignored(self) -> str:
        """The key of the last value that was ignored."""
        return self.secrecy.take_ignored()[1]


def record(name: str) -> HostRecord:
    return HostRecord(name, (TaskRecord(1, "default", 7),), born=f"born {name}", most=3, host_info="CARD of " + name)


def rdzv_of(name: str) -> RendezvousRound:
    first = {"backend": "static", "node_rank": 0, "least": 2, "most": 3, "run_id": "job7", "timeout_s": DEADLINE_S}
    return RendezvousRound(fit(JoinRequest, {**first, "probe_after_s": 30.0, "name": name, "tasks": 1}))


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except (JoinFailedError, MovedError) as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def follow(store: MemoryStore, host: Host, number: int, *, prefix: str = "r0/") -> tuple[threading.Thread, list[Any]]:
    del store
    name = f"node{number}"
    return in_background(lambda: await_assignment(host.client, prefix, number, rdzv_of(name), record(name)))


def meet(store: MemoryStore, hosts: Sequence[Host], *, prefix: str = "r0/") -> list[Any]:
    """What a meeting comes to on each host: a place, or why there is none."""
    leader = hosts[0]
    if isinstance(leader.client.signer, SecretAgreement):
        leader.agreement.offer(leader.client)
    threads = [follow(store, host, number, prefix=prefix) for number, host in enumerate(hosts) if number]

    def lead() -> HostAssignment:
        collection = HostRecordCollection(leader.client, prefix, len(hosts), can_probe=False)
        return collection.publish_assignments(collection.collect(rdzv_of("node0"), record("node0")))

    thread, results = in_background(lead)
    for one, _ in [(thread, results), *threads]:
        one.join(DEADLINE_S)
    return [results[0], *(found[0] for _, found in threads)]


def until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def is_agreed(hosts: Sequence[Host]) -> list[bool]:
    return [host.agreement.is_agreed for host in hosts]


@pytest.mark.parametrize("kind", ["munge", "file"])
def test_where_all_hosts_take_the_offer_everything_is_signed(kind: str) -> None:
    """Cards in records are encrypted, too; nothing is in the store that tells the secret."""
    store, channel = MemoryStore(), Channel()
    sharing = channel.of_host(kind=kind)
    hosts = [Host(store, sharing), Host(store, channel.of_host()), Host(store, channel.of_host())]
    assignments = meet(store, hosts)
    assert [assignment.host for assignment in assignments] == [0, 1, 2]
    assert is_agreed(hosts) == [True] * 3
    assert hosts[0].made == ([["/somewhere", 1, 2]] if kind == "file" else [])
    assert sharing.withdrawn == (kind == "file")
    for key in ("r0/host/1", "r0/host/2", "r0/assignment/1", "r0/assignment/2", "a0/heartbeat/1", "a0/state/1"):
        assert is_signed(store.values[key]), key
    assert not any(b"CARD" in value for value in store.values.values())
    hosts[1].client.set("a0/log/0", "entry")
    assert is_signed(store.values["a0/log/0"])
    assert hosts[2].client.find("a0/log/0") == b"entry"
    store.write("a0/log/1", "forged")
    assert hosts[2].client.find("a0/log/1") is None
    assert hosts[2].ignored() == "a0/log/1"


def test_where_one_host_cannot_take_it_the_job_goes_on_unsigned() -> None:
    """As without a secret. Who could have signed is told so by a place that is signed."""
    store, channel = MemoryStore(), Channel()
    hosts = [
        Host(store, channel.of_host()),
        Host(store, channel.of_host()),
        Host(store, channel.of_host(is_there=False)),
    ]
    assignments = meet(store, hosts)
    assert [assignment.host for assignment in assignments] == [0, 1, 2]
    assert is_agreed(hosts) == [False] * 3
    assert hosts[0].agreement.why == "node2 did not take the secret"
    assert hosts[2].agreement.why == NO
    assert is_signed(store.values["r0/assignment/1"])
    assert not is_signed(store.values["r0/assignment/2"])
    hosts[1].client.set("a0/log/0", "entry")
    assert store.values["a0/log/0"] == b"entry"
    assert hosts[2].client.find("a0/log/0") == b"entry"
    assert hosts[0].client.read_all(["a0/log/0"], newest=True) == [b"entry"]
    assert hosts[0].ignored() == ""


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_that_takes_no_part_in_it_has_others_do_without(number: int) -> None:
    """It was started with --sign-messages off, on the first host or on another one."""
    store, channel = MemoryStore(), Channel()
    hosts = [Host(store, channel.of_host()) for _ in range(3)]
    hosts[number].client.signer = None
    assignments = meet(store, hosts)
    assert [assignment.host for assignment in assignments] == [0, 1, 2]
    assert is_agreed(hosts) == [False] * 3


def test_without_a_channel_the_store_holds_what_it_holds_without_all_this() -> None:
    """Not a byte that is signed, and no offer."""
    store, channel = MemoryStore(), Channel()
    hosts = [Host(store, channel.of_host(is_there=False)) for _ in range(3)]
    assert [assignment.host for assignment in meet(store, hosts)] == [0, 1, 2]
    assert is_agreed(hosts) == [False] * 3
    assert OFFER_KEY not in store.values
    assert not any(is_signed(value) for value in store.values.values())
    assert hosts[0].agreement.why == "there is no munge; there is no run directory"
    assert hosts[1].agreement.why == "the leader offers no secret"


@pytest.mark.parametrize("missing", ["munge on the first host", "munge on another host", "a agreement of another host"])
def test_where_signing_is_required_there_is_no_job_without(missing: str) -> None:
    """All hosts end, each with two lines, and none of them waits for its time to be over."""
    store, channel = MemoryStore(), Channel()
    hosts = [
        Host(store, channel.of_host(is_there=missing != "munge on the first host"), is_required=True),
        Host(store, channel.of_host(is_there=missing != "munge on another host"), is_required=True),
        Host(store, channel.of_host(), is_required=True),
    ]
    if missing == "a agreement of another host":
        hosts[2].client.signer = None
    results = meet(store, hosts)
    for result in results:
        assert isinstance(result, JoinFailedError), result
        assert result.is_usage
        assert result.what.startswith("the hosts share no secret, as ")
        assert "--sign-messages" in result.hint


def test_the_next_meeting_is_signed_as_well_and_takes_in_who_comes_again() -> None:
    """A saferun that was started again has the secret to take anew."""
    store, channel = MemoryStore(), Channel()
    hosts = [Host(store, channel.of_host()) for _ in range(3)]
    meet(store, hosts)
    hosts[2] = Host(store, channel.of_host())
    assert [assignment.host for assignment in meet(store, hosts, prefix="r1/")] == [0, 1, 2]
    assert is_agreed(hosts) == [True] * 3
    hosts[2] = Host(store, channel.of_host(is_there=False))
    assert [assignment.host for assignment in meet(store, hosts, prefix="r2/")] == [0, 1, 2]
    assert is_agreed(hosts) == [False] * 3
    hosts[2] = Host(store, channel.of_host())
    assert [assignment.host for assignment in meet(store, hosts, prefix="r3/")] == [0, 1, 2]
    assert is_agreed(hosts) == [True] * 3


# ------------------------------------------------------------------------------------------------------ somebody else


@pytest.mark.parametrize("offer", ["", "7", "x" * 100_000, "\0", '{"munge": "MUNGE:A:"}'])
def test_who_overwrites_the_offer_has_the_job_run_unsigned_and_no_more(offer: str) -> None:
    """It is what docs/security.md says: before the hosts have met, whoever writes to the store can prevent it."""
    store, channel = MemoryStore(), Channel()
    hosts = [Host(store, channel.of_host()) for _ in range(3)]
    channel.secrets["7"] = b"a secret of somebody else's......", "job7", "4567"
    original = hosts[0].agreement.offer

    def overwritten(client: StoreClient) -> None:
        original(client)
        store.write(OFFER_KEY, offer)

    hosts[0].agreement.offer = overwritten  # type: ignore[method-assign]
    assert [assignment.host for assignment in meet(store, hosts)] == [0, 1, 2]
    assert is_agreed(hosts) == [False] * 3
    assert hosts[1].agreement.why in {NO, "the offer is invalid"}
    assert hosts[0].agreement.why == "node1, node2 did not take the secret"


def test_a_place_that_nobody_has_signed_is_not_taken_by_who_has_the_secret() -> None:
    """It would put the host under somebody else's orders. The true one is waited for."""
    store, channel = MemoryStore(), Channel()
    leader, host = Host(store, channel.of_host()), Host(store, channel.of_host())
    leader.agreement.offer(leader.client)
    forged = json.dumps({**assign([record("evil"), record("node1")])[1]._asdict(), "to": "born node1", "signed": "no"})
    store.write("r0/assignment/1", forged)
    thread, results = follow(store, host, 1)
    collection = HostRecordCollection(leader.client, "r0/", 2, can_probe=False)
    records = collection.collect(rdzv_of("node0"), record("node0"))
    until(lambda: host.ignored() == "r0/assignment/1")
    assert not results
    collection.publish_assignments(records)
    thread.join(DEADLINE_S)
    assert results[0].leader_name == "node0"
    assert is_agreed([leader, host]) == [True, True]


def test_a_record_that_somebody_else_has_signed_is_handed_in_again() -> None:
    """It looks as if it were signed, and is deleted; the host, which looks after it, writes the true one."""
    store, channel = MemoryStore(), Channel()
    leader, host, other = (Host(store, channel.of_host(), job=job) for job in ("0123", "0123", "4567"))
    leader.agreement.offer(leader.client)
    other.agreement.offer(other.client)
    other.client.set("r0/host/1", encode_host_record(record("evil")))
    store.values.pop(OFFER_KEY)
    leader.agreement.offer(leader.client)
    assert is_signed(store.values["r0/host/1"])
    collection = HostRecordCollection(leader.client, "r0/", 2, can_probe=False)
    thread, results = in_background(
        lambda: collection.publish_assignments(collection.collect(rdzv_of("node0"), record("node0")))
    )
    until(lambda: "r0/host/1" not in store.values)
    follower, found = follow(store, host, 1)
    thread.join(DEADLINE_S)
    follower.join(DEADLINE_S)
    assert (results[0].host, found[0].host) == (0, 1)
    assert is_agreed([leader, host]) == [True, True]


def test_a_signed_value_counts_under_its_own_key_and_in_its_own_job_alone() -> None:
    """What one host has said is not what another one says, nor the same host later."""
    store, channel = MemoryStore(), Channel()
    hosts = [Host(store, channel.of_host()) for _ in range(3)]
    meet(store, hosts)
    hosts[1].client.set("a0/log/0", "entry")
    for key in ("a0/log/1", "a1/log/0"):
        store.write(key, store.values["a0/log/0"])
        assert hosts[2].client.find(key) is None


def test_a_host_without_a_secret_reads_nothing_that_is_signed() -> None:
    """As if it were not there: it cannot know who has written it."""
    store, channel = MemoryStore(), Channel()
    hosts = [Host(store, channel.of_host()) for _ in range(2)]
    meet(store, hosts)
    late = Host(store, channel.of_host(is_there=False))
    assert late.client.find("a0/heartbeat/1") is None
    assert late.client.find("r0/assignment/1") is None


# ------------------------------------------------------------------------------------------------------------- details


def test_a_credential_is_renewed_while_hosts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It expires, and the host that comes last is to take it as well. A file does not expire."""
    store, channel = MemoryStore(), Channel()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for kind, offers in (("munge", ["0", "1"]), ("file", ["2", "2"])):
        host = Host(store, channel.of_host(kind=kind))
        host.agreement.offer(host.client)
        seen = [store.values[OFFER_KEY].decode()]
        host.agreement.keep(host.client)
        assert store.values[OFFER_KEY].decode() == seen[0]
        now[0] += 101.0
        host.agreement.keep(host.client)
        assert [*seen, store.values[OFFER_KEY].decode()] == offers
        assert len({secret for secret, *_ in channel.secrets.values()}) == (1 if kind == "munge" else 2)


@pytest.mark.parametrize("hide", [0, 1])
def test_where_nothing_can_encrypt_the_job_is_not_signed(hide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that encrypts is broken on one host."""
    store, channel = MemoryStore(), Channel()
    hosts = [Host(store, channel.of_host()) for _ in range(2)]

    def fail(_secret: bytes) -> None:
        raise CannotSealError("ImportError: no cryptography")

    monkeypatch.setattr(hosts[hide].agreement, "_adopt", fail)
    assert [assignment.host for assignment in meet(store, hosts)] == [0, 1]
    assert is_agreed(hosts) == [False] * 2
    assert hosts[hide].agreement.why.startswith("evidence cannot be encrypted: ImportError")


def test_nothing_that_shows_a_pact_shows_its_secret() -> None:
    """In a traceback, say."""
    host = Host(MemoryStore(), Channel().of_host())
    host.agreement.offer(host.client)
    assert repr(host.agreement) == "SecretAgreement(hidden)"


def test_what_is_told_of_keys_is_what_they_are() -> None:
    """A key of somebody else's looks like none of these by accident."""
    kinds = {
        "r0/host/1": "host",
        "r12/assignment/3": "assignment",
        "a0/log/1": "attempt",
        "a12/heartbeat/3": "attempt",
        "r0/open": "",
        "round": "",
        "saferun/job": "",
        "rx/host/1": "",
        "ab/log/1": "",
        "a/x": "",
        "": "",
    }
    assert {key: secret_agreement._kind_of(key) for key in kinds} == kinds
    assert encode_assignment(assign([record("a")])[0])
