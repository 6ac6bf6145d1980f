"""JSON Lines framing: objects, one a line, from the chunks that a connection or a pipe delivers. Pure."""

from __future__ import annotations

import json

from saferun.errors import suppress
from saferun.model import JsonObject


class MessageBuffer:
    """Joins chunks into messages; lines that are not JSON objects are dropped.

    Args:
        longest_bytes: the maximum length of a line.
    """

    def __init__(self, longest_bytes: int) -> None:
        self._longest_bytes = longest_bytes
        self._chunks: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[JsonObject] | None:
        """The messages that a chunk completes; None if a line exceeds the maximum length."""
        if self._size > self._longest_bytes:
            return None
        self._chunks.append(chunk)
        self._size += len(chunk)
        if b"\n" not in chunk:
            return []
        *lines, rest = b"".join(self._chunks).split(b"\n")
        self._chunks, self._size = [rest], len(rest)
        messages = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages
