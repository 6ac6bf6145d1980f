"""Errors that RDMA ports have counted during the job: sysfs is a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from saferun.captures import rdma_errors
from saferun.captures.rdma_errors import capture_rdma_errors, error_lines, is_remembered, read_errors, remember_errors

# A ConnectX-7 that has run for weeks.
OLD = {"symbol_error": 3, "link_downed": 2, "port_rcv_errors": 0}
OLD_HARDWARE = {"local_ack_timeout_err": 118, "packet_seq_err": 40, "rnr_nak_retry_err": 0}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    rdma_errors._START.clear()
    yield
    rdma_errors._START.clear()


def count(root: Path, counters: Mapping[str, int], device: str = "mlx5_0") -> None:
    folder = root / "sys/class/infiniband" / device / "ports/1"
    for name, value in counters.items():
        path = folder / ("counters" if name in OLD else "hw_counters") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def remembered(root: Path) -> None:
    remember_errors(str(root))
    os.waitpid(-1, 0)


def test_a_host_without_ports_has_no_capture(tmp_path: Path) -> None:
    remember_errors(str(tmp_path))
    assert not is_remembered()


def test_what_was_counted_before_the_job_is_not_shown(tmp_path: Path) -> None:
    count(tmp_path, {**OLD, **OLD_HARDWARE})
    remembered(tmp_path)
    found = capture_rdma_errors(str(tmp_path))
    assert (found.lines, found.failure) == ((), "")
    assert found.content["now"] == {"mlx5_0:1": {**OLD, **OLD_HARDWARE}}


def test_what_was_counted_during_the_job_is_shown(tmp_path: Path) -> None:
    count(tmp_path, {**OLD, **OLD_HARDWARE})
    count(tmp_path, {**OLD, **OLD_HARDWARE}, "mlx5_1")
    remembered(tmp_path)
    count(tmp_path, {"link_downed": 3, "local_ack_timeout_err": 130})
    found = capture_rdma_errors(str(tmp_path))
    (line,) = found.lines
    assert line.startswith("mlx5_0:1: 1 link_downed, 12 local_ack_timeout_err in the last ")


def test_counters_that_were_reset_count_from_zero() -> None:
    before, now = (
        {"mlx5_0:1": {"symbol_error": 65535}},
        {"mlx5_0:1": {"symbol_error": 4}, "mlx5_9:1": {"link_downed": 7}},
    )
    assert error_lines(before, now, 312) == ("mlx5_0:1: 4 symbol_error in the last 312 s",)


def test_many_ports_are_few_lines() -> None:
    before = {f"mlx5_{number:02}:1": {"link_downed": 0} for number in range(40)}
    now = {port: {"link_downed": 1} for port in before}
    lines = error_lines(before, now, 1)
    assert len(lines) == 17
    assert lines[-1] == "… 24 more ports"


def test_a_driver_that_does_not_answer_at_the_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count(tmp_path, OLD)
    monkeypatch.setattr(rdma_errors, "read_errors", lambda _root: os._exit(0))
    remembered(tmp_path)
    assert capture_rdma_errors(str(tmp_path)).failure == "the counters at the start of the job are not known"


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    count(tmp_path, OLD)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error").write_text("N/A (no PMA)\n")
    assert "symbol_error" not in read_errors(str(tmp_path))["mlx5_0:1"]
