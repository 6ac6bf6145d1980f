"""Whether the messages of this host are signed, from the first key that it reads or writes; and who does otherwise.

The address of the control store is published in another store (``saferun/control``, ``saferun/leader``): signed with a
key that follows from the secret alone, but legible for every host, so that one with another secret, or none, can report
what is wrong. It holds a number that is unique to the job. All else is signed with a key that follows from that number.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Annotated

from saferun.cluster.messages import MOST_HOSTS
from saferun.cluster.signed import Signer, cipher_of, is_signed
from saferun.coordinator.assignments import Name, typed
from saferun.model import Value
from saferun.text.typed_json import number_of

if TYPE_CHECKING:
    from saferun.cluster.secret import JobSecret

NOTE_KEY = "saferun/secret_mismatch"
MISMATCH_HINT = "pass the same secret on all hosts: --secret-file, or SAFERUN_JOB_SECRET_FILE"
# What another host's secret is, seen from here.
NONE_HERE, NONE_THERE, OTHER = "none here", "none there", "other"
_GREETING = "greeting"
_MARK = "saferun/job"
_LONGEST_NAME = 255


class SecretMismatch(Value):
    """A host that has another job secret than the first one, or none, for people."""

    host: int
    what: str


class _Note(Value):
    kind: Name
    host: Annotated[int, number_of(MOST_HOSTS)]
    name: Name
    job: Name


class Secrecy:
    """What this host does with the job secret.

    Args:
        secret: the job secret; None: there is none, and nothing is signed.

    Raises:
        CannotSealError: evidence and host infos cannot be encrypted here.
    """

    def __init__(self, secret: JobSecret | None = None) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._ignored = 0
        self._last = ""
        self.greeting = Signer(secret, _GREETING, seals=False) if secret is not None else None
        if secret is not None:
            cipher_of(secret.sealing_key(""))  # before the hosts meet

    def signer(self, run_id: str, job: str) -> Signer | None:
        """What signs the messages of a job.

        Args:
            run_id: the job's name.
            job: the number that its first host has drawn.
        """
        if self._secret is None:
            return None
        return Signer(self._secret, json.dumps([run_id, job]), on_ignored=self.ignore)

    def greet(self, key: str, content: str) -> str | bytes:
        """The description of the first host, to be stored under a key that every host reads."""
        return content if self.greeting is None else self.greeting.protect(key, content)

    def mismatch(self, key: str, stored: bytes) -> str:
        """How the secret of the host that wrote this differs from this host's; empty: it does not."""
        if self.greeting is None:
            return NONE_HERE if is_signed(stored) else ""
        if not is_signed(stored):
            return NONE_THERE
        return OTHER if self.greeting.open(key, stored) is None else ""

    def ignore(self, key: str) -> None:
        """Count a value that has no valid signature."""
        if key == _MARK:
            return  # the store of another job, or of the previous attempt, shows itself by this
        with self._lock:
            self._ignored += 1
            self._last = key

    def take_ignored(self) -> tuple[int, str]:
        """How many values had no valid signature since this was asked last, and the key of the last one."""
        if not self._ignored:
            return 0, ""
        with self._lock:
            ignored, self._ignored = self._ignored, 0
            return ignored, self._last


NO_SECRET = Secrecy()


def mismatch_message(kind: str, first: str, name: str) -> str:
    """What differs between the first host and the one with this name."""
    if kind == OTHER:
        return f"{name} and {first} have different job secrets"
    has, has_none = (name, first) if kind == NONE_THERE else (first, name)
    return f"{has} has a job secret, and {has_none} has none"


def encode_note(kind: str, host: int, name: str, job: str) -> str:
    """What a host with another secret leaves for the first one. It is not signed, and is only printed."""
    return json.dumps(_Note(kind, host, name[:_LONGEST_NAME], job)._asdict())


def decode_note(content: bytes | None, first: str, job: str) -> SecretMismatch | None:
    """What such a note means for the first host; None: nothing about this job.

    Args:
        content: the note, if there is one.
        first: the first host's name.
        job: the number that this host has drawn.
    """
    note: _Note | None = typed(_Note, content or b"")
    if note is None or note.job != job or note.kind not in {NONE_HERE, OTHER}:
        return None
    return SecretMismatch(note.host, mismatch_message(note.kind, first, note.name))


def secrecy_of(secret: str) -> Secrecy:
    """What is done with the job secret that the supervisor has handed on.

    Raises:
        CannotSealError: evidence cannot be encrypted.
    """
    from saferun.cluster.secret import JobSecret

    return Secrecy(JobSecret(bytes.fromhex(secret)))
