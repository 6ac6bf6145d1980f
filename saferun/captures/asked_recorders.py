"""Asks the ranks of this host for their Flight Recorders, one after the other, to see which one the others wait for.

What a rank is asked for costs it some milliseconds: torch copies its entries, of which there is no way to ask for a
few, and queries the GPU for the calls that are under way. Its stacks are not in it. The answers are decoded when all
are here, so that they are of about the same moment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from saferun.captures.flight_recorder import REPLY_LIMIT_BYTES, LeftOutError, NoAnswerError, ask_server, sockets_of
from saferun.captures.recorder_waits import FlightRecorderCalls, calls_of, rows_of
from saferun.captures.wire import CaptureTarget
from saferun.model import JsonObject
from saferun.text.decoding import loads

RANK_S = 2.0
"""How long a rank may take to answer."""
_NCCL = "dump_nccl_trace_json"
_BACKEND = "fr_trace_json"
_NCCL2 = f"{_BACKEND}?backend=nccl2"


def waits_json(targets: Sequence[Sequence[Any]]) -> bytes:
    """What :func:`ask_ranks` finds, as the examiner answers. ``targets``: rank, pid and hook prefix of each."""
    return json.dumps(
        ask_ranks([CaptureTarget(int(rank), int(pid), str(prefix)) for rank, pid, prefix in targets])
    ).encode()


def ask_ranks(targets: Sequence[CaptureTarget]) -> JsonObject:
    """Ask all of them. Nothing is asked any more where one has not answered.

    Returns:
        ``rows`` as :func:`rows_of` has them; ``failure``: why there are none, empty where it is too early to know;
        ``is_final``: whether it is no use to try again.
    """
    replies: dict[int, list[bytes]] = {}
    for target in targets:
        paths = sockets_of(target)
        if not paths:
            return {"rows": [], "failure": "", "is_final": False}  # it has no process group yet
        try:
            names = _names(paths[0])
            if not names & {_NCCL, _BACKEND}:
                return _failed(target, "its torch has no Flight Recorder that can be asked", is_final=True)
            asked = [_NCCL] if _NCCL in names else []
            asked += [_NCCL2] if _BACKEND in names else []
            replies[target.rank] = [_ask(paths[0], "POST", f"/handler/{handler}") for handler in asked[:1]]
            if _is_empty(replies[target.rank][0]) and len(asked) > 1:
                replies[target.rank] = [_ask(paths[0], "POST", f"/handler/{asked[1]}")]
        except NoAnswerError as error:
            return _failed(target, str(error), is_final=isinstance(error, LeftOutError))
    recorded: dict[int, FlightRecorderCalls] = {}
    for rank, (reply,) in replies.items():
        try:
            recorded[rank] = calls_of(loads(reply, longest=REPLY_LIMIT_BYTES, most=REPLY_LIMIT_BYTES))
        except (ValueError, MemoryError):
            return _failed(CaptureTarget(rank, 0), "its answer is not JSON", is_final=False)
    return {"rows": rows_of(recorded), "failure": "", "is_final": False}


def _failed(target: CaptureTarget, why: str, *, is_final: bool) -> JsonObject:
    return {"rows": [], "failure": f"rank {target.rank}: {why}", "is_final": is_final}


def _ask(path: str, method: str, resource: str) -> bytes:
    return ask_server(path, method, resource, time.monotonic() + RANK_S)


def _names(path: str) -> set[str]:
    try:
        names = loads(_ask(path, "GET", "/handler/"))
    except ValueError:
        raise NoAnswerError("its answer is not JSON") from None
    return {name for name in names if type(name) is str} if isinstance(names, list) else set()


def _is_empty(reply: bytes) -> bool:
    """Whether a recorder has no entries, without decoding it: that of a backend that the rank does not use."""
    return b'"profiling_name"' not in reply
