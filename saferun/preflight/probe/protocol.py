"""What a probe and the listener that it tries say to each other: records of one size, both ends proving who they are.

The secret itself is never sent: whoever answers at an address need not be the one that is meant. Each end proves by a
keyed hash (HMAC, RFC 2104) that it knows the secret. After the proofs the records only have a kind.
"""

from __future__ import annotations

import math
import struct

RECORD_BYTES = 64
NONCE_BYTES = 16
_PROOF_BYTES = 32
LARGE_BYTES = 1 << 20
"""The large message. Some 700 full segments of Ethernet: enough to see that one in a hundred is lost, and throughput of
up to about a gigabyte a second. And 8 ms on a network of 1 Gbit/s, so that one of 64 hosts is through with its six
partners in 50 ms for each interface."""
MOST_LARGE = 4
MOST_SMALL = 16

MAGIC = b"saferun\x01"
HELLO, WELCOME, SMALL, LARGE, RECEIVED = b"H", b"W", b"S", b"L", b"R"

_LAYOUT = struct.Struct(f"!8sc7x{NONCE_BYTES}s{_PROOF_BYTES}s")
_CLOCK = struct.Struct("!d8x")


def record(kind: bytes, clock: float = 0.0) -> bytes:
    """A record that proves nothing: for after the proofs. ``clock``: seconds since the epoch, in an answer."""
    return _LAYOUT.pack(MAGIC, kind, _CLOCK.pack(clock), b"")


def clock_of(received: bytes) -> float:
    """The clock in a record."""
    clock = float(_CLOCK.unpack_from(received, RECORD_BYTES - NONCE_BYTES - _PROOF_BYTES)[0])
    return clock if math.isfinite(clock) else 0.0


def hello(token: str, nonce: bytes) -> bytes:
    """What the probe says first. ``nonce``: random, never used before."""
    return _LAYOUT.pack(MAGIC, HELLO, nonce, _proof(token, HELLO, nonce, nonce))


def welcome(token: str, nonce: bytes, clock: float) -> bytes:
    """The listener's answer to a hello with that nonce. ``clock``: seconds since the epoch."""
    content = _CLOCK.pack(clock)
    return _LAYOUT.pack(MAGIC, WELCOME, content, _proof(token, WELCOME, nonce, content))


def kind_of(received: bytes) -> bytes:
    """The kind of a record; empty where it is none."""
    return received[8:9] if len(received) == RECORD_BYTES and received.startswith(MAGIC) else b""


def read_hello(received: bytes, token: str) -> bytes:
    """The nonce of a hello from a host that knows the secret; empty where it is none."""
    if kind_of(received) != HELLO:
        return b""
    _, _, nonce, proof = _LAYOUT.unpack(received)
    return bytes(nonce) if _equal(proof, _proof(token, HELLO, nonce, nonce)) else b""


def read_welcome(received: bytes, token: str, nonce: bytes) -> float | None:
    """The listener's clock, from an answer to a hello with that nonce from a host that knows the secret; else None."""
    if kind_of(received) != WELCOME:
        return None
    _, _, content, proof = _LAYOUT.unpack(received)
    if not _equal(proof, _proof(token, WELCOME, nonce, content)):
        return None
    return clock_of(received)


def _proof(token: str, kind: bytes, nonce: bytes, content: bytes) -> bytes:
    import hmac

    return hmac.digest(token.encode(), kind + nonce + content, "sha256")


def _equal(a: bytes, b: bytes) -> bool:
    import hmac

    return hmac.compare_digest(a, b)
