"""A host of a job: the real supervisor's machine, the real job and the real coordinator, with virtual ranks."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from saferun.cluster.evidence_exchange import EvidenceExchange
from saferun.cluster.job import Job
from saferun.cluster.job_values import Assignment, EvidenceChunk, JobCallbacks
from saferun.cluster.silence import Progress
from saferun.config import HostsConfig, LaunchConfig, Setting
from saferun.coordinator.host_coordinator import HostCoordinator
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Evidence
from saferun.linux.json_lines import LONGEST_MESSAGE_BYTES
from saferun.model import ExitStatus, JsonObject
from saferun.preflight.host_messages import encode_endpoint, encode_host_info, encode_probes
from saferun.preflight.host_probing import HostProbing, LeaderProbing
from saferun.preflight.leader_messages import go_ahead_message
from saferun.preflight.outcome import outcome_of, unusable_hosts
from saferun.preflight.results import UNUSABLE, CheckResult, HostInfo, Preflight, Probe, ProbeEndpoint
from saferun.supervisor import actions
from saferun.supervisor.events import (
    CauseShown,
    ChecksPassed,
    DeadlineExpired,
    Diagnosed,
    Event,
    EvidenceCaptured,
    HostsJoined,
    LaunchRequested,
    OrphansGone,
    ProbesPassed,
    RankExited,
    RanksStarted,
    StartFailed,
)
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, FailureFacts, HangPolicy, JobPolicy
from saferun.supervisor.policy.faulty_hosts import FaultyHost
from tests.fleet.virtual_network import Host, Network, ServedStores
from tests.fleet.virtual_time import SimpleQueue
from tests.unit.host_samples import host_evidence
from tests.unit.samples import CONFIG

if TYPE_CHECKING:
    from tests.fleet.fleet import Fleet

RANKS_PORT, CONTROL_PORT = 29500, 40000
OTHERS_S = 60.0
_PIPE_S = 20e-6
_TICK_S = 0.5
_CHECKS_S, _PROBES_S, _START_S, _CAPTURE_S, _STOP_S = 0.05, 0.1, 0.02, 0.2, 0.02
_GPU_LOST = CheckResult(
    *("gpus", "warn", "GPU 3 fell off the bus", "", ((UNUSABLE, "GPU 3"),)), class_name="gpu_hardware_error"
)
_DIAGNOSIS = Diagnosis("rank 0 failed first", None, None, (), (), ())


class _Connection:
    """The coordinator's end of its connection to the supervisor."""

    is_head = True
    is_leaving = False
    unsent_bytes = 0

    def __init__(self, host: FleetHost) -> None:
        self.task: int | None = 0
        self._host = host

    def send(self, message: JsonObject) -> None:
        host, line = self._host, json.dumps(message)
        assert len(line) <= LONGEST_MESSAGE_BYTES, f"no supervisor reads a message of {len(line)} bytes"
        host.fleet.simulation.at(host.fleet.simulation.now + host.pipe_s, partial(host.hear, line), host)


class _Tasks:
    """As ``saferun.coordinator.tasks.Tasks``, for a host with one saferun."""

    def __init__(self, host: FleetHost) -> None:
        self.head = _Connection(host)

    def connected(self) -> list[_Connection]:
        return [self.head]

    def of_task(self, task: int) -> _Connection | None:
        return self.head if task == 0 else None

    def send_away(self, joins: Collection[int]) -> None:
        """No other saferun comes to this host."""

    def send_all(self, message: JsonObject) -> None:
        self.head.send(message)


class _Channel:
    """The supervisor's end."""

    port = 0
    control_port = CONTROL_PORT
    is_head = True
    deadline: float | None = None

    def __init__(self, host: FleetHost) -> None:
        self.client = self.torch = SimpleNamespace(asks_torch=False, is_preparing=False, serves_timers=False)
        self.pids: set[int] = set()
        self._host = host
        self.port = host.stores.ranks_port

    def send(self, message: JsonObject) -> None:
        self._host.inbox.put(json.dumps(message, default=_as_dict))

    def open(self) -> None:
        """It is there."""

    def close(self) -> None:
        self.send({"op": "goodbye"})


