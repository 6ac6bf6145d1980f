"""``saferunctl attach``, and a rank in a debugger, in a job of several hosts."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import Way, assert_nothing_left, start
from tests.cluster.test_ctl_ends_jobs import has_control_sockets
from tests.process.launching import until
from tests.process.test_terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host
    from tests.cluster.machines.process import Process

ONE_ASKS = """
secret = 41
tell("ready")
if RANK == 3:
    breakpoint()
    tell("went_on")
else:
    time.sleep(6)
    tell("slept")
stay()
"""


@contextmanager
def attached(host: Host, folder: Path, rank: int) -> Iterator[tuple[Process, Terminal]]:
    """Attach on a host."""
    terminal = Terminal()
    slave = terminal.slave
    command = [sys.executable, "-m", "saferun.ctl", "attach", "latest", "--rank", str(rank)]
    process = host.popen(command, cwd=folder, stdin=slave, stdout=slave, stderr=slave)
    try:
        yield process, terminal
    finally:
        process.end()
        terminal.close()


@pytest.mark.slow
def test_a_debugger_on_the_second_host_is_used_there_and_no_host_reports_a_hang(
    cluster: Cluster, tmp_path: Path
) -> None:
    """On the first host the refusal says where to go."""
    hosts = cluster.hosts[:2]
    options = ("--attach", "any", "--hang-timeout", "1", "--on-hang", "stop", "--external-wait-timeout", "0")
    job = start(cluster, Way("by_hand"), tmp_path, ONE_ASKS, *options, hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    with attached(hosts[0], tmp_path, 3) as (process, terminal):
        assert process.finish() == 1
        until(lambda: "rank 3 runs on node2" in terminal.text, "it says where")
        until(lambda: "ssh -t node2 saferunctl attach" in terminal.text, "it says how")
    with attached(hosts[1], tmp_path, 3) as (_, terminal):
        until(lambda: "(Pdb) " in terminal.text, "attached")
        terminal.type(b"p secret + 1000\r")
        until(lambda: "\n1041\r\n" in terminal.text, "the debugger answers")
        job.hear("slept", 3)
        events = "".join(path.read_text() for path in tmp_path.glob("saferun_runs/latest/*/events.jsonl"))
        assert "HangSuspected" not in events
        terminal.type(b"c\r")
        job.hear("went_on", 1)
    assert set(job.finish()) == {1}, job.story("wrong exit code")
    events = "".join(path.read_text() for path in tmp_path.glob("saferun_runs/latest/*/events.jsonl"))
    assert "HangSuspected" in events
    assert_nothing_left(cluster)
