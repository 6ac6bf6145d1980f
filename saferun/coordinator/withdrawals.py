"""That a host cannot start, or leaves while the hosts of a job meet, as it publishes it in the control store.

Keys, below the prefix of the rendezvous: ``withdrawn/<n>`` that this host cannot start, or has left, and has written
why; ``leaver/<n>`` which process of it has left: another one may come for it; ``withdrawn`` that some host has left
whose record is there. ``<n>`` is the host's seat (see ``members``).
"""

from __future__ import annotations

from saferun.coordinator.assignments import decode_host_record
from saferun.coordinator.failure_messages import failure_text, publish_failure, read_failure
from saferun.coordinator.rendezvous_round import JoinFailedError
from saferun.coordinator.store_client import StoreClient


def withdraw_alone(client: StoreClient, prefix: str, seat: int, error: JoinFailedError) -> None:
    """Publish that a host cannot start, where another one takes its place."""
    if not client.check(f"{prefix}host/{seat}"):
        client.set(f"{prefix}withdrawn/{seat}", failure_text(error))
        client.check(f"{prefix}fail")


def leave_alone(client: StoreClient, prefix: str, seat: int, born: str, error: JoinFailedError) -> None:
    """Publish that a host leaves that has come, where another one takes its place. ``born``: as in its record."""
    client.set(f"{prefix}leaver/{seat}", born)
    client.set(f"{prefix}withdrawn/{seat}", failure_text(error))
    client.set(f"{prefix}withdrawn", "")
    client.check(f"{prefix}fail")


def withdraw(client: StoreClient, prefix: str, seat: int | None, error: JoinFailedError) -> None:
    """Publish that a host cannot start. Nothing is published where the host takes part, started by another command."""
    if seat is None or not client.check(f"{prefix}host/{seat}"):
        publish_failure(client, prefix, error)
        if seat is not None:
            client.set(f"{prefix}withdrawn/{seat}", "")
        client.check(f"{prefix}fail")


def read_withdrawal(client: StoreClient, prefix: str, seat: int) -> JoinFailedError | None:
    """Why a host takes no part; None: it has not said so, or another process has come for it since."""
    reason = read_failure(client.find(f"{prefix}withdrawn/{seat}"))
    if reason is None:
        return None
    record = decode_host_record(client.find(f"{prefix}host/{seat}") or b"")
    leaver = client.find(f"{prefix}leaver/{seat}") or b""
    return reason if record is None or record.born.encode() == leaver else None
