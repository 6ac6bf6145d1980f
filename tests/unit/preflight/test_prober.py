"""What the probing host lacks itself says nothing of the network, and costs the route or nothing."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, Self

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.probe import prober
from saferun.preflight.probe.prober import probe_all
from saferun.preflight.results import Probe, ProbeEndpoint, ProbeTarget

ENDPOINT = ProbeEndpoint(4000, "0" * 32, (("eth0", "10.0.0.2"), ("eth1", "10.1.0.2")))
NICS = tuple(Nic(f"eth{number}", (f"10.{number}.0.1",), (f"10.{number}.0.1/16",)) for number in range(2))
STAGES = ("socket", "bind", "connect", "sendall")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "_PAUSE_S", 0.001)


class Socket:
    """One that fails at a stage."""

    def __init__(self, stage: str, number: int) -> None:
        self._stage = stage
        self._number = number
        self._fail("socket")

    def _fail(self, stage: str, *_: object) -> None:
        if stage == self._stage:
            raise OSError(self._number, os.strerror(self._number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._fail(name, *arguments)


def found(monkeypatch: pytest.MonkeyPatch, stage: str, number: int) -> list[Probe]:
    monkeypatch.setattr(socket, "socket", lambda *_: Socket(stage, number))
    return probe_all(0, [ProbeTarget(1, "node1", ENDPOINT)], NICS, time.monotonic() + 5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_a_route_for_which_the_probing_host_has_no_room_is_left_out(
    monkeypatch: pytest.MonkeyPatch, stage: str, number: int
) -> None:
    """The network may be in order, and the ranks may have what the check process lacks."""
    assert found(monkeypatch, stage, number) == []


def test_what_the_network_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {stage: {probe.kind for probe in found(monkeypatch, stage, errno.ECONNREFUSED)} for stage in STAGES[2:]}
    assert kinds == {"connect": {"refused"}, "sendall": {"stranger"}}


def test_a_shortage_that_passes_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second try finds counts."""
    numbers = iter([errno.EMFILE, errno.ECONNREFUSED])
    monkeypatch.setattr(socket, "socket", lambda *_: Socket("connect", next(numbers)))
    endpoint = ENDPOINT._replace(routes=ENDPOINT.routes[:1])
    (probe,) = probe_all(0, [ProbeTarget(1, "node1", endpoint)], NICS, time.monotonic() + 5)
    assert probe.kind == "refused"


@pytest.mark.parametrize("threads", [0, 1])
def test_a_host_without_more_threads_probes_with_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    left = [True] * threads

    class Thread(threading.Thread):
        def start(self) -> None:
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            super().start()

    stand_in = SimpleNamespace(Thread=Thread, Lock=threading.Lock)
    monkeypatch.setattr(prober, "threading", stand_in)
    assert len(found(monkeypatch, "connect", errno.ECONNREFUSED)) == 2
