"""Tries to reach other hosts, interface by interface: small messages first, then a large one.

What fails is tried once more before it is believed: the other host may be busy with importing torch, and a packet may
get lost. What fails takes seconds and what works takes milliseconds, so all routes are tried side by side; but the
large messages go one after the other, because they would slow each other down.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from saferun.linux.nic import Nic
from saferun.model import Value
from saferun.preflight.probe.listener import sockaddr
from saferun.preflight.probe.protocol import (
    LARGE,
    LARGE_BYTES,
    MOST_LARGE,
    NONCE_BYTES,
    RECEIVED,
    RECORD_BYTES,
    SMALL,
    clock_of,
    hello,
    kind_of,
    read_welcome,
    record,
)
from saferun.preflight.probe.routes import NO_SOURCE, holders_of, is_unanswered, source_for
from saferun.preflight.results import Probe, ProbeTarget

CONNECT_TIMEOUT_S = 3.5
"""Linux sends the first packet of a connection again after one second and after three: a lossy route gets three tries.
And a kernel that has found no host on the link gives up after 3.1 s."""
ANSWER_TIMEOUT_S = 3.5
LARGE_TIMEOUT_S = 2.5
"""A large message takes 0.8 s on a network of 10 Mbit/s. What has not arrived after this time counts as far as it
has."""
_TRIES = 2
_PAUSE_S = 0.25
_SMALL_MESSAGES = 3
# The other clock is known to half of that, and what is wrong with it adds up from host to host.
_CLOCK_LATENCY_S = 0.25
# A large message that takes longer may have met a busy host, and is worth another look; one that takes much longer is
# not.
_SLOW_S = 0.005
_VERY_SLOW_S = 0.2
# Whoever stalls does not hold up the others.
_ALONE_S = 0.25
_THREADS = 32
_CONTENT = bytes(256 << 10)

# linux/tcp.h: struct tcp_info.
_TOTAL_RETRANS_AT = 100
_DATA_SEGS_OUT_AT = 156
_TIOCOUTQ = 0x5411

_KINDS = {
    errno.ECONNREFUSED: ("refused", "connection refused"),
    errno.ETIMEDOUT: ("timeout", "no answer"),
    errno.EHOSTUNREACH: ("no_route", "no route to host"),
    errno.EHOSTDOWN: ("no_route", "host is down"),
    errno.ENETUNREACH: ("unreachable", "network is unreachable"),
    errno.ENETDOWN: ("unreachable", "network is down"),
    errno.EADDRNOTAVAIL: ("unreachable", "cannot assign requested address"),
    errno.ENODEV: ("unreachable", "this host has no such interface"),
    errno.ENXIO: ("unreachable", "this host has no such interface"),
    errno.EACCES: ("no_route", "this host's own firewall forbids it"),
    errno.EPERM: ("no_route", "this host's own firewall forbids it"),
}
# This host itself has no room, for a descriptor or for packets.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class _Route(Value):
    """One address of one host."""

    target: ProbeTarget
    nic: str
    address: str


class _Failed(Exception):  # noqa: N818 - it is an outcome
    """Why a route does not work, as a kind and in words."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def probe_all(source: int, targets: Sequence[ProbeTarget], nics: Sequence[Nic], deadline: float) -> list[Probe]:
    """Try all routes to some hosts, and say of each what came of it.

    A healthy route takes a few milliseconds, one that does not answer seven seconds, and all of them side by side.

    Args:
        source: the number of this host.
        targets: the hosts; where one of them is this host itself, that is tried too.
        nics: this host's interfaces.
        deadline: in monotonic seconds. Routes of which nothing is known by then are left out, and those for which this
            host has no room itself.

    Returns:
        One for each route, in order.
    """
    routes = [_Route(target, nic, address) for target in targets for nic, address in target.endpoint.routes]
    prober = _Prober(source, routes, nics, deadline)
    threads: list[threading.Thread] = []
    for _ in range(min(len(routes), _THREADS)):
        thread = threading.Thread(target=prober.work, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there can be no more
            break
        threads.append(thread)
    if not threads:
        prober.work()
    for thread in threads:
        # Each keeps to the deadline itself.
        thread.join(max(deadline - time.monotonic(), 0.0) + _PAUSE_S)
    return [prober.found[route] for route in routes if route in prober.found]


class _Prober:
    """What the threads share."""

    def __init__(self, source: int, routes: Sequence[_Route], nics: Sequence[Nic], deadline: float) -> None:
        self._source = source
        self._nics = nics
        self._deadline = deadline
        self._waiting = list(reversed(routes))
        self._lock = threading.Lock()
        self._large = threading.Lock()
        self.found: dict[_Route, Probe] = {}

    def work(self) -> None:
        """Try routes until there are no more, or no time."""
        while time.monotonic() < self._deadline:
            with self._lock:
                if not self._waiting:
                    return
                route = self._waiting.pop()
            self._try(route)

    def _try(self, route: _Route) -> None:
        from_nic, own = source_for(route.nic, route.address, self._nics)
        first = ""
        for number in range(_TRIES):
            asked_at = time.monotonic()
            result = Probe(self._source, route.target.host, route.nic, route.address, from_nic)
            try:
                with _dial(route, own, from_nic, self._deadline) as connection:
                    conversation = _Conversation(connection, route.target.endpoint.token, self._deadline)
                    result = conversation.run(result, self._large)
            except _Failed as failed:
                result = result._replace(kind=failed.kind, message=failed.message)
            except OSError as error:
                if error.errno in _SHORTAGES:
                    self.found.pop(route, None)  # only what fails twice is believed
                    time.sleep(_PAUSE_S)
                    continue
                result = result._replace(kind="broken", message=_strerror(error))
            result = self._recognised(result)
            if result.kind == "ok":
                message = f"{first} at first" if first and not result.message else result.message
                self.found[route] = result._replace(message=message)
                return
            first = first or result.message
            now = time.monotonic()
            if now >= self._deadline and _is_impatient(result, now - asked_at):
                # It was given less time than it may take.
                return
            self.found[route] = result
            if number + 1 < _TRIES:
                if now + _PAUSE_S >= self._deadline:
                    return
                time.sleep(_PAUSE_S)

    def _recognised(self, result: Probe) -> Probe:
        """Refusals and strangers at an address that this host has itself come from itself."""
        if result.kind in {"refused", "stranger"}:
            own = holders_of(result.address, self._nics)
            if own:
                return result._replace(kind="self", message=f"this host has that address itself, on {own[0]}")
        return result


def _is_impatient(result: Probe, took_s: float) -> bool:
    return result.kind in {"timeout", "silent", "black_hole"} and took_s < min(ANSWER_TIMEOUT_S, LARGE_TIMEOUT_S)


# -------------------------------------------------------------------------------------------------------- a connection


class _Turn:
    """The time in which a host sends one large message alone; who stalls gives it up."""

    def __init__(self, lock: threading.Lock, deadline: float) -> None:
        self._lock = lock
        self._holds = lock.acquire(timeout=max(deadline - time.monotonic(), 0.0))
        self._ends_at = time.monotonic() + _ALONE_S

    def until(self, now: float, give_up_at: float) -> float:
        """When to look again."""
        if self._holds and now >= self._ends_at:
            self.end()
        return min(give_up_at, self._ends_at) if self._holds else give_up_at

    def end(self) -> None:
        """The next one's turn."""
        if self._holds:
            self._holds = False
            self._lock.release()


def _dial(route: _Route, own: str, from_nic: str, deadline: float) -> socket.socket:
    asked_at = time.monotonic()
    connection = socket.socket(socket.AF_INET6 if ":" in route.address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(_patience_s(CONNECT_TIMEOUT_S, deadline))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if own != NO_SOURCE:
            connection.bind(sockaddr(own, 0, from_nic))
        connection.connect(sockaddr(route.address, route.target.endpoint.port, from_nic or route.nic))
    except OverflowError:
        connection.close()
        raise _Failed("refused", f"{route.target.endpoint.port} is no port") from None
    except OSError as error:
        connection.close()
        if error.errno in _SHORTAGES:
            raise
        raise _why(error, route.address, time.monotonic() - asked_at) from None
    return connection


def _why(error: OSError, address: str, took_s: float) -> _Failed:
    if isinstance(error, TimeoutError):
        return _Failed("timeout", f"no answer within {took_s:.1f} s")
    kind, message = _KINDS.get(error.errno or 0, ("broken", _strerror(error)))
    if kind == "no_route" and error.errno == errno.EHOSTUNREACH and is_unanswered(address, took_s):
        return _Failed("timeout", "no host on the link answers for that address")
    return _Failed(kind, message)


def _strerror(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _patience_s(timeout_s: float, deadline: float) -> float:
    return max(min(timeout_s, deadline - time.monotonic()), 0.001)


class _Conversation:
    """What is said on one connection."""

    def __init__(self, connection: socket.socket, token: str, deadline: float) -> None:
        self._connection = connection
        self._token = token
        self._deadline = deadline

    def run(self, result: Probe, large: threading.Lock) -> Probe:
        """Prove and be proven to, then messages.

        Args:
            result: what is known so far.
            large: who sends a large message holds it.

        Raises:
            _Failed: the route does not work.
            OSError: the connection broke.
        """
        # The shortest exchange gives the latency, and most exactly what the other clock says.
        latency_s, clock_s = min([self._meet(), *(self._exchange() for _ in range(_SMALL_MESSAGES))])
        result = result._replace(latency_s=latency_s, clock_s=clock_s if latency_s < _CLOCK_LATENCY_S else 0.0)
        for _ in range(MOST_LARGE - 1):
            took_s, size_bytes = self._send_large(large)
            result = result._replace(bytes_s=max(result.bytes_s, size_bytes / max(took_s - latency_s, took_s / 8)))
            if size_bytes < LARGE_BYTES:
                part = f"{size_bytes / LARGE_BYTES:.0%} of {LARGE_BYTES >> 20} MiB came through in {took_s:.1f} s"
                result = result._replace(message=part)
            if not _SLOW_S < took_s < _VERY_SLOW_S:
                break
        retransmits, segments = self._counts()
        return result._replace(retransmits=retransmits, segments=segments)

    def _meet(self) -> tuple[float, float]:
        """The time it took, and how far the other clock is ahead."""
        nonce = os.urandom(NONCE_BYTES)
        began_at, clock = time.monotonic(), time.time()
        try:
            self._connection.sendall(hello(self._token, nonce))
            answer = self._receive()
        except TimeoutError:
            if self._unacknowledged_bytes():
                raise _Failed("timeout", "the connection is accepted, and then nothing comes through") from None
            raise _Failed("silent", "the connection is accepted, but no data is received") from None
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise
            raise _Failed("stranger", f"the connection is accepted, then {_strerror(error)}") from None
        took_s = time.monotonic() - began_at
        theirs = read_welcome(answer, self._token, nonce)
        if theirs is None:
            message = (
                "another machine or program answers"
                if answer
                else "the connection is accepted and closed without an answer"
            )
            raise _Failed("stranger", message)
        return took_s, theirs - (clock + took_s / 2)

    def _exchange(self) -> tuple[float, float]:
        """The same, of a small message."""
        began_at, clock = time.monotonic(), time.time()
        try:
            self._connection.sendall(record(SMALL))
            answer = self._receive()
        except TimeoutError:
            raise _Failed("timeout", f"no answer within {ANSWER_TIMEOUT_S} s any more") from None
        took_s = time.monotonic() - began_at
        if kind_of(answer) != SMALL:
            raise _Failed("broken", "closed midway")
        return took_s, clock_of(answer) - (clock + took_s / 2)

    def _receive(self) -> bytes:
        """A record; shorter where the connection was closed."""
        give_up_at = min(time.monotonic() + ANSWER_TIMEOUT_S, self._deadline)
        received = b""
        while len(received) < RECORD_BYTES:
            self._connection.settimeout(_patience_s(ANSWER_TIMEOUT_S, give_up_at))
            chunk = self._connection.recv(RECORD_BYTES - len(received))
            if not chunk:
                break
            received += chunk
        return received

    def _send_large(self, large: threading.Lock) -> tuple[float, int]:
        """How long it took, and how much of it has arrived.

        Raises:
            _Failed: nothing of it has.
        """
        turn = _Turn(large, self._deadline)
        began_at = time.monotonic()
        try:
            is_received, left_bytes = self._push(turn, min(began_at + LARGE_TIMEOUT_S, self._deadline))
        finally:
            turn.end()
        took_s = time.monotonic() - began_at
        if is_received:
            return took_s, LARGE_BYTES
        arrived_bytes = LARGE_BYTES - left_bytes - self._unacknowledged_bytes()
        if arrived_bytes <= 0:
            raise _Failed("black_hole", f"small messages come through, and nothing of a large one in {took_s:.1f} s")
        return took_s, arrived_bytes

    def _push(self, turn: _Turn, give_up_at: float) -> tuple[bool, int]:
        """Send, and wait for the answer. Whether it came, and how much could not even be sent."""
        connection = self._connection
        connection.setblocking(False)
        poll = select.poll()
        poll.register(connection, select.POLLIN | select.POLLOUT)
        connection.send(record(LARGE))
        left_bytes = LARGE_BYTES
        while (now := time.monotonic()) < give_up_at:
            until = turn.until(now, give_up_at)
            for _, event in poll.poll(max((until - now) * 1000, 1)):
                if event & ~select.POLLOUT:
                    if left_bytes or kind_of(connection.recv(RECORD_BYTES)) != RECEIVED:
                        raise _Failed("broken", "closed midway")
                    return True, 0
                left_bytes -= connection.send(memoryview(_CONTENT)[:left_bytes])
                if not left_bytes:
                    poll.modify(connection, select.POLLIN)
        return False, left_bytes

    def _unacknowledged_bytes(self) -> int:
        import fcntl

        answer = fcntl.ioctl(self._connection, _TIOCOUTQ, bytes(4))
        return int.from_bytes(answer, "little")

    def _counts(self) -> tuple[int, int]:
        """Segments that were sent again, and all that carried something; zeros where the kernel does not say."""
        try:
            info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            return 0, 0
        if len(info) < _DATA_SEGS_OUT_AT + 4:
            return 0, 0
        retransmits = int.from_bytes(info[_TOTAL_RETRANS_AT : _TOTAL_RETRANS_AT + 4], "little")
        return retransmits, int.from_bytes(info[_DATA_SEGS_OUT_AT : _DATA_SEGS_OUT_AT + 4], "little")
