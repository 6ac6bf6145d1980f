"""Which silent hosts the leader gives up, by what is found out by knocking at them."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saferun.cluster.silence import CUT, FROZEN, GONE, REACHED, UNKNOWN, UNREACHABLE
from saferun.coordinator import liveness as liveness_module
from saferun.coordinator.assignments import HostRecord, TaskRecord
from saferun.coordinator.liveness import Liveness
from saferun.coordinator.liveness_probe import SilenceReason

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 0.1


class Silent:
    """A monitor to whom a host has fallen silent; it heartbeats again after so many looks, or never."""

    def __init__(self, beats_again_after: int | None) -> None:
        self._beats_again_after = beats_again_after
        self._with_processes = itertools.count()
        self.was_reset = False
        self.was_lost = False
        self.is_known = False

    def heartbeat_of(self, _host: int) -> bytes:
        look = next(self._with_processes)
        return b"8" if self._beats_again_after is not None and look > self._beats_again_after else b"7"

    def silent_s(self, _host: int) -> float:
        return 10 * INTERVAL_S

    def reset(self, _host: int) -> None:
        self.was_reset = True

    def lose(self, _host: int) -> None:
        self.was_lost = True

    def miss(self, _host: int) -> bool:
        is_news, self.is_known = not self.is_known, True
        return is_news

    def is_missed(self, _host: int) -> bool:
        return self.is_known


def find_out(monitor: Silent, why: str) -> list[dict[str, Any]]:
    """What the leader's supervisor is told of host 1."""
    told: list[dict[str, Any]] = []
    record = HostRecord("node2", (TaskRecord(1, "default", 1),), ("10.0.0.2",), 1)
    liveness = Liveness(
        [record, record],
        ["node1", "node2"],
        ("10.0.0.1",),
        INTERVAL_S,
        has_one_port=False,
        report=lambda op, fields: told.append({"op": op, **fields}),
        probe=lambda *_arguments, **_more: SilenceReason(why, "in words"),
    )
    stand_in: Any = monitor
    liveness.monitor = stand_in
    liveness._find_out(1)
    return told


def test_a_host_that_answers_and_beats_again_a_moment_later_is_not_lost() -> None:
    """It stood still, and goes on while it is knocked at: its answer is there before its heartbeat is."""
    monitor = Silent(beats_again_after=3)
    assert find_out(monitor, CUT) == []
    assert (monitor.was_reset, monitor.was_lost) == (True, False)


def test_a_host_whose_saferun_is_gone_is_lost() -> None:
    """Its ranks ended with it."""
    monitor = Silent(beats_again_after=None)
    assert [(told["op"], told["host"], told["why"]) for told in find_out(monitor, GONE)] == [("lost", 1, GONE)]
    assert (monitor.was_reset, monitor.was_lost) == (False, True)


@pytest.mark.parametrize("why", [CUT, UNREACHABLE, UNKNOWN, FROZEN])
def test_a_host_whose_ranks_may_be_at_work_is_not_given_up(why: str) -> None:
    """The way to it may be cut, or its saferun stopped; once it is missed, nothing found later proves its death."""
    monitor = Silent(beats_again_after=None)
    for found in (why, GONE):
        told = find_out(monitor, found)
        assert [(message["op"], message["host"], message["why"]) for message in told] == [("silent", 1, found)]
    assert not monitor.was_lost


