"""A request to the saferun of a running job, by its control socket."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from saferun.errors import UsageError, suppress
from saferun.files.run_dir import shorter_path
from saferun.files.run_files import RunEnd, RunRecord, RunState, living_records, open_run, read_state
from saferun.linux.bare_socket import Socket
from saferun.linux.control_socket import connect
from saferun.linux.user_name import user_name
from saferun.model import JsonObject
from saferun.text.decoding import MALFORMED, display_text, number
from saferun.text.framing import MessageBuffer

_TIMEOUT_S = 10.0
_LONGEST_ANSWER_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_LONGEST_NAME = 60
_LONGEST_TEXT = 400
_NAMED_HOSTS = 4


class LiveRun:
    """A connection to the saferun of a run.

    Args:
        directory: the run's.
        connection: to its control socket, which this object then owns.
        record: what run.json says of that saferun.
    """

    def __init__(self, directory: Path, connection: Socket, record: RunRecord) -> None:
        self.directory = directory
        self.record = record
        self._connection = connection
        self._buffer = MessageBuffer(_LONGEST_ANSWER_BYTES)

    @property
    def shown(self) -> str:
        """The run as it is shown."""
        return shorter_path(str(self.directory))

    def ask(self, op: str, *, patience_s: float = _TIMEOUT_S, **fields: object) -> JsonObject:
        """Send the request, and return the answer to it.

        Raises:
            UsageError: the saferun refuses it, or does not answer.
        """
        content = json.dumps({"op": op, "user": user_name(), **fields}).encode() + b"\n"
        try:
            self._connection.sendall(content)
        except OSError as error:
            raise _silent(self.shown, error.strerror or str(error)) from None
        return self.next_answer(patience_s)

    def fileno(self) -> int:
        """A descriptor that is readable when something has come."""
        return self._connection.fileno()

    def send(self, message: JsonObject) -> None:
        """Send a message that has no answer; that the saferun has gone is found by ``receive``."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[JsonObject] | None:
        """The messages that have come; None: the connection is closed."""
        try:
            chunk = self._connection.recv(_READ_BYTES)
        except OSError:
            return None
        return self._buffer.feed(chunk) if chunk else None

    def next_answer(self, timeout_s: float = _TIMEOUT_S) -> JsonObject:
        """The next answer. A request that is refused is an error.

        Raises:
            UsageError: as ``ask``.
        """
        self._connection.settimeout(timeout_s)
        try:
            while chunk := self._connection.recv(_READ_BYTES):
                for answer in self._buffer.feed(chunk) or ():
                    if "error" in answer:
                        raise UsageError(_text(answer["error"]), _text(answer.get("hint", "")), exit_code=1)
                    return answer
        except OSError as error:
            raise _silent(self.shown, error.strerror or str(error)) from None
        raise _silent(self.shown, "it closed the connection")

    def wait_for_end(self) -> RunState:
        """Return when the saferun has ended, or closes the connection because of that: how, as far as it has said."""
        self._connection.settimeout(None)
        last: JsonObject = {}
        with suppress(OSError):
            while chunk := self._connection.recv(_READ_BYTES):
                for answer in self._buffer.feed(chunk) or ():
                    last = answer
        try:
            end = RunEnd(time.time(), number(last["exit_code"]), str(last["outcome"]), "")
        except MALFORMED:
            return RunState("unknown", record=self.record)
        return RunState(end.outcome, record=self.record._replace(end=end))

    def again(self) -> LiveRun:
        """Another connection to the same saferun, for another request.

        Raises:
            UsageError: it cannot be reached any more.
        """
        try:
            connection = connect(self.record.control_socket, _TIMEOUT_S)
        except OSError as error:
            raise _silent(self.shown, error.strerror or str(error)) from None
        return LiveRun(self.directory, connection, self.record)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def find_live(directory: Path) -> LiveRun:
    """A connection to a saferun of a run that lives on this host, the one that leads the job if possible.

    Raises:
        UsageError: there is none.
    """
    return next(connections(directory))


def connections(directory: Path) -> Iterator[LiveRun]:
    """Connections to the saferuns of a run that live on this host, the one that leads the job first, if it is here.

    Each belongs to the caller, and is opened when it is wanted.

    Raises:
        UsageError: there is none.
    """
    shown = shorter_path(str(directory))
    try:
        fd = open_run(str(directory))
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}", "see saferunctl list") from None
    try:
        records = living_records(fd)
        state = read_state(fd)
    finally:
        os.close(fd)
    if not records:
        raise _ended(shown, state)
    failure, has_any = "", False
    for record in records:
        if record.control_socket:
            try:
                connection = connect(record.control_socket, _TIMEOUT_S)
            except OSError as error:
                failure = failure or str(error.strerror or error)
                continue
            has_any = True
            yield LiveRun(directory, connection, record)
    if not has_any:
        raise _unreachable(shown, records, failure)


def _ended(shown: str, state: RunState) -> UsageError:
    if state.name == "unknown":
        return UsageError(f"{shown} has no run.json that can be read", "see saferunctl list for the runs that live")
    what = "was killed, or its host is gone" if state.name == "lost" else f"has ended: {state.name}"
    return UsageError(f"{shown} {what}", "see saferunctl list for the runs that live", exit_code=1)


def _unreachable(shown: str, records: list[RunRecord], failure: str) -> UsageError:
    hosts = list(dict.fromkeys(record.host for record in records if record.host))
    if not any(record.control_socket for record in records):
        what = f"{shown} has no control socket (yet)"
        hint = "it opens some seconds after the ranks start; kill -TERM of its saferun process does the same as stop"
        return UsageError(what, hint, exit_code=1)
    named = ", ".join(hosts[:_NAMED_HOSTS]) + (", …" if len(hosts) > _NAMED_HOSTS else "")
    hint = f"run saferunctl on one of its hosts ({named})" if named else "run saferunctl on one of its hosts"
    return UsageError(f"no saferun process of {shown} can be reached from here: {failure}", hint, exit_code=1)


def _silent(shown: str, why: str) -> UsageError:
    return UsageError(f"the saferun process of {shown} does not answer: {why}", "see saferunctl list", exit_code=1)


def _text(value: object) -> str:
    try:
        return display_text(value, _LONGEST_TEXT)
    except MALFORMED:
        return "the answer cannot be read"
