"""The job's log: what every host must learn, in the same order on all of them.

Entry ``k`` is the key ``log/<k>`` below the attempt's prefix. Whoever has a message tries to be the first to set
the next one; who is not reads the message of the winner, and tries the one after it, unless that has made its own
message moot. So when all hosts see the same failure at once, each asks the store once and gets the first message.

An entry is JSON: ``h`` the host that wrote it, ``n`` a number unique to that host, ``m`` the message; or ``{"end":
true}``, after which nothing more comes; or ``{"old": true}``, which stands for nothing: what was there is of no use any
more. What only the leader may send counts only as an entry of host 0.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from saferun.cluster.messages import MOST_HOSTS, is_leaders, is_sound
from saferun.coordinator.control_channel import ControlChannel
from saferun.coordinator.store_client import FORGED, StoreBrokenError
from saferun.text.decoding import MALFORMED, loads, number

LONGEST_MESSAGE_BYTES = 64 << 10
_LONGEST_ENTRY_BYTES = LONGEST_MESSAGE_BYTES + 256
# Of these, the first of an attempt says it all.
_ONCE = frozenset({"abort", "cause", "decision"})
# Firewalls between the hosts may drop connections that are idle for minutes.
_WAIT_S = 120.0
# A process that was stopped itself may not blame a connection for the time.
_LONGEST_TICK_S = 2.0
# The end of the log is the end of waiting where the attempt is over for this host as well, which shows in a moment.
_WAIT_AFTER_END_S = 5.0
_RECHECK_S = 0.1
_LONGEST_MESSAGE = 200
# Of what users ask for again and again while the store does not answer; for what ends the attempt there is room.
_MOST_UNWRITTEN = 1000
_ROOM_FOR_ENDS = 100
# What users ask for, however often, and the leader if a host is in doubt. In the store all but the newest are emptied.
ANSWERS = frozenset({"asked_answer", "table"})
QUESTIONS = frozenset({"asked", "asked_elsewhere", "status", "table_wanted", "watch"})
QUERIES = ANSWERS | QUESTIONS
_KEPT_ANSWERS = 8
_KEPT_QUESTIONS = 32
_END = '{"end": true}'
_EMPTIED = '{"old": true}'
# The kind of what is reported for an entry that cannot be read. No host writes it.
_MALFORMED = "malformed"


class JobLog:
    """One attempt's log, as this host sees it.

    Args:
        channel: to the control store.
        prefix: the attempt's.
        host: this host's number.
        on_entry: gets each message with its number, in order, never two at once.
        is_resumed: whether another process of this host has read and written it before.
    """

    def __init__(
        self,
        channel: ControlChannel,
        prefix: str,
        host: int,
        on_entry: Callable[[int, dict[str, Any]], None],
        *,
        is_resumed: bool = False,
    ) -> None:
        self._channel = channel
        self._prefix = prefix
        self._host = host
        self._on_entry = on_entry
        self._lock = threading.Lock()
        self._count = 0  # entries known
        self._kinds: set[str] = set()
        self._is_ending = False  # this host ends it
        self._ended = False
        self._written = threading.Condition()
        self._unwritten: deque[tuple[str, str]] = deque()  # the kind and the entry
        self._own: set[bytes] = set()  # of this host's entries, those that have not been seen in the log yet
        # Of a replacement other numbers than of the process before it: an entry is known again by its bytes.
        self._number = int.from_bytes(os.urandom(4), "big") << 16 if is_resumed else 0
        self._waiting_s = 0.0  # since the wait for the next entry began
        self._is_resumed = is_resumed
        self._in_log: set[str] = set()  # this host's messages, where a process before this one has appended some
        self._repeated: set[str] = set()  # the entries that may be among them
        self._kept: dict[str, deque[int]] = {}  # this host's questions and answers: where the newest of each kind are

    def start(self) -> None:
        """Read and append, with the channel's connections of now."""
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    @property
    def count(self) -> int:
        """How many entries there are."""
        return self._count

    def has(self, kind: str) -> bool:
        """Whether there has been a message of this kind."""
        with self._lock:
            return kind in self._kinds

    def append(self, message: object, *, is_repeated: bool = False) -> None:
        """Append a message; it comes back like those of other hosts, unless it is moot.

        Args:
            message: what the log is to say.
            is_repeated: whether it may be in the log already.
        """
        if not isinstance(message, dict):
            return
        self._number += 1
        entry = json.dumps({"h": self._host, "n": self._number, "m": message})
        kind = str(message.get("kind"))
        if len(entry) > _LONGEST_ENTRY_BYTES and isinstance(message.get("text"), str | list):
            # What follows from it matters more than its text.
            entry = json.dumps({"h": self._host, "n": self._number, "m": {**message, "text": message["text"][:0]}})
        if len(entry) > _LONGEST_ENTRY_BYTES:
            with self._lock, suppress(Exception):
                text = f"{kind} of this host is longer than {LONGEST_MESSAGE_BYTES >> 10} KiB, so it is not sent"
                self._on_entry(self._count, _malformed(text))
            return
        room = _MOST_UNWRITTEN + (_ROOM_FOR_ENDS if kind in _ONCE or kind == "request" else 0)
        with self._written:
            if len(self._unwritten) < room:
                self._own.add(entry.encode())
                self._unwritten.append((kind, entry))
                if is_repeated:
                    self._repeated.add(entry)
                self._written.notify_all()

    @property
    def _is_over(self) -> bool:
        # On other hosts it is over when the attempt is: every host can write that it has ended.
        return self._ended and self._is_ending

    def end(self) -> None:
        """End the wait of all hosts for the next entry."""
        with self._written:
            self._is_ending = True
            self._unwritten.append(("", _END))
            self._written.notify_all()

    def wake(self) -> None:
        """The channel is closed: who waits for something to write has nothing to wait for."""
        with self._written:
            self._written.notify_all()

    def wait_written(self, timeout_s: float) -> None:
        """Wait until all entries have reached the store, or cannot any more."""
        give_up_at = time.monotonic() + timeout_s
        with self._written:
            while self._unwritten and not self._ended and not self._channel.is_closed and time.monotonic() < give_up_at:
                self._written.wait(_RECHECK_S)

    def tick(self, elapsed_s: float, patience_s: float) -> None:
        """Time has passed. A wait that lasts longer than it was to last has a connection that is gone without a word.

        Args:
            elapsed_s: since the last call.
            patience_s: for how long the store may answer nothing.
        """
        with self._lock:
            self._waiting_s += min(elapsed_s, _LONGEST_TICK_S)
            if self._waiting_s < _WAIT_S + patience_s:
                return
            self._waiting_s = 0.0
        client = self._channel.watching
        with suppress(RuntimeError):  # no thread can be started now: another tick follows
            threading.Thread(
                target=self._channel.repair, args=(client,), kwargs={"is_silent": True}, daemon=True
            ).start()

    # ------------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        client = self._channel.watching
        while self._channel.is_current(client) and not self._is_over:
            k = self._count
            with self._lock:
                self._waiting_s = 0.0
            try:
                wait_s = _WAIT_AFTER_END_S if self._ended else _WAIT_S
                value = client.get(f"{self._prefix}log/{k}", wait_s, forged=FORGED)
            except StoreBrokenError:
                self._channel.repair(client)
                return
            if value is not None:
                self._take(k, value)

    def _write(self) -> None:
        client = self._channel.client
        while self._channel.is_current(client) and not self._is_over:
            with self._written:
                # The timeout is for a channel that has been made again meanwhile.
                self._written.wait_for(lambda: self._unwritten or self._channel.is_closed, 60.0)
                if not self._unwritten:
                    continue
                first = self._unwritten[0]
            if not self._channel.is_current(client):
                return
            try:
                self._place(client, *first)
            except StoreBrokenError:
                # It stays the first to be written, in case there will be another connection.
                self._channel.repair(client)
                return
            with self._written:
                # The writer of a connection that was given up may have been answered after all, and both wrote this.
                if self._unwritten and self._unwritten[0] is first:
                    self._unwritten.popleft()
                self._written.notify_all()

    def _place(self, client: Any, kind: str, entry: str) -> None:  # noqa: ANN401
        while not (self._is_over or (kind in _ONCE and self.has(kind))):
            if entry in self._repeated and json.dumps(json.loads(entry)["m"], sort_keys=True) in self._in_log:
                return
            if entry != _END and entry.encode() not in self._own:
                return  # it was seen there, though its answer was lost with a connection
            k = self._count
            found = client.create(f"{self._prefix}log/{k}", entry)
            self._take(k, found)
            if found == entry.encode():
                if kind in QUERIES:
                    self._keep_newest(client, kind, k)
                return

    def _keep_newest(self, client: Any, kind: str, k: int) -> None:  # noqa: ANN401
        """Entries stay in the store for as long as the attempt lasts: of old questions and answers, hardly anything."""
        kept = self._kept.setdefault(kind, deque())
        kept.append(k)
        if len(kept) > (_KEPT_ANSWERS if kind in ANSWERS else _KEPT_QUESTIONS):
            client.set(f"{self._prefix}log/{kept.popleft()}", _EMPTIED)

    def _take(self, k: int, value: bytes) -> None:
        """The entry ``k``, by whichever way it came first."""
        with self._lock:
            if k != self._count:
                return
            self._count += 1
            if value in {FORGED, _EMPTIED.encode()}:
                return  # what is forged is counted where signatures are checked; the next entry may be a true one
            message = self._message_of(value)
            if message is None:
                return
            if message["kind"] in self._kinds:
                message = _malformed("another one was sent before")  # whose writer should have read it
            elif message["kind"] in _ONCE:
                self._kinds.add(message["kind"])
            try:
                self._on_entry(k, message)
            except Exception as error:
                # It costs this entry, and not those after it.
                with suppress(Exception):
                    self._on_entry(k, _malformed(f"{type(error).__name__}: {error}"))

    def _message_of(self, value: bytes) -> dict[str, Any] | None:
        """The message of an entry, marked with the host that wrote it; ``malformed`` for what cannot be read.

        None: it is the end.
        """
        try:
            entry = loads(value, longest=_LONGEST_ENTRY_BYTES)
            if entry.get("end") is True:
                if self._host == 0 and not self._is_ending:
                    raise ValueError("only this host ends the log")
                self._ended = True
                return None
            host = number(entry["h"], 0, MOST_HOSTS)
            if self._is_resumed and host == self._host and value not in self._own:
                self._in_log.add(json.dumps(entry["m"], sort_keys=True))
            message: dict[str, Any] = {**entry["m"], "host": host}
            kind = message["kind"]
            if is_leaders(kind) and host == self._host and value not in self._own:
                # It would take a decision for its own, and send no other one.
                raise ValueError("another process writes in this host's name")
            self._own.discard(value)
            is_foreign = host != 0 and is_leaders(kind)
            if not isinstance(kind, str) or kind == _MALFORMED or is_foreign or not is_sound(message):
                raise ValueError("it is out of bounds, or not for that host to say")
        except MALFORMED as error:
            # It does not count as one of its kind, of which another one may come that is right.
            return _malformed(str(error))
        return message


def _malformed(text: str) -> dict[str, Any]:
    return {"kind": _MALFORMED, "text": text[:_LONGEST_MESSAGE]}
