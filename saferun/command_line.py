"""argv, environment and settings file -> the value of every option, with its origin. The only home of argparse."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence

from saferun import __version__
from saferun.config import Origin, Setting
from saferun.errors import UsageError, suppress
from saferun.options import OPTIONS, TORCHRUN_OPTIONS, Option, comma_separated_list
from saferun.profiles.words import nearest, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_TORCHRUN_DESTS = frozenset(option.dest for option in TORCHRUN_OPTIONS)
_LATELY = frozenset({"log_line_prefix_template", "print_completion"})  # torch 2.14 and later
_REPEATABLE = frozenset(option.dest for option in OPTIONS if option.kind == "append")
_SETTINGS_FILE = "saferun.yaml"
_SEE_HELP = "see saferun --help"
_OWN_PREFIX = "SAFERUN_"
_TOLD_TO_RANKS = frozenset({"SAFERUN_RUN_ID", "SAFERUN_OUTER_RUNS", "SAFERUN_HOOK", "SAFERUN_HEARTBEAT_FILE"})
# Others may use the prefix as well: only slips are refused.
_NEARLY = 0.75


def tell(words: object) -> None:
    """Words of saferun's own, before there is a console."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{words}\n")


# --------------------------------------------------------------------------------------------------------------------
# The parser


class _Parser(argparse.ArgumentParser):
    """argparse with two-line errors, and abbreviations that mean what they mean to torchrun."""

    def error(self, message: str) -> NoReturn:
        """Two lines and exit code 2."""
        tell(UsageError(message, _SEE_HELP))
        raise SystemExit(2)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # An abbreviation that torchrun understands must not become ambiguous by an option that torchrun lacks.
        matches: list[Any] = super()._get_option_tuples(option_string)
        torchruns = [match for match in matches if match[0].dest in _TORCHRUN_DESTS]
        # Nor by one that torchrun has only lately: command lines are older.
        older = [match for match in torchruns if match[0].dest not in _LATELY]
        return older or torchruns or matches


