"""Every built-in env profile launches the training example unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saferun.env.profiles.builtin import PROFILES
from tests.breadth import slow_but

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--sequences", "256", "--epochs", "1", "--steps", "4")


# What the others set is compared with torch's own code in test_profiles_against_torch.py.
@pytest.mark.slow
@pytest.mark.parametrize("profile", slow_but(sorted(PROFILES), "production"))
def test_the_example_runs_with_every_profile(profile: str, tmp_path: Path) -> None:
    """A profile that ends a healthy job would be worse than none."""
    command = [sys.executable, "-m", "saferun", "--nproc-per-node", "2", "--env-profile", profile]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_ddp.py"), *SMALL],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
