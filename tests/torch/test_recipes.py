"""The recipes of docs/programs.md with the tools themselves: a training ends well, and a rank that fails is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.recipes import DIRECTORY, PYTHON, ROOT

RECIPES = {
    "accelerate": "train_accelerate.py",
    "lightning": "train_lightning.py",
    "transformers": "train_hf_trainer.py",
    "deepspeed": "train_deepspeed.py",
}


def is_there(package: str) -> bool:
    """Whether ``python -m tests.recipes`` has installed it."""
    return any(DIRECTORY.glob(f"lib/python*/site-packages/{package}/__init__.py"))


def run(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command with the recipes' Python first on the PATH, in a folder."""
    names = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "TORCH_EXTENSIONS_DIR"}}
    fixed = {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        command,
        cwd=folder,
        env={**names, **fixed, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # DeepSpeed compiles an extension first, which a busy machine needs minutes for
    )


@pytest.mark.slow
@pytest.mark.limit_s(900)
@pytest.mark.parametrize("package", RECIPES)
def test_a_tool_trains_under_saferun_and_its_failure_is_named(tmp_path: Path, package: str) -> None:
    if not is_there(package):
        pytest.skip(f"{package} is not installed: python -m tests.recipes")
    script = str(ROOT / "examples" / "recipes" / RECIPES[package])
    command = (str(PYTHON), "-m", "saferun", "--nproc-per-node", "2", "--preflight", "off", script)
    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained on rank 0 of 2") == done.stdout.count("trained on rank 1 of 2") == 1
    failed = run(tmp_path, *command, "1")
    assert failed.returncode == 1
    report = json.loads((tmp_path / "saferun-runs" / "latest" / "report.json").read_text())
    assert report["incidents"][-1]["first_failure"]["rank"] == 1
    assert "this rank was asked to fail" in failed.stderr


@pytest.mark.slow
def test_a_tool_that_calls_torchrun_gets_the_shim(tmp_path: Path) -> None:
    """Such as a script for a cluster."""
    if not is_there("accelerate"):
        pytest.skip("accelerate is not installed: python -m tests.recipes")
    assert run(tmp_path, str(PYTHON), "-m", "saferun.ctl", "shim", "bin").returncode == 0
    script = str(ROOT / "examples" / "recipes" / "train_accelerate.py")
    path = f"{tmp_path / 'bin'}:{PYTHON.parent}:{os.environ['PATH']}"
    done = run(tmp_path, "torchrun", "--nproc_per_node=2", script, PATH=path, SAFERUN_PREFLIGHT="off")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained on rank") == 2
    assert (tmp_path / "saferun-runs" / "latest").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("accelerate", ("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0")),
        ("lightning", ("fabric", "run", "--accelerator=cpu", "--devices=2")),
    ],
)
def test_a_tool_that_runs_torchs_launcher_in_its_own_process_becomes_saferun(
    tmp_path: Path, package: str, command: tuple[str, ...]
) -> None:
    """By the start-up hook of the shim; the tool's own settings for the ranks are kept, and so is its exit code."""
    if not is_there(package):
        pytest.skip(f"{package} is not installed: python -m tests.recipes")
    assert run(tmp_path, str(PYTHON), "-m", "saferun.ctl", "shim", "bin").returncode == 0
    script = str(ROOT / "examples" / "recipes" / RECIPES["accelerate"])
    environ = {"PYTHONPATH": str(tmp_path / "bin" / "python"), "SAFERUN_PREFLIGHT": "off"}
    tool = (str(PYTHON.parent / command[0]), *command[1:])
    done = run(tmp_path, *tool, script, **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained on rank 0 of 2") == done.stdout.count("trained on rank 1 of 2") == 1
    assert run(tmp_path, *tool, script, "1", **environ).returncode == 1
    report = json.loads((tmp_path / "saferun-runs" / "latest" / "report.json").read_text())
    assert report["incidents"][-1]["first_failure"]["rank"] == 1
