"""The ranks of a run in uninterruptible sleep: their environment may not be read, and its saferun knows them."""

from __future__ import annotations

from pathlib import Path

from saferun.ctl.live_run import ask_living
from saferun.errors import SaferunError
from saferun.text.decoding import MALFORMED, number

_PATIENCE_S = 10.0


def ranks_by_pid(directory: str) -> dict[int, int]:
    """The rank of each process of a run on this host alone, by pid; empty where its saferun does not answer.

    Args:
        directory: the run's.
    """
    try:
        live, reply = ask_living(Path(directory), "status", patience_s=_PATIENCE_S)
        live.close()
        (host,) = reply["hosts"]  # pids of other hosts mean other processes here
        return {number(row["pid"]): number(row["rank"]) for row in host["ranks"]}
    except (SaferunError, *MALFORMED):
        return {}
