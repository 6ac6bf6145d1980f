"""The command lines of ranks. Those of ``--run-path`` run their script in the interpreter that runs saferun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from saferun.config import Command
from saferun.errors import suppress
from saferun.supervisor.topology import substitute_local_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.wrapping import Wrapper

_PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "coordinator", "run_path.py")
# -E, -I and -S are not among them: without the environment and `site` the start-up hook would not run.
_FLAGS = {
    "debug": "d",
    "dont_write_bytecode": "B",
    "optimize": "O",
    "verbose": "v",
    "bytes_warning": "b",
    "quiet": "q",
    "no_user_site": "s",
    "safe_path": "P",
}
_MORE_OPTIONS = ("dev", "faulthandler", "tracemalloc", "importtime", "frozen_modules", "showrefcount", "utf8", "gil")

_started_as = ""
with suppress(OSError):  # the working directory was removed
    _started_as = os.path.realpath(sys.argv[0])  # now: later its file system may not answer


def rank_argv(command: Command, local_rank: int, wrappers: Sequence[Wrapper] = ()) -> list[str]:
    """The command line of a rank.

    Args:
        command: what the ranks run.
        local_rank: its number on the host.
        wrappers: the tools that it runs under, the outermost first.
    """
    if command.run_path:
        argv = run_path_command(substitute_local_rank(command.argv, local_rank))
    else:
        argv = [command.argv[0], *substitute_local_rank(command.argv[1:], local_rank)]
    for wrapper in reversed(wrappers):
        argv = wrapper.around(argv)
    return argv


def run_path_command(argv: Sequence[str]) -> list[str]:
    """The command line of a rank of ``--run-path``.

    Args:
        argv: the script and its arguments.
    """
    # torchrun's ranks search where torchrun was found: the directory of a command, else the working directory.
    own = "" if os.path.basename(_started_as) == "__main__.py" else os.path.dirname(_started_as)
    return [sys.executable, *_options_of_interpreter(), _PROGRAM, own, *argv]


def _options_of_interpreter() -> list[str]:
    """The options of this interpreter that torchrun's ranks of this kind, which are multiprocessing's children, get.

    Source: ``subprocess._args_from_interpreter_flags``, whose import would take the time of many starts.
    """
    flags = sys.flags
    options = [f"-{letter * count}" for name, letter in _FLAGS.items() if (count := int(getattr(flags, name, 0))) > 0]
    warnings = list(sys.warnoptions)
    implied = ["error::BytesWarning"] if flags.bytes_warning > 1 else ["default::BytesWarning"]
    for one in (*(implied if flags.bytes_warning else ()), *(["default"] if flags.dev_mode else ())):
        if one in warnings:
            warnings.remove(one)
    options += [f"-W{one}" for one in warnings]
    given = sys._xoptions  # noqa: SLF001 - documented in sys
    # Python 3.14 passes all of them on.
    for name in sorted(given) if sys.version_info >= (3, 14) else [one for one in _MORE_OPTIONS if one in given]:
        # In one word: whatever runs within the interpreter is inserted behind its options.
        options.append(f"-X{name}" if given[name] is True else f"-X{name}={given[name]}")
    return options
