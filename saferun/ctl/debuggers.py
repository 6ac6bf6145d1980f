"""The debugger for a rank: Python's own where its interpreter lets one in, else gdb."""

from __future__ import annotations

import os
import re
import shlex

from saferun.captures.gdb import find_gdb
from saferun.captures.tools import find_tool
from saferun.errors import UsageError, suppress
from saferun.linux.small_files import read_bytes, read_link
from saferun.model import Value

_PYTHON = re.compile(r"python(3(\.\d+)?)?[a-z]?")
_ASKED_S = 10.0
_LONGEST_ENVIRON = 1 << 20
# Source: Python's documentation, sys.remote_exec (3.14) and sys.is_remote_debug_enabled.
_CHECK = "import sys; sys.exit(not (hasattr(sys, 'remote_exec') and sys.is_remote_debug_enabled()))"
_DISABLED = b"PYTHON_DISABLE_REMOTE_DEBUG="
_QUIETLY = ("set pagination off", "set debuginfod enabled off")
# ``quit`` asks nothing, as it only lets the rank go on; ``kill`` asks. A gdb older than 8.2, which takes no text of
# several lines from Python, asks at ``quit``, too. Source: gdb's manual, "User-defined Command Hooks"; its NEWS, 8.2.
_QUIT_AT_ONCE = (
    r"""python exec("try: gdb.execute('define hook-quit\\nset confirm off\\nend')\nexcept gdb.error: pass")"""
)


class Debugger(Value):
    """A debugger. ``remark``: what the user has to know of it."""

    name: str
    command: tuple[str, ...]
    remark: str


def find_debugger(wanted: str, pid: int, shown: str) -> Debugger:
    """The debugger for a process.

    Args:
        wanted: ``gdb`` or ``pdb``; empty: pdb where it can be, else gdb.
        pid: the process.
        shown: the run, for people.

    Raises:
        UsageError: there is none.
    """
    python = _python_of(pid) if wanted != "gdb" else ""
    if python:
        remark = (
            "stops in pdb as soon as it runs Python code; while it is in C code (a collective) pdb waits: "
            "end that with Ctrl-C, and use --with gdb; q lets it go on"
        )
        return Debugger("pdb", (python, "-I", "-m", "pdb", "-p", str(pid)), remark)
    if wanted == "pdb":
        what = "pdb cannot be attached: that takes Python 3.14 or newer in the rank, and remote debugging on there"
        raise UsageError(what, "use --with gdb")
    gdb = find_gdb()
    if not gdb:
        raise UsageError("gdb is not installed here", f"install it; saferunctl stacks {shown} needs none")
    calls = "py-spy shows its Python calls, bt the native ones" if find_tool("py-spy") else "bt shows its calls"
    return Debugger("gdb", _gdb_command(gdb, pid), f"stops in gdb: {calls}; quit lets it go on")


def _python_of(pid: int) -> str:
    """The interpreter of a process, if Python's debugger can be attached to it; else empty."""
    path = read_link(f"/proc/{pid}/exe")
    if not _PYTHON.fullmatch(os.path.basename(path)) or not os.access(path, os.X_OK):
        return ""
    for entry in read_bytes(f"/proc/{pid}/environ", _LONGEST_ENVIRON).split(b"\0"):
        if entry.startswith(_DISABLED) and entry != _DISABLED:
            return ""
    import subprocess  # slow, and not needed for --help

    with suppress(OSError, subprocess.SubprocessError):
        # Both ends have to be of the same release: it is asked itself.
        asked = subprocess.run(
            [path, "-I", "-S", "-c", _CHECK], stdin=subprocess.DEVNULL, timeout=_ASKED_S, check=False
        )
        return path if asked.returncode == 0 else ""
    return ""


def _gdb_command(gdb: str, pid: int) -> tuple[str, ...]:
    """The settings of the user's own .gdbinit hold."""
    before = [word for setting in (*_QUIETLY, _QUIT_AT_ONCE) for word in ("-iex", setting)]
    py_spy = find_tool("py-spy")
    if py_spy:
        # It reads the memory of the stopped process, and needs no debugging symbols.
        dump = shlex.join((py_spy, "dump", "--nonblocking", "--pid", str(pid)))
        before += ["-iex", f"alias -- py-spy = shell {dump}"]
    return (gdb, "-q", *before, "-p", str(pid), "-ex", "set pagination on")
