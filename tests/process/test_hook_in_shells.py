"""A shell script that looks at PYTHONPATH sees what the user has set, which may be nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT = 'export PYTHONPATH="${PYTHONPATH:-$PWD/src}"\n'
RUN = f"exec {sys.executable} train.py\n"
TRAIN = "import faulthandler, mine\nprint('hook' if faulthandler.is_enabled() else 'no hook')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/mine.py").touch()
    (tmp_path / "train.py").write_text(TRAIN)
    for name, text in (("train.sh", f"#!/bin/bash\n{DEFAULT}{RUN}"), ("plain.sh", f"#!/bin/bash\ncd src\n{RUN}")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "plain.sh").write_text(f"#!/bin/bash\ncp src/mine.py .\n{RUN}")
    script = tmp_path / "train"
    script.write_text(f"#!{sys.executable}\n# PYTHONPATH=src\nimport sys; sys.path.append('src')\n{TRAIN}")
    script.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "environ", "printed"),
    [
        (("./train.sh",), {}, "no hook"),
        (("bash", "train.sh"), {}, "no hook"),
        (("bash", "-e", "train.sh"), {}, "no hook"),
        (("sh", "-ec", f"{DEFAULT}{RUN}"), {}, "no hook"),
        (("./train.sh",), {"PYTHONPATH": "src"}, "hook"),
        (("./plain.sh",), {}, "hook"),
        (("./train",), {}, "hook"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_shell_script_gets_the_python_path_that_the_user_has_set(
    folder: Path, command: tuple[str, ...], environ: dict[str, str], printed: str
) -> None:
    """``${PYTHONPATH:-src}`` had lost its default, and the ranks what they import."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    launcher = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import saferun.__main__ as m; m.main()",
    ]
    done = subprocess.run(
        [*launcher, "--run-dir", "none", "--prefix", "none", "--no-python", *command],
        cwd=folder,
        env={**plain, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{printed}\n"), done.stderr
