"""Modules of the user's that have the names of Python's own are the ranks' matter, as under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

# Of those that saferun imports, the ones that `import torch.distributed.run` does not.
NAMES = ("resource", "termios", "shlex", "html", "hmac", "pdb", "webbrowser")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    (tmp_path / "train.py").write_text("import resource, shlex\nprint('mine:', resource.MINE and shlex.MINE)\n")
    return tmp_path


@pytest.mark.parametrize("where", ["PYTHONPATH", "the current directory"])
def test_a_file_called_like_a_module_of_pythons_breaks_no_launch(folder: Path, where: str) -> None:
    """``resource.py`` is a plausible name, and torchrun imports none of that name."""
    paths = [str(folder), str(REPOSITORY)] if where == "PYTHONPATH" else [str(REPOSITORY)]
    done = subprocess.run(
        [sys.executable, "-m", "saferun", "--nproc-per-node", "2", "--prefix", "none", str(folder / "train.py")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "mine: True\n" * 2), done.stderr
    assert done.stderr == ""


def test_a_file_called_like_a_module_of_pythons_breaks_no_question_about_a_run(folder: Path) -> None:
    """A run is asked about in the directory in which it was started."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}

    def answer(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stderr

    assert answer("saferun", "--nproc-per-node", "1", "train.py") == (0, "")
    for words in (["list"], ["list", "--here"], ["logs"], ["status"], ["clean", "--keep", "1"], ["shim", "there"]):
        assert answer("saferun.ctl", *words) == (0, ""), words
