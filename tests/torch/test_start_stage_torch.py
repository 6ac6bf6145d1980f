"""How far the ranks of a real job have come, as their store, the hook and their own words show it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.diagnosis.start_stage import StoreStage, read_store_stage, start_stage
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.linux.start_marks import ranks_with_group
from saferun.model import ExitStatus, RankEnd
from tests.torch.coordinating import PROGRAM, REPOSITORY, Line, hosts, join_all, listening, port_of, until

SCRIPT = """
import os, sys
import torch.distributed as dist
def main():
    print("ready", flush=True)
    order = sys.stdin.readline().strip()
    if order == "die":
        raise KeyError("labels")
    dist.init_process_group("gloo")
    print("through", flush=True)
    if sys.stdin.readline().strip() == "fail":
        raise KeyError("labels")
    os._exit(0)
main()
"""


class Coordinator(Line):
    """The coordinator of one host, as a supervisor starts it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.listener = listening()
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(theirs.fileno()), str(self.listener.fileno()), "0"],
            pass_fds=[theirs.fileno(), self.listener.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def serve(self, attempt: int) -> None:
        self.send("serve", attempt=attempt)
        self.expect("serving", attempt=attempt)

    def stage(self, attempt: int = 0, world_size: int = 2) -> StoreStage:
        self.send("start_stage", attempt=attempt, world_size=world_size)
        return read_store_stage(self.expect("start_stage", attempt=attempt))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()
        self.socket.close()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """A coordinator that serves the store of attempt 0."""
    found = Coordinator()
    try:
        found.serve(0)
        yield found
    finally:
        found.close()


class Rank:
    """A rank that does what it is told, one line after the other."""

    def __init__(self, rank: int, port: int, directory: Path) -> None:
        self.rank = rank
        self.prefix = str(directory / f"a0r{rank}")
        script = directory / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0"}
        environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environ |= {"SAFERUN_HOOK": self.prefix, "PYTHONPATH": str(REPOSITORY / "saferun" / "inject")}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(script)],
            env={**os.environ, **environ},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        self.said: tuple[str, ...] = ()

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def order(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self, order: str = "") -> RankEnd:
        """Its end, by itself after an order, else by us."""
        if not order:
            self.process.terminate()
        _, stderr = self.process.communicate(f"{order}\n" if order else None, timeout=60)
        self.said = tuple(stderr.splitlines())
        code = self.process.returncode
        status = ExitStatus(code, None) if code >= 0 else ExitStatus(None, -code)
        return RankEnd(self.rank, self.rank, self.process.pid, status, 10.0, 1e9, stopped_by_us=not order)


@contextlib.contextmanager
def two_ranks(port: int, directory: Path) -> Iterator[list[Rank]]:
    ranks = [Rank(rank, port, directory) for rank in range(2)]
    try:
        for rank in ranks:
            rank.expect("ready")
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()


def marked(ranks: list[Rank]) -> frozenset[int]:
    return ranks_with_group({rank.rank: rank.prefix for rank in ranks})


def evidence(ranks: list[Rank], *ends: RankEnd) -> Evidence:
    outputs = tuple(RankOutput(rank.rank, rank.said, "", "", 0.0, rank=rank.rank) for rank in ranks)
    return Evidence("node1", 1.0, ends, outputs, (), None, ranks=(0, 1), script="train.py")


@pytest.mark.slow
def test_a_real_start_is_before_inside_and_through(coordinator: Coordinator, tmp_path: Path) -> None:
    """Each stage by the store and by the hook; and nothing of it is left for the next attempt."""
    with two_ranks(port_of(coordinator.listener), tmp_path) as ranks:
        assert coordinator.stage() == ("before", 0, 2)
        assert marked(ranks) == frozenset()
        ranks[0].order("come")
        until(lambda: coordinator.stage() == ("inside", 1, 2), "rank 0 comes to the store")
        assert marked(ranks) == frozenset()
        ranks[1].order("come")
        for rank in ranks:
            rank.expect("through")
        assert coordinator.stage() == ("through", 2, 2)
        assert marked(ranks) == {0, 1}
        ends = [ranks[0].end("fail"), ranks[1].end()]
        # What the dead have left behind still tells.
        assert marked(ranks) == {0, 1}
        assert any(line.startswith("[rank0]:") for line in ranks[0].said)
        found = evidence(ranks, *ends)
        assert start_stage(found, marked=marked(ranks)) == "through"
        assert start_stage(found, store=coordinator.stage()) == "through"
    coordinator.send("drop")
    coordinator.expect("dropped")
    assert coordinator.stage() == StoreStage()
    coordinator.serve(1)
    assert coordinator.stage(1) == ("before", 0, 2)
    assert coordinator.stage(0) == StoreStage()


@pytest.mark.slow
def test_a_rank_that_never_comes_leaves_the_others_inside(coordinator: Coordinator, tmp_path: Path) -> None:
    """It died before, of something of its own."""
    with two_ranks(port_of(coordinator.listener), tmp_path) as ranks:
        ranks[0].order("come")
        until(lambda: coordinator.stage().stage == "inside", "rank 0 comes to the store")
        ends = [ranks[1].end("die"), ranks[0].end()]
        assert "KeyError" in ranks[1].said[-1]
        assert start_stage(evidence(ranks, *ends), marked=marked(ranks), store=coordinator.stage()) == "inside"


@pytest.mark.slow
def test_a_rank_that_fails_in_it_says_so_itself(coordinator: Coordinator, tmp_path: Path) -> None:
    """By its traceback, whatever the store shows: here that both have come."""
    with two_ranks(port_of(coordinator.listener), tmp_path) as ranks:
        ranks[0].order("come")
        until(lambda: coordinator.stage().arrived == 1, "rank 0 comes to the store")
        # The store is gone while it waits there for the other's address.
        coordinator.send("drop")
        coordinator.expect("dropped")
        end = ranks[0].end("come")
        assert any("in init_process_group" in line for line in ranks[0].said)
        assert start_stage(evidence(ranks, end), store=StoreStage("through", 2, 2)) == "inside"


# -------------------------------------------------------------------------------------------------------- several hosts


def rank_clients(joined: dict[str, Any], count: int) -> list[Any]:
    """Clients of the ranks' store, as ``init_process_group`` makes them."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = (joined["master_addr"], joined["master_port"])
    return [TCPStore(*address, joined["world_size"], False, timedelta(seconds=10)) for _ in range(count)]


def test_of_several_hosts_the_one_with_the_ranks_store_tells() -> None:
    """Saferun's own keys and connections are no ranks'; the others cannot know."""
    with hosts("node1", "node2") as job:
        joined = join_all(job)[0]

        def stage(host: Line) -> StoreStage:
            host.send("start_stage", attempt=0)
            return read_store_stage(host.expect("start_stage", attempt=0))

        assert stage(job[0]) == ("before", 0, 4)
        assert stage(job[1]) == StoreStage()
        clients = rank_clients(joined, 3)
        assert stage(job[0]) == ("inside", 3, 4)
        clients += rank_clients(joined, 1)
        assert stage(job[0]) == ("through", 4, 4)
        # An attempt that is over has nothing to tell.
        job[0].send("start_stage", attempt=7)
        job[0].send("counts")
        job[0].expect("counts")
        assert not [message for message in job[0].read_all() if message["op"] == "start_stage"], json.dumps(joined)
