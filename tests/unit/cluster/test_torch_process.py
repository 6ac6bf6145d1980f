"""What a task that is not its host's first one asks torch for, in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster.job_channel import JobChannel
from saferun.cluster.torch_process import TorchProcess
from saferun.config import HostsConfig, TaskConfig
from saferun.errors import SaferunError
from saferun.linux.children import SpawnError
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from tests.unit.cluster.silent_link import NO_PID, SilentLink
from tests.unit.samples import CONFIG, logs_of

TIMED = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


class Task:
    """The second task of a host."""

    def __init__(self, environ: dict[str, str] | None = None, *, can_start: bool = True, **changes: Any) -> None:
        self.answers: list[JsonObject] = []
        self.refused: list[SaferunError] = []
        self.lines: list[str] = []
        self.links: list[SilentLink] = []
        self.can_start = can_start
        self.poller = Poller()
        callbacks: Any = SimpleNamespace(
            on_prepared=self.answers.append, on_prepare_failed=self.refused.append, print_line=self.lines.append
        )
        config = CONFIG._replace(**changes)
        self.torch = TorchProcess(config, environ or {}, self.poller, callbacks, 1, open_link=self._open_link)

    def _open_link(self, *arguments: Any, **more: Any) -> Any:
        if not self.can_start:
            raise SpawnError(11, "fork")
        self.links.append(SilentLink(*arguments, **more))
        return self.links[-1]

    def hear(self, **message: Any) -> None:
        self.links[-1].say(**message)
        self.poller.wait(0.0)
        os.read(self.links[-1].fd, 1)

    def lose(self) -> None:
        assert self.torch.on_exit(NO_PID, ExitStatus(None, signal.SIGKILL))


@pytest.fixture
def task() -> Iterator[Task]:
    task = Task(TIMED, event_log_handler="console")
    yield task
    task.torch._link = None  # there is no such process
    task.torch.close()
    task.poller.close()


def test_all_of_torch_is_asked_by_the_task_itself(task: Task) -> None:
    """And its events go there, too. It serves no store, and is started before it is asked."""
    task.torch.open()
    assert [(link.torch_parts, link.sent) for link in task.links] == [("all", [])]
    assert task.torch.pids == {NO_PID}
    task.torch.prepare({"local_ranks": [1]})
    expected = {"op": "prepare", "handler": "console", "file_timer": True, "local_ranks": [1]}
    assert task.links[0].sent == [expected]
    task.hear(op="prepared", timer_file="/tmp/timer")
    assert task.answers == [{"op": "prepared", "timer_file": "/tmp/timer"}]
    task.torch.forward_event({"source": "AGENT"})
    assert task.links[0].sent[-1] == {"op": "event", "handler": "console", "source": "AGENT"}
    assert len(task.links) == 1


def test_without_such_options_no_process_is_started() -> None:
    task = Task()
    task.torch.open()
    assert task.links == []


def test_what_torch_refuses_is_a_start_that_fails(task: Task) -> None:
    task.torch.prepare({})
    task.hear(op="failed", what="ValueError: no such handler", usage=True)
    (refused,) = task.refused
    assert (refused.what, refused.exit_code) == ("ValueError: no such handler", 2)


def test_one_that_ends_while_it_is_asked_fails_the_start(task: Task) -> None:
    """It had all of torch: another one would fare no better."""
    task.torch.prepare({})
    task.lose()
    (refused,) = task.refused
    assert "the process of task 1 that has torch ended (killed by SIGKILL)" in refused.what
    assert (len(task.links), task.lines, task.torch.is_preparing) == (1, [], False)


def test_one_that_cannot_be_started_fails_the_start(task: Task) -> None:
    """Not before it is asked: there may be room for it by then."""
    task.can_start = False
    task.torch.open()
    assert (task.refused, task.lines) == ([], [])
    task.torch.prepare({})
    assert len(task.refused) == 1
    task.can_start = True
    task.torch.prepare({})
    assert [message["op"] for message in task.links[0].sent] == ["prepare"]


@pytest.mark.parametrize(
    ("environ", "handler", "missing"),
    [
        (TIMED, "null", "torch's timers"),
        ({}, "console", "torchrun's events"),
        (TIMED, "console", "torch's timers and torchrun's events"),
        ({}, "null", ""),
    ],
)
def test_one_that_ends_while_ranks_run_costs_a_line_about_what_is_missing(
    environ: dict[str, str], handler: str, missing: str
) -> None:
    """The ranks need nothing else of it. The next attempt gets another one, and a single line is enough."""
    task = Task(environ, event_log_handler=handler, numa_binding="node")
    task.torch.prepare({})
    task.hear(op="prepared")
    task.lose()
    ended = "saferun: warning: the process of task 1 that has torch ended (killed by SIGKILL)"
    assert task.lines == ([f"{ended}; {missing} of that task are missing"] if missing else [])
    task.torch.open()
    task.lose()
    assert (len(task.links), len(task.lines), task.refused) == (2, bool(missing), [])
    task.torch.prepare({})
    assert (len(task.links), task.links[2].sent[-1]["op"]) == (3, "prepare")
    task.torch._link = None
    task.torch.close()


@pytest.mark.parametrize("local_rank", [None, 0, 1])
@pytest.mark.parametrize("asks", [False, True])
def test_the_coordinator_answers_the_task_that_has_it(local_rank: int | None, *, asks: bool) -> None:
    """Another task has such a process of its own where the options need one."""
    place = None if local_rank is None else TaskConfig(local_rank, 2, "step")
    logs = logs_of()._replace(logs_specs="mine" if asks else None)
    config = CONFIG._replace(hosts=HostsConfig(1, 1, 0, task=place), logs=logs)
    callbacks: Any = SimpleNamespace(on_stderr=lambda _: None)
    channel = JobChannel(config, {}, Poller(), callbacks, on_message=lambda _: None, on_lost=lambda *_: None)
    assert channel.torch.asks_torch is asks
    assert isinstance(channel.torch, TorchProcess) is (asks and local_rank == 1)
    assert (channel.torch is channel.client) is not isinstance(channel.torch, TorchProcess)
