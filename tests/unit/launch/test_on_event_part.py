"""Events go to the command from one host of the job, bounded in number."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.on_event_part import OnEventPart
from saferun.linux.poller import Poller
from saferun.report.event_json import LaunchEvent

EVENT = LaunchEvent("hang", 0, 1.0, "rank 3 does not call all_reduce", ranks=(3,))


def part_of(
    warned: list[str], *, leads: bool, leader: str = "node1", config: object = None, **job: bool
) -> OnEventPart:
    context: Any = SimpleNamespace(
        config=config,
        job=SimpleNamespace(leads=leads, leader=leader, **job),
        run_dir=SimpleNamespace(path=None, files=SimpleNamespace(is_stalled=False), write_text=lambda *_: None),
        run_id="5f2c1a",
        environ=dict(os.environ),
        investigation=SimpleNamespace(log=SimpleNamespace(host="node1")),
        poller=Poller(),
        warn=warned.append,
    )
    return OnEventPart(context, ("sleep", "1000"))


def end(part: OnEventPart) -> None:
    pids = part.pids
    part.finish(lambda: True, bool)
    for pid in pids:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("leads", [True, False])
def test_one_host_of_the_job_sends_them(leads: bool) -> None:
    warned: list[str] = []
    part = part_of(warned, leads=leads)
    part.notify(EVENT)
    assert (part.deadline is not None) is leads
    end(part)


@pytest.mark.parametrize(
    ("backend", "node_rank", "is_endpoint_here", "is_head", "sends"),
    [
        ("static", 0, False, True, True),
        ("static", 0, False, False, False),
        ("static", 1, False, True, False),
        ("c10d", None, True, True, True),
        ("c10d", None, True, False, False),
        ("c10d", None, False, True, False),
    ],
)
def test_while_the_hosts_have_not_met_the_first_one_sends_them(
    backend: str, node_rank: int | None, *, is_endpoint_here: bool, is_head: bool, sends: bool
) -> None:
    """If they never meet, there is no leader, and the user is to know that the job has not started."""
    config = SimpleNamespace(hosts=SimpleNamespace(node_rank=node_rank), rendezvous=SimpleNamespace(backend=backend))
    part = part_of([], leads=False, leader="", config=config, is_endpoint_here=is_endpoint_here, is_head=is_head)
    part.notify(EVENT)
    assert (part.deadline is not None) is sends
    end(part)


def test_a_command_that_cannot_be_killed_is_one_line() -> None:
    warned: list[str] = []
    part = part_of(warned, leads=True)
    part.notify(EVENT)
    part.tick(0.0)
    part._on_message({"number": 1, "returncode": -9, "is_late": True, "is_stuck": True})
    end(part)
    expected = (
        "--on-event: sleep: took longer than 30 s, and does not end even by SIGKILL; the job does not depend on it"
    )
    assert warned == [expected]


def test_what_a_slow_command_cannot_take_is_left_out_with_one_line() -> None:
    """The queue is bounded."""
    warned: list[str] = []
    part = part_of(warned, leads=True)
    for _ in range(40):
        part.notify(EVENT)
        part.tick(0.0)
    assert len(warned) == 8
    assert len(set(warned)) == 1
    assert "events are left out" in warned[0]
    end(part)
