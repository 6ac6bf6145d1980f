"""argv and environment -> LaunchConfig. The only home of argparse."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn, cast

from saferun import __version__
from saferun.config import (
    DEFAULT_PREFIX,
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    KEEP_NO_FILES,
    OPTIONS,
    TORCHRUN_OPTIONS,
    Command,
    EnvironConfig,
    LaunchConfig,
    LogConfig,
    Option,
    Origin,
    OutputConfig,
    RendezvousConfig,
    Setting,
    WatchConfig,
    comma_separated_list,
)
from saferun.errors import SaferunError, UsageError
from saferun.profiles.words import nearest, quoted

_TORCHRUN_DESTS = frozenset(option.dest for option in TORCHRUN_OPTIONS)
_REPEATABLE = frozenset(option.dest for option in OPTIONS if option.kind == "append")
_SETTINGS_FILE = "saferun.yaml"
_SEE_HELP = "see saferun --help"
_OWN_PREFIX = "SAFERUN_"
_TOLD_TO_RANKS = frozenset({"SAFERUN_RUN_ID", "SAFERUN_OUTER_RUNS", "SAFERUN_HOOK", "SAFERUN_HEARTBEAT_FILE"})
# A service of this name in Kubernetes leaves SAFERUN_PORT and the like in every container: only slips are refused.
_NEARLY = 0.75
_MOST_RANKS = 4096
# A year; what is beyond is a slip, or not a number at all.
_LONGEST_S = 366 * 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    """The ``saferun`` command.

    Args:
        argv: the arguments; None: those of this process, which then ends here.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        config = read_config(arguments, os.environ)
        from saferun.launcher import launch

        exit_code = launch(config, dict(os.environ))
    except SaferunError as error:
        _tell(error)
        exit_code = error.exit_code
    except KeyboardInterrupt:
        exit_code = 130
    if argv is None:
        from saferun.launcher import leave

        leave(exit_code)
    return exit_code