def _as_dict(value: Any) -> Any:
    return list(value)


class VirtualWatch:
    """Stands in for ``ProgressWatch``: whether the virtual ranks move."""

    def __init__(self, span_s: float, poller: FleetHost) -> None:
        self._host = poller
        self._interval_s = min(max(span_s / 8, 0.2), 2.0)
        self._began_at = 0.0
        self.deadline: float | None = None

    def begin(self, now: float) -> None:
        if self.deadline is None:
            self._began_at = self.deadline = now

    def end(self) -> None:
        self.deadline = None

    def tick(self, now: float, _ranks: object) -> None:
        if self.deadline is not None and now >= self.deadline:
            self.deadline = now + self._interval_s

    def progress(self, now: float, *, runs: bool) -> Progress:
        still_s = min(now - self._began_at, now - self._host.fleet.moved_at(now))
        return Progress(runs, now - self._began_at, still_s, still_s)


class FleetHost(Host):
    """One host.

    Args:
        fleet: the others.
        number: its node rank.
        clock_ahead_s: how far its clock is ahead.
    """

    def __init__(self, fleet: Fleet, number: int, clock_ahead_s: float = 0.0) -> None:
        super().__init__(number, clock_ahead_s=clock_ahead_s)
        self.fleet = fleet
        self.alive: set[int] = set()
        self.statuses: dict[int, ExitStatus] = {}
        self.finish: actions.Finish | None = None
        self.log: list[tuple[int, JsonObject]] = []  # of the attempt that is under way
        self.decisions: list[tuple[int, str, int]] = []
        self.running_since: dict[int, float] = {}
        self.evidence_of: dict[int, set[int]] = {}  # on the leader, by attempt: the hosts whose evidence it has had
        self.lines: list[str] = []
        self.clock: Any = None
        self.is_killed = False  # its saferun and coordinator
        self.is_waiting = False  # as a spare
        self.pipe_s = _PIPE_S  # what a message of its coordinator takes to its supervisor
        self.checks_s = _CHECKS_S
        self.cores_s = 0.0  # what it takes to read what dead ranks have left
        self._posted: list[Event] = []
        self._handling = False
        self._probing: HostProbing | None = None
        self._woken_for = float("inf")

    def start(self) -> None:
        """Begin as ``saferun`` does."""
        fleet = self.fleet
        self.inbox = SimpleQueue(fleet.simulation)
        self.config = _config(fleet, self.number)
        may_lead = self.number == 0 or self.config.moves_leader
        self.stores = ServedStores(fleet.network, self, RANKS_PORT if may_lead else 0, CONTROL_PORT)
        self.tasks: Any = _Tasks(self)
        self.coordinator = HostCoordinator(self.tasks, self.stores, -1)  # type: ignore[arg-type]
        fleet.simulation.spawn(self, self._coordinate)
        least = fleet.count - fleet.spares
        job = JobPolicy(spans_hosts=True, others_s=OTHERS_S, least_hosts=least, moves_leader=self.config.moves_leader)
        self.supervisor = Supervisor(AttemptPolicy(fleet.restarts, 0, wait=lambda _: 1.0), Limits(), HangPolicy(), job)
        poller: Any = self
        run_dir: Any = SimpleNamespace(
            shared_base="",
            name="run",
            write_event=fleet.note_event(self),
            scratch=SimpleNamespace(note=lambda *_: None),
        )
        self.job = Job(
            self.config,
            {},
            poller,
            JobCallbacks(
                post=self.post,
                attempt=lambda: self.supervisor.attempt,
                on_assigned=self._on_assigned,
                on_prepared=lambda _: None,
                on_prepare_failed=lambda _: None,
                on_preflight=self._on_preflight,
                on_torch=lambda _: None,
                on_stderr=lambda _: None,
                print_line=self.lines.append,
                ranks=lambda: tuple(self.alive),  # type: ignore[arg-type]
            ),
            run_dir=run_dir,
            open_channel=self._open_channel,
        )
        self.exchange = EvidenceExchange(self.job, 0, lambda _what, call, *arguments: call(*arguments))
        self.post(LaunchRequested(fleet.simulation.now, 0))

    def _open_channel(self, *_: Any, on_message: Callable[[JsonObject], None], **__: Any) -> Any:
        self._on_message = on_message
        return _Channel(self)

    # ------------------------------------------------------------------------------------------------ the coordinator

    def _coordinate(self) -> None:
        """As ``Tasks.run`` does."""
        simulation = self.fleet.simulation
        ticked_at = simulation.now
        connection = self.tasks.head
        while True:
            try:
                message = json.loads(self.inbox.get(_TICK_S))
            except queue.Empty:
                pass
            else:
                if message["op"] == "goodbye":
                    connection.is_leaving = True
                    self.coordinator.farewell(self._end_coordinator)
                else:
                    self.coordinator.handle(connection, message)
            if simulation.now - ticked_at >= _TICK_S:
                self.coordinator.tick(simulation.now - ticked_at)
                ticked_at = simulation.now

    def replace_coordinator(self) -> None:
        """Another coordinator takes the place of one that is killed, where none of the stores is served here."""
        message = self.job._replace_coordinator("the coordinator was killed")
        assert message is not None, "there is nothing that another one could go on from"
        assert self.coordinator._attempt is not None
        self.coordinator._attempt.close()  # nothing more comes from it
        self.coordinator = HostCoordinator(self.tasks, self.stores, -1)  # type: ignore[arg-type]
        self.log = []  # which the next one reads from the beginning
        self.inbox.put(json.dumps(message, default=_as_dict))

    def _end_coordinator(self) -> None:
        self.stores.close()
        self.is_gone = True

    # -------------------------------------------------------------------------------------------------- the supervisor

    def hear(self, text: str) -> None:
        """A message of the coordinator's."""
        message = json.loads(text)
        if message["op"] == "entry":
            self.fleet.note_entry(self, message)
        self._on_message(message)
        self._handle_posted()

    def post(self, event: Event) -> None:
        """An event for the supervisor."""
        self._posted.append(event)
        self._handle_posted()

    def later(self, seconds: float, event: Event) -> None:
        """The same after some time."""
        self.fleet.simulation.at(self.fleet.simulation.now + seconds, partial(self._arrive, event), self)

    def _arrive(self, event: Event) -> None:
        self.post(event._replace(at=self.fleet.simulation.now))

    def _handle_posted(self) -> None:
        if self._handling:
            return
        self._handling = True
        try:
            while self._posted:
                event = self._posted.pop(0)
                before = self.state
                for action in self.supervisor.handle(event):
                    self._do(action)
                if self.state is not before and self.state is State.RUNNING:
                    self.fleet.note_running(self)
        finally:
            self._handling = False
        self._set_alarm()

    @property
    def state(self) -> State:
        """Of the launch on this host."""
        return self.supervisor.state

    @property
    def master_addr(self) -> str:
        """Where its ranks look for their store."""
        placement = self.supervisor._launch.attempt.placement
        return placement.master_addr if placement is not None else ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.finish is not None or self.is_off or self.is_killed

    def _set_alarm(self) -> None:
        if self.finish is not None:
            return
        due = min((at for at in (self.supervisor.deadline, self.job.deadline) if at is not None), default=None)
        if due is not None and due < self._woken_for:
            self._woken_for = due
            self.fleet.simulation.at(max(due, self.fleet.simulation.now), partial(self._wake, due), self)

    def _wake(self, due: float) -> None:
        if due != self._woken_for:
            return
        self._woken_for = float("inf")
        now = self.fleet.simulation.now
        if self.finish is None:
            self.job.tick(now)
            deadline = self.supervisor.deadline
            if deadline is not None and deadline <= now:
                self.post(DeadlineExpired(now, self.supervisor.attempt))
        self._handle_posted()

    # ------------------------------------------------------------------------------------------- what it wants done

    def _do(self, action: actions.Action) -> None:  # noqa: C901 - one flat table of the actions
        now, attempt = self.fleet.simulation.now, self.supervisor.attempt
        match action:
            case actions.RunChecks():
                self.later(self.checks_s * (1 + self.fleet.simulation.random.random()), ChecksPassed(now, attempt))
            case actions.JoinHosts():
                endpoint = encode_endpoint(ProbeEndpoint(41000, "ab" * 16, (("eth0", self.address),)))
                info = host_info(self.fleet.info_bytes, unfit=self.number in self.fleet.unfit)
                self.job.join(action, *((info, endpoint) if self.fleet.checked else ("", "")))
            case actions.ProbeHosts():
                assert self._probing is not None
                self._probing.begin()
            case actions.StartRanks():
                self.alive = set(range(self.config.nproc_per_node))
                self.statuses = {}
                self.later(_START_S, RanksStarted(now, attempt, tuple(1000 + rank for rank in self.alive)))
                for rank in tuple(self.alive) if self.fleet.ends_well else ():
                    self.end_rank(rank, ExitStatus(0, None), 1.0)
            case actions.CaptureEvidence():
                self.later(_CAPTURE_S, EvidenceCaptured(now, attempt))
            case actions.AwaitCause():
                self.later(_CAPTURE_S, CauseShown(now, attempt))
            case actions.SignalRanks():
                for rank in self.alive.intersection(action.local_ranks):
                    self.end_rank(rank, ExitStatus(None, action.signum), _STOP_S)
            case actions.SweepOrphans():
                self.later(_STOP_S, OrphansGone(now, attempt, ()))
            case actions.Diagnose(alone=True):
                self.later(_STOP_S, Diagnosed(now, attempt, _DIAGNOSIS))
            case actions.Diagnose() if self.cores_s:
                self.fleet.simulation.at(now + self.cores_s, partial(self._hand_in, attempt), self)
            case actions.Diagnose():
                self._hand_in(attempt)
            case actions.BroadcastAbort():
                self.job.abort_attempt(action.reason, action.message, hint=action.hint, signum=action.signum)
            case actions.BroadcastRequest():
                self.job.broadcast_request(action.by, at_once=action.at_once)
            case actions.BroadcastCause():
                self.job.broadcast_cause()
            case actions.NotifyDone():
                self.job.reports.set_state({"s": "done"})
            case actions.BroadcastDecision():
                self.job.broadcast_decision(action, ["why"])
            case actions.Finish():
                self.finish = action
                self.job.end = action
                self.job.close()
                self.fleet.note_end(self)

    def end_rank(self, rank: int, status: ExitStatus, after_s: float = 0.0) -> None:
        """A rank ends."""
        if rank in self.alive:
            self.alive.discard(rank)
            self.later(after_s, RankExited(self.fleet.simulation.now, self.supervisor.attempt, rank, status))

    def _on_assigned(self, assignment: Assignment) -> None:
        now, attempt = self.fleet.simulation.now, self.supervisor.attempt
        self.fleet.note_meeting(self, assignment)
        self.log, self.is_waiting = [], not assignment.placement.ranks
        if assignment.checked and not self.is_waiting:
            checks: Any = SimpleNamespace(probe=self._probe, results=(), duration_s=0.0)
            self._probing = (
                LeaderProbing(assignment, checks, self.job, nics=(), on_judged=self._on_judged)
                if assignment.leads
                else HostProbing(assignment, checks, self.job)
            )
        self.post(
            HostsJoined(
                now,
                attempt,
                assignment.placement,
                number=assignment.number,
                leads=assignment.leads,
                may_leave=assignment.may_leave,
                probes=assignment.checked,
                spares=assignment.spares,
            )
        )

    def _probe(
        self, own: int, endpoints: Any, _limit_s: float, on_done: Callable[[str], None], *, limit_bytes: int
    ) -> None:
        found = [
            Probe(own, target, "eth0", f"10.0.0.{target & 255}", latency_s=1e-4, bytes_s=1e9)
            for target, *_ in endpoints
        ]
        self.fleet.simulation.at(
            self.fleet.simulation.now + _PROBES_S,
            partial(self._probed, on_done, encode_probes(found, limit_bytes)),
            self,
        )

    def _probed(self, on_done: Callable[[str], None], text: str) -> None:
        on_done(text)
        self._handle_posted()

    def _on_judged(self, preflight: Preflight) -> None:
        """As ``PreflightRun`` does."""
        now, attempt = self.fleet.simulation.now, self.supervisor.attempt
        assert isinstance(self._probing, LeaderProbing)
        faulty = unusable_hosts(outcome_of(preflight, self._probing.infos, nics=(), only_warn=False))
        if self.supervisor.can_replace(faulty):
            self.post(StartFailed(now, attempt, "a host is unfit", "", 1, faulty=faulty, may_go_on=True))
        else:
            self.job.broadcast_preflight(go_ahead_message(()))

    def _on_preflight(self, message: JsonObject) -> None:
        if message.get("ok"):
            self.post(ProbesPassed(self.fleet.simulation.now, self.supervisor.attempt))

    def _evidence(self) -> Evidence:
        return host_evidence(self.number, nproc=self.config.nproc_per_node)

    def _hand_in(self, attempt: int) -> None:
        """Whatever the attempt by then is."""
        self.exchange.share("end", self._evidence(), OTHERS_S, partial(self._on_evidence, attempt), attempt=attempt)
        self._handle_posted()

    def _on_evidence(self, attempt: int, _merged: Evidence | None, chunks: tuple[EvidenceChunk, ...]) -> None:
        if self.job.leads:
            self.evidence_of[attempt] = {chunk.host for chunk in chunks}
            self.clock = {chunk.host: (chunk.offset_s, chunk.measured) for chunk in chunks}
        lost = self.job.lost.values() if self.job.leads else ()
        faulty = tuple(FaultyHost(one.host, one.label, one.message, is_lost=True) for one in lost)
        facts = FailureFacts("host_lost", faulty=faulty) if faulty else None
        self.post(Diagnosed(self.fleet.simulation.now, attempt, _DIAGNOSIS, facts=facts))


