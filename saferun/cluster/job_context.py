"""What the parts of a job of several hosts have in common, from its first attempt to its last."""

from __future__ import annotations

from collections.abc import Callable

from saferun.cluster.job_sender import JobSender
from saferun.cluster.job_values import JobCallbacks
from saferun.cluster.leader_clock import LeaderClock
from saferun.cluster.rank_reports import RankReports
from saferun.config import LaunchConfig
from saferun.files.run_dir import RunDirectory
from saferun.linux.poller import Poller

__all__ = ["JobContext"]


class JobContext:
    """What the parts of a job use.

    Args:
        config: the launch.
        poller: the loop's.
        callbacks: what the job calls.
        run_dir: takes events.
        sender: sends messages to the other hosts.
        reports: what hosts report of their ranks.
        on_channel_lost: called when messages of the other hosts no longer arrive: with why, what to do about it, and
            the class of the failure.
        warn: takes a line about something that ends nothing.
        clock: this host's and the leader's.
    """

    def __init__(
        self,
        config: LaunchConfig,
        poller: Poller,
        callbacks: JobCallbacks,
        *,
        run_dir: RunDirectory,
        sender: JobSender,
        reports: RankReports,
        on_channel_lost: Callable[[str, str, str], None],
        warn: Callable[[object], None],
        clock: LeaderClock,
    ) -> None:
        self.config = config
        self.poller = poller
        self.calls = callbacks
        self.run_dir = run_dir
        self.sender = sender
        self.reports = reports
        self.on_channel_lost = on_channel_lost
        self.warn = warn
        self.clock = clock