def _tell(words: object) -> None:
    """Words of saferun's own, before there is a console."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{words}\n")


def read_config(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchConfig:
    """What one command line asks for.

    Raises:
        SaferunError: it cannot be done; the exit code says whose fault it is.
        SystemExit: ``--help`` and ``--version``.
    """
    parser = build_parser(environ)
    values = parser.parse_args(arguments)
    settings, settings_file = _fill_in(values, environ)
    try:
        config = _resolve(values, arguments, environ, settings)
    except UsageError as error:
        raise _placed(error, settings) from None
    return config._replace(settings_file=settings_file)


def _placed(error: UsageError, settings: Mapping[str, Setting]) -> UsageError:
    """The same error, with the place of the option that it begins with, where that is not the command line."""
    begins = error.what.partition(" ")[0].rstrip(":")
    for option in OPTIONS:
        setting = settings[option.dest]
        if begins in option.flags and setting.origin in {"environment", "file"}:
            return UsageError(f"{setting.place}: {error.what}", error.hint, error.exit_code)
    return error


# --------------------------------------------------------------------------------------------------------------------
# The parser


class _Parser(argparse.ArgumentParser):
    """argparse with two-line errors, and abbreviations that mean what they mean to torchrun."""

    def error(self, message: str) -> NoReturn:
        """Two lines and exit code 2."""
        _tell(UsageError(message, _SEE_HELP))
        raise SystemExit(2)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # An abbreviation that torchrun understands must not become ambiguous by an option that torchrun lacks.
        matches = super()._get_option_tuples(option_string)
        torchruns = [match for match in matches if match[0].dest in _TORCHRUN_DESTS]
        return torchruns or cast("list[Any]", matches)


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
        action=_Store,
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


def _fill_in(values: argparse.Namespace, environ: Mapping[str, str]) -> tuple[dict[str, Setting], str | None]:
    """Give every option that is not on the command line its value from the environment or the settings file.

    Returns:
        Every option's value with its origin, and the settings file, if there is one.
    """
    given: set[str] = getattr(values, "given", set())
    path = _settings_file(values, environ, given)
    from_file: Mapping[str, Any] = {}
    if path is not None:
        from saferun.settings_file import read_settings_file

        from_file = read_settings_file(path)
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
    elif path is not None and "profiles" in from_file and os.path.realpath(path) != os.path.realpath(_SETTINGS_FILE):
        values.env_profile_path = [*values.env_profile_path, path]  # ./saferun.yaml is looked into anyway
    return settings, path


def _settings_file(values: argparse.Namespace, environ: Mapping[str, str], given: set[str]) -> str | None:
    chosen: str | None = values.config if "config" in given else environ.get("SAFERUN_CONFIG")
    if chosen is not None:
        return chosen or None
    return _SETTINGS_FILE if os.path.isfile(_SETTINGS_FILE) else None


def _check_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """Refuse ``SAFERUN_*`` variables that are nearly the name of an option; others may be anybody's.

    Returns:
        The variables that are named like an option and are none here.
    """
    names = {option.variable for option in OPTIONS if not option.asks}
    unknown = [name for name in environ if name.startswith(_OWN_PREFIX) and name not in names | _TOLD_TO_RANKS]
    if unknown:
        from difflib import get_close_matches

        plain = [name.removeprefix(_OWN_PREFIX) for name in sorted(names)]
        for name in sorted(unknown):
            near = get_close_matches(name.removeprefix(_OWN_PREFIX), plain, n=1, cutoff=_NEARLY)
            if near:
                raise UsageError(f"{name}: there is no such setting", f"did you mean {_OWN_PREFIX}{near[0]}?")
    # Within a rank of another run this says where that run's files are, and two runs do not share a directory.
    return frozenset({"SAFERUN_RUN_DIR"}) if "SAFERUN_RUN_ID" in environ else frozenset()


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


def _resolve(
    values: argparse.Namespace, arguments: Sequence[str], environ: Mapping[str, str], settings: dict[str, Setting]
) -> LaunchConfig:
    _check_hosts(values)
    command = _command(values, environ)
    nproc_per_node = _nproc_per_node(values.nproc_per_node, environ)
    rendezvous = _rendezvous(values, environ)
    _check_monitor_interval(values.monitor_interval)
    if values.max_restarts < 0:
        raise UsageError(f"--max-restarts {values.max_restarts} is negative", "use 0 for no restarts")
    return LaunchConfig(
        nproc_per_node=nproc_per_node,
        role=values.role,
        command=command,
        rendezvous=rendezvous,
        logs=_logs(values, nproc_per_node),
        output=_output(values, environ),
        environ=_environ(values),
        watch=_watch(values),
        max_restarts=values.max_restarts,
        shutdown_timeout_s=_shutdown_timeout_s(values.shutdown_timeout, environ),
        signals=_signals(values.signals_to_handle),
        numa_binding=values.numa_binding,
        virtual_local_rank=values.virtual_local_rank,
        event_log_handler=values.event_log_handler,
        settings=settings,
        argv=tuple(arguments),
        show_config=values.show_config,
        dry_run=values.dry_run,
    )


def _environ(values: argparse.Namespace) -> EnvironConfig:
    pairs = []
    for text in values.env:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--env {text} is not NAME=VALUE", "to take a variable out, use --unset NAME")
        pairs.append((name, value))
    return EnvironConfig(
        profiles=tuple(name for name in values.env_profile if name),
        profile_path=tuple(values.env_profile_path),
        env=tuple(pairs),
        unset=tuple(values.unset),
        vendor=cast("Literal['auto', 'nvidia', 'amd', 'none']", values.vendor),
        lint=values.lint == "on",
    )


def _watch(values: argparse.Namespace) -> WatchConfig:
    for name in ("hang_timeout", "capture_budget"):
        value = getattr(values, name)
        if not 0 <= value < _LONGEST_S:
            raise UsageError(f"--{name.replace('_', '-')} {value:g} is not a number of seconds", "0 turns it off")
    if values.keep_cores < 0:
        raise UsageError(f"--keep-cores {values.keep_cores} is negative", "to keep none, leave --cores at backtrace")
    if values.on_hang == "restart" and values.max_restarts <= 0:
        raise UsageError("--on-hang restart has no restart to use up", "pass --max-restarts N, or --on-hang stop")
    if values.on_hang != "report" and values.hang_timeout == 0:
        raise UsageError(
            f"--on-hang {values.on_hang} waits for hangs, and --hang-timeout 0 does not look for any",
            "pass a --hang-timeout in seconds",
        )
    return WatchConfig(
        hang_timeout_s=values.hang_timeout,
        on_hang=values.on_hang,
        capture_budget_s=values.capture_budget,
        native=values.native_stacks,
        strace=values.strace,
        cores=values.cores,
        keep_cores=values.keep_cores,
        gdb=values.gdb,
        inject=not values.no_inject,
    )


def _check_hosts(values: argparse.Namespace) -> None:
    low, colon, high = values.nnodes.partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise UsageError(f"--nnodes {values.nnodes} is neither N nor MIN:MAX", "for one host, leave it out") from None
    if not 0 < least <= most:
        raise UsageError(
            f"--nnodes {values.nnodes}: MIN must be at least 1 and at most MAX", "for one host, leave it out"
        )
    if most > 1:
        kind = "an elastic range" if least != most else f"{most} hosts"
        raise UsageError(
            f"--nnodes {values.nnodes} asks for {kind}, and jobs of several hosts are not built yet",
            "start one saferun on one host, or use torchrun for this job",
        )
    if values.node_rank != 0 and values.rdzv_backend == "static":
        raise UsageError(f"--node-rank {values.node_rank} does not exist in a job of one host", "leave --node-rank out")


def _command(values: argparse.Namespace, environ: Mapping[str, str]) -> Command:
    script, rest = values.training_script, values.training_script_args
    if values.run_path:
        _check_script(script)
        return Command((script, *rest), run_path=True, name=script)
    if values.no_python:
        if values.module:
            raise UsageError("--no-python and --module contradict each other", "leave one of them out")
        _check_program(script, environ)
        return Command((script, *rest), run_path=False, name=script)
    python = environ.get("PYTHON_EXEC", sys.executable)
    if "PYTHON_EXEC" in environ:
        _check_program(python, environ)
    if values.module:
        return Command((python, "-u", "-m", script, *rest), run_path=False, name=script)
    _check_script(script)
    return Command((python, "-u", script, *rest), run_path=False, name=script)


def _check_monitor_interval(value: float) -> None:
    if not 0 <= value < float("inf"):
        raise UsageError(f"--monitor-interval {value} is not a time", "leave it out: nothing is polled here")


def _check_script(script: str) -> None:
    if "$" in script or script == "-":
        return  # a name that differs by rank; the program comes from standard input
    # Not by opening it: what is in a named pipe is meant for the rank.
    try:
        os.stat(script)
    except FileNotFoundError:
        raise UsageError(
            f"there is no script {script}", "check the path; use -m for a module, --no-python for a program"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the script {script} cannot be read: {reason}", "check the path") from None
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"{script} is a directory without a __main__.py", "name the script in it")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the script {script} cannot be read: permission denied", "check its permissions")


def _check_program(program: str, environ: Mapping[str, str]) -> None:
    if "/" in program:
        found = _is_program(program)
    else:
        paths = environ.get("PATH", os.defpath).split(os.pathsep)
        found = any(_is_program(os.path.join(path or ".", program)) for path in paths)
    if not found:
        raise UsageError(f"{program} is not a program that can be executed", "check the path, PATH and chmod +x")


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _nproc_per_node(value: str, environ: Mapping[str, str]) -> int:
    try:
        count = int(value)
    except ValueError:
        # Only words that ask for a count of this host's devices pay for the import.
        from saferun.host.gpus import resolve_nproc_per_node

        return resolve_nproc_per_node(value, environ.get("PYTHON_EXEC", sys.executable), environ)
    if not 1 <= count <= _MOST_RANKS:
        raise UsageError(
            f"--nproc-per-node {value} is not between 1 and {_MOST_RANKS}", "one rank for each GPU is usual"
        )
    return count


def _rendezvous(values: argparse.Namespace, environ: Mapping[str, str]) -> RendezvousConfig:
    backend, endpoint = values.rdzv_backend, values.rdzv_endpoint
    options = _rdzv_conf(values.rdzv_conf)
    own_port = backend == "static" and not endpoint and values.master_port is None
    if values.standalone or own_port:
        return _c10d(_random_id(), values, environ)
    if backend == "static":
        if endpoint:
            host, port = _split_endpoint(endpoint)
            if port is None:
                raise UsageError(f"--rdzv-endpoint {endpoint} has no port", "write it as HOST:PORT")
        else:
            host, port = values.master_addr, values.master_port
        if not 0 <= port < 1 << 16:
            raise UsageError(f"--master-port {port} is not a port", "use a number from 0 to 65535")
        run_id = values.rdzv_id or str(int.from_bytes(os.urandom(16), "big"))
        return RendezvousConfig("static", run_id, _without_brackets(host), port, values.local_addr)
    if backend == "c10d":
        if _store_type(options) == "file":
            return _c10d(values.rdzv_id, values, environ)  # the endpoint is a path, where one host has nobody to meet
        host, _ = _split_endpoint(endpoint)
        from saferun.host.net import is_this_host

        if not is_this_host(host):
            raise UsageError(
                f"--rdzv-endpoint {endpoint} is another host, and jobs of several hosts are not built yet",
                "use --standalone for a job of one host",
            )
        return _c10d(values.rdzv_id, values, environ)
    raise UsageError(
        f"--rdzv-backend {backend} serves jobs of several hosts, which are not built yet",
        "use static or c10d, or leave it out",
    )


def _c10d(run_id: str, values: argparse.Namespace, environ: Mapping[str, str]) -> RendezvousConfig:
    if not run_id:
        raise UsageError("--rdzv-id is empty", "give the job a name, or leave --rdzv-id out")
    agent_store = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"
    return RendezvousConfig("c10d", run_id, None, None, values.local_addr, agent_store)


def _random_id() -> str:
    """A random (version 4) UUID, as torchrun names such runs."""
    digits = bytearray(os.urandom(16))
    digits[6] = digits[6] & 0x0F | 0x40
    digits[8] = digits[8] & 0x3F | 0x80
    text = digits.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _split_endpoint(endpoint: str) -> tuple[str, int | None]:
    endpoint = endpoint.strip()
    if not endpoint:
        return "localhost", None
    if endpoint.startswith("[") and endpoint.endswith("]"):
        return _without_brackets(endpoint), None
    host, colon, port = endpoint.rpartition(":")
    name = _without_brackets(host if colon else endpoint)
    if not name or not all(char.isalnum() or char in "_.:-" for char in name):
        raise UsageError(f"--rdzv-endpoint {endpoint}: {name!r} is not a host", "write it as HOST:PORT")
    if not colon:
        return endpoint, None
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"--rdzv-endpoint {endpoint}: {port!r} is not a port", "write it as HOST:PORT")
    return _without_brackets(host), int(port)


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _rdzv_conf(text: str) -> dict[str, str]:
    options = {}
    for item in text.split(",") if text.strip() else ():
        key, _, value = item.partition("=")
        if not key.strip() or not value.strip():
            raise UsageError(f"--rdzv-conf {text}: {item!r} is not KEY=VALUE", "write it as KEY=VALUE,KEY=VALUE")
        options[key.strip()] = value.strip()
    return options


def _store_type(options: Mapping[str, str]) -> str:
    kind = options.get("store_type", "tcp").lower()
    if kind not in {"tcp", "file"}:
        raise UsageError(f"--rdzv-conf store_type={kind}: there is no such store", "use tcp or file")
    is_host = options.get("is_host", "0").lower()
    if is_host not in {"1", "true", "t", "yes", "y", "0", "false", "f", "no", "n"}:
        raise UsageError(f"--rdzv-conf is_host={is_host} is neither true nor false", "use 1 or 0")
    return kind


def _logs(values: argparse.Namespace, nproc_per_node: int) -> LogConfig:
    log_dir = values.log_dir or None
    if log_dir is not None and log_dir != os.devnull and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise UsageError(f"--log-dir {log_dir} is not a directory", "pass a directory; it is made if need be")
    shown: frozenset[int] = frozenset()
    if values.local_ranks_filter:
        try:
            shown = frozenset(map(int, values.local_ranks_filter.split(",")))
        except ValueError:
            raise UsageError(
                f"--local-ranks-filter {values.local_ranks_filter} is not a list of local ranks", "write it as 0,1,2"
            ) from None
    if log_dir == os.devnull and (values.duplicate_stdout_filters or values.duplicate_stderr_filters):
        raise UsageError("filtered copies of output have no place in --log-dir /dev/null", "pass another --log-dir")
    return LogConfig(
        log_dir=log_dir,
        redirects=_masks("--redirects", values.redirects, nproc_per_node),
        tee=_masks("--tee", values.tee, nproc_per_node),
        local_ranks_filter=shown,
        duplicate_stdout_filters=tuple(values.duplicate_stdout_filters),
        duplicate_stderr_filters=tuple(values.duplicate_stderr_filters),
        logs_specs=values.logs_specs,
    )


def _masks(option: str, text: str, nproc_per_node: int) -> tuple[int, ...]:
    """``3`` for all local ranks, or ``0:1,1:2`` for some."""
    if text in {"0", "1", "2", "3"}:
        return (int(text),) * nproc_per_node
    masks = [0] * nproc_per_node
    for item in text.split(","):
        rank, colon, mask = item.partition(":")
        if not (colon and rank.isascii() and rank.isdigit() and mask in {"0", "1", "2", "3"}):
            raise UsageError(
                f"{option} {text} is neither 0, 1, 2, 3 nor LOCAL_RANK:N,LOCAL_RANK:N",
                "1 is stdout, 2 stderr, 3 both",
            )
        if int(rank) < nproc_per_node:
            masks[int(rank)] = int(mask)
    return tuple(masks)


def _output(values: argparse.Namespace, environ: Mapping[str, str]) -> OutputConfig:
    prefix: str | None = values.prefix
    legacy = None
    if prefix is None:
        legacy = environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        prefix = DEFAULT_PREFIX if legacy is None else None
    elif prefix == "none":
        prefix = None
    else:
        from saferun.console.prefix import check_template

        check_template(prefix)
    return OutputConfig(
        run_dir=None if values.run_dir in {None, KEEP_NO_FILES} else values.run_dir,
        keep_files=values.run_dir != KEEP_NO_FILES,
        prefix=prefix,
        legacy_template=legacy,
        pty=cast("Literal['auto', 'on', 'off']", values.pty),
        color=cast("Literal['auto', 'always', 'never']", values.color),
    )


def _shutdown_timeout_s(value: int | None, environ: Mapping[str, str]) -> float:
    name = "--shutdown-timeout"
    if value is None:
        name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        text = environ.get(name, str(DEFAULT_SHUTDOWN_TIMEOUT_S))
        try:
            value = int(text)
        except ValueError:
            raise UsageError(f"{name}={text} is not a number of seconds", "use a whole number") from None
    if value < 0:
        raise UsageError(f"{name} {value} is negative", "use 0 to kill at once")
    return float(value)


def _signals(text: str) -> tuple[int, ...]:
    import signal

    signums = []
    for name in text.split(","):
        signum = getattr(signal, name.strip(), None)
        if not isinstance(signum, signal.Signals):
            _tell(f"saferun: --signals-to-handle: there is no signal {name.strip()!r}; it is left out")
        elif signum in {signal.SIGKILL, signal.SIGSTOP}:
            raise UsageError(f"--signals-to-handle {text}: no program can handle {signum.name}", "leave it out")
        else:
            signums.append(int(signum))
    return tuple(signums)
