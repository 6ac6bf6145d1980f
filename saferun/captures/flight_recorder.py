"""torch's Flight Recorder of a rank: which collectives it has called, in which process groups, and how far it got.

The hook in the rank has opened torch's worker server on a Unix socket. Its threads respond without the interpreter,
even while the rank hangs in C code. Everything that comes over the socket is untrusted.

Limits: collectives in a CUDA graph are neither recorded when it is captured nor when it is replayed, except for
    members of coalesced ones when it is captured. NCCL's recorder queries the GPU for the state of each call that is
    not retired, which fails if the GPU has failed (HTTP status 500). While a graph is captured in CUDA's default mode
    no thread may do that: torch begins a capture when its watchdog has retired all calls, so that a dump then queries
    nothing. That is by its source, and has not been tried on a GPU. A rank is queried only when it hangs or on request.

Source: ``torch/csrc/distributed/c10d/control_plane/Handlers.cpp``, ``FlightRecorderCuda.cpp`` (2.4 to 2.15),
``FlightRecorderDetail.hpp`` (``update_state``, ``retire_id``), ``CUDAGraph::num_pending_event_queries``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from saferun.captures.plain_pickle import read_pickle
from saferun.captures.recorder_content import GROUPS_LIMIT, read_groups
from saferun.captures.wire import CaptureTarget
from saferun.errors import printable
from saferun.evidence.job_evidence import GroupProgress, RankCollectives
from saferun.text.decoding import loads

REPLY_LIMIT_BYTES = 16 << 20
_ANY_BACKEND = "fr_trace_json"
_NCCL_JSON = "dump_nccl_trace_json"
_NCCL_PICKLE = "dump_nccl_trace_pickle"
_BACKENDS = ("nccl2", "nccl-lazy", "ncclx", "rcclx", "xccl", "nccl-legacy", "nccl")
"""Backends that may have a recorder of their own, since torch 2.15. For an unknown name torch creates one."""
# Ranks are queried in parallel, and their answers decoded one at a time: values take many times their JSON.
_READING = threading.Lock()
_NO_SOCKET = "it has no process group yet, or a torch without a worker server"
_LIMITS = "pids.max, ulimit -u, -v or -d, vm.overcommit_memory"
_SOCKETS_LIMIT = 8
_ONLY_ACTIVE = "?onlyactive=true"
_NUMBERS = "?includecollectives=false"
_OF_BACKEND = "?backend="


class NoAnswerError(Exception):
    """A socket gave no answer; the message says why."""


class LeftOutError(NoAnswerError):
    """The rank has no worker server, and will have none: its hook has found too little room for the threads."""

    def __init__(self) -> None:
        super().__init__(f"a limit ({_LIMITS}) leaves too little room for torch's worker server")


class ErrorAnswerError(NoAnswerError):
    """It answered with an HTTP status that is an error."""


# ------------------------------------------------------------------------------------------------------------- to look


def capture_flight_recorder(target: CaptureTarget, deadline: float) -> tuple[RankCollectives, bytes]:
    """Query a rank's Flight Recorder. Returns the collectives, and the raw dump for the file. Never raises.

    The dump is one JSON object: name of the recorder -> torch's answer; empty if there was none. If several processes
    of the rank have a socket, the rank itself comes first, then the lowest pid.

    Args:
        target: the rank, and its hook.
        deadline: in monotonic seconds.
    """
    failure = "the hook is not in this rank" if not target.hook_prefix else _NO_SOCKET
    for path in sockets_of(target):
        # Leave time for the next socket.
        give_up_at = time.monotonic() + max(0.0, deadline - time.monotonic()) * 0.6
        try:
            recorders = _Recorders(path, give_up_at)
            recorders.ask()
        except NoAnswerError as error:
            failure = str(error)
            continue
        except Exception as error:
            failure = f"its answer is invalid ({type(error).__name__})"
            continue
        content = b",\n".join(b'"' + name.encode() + b'": ' + reply for name, reply in recorders.replies.items())
        groups = tuple(recorders.groups.values())[:GROUPS_LIMIT]
        found = RankCollectives(target.rank, groups, "", recorders.incomplete, recorders.has_failed)
        return found, b"{" + content + b"}\n"
    return RankCollectives(target.rank, (), failure), b""


def sockets_of(target: CaptureTarget) -> list[str]:
    """The sockets of a rank's worker servers: its own first, then those of other processes of it."""
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


