"""The wait for the rank whose error made the others fail: they lost it before it had printed anything."""

from __future__ import annotations

import time

from saferun.diagnosis.pending_cause import is_shown
from saferun.launch.attempt_record import AttemptRecord, InvestigationContext
from saferun.supervisor.actions import AwaitCause
from saferun.text.wording import ranks_text

_PERIOD_S = 0.2


class CauseWait:
    """Sees whether one of some ranks shows the cause of a failure. The supervisor limits how long.

    Args:
        context: of the launch.
        record: of the attempt.
        action: the ranks.

    Attributes:
        deadline: when they are to be checked again, in monotonic seconds.
    """

    def __init__(self, context: InvestigationContext, record: AttemptRecord, action: AwaitCause) -> None:
        self._record = record
        self.deadline = 0.0
        self._ends_at = time.monotonic() + action.limit_s
        ranks = [rank for rank in record.living if rank.assignment.local_rank in action.local_ranks]
        self._ranks = tuple(rank.assignment.rank for rank in ranks)
        failed = [rank.assignment.rank for rank in record.ranks if rank.end is not None and not rank.end.status.ok]
        victims = ranks_text(failed) if failed else "a rank of another host"
        shown = (
            f"{victims} may have failed because of another rank; waiting up to {action.limit_s:g} s for the error of"
        )
        if not context.launch.another_host_prints:
            context.print_lines([f"saferun: {shown} {ranks_text(self._ranks)}"])

    def poll(self, now: float) -> bool:
        """Check the ranks. Returns whether the cause is known, no rank is left, or the supervisor waits no more."""
        self.deadline = now + _PERIOD_S
        return now >= self._ends_at or is_shown(self._record.gather(None), self._ranks)
