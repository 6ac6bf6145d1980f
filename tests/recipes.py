"""The environment for the recipes: accelerate, Lightning, transformers and DeepSpeed beside our own torch.

    python -m tests.recipes              # build what is missing below .matrix/

It is kept until ``make clean``. What this machine cannot have is told in one line, and its test is skipped.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / ".matrix" / "recipes"
PYTHON = DIRECTORY / "bin" / "python"
_BUILD_S = 1800.0
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES: tuple[str, ...] = tuple(_PROJECT["optional-dependencies"]["recipes"])


def main() -> int:
    """Build it."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(DIRECTORY)], check=True, timeout=_BUILD_S)
        # Our own packages, torch among them, are there already.
        (folder,) = DIRECTORY.glob("lib/python*/site-packages")
        (folder / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n", encoding="utf-8")
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    # DeepSpeed's is a source package, which is built with what is there.
    for packages in (("setuptools>=77", "wheel", "ninja"), *((package,) for package in PACKAGES)):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=_BUILD_S, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip failed"]
            print(f"recipes: {' '.join(packages)}: {lines[-1]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
