"""Tools that are held in memory, so that they can be run while no file system answers."""

from __future__ import annotations

import os

from saferun.captures.tools import find_tool, has_module, remember_tool
from saferun.linux.memory_file import memory_file
from saferun.model import Value

_HELD = ("py-spy",)
"""It is linked statically: nothing but the file itself is read to start it."""
_FOUND = ("gdb", "strace", "nvidia-smi", "rocm-smi", "amd-smi")
"""These lie where the system does, as a rule; where they are is found out early."""
_LARGEST_BYTES = 64 << 20


class HeldTool(Value):
    """A program: ``path`` is what is executed, ``fd`` the file in memory (-1: it is run from where it lies)."""

    name: str
    path: str
    fd: int = -1


_tools: dict[str, HeldTool] = {}


def hold_tools() -> list[str]:
    """Read the tools into memory, where that can be done, and look for the others. Returns the names of those found."""
    for name in _HELD:
        path = find_tool(name)
        if path:
            tool = _held(name, path) or HeldTool(name, path)
            _tools[name] = tool
            remember_tool(name, tool.path)
        else:
            remember_tool(name, "")
    remember_tool("pystack", "pystack" if has_module("pystack") else "")
    found = list(_tools)
    for name in _FOUND:
        path = find_tool(name)
        remember_tool(name, path)
        if path:
            found.append(name)
    return found


def held_tool(name: str) -> HeldTool:
    """A tool that ``hold_tools`` has found.

    Raises:
        KeyError: it has not.
    """
    return _tools[name]


def held_fds() -> list[int]:
    """The files in memory."""
    return [tool.fd for tool in _tools.values() if tool.fd >= 0]


def _held(name: str, path: str) -> HeldTool | None:
    """A copy in memory; None where there can be none, or where it could not be executed."""
    fd = -1
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
                return None
            fd = memory_file(name, file.read(), executable=True)
        # By this process's own number: whoever executes it has closed its descriptors by then.
        held = f"/proc/{os.getpid()}/fd/{fd}"
        if os.access(held, os.X_OK):
            return HeldTool(name, held, fd)
    except OSError:
        pass
    if fd >= 0:
        os.close(fd)
    return None
