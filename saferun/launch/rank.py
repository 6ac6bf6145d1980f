"""A started rank, and what the ranks of an attempt are started with."""

from __future__ import annotations

from saferun.console.rank_stream import RankStream
from saferun.linux.children import Child
from saferun.linux.procfs import read_stat
from saferun.model import (
    KEPT_LINES,
    ExitStatus,
    JsonObject,
    LogDestinations,
    Placement,
    RankAssignment,
    RankEnd,
    Value,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.wrapping import Wrapper
    from saferun.linux.keyboard import StdinTerminal

_ENDED = frozenset({"Z", "X"})  # in /proc/PID/stat: dead, and not reaped, or just being reaped


class AttemptPlan(Value):
    """What the ranks of an attempt are started with.

    ``environs``, ``command_prefixes``, ``wrappers`` and what ``destinations`` holds are in order of local rank.
    """

    attempt: int
    placement: Placement
    destinations: LogDestinations
    environs: tuple[dict[str, str], ...]
    command_prefixes: tuple[tuple[str, ...], ...]
    wrappers: tuple[tuple[Wrapper, ...], ...] = ()

    def position(self, assignment: RankAssignment) -> int:
        """Where a rank stands among those of this process, which need not begin with local rank 0."""
        return assignment.local_rank - self.placement.ranks[0].local_rank


class Script:
    """The process of a rank's script that runs under a tool.

    Attributes:
        child: the process, which is no child of saferun's.
        ticks: when it started, in clock ticks since boot.
        ended_at, ended_time: when it ended, in monotonic seconds and in seconds since the epoch; 0: it has not, as
            far as is known.
        status: how it ended, where that is known.
        signals: what saferun had sent to it by then.
    """

    __slots__ = ("child", "ended_at", "ended_time", "signals", "status", "ticks")

    def __init__(self, child: Child, ticks: int) -> None:
        self.child = child
        self.ticks = ticks
        self.ended_at = self.ended_time = 0.0
        self.status: ExitStatus | None = None
        self.signals: frozenset[int] = frozenset()

    @property
    def lives(self) -> bool:
        """Whether it has not ended, as far as is known."""
        if self.ended_at or self.child.pidfd >= 0:
            return not self.ended_at
        stat = read_stat(self.child.pid)  # the number may be another process's by now
        return stat is not None and stat.start_ticks == self.ticks and stat.state not in _ENDED


class Rank:
    """A started rank."""

    __slots__ = (
        "assignment",
        "child",
        "end",
        "failure",
        "handled",
        "lines_before_stop",
        "recorded",
        "signals",
        "stderr_path",
        "streams",
        "terminal",
        "traceback",
        "uncaught_time",
        "wrapped",
    )

    def __init__(
        self,
        assignment: RankAssignment,
        child: Child,
        streams: list[RankStream],
        stderr_path: str,
        terminal: StdinTerminal | None = None,
    ) -> None:
        self.assignment = assignment
        self.child = child
        self.streams = streams
        self.stderr_path = stderr_path
        self.signals: set[int] = set()  # that saferun sent to it
        self.handled: set[int] = set()  # those of them for which it had a handler then
        self.lines_before_stop: tuple[str, ...] = ()  # the last ones of its stderr when it was sent the first of them
        self.end: RankEnd | None = None
        self.failure: tuple[str, ...] = ()  # lines of its failure record
        self.traceback: tuple[str, ...] = ()  # of that as well, where it has not printed it
        self.uncaught_time = 0.0  # of that as well, where it is certain to end the rank; since the epoch
        self.recorded: JsonObject | None = None  # its error file: message, time, content
        self.terminal = terminal  # its stdin, where that is not saferun's own
        self.wrapped: Script | None = None  # where it is not ``child`` itself but runs under a tool

    @property
    def pid(self) -> int:
        """The process that runs the script, as far as is known."""
        return self.wrapped.child.pid if self.wrapped is not None else self.child.pid

    @property
    def receiver(self) -> Child | None:
        """The process that gets its signals; None where it has ended before its tool."""
        if self.wrapped is None:
            return self.child
        return self.wrapped.child if self.wrapped.lives else None

    def output_bytes(self) -> int:
        """How many bytes it has written to its streams that are open, as far as they come through saferun."""
        return sum(stream.bytes_read for stream in self.streams)

    def last_lines(self, *, is_stderr: bool) -> tuple[str, ...]:
        """The last lines of its stdout or stderr."""
        stream = next((stream for stream in self.streams if stream.is_stderr is is_stderr), None)
        return stream.last_lines(KEPT_LINES) if stream is not None else ()
