"""The warning of a value of ``saferun.step`` that is not finite, such as a loss that is NaN."""

from __future__ import annotations

from saferun.launch.attempt_record import AttemptRecord, InvestigationContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.text.script_state import ScriptState


class NonFiniteWarning:
    """Warns once per attempt: later values are not finite either.

    Args:
        context: of the launch.
        record: of the attempt.
    """

    def __init__(self, context: InvestigationContext, record: AttemptRecord) -> None:
        self._context = context
        self._record = record
        self._found: dict[int, tuple[int, str, str]] = {}  # by rank: the step, the name and the value
        self._has_warned = False

    def read(self, rank: int) -> ScriptState | None:
        """What a rank has reported last; a value of it that is not finite is kept for ``warn_once``."""
        state = self._context.hook.script_state(self._context.launch.attempt, rank)
        if state is not None and state.bad is not None and not self._has_warned:
            self._found[rank] = state.bad
        return state

    def read_last(self, local_rank: int) -> None:
        """As ``read``, for a rank that has ended."""
        for rank in self._record.ranks:
            if rank.assignment.local_rank == local_rank:
                self.read(rank.assignment.rank)

    def warn_once(self) -> None:
        """Print the warning, if a value has been found, and none before."""
        if self._has_warned or not self._found:
            return
        self._has_warned = True
        from saferun.text.wording import ranks_text

        number, name, value = first = min(self._found.values())
        ranks = ranks_text(tuple(sorted(rank for rank, bad in self._found.items() if bad == first)))
        self._context.launch.warn(f"warning: {name} is {value} in step {number} of {ranks} (reported by saferun.step)")
