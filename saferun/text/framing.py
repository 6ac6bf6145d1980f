"""JSON objects, one a line, out of the chunks in which a connection or a pipe brings them. Pure."""

from __future__ import annotations

import json

from saferun.errors import suppress
from saferun.model import JsonObject


class MessageBuffer:
    """Puts chunks together; what is no JSON object is left out.

    Args:
        longest_bytes: how long a line may be.
    """

    def __init__(self, longest_bytes: int) -> None:
        self._longest_bytes = longest_bytes
        self._chunks: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[JsonObject] | None:
        """The messages that a chunk completes; None: the other side sends a line without end."""
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
