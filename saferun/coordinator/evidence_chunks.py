"""Chunks of evidence on their way to the leader, through the control store, where they stay as short as may be.

A chunk is the key ``chunk/<host>/<task>/<name>`` below the attempt's prefix. That it is there is in the host's
state; the leader reads it and deletes it. It is written by a connection of its own, so that it holds up nothing else.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from saferun.cluster.messages import MOST_TASKS
from saferun.coordinator.control_channel import ControlChannel
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.model import ASKED_CHUNK

_NAME = re.compile(r"[a-z0-9-]{1,40}")
_MOST_NAMES = 1000
_TRY_FOR_S = 60.0
_TRY_AGAIN_S = 1.0
_PAUSE_S = 0.05
# Of small chunks so many are read in one request: a leader gets one from each of thousands of hosts at a time.
_MOST_AT_ONCE = 64
_MOST_BYTES_AT_ONCE = 1 << 20


def is_chunk_name(name: object) -> bool:
    """Whether a chunk may have this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def chunk_key(prefix: str, host: int, task: int, name: str) -> str:
    """The key of a chunk."""
    return f"{prefix}chunk/{host}/{task}/{name}"


def write_chunk(channel: ControlChannel, key: str, text: str, on_done: Callable[[], None]) -> None:
    """Write a chunk to the store in the background; ``on_done`` is called when it is there."""

    def write() -> None:
        give_up_at = time.monotonic() + _TRY_FOR_S
        while not channel.is_closed and time.monotonic() < give_up_at:
            try:
                client = channel.client.another()
                client.set(key, text)
                # The server's answer to this means that it has the text.
                client.check(key)
            except StoreBrokenError:
                # Perhaps the channel is being made again, over another network.
                time.sleep(_TRY_AGAIN_S)
                continue
            on_done()
            return

    threading.Thread(target=write, daemon=True).start()


class ChunkReader:
    """The leader's reading of chunks, in a thread of its own.

    Args:
        client: to the control store, of its own.
        prefix: the attempt's.
        limit_bytes: what is longer is dropped.
        deliver: gets host, task, name and text.
        is_busy: whether the receiver has enough to read for now.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        limit_bytes: int,
        deliver: Callable[[int, int, str, str], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._limit_bytes = limit_bytes
        self._deliver = deliver
        self._is_busy = is_busy
        self._names: dict[tuple[int, int], dict[str, bool]] = {}  # of each task, oldest first: whether it has been read
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[int, int, str] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Read what ``announce`` names, until ``close``."""
        threading.Thread(target=self._run, daemon=True).start()

    def announce(self, host: int, task: int, name: str) -> None:
        """A chunk is in the store. Each is read once, and of each task so many at most wait to be read."""
        if not (0 <= task < MOST_TASKS and is_chunk_name(name)):
            return
        with self._lock:
            names = self._names.setdefault((host, task), {})
            if name in names or not _has_room(names):
                return
            if name.startswith(ASKED_CHUNK):
                for other in [other for other in names if other.startswith(ASKED_CHUNK)]:
                    del names[other]
            names[name] = False
            self._waiting.put((host, task, name))

    def close(self) -> None:
        """Read no more."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (part := self._waiting.get()) is not None:
            while self._is_busy():
                time.sleep(_PAUSE_S)
            parts, is_last = self._with_waiting(part)
            texts = self._read([chunk_key(self._prefix, *part) for part in parts])
            with self._lock:
                for host, task, name in parts:
                    names = self._names[host, task]
                    if name in names:
                        names[name] = True
            for part in parts:
                text = texts.get(chunk_key(self._prefix, *part))
                if text is not None and len(text) <= self._limit_bytes:
                    self._deliver(*part, text.decode(errors="replace"))
            if is_last:
                return

    def _with_waiting(self, first: tuple[int, int, str]) -> tuple[list[tuple[int, int, str]], bool]:
        """This one and others that wait to be read, as many as are read at a time; and whether they are the last."""
        parts = [first]
        most = min(_MOST_AT_ONCE, _MOST_BYTES_AT_ONCE // max(1, self._limit_bytes))
        while len(parts) < most and not self._waiting.empty():
            part = self._waiting.get()
            if part is None:
                return parts, True
            parts.append(part)
        return parts, False

    def _read(self, keys: list[str]) -> dict[str, bytes]:
        """What lies there, by key. Nothing is waited for: a chunk is there before it is announced, or never will be."""
        found: dict[str, bytes] = {}
        for _ in range(2):
            missing = [key for key in keys if key not in found]
            try:
                texts = self._client.find_all(missing, longest=self._limit_bytes)
                found.update((key, text) for key, text in zip(missing, texts, strict=True) if text is not None)
                for key in found:
                    self._client.delete(key)
            except StoreBrokenError:
                # Something held the connection up; or another process deleted a key, which torch's store waits for.
                with suppress(StoreBrokenError):
                    self._client = self._client.another()
                continue
            break
        return found


def _has_room(names: dict[str, bool]) -> bool:
    """Whether one more name can be remembered. For it the oldest is forgotten, if it has been read."""
    if len(names) < _MOST_NAMES:
        return True
    oldest = next(iter(names))
    if not names[oldest]:
        return False
    del names[oldest]
    return True
