"""With what stacks can be read: which tools there are, and whether ptrace is permitted."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from saferun.preflight.checks.all_checks import CHECKS, WITHOUT_A_LAUNCH
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.stack_tools import check_ptrace, check_tools

if TYPE_CHECKING:
    from pathlib import Path


def test_a_launch_does_not_ask_for_tools() -> None:
    assert {check.name for check in WITHOUT_A_LAUNCH} - {check.name for check in CHECKS} == {"ptrace", "tools"}


def test_tools_are_found_beside_the_interpreter_and_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    for folder, tool in (("venv", "py-spy"), ("bin", "gdb")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / tool).touch(0o755)
    result = check_tools(CheckContext(environ={"PATH": f"/nowhere:{tmp_path}/bin"}))
    assert (result.verdict, result.message, result.hint) == ("ok", "py-spy, no pystack, gdb", "")
    assert dict(result.facts)["gdb"] == str(tmp_path / "bin" / "gdb")
    os.chmod(tmp_path / "bin" / "gdb", 0o644)
    result = check_tools(CheckContext(environ={"PATH": f"{tmp_path}/bin"}))
    assert result.message == "py-spy, no pystack, no gdb"
    assert result.hint == "to read cores and native stacks, install pystack or gdb"


@pytest.mark.parametrize(
    ("scope", "capabilities", "message"),
    [
        ("", "0000000000000000", "permitted, of processes of the same user"),
        ("0", "0000000000000000", "permitted, of processes of the same user"),
        ("1", "0000000000000000", "permitted of child processes, and of ranks with saferun's hook"),
        ("2", "0000000000000000", "permitted with CAP_SYS_PTRACE only"),
        ("3", "ffffffffffffffff", "permitted of no process"),
        ("1", "0000000000080000", "permitted, of all processes (CAP_SYS_PTRACE)"),
        ("", "no number", "permitted, of processes of the same user"),
    ],
)
def test_it_is_said_whose_stacks_can_be_read(tmp_path: Path, scope: str, capabilities: str, message: str) -> None:
    yama = tmp_path / "proc" / "sys" / "kernel" / "yama"
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\nSeccomp:\t0\n")
    if scope:
        yama.mkdir(parents=True)
        (yama / "ptrace_scope").write_text(f"{scope}\n")
    result = check_ptrace(CheckContext(root=f"{tmp_path}/"))
    assert result.verdict == "ok"
    assert result.message.startswith(message)
