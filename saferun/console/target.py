"""Where the console's bytes go: saferun's own stdout and stderr, never waited for."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable

# What may wait for a slow reader; beyond it whole lines are skipped (they stand in the run directory) or, where no
# files are kept, the ranks' streams are not read for a while.
MOST_WAITING_BYTES = 8 << 20
_ONE_WRITE_BYTES = 256 << 10
_PIPE_BUF = 4096
# What says so, or says nothing, knows neither colours nor cursor movements (terminfo(5)): it is written like a file.
_DUMB = frozenset({None, "", "dumb"})


class Target:
    """One open file behind stdout or stderr (or both), written without ever blocking.

    Args:
        fd: the descriptor; left as it is, since others share its open file.
        skipping: whether lines may be skipped when the reader is too slow.
        where: tells where skipped lines can be read, for the note about them.
    """

    def __init__(self, fd: int, *, skipping: bool, where: Callable[[], str]) -> None:
        mode = os.fstat(fd).st_mode
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM") not in _DUMB and _is_own_terminal(fd)
        self.is_broken = False
        self.fd = fd
        self.skipping = skipping
        self._where = where
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._skipped_lines = 0
        # Brings a note of skipped lines into the form in which it is queued.
        self.shape_note: Callable[[bytes], bytes] = bytes
        self._write: Callable[[bytes], int]
        if stat.S_ISREG(mode):
            self.can_wait = False
            self._write = self._write_plainly
        else:
            self.can_wait = True
            self._write = self._choose(mode)

    # ----------------------------------------------------------------------------------------------------------------

    def has_room(self, size_bytes: int) -> bool:
        """Whether lines of this size would be queued, or skipped because the reader is too slow.

        A note of what was skipped before is queued first, when there is room again.
        """
        if self.is_broken:
            return False
        if self._skipped_lines and (not self.skipping or self._waiting_bytes < MOST_WAITING_BYTES // 2):
            self._queue_note()
        if not self.skipping:
            return True
        # However large, a chunk finds room where nothing waits: then the reader has not been slow.
        return not self._waiting or (not self._skipped_lines and self._waiting_bytes + size_bytes <= MOST_WAITING_BYTES)

    def put(self, text: bytes) -> None:
        """Queue bytes, whether there is room or not. Nothing is written before ``flush``."""
        if text and not self.is_broken:
            self._waiting.append(text)
            self._waiting_bytes += len(text)

    def skip(self, lines: int) -> None:
        """Count lines that are not shown because there was no room."""
        if not self.is_broken:
            self._skipped_lines += lines

    @property
    def is_full(self) -> bool:
        """Whether the streams that lead here should not be read for now."""
        return not self.skipping and not self.is_broken and self._waiting_bytes > MOST_WAITING_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting and not self._skipped_lines

    def flush(self) -> bool:
        """Write as much as goes without waiting. Returns whether something was written."""
        wrote = False
        while not self.is_broken:
            if not self._waiting:
                if not self._skipped_lines:
                    break
                self._queue_note()
            block = self._next_block()
            try:
                count = self._write(block)
            except BlockingIOError:
                self._put_back(block)
                break
            except OSError:
                # The reader is gone, or the terminal is. The ranks do not care; the files go on.
                self.is_broken = True
                self._waiting.clear()
                self._waiting_bytes = 0
                self._skipped_lines = 0
                break
            wrote = wrote or count > 0
            self._waiting_bytes -= count
            if count < len(block):
                self._waiting.appendleft(block[count:])
        return wrote

    def _next_block(self) -> bytes:
        block = self._waiting.popleft()
        if not self._waiting or len(block) >= _ONE_WRITE_BYTES:
            return block
        parts = [block]
        size = len(block)
        while self._waiting and size < _ONE_WRITE_BYTES:
            parts.append(self._waiting.popleft())
            size += len(parts[-1])
        return b"".join(parts)

    def _put_back(self, block: bytes) -> None:
        self._waiting.appendleft(block)

    def _queue_note(self) -> None:
        count, self._skipped_lines = self._skipped_lines, 0
        note = f"saferun: this output is read too slowly: {count} lines skipped here; {self._where()}\n"
        self.put(self.shape_note(note.encode(errors="backslashreplace")))

    # ----------------------------------------------------------------------------------------------------------------

    def _choose(self, mode: int) -> Callable[[bytes], int]:
        """A way to write that returns instead of waiting.

        Setting O_NONBLOCK on the descriptor itself would change it for every process that shares it (the shell, the
        other end of ``2>&1``), so the file is opened once more.
        """
        if stat.S_ISSOCK(mode):
            import socket

            sock = socket.socket(fileno=os.dup(self.fd))
            return lambda block: sock.send(block, socket.MSG_DONTWAIT)
        try:
            self.fd = os.open(f"/proc/self/fd/{self.fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return self._write_carefully
        return self._write_plainly

    def _write_plainly(self, block: bytes) -> int:
        return os.write(self.fd, block)

    def _write_carefully(self, block: bytes) -> int:
        """For a pipe or terminal of another user, which cannot be opened again: small writes when there is room."""
        import select

        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self.fd, block[:_PIPE_BUF])


def _is_own_terminal(fd: int) -> bool:
    """Whether a terminal is the one that this process was started on.

    Open MPI's daemons give their tasks pseudo-terminals that nobody looks at: what comes out of them goes to a pipe or
    a file, with that of all other tasks.
    """
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True
