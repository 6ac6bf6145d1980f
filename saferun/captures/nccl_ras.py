"""NCCL's RAS subsystem: which communicators the ranks have, and who differs from the others in them.

It is a thread of NCCL (2.24 and newer) in each rank, and needs no hook. It answers over TCP, as a rule at
localhost:28028, where the kernel chooses one of the host's ranks for each connection; that one collects the answers of
all ranks of the job.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable

from saferun.captures.inspection_values import NcclCalls
from saferun.captures.ras_content import LONGEST_BYTES, RasAnswer, lasting, outliers, read_ras
from saferun.captures.scene import Scene
from saferun.linux.memory_limit import limited_memory
from saferun.linux.netlink import own_addresses
from saferun.linux.procfs import read_environ_entry
from saferun.linux.small_files import list_directory, read_bytes, read_link

_DEFAULT = "localhost:28028"
_MOST_ADDRESSES = 4
_TRIES = 4
# Before it has collected anything RAS says its version.
_GREETING_S = 1.0
# RAS waits for those that do not answer five seconds longer than the timeout that it is given.
_COLLECTING_S = 2
_ANSWER_S = 8.0
_WATCHING_S = 4.0
# The time in an answer has no fractions of seconds.
_APART_S = 1.2
_HELLO = b"client protocol 2\n"
_GREETING = b"SERVER PROTOCOL"
_LONGEST_LINE = 4096
_MOST_SETTINGS = 8
_ASK = f"timeout {_COLLECTING_S}\n".encode()
# NCCL before 2.28.7 refuses the format, and answers with a text.
_ASK_JSON = b"set format json\nverbose status\n"
_GPU_NODES = ("/dev/nvidia", "/dev/kfd")


class _NoAnswerError(Exception):
    """There is no answer; the message says why."""


def capture_nccl_ras(scene: Scene) -> None:
    """Emit who differs from the others; two answers are needed for that."""
    for address in _addresses(_pids(scene)):
        started_at = time.monotonic()
        scene.begin("nccl_ras")
        path = failure = ""
        try:
            content, first = _ask(address, _pids(scene), scene.deadline)
            path = scene.write("nccl_ras", content, "txt")
            failure = _compare(scene, address, first)
        except _NoAnswerError as error:
            failure = f"{address}: {error}"
        scene.note("nccl_ras", (-1, 0), started_at, path=path, failure=failure)


def _compare(scene: Scene, address: str, first: RasAnswer) -> str:
    """Emit what differs, in a second answer too. Returns why nothing is known of that."""
    odd = outliers(first)
    if not odd:
        return ""
    time.sleep(min(_APART_S, scene.left_s))
    _, second = _ask(address, _pids(scene), scene.deadline)
    if first.timestamp and first.timestamp == second.timestamp:
        return "NCCL's RAS gives the same old state twice"
    for one in lasting(odd, outliers(second)):
        scene.emit("nccl", one)
    return ""


def launched_calls(pids: Iterable[int]) -> dict[int, tuple[NcclCalls, ...]]:
    """How many calls these processes have launched by now; those of which nothing is known are missing.

    For watching ranks that seem to do nothing: growing numbers mean progress. Never raises, and takes seconds at most.
    """
    found: dict[int, list[NcclCalls]] = {}
    own: set[str] = set()
    known, until = frozenset(pids), time.monotonic() + _WATCHING_S
    for address in _addresses(known):
        try:
            with limited_memory():
                _, answer = _ask(address, known, until)
            # Process ids are those of each host.
            own = own or set(own_addresses())
        except (_NoAnswerError, OSError, MemoryError):
            continue
        for one in answer.communicators:
            for rank in one.ranks:
                pid, host = rank.process.pid, rank.process.host.partition("%")[0]
                if pid in known and host in own and rank.launched >= 0:
                    found.setdefault(pid, []).append(NcclCalls(one.name, rank.launched))
    return {pid: tuple(calls) for pid, calls in found.items()}


def _pids(scene: Scene) -> frozenset[int]:
    return frozenset(process.pid for process in scene.processes)


def _addresses(pids: Iterable[int]) -> list[str]:
    """Where those of the processes answer that use GPUs."""
    found: dict[str, None] = {}
    for pid in sorted(pids):
        if uses_gpus(pid) and read_environ_entry(pid, "NCCL_RAS_ENABLE").strip() != "0":
            found[read_environ_entry(pid, "NCCL_RAS_ADDR").strip() or _DEFAULT] = None
    return list(found)[:_MOST_ADDRESSES]


def uses_gpus(pid: int) -> bool:
    """Whether a process has opened a GPU."""
    return any(read_link(f"/proc/{pid}/fd/{name}").startswith(_GPU_NODES) for name in list_directory(f"/proc/{pid}/fd"))


def _ask(address: str, pids: frozenset[int], deadline: float) -> tuple[bytes, RasAnswer]:
    """The answer about these processes; another try may come to another one.

    Raises:
        _NoAnswerError: there is none.
    """
    failure = _NoAnswerError("no time is left")
    until = min(deadline, time.monotonic() + _ANSWER_S)
    for _ in range(_TRIES):
        if time.monotonic() >= until:
            break
        try:
            content = _answer(address, until)
            answer = read_ras(content)
        except _NoAnswerError as error:
            failure = error
            continue
        except (ValueError, MemoryError) as error:
            failure = _NoAnswerError(f"its answer cannot be read: {error}")
            continue
        # A text names only those that differ.
        if not answer.timestamp or not answer.communicators or any(pid in pids for _, pid in answer.processes):
            return content, answer
        failure = _NoAnswerError("another job answers")
    raise failure


def _answer(address: str, until: float) -> bytes:
    try:
        with _connect(address, until) as link:
            greeting_until = min(until, time.monotonic() + _GREETING_S)
            link.settimeout(_left_s(greeting_until))
            link.sendall(_HELLO)
            greeting = _line(link, greeting_until)
            if not greeting.startswith(_GREETING):
                raise _NoAnswerError("it is not NCCL's RAS that answers")
            if not _is_ours(link):
                raise _NoAnswerError("a process of another user answers")
            link.sendall(_ASK + _ASK_JSON)
            return _content(link, until)
    except TimeoutError:
        raise _NoAnswerError("it does not answer") from None
    except (OSError, UnicodeError) as error:
        raise _NoAnswerError(getattr(error, "strerror", None) or type(error).__name__) from None


def _connect(address: str, until: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):  # noqa: PLR2004 - digits
        raise _NoAnswerError("NCCL_RAS_ADDR is not HOST:PORT")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        # A name server may never answer.
        socket.getaddrinfo(host, int(port), flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        raise _NoAnswerError("NCCL_RAS_ADDR has a name, which is not looked up") from None
    return socket.create_connection((host, int(port)), _left_s(min(until, time.monotonic() + _GREETING_S)))


def _line(link: socket.socket, until: float) -> bytes:
    content = b""
    while not content.endswith(b"\n") and len(content) < _LONGEST_LINE:
        link.settimeout(_left_s(until))
        chunk = link.recv(1)
        if not chunk:
            raise _NoAnswerError("it hangs up")
        content += chunk
    return content


def _content(link: socket.socket, until: float) -> bytes:
    """All until the other end hangs up, without the answers to settings."""
    content = bytearray()
    # So much that what is left without the answers to settings is still too long to be taken for a whole answer.
    while len(content) <= LONGEST_BYTES + _MOST_SETTINGS * _LONGEST_LINE:
        link.settimeout(_left_s(until))
        chunk = link.recv(1 << 18)
        if not chunk:
            break
        content += chunk
    for _ in range(_MOST_SETTINGS):
        if not content.startswith((b"OK", b"ERROR", b"SERVER")):
            break
        line, newline, _ = bytes(content[:_LONGEST_LINE]).partition(b"\n")
        if not newline:
            break
        del content[: len(line) + 1]
    if not content:
        raise _NoAnswerError("it hangs up")
    return bytes(content)


def _is_ours(link: socket.socket) -> bool:
    """Whether the other end of a connection within this host belongs to this user; unknown counts as yes."""
    (host, port), (peer, peer_port) = link.getsockname()[:2], link.getpeername()[:2]
    if host != peer:
        return True
    ends = [f":{peer_port:04X}", f":{port:04X}"]
    for table in ("tcp", "tcp6"):
        for line in read_bytes(f"/proc/self/net/{table}").decode(errors="replace").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 7 and [fields[1][-5:], fields[2][-5:]] == ends:  # noqa: PLR2004 - with its owner
                return fields[7] in {str(os.geteuid()), "0"}
    return True


def _left_s(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
