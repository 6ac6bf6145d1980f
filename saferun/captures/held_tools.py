"""Tools that are kept in memory, so that they run while file systems hang."""

from __future__ import annotations

import os

from saferun.captures.tools import find_tool, has_module, remember_tool
from saferun.linux.memory_file import memory_file
from saferun.linux.small_files import own_directory
from saferun.model import Value

_HELD = ("py-spy",)
"""Statically linked: starting it reads nothing but the file itself."""
_FOUND = ("gdb", "strace", "nvidia-smi", "rocm-smi", "amd-smi")
"""Usually on the system's disk; their paths are looked up early."""
_LARGEST_BYTES = 64 << 20


class HeldTool(Value):
    """A program: ``path`` is what is executed, ``fd`` the memory file (-1: it is run from disk)."""

    name: str
    path: str
    fd: int = -1


_tools: dict[str, HeldTool] = {}


def hold_tools() -> list[str]:
    """Read the tools into memory, if possible, and find the others. Returns the names of those found."""
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
        KeyError: it was not found.
    """
    return _tools[name]


def held_fds() -> list[int]:
    """The descriptors of the memory files."""
    return [tool.fd for tool in _tools.values() if tool.fd >= 0]


def _held(name: str, path: str) -> HeldTool | None:
    """A copy in memory; None if there can be none, or it could not be executed."""
    fd = -1
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
                return None
            fd = memory_file(name, file.read(), executable=True)
        # By this process's pid: the process that executes it has closed its descriptors by then.
        held = f"{own_directory()}/fd/{fd}"
        if os.access(held, os.X_OK):
            return HeldTool(name, held, fd)
    except OSError:
        pass
    if fd >= 0:
        os.close(fd)
    return None
