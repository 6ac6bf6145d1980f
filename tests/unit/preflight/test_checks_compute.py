"""``--health full``: what the answers of those that have computed say of their host, and what they do not."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from saferun.preflight.bisect import Member, TrialResult
from saferun.preflight.checks import server
from saferun.preflight.checks.compute import judge
from tests.unit.preflight.host_roots import Root

if TYPE_CHECKING:
    from pathlib import Path

    from saferun.preflight.checks.context import Check


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


WELL, WHERE = "multiplied matrices right and ran all_reduce", "multiplying matrices"


def answers(*kinds: str) -> list[TrialResult]:
    """How members did: a number is how fast one was."""
    return [
        TrialResult(Member(0, number), "ok", kind)
        if kind[0].isdigit()
        else TrialResult(Member(0, number), kind.partition(" ")[0], kind.partition(" ")[2], WHERE)
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("found", "on_gpu", "message", "class_name"),
    [
        (answers("20000.5", "20100", "19000", "20000"), True, f"4 GPUs {WELL}", ""),
        (answers("5", "1"), False, f"2 ranks {WELL}", ""),
        (
            answers("20000", "9000", "19000", "20000"),
            True,
            "GPU 1 computes at 9000 GFLOP/s, and the others at 20000",
            "",
        ),
        (
            answers("timeout", "error a matrix product is wrong", "timeout"),
            True,
            "GPU 1 multiplying matrices: a matrix product is wrong",
            "gpu_hardware_error",
        ),
        (answers("error CUDA out of memory"), True, f"GPU 0 {WHERE}: CUDA out of memory", "gpu_busy"),
        (
            answers("error a matrix product is wrong"),
            False,
            f"rank 0 {WHERE}: a matrix product is wrong",
            "machine_fault",
        ),
        (answers("timeout"), True, f"GPU 0 {WHERE}: it did not come to an end", "gpu_hardware_error"),
        (answers("timeout"), False, f"rank 0 {WHERE}: it did not come to an end", ""),
        (answers("error ncclInvalidUsage"), True, f"GPU 0 {WHERE}: ncclInvalidUsage", ""),
        (answers("error killed by SIGKILL", "5"), False, f"rank 0 {WHERE}: killed by SIGKILL", ""),
        (
            answers("error CUDA error: uncorrectable ECC error encountered"),
            True,
            f"GPU 0 {WHERE}: CUDA error: uncorrectable ECC error encountered",
            "gpu_hardware_error",
        ),
    ],
)  # fmt: skip
def test_what_members_answer_is_judged(found: list[TrialResult], on_gpu: bool, message: str, class_name: str) -> None:
    result = judge(found, on_gpu=on_gpu)
    assert (result.message, result.class_name) == (message, class_name)


def test_a_computation_whose_process_was_killed_says_nothing_of_the_host() -> None:
    """When memory runs out, the kernel ends what is largest; and parts of GPUs differ in speed by design."""
    results = answers("error the trial process ended (killed by SIGKILL)", "error the trial process ended")
    assert judge(results, on_gpu=True).verdict == "skipped"
    parts = answers("20000", "2000", "20000", "20000")
    assert judge(parts, on_gpu=True).verdict == "warn"
    assert judge(parts, on_gpu=True, are_alike=False).verdict == "ok"


def test_what_computes_begins_when_the_other_checks_are_over(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take it for another program that uses the GPUs."""
    order: list[str] = []

    def run(checks: list[Check], *_: object) -> None:
        order.append(" ".join(check.name for check in checks))

    monkeypatch.setattr(server, "run_checks", run)
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(BrokenPipeError):
        server.serve(theirs, root.context(health="full"), is_probed=False)
    theirs.close()
    assert order[1:] == ["compute"]
    assert "gpus" in order[0].split()
    assert "compute" not in order[0].split()
