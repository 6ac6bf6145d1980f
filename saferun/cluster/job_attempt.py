"""One attempt of the job, as this host sees it: what the other hosts report, and what follows from that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from saferun.cluster.evidence_collection import EvidenceCollections
from saferun.cluster.job_context import JobContext
from saferun.cluster.job_sender import StateReport
from saferun.cluster.job_values import AbortReason
from saferun.cluster.lines_of_others import LinesOfOthers
from saferun.cluster.lost_hosts import LostHosts, why_of
from saferun.cluster.messages import (
    LONGEST_MESSAGE,
    MOST_TASKS,
    StopMessage,
    abort_from,
    decision_from,
    is_leaders,
    request_from,
)
from saferun.cluster.rank_reports import RankReports
from saferun.cluster.reported_states import ReportedStates
from saferun.cluster.silent_hosts import SilenceLimits, SilentHosts, ThisHost
from saferun.cluster.task_states import TaskStates
from saferun.linux.signals import SURVIVED
from saferun.model import ABORT_REGROUPS, JsonObject, Value
from saferun.supervisor.events import (
    CauseShown,
    CheckpointRequested,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    JobDecided,
    StopRequested,
)
from saferun.text.decoding import display_text, number

# While a host is silent, at most so many others are asked whether their ranks make progress.
_MOST_ASKED = 8
_HINT = "look at that host: the last messages of saferun there, and dmesg"


class _Handler(Value):
    """What takes a message of the coordinator.

    Attributes:
        take: takes it.
        leader_only: whether hosts that do not lead drop it.
        of_attempt: whether it is dropped if it is of another attempt. The hosts end an attempt at different moments: a
            ``store_lost`` of the previous one would end the next.
    """

    take: Callable[[JobAttempt, JsonObject], None]
    leader_only: bool = False
    of_attempt: bool = False


def _refuse_entry(_attempt: JobAttempt, message: JsonObject) -> None:
    raise ValueError(f"an entry of the job's log: {message.get('text') or 'it cannot be read'}")


def _note_start_stage(attempt: JobAttempt, message: JsonObject) -> None:
    attempt.start_stage = message


def _note_clock(attempt: JobAttempt, message: JsonObject) -> None:
    attempt.context.clock.take(attempt.number, message)


class JobAttempt:
    """An attempt, from the hosts' agreement to the next one. Before the first agreement it has the number -1.

    Args:
        context: what all attempts have in common.
        number: the job's number of the attempt.
        addresses: of other hosts, to look up the interfaces that lead there.
        local_ranks: the local rank of each rank of this process.
        is_head: whether this process prints messages; others of the host do not.
        patience_after_s: as in ``SilenceLimits``; a spare has no ranks that show how long the others stand still.
        has_successor: as in ``SilenceLimits``.

    Attributes:
        blamed: ranks of the job that the hang is blamed on that was captured last.
    """

    def __init__(
        self,
        context: JobContext,
        number: int = -1,
        *,
        addresses: Sequence[str] = (),
        local_ranks: Mapping[int, int] | None = None,
        is_head: bool = False,
        patience_after_s: float = float("inf"),
        has_successor: bool = False,
    ) -> None:
        self.context = context
        self._roster = roster = context.sender.roster
        self._local_ranks = local_ranks or {}
        self.number = number
        self.abort_reason: AbortReason | None = None
        self.start_stage: JsonObject | None = None
        self.blamed: tuple[int, ...] = ()
        self.report = StateReport(context.sender)
        self.states = TaskStates(roster)
        self.lost_hosts = LostHosts(context, roster, self.states)
        self.chunks = EvidenceCollections(roster, self._is_awaited, context.sender.probe, number=number)
        self.is_ending = False  # the job's log says that the attempt ends on all hosts
        self._notices = LinesOfOthers()
        self.silent_hosts = SilentHosts(
            context.poller,
            SilenceLimits(
                context.config.hosts.probe_after_s,
                context.config.watch.hang_timeout_s,
                patience_after_s if local_ranks else float("inf"),
                has_successor,
            ),
            ThisHost(
                roster.label,
                roster.leader,
                leads=roster.host == 0 and number >= 0,
                is_head=is_head,
                addresses=tuple(addresses),
            ),
            ranks=context.calls.ranks,
            print_line=context.calls.print_line,
            on_lost=self._on_silent,
            on_notice=self.report.set_route,
            on_leader_silence=self._post_reachability,
            ask_others=self._ask_others,
            on_progress=self.report.set_progress,
            has_ended=lambda: self.report.has_ended,
            is_done=self.states.is_done,
        )
        self._reported = ReportedStates(
            context,
            roster,
            self.states,
            lost_hosts=self.lost_hosts,
            silent_hosts=self.silent_hosts,
            review_chunks=self.chunks.review,
            on_silent_awaited=self._post_reachability,
        )

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self._roster.leads and self.number >= 0

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = (self.silent_hosts.deadline, self.chunks.deadline)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.silent_hosts.deadline is not None and self.silent_hosts.deadline <= now:
            self._judge_silence(self.silent_hosts.tick, now)
            if self.leads:
                self._reported.check_silent()
        self.chunks.tick(now)

    def take(self, message: JsonObject) -> None:
        """Take in what the coordinator reports.

        Raises:
            One of ``MALFORMED``: it makes no sense.
        """
        handler = self._BY_OP.get(str(message.get("op")))
        if handler is None:
            return
        if handler.leader_only and not self.leads:
            return
        if not handler.of_attempt or message["attempt"] == self.number:
            handler.take(self, message)

    def _judge_silence(self, call: Callable[[Any], None], argument: object) -> None:
        """Judge silent hosts; if that fails, the job goes on without a verdict."""
        try:
            call(argument)
        except Exception as error:
            self.silent_hosts.end()
            self.context.warn(f"cannot judge whether other hosts are there: {type(error).__name__}: {error}")

    # ----------------------------------------------------------------------------------------------------------------
    # The log, which all hosts read

    def _on_entry(self, message: JsonObject) -> None:
        attempt, entry = number(message["attempt"]), message["message"]
        kind = entry["kind"]
        if is_leaders(kind) and entry["host"] != 0:
            raise ValueError("a message of the leader from another host")
        if str(kind) in RankReports.KINDS:
            if attempt == self.context.calls.attempt():
                self.context.reports.take(str(kind), entry)
        elif (method := self._BY_KIND.get(str(kind))) is not None:
            method(self, attempt, entry)

    def _on_abort(self, attempt: int, entry: JsonObject) -> None:
        received = abort_from(entry)
        hosts, rendezvous = self.context.config.hosts, self.context.config.rendezvous
        is_elastic = hosts.least != hosts.most or (received.reason == "leave" and rendezvous.backend != "static")
        if received.reason in ABORT_REGROUPS and not is_elastic:
            # No host comes or goes in this job, whatever it says: it ends as one that has failed.
            received = received._replace(reason="failure")
        if received.lost_task is not None and received.host in self._roster.peers:
            self.lost_hosts.add_task(received.host, received.lost_task)
        if attempt in {self.context.calls.attempt(), self.number}:
            self.is_ending = True
            self.silent_hosts.end()
            rank = received.ranks[0] if received.ranks else None
            self.abort_reason = AbortReason(received.reason, received.about, received.text, rank, "", received.hint)
            if self.leads and self.start_stage is None:
                self.start_stage = {}
                self.context.sender.request_start_stage()
        self.context.calls.post(
            JobAborted(
                time.monotonic(),
                attempt,
                received.reason,
                received.text,
                received.label,
                ours=(received.host, received.task) == (self._roster.host, self._roster.task),
                signum=received.signum,
                culprits=tuple(sorted(local for rank, local in self._local_ranks.items() if rank in received.ranks)),
            )
        )

    def _on_cause(self, attempt: int, _entry: JsonObject) -> None:
        self.context.calls.post(CauseShown(time.monotonic(), attempt))

    def _on_request(self, attempt: int, entry: JsonObject) -> None:
        found = request_from(entry)
        if attempt == self.context.sender.joined_attempt < self.context.calls.attempt():
            self._on_request_between_attempts(found, is_stop=entry["kind"] == "request")
        elif (found.host, found.task) != (self._roster.host, self._roster.task):
            now, by = time.monotonic(), found.text
            if entry["kind"] == "request":
                self.context.calls.post(StopRequested(now, attempt, by, found.at_once, ours=False))
            elif found.signum in SURVIVED:
                self.context.calls.post(CheckpointRequested(now, attempt, by, found.signum, ours=False))

    def _on_request_between_attempts(self, found: StopMessage, *, is_stop: bool) -> None:
        """The hosts have not met for the next attempt, so that the request is in the log of the previous one.

        They end when they read the leader's request; it repeats those of other hosts. An entry of the leader proves
        that the leader still had this log open, and has not met the others for the next attempt.
        """
        if not is_stop:
            return
        if found.host == 0:
            now, attempt = time.monotonic(), self.context.calls.attempt()
            self.context.calls.post(StopRequested(now, attempt, found.text, found.at_once, ours=False))
        elif (self._roster.host, self._roster.task) == (0, 0):
            number = self.context.sender.joined_attempt
            self.context.sender.broadcast("request", attempt=number, text=found.text, at_once=found.at_once)

    def _on_decision(self, attempt: int, entry: JsonObject) -> None:
        found, current, read_of = decision_from(entry), self.context.calls.attempt(), attempt
        if attempt == self.context.sender.joined_attempt < current and not self.leads:
            attempt = current  # this host is about to meet the others for it
        self.context.calls.post(
            JobDecided(
                time.monotonic(),
                attempt,
                "restart" if found.next == "restart" else "finish",
                found.exit_code,
                found.wait_s,
                found.restarts,
                found.text,
                excluded=found.excluded,
                replaced=found.replaced,
            )
        )
        self.context.sender.acknowledge(read_of)

    def _on_preflight(self, attempt: int, entry: JsonObject) -> None:
        if attempt == self.number:
            self.context.calls.on_preflight(entry)

    def _on_notice(self, attempt: int, entry: JsonObject) -> None:
        # The leader cannot print it itself, and of the other hosts only one does.
        if attempt == self.number and self._roster.host == 1 and self._notices.admit("notice"):
            self.context.warn(entry["text"])

    def _on_progress_wanted(self, attempt: int, entry: JsonObject) -> None:
        if attempt == self.context.calls.attempt() and self._roster.host in entry["hosts"]:
            self.silent_hosts.watch()

    # ----------------------------------------------------------------------------------------------------------------
    # The states of all ranks

    def _on_states(self, message: JsonObject) -> None:
        # Its own number: the supervisor may have yet to count this attempt, and no state comes twice.
        if message["attempt"] == self.number:
            self._reported.take(message["changed"])

    # ----------------------------------------------------------------------------------------------------------------
    # Hosts that are silent, or lost

    def _is_awaited(self, host: int, task: int) -> bool:
        return not self.lost_hosts.has(host, task) and host not in self.silent_hosts.silent_but_tolerated

    def _ask_others(self) -> bool:
        """Ask some other hosts whether their ranks make progress. Returns whether there are any with ranks."""
        asked = sorted(self.states.running() - {self._roster.host} - self.silent_hosts.silent)[:_MOST_ASKED]
        if asked:
            self.context.sender.ask_for_progress(asked)
        return bool(asked)

    def _on_liveness(self, message: JsonObject) -> None:
        if message.get("host") in self._roster.spares:
            return  # no rank waits for it
        if not self.is_ending:
            self._judge_silence(self.silent_hosts.hear, message)
            if self.leads:
                self._reported.check_end()

    def _on_silent(self, host: int, why: str, text: str) -> None:
        """A silent host is given up: the ranks stand still, or it is certain that it is gone."""
        if self.leads:
            self._on_lost({"host": host, "why": why, "text": text})
        elif not self.is_ending:
            self._lose_store(text, why)

    def _post_reachability(self, text: str) -> None:
        """Hosts that the job goes on without cannot be reached; empty: they can again."""
        now, attempt = time.monotonic(), self.context.calls.attempt()
        self.context.calls.post(HostsUnreachable(now, attempt, text) if text else HostsReachable(now, attempt))

    def _on_lost(self, message: JsonObject) -> None:
        if self.lost_hosts.take(message, is_ending=self.is_ending):
            self.chunks.review()

    def _on_store_lost(self, message: JsonObject) -> None:
        # A process that still holds the port there is its saferun, which can serve another store.
        text, may_come_again = display_text(message["text"], LONGEST_MESSAGE), message.get("again") is True
        self._lose_store(text, why_of(message), "store_lost" if may_come_again else "")

    def _lose_store(self, text: str, why: str, class_name: str = "") -> None:
        self.abort_reason = AbortReason("store_lost", self._roster.leader, text, None, why)
        self.context.on_channel_lost(text, _HINT, class_name)

    def _on_task_lost(self, message: JsonObject) -> None:
        task = number(message["task"], 0, MOST_TASKS)
        self.lost_hosts.add_task(self._roster.host, task)
        rank = next((own - local + task for own, local in self._local_ranks.items()), None)  # each of them has one
        whose = f"local rank {task}" if rank is None else f"rank {rank} (local rank {task})"
        self.context.sender.abort_attempt("task_lost", f"that of {whose}", lost_task=task)
        self.chunks.review()

    def _on_membership(self, message: JsonObject) -> None:
        # What is over is not begun again for a host that comes then.
        if not self.is_ending and not self.states.have_all_ended():
            text = display_text(message.get("text") or "a host wants to join", LONGEST_MESSAGE)
            self.context.sender.abort_attempt("membership", text)

    def _on_chunk(self, message: JsonObject) -> None:
        self.chunks.add(message)

    def _on_warning(self, message: JsonObject) -> None:
        self.context.warn(message["text"])

    _BY_OP: ClassVar[dict[str, _Handler]] = {
        "entry": _Handler(_on_entry),
        "states": _Handler(_on_states, leader_only=True),
        "chunk": _Handler(_on_chunk, leader_only=True, of_attempt=True),
        "probed": _Handler(_on_lost, leader_only=True, of_attempt=True),
        "lost": _Handler(_on_lost, leader_only=True, of_attempt=True),
        "store_lost": _Handler(_on_store_lost, of_attempt=True),
        "late": _Handler(_on_liveness, of_attempt=True),
        "silent": _Handler(_on_liveness, of_attempt=True),
        "returned": _Handler(_on_liveness, of_attempt=True),
        "malformed": _Handler(_refuse_entry, of_attempt=True),
        "start_stage": _Handler(_note_start_stage, of_attempt=True),
        "task_lost": _Handler(_on_task_lost),
        "membership": _Handler(_on_membership, leader_only=True),
        "clock": _Handler(_note_clock, of_attempt=True),
        "warn": _Handler(_on_warning, of_attempt=True),
    }
    _BY_KIND: ClassVar[dict[str, Callable[[JobAttempt, int, JsonObject], None]]] = {
        "abort": _on_abort,
        "cause": _on_cause,
        "request": _on_request,
        "checkpoint": _on_request,
        "decision": _on_decision,
        "preflight": _on_preflight,
        "notice": _on_notice,
        "watch": _on_progress_wanted,
    }