def _config(fleet: Fleet, number: int) -> LaunchConfig:
    count = fleet.count - fleet.spares
    hosts = HostsConfig(count, count, number, names=(), start_timeout_s=fleet.start_timeout_s, host_timeout_s=30.0)
    hosts = hosts._replace(spares=fleet.spares)
    # If it is given, silent hosts are not waited for any longer.
    host_timeout = Setting("30", "default" if fleet.is_patient else "flag")
    rendezvous = CONFIG.rendezvous._replace(master_addr="node0", ports=(RANKS_PORT,), port_source="given")
    if fleet.one_port:
        rendezvous = rendezvous._replace(control="same")
    return CONFIG._replace(
        hosts=hosts,
        rendezvous=rendezvous,
        nproc_per_node=fleet.ranks,
        sign_messages="off",
        max_restarts=fleet.restarts,
        settings={**CONFIG.settings, "host_timeout": host_timeout},
    )


def host_info(size_bytes: int, *, unfit: bool = False) -> str:
    """What a host tells of itself: about so much, though no less than the least."""
    versions = tuple((f"driver {number}", "1" * 100) for number in range(size_bytes // 120))
    results = (_GPU_LOST,) if unfit else ()
    return encode_host_info(HostInfo(gloo=("eth0",), probed=("eth0",), versions=versions, results=results))


__all__ = ["FleetHost", "Network", "VirtualWatch", "host_info"]
