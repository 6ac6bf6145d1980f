"""Core files of the ranks of a launch: their limits, and the process that saves cores before others overwrite them."""

from __future__ import annotations

import os
from signal import SIGQUIT

from saferun.launch.launch_context import LaunchContext
from saferun.linux.core_limits import (
    LimitNotes,
    RankPreparation,
    cores_are_off,
    have_raised,
    lower_limits_of,
    plan_preparation,
)
from saferun.linux.core_watch import CoreWatch
from saferun.linux.scratch import current_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from saferun.linux.cgroups import MemoryState
    from saferun.model import ExitStatus

# Cores are watched for from then on: a shorter launch is not to pay for it until its ranks have ended.
_DELAY_S = 0.1


class CorePart:
    """What is prepared before ranks start, and watched while they run. A part of the loop (``linux.part``).

    Args:
        launch: the launch.

    Attributes:
        preparation: what is to be done in each rank's process before its program starts.
        memory: the limits of memory that the ranks started with.
        watch: saves cores, where they are wanted.
    """

    def __init__(self, launch: LaunchContext) -> None:
        self._launch = launch
        self.preparation: RankPreparation | None = None
        self.memory: MemoryState | None = None
        self.watch: CoreWatch | None = None
        self._notes: LimitNotes | None = None

    @property
    def has_raised_limit(self) -> bool:
        """Whether the ranks of this attempt leave cores because saferun has had them do so."""
        return self._notes is not None and have_raised(self._notes.fd)

    def prepare(self) -> None:
        """Ranks are going to be started: plan, and note the limits that they start with."""
        guarded = self._launch.guarded
        if self.preparation is None:
            # Once: a later attempt comes to the same plan, and must open no file.
            self.preparation = guarded("prepare for cores", self._planned)
        if self._notes is not None:
            guarded("note the limits on cores", self._notes.begin_attempt)
        guarded("read the memory limits", self._read_memory)
        if self._launch.config.watch.cores != "off" and self.watch is None:
            self.watch = guarded("watch for cores", self._watch)

    def _watch(self) -> CoreWatch:
        watching, plan = self._launch.config.watch, self.preparation
        return CoreWatch(
            current_directory(),
            self._launch.guarded_poller,
            notes_fd=self._notes.fd if self._notes is not None and cores_are_off() else -1,
            spared=watching.keep_cores if watching.cores == "keep" else 0,
            room_bytes=plan.cores_bytes if plan is not None else 0,
            run_id=self._launch.run_id,
        )

    def _planned(self) -> RankPreparation:
        watching = self._launch.config.watch
        plan = plan_preparation(
            current_directory(),
            self._launch.config.nproc_per_node,
            cores=watching.cores != "off",
            tracer_pid=os.getpid(),
            asked=watching.cores_asked,
        )
        if not plan.raise_core_limit:
            return plan
        try:
            self._notes = LimitNotes()
        except OSError:  # a core that is not known to be saferun's would never be deleted
            return plan._replace(raise_core_limit=False)
        return plan._replace(note_path=self._notes.path)

    def _read_memory(self) -> None:
        from saferun.linux.cgroups import read_memory_state

        self.memory = read_memory_state()

    def ranks_started(self, now: float) -> None:
        """The ranks of an attempt run."""
        if self.watch is not None:
            self.watch.begin_at(now + _DELAY_S)

    def hand_over(self, pids: Sequence[int]) -> None:
        """Leave the cores of these ranks, which have failed, and of their subprocesses to the examiner."""
        if self.watch is not None:
            self.watch.hand_over(pids)

    def before_signal(self, pids: Sequence[int], signum: int) -> None:
        """Ranks are going to be sent a signal. SIGQUIT asks them to stop, and is no crash that a core could explain.

        Where the user has cores on, they leave one all the same, as they would without saferun.
        """
        if signum == SIGQUIT and self.has_raised_limit and cores_are_off():
            lower_limits_of(pids)

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return self.watch.deadline if self.watch is not None else None

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.watch is not None:
            self.watch.tick(now)

    @property
    def pids(self) -> set[int]:
        """The process that saves cores."""
        return self.watch.pids if self.watch is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was this one."""
        return self.watch is not None and self.watch.on_exit(pid, status)

    def close(self) -> None:
        """End the process that saves cores."""
        if self.watch is not None:
            # Those of an attempt whose ranks have not raised their limit are the user's.
            self.watch.close(below=self._notes is not None and not self._notes.were_kept)
        if self._notes is not None:
            self._notes.close()
