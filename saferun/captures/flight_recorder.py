"""torch's Flight Recorder of a rank: which collectives it has called, in which process groups, and how far it came.

The hook in the rank has opened torch's worker server on a Unix socket. Its threads answer without the interpreter, so
that a rank is readable while it hangs in C code too. Everything that comes over the socket is taken for untrusted.

Source: ``torch/csrc/distributed/c10d/FlightRecorder*.hpp`` and ``control_plane/`` (2.4 to 2.13).
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from saferun.captures.wire import Target
from saferun.evidence import CollectiveCall, Frame, GroupProgress, RankCollectives
from saferun.model import Value
from saferun.text.decoding import loads

REPLY_LIMIT_BYTES = 16 << 20
_RECORDERS = {"fr_trace_json": "gloo", "dump_nccl_trace_json": "nccl"}
"""torch's names of its recorders, and whose calls each keeps; a process may have both."""
# Ranks are asked at the same time, and their answers read one after the other: values take many times their JSON.
_READING = threading.Lock()
_NO_SOCKET = "it has no process group yet, or a torch without a worker server"
_NEWEST_CALLS = 20
_OLDEST_WAITING_CALLS = 4
_GROUPS_LIMIT = 256
_FRAMES_LIMIT = 16
_RANKS_LIMIT = 1 << 16
_TEXT_LIMIT = 200
_NUMBER_LIMIT = 1 << 62
_SOCKETS_LIMIT = 8
_OP_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""What the recorder calls otherwise than the user did."""


class NoAnswerError(Exception):
    """Why one socket gave nothing, in words."""


# ------------------------------------------------------------------------------------------------------------- to look


def capture_flight_recorder(target: Target, deadline: float) -> tuple[RankCollectives, bytes]:
    """The Flight Recorder of a rank, and what it is made of for the file. Never raises.

    The bytes are one JSON object: name of the recorder -> what torch answered; empty where nothing did. Of several
    processes of the rank the rank's own comes first, then the lowest number.

    Args:
        target: the rank, and its hook.
        deadline: in monotonic seconds.
    """
    failure = "the hook is not in this rank" if not target.hook_prefix else _NO_SOCKET
    for path in _sockets(target):
        # One that does not answer leaves time for the next.
        give_up_at = time.monotonic() + max(0.0, deadline - time.monotonic()) * 0.6
        try:
            replies, groups = _ask_recorders(path, give_up_at)
        except NoAnswerError as error:
            failure = str(error)
            continue
        except Exception as error:
            failure = f"its answer makes no sense ({type(error).__name__})"
            continue
        content = b",\n".join(b'"' + name.encode() + b'": ' + reply for name, reply in replies.items())
        return RankCollectives(target.rank, groups), b"{" + content + b"}\n"
    return RankCollectives(target.rank, (), failure), b""


def _sockets(target: Target) -> list[str]:
    if not target.hook_prefix:
        return []
    directory, _, stem = target.hook_prefix.rpartition("/")
    pids = []
    try:
        for name in os.listdir(directory):
            pid = name.removeprefix(f"{stem}.").removesuffix(".sock")
            if name == f"{stem}.{pid}.sock" and pid.isascii() and pid.isdecimal() and os.path.exists(f"/proc/{pid}"):
                pids.append(int(pid))
    except OSError:
        return []
    pids.sort(key=lambda pid: (pid != target.pid, pid))
    return [f"{target.hook_prefix}.{pid}.sock" for pid in pids[:_SOCKETS_LIMIT]]


def _ask_recorders(path: str, deadline: float) -> tuple[dict[str, bytes], tuple[GroupProgress, ...]]:
    """What each recorder has answered, and the groups that it tells of."""
    names = _loads(ask_server(path, "GET", "/handler/", deadline))
    present = [name for name in _RECORDERS if isinstance(names, list) and name in names]
    if not present:
        raise NoAnswerError("this torch has no Flight Recorder that can be asked")
    replies: dict[str, bytes] = {}
    groups: dict[str, GroupProgress] = {}
    failure: NoAnswerError | None = None
    for name in present:
        try:
            reply = ask_server(path, "POST", f"/handler/{name}", deadline)
            for group in _read(reply, name):
                groups.setdefault(group.group, group)
        except NoAnswerError as error:
            failure = error
        else:
            replies[name] = reply
    if failure is not None and not replies:
        raise failure
    return replies, tuple(groups.values())[:_GROUPS_LIMIT]


def _read(reply: bytes, recorder: str) -> tuple[GroupProgress, ...]:
    try:
        with _READING:
            return read_groups(_loads(reply), recorder)
    except MemoryError:
        raise NoAnswerError("its answer takes too much memory") from None


def ask_server(path: str, method: str, resource: str, deadline: float) -> bytes:
    """The body of the answer of a rank's worker server to one HTTP request.

    Raises:
        NoAnswerError: there is none, or it is no answer.
    """
    import socket

    request = f"{method} {resource} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    content = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as link:
            link.settimeout(_left_s(deadline))
            link.connect(path)
            link.sendall(request.encode())
            while len(content) <= REPLY_LIMIT_BYTES:
                link.settimeout(_left_s(deadline))
                chunk = link.recv(1 << 18)
                if not chunk:
                    break
                content += chunk
    except TimeoutError:
        raise NoAnswerError("it does not answer") from None
    except OSError as error:
        raise NoAnswerError(f"its socket cannot be used: {error.strerror or error}") from None
    return _body_of(content)


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _body_of(content: bytearray) -> bytes:
    if len(content) > REPLY_LIMIT_BYTES:
        raise NoAnswerError(f"its answer is longer than {REPLY_LIMIT_BYTES >> 20} MiB")
    head, blank, body = content.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    words = status.split()
    if not blank or len(words) < 2 or not words[0].startswith(b"HTTP/"):  # noqa: PLR2004 - version and status
        raise NoAnswerError("what answers is not torch's worker server")
    if words[1] != b"200":
        raise NoAnswerError(f"it answers with status {_text(words[1].decode(errors='replace'), 16)}")
    for header in headers:
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit() and int(value[:20]) > len(body):
            raise NoAnswerError("its answer breaks off")
    return bytes(body)


def _loads(content: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return loads(content, longest=REPLY_LIMIT_BYTES, most=REPLY_LIMIT_BYTES)
    except ValueError:
        raise NoAnswerError("its answer is no JSON") from None


# ------------------------------------------------------------------------------------------------------------- to read


class _Entry(Value):
    group: tuple[str, str, str]
    pg_id: int
    call: CollectiveCall


def read_groups(content: object, recorder: str) -> tuple[GroupProgress, ...]:
    """What a recorder tells, by process group.

    A group is called ``<backend>:<name>``, for each backend of a group counts for itself. ``enqueued`` is the newest
    collective, ``completed`` the last one before the first that is not complete; calls between two ranks do not count.

    Args:
        content: what its JSON holds.
        recorder: its name.
    """
    if not isinstance(content, dict):
        return ()
    groups: dict[str, GroupProgress] = {}
    for group in _groups_of(content, _RECORDERS.get(recorder, recorder)):
        groups.setdefault(group.group, group)
    return tuple(groups.values())[:_GROUPS_LIMIT]


def _groups_of(content: dict[str, Any], backend: str) -> list[GroupProgress]:
    entries = [entry for entry in (_entry(raw, backend) for raw in _list(content.get("entries"))) if entry is not None]
    calls: dict[tuple[str, str, str], list[CollectiveCall]] = {}
    newest: dict[tuple[str, str, str], int] = {}
    names: dict[int, tuple[str, str, str]] = {0: (backend, "0", "default_pg")}
    for entry in entries:
        kept = calls.setdefault(entry.group, [])
        if not entry.call.is_p2p and entry.call.seq < newest.get(entry.group, 0):
            kept.clear()  # a group of the same name, made after the one before was destroyed, counts from 1 again
        if not entry.call.is_p2p:
            newest[entry.group] = entry.call.seq
        kept.append(entry.call)
        names[entry.pg_id] = entry.group
    statuses = {
        names[int(key)]: status
        for key, status in _dict(content.get("pg_status")).items()
        if isinstance(status, dict) and key.isascii() and key.isdecimal() and len(key) < 10 and int(key) in names  # noqa: PLR2004
    }
    members = _members(content)
    groups = [
        _progress(group, members.get(group[1], ()), calls.get(group, []), statuses.get(group, {}))
        for group in dict.fromkeys([*calls, *statuses])
    ]
    return [group for group in groups if group.calls or group.enqueued >= 0]


def _progress(
    group: tuple[str, str, str], ranks: tuple[int, ...], calls: list[CollectiveCall], status: dict[str, Any]
) -> GroupProgress:
    backend, name, description = group
    collectives = [call for call in calls if not call.is_p2p]
    enqueued = max((call.seq for call in collectives), default=-1)
    # The members of a coalesced call have one number, and only one of them is marked when it is complete.
    done = {call.seq for call in collectives if call.retired}
    waiting = [call.seq for call in collectives if call.seq not in done]
    completed = min(waiting) - 1 if waiting else enqueued
    started = -1
    # Some backends count sends and receives there too: then these numbers are others than those of the calls.
    if enqueued in {-1, _number(status.get("last_enqueued_collective"))}:
        enqueued = max(enqueued, _number(status.get("last_enqueued_collective")))
        started = _number(status.get("last_started_collective"))
        completed = max(completed, _number(status.get("last_completed_collective")))
    shown = _worth_keeping(calls, done)
    return GroupProgress(f"{backend}:{name}", description, ranks, enqueued, started, min(completed, enqueued), shown)


def _worth_keeping(calls: list[CollectiveCall], done: set[int]) -> tuple[CollectiveCall, ...]:
    """The newest, and the first of those that wait: a GPU may be hundreds of calls behind its rank."""
    since = max(0, len(calls) - _NEWEST_CALLS)
    waiting = [call for call in calls[:since] if not call.retired and (call.is_p2p or call.seq not in done)]
    return tuple(waiting[:_OLDEST_WAITING_CALLS] + calls[since:])


def _members(content: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Process group's name -> ranks, where torch tells them: ``{"name": "0", "ranks": "[0, 1]"}``."""
    members = {}
    for key, raw in _dict(content.get("pg_config")).items():
        config = _dict(raw)
        ranks = config.get("ranks")
        if isinstance(ranks, str) and len(ranks) <= _RANKS_LIMIT * 8:
            try:
                ranks = loads(ranks)
            except ValueError:
                continue
        numbers = [rank for rank in _list(ranks)[:_RANKS_LIMIT] if type(rank) is int and 0 <= rank < _NUMBER_LIMIT]
        members[_text(config.get("name") or key)] = tuple(dict.fromkeys(numbers))
    return members


