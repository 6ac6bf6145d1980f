"""What the replacement of a killed coordinator needs to go on with an attempt. Pure.

The coordinator hands it to its supervisor when the hosts have met, as text, and its replacement gets it back: where the
control store is, what this host was assigned, and the job secret that the hosts agreed on. It does not leave the host.
"""

from __future__ import annotations

import json
from typing import Annotated

from saferun.coordinator.assignments import (
    Addresses,
    HostAssignment,
    HostRecord,
    Name,
    Number,
    Port,
    TaskRecord,
    decode_assignment,
    encode_assignment,
    typed,
)
from saferun.model import Value
from saferun.text.typed_json import text_of

__all__ = ["Resumption", "SharedSecret", "decode_resumption", "encode_resumption"]

_LONGEST_TEXT = 1 << 16


class SharedSecret(Value):
    """A job secret that the hosts have agreed on; empty: none. ``way``: by which it was shared."""

    secret: Annotated[str, text_of(_LONGEST_TEXT)] = ""
    way: Name = ""


class _RestOfResumption(Value):
    """The parts beside the assignment."""

    job: Name
    control_addr: Name
    control_port: Port
    is_shared: bool
    master_port: Port
    moves: Number
    round: Number
    script: Name
    shared: SharedSecret
    addresses: Addresses
    tasks: tuple[TaskRecord, ...]
    successor_addr: Annotated[str, text_of(_LONGEST_TEXT)] = ""


class Resumption(Value):
    """An attempt that goes on.

    Attributes:
        assignment: this host's.
        job: the number that the first host has drawn.
        control: where the control store is.
        is_shared: whether it is a part of the ranks' store.
        master_port: of the ranks' store.
        moves: how often the control store has become another one.
        round: the number of the rendezvous.
        script: what the ranks of the first host run, for people.
        shared: the secret that was agreed on, where none was named.
        record: this host's, as far as it is needed.
        successor_addr: where the ranks find their store, if a spare has taken the place of the first host; else empty.
    """

    assignment: HostAssignment
    job: str
    control: tuple[str, int]
    is_shared: bool
    master_port: int
    moves: int
    round: int
    script: str
    shared: SharedSecret
    record: HostRecord
    successor_addr: str = ""


def encode_resumption(resumption: Resumption) -> str:
    """The resumption as text that ``decode_resumption`` reads."""
    one = resumption
    rest = _RestOfResumption(
        one.job,
        *one.control,
        is_shared=one.is_shared,
        master_port=one.master_port,
        moves=one.moves,
        round=one.round,
        script=one.script,
        shared=one.shared,
        addresses=one.record.addresses,
        tasks=one.record.tasks,
        successor_addr=one.successor_addr,
    )
    return json.dumps({"assignment": encode_assignment(one.assignment), "rest": json.dumps(rest._asdict())})


def decode_resumption(content: str) -> Resumption | None:
    """A resumption; None where it is malformed or out of bounds."""
    try:
        parts = json.loads(content)
        assignment: HostAssignment | None = decode_assignment(parts["assignment"])
        rest: _RestOfResumption | None = typed(_RestOfResumption, parts["rest"])
    except (ValueError, TypeError, KeyError):
        return None
    if assignment is None or rest is None:
        return None
    return Resumption(
        assignment,
        rest.job,
        (rest.control_addr, rest.control_port),
        is_shared=rest.is_shared,
        master_port=rest.master_port,
        moves=rest.moves,
        round=rest.round,
        script=rest.script,
        shared=rest.shared,
        record=HostRecord(assignment.label, rest.tasks, rest.addresses),
        successor_addr=rest.successor_addr,
    )
