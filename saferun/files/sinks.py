"""Files that are written as well as it goes: what fails is tried again, and what is missing is noted at its place.

Every call of the operating system may fail at any moment, also twice, and none of it is passed on as an exception. A
descriptor is closed once, whatever ``close`` says.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from saferun.errors import suppress
from saferun.files.removed_file import QuietCheck, RemovalCheck
from saferun.files.time_index import NO_CUT
from saferun.files.trees import open_parent
from saferun.files.trimmed_file import DISK_FULL, TOO_LARGE, leave_out_middle
from saferun.linux.ownership import open_temporary

# What a file that cannot be written keeps in memory; what comes after it is missing in the end.
_KEPT_BYTES = 256 << 10
# The same for all of them together.
ALL_KEPT_BYTES = 4 << 20
RETRY_S = 1.0
# A copy of the ranks' output leaves so much of the file system to the job, which may want to write a checkpoint there.
_RESERVE_BYTES = 1 << 30
_RESERVE_SHARE = 0.02
_CHECK_EVERY_BYTES = 8 << 20
# A smaller file makes no room worth having where the disk is full.
_LEAST_LEFT_OUT_BYTES = 4 << 20
_DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MOST_BLOCKS = 1024  # IOV_MAX
_PIECE_BYTES = 1 << 20
_REMOVED = "the file was removed"
_JSON_LINES = ".jsonl"  # each line is a value: no note stands among them

Report = Callable[[str, OSError | None, int], None]
"""Called when a file cannot be written (path, error, 0), or that it can be again (path, None, missing bytes)."""
FOR_ONCE = -1
"""In place of the missing bytes: something has failed that is not tried again."""


class Budget:
    """How much all files together may keep in memory."""

    def __init__(self, size_bytes: int = ALL_KEPT_BYTES) -> None:
        self.left_bytes = size_bytes


def gap_note(missing_bytes: int, reason: str, lasted_s: float | None = None) -> bytes:
    """The line that stands in a file where something is missing."""
    lasted = "" if lasted_s is None else f" for {lasted_s:.0f} s"
    bytes_are = "byte of this stream is" if missing_bytes == 1 else "bytes of this stream are"
    note = f"[saferun: {missing_bytes} {bytes_are} missing here: {reason}{lasted}]\n"
    return note.encode(errors="backslashreplace")


class Sink:
    """One file that grows.

    Args:
        path: the file.
        fresh: whether what is there from before is deleted.
        budget: shared by all files.
        report: called when writing fails, and when it works again.
    """

    def __init__(self, path: str, *, fresh: bool, budget: Budget, report: Report) -> None:
        self.path = path
        self.retry_at: float | None = None
        """When it is tried again, in monotonic seconds; None: nothing has failed."""
        self.missing_bytes = 0
        self.position = 0
        """How many bytes have been written to the file, with those that were left out later."""
        self.cut = NO_CUT
        """What was left out of it."""
        self.keep_bytes = 0
        """How large the file may become, about: beyond that its middle is left out; 0: there is no limit."""
        self.gives_way = False
        """Whether the job's own files have precedence where the disk is full."""
        self._unchecked_bytes = 0  # written since the room was checked
        self._has_given_way = False  # since it could be written last
        self._left_out_for = TOO_LARGE
        self._fresh = fresh
        self._budget = budget
        self._report = report
        self._fd = -1
        self._removal: RemovalCheck | None = None
        self._is_removed = False  # and that has been reported
        self._removed_bytes = 0  # what is missing in it since it was made again, until that is reported
        self._directory: QuietCheck | None = None  # None: the file has not been open yet
        self._failed_at = 0.0
        self._reason = ""
        self._kept: deque[memoryview] = deque()
        self._kept_bytes = 0
        self._is_within_line = False

    def open(self) -> None:
        """Make the file now, and not when there is something to be written."""
        self._try(deque())

    def write(self, blocks: Iterable[memoryview]) -> None:
        """Append; what cannot be written now is kept for later, as far as there is room."""
        if self.retry_at is not None:
            self._keep(blocks)
            self.retry(time.monotonic())
            return
        if self._removal is not None and self._removal.is_removed(self._fd):
            self._follow_removal()
        is_opened = self._fd < 0
        if self._try(deque(blocks)) and is_opened and self._is_removed:
            self._report_written(0)

    def touch(self) -> None:
        """Set the file's time."""
        if self._fd >= 0:
            with suppress(OSError):
                os.utime(self._fd)

    def note_gap(self, missing_bytes: int, reason: str, lasted_s: float) -> None:
        """Something is missing here that has never come."""
        if self.retry_at is not None:
            self.missing_bytes += missing_bytes
        else:
            self._try(deque([memoryview(self._line_end() + gap_note(missing_bytes, reason, lasted_s))]))

    def retry(self, now: float, *, at_once: bool = False) -> None:
        """Try again, where that is due."""
        if self.retry_at is None or (now < self.retry_at and not at_once):
            return
        blocks, self._kept = self._kept, deque()
        self._budget.left_bytes += self._kept_bytes
        self._kept_bytes = 0
        missing = self.missing_bytes
        if missing:
            line_end = b"\n" if (blocks[-1][-1] != 10 if blocks else self._is_within_line) else b""  # noqa: PLR2004
            blocks.append(memoryview(line_end + gap_note(missing, self._reason, now - self._failed_at)))
            self.missing_bytes = 0
        if self._try(blocks):
            self.retry_at, self._has_given_way = None, False
            self._report_written(missing)
        else:
            if missing and blocks:
                # The note is made again the next time.
                blocks.pop()
                self.missing_bytes += missing
            self._keep(blocks)

    def close(self) -> None:
        """Close the file. One that has failed is tried once more; ``retry`` may still be called.

        One that has been removed since its last bytes is not made again: that is only reported.
        """
        self.retry(time.monotonic(), at_once=True)
        if not self._is_removed and self._removal is not None and self._removal.may_lack(self._fd):
            self._report(self.path, OSError(errno.ENOENT, _REMOVED), FOR_ONCE)
        self._close()

    @property
    def unwritten_bytes(self) -> int:
        """What has come and is not in the file."""
        return self._kept_bytes + self.missing_bytes

    def _line_end(self) -> bytes:
        return b"\n" if self._is_within_line else b""

    def _try(self, blocks: deque[memoryview]) -> bool:
        """Write the blocks; those that are left could not be written, and are kept unless this is a retry already."""
        try:
            if self._fd < 0:
                self._fd = self._open_for_append(blocks)
                self._removal = RemovalCheck(self._fd)
            while blocks:
                if self.gives_way and self._unchecked_bytes >= _CHECK_EVERY_BYTES:
                    self._check_room()
                count = os.writev(self._fd, list(islice(blocks, _MOST_BLOCKS)))
                self._drop(blocks, count)
                if self._removal is not None:
                    self._removal.note_written()
                if self.keep_bytes and self.size_bytes > self.keep_bytes:
                    self._leave_out_middle()
        except OSError as error:
            self._fail(error, blocks)
            return False
        return True

    def _check_room(self) -> None:
        """Check whether there is room for more than the job may need.

        Raises:
            OSError: there is not.
        """
        free_bytes = reserve_bytes = 0
        with suppress(OSError):
            system = os.fstatvfs(self._fd)
            free_bytes = system.f_bavail * system.f_frsize
            reserve_bytes = min(_RESERVE_BYTES, int(system.f_blocks * system.f_frsize * _RESERVE_SHARE))
        if 0 < free_bytes < reserve_bytes:  # some file systems do not know, and say 0
            raise OSError(errno.ENOSPC, f"less than {reserve_bytes >> 20} MiB are free, which are left to the job")
        self._unchecked_bytes = 0

    def _make_room(self) -> None:
        """The disk is full, perhaps of this copy of a rank's output: its middle is left out."""
        if self.size_bytes >= _LEAST_LEFT_OUT_BYTES:
            self.keep_bytes, self._left_out_for = self.size_bytes // 2, DISK_FULL
            self._leave_out_middle()

    def _open_for_append(self, blocks: deque[memoryview]) -> int:
        flags = os.O_WRONLY | os.O_APPEND
        if self._directory is None:
            fd = self._opened(flags | os.O_CREAT | (os.O_TRUNC if self._fresh else 0))
            self._directory = QuietCheck(os.path.dirname(self.path))
        else:
            fd = self._opened_again(flags, self._directory, blocks)
        if self._fresh:
            self.position = 0
        else:
            self._compare_size(os.fstat(fd).st_size)
        self._fresh = False
        return fd

    def _compare_size(self, size_bytes: int) -> None:
        """Take the file as it is where it has not the size that it should have.

        Others truncate it (logrotate's copytruncate): nothing is where it was, and what was left out is unknown. Or
        they append to it: the beginning and the mark are where they were.
        """
        if size_bytes < self.size_bytes:
            self.position, self.cut = size_bytes, NO_CUT
        else:
            self.position += size_bytes - self.size_bytes

    def _opened_again(self, flags: int, directory: QuietCheck, blocks: deque[memoryview]) -> int:
        """The file; one that has been removed is made again, with a note, unless its directory may be being removed.

        A rank that clears a directory must find it empty in the end.
        """
        removed = self.size_bytes
        with suppress(FileNotFoundError):
            fd = self._opened(flags)
            if self._is_removed:  # another process has made it again
                self.cut, self._is_within_line = NO_CUT, False
            return fd
        if not directory.is_quiet():
            raise OSError(errno.ENOENT, _REMOVED)
        fd = self._opened(flags | os.O_CREAT)
        self._removed_bytes += removed
        self.cut, self._is_within_line = NO_CUT, False
        if removed and not self.path.endswith(_JSON_LINES):
            blocks.appendleft(memoryview(gap_note(removed, _REMOVED)))
        return fd

    def _follow_removal(self) -> None:
        """The file has been removed: it is written on as it is, as under torchrun, until it can be opened again."""
        if not self._is_removed:
            self._is_removed = True
            self._report(self.path, OSError(errno.ENOENT, _REMOVED), 0)
        if self._directory is not None and self._directory.is_quiet():
            self._close()

    def _report_written(self, missing_bytes: int) -> None:
        removed, self._removed_bytes = self._removed_bytes, 0
        self._is_removed = False
        self._report(self.path, None, missing_bytes + removed)

    def _opened(self, flags: int) -> int:
        flags |= os.O_CLOEXEC
        parent, name, tree = open_parent(self.path)
        try:
            if tree is None:
                return os.open(name, flags, 0o666, dir_fd=parent)
            return tree.open_file(parent, name, flags, self.path)
        finally:
            with suppress(OSError):
                os.close(parent)

    @property
    def size_bytes(self) -> int:
        """How large the file is."""
        return self.position - self.cut.left_out_bytes + self.cut.mark_bytes

    def _leave_out_middle(self) -> None:
        """Keep the beginning and the end of the file, with a mark between them. What fails is not tried again.

        Where others have truncated the file, or have put another one in its place, that waits until it is too large.
        One that has been removed is emptied: it takes room, and cannot be read by name any more.
        """
        try:
            if self._is_removed:
                os.ftruncate(self._fd, 0)
                self.position, self.cut = 0, NO_CUT
                return
            fd = self._opened(os.O_RDWR)
            try:
                size_bytes = os.fstat(fd).st_size
                is_truncated = size_bytes < self.size_bytes
                self._compare_size(size_bytes)
                if not is_truncated:
                    self.cut = leave_out_middle(fd, self.cut, self.size_bytes, self.keep_bytes, self._left_out_for)
            finally:
                os.close(fd)
        except OSError as error:
            self.keep_bytes = 0
            self._report(self.path, error, FOR_ONCE)

    def _drop(self, blocks: deque[memoryview], count: int) -> None:
        self.position += count
        self._unchecked_bytes += count
        while count:
            block = blocks[0]
            written = min(count, len(block))
            self._is_within_line = block[written - 1] != 10  # noqa: PLR2004 - a line feed
            count -= written
            if written == len(block):
                blocks.popleft()
            else:
                blocks[0] = block[written:]
        while blocks and not blocks[0]:
            blocks.popleft()

    def _fail(self, error: OSError, blocks: deque[memoryview]) -> None:
        now = time.monotonic()
        first = self.retry_at is None
        self.retry_at = now + RETRY_S
        self._reason = error.strerror or str(error)
        if self.gives_way and error.errno in _DISK_IS_FULL:
            if not self._has_given_way and self._unchecked_bytes < _CHECK_EVERY_BYTES:
                self._has_given_way = True
                self._make_room()
            self._unchecked_bytes = _CHECK_EVERY_BYTES  # there must be more than a little before it is written again
        # A stale handle stays stale: it is opened again.
        self._close()
        if first:
            self._failed_at = now
            self._keep(blocks)
            self._report(self.path, error, 0)

    def _keep(self, blocks: Iterable[memoryview]) -> None:
        """Copy what cannot be written now; in one piece up to where there is no more room, so that one gap is left."""
        for block in blocks:
            room = min(_KEPT_BYTES - self._kept_bytes, self._budget.left_bytes) if not self.missing_bytes else 0
            kept = memoryview(bytes(block[:room]))
            if kept:
                self._kept.append(kept)
                self._kept_bytes += len(kept)
                self._budget.left_bytes -= len(kept)
            self.missing_bytes += len(block) - len(kept)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        self._removal = None
        if fd < 0:
            return
        try:
            os.close(fd)
        except OSError as error:
            # It is closed all the same. Errors of earlier writes may come only now, on NFS and with quotas.
            if self.retry_at is None:
                self._report(self.path, error, FOR_ONCE)


