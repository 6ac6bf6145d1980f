"""How hosts whose numbers are known exchange records for assignments, in the control store.

Keys, below the prefix of the rendezvous: ``host/<n>`` a record; ``assignment/<n>`` what that host gets; ``missing`` who
has not come, for the others to print; ``fail`` why no host gets an assignment, written by whoever finds out; ``read``
how many hosts have read of it; ``withdrawn/<n>`` that this host cannot start, and has written why. Each host reads its
own assignment only, so that what the leader sends grows with the number of hosts, not with its square.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from saferun.coordinator.assignments import (
    LONGEST_RECORD_BYTES,
    HostAssignment,
    HostRecord,
    assign,
    decode_assignment,
    decode_record,
    disagreement,
    encode_assignment,
    encode_record,
    missing_text,
)
from saferun.coordinator.liveness_probe import GONE, probe_host
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.secrecy import MISMATCH_HINT, SecretMismatch
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient
from saferun.errors import printable
from saferun.text.decoding import MALFORMED, display_text, loads

_RECHECK_S = 0.25
_LIST_MISSING_EVERY_S = 1.0
_LONGEST_MESSAGE = 4096
# A record that has lain there for longer may be that of a process that has ended since.
_STALE_RECORD_S = 2.0
_READ_TIMEOUT_S = 3.0
# How long the first host stays to tell those who have yet to come why no host gets an assignment.
_LATE_S = 3.0
_LATE_PAUSE_S = 0.05
# How often a host checks whether its record is still there.
_HAND_IN_AGAIN_S = 5.0
# What a host reads instead of its assignment where the store of the job's messages is another one from now on.
_MOVED = "moved"


class MovedError(Exception):
    """The rendezvous goes on in another store."""


class OnePortError(Exception):
    """Some host reaches the port of the ranks' store only."""


def publish_failure(client: StoreClient, prefix: str, error: JoinFailedError) -> None:
    """Let all hosts of a rendezvous fail, with the same message."""
    message: list[object] = [error.what[:_LONGEST_MESSAGE], error.hint[:_LONGEST_MESSAGE]]
    text = json.dumps([*message, True] if error.is_usage else message)
    if client.compare_set(f"{prefix}fail", "", text) == FORGED:
        client.set(f"{prefix}fail", text)


def _failure(text: bytes | None) -> JoinFailedError | None:
    if text is None:
        return None
    try:
        what, hint, *more = loads(text, longest=4 * _LONGEST_MESSAGE)
        what, hint = display_text(what, _LONGEST_MESSAGE), display_text(hint, _LONGEST_MESSAGE)
        return JoinFailedError(what, hint, is_published=True, is_usage=more == [True])
    except MALFORMED:
        return None


