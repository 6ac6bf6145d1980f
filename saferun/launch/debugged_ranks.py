"""Ranks that ``saferunctl debug`` holds: where they are, and the hang clock, which stands until it lets go of them.

The debugger is a process of the other shell's. This host holds its clock for as long as the connection lasts, and says
when the debugger has to let go of the rank: when the rank has ended, and before the ranks are to be.
"""

from __future__ import annotations

from saferun.errors import suppress
from saferun.launch.attached_viewer import absent_rank, rank_number
from saferun.linux.procfs import read_stat
from saferun.supervisor.machine import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.launch_context import LaunchContext
    from saferun.launch.rank import Rank
    from saferun.model import JsonObject

_AT_WORK = frozenset({State.STARTING, State.RUNNING, State.CAPTURING})
_AGAIN = "try again when saferunctl status shows that the ranks run"


class DebuggedRank:
    """One rank in a debugger of another shell.

    Args:
        context: the launch.
        rank: the rank.
        by: who debugs it, for people.
    """

    def __init__(self, context: LaunchContext, rank: Rank, by: str) -> None:
        self._context = context
        self._rank = rank
        self._attempt = context.attempt
        self._hangs = context.investigation.hangs  # of this attempt
        self._holder = f"debugger of rank {rank.assignment.rank}"
        self.number = rank.assignment.rank
        self._hangs.hold(self._holder, True)
        context.report(f"rank {self.number} is in a debugger, and hang detection waits for it ({by})")

    def end_reason(self) -> str:
        """Why the debugger has to let go of the rank; empty: it need not."""
        context = self._context
        if self._rank.end is not None or context.attempt != self._attempt:
            return f"rank {self.number} has ended"
        return "" if context.supervisor.state in _AT_WORK else "the ranks of this attempt are being ended"

    def release(self) -> None:
        """The debugger is gone."""
        self._hangs.hold(self._holder, False)
        if self._rank.end is None:
            with suppress(Exception):
                self._context.report(f"the debugger of rank {self.number} has detached")


def locate(context: LaunchContext, wanted: str) -> JsonObject:
    """Where a rank is. Holds nothing.

    Args:
        context: the launch.
        wanted: the rank's number.

    Returns:
        ``rank``, ``pid`` and ``ticks`` (when its process started, in clock ticks since boot), or
        ``elsewhere`` with the name of its host, or ``refused`` and ``hint``.
    """
    rank = _find(context, wanted)
    if isinstance(rank, dict):
        return rank
    stat = read_stat(rank.pid)
    if stat is None:
        return {"refused": f"rank {wanted} has ended", "hint": _AGAIN}
    return {"ok": True, "rank": rank.assignment.rank, "pid": rank.pid, "ticks": stat.start_ticks}


def debug(context: LaunchContext, wanted: str, held: set[int], by: str) -> DebuggedRank | JsonObject:
    """Hold the hang clock for a debugger.

    Args:
        context: the launch.
        wanted: the rank's number.
        held: the ranks that others debug.
        by: who asks, for people.
    """
    rank = _find(context, wanted)
    if isinstance(rank, dict):
        return rank
    if rank.assignment.rank in held:
        return {"refused": f"another shell debugs rank {wanted}", "hint": "end that debugger with quit"}
    return DebuggedRank(context, rank, by)


def _find(context: LaunchContext, wanted: str) -> Rank | JsonObject:
    plan = context.current.plan
    if plan is None or context.supervisor.state not in _AT_WORK:
        return {"refused": "no rank runs now", "hint": _AGAIN}
    given = rank_number(wanted)
    number = -1 if given is None else given
    if absent := absent_rank(context, plan.placement, number, "refused"):
        return absent
    rank = next((one for one in context.current.living() if one.assignment.rank == number), None)
    if rank is None or (rank.wrapped is not None and not rank.wrapped.lives):
        return {"refused": f"rank {number} has ended", "hint": _AGAIN}
    return rank
