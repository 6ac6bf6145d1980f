"""What the leader broadcasts to the other hosts' checks: as JSON of bounded size, and back again. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

from saferun.cluster.messages import MOST_HOSTS, Line
from saferun.model import JsonObject, Value
from saferun.text.typed_json import fit, list_of, number_of, text_of

__all__ = ["GoAhead", "PairAgain", "again_message", "go_ahead_from", "go_ahead_message", "pairs_from"]

_MOST_PAIRS = 64
_MOST_NICS = 8
_LONGEST_ENDPOINT = 16 << 10
# An entry of the job's log may have 64 KiB; a longer one would not arrive.
_LONGEST_PAIRS_BYTES = 48 << 10

Host = Annotated[int, number_of(MOST_HOSTS)]


class PairAgain(Value):
    """Two hosts that are to be measured once more. ``label``, ``endpoint``: the target's name, and how it is probed."""

    source: Host
    target: Host
    label: Line
    endpoint: Annotated[str, text_of(_LONGEST_ENDPOINT)]


class GoAhead(Value):
    """The ranks may be started. ``nic``: the interfaces that they are to use; none: they choose."""

    nic: Annotated[tuple[str, ...], list_of(Line, _MOST_NICS)] = ()


def again_message(pairs: Iterable[PairAgain]) -> JsonObject:
    """These pairs are to be measured again: as many of them as one message holds."""
    rows: list[list[object]] = []
    room = _LONGEST_PAIRS_BYTES
    for pair in pairs:
        room -= len(json.dumps(pair)) + 2
        if room < 0 or len(rows) >= _MOST_PAIRS:
            break
        rows.append(list(pair))
    return {"again": rows}


def pairs_from(message: JsonObject) -> tuple[PairAgain, ...]:
    """The pairs of a message; those that make no sense are left out.

    Raises:
        One of ``MALFORMED``: it has no list of pairs.
    """
    pairs: tuple[PairAgain, ...] = list_of(PairAgain, _MOST_PAIRS, skips=True)(message["again"])
    return pairs


def go_ahead_message(nics: Iterable[str]) -> JsonObject:
    """The ranks may be started, with these interfaces."""
    return {"ok": True, "nic": list(nics)[:_MOST_NICS]}


def go_ahead_from(message: JsonObject) -> GoAhead:
    """What the leader lets all hosts know.

    Raises:
        One of ``MALFORMED``: it makes no sense.
    """
    found: GoAhead = fit(GoAhead, message)
    return found