class Clock:
    """The time in ``liveness``, where waiting takes none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(liveness_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Beating:
    """A monitor of a host that heartbeats at each interval, until it ends after so many of them, or forever."""

    def __init__(self, clock: Clock, beats: float = float("inf"), *, silent_s: float = 0.0) -> None:
        self._clock = clock
        self._beats = beats
        self._began_at = clock.now - silent_s
        self.was_lost = self.was_reset = False

    def _beat(self) -> float:
        return min((self._clock.now - self._began_at) // INTERVAL_S, self._beats)

    def heartbeat_of(self, _host: int) -> bytes:
        return b"%d" % self._beat()

    def silent_s(self, _host: int) -> float:
        return self._clock.now - self._began_at - self._beat() * INTERVAL_S

    def lose(self, _host: int) -> None:
        self.was_lost = True

    def reset(self, _host: int) -> None:
        self.was_reset = True

    def miss(self, _host: int) -> bool:
        return True

    def is_missed(self, _host: int) -> bool:
        return False


class Leader:
    """A leader that probes host 1. ``why``: what it finds; that ports are refused, unless another thing is given."""

    def __init__(self, why: str = GONE) -> None:
        self.told: list[dict[str, Any]] = []
        record = HostRecord("node2", (TaskRecord(1, "default", 1),), ("10.0.0.2",), 1)
        self.liveness = Liveness(
            [record, record],
            ["node1", "node2"],
            ("10.0.0.1",),
            INTERVAL_S,
            has_one_port=False,
            report=lambda op, fields: self.told.append({"op": op, **fields}),
            probe=lambda *_arguments, **_more: SilenceReason(why, "in words"),
        )

    def probe(self, monitor: Beating | None, *, awaits_heartbeat: bool = False) -> str:
        stand_in: Any = monitor
        self.liveness.monitor = stand_in
        self.liveness._probe(1, awaits_heartbeat)
        return str(self.told[-1]["why"])

    def judge(self, monitor: Beating) -> list[tuple[str, str]]:
        stand_in: Any = monitor
        self.liveness.monitor = stand_in
        self.liveness._find_out(1)
        found, self.told = [(told["op"], told["why"]) for told in self.told], []
        return found


def test_a_host_with_heartbeats_whose_ports_a_firewall_refuses_is_not_lost_at_a_failure(clock: Clock) -> None:
    """Its evidence may take long, and its next heartbeat comes within the interval."""
    monitor = Beating(clock)
    assert Leader().probe(monitor) == REACHED
    assert not monitor.was_lost


def test_a_host_whose_saferun_has_just_ended_is_lost_as_soon_as_two_heartbeats_are_missing(clock: Clock) -> None:
    """One whose last heartbeat is older than that is lost at once."""
    monitor = Beating(clock, beats=0)
    began_at = clock.now
    assert Leader().probe(monitor) == GONE
    assert monitor.was_lost
    assert clock.now - began_at == pytest.approx(2 * INTERVAL_S, abs=0.25 * INTERVAL_S)
    old = Beating(clock, beats=0, silent_s=3 * INTERVAL_S)
    began_at = clock.now
    assert Leader().probe(old) == GONE
    assert clock.now == began_at


@pytest.mark.parametrize("awaits_heartbeat", [False, True])
def test_an_attempt_that_goes_on_loses_no_host_because_it_does_not_answer_for_some_seconds(
    clock: Clock, *, awaits_heartbeat: bool
) -> None:
    """A switch restarts: the silence of a host counts, as while ranks run. A failed one waits for no evidence."""
    monitor = Beating(clock, beats=0, silent_s=3 * INTERVAL_S)
    found = Leader(UNREACHABLE).probe(monitor, awaits_heartbeat=awaits_heartbeat)
    assert (found, monitor.was_lost) == ((UNKNOWN, False) if awaits_heartbeat else (UNREACHABLE, True))
    early = Leader(UNREACHABLE).probe(None, awaits_heartbeat=awaits_heartbeat)
    assert early == (UNKNOWN if awaits_heartbeat else UNREACHABLE)


def test_an_attempt_that_goes_on_loses_a_host_whose_saferun_is_gone(clock: Clock) -> None:
    """It is known, once no heartbeat has come for a while."""
    monitor = Beating(clock, beats=0, silent_s=3 * INTERVAL_S)
    assert Leader().probe(monitor, awaits_heartbeat=True) == GONE
    assert monitor.was_lost


def test_where_heartbeats_have_come_since_a_refusal_a_refusal_means_nothing(clock: Clock) -> None:
    """A firewall refused, and goes on to do so when the host falls silent."""
    leader = Leader()
    monitor = Beating(clock)
    assert leader.probe(monitor) == REACHED
    silent = Beating(clock, beats=9, silent_s=20 * INTERVAL_S)
    leader.told.clear()
    assert leader.judge(silent) == [("silent", UNKNOWN)]
    assert not silent.was_lost


def test_a_heartbeat_that_comes_just_before_the_end_makes_no_firewall_of_a_refusal(clock: Clock) -> None:
    """It was on its way when the process ended, and one that comes within an interval shows nothing at all."""
    assert Leader().probe(Beating(clock, beats=1)) == GONE
    leader = Leader()
    ending = Beating(clock, beats=2)
    assert leader.probe(ending) == REACHED
    leader.told.clear()
    assert leader.judge(ending) == [("lost", GONE)]
    assert ending.was_lost


def test_a_host_that_is_refused_after_a_silence_has_a_moment_for_a_heartbeat(clock: Clock) -> None:
    """The network was away until now: what was not delivered is sent again."""
    monitor = Beating(clock)
    assert Leader().judge(monitor) == []
    assert monitor.was_reset


class Many:
    """A leader to whom many hosts fall silent at once."""

    def __init__(self, hosts: int) -> None:
        self.released = threading.Event()
        self.changed = threading.Condition()
        self.at_once = self.most_at_once = 0
        self.reported: set[Any] = set()
        self.broken: set[str] = set()
        records = [HostRecord(f"node{k}", (TaskRecord(1, "default", 1),), (f"10.0.0.{k}",), 1) for k in range(hosts)]
        self.liveness = Liveness(
            records,
            [record.name for record in records],
            ("10.0.0.0",),
            INTERVAL_S,
            has_one_port=False,
            report=self._report,
            probe=self._probe,
        )
        self.monitor = Silent(None)
        stand_in: Any = self.monitor
        self.liveness.monitor = stand_in

    def _probe(self, name: str, *_: Any, **__: Any) -> SilenceReason:
        with self.changed:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.changed.notify_all()
        self.released.wait(30.0)
        with self.changed:
            self.at_once -= 1
        if name in self.broken:
            raise OSError("out of descriptors")
        return SilenceReason(UNREACHABLE, "in words")

    def _report(self, _op: str, fields: dict[str, Any]) -> None:
        with self.changed:
            self.reported.add(fields["host"])
            self.changed.notify_all()

    def wait(self, what: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(what, 30.0)


def test_of_many_hosts_that_fall_silent_at_once_only_some_are_probed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of threads and connections, for each address of each host, are more than a process may have."""
    monkeypatch.setattr(liveness_module, "_MOST_PROBED", 3)
    many = Many(41)
    many.broken = {"node7"}
    for host in range(1, 31):
        many.liveness.find_out(host)
    many.liveness.probe(range(31, 41), awaits_heartbeat=False)
    assert many.wait(lambda: many.at_once == 3)
    many.released.set()
    assert many.wait(lambda: many.reported == set(range(1, 41)) - {7}), "one that cannot be probed holds up no other"
    assert many.most_at_once == 3
    assert many.monitor.was_reset, "it is probed again after another timeout"


def test_where_no_thread_can_be_started_the_others_probe_or_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks is to know that nothing will come of it."""
    many = Many(4)
    many.liveness.find_out(1)
    assert many.wait(lambda: many.at_once == 1)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        many.liveness.find_out(2)
    many.released.set()
    assert many.wait(lambda: many.reported == {1, 2})
    assert many.wait(lambda: many.liveness._probes._threads == 0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            many.liveness.find_out(3)
    many.liveness.find_out(3)
    assert many.wait(lambda: many.reported == {1, 2, 3})
