"""The lines about hosts that have not met yet, as this host's coordinator has them printed."""

from __future__ import annotations

from collections.abc import Callable

from saferun.cluster.messages import LONGEST_MESSAGE
from saferun.model import JsonObject
from saferun.text.decoding import display_text, number


class WaitLines:
    """Shows what keeps the hosts from meeting, and for how long it has.

    Args:
        show: shows it where a line can change in place, with the seconds; returns whether it is shown.
        print_line: takes an ordinary line.
        hint: is in the first line about others that come late; empty: none.
    """

    def __init__(self, show: Callable[[str | None, int], bool], print_line: Callable[[str], None], hint: str) -> None:
        self._show = show
        self._print_line = print_line
        self._hint = hint
        self._last = ""  # what was printed last, with the seconds beside it

    def take(self, message: JsonObject) -> None:
        """They have not met.

        Raises:
            One of ``MALFORMED``: the message makes no sense.
        """
        text = display_text(message["text"], LONGEST_MESSAGE)
        waited_s = number(message["waited_s"]) if "waited_s" in message else None  # None: the text itself has them
        if self._show(text, waited_s or 0):
            return
        is_first = not self._last and message.get("for_others") is True
        more = f"; {self._hint}" if is_first and self._hint else ""
        self._last = text if waited_s is not None else ""
        lasted = f" ({waited_s} s)" if waited_s is not None else ""
        self._print_line(f"saferun: {text}{lasted}{more}")

    def has_printed(self, what: str) -> bool:
        """Whether the last line was about this, which has made the hosts give up."""
        return self._last != "" and what.startswith(self._last)
