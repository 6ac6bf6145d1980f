"""A started rank, and what the ranks of an attempt are started with."""

from __future__ import annotations

from saferun.console.rank_stream import RankStream
from saferun.linux.children import Child
from saferun.linux.procfs import read_stat
from saferun.model import JsonObject, LogDestinations, Placement, RankAssignment, RankEnd, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.wrapping import Wrapper


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

    def position(self, place: RankAssignment) -> int:
        """Where a rank stands among those of this process, which need not begin with local rank 0."""
        return place.local_rank - self.placement.ranks[0].local_rank


class Rank:
    """A started rank."""

    __slots__ = (
        "child",
        "end",
        "lines_before_stop",
        "place",
        "recorded",
        "signals",
        "stderr_path",
        "streams",
        "wrapped",
        "wrapped_ticks",
    )

    def __init__(self, place: RankAssignment, child: Child, streams: list[RankStream], stderr_path: str) -> None:
        self.place = place
        self.child = child
        self.streams = streams
        self.stderr_path = stderr_path
        self.signals: set[int] = set()  # that saferun sent to it
        self.lines_before_stop: tuple[str, ...] = ()  # the last ones of its stderr when it was sent the first of them
        self.end: RankEnd | None = None
        self.recorded: JsonObject | None = None  # its error file: message, time, content
        self.wrapped: Child | None = None  # the script, where it is not ``child`` itself but runs under a tool
        self.wrapped_ticks = 0  # when that started, in clock ticks since boot

    @property
    def pid(self) -> int:
        """The process that runs the script, as far as is known."""
        return self.wrapped.pid if self.wrapped is not None else self.child.pid

    @property
    def receiver(self) -> Child | None:
        """The process that gets its signals; None where it has ended before its tool."""
        script = self.wrapped
        if script is None:
            return self.child
        if script.pidfd < 0:  # the number may be another process's by now
            stat = read_stat(script.pid)
            return script if stat is not None and stat.start_ticks == self.wrapped_ticks else None
        return script

    def output_bytes(self) -> int:
        """How many bytes it has written to its streams, as far as they come through saferun."""
        return sum(stream.bytes_read for stream in self.streams)
