"""What keeps the hosts from meeting, and when the tasks of this host are to hear of it."""

from __future__ import annotations

from saferun.model import JsonObject

# How soon something is reported that waiting alone will hardly mend.
_FAULT_S = 2.0
# A line that does not change is repeated at least so often.
_LONGEST_REPORT_S = 3600.0


class WaitingNotice:
    """The notice of one rendezvous.

    Args:
        began_at: when that has begun, in monotonic seconds.
        every_s: how often it is reported.
    """

    def __init__(self, began_at: float, every_s: float) -> None:
        self.text = ""
        self._is_fault = self._is_for_others = False
        self._began_at = self._reported_at = began_at
        self._every_s = every_s
        self._reported = ""
        self._again_s = 0.0  # after which the same line is reported again

    def set_status(self, text: str, *, is_fault: bool = False) -> None:
        """What it is. ``is_fault``: more than a host that comes late."""
        self.text, self._is_fault, self._is_for_others = text, is_fault, False

    def wait_for(self, whom: str) -> None:
        """Others are waited for, as far as is known only because they come late."""
        self.text, self._is_fault, self._is_for_others = f"waiting for {whom}", False, True

    def due_message(self, now: float) -> JsonObject | None:
        """The message that is due, with the seconds that the rendezvous has lasted; None: nothing yet."""
        is_first = self._reported_at == self._began_at
        wait_s = self._every_s
        if self._is_fault and is_first:
            wait_s = min(_FAULT_S, wait_s)
        if self.text == self._reported:
            wait_s = max(wait_s, self._again_s)
        if not self.text or now - self._reported_at < wait_s:
            return None
        self._again_s = min(2 * wait_s, _LONGEST_REPORT_S) if self.text == self._reported else wait_s
        self._reported_at, self._reported = now, self.text
        waited_s = round(now - self._began_at)
        return {"op": "waiting", "text": self.text, "waited_s": waited_s, "for_others": self._is_for_others}
