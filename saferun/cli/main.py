"""The ``saferun`` command: argv and environment -> LaunchConfig, and off it goes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from saferun.cli.command_line import fill_in, parse
from saferun.cli.options import OPTIONS
from saferun.cli.rank_command import NO_SCRIPT, rank_command
from saferun.cluster.placement import find_place, is_in_batch_job
from saferun.config import (
    DEFAULT_PREFIX,
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    KEEP_NO_FILES,
    ChecksConfig,
    Command,
    EnvironConfig,
    JobMembership,
    LaunchConfig,
    LogConfig,
    OutputConfig,
    RetryConfig,
    Setting,
    WatchConfig,
    WrapConfig,
)
from saferun.console.stderr import print_error
from saferun.errors import EXIT_INTERRUPTED, SaferunError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Literal

    from saferun.preflight.check_process import CheckProcess

# A year; what is beyond is a slip, or not a number at all.
_LONGEST_S = 366 * 86400.0
# What can only be had again when a limit is raised, and the hint. Source: fork(2), open(2).
_LIMITS = {
    errno.EMFILE: "raise the limit on open files: ulimit -n 1024",
    errno.ENFILE: "the host has too many open files: see /proc/sys/fs/file-nr",
    errno.EAGAIN: "no more processes can be started: raise the limit on them (ulimit -u), or pids.max of the container",
    errno.ENOMEM: "there is no memory for another process",
}
# A size in bytes that fits into any file system.
_MOST_DIGITS = 15
_LARGEST_PORT = 65535
_LEAST_KEPT_BYTES = 64 << 10
_LEAST_DUMPS_S = 60.0
# torchrun's variables that hold where an option is left out; they have names of their own.
_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def main(argv: Sequence[str] | None = None) -> int:
    """The ``saferun`` command.

    Args:
        argv: the arguments; None: those of this process, which then ends here.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    checks: CheckProcess | None = None
    memberships: list[JobMembership] = []
    try:
        config = read_config(arguments, os.environ, memberships.append)
        checks = _fork_checks(config)
        from saferun.launch.entry import launch

        exit_code = launch(config, dict(os.environ), checks)
    except SaferunError as error:
        if checks is not None:
            checks.discard()
        from saferun.cli.refusal import give_up

        give_up(error, memberships, os.environ)
        exit_code = error.exit_code
    except OSError as error:
        hint = _LIMITS.get(error.errno or 0)
        if hint is None:
            raise
        if checks is not None:
            checks.discard()
        print_error(SaferunError(f"cannot go on: {error.strerror}", hint))
        exit_code = 1
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    if argv is None:
        from saferun.launch.entry import leave

        leave(exit_code)
    return exit_code


def _fork_checks(config: LaunchConfig) -> CheckProcess | None:
    """The check process, where the ranks wait for it: it imports what it needs while this one imports the rest."""
    if not config.checks_here or config.show_config or config.dry_run:
        return None
    from saferun.launch.preflight_part import ranks_wait

    if not ranks_wait(config, os.environ):
        return None
    from saferun.linux.streams import ensure_standard_descriptors
    from saferun.preflight.check_process import CheckProcess

    ensure_standard_descriptors()
    try:
        return CheckProcess()
    except OSError:
        return None  # it is tried again when it is needed, and reported then


def read_config(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    on_membership: Callable[[JobMembership], None] = lambda _: None,
) -> LaunchConfig:
    """What one command line asks for.

    Args:
        arguments: the command line.
        environ: the environment of this process.
        on_membership: called as soon as this host's membership in the job is known, if it is to be started.

    Raises:
        SaferunError: it cannot be done; the exit code says whose fault it is.
        SystemExit: ``--help`` and ``--version``.
    """
    if "--show-config" in arguments:
        # The settings can be shown without a script, and the ranks of none cannot.
        values = parse([*arguments, NO_SCRIPT], environ)
        if values.dry_run and values.training_script == NO_SCRIPT:
            values = parse(arguments, environ)
        values.training_script_args = [word for word in values.training_script_args if word != NO_SCRIPT]
    else:
        values = parse(arguments, environ)
    settings, settings_file = fill_in(values, environ)
    try:
        config = _resolve(values, arguments, environ, settings, on_membership)
    except UsageError as error:
        raise _placed(error, settings) from None
    return config._replace(settings_file=settings_file)


def _placed(error: UsageError, settings: Mapping[str, Setting]) -> UsageError:
    """The same error, with the place of the option that it begins with, where that is not the command line."""
    begins = error.what.partition(" ")[0].rstrip(":")
    for option in OPTIONS:
        setting = settings[option.dest]
        if begins in option.flags and setting.origin in {"environment", "file"}:
            return UsageError(f"{setting.location}: {error.what}", error.hint, error.exit_code)
    return error


