"""The file ``output.index`` of a host, in the writer process. It may fail only by being absent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.files.removed_file import QuietCheck, RemovalCheck
from saferun.files.ring import RingRecord
from saferun.files.time_index import LARGEST_BYTES, Growing, IndexWriter
from saferun.files.trees import open_parent


class IndexFile:
    """Notes when the files of a host's ranks have grown.

    Args:
        path: the index; it is made when there is something to be noted.
        fresh: whether what is there from before is deleted.
    """

    def __init__(self, path: str, *, fresh: bool) -> None:
        self._path = path
        self._fresh = fresh
        self._entries = IndexWriter(os.path.dirname(path))
        self._files: dict[int, Growing] = {}
        self._fd = -1
        self._removal: RemovalCheck | None = None
        self._directory = QuietCheck(os.path.dirname(path))
        self._size_bytes = 0
        self._is_over = False

    def add(self, stream: int, file: Growing) -> bool:
        """A file is open. Returns whether it is one of those that the index is about."""
        self._entries.forget(stream)
        is_known = file.path.startswith(f"{os.path.dirname(self._path)}/")
        if is_known:
            self._files[stream] = file
        return is_known

    def remove(self, stream: int) -> None:
        """A file is closed."""
        self._files.pop(stream, None)

    def note(self, records: Sequence[RingRecord]) -> None:
        """These records have just been appended."""
        files = self._files
        pieces = [(record.stream, len(record.payload)) for record in records if record.stream in files]
        if not pieces or self._is_over:
            return
        if self._removal is not None and self._removal.is_removed(self._fd) and not self._begins_again():
            return
        content = self._entries.entries(pieces, files, int(time.time() * 1000))
        self._is_over = self._size_bytes + len(content) > LARGEST_BYTES
        if self._is_over:
            return
        try:
            if self._fd < 0:
                self._fd = self._opened()
                self._removal = RemovalCheck(self._fd)
                self._size_bytes = os.fstat(self._fd).st_size
            written = os.write(self._fd, content)
        except OSError:
            written = 0
        if written == len(content):
            self._size_bytes += written
            return
        # What is there stays readable, and the next entries say again what they are about.
        self._entries.forget()
        with suppress(OSError):
            if self._fd >= 0:
                os.ftruncate(self._fd, self._size_bytes)
                return
        self._is_over = self._fd >= 0

    def _begins_again(self) -> bool:
        """The index has been removed: whether the next entries are the first ones of another."""
        if not self._directory.is_quiet():
            return False
        self.close()
        self._fd, self._removal = -1, None
        self._entries.forget()
        return True

    def close(self) -> None:
        """The launch is over."""
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND | (os.O_TRUNC if self._fresh else 0)
        parent, name, tree = open_parent(self._path)
        try:
            if tree is None:
                return os.open(name, flags, 0o600, dir_fd=parent)
            return tree.open_file(parent, name, flags, self._path)
        finally:
            with suppress(OSError):
                os.close(parent)