class _Store(argparse.Action):
    """Stores a value and remembers that it came from the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,  # noqa: ANN401
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in _REPEATABLE:
            values = [*getattr(namespace, self.dest), values] if self.dest in given else [values]
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        given.add(self.dest)


class _PrintCompletion(argparse.Action):
    """Prints a completion script made from the parser, and ends the process, as torchrun does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,  # noqa: ANN401
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            tell(UsageError(f"{option_string} needs the package shtab", "install it: pip install shtab"))
            raise SystemExit(1) from None
        sys.stdout.write(f"{shtab.complete(parser, shell=values)}\n")
        parser.exit()


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of saferun's command line.

    Args:
        environ: gives ``PET_*`` defaults.

    Raises:
        SaferunError: a ``PET_*`` variable of a switch is not a number (exit code 1, as under torchrun).
    """
    parser = _Parser(
        prog="saferun",
        description="Start the ranks of a distributed PyTorch job on this host, and say what went wrong.",
        usage="saferun [options] script [script arguments]",
        epilog="Options marked * take their default from PET_<NAME> in the environment, as under torchrun.",
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


_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float, "list": comma_separated_list, "append": str}


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
        action=_PrintCompletion if option.dest == "print_completion" else _Store,
        type=_TYPES[option.kind],
        default=default if given is None else given,
        choices=option.choices,
        metavar=option.metavar,
        help=marked,
    )


def _switch(variable: str, value: str) -> bool:
    try:
        return bool(int(value))
    except ValueError:
        raise UsageError(f"{variable}={value} is not a number", "use 1 for on and 0 for off", exit_code=1) from None


# --------------------------------------------------------------------------------------------------------------------
# The settings


def fill_in(values: argparse.Namespace, environ: Mapping[str, str]) -> tuple[dict[str, Setting], str | None]:
    """Give every option that is not on the command line its value from the environment or the settings file.

    Returns:
        Every option's value with its origin, and the settings file, if there is one.
    """
    given: set[str] = getattr(values, "given", set())
    path, fd = _settings_file(values, environ, given)
    from_file: Mapping[str, Any] = {}
    if path is not None:
        from saferun.settings_file import read_settings_file

        from_file = read_settings_file(path, fd)
    not_meant = _check_variables(environ)
    settings: dict[str, Setting] = {}
    for option in OPTIONS:
        if option.dest in given:
            origin: Origin = "flag"
            place = option.name
        elif not option.asks and option.variable in environ and option.variable not in not_meant:
            origin, place = "environment", option.variable
            setattr(values, option.dest, _read(option, _split(option, environ[option.variable]), place))
        elif option.pet and f"PET_{option.dest.upper()}" in environ:
            origin, place = "environment", f"PET_{option.dest.upper()}"
        elif option.dest in from_file:
            found = from_file[option.dest]
            origin, place = "file", found.place
            setattr(values, option.dest, _read(option, found.texts, place))
        else:
            origin, place = "default", ""
        settings[option.dest] = Setting(getattr(values, option.dest), origin, place)
    if path is not None and settings["config"].origin == "default":
        values.config = path
        settings["config"] = Setting(path, "default", "found in the current directory")
    elif path is not None and "profiles" in from_file:
        values.env_profile_path = [*values.env_profile_path, path]
    elif path is not None and os.path.realpath(path) == os.path.realpath(_SETTINGS_FILE):
        # Searched for profiles anyway, and no longer a file that nobody named.
        values.env_profile_path = [*values.env_profile_path, _SETTINGS_FILE]
    return settings, path


def _settings_file(
    values: argparse.Namespace, environ: Mapping[str, str], given: set[str]
) -> tuple[str | None, int | None]:
    """The file of settings, and its descriptor where it was found and not named."""
    chosen: str | None = values.config if "config" in given else environ.get("SAFERUN_CONFIG")
    if chosen is not None:
        return chosen or None, None
    if not os.path.isfile(_SETTINGS_FILE):
        return None, None
    from saferun.profiles.found import open_found_file

    fd = open_found_file(_SETTINGS_FILE, "--config")
    return (None if fd is None else _SETTINGS_FILE), fd


def _check_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """Refuse ``SAFERUN_*`` variables that are nearly the name of an option; others may be anybody's.

    Returns:
        The variables that are named like an option and are none here.
    """
    names = {option.variable for option in OPTIONS if not option.asks}
    ours = [name for name in environ if name.startswith(_OWN_PREFIX)]
    services = frozenset(name for name in ours if _is_of_a_service(name, environ[name]))
    unknown = [name for name in ours if name not in names | _TOLD_TO_RANKS | services]
    if unknown:
        from difflib import get_close_matches

        plain = [name.removeprefix(_OWN_PREFIX) for name in sorted(names)]
        for name in sorted(unknown):
            near = get_close_matches(name.removeprefix(_OWN_PREFIX), plain, n=1, cutoff=_NEARLY)
            if near:
                raise UsageError(f"{name}: there is no such setting", f"did you mean {_OWN_PREFIX}{near[0]}?")
    # Within a rank of another run this says where that run's files are, and two runs do not share a directory.
    return services | ({"SAFERUN_RUN_DIR"} if "SAFERUN_RUN_ID" in environ else set())


def _is_of_a_service(name: str, value: str) -> bool:
    """Whether Kubernetes has set a variable, in every container beside a service named ``saferun-...``.

    See https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables.
    """
    if name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://")):
        return True
    return bool(re.search(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$", name))


def _split(option: Option, text: str) -> Sequence[str]:
    """The values of an option in an environment variable; of one that may be given several times, one a line."""
    if option.kind == "append":
        return [line for line in text.splitlines() if line]
    return comma_separated_list(text) if option.kind == "list" else [text]


def _read(option: Option, texts: Sequence[str], place: str) -> object:
    """The value of an option from text that does not come from the command line."""
    if option.kind in {"list", "append"}:
        return list(texts)
    text = texts[0]
    if option.kind == "flag":
        return _truth(option, text, place)
    try:
        value = _TYPES[option.kind](text)
    except ValueError:
        kind = "whole number" if option.kind == "int" else "number"
        raise UsageError(f"{place}: {option.name}: {quoted(text)} is not a {kind}", _SEE_HELP) from None
    if option.choices is not None and value not in option.choices:
        near = nearest(text, option.choices)
        hint = _SEE_HELP if near is None else f"did you mean {near}?"
        raise UsageError(f"{place}: {option.name}: {quoted(text)} is none of {', '.join(option.choices)}", hint)
    return value


def _truth(option: Option, text: str, place: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise UsageError(f"{place}: {option.name}: {quoted(text)} is neither on nor off", "write on or off")
    return words[text.lower()]
