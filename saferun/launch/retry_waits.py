"""The waits before retries: drawn up by another process, so that the supervisor needs nothing that it takes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from saferun.linux.helper import PartBase
from saferun.linux.poller import Poller

# A retry waits for a second and longer in any case.
_PATIENCE_S = 2.0
_LIMIT_BYTES = 1 << 16


class RetryWaits(PartBase):
    """Asks once for the waits before all retries. Where they do not come, the policy has a rule of its own.

    Args:
        poller: the loop's.
        ask: asks for the waits, and returns a descriptor to read them from, as a JSON array of seconds. Raises OSError
            where no process can be asked.
        on_waits: takes them.
    """

    def __init__(self, poller: Poller, ask: Callable[[float], int], on_waits: Callable[[list[float]], None]) -> None:
        self.deadline: float | None = None
        self._poller = poller
        self._on_waits = on_waits
        self._content = b""
        self._waiting: list[Callable[[], None]] = []
        self._fd = -1
        try:
            self._fd = ask(_PATIENCE_S)
        except OSError:
            return
        self.deadline = time.monotonic() + _PATIENCE_S
        poller.watch(self._fd, self._on_readable)

    def need(self, call: Callable[[], None]) -> None:
        """Call when the waits are there, or are known not to come."""
        if self._fd < 0:
            call()
        else:
            self._waiting.append(call)

    def tick(self, now: float) -> None:
        """Go on without, where that is due."""
        if self.deadline is not None and self.deadline <= now:
            self._end()

    def close(self) -> None:
        """The launch is over."""
        self._waiting.clear()
        self._end()

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._fd, _LIMIT_BYTES)
        except BlockingIOError:
            return
        self._content += chunk
        if chunk and len(self._content) <= _LIMIT_BYTES:
            return
        try:
            self._on_waits([float(wait_s) for wait_s in json.loads(self._content)])
        except (ValueError, TypeError):
            pass  # it ended before its answer was whole
        self._end()

    def _end(self) -> None:
        self.deadline = None
        if self._fd >= 0:
            self._poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
