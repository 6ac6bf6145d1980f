"""How hosts whose numbers are known exchange records for places, in the control store.

Keys, below the prefix of the meeting: ``host/<n>`` a record; ``place/<n>`` what that host is told; ``missing`` who has
not come, for the others to tell; ``fail`` why nobody gets a place, written by whoever finds out; ``read`` how many
hosts have read of it. Each host reads its own place only, so that the leader sends as much as there are hosts, not its
square.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from saferun.coordinator.liveness_probe import GONE, probe_host
from saferun.coordinator.meeting import JoinFailedError, Meeting
from saferun.coordinator.pact import Pact
from saferun.coordinator.places import (
    LONGEST_RECORD_BYTES,
    HostPlace,
    HostRecord,
    assign,
    decode_place,
    decode_record,
    disagreement,
    encode_place,
    encode_record,
    missing_words,
)
from saferun.coordinator.secrecy import MISMATCH_HINT, Mismatch
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient
from saferun.errors import printable
from saferun.text.decoding import MALFORMED, display_text, loads

_LOOK_AGAIN_S = 0.25
_LIST_MISSING_EVERY_S = 1.0
_LONGEST_WORDS = 4096
# A record that has lain there for longer may be that of a process that has ended since.
_STALE_RECORD_S = 2.0
_READ_TIMEOUT_S = 3.0
# How often a host looks whether what it has handed in is still there.
_HAND_IN_AGAIN_S = 5.0
# What a host reads instead of its place where the store of the job's messages is another one from now on.
_MOVED = "moved"


class MovedError(Exception):
    """The meeting goes on in another store."""


class OnePortError(Exception):
    """Some host reaches the port of the ranks' store only."""


def tell_failure(client: StoreClient, prefix: str, error: JoinFailedError) -> None:
    """Let all hosts of a meeting fail, with the same words."""
    told: list[object] = [error.what[:_LONGEST_WORDS], error.hint[:_LONGEST_WORDS]]
    text = json.dumps([*told, True] if error.is_usage else told)
    if client.compare_set(f"{prefix}fail", "", text) == FORGED:
        client.set(f"{prefix}fail", text)


def _failure(text: bytes | None) -> JoinFailedError | None:
    if text is None:
        return None
    try:
        what, hint, *more = loads(text, longest=4 * _LONGEST_WORDS)
        what, hint = display_text(what, _LONGEST_WORDS), display_text(hint, _LONGEST_WORDS)
        return JoinFailedError(what, hint, is_told=True, is_usage=more == [True])
    except MALFORMED:
        return None


