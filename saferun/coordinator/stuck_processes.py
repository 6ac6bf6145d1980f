"""Processes that are stopped or wait for I/O that does not come, and what is said of supervisors among them."""

from __future__ import annotations

from saferun.linux.procfs import read_stat
from saferun.linux.stuck import awaited_file_system

__all__ = ["LONGEST_LOCATION", "stuck_message", "stuck_processes", "wait_locations"]

LONGEST_LOCATION = 200
# Stands for the location where a supervisor waits that was stopped.
_STOPPED = "SIGSTOP"


def stuck_processes(pids: dict[int, int], seen_in_d: dict[int, int]) -> dict[str, str]:
    """Which processes are stopped (T), or in the same uninterruptible sleep (D) as in the previous sample, by task.

    Args:
        pids: of the processes, by task.
        seen_in_d: how often those that were in state D had been put on a processor then; updated. One that has run
            since is not stuck: a slow disk and a busy machine show many short sleeps.
    """
    stuck = {}
    for task, pid in pids.items():
        state, runs = _state_of(pid), _runs_of(pid)
        if state in {"T", "t"} or (state == "D" and seen_in_d.get(task) == runs):
            stuck[str(task)] = state.upper()
        if state == "D":
            seen_in_d[task] = runs
        else:
            seen_in_d.pop(task, None)
    return stuck


def wait_locations(stuck: dict[str, str], pids: dict[int, int]) -> dict[str, str]:
    """The file systems that processes in state D wait for, by task, where they can be found; or that one is stopped."""
    found = {task: _STOPPED if letter == "T" else _location(pids[int(task)]) for task, letter in stuck.items()}
    return {task: location[:LONGEST_LOCATION] for task, location in found.items() if location}


def stuck_message(label: str, pid: int, location: str) -> str:
    """The message about a supervisor in state D, or in state T, which ``location`` is then."""
    if location == _STOPPED:
        return (
            f"saferun on {label} (pid {pid}) is stopped (SIGSTOP); the job goes on; kill -CONT {pid} lets saferun go on"
        )
    where = f" on {location}" if location else ""
    return f"saferun on {label} (pid {pid}) waits for I/O{where} (state D); the job goes on"


def _location(pid: int) -> str:
    """``ext4 at /scratch``, ``NFS``; empty where that cannot be found."""
    mount, kind = awaited_file_system(pid)
    return f"{kind} at {mount}" if mount else kind


def _state_of(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat is not None else ""


def _runs_of(pid: int) -> int:
    """How often the main thread was put on a processor; 0 where unknown. Source: proc(5), /proc/PID/schedstat."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[2])
    except (OSError, ValueError, IndexError):
        return 0