def _entry(raw: Any, backend: str) -> _Entry | None:  # noqa: ANN401 - JSON
    if not isinstance(raw, dict):
        return None
    name_and_description = [*_list(raw.get("process_group")), "", ""]
    own_backend, colon, op = _text(raw.get("profiling_name")).rpartition(":")
    is_p2p = raw.get("is_p2p") is True
    call = CollectiveCall(
        _number(raw.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        _OP_NAMES.get(op, op),
        _text(json.dumps(raw.get("input_sizes", []))),
        raw.get("retired") is True or raw.get("state") == "completed",
        is_p2p,
        _number(raw.get("time_created_ns")),
        tuple(_frame(frame) for frame in _list(raw.get("frames"))[:_FRAMES_LIMIT] if isinstance(frame, dict)),
    )
    if not op or call.seq < 0:
        return None
    group = (own_backend if colon else backend, _text(name_and_description[0]), _text(name_and_description[1]))
    return _Entry(group, _number(raw.get("pg_id")), call)


def _frame(raw: dict[str, Any]) -> Frame:
    return Frame(_text(raw.get("name")), _text(raw.get("filename"), 1024), max(0, _number(raw.get("line"))))


def _list(raw: Any) -> list[Any]:  # noqa: ANN401 - JSON
    return raw if isinstance(raw, list) else []


def _dict(raw: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return raw if isinstance(raw, dict) else {}


def _number(raw: Any) -> int:  # noqa: ANN401 - JSON
    """A number, also one that is written as text; -1 for anything else."""
    if isinstance(raw, str) and raw.isascii() and raw.isdecimal() and len(raw) < 19:  # noqa: PLR2004 - fits 64 bits
        raw = int(raw)
    return raw if type(raw) is int and 0 <= raw < _NUMBER_LIMIT else -1


def _text(raw: Any, limit: int = _TEXT_LIMIT) -> str:  # noqa: ANN401 - JSON
    """A text that can be shown on a line; empty for anything else."""
    return "".join(letter if letter.isprintable() else "?" for letter in raw[:limit]) if isinstance(raw, str) else ""
