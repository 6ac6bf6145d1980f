"""argv, environment and settings file -> the value of every option, with its origin."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from saferun.cli.options import OPTIONS, TYPES, Option, comma_separated_list
from saferun.config import Origin, Setting
from saferun.console.stderr import print_error
from saferun.env.profiles.quoting import nearest, quoted
from saferun.errors import UsageError, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}
_SETTINGS_FILE = "saferun.yaml"
_SEE_HELP = "see saferun --help"
_OWN_PREFIX = "SAFERUN_"
_SET_FOR_RANKS = frozenset({"SAFERUN_RUN_ID", "SAFERUN_OUTER_RUNS", "SAFERUN_HOOK", "SAFERUN_HEARTBEAT_FILE"})
_YES = frozenset({"1", "true", "yes", "y", "on"})
# Others may use the prefix as well: only slips are mentioned.
_NEARLY = 0.75


# --------------------------------------------------------------------------------------------------------------------
# The command line


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> SimpleNamespace:
    """The values of all options, the script and its arguments; ``given`` names what stands on the command line.

    Args:
        arguments: the command line, without the program.
        environ: gives ``PET_*`` defaults.

    Raises:
        SaferunError: a ``PET_*`` variable of a switch is not a number (exit code 1, as under torchrun).
        SystemExit: ``--help``, ``--version``, and what cannot be understood.
    """
    values = parse_plain(arguments, environ)
    if values is None:
        from saferun.cli.argument_parser import build_parser

        values = SimpleNamespace(
            **{"given": set(), **vars(build_parser(environ, keeps_dashes=True).parse_args(arguments))}
        )
    return values


def parse_plain(arguments: Sequence[str], environ: Mapping[str, str]) -> SimpleNamespace | None:
    """The same for a command line that can be read in one way only; None: ask argparse, whose word it is.

    Plain are options that are written in full, with values that do not begin with a dash, before a script. argparse
    and the modules that it needs take a tenth of the time from the start of saferun to that of the ranks.
    """
    if any(name.startswith("PET_") for name in environ):
        return None
    values = SimpleNamespace(given=set())
    for option in OPTIONS:
        default = option.default
        setattr(values, option.dest, list(default) if isinstance(default, tuple) else default)
    left = deque(arguments)
    while left and left[0].startswith("-"):
        if not _take_plain(left, values):
            return None
    if not left or not left[0]:
        return None
    values.training_script = left.popleft()
    values.training_script_args = list(left)
    return values if all(map(_is_the_scripts, left)) else None


def _take_plain(left: deque[str], values: SimpleNamespace) -> bool:
    """Take one option off the command line. Returns whether it could be read in one way only."""
    flag, equals, text = left.popleft().partition("=")
    option = _BY_FLAG.get(flag)
    if option is None or option.dest == "print_completion" or (equals and not flag.startswith("--")):
        return False
    value: Any = True
    if option.kind == "flag":
        if equals:
            return False
    else:
        if not equals:
            text = left.popleft() if left else ""
        if not text or text.startswith("-"):
            return False
        try:
            value = TYPES[option.kind](text)
        except ValueError:
            return False
        if option.choices is not None and value not in option.choices:
            return False
        if option.kind == "append":
            value = [*getattr(values, option.dest), value] if option.dest in values.given else [value]
    setattr(values, option.dest, value)
    values.given.add(option.dest)
    return True


def _is_the_scripts(argument: str) -> bool:
    """Whether argparse has nothing to say of an argument behind the script.

    Some of its releases refuse even there what may abbreviate two options, and take ``--`` out.
    """
    if not argument.startswith("-"):
        return True
    name = argument.partition("=")[0]
    if name in _BY_FLAG:
        return True
    return argument[:2] not in _BY_FLAG and not any(flag.startswith(name) for flag in _BY_FLAG)


# --------------------------------------------------------------------------------------------------------------------
# The settings


def fill_in(values: SimpleNamespace, environ: Mapping[str, str]) -> tuple[dict[str, Setting], str | None]:
    """Give every option that is not on the command line its value from the environment or the settings file.

    Returns:
        Every option's value with its origin, and the settings file, if there is one.
    """
    given: set[str] = values.given
    path, fd = _settings_file(values, environ, given)
    from_file: Mapping[str, Any] = {}
    if path is not None:
        from saferun.cli.settings_file import read_settings_file

        from_file = read_settings_file(path, fd)
    not_meant = _check_variables(environ)
    settings: dict[str, Setting] = {}
    for option in OPTIONS:
        if option.dest in given:
            origin: Origin = "flag"
            location = option.name
        elif not option.asks and option.variable in environ and option.variable not in not_meant:
            origin, location = "environment", option.variable
            setattr(values, option.dest, _read(option, _split(option, environ[option.variable]), location))
        elif option.pet and f"PET_{option.dest.upper()}" in environ:
            origin, location = "environment", f"PET_{option.dest.upper()}"
        elif option.dest in from_file:
            found = from_file[option.dest]
            origin, location = "file", found.location
            setattr(values, option.dest, _read(option, found.texts, location))
        else:
            origin, location = "default", ""
        settings[option.dest] = Setting(getattr(values, option.dest), origin, location)
    if path is not None and settings["config"].origin == "default":
        values.config = path
        settings["config"] = Setting(path, "default", "found in the current directory")
    elif path is not None and "profiles" in from_file:
        values.env_profile_path = [*values.env_profile_path, path]
    elif path is not None and os.path.realpath(path) == os.path.realpath(_SETTINGS_FILE):
        # Searched for profiles anyway, and no longer a file that was only found.
        values.env_profile_path = [*values.env_profile_path, _SETTINGS_FILE]
    return settings, path


def _settings_file(
    values: SimpleNamespace, environ: Mapping[str, str], given: set[str]
) -> tuple[str | None, int | None]:
    """The file of settings, and its descriptor where it was found and not named."""
    chosen: str | None = values.config if "config" in given else environ.get("SAFERUN_CONFIG")
    if chosen is not None:
        return chosen or None, None
    if not os.path.isfile(_SETTINGS_FILE):
        return None, None
    from saferun.env.profiles.found import open_found_file

    fd = open_found_file(_SETTINGS_FILE, "--config")
    return (None if fd is None else _SETTINGS_FILE), fd


def _check_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """Warn of ``SAFERUN_*`` variables that are nearly the name of an option, or that of one which has no variable.

    Others may belong to any program.

    A launch goes on: what another release knows by this name may be set for all users of a cluster.

    Returns:
        The variables that are named like an option and are none here.
    """
    names = {option.variable for option in OPTIONS if not option.asks}
    ours = [name for name in environ if name.startswith(_OWN_PREFIX)]
    services = frozenset(name for name in ours if _is_of_a_service(name, environ[name]))
    questions = {option.variable: option.name for option in OPTIONS if option.asks}
    for name in sorted(questions.keys() & set(ours)):
        if environ[name].strip().lower() in _YES:
            why = f"{questions[name]} is only an option of the command line"
            print_error(printable(f"saferun: {name} is ignored: {why}"))
    unknown = [name for name in ours if name not in names | questions.keys() | _SET_FOR_RANKS | services]
    if unknown:
        from difflib import get_close_matches

        plain = [name.removeprefix(_OWN_PREFIX) for name in sorted(names)]
        for name in sorted(unknown):
            near = get_close_matches(name.removeprefix(_OWN_PREFIX), plain, n=1, cutoff=_NEARLY)
            if near:
                meant = f"did you mean {_OWN_PREFIX}{near[0]}?"
                print_error(printable(f"saferun: {name} is ignored: there is no such setting; {meant}"))
    # Within a rank of another run this says where that run's files are, and two runs do not share a directory.
    return services | ({"SAFERUN_RUN_DIR"} if "SAFERUN_RUN_ID" in environ else set())


def _is_of_a_service(name: str, value: str) -> bool:
    """Whether Kubernetes has set a variable, in every container beside a service named ``saferun-...``.

    See https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables.
    """
    if name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://")):
        return True
    import re

    return bool(re.search(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$", name))


def _split(option: Option, text: str) -> Sequence[str]:
    """The values of an option in an environment variable; of one that may be given several times, one a line."""
    if option.kind == "append":
        return [line for line in text.splitlines() if line]
    return comma_separated_list(text) if option.kind == "list" else [text]


def _read(option: Option, texts: Sequence[str], location: str) -> object:
    """The value of an option from text that does not come from the command line."""
    if option.kind in {"list", "append"}:
        return list(texts)
    text = texts[0]
    if option.kind == "flag":
        return _truth(option, text, location)
    try:
        value = TYPES[option.kind](text)
    except ValueError:
        from saferun.cli.option_values import no_number

        what, hint = no_number(option, text)
        raise UsageError(f"{location}: {option.name}: {quoted(text)} {what}", hint) from None
    if option.choices is not None and value not in option.choices:
        near = nearest(text, option.choices)
        hint = _SEE_HELP if near is None else f"did you mean {near}?"
        raise UsageError(f"{location}: {option.name}: {quoted(text)} is not one of {', '.join(option.choices)}", hint)
    return value


def _truth(option: Option, text: str, location: str) -> bool:
    truths = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in truths:
        raise UsageError(f"{location}: {option.name}: {quoted(text)} is neither on nor off", "write on or off")
    return truths[text.lower()]