class _Recorders:
    """The recorders of one process.

    Args:
        path: the socket.
        deadline: in monotonic seconds.

    Attributes:
        replies: the JSON of each, by its name.
        groups: their groups, by name.
        incomplete: what is missing, and why.
        has_failed: whether NCCL's answered with an error.
    """

    def __init__(self, path: str, deadline: float) -> None:
        self.replies: dict[str, bytes] = {}
        self.groups: dict[str, GroupProgress] = {}
        self.incomplete = ""
        self.has_failed = False
        self._path = path
        self._deadline = deadline
        self._failure: NoAnswerError | None = None

    def ask(self) -> None:
        """Query all of them.

        Raises:
            NoAnswerError: none answered.
        """
        names = _loads(ask_server(self._path, "GET", "/handler/", self._deadline))
        present = names if isinstance(names, list) else []
        if not {_ANY_BACKEND, _NCCL_JSON, _NCCL_PICKLE}.intersection(name for name in present if type(name) is str):
            raise NoAnswerError("this torch has no Flight Recorder that can be asked")
        if _ANY_BACKEND in present:
            self._ask(_ANY_BACKEND, share=0.6 if _NCCL_JSON in present else 1.0)
        if _NCCL_JSON in present:
            self._ask_nccl()
        elif _NCCL_PICKLE in present and not self.groups:
            self._ask(_NCCL_PICKLE, "?includestacktraces=false")
        if _ANY_BACKEND in self.replies:
            self._ask_backends()
        if self._failure is not None and not self.replies:
            raise self._failure

    def _ask(self, handler: str, query: str = "", share: float = 1.0) -> tuple[str, ...] | None:
        """Query one, for a share of the remaining time. Returns the names of its groups; None if it did not answer.

        Raises nothing: the last error is kept.
        """
        deadline = time.monotonic() + _left_s(self._deadline, 0.0) * share
        try:
            reply = ask_server(self._path, "POST", f"/handler/{handler}{query}", deadline)
            if reply == self.replies.get(handler):
                return tuple(self.groups)
            groups, reply = _read(handler, reply, only_active=query == _ONLY_ACTIVE)
        except NoAnswerError as error:
            self._failure = error
            return None
        if query.startswith(_OF_BACKEND) and not any(group.group not in self.groups for group in groups):
            return tuple(group.group for group in groups)
        for group in groups:
            self.groups.setdefault(group.group, group)
        self.replies[handler + query] = reply
        return tuple(group.group for group in groups)

    def _ask_nccl(self) -> None:
        """Query NCCL's recorder: all calls; else incomplete ones; else sequence numbers, without GPU queries."""
        before = self._failure
        if self._ask(_NCCL_JSON, share=0.6) is not None:
            return
        why = self._failure
        self.has_failed = isinstance(why, ErrorAnswerError)
        for query, left in ((_ONLY_ACTIVE, "the calls that are over"), (_NUMBERS, "its calls")):
            if self._ask(_NCCL_JSON, query, share=0.6) is not None:
                self.incomplete = f"NCCL's recorder has not sent {left}: {why}"
                self._failure = before
                return
        self._failure = why

    def _ask_backends(self) -> None:
        """Query the backends' own recorders. A torch without them returns the same answer for each."""
        for backend in _BACKENDS:
            known = {*self.groups}
            groups = self._ask(_ANY_BACKEND, _OF_BACKEND + backend, share=0.6)
            if groups is None or (groups and known.issuperset(groups)):
                break


def _read(handler: str, reply: bytes, *, only_active: bool) -> tuple[tuple[GroupProgress, ...], bytes]:
    """Decode a reply. Returns its groups, and the reply as JSON."""
    try:
        with _READING:
            if handler != _NCCL_PICKLE:
                return read_groups(_loads(reply), handler, only_active=only_active), reply
            content = read_pickle(reply)
            return read_groups(content, handler), json.dumps(content).encode()
    except MemoryError:
        raise NoAnswerError("its answer takes too much memory") from None
    except ValueError as error:
        raise NoAnswerError(f"its pickle cannot be read: {error}") from None


def ask_server(path: str, method: str, resource: str, deadline: float) -> bytes:
    """Send one HTTP request to a rank's worker server. Returns the body of the answer.

    Raises:
        NoAnswerError: there is none, or it is malformed.
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
        if os.path.isfile(path):
            raise LeftOutError from None
        raise NoAnswerError(f"its socket cannot be used: {error.strerror or error}") from None
    return _body_of(content)


def _left_s(deadline: float, at_least: float | None = None) -> float:
    left_s = deadline - time.monotonic()
    if at_least is not None:
        return max(left_s, at_least)
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _body_of(content: bytearray) -> bytes:
    if len(content) > REPLY_LIMIT_BYTES:
        raise NoAnswerError(f"its answer is longer than {REPLY_LIMIT_BYTES >> 20} MiB")
    head, blank, body = content.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    fields = status.split()
    if not blank or len(fields) < 2 or not fields[0].startswith(b"HTTP/"):  # noqa: PLR2004 - version and status
        raise NoAnswerError("what answers is not torch's worker server")
    if fields[1] != b"200":
        raise ErrorAnswerError(f"it answers with status {printable(fields[1][:16].decode(errors='replace'))}")
    for header in headers:
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit() and int(value[:20]) > len(body):
            raise NoAnswerError("its answer breaks off")
    return bytes(body)


def _loads(content: bytes) -> Any:  # noqa: ANN401 - JSON
    try:
        return loads(content, longest=REPLY_LIMIT_BYTES, most=REPLY_LIMIT_BYTES)
    except ValueError:
        raise NoAnswerError("its answer is not JSON") from None
