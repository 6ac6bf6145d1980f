"""Asks a rank for the sequence numbers of its collectives, through the Unix socket of torch's worker server.

The socket is the rank's: whatever comes out of it is bounded in time and size, and is parsed as numbers or not at all.
Of the answer, which may hold thousands of calls, only the end is kept: the keys come in alphabetical order, and
``pg_status`` behind the calls.

NCCL's recorder reports its numbers without its calls, so that no GPU is asked. Where sends and receives are among them
they are two sequences in one: the last enqueued may be a send with the number 5, the last completed a collective with
the number 900, and the send may be over or not. Then, and from recorders that a backend has for itself (nccl2, torch
2.15), the calls are asked for, which show whether they are retired.

Nor does a last completed number below the last enqueued one prove that a call is open. torch assigns it in the order in
which it sees calls end, without a maximum: where gloo's two threads end call 8 before call 7, it stays at 7 until the
next call. So where an answer has calls, such a pair counts only if one of that group is open. The group may have an
open call before the end that is read, or one that has been overwritten: that is not known, and counts as little as an
idle group. It only keeps a hang from being certain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from saferun.linux.bare_socket import AF_UNIX, Socket
from saferun.linux.poller import Poller
from saferun.watchdog.samples import Numbers

# The first is that of CUDA builds; the second came with torch 2.10 or so, for all backends. They know different groups.
_NCCL = "dump_nccl_trace_json?includecollectives=false&onlyactive=true"
_HANDLERS = (_NCCL, "fr_trace_json")
_NCCL_CALLS = "dump_nccl_trace_json"
# Where NCCL's recorder is there and empty the job may use another backend; each is asked until one has groups.
_BACKENDS = ("nccl2", "nccl-lazy", "ncclx", "rcclx")
_OF_BACKEND = "fr_trace_json?backend="
# Calls that were made as one: ``coalesced``; collectives also as ``all_gather_into_tensor_coalesced`` and the like.
_AS_ONE = "coalesced"
# A call begins with it.
_CALL = b'{"collective_seq_id"'
_TAIL_BYTES = 1 << 18
_LIMIT_BYTES = 256 << 20
_READ_BYTES = 1 << 18
_GROUPS = 4096
_NUMBER_LIMIT = 1 << 62
# A rank's answer is waited for so long.
_DEADLINE_S = 2.0


class NumbersQuery:
    """One question to one rank.

    Args:
        path: the socket.
        poller: the loop's.
        deadline: monotonic seconds after which the owner calls ``give_up``.

    Attributes:
        numbers: the answer; None where there is none.
        is_over: whether there will be no other.
    """

    def __init__(self, path: str, poller: Poller, deadline: float) -> None:
        self.deadline = deadline
        self.numbers: Numbers | None = None
        self.is_over = False
        self._path = path
        self._poller = poller
        self._handlers = list(_HANDLERS)
        self._handler = ""
        self._socket: Socket | None = None
        self._unsent = b""
        self._tail = bytearray()
        self._received = 0
        self._has_lost_calls = False
        self._on_done: Callable[[], None] = _nothing

    @classmethod
    def to_process(cls, hook_prefix: str, pid: int, poller: Poller, now: float) -> NumbersQuery:
        """A query to a process of a rank with this ``SAFERUN_HOOK``. ``now``: in monotonic seconds."""
        return cls(f"{hook_prefix}.{pid}.sock", poller, now + _DEADLINE_S)

    def begin(self, on_done: Callable[[], None]) -> None:
        """Ask. ``on_done`` is called once, perhaps at once, and not after ``give_up``."""
        self._on_done = on_done
        self._next()

    def give_up(self) -> None:
        """The time is over. What has been answered counts."""
        self.is_over = True
        self._on_done = _nothing
        self._close()

    def _next(self) -> None:
        """Ask the next handler."""
        self._close()
        if not self._handlers:
            self.is_over = True
            self._on_done()
            return
        handler = self._handler = self._handlers.pop(0)
        self._unsent = (
            f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
        )
        self._tail.clear()
        self._received = 0
        self._has_lost_calls = False
        try:
            self._socket = Socket(AF_UNIX)
            self._socket.setblocking(False)
            self._socket.connect(self._path)
            self._send()
        except OSError:
            # No such socket, or one whose owner does not take connections in.
            self._handlers.clear()
            self._next()
            return
        self._poller.watch(self._socket.fileno(), self._on_ready)

    def _send(self) -> None:
        assert self._socket is not None  # noqa: S101 - it is connected
        # The question is far smaller than any socket's buffer.
        sent = self._socket.send(self._unsent)
        if sent != len(self._unsent):
            raise OSError("the question does not fit")

    def _on_ready(self) -> None:
        assert self._socket is not None  # noqa: S101 - it is watched
        try:
            chunk = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self._received += len(chunk)
        self._tail += chunk
        if len(self._tail) > 2 * _TAIL_BYTES:
            # (What is long may also be the list of groups.)
            self._has_lost_calls |= self._tail.find(_CALL, 0, len(self._tail) - _TAIL_BYTES + len(_CALL) - 1) >= 0
            del self._tail[:-_TAIL_BYTES]
        if not chunk or self._received > _LIMIT_BYTES:
            self._take(bytes(self._tail))
            self._next()

    def _take(self, text: bytes) -> None:
        """Take the end of an answer."""
        backend = "nccl" if self._handler == _NCCL_CALLS else self._handler.partition(_OF_BACKEND)[2]
        numbers = numbers_of_calls(text, backend) if backend else numbers_from(text, is_cut=self._has_lost_calls)
        if numbers is None:
            return
        if self._handler == _NCCL and not numbers:
            self._handlers += [_OF_BACKEND + name for name in _BACKENDS]
        elif self._handler == _NCCL and any(enqueued < completed for enqueued, completed in numbers.values()):
            self._handlers.append(_NCCL_CALLS)
        elif backend and numbers:
            self._handlers.clear()
        # Two handlers may call different groups alike.
        self.numbers = {
            **(self.numbers or {}),
            **{f"{self._handler}:{group}": pair for group, pair in numbers.items()},
        }

    def _close(self) -> None:
        if self._socket is not None:
            self._poller.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None


def numbers_from(text: bytes, *, is_cut: bool = False) -> Numbers | None:
    """The sequence numbers that the end of an answer holds; None where it holds none.

    Of a group that is not known to have an open call the last enqueued number is taken for completed.

    Args:
        text: the end of the answer.
        is_cut: whether there were more calls before it.
    """
    _, found, rest = text.rpartition(b'"pg_status":')
    if not found:
        return None
    try:
        status, _ = json.JSONDecoder().raw_decode(rest.decode(errors="replace").lstrip())
        numbers = {
            str(group): (_number(entry["last_enqueued_collective"]), _number(entry["last_completed_collective"]))
            for group, entry in list(status.items())[:_GROUPS]
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    seem_open = [group for group, (enqueued, completed) in numbers.items() if enqueued > completed]
    have_open = _with_open_calls(text, is_cut=is_cut) if seem_open else None
    if have_open is not None:
        numbers.update({group: (numbers[group][0], numbers[group][0]) for group in seem_open if group not in have_open})
    return numbers


def _with_open_calls(text: bytes, *, is_cut: bool) -> set[str] | None:
    """The groups of which an answer holds an open call; None where it came without calls that can be read."""
    try:
        by_group = _by_group(_calls(text))
        found = {group for group, calls in by_group.items() if not all(map(_is_over, _without_members(calls)))}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set() if is_cut else None
    return found if by_group or is_cut else None


def _calls(text: bytes) -> list[dict[str, Any]]:
    """The calls that the end of an answer holds whole."""
    begin, end = text.find(_CALL), text.rfind(b'}],"nccl_comm_state"')
    calls: list[dict[str, Any]] = json.loads(b"[" + text[begin : end + 1] + b"]") if 0 <= begin < end else []
    return calls


def _by_group(calls: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        found.setdefault(str(call["pg_id"]), []).append(call)
    return found


def _without_members(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a group without those that were made as one: the entry behind them has their state."""
    kept: list[dict[str, Any]] = []
    for call in calls:
        op = call["profiling_name"].rpartition(":")[2]
        if kept and op.endswith(_AS_ONE) and (op == _AS_ONE or not kept[-1]["is_p2p"]):
            # Sends and receives have numbers of their own.
            is_p2p = kept[-1]["is_p2p"]
            name = "p2p_seq_id" if is_p2p else "collective_seq_id"
            while kept and kept[-1]["is_p2p"] is is_p2p and kept[-1][name] == call[name]:
                kept.pop()
        kept.append(call)
    return kept