class Gathering:
    """The leader's side of a meeting.

    Args:
        client: to the control store.
        prefix: of the meeting's keys.
        hosts: how many there will be.
        can_probe: whether hosts can be probed; where one port is all that is open, a refusal says nothing.
        is_asked_for: whether somebody asks for ``OnePortError``.
        mismatch: why a host does not come that has another job secret than this one, or none.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        hosts: int,
        *,
        can_probe: bool = True,
        is_asked_for: Callable[[], bool] = lambda: False,
        mismatch: Callable[[], Mismatch | None] = lambda: None,
    ) -> None:
        self._can_probe = can_probe
        self._is_asked_for = is_asked_for
        self._mismatch = mismatch
        self._client = client
        self._prefix = prefix
        self._hosts = hosts
        self._missing = list(range(1, hosts))
        self._seen_at: dict[int, float] = {}

    def gather(self, meeting: Meeting, own: HostRecord) -> list[HostRecord]:
        """Wait for the records of all hosts.

        Raises:
            JoinFailedError: some did not come, or somebody found that it cannot be.
            OnePortError: it was asked for.
            CancelledError: nobody waits any more.
            StoreBrokenError: the store is gone.
        """
        meeting.on_leave = lambda: self.fail(left_error(own.name), self._client.another())
        try:
            while True:
                self._wait_for_all(meeting)
                gone = self._gone(own) if self._can_probe else []
                texts = [] if gone else self._read_texts()
                if not gone and None not in texts:
                    break
                self._missing = gone or self._drop_forged(texts)
            records = [own, *self._records(texts)]
            _check_agreement(records)
            if isinstance(self._client.signer, Pact):
                self._client.signer.conclude(self._prefix, [record.name for record in records])
        except JoinFailedError as error:
            self.fail(error)
            raise
        return records

    def _wait_for_all(self, meeting: Meeting) -> None:
        listed_at = 0.0
        while self._missing:
            meeting.check()
            waited = self._client.wait([self._key(host) for host in self._missing], _LOOK_AGAIN_S)
            if waited:
                self._missing = []
                return
            failure = _failure(self._client.find(f"{self._prefix}fail"))
            if failure is not None:
                raise failure
            if self._is_asked_for():
                raise OnePortError
            if isinstance(self._client.signer, Pact):
                self._client.signer.keep(self._client)
            now = time.monotonic()
            if now - listed_at < _LIST_MISSING_EVERY_S and meeting.remaining_s > 0:
                continue
            listed_at = now
            self._list_missing(now)
            words = missing_words(self._missing, self._hosts, meeting.expected)
            if not self._missing:
                return
            mismatch = self._mismatch()
            if mismatch is not None and mismatch.host in self._missing:
                raise JoinFailedError(mismatch.what, MISMATCH_HINT, is_usage=True)
            meeting.say(f"waiting for {words}")
            self._client.set(f"{self._prefix}missing", words[:_LONGEST_WORDS])
            if meeting.remaining_s <= 0:
                raise missing_error(words, meeting.timeout_s)

    def _list_missing(self, now: float) -> None:
        missing = [host for host in self._missing if not self._client.check(self._key(host))]
        for host in self._missing:
            if host not in missing:
                self._seen_at[host] = now
        self._missing = missing

    def _gone(self, own: HostRecord) -> list[int]:
        """Hosts that came early and whose saferun has ended while the others were waited for."""
        now = time.monotonic()
        stale = [host for host, seen_at in self._seen_at.items() if now - seen_at > _STALE_RECORD_S]
        if not stale:
            return []
        gone: list[int] = []

        def look(host: int, record: HostRecord) -> None:
            if is_gone(record, own):
                gone.append(host)

        threads = []
        for host in stale:
            record = decode_record(self._client.find(self._key(host)) or b"")
            if record is not None:
                threads.append(threading.Thread(target=look, args=(host, record), daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join()
        for host in gone:
            self._client.delete(self._key(host))
            del self._seen_at[host]
        return gone

    def _read_texts(self) -> list[bytes | None]:
        """What all hosts have handed in; None where somebody else did so."""
        hosts = range(1, self._hosts)
        return self._client.read_all([self._key(host) for host in hosts]) if hosts else []

    def _drop_forged(self, texts: list[bytes | None]) -> list[int]:
        """Delete what somebody else has put in the place of hosts, which hand in theirs again then."""
        forged = [host for host, text in enumerate(texts, 1) if text is None]
        for host in forged:
            self._client.delete(self._key(host))
        return forged

    def _records(self, texts: list[bytes | None]) -> list[HostRecord]:
        records = []
        for host, text in enumerate(texts, 1):
            record = decode_record(text or b"")
            if record is None:
                raise JoinFailedError(
                    f"what the host with node rank {host} says of itself cannot be read",
                    "use the same version of saferun on all hosts",
                )
            records.append(record)
        return records

    def move(self) -> None:
        """Send everybody who has come, or comes here late, to where the meeting goes on."""
        for host in range(1, self._hosts):
            self._client.set(f"{self._prefix}place/{host}", _MOVED)
        self._client.check(f"{self._prefix}fail")

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait until all hosts have read that; those who have not read it in time find out by the end of the store."""
        give_up_at = time.monotonic() + timeout_s
        with suppress(StoreBrokenError):
            # By a connection of its own, which breaks where somebody has written what is no number.
            client = self._client.another()
            while client.add(f"{self._prefix}left", 0) < self._hosts - 1 and time.monotonic() < give_up_at:
                time.sleep(0.02)

    def hand_out(self, records: Sequence[HostRecord]) -> HostPlace:
        """Give every host its place, and return the leader's own."""
        places = assign(records)
        prefix = attempt_prefix(places[0].attempt)
        for place in places[1:]:
            # The monitor reads those of many hosts in one go, which would wait for keys that are not there.
            self._client.set(f"{prefix}beat/{place.host}", "0")
            self._client.set(f"{prefix}state/{place.host}", "")
        for place, record in zip(places[1:], records[1:], strict=True):
            text = encode_place(place)
            if self._client.signer is not None:
                # Whoever gets it knows by this that nobody has recorded it in another job.
                told = self._client.signer.told if isinstance(self._client.signer, Pact) else {}
                text = json.dumps({**place._asdict(), "to": record.born, **told})
            self._client.set(f"{self._prefix}place/{place.host}", text)
        # An answer, so that all has arrived before anybody may end the store.
        self._client.check(f"{self._prefix}fail")
        return places[0]

    def fail(self, error: JoinFailedError, client: StoreClient | None = None) -> None:
        """Tell those who have come that nobody gets a place, and wait a moment until they have read it."""
        client = client or self._client
        try:
            if not error.is_told:
                tell_failure(client, self._prefix, error)
            text = client.find(f"{self._prefix}fail") or b""
            arrived = [host for host in range(1, self._hosts) if client.check(self._key(host))]
            for host in arrived:
                key, words = f"{self._prefix}place/{host}", text.decode(errors="replace")
                if client.compare_set(key, "", words) == FORGED:
                    client.set(key, words)
            give_up_at = time.monotonic() + _READ_TIMEOUT_S
            while client.add(f"{self._prefix}read", 0) < len(arrived) and time.monotonic() < give_up_at:
                time.sleep(0.02)
        except StoreBrokenError:
            pass

    def _key(self, host: int) -> str:
        return f"{self._prefix}host/{host}"


