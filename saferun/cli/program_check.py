"""Whether a program that is to be run instead of Python can be."""

from __future__ import annotations

import os
from collections.abc import Mapping

from saferun.errors import UsageError


def check_program(program: str, environ: Mapping[str, str]) -> None:
    """Look for it as the kernel would.

    Raises:
        UsageError: there is none.
    """
    if "/" in program:
        found = _is_program(program)
    else:
        paths = environ.get("PATH", os.defpath).split(os.pathsep)
        found = any(_is_program(os.path.join(path or ".", program)) for path in paths)
    if not found:
        raise UsageError(f"{program} is not a program that can be executed", "check the path, PATH and chmod +x")


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
