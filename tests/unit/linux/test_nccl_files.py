"""NCCL's own files of variables."""

from __future__ import annotations

import os
from pathlib import Path

from saferun.linux.nccl_files import variables_in_nccl_files


def test_the_users_file_wins_over_the_systems(tmp_path: Path) -> None:
    system = tmp_path / "nccl.conf"
    system.write_text("# for all\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eth0\nno value\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG = INFO\n")
    assert variables_in_nccl_files({"HOME": str(tmp_path)}, str(system)) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }
    named = tmp_path / "named"
    named.write_bytes(b"NCCL_DEBUG=TRACE\n\xff\0=\n")
    found = variables_in_nccl_files({"HOME": str(tmp_path), "NCCL_CONF_FILE": str(named)}, str(system))
    assert found["NCCL_DEBUG"] == "TRACE"


def test_files_that_cannot_be_read_set_nothing(tmp_path: Path) -> None:
    """A pipe without a writer would block whoever opens it."""
    os.mkfifo(tmp_path / ".nccl.conf")
    (tmp_path / "nccl.conf").mkdir()
    assert variables_in_nccl_files({"HOME": str(tmp_path)}, str(tmp_path / "nccl.conf")) == {}
    assert variables_in_nccl_files({}, str(tmp_path / "nothing")) == {}