class RecordCollection:
    """The leader's side of a rendezvous.

    Args:
        client: to the control store.
        prefix: of the rendezvous's keys.
        hosts: how many there will be.
        can_probe: whether hosts can be probed; where one port is all that is open, a refusal means nothing.
        is_asked_for: whether a host asks for ``OnePortError``.
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
        mismatch: Callable[[], SecretMismatch | None] = lambda: None,
    ) -> None:
        self._can_probe = can_probe
        self._is_asked_for = is_asked_for
        self._mismatch = mismatch
        self._client = client
        self._prefix = prefix
        self._hosts = hosts
        self._missing = list(range(1, hosts))
        self._seen_at: dict[int, float] = {}

    def collect(self, rdzv: RendezvousRound, own: HostRecord) -> list[HostRecord]:
        """Wait for the records of all hosts.

        Raises:
            JoinFailedError: some did not come, or a host found that it cannot be.
            OnePortError: it was asked for.
            CancelledError: no task waits for it any more.
            StoreBrokenError: the store is gone.
        """
        rdzv.on_leave = lambda: self.fail(left_error(own.name), self._client.another())
        try:
            while True:
                self._wait_for_all(rdzv)
                gone = self._gone(own) if self._can_probe else []
                texts = [] if gone else self._read_texts()
                if not gone and None not in texts:
                    break
                self._missing = gone or self._drop_forged(texts)
            records = [own, *self._records(texts)]
            _check_agreement(records)
            if isinstance(self._client.signer, SecretAgreement):
                self._client.signer.conclude(self._prefix, [record.name for record in records])
        except JoinFailedError as error:
            self.fail(error)
            if error.is_published:
                self.fail_for_late(rdzv)
            raise
        return records

    def _wait_for_all(self, rdzv: RendezvousRound) -> None:
        listed_at = 0.0
        while self._missing:
            rdzv.check()
            waited = self._client.wait([self._key(host) for host in self._missing], _RECHECK_S)
            if waited:
                self._missing = []
                return
            failure = _failure(self._client.find(f"{self._prefix}fail"))
            if failure is not None:
                raise failure
            if self._is_asked_for():
                raise OnePortError
            if isinstance(self._client.signer, SecretAgreement):
                self._client.signer.keep(self._client)
            now = time.monotonic()
            if now - listed_at < _LIST_MISSING_EVERY_S and rdzv.remaining_s > 0:
                continue
            listed_at = now
            self._list_missing(now)
            message = missing_text(self._missing, self._hosts, rdzv.request.expected)
            if not self._missing:
                return
            mismatch = self._mismatch()
            if mismatch is not None and mismatch.host in self._missing:
                raise JoinFailedError(mismatch.what, MISMATCH_HINT, is_usage=True)
            rdzv.set_status(f"waiting for {message}")
            self._client.set(f"{self._prefix}missing", message[:_LONGEST_MESSAGE])
            if rdzv.remaining_s <= 0:
                raise missing_error(message, rdzv.timeout_s)

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

        def probe(host: int, record: HostRecord) -> None:
            if is_gone(record, own):
                gone.append(host)

        threads = []
        for host in stale:
            record = decode_record(self._client.find(self._key(host)) or b"")
            if record is not None:
                threads.append(threading.Thread(target=probe, args=(host, record), daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join()
        for host in gone:
            self._client.delete(self._key(host))
            del self._seen_at[host]
        return gone

    def _read_texts(self) -> list[bytes | None]:
        """The records of all hosts; None for those that no host of this job has written."""
        hosts = range(1, self._hosts)
        return self._client.read_all([self._key(host) for host in hosts]) if hosts else []

    def _drop_forged(self, texts: list[bytes | None]) -> list[int]:
        """Delete forged records; their hosts publish theirs again then."""
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
        """Send all hosts that have come, or come here late, to where the rendezvous goes on."""
        for host in range(1, self._hosts):
            self._client.set(f"{self._prefix}assignment/{host}", _MOVED)
        self._client.check(f"{self._prefix}fail")

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait until all hosts have read that; those who have not read it in time find out by the end of the store."""
        give_up_at = time.monotonic() + timeout_s
        with suppress(StoreBrokenError):
            # By a connection of its own, which breaks where the value is no number.
            client = self._client.another()
            while client.add(f"{self._prefix}left", 0) < self._hosts - 1 and time.monotonic() < give_up_at:
                time.sleep(0.02)

    def publish_assignments(self, records: Sequence[HostRecord]) -> HostAssignment:
        """Give every host its assignment, and return the leader's own."""
        assignments = assign(records)
        prefix = attempt_prefix(assignments[0].attempt)
        for assignment in assignments[1:]:
            # The monitor reads those of many hosts in one go, which would wait for keys that are not there.
            self._client.set(f"{prefix}heartbeat/{assignment.host}", "0")
            self._client.set(f"{prefix}state/{assignment.host}", "")
        for assignment, record in zip(assignments[1:], records[1:], strict=True):
            text = encode_assignment(assignment)
            if self._client.signer is not None:
                # Whoever gets it knows by this that it is no replay from another job.
                fields = self._client.signer.fields if isinstance(self._client.signer, SecretAgreement) else {}
                text = json.dumps({**assignment._asdict(), "to": record.born, **fields})
            self._client.set(f"{self._prefix}assignment/{assignment.host}", text)
        # An answer, so that all has arrived before anybody may end the store.
        self._client.check(f"{self._prefix}fail")
        return assignments[0]

    def fail(self, error: JoinFailedError, client: StoreClient | None = None) -> None:
        """Publish to those who have come that no host gets an assignment, and wait a moment until they have read it."""
        client = client or self._client
        try:
            if not error.is_published:
                publish_failure(client, self._prefix, error)
            text = client.find(f"{self._prefix}fail") or b""
            arrived = [host for host in range(1, self._hosts) if client.check(self._key(host))]
            for host in arrived:
                self._hand_out(client, host, text.decode(errors="replace"))
            give_up_at = time.monotonic() + _READ_TIMEOUT_S
            while client.add(f"{self._prefix}read", 0) < len(arrived) and time.monotonic() < give_up_at:
                time.sleep(0.02)
        except StoreBrokenError:
            pass

    def fail_for_late(self, rdzv: RendezvousRound, timeout_s: float = _LATE_S) -> None:
        """The same for those who are on their way: they would wait for hosts that have gone."""
        give_up_at = time.monotonic() + timeout_s
        waited_for, handed_out = set(range(1, self._hosts)), 0
        with suppress(StoreBrokenError):
            text = (self._client.find(f"{self._prefix}fail") or b"").decode(errors="replace")
            while time.monotonic() < give_up_at:
                rdzv.check()
                here = {host for host in waited_for if self._client.check(self._key(host))}
                for host in here:
                    self._hand_out(self._client, host, text)
                handed_out += len(here)
                waited_for -= here
                waited_for -= {host for host in waited_for if self._client.check(self._withdrawn(host))}
                if not waited_for and self._client.add(f"{self._prefix}read", 0) >= handed_out:
                    return
                time.sleep(_LATE_PAUSE_S)

    def _hand_out(self, client: StoreClient, host: int, failure: str) -> None:
        key = f"{self._prefix}assignment/{host}"
        if client.compare_set(key, "", failure) == FORGED:
            client.set(key, failure)

    def _withdrawn(self, host: int) -> str:
        return f"{self._prefix}withdrawn/{host}"

    def _key(self, host: int) -> str:
        return f"{self._prefix}host/{host}"


