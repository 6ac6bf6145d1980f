"""A job whose coordinator on the first host is gone: the ranks may need nothing of it any more, and train on.

With it went the stores. Ranks that have met need theirs for new groups only, so that a training usually goes on; and
torch's store cannot be had back. So each host watches its own ranks: while they make progress the job goes on, though
what happens on one host is not reported to the others any more. Soon after the start, ranks that show none are those
that have yet to meet, and would look for their store for long. Later they may as well write a checkpoint, or wait for
ranks of another host that do, so that they have as much time as before a hang.

The ranks of a host that serves no store train on as well where its coordinators are gone: it does not answer any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from saferun.cluster.progress import ObservedRank, ProgressWatch
from saferun.cluster.silence import CUT, GO_ON, LOST, Progress, SilentHost, judge, with_phases
from saferun.linux.poller import Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.supervisor.events import Event, JobLost

__all__ = ["StorelessJob"]

_MOVING = "the ranks make progress, so the job goes on"
_QUIET = "ranks that have met need it for new process groups only, so the job goes on"
_CONSEQUENCE = "but hosts no longer hear of each other's failures"
_CUT_OFF = "but this host and the others no longer hear of each other"


class StorelessJob:
    """Whether the ranks of this host make progress without the stores.

    Args:
        lost: what is to be posted when they do not, or when this host's part of the attempt ends.
        ranks: returns the ranks of this host that run.
        poller: the loop's.
        started_by: when the start of the ranks is over, in monotonic seconds.
        host_timeout_s: half of it is what ranks get to show that they make progress, until then.
        hang_timeout_s: for how long nothing may move later; 0: that is not checked.
        post: takes events.
        note: called when the job goes on.
        warn: takes the line about that.
        on_lost: called when they do not make progress.
        has_store: whether the store is still served, and only this host is cut off, as it has lost its coordinator.

    Attributes:
        is_over: whether it has been decided how this host's part of the attempt ends.
    """

    def __init__(
        self,
        lost: JobLost,
        ranks: Callable[[], Sequence[ObservedRank]],
        poller: Poller,
        *,
        started_by: float,
        host_timeout_s: float,
        hang_timeout_s: float,
        post: Callable[[Event], None],
        note: Callable[[], None],
        warn: Callable[[str], None],
        on_lost: Callable[[], None],
        has_store: bool = False,
    ) -> None:
        self._lost = lost
        self._ranks = ranks
        self._started_by = started_by
        self._host_timeout_s = host_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._post = post
        self._note = note
        self._warn = warn
        self._on_lost = on_lost
        self._has_store = has_store
        self.is_over = False
        # The host is up, so that ranks that are at work are enough.
        self._silent = SilentHost(0, "", CUT, lost.what, lost.at)
        self._watch = ProgressWatch(host_timeout_s / 2, poller)
        self._watch.begin(lost.at)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return self._watch.deadline

    def tick(self, now: float) -> None:
        """Check the ranks if that is due. If the check fails, the job goes on."""
        try:
            if self._watch.deadline is not None and now >= self._watch.deadline:
                self._check(now)
        except Exception as error:
            self._watch.end()
            self._warn(f"cannot judge whether the ranks make progress: {type(error).__name__}: {error}")

    def _check(self, now: float) -> None:
        ranks = self._ranks()
        self._watch.tick(now, ranks)
        if not ranks:
            return  # they have ended, and the supervisor knows how
        progress = with_phases(self._watch.progress(now, runs=True))
        verdict = judge(self._silent, progress, self._host_timeout_s, self._hang_timeout_s)
        is_quiet = verdict == LOST and now >= self._started_by
        if verdict == LOST and not (is_quiet and self._may_be_quiet(progress)):
            self._give_up()
        elif (verdict == GO_ON or is_quiet) and not self._silent.goes_on:
            self._silent = self._silent._replace(goes_on=True)
            self._note()
            if self._has_store:
                self._warn(f"{self._lost.what}, and none takes its place; the job goes on, {_CUT_OFF}")
                return
            why = _QUIET if is_quiet else _MOVING
            self._warn(f"{self._lost.what}, and with it the job's store; {why}, {_CONSEQUENCE}")

    def _may_be_quiet(self, progress: Progress) -> bool:
        """Whether ranks that have met may show nothing for as long as they have."""
        longest_s = max(self._host_timeout_s, self._hang_timeout_s)
        return self._hang_timeout_s <= 0 or progress.still_s < longest_s

    def conclude(self, is_done: bool) -> None:  # noqa: FBT001 - as it is called
        """This host's part of the attempt ends, about which no other host can decide any more.

        Args:
            is_done: all its ranks have ended with exit code 0, and there is no other attempt for them. Else one of them
                has failed, or a user ends the job: then that is why, and not the coordinator.
        """
        self._watch.end()
        if not self.is_over:
            self.is_over = True
            lost = self._lost._replace(at=time.monotonic())
            self._post(lost._replace(class_name="") if is_done else lost._replace(what="", hint=""))

    def _give_up(self) -> None:
        """The ranks do not make progress without it."""
        self._watch.end()
        if not self.is_over:
            self.is_over = True
            self._on_lost()
            self._post(self._lost._replace(at=time.monotonic()))

    def end(self) -> None:
        """There is another attempt."""
        self.is_over = True
        self._watch.end()
