"""The terminal of another shell, which ``saferunctl attach`` has brought to one rank. It never holds the rank up."""

from __future__ import annotations

import time

from saferun.console.harmless import HarmlessText
from saferun.errors import suppress
from saferun.launch.keyboard_session import TypedKeys
from saferun.text.decoding import MALFORMED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.launch.launch_context import LaunchContext
    from saferun.launch.rank_terminals import RankTerminal
    from saferun.linux.json_lines import JsonLines
    from saferun.model import JsonObject, Placement

# Of output that the other shell has not read; beyond that it is skipped there.
_MOST_QUEUED_BYTES = 1 << 20
_SHOWN_BYTES = 4 << 10
_MOST_COLUMNS = 10_000


class AttachedViewer:
    """One attached terminal.

    Args:
        terminal: the rank's terminal.
        lines: the connection.
        on_rank_ended: called when the rank is gone.
    """

    def __init__(self, terminal: RankTerminal, lines: JsonLines, on_rank_ended: Callable[[], None]) -> None:
        self.keys = TypedKeys(terminal.rank, terminal.stdin, None)
        self.rank_ended = on_rank_ended
        self._terminal = terminal
        self._lines = lines
        self._harmless = HarmlessText()
        self._skipped_bytes = 0
        self._has_begun = False

    def _show_last(self) -> None:
        """Show what the rank has printed last."""
        for stream in sorted(self._terminal.rank.streams, key=lambda stream: not stream.is_stderr):
            last = stream.last_bytes(_SHOWN_BYTES)
            if len(last) == _SHOWN_BYTES:
                last = last[last.find(b"\n") + 1 :]
            if stream.is_stderr and last and not last.endswith(b"\n"):
                last += b"\n"
            self.show(last)

    def show(self, chunk: bytes) -> None:
        """Show what the rank writes, or its terminal echoes."""
        if not self._has_begun:
            return  # it is among the last lines, which are shown first
        if self._lines.queued_bytes > _MOST_QUEUED_BYTES:
            self._skipped_bytes += len(chunk)
            return
        text = self._harmless.feed(chunk)
        if self._skipped_bytes:
            text = b"\nsaferun: %d bytes skipped: this terminal reads too slowly\n" % self._skipped_bytes + text
            self._skipped_bytes = 0
        if text:
            self._lines.send({"text": text.decode("latin-1")})

    def take(self, message: JsonObject) -> None:
        """A message of the other shell's; what is malformed is ignored."""
        with suppress(*MALFORMED):
            if isinstance(size := message.get("size"), list):
                columns, rows = (min(max(int(number), 1), _MOST_COLUMNS) for number in size)
                self._terminal.stdin.resize(columns, rows)
            if isinstance(typed := message.get("keys"), str):
                self._terminal.typed_at = time.monotonic()
                self.keys.take(typed.encode("latin-1"))
        if not self._has_begun:
            self._has_begun = True
            self._show_last()


def find_terminal(context: LaunchContext, wanted: str) -> RankTerminal | JsonObject:
    """The terminal of a rank, or why there is none.

    Args:
        context: the launch.
        wanted: the rank's number; empty: the one that asks.
    """
    terminals, plan = context.terminals, context.current.plan
    if plan is None:
        return {"error": "no rank runs now", "hint": "try again when saferunctl status shows that the ranks run"}
    number = rank_number(wanted)
    if number is not None and (absent := absent_rank(context, plan.placement, number, "error")):
        return absent
    terminal = terminals.find(number) if terminals is not None else None
    if terminal is None and terminals is not None and terminals.has_any and number is None:
        return {"error": "no rank asks for input now", "hint": "name one of the ranks: --rank N"}
    if terminal is None:
        what = "the ranks of this launch have" if number is None else f"rank {number} has"
        return {"error": f"{what} no terminal of its own, or has ended", "hint": "start the job with --attach any"}
    if terminal.viewer is not None:
        return {"error": f"another shell is attached to rank {terminal.number}", "hint": "it detaches with Ctrl-]"}
    return terminal


def rank_number(wanted: str) -> int | None:
    """The number of the rank that another shell asks for; None: it sends none."""
    return int(wanted) if wanted.isascii() and wanted.isdecimal() else None


def absent_rank(context: LaunchContext, placement: Placement, number: int, key: str) -> JsonObject:
    """The answer about a rank that is not one of this host; empty: it is one. ``key``: of the reason in the answer."""
    if not 0 <= number < placement.world_size:
        return {key: f"the job has no rank {number}", "hint": f"its ranks are 0-{placement.world_size - 1}"}
    if number not in {assignment.rank for assignment in placement.ranks}:
        return {"elsewhere": _host_of(context, number)}
    return {}


def _host_of(context: LaunchContext, number: int) -> str:
    """The host of a rank, as far as this one knows: the leader knows all."""
    for peer in context.job.peers.values():
        if peer.base_rank <= number < peer.base_rank + peer.ranks:
            return peer.label
    return ""
