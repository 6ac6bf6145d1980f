"""What each rank runs: a script, a module or a program."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping

from saferun.config import Command
from saferun.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

NO_SCRIPT = "\0"
"""Stands for the script where nothing is to be started; no command line can hold it."""


def rank_command(values: SimpleNamespace, environ: Mapping[str, str]) -> Command:
    """The command of a rank.

    Raises:
        UsageError: there is no such script, or no such program.
    """
    script, rest = values.training_script, values.training_script_args
    if script == NO_SCRIPT:
        return Command((), run_path=False, name="")
    if values.run_path:
        check_script(script)
        return Command((script, *rest), run_path=True, name=script)
    if values.no_python:
        if values.module:
            raise UsageError("--no-python and --module contradict each other", "leave one of them out")
        _check_program(script, _search_path(values, environ))
        return Command((script, *rest), run_path=False, name=script, is_python=False)
    python = environ.get("PYTHON_EXEC", sys.executable)
    if "PYTHON_EXEC" in environ:
        _check_program(python, _search_path(values, environ))
    is_python = python == sys.executable
    if values.module:
        return Command((python, "-u", "-m", script, *rest), run_path=False, name=script, is_python=is_python)
    if is_python:  # another program may go elsewhere before it reads the script: into a container
        check_script(script)
    return Command((python, "-u", script, *rest), run_path=False, name=script, is_python=is_python)


def check_script(script: str) -> None:
    """Refuse a script that does not exist or cannot be read.

    Raises:
        UsageError: it is so.
    """
    if "$" in script or script.startswith("-"):
        return  # a name that differs by rank; the program comes from standard input, or is an option of the interpreter
    # Not by opening it: what is in a named pipe is meant for the rank.
    try:
        mode = os.stat(script).st_mode
    except FileNotFoundError:
        raise UsageError(
            f"there is no script {script}", "check the path; use -m for a module, --no-python for a program"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the script {script} cannot be read: {reason}", "check the path") from None
    if os.path.isdir(script) and not any(
        os.path.exists(os.path.join(script, name)) for name in ("__main__.py", "__main__.pyc")
    ):
        raise UsageError(f"{script} is a directory without a __main__.py", "name the script in it")
    if not os.access(script, os.R_OK) and not (stat.S_ISREG(mode) and _can_be_opened(script)):
        raise UsageError(f"the script {script} cannot be read: permission denied", "check its permissions")


def _can_be_opened(path: str) -> bool:
    """Whether a regular file can, whatever access(2) says: file servers with ACLs may be stricter there."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _search_path(values: SimpleNamespace, environ: Mapping[str, str]) -> str | None:
    """The PATH of the ranks; None: it is not known here, or differs by rank."""
    own = path = environ.get("PATH", os.defpath)
    for text in values.env:
        name, equals, value = text.partition("=")
        if name == "PATH":
            path = value if equals else own
    return None if "PATH" in values.unset or (path is not own and "{" in path) else path


def _check_program(program: str, path: str | None) -> None:
    """Look for it as the kernel would, in the directories of a PATH.

    Raises:
        UsageError: there is none.
    """
    if "/" in program:
        found = _is_program(program)
    else:
        paths = path.split(os.pathsep) if path is not None else []
        found = path is None or any(_is_program(os.path.join(one or ".", program)) for one in paths)
    if not found:
        raise UsageError(f"{program} is not a program that can be executed", "check the path, PATH and chmod +x")


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
