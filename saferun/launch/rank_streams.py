"""Opens the streams of the ranks of one attempt: where they lead, and how their lines look."""

from __future__ import annotations

import os

from saferun.console.console_stream import ConsoleStream
from saferun.console.prefix import colored, render_legacy, render_template
from saferun.console.rank_stream import LineFilter, RankStream
from saferun.files.file_stream import FRESH, LAZY, FileStream
from saferun.files.run_dir import shorter_path
from saferun.launch.rank import AttemptPlan
from saferun.launch.stdin_terminals import is_asked_for
from saferun.linux.limits import has_room_for_files
from saferun.linux.streams import RankPipes, open_terminal, terminal_size
from saferun.model import RankAssignment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.launch_context import LaunchContext

_NO_ROOM = "the limit on open files leaves no room for the output of all ranks: some write to the console themselves"


class RankStreams:
    """Opens stdout and stderr of each rank, with the files and the console that they lead to.

    Args:
        context: the launch.
        plan: what the ranks are started with.
    """

    def __init__(self, context: LaunchContext, plan: AttemptPlan) -> None:
        self._config = context.config
        self._plan = plan
        self._screen = context.screen
        self._run_dir = context.run_dir
        self._host = context.host
        self._warn = context.warn
        self._filters = self._open_filters()
        self._pipes = RankPipes(2 * len(plan.placement.ranks))

    def open(self, assignment: RankAssignment, *, is_stderr: bool) -> tuple[RankStream | None, int, str]:
        """Open a stream: (our end or None, the rank's descriptor, the file that keeps it).

        The descriptor is 1 or 2 where the rank has saferun's own stream; any other one is the caller's to close.
        """
        destinations = self._plan.destinations
        i = self._plan.position(assignment)
        path = (destinations.stderrs if is_stderr else destinations.stdouts)[i]
        teed = i in (destinations.tee_stderrs if is_stderr else destinations.tee_stdouts)
        on_console = teed or path == ""
        paths = [path] if path not in {"", os.devnull} else []
        own_path = self._run_dir.rank_path(self._plan.attempt, assignment.rank)
        if own_path is not None:
            own = os.path.join(own_path, "stderr.log" if is_stderr else "stdout.log")
            if own not in paths:
                paths.append(own)
        shown_path = shorter_path(paths[-1]) if paths else ""
        if not paths:
            if not on_console:
                return None, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), ""
            is_bare = self._config.output.prefix is None and self._config.output.legacy_template is None
            if is_bare and not teed and not is_asked_for(self._config, assignment.rank):
                return None, 2 if is_stderr else 1, ""
        if path == "" and not teed and not has_room_for_files():
            self._warn(_NO_ROOM)
            return None, 2 if is_stderr else 1, ""
        read_end, write_end = self._open_ends(assignment, on_console=on_console, teed=teed, is_stderr=is_stderr)
        # torchrun makes the files of --log-dir at once; the others are made when a rank writes something.
        at_once = self._config.logs.log_dir is not None
        files = tuple(self._run_dir.files.open(path, FRESH if at_once else LAZY) for path in paths)
        console = self._console_stream(assignment, teed=teed, is_stderr=is_stderr) if on_console else None
        line_filter = None
        if teed and (shared := self._filters[is_stderr]) is not None:
            needles, sink = shared
            line_filter = LineFilter(sink, needles, self._filter_header(assignment))
        stream = RankStream(
            read_end,
            assignment.local_rank,
            is_stderr=is_stderr,
            files=files,
            console=console,
            line_filter=line_filter,
            pipes=self._pipes,
        )
        stream.is_log = path not in {"", os.devnull}
        return stream, write_end, shown_path

    def _open_ends(
        self, assignment: RankAssignment, *, on_console: bool, teed: bool, is_stderr: bool
    ) -> tuple[int, int]:
        pane = self._screen.err if is_stderr else self._screen.out
        output = self._config.output
        is_seen = (pane.target.is_terminal and not teed) or is_asked_for(self._config, assignment.rank)
        wanted = output.pty == "on" or (output.pty == "auto" and is_seen)
        if wanted and on_console:
            try:
                columns, rows = terminal_size(pane.target.fd)
                return open_terminal(columns - len(self.prefix(assignment)), rows)
            except OSError as error:
                self._warn(f"no pseudo-terminal for rank {assignment.rank}: {error.strerror}; it gets a pipe")
        return self._pipes.open()

    def prefix(self, assignment: RankAssignment) -> str:
        """What is put before each of its lines, without color."""
        output = self._config.output
        if output.prefix is not None:
            rank, local_rank, role = assignment.rank, assignment.local_rank, self._config.role
            return render_template(output.prefix, host=self._host, rank=rank, local_rank=local_rank, role=role)
        if output.legacy_template is not None:
            return self._legacy_prefix(output.legacy_template, assignment)
        return ""

    def _legacy_prefix(self, template: str, assignment: RankAssignment) -> str:
        hostname = os.uname().nodename  # socket.gethostname() without its import
        return render_legacy(
            template, hostname=hostname, rank=assignment.rank, local_rank=assignment.local_rank, role=self._config.role
        )

    def _filter_header(self, assignment: RankAssignment) -> str:
        template = self._config.output.legacy_template
        if template:
            return self._legacy_prefix(template, assignment)
        return f"[{self._config.role}{assignment.local_rank}]:"

    def _console_stream(self, assignment: RankAssignment, *, teed: bool, is_stderr: bool) -> ConsoleStream:
        pane = self._screen.err if is_stderr else self._screen.out
        prefix = self.prefix(assignment)
        if self._screen.colors(pane):
            prefix = colored(prefix, assignment.rank)
        shows_rank = "{rank" in (self._config.output.prefix or "")
        return ConsoleStream(
            pane,
            prefix.encode(errors="backslashreplace"),
            self._screen if is_stderr else None,
            assignment.rank,
            b"[rank%d]:" % assignment.rank if is_stderr and shows_rank else b"",
            is_teed=teed,
        )

    def _open_filters(
        self,
    ) -> tuple[tuple[tuple[str, ...], FileStream] | None, tuple[tuple[str, ...], FileStream] | None]:
        logs, destinations = self._config.logs, self._plan.destinations
        out = err = None
        if logs.duplicate_stdout_filters:
            out = (logs.duplicate_stdout_filters, self._run_dir.files.open(destinations.filtered_stdout, FRESH))
        if logs.duplicate_stderr_filters:
            err = (logs.duplicate_stderr_filters, self._run_dir.files.open(destinations.filtered_stderr, FRESH))
        return out, err

    def close(self) -> None:
        """Close the files that all ranks share."""
        for shared in self._filters:
            if shared is not None:
                shared[1].close()