def _check_agreement(records: Sequence[HostRecord]) -> None:
    for record in records:
        if (message := disagreement(records[0], record)) is not None:
            raise JoinFailedError(message, "give all hosts the same --nnodes")


def attempt_prefix(attempt: int) -> str:
    """Where the keys of an attempt are."""
    return f"a{attempt}/"


def missing_error(message: str, timeout_s: float) -> JoinFailedError:
    """Some hosts did not come."""
    count, _, names = message.partition(": ")
    return JoinFailedError(
        f"{count} did not come within {timeout_s:.0f} s{f': {names}' if names else ''}",
        "see whether saferun was started there, and what it says; --start-timeout is how long they are waited for",
    )


def withdraw(client: StoreClient, prefix: str, host: int | None, error: JoinFailedError) -> None:
    """Publish that a host cannot start. Nothing is published where the host takes part, started by another command."""
    if host is None or not client.check(f"{prefix}host/{host}"):
        publish_failure(client, prefix, error)
        if host is not None:
            client.set(f"{prefix}withdrawn/{host}", "")
        client.check(f"{prefix}fail")


def _leave(client: StoreClient, prefix: str, name: str) -> None:
    publish_failure(client, prefix, left_error(name))
    client.add(f"{prefix}read", 1)


def left_error(name: str) -> JoinFailedError:
    """A host has left before the others had their assignments."""
    return JoinFailedError(f"{name} left while the hosts of the job met", f"see what saferun says on {name}")


