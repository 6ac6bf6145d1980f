"""One meeting of the hosts: with what this process asks to join them, and their agreement."""

from __future__ import annotations

import os

from saferun.cluster.job_channel import JobChannel
from saferun.cluster.join_messages import Joined, JoinRequest, SecretSharing, TaskInfo
from saferun.cluster.rendezvous_messages import JoinedParts, join_request
from saferun.config import LaunchConfig
from saferun.files.run_dir import RunDirectory
from saferun.model import JsonObject
from saferun.supervisor.actions import JoinHosts

__all__ = ["Meeting"]

# The rendezvous timeout after a lost store: hosts may disagree whether the start was over, and then some do not come.
_REJOIN_TIMEOUT_S = 60.0


class Meeting:
    """A meeting, from this process's request to join to the hosts' agreement.

    Args:
        config: the launch.
        run_dir: says where this launch's files are going to be.
        channel: has the ports of this host.
        after_loss: whether the store was lost before.

    Attributes:
        own_addresses: this host's.
    """

    def __init__(self, config: LaunchConfig, run_dir: RunDirectory, channel: JobChannel, *, after_loss: bool) -> None:
        from saferun.linux.netlink import own_addresses

        self.own_addresses = tuple(own_addresses())
        self._config = config
        self._run_dir = run_dir
        self._channel = channel
        timeout_s = config.hosts.start_timeout_s
        # Shorter after a lost store: each host decided for itself to meet again, and some may not have.
        self._timeout_s = min(timeout_s, _REJOIN_TIMEOUT_S) if after_loss else timeout_s
        self._parts = JoinedParts()

    def request(self, action: JoinHosts, task: int, host_info: str, probe_endpoint: str) -> JoinRequest:
        """With what this process asks to join.

        Args:
            action: says which attempt it is.
            task: which of several saferuns of this host this is.
            host_info: what this host found out about itself.
            probe_endpoint: how others can probe it.
        """
        config = self._config
        base = self._run_dir.shared_base if config.shares_secret else ""
        record = TaskInfo(
            config.nproc_per_node,
            config.role,
            os.getpid(),
            addresses=self.own_addresses,
            port=self._channel.control_port,
            files=self._run_dir.name,
            host_info=host_info,
            probe_endpoint=probe_endpoint,
            full=config.checks.full,
        )
        request = join_request(
            config.hosts, config.rendezvous, action, task=task, port=self._channel.port, record=record
        )
        return request._replace(
            timeout_s=self._timeout_s,
            script=os.path.basename(config.command.name),
            sharing=SecretSharing(base, required=config.sign_messages == "required"),
        )

    def take(self, message: JsonObject) -> Joined | None:
        """Take ``hosts`` or ``joined``. Returns the agreement once it is whole."""
        return self._parts.take(message)
