"""What follows on this host where the store of an attempt is lost, or its own coordinator and with it the other hosts.

The ranks go on without for as long as they make progress (``storeless_job``). Where they cannot, the attempt ends here.
"""

from __future__ import annotations

import time

from saferun.cluster.job_attempt import JobAttempt
from saferun.cluster.job_channel import JobChannel
from saferun.cluster.storeless_job import StorelessJob
from saferun.supervisor.events import JobLost

__all__ = ["StoreLoss"]


class StoreLoss:
    """The loss of the store in one attempt, if there is one.

    Args:
        attempt: the attempt.
        channel: to the coordinator.

    Attributes:
        is_of_leader: whether the leader's store was lost, which may be served again in another attempt.
        storeless_job: set while the ranks go on without.
    """

    def __init__(self, attempt: JobAttempt, channel: JobChannel) -> None:
        self.is_of_leader = False
        self.storeless_job: StorelessJob | None = None
        self._attempt = attempt
        self._began_at = time.monotonic()  # as the attempt
        self._channel = channel

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return self.storeless_job.deadline if self.storeless_job is not None else None

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.storeless_job is not None:
            self.storeless_job.tick(now)

    def end(self) -> None:
        """There is another attempt."""
        if self.storeless_job is not None:
            self.storeless_job.end()

    def take(self, what: str, hint: str, class_name: str, *, is_own: bool) -> None:
        """Messages of the other hosts no longer arrive.

        Args:
            what: why.
            hint: what to do about it.
            class_name: ``store_lost`` if the leader's store is lost and may be served again; else empty.
            is_own: because this process has lost its coordinator.
        """
        sender, calls, is_head = self._attempt.context.sender, self._attempt.context.calls, self._channel.is_head
        is_neighbour = sender.roster.host == 0 and sender.joined_attempt >= 0 and not is_head
        if (sender.roster.leads and is_head) or (is_neighbour and self._channel.client.is_open):
            class_name = "store_lost"  # this host's own coordinator served it
            self._channel.answer_end()
        self.is_of_leader = bool(class_name)
        lost = JobLost(time.monotonic(), calls.attempt(), what, hint, class_name)
        is_cut_off = is_own and is_head and not class_name
        if self.storeless_job is not None and not self.storeless_job.is_over and calls.ranks():
            return  # the first process of this host has ended, as its ranks have; those of this one have not
        if (self.is_of_leader or is_cut_off) and self._may_go_on():
            self._go_on(lost, is_cut_off=is_cut_off)
        else:
            calls.post(lost)

    def _may_go_on(self) -> bool:
        """Whether the ranks of this host may go on without the job's store, or without this host's coordinator."""
        attempt, context = self._attempt, self._attempt.context
        is_static = context.config.rendezvous.backend == "static"
        is_ending = attempt.is_ending or context.sender.aborted_attempt == attempt.number
        is_underway = attempt.number == context.calls.attempt() and not is_ending and self.storeless_job is None
        return is_static and is_underway and bool(context.calls.ranks())

    def _go_on(self, lost: JobLost, *, is_cut_off: bool) -> None:
        """Go on for as long as the ranks make progress. ``is_cut_off``: only this host is without its coordinator."""
        if is_cut_off:
            self._channel.answer_end()  # the leader finds that this host is up
        attempt, context, reason = self._attempt, self._attempt.context, self._attempt.abort_reason
        config = context.config
        attempt.silent_hosts.end()
        # The loss is why the attempt ends only if nothing else ends it first.
        attempt.abort_reason = None

        def restore_reason() -> None:
            attempt.abort_reason = reason

        fields = {"monotonic_s": lost.at, "attempt": lost.attempt, "what": lost.what}
        prints_for_job = context.sender.roster.leads or not config.hosts.shares_console
        self.storeless_job = StorelessJob(
            lost,
            context.calls.ranks,
            context.poller,
            started_by=self._began_at + config.retry.start_window_s,
            host_timeout_s=config.hosts.host_timeout_s,
            hang_timeout_s=config.watch.hang_timeout_s,
            post=context.calls.post,
            note=lambda: context.run_dir.write_event({"event": "StoreLost", "time": time.time(), **fields}),
            warn=context.warn if prints_for_job or is_cut_off else lambda _: None,
            has_store=is_cut_off,
            on_lost=restore_reason,
        )
        context.sender.on_end = self.storeless_job.conclude
