"""This host's part in a job of several hosts, or of several saferuns on one host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from saferun.cluster.coordinator_client import KILLED_HINT
from saferun.cluster.coordinator_replacement import CoordinatorReplacement
from saferun.cluster.job_attempt import JobAttempt, JobContext
from saferun.cluster.job_channel import JobChannel
from saferun.cluster.job_sender import JobSender
from saferun.cluster.job_values import Assignment, EvidenceChunk, JobCallbacks
from saferun.cluster.job_view import JobView
from saferun.cluster.join_messages import EndNote, Joined, SecretSharing, TaskInfo
from saferun.cluster.leader_clock import LeaderClock
from saferun.cluster.meeting_failure import MeetingFailure, read_meeting_failure
from saferun.cluster.messages import LONGEST_MESSAGE, Ignored
from saferun.cluster.rank_reports import RankReports
from saferun.cluster.rendezvous_messages import JoinedParts, assignment_from, chunk_limit, hosts_text, join_request
from saferun.cluster.roster import Roster
from saferun.cluster.shared_store import SharedStore
from saferun.cluster.storeless_job import StorelessJob
from saferun.cluster.wait_lines import WaitLines
from saferun.config import LaunchConfig
from saferun.errors import EXIT_USAGE, SaferunError, printable
from saferun.files.run_dir import RunDirectory
from saferun.linux.bare_socket import short_host_name
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.actions import Finish, JoinHosts
from saferun.supervisor.events import HostsAwaited, JobLost, StartFailed, StopRequested
from saferun.text.decoding import display_text, number, text
from saferun.text.typed_json import fit

if TYPE_CHECKING:
    from saferun.cluster.secret import JobSecret

_LONGEST_NAME, _LONGEST_PATH = 255, 4096
_ALONE = "if this process is not part of a larger job, pass --standalone"
_OFF = "--scheduler none ignores the scheduler, as torchrun does"
# The rendezvous timeout after a lost store: hosts may disagree whether the start was over, and then some do not come.
_REJOIN_TIMEOUT_S = 60.0
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
        self.is_join_failure_reported = self.is_refusal_printed = False
        self.blamed: tuple[int, ...] = ()  # ranks of the job that the hang is blamed on that was captured last
        self.storeless_job: StorelessJob | None = None  # set while the job runs on without its store
        self.end: Finish | None = None
        self._own_addresses: tuple[str, ...] = ()
        self._joining = False
        self._joined_parts = JoinedParts()
        self._after_loss = False  # the store of the leader was lost
        self._config = config
        self._poller = poller
        self._run_dir = run_dir
        self._callbacks = callbacks
        self._post, self._print_line = callbacks.post, callbacks.print_line
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
        self._task = task.local_rank if task is not None else 0
        clock = LeaderClock(run_dir.write_event if channel.is_head else None)
        super().__init__(channel, callbacks.attempt, Roster(0, self._task, has_tasks=task is not None), clock)
        self.client = channel.torch
        self.is_head = channel.is_head
        self.reports = RankReports(self, lambda: self.current.report)
        self._context = JobContext(
            config,
            poller,
            callbacks,
            sender=self,
            reports=self.reports,
            on_channel_lost=self._on_channel_lost,
            warn=self._warn,
            clock=self.leader_clock,
        )
        self.current = JobAttempt(self._context)
        self._replacement = CoordinatorReplacement(
            self,
            config.hosts.host_timeout_s,
            on_resumed=self._on_resumed,
            on_failed=lambda reason: self._on_channel_lost(reason, KILLED_HINT, is_own=True),
        )
        hint = _ALONE if config.hosts.detected else ""
        self._wait_lines = WaitLines(callbacks.set_status, self._print_line, hint)
        self.ignored = Ignored(self._warn)
        self.unsigned = Ignored(self._warn)

    def _begin(self, attempt: JobAttempt) -> None:
        self.current.silent_hosts.end()
        if self.storeless_job is not None:
            self.storeless_job.end()
        self.storeless_job = None
        self.current = attempt
        self.blamed = ()

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        storeless = self.storeless_job.deadline if self.storeless_job is not None else None
        moments = (self._channel.deadline, self.current.deadline, self._replacement.deadline, storeless)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._channel.deadline is not None and self._channel.deadline <= now:
            self._channel.tick(now)
        self.current.tick(now)
        self._replacement.tick(now)
        if self.storeless_job is not None:
            self.storeless_job.tick(now)

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
        if not self._joining:
            if self.leads:
                self.acknowledge()  # its own decision, which it does not wait to hear
            hosts = self._config.hosts
            # An elastic job is not over where one host could not join it.
            outside = self.current.number < 0 and hosts.least != hosts.most
            # As under torchrun: a job that the scheduler starts again meets in the same etcd by the same id.
            stays_open = end.by_signal and self._config.rendezvous.outlives_job
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
        from saferun.linux.netlink import own_addresses

        config, channel, last = self._config, self._channel, self.current
        replaces_leader = config.moves_leader and not self.leads and action.left_out == 0
        self._after_loss = self._after_loss or replaces_leader
        left_out = sorted({*last.lost, *last.lost_spares, *([action.left_out] if action.left_out >= 0 else ())})
        self._begin(JobAttempt(self._context))
        self._joining, self._joined_parts = True, JoinedParts()
        timeout_s = config.hosts.start_timeout_s
        # Shorter after a lost store: each host decided for itself to meet again, and some may not have.
        if self._after_loss:
            timeout_s, self._after_loss = min(timeout_s, _REJOIN_TIMEOUT_S), False
        base = self._run_dir.shared_base if config.shares_secret else ""
        self._own_addresses = tuple(own_addresses())
        record = TaskInfo(
            config.nproc_per_node,
            config.role,
            os.getpid(),
            addresses=self._own_addresses,
            port=channel.control_port,
            files=self._run_dir.name,
            host_info=host_info,
            probe_endpoint=probe_endpoint,
            full=config.checks.full,
        )
        request = join_request(
            config.hosts, config.rendezvous, action, task=self._task, port=channel.port, record=record
        )._replace(
            timeout_s=timeout_s,
            script=os.path.basename(config.command.name),
            sharing=SecretSharing(base, required=config.sign_messages == "required"),
            left_out=tuple(left_out) if config.hosts.spares and self.leads else (),
            replaces_leader=replaces_leader,
            has_met=self.joined_attempt >= 0,
        )
        message = {"op": "join", **request._asdict()}
        if self._secret is not None and self.is_head:
            message["secret"] = self._secret.raw.hex()  # to this host's coordinator alone, over a pair of sockets
        self._replacement.joins(message)
        channel.send(message)
        self._channel.open()

    def _on_joined(self, message: JsonObject) -> None:
        if message["op"] == "joined":
            self._joining = False
        joined = self._joined_parts.take(message)
        if joined is None:
            return
        assignment = assignment_from(self._config, joined)
        placement = assignment.placement
        self.roster = self._roster_of(joined, assignment)
        self.chunk_limit_bytes = chunk_limit(joined)
        self.leader_clock.forget()  # another host may lead
        attempt = JobAttempt(
            self._context,
            assignment.number,
            label=placement.host,
            leader=self.leader,
            leads=self.leads,
            addresses=self.roster.host_addresses[:_MOST_ROUTES],
            local_ranks={rank_assignment.rank: rank_assignment.local_rank for rank_assignment in placement.ranks},
            is_head=self.is_head,
            patience_after_s=self._config.patience_after_s(joined.restarts, assignment.spares, leads=self.leads),
            has_successor=self._config.moves_leader and bool(assignment.spares) and not self.leads,
        )
        self._begin(attempt)
        self.joined_attempt = assignment.number
        self._note_signed(joined)
        detected = self._config.hosts.detected
        if self.leads and detected and assignment.number == 0:
            met = f"{hosts_text(self.peers.values(), placement.world_size)}, from {detected}"
            self._print_line(f"saferun: {printable(met)} ({_OFF})")
        self._callbacks.on_assigned(assignment)

    def _roster_of(self, joined: Joined, assignment: Assignment) -> Roster:
        """This host's place among the hosts, by their agreement."""
        placement = assignment.placement
        has_neighbours = placement.local_world_size > len(placement.ranks)
        return Roster(
            placement.group_rank,
            self._task,
            has_tasks=self._config.hosts.task is not None,
            label=joined.label,
            peers=joined.peers,
            spares=joined.spare_peers,
            leader=placement.leader,
            leads=assignment.leads,
            leader_addresses=joined.leader_addresses,
            neighbour_addresses=(*self._own_addresses, "127.0.0.1", "::1") if has_neighbours else (),
        )

    def _note_signed(self, joined: Joined) -> None:
        """Note by which secret the hosts sign their messages, or why by none."""
        by, why = joined.signed, joined.unsigned_why
        at = {"time": time.time(), "monotonic_s": time.monotonic(), "attempt": self.current.number}
        self._run_dir.write_event({"event": "MessagesSigned", **at, "signed_by": by, "unsigned_reason": why})
        if self.leads and not by and joined.offered == "munge":
            # Hosts of one cluster have munge, all or none of them. Another file system on each is nothing unusual.
            self._warn(f"messages between the hosts are not signed: {why}")

    def prepare(self, preparation: JsonObject) -> None:
        """Ask what only torch can answer, if anything; ``on_prepared`` follows."""
        if self.client.asks_torch:
            self.client.prepare(preparation)
        else:
            self._callbacks.on_prepared({})

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
        joins = self._joining and message.get("op") == "joined"
        try:
            self._take(message)
        except SaferunError:
            raise  # not because of the message, and the user can do something about it
        except Exception as error:
            if joins:
                what = f"the hosts' agreement cannot be read: {type(error).__name__}: {error}"
                self._fail(MeetingFailure(what, "run the same version of saferun on all hosts"))
                return
            entry = message.get("message")
            self.ignored.add(entry.get("kind") if isinstance(entry, dict) else message.get("op"), error)

    def _take(self, message: JsonObject) -> None:
        if message.get("op") in {"joined", "join_failed", "job_ended"}:
            self._callbacks.set_status(None, 0)
        match message.get("op"):
            case "hosts" | "joined" if self._joining:
                self._on_joined(message)
            case "join_failed" if self._joining:
                self._joining = False
                failure = read_meeting_failure(message, self._config)
                self.is_join_failure_reported = failure.is_published or (
                    # Printed already while the others were waited for; the second host prints it again, with its hint.
                    self._wait_lines.has_printed(failure.what) and self._config.hosts.node_rank != 1
                )
                self.is_refusal_printed = failure.is_published and failure.exit_code == EXIT_USAGE
                self._fail(failure)
            case "job_ended" if self._joining:
                self._joining = False
                ended: EndNote = fit(EndNote, message)
                self._post(StopRequested(time.monotonic(), self._attempt(), ended.by, ended.at_once, ours=False))
            case "waiting" | "head_awaited" as op:
                if op == "waiting":
                    self._post(HostsAwaited(time.monotonic(), self._attempt()))
                self._wait_lines.take(message)
            case "made":
                # Removed with the run's own directories if the coordinator cannot, whoever is killed.
                which = number(message["device"]), number(message["inode"])
                self._run_dir.scratch.note(text(message["path"], _LONGEST_PATH), which)
            case "unsigned":
                self.unsigned.add_unsigned(display_text(message["key"], _LONGEST_NAME), number(message["count"], 1))
            case _:
                if not self._replacement.take(message):
                    self.current.take(message)

    def _warn(self, what: object) -> None:
        if self.is_head:
            self._print_line(f"saferun: warning: {display_text(str(what), LONGEST_MESSAGE)}")

    def _fail(self, failure: MeetingFailure) -> None:
        what, hint, exit_code = failure.what, failure.hint, failure.exit_code
        hosts = self._config.hosts
        is_printed = hosts.shares_console and (self.is_refusal_printed or not hosts.prints_start_lines)
        if hosts.detected and not is_printed and short_host_name() not in what:
            here = "of unknown node rank" if hosts.node_rank is None else f"node rank {hosts.node_rank}"
            self._print_line(f"saferun: {printable(f'this is {short_host_name()}, {here}, from {hosts.detected}')}")
        if hosts.detected and failure.is_incomplete:
            hint += f"; {_ALONE}"
        self._post(StartFailed(time.monotonic(), self._attempt(), what, hint, exit_code, class_name=failure.class_name))

    def _replace_coordinator(self, reason: str) -> JsonObject | None:
        """The message that starts a replacement coordinator; None: there is to be none."""
        attempt = self._attempt()
        # Torch's timers have lost their server with it.
        if self.client.serves_timers or self._joining or self.client.is_preparing or attempt != self.joined_attempt:
            return None
        return self._replacement.begin(attempt, reason)

    def _on_resumed(self, reason: str) -> None:
        self.current.report.repeat()
        at = {"time": time.time(), "monotonic_s": time.monotonic(), "attempt": self.current.number}
        self._run_dir.write_event({"event": "CoordinatorReplaced", **at, "what": reason})
        self._warn(f"{reason}; another one has taken its place, and the job goes on")

    def _on_channel_lost(self, what: str, hint: str, class_name: str = "", *, is_own: bool = False) -> None:
        """Messages of the other hosts no longer arrive. ``is_own``: because this host has lost its coordinator."""
        self._callbacks.set_status(None, 0)
        if self._joining or self.client.is_preparing:
            self._joining = self.client.is_preparing = False
            self._fail(MeetingFailure(what, hint))
            return
        is_neighbour = self.host == 0 and self.joined_attempt >= 0 and not self.is_head
        if (self.leads and self.is_head) or (is_neighbour and self._channel.client.is_open):
            class_name = "store_lost"  # this host's own coordinator served it
            self._channel.answer_end()
        self._after_loss = bool(class_name)
        lost = JobLost(time.monotonic(), self._attempt(), what, hint, class_name)
        lost_own_coordinator = is_own and self.is_head and not class_name
        if self.storeless_job is not None and not self.storeless_job.is_over and self._callbacks.ranks():
            return  # the first process of this host has ended, as its ranks have; those of this one have not
        if self._may_run_storeless(class_name, lost_own_coordinator=lost_own_coordinator):
            self._run_storeless(lost, lost_own_coordinator=lost_own_coordinator)
        else:
            self._post(lost)

    def _may_run_storeless(self, class_name: str, *, lost_own_coordinator: bool) -> bool:
        """Whether the ranks of this host may go on without the job's store, or without this host's coordinator."""
        is_static = self._config.rendezvous.backend == "static"
        is_lost = bool(class_name) or lost_own_coordinator
        is_ending = self.current.is_ending or self.aborted_attempt == self.current.number
        is_underway = self.current.number == self._attempt() and not is_ending and self.storeless_job is None
        return is_static and is_lost and is_underway and bool(self._callbacks.ranks())

    def _run_storeless(self, lost: JobLost, *, lost_own_coordinator: bool) -> None:
        """Go on for as long as the ranks make progress."""
        if lost_own_coordinator:
            self._channel.answer_end()  # the leader finds that this host is up
        attempt, reason = self.current, self.current.abort_reason
        attempt.silent_hosts.end()
        # The loss is why the attempt ends only if nothing else ends it first.
        attempt.abort_reason = None

        def restore_reason() -> None:
            attempt.abort_reason = reason

        fields = {"monotonic_s": lost.at, "attempt": lost.attempt, "what": lost.what}
        prints_for_job = self.leads or not self._config.hosts.shares_console
        self.storeless_job = StorelessJob(
            lost,
            self._callbacks.ranks,
            self._poller,
            started_by=attempt.began_at + self._config.retry.start_window_s,
            host_timeout_s=self._config.hosts.host_timeout_s,
            hang_timeout_s=self._config.watch.hang_timeout_s,
            post=self._post,
            note=lambda: self._run_dir.write_event({"event": "StoreLost", "time": time.time(), **fields}),
            warn=self._warn if prints_for_job or lost_own_coordinator else lambda _: None,
            has_store=lost_own_coordinator,
            on_lost=restore_reason,
        )
        self.on_end = self.storeless_job.conclude
