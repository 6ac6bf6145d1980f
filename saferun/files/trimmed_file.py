"""Leaving out the middle of a file that has become too large, or fills the disk: its beginning and its end stay."""

from __future__ import annotations

import os

from saferun.files.time_index import Cut

_PIECE_BYTES = 1 << 20
# However much is kept: while the end is moved, nothing is written.
_MOST_MOVED_BYTES = 64 << 20
_LONGEST_LINE_BYTES = 4096
_NEWLINE = b"\n"
TOO_LARGE = "--keep-output"
DISK_FULL = "the disk was full"


def mark_text(left_out_bytes: int, reason: str = TOO_LARGE) -> bytes:
    """The line that stands for what is left out."""
    return f"[saferun: {left_out_bytes} bytes of this stream are left out here: {reason}]\n".encode()


def leave_out_middle(fd: int, before: Cut, size_bytes: int, keep_bytes: int, reason: str = TOO_LARGE) -> Cut:
    """Leave it out: half of what may be kept stays of the beginning, a quarter of the end, in whole lines if possible.

    Args:
        fd: the file, open for reading and writing.
        before: what has been left out of it before.
        size_bytes: how large it is.
        keep_bytes: how large it may be.
        reason: for the line that stands for what is left out.

    Returns:
        What is left out now.

    Raises:
        OSError: as of the system. The file may have its end twice then.
    """
    if before.left_out_bytes:
        head = before.kept_bytes
    else:
        head = keep_bytes // 2
        last = os.pread(fd, min(head, _LONGEST_LINE_BYTES), head - min(head, _LONGEST_LINE_BYTES))
        head -= len(last) - (last.rfind(_NEWLINE) + 1 or len(last))
    start = size_bytes - min(keep_bytes // 4, _MOST_MOVED_BYTES)
    start = max(start, head + before.mark_bytes)
    start += max(os.pread(fd, _LONGEST_LINE_BYTES, start - 1).find(_NEWLINE), 0) if start else 0
    # What is in the file from there on was written so much later.
    removed = before.left_out_bytes - before.mark_bytes + start - head
    mark = mark_text(removed, reason)
    if head and os.pread(fd, 1, head - 1) != _NEWLINE:
        mark = _NEWLINE + mark
    if len(mark) >= start - head:
        return before  # there is nothing to be gained
    end = head + len(mark)
    os.pwrite(fd, mark, head)
    while piece := os.pread(fd, _PIECE_BYTES, start):
        os.pwrite(fd, piece, end)
        start += len(piece)
        end += len(piece)
    os.ftruncate(fd, end)
    return Cut(head, removed, len(mark))
