"""What ``saferunctl stacks`` and ``record`` show of a running job: the stacks of each host's ranks, through the leader.

The leader sends the request in the job's log. Each host has its examiner read the ranks, and hands in the result
packed, like the evidence of a hang; the leader forwards it unchanged to saferunctl, which unpacks it. One round runs at
a time: a user who asks for the same meanwhile gets the same answer. While a failure or a hang is captured, nothing is
read for users, since two tools at one process get in each other's way.

If a user asks another host, that host asks the leader. The answer comes in the job's log, for all users who wait for
it, unless it is too large for an entry.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial

from saferun.captures.examiner import Answer
from saferun.captures.wire import MOST_RECORDED, CaptureTarget
from saferun.launch.host_stacks import RECORDING, HostRequest, Wanted
from saferun.launch.launch_context import LaunchContext
from saferun.linux.scratch import current_directory
from saferun.model import ASKED_CHUNK, JsonObject
from saferun.text.decoding import MALFORMED
from saferun.text.typed_json import fit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.job_values import EvidenceChunk

# The examiner has a time limit of its own; this one is for an examiner that does not keep it.
_EXAMINER_S = 5.0
# Hosts that have not answered by then are left out.
_OTHERS_S = 10.0
_LARGEST_BYTES = 4 << 20
# The stacks of all hosts in one answer.
_MOST_BYTES = 12 << 20
# An entry of the job's log has 64 KiB.
_LONGEST_SHARED = 60_000
# What an entry has beside the stacks of a host, and what these take at least.
_AROUND_BYTES = 500
_LEAST_BYTES = 1000
# The additional time that the leader has to answer another host.
_LEADER_S = 5.0
# Ends a recording whose last user has gone.
_END = "end"


def longest_s(wanted: Wanted) -> float:
    """How long an answer may take."""
    return wanted.budget_s + _EXAMINER_S + _OTHERS_S


class AskedStacks:
    """Collects the stacks of the job. Its owner wakes it at its deadline.

    Args:
        context: the launch.
        wrapped: takes a callback, and returns one whose exceptions only close the control socket.
    """

    def __init__(self, context: LaunchContext, wrapped: Callable[..., Callable[..., None]]) -> None:
        self._context = context
        self._wrapped = wrapped
        self._number = 0
        self._wanted = Wanted("stacks")
        self._waiting: list[Callable[[JsonObject], None]] = []
        self._until = 0.0
        self._stacks: str | None = None  # of this host, as they travel
        self._chunks: Sequence[EvidenceChunk] | None = None  # of the others
        self._own: Answer | None = None
        self._own_number = 0
        self._own_kind = ""
        self._own_until = 0.0
        self._asking: list[tuple[Wanted, Callable[[JsonObject], None]]] = []  # users who wait for the leader's answer
        self._asking_until = 0.0
        # Requests of other hosts to this one, with what takes the answers.
        self._shares: dict[Wanted, Callable[[JsonObject], None]] = {}
        context.job.reports.subscribe_asked(
            wrapped(self._take_asked), wrapped(self._take_asked_elsewhere), wrapped(self._take_answer)
        )

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [0.0 if self._is_in_the_way else self._own_until] if self._own is not None else []
        moments += [self._until] if self._waiting else []
        moments += [self._asking_until] if self._asking else []
        return min(moments, default=None)

    def tick(self, now: float) -> None:
        """Answer with what has come."""
        if self._own is not None and (self._own_until <= now or self._is_in_the_way):
            self._own.close()
            self._take_own(b"")
        if self._waiting and self._until <= now:
            self._answer()
        if self._asking and self._asking_until <= now:
            asking, self._asking = self._asking, []
            for _, on_done in asking:
                on_done({"error": f"{self._leader} does not answer", "hint": "see saferunctl status"})

    def close(self) -> None:
        """Nothing is wanted any more."""
        self._waiting.clear()
        self._asking.clear()
        own, self._own = self._own, None
        if own is not None:
            own.close()

    @property
    def _is_in_the_way(self) -> bool:
        """The ranks are captured because of a failure or a hang: a process can have one debugger.

        A recording attaches to none.
        """
        return self._own_kind != RECORDING and self._context.investigation.is_capturing

    @property
    def _leader(self) -> str:
        return self._context.job.leader or self._context.investigation.log.host

    def request(self, wanted: Wanted, on_done: Callable[[JsonObject], None]) -> None:
        """Collect the stacks of all hosts; only in a job of several hosts.

        Args:
            wanted: what the user wants.
            on_done: called once, with the answer to saferunctl.
        """
        plan = self._context.current.plan
        world_size = plan.placement.world_size if plan is not None else 0
        if wanted.kind == RECORDING and not wanted.ranks and world_size > MOST_RECORDED:
            what = f"the job has {world_size} ranks: name {MOST_RECORDED} at most with --rank"
            on_done({"error": what, "hint": ""})
        elif self._context.job.leads:
            self._collect(wanted, on_done)
        else:
            self._asking.append((wanted, on_done))
            self._asking_until = max(self._asking_until, time.monotonic() + longest_s(wanted) + _LEADER_S)
            self._context.job.reports.ask_leader(wanted._asdict())

    def forget(self, on_done: Callable[[JsonObject], None]) -> None:
        """The user who asked with ``on_done`` is gone: a recording without another user ends now, on all hosts.

        Args:
            on_done: as in ``request``.
        """
        for wanted in [wanted for wanted, waiting in self._asking if waiting == on_done]:
            self._asking = [one for one in self._asking if one[1] != on_done]
            if wanted.kind == RECORDING and all(other != wanted for other, _ in self._asking):
                self._context.job.reports.ask_leader(wanted._replace(kind=_END)._asdict())
        self._forget_collecting(on_done)

    # ------------------------------------------------------------------------------------------------------ the leader

    def _forget_collecting(self, on_done: Callable[[JsonObject], None]) -> None:
        if on_done in self._waiting:
            self._waiting.remove(on_done)
            if not self._waiting and self._wanted.kind == RECORDING:
                self._context.job.reports.ask_ranks(self._number, self._wanted._replace(kind=_END)._asdict())

    def _collect(self, wanted: Wanted, on_done: Callable[[JsonObject], None]) -> None:
        if self._waiting and wanted != self._wanted:
            what = "the ranks of this job are being read for another saferunctl"
            on_done({"error": what, "hint": "try again when it is through"})
            return
        self._waiting.append(on_done)
        if len(self._waiting) > 1:
            return
        self._number += 1
        self._wanted = wanted
        self._until = time.monotonic() + longest_s(wanted)
        self._stacks = self._chunks = None
        number, job = self._number, self._context.job

        def take(chunks: Sequence[EvidenceChunk]) -> None:
            if number == self._number and self._waiting:
                self._chunks = chunks
                self._answer_if_whole()

        job.collect(_name(number), wanted.budget_s + _OTHERS_S, self._wrapped(take))
        job.reports.ask_ranks(number, wanted._asdict())  # this host hears of it as well

    def _answer_if_whole(self) -> None:
        if self._waiting and self._stacks is not None and self._chunks is not None:
            self._answer()

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        answer = self._as_json()
        self._stacks = self._chunks = None
        for on_done in waiting:
            on_done(answer)

    def _as_json(self) -> JsonObject:
        context, job, plan = self._context, self._context.job, self._context.current.plan
        task = context.config.hosts.task
        own = (job.host, task.local_rank if task is not None else 0, context.investigation.log.host, self._stacks or "")
        parts = [own] if self._stacks is not None else []
        parts += [(chunk.host, chunk.task, chunk.label, chunk.evidence) for chunk in self._chunks or ()]
        room = _MOST_BYTES
        fitting = []
        for host, of_task, label, stacks in parts:
            room -= len(stacks)
            fitting.append([host, of_task, label, stacks if room >= 0 else ""])
        return {
            "ok": True,
            "attempt": context.attempt,
            "world_size": plan.placement.world_size if plan is not None else 0,
            "host": job.host,
            "peers": [[peer.host, peer.label, peer.base_rank, peer.ranks] for peer in job.peers.values()],
            "parts": fitting,
        }

    # ---------------------------------------------------------------------------------- the leader, and who asks it

    def _take_asked_elsewhere(self, asked: object) -> None:
        """A user asks another host."""
        wanted = _wanted_from(asked)
        if wanted is None:
            return
        if wanted.kind == _END:
            share = self._shares.get(wanted._replace(kind=RECORDING))
            if share is not None:
                self._forget_collecting(share)
                share({"error": "the recording was ended on another host", "hint": "start it again"})
        elif self._context.job.leads and wanted not in self._shares:
            share = self._shares[wanted] = partial(self._share, wanted)
            # An answer of all hosts is one entry of the job's log.
            context = self._context
            parts = sum(
                peer.ranks if context.config.hosts.task is not None else 1 for peer in context.job.peers.values()
            )
            limit_bytes = _LONGEST_SHARED // max(1, parts) - _AROUND_BYTES
            if limit_bytes < _LEAST_BYTES:
                self._share(wanted, {"error": f"there are too many hosts; ask on {self._leader}", "hint": ""})
                return
            self._collect(wanted._replace(limit_bytes=limit_bytes), share)

    def _share(self, wanted: Wanted, answer: JsonObject) -> None:
        self._shares.pop(wanted, None)
        if len(json.dumps(answer)) > _LONGEST_SHARED:
            answer = {"error": f"there is too much for this host; ask on {self._leader}", "hint": ""}
        self._context.job.reports.share_asked(wanted._asdict(), answer)

    def _take_answer(self, asked: object, answer: object) -> None:
        """The leader has answered one of those who asked it."""
        if not self._asking or not isinstance(answer, dict):
            return
        wanted = _wanted_from(asked)
        done = [on_done for of, on_done in self._asking if of == wanted]
        self._asking = [one for one in self._asking if one[0] != wanted]
        for on_done in done:
            on_done(answer)

    # --------------------------------------------------------------------------------------------------- on each host

    def _take_asked(self, number: int, asked: object) -> None:
        """The leader asks."""
        wanted = _wanted_from(asked)
        if wanted is None:
            return
        if wanted.kind == _END:
            self._end_own(number)
            return
        if self._own is not None:
            return  # the answer to an earlier request that took too long
        context, job = self._context, self._context.job
        self._own_number, self._own_kind = number, wanted.kind
        ranks = [rank for rank in context.current.living() if not wanted.ranks or rank.assignment.rank in wanted.ranks]
        if not ranks or context.investigation.is_capturing:
            self._take_own(b"")
            return
        hook, attempt = context.investigation.hook, context.attempt
        request = HostRequest(
            wanted,
            tuple(
                CaptureTarget(rank.assignment.rank, rank.pid, hook.prefix(attempt, rank.assignment.rank))
                for rank in ranks
            ),
            context.investigation.log.host,
            context.current.plan.placement.world_size if context.current.plan is not None else 0,
            context.config.command.name,
            current_directory(),
            min(job.chunk_limit_bytes, _LARGEST_BYTES, wanted.limit_bytes or _LARGEST_BYTES),
        )
        self._own_until = time.monotonic() + wanted.budget_s + _EXAMINER_S
        try:
            self._own = Answer(
                context.examiner,
                context.guarded_poller,
                "stacks",
                request._asdict(),
                wanted.budget_s,
                self._wrapped(self._take_own),
                limit_bytes=_LARGEST_BYTES,
                is_urgent=False,
            )
        except OSError:
            self._take_own(b"")

    def _end_own(self, number: int) -> None:
        if self._own is not None and number == self._own_number:
            self._own.close()
            self._take_own(b"")

    def _take_own(self, content: bytes) -> None:
        """The examiner has answered; empty: there are no stacks."""
        self._own = None
        stacks = content.decode("ascii", "replace")
        if not self._context.job.leads:
            self._context.job.share(_name(self._own_number), stacks)
        elif self._own_number == self._number:
            self._stacks = stacks
            self._answer_if_whole()


def _wanted_from(asked: object) -> Wanted | None:
    """The request of another host; None: it is malformed."""
    try:
        wanted: Wanted = fit(Wanted, asked)
    except MALFORMED:
        return None
    return wanted


def _name(number: int) -> str:
    """Of the chunks of a request."""
    return f"{ASKED_CHUNK}{number}"
