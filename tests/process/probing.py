"""What tests of probes between hosts share."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.probe import prober
from saferun.preflight.probe.prober import probe_all
from saferun.preflight.results import Probe, ProbeEndpoint, ProbeTarget

LOOPBACK = Nic("lo", ("127.0.0.1",), ("127.0.0.1/8",), kind="loopback")
DEADLINE_S = 30.0
TOKEN = "0123456789abcdef" * 2


def soon(within_s: float = DEADLINE_S) -> float:
    return time.monotonic() + within_s


def one(endpoint: ProbeEndpoint, nics: Sequence[Nic] = (LOOPBACK,)) -> Probe:
    """The only route of a probe endpoint, probed."""
    (found,) = probe_all(0, [ProbeTarget(1, "node1", endpoint)], nics, soon())
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not answer takes a second instead of seven."""
    monkeypatch.setattr(prober, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(prober, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(prober, "LARGE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(prober, "_PAUSE_S", 0.05)
