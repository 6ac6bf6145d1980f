"""What is reported of hosts that have not met yet, or that do not meet: to the user, and to the supervisor."""

from __future__ import annotations

import time

from saferun.cluster.job_values import JobCallbacks
from saferun.cluster.meeting_failure import MeetingFailure, read_meeting_failure
from saferun.cluster.wait_lines import WaitLines
from saferun.config import LaunchConfig
from saferun.errors import EXIT_USAGE, printable
from saferun.linux.bare_socket import short_host_name
from saferun.model import JsonObject
from saferun.supervisor.events import HostsAwaited, StartFailed

__all__ = ["MeetingReports"]

_ALONE = "if this process is not part of a larger job, pass --standalone"


class MeetingReports:
    """Reports what keeps the hosts from meeting.

    Args:
        config: the launch.
        callbacks: of the job.

    Attributes:
        is_failure_reported: whether another host prints why the hosts could not meet, or this one printed it while it
            waited.
        is_refusal_printed: whether another host has refused to start, which it prints itself.
    """

    def __init__(self, config: LaunchConfig, callbacks: JobCallbacks) -> None:
        self.is_failure_reported = self.is_refusal_printed = False
        self._config = config
        self._callbacks = callbacks
        hint = _ALONE if config.hosts.detected else ""
        self._wait_lines = WaitLines(callbacks.set_status, callbacks.print_line, hint)

    def take_wait(self, message: JsonObject) -> None:
        """Other hosts are waited for, or the head of this one.

        Raises:
            One of ``MALFORMED``: the message makes no sense.
        """
        if message["op"] == "waiting":
            self._callbacks.post(HostsAwaited(time.monotonic(), self._callbacks.attempt()))
        self._wait_lines.take(message)

    def take_failure(self, message: JsonObject) -> None:
        """The coordinator reports that the hosts do not meet."""
        failure = read_meeting_failure(message, self._config)
        self.is_failure_reported = failure.is_published or (
            # Printed already while the others were waited for; the second host prints it again, with its hint.
            self._wait_lines.has_printed(failure.what) and self._config.hosts.node_rank != 1
        )
        self.is_refusal_printed = failure.is_published and failure.exit_code == EXIT_USAGE
        self.fail(failure)

    def fail(self, failure: MeetingFailure) -> None:
        """The start has failed."""
        what, hint, hosts = failure.what, failure.hint, self._config.hosts
        is_printed = hosts.shares_console and (self.is_refusal_printed or not hosts.prints_start_lines)
        if hosts.detected and not is_printed and short_host_name() not in what:
            here = "of unknown node rank" if hosts.node_rank is None else f"node rank {hosts.node_rank}"
            line = f"this is {short_host_name()}, {here}, from {hosts.detected}"
            self._callbacks.print_line(f"saferun: {printable(line)}")
        if hosts.detected and failure.is_incomplete:
            hint += f"; {_ALONE}"
        at, attempt = time.monotonic(), self._callbacks.attempt()
        self._callbacks.post(StartFailed(at, attempt, what, hint, failure.exit_code, class_name=failure.class_name))
