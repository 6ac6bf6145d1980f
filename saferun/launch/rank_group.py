"""The ranks of one attempt on this host: their processes, their streams, their ends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from signal import SIGCONT, SIGKILL, SIGWINCH
from time import localtime, strftime

from saferun.console.rank_stream import RankStream
from saferun.errors import SaferunError, suppress
from saferun.launch.failed_rank_files import LeftFiles
from saferun.launch.rank import AttemptPlan, Rank
from saferun.launch.rank_argv import rank_argv
from saferun.launch.rank_streams import RankStreams
from saferun.launch.stdin_terminals import open_stdin, with_columns
from saferun.linux.children import (
    Child,
    SpawnError,
    await_report,
    begin_spawn,
    signal_child,
    signal_family,
    signal_group,
    without_descriptor,
)
from saferun.linux.core_limits import RankPreparation, prepare_rank
from saferun.linux.limits import has_room_for_files, make_room_for_files, restore_files
from saferun.linux.preforked import PreforkedProcesses
from saferun.linux.procfs import read_stat
from saferun.linux.program_start import ForkedRank, start_error
from saferun.linux.signals import caught_signals, ignore_as_before
from saferun.linux.streams import resize_terminal, terminal_size
from saferun.model import ExitStatus, RankAssignment, RankEnd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.evidence.job_evidence import RankOutput
    from saferun.launch.launch_context import LaunchContext
    from saferun.linux.keyboard import StdinTerminal
    from saferun.linux.reaper import Reaper

# When a rank ends, at most so much of its output is read: a descendant of it may go on writing forever.
_MOST_CHUNKS_AT_EXIT = 256


class RankGroup:
    """All ranks of an attempt on this host.

    Args:
        context: the launch.
        plan: what the ranks are started with.
        reaper: is informed of each rank's session before its program can start a process in it.
        preparation: done in each rank's process before its program starts.
        preforked: processes that may become ranks.
    """

    def __init__(
        self,
        context: LaunchContext,
        plan: AttemptPlan,
        reaper: Reaper,
        *,
        preparation: RankPreparation | None = None,
        preforked: PreforkedProcesses | None = None,
    ) -> None:
        config = self._config = context.config
        self.plan = plan
        self._screen = context.screen
        self._warn = context.warn
        self._guarded = context.guarded
        self._streams = RankStreams(context, plan)
        self._preparation = preparation
        self._preforked = preforked
        self._reaper = reaper
        self._file_limits = make_room_for_files(config.nproc_per_node)
        self.is_closed = False
        self._last_lines: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # by rank; once all is closed
        self.left_files = LeftFiles(context.run_dir)
        self.ranks: list[Rank] = []
        self.by_pid: dict[int, Rank] = {}

    def begin_folding(self) -> None:
        """Show tracebacks that several ranks print only once; output in torchrun's own format stays as it is.

        To be called once the ranks have been forked, before any of their output is read.
        """
        config, screen = self._config, self._screen
        if screen.folding is not None:
            screen.folding.forget()
        elif (
            config.output.fold
            and config.output.keep_files
            and config.output.prefix is not None
            and not any((*config.logs.tee, *config.logs.redirects))
            and config.logs.logs_specs is None
        ):
            with suppress(Exception):  # without it all tracebacks are shown
                from saferun.console.folding import Folding

                screen.folding = Folding()

    def start(self) -> tuple[list[ForkedRank], SaferunError | None]:
        """Begin to start every rank, in order of local rank, without waiting for any program's file.

        Returns:
            The ranks that have been forked, and the error that kept the next one from it (None: those are all).
        """
        forked: list[ForkedRank] = []
        for assignment in self.plan.placement.ranks:
            try:
                forked.append(self._start(assignment))
            except SaferunError as error:
                return forked, error
        if self._preforked is not None:
            self._preforked.release()
        return forked, None

    def wrapped_commands(self) -> dict[int, tuple[str, list[str]]]:
        """By the pid of each tool that a rank runs under: its name, and the command line of the script."""
        if not self.plan.wrappers:
            return {}
        commands = {}
        for rank in self.ranks:
            wrappers = self.plan.wrappers[self.plan.position(rank.assignment)]
            if wrappers and not wrappers[-1].is_module:
                argv = rank_argv(self._config.command, rank.assignment.local_rank)
                commands[rank.child.pid] = (wrappers[0].name, argv)
        return commands

    def adopt(self, rank: Rank) -> None:
        """The tool that a rank ran under has ended; its script is a child of saferun's now, and the rank."""
        script = rank.wrapped
        if script is None:
            return
        del self.by_pid[rank.child.pid]
        if rank.child.pidfd >= 0:
            os.close(rank.child.pidfd)
        rank.child, rank.wrapped = script.child, None
        self.by_pid[rank.child.pid] = rank

    def drop(self, rank: Rank) -> None:
        """Drop a rank that could not start its program."""
        del self.by_pid[rank.child.pid]
        self.ranks.remove(rank)
        if rank.child.pidfd >= 0:
            os.close(rank.child.pidfd)
        for stream in rank.streams:
            stream.close()
        if rank.terminal is not None:
            rank.terminal.close()

    # ----------------------------------------------------------------------------------------------------------------

    def _start(self, assignment: RankAssignment) -> ForkedRank:
        i = self.plan.position(assignment)
        environ = self.plan.environs[i]
        argv = self._wrapped_argv(i, assignment.local_rank)
        opened: list[int] = []
        streams: list[RankStream] = []
        stderr_path = ""
        child: Child | None = None
        terminal: StdinTerminal | None = None
        try:
            targets = []
            for is_stderr in (False, True):
                stream, target, path = self._streams.open(assignment, is_stderr=is_stderr)
                if target > 2:  # noqa: PLR2004
                    opened.append(target)
                if stream is not None:
                    streams.append(stream)
                if is_stderr:
                    stderr_path = path
                targets.append(target)
            terminal, stdin = open_stdin(self._config, assignment.rank, streams, self._warn)
            environ = with_columns(environ, streams, has_terminal=terminal is not None)
            opened += [stdin] if stdin else []
            child, report = self._begun(*self._begin_spawn(argv, environ, stdin, *targets))
        except SpawnError as error:
            raise start_error(error, assignment.rank, argv, environ) from None
        except OSError as error:
            raise SaferunError(
                f"rank {assignment.rank} cannot be started: {error}", "check the limits on open files (ulimit -n)"
            ) from None
        finally:
            for fd in opened:
                os.close(fd)
            if child is None:
                for stream in (*streams, *((terminal,) if terminal is not None else ())):
                    stream.close()
        rank = Rank(assignment, child, streams, stderr_path, terminal)
        self.ranks.append(rank)
        self.by_pid[child.pid] = rank
        return ForkedRank(assignment.local_rank, assignment.rank, child.pid, report, argv, environ)

    def _begin_spawn(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int, stdout: int, stderr: int
    ) -> tuple[Child, int]:
        if self._preforked is not None and (pids := self._preforked.pids):
            self._note_session(pids[0])
            begun = self._preforked.begin_spawn(
                argv,
                environ,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                preparation=self._preparation,
                files=self._file_limits,
            )
            if begun is not None:
                return begun
            self._reaper.note_ended(pids[0])
        begun = begin_spawn(argv, environ, stdin=stdin, stdout=stdout, stderr=stderr, prepare=self._prepare)
        self._note_session(begun[0].pid)
        return begun

    def _begun(self, child: Child, report: int) -> tuple[Child, int]:
        try:
            return _modest(child, report)
        except SpawnError:
            self._reaper.note_ended(child.pid)
            raise

    def _note_session(self, pid: int) -> None:
        """Inform the reaper at once: the rank's program may begin, and this process be killed, before it runs again."""
        stat = read_stat(pid)
        self._reaper.note_started(pid, stat.start_ticks if stat is not None else 0)

    def _prepare(self) -> None:
        """In a rank's process, before its program starts."""
        ignore_as_before()
        if self._preparation is not None:
            prepare_rank(self._preparation)
        if self._file_limits is not None:
            restore_files(self._file_limits)

    def _wrapped_argv(self, position: int, local_rank: int) -> list[str]:
        wrappers = self.plan.wrappers[position] if self.plan.wrappers else ()
        return [*self.plan.command_prefixes[position], *rank_argv(self._config.command, local_rank, wrappers)]

    def resize(self) -> None:
        """The terminal has another size: resize the ranks' pseudo-terminals."""
        for rank in self.ranks:
            for stream in rank.streams:
                if os.isatty(stream.fd):
                    pane = self._screen.err if stream.is_stderr else self._screen.out
                    columns, rows = terminal_size(pane.target.fd)
                    resize_terminal(stream.fd, columns - len(self._streams.prefix(rank.assignment)), rows)

    def note_size(self) -> None:
        """Send SIGWINCH to ranks with pseudo-terminals, which are not the controlling ones of their sessions."""
        for rank in self.ranks:
            receiver = rank.receiver
            if rank.end is None and receiver is not None and any(os.isatty(stream.fd) for stream in rank.streams):
                signal_child(receiver, SIGWINCH)

    # ----------------------------------------------------------------------------------------------------------------

    def signal(self, local_ranks: Sequence[int], signum: int, *, only_handled: bool = False) -> list[int]:
        """Send a signal to the process groups of ranks that have not ended.

        Args:
            local_ranks: the ranks.
            signum: the signal.
            only_handled: leave out ranks that have no handler for it.

        Returns:
            The local ranks that it was sent to.
        """
        signalled = []
        for rank in self.ranks:
            if rank.assignment.local_rank not in local_ranks or rank.end is not None:
                continue
            if only_handled and signum not in caught_signals(rank.pid):
                continue
            if not rank.signals:
                rank.lines_before_stop = self._last_lines_of(rank, is_stderr=True)
            rank.signals.add(signum)
            if signum in caught_signals(rank.pid):
                rank.handled.add(signum)
            self._signal(rank, signum)
            signalled.append(rank)
        for rank in signalled:
            stat = read_stat(rank.pid)
            if stat is not None and stat.state == "T":
                # A stopped process takes no signal but SIGKILL before it goes on.
                self._signal(rank, SIGCONT)
        return [rank.assignment.local_rank for rank in signalled]

    def _signal(self, rank: Rank, signum: int) -> None:
        # torchrun's ranks of --run-path are no leaders of a group: their data loaders live while they save.
        is_alone = self._config.command.run_path and signum not in {SIGKILL, SIGCONT}
        if rank.wrapped is not None and (receiver := rank.receiver) is not None:
            # Its group may be another one than the tool's.
            signal_child(receiver, signum) if is_alone else signal_family(receiver, signum)
        if rank.wrapped is not None and signum != SIGKILL:
            return  # a tool that got it as well might end before the script, or keep it from ending
        if is_alone and not self.plan.wrappers:
            signal_child(rank.child, signum)
        else:
            signal_group(rank.child, signum)

    def note_exit(self, rank: Rank, status: ExitStatus, *, at: float, time: float) -> None:
        """Remember how a rank ended, after taking in its last output.

        Args:
            rank: the rank, whose process has been reaped.
            status: how it ended.
            at: when, in monotonic seconds.
            time: when, in seconds since the epoch.
        """
        del self.by_pid[rank.child.pid]
        script = rank.wrapped
        # Nothing may remember a number that another descriptor gets next.
        rank.child = without_descriptor(rank.child)
        if script is not None:
            script.child = without_descriptor(script.child)
        self._guarded("read the last output of a rank", _take_in, rank, at)
        assignment, signals = rank.assignment, frozenset(rank.signals)
        if script is not None and script.ended_at:
            # A rank ends when its script does, however long its tool goes on.
            at, time, signals = script.ended_at, script.ended_time, script.signals
        rank.end = RankEnd(
            assignment.local_rank,
            assignment.rank,
            rank.pid,
            status,
            at=at,
            time=time,
            stopped_by_us=bool(signals) and (status.signum is None or status.signum in signals),
            clock=strftime("%H:%M:%S", localtime(time)),
        )
        if not status.ok:
            self._guarded("read the files of a rank that has failed", self._read_left_files, rank)

    def _read_left_files(self, rank: Rank) -> None:
        position = self.plan.position(rank.assignment)
        heartbeat = self.plan.environs[position].get("SAFERUN_HEARTBEAT_FILE", "")
        self.left_files.read(rank, self.plan.attempt, self.plan.destinations.error_files[position], heartbeat)

    def close(self, at: float) -> int:
        """The attempt is over: take in what is left in the pipes and close everything.

        Args:
            at: monotonic seconds.

        Returns:
            How many bytes the ranks have written, as far as they came through saferun.
        """
        self.is_closed = True
        failed = any(rank.end is None or not rank.end.status.ok for rank in self.ranks)
        for rank in self.ranks:
            _take_in(rank, at)
            if failed:
                self._last_lines[rank.assignment.rank] = self._all_last_lines(rank)
        written = sum(rank.output_bytes() for rank in self.ranks)
        for rank in self.ranks:
            for stream in rank.streams:
                stream.close()
            rank.streams.clear()
        self._streams.close()
        return written

    def outputs(self) -> tuple[RankOutput, ...]:
        """What each rank has written last, in order of local rank."""
        from saferun.diagnosis.tracebacks import ends_with_traceback
        from saferun.evidence.job_evidence import RankOutput
        from saferun.text.redaction import lines_without_keys

        outputs = []
        for rank in self.ranks:
            out, err = (
                self._last_lines.get(rank.assignment.rank, ((), ())) if self.is_closed else self._all_last_lines(rank)
            )
            # A diagnosis quotes single lines of them.
            out, err = tuple(lines_without_keys(out)), tuple(lines_without_keys(err))
            recorded = rank.recorded or {"message": "", "time": 0.0}
            output = RankOutput(
                rank.assignment.local_rank, err, rank.stderr_path, recorded["message"], recorded["time"], out
            )
            raised = ends_with_traceback(rank.lines_before_stop)
            tools = self._tools_of(rank)
            output = output._replace(raised=raised, failure=rank.failure, traceback=rank.traceback, tools=tools)
            outputs.append(output._replace(uncaught_time=rank.uncaught_time))
        return tuple(outputs)

    def _tools_of(self, rank: Rank) -> tuple[str, ...]:
        if not self.plan.wrappers:
            return ()
        import shlex

        wrappers = self.plan.wrappers[self.plan.position(rank.assignment)]
        return tuple(shlex.join(wrapper.argv) for wrapper in wrappers if not wrapper.is_module)

    def _all_last_lines(self, rank: Rank) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._last_lines_of(rank, is_stderr=False), self._last_lines_of(rank, is_stderr=True)

    def _last_lines_of(self, rank: Rank, *, is_stderr: bool) -> tuple[str, ...]:
        """A rank's last lines. They are for the report only: without them it is signalled, and its end is noted."""
        return self._guarded("read the last lines of a rank", lambda: rank.last_lines(is_stderr=is_stderr)) or ()


def _modest(child: Child, report: int) -> tuple[Child, int]:
    """A child without its descriptors if the limit on open files is reached: SIGCHLD reports its end as well."""
    if has_room_for_files():
        return child, report
    child = without_descriptor(child)
    return child, await_report(child, report)


def _take_in(rank: Rank, at: float) -> None:
    """Read what a rank's pipes hold by now."""
    for stream in rank.streams:
        for _ in range(_MOST_CHUNKS_AT_EXIT):
            if stream.read(at, is_last=True) <= 0:
                break
