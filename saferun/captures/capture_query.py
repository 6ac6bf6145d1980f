"""One capture from the supervisor's side: a request to the examiner, whose answer is read without blocking."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from saferun.captures.examiner import READ_BYTES, Examiner, Query
from saferun.captures.wire import CaptureReader, CaptureRequest, CoreRequest, CoresFound, request_value
from saferun.errors import suppress
from saferun.linux.poller import Poller

_READS_AT_MOST = 64
# A capture whose examiner is lost is repeated by the replacement, but not by a third one.
_TRIES = 2
_LEAST_BUDGET_S = 0.5


class CaptureQuery(Query):
    """One capture. ``on_done`` is called exactly once: when it is complete, incomplete, or cannot begin.

    If the examiner is lost, its replacement gets the request with the remaining time. If that is lost as well, the
    capture ends with what has been received.

    Args:
        request: what to capture.
        examiner: runs the capture.
        poller: the loop's.
        deadline: when the capture ends, complete or not, in monotonic seconds; the owner calls ``expire`` then.
        on_done: called with the evidence, and why it is incomplete in one line (empty: it is complete).
        on_cores_found: called with the cores that are about to be read.
    """

    def __init__(
        self,
        request: CaptureRequest | CoreRequest,
        examiner: Examiner,
        poller: Poller,
        *,
        deadline: float,
        on_done: Callable[[CaptureReader, str], None],
        on_cores_found: Callable[[CoresFound], None] | None = None,
    ) -> None:
        super().__init__(examiner, poller)
        self.deadline = deadline
        self._request = request
        self._on_done = on_done
        self._reader = CaptureReader()
        self._reader.on_cores_found = on_cores_found
        self._seen = self._reader  # the most complete one of lost examiners
        self._tries = 0
        self._failure = ""
        try:
            self._ask(request)
        except OSError as error:
            self._failure = f"the capture cannot be started: {error.strerror}"

    def _ask(self, request: CaptureRequest | CoreRequest) -> None:
        self._tries += 1
        self._send("capture", request_value(request), request.budget_s, self._again)

    def begin(self) -> None:
        """Call ``on_done`` if the examiner has not taken the request."""
        if self._failure:
            self._finish(self._failure)

    def expire(self, why: str = "capture budget exceeded") -> None:
        """End the capture at its deadline. ``why``: it is no later."""
        if not self.is_over:
            self._read_rest()
            self.close()
            self._finish("" if self._reader.is_done else why)

    def abort(self) -> CaptureReader | None:
        """End the capture without ``on_done``. Returns what has been received; None: it had ended."""
        if self.is_over:
            return None
        self._read_rest()
        self.close()
        return self._best()

    def _on_chunk(self, chunk: bytes) -> None:
        if chunk:
            self._reader.feed(chunk)
        if self._reader.is_done:
            self.close()
            self._finish("")
        elif not chunk:
            number = self._number
            # The examiner itself may have ended, which ends all its captures.
            self._examiner.receive()
            if self._number == number and not self.is_over:
                self._again()

    def _read_rest(self) -> None:
        """Read what is in the pipe."""
        with suppress(Exception):  # the pipe is empty, or the content is malformed, which has been reported
            for _ in range(_READS_AT_MOST):
                chunk = os.read(self._fd, READ_BYTES)
                if not chunk:
                    return
                self._reader.feed(chunk)

    def _again(self) -> None:
        """The examiner is lost: repeat the request with its replacement."""
        if self.is_over:
            return
        self._read_rest()
        self.close()
        left_s = self.deadline - time.monotonic()
        if self._tries < _TRIES and left_s >= _LEAST_BUDGET_S:
            self._seen, self._reader = self._reader, CaptureReader()
            with suppress(OSError):
                self._ask(self._request._replace(budget_s=left_s))
                return
        self._finish("the capture process ended before it was done")

    def _best(self) -> CaptureReader:
        """The result of the newest examiner, unless the previous one has more; with the cores that either has read."""
        best = max((self._reader, self._seen), key=_found_in)
        if self._seen is not self._reader:
            best.add_cores(self._seen if best is self._reader else self._reader)
        return best

    def _finish(self, failure: str) -> None:
        self._failure = ""
        self._on_done(self._best(), failure)


def _found_in(reader: CaptureReader) -> tuple[bool, int, int]:
    """By how much it has: whether it is complete, how many stacks and cores were read, how many cores were found.

    A replacement does not find what the lost one has read and deleted; the entry that says so is no core.
    """
    cores = reader.cores
    read = sum(bool(core.threads) for core in cores)
    return reader.is_done, len(reader.capture.stacks) + read, len(cores)
