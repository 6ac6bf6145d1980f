"""Chunks of bytes -> whole lines, prefixed. Pure; works on whole chunks, never line by line in the usual case."""

from __future__ import annotations

from collections.abc import Sequence

# Longer lines are forwarded in pieces, so that a stream without line ends cannot fill the memory.
LONGEST_LINE_BYTES = 1 << 20
# The same where programs read them, to which a line of JSON is one. There its end is waited for a second at most.
LONGEST_LOGGED_BYTES = 8 << 20


class LineAssembler:
    r"""Cuts one stream into whole lines, however its bytes are split into chunks.

    What has no line end yet is ``unfinished``. Of a line that overwrites itself (a progress bar's ``\r``) only the
    newest state is kept: it is all that a reader would see.

    Args:
        longest_bytes: longer lines are forwarded in pieces.
    """

    __slots__ = ("_longest_bytes", "_overwritten", "_pieces", "_size")

    def __init__(self, longest_bytes: int = LONGEST_LINE_BYTES) -> None:
        self._longest_bytes = longest_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._overwritten = False

    def feed(self, chunk: bytes) -> bytes:
        """The whole lines that the chunk completes; empty where it completes none.

        The result ends with a line feed, unless a line is too long and is forwarded in pieces.
        """
        end = chunk.rfind(b"\n") + 1
        if end == 0:
            self._hold(chunk)
            return self.take() if self._size > self._longest_bytes else b""
        if self._pieces:
            self._pieces.append(chunk[:end])
            text = b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
        else:
            text = chunk if end == len(chunk) else chunk[:end]
        self._overwritten = False
        if end < len(chunk):
            self._hold(chunk[end:])
        return newest_states(text) if b"\r" in text else text

    def feed_prefixed(self, chunk: bytes, prefix: bytes) -> Sequence[bytes | memoryview]:
        """The same lines, each after the prefix, in pieces, with as little copying as possible."""
        end = chunk.rfind(b"\n") + 1
        if end == 0 or b"\r" in chunk or any(b"\r" in piece for piece in self._pieces):
            text = self.feed(chunk)
            return (prefixed(prefix, text),) if text else ()
        pieces: list[bytes | memoryview] = [prefix, *self._pieces]
        self._pieces.clear()
        self._size = 0
        self._overwritten = False
        unfinished = len(chunk) - end
        if unfinished:
            self._hold(chunk[end:])
        # All lines at once; the last prefix belongs to the unfinished line and is left out.
        text = chunk.replace(b"\n", b"\n" + prefix) if prefix else chunk
        pieces.append(memoryview(text)[: len(text) - unfinished - len(prefix)])
        return pieces

    def skip(self, chunk: bytes) -> int:
        """Drop the whole lines that the chunk completes. Returns how many."""
        end = chunk.rfind(b"\n") + 1
        if end == 0:
            self.feed(chunk)
            return 0
        self._pieces.clear()
        self._size = 0
        self._overwritten = False
        if end < len(chunk):
            self._hold(chunk[end:])
        return chunk.count(b"\n")

    def take(self) -> bytes:
        """Take the unfinished line, which is then empty."""
        text = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        self._overwritten = False
        return newest_state(text) if b"\r" in text else text

    def take_back(self) -> bytes:
        """Take the unfinished line to feed it again, which changes nothing; empty for one that overwrites itself."""
        if self._overwritten or any(b"\r" in piece for piece in self._pieces):
            return b""
        return self.take()

    def ends_with(self, end: bytes) -> bool:
        """Whether the unfinished line ends with this, as far as it came last."""
        return bool(self._pieces) and self._pieces[-1].endswith(end)

    @property
    def unfinished(self) -> bytes:
        """The line that has no end yet."""
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return newest_state(self._pieces[0]) if self._pieces else b""

    @property
    def overwrites_itself(self) -> bool:
        """Whether the unfinished line is rewritten in place, like a progress bar."""
        return self._overwritten or bool(self._pieces and self._pieces[-1].endswith(b"\r"))

    def __bool__(self) -> bool:
        """Whether there is an unfinished line."""
        return self._size > 0

    def _hold(self, rest: bytes) -> None:
        if b"\r" in rest:
            # Everything before the last state has been overwritten. A trailing \r may belong to a \r\n.
            self._pieces.append(rest)
            rest = b"".join(self._pieces)
            newest = rest.rstrip(b"\r").rfind(b"\r") + 1
            self._overwritten = self._overwritten or newest > 0
            rest = rest[newest:]
            self._pieces.clear()
            self._size = 0
        self._pieces.append(rest)
        self._size += len(rest)


def newest_state(line: bytes) -> bytes:
    """What a terminal shows of a line that overwrites itself: the text after its last carriage return."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


def newest_states(text: bytes) -> bytes:
    r"""The same for whole lines. Lines that merely end with ``\r\n`` are left as they are."""
    if text.count(b"\r") == text.count(b"\r\n"):
        return text
    return b"".join(
        line if line.count(b"\r") == line.endswith(b"\r\n") else newest_state(line.rstrip(b"\r\n")) + b"\n"
        # Not splitlines: it would also split at the carriage returns.
        for line in (part + b"\n" for part in text.removesuffix(b"\n").split(b"\n"))
    )


def prefixed(prefix: bytes, text: bytes) -> bytes:
    """Every line of ``text`` after the prefix; a missing line feed at the end is added."""
    if text.endswith(b"\n"):
        text = text[:-1]
    if not prefix:
        return text + b"\n"
    return prefix + text.replace(b"\n", b"\n" + prefix) + b"\n"


def closed_row(row: bytes) -> bytes:
    """A row without a line end, with the end of its colours."""
    return row + b"\x1b[0m" if b"\x1b[" in row and not row.endswith(b"\x1b[0m") else row


def shown_width(row: bytes) -> int:
    """How many characters a row shows; its colours are none."""
    text = row.decode(errors="replace")
    first, *others = text.split("\x1b[")
    return len(first) + sum(len(part.partition("m")[2]) for part in others)