def _check_agreement(records: Sequence[HostRecord]) -> None:
    for record in records:
        if (words := disagreement(records[0], record)) is not None:
            raise JoinFailedError(words, "give all hosts the same --nnodes")


def attempt_prefix(attempt: int) -> str:
    """Where the keys of an attempt are."""
    return f"a{attempt}/"


def missing_error(words: str, timeout_s: float) -> JoinFailedError:
    """Some hosts did not come."""
    count, _, names = words.partition(": ")
    return JoinFailedError(
        f"{count} did not come within {timeout_s:.0f} s{f': {names}' if names else ''}",
        "see whether saferun was started there, and what it says; --start-timeout is how long they are waited for",
    )


def _leave(client: StoreClient, prefix: str, name: str) -> None:
    tell_failure(client, prefix, left_error(name))
    client.add(f"{prefix}read", 1)


def left_error(name: str) -> JoinFailedError:
    """A host has gone home before the others had their places."""
    return JoinFailedError(f"{name} left while the hosts of the job met", f"see what saferun says on {name}")


def is_gone(record: HostRecord, own: HostRecord) -> bool:
    """Whether the process that wrote a record has certainly ended."""
    addresses = [a for a in record.addresses if a not in own.addresses] or list(record.addresses)
    return probe_host(record.name, addresses, record.port, way=None).why == GONE


def take_place(client: StoreClient, prefix: str, host: int, meeting: Meeting, own: HostRecord) -> HostPlace:
    """A host's side of a meeting: hand in its record, and wait for its place.

    Raises:
        JoinFailedError: there is none.
        MovedError: it is to be asked for where the meeting goes on.
        CancelledError: nobody waits any more.
        StoreBrokenError: the store is gone.
    """
    # By a connection of its own: this one is about to wait.
    meeting.on_leave = lambda: _leave(client.another(), prefix, own.name)
    signer = client.signer
    if isinstance(signer, Pact):
        with _telling(client, prefix):
            signer.take(client)
    _hand_in(client, prefix, host, meeting, own)
    key = f"{prefix}place/{host}"
    while True:
        meeting.check()
        text = client.get(key, max(0.1, min(meeting.tell_every_s / 2, _HAND_IN_AGAIN_S, meeting.remaining_s)))
        if text is not None:
            if text == _MOVED.encode():
                with suppress(StoreBrokenError):
                    client.add(f"{prefix}left", 1)
                raise MovedError
            place = decode_place(text)
            if place is not None and signer is not None and signer.signs and not _is_for(text, own):
                time.sleep(_LOOK_AGAIN_S)  # it was recorded earlier; the true one may yet be written over it
                continue
            if place is not None:
                if isinstance(signer, Pact):
                    with _telling(client, prefix):
                        signer.join(text)
                return place
            client.add(f"{prefix}read", 1)
            raise _failure(text) or JoinFailedError(
                "the place that the first host hands out cannot be read", "use the same version of saferun on all hosts"
            )
        if not client.check(f"{prefix}host/{host}"):
            # Somebody before this host refuses connections, so that it was taken to be gone.
            _hand_in(client, prefix, host, meeting, own)
        words = printable((client.find(f"{prefix}missing") or b"").decode(errors="replace")[:_LONGEST_WORDS])
        meeting.say(f"waiting for {words}" if words else "waiting for the first host's answer")
        if meeting.remaining_s <= 0:
            error = missing_error(words or "hosts", meeting.timeout_s)
            tell_failure(client, prefix, error)
            client.add(f"{prefix}read", 1)
            raise error


@contextmanager
def _telling(client: StoreClient, prefix: str) -> Iterator[None]:
    """Let the others hear why this host does not take part."""
    try:
        yield
    except JoinFailedError as error:
        tell_failure(client, prefix, error)
        client.add(f"{prefix}read", 1)
        raise


def _is_for(text: bytes, own: HostRecord) -> bool:
    return bool(own.born) and loads(text, longest=LONGEST_RECORD_BYTES).get("to") == own.born


def _hand_in(client: StoreClient, prefix: str, host: int, meeting: Meeting, own: HostRecord) -> None:
    key, text = f"{prefix}host/{host}", encode_record(own)
    expected = b""
    while True:
        meeting.check()
        if meeting.remaining_s <= 0:
            words = f"another process writes what {own.name} says of itself"
            raise JoinFailedError(f"{words}, for {meeting.timeout_s:.0f} s", "see who else reaches the job's store")
        stored, found = client.swap(key, expected, text)
        if found == text.encode():
            return
        if expected and stored == expected:
            # This is what the store says where there is no such key any more.
            expected = b""
            continue
        other = decode_record(found or b"")
        if other is not None and other.born != own.born and not is_gone(other, own):
            both = f"{other.name} and {own.name}"
            error = JoinFailedError(
                f"two hosts have the node rank {host}: {both}", "give every host a --node-rank of its own"
            )
            tell_failure(client, prefix, error)
            raise error
        # That of a process that has ended, or what this one said before it lost the connection.
        expected = stored
