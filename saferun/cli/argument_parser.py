"""The parser of saferun's command line, made from the table of options. The only home of argparse.

It is made where it is needed: for ``--help``, for errors, and for command lines that are not plain (``command_line``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from saferun import __version__
from saferun.cli.help import help_text, show_help, terminal_width
from saferun.cli.option_values import may_be_script, no_number, value_and_script
from saferun.cli.options import OPTIONS, TORCHRUN_OPTIONS, TYPES, Option
from saferun.console.stderr import print_error
from saferun.env.profiles.quoting import nearest
from saferun.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_TORCHRUN_DESTS = frozenset(option.dest for option in TORCHRUN_OPTIONS) | {"help"}
_LATELY = frozenset({"log_line_prefix_template", "print_completion"})  # torch 2.14 and later
_BY_DEST = {option.dest: option for option in OPTIONS}
_REPEATABLE = frozenset(option.dest for option in OPTIONS if option.kind == "append")
_SEE_HELP = "see saferun --help"
# What other launchers call them, and what is often written.
_OF_OTHERS = {
    **dict.fromkeys(("-n", "-np", "--np", "--nprocs", "--nproc", "--num-processes", "--num-gpus"), "--nproc-per-node"),
    **dict.fromkeys(("-N", "--node", "--nodes", "--num-machines", "--num-nodes", "--nnode"), "--nnodes"),
    **dict.fromkeys(("--machine-rank", "--rank", "--noderank"), "--node-rank"),
    **dict.fromkeys(("--main-process-ip", "--main-address", "--host", "--master"), "--master-addr"),
    **dict.fromkeys(("--main-process-port", "--port"), "--master-port"),
    **dict.fromkeys(("--timeout", "--hang"), "--hang-timeout"),
    **dict.fromkeys(("--retries", "--restarts"), "--max-restarts"),
    **dict.fromkeys(("--log-path", "--output-dir", "--logdir"), "--log-dir"),
    "--profile": "--env-profile",
}


class _Parser(argparse.ArgumentParser):
    """argparse with two-line errors, and abbreviations that mean what they mean to torchrun."""

    keeps_dashes = False

    def __init__(self, **arguments: Any) -> None:  # noqa: ANN401 - argparse's
        self._unclear: dict[str, list[str]] = {}  # what stands for several options, with their names
        self._arguments: list[str] = []  # the command line
        super().__init__(**arguments)

    def format_help(self) -> str:
        """The common options."""
        return help_text(width=terminal_width())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 - argparse's
        """Keeps the command line, for messages."""
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Two lines and exit code 2."""
        self._check_for_script(message)
        kind, _, rest = message.partition(": ")
        word = rest.partition(" ")[0].partition("=")[0]
        if kind == "unrecognized arguments" and word in self._unclear:
            message = f"ambiguous option: {word} could match {', '.join(self._unclear[word])}"
        if message.startswith("ambiguous option: "):
            message = _once(message)
        _refuse(message, _meant(message) or _SEE_HELP)

    def _check_for_script(self, message: str) -> None:
        """End with the reason, where an option without its value took the script for it."""
        flag, equals, value = self._arguments[-1].partition("=") if self._arguments else ("", "", "")
        if not equals and len(self._arguments) > 1:
            flag, value = self._arguments[-2:]
        if not flag.startswith("-") or not value or not may_be_script(value):
            return
        # Else something else is wrong, or there is a script.
        if not (message.startswith("the following arguments are required: script") or repr(value) in message):
            return
        actions = [self._option_string_actions[flag]] if flag in self._option_string_actions else []
        if not actions and flag.startswith("--"):
            actions = [match[0] for match in self._get_option_tuples(flag)]
        option = _BY_DEST.get(actions[0].dest) if len(actions) == 1 else None
        if option is not None and option.kind != "flag":
            _refuse(f"there is no script: {option.name} took {value!r} as its value", value_and_script(option))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:  # noqa: ANN401 - of any type
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            option = _BY_DEST.get(action.dest)
            if option is None or option.kind not in {"int", "float"}:
                raise
            if arg_string is not action.default:
                self._check_for_script(repr(arg_string))
            what, hint = no_number(option, arg_string)
            shown = arg_string if arg_string.strip() else repr(arg_string)
            _refuse(
                f"PET_{option.dest.upper()}={shown} {what}"
                if arg_string is action.default
                else f"{option.name} {shown} {what}",
                hint,
            )

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:  # noqa: ANN401 - of any type
        # Before Python 3.13 argparse takes the dashes out of --option=-- and leaves an empty list in their place.
        if self.keeps_dashes and action.nargs is None and arg_strings == ["--"] and isinstance(action, _Store):
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # An abbreviation that torchrun understands must not become ambiguous by an option that torchrun lacks.
        matches: list[Any] = super()._get_option_tuples(option_string)
        torchruns = [match for match in matches if match[0].dest in _TORCHRUN_DESTS]
        # Nor by one that torchrun has only lately: command lines are older.
        older = [match for match in torchruns if match[0].dest not in _LATELY]
        found = older or torchruns or matches
        if older or len(found) < 2:  # noqa: PLR2004 - several
            return found
        # What stands for several options that torchrun lacks is none of them, or else argparse refuses it, before
        # Python 3.13, behind the script as well. Before the script it is an unknown option.
        self._unclear[option_string.partition("=")[0]] = [match[1] for match in found]
        return []