def _resolve(
    values: SimpleNamespace,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    settings: dict[str, Setting],
    on_membership: Callable[[JobMembership], None],
) -> LaunchConfig:
    hosts, rendezvous, nproc_per_node = find_place(values, settings, environ)
    if not values.show_config and not values.dry_run:
        on_membership(JobMembership(hosts, rendezvous, values.job_secret_file))
    command = rank_command(values, environ)
    task = hosts.task
    _check_monitor_interval(values.monitor_interval)
    _check_count(values, "max_restarts", "use 0 for no restarts")
    _check_seconds(values, "leftovers_timeout", "0 waits for nothing")
    return LaunchConfig(
        nproc_per_node=nproc_per_node,
        role=values.role,
        command=command,
        rendezvous=rendezvous,
        # One mask for each rank of the host, also where this process has one of them.
        logs=_logs(values, task.local_world_size if task is not None else nproc_per_node),
        output=_output(values, environ, settings),
        environ=_environ(values, environ, settings),
        watch=_watch(values, settings, command),
        max_restarts=values.max_restarts,
        shutdown_timeout_s=_shutdown_timeout_s(values.shutdown_timeout, environ, settings),
        signals=_signals(values.signals_to_handle),
        numa_binding=values.numa_binding,
        virtual_local_rank=values.virtual_local_rank,
        event_log_handler=values.event_log_handler,
        settings=settings,
        argv=tuple(arguments),
        show_config=values.show_config,
        dry_run=values.dry_run,
        hosts=hosts,
        in_batch_job=is_in_batch_job(environ),
        in_pod="KUBERNETES_SERVICE_HOST" in environ,
        checks=_checks(values),
        retry=_retry(values),
        wraps=_wraps(values),
        leftovers=values.leftovers,
        leftovers_timeout_s=values.leftovers_timeout,
        secret_file=values.job_secret_file,
        sign_messages=values.sign_messages,
    )


def _check_seconds(values: SimpleNamespace, dest: str, hint: str) -> None:
    value = getattr(values, dest)
    if value < 0:
        raise UsageError(f"--{dest.replace('_', '-')} {value:g} must not be negative", hint)
    if not 0 <= value < _LONGEST_S:
        raise UsageError(f"--{dest.replace('_', '-')} {value:g} is not a number of seconds", hint)


def _check_count(values: SimpleNamespace, dest: str, hint: str) -> None:
    value = getattr(values, dest)
    if value < 0:
        raise UsageError(f"--{dest.replace('_', '-')} {value} is negative", hint)


def _environ(values: SimpleNamespace, environ: Mapping[str, str], settings: Mapping[str, Setting]) -> EnvironConfig:
    pairs: tuple[tuple[str, str], ...] = ()
    if values.env:
        from saferun.cli.env_option import read_env

        pairs = read_env(values.env, environ, print_error, on_command_line=settings["env"].origin == "flag")
    return EnvironConfig(
        profiles=tuple(name for name in values.env_profile if name),
        profile_path=tuple(values.env_profile_path),
        env=pairs,
        unset=tuple(values.unset),
        vendor=values.vendor,
        lint=values.lint == "on",
    )


def _wraps(values: SimpleNamespace) -> tuple[WrapConfig, ...]:
    if not values.wrap:
        return ()
    from saferun.cli.wrap_option import read_wraps

    return read_wraps(values.wrap)


def _watch(values: SimpleNamespace, settings: Mapping[str, Setting], command: Command) -> WatchConfig:
    _check_seconds(values, "hang_timeout", "0 turns it off")
    _check_seconds(values, "external_wait_timeout", "0 makes no difference between such waits and others")
    _check_seconds(values, "capture_budget", "0 turns it off")
    _check_seconds(values, "cause_wait", "0 turns it off")
    _check_seconds(values, "slow_window", "0 turns it off")
    _check_seconds(values, "bar_interval", "0 shows it once a second")
    _check_seconds(values, "slow_dumps", "0 turns it off")
    _check_seconds(values, "pdb_timeout", "0 waits forever")
    if values.pdb and values.no_inject:
        raise UsageError("--pdb needs the start-up hook, which --no-inject leaves out", "leave one of them out")
    _check_count(values, "keep_runs", "use 0 to remove nothing")
    _check_count(values, "keep_cores", "to keep none, leave --cores at backtrace")
    if values.on_hang == "restart" and values.max_restarts <= 0 and not values.spares:
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
        cause_wait_s=values.cause_wait,
        external_wait_s=values.external_wait_timeout,
        external_wait_asked=settings["external_wait_timeout"].origin != "default",
        slow_window_s=values.slow_window,
        slow_dumps_s=max(values.slow_dumps, _LEAST_DUMPS_S) if values.slow_dumps > 0 else 0.0,
        native=values.native_stacks,
        strace=values.strace,
        cores=values.cores,
        keep_cores=values.keep_cores,
        gdb=values.gdb,
        inject=not values.no_inject,
        cores_asked=settings["cores"].origin != "default" and values.cores != "off",
        trace_calls=_traced_code(values, command),
        trace_lines=values.trace_lines,
        pdb=values.pdb,
        pdb_timeout_s=values.pdb_timeout,
    )


