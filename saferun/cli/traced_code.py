"""Whose calls ``--trace-calls`` records: packages, modules and directories. Imported where that is asked for."""

from __future__ import annotations

import os

from saferun.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from saferun.config import Command

_SCRIPT = "script"


def traced_code(values: SimpleNamespace, command: Command) -> tuple[str, ...]:
    """Absolute paths of directories, and names of packages and modules.

    ``script`` stands for the modules beside the script: its directory, or the package of a module that is run with
    ``-m``. Of a program that is no Python script it is the current directory.

    Args:
        values: of the options.
        command: what the ranks run.

    Raises:
        UsageError: it is no list of packages, or the hook is not wanted, without which nothing can be recorded.
    """
    if values.no_inject:
        raise UsageError(
            "--trace-calls records calls in saferun's start-up hook, and --no-inject leaves the hook out",
            "leave one of them out",
        )
    text = values.trace_calls.strip()
    items = [item.strip() for item in (text if text not in {"", "off"} else _SCRIPT).split(",")]
    return tuple(dict.fromkeys(_resolved(item, values, command) for item in items))


def _resolved(item: str, values: SimpleNamespace, command: Command) -> str:
    if item == _SCRIPT:
        if values.module:
            return command.name.partition(".")[0]
        return os.getcwd() if values.no_python else os.path.dirname(os.path.abspath(command.name))
    if "/" in item or item in {".", ".."}:
        return os.path.abspath(item)
    name = item.removesuffix(".py")
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"--trace-calls: {item!r} is no package, module or directory",
            "write it as mypkg,train or ./src; script stands for the modules beside the script",
        )
    return name
