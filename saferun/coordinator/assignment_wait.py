"""A host's side of a rendezvous: it publishes its record, and waits for its assignment.

See ``host_record_collection``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from saferun.coordinator.assignments import (
    LONGEST_RECORD_BYTES,
    HostAssignment,
    HostRecord,
    decode_assignment,
    decode_host_record,
    encode_host_record,
)
from saferun.coordinator.failure_messages import LONGEST_MESSAGE, publish_failure, read_failure
from saferun.coordinator.gone_hosts import is_gone
from saferun.coordinator.host_record_collection import (
    MOVED,
    RECHECK_S,
    MovedError,
    left_error,
    missing_error,
)
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.coordinator.withdrawals import leave_alone
from saferun.errors import printable
from saferun.model import Value
from saferun.text.decoding import loads

# How often a host checks whether its record is still there.
_HAND_IN_AGAIN_S = 5.0
_HOST_S = 0.01
# When the hosts have met: how long the leader of many may take to answer them all.
_ANSWER_S = 3.0
_OTHER_JOB_HINT = "if that is another job, give each its own --master-port or --rdzv-id"


class MissedError(Exception):
    """The others have met without this host, which came too late."""


class BegunWithout(Value):
    """What is said of a job that has begun without this host, and what to do if it is another one."""

    what: str
    hint: str


def await_assignment(
    client: StoreClient,
    prefix: str,
    host: int,
    rdzv: RendezvousRound,
    own: HostRecord,
    begun: BegunWithout | None = None,
) -> HostAssignment:
    """A host's side of a rendezvous: publish its record, and wait for its assignment.

    Args:
        client: a connection to the control store.
        prefix: of the rendezvous's keys.
        host: where it looks for its assignment.
        rdzv: the rendezvous.
        own: what it publishes.
        begun: what is said if another process gets the assignment; None: that without names.

    Raises:
        JoinFailedError: there is none.
        MovedError: it is to be asked for where the rendezvous goes on.
        MissedError: the others have met without this host.
        CancelledError: no task waits for it any more.
        StoreBrokenError: the store is gone.
    """
    farewell = _Farewell(client, prefix, host, own, rdzv)
    rdzv.on_leave = farewell.publish
    try:
        begun = begun or BegunWithout(f"the job at this address has begun without {own.name}", _OTHER_JOB_HINT)
        return _await_assignment(client, prefix, host, rdzv, own, farewell, begun)
    finally:
        farewell.forget()


def _await_assignment(
    client: StoreClient,
    prefix: str,
    host: int,
    rdzv: RendezvousRound,
    own: HostRecord,
    farewell: _Farewell,
    begun: BegunWithout,
) -> HostAssignment:
    if isinstance(client.signer, SecretAgreement):
        with _publishing_failure(client, prefix):
            client.signer.take(client)
    _publish_record(client, prefix, host, rdzv, own)
    key = f"{prefix}assignment/{host}"
    is_rendezvous_done = False
    while True:
        rdzv.check()
        # All hosts together ask a leader that may be slow: the more of them, the less often each.
        wait_s = max(_HAND_IN_AGAIN_S, rdzv.most * _HOST_S)
        wait_s = _ANSWER_S if is_rendezvous_done else min(rdzv.request.report_every_s / 2, wait_s)
        text = client.get(key, max(0.1, min(wait_s, rdzv.remaining_s)))
        if text is not None:
            assignment = _accept(text, client, prefix, own)
            if assignment is not None:
                return assignment
            _await_another(client, prefix, host, rdzv, own, begun)
            continue
        _check_missed(client, prefix, key, rdzv)
        farewell.prepare()
        was_done, is_rendezvous_done = is_rendezvous_done, client.check(f"{prefix}done")
        if not _check_place(client, prefix, host, own, is_late=is_rendezvous_done):
            # Something in front of this host refuses connections, so that it was taken to be gone.
            _publish_record(client, prefix, host, rdzv, own)
        # Assignments follow at once: where there is none the next time either, it is for another process.
        _report_wait(client, prefix, rdzv, begun if was_done and is_rendezvous_done else None)


def _accept(text: bytes, client: StoreClient, prefix: str, own: HostRecord) -> HostAssignment | None:
    """What the leader has answered, as this host's assignment; None: it is another process's.

    Raises:
        JoinFailedError: this host gets none.
        MovedError: it is to be asked for where the rendezvous goes on.
    """
    if text == MOVED.encode():
        with suppress(StoreBrokenError):
            client.add(f"{prefix}left", 1)
        raise MovedError
    assignment, signer = decode_assignment(text), client.signer
    if assignment is None:
        client.add(f"{prefix}read", 1)
        raise read_failure(text) or JoinFailedError(
            "the assignment by the leader cannot be read",
            "use the same version of saferun on all hosts",
        )
    if signer is not None and signer.signs and not is_for(text, own):
        return None
    if isinstance(signer, SecretAgreement):
        with _publishing_failure(client, prefix):
            signer.join(text)
    return assignment


def _await_another(
    client: StoreClient, prefix: str, host: int, rdzv: RendezvousRound, own: HostRecord, begun: BegunWithout
) -> None:
    """An assignment is not for this host: recorded earlier, so that the true one may yet come, or another process's."""
    _check_place(client, prefix, host, own, is_late=True)
    _report_wait(client, prefix, rdzv, begun)
    time.sleep(RECHECK_S)