def numbers_of_calls(text: bytes, backend: str) -> Numbers | None:
    """The same of a recorder of a backend's own, from its newest calls; None where there are none of this backend.

    What counts is the place in the recorder: the newest call, and the last before the first that is not over. A send or
    receive that is not over counts where it comes after one that is: within a batch they never are.
    """
    try:
        own = [call for call in _calls(text) if call["profiling_name"].startswith(f"{backend}:")]
        by_group = _by_group(own)
        numbers: Numbers = {}
        for group in dict.fromkeys(str(call["pg_id"]) for call in own[-_GROUPS:]):
            newest = max(_number(call["record_id"]) for call in by_group[group])
            theirs = _without_members(by_group[group])
            tells = {call["is_p2p"] for call in theirs if _is_over(call)} | {False}
            waiting = [_number(call["record_id"]) for call in theirs if not _is_over(call) and call["is_p2p"] in tells]
            numbers[group] = (newest, min(waiting) - 1 if waiting else newest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return numbers or None


def _is_over(call: dict[str, object]) -> bool:
    return call["retired"] is True or call["state"] == "completed"


def _number(value: object) -> int:
    number = int(value) if isinstance(value, (int, str)) else -1
    if abs(number) > _NUMBER_LIMIT:
        raise ValueError("no sequence number")
    return number


def _nothing() -> None:
    """Nothing waits for it."""


__all__ = ["NumbersQuery", "numbers_from", "numbers_of_calls"]
