"""A request to the saferun of a running job, by its control socket."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from saferun.errors import UsageError, suppress
from saferun.files.run_dir import shorter_path
from saferun.files.run_files import RunEnd, RunRecord, RunState, living_records, open_run, read_state
from saferun.linux.bare_socket import Socket
from saferun.linux.control_socket import connect
from saferun.linux.descriptors import close_on_error
from saferun.linux.ownership import NotOursError, check_owner
from saferun.linux.process_identity import is_living
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


class SilentError(UsageError):
    """The saferun process of a run has not answered in time. Another one of the job may answer."""


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
        self._pending: deque[JsonObject] = deque()

    @property
    def shown(self) -> str:
        """The run as it is shown."""
        return shorter_path(str(self.directory))

    def ask(self, op: str, *, patience_s: float = _TIMEOUT_S, **fields: object) -> JsonObject:
        """Send the request, and return the answer to it.

        Raises:
            SilentError: the saferun does not answer in time.
            UsageError: the saferun refuses it, or has closed the connection.
        """
        request = {"op": op, "user": user_name(), "run_id": self.record.run_id, **fields}
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._unanswered(error) from None
        return self.next_answer(patience_s)

    def fileno(self) -> int:
        """A descriptor that is readable when something has come."""
        return self._connection.fileno()

    def send(self, message: JsonObject) -> None:
        """Send a message that has no answer; that the saferun has gone is found by ``receive``."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    @property
    def has_pending(self) -> bool:
        """Whether messages have been read from the connection that ``receive`` has yet to return."""
        return bool(self._pending)

    def receive(self) -> list[JsonObject] | None:
        """The messages that have come; None: the connection is closed."""
        if self._pending:
            messages = list(self._pending)
            self._pending.clear()
            return messages
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
            while not self._pending and (chunk := self._connection.recv(_READ_BYTES)):
                self._pending.extend(self._buffer.feed(chunk) or ())
        except OSError as error:
            raise self._unanswered(error) from None
        if not self._pending:
            raise _silent(self.shown, "it closed the connection")
        answer = self._pending.popleft()
        if "error" in answer:
            raise UsageError(_text(answer["error"]), _text(answer.get("hint", "")), exit_code=1)
        return answer

    def wait_for_end(self) -> RunState:
        """Return when the saferun has ended, or closes the connection because of that: how, as far as it has said."""
        self._connection.settimeout(None)
        last: JsonObject = {}
        while (messages := self.receive()) is not None:
            last = messages[-1] if messages else last
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
            raise self._unanswered(error) from None
        return LiveRun(self.directory, connection, self.record)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _unanswered(self, error: OSError) -> UsageError:
        closed = _silent(self.shown, error.strerror or str(error))
        if not isinstance(error, TimeoutError):
            return closed
        return SilentError(closed.what, _instead([self.record]) or closed.hint, closed.exit_code)


def find_live(directory: Path) -> LiveRun:
    """A connection to a saferun of a run that lives on this host, the one that leads the job if possible.

    Raises:
        UsageError: there is none.
    """
    return next(connections(directory))


def ask_living(
    directory: Path, op: str, *, patience_s: float = _TIMEOUT_S, **fields: float
) -> tuple[LiveRun, JsonObject]:
    """The saferun of a run on this host that answers a request, and its answer: the one that leads the job if it does.

    Raises:
        UsageError: there is none, it refuses the request, or none answers in time.
    """
    silent: SilentError | None = None
    for live in connections(directory):
        try:
            return live, live.ask(op, patience_s=patience_s, **fields)
        except SilentError as error:
            silent = silent or error
            live.close()
        except BaseException:
            live.close()
            raise
    assert silent is not None  # noqa: S101 - there is a connection, or an error
    raise silent


def open_own_run(directory: Path) -> int:
    """A descriptor of a run directory of this user, whose files say whom to ask; the caller closes it.

    Raises:
        UsageError: it is another user's.
        OSError: it cannot be opened.
    """
    fd = open_run(str(directory))
    with close_on_error(fd):
        status = os.fstat(fd)
        try:
            check_owner(status, str(directory), or_root=True, new_in=(".", fd))
        except NotOursError as error:
            what = f"{shorter_path(str(directory))}: {error.strerror}"
            raise UsageError(what, _as_user(f"'#{status.st_uid}'"), exit_code=1) from None
    return fd


def connections(directory: Path) -> Iterator[LiveRun]:
    """Connections to the saferuns of a run that live on this host, the one that leads the job first, if it is here.

    Each belongs to the caller, and is opened when it is wanted.

    Raises:
        UsageError: there is none, or the directory is another user's.
    """
    shown = shorter_path(str(directory))
    try:
        fd = open_own_run(directory)
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}", "see saferunctl list") from None
    try:
        records = living_records(fd)
        state = read_state(fd)
    finally:
        os.close(fd)
    if not records:
        raise _ended(shown, state)
    failure: OSError | None = None
    has_any = False
    for record in records:
        if record.control_socket:
            try:
                connection = connect(record.control_socket, _TIMEOUT_S)
            except OSError as error:
                failure = failure or error
                continue
            has_any = True
            yield LiveRun(directory, connection, record)
    if not has_any:
        raise _unreachable(shown, records, failure)


def _ended(shown: str, state: RunState) -> UsageError:
    if state.name == "unknown":
        return UsageError(f"{shown} has no run.json that can be read", "see saferunctl list for those that are running")
    what = "was killed, or its host is gone" if state.name == "lost" else f"has ended: {state.name}"
    return UsageError(f"{shown} {what}", "see saferunctl list for those that are running", exit_code=1)


def _unreachable(shown: str, records: list[RunRecord], failure: OSError | None) -> UsageError:
    by_signal = _instead(records)
    if failure is None:
        what = f"{shown} has no control socket (yet)"
        instead = by_signal or "kill -TERM stops its saferun process on a host"
        return UsageError(what, f"it opens some seconds after the ranks start; {instead}", exit_code=1)
    hosts = list(dict.fromkeys(record.host for record in records if record.host))
    named = ", ".join(hosts[:_NAMED_HOSTS]) + (", …" if len(hosts) > _NAMED_HOSTS else "")
    hint = f"run saferunctl on one of its hosts ({named})" if named else "run saferunctl on one of its hosts"
    if isinstance(failure, PermissionError):
        hint = _as_user("USER")
    elif by_signal:
        hint = by_signal
    why = failure.strerror or failure
    return UsageError(f"no saferun process of {shown} can be reached from here: {why}", hint, exit_code=1)


def _as_user(user: str) -> str:
    return f"run it as that user: sudo -u {user} saferunctl …"


def _instead(records: list[RunRecord]) -> str:
    """What ends a saferun that does not answer; empty: none of the job's lives here."""
    processes = [record.process for record in records if record.process is not None]
    pid = next((process.pid for process in processes if is_living(process)), None)
    return f"kill -TERM {pid} ends this saferun" if pid is not None else ""


def _silent(shown: str, why: str) -> UsageError:
    return UsageError(f"the saferun process of {shown} does not answer: {why}", "see saferunctl list", exit_code=1)


def _text(value: object) -> str:
    try:
        return display_text(value, _LONGEST_TEXT)
    except MALFORMED:
        return "the answer cannot be read"
