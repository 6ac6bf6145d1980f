"""A copy of the ranks' start-up hook in memory, for restarts while the file system of saferun's own files hangs."""

from __future__ import annotations

import os

from saferun.errors import suppress
from saferun.linux.ownership import remove_tree

_NAME = "hook"
_FILE = "sitecustomize.py"
_OTHERS = (
    "saferun_hook.py",
    "saferun_failure.py",
    "saferun_written.py",
    "saferun_calls.py",
    "saferun_rings.py",
    "saferun_pdb.py",
)
"""What it loads, the last three where they are asked for."""


def copy_hook(source: str, directory: str) -> None:
    """Copy the hook and its compiled files, atomically.

    Args:
        source: the directory with the hook.
        directory: a private directory in memory.

    Raises:
        OSError: it cannot be read, or there is no space.
    """
    making = os.path.join(directory, f".{_NAME}-{os.getpid()}")
    os.mkdir(making, 0o700)
    try:
        _copy(os.path.join(source, _FILE), os.path.join(making, _FILE))
        for name in _OTHERS:
            with suppress(OSError):  # the ranks do without it
                _copy(os.path.join(source, name), os.path.join(making, name))
        with suppress(OSError):  # Python compiles it again
            compiled = os.path.join(source, "__pycache__")
            os.mkdir(os.path.join(making, "__pycache__"), 0o700)
            for name in os.listdir(compiled):
                if name.startswith(("sitecustomize.", "saferun_")) and name.endswith(".pyc"):
                    _copy(os.path.join(compiled, name), os.path.join(making, "__pycache__", name))
        with suppress(OSError):  # a copy exists
            os.rename(making, os.path.join(directory, _NAME))
    finally:
        remove_tree(making)


def copied_hook(directory: str) -> str:
    """The path of the copy; empty if there is none. The directory must be in memory."""
    copy = os.path.join(directory, _NAME)
    return copy if os.path.exists(os.path.join(copy, _FILE)) else ""


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as file:
        content, status = file.read(), os.fstat(file.fileno())
    with open(target, "xb") as file:
        file.write(content)
    # A compiled file names its source's modification time.
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
