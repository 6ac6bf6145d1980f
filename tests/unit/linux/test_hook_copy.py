"""The start-up hook's copy in memory."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from saferun.launch.rank_hook import INJECT
from saferun.linux.hook_copy import copied_hook, copy_hook

if TYPE_CHECKING:
    from pathlib import Path


def test_the_copy_is_there_as_a_whole_and_once(tmp_path: Path) -> None:
    """Whoever takes the place of a process that was lost copies it again."""
    assert copied_hook(str(tmp_path)) == ""
    for _ in range(2):
        copy_hook(INJECT, str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["hook"]
    copy = tmp_path / "hook" / "sitecustomize.py"
    with open(f"{INJECT}/sitecustomize.py", "rb") as file:
        assert copy.read_bytes() == file.read()
    assert copied_hook(str(tmp_path)) == str(tmp_path / "hook")


def test_what_python_has_compiled_is_taken_from_the_copy(tmp_path: Path) -> None:
    """Compiling takes each rank longer than all else that the hook does."""
    source, memory = tmp_path / "source", tmp_path / "memory"
    for directory in (source, memory):
        directory.mkdir()
    (source / "sitecustomize.py").write_text("word = 1\n")
    environ = {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-c", ""], env=environ, check=True)
    copy_hook(str(source), str(memory))
    command = [sys.executable, "-v", "-B", "-c", ""]
    done = subprocess.run(command, env={"PYTHONPATH": copied_hook(str(memory))}, capture_output=True, check=True)
    compiled = next((memory / "hook" / "__pycache__").iterdir())
    assert f"{compiled} matches {memory}/hook/sitecustomize.py" in done.stderr.decode()


def test_a_hook_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    """The ranks of a restart read it where it is."""
    with pytest.raises(FileNotFoundError):
        copy_hook(str(tmp_path / "nowhere"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
