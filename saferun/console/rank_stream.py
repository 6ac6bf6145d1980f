"""One stream of one rank, from its pipe to its files and the console."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from saferun.console.console_stream import ConsoleStream
from saferun.console.lines import LONGEST_LOGGED_BYTES, LineAssembler, prefixed
from saferun.errors import suppress
from saferun.files.file_stream import FileStream
from saferun.model import KEPT_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.streams import RankPipes

READ_BYTES = 64 << 10
# After so many reads in a row that filled half of the buffer, a rank writes faster than it is read. Writes that are no
# multiple of a page leave gaps in a full pipe: such a read may have emptied it.
_LOUD_READS = 4
_HEAP_BYTES = 4 << 20
# Chunks up to this size are joined, so that a rank that writes byte by byte does not cost an object per byte.
_SMALL_BYTES = 4 << 10


def keep_heap() -> None:
    """Have malloc keep blocks of this size instead of mapping and unmapping each.

    glibc adapts its threshold to the size of a freed block, see M_MMAP_THRESHOLD in mallopt(3); this one is never
    touched. With other C libraries it has no effect.
    """
    bytes(_HEAP_BYTES)


class LineFilter:
    r"""Copies the lines that contain one of some strings to a file (torchrun's ``--duplicate-*-filters``).

    As torchrun's do, lines end at ``\n``, ``\r\n`` and ``\r``: each state of a bar is one.
    """

    def __init__(self, sink: FileStream, needles: tuple[str, ...], header: str) -> None:
        self._sink = sink
        self._needles = tuple(needle.encode() for needle in needles)
        self._header = header.encode()
        self._lines = LineAssembler(LONGEST_LOGGED_BYTES)
        self._open_end = b""  # a carriage return that may belong to the line feed behind it

    def feed(self, chunk: bytes) -> None:
        """More bytes of the stream."""
        if self._open_end:
            chunk, self._open_end = self._open_end + chunk, b""
        if b"\r" in chunk:
            if chunk.endswith(b"\r"):
                chunk, self._open_end = chunk[:-1], b"\r"
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = self._lines.feed(chunk)
        if text and any(needle in text for needle in self._needles):
            self._copy(text)

    def close(self) -> None:
        """The stream has ended."""
        rest = self._lines.take()
        if rest:
            self._copy(rest)

    def _copy(self, text: bytes) -> None:
        lines = text.removesuffix(b"\n").split(b"\n")
        kept = [line for line in lines if any(needle in line for needle in self._needles)]
        if kept:
            self._sink.write(prefixed(self._header, b"\n".join(kept)))


class RankStream:
    """The reading end of a rank's stdout or stderr.

    Args:
        fd: the pipe's reading end or the pseudo-terminal's master, non-blocking.
        local_rank: whose stream it is.
        is_stderr: whether it is stderr.
        files: receive the raw bytes.
        console: receives the lines, if not None.
        line_filter: torchrun's filter file, if any.
        pipes: enlarges the pipe if the rank keeps filling it; None: nothing does.

    Attributes:
        on_chunk: takes each chunk as well, if not None.
        is_log: whether the first file is one of ``--log-dir``: the rank waits for it, however slow it is, as under
            torchrun.
    """

    __slots__ = (
        *("_console", "_files", "_full_reads", "_kept", "_last", "_line_filter", "_pipe_bytes", "_pipes", "_size"),
        *("bytes_read", "fd", "is_log", "is_paused", "is_stderr", "local_rank", "on_chunk"),
    )

    def __init__(
        self,
        fd: int,
        local_rank: int,
        *,
        is_stderr: bool,
        files: tuple[FileStream, ...],
        console: ConsoleStream | None,
        line_filter: LineFilter | None,
        pipes: RankPipes | None = None,
    ) -> None:
        self.fd = fd
        self.local_rank = local_rank
        self.is_stderr = is_stderr
        self.bytes_read = 0
        self._files = files
        self._console = console
        self._line_filter = line_filter
        self._last: deque[bytes] = deque()
        self._kept = 0
        self._size = READ_BYTES
        self._pipes = pipes
        self._pipe_bytes = pipes.size_of(fd) if pipes is not None else READ_BYTES
        self._full_reads = 0
        self.on_chunk: Callable[[bytes], None] | None = None
        self.is_log = False
        self.is_paused = False  # it is not read, for want of room; what its rank has written since is not known
        if console is not None:
            console.is_held = self._is_held

    def _is_held(self) -> bool:
        return self.is_paused or self.is_full

    @property
    def is_shown(self) -> bool:
        """Whether its lines go to the console."""
        return self._console is not None

    @property
    def is_full(self) -> bool:
        """Whether to pause reading: its console is slow and no file has a copy, or its files are slow."""
        if self._console is not None and self._console.is_full:
            return True
        return bool(self._files) and (self._files[0].is_full or (self.is_log and self._files[0].would_miss))

    def read(self, now: float, *, is_last: bool = False) -> int:
        """Read one chunk and forward it.

        Args:
            now: monotonic seconds.
            is_last: whether this is the last chance to do so: then files accept it without room.

        Returns:
            Its size in bytes; 0 at the end of the stream, -1 if nothing can be read now.
        """
        try:
            chunk = os.read(self.fd, self._size)
        except BlockingIOError:
            return -1
        except OSError:
            # EIO: the last process that had the pseudo-terminal open has exited.
            chunk = b""
        if not chunk:
            return 0
        for file in self._files:
            file.write(chunk, must=is_last)
        if self._console is not None:
            try:
                self._console.feed(chunk, now)
            except Exception:
                self._console.show_plainly(chunk)
        if self._line_filter is not None:
            self._line_filter.feed(chunk)
        if self.on_chunk is not None:
            try:
                self.on_chunk(chunk)
            except Exception:
                self.on_chunk = None
        size = len(chunk)
        self.bytes_read += size
        self._size_next(size)
        self._keep(chunk if size <= KEPT_BYTES else chunk[-KEPT_BYTES:])
        return size

    def _size_next(self, size: int) -> None:
        """Decide how much is read next, after a chunk of this size in bytes."""
        if size >= min(self._size, self._pipe_bytes) // 2:
            self._full_reads += 1
            if self._full_reads >= _LOUD_READS and self._pipes is not None:
                self._enlarge_pipe(self._pipes)
            # Half of what the pipe holds: the rank can continue to write meanwhile.
            self._size = max(self._pipe_bytes // 2, READ_BYTES)
        else:
            self._full_reads = 0
            if size < READ_BYTES:
                self._size = READ_BYTES

    def _enlarge_pipe(self, pipes: RankPipes) -> None:
        held = pipes.enlarge(self.fd)
        if held > self._pipe_bytes:
            keep_heap()
            self._pipe_bytes, self._full_reads = held, 0
        else:
            self._pipes = None  # there is no room for more

    def _keep(self, chunk: bytes) -> None:
        size = len(chunk)
        if self._last and size + len(self._last[-1]) <= _SMALL_BYTES:
            self._last[-1] += chunk
        else:
            self._last.append(chunk)
        self._kept += size
        while self._kept - len(self._last[0]) >= KEPT_BYTES:
            self._kept -= len(self._last.popleft())

    @property
    def console(self) -> ConsoleStream | None:
        """Where its lines are shown, if anywhere."""
        return self._console

    def last_bytes(self, count: int) -> bytes:
        """The last bytes that it has written, as far as they are kept."""
        return b"".join(self._last)[-count:]

    def last_lines(self, count: int) -> tuple[str, ...]:
        """The last lines that are not blank, decoded for display."""
        text = b"".join(self._last)[-KEPT_BYTES:].decode(errors="replace").replace("\r", "\n")
        if "\x1b" in text:
            with suppress(ImportError):  # its file cannot be read: the text stays as it is
                from saferun.console.rows import without_sequences

                text = without_sequences(text)
        lines = [line.rstrip() for line in text.split("\n") if line.strip()]
        return tuple(lines[-count:])

    def close(self) -> None:
        """Flush the unfinished line and close everything that belongs to this stream alone."""
        if self._console is not None:
            with suppress(Exception):
                self._console.close()
        if self._line_filter is not None:
            self._line_filter.close()
        for file in self._files:
            file.close()
        os.close(self.fd)