class _Store(argparse.Action):
    """Stores a value and remembers that it came from the command line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:  # noqa: ANN401, ARG002
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in _REPEATABLE:
            values = [*getattr(namespace, self.dest), values] if self.dest in given else [values]
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        given.add(self.dest)


class _HelpAll(argparse.Action):
    """Prints the help with all options, and ends the process."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:  # noqa: ANN401, ARG002
        parser.exit(show_help("--help-all"))


class _PrintCompletion(argparse.Action):
    """Prints a completion script made from the parser, and ends the process, as torchrun does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:  # noqa: ANN401, ARG002
        if not values:  # --print-completion=--, of which argparse takes the dashes out
            parser.error(f"argument {option_string}: expected one argument")
        try:
            import shtab
        except ImportError:
            print_error(UsageError(f"{option_string} needs the package shtab", "install it: pip install shtab"))
            raise SystemExit(1) from None
        sys.stdout.write(f"{shtab.complete(parser, shell=values)}\n")
        parser.exit()


def build_parser(environ: Mapping[str, str], *, keeps_dashes: bool = False) -> argparse.ArgumentParser:
    """The parser of saferun's command line.

    Args:
        environ: gives ``PET_*`` defaults.
        keeps_dashes: ``--option=--`` has the value ``--`` in each version of Python; torchrun's parser has an empty
            list in some.

    Raises:
        SaferunError: a ``PET_*`` variable of a switch is not a number (exit code 1, as under torchrun).
    """
    parser = _Parser(prog="saferun", usage="saferun [options] script [script arguments]")
    parser.keeps_dashes = keeps_dashes
    parser.add_argument(
        "--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help="show all options and exit"
    )
    parser.add_argument("--version", action="version", version=f"saferun {__version__}")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        group = groups.get(option.group)
        if group is None:
            group = groups[option.group] = parser.add_argument_group(option.group)
        _add(group, option, environ)
    parser.add_argument("training_script", metavar="script", help="the training script, module or program")
    parser.add_argument(
        "training_script_args", metavar="...", nargs=argparse.REMAINDER, help="arguments of the training script"
    )
    return parser


def _add(group: Any, option: Option, environ: Mapping[str, str]) -> None:  # noqa: ANN401 - argparse's is private
    default: Any = list(option.default) if isinstance(option.default, tuple) else option.default
    variable = f"PET_{option.dest.upper()}"
    given = environ.get(variable) if option.pet else None
    marked = option.help.replace("%", "%%") + (" *" if option.pet else "")
    if option.kind == "flag":
        if given is not None:
            default = _switch(variable, given)
        group.add_argument(*option.flags, action=_Store, nargs=0, const=True, default=default, help=marked)
        return
    group.add_argument(
        *option.flags,
        dest=option.dest,
        action=_PrintCompletion if option.dest == "print_completion" else _Store,
        type=TYPES[option.kind],
        default=default if given is None else given,
        choices=option.choices,
        metavar=option.metavar,
        help=marked,
    )


def _refuse(what: str, hint: str) -> NoReturn:
    print_error(UsageError(what, hint))
    raise SystemExit(2)


def _once(message: str) -> str:
    """Argparse's message with every option named once, not in both of its spellings."""
    head, _, names = message.partition(" could match ")
    kept = dict.fromkeys(name.replace("_", "-") for name in names.split(", "))
    return f"{head} could match {', '.join(kept)}"


def _meant(message: str) -> str:
    """A hint that names the option that was meant; empty where none is near."""
    kind, _, rest = message.partition(": ")
    if kind not in {"unrecognized arguments", "ambiguous option"} or not rest.startswith("-"):
        return ""
    word = rest.split()[0].partition("=")[0]
    flags = {flag for option in OPTIONS for flag in option.flags if flag.startswith("--") and "_" not in flag}
    near = _OF_OTHERS.get(word.replace("_", "-")) or nearest(word.replace("_", "-"), sorted(flags))
    return f"did you mean {near}?" if near is not None else ""


def _switch(variable: str, value: str) -> bool:
    try:
        return bool(int(value))
    except ValueError:
        raise UsageError(f"{variable}={value} is not a number", "use 1 for on and 0 for off", exit_code=1) from None
