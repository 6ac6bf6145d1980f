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
