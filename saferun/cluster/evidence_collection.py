"""The chunks of evidence that the tasks of a job hand in, as the leader collects them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from saferun.cluster.job_values import EvidenceChunk
from saferun.cluster.messages import MOST_HOSTS, MOST_TASKS, chunk_from
from saferun.cluster.roster import Roster
from saferun.model import ASKED_CHUNK, JsonObject
from saferun.text.decoding import number, text

_LONGEST_NAME = 255
# Of a task, which is asked for one at a time: older ones are dropped. A peer can fill no more of the leader's memory.
_MOST_CHUNKS = 4
# A host that has handed in nothing by then is probed; again at longer intervals.
_PROBE_AFTER_S = 1.5
_PROBE_AGAIN_S = 5.0
# What is collected while the attempt is to go on: what the hosts found of each other, and a hang that may only be
# reported. A host that does not answer for some seconds is not lost then.
_WHILE_IT_GOES_ON = ("probes-", "hang-")
# Clocks that were not measured are compared by when a message was sent and came, which may take a second.
_SKEW_S = 1.5


class _Wanted:
    """Chunks of one name that are waited for."""

    def __init__(
        self, name: str, tasks: set[tuple[int, int]], timeout_s: float, on_done: Callable[[list[EvidenceChunk]], None]
    ) -> None:
        now = time.monotonic()
        self.name = name
        self.missing = tasks  # that have not handed in theirs
        self.on_done = on_done
        self.give_up_at = now + timeout_s
        self.probe_at = now + _PROBE_AFTER_S


class EvidenceCollection:
    """Chunks of one attempt.

    Args:
        roster: who may hand in any.
        is_awaited: whether a host's task may still hand in something.
        probe: has hosts probed; takes their numbers, and ``awaits_heartbeat`` (see ``JobSender.probe``).
        keeps: whether chunks are kept before and after they are waited for.
    """

    def __init__(
        self,
        roster: Roster,
        is_awaited: Callable[[int, int], bool],
        probe: Callable[[list[int], bool], None],
        *,
        keeps: bool = True,
    ) -> None:
        self._roster = roster
        self._is_awaited = is_awaited
        self._probe = probe
        self._keeps = keeps
        self._chunks: dict[tuple[int, int], dict[str, EvidenceChunk]] = {}  # by host and task, and name
        self._wanted: _Wanted | None = None

    @property
    def names(self) -> list[str]:
        """Of the chunks that are there."""
        return [name for chunks in self._chunks.values() for name in chunks]

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return min(self._wanted.give_up_at, self._wanted.probe_at) if self._wanted is not None else None

    def tick(self, now: float) -> None:
        """Give up waiting, or have those probed that have handed in nothing."""
        wanted = self._wanted
        if wanted is None:
            return
        if wanted.give_up_at <= now:
            self._end()
        elif wanted.probe_at <= now:
            wanted.probe_at = now + _PROBE_AGAIN_S
            missing = {host for host, task in wanted.missing if self._is_awaited(host, task)}
            self._probe(sorted(missing), wanted.name.startswith(_WHILE_IT_GOES_ON))

    def collect(
        self, name: str, timeout_s: float, on_done: Callable[[list[EvidenceChunk]], None], hosts: Collection[int] | None
    ) -> None:
        """Wait for the chunks of this name; see ``JobPort.collect``."""
        missing = {task for task in self._roster.others(hosts) if name not in self._chunks.get(task, ())}
        self._wanted = _Wanted(name, missing, timeout_s, on_done)
        self.review()

    def add(self, message: JsonObject) -> None:
        """A task has handed in a chunk.

        Raises:
            One of ``MALFORMED``: it is none.
        """
        host, task = number(message["host"], 0, MOST_HOSTS), number(message["task"], 0, MOST_TASKS)
        name = text(message["name"], _LONGEST_NAME)
        peer = self._roster.peer_of(host, task)
        if peer is None:
            raise ValueError("there is no such host or task")
        if not self._keeps and (self._wanted is None or self._wanted.name != name):
            return  # it comes too late
        chunk = chunk_from(message["text"])
        skew_s = time.time() - chunk.time
        offset_s = chunk.behind_s
        if offset_s is None:
            offset_s = skew_s if abs(skew_s) > _SKEW_S else 0.0
        chunks = self._chunks.setdefault((host, task), {})
        older = [other for other in chunks if other != name]
        for other in older[: max(0, len(older) + 1 - _MOST_CHUNKS)]:
            del chunks[other]
        chunks[name] = EvidenceChunk(
            host,
            task,
            peer.label,
            offset_s,
            moved=chunk.moved,
            stopped=chunk.stopped,
            evidence=chunk.evidence,
            measured=chunk.behind_s is not None,
        )
        if self._wanted is not None and self._wanted.name == name:
            self._wanted.missing.discard((host, task))
            self.review()

    def review(self) -> None:
        """End the wait where nothing more can come."""
        # Not all of them are counted, each time that one of thousands has come.
        if self._wanted is not None and not any(self._is_awaited(*task) for task in self._wanted.missing):
            self._end()

    def _end(self) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            found = [chunks[wanted.name] for _, chunks in sorted(self._chunks.items()) if wanted.name in chunks]
            if not self._keeps:
                self._chunks.clear()
            wanted.on_done(found)


class EvidenceCollections:
    """The chunks of one attempt: of failures and hangs, and apart from these what a user has asked for.

    Args: as ``EvidenceCollection``, and ``number``, of the attempt.
    """

    def __init__(
        self,
        roster: Roster,
        is_awaited: Callable[[int, int], bool],
        probe: Callable[[list[int], bool], None],
        *,
        number: int,
    ) -> None:
        self._number = number
        self._failures = EvidenceCollection(roster, is_awaited, probe)
        # A host that is slow to answer a user is not suspected of anything.
        self._asked = EvidenceCollection(roster, is_awaited, lambda _hosts, _awaits_heartbeat: None, keeps=False)

    @property
    def names(self) -> list[str]:
        """Of the chunks that are kept."""
        return self._failures.names

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = (self._failures.deadline, self._asked.deadline)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Give up waiting, or have those probed that have handed in nothing."""
        self._failures.tick(now)
        self._asked.tick(now)

    def collect(
        self,
        name: str,
        timeout_s: float,
        on_done: Callable[[list[EvidenceChunk]], None],
        hosts: Collection[int] | None,
        attempt: int | None = None,
    ) -> None:
        """Wait for the chunks of this name; see ``JobPort.collect``."""
        if attempt is not None and attempt != self._number:
            on_done([])  # this attempt may wait for something else
            return
        self._of(name).collect(name, timeout_s, on_done, hosts)

    def add(self, message: JsonObject) -> None:
        """A task has handed in a chunk.

        Raises:
            One of ``MALFORMED``: it is none.
        """
        self._of(text(message["name"], _LONGEST_NAME)).add(message)

    def review(self) -> None:
        """End a wait where nothing more can come."""
        self._failures.review()
        self._asked.review()

    def _of(self, name: str) -> EvidenceCollection:
        return self._asked if name.startswith(ASKED_CHUNK) else self._failures
