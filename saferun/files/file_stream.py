"""What the supervisor has in its hands of a file: bytes go in, and nothing is ever waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from saferun.files.ring import CLOSE, DATA, GAP, OPEN
from saferun.linux.ownership import NotOursError
from saferun.model import JsonObject, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol
else:
    Protocol = object

# How a file is opened: created at once, created at its first byte, appended to, or replaced as a whole.
FRESH, LAZY, APPENDED, WHOLE = range(4)
_PIECE_BYTES = 128 << 10
_AMPLE_BYTES = 256 << 10
_LARGEST_CHUNK_BYTES = 512 << 10  # of a rank's output
_HUNG = "the file system did not answer"
_TOO_SLOW = "the file system was too slow"


class WriterAnswer(Value):
    """What an operation returned, or why it failed: a ``NotOursError`` where the file is another user's."""

    value: Any = None
    error: OSError | None = None


def read_answer(message: JsonObject) -> WriterAnswer:
    """The answer in a message of a file server."""
    if "error" not in message:
        return WriterAnswer(message["value"])
    errno, text, path = message["error"]
    return WriterAnswer(error=NotOursError(text, path) if message["is_theirs"] else OSError(errno, text, path))


OnAnswer = Callable[[WriterAnswer | None], None]
"""Takes the answer; None: none came in time."""


class Files(Protocol):
    """Whoever writes files."""

    on_failed: Callable[[str, OSError, bool], None]
    """Takes a file that cannot be written: its path, why, and whether it is tried again."""
    on_written: Callable[[str, int], None]
    """Takes one that can be again, and how many bytes are missing in it."""
    directory: str
    """What the files are said to be in: the run directory."""

    @property
    def is_stalled(self) -> bool:
        """Whether the file system does not answer, so that what comes now may be missing in the end."""

    def open(self, path: str, how: int) -> FileStream:
        """Open a file: FRESH, LAZY, APPENDED or WHOLE. What fails is reported to ``on_failed``."""

    def ask(self, name: str, arguments: list[object], on_answer: OnAnswer | None = None) -> None:
        """Have one of the operations carried out (``saferun.files.operations``)."""


class _Queue(Protocol):
    def put(self, kind: int, stream: int, payload: bytes | memoryview, *, must: bool) -> bool:
        """Queue a record. Returns whether it has found room; where it must, it has."""

    def has_room(self, stream: int, size_bytes: int) -> bool:
        """Whether so much would find room."""

    def is_slow(self) -> bool:
        """Whether whoever fills a stream should wait a moment."""

    @property
    def is_too_slow(self) -> bool:
        """Whether what finds no room is missing because the files take too little, though they do take something."""

    def give_back(self, number: int) -> None:
        """A stream's number is free again."""


class FileStream:
    """One open file.

    Args:
        path: the file.
        number: the stream's; 0: there is none for it, and it is closed from the start.
        queue: leads to whoever writes it.
        must: whether it is never cut short: what is small and matters.
    """

    def __init__(self, path: str, number: int, queue: _Queue, how: int) -> None:
        self.path = path
        self._number = number
        self._queue = queue
        self._must = how in {APPENDED, WHOLE}
        self._lost_bytes = 0
        self._lost_at = 0.0
        self._lost_why = _HUNG
        self._noted_bytes = 0  # lost, and noted in the file since it was asked last how much that is
        self._is_open = number > 0
        if self._is_open:
            queue.put(OPEN, number, json.dumps([path, how]).encode(), must=True)

    @property
    def is_full(self) -> bool:
        """Whether a rank's output should not be read for now, because its files are slow (and not stalled)."""
        return self._queue.is_slow()

    @property
    def would_miss(self) -> bool:
        """Whether output would be missing in it now, only because its file system is too slow."""
        return self._queue.is_too_slow and not self._queue.has_room(self._number, _LARGEST_CHUNK_BYTES)

    def write(self, chunk: bytes | memoryview, *, must: bool = False) -> None:
        """Append. What finds no room is counted, and a note will stand in its place.

        Args:
            chunk: the bytes.
            must: that it is the last chance to take them: they find room.
        """
        must = must or self._must
        if not self._is_open:
            return
        if len(chunk) > _PIECE_BYTES:
            view = memoryview(chunk)
            for start in range(0, len(view), _PIECE_BYTES):
                self.write(view[start : start + _PIECE_BYTES], must=must)
            return
        if self._lost_bytes and not must and not self._queue.has_room(self._number, _AMPLE_BYTES):
            # Not before there is ample room again: one gap is better than many.
            self._lost_bytes += len(chunk)
            return
        if self._lost_bytes:
            self._note_gap(must=True)
        if not self._queue.put(DATA, self._number, chunk, must=must):
            self._lost_bytes = len(chunk)
            self._lost_at = time.monotonic()
            self._lost_why = _TOO_SLOW if self._queue.is_too_slow else _HUNG

    def note_gap(self) -> int:
        """Note what has been lost so far. Returns how much that was since the last time."""
        if self._lost_bytes:
            self._note_gap(must=True)
        noted, self._noted_bytes = self._noted_bytes, 0
        return noted

    def close(self) -> None:
        """Nothing more will come. Writing to it afterwards does nothing."""
        if not self._is_open:
            return
        if self._lost_bytes:
            self._note_gap(must=True)
        self._is_open = False
        self._queue.put(CLOSE, self._number, b"", must=True)
        self._queue.give_back(self._number)

    def _note_gap(self, *, must: bool) -> bool:
        note = json.dumps([self._lost_bytes, self._lost_why, time.monotonic() - self._lost_at]).encode()
        if not self._queue.put(GAP, self._number, note, must=must):
            return False
        self._noted_bytes += self._lost_bytes
        self._lost_bytes = 0
        return True


def report(files: Files, message: JsonObject) -> bool:
    """Pass on what the file server says of a file. Returns whether it was that."""
    if "failed" in message:
        error = OSError(message["errno"], message["words"])
        files.on_failed(message["failed"], error, not message["once"])
        return True
    if "written" in message:
        files.on_written(message["written"], message["missing"])
        return True
    return False
