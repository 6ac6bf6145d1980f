"""NCCL's own files of variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saferun.linux import nccl_files
from saferun.linux.nccl_files import system_file, user_file, variables_in_nccl_files


def test_the_users_file_wins_over_the_systems(tmp_path: Path) -> None:
    system = tmp_path / "nccl.conf"
    system.write_text("# for all\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eth0\nno value\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG = INFO\n")
    paths = [user_file({"HOME": str(tmp_path)}, "nvidia"), str(system)]
    assert variables_in_nccl_files(paths) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }
    named = tmp_path / "named"
    named.write_bytes(b"NCCL_DEBUG=TRACE\n\xff\0=\n")
    paths[0] = user_file({"HOME": str(tmp_path), "NCCL_CONF_FILE": str(named)}, "nvidia")
    found = variables_in_nccl_files(paths)
    assert found["NCCL_DEBUG"] == "TRACE"


def test_files_that_cannot_be_read_set_nothing(tmp_path: Path) -> None:
    """A pipe without a writer would block whoever opens it."""
    os.mkfifo(tmp_path / ".nccl.conf")
    (tmp_path / "nccl.conf").mkdir()
    assert variables_in_nccl_files([str(tmp_path / ".nccl.conf"), str(tmp_path / "nccl.conf")]) == {}
    assert variables_in_nccl_files([user_file({}, ""), str(tmp_path / "nothing")]) == {}


def test_rccl_has_files_of_its_own() -> None:
    """It reads none of NCCL's; only the variable that names another file is the same."""
    home = {"HOME": "/home/me"}
    assert [user_file(home, vendor) for vendor in ("nvidia", "amd")] == ["/home/me/.nccl.conf", "/home/me/.rccl.conf"]
    assert [system_file(vendor) for vendor in ("nvidia", "amd")] == ["/etc/nccl.conf", "/etc/rccl.conf"]
    assert user_file({**home, "NCCL_CONF_FILE": "/my/file"}, "amd") == "/my/file"


def test_the_home_directory_is_that_of_the_password_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for NCCL and RCCL, which ask getpwuid(3): in a container, or under sudo, HOME is often another one."""
    passwd = tmp_path / "passwd"
    passwd.write_text(f"a:x:{os.getuid() + 1}:0::/other:/bin/sh\nb:x:{os.getuid()}:0:B:/of/b:/bin/sh\n")
    monkeypatch.setattr(nccl_files, "_USERS", str(passwd))
    assert user_file({"HOME": "/home/me"}, "nvidia") == "/of/b/.nccl.conf"
    assert user_file({}, "amd") == "/of/b/.rccl.conf"
    assert user_file({"NCCL_CONF_FILE": "/my/file"}, "nvidia") == "/my/file"


@pytest.mark.parametrize("content", ["", "+::::::\n", "a:x:none:0::/other:/bin/sh\n", "b:x:{uid}\n"])
def test_where_a_directory_service_has_the_user_home_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """To ask it takes as long as it wants."""
    passwd = tmp_path / "passwd"
    passwd.write_text(content.replace("{uid}", str(os.getuid())))
    monkeypatch.setattr(nccl_files, "_USERS", str(passwd))
    assert user_file({"HOME": "/home/me"}, "nvidia") == "/home/me/.nccl.conf"
