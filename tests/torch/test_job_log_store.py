"""The job's log in a real TCPStore that is slow, and whose connections break: what hosts write there reaches all."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from saferun.cluster.silence import REACHED
from saferun.coordinator import control_channel as channel_module
from saferun.coordinator.control_channel import ControlChannel
from saferun.coordinator.job_log import JobLog
from saferun.coordinator.liveness_probe import SilenceReason
from saferun.coordinator.store_client import StoreClient

DEADLINE_S = 120.0
HOSTS, ENTRIES = 4, 20


class _Way:
    """A proxy before a port: every message takes a while, and some connections end instead."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.cuts = 0
        self.is_steady = False
        self._port = port
        self._chance = chance
        self._threads = [threading.Thread(target=self._accept)]
        self._ends: list[socket.socket] = []
        self._threads[0].start()

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += (near, far)
                for one, other in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._carry, args=(one, other)))
                    self._threads[-1].start()

    def close(self) -> None:
        """End all connections."""
        self.is_steady = True
        for end in (self.listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self.listener, *self._ends):
            end.close()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := one.recv(1 << 16):
                time.sleep(self._chance.random() * 0.01)
                if not self.is_steady and self._chance.random() < 0.01:
                    self.cuts += 1
                    break
                other.sendall(chunk)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slow_store(chance: random.Random) -> Iterator[tuple[type[Any], _Way]]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    way = _Way(server.port, chance)
    try:
        yield TCPStore, way
    finally:
        way.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_host_reads_every_entry_once_and_in_the_same_order(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The fast sister of this is in tests/unit/coordinator/test_job_log.py, with a store in memory."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    told = [list[str]() for _ in range(HOSTS)]
    changed = threading.Condition()
    monkeypatch.setattr(channel_module, "_LEAST_PAUSE_S", 0.02)
    monkeypatch.setattr(channel_module, "_LEAST_SEARCH_S", 0.02)

    def hear(host: int, message: dict[str, Any]) -> None:
        with changed:
            told[host].append(message["text"])
            changed.notify_all()

    with slow_store(chance) as (store_class, way):
        finding = SilenceReason(REACHED, "it answers", "127.0.0.1")
        monkeypatch.setattr(channel_module, "probe_host", lambda *_, **__: finding)
        logs = list[tuple[ControlChannel, JobLog]]()
        for host in range(HOSTS):
            client = StoreClient.connect(store_class, ("127.0.0.1", way.port), dialled=True)
            channel = ControlChannel(
                client,
                *("job", "key", "node1", ["127.0.0.1"], 2.0),
                start=lambda host=host: logs[host][1].start(),  # type: ignore[misc]
                on_lost=lambda *_: None,
            )
            log = JobLog(channel, "a0/", host, lambda _, message, host=host: hear(host, message))  # type: ignore[misc]
            logs.append((channel, log))
            channel.open()
        written = [f"{host} {n}" for n in range(ENTRIES) for host in range(HOSTS)]
        for text in written:
            logs[int(text[0])][1].append({"kind": "request", "text": text, "at_once": False})
        with changed:
            are_told = changed.wait_for(lambda: all(len(heard) >= len(written) for heard in told), DEADLINE_S)
        for channel, _ in logs:
            channel.close()
        assert are_told, [len(heard) for heard in told]
        assert way.cuts > 0
    assert sorted(told[0]) == sorted(written)
    assert all(heard == told[0] for heard in told)
