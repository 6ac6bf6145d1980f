"""What this process knows of a job of several hosts, for the parts of the launch that ask."""

from __future__ import annotations

from collections.abc import Mapping

from saferun.cluster.job_attempt import JobAttempt
from saferun.cluster.job_values import AbortReason, LostHost
from saferun.cluster.join_messages import Peer
from saferun.cluster.roster import Roster
from saferun.model import JsonObject

__all__ = ["JobView"]


class JobView:
    """This host's place in the job and the current attempt, as ``JobPort`` shows them.

    Attributes:
        roster: the hosts, as they were assigned when they met last.
        current: the attempt.
    """

    roster: Roster
    current: JobAttempt

    @property
    def host(self) -> int:
        """This host's number."""
        return self.roster.host

    @property
    def leads(self) -> bool:
        """Whether this process decides for the job."""
        return self.roster.leads

    @property
    def leader(self) -> str:
        """The name of the host that does; empty: the hosts have not met."""
        return self.roster.leader

    @property
    def peers(self) -> Mapping[int, Peer]:
        """All hosts, on the leader."""
        return self.roster.peers

    @property
    def other_addresses(self) -> tuple[str, ...]:
        """Of hosts with other ranks of the job, as far as they are known: on the leader all of them."""
        return self.roster.other_addresses

    @property
    def lost(self) -> Mapping[int, LostHost]:
        """The hosts that have been lost in this attempt."""
        return self.current.lost_hosts.hosts

    @property
    def abort_reason(self) -> AbortReason | None:
        """Why the attempt ends on all hosts."""
        return self.current.abort_reason

    @property
    def start_stage(self) -> JsonObject | None:
        """How far the ranks have come, as their store shows it."""
        return self.current.start_stage

    @property
    def blamed(self) -> tuple[int, ...]:
        """Ranks of the job that the hang is blamed on that was captured last."""
        return self.current.blamed

    @blamed.setter
    def blamed(self, ranks: tuple[int, ...]) -> None:
        self.current.blamed = ranks

    def nic_fault(self) -> str:
        """What is amiss with an interface to other hosts; empty: nothing."""
        return self.current.silent_hosts.own_nic_fault()
