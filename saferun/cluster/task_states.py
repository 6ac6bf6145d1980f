"""The states of the ranks of all hosts, as their saferuns report them to the leader."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from saferun.cluster.messages import task_of
from saferun.cluster.roster import Roster
from saferun.model import RANKS_DONE, RANKS_HELD, RANKS_LEFT_OVER, RANKS_QUIET, RANKS_RUN, JsonObject
from saferun.text.decoding import MALFORMED, number

# Fields of a state that are not about how its ranks are doing.
_APART = ("route", "progress", "waits", "beside", "status")
# States in which some ranks run.
_RUNS = (RANKS_RUN, RANKS_QUIET, RANKS_HELD)


class TaskStates:
    """The last reported state of each saferun, by its key: ``HOST/TASK``.

    Args:
        roster: who may report one.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.by_task: dict[str, JsonObject] = {}
        self._progress: dict[str, tuple[int, int]] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        # Kept up to date, because they are asked for with each message about each of thousands of hosts.
        self._reported = set[int]()
        self._unfinished: dict[int, set[str]] = {}

    def add(self, key: str, state: Mapping[str, Any]) -> None:
        """A saferun has reported its state."""
        self.by_task[key] = {name: value for name, value in state.items() if name not in _APART}
        host = task_of(key)[0]
        self._reported.add(host)
        unfinished = self._unfinished.setdefault(host, set())
        unfinished.add(key)
        if state.get("s") == RANKS_DONE:
            unfinished.discard(key)
        if not unfinished:
            del self._unfinished[host]

    def progress(self, key: str, reported: object) -> tuple[bool, bool]:
        """Whether the ranks of a saferun have moved, or been active, since its last report."""
        try:
            moved, active = map(number, reported)  # type: ignore[call-overload]
        except MALFORMED:
            return False, False
        before = self._progress.get(key, (0, 0))
        self._progress[key] = (moved, active)
        return moved > before[0], active > before[1]

    def news(self, key: str, name: str, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A part of a saferun's state with a number that rises, unless it is an old one or malformed."""
        part = state.get(name)
        if not isinstance(part, dict):
            return None
        try:
            count = number(part.get("n"))
        except MALFORMED:
            return None
        if count <= self._numbers.get((key, name), -1):
            return None
        self._numbers[key, name] = count
        return part

    def running(self) -> set[int]:
        """Hosts with ranks that run."""
        return {task_of(key)[0] for key, state in self.by_task.items() if state.get("s") in _RUNS}

    def living(self) -> set[int]:
        """Hosts with ranks that have not ended well, as far as is known."""
        return (self._roster.peers.keys() - self._reported) | self._unfinished.keys()

    def are_all_done(self) -> bool:
        """Whether all ranks of the job have ended well."""
        return len(self.by_task) >= self._roster.task_count and not self.living()

    def have_all_ended(self) -> bool:
        """The same, also where processes that they left behind still run."""
        ended = [state.get("s") in (RANKS_DONE, RANKS_LEFT_OVER) for state in self.by_task.values()]
        return len(ended) >= self._roster.task_count and all(ended)

    def is_done(self, host: int) -> bool:
        """Whether all ranks of a host have ended well."""
        tasks = self._roster.tasks_of(host)
        return tasks > 0 and all(self.by_task.get(f"{host}/{task}", {}).get("s") == RANKS_DONE for task in range(tasks))

    def of_heard(self, silent: Collection[int]) -> Mapping[str, JsonObject]:
        """The states, as if all ranks of the silent hosts had ended well."""
        done = {"s": RANKS_DONE}
        return {key: done if task_of(key)[0] in silent else state for key, state in self.by_task.items()}
