"""The terminal of another shell, which ``saferunctl attach`` has brought to one rank. It never holds the rank up."""

from __future__ import annotations

from saferun.console.harmless import HarmlessText
from saferun.errors import suppress
from saferun.launch.keyboard_session import TypedKeys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.launch.rank_terminals import RankTerminal
    from saferun.linux.json_lines import JsonLines
    from saferun.model import JsonObject

# Of output that the other shell has not read; beyond that it is skipped there.
_MOST_QUEUED_BYTES = 1 << 20
_SHOWN_BYTES = 4 << 10
_MOST_COLUMNS = 10_000


class AttachedViewer:
    """One attached terminal.

    Args:
        one: the rank's terminal.
        lines: the connection.
        on_rank_ended: called when the rank is gone.
    """

    def __init__(self, one: RankTerminal, lines: JsonLines, on_rank_ended: Callable[[], None]) -> None:
        self.keys = TypedKeys(one.rank, one.terminal, None)
        self.rank_ended = on_rank_ended
        self._one = one
        self._lines = lines
        self._harmless = HarmlessText()
        self._skipped_bytes = 0

    def show_last(self) -> None:
        """Show what the rank has printed last."""
        for stream in sorted(self._one.rank.streams, key=lambda stream: not stream.is_stderr):
            last = stream.last_bytes(_SHOWN_BYTES)
            if len(last) == _SHOWN_BYTES:
                last = last[last.find(b"\n") + 1 :]
            if stream.is_stderr and last and not last.endswith(b"\n"):
                last += b"\n"
            self.show(last)

    def show(self, chunk: bytes) -> None:
        """Show what the rank writes, or its terminal echoes."""
        if self._lines.queued_bytes > _MOST_QUEUED_BYTES:
            self._skipped_bytes += len(chunk)
            return
        text = self._harmless.feed(chunk)
        if self._skipped_bytes:
            text = b"\nsaferun: %d bytes are not shown here, which reads too slowly\n" % self._skipped_bytes + text
            self._skipped_bytes = 0
        if text:
            self._lines.send({"text": text.decode("latin-1")})

    def take(self, message: JsonObject) -> None:
        """A message of the other shell's; what is malformed is ignored."""
        with suppress(ValueError, TypeError):
            if isinstance(typed := message.get("keys"), str):
                self.keys.take(typed.encode("latin-1"))
            if isinstance(size := message.get("size"), list):
                columns, rows = (min(max(int(number), 1), _MOST_COLUMNS) for number in size)
                self._one.terminal.resize(columns, rows)
