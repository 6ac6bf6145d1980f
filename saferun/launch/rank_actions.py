"""The ranks of this host: started, captured, signalled, and what they leave behind swept away.

The loop reaps children (``event_loop.EventLoop.reap``) and calls ``on_exit`` for each; a rank's becomes RankExited.
"""

from __future__ import annotations

import os
import time
from functools import partial
from signal import SIGINT

from saferun.console.intake import Intake
from saferun.errors import SaferunError, suppress
from saferun.launch.exec_wait import ExecWait
from saferun.launch.launch_context import HostAttempt, LaunchContext
from saferun.launch.orphaned_segments import OrphanedSegments
from saferun.launch.orphans import Grace, Orphans
from saferun.launch.rank import Rank
from saferun.launch.rank_group import RankGroup
from saferun.linux.children import Child, signal_child, without_descriptor
from saferun.linux.helper import PartBase
from saferun.linux.procfs import read_stat
from saferun.linux.reaper import Reaper
from saferun.linux.signals import caught_signals
from saferun.linux.small_files import read_pairs
from saferun.linux.streams import has_writers
from saferun.model import RANKS_LEFT_OVER, ExitStatus, signal_name
from saferun.supervisor import actions, events
from saferun.supervisor.machine import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.linux.preforked import PreforkedProcesses

# The examiner is forked when the ranks are on their way, or at once where something is to be captured before.
_EXAMINER_DELAY_S = 0.4
# A shell ends with this and the number of the signal that has ended its last command.
_SHELL_SIGNAL = 128
# Of a message of this host's, what the leader is sent.
_LONGEST_STATE = 300


