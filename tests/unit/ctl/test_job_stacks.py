"""The answer of the saferun that leads a job to a request for stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saferun.captures.wire import CaptureTarget
from saferun.cluster.evidence import encode_part
from saferun.ctl import job_stacks
from saferun.ctl.job_stacks import JobStacks, read_job_stacks
from saferun.ctl.live_stacks import asked_processes_of_job, picture
from saferun.errors import UsageError
from saferun.evidence.job_evidence import Capture, Evidence, Frame, StackDump, ThreadStack

FIRST = {"ok": True, "spans_hosts": True}
PEERS = [[0, "node0", 0, 2], [1, "node1", 2, 2], [2, "node2", 4, 2]]


def part(host: int, *ranks: int, function: str = "train") -> list[Any]:
    """What a host hands in."""
    frames = (Frame(function, "/work/train.py", 7), Frame("<module>", "/work/train.py", 9))
    dumps = tuple(
        # The pids of different hosts may be the same.
        StackDump(
            rank,
            100 + rank % 2,
            True,
            "python",
            "py-spy",
            (ThreadStack("MainThread", 1, True, False, False, frames),),
            "",
        )
        for rank in ranks
    )
    evidence = Evidence(
        host=f"node{host}",
        started_at=0.0,
        ends=(),
        outputs=(),
        abandoned=(),
        stop_signum=None,
        ranks=ranks,
        capture=Capture(stacks=dumps),
        script="train.py",
        cwd="/work",
        world_size=6,
    )
    return [host, 0, f"node{host}", encode_part(evidence, 1 << 16)]


def answer(*parts: list[Any], **changed: Any) -> dict[str, Any]:
    """The answer with the stacks of all hosts."""
    return {"ok": True, "attempt": 0, "world_size": 6, "host": 0, "peers": PEERS, "parts": list(parts), **changed}


def stacks(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> JobStacks:
    """What becomes of these answers."""
    left = list(answers)

    class Live:
        def ask(self, op: str, *, wanted: dict[str, Any]) -> Any:
            assert (op, wanted["kind"]) in {("stacks", "stacks"), ("stacks", "recording")}
            return self.next_answer()

        def next_answer(self, _timeout_s: float = 0.0) -> Any:
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        def close(self) -> None:
            """Nothing is open."""

    def find(_directory: Path) -> Any:
        if not left:
            raise UsageError("it has no control socket (yet)", "")
        return Live()

    monkeypatch.setattr(job_stacks, "find_live", find)
    return read_job_stacks(Path("saferun-runs/latest"), native=False)


def test_the_ranks_of_all_hosts_are_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stacks(monkeypatch, FIRST, answer(part(0, 0, 1), part(1, 2, 3, function="evaluate"), part(2, 4, 5)))
    assert found.remarks == ()
    assert found.evidence is not None
    asked = asked_processes_of_job("latest", found.evidence, found.silent)
    assert asked.targets == tuple(CaptureTarget(rank, 100 + rank % 2) for rank in range(6))
    assert asked.hosts == (("node0", (0, 1)), ("node1", (2, 3)), ("node2", (4, 5)))
    lines = picture(asked, found.evidence.capture)
    assert lines[0] == "run latest, 3 hosts: ranks 0-5; 6 processes"
    assert any("ranks 2-3" in line and "evaluate" in line for line in lines)


def test_hosts_without_stacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have not answered, and those whose answer is empty or makes no sense."""
    found = stacks(monkeypatch, FIRST, answer(part(0, 0, 1), [1, 0, "node1", ""], [2, 0, "node2", "{" * 99]))
    assert found.evidence is not None
    assert found.remarks == ("no stacks from node1 (ranks 2-3)", "no stacks from node2 (ranks 4-5)")
    assert found.silent == ("node1", "node2")


def test_hosts_with_more_ranks_than_there_are_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number by itself may be one."""
    peers = [[host, f"node{host}", 0, 1 << 20] for host in range(100)]
    found = stacks(monkeypatch, FIRST, answer(part(0, 0, 1), peers=peers))
    assert found.evidence is None
    assert found.remarks == ("the ranks of this host alone: use the saferunctl of that saferun for all",)


def test_a_host_speaks_for_its_own_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stacks(monkeypatch, FIRST, answer(part(0, 0, 1), part(1, 0, 3, function="forged")))
    assert found.evidence is not None
    of_rank_0 = [dump for dump in found.evidence.capture.stacks if dump.rank == 0]
    assert [dump.threads[0].frames[0].function for dump in of_rank_0] == ["train"]


@pytest.mark.parametrize(
    ("answers", "remark"),
    [
        ([], ""),
        ([{**FIRST, "spans_hosts": False}], ""),
        ([UsageError("the request is not known", "")], "the request is not known"),
        ([{"ok": True}], "use the saferunctl of that saferun"),
        ([FIRST, UsageError("it does not answer", "")], "it does not answer"),
        ([FIRST, answer(parts="all")], "use the saferunctl of that saferun"),
        ([FIRST, answer(parts=[["x"]])], "use the saferunctl of that saferun"),
        ([FIRST, answer([0, 0, "node0", ""])], "no host has handed in its stacks"),
    ],
)
def test_without_them_the_stacks_are_taken_here(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], remark: str
) -> None:
    """And why is said, unless the job has one host, or has ended."""
    found = stacks(monkeypatch, *answers)
    assert found.evidence is None
    assert [remark in line for line in found.remarks] == ([True] if remark else [])
