"""Values that several tests start from."""

from __future__ import annotations

from saferun.config import (
    Command,
    EnvironConfig,
    LaunchConfig,
    LogConfig,
    OutputConfig,
    RendezvousConfig,
    Setting,
    WatchConfig,
)
from saferun.model import ExitStatus, Placement, RankAssignment, RankEnd

LOGS = LogConfig(None, (0, 0), (0, 0), frozenset(), (), (), None)
CONFIG = LaunchConfig(
    nproc_per_node=2,
    role="trainer",
    command=Command(("python", "-u", "train.py"), run_path=False, name="train.py"),
    rendezvous=RendezvousConfig("static", "job7", "127.0.0.1", 29500, None),
    logs=LOGS,
    output=OutputConfig(None, True, None, None, "auto", "auto"),
    environ=EnvironConfig(profiles=(), profile_path=(), env=(), unset=(), vendor="auto", lint=False),
    watch=WatchConfig(
        300.0, "report", 20.0, 10.0, "auto", strace=False, cores="off", keep_cores=0, gdb=False, inject=True
    ),
    max_restarts=3,
    shutdown_timeout_s=30.0,
    signals=(15, 2),
    numa_binding=None,
    virtual_local_rank=False,
    event_log_handler="null",
    settings={"signals_to_handle": Setting("SIGTERM,SIGINT", "default")},
    argv=("train.py",),
)


def logs_of(
    log_dir: str | None = None,
    redirects: tuple[int, ...] = (0, 0),
    tee: tuple[int, ...] = (0, 0),
    shown: frozenset[int] = frozenset(),
) -> LogConfig:
    return LOGS._replace(log_dir=log_dir, redirects=redirects, tee=tee, local_ranks_filter=shown)


def second_host() -> Placement:
    """The second of three hosts, with two ranks of seven."""
    return Placement(1, 3, 7, 5, (RankAssignment(0, 3, 1), RankAssignment(1, 4, 2)), "node0", 29500, "job7")


def end_of(
    rank: int, *, code: int | None = None, signum: int | None = None, at: float = 100.0, stopped: bool = False
) -> RankEnd:
    """The end of a rank whose local rank is the rank. ``at`` is used for both clocks."""
    return RankEnd(rank, rank, 4000 + rank, ExitStatus(code, signum), at, 1.7e9 + at, stopped)