class RankActions(PartBase):
    """The ranks of a launch on this host, one attempt after the other.

    Args:
        context: the launch.
        older_children: children of this process that have nothing to do with the launch.
        reaper: ends the ranks if this process cannot.
        preforked: processes that may become ranks.
    """

    deadline = None  # nothing is done by time

    def __init__(
        self,
        context: LaunchContext,
        older_children: frozenset[int],
        reaper: Reaper,
        preforked: PreforkedProcesses | None,
    ) -> None:
        self._context = context
        self._reaper = reaper
        self._preforked = preforked
        self.ended_output_bytes = 0  # what the ranks of attempts that are over have written
        self.intake = Intake(context.poller, time.monotonic)
        self.exec_wait = ExecWait(
            context.poller, on_started=self._on_started, on_failed=self._on_start_failed, warn=context.warn
        )
        self.segments = OrphanedSegments()
        self.orphans = Orphans(
            context.run_id,
            not_ours=older_children | {reaper.pid},
            exempt=context.own_pids,
            on_gone=self._on_orphans_gone,
            report=context.report,
            report_wait=self._report_wait,
            warn=context.warn,
        )

    # ----------------------------------------------------------------------------------------------------------------
    # Start

    def start(self, _action: actions.StartRanks) -> None:
        """Start every rank; RanksStarted or StartFailed follows."""
        context = self._context
        current = context.current
        if current.plan is None:
            return
        current.started_at, current.started_time = time.monotonic(), time.time()
        self.orphans.begin_attempt()
        self._reaper.begin_attempt()
        preparation = context.cores.preparation
        group = current.group = RankGroup(
            context, current.plan, self._reaper, preparation=preparation, preforked=self._preforked
        )
        forked, failure = group.start()
        context.guarded("fold tracebacks", group.begin_folding)
        context.guarded("watch the ranks", context.investigation.ranks_started, group, current.started_at)
        context.guarded("watch for cores", context.cores.ranks_started, current.started_at)
        for rank in group.ranks:
            environ = current.plan.environs[current.plan.position(rank.assignment)]
            self.orphans.note_rank(rank.child.pid, rank.assignment.rank, environ)
            self._watch_end(rank)
            for stream in rank.streams:
                self.intake.add(stream)
        if any(rank.terminal is not None for rank in group.ranks):
            context.guarded("give ranks the keyboard", self._begin_terminals, group)
        context.guarded("import what captures take", context.imports.seal)
        self.exec_wait.begin(forked, failure)
        if context.wrapped is not None:
            context.guarded("find the scripts of wrapped ranks", context.wrapped.begin, group)
        context.guarded("begin the examiner", context.examiner.begin_at, time.monotonic() + _EXAMINER_DELAY_S)
        context.guarded("write run.json", context.log.describe)

    def _watch_end(self, rank: Rank) -> None:
        if rank.child.pidfd >= 0:
            self._context.poller.watch(rank.child.pidfd, partial(self._reap, rank, rank.child))

    def _reap(self, rank: Rank, child: Child) -> None:
        """A rank has ended. It cannot be reaped while a debugger traces it; SIGCHLD comes when that lets go of it."""
        context = self._context
        context.loop.reap()
        if rank.end is not None or rank.child is not child or not context.poller.is_watched(child.pidfd):
            return
        context.poller.unwatch(child.pidfd)  # it would be ready all the time
        tracer = read_pairs(f"/proc/{child.pid}/status").get("TracerPid", "0")
        if tracer not in {"0", ""}:
            name = f"rank {rank.assignment.rank} (pid {child.pid})"
            context.warn(f"{name} has ended, but process {tracer} traces it; its exit code is known once that lets go")

    def _begin_terminals(self, group: RankGroup) -> None:
        context = self._context
        if context.terminals is None:
            from saferun.launch.rank_terminals import RankTerminals

            context.terminals = RankTerminals(context)
            context.loop.add_watching(context.terminals)
            context.loop.add_watching(context.terminals.owners)
        context.terminals.begin(group)

    def _on_started(self) -> None:
        """Every rank has become its program."""
        context = self._context
        current, attempt = context.current, context.attempt
        context.torchrun_events.ranks_started(current, attempt)
        if current.plan is not None:
            context.guarded("check this host", context.checks.begin_beside, current.plan)
        pids = tuple(rank.child.pid for rank in current.ranks)
        context.post(events.RanksStarted(time.monotonic(), attempt, pids))
        if current.plan is not None and attempt == 0:
            context.guarded("lint the environment", context.lint.begin_soon, current.plan)

    def _on_start_failed(self, error: SaferunError, running: tuple[int, ...]) -> None:
        """A rank did not become its program; ``running``: local ranks that did, or may come to."""
        attempt = self._context.attempt
        self._context.torchrun_events.ranks_started(self._context.current, attempt)
        self._context.start_failed(attempt, error, running)

    def serve_store(self, _action: actions.ServeStore) -> None:
        """Have the store of these ranks served."""
        self._context.job.serve_soon()

    # ----------------------------------------------------------------------------------------------------------------
    # While they run

    def capture(self, action: actions.CaptureEvidence) -> None:
        """Have the ranks captured; EvidenceCaptured follows."""
        if action.verdict is None:
            self._note_shared_memory()
        # What has not become its program is still saferun itself: there is nothing to be seen in it.
        ranks = tuple(rank for rank in action.local_ranks if rank not in self.exec_wait.waiting)
        if not ranks:
            self._context.post(events.EvidenceCaptured(time.monotonic(), action.attempt))
            return
        action = action._replace(local_ranks=ranks)
        context = self._context

        def capture() -> None:
            if not context.succeeds("capture", context.investigation.capture, action):
                context.post(events.EvidenceCaptured(time.monotonic(), action.attempt))

        # CAPTURING, or STOPPING, where ranks do not end: what waits for the imports must still be wanted then.
        self.when_imported(context.supervisor.state, capture)

    def when_imported(self, state: State, call: Callable[[], None]) -> None:
        """Call when what captures take is in memory, unless the launch has left this state by then."""
        attempt = self._context.attempt

        def call_in_time() -> None:
            if self._context.is_in(state, attempt):
                call()

        if not self._context.succeeds("import what captures take", self._context.imports.need, call_in_time):
            call_in_time()

    def signal(self, action: actions.SignalRanks) -> None:
        """Send ranks a signal."""
        group = self._context.current.group
        if group is None:
            return
        addressed = [rank for rank in group.ranks if rank.assignment.local_rank in action.local_ranks]
        pids = [rank.child.pid for rank in addressed if rank.end is None]
        self._context.guarded("prevent cores", self._context.cores.before_signal, pids, action.signum)
        # A rank that handles the signal lives on for a moment, in which its memory map can still be read; one that
        # does not may be gone at once.
        handling = group.signal(action.local_ranks, action.signum, only_handled=not self.segments.is_noted)
        self._note_shared_memory()
        others = [local_rank for local_rank in action.local_ranks if local_rank not in handling]
        if others:
            group.signal(others, action.signum)

    def request_checkpoint(self, action: actions.RequestCheckpoint) -> None:
        """Send the signal to ranks that handle it: it would end others. Their workers do not get it."""
        ranks = [rank for rank in self._context.current.living() if rank.assignment.local_rank in action.local_ranks]
        handling = [rank for rank in ranks if action.signum in caught_signals(rank.pid)]
        for rank in handling:
            if (receiver := rank.receiver) is not None:
                signal_child(receiver, action.signum)
        name = signal_name(action.signum)
        self._context.report(f"{action.by}: {name} to {len(handling)} of {len(ranks)} ranks, which handle it")

    def _note_shared_memory(self) -> None:
        """The ranks are about to be ended."""
        current = self._context.current
        if current.group is not None:
            # The clock may have been set since, or have gone on while the machine was suspended.
            since = min(current.started_time, time.time() - (time.monotonic() - current.started_at))
            pids = [rank.child.pid for rank in current.living()]
            self._context.guarded("find the ranks' shared memory", self.segments.note, pids, since)

    def tick(self, now: float) -> None:
        """Nothing is done by time."""

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was a rank, or was to become one."""
        now = time.monotonic()
        group = self._context.current.group
        rank = group.by_pid.get(pid) if group is not None else None
        if group is None or rank is None:
            return False
        self._context.poller.unwatch(rank.child.pidfd)
        terminals = self._context.terminals
        if self.exec_wait.take_failed(pid):
            if terminals is not None:
                self._context.guarded("take the keyboard back", terminals.rank_ended, rank)
            for stream in rank.streams:
                self.intake.remove(stream)
            group.drop(rank)
            self._reaper.note_ended(pid)
            return True
        wrapped = self._context.wrapped
        if wrapped is not None:
            if self._context.guarded("look for the script of a rank", wrapped.adopts, rank, status):
                group.adopt(rank)
                self._watch_end(rank)
                return True
            status = self._context.guarded("ask how a rank ended", wrapped.status_of, rank, status) or status
        group.note_exit(rank, status, at=now, time=time.time())
        if terminals is not None:
            self._context.guarded("take the keyboard back", terminals.rank_ended, rank)
        self._reaper.note_ended(pid)
        self._context.guarded(
            "watch the ranks", self._context.investigation.hangs.rank_ended, rank.assignment.local_rank
        )
        if not status.ok:
            # Before anything of this attempt is taken out of the store.
            self._context.guarded("ask how far the start came", self._context.job.ask_start_stage, len(group.ranks))
        self._context.post(events.RankExited(now, self._context.attempt, rank.assignment.local_rank, status))
        return True

    # ----------------------------------------------------------------------------------------------------------------
    # The end of an attempt

    def sweep(self, action: actions.SweepOrphans) -> None:
        """End what the ranks left behind, or wait for its end; OrphansGone follows."""
        if action.leave:
            self.orphans.leave()
            return
        if action.wait_s > 0:
            # The ranks here are done; nothing of them moves any more, and that is no hang.
            self._context.job.reports.set_state({"s": RANKS_LEFT_OVER})
        if self._context.wrapped is not None:
            for rank in self._context.current.ranks:
                self.orphans.note_script(rank.pid, rank.assignment.rank)
        self.orphans.begin(
            time.monotonic(),
            action.term_s,
            wait_s=action.wait_s,
            idle_s=action.idle_s,
            ends_all=action.ends_all,
            grace=self._grace(action),
        )

    def _grace(self, action: actions.SweepOrphans) -> Grace | None:
        """What is left of the ranks' grace, for what has had their signal with them.

        A rank that is itself the training has had its grace: what it leaves has none. Of a rank under a tool only the
        script has had the signal.
        """
        ranks = self._context.current.ranks
        sent = [rank for rank in ranks if rank.wrapped is None and self._is_wrapper(rank, action.signum)]
        pids = frozenset(rank.child.pid for rank in sent)
        return Grace(action.signum, pids, action.grace_s) if action.grace_s > 0 and pids else None

    def _is_wrapper(self, rank: Rank, signum: int) -> bool:
        """Whether a signal that was sent to a rank may have ended it before its training, as a shell or `conda run`."""
        # Every Python has a handler for SIGINT, and bash with a trap has one, and dies of the signal nonetheless.
        status = rank.end.status if rank.end is not None else None
        has_died = status is not None and (status.signum == signum or status.code == _SHELL_SIGNAL + signum)
        is_taken = signum in rank.handled and signum != SIGINT and not has_died
        return not self._context.config.command.is_python and signum in rank.signals and not is_taken

    def _left_pipes(self, group: RankGroup) -> list[tuple[int, int, str]]:
        """Copies of the pipes that outlive the attempt, and where the output of each goes: console and file.

        Those to which a process can still write, also one of which nothing shows that it is a rank's. The files are
        those of torchrun's options, which what is left running would hold open itself there.
        """
        held = [(rank, stream) for rank in group.ranks for stream in rank.streams if has_writers(stream.fd)]
        if held and not self.orphans.is_left and read_stat(os.getpid()) is not None:
            # What was killed and has not ended writes no more: who reads from saferun does not wait for that.
            held = [] if self.orphans.has_given_up else [(rank, one) for rank, one in held if rank.end is not None]
        found: list[tuple[int, int, str]] = []
        for rank, stream in held:
            position, goals = group.plan.position(rank.assignment), group.plan.destinations
            path = (goals.stderrs if stream.is_stderr else goals.stdouts)[position]
            console = (2 if stream.is_stderr else 1) if stream.is_shown else -1
            with suppress(OSError):  # there are no descriptors left
                found.append((os.dup(stream.fd), console, "" if path == os.devnull else path))
        return found

    def _copy_left_output(self, pipes: list[tuple[int, int, str]]) -> None:
        """Processes that live on can write to their pipes for as long as they do."""
        try:
            if pipes:
                from saferun.linux.left_output import copy_left_output

                copy_left_output(pipes)
        finally:
            for fd, _, _ in pipes:
                os.close(fd)

    def _report_wait(self, text: str) -> None:
        """Processes that the ranks left behind are waited for."""
        if not self._context.screen.set_status("leftovers", text, since=self.orphans.began_at):
            self._context.report(text)
        if self._context.supervisor.state is State.STOPPING:
            # The leader reports it as well: it waits for this host.
            self._context.job.reports.set_state({"s": RANKS_LEFT_OVER, "text": text[:_LONGEST_STATE]})

    def _on_orphans_gone(self, pids: tuple[int, ...]) -> None:
        self.close()
        self._context.guarded("remove shared memory", self.segments.sweep)
        self._context.post(events.OrphansGone(time.monotonic(), self._context.attempt, pids))

    def close(self) -> None:
        """The ranks are gone: take in what is left in their streams, and close those.

        Processes that are left running keep the pipes, however the sweep has ended.
        """
        context = self._context
        context.guarded("name what is left behind", self.orphans.end)
        context.screen.set_status("leftovers", None)
        self.exec_wait.close()
        context.guarded("end the watch", context.investigation.attempt_ended)
        context.job.attempt_ended()
        context.guarded("lint the environment", context.lint.cancel)
        current = context.current
        group = current.group
        if group is None or group.is_closed:
            return
        for rank in group.ranks:
            if rank.end is None:
                # No signal ends it, perhaps for as long as the launch lasts. Until it is reaped, its pid is its own.
                context.poller.unwatch(rank.child.pidfd)
                rank.child = without_descriptor(rank.child)
            for stream in rank.streams:
                self.intake.remove(stream)
        context.ended_attempt = current
        if context.terminals is not None:
            context.guarded("take the keyboard back", context.terminals.close)
        what = "keep the output of what is left running"
        pipes = context.guarded(what, self._left_pipes, group) or []
        self.ended_output_bytes += group.close(time.monotonic())
        context.guarded(what, self._copy_left_output, pipes)

    def forget(self) -> None:
        """The attempt has been reported on. Ranks that no signal ends are left as they are."""
        self.orphans.give_up(self._context.current.by_pid)
        self._context.current = HostAttempt()
