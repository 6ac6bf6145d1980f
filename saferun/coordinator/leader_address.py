"""Where the first host serves the control store, as it publishes it in another store; and job secrets that differ.

The other store is the ranks' store of a static job, or that of torch's rendezvous handler. Every host can read the
address, whatever its job secret: it is signed, not encrypted, so that a host with another secret can report that.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from saferun.cluster.signed import unverified
from saferun.coordinator.assignments import Name, Number, Port, typed
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.secrecy import (
    MISMATCH_HINT,
    NONE_THERE,
    NOTE_KEY,
    SecretMismatch,
    decode_note,
    encode_note,
    mismatch_message,
)
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.model import Value
from saferun.text.typed_json import line_of, text_of

# Set by a host that reaches the other store and not the control store, and how long it tries before.
ASK_KEY = "saferun/one_port"
ASK_AFTER_S = 5.0
_LONGEST_RUN_ID = 4096
_LONGEST_NAME = 255
_MOST_ADDRESSES = 64


def _numeric(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("a list is wanted")
    # No names: a name service is not asked for what another host sends.
    return tuple(address for address in value[:_MOST_ADDRESSES] if isinstance(address, str) and _is_address(address))


class LeaderAddress(Value):
    """Where the first host serves its stores.

    Attributes:
        job: the random number of the job.
        control_port: of the control store.
        ranks_port: of the ranks' store; 0: torch's handler provides another one.
        master_addr: where the ranks reach it.
        addresses: all addresses of the host.
        run_id: the job's name.
        hosts: for how many hosts it was started.
        one_port: whether the control store is a part of the ranks' store.
        moves: how often the control store has become another one.
        script: the name of what the ranks run, for people.
        spares: for how many hosts beside those.
    """

    job: Name
    control_port: Port
    ranks_port: Port
    master_addr: Name
    addresses: Annotated[tuple[str, ...], _numeric]
    run_id: Annotated[str, text_of(_LONGEST_RUN_ID)]
    hosts: Number
    one_port: bool
    moves: Number
    script: Annotated[str, line_of(_LONGEST_NAME)] = ""
    spares: Number = 0


def publish_address(store: StoreClient, key: str, rdzv: RendezvousRound, address: LeaderAddress) -> None:
    """Publish where the control store is; when this returns, every host can read it."""
    store.set(key, rdzv.secrecy.greet(key, json.dumps(address._asdict())))
    store.check(key)


def read_address(stored: bytes | None) -> LeaderAddress | None:
    """A published address, whether or not its signature is right; None where it is malformed."""
    address: LeaderAddress | None = typed(LeaderAddress, unverified(stored or b""))
    return address


def mismatch_on_first_host(store: StoreClient | None, rdzv: RendezvousRound, job: str) -> SecretMismatch | None:
    """What a host with another job secret has left for this one, the first; None: nothing about this job."""
    if store is None or rdzv.secrecy.greeting is None:
        return None
    return decode_note(store.find(NOTE_KEY), rdzv.name, job)


def mismatch_error(
    kind: str,
    store: StoreClient,
    rdzv: RendezvousRound,
    host: int,
    found: LeaderAddress,
    fail_round: Callable[[JoinFailedError], None],
) -> JoinFailedError:
    """The error, here and on the first host, for a job secret that is not the same on both.

    Args:
        kind: how it differs.
        store: where the address was published.
        rdzv: the round of this host.
        host: its number.
        found: what the first host has published.
        fail_round: fails the round for a first host without a secret, which reads no notes.
    """
    first = rdzv.request.expected[0] if rdzv.request.expected else f"the leader ({found.master_addr})"
    error = JoinFailedError(mismatch_message(kind, first, rdzv.name), MISMATCH_HINT, kind="usage")
    if kind == NONE_THERE:
        fail_round(error)
        return error
    with suppress(StoreBrokenError):
        store.set(NOTE_KEY, encode_note(kind, host, rdzv.name, found.job))
        store.check(NOTE_KEY)
    return error


def _is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
        except (OSError, ValueError):
            continue
        return True
    return False


def master_addr(named: str, addresses: tuple[str, ...]) -> str:
    """The MASTER_ADDR of the ranks: torch's choice where that leads anywhere, else one of this host's own.

    A name service that is not in order gives names that no host can resolve, or that lead every host to itself.
    """
    away = [address for address in addresses if not is_loopback(address)]
    if away and all(map(is_loopback, _resolved(named))):
        return away[0]
    return named


def leads_to(named: str, addresses: tuple[str, ...]) -> bool:
    """Whether a name or address leads to this host, which has these addresses."""
    return any(is_loopback(address) or address in addresses for address in _resolved(named))


def _resolved(named: str) -> list[str]:
    """The addresses behind a name; none where it is unknown."""
    try:
        infos = socket.getaddrinfo(named.encode(), None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return [str(info[4][0]) for info in infos]


def is_loopback(address: str) -> bool:
    """Whether an address leads every host to itself."""
    return address.startswith("127.") or address in {"::1", "localhost"}