def _traced_code(values: SimpleNamespace, command: Command) -> tuple[str, ...]:
    if values.trace_calls.strip() in {"", "off"} and values.trace_lines < 0:
        return ()
    from saferun.cli.traced_code import traced_code

    return traced_code(values, command)


def _checks(values: SimpleNamespace) -> ChecksConfig:
    nics = tuple(name.strip() for name in values.nic.split(",")) if values.nic else ()
    if any(not name for name in nics) or ("auto" in nics and len(nics) > 1):
        raise UsageError(f"--nic {values.nic} is not a list of interfaces", "write it as eth0 or eth0,eth1, or auto")
    return ChecksConfig(
        preflight=values.preflight,
        full=values.preflight_full,
        nics=nics,
        health=values.health,
        health_paths=tuple(values.health_path),
    )


def _retry(values: SimpleNamespace) -> RetryConfig:
    _check_count(values, "start_retries", "use 0 for no retries")
    _check_seconds(values, "retry_wait", "use 0 or more")
    _check_seconds(values, "start_window", "use 0 or more")
    return RetryConfig(
        start_retries=values.start_retries,
        wait_s=values.retry_wait,
        start_window_s=values.start_window,
        always=values.retry_always,
        exclude_bad_hosts=values.exclude_bad_hosts,
        exclude_file=values.exclude_file,
        by_progress=values.restart_limit == "progress",
    )


def _check_monitor_interval(value: float) -> None:
    if not 0 <= value < float("inf"):
        raise UsageError(f"--monitor-interval {value} is not a time", "leave it out: saferun does not poll")


def _logs(values: SimpleNamespace, local_world_size: int) -> LogConfig:
    log_dir = values.log_dir or None
    if log_dir is not None and log_dir != os.devnull and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise UsageError(f"--log-dir {log_dir} is not a directory", "pass a directory; it is made if necessary")
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
        redirects=_masks("--redirects", values.redirects, local_world_size),
        tee=_masks("--tee", values.tee, local_world_size),
        local_ranks_filter=shown,
        duplicate_stdout_filters=tuple(values.duplicate_stdout_filters),
        duplicate_stderr_filters=tuple(values.duplicate_stderr_filters),
        logs_specs=values.logs_specs,
    )


def _masks(option: str, text: str, local_world_size: int) -> tuple[int, ...]:
    """``3`` for all local ranks, or ``0:1,1:2`` for some."""
    text = text.removesuffix("\n")  # as torchrun has it: the end of a block of YAML
    if text in {"0", "1", "2", "3"}:
        return (int(text),) * local_world_size
    masks = [0] * local_world_size
    for item in text.split(","):
        rank, colon, mask = item.partition(":")
        if not (colon and rank.isascii() and rank.isdigit() and mask in {"0", "1", "2", "3"}):
            raise UsageError(
                f"{option} {text} is neither 0, 1, 2, 3 nor LOCAL_RANK:N,LOCAL_RANK:N",
                "1 is stdout, 2 stderr, 3 both",
            )
        if int(rank) < local_world_size:
            masks[int(rank)] = int(mask)
    return tuple(masks)


