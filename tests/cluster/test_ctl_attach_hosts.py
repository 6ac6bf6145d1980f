"""``saferunctl attach``, and a rank in a debugger, in a job of several hosts."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import STAY, Way, assert_nothing_left, start
from tests.cluster.test_ctl_ends_jobs import ask, has_control_sockets
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
def attached(
    host: Host, folder: Path, rank: int, *options: str, verb: str = "attach"
) -> Iterator[tuple[Process, Terminal]]:
    """Attach on a host, or use another verb there."""
    terminal = Terminal()
    slave = terminal.slave
    command = [sys.executable, "-m", "saferun.ctl", verb, "latest", "--rank", str(rank), *options]
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
    """On the first host it is said where to go, where nothing is to be done elsewhere."""
    hosts = cluster.hosts[:2]
    options = ("--attach", "any", "--hang-timeout", "1", "--on-hang", "stop", "--external-wait-timeout", "0")
    job = start(cluster, Way("by_hand"), tmp_path, ONE_ASKS, *options, hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    with attached(hosts[0], tmp_path, 3, "--here") as (process, terminal):
        assert process.finish() == 1
        until(lambda: "rank 3 runs on node2" in terminal.text, "it says where")
        until(lambda: "ssh -t node2 saferunctl attach" in terminal.text, "it says how")
    with attached(hosts[1], tmp_path, 3) as (_, terminal):
        until(lambda: "(Pdb) " in terminal.text, "attached")
        terminal.type(b"p secret + 1000\r")
        until(lambda: "\n1041\r\n" in terminal.text, "the debugger answers")
        job.hear("slept", 3)
        events = "".join(path.read_text() for path in tmp_path.glob("saferun-runs/latest/*/events.jsonl"))
        assert "HangSuspected" not in events
        terminal.type(b"c\r")
        job.hear("went_on", 1)
    assert set(job.finish()) == {1}, job.story("wrong exit code")
    events = "".join(path.read_text() for path in tmp_path.glob("saferun-runs/latest/*/events.jsonl"))
    assert "HangSuspected" in events
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way("by_hand"), Way("pdsh"), Way("srun")], ids=lambda way: way.name)
def test_attach_on_any_host_goes_to_that_of_the_rank(cluster: Cluster, tmp_path: Path, way: Way) -> None:
    """From a host of the job, and from one that only sees the run directory: by ssh, under Slurm as a step."""
    hosts = cluster.hosts[:2]
    job = start(cluster, way, tmp_path, ONE_ASKS, "--attach", "any", hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    tool = "srun" if way.launcher == "srun" else "ssh"
    for host in (hosts[0], cluster.hosts[2]):
        with attached(host, tmp_path, 3) as (process, terminal):
            until(lambda: "(Pdb) " in terminal.text, f"attached: {terminal.text}")
            assert f"rank 3 runs on node2: going there by {tool}" in terminal.text
            terminal.type(b"p secret + 1000\r")
            until(lambda: "\n1041\r\n" in terminal.text, "the debugger answers")
            terminal.type(b"\x1d")
            assert process.finish() == 0, terminal.text
            assert "detached from rank 3, which goes on" in terminal.text
    with attached(hosts[0], tmp_path, 3) as (process, terminal):
        until(lambda: "(Pdb) " in terminal.text, "attached")
        process.end()  # the other end hears of it
    with attached(hosts[1], tmp_path, 3) as (_, terminal):
        until(lambda: "(Pdb) " in terminal.text, "attached again")
        terminal.type(b"c\r")
        job.hear("went_on", 1)
    ask(hosts[0], tmp_path, "stop", "latest")
    job.finish()
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_debug_on_another_host_goes_to_that_of_the_rank(cluster: Cluster, tmp_path: Path) -> None:
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, STAY, hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    with attached(hosts[0], tmp_path, 3, verb="debug") as (process, terminal):
        until(lambda: terminal.text.rstrip().endswith("(gdb)"), "gdb asks")
        job.until(lambda: "rank 3 is in a debugger" in job.err, "the console says so")
        terminal.type(b"quit\r")
        until(lambda: "Quit anyway?" in terminal.text, "gdb asks first")
        terminal.type(b"y\r")
        assert process.finish() == 0, terminal.text
    ask(hosts[0], tmp_path, "stop", "latest")
    job.finish()
    assert_nothing_left(cluster)
