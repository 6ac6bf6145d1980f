"""The state of the ranks that still run, from /proc: who sleeps where, who is stopped, who cannot be interrupted."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.host.procfs import read_process_state
from saferun.model import ProcessState


def capture_process_states(pids: Iterable[tuple[int, int]]) -> tuple[ProcessState, ...]:
    """The states of (local rank, pid) pairs. Reads /proc only, which never waits for the process."""
    return tuple(read_process_state(local_rank, pid) for local_rank, pid in pids)
