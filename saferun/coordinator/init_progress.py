"""How far the ranks of an attempt have come, as their store shows it.

``init_process_group`` connects to the store, and with that adds one to a number that torch's clients keep there; gloo
then leaves each rank's address. Nothing else touches either: a script that never calls it leaves no trace there. That
number has a name that torch's own clients cannot ask for, so it is asked for on the wire.

Sources: ``TCPStore.cpp`` and ``TCPStoreBackend.cpp`` of torch (2.4 to 2.13): queries, the key ``init/``;
``distributed_c10d.py``: the prefixes of the default process group.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterable
from typing import Any

from saferun.coordinator.store_connection import ADD, MAGIC, VALIDATE
from saferun.model import Value

__all__ = ["Stage", "read_arrived", "start_stage"]

_ARRIVED_KEY = b"init/"
_TIMEOUT_S = 2.0
# ``default_pg/0//cpu//0/3``; before torch 2.5 with the attempt's prefix before it. The last number is the rank.
_GLOO_ADDRESS = re.compile(r"(?:^|/)default_pg/0//\w{1,16}//0/(\d{1,7})$")


class Stage(Value):
    """How far the ranks have come.

    Attributes:
        stage: ``before`` (none has come to the store), ``inside`` (some have, or not all have left what the others
            need), ``through`` (all have; the last steps cannot be seen here); empty: it is not known.
        arrived: how many have connected; -1: unknown.
        world_size: how many are expected.
    """

    stage: str
    arrived: int
    world_size: int


def start_stage(store: Any, address: tuple[str, int], world_size: int) -> Stage:  # noqa: ANN401 - torch may be there in part only
    """How far the ranks have come that meet in a store. Bounded by two seconds; never raises.

    Args:
        store: torch's TCPStore, the server's own object or a client.
        address: where it is served.
        world_size: how many ranks are expected; 0: unknown.
    """
    arrived = read_arrived(address)
    if arrived < 0:
        return Stage("", -1, world_size)
    if arrived == 0:
        return Stage("before", 0, world_size)
    if world_size <= 0:
        return Stage("inside", arrived, world_size)
    addresses = _gloo_ranks(store)
    is_through = arrived >= world_size and (not addresses or len(addresses) >= world_size)
    # A rank may have come twice, by a second store of its own.
    return Stage("through" if is_through else "inside", min(arrived, world_size), world_size)


def read_arrived(address: tuple[str, int]) -> int:
    """How many clients have connected to a store as one of a number of workers; -1 where it does not answer.

    Args:
        address: where the store is served.
    """
    request = struct.pack("=BI", VALIDATE, MAGIC)
    # To add nothing is to read, and a key that does not exist counts as 0.
    request += struct.pack("=BQ", ADD, len(_ARRIVED_KEY)) + _ARRIVED_KEY + struct.pack("=q", 0)
    try:
        with socket.create_connection(address, _TIMEOUT_S) as connection:
            connection.sendall(request)
            answer = b""
            while len(answer) < 8:  # noqa: PLR2004 - a number of 64 bits
                chunk = connection.recv(8 - len(answer))
                if not chunk:
                    return -1
                answer += chunk
    except OSError:
        return -1
    arrived: int = struct.unpack("=q", answer)[0]
    return max(arrived, 0)


def _gloo_ranks(store: Any) -> set[int]:  # noqa: ANN401 - as above
    """The ranks that have left gloo's address; none where there is no gloo, or this torch cannot list keys."""
    try:
        keys: Iterable[str] = store.list_keys()
        return {int(match[1]) for key in keys if (match := _GLOO_ADDRESS.search(key))}
    except Exception:
        return set()
