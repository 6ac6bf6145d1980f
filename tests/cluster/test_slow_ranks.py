"""The rank that the others wait for is named with its host, and where all are even none is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import Way, assert_nothing_left, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.jobs import Job
    from tests.cluster.machines.cluster import Cluster

SLOW = r"saferun: .* is slow: the other ranks spent "
# Ranks that meet in every step, as those of gloo do: the main thread waits on a lock, another one does the network.
# SLOW and FACTOR come before it. It ends in the step in which rank 0 sees the release of "end".
IN_STEP = """
import queue, threading

def serve(listener):
    links = [listener.accept()[0] for _ in range(WORLD)]
    while all(link.recv(1) for link in links):
        last = b"1" if os.path.exists(FOLDER + "/release.end") else b"0"
        for link in links:
            link.sendall(last)

if RANK == 0:
    threading.Thread(target=serve, args=(socket.create_server(("", 7777)),), daemon=True).start()
while True:
    try:
        link = socket.create_connection(("node1", 7777))
        break
    except OSError:
        time.sleep(0.05)
link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
asked, answered = queue.Queue(), queue.Queue()

def exchange():
    while True:
        asked.get()
        try:
            link.sendall(b"1")
            answered.put(link.recv(1))
        except OSError:
            answered.put(b"")

threading.Thread(target=exchange, daemon=True).start()
tell("ready")
while True:
    time.sleep(0.1 * (FACTOR if RANK == SLOW else 1.0))
    asked.put(1)
    if answered.get() != b"0":
        break
os._exit(0)
"""


def in_step(cluster: Cluster, folder: Path, slow: int, factor: float) -> Job:
    """A job of four ranks on two hosts that work in step."""
    program = f"SLOW, FACTOR = {slow}, {factor}\n{IN_STEP}"
    options = ("--slow-window", "6", "--hang-timeout", "60")
    return start(cluster, Way("by_hand"), folder, program, *options, hosts=cluster.hosts[:2])


def run_json(folder: Path) -> dict[str, object]:
    """What run.json of the leader has."""
    found = [json.loads(path.read_text()) for path in folder.glob("saferun-runs/*/run.json")]
    return next((one for one in found if one["slow_ranks"]), found[0])


def waits(folder: Path) -> dict[str, object]:
    """What ``saferunctl status`` shows."""
    for path in folder.glob("saferun-runs/*/waits.json"):
        table: dict[str, object] = json.loads(path.read_text())
        return table
    return {}


@pytest.mark.slow
def test_a_rank_that_is_30_percent_slower_is_named_with_its_host(cluster: Cluster, tmp_path: Path) -> None:
    """Once, by the leader; the run directory has it."""
    job = in_step(cluster, tmp_path, 3, 1.3)
    job.hear("ready", 4)
    job.until(lambda: job.saferun_said(SLOW), "a rank is named")
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    (line,) = job.saferun_said(SLOW)
    assert line.startswith("saferun: rank 3 (node2) is slow: "), job.story("another rank is named")
    described = run_json(tmp_path)["slow_ranks"]
    assert isinstance(described, list)
    assert [(row["ranks"], row["host"], row["by"]) for row in described] == [([3], "node2", "samples")]
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_no_rank_of_an_even_job_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Though all of them have been compared again and again."""
    job = in_step(cluster, tmp_path, -1, 1.0)
    job.hear("ready", 4)
    times: set[object] = set()

    def compared() -> bool:
        table = waits(tmp_path)
        if table and len(table["ranks"]) == 4:  # type: ignore[arg-type]
            times.add(table["time"])
        return len(times) >= 12

    job.until(compared, "the ranks are compared twelve times")
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    assert not job.saferun_said(SLOW), job.story("a rank is named")
    assert run_json(tmp_path)["slow_ranks"] == []
    assert_nothing_left(cluster)
