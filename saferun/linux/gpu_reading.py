"""What all readings of GPUs have in common: a broken driver may hold its caller for ever, and processes have owners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from saferun.linux.procfs import descendants_of, read_name
from saferun.model import JsonObject

# What is left of the budget for putting into words what has been read by then.
_REST_S = 0.2


class Snapshot:
    """What has been read of the GPUs so far. One thread fills it, another may look at any time.

    Attributes:
        facts: what concerns all GPUs.
        gpus: what is known of each.
        step: what is being asked of the driver at this moment; empty when nothing is.
    """

    def __init__(self) -> None:
        self.facts: JsonObject = {}
        self.gpus: list[JsonObject] = []
        self.step = ""

    def as_json(self) -> JsonObject:
        """A copy, as ``gpu_lines`` takes it."""
        # Copying a dictionary of plain values is one step of the interpreter: the other thread cannot come between.
        return {**dict(self.facts), "gpus": [dict(gpu) for gpu in list(self.gpus)]}


def read_until(deadline: float, read: Callable[[], None]) -> bool:
    """Run something that may never return, in a thread, and say whether it was done by the deadline.

    Args:
        deadline: in monotonic seconds.
        read: it may raise; that counts as done.
    """

    def quietly() -> None:
        try:
            read()
        except Exception:  # what was read until then counts
            return

    thread = threading.Thread(target=quietly, name="gpu", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - _REST_S - time.monotonic()))
    return not thread.is_alive()


def families_of(pids: Iterable[int]) -> frozenset[int]:
    """The processes with all that descends from them."""
    return frozenset(member for pid in pids for member in (pid, *descendants_of(pid)))


def owned(processes: Sequence[tuple[int, int | None, str]], ours: frozenset[int]) -> list[JsonObject]:
    """Processes on a GPU, as a snapshot holds them.

    Args:
        processes: pid, bytes of GPU memory (None: unknown), name (empty: to be looked up).
        ours: the pids that belong to the job.
    """
    found: list[JsonObject] = []
    for pid, memory_bytes, name in processes:
        seen = "".join(char if char.isprintable() else "?" for char in read_name(pid).strip())
        whose = "ours" if pid in ours else "other" if seen else "hidden"
        one: JsonObject = {"pid": pid, "name": seen or name, "whose": whose}
        if memory_bytes is not None:
            one["memory_bytes"] = memory_bytes
        found.append(one)
    return found
