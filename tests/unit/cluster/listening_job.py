"""A job that hears messages from other hosts. The channel is a list."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

from saferun.cluster.job import Job
from saferun.cluster.job_values import Assignment, JobCallbacks
from saferun.config import HostsConfig, LaunchConfig
from saferun.errors import SaferunError
from saferun.files.run_dir import RunDirectory
from saferun.linux.poller import Poller
from saferun.model import JsonObject
from saferun.supervisor.actions import JoinHosts
from saferun.supervisor.events import (
    Event,
)
from tests.direct_files import DirectFiles
from tests.unit.samples import CONFIG


class Channel:
    """Stands in for the channel to the coordinator."""

    def __init__(self, on_message: Any) -> None:
        self.client = self.torch = SimpleNamespace(asks_torch=False, is_preparing=False)
        self.deadline: float | None = None
        self.port = 29500
        self.control_port = 40000
        self.is_head = True
        self.sent: list[JsonObject] = []
        self.say = on_message

    def send(self, message: JsonObject) -> None:
        self.sent.append(message)

    def open(self) -> None:
        """It is always there."""

    def answer_end(self) -> None:
        """No other host asks."""

    def close(self) -> None:
        """Nothing to be closed."""


class Listening:
    """A job with its surroundings.

    Args:
        backend: of the rendezvous.
        detected: the scheduler that the hosts were found by.
        config: the whole launch, instead of these two.
    """

    def __init__(self, backend: str = "static", *, detected: str = "", config: LaunchConfig | None = None) -> None:
        self.events: list[Event] = []
        self.assignments: list[Assignment] = []
        self.said: list[str] = []
        self.states: list[dict[str, Any]] = []
        self.hangs: list[int] = []
        self.told: list[dict[str, Any]] = []  # of the checks
        self.refused: list[SaferunError] = []  # by torch
        self.attempt = 0
        self.ranks: tuple[Any, ...] = ()  # those of this process that run
        rendezvous = CONFIG.rendezvous._replace(backend=backend)
        config = config or CONFIG._replace(hosts=HostsConfig(2, 2, 0, detected=detected), rendezvous=rendezvous)
        self.run_dir = RunDirectory(
            None, wanted=False, host="vm", run_id="r", warn=self.said.append, files=DirectFiles()
        )
        self.job = Job(
            config,
            {},
            Poller(),
            JobCallbacks(
                post=self.events.append,
                attempt=lambda: self.attempt,
                on_assigned=self.assignments.append,
                on_prepared=lambda _: None,
                on_prepare_failed=self.refused.append,
                on_preflight=self.told.append,
                on_torch=lambda _: None,
                on_stderr=lambda _: None,
                print_line=self.said.append,
                ranks=lambda: self.ranks,
            ),
            run_dir=self.run_dir,
            open_channel=self._open_channel,
        )
        self.job.reports.subscribe(
            lambda states: self.states.append(dict(states)), lambda _, number: self.hangs.append(number)
        )

    def _open_channel(self, *_: Any, on_message: Any, **__: Any) -> Any:
        self.channel = Channel(on_message)
        return self.channel

    def hear(self, **message: Any) -> None:
        self.channel.say(message)

    def join(self) -> None:
        self.job.join(JoinHosts(0))
        self.hear(**JOINED)


JOINED: dict[str, Any] = {
    "op": "joined",
    "attempt": 0,
    "restarts": 0,
    "host": 0,
    "hosts": 2,
    "base_rank": 0,
    "world_size": 4,
    "role_base": 0,
    "role_world_size": 4,
    "local_base": 0,
    "local_world_size": 2,
    "master_addr": "node0",
    "master_port": 29500,
    "leader": True,
    "leader_name": "node0",
    "label": "node0",
    "files": "20260101-000000-abcdef",
    "chunk_limit_bytes": 65536,
    "peers": [[0, "node0", ["10.0.0.1"], 0, 2], [1, "node1", ["10.0.0.2"], 2, 2]],
}


DECISION: dict[str, Any] = {
    "kind": "decision",
    "host": 0,
    "task": 0,
    "next": "restart",
    "exit_code": 1,
    "wait_s": 0,
    "restarts": 1,
    "text": ["why"],
    "excluded": -1,
}


def piece(text: str = "evidence", at: float | None = None) -> str:
    return json.dumps({"time": time.time() if at is None else at, "moved": True, "stopped": False, "evidence": text})
