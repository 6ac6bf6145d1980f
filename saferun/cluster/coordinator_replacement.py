"""Another coordinator in the place of one that has been killed, while an attempt is under way.

On a host that serves no store, a coordinator holds nothing that is not in the control store, or known here. Its
replacement reads the job's log from the beginning, of which nothing is taken in twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from saferun.cluster.job_sender import JobSender
from saferun.model import JsonObject
from saferun.text.decoding import number, text

__all__ = ["CoordinatorReplacement"]

# One that is killed again and again, by want of memory for one, is not started forever.
_MOST = 3
# Less than this torch's import may take from a shared file system.
_LEAST_S = 60.0
_LONGEST_TEXT = 1 << 20


class CoordinatorReplacement:
    """The replacements of this host's coordinator.

    Args:
        sender: this host's messages.
        host_timeout_s: how long a host may be silent.
        on_resumed: called when one has taken over, with why its predecessor is gone.
        on_failed: called when none does, with the same.
    """

    def __init__(
        self,
        sender: JobSender,
        host_timeout_s: float,
        *,
        on_resumed: Callable[[str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.deadline: float | None = None  # when one is to have taken over
        self._sender = sender
        self._timeout_s = max(_LEAST_S, host_timeout_s)
        self._on_resumed = on_resumed
        self._on_failed = on_failed
        self._join: JsonObject = {}
        self._offer: str | None = None
        self._attempt = -1
        self._reason = ""
        self._left = _MOST
        self._has_resumed = False
        self._read = (-1, 0)  # the attempt, and the number of the next entry of its log

    def joins(self, message: JsonObject) -> None:
        """This host asks to join the others.

        The join replaces all that a replacement coordinator was still to resume.
        """
        self._join, self._offer, self.deadline = message, None, None

    def begin(self, attempt: int, reason: str) -> JsonObject | None:
        """With which message another coordinator goes on; None: it could not.

        Args:
            attempt: the one that is under way.
            reason: why the coordinator is gone.
        """
        if self._offer is None or attempt != self._attempt or self.deadline is not None or self._left == 0:
            return None
        self._left -= 1
        self._reason = reason
        self.deadline = time.monotonic() + self._timeout_s
        if self._join["task"]:
            return {"op": "rejoin", "task": self._join["task"]}
        request = {name: value for name, value in self._join.items() if name not in {"op", "secret"}}
        secret = {"secret": self._join["secret"]} if "secret" in self._join else {}
        return {"op": "resume", "request": request, "text": self._offer, **secret}

    def take(self, message: JsonObject) -> bool:
        """Take in a message of the coordinator. Returns whether that is all."""
        match message.get("op"):
            case "resumable":
                self._offer, self._attempt = text(message["text"], _LONGEST_TEXT), number(message["attempt"])
            case "resumed" | "resume_failed":
                self._conclude(message)
            case "entry" | "malformed":
                return self._skip_if_read(message)  # one that has taken over reads the log from its beginning
            case _:
                return False
        return True

    def _conclude(self, message: JsonObject) -> None:
        """What became of a replacement."""
        if self.deadline is None or message["attempt"] != self._attempt:
            return
        self.deadline = None
        if message["op"] == "resumed":
            self._has_resumed = True
            self._sender.repeat_unread(self._attempt)
            self._on_resumed(self._reason)
        else:
            self._on_failed(self._reason)

    def tick(self, now: float) -> None:
        """Give up one that does not take over."""
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
            self._on_failed(self._reason)

    def _skip_if_read(self, message: JsonObject) -> bool:
        """Skip an entry of the log that has been read before, else note it as read. Returns whether it is skipped."""
        entry = message.get("message")
        if isinstance(entry, dict) and entry.get("host") == self._sender.roster.host:
            self._sender.note_read(entry)
        attempt, k = number(message["attempt"]), number(message.get("k", 0))
        before, following = self._read
        if self._has_resumed and attempt == before and k < following:
            return True
        self._read = (attempt, k + 1)
        return False