def _output(values: SimpleNamespace, environ: Mapping[str, str], settings: dict[str, Setting]) -> OutputConfig:
    prefix: str | None = values.prefix
    legacy = None
    if settings["log_line_prefix_template"].origin == "flag" and settings["prefix"].origin != "flag":
        prefix = None  # what stands on the command line wins
    if prefix is None:
        # An empty template is none, as to torchrun.
        legacy = values.log_line_prefix_template or environ.get(_TEMPLATE) or None
        if legacy is not None and not values.log_line_prefix_template:
            settings["log_line_prefix_template"] = Setting(legacy, "environment", _TEMPLATE)
        prefix = DEFAULT_PREFIX if legacy is None else None
    elif prefix == "none":
        prefix = None
    else:
        from saferun.console.prefix import check_template

        check_template(prefix)
    return OutputConfig(
        run_dir=None if values.run_dir in {None, KEEP_NO_FILES} else values.run_dir,
        keep_runs=values.keep_runs,
        keep_bytes=_size_bytes("--keep-output", values.keep_output),
        # With --preflight only there are no files, unless they are asked for.
        keep_files=values.run_dir != KEEP_NO_FILES and (values.preflight != "only" or values.run_dir is not None),
        prefix=prefix,
        legacy_template=legacy,
        pty=values.pty,
        color=values.color,
        fold=values.fold == "on",
        bar_interval_s=values.bar_interval,
        report_html=values.report_html,
        attach=_attach("any" if values.pdb and values.attach == "auto" else values.attach),
        on_event=_split_command("--on-event", values.on_event) if values.on_event else (),
        metrics=values.metrics,
        metrics_port=_metrics_address(values.metrics_port) if values.metrics_port else None,
    )


def _attach(text: str) -> Literal["auto", "any", "off"] | int:
    if text in {"auto", "any", "off"}:
        return text  # type: ignore[return-value]
    if not (text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS):
        raise UsageError(f"--attach {text} is no rank", "pass a rank, or auto, any, off")
    return int(text)


def _size_bytes(option: str, text: str) -> int:
    if text == "all":
        return 0
    short = text.upper().removesuffix("B").removesuffix("I")
    factor = 1 << 10 * (" KMGT".find(short[-1:]) if short[-1:] in "KMGT" else 0)
    number = short[:-1] if factor > 1 else short
    if not number.isdecimal() or len(number) > _MOST_DIGITS or int(number) * factor < _LEAST_KEPT_BYTES:
        raise UsageError(
            f"{option} {text} is not a size of at least 64K", "write it like 100M, 2G, or all for no limit"
        )
    return int(number) * factor


def _metrics_address(text: str) -> tuple[str, int]:
    """The address and the port of ``--metrics-port``. No name is looked up: that may take forever."""
    from _socket import AF_INET, AF_INET6, inet_pton

    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    address = {"": "0.0.0.0" if colon else "127.0.0.1", "localhost": "127.0.0.1"}.get(bare, bare)  # noqa: S104 - asked for
    try:
        inet_pton(AF_INET6 if ":" in address else AF_INET, address)
        is_known = port.isascii() and port.isdecimal() and len(port) <= _MOST_DIGITS and int(port) <= _LARGEST_PORT
    except (OSError, ValueError):
        is_known = False
    if not is_known or (":" in bare and bare == host):
        raise UsageError(
            f"--metrics-port {text} is not a port of an address",
            "write it like 9400, 10.0.0.5:9400, [::1]:9400, or :9400 for all addresses",
        )
    return address, int(port)


def _split_command(name: str, text: str) -> tuple[str, ...]:
    """A command line as a shell splits it; there is no shell that runs it."""
    import shlex

    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{name} {text}: {str(error).lower()}", "quote it as in a shell") from None
    if not argv:
        raise UsageError(f"{name} {text!r} names no program", "name one, or leave the option out")
    return argv


def _shutdown_timeout_s(value: int | None, environ: Mapping[str, str], settings: dict[str, Setting]) -> float:
    if value is None:
        text = environ.get(_TIMEOUT)
        if text is None:
            return float(DEFAULT_SHUTDOWN_TIMEOUT_S)
        try:
            value = max(int(text), 0)  # torchrun takes a negative one, and kills at once
        except ValueError:
            raise UsageError(f"{_TIMEOUT}={text} is not a number of seconds", "use a whole number") from None
        settings["shutdown_timeout"] = Setting(value, "environment", _TIMEOUT)
    if value < 0:
        raise UsageError(f"--shutdown-timeout {value} is negative", "use 0 to kill at once")
    return float(value)


def _signals(text: str) -> tuple[int, ...]:
    import signal

    signums = []
    for name in text.split(","):
        signum = getattr(signal, name.strip(), None)
        if not isinstance(signum, signal.Signals):
            print_error(f"saferun: --signals-to-handle: there is no signal {name.strip()!r}; it is left out")
        elif signum in {signal.SIGKILL, signal.SIGSTOP}:
            raise UsageError(f"--signals-to-handle {text}: no program can handle {signum.name}", "leave it out")
        else:
            signums.append(int(signum))
    return tuple(signums)