class WholeFile:
    """A file that is there as a whole, or not at all: it replaces the previous one once all of it has come.

    Args:
        path: the file.
        report: called when it cannot be written, and when it can after all.
    """

    mode = 0o666

    def __init__(self, path: str, *, report: Report) -> None:
        self.path = path
        self.retry_at: float | None = None
        self._report = report
        self._pieces: list[bytes] = []

    def write(self, blocks: Iterable[memoryview]) -> None:
        """More of it."""
        self._pieces += map(bytes, blocks)

    def note_gap(self, missing_bytes: int, reason: str, lasted_s: float) -> None:
        """Something is missing here that has never come."""
        self._pieces.append(gap_note(missing_bytes, reason, lasted_s))

    def open(self) -> None:
        """There is nothing to be seen before it is whole."""

    @property
    def unwritten_bytes(self) -> int:
        """What has come and is not in the file."""
        return sum(map(len, self._pieces)) if self.retry_at is not None else 0

    def close(self) -> None:
        """All has come."""
        self._put()

    def retry(self, now: float, *, at_once: bool = False) -> None:
        """Try again, where that is due."""
        if self.retry_at is not None and (now >= self.retry_at or at_once):
            self._put()

    def forget(self) -> None:
        """It is not to be written any more: a newer one takes its place."""
        self.retry_at = None
        self._pieces.clear()

    def _put(self) -> None:
        try:
            parent, name, tree = open_parent(self.path)
            try:
                self._replace(parent, name, self.mode & tree.file_mode if tree is not None else self.mode)
            finally:
                with suppress(OSError):
                    os.close(parent)
        except OSError as error:
            first = self.retry_at is None
            self.retry_at = time.monotonic() + RETRY_S
            if first:
                self._report(self.path, error, 0)
            return
        if self.retry_at is not None:
            self.retry_at = None
            self._report(self.path, None, 0)

    def _blocks(self) -> Iterable[bytes]:
        return [b"".join(self._pieces)]

    def _replace(self, parent: int, name: str, mode: int) -> None:
        fd, temporary = open_temporary(f".{name}", dir_fd=parent, mode=mode)
        try:
            self._write(fd)
            os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise

    def _write(self, fd: int) -> None:
        try:
            for block in self._blocks():
                rest = memoryview(block)
                while rest:
                    rest = rest[os.write(fd, rest) :]
        except OSError:
            with suppress(OSError):
                os.close(fd)
            raise
        os.close(fd)


class HandedFile(WholeFile):
    """A file that another process has handed in: there as a whole, or not at all, and for its owner alone.

    Args:
        path: where it is to be.
        fd: its content, in memory; -1: it could not be received.
        report: called when it cannot be written, and when it can after all.
        on_written: called once it is there.
    """

    mode = 0o600  # what a process has open and what it is called with is its owner's business alone

    def __init__(self, path: str, fd: int, report: Report, on_written: Callable[[], object]) -> None:
        super().__init__(path, report=report)
        self._fd = fd
        self._on_written = on_written

    def close(self) -> None:
        """Write it."""
        super().close()
        self._release()

    def retry(self, now: float, *, at_once: bool = False) -> None:
        """Try again, where that is due."""
        super().retry(now, at_once=at_once)
        self._release()

    def forget(self) -> None:
        """It is not to be written any more: a newer one takes its place."""
        super().forget()
        self._release()

    def _release(self) -> None:
        if self.retry_at is None and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._on_written()

    def _blocks(self) -> Iterator[bytes]:
        at = 0
        # Not at the descriptor's own position: it may be the second time.
        while block := os.pread(self._fd, _PIECE_BYTES, at):
            at += len(block)
            yield block
