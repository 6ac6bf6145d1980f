"""A terminal that one rank has for itself for a while, as a debugger needs it: what the others write waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from saferun.console.harmless import HarmlessText

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.pane import Pane

# The newest lines that are kept for later. Older ones are in files; where there are none, they are shown.
_MOST_HELD_BYTES = 1 << 20
# The line in which the cursor stands: a prompt, and what is typed behind it.
_LONGEST_LINE_BYTES = 4 << 10


class HeldOutput:
    """What other ranks write to a pane meanwhile. From its making to ``release`` the pane is held.

    Args:
        pane: a terminal.
        keeps_all: whether files have all of it.
    """

    def __init__(self, pane: Pane, keeps_all: Callable[[], bool]) -> None:
        self._pane = pane
        self._keeps_all = keeps_all
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._skipped_lines = 0
        self._harmless: dict[object, HarmlessText] = {}
        self._line = b""  # in which the cursor is
        pane.hold(self)

    def keep(self, text: bytes) -> bool:
        """Keep lines of a rank for later. Returns whether none had to be dropped for them."""
        self._held.append(text)
        self._held_bytes += len(text)
        is_whole = True
        while self._held_bytes > _MOST_HELD_BYTES:
            oldest = self._held.popleft()
            self._held_bytes -= len(oldest)
            if self._keeps_all():
                self._skipped_lines += oldest.count(b"\n")
                is_whole = False
            else:
                self._pane.target.put(self.beside(oldest))
        return is_whole

    def show(self, source: object, chunk: bytes) -> None:
        """Show what the rank writes that has the terminal. ``source``: its stream."""
        text = self._harmless.setdefault(source, HarmlessText()).feed(chunk)
        if not text:
            return
        if not self._pane.target.has_room(len(text)):
            self._pane.target.skip(text.count(b"\n"))
            return
        self._pane.target.put(text)
        self._line = (self._line + text)[(self._line + text).rfind(b"\n") + 1 :][-_LONGEST_LINE_BYTES:]

    def beside(self, message: bytes) -> bytes:
        """Lines of saferun itself, above the line in which the cursor stands."""
        return (b"\r\x1b[K" if self._line else b"") + message + self._line

    def release(self, note: str) -> None:
        """The terminal belongs to all ranks again. ``note``: where the lines are that are not shown."""
        pane = self._pane
        if self._line:
            pane.target.put(b"\n")
        pane.hold(None)
        if self._skipped_lines:
            pane.put_message(f"saferun: {self._skipped_lines} lines of other ranks are not shown; {note}\n".encode())
        for text in self._held:
            pane.put(text)
