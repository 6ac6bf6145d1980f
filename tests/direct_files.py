"""The files of a launch without the writer process, for tests of what is in them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from saferun.files.file_server import FileServer
from saferun.files.file_stream import FileStream, OnAnswer, read_answer, report
from saferun.files.ring import ASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.model import JsonObject


class DirectFiles:
    """Files that are written by who asks, at once."""

    is_stalled = False

    def __init__(self) -> None:
        self.directory = ""
        self.on_failed: Callable[[str, OSError, bool], None] = _nothing
        self.on_written: Callable[[str, int], None] = _nothing
        self._said: list[JsonObject] = []
        self._server = FileServer(self._said.append)
        self._opened = 0

    def open(self, path: str, how: int) -> FileStream:
        """See Files."""
        self._opened += 1
        return FileStream(path, self._opened, self, how)

    def ask(self, name: str, arguments: list[object], on_answer: OnAnswer | None = None) -> None:
        """See Files. The answer comes before this returns."""
        self._server.handle(ASK, 0, memoryview(json.dumps([0, name, arguments]).encode()))
        answer = self._said.pop()
        if on_answer is not None:
            on_answer(read_answer(answer))

    def finish(self) -> None:
        """Close everything, and try once more what has failed."""
        self._server.finish()
        self._tell()

    def put(self, kind: int, stream: int, payload: bytes | memoryview, *, must: bool) -> bool:  # noqa: ARG002 - there is always room
        """Write it."""
        self._server.handle(kind, stream, memoryview(payload))
        self._tell()
        return True

    is_too_slow = False

    def has_room(self, stream: int, size_bytes: int) -> bool:  # noqa: ARG002
        """There always is."""
        return True

    def is_slow(self) -> bool:
        """Whoever calls is as slow."""
        return False

    def give_back(self, number: int) -> None:
        """There are enough numbers."""

    def _tell(self) -> None:
        while self._said:
            report(self, self._said.pop(0))


def _nothing(*_arguments: object) -> None:
    """No one wants to know."""
