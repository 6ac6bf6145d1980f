"""How a job secret gets to all hosts by itself, where they have a private channel.

The leader makes the secret and an *offer*, a short text that any user may read. It holds either

* a MUNGE credential with the secret in it, which only the same user can read, on hosts with the same key; or
* the name of a file, 0600 in a directory of its own, 0700, in the directory where each host keeps its run directories.

Who takes the offer believes it only where the operating system says that the same user (or root) has made it: the
daemon of MUNGE tells who made the credential, the file system who owns the file. So no other user can put a secret of
theirs into its place. And the secret is bound to the job: what was offered to another job is refused.

What is done here may wait for a file system or a daemon, and happens in a process of its own (``serve``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from saferun.errors import printable, suppress
from saferun.files.private_file import new_name, read_private, remove_private, write_private
from saferun.linux.munge import LONGEST_CREDENTIAL, Munge, MungeError, decode, encode, find_munge
from saferun.linux.prctl import die_with_parent, outlive_parent
from saferun.model import JsonObject, Value
from saferun.text.decoding import MALFORMED, loads, text

SECRET_BYTES = 32
LONGEST_OFFER = 2 * LONGEST_CREDENTIAL
_LONGEST_CONTENT = 1024
_LONGEST_NAME = 1024
# A file system that takes longer is no way to share a secret.
_FILE_S = 2.0
# For so long the process waits for the next request. Hosts that meet ask within moments of each other.
_IDLE_S = 10.0

# A call still waits for a file system: no other one is made to wait with it.
_is_waiting = threading.Event()


class NoSecretError(Exception):
    """The offer cannot be taken; why, in words."""


class Offer(Value):
    """What the leader has to offer.

    ``text`` is for all hosts, and empty where there is no channel; ``why`` says so then. ``name`` is that of the file,
    where one was made or tried to be. ``made`` is its directory, if there is one: path, device and inode.
    """

    text: str
    why: str = ""
    name: str = ""
    made: tuple[str, int, int] | None = None


def binding(run_id: str, job: str) -> str:
    """What tells a job from all others, as it is kept beside the secret.

    Args:
        run_id: the name of the job, which every host knows by itself.
        job: a random text of the leader, unique to the job.
    """
    return hashlib.sha256(json.dumps([run_id, job]).encode()).hexdigest()


def pack(secret: bytes, bound_to: str) -> bytes:
    """What is in the credential, or in the file."""
    return json.dumps({"saferun": "job secret", "job": bound_to, "secret": secret.hex()}).encode()


def unpack(content: bytes, bound_to: str) -> bytes:
    """The secret.

    Raises:
        NoSecretError: there is none, or it is another job's.
    """
    try:
        found = loads(content, longest=_LONGEST_CONTENT)
        if found["saferun"] != "job secret":
            raise NoSecretError("it holds no job secret")
        job, secret = text(found["job"], 64), bytes.fromhex(text(found["secret"], 2 * SECRET_BYTES))
    except MALFORMED:
        raise NoSecretError("it holds no job secret") from None
    if not hmac.compare_digest(job.encode(errors="replace"), bound_to.encode()):
        raise NoSecretError("it holds the secret of another job")
    if len(secret) != SECRET_BYTES:
        raise NoSecretError("it holds no job secret")
    return secret


# --------------------------------------------------------------------------------------------------------------------
# The two ways


def make_offer(secret: bytes, bound_to: str, ttl_s: int, base: str, munge: Munge | None) -> Offer:
    """Offer a secret by the first way that there is. Bounded in time.

    Args:
        secret: the secret.
        bound_to: the job's ``binding``.
        ttl_s: for how many seconds a credential can be read.
        base: where this user's run directories are; empty: there are none.
        munge: the programs of MUNGE, if they are installed.
    """
    content, reasons = pack(secret, bound_to), []
    if munge is None:
        reasons.append("there is no munge")
    else:
        try:
            return Offer(json.dumps({"munge": encode(munge, content, ttl_s)}))
        except MungeError as error:
            reasons.append(f"munge: {error}")
    if not base:
        return Offer("", "; ".join([*reasons, "there is no run directory"]))
    name = new_name()

    try:
        made = _bounded(lambda: write_private(base, name, content))
    except NoSecretError as error:
        return Offer("", "; ".join([*reasons, f"the run directory: {error}"]), name)
    return Offer(json.dumps({"file": name}), "", name, (made.path, *made.which))


def read_offer(offer: str) -> tuple[str, str]:
    """The credential and the name of the file in an offer; each may be empty.

    Raises:
        NoSecretError: it makes no sense.
    """
    try:
        found = loads(offer, longest=LONGEST_OFFER)
        return text(found.get("munge", ""), LONGEST_CREDENTIAL), text(found.get("file", ""), _LONGEST_NAME)
    except MALFORMED:
        raise NoSecretError("the offer is invalid") from None


def take_offer(offer: str, bound_to: str, base: str, munge: Munge | None) -> bytes:
    """The secret that was offered. Bounded in time.

    Args:
        offer: what the leader has published, or whoever has overwritten it.
        bound_to: the job's ``binding``, as this host knows it.
        base: as in ``make_offer``, on this host.
        munge: as in ``make_offer``.

    Raises:
        NoSecretError: this host cannot have it, or it was not offered by this user.
    """
    credential, name = read_offer(offer)
    reasons = []
    if credential and munge is None:
        reasons.append("munge: it is not installed on this host")
    elif credential and munge is not None:
        try:
            return unpack(decode(munge, credential), bound_to)
        except (MungeError, NoSecretError) as error:
            reasons.append(f"munge: {error}")
    if name and not base:
        reasons.append("the run directory: this host has none")
    elif name:
        try:
            return unpack(_bounded(lambda: read_private(base, name, _LONGEST_CONTENT)), bound_to)
        except NoSecretError as error:
            reasons.append(f"the run directory: {error}")
    raise NoSecretError("; ".join(reasons) or "nothing is offered")


def withdraw(base: str, name: str) -> None:
    """Remove the file of an offer. Bounded in time."""
    with suppress(NoSecretError):
        _bounded(lambda: remove_private(base, name))


def _bounded(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever it returns
    """What a call returns that may wait for a file system forever.

    A thread is enough: this process has nothing else to do, and may be lost.

    Raises:
        NoSecretError: it fails, or does not return in time.
    """
    answers: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
    if _is_waiting.is_set():
        raise NoSecretError("its file system does not answer")

    def answer() -> None:
        try:
            answers.put((call(), ""))
        except OSError as error:
            answers.put((None, printable(error.strerror or str(error)) or "it fails"))
        _is_waiting.clear()

    try:
        threading.Thread(target=answer, daemon=True).start()
        value, failure = answers.get(timeout=_FILE_S)
    except queue.Empty:
        _is_waiting.set()
        raise NoSecretError(f"its file system did not answer within {_FILE_S:.0f} s") from None
    except RuntimeError:
        raise NoSecretError("no thread can be made") from None
    if failure:
        raise NoSecretError(failure)
    return value


# --------------------------------------------------------------------------------------------------------------------
# The process


def serve(
    connection: socket.socket,
    munge: Munge | Callable[[], Munge | None] | None = find_munge,
    *,
    idle_s: float = _IDLE_S,
) -> None:
    """Answer requests, one JSON line each, until the other side is gone; then remove what was made.

    ``offer {secret, run_id, job, ttl_s, base}`` is answered by ``{text, why, made}``; ``take {offer, run_id, job,
    base}`` by ``{secret, why}``, where the secret is empty if there is none; ``withdraw`` by ``{}``. Each answer
    repeats ``id``. ``{exits}`` is the last line of a process that has had no request for a while.

    Args:
        connection: to whoever asks, in blocking mode. A request comes after the answer to the last one.
        munge: the programs of MUNGE; or what looks for them.
        idle_s: for how long to wait for a request, while there is nothing to remove.
    """
    made: list[tuple[str, str]] = []
    parent_pid = os.getppid()
    try:
        with connection, connection.makefile("rwb") as lines:
            while made or _is_readable(connection, idle_s):
                line = lines.readline()
                if not line:
                    return
                request = json.loads(line)
                # What has made a file lives to remove it, whoever is killed.
                outlive_parent()
                answer = {**_answered(request, made, munge() if callable(munge) else munge), "id": request["id"]}
                if not made:
                    die_with_parent(parent_pid)
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()
            lines.write(b'{"exits": true}\n')
    except OSError:
        pass  # the other side is gone
    finally:
        for base, name in made:
            withdraw(base, name)


def _is_readable(connection: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _answered(request: JsonObject, made: list[tuple[str, str]], munge: Munge | None) -> JsonObject:
    bound_to = binding(str(request.get("run_id")), str(request.get("job")))
    match request["op"]:
        case "offer":
            secret, ttl_s = bytes.fromhex(request["secret"]), int(request["ttl_s"])
            base = str(request["base"])
            offer = make_offer(secret, bound_to, ttl_s, base, munge)
            if offer.name:
                made.append((base, offer.name))
            return offer._asdict()
        case "take":
            try:
                secret = take_offer(str(request["offer"]), bound_to, str(request["base"]), munge)
            except NoSecretError as error:
                return {"secret": "", "why": str(error)}
            return {"secret": secret.hex(), "why": ""}
        case "withdraw":
            while made:
                withdraw(*made.pop())
    return {}