def _report_wait(client: StoreClient, prefix: str, rdzv: RendezvousRound, begun: BegunWithout | None) -> None:
    """Say what this host waits for. ``begun``: the others have met.

    Raises:
        JoinFailedError: the time for that is over.
    """
    if begun is not None:
        rdzv.set_status(f"{begun.what}; waiting for the leader's answer", is_fault=True)
        if rdzv.remaining_s <= 0:
            raise JoinFailedError(f"{begun.what}: another process may have its place", begun.hint)
        return
    message = printable((client.find(f"{prefix}missing") or b"").decode(errors="replace")[:LONGEST_MESSAGE])
    rdzv.wait_for(message or "the leader's answer")
    if rdzv.remaining_s <= 0:
        with _publishing_failure(client, prefix):
            error = missing_error(message or "hosts", rdzv.timeout_s, rdzv.answer_s)
            error.is_published = bool(message)  # by the first host, whose time is over as well
            raise error


def _check_place(client: StoreClient, prefix: str, host: int, own: HostRecord, *, is_late: bool) -> bool:
    """Whether this host's record is there. ``is_late``: the others have met.

    Raises:
        JoinFailedError: there is that of another process, to which the leader answers.
        MissedError: there is none any more, as the others have met.
    """
    key = f"{prefix}host/{host}"
    if not client.check(key):
        if is_late:
            raise MissedError
        return False
    # Until then nothing depends on whose it is: whoever comes second finds that out.
    other = decode_host_record(client.find(key) or b"") if is_late else None
    if other is not None and other.born != own.born:
        raise _taken_error(other, own, host)
    return True


def _taken_error(other: HostRecord, own: HostRecord, host: int) -> JoinFailedError:
    if other.name == own.name:
        return JoinFailedError(f"{own.name} has come to this address twice, with node rank {host}", _OTHER_JOB_HINT)
    both = f"{other.name} and {own.name}"
    hint = "give every host a --node-rank of its own"
    return JoinFailedError(f"two hosts have the node rank {host}: {both}", hint)


def _check_missed(client: StoreClient, prefix: str, key: str, rdzv: RendezvousRound) -> None:
    if rdzv.spares and client.check(f"{prefix}handed_out") and not client.check(key):
        raise MissedError


@contextmanager
def _publishing_failure(client: StoreClient, prefix: str) -> Iterator[None]:
    """If joining fails in this block, publish why, so that the others fail with the same message."""
    try:
        yield
    except JoinFailedError as error:
        publish_failure(client, prefix, error)
        client.add(f"{prefix}read", 1)
        raise


def is_for(text: bytes, own: HostRecord) -> bool:
    """Whether what the leader has answered is an assignment for the process of this record, of which it says so."""
    if decode_assignment(text) is None:
        return False
    return bool(own.born) and loads(text, longest=LONGEST_RECORD_BYTES).get("to") == own.born


def _publish_record(client: StoreClient, prefix: str, host: int, rdzv: RendezvousRound, own: HostRecord) -> None:
    key, text = f"{prefix}host/{host}", encode_host_record(own)
    expected = b""
    while True:
        rdzv.check()
        if rdzv.remaining_s <= 0:
            message = f"another process overwrites the record of {own.name}"
            raise JoinFailedError(
                f"{message}, for {time.monotonic() - rdzv.began_at:.0f} s",
                "find out which other processes can reach the job's store",
            )
        stored, found = client.swap(key, expected, text)
        if found == text.encode():
            return
        if expected and stored == expected:
            # This is what the store says where there is no such key any more.
            expected = b""
            continue
        other = decode_host_record(found or b"")
        if other is not None and other.born != own.born and not is_gone(other, own):
            error = _taken_error(other, own, host)
            publish_failure(client, prefix, error)
            raise error
        # That of a process that has ended, or what this one wrote before it lost the connection.
        expected = stored


class _Farewell:
    """What this host publishes if it leaves while the hosts meet.

    Args:
        client: a connection to the store, which is about to wait.
        prefix: of the rendezvous.
        host: where it looks for its assignment.
        own: this host's record.
        rdzv: knows why it leaves.
    """

    def __init__(self, client: StoreClient, prefix: str, host: int, own: HostRecord, rdzv: RendezvousRound) -> None:
        self._client = client
        self._prefix = prefix
        self._host = host
        self._own = own
        self._rdzv = rdzv
        self._another: StoreClient | None = None
        self._is_prepared = False

    def prepare(self) -> None:
        """Connect, while the store answers: what is sent later is there when a leader that stands still goes on.

        A store that takes no more connections is asked once, and costs this host nothing else.
        """
        if not self._is_prepared:
            self._is_prepared = True
            with suppress(StoreBrokenError):
                self._another = self._client.another()

    def forget(self) -> None:
        """This host has been answered, and needs no other connection."""
        self._another = None

    def publish(self) -> None:
        """Let the others know that this host has left, and who has ended the job, if that is why.

        In a job with spares another one takes its place, unless the job is to end.
        """
        client = self._another or self._client.another()
        error = left_error(self._own.name, self._rdzv)
        if self._rdzv.spares and error.end is None:
            leave_alone(client, self._prefix, self._host, self._own.born, error)
        else:
            publish_failure(client, self._prefix, error)
            client.add(f"{self._prefix}read", 1)
