"""With what stacks and cores can be read here: for ``saferunctl doctor`` and ``--preflight only``. Never a warning."""

from __future__ import annotations

import os
import sys

from saferun.linux.small_files import read_line, read_pairs
from saferun.preflight.checks.answers import ok
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult

_TOOLS = ("py-spy", "pystack", "gdb")
_CAP_SYS_PTRACE = 19
_SCOPES = {
    "1": "of child processes, and of ranks with saferun's hook",
    "2": "with CAP_SYS_PTRACE only",
    "3": "of no process",
}
_FORBIDDEN = frozenset("23")


def check_tools(context: CheckContext) -> CheckResult:
    """Which of the tools are installed: beside saferun's interpreter, where pip puts them, or on PATH."""
    own = os.path.dirname(sys.executable)
    folders = [own, *(folder for folder in context.environ.get("PATH", "").split(":") if folder)]
    found = {tool: _path_of(tool, folders) for tool in _TOOLS}
    message = ", ".join(tool if path else f"no {tool}" for tool, path in found.items())
    missing = [tool for tool in ("pystack", "gdb") if not found[tool]]
    hint = f"to read cores and native stacks, install {' or '.join(missing)}" if len(missing) > 1 else ""
    return ok(message, [(tool, path or "missing") for tool, path in found.items()], hint=hint)


def check_ptrace(context: CheckContext) -> CheckResult:
    """Whether stacks can be read from outside of a process. If not, the hook in the ranks writes them.

    Source: Documentation/admin-guide/LSM/Yama.rst; capabilities(7).
    """
    scope = read_line(context.path("proc/sys/kernel/yama/ptrace_scope"))
    status = read_pairs(context.path("proc/self/status"))
    facts = [("ptrace_scope", scope or "none"), ("seccomp", status.get("Seccomp", ""))]
    if _is_capable(status) and scope != "3":
        return ok("permitted, of all processes (CAP_SYS_PTRACE)", facts)
    if scope in _SCOPES:
        hint = "as root: sysctl kernel.yama.ptrace_scope=1" if scope in _FORBIDDEN else ""
        return ok(f"permitted {_SCOPES[scope]} (kernel.yama.ptrace_scope={scope})", facts, hint=hint)
    return ok("permitted, of processes of the same user", facts)


def _is_capable(status: dict[str, str]) -> bool:
    try:
        return bool(int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1)
    except ValueError:
        return False


def _path_of(tool: str, folders: list[str]) -> str:
    paths = (os.path.join(folder, tool) for folder in folders)
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")
