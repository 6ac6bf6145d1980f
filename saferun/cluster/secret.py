"""The job secret: where it comes from, and the keys that follow from it.

All hosts of a job have the same one. Their messages are signed and sealed with keys that are derived from it
and from what tells this job from all others (``cluster/signed.py``); the secret itself never leaves a host.
"""

from __future__ import annotations

import os

from saferun.errors import UsageError
from saferun.linux.ownership import NotOursError
from saferun.linux.trusted_files import open_secret

LEAST_BYTES = 16
MOST_BYTES = 4096
_SALT = b"saferun job secret 1"


class JobSecret:
    """What all hosts of a job have and no one else.

    Args:
        raw: the secret itself. It is in no text that this object makes of itself.
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = bytes(raw)

    @property
    def raw(self) -> bytes:
        """The secret itself."""
        return self._raw

    def __repr__(self) -> str:
        return "JobSecret(hidden)"

    def __reduce__(self) -> str:
        """Nothing that copies or stores objects gets it.

        Raises:
            TypeError: always.
        """
        raise TypeError("a job secret is not to be copied")

    def signing_key(self, job: str) -> bytes:
        """The key for the signatures of a job's messages: 32 bytes.

        Args:
            job: what tells this job from all others with the same secret.
        """
        return self._derived(b"sign", job)

    def sealing_key(self, job: str) -> bytes:
        """The key that a job's evidence and host infos are encrypted with: 32 bytes. The argument is the same."""
        return self._derived(b"seal", job)

    def _derived(self, purpose: bytes, job: str) -> bytes:
        """HKDF with SHA-256 and one block of output. Source: RFC 5869, section 2."""
        import hmac  # not where the secret is only handed on

        extracted = hmac.digest(_SALT, self._raw, "sha256")
        return hmac.digest(extracted, purpose + b"\0" + job.encode(errors="surrogateescape") + b"\x01", "sha256")


def read_secret(path: str, option: str = "--secret-file") -> JobSecret:
    """The secret in a file. A line feed at its end is none of it, as editors put it there and other tools do not.

    Args:
        path: the file.
        option: what named it, for messages.

    Raises:
        UsageError: it cannot be read, is not for this user alone, or is too short or too long.
    """
    named = f"{option} {path}"
    try:
        fd = open_secret(path)
        try:
            content = _content(fd)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise UsageError(
            f"{named}: there is no such file",
            f"make one and copy it to every host: (umask 077; head -c 32 /dev/urandom > {path})",
        ) from None
    except NotOursError as error:
        hint = f"it must belong to this user or root, and be readable by no other user: chmod 600 {path}"
        raise UsageError(f"{named}: {error.strerror}", hint) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{named} cannot be read: {reason}", "name a plain file of this user's or root's") from None
    if not LEAST_BYTES <= len(content) <= MOST_BYTES:
        size = f"more than {MOST_BYTES}" if len(content) > MOST_BYTES else f"{len(content)}"
        raise UsageError(
            f"{named} holds {size} bytes, and {LEAST_BYTES} to {MOST_BYTES} are wanted",
            f"make another one and copy it to every host: (umask 077; head -c 32 /dev/urandom > {path})",
        )
    return JobSecret(content)


def _content(fd: int) -> bytes:
    content = b""
    while len(content) <= MOST_BYTES + 2 and (chunk := os.read(fd, MOST_BYTES + 3)):
        content += chunk
    return content.rstrip(b"\r\n")