def is_gone(record: HostRecord, own: HostRecord) -> bool:
    """Whether the process that wrote a record has certainly ended."""
    addresses = [a for a in record.addresses if a not in own.addresses] or list(record.addresses)
    return probe_host(record.name, addresses, record.port, way=None).why == GONE


def await_assignment(
    client: StoreClient, prefix: str, host: int, rdzv: RendezvousRound, own: HostRecord
) -> HostAssignment:
    """A host's side of a rendezvous: publish its record, and wait for its assignment.

    Raises:
        JoinFailedError: there is none.
        MovedError: it is to be asked for where the rendezvous goes on.
        CancelledError: no task waits for it any more.
        StoreBrokenError: the store is gone.
    """
    # By a connection of its own: this one is about to wait.
    rdzv.on_leave = lambda: _leave(client.another(), prefix, own.name)
    signer = client.signer
    if isinstance(signer, SecretAgreement):
        with _telling(client, prefix):
            signer.take(client)
    _publish_record(client, prefix, host, rdzv, own)
    key = f"{prefix}assignment/{host}"
    while True:
        rdzv.check()
        text = client.get(key, max(0.1, min(rdzv.request.report_every_s / 2, _HAND_IN_AGAIN_S, rdzv.remaining_s)))
        if text is not None:
            if text == _MOVED.encode():
                with suppress(StoreBrokenError):
                    client.add(f"{prefix}left", 1)
                raise MovedError
            assignment = decode_assignment(text)
            if assignment is not None and signer is not None and signer.signs and not _is_for(text, own):
                time.sleep(_RECHECK_S)  # it was recorded earlier; the true one may yet be written over it
                continue
            if assignment is not None:
                if isinstance(signer, SecretAgreement):
                    with _telling(client, prefix):
                        signer.join(text)
                return assignment
            client.add(f"{prefix}read", 1)
            raise _failure(text) or JoinFailedError(
                "the assignment that the first host hands out cannot be read",
                "use the same version of saferun on all hosts",
            )
        if not client.check(f"{prefix}host/{host}"):
            # Something in front of this host refuses connections, so that it was taken to be gone.
            _publish_record(client, prefix, host, rdzv, own)
        message = printable((client.find(f"{prefix}missing") or b"").decode(errors="replace")[:_LONGEST_MESSAGE])
        rdzv.set_status(f"waiting for {message}" if message else "waiting for the first host's answer")
        if rdzv.remaining_s <= 0:
            error = missing_error(message or "hosts", rdzv.timeout_s)
            publish_failure(client, prefix, error)
            client.add(f"{prefix}read", 1)
            error.is_published = bool(message)  # by the first host, whose time is over as well
            raise error


@contextmanager
def _telling(client: StoreClient, prefix: str) -> Iterator[None]:
    """Publish why this host does not take part."""
    try:
        yield
    except JoinFailedError as error:
        publish_failure(client, prefix, error)
        client.add(f"{prefix}read", 1)
        raise


def _is_for(text: bytes, own: HostRecord) -> bool:
    return bool(own.born) and loads(text, longest=LONGEST_RECORD_BYTES).get("to") == own.born


def _publish_record(client: StoreClient, prefix: str, host: int, rdzv: RendezvousRound, own: HostRecord) -> None:
    key, text = f"{prefix}host/{host}", encode_record(own)
    expected = b""
    while True:
        rdzv.check()
        if rdzv.remaining_s <= 0:
            message = f"another process writes what {own.name} says of itself"
            raise JoinFailedError(f"{message}, for {rdzv.timeout_s:.0f} s", "see who else reaches the job's store")
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
            publish_failure(client, prefix, error)
            raise error
        # That of a process that has ended, or what this one wrote before it lost the connection.
        expected = stored
