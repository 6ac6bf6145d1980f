"""torchrun's events, handed over to the event handler of torch's that the user named."""

from __future__ import annotations

import json
import os
import time

from saferun.config import LaunchConfig
from saferun.launch.ranks import AttemptPlan, Rank
from saferun.launch.torchrun_events import agent_event, common_fields, missing_error, rank_event
from saferun.model import JsonObject, Placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class _Receiver(Protocol):
        """Whoever has the line to torch."""

        @property
        def forwards_events(self) -> bool:
            """Whether the user named one of torch's event handlers."""

        def forward_event(self, event: JsonObject) -> None:
            """Take an event."""


class Handover:
    """Makes torchrun's events of what happens here. Where no handler was named it does nothing.

    Args:
        config: the launch.
        receiver: whoever has the line to torch.
    """

    def __init__(self, config: LaunchConfig, receiver: _Receiver) -> None:
        self._config = config
        self._receiver = receiver
        self._launched_at = time.monotonic()

    def hand_on(self, rank: Rank, plan: AttemptPlan | None, state: str, restarts: int) -> None:
        """What has happened to a rank, in torchrun's word for it."""
        if not self._receiver.forwards_events or plan is None:
            return
        failed = rank.end if state == "FAILED" else None
        error = None
        if failed is not None:
            content = rank.recorded["content"] if rank.recorded is not None else missing_error(failed.status.returncode)
            error = json.dumps(content)
        self._receiver.forward_event(
            rank_event(state, self._fields(restarts), plan.placement, rank.place, rank.child.pid, failed, error)
        )

    def hand_on_own(
        self, state: str, restarts: int, placement: Placement | None, duration_ms: float | None = None
    ) -> None:
        """What has happened to the launcher itself."""
        if self._receiver.forwards_events:
            self._receiver.forward_event(agent_event(state, self._fields(restarts), placement, duration_ms))

    def end(self, ranks: list[Rank], plan: AttemptPlan | None, restarts: int, *, stopped: bool) -> None:
        """The launch is over: what became of its last ranks, and of the launcher."""
        for rank in ranks:
            self.hand_on(rank, plan, _state_of(rank), restarts)
        placement = plan.placement if plan is not None and ranks else None
        self.hand_on_own("FAILED" if stopped else "SUCCEEDED", restarts, placement)

    def _fields(self, restarts: int) -> JsonObject:
        return common_fields(
            run_id=self._config.rendezvous.run_id,
            role=self._config.role,
            backend=self._config.rendezvous.backend,
            restarts=restarts,
            total_s=time.monotonic() - self._launched_at,
            entry_point=os.path.basename(self._config.command.argv[0]),
        )


def _state_of(rank: Rank) -> str:
    """Torchrun's word for how a rank ended."""
    if rank.end is None or rank.end.stopped_by_us:
        return "TERMINATED"
    return "SUCCEEDED" if rank.end.status.ok else "FAILED"
