"""Messages between hosts, signed and sealed with the job secret.

All messages between hosts are values in a store, each under a key that says what it is about: the attempt,
the number of an entry, the host. So a signature over the key and the value cannot be used for anything else, neither in
another attempt nor, as the key for it is derived from what is unique to a job, in another one. A value that is written
again under its key carries a counter, and an older one is not taken for a newer one.

A value is ``MAGIC``, a byte (plain or sealed), the counter (8 bytes), the signature (HMAC with SHA-256, 32 bytes) and
the content, which is encrypted where it may hold evidence or secrets (AES-256-GCM with a random nonce of 96 bits).
What has no valid signature is as if it were not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from saferun.model import Value
from saferun.text.wording import first_line

if TYPE_CHECKING:
    from saferun.cluster.secret import JobSecret

MAGIC = b"\0saferun\x01"
LONGEST_BYTES = 24 << 20
_PLAIN, _SEALED = b"p", b"s"
_COUNTER_BYTES = 8
_SIGNATURE_BYTES = 32
_NONCE_BYTES = 12
_HEAD_BYTES = len(MAGIC) + 1 + _COUNTER_BYTES + _SIGNATURE_BYTES
OVERHEAD_BYTES = _HEAD_BYTES + _NONCE_BYTES + 16
_SHORT_BYTES = 128
# The second part of a key names its kind: records and assignments, states, the log, evidence, failures.
_CONFIDENTIAL = frozenset({"host", "assignment", "state", "log", "chunk", "fail", "missing"})


class Cipher(Protocol):
    """Encrypts, and knows what was changed. As the classes of ``cryptography`` do."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        """The encrypted data."""

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        """The data."""


class CannotSealError(Exception):
    """The library that encrypts is not there, or does not work."""


class Opened(Value):
    """A value whose signature is right."""

    content: bytes
    counter: int


def cipher_of(key: bytes) -> Cipher:
    """What encrypts with a key.

    Raises:
        CannotSealError: there is nothing that can.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(key)
    except BaseException as error:
        # A part in Rust that fails raises what is no Exception.
        raise CannotSealError(f"{type(error).__name__}: {first_line(error, 200)}") from None


def is_confidential(key: str) -> bool:
    """Whether what stands under a key is encrypted."""
    kind = key.split("/", 2)[1:2]
    return bool(kind) and kind[0] in _CONFIDENTIAL


def is_signed(stored: bytes) -> bool:
    """Whether a stored value has a signature, right or wrong."""
    return stored.startswith(MAGIC)


def unverified(stored: bytes) -> bytes:
    """The content of a stored value, whoever wrote it; empty where it is encrypted or malformed."""
    if not is_signed(stored):
        return stored
    if len(stored) < _HEAD_BYTES or stored[len(MAGIC) : len(MAGIC) + 1] != _PLAIN:
        return b""
    return stored[_HEAD_BYTES:]


class Signer:
    """Signs and seals the messages of this host, and opens those of others.

    Args:
        secret: the job secret.
        job: what tells this job from all others.
        on_ignored: takes the key of each value that has no valid signature.
        seals: whether to encrypt as well. Where not, nothing that is encrypted is opened either.
    """

    def __init__(
        self, secret: JobSecret, job: str, *, on_ignored: Callable[[str], None] = lambda _: None, seals: bool = True
    ) -> None:
        self._key = secret.signing_key(job)
        self._cipher = cipher_of(secret.sealing_key(job)) if seals else None
        self._on_ignored = on_ignored
        self._newest: dict[str, int] = {}
        self._same: dict[str, tuple[bytes, Opened]] = {}

    def __repr__(self) -> str:
        return "Signer(hidden)"

    @property
    def signs(self) -> bool:
        """Whether there is a secret."""
        return True

    def protect(self, key: str, content: str | bytes, counter: int = 0) -> bytes:
        """The value to be stored.

        Args:
            key: where.
            content: what.
            counter: higher than all before where the key is written again and an older value would mislead.
        """
        body = content.encode() if isinstance(content, str) else content
        kind = _PLAIN
        if self._cipher is not None and is_confidential(key):
            kind = _SEALED
            nonce = os.urandom(_NONCE_BYTES)
            body = nonce + self._cipher.encrypt(nonce, body, _about(key, kind, counter))
        head = MAGIC + kind + counter.to_bytes(_COUNTER_BYTES)
        return head + self._signature(key, kind, counter, body) + body

    def open(self, key: str, stored: bytes, *, longest: int = LONGEST_BYTES) -> Opened | None:
        """A stored value; None: it is not signed with this job's secret for this key, or too long.

        Args:
            key: where it was found.
            stored: what was found.
            longest: in bytes, of the content.
        """
        opened = self._opened(key, stored, longest)
        if opened is None:
            self._on_ignored(key)
        return opened

    def open_newest(self, key: str, stored: bytes) -> Opened | None:
        """The same of a value that is written again; None as well where a newer one has been seen."""
        same = self._same.get(key)
        if same is not None and same[0] == stored:
            return same[1]  # mostly: all heartbeats are read each second, and few of them are new
        opened = self.open(key, stored)
        if opened is None or opened.counter < self._newest.get(key, 0):
            # An older one is a host's own: it came late, by a connection that its host has given up meanwhile.
            return None
        self._newest[key] = opened.counter
        if len(stored) <= _SHORT_BYTES:
            self._same[key] = stored, opened
        return opened

    def _opened(self, key: str, stored: bytes, longest: int) -> Opened | None:
        import hmac

        if not (is_signed(stored) and _HEAD_BYTES <= len(stored) <= longest + OVERHEAD_BYTES):
            return None
        at = len(MAGIC)
        kind = stored[at : at + 1]
        counter = int.from_bytes(stored[at + 1 : at + 1 + _COUNTER_BYTES])
        signature = stored[_HEAD_BYTES - _SIGNATURE_BYTES : _HEAD_BYTES]
        body = stored[_HEAD_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, kind, counter, body)):
            return None
        if kind == _PLAIN:
            # What is to be encrypted and is not was not signed by a host of this job.
            return None if self._cipher is not None and is_confidential(key) else Opened(body, counter)
        if self._cipher is None:
            return None
        try:
            content = self._cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], _about(key, kind, counter))
        except Exception:
            return None
        return Opened(content, counter)

    def _signature(self, key: str, kind: bytes, counter: int, body: bytes) -> bytes:
        import hmac

        return hmac.digest(self._key, _about(key, kind, counter) + body, "sha256")


def _about(key: str, kind: bytes, counter: int) -> bytes:
    """What a value is about, so that no two are about the same."""
    name = key.encode(errors="surrogateescape")
    return b"".join((MAGIC, kind, counter.to_bytes(_COUNTER_BYTES), len(name).to_bytes(4), name))
