"""Whether a host is up whose port does not answer, by TCP connections to other ports; a ping would need root.

Whatever answers there, be it with a refusal, is proof that the host is up; silence proves nothing.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from saferun.model import Value

# sshd's port, which is open on most hosts of clusters, and one beside the port in question, which is closed on most.
_SSH_PORT = 22
_LAST_PORT = 65535
_TIMEOUT_S = 2.0
_MOST_ADDRESSES = 4
# How soon a host that was down is probed again.
_AGAIN_S = 10.0
_ANSWERS = frozenset({0, errno.ECONNREFUSED, errno.ECONNRESET})


class ProbedHost(Value):
    """What came of it: the ports that were tried, whether any of them answered, and what the name resolves to."""

    ports: tuple[int, ...] = ()
    is_up: bool = False
    addresses: tuple[str, ...] = ()


class HostProbe:
    """Probes a host, in a thread of its own, again and again until it answers.

    Args:
        host: name or address.
        ports: those that do not answer.
        probe: tries some ports of addresses, and returns whether any of them answers.
    """

    def __init__(
        self, host: str, ports: Sequence[int], probe: Callable[[Sequence[str], Sequence[int]], bool] | None = None
    ) -> None:
        last = max(ports)
        beside = last + 1 if last < _LAST_PORT else last - 1
        self._host = host
        self._ports = tuple(dict.fromkeys((_SSH_PORT, beside)))
        self._probe = probe or answers
        self._lock = threading.Lock()
        self._found: ProbedHost | None = None
        self._at = 0.0
        self._is_probing = False

    def result(self, now: float) -> ProbedHost | None:
        """What is known, at once; starts a probe where one is due. None: nothing yet."""
        with self._lock:
            found = self._found
            is_due = found is None or (not found.is_up and now - self._at > _AGAIN_S)
            if self._is_probing or not is_due:
                return found
            self._is_probing = True
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # no more threads: nothing is known then
            with self._lock:
                self._is_probing = False
        return found

    def _run(self) -> None:
        addresses = _resolve(self._host)
        probed = ProbedHost(self._ports, self._probe(addresses, self._ports), addresses)
        with self._lock:
            self._found, self._at, self._is_probing = probed, time.monotonic(), False


def _resolve(host: str) -> tuple[str, ...]:
    try:
        infos = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(info[4][0]) for info in infos))[:_MOST_ADDRESSES]


def answers(addresses: Sequence[str], ports: Sequence[int]) -> bool:
    """Whether any of these ports answers at any of these addresses, all being tried at the same time."""
    poller = select.poll()
    pending: dict[int, socket.socket] = {}
    try:
        for address in addresses:
            for port in ports:
                connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
                connection.setblocking(False)
                pending[connection.fileno()] = connection
                connection.connect_ex((address, port))
                poller.register(connection, select.POLLOUT)
        until = time.monotonic() + _TIMEOUT_S
        while pending:
            ready = poller.poll(max(until - time.monotonic(), 0.0) * 1000)
            if not ready:
                return False
            for fd, _ in ready:
                poller.unregister(fd)
                with pending.pop(fd) as connection:
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                        return True
    except OSError:
        return False
    finally:
        for connection in pending.values():
            connection.close()
    return False
