"""Values passed between layers. Immutable, without behaviour beyond reading themselves.

They are named tuples rather than dataclasses because every launch pays for their creation: importing ``dataclasses``
costs more than the whole supervisor's event loop, and each dataclass about six times a named tuple.
"""

from __future__ import annotations

import signal
from typing import Any, NamedTuple


class ExitStatus(NamedTuple):
    """How a process ended, from its wait status.

    Exactly one of ``code`` and ``signum`` is not None.
    """

    code: int | None
    signum: int | None
    core_dumped: bool = False

    @property
    def ok(self) -> bool:
        """Whether the process ended with exit code 0."""
        return self.code == 0

    @property
    def returncode(self) -> int:
        """The convention of ``subprocess``: the exit code, or minus the signal's number."""
        return self.code if self.code is not None else -(self.signum or 0)

    @property
    def words(self) -> str:
        """The status in words: ``exit code 3``, ``killed by SIGSEGV (core dumped)``."""
        if self.code is not None:
            return f"exit code {self.code}"
        dumped = " (core dumped)" if self.core_dumped else ""
        return f"killed by {signal_name(self.signum or 0)}{dumped}"


def signal_name(signum: int) -> str:
    """``SIGSEGV`` for 11, ``signal 64`` where there is no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class RankPlace(NamedTuple):
    """The place of one rank in the job."""

    local_rank: int
    rank: int
    role_rank: int


class Placement(NamedTuple):
    """What a host knows once the hosts of a job have met.

    ``ranks`` holds the ranks of this process in order of local rank. ``group_rank`` is the node rank.
    ``local_world_size`` is the number of ranks on this host; 0: those in ``ranks`` are all.
    ``host`` is the name under which the job knows this host, ``leader`` the one of the host that decides.
    ``restarts`` counts the failures that the job has got over so far.
    """

    group_rank: int
    group_world_size: int
    world_size: int
    role_world_size: int
    ranks: tuple[RankPlace, ...]
    master_addr: str
    master_port: int
    run_id: str
    local_world_size: int = 0
    host: str = ""
    leader: str = ""
    restarts: int = 0


class LogDestinations(NamedTuple):
    """Where the streams of an attempt's ranks go besides the run directory, by local rank.

    The meaning is that of torch's ``LogsDest``: an empty path means the console, ``os.devnull`` nowhere; a stream
    that stands in ``tee_*`` goes to the console as well as to its file.
    """

    stdouts: tuple[str, ...]
    stderrs: tuple[str, ...]
    tee_stdouts: frozenset[int]
    tee_stderrs: frozenset[int]
    error_files: tuple[str, ...]
    filtered_stdout: str
    filtered_stderr: str


class RankEnd(NamedTuple):
    """The end of one rank.

    ``at`` is in monotonic seconds, ``time`` in seconds since the epoch, ``clock`` the same on the wall (``03:15:33``).
    """

    local_rank: int
    rank: int
    pid: int
    status: ExitStatus
    at: float
    time: float
    stopped_by_us: bool
    clock: str = ""


JsonObject = dict[str, Any]
