"""MUNGE credentials: tokens that only the user who made them can decode, on all hosts of a cluster.

The programs ``munge`` and ``unmunge`` ask the daemon of this host, which shares a key with those of the other hosts and
gets the caller's user from the kernel. Slurm depends on it, so clusters with Slurm mostly have it.

Sources: munge(1), unmunge(1), munge(7), munge.h (the error numbers).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.child_output import run_program
from saferun.linux.children import SpawnError
from saferun.model import Value

# Not PATH: the programs must be root's.
_FOLDERS = ("/usr/bin", "/bin", "/usr/local/bin", "/opt/munge/bin")
_SOCKETS = ("/run/munge/munge.socket.2", "/var/run/munge/munge.socket.2")
_ENVIRON = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
_TIMEOUT_S = 3.0
_ROOT = 0
_WRITABLE_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH

LONGEST_CREDENTIAL = 4096
"""Fits into a pipe at once."""
_LONGEST_PAYLOAD = 1024
_CREDENTIAL = re.compile(r"MUNGE:[A-Za-z0-9+/=]{1,4000}:")
# ``UID:   0``, or without the option ``--numeric``: ``UID:  root (0)``.
_NUMBER = re.compile(rb"(?:.*\()?([0-9]{1,10})\)?")

_SUCCESS, _BAD_OPTION, _REPLAYED = 0, 1, 17
_STATUS_TEXTS = {
    6: "the munge daemon of this host does not answer",
    15: "the credential has expired",
    16: "the credential is from the future: the clocks of the hosts differ",
    18: "the credential is another user's",
}


class MungeError(Exception):
    """A credential cannot be made or decoded; the message says why."""


class Munge(Value):
    """The programs and the socket of the daemon."""

    encoder: str
    decoder: str
    socket: str


def find_munge(folders: Sequence[str] = _FOLDERS, sockets: Sequence[str] = _SOCKETS) -> Munge | None:
    """The programs and the daemon's socket, if root has installed them; None otherwise.

    The daemon is not called.
    """
    socket = next((path for path in sockets if _is_socket(path)), None)
    if socket is None:
        return None
    encoder, decoder = (_program(name, folders) for name in ("munge", "unmunge"))
    return Munge(encoder, decoder, socket) if encoder and decoder else None


def _is_socket(path: str) -> bool:
    """Whether it is a socket that only root, or a service to which root gave the directory, can have made."""
    folder = os.path.dirname(path)
    try:
        if not stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):
            return False
        own, above = os.stat(folder), os.stat(os.path.dirname(os.path.realpath(folder)))
    except OSError:
        return False
    return not own.st_mode & _WRITABLE_FOR_OTHERS and _is_roots(above)


def _program(name: str, folders: Sequence[str]) -> str:
    for folder in folders:
        path = os.path.join(folder, name)
        with suppress(OSError):
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode) and _is_roots(status) and _is_roots(os.stat(folder)):
                return path
    return ""


def _is_roots(status: os.stat_result) -> bool:
    return status.st_uid == _ROOT and not status.st_mode & _WRITABLE_FOR_OTHERS


def encode(munge: Munge, payload: bytes, ttl_s: int) -> str:
    """Make a credential whose payload only this user can decode.

    Args:
        munge: the programs.
        payload: at most 1024 bytes.
        ttl_s: how long it is valid, in seconds; the daemon may allow less.

    Raises:
        MungeError: it cannot be made.
    """
    if len(payload) > _LONGEST_PAYLOAD:
        raise MungeError("the payload is too long")
    arguments = [f"--socket={munge.socket}", f"--restrict-uid={os.geteuid()}", f"--ttl={ttl_s}"]
    code, output = _run([munge.encoder, *arguments], payload)
    credential = output.decode(errors="replace").strip()
    if code != 0 or not is_credential(credential):
        raise MungeError(_STATUS_TEXTS.get(code, f"munge ended with exit code {code}"))
    return credential


def is_credential(text: str) -> bool:
    """Whether it has the form of a credential."""
    return _CREDENTIAL.fullmatch(text) is not None


def decode(munge: Munge, credential: str) -> bytes:
    """Decode a credential of this user or root that has not expired. Returns its payload.

    One that was decoded on this host before is accepted, although the daemon reports a replay: several processes of a
    user may need the same one. The payload itself must say what it is for.

    Raises:
        MungeError: it cannot be decoded, or is another user's.
    """
    if not is_credential(credential):
        raise MungeError("this is not a credential")
    arguments = [f"--socket={munge.socket}", "--keys=STATUS,UID,LENGTH"]
    # Without it, user names are looked up, which may take long.
    code, output = _run([munge.decoder, "--numeric", *arguments], credential.encode())
    if not output and code == _BAD_OPTION:
        code, output = _run([munge.decoder, *arguments], credential.encode())
    if not output:
        raise MungeError(_STATUS_TEXTS.get(code, f"unmunge ended with exit code {code}"))
    head, blank, payload = output.partition(b"\n\n")
    fields = dict(_field(line) for line in head.splitlines())
    status, uid, length = (fields.get(name, -1) for name in (b"STATUS", b"UID", b"LENGTH"))
    if status not in {_SUCCESS, _REPLAYED}:
        raise MungeError(_STATUS_TEXTS.get(status, f"unmunge says {status}"))
    if uid not in {os.geteuid(), _ROOT}:
        raise MungeError(f"the credential was made by user {uid}")
    if not blank or length != len(payload):
        raise MungeError("unmunge ended before it had written all of the payload")
    return payload


def _field(line: bytes) -> tuple[bytes, int]:
    name, _, value = line.partition(b":")
    found = _NUMBER.fullmatch(value.strip())
    return name, int(found[1]) if found is not None else -1


def _run(argv: list[str], content: bytes) -> tuple[int, bytes]:
    """Run a program for at most three seconds. Returns its exit code and its stdout.

    Raises:
        MungeError: it does not exit in time, or cannot be run.
    """
    try:
        output, status = run_program(argv, _ENVIRON, _TIMEOUT_S, content=content)
    except SpawnError as error:
        raise MungeError(f"{argv[0]} cannot be run: {os.strerror(error.errno)}") from None
    if status is None:
        raise MungeError(f"{os.path.basename(argv[0])} did not end within {_TIMEOUT_S:.0f} s")
    return -1 if status.code is None else status.code, output
