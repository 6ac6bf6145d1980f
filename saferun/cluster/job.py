"""This host's part in a job of several hosts, or of several saferuns on one host."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from saferun.cluster.coordinator_client import KILLED_HINT
from saferun.cluster.coordinator_replacement import CoordinatorReplacement
from saferun.cluster.job_attempt import JobAttempt
from saferun.cluster.job_channel import JobChannel
from saferun.cluster.job_context import JobContext
from saferun.cluster.job_sender import JobSender
from saferun.cluster.job_values import Assignment, EvidenceChunk, JobCallbacks
from saferun.cluster.job_view import JobView
from saferun.cluster.join_messages import EndNote, Joined
from saferun.cluster.leader_clock import LeaderClock
from saferun.cluster.meeting import Meeting
from saferun.cluster.meeting_failure import MeetingFailure
from saferun.cluster.meeting_reports import MeetingReports
from saferun.cluster.messages import LONGEST_MESSAGE, Ignored
from saferun.cluster.rank_reports import RankReports
from saferun.cluster.rendezvous_messages import assignment_from, chunk_limit, hosts_text
from saferun.cluster.roster import Roster
from saferun.cluster.shared_store import SharedStore
from saferun.cluster.store_loss import StoreLoss
from saferun.config import LaunchConfig
from saferun.errors import SaferunError, printable
from saferun.files.run_dir import RunDirectory
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.actions import Finish, JoinHosts
from saferun.supervisor.events import StopRequested
from saferun.text.decoding import display_text, number, text
from saferun.text.typed_json import fit

if TYPE_CHECKING:
    from saferun.cluster.secret import JobSecret
    from saferun.cluster.storeless_job import StorelessJob

_LONGEST_NAME, _LONGEST_PATH = 255, 4096
_OFF = "--scheduler none ignores the scheduler, as torchrun does"
_MOST_ROUTES = 8  # addresses of other hosts for which the interface that leads there is looked up


class Job(JobSender, JobView, SharedStore):
    """The other hosts, with the interface of ``cluster.job_interface.JobPort``.

    Args:
        config: the launch.
        environ: the coordinator's environment.
        poller: the loop's.
        callbacks: what it calls.
        run_dir: says where this launch's files are going to be.
        secret: signs the messages between hosts; None: nothing does.
        open_channel: makes the channel to the coordinator.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        poller: Poller,
        callbacks: JobCallbacks,
        *,
        run_dir: RunDirectory,
        secret: JobSecret | None = None,
        open_channel: Callable[..., JobChannel] = JobChannel,
    ) -> None:
        self.chunk_limit_bytes = 1 << 16
        self.end: Finish | None = None
        self.ignored = Ignored(self._warn)
        self.unsigned = Ignored(self._warn)
        self._meeting: Meeting | None = None  # the one that is under way
        self._meeting_reports = MeetingReports(config, callbacks)
        self._secret = secret
        channel = open_channel(
            config,
            environ,
            poller,
            callbacks,
            on_message=self._on_message,
            on_lost=partial(self._on_channel_lost, is_own=True),
            replacement=self._replace_coordinator,
        )
        task = config.hosts.task
        roster = Roster(0, task.local_rank if task is not None else 0, has_tasks=task is not None)
        clock = LeaderClock(run_dir.write_event if channel.is_head else None)
        super().__init__(channel, callbacks.attempt, roster, clock)
        self.client = channel.torch
        self.is_head = channel.is_head
        self.reports = RankReports(self, lambda: self.current.report)
        self._context = JobContext(
            config,
            poller,
            callbacks,
            run_dir=run_dir,
            sender=self,
            reports=self.reports,
            on_channel_lost=self._on_channel_lost,
            warn=self._warn,
            clock=self.leader_clock,
        )
        self.current = JobAttempt(self._context)
        self._store_loss = StoreLoss(self.current, channel)
        self._replacement = CoordinatorReplacement(
            self,
            config.hosts.host_timeout_s,
            on_resumed=self._on_resumed,
            on_failed=lambda reason: self._on_channel_lost(reason, KILLED_HINT, is_own=True),
        )

    def _begin(self, attempt: JobAttempt) -> None:
        self.current.silent_hosts.end()
        self._store_loss.end()
        self.current = attempt
        self._store_loss = StoreLoss(attempt, self._channel)

    @property
    def storeless_job(self) -> StorelessJob | None:
        """Set while the job runs on without its store, or without this host's coordinator."""
        return self._store_loss.storeless_job

    @property
    def is_join_failure_reported(self) -> bool:
        """Whether the user knows from elsewhere why the hosts could not meet."""
        return self._meeting_reports.is_failure_reported

    @property
    def is_refusal_printed(self) -> bool:
        """Whether another host has refused to start, which it prints itself."""
        return self._meeting_reports.is_refusal_printed

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [one.deadline for one in (self._channel, self.current, self._replacement, self._store_loss)]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._channel.deadline is not None and self._channel.deadline <= now:
            self._channel.tick(now)
        self.current.tick(now)
        self._replacement.tick(now)
        self._store_loss.tick(now)

    @property
    def pids(self) -> set[int]:
        """This host's coordinator, where this process has started it, and what the channel has beside it."""
        return self._channel.pids

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the coordinator, or belongs to the channel to it."""
        return self._channel.on_exit(pid, status)

    def close(self) -> None:
        """The launch is over on this host."""
        end = self.end or Finish(1)
        by = self.asked_here(end.by) if end.ours else end.by
        note = {"note": EndNote(by, end.at_once)._asdict()} if by else {}
        if self._meeting is None:
            if self.leads:
                self.acknowledge()  # its own decision, which it does not wait to hear
            hosts = self._context.config.hosts
            # An elastic job is not over where one host could not join it.
            outside = self.current.number < 0 and hosts.least != hosts.most
            # As under torchrun: a job that the scheduler starts again meets in the same etcd by the same id.
            stays_open = end.by_signal and self._context.config.rendezvous.outlives_job
            self._channel.send({"op": "leave"} if end.leaves or outside or stays_open else {"op": "close", **note})
        elif note:
            # Hosts that this one waits for may be waiting for it in turn: they learn that the job has ended.
            self._channel.send({"op": "close", **note})
        self._channel.close()

    # ----------------------------------------------------------------------------------------------------------------
    # Rendezvous

    def bind(self) -> None:
        """Bind every port, before anything else starts, so that others can connect while the coordinator starts.

        Raises:
            SaferunError: a port cannot be had.
        """
        self._channel.bind()
        self._channel.open()

    def find_endpoint(self, on_found: Callable[[], None]) -> None:
        """Find out whether the rendezvous endpoint is this host; then ``bind`` may be called, by ``on_found``."""
        self._channel.find_endpoint(on_found)

    @property
    def is_endpoint_here(self) -> bool:
        """Whether the endpoint of torch's rendezvous is this host, as far as is known."""
        return self._channel.is_endpoint_here

    def bound_ports(self) -> list[int]:
        """The port of the ranks' store, where it is bound here."""
        return [self._channel.port] if self._channel.port else []

    def join(self, action: JoinHosts, host_info: str = "", probe_endpoint: str = "") -> None:
        """Meet the others; ``on_assigned`` or StartFailed follows.

        Args:
            action: says which attempt it is.
            host_info: what this host found out about itself.
            probe_endpoint: how others can probe it.
        """
        config, lost = self._context.config, self.current.lost_hosts
        replaces_leader = config.moves_leader and not self.leads and action.left_out == 0
        after_loss = self._store_loss.is_of_leader or replaces_leader
        left_out = sorted({*lost.hosts, *lost.spares, *([action.left_out] if action.left_out >= 0 else ())})
        self._begin(JobAttempt(self._context))
        self._meeting = Meeting(config, self._context.run_dir, self._channel, after_loss=after_loss)
        request = self._meeting.request(action, self.roster.task, host_info, probe_endpoint)._replace(
            left_out=tuple(left_out) if config.hosts.spares and self.leads else (),
            replaces_leader=replaces_leader,
            has_met=self.joined_attempt >= 0,
        )
        message = {"op": "join", **request._asdict()}
        if self._secret is not None and self.is_head:
            message["secret"] = self._secret.raw.hex()  # to this host's coordinator alone, over a pair of sockets
        self._replacement.joins(message)
        self._channel.send(message)
        self._channel.open()

    def _on_joined(self, meeting: Meeting, message: JsonObject) -> None:
        if message["op"] == "joined":
            self._meeting = None
        joined = meeting.take(message)
        if joined is None:
            return
        config = self._context.config
        assignment = assignment_from(config, joined)
        placement = assignment.placement
        self.join_attempt(assignment.number, self._roster_of(joined, assignment, meeting.own_addresses))
        self.chunk_limit_bytes = chunk_limit(joined)
        self.leader_clock.forget()  # another host may lead
        attempt = JobAttempt(
            self._context,
            assignment.number,
            addresses=self.roster.host_addresses[:_MOST_ROUTES],
            local_ranks={rank_assignment.rank: rank_assignment.local_rank for rank_assignment in placement.ranks},
            is_head=self.is_head,
            patience_after_s=config.patience_after_s(joined.restarts, assignment.spares, leads=self.leads),
            has_successor=config.moves_leader and bool(assignment.spares) and not self.leads,
        )
        self._begin(attempt)
        self._note_signed(joined)
        detected = config.hosts.detected
        if self.leads and detected and assignment.number == 0:
            met = f"{hosts_text(self.peers.values(), placement.world_size)}, from {detected}"
            self._context.calls.print_line(f"saferun: {printable(met)} ({_OFF})")
        self._context.calls.on_assigned(assignment)

    def _roster_of(self, joined: Joined, assignment: Assignment, own_addresses: tuple[str, ...]) -> Roster:
        """This host's place among the hosts, by their agreement."""
        placement = assignment.placement
        has_neighbours = placement.local_world_size > len(placement.ranks)
        return Roster(
            placement.group_rank,
            self.roster.task,
            has_tasks=self._context.config.hosts.task is not None,
            label=joined.label,
            peers=joined.peers,
            spares=joined.spare_peers,
            leader=placement.leader,
            leads=assignment.leads,
            leader_addresses=joined.leader_addresses,
            neighbour_addresses=(*own_addresses, "127.0.0.1", "::1") if has_neighbours else (),
        )

    def _note_signed(self, joined: Joined) -> None:
        """Note by which secret the hosts sign their messages, or why by none."""
        by, why = joined.signed, joined.unsigned_why
        at = {"time": time.time(), "monotonic_s": time.monotonic(), "attempt": self.current.number}
        self._context.run_dir.write_event({"event": "MessagesSigned", **at, "signed_by": by, "unsigned_reason": why})
        if self.leads and not by and joined.offered == "munge":
            # Hosts of one cluster have munge, all or none of them. Another file system on each is nothing unusual.
            self._warn(f"messages between the hosts are not signed: {why}")

    def prepare(self, preparation: JsonObject) -> None:
        """Ask what only torch can answer, if anything; ``on_prepared`` follows."""
        if self.client.asks_torch:
            self.client.prepare(preparation)
        else:
            self._context.calls.on_prepared({})

    # ----------------------------------------------------------------------------------------------------------------
    # While ranks run

    def collect(
        self,
        name: str,
        timeout_s: float,
        on_done: Callable[[list[EvidenceChunk]], None],
        *,
        attempt: int | None = None,
        hosts: Collection[int] | None = None,
    ) -> None:
        """Wait for the chunks of this name of all other tasks, and hand over what has come by then."""
        self.current.chunks.collect(name, timeout_s, on_done, hosts, attempt)

    # ----------------------------------------------------------------------------------------------------------------
    # Hearing

    def _on_message(self, message: JsonObject) -> None:
        """A message of another host, and what fails because of it, ends nothing: it is ignored, and counted."""
        joins = self._meeting is not None and message.get("op") == "joined"
        try:
            self._take(message)
        except SaferunError:
            raise  # not because of the message, and the user can do something about it
        except Exception as error:
            if joins:
                what = f"the hosts' agreement cannot be read: {type(error).__name__}: {error}"
                self._meeting_reports.fail(MeetingFailure(what, "run the same version of saferun on all hosts"))
                return
            entry = message.get("message")
            self.ignored.add(entry.get("kind") if isinstance(entry, dict) else message.get("op"), error)

    def _take(self, message: JsonObject) -> None:
        if message.get("op") in {"joined", "join_failed", "job_ended"}:
            self._context.calls.set_status(None, 0)
        match message.get("op"):
            case "hosts" | "joined" if self._meeting is not None:
                self._on_joined(self._meeting, message)
            case "join_failed" if self._meeting is not None:
                self._meeting = None
                self._meeting_reports.take_failure(message)
            case "job_ended" if self._meeting is not None:
                self._meeting = None
                ended: EndNote = fit(EndNote, message)
                calls = self._context.calls
                calls.post(StopRequested(time.monotonic(), self._attempt(), ended.by, ended.at_once, ours=False))
            case "waiting" | "head_awaited":
                self._meeting_reports.take_wait(message)
            case "made":
                # Removed with the run's own directories if the coordinator cannot, whoever is killed.
                which = number(message["device"]), number(message["inode"])
                self._context.run_dir.scratch.note(text(message["path"], _LONGEST_PATH), which)
            case "unsigned":
                self.unsigned.add_unsigned(display_text(message["key"], _LONGEST_NAME), number(message["count"], 1))
            case _:
                if not self._replacement.take(message):
                    self.current.take(message)

    def _warn(self, what: object) -> None:
        if self.is_head:
            self._context.calls.print_line(f"saferun: warning: {display_text(str(what), LONGEST_MESSAGE)}")

    def _replace_coordinator(self, reason: str) -> JsonObject | None:
        """The message that starts a replacement coordinator; None: there is to be none."""
        attempt, client = self._attempt(), self.client
        is_prepared = self._meeting is None and not client.is_preparing and attempt == self.joined_attempt
        # Torch's timers have lost their server with it.
        if client.serves_timers or not is_prepared:
            return None
        return self._replacement.begin(attempt, reason)

    def _on_resumed(self, reason: str) -> None:
        self.current.report.repeat()
        at = {"time": time.time(), "monotonic_s": time.monotonic(), "attempt": self.current.number}
        self._context.run_dir.write_event({"event": "CoordinatorReplaced", **at, "what": reason})
        self._warn(f"{reason}; another one has taken its place, and the job goes on")

    def _on_channel_lost(self, what: str, hint: str, class_name: str = "", *, is_own: bool = False) -> None:
        """Messages of the other hosts no longer arrive. ``is_own``: because this host has lost its coordinator."""
        self._context.calls.set_status(None, 0)
        if self._meeting is not None or self.client.is_preparing:
            self._meeting = None
            self.client.is_preparing = False
            self._meeting_reports.fail(MeetingFailure(what, hint))
            return
        self._store_loss.take(what, hint, class_name, is_own=is_own)
