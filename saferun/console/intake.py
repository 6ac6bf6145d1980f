"""Reads the ranks' streams: occasional output at once, bulk output in large chunks."""

from __future__ import annotations

from collections.abc import Callable

from saferun.console.rank_stream import RankStream
from saferun.linux.helper import PartBase
from saferun.linux.poller import Poller

# A stream that has just delivered much, or delivered again this soon, is not read for this long: its output collects in
# its pipe and is read in one chunk. A rank that writes every few milliseconds or less often is always read at once.
_GATHER_S = 0.002
_MUCH_BYTES = 32 << 10


class Intake(PartBase):
    """The streams of the running ranks. A Part of the loop.

    Args:
        poller: the loop's.
        clock: monotonic seconds.
    """

    def __init__(self, poller: Poller, clock: Callable[[], float]) -> None:
        self._poller = poller
        self._clock = clock
        self._read_at: dict[RankStream, float] = {}
        self._full: list[RankStream] = []  # not read until there is room for their output
        self._gathering: list[RankStream] = []
        self._gathered_at: float | None = None

    def add(self, stream: RankStream) -> None:
        """Start to read a stream, until it ends."""
        self._read_at[stream] = 0.0
        self._listen(stream)

    def _listen(self, stream: RankStream) -> None:
        self._poller.watch(stream.fd, lambda: self._read(stream, is_watched=True))

    def _read(self, stream: RankStream, *, is_watched: bool) -> None:
        if stream.is_full:
            # Its files are slow, or it has none and its console is slow: the rank waits, as it would without saferun.
            self._full.append(stream)
            stream.is_paused = True
        else:
            now = self._clock()
            stream.is_paused = False
            size = stream.read(now)
            is_quiet = size < _MUCH_BYTES and now - self._read_at[stream] >= _GATHER_S
            self._read_at[stream] = now
            if size < 0 or (size and is_quiet):
                if not is_watched:
                    self._listen(stream)
                return
            if size:
                self._gathering.append(stream)
                if self._gathered_at is None:
                    self._gathered_at = now + _GATHER_S
        if is_watched:
            self._poller.unwatch(stream.fd)

    def read_at(self, stream: RankStream) -> float:
        """When something of a stream was last read, in monotonic seconds; 0: never, or it has ended."""
        return self._read_at.get(stream, 0.0)

    def remove(self, stream: RankStream) -> None:
        """Stop reading it; its descriptor stays open."""
        if self._read_at.pop(stream, None) is None:
            return
        self._poller.unwatch(stream.fd)
        for waiting in (self._full, self._gathering):
            if stream in waiting:
                waiting.remove(stream)

    # ----------------------------------------------------------------------------------------------------------------
    # A part

    @property
    def deadline(self) -> float | None:
        """When collecting streams, or those that had no room, are read again."""
        if any(not stream.is_full for stream in self._full):
            return 0.0
        return self._gathered_at

    def tick(self, now: float) -> None:
        """Read the streams for which there is room again, and those that have collected for long enough."""
        if self._full:
            full, self._full = self._full, []
            for stream in full:
                self._read(stream, is_watched=False)
        if self._gathered_at is not None and self._gathered_at <= now:
            self._gathered_at = None
            gathering, self._gathering = self._gathering, []
            for stream in gathering:
                self._read(stream, is_watched=False)

    def close(self) -> None:
        """Stop reading; the streams are closed with their ranks."""
        for stream in list(self._read_at):
            self.remove(stream)
