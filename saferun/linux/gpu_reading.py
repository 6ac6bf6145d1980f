"""What all GPU readers share: a broken driver may block its caller forever, and processes have owners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from saferun.linux.procfs import descendants_of, read_name
from saferun.model import JsonObject

# The part of the budget that is kept for formatting the result.
_REST_S = 0.2


class Snapshot:
    """The GPU state read so far. One thread fills it, another may read it at any time.

    Attributes:
        facts: values that apply to all GPUs.
        gpus: values of each GPU.
    """

    def __init__(self) -> None:
        self.facts: JsonObject = {}
        self.gpus: list[JsonObject] = []
        self._step = ("", 0.0)

    @property
    def step(self) -> str:
        """The driver call in progress; empty if none. Setting it restarts its time."""
        return self._step[0]

    @step.setter
    def step(self, step: str) -> None:
        self._step = (step, time.monotonic())

    def stuck(self, default: str) -> JsonObject:
        """The call in progress, as ``stuck_in``, and since how many seconds, as ``stuck_s``.

        Args:
            default: its name where none is known.
        """
        step, since = self._step
        return {"stuck_in": step or default, "stuck_s": round(time.monotonic() - since, 1) if step else 0.0}

    def as_json(self) -> JsonObject:
        """A copy, in the form that ``gpu_lines`` takes."""
        # Copying a dictionary of plain values is atomic for other threads.
        return {**dict(self.facts), "gpus": [dict(gpu) for gpu in list(self.gpus)]}


def read_until(deadline: float, read: Callable[[], None]) -> bool:
    """Run a function that may never return in a thread. Returns whether it returned by the deadline.

    Args:
        deadline: in monotonic seconds.
        read: the function; raising counts as returning.
    """

    def quietly() -> None:
        try:
            read()
        except Exception:  # what was read until then is kept
            return

    thread = threading.Thread(target=quietly, name="gpu", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - _REST_S - time.monotonic()))
    return not thread.is_alive()


def families_of(pids: Iterable[int]) -> frozenset[int]:
    """The processes and all their descendants."""
    return frozenset(member for pid in pids for member in (pid, *descendants_of(pid)))


def owned(processes: Sequence[tuple[int, int | None, str]], ours: frozenset[int]) -> list[JsonObject]:
    """Processes on a GPU, as a snapshot holds them.

    Args:
        processes: pid, bytes of GPU memory (None: unknown), name (empty: read from /proc).
        ours: the pids of the job.
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
