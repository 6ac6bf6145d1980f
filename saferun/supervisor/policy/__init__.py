"""What follows a failed attempt or a hang. Pure.

A *start* is over when every rank has got through ``init_process_group``. A start that failed is tried again where its
cause may pass by itself; what fails later belongs to ``--max-restarts``, as with torchrun.

What is loaded at every launch stands here and in ``attempts``; ``facts`` is loaded when something has failed.
"""

from __future__ import annotations

import signal

from saferun.model import Value
from saferun.supervisor.policy.attempts import AttemptPolicy, Decision, FailureFacts, Fingerprint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

__all__ = ["AttemptPolicy", "Decision", "FailureFacts", "Fingerprint", "HangPolicy", "JobPolicy"]


class JobPolicy(Value):
    """The role of this process among the others of its job.

    ``spans_hosts``: there are others. ``outlives_leader``: they can meet again where the leader is gone.
    ``others_s``: how long the leader waits for the evidence of the others. ``scheduler_kills_soon``: a scheduler that
    asks for an end by a signal kills whatever is still there soon afterwards, saferun included. ``least_hosts``: how
    many have to be left where one is left out. ``moves_leader``: whether a spare host takes the place of the leader,
    too. ``awaits_replacement_host``: whether the others wait for a host that takes the place of one that gets SIGTERM.
    ``serves_tasks``: whether other processes of this host depend on this one. ``stop_signals``: those that stop this
    launch.
    """

    spans_hosts: bool = False
    outlives_leader: bool = False
    others_s: float = 0.0
    scheduler_kills_soon: bool = False
    least_hosts: int = 1
    moves_leader: bool = False
    awaits_replacement_host: bool = False
    serves_tasks: bool = False
    stop_signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class HangPolicy(Value):
    """What to do about a hang.

    ``abort_culprits``: its culprits get SIGABRT, for a core of the hang; the others get SIGTERM.
    """

    on_hang: Literal["report", "stop", "restart"] = "report"
    abort_culprits: bool = False

    def next_step(self, *, certain: bool) -> Literal["report", "stop", "restart"]:
        """A suspected hang is reported and never acted upon."""
        return self.on_hang if certain else "report"
