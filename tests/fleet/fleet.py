"""A job of many virtual hosts, what happens to them, and the laws that hold at every step."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import saferun.cluster
import saferun.coordinator
from saferun.cluster.job_values import Assignment
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.machine import State
from tests.fleet.virtual_host import FleetHost, VirtualWatch
from tests.fleet.virtual_network import Network
from tests.fleet.virtual_time import Simulation, installed

_ROOMS = ("saferun.coordinator.", "saferun.cluster.", "saferun.preflight.host_probing")
# What needs torch, or is of torch's own rendezvous; none of it runs here.
_NOT_HERE = frozenset(
    {"__main__", "handler_rendezvous", "torchrun_parts", "torch_store", "trial_member", "trial_server"}
)
FAILED = ExitStatus(1, None)
OK = ExitStatus(0, None)


class LawError(AssertionError):
    """A law has been broken."""


class Fleet:
    """The hosts of a job.

    Args:
        count: how many.
        seed: of all that is random.
        ranks: on each host.
        restarts: how many the job has.
        checked: whether the hosts probe each other before they start.
        start_timeout_s: how long the hosts wait for each other.
        info_bytes: about how much each host has to tell of itself.
        spares: how many of the hosts wait to take the place of one.
        unfit: hosts whose checks find that no rank can work there.
        is_patient: whether silent hosts may be waited for as long as --hang-timeout.
        one_port: whether the job's own messages go through the ranks' store.
        network: as for ``Network``.
    """

    def __init__(
        self,
        count: int,
        seed: int = 0,
        *,
        ranks: int = 1,
        restarts: int = 0,
        checked: bool = True,
        start_timeout_s: float = 600.0,
        info_bytes: int = 0,
        spares: int = 0,
        unfit: Collection[int] = (),
        is_patient: bool = False,
        one_port: bool = False,
        network: Mapping[str, float] | None = None,
    ) -> None:
        self.count = count
        self.ranks = ranks
        self.restarts = restarts
        self.checked = checked
        self.spares = spares
        self.unfit = unfit
        self.is_patient = is_patient
        self.one_port = one_port
        self.start_timeout_s = start_timeout_s
        self.info_bytes = info_bytes
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation, **(network or {}))
        self.ends_well = False
        self.stopped_at: float | None = None  # when the ranks stopped to move
        self.last_end_at = 0.0
        self.entries: dict[int, list[JsonObject]] = {}  # of the job's log, by attempt
        self.first_met = 1 << 20  # the attempt for which hosts have met for the first time
        self.clock_events: dict[int, float] = {}
        self.hosts: list[FleetHost] = []
        for number in range(count):
            ahead_s = self.simulation.random.uniform(-0.5, 0.5) if number else 0.0
            host = FleetHost(self, number, ahead_s)
            self.hosts.append(host)
            self.network.add(host)

    @property
    def leader(self) -> FleetHost:
        """The first host."""
        return self.hosts[0]

    @contextmanager
    def running(self, spread_s: float = 0.5) -> Iterator[Fleet]:
        """Start all hosts, within so many seconds of each other; only here the code waits in virtual time."""
        simulation = self.simulation
        with ExitStack() as stack:
            for module, name, stand_in in self._stand_ins():
                stack.enter_context(patch.object(module, name, stand_in))
            stack.enter_context(installed(simulation, _ROOMS))
            for host in self.hosts:
                simulation.at(simulation.now + spread_s * simulation.random.random(), host.start, host)
            yield self

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        for package in (saferun.coordinator, saferun.cluster):
            for module in pkgutil.iter_modules(package.__path__):
                if module.name not in _NOT_HERE:
                    importlib.import_module(f"{package.__name__}.{module.name}")
        from saferun.cluster import leader_routes, meeting_reports, rendezvous_messages, roster, silent_hosts
        from saferun.coordinator import ended_attempts, heartbeats, liveness, liveness_probe, store_client, store_search
        from saferun.linux import netlink

        def dial(name: str, port: int, timeout_s: float = 5.0, **more: Any) -> Any:
            here: Any = self.simulation.place
            on_resolved = more.get("on_resolved", lambda: None)
            return self.network.dial(here, name, port, timeout_s, on_resolved)

        def here(attribute: str) -> Any:
            return getattr(self.simulation.place, attribute)

        def no_route(_address: str) -> Any:
            raise OSError

        for module_of_dial in (liveness_probe, store_client, store_search):
            yield module_of_dial, "dial", dial
        # Each host's coordinator is a process of its own; here each would go through the memory of all.
        yield ended_attempts, "gc", SimpleNamespace(collect=lambda: 0)
        yield store_search, "HostProbe", _NoHostProbe
        yield netlink, "own_addresses", lambda: [here("address")]
        for named in (meeting_reports, rendezvous_messages, roster):
            yield named, "short_host_name", lambda: here("name")
        yield silent_hosts, "ProgressWatch", VirtualWatch
        yield leader_routes, "route_to", no_route
        yield leader_routes, "working_nics", list
        for looks in (heartbeats, liveness):
            yield looks, "stuck_processes", lambda *_: {}

    # -------------------------------------------------------------------------------------------------------- time

    def run(self, seconds: float, until: Callable[[], object] = lambda: None, *, every: int = 1) -> float:
        """Let time pass, until something has come to be if that is sooner. Returns the seconds that it took."""
        began_at = self.simulation.now
        self.simulation.run(began_at + seconds, until, every)
        return self.simulation.now - began_at

    def await_running(self, seconds: float = 120.0, *, attempt: int = 0) -> float:
        """Until all ranks of the job run."""

        def all_run() -> bool:
            return all(host.is_over or host.is_waiting or attempt in host.running_since for host in self.hosts)

        took_s = self.run(seconds, all_run, every=max(1, self.count // 8))
        if not all_run():
            raise LawError(f"not all run after {seconds} s: {self.story()}")
        return took_s

    def await_end(self, seconds: float) -> float:
        """Until every host has ended, which is a law. Returns the seconds that it took the last one."""
        began_at = self.simulation.now

        def all_ended() -> bool:
            return all(host.is_over for host in self.hosts)

        self.run(seconds, all_ended, every=max(1, self.count // 8))
        if not all_ended():
            raise LawError(f"not everybody has ended after {seconds} s: {self.story()}")
        return max(self.last_end_at - began_at, 0.0)

    def moved_at(self, now: float) -> float:
        """When the ranks of the job moved last."""
        return now if self.stopped_at is None else self.stopped_at

    def story(self) -> str:
        """Who is where, and what was said."""
        states: dict[str, list[int]] = {}
        for host in self.hosts:
            state = "off" if host.is_off else "killed" if host.is_killed else host.state.value
            states.setdefault(state, []).append(host.number)
        who = "; ".join(f"{state}: {len(hosts)} ({hosts[:8]})" for state, hosts in states.items())
        lines = [f"{host.name}: {line}" for host in self.hosts for line in host.lines][:12]
        return "\n".join((who, *lines, f"log: {self.entries}"[:2000]))

    # ----------------------------------------------------------------------------------------------- what happens to it

    def fail(self, *hosts: int) -> None:
        """A rank of each of these hosts fails."""
        self.stopped_at = self.simulation.now
        for number in hosts:
            host = self.hosts[number]
            self.simulation.at(self.simulation.now, partial(host.end_rank, 0, FAILED), host)

    def finish_ranks(self) -> None:
        """All ranks end well, also those that are still to be started."""
        self.ends_well = True
        for host in self.hosts:
            for rank in list(host.alive):
                seconds = self.simulation.random.random()
                self.simulation.at(self.simulation.now + seconds, partial(host.end_rank, rank, OK), host)

    def power_off(self, *hosts: int) -> None:
        """Hosts are gone from one moment to the next: they are silent."""
        self.stopped_at = self.simulation.now
        for number in hosts:
            host = self.hosts[number]
            host.is_off = host.is_gone = True

    def kill(self, number: int) -> None:
        """A host's saferun, its coordinator and its ranks are killed; the host itself lives."""
        self.stopped_at = self.simulation.now
        host = self.hosts[number]
        host.stores.close()
        host.is_killed = host.is_gone = True

    def replace_coordinator(self, number: int) -> None:
        """The coordinator of a host is killed, and another one takes its place."""
        host = self.hosts[number]
        self.simulation.at(self.simulation.now, host.replace_coordinator, host)
        self.run(5.0)
        if host.coordinator._attempt is None:
            raise LawError(f"no coordinator has taken the place of the one on {host.name}: {self.story()}")

    def freeze(self, number: int, seconds: float) -> None:
        """Nothing of a host runs for a while."""
        self.hosts[number].frozen_until = self.simulation.now + seconds

    # ------------------------------------------------------------------------------------------------------- the laws

    def note_entry(self, host: FleetHost, message: JsonObject) -> None:
        """A host has read an entry of the job's log: all read the same, in the same order, and miss none."""
        k, entry = message["k"], message["message"]
        log = self.entries.setdefault(message["attempt"], [])
        if k < len(log):
            if log[k] != entry:
                raise LawError(f"{host.name} reads {entry} where others have read {log[k]}")
        elif k == len(log):
            log.append(entry)
        else:
            raise LawError(f"{host.name} reads entry {k}, and nobody has read {len(log)}")
        if k != (host.log[-1][0] + 1 if host.log else 0):
            raise LawError(f"{host.name} reads entry {k} after {[number for number, _ in host.log]}")
        host.log.append((k, entry))
        kinds = [one["kind"] for one in log]
        if kinds.count("decision") > 1 or kinds.count("abort") > 1:
            raise LawError(f"an attempt is ended twice: {kinds}")

    def note_meeting(self, host: FleetHost, assignment: Assignment) -> None:
        """A host has met the others, as many as the job needs: it knows whether some of them have met before."""
        if assignment.placement.world_size != (self.count - self.spares) * self.ranks:
            raise LawError(f"{host.name} has a WORLD_SIZE of {assignment.placement.world_size}: {self.story()}")
        self.first_met = min(self.first_met, assignment.number)
        if assignment.has_begun != (assignment.number > self.first_met):
            raise LawError(f"{host.name} has {assignment}, and attempt {self.first_met} was the first one")

    def note_running(self, host: FleetHost) -> None:
        """The ranks of a host run: all that run are in the same attempt, but those that stand still or are cut off."""
        number, now = host.job.joined_attempt, self.simulation.now
        host.running_since[number] = now
        for other in self.hosts:
            is_out = other.is_gone or other.is_waiting or other.finish or other.frozen_until > now
            is_out = is_out or not self.network.connects(host, other)
            if not (is_out or number in other.running_since):
                latest = max(other.running_since, default=-1)
                if latest > number or (latest >= 0 and other.state is State.RUNNING):
                    raise LawError(f"{host.name} runs attempt {number}, {other.name} attempt {latest}")

    def note_end(self, host: FleetHost) -> None:
        """A host has ended: as the job decided, if it has."""
        self.last_end_at = self.simulation.now
        decided = [entry for _, entry in host.log if entry["kind"] == "decision" and entry["next"] == "finish"]
        if host.finish is not None and decided and host.finish.exit_code != decided[-1]["exit_code"]:
            raise LawError(f"{host.name} ends with {host.finish}, and {decided[-1]} was decided")

    def note_event(self, host: FleetHost) -> Callable[[JsonObject], None]:
        """What a host's supervisor writes into events.jsonl."""

        def write(event: JsonObject) -> None:
            json.dumps(event)
            if event["event"] == "ClockMeasured":
                self.clock_events[host.number] = event["ahead_s"]

        return write


class _NoHostProbe:
    def __init__(self, *_: object) -> None:
        """Whether a host is up is not found out here by other ports."""

    def result(self, _now: float) -> None:
        return None
