"""Hosts that are found bad: in the report, and in the list of --exclude-file; whatever becomes of that file."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.process.frozen import mirror, needs_mounts
from tests.process.launching import running

HOST = socket.gethostname().partition(".")[0]
# What torch says of a GPU whose memory is broken.
BROKEN_GPU = """
raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
OWN_MISTAKE = """
raise RuntimeError("the loss is not a number")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_a_host_whose_gpu_has_failed_is_reported_and_added_to_the_list(folder: Path) -> None:
    with running(folder, BROKEN_GPU, "--exclude-file", "bad-hosts", "--max-restarts", "1", store=False) as job:
        assert job.wait() == 1
        assert (folder / "job" / "bad-hosts").read_text() == f"{HOST}\n"
        assert job.err.count(f"{HOST} is added to bad-hosts (--exclude-file)") == 1
        report = json.loads((job.run_dir / "report.json").read_text())
        (row,) = report["bad_hosts"]
        assert (row["host"], row["kind"], row["found_by"], row["attempt"]) == (HOST, "gpu", "failure", 0)


@pytest.mark.slow
def test_a_mistake_of_the_script_blames_no_host(folder: Path) -> None:
    with running(folder, OWN_MISTAKE, "--exclude-file", "bad-hosts", store=False) as job:
        assert job.wait() == 1
        assert not (folder / "job" / "bad-hosts").exists()
        assert json.loads((job.run_dir / "report.json").read_text())["bad_hosts"] == []


@needs_mounts
@pytest.mark.slow
def test_a_list_on_a_file_system_that_hangs_costs_one_line_and_no_file_of_the_run(tmp_path: Path, folder: Path) -> None:
    """It is another file system than that of the run directory, whose report is written as ever."""
    (tmp_path / "site").mkdir()
    (tmp_path / "mirrored").mkdir()
    folder.mkdir()
    with mirror(tmp_path / "mirrored", tmp_path / "site") as system:
        system.freeze()
        path = system.path / "bad-hosts"
        with running(folder, BROKEN_GPU, "--exclude-file", str(path), before=system.before()) as job:
            assert job.wait() == 1
            assert (
                job.err.count(f"--exclude-file {path}: the file system does not answer; {HOST} may not be in it") == 1
            )
            assert "are not written yet" not in job.err
            assert json.loads((job.run_dir / "report.json").read_text())["bad_hosts"][0]["host"] == HOST
            system.thaw()  # nothing else ends who asks it


@pytest.mark.slow
def test_a_list_that_cannot_be_written_costs_one_line(folder: Path) -> None:
    with running(folder, BROKEN_GPU, "--exclude-file", "/proc/no/such", "--max-restarts", "1", store=False) as job:
        assert job.wait() == 1
        assert job.err.count("--exclude-file /proc/no/such: ") == 1
        assert "uncorrectable ECC error" in job.err
