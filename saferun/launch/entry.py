"""Where a launch begins: settings in, exit code out. What runs it is put together in ``host_launch``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping

from saferun.config import LaunchConfig
from saferun.console.screen import Screen
from saferun.env.apply import resolve_environ, without_outer_files
from saferun.env.profiles import Resolution
from saferun.errors import SaferunError, printable, suppress
from saferun.files.run_dir import RunDirectory
from saferun.files.writer_client import WriterClient
from saferun.launch.preflight_part import ranks_wait
from saferun.linux.bare_socket import short_host_name
from saferun.linux.limits import has_room_for_files
from saferun.linux.prctl import become_subreaper, keep_freed_memory
from saferun.linux.procfs import children_of
from saferun.linux.reaper import Reaper
from saferun.linux.signals import not_ignored
from saferun.linux.streams import ensure_standard_descriptors, leave_keyboard
from saferun.model import Defaults
from saferun.supervisor.actions import Finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.secret import JobSecret
    from saferun.linux.preforked import PreforkedProcesses
    from saferun.preflight.check_process import CheckProcess
    from saferun.supervisor.machine import Limits, Supervisor
    from saferun.supervisor.policy import JobPolicy

_BACKSTOP_S = 5.0
# Every trial of a search for bad parts has a deadline of its own, and their number is bounded.
_COLLECTIVE_S = 6 * 3600.0
# The coordinator reports a rendezvous that fails; this is for a coordinator that does not answer.
_JOIN_BACKSTOP_S = 60.0
# These handlers of torch's give up by themselves, except for a host beyond MAX, which waits until it is needed.
_KEEP_TIME = frozenset({"c10d", "etcd-v2"})
_AWAITED_S = 2 * 3600.0  # the coordinator says at least once an hour that it waits
# Of --host-timeout: five minutes unless another one is given, as torchrun waits at its exit barrier.
_UNHEARD_TIMEOUTS = 10
# The host that decides waits for the others' evidence (``evidence_exchange``), and a little longer.
_OTHERS_S = 12.0
# A few chunks of output with their prefixes.
_KEPT_BYTES = 4 << 20
# More ranks than this on one host are rare, and each preforked process takes memory.
_MOST_PREFORKED = 16


def launch(config: LaunchConfig, environ: Mapping[str, str], checks: CheckProcess | None = None) -> int:
    """Carry out one launch on this host.

    Args:
        config: the launch.
        environ: saferun's own environment.
        checks: the check process, where it has been forked already.

    Returns:
        saferun's exit code. Where a signal ended the launch before anything ran, this does not return.
    """
    ensure_standard_descriptors()
    if config.output.attach == "off":
        leave_keyboard()  # otherwise each rank of a background job has a terminal of its own
    if config.checks.nics and config.checks.nics != ("auto",):
        from saferun.launch.nic_variables import with_nics

        environ = with_nics(config, environ)
    # ``env "=x"`` makes an entry without a name, which exec passes on, and Python's putenv and execve refuse.
    environ = without_outer_files({name: value for name, value in environ.items() if name})
    resolution = resolve_environ(config.environ, environ)
    # Here, because a file system that hangs may hold it: it is never read again.
    secret = _read_secret(config)
    if config.show_config or config.dry_run:
        from saferun.launch.dry_run import config_lines, plan_lines

        lines = config_lines(config) if config.show_config else []
        if config.dry_run:
            from saferun.launch.planned_wrappers import planned_wrappers

            host = short_host_name()
            wrappers, notes = planned_wrappers(config, resolution, environ, host)
            lines += plan_lines(config, resolution, environ, host, wrappers, notes)
        try:
            sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
            sys.stdout.flush()
        except BrokenPipeError:
            pass  # the reader has seen enough
        except OSError as error:
            raise SaferunError(f"standard output: {error.strerror}", "make room there, or write elsewhere") from None
        return 0
    run_id = os.urandom(8).hex()
    # Children from before (a shell that became saferun by exec may have some) are no orphans of the ranks.
    older = frozenset(children_of(os.getpid())) - (checks.pids if checks is not None else set())
    # Some daemons start their children with it blocked; without pidfds it alone reports the end of a process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    become_subreaper()
    keep_freed_memory(_KEPT_BYTES)
    reaper = Reaper(run_id, short_host_name() if config.hosts.spans_hosts else "")
    try:
        finish = _run(config, environ, resolution, run_id, older, reaper, checks, secret)
    finally:
        reaper.dismiss()
    if finish.reraise is not None:
        signal.signal(finish.reraise, signal.SIG_DFL)
        os.kill(os.getpid(), finish.reraise)
    return finish.exit_code


def _read_secret(config: LaunchConfig) -> JobSecret | None:
    """The job's secret. One host sends nothing to others, so the file is not even opened."""
    if not config.secret_file or not config.hosts.spans_hosts:
        return None
    from saferun.cluster.secret import read_secret

    setting = config.settings["job_secret_file"]
    return read_secret(config.secret_file, setting.location or "--secret-file")


def _prefork(config: LaunchConfig, environ: Mapping[str, str]) -> PreforkedProcesses | None:
    """Processes for the ranks, where these are started as soon as possible."""
    if config.hosts.spans_hosts or (config.checks_here and ranks_wait(config, environ)) or not has_room_for_files():
        return None
    from saferun.linux.preforked import PreforkedProcesses

    return PreforkedProcesses(min(config.nproc_per_node, _MOST_PREFORKED))


def _run(
    config: LaunchConfig,
    environ: Mapping[str, str],
    resolution: Resolution,
    run_id: str,
    older: frozenset[int],
    reaper: Reaper,
    checks: CheckProcess | None,
    secret: JobSecret | None,
) -> Finish:
    host = short_host_name()

    where = f"{host}: " if config.hosts.spans_hosts else ""  # the console may be that of all hosts
    early: list[str] = []  # messages from before there is a console
    print_message: Callable[[str], None] = early.append

    def warn(text: str, hint: str = "") -> None:
        print_message(f"saferun: {printable(where)}{printable(text)}" + (f"\nhint: {printable(hint)}" if hint else ""))

    writer = WriterClient(warn)
    run_dir = _open_run_dir(config, host, run_id, warn, writer)
    run_dir.scratch.on_made = reaper.note_made
    try:
        screen = _open_screen(config, run_dir)
    except OSError:
        writer.discard()
        raise
    print_message = screen.print_message
    for text in early:
        print_message(text)
    # Only now: the processes forked before stay as small as they can be.
    preforked = _prefork(config, environ)
    from saferun.launch.host_launch import HostLaunch
    from saferun.launch.launch_context import LaunchContext

    if config.hosts.prints_start_lines:
        _print_start_lines(config, screen)
    others_s = _others_s(config)
    supervisor = _open_supervisor(config, others_s)
    gc.freeze()  # all this stays to the end
    gc.enable()
    try:
        context = LaunchContext(config, environ, supervisor, screen=screen, run_dir=run_dir, host=host, run_id=run_id)
        return HostLaunch(
            context,
            resolution=resolution,
            writer=writer,
            older_children=older,
            reaper=reaper,
            others_s=others_s,
            checks=checks,
            preforked=preforked,
            secret=secret,
        ).run()
    finally:
        run_dir.close()
        if preforked is not None:
            preforked.close()


def _open_run_dir(
    config: LaunchConfig, host: str, run_id: str, warn: Callable[..., None], writer: WriterClient
) -> RunDirectory:
    output = config.output
    return RunDirectory(
        output.run_dir,
        wanted=output.keep_files,
        host=host,
        run_id=run_id,
        warn=warn,
        files=writer,
        keep_runs=output.keep_runs,
        keep_bytes=output.keep_bytes,
    )


def _print_start_lines(config: LaunchConfig, screen: Screen) -> None:
    """Where the settings come from, if no option names the file, and what there is to say of the hosts and tools."""
    if config.settings_file is not None and config.settings["config"].origin == "default":
        screen.print_message(f"saferun: settings from {printable(config.settings_file)}")
    for note in filter(None, (config.hosts.note, config.rendezvous.note)):
        screen.print_message(f"saferun: {printable(note)}")
    if config.wraps:
        from saferun.launch.wrapping import misspelt_lines

        for line in misspelt_lines(config.wraps):
            screen.print_message(f"saferun: {printable(line)}")


def _open_screen(config: LaunchConfig, run_dir: RunDirectory) -> Screen:
    output = config.output
    return Screen(
        1,
        2,
        raw=output.prefix is None and output.legacy_template is None,
        carries=True,
        bar_interval_s=output.bar_interval_s,
        color=output.color,
        skipping=False,  # until there are files that keep all of it
        where=lambda: _location_of_lines(config, run_dir),
    )


def _location_of_lines(config: LaunchConfig, run_dir: RunDirectory) -> str:
    """Where lines that the console has skipped can be read, as its note says it."""
    if run_dir.path:
        return f"all of it is in {run_dir.path}"
    if not any(config.logs.tee):
        return "there is no other copy"
    logs = config.logs.log_dir or run_dir.logs_path
    return "what -t copies is in " + (f"the log files in {logs}" if logs else "its log files")


def _open_supervisor(config: LaunchConfig, others_s: float) -> Supervisor:
    from saferun.supervisor.machine import Supervisor
    from saferun.supervisor.policy import AttemptPolicy, HangPolicy

    retry = config.retry
    attempts = AttemptPolicy(
        config.max_restarts,
        retry.start_retries,
        retry.wait_s,
        always=retry.always,
        exclude_bad_hosts=retry.exclude_bad_hosts,
        by_progress=retry.by_progress,
    )
    hangs = HangPolicy(config.watch.on_hang, abort_culprits=config.watch.cores == "keep")
    return Supervisor(attempts, _limits(config), hangs, _job_policy(config, others_s), orphans=config.leftovers)


def _limits(config: LaunchConfig) -> Limits:
    """How long each phase may last."""
    hosts, limits = config.hosts, _own_limits(config)
    if config.checks.health == "full" and config.checks_here:
        from saferun.preflight.check_process import FULL_S

        limits = limits._replace(checks_s=limits.checks_s + FULL_S)
    if config.checks.collective:
        limits = limits._replace(checks_s=_COLLECTIVE_S, probe_s=_COLLECTIVE_S)
    if hosts.spans_hosts:
        # A host that torch's rendezvous keeps as a spare waits longer than --rdzv-conf has late hosts waited for.
        least_s = 0.0 if config.rendezvous.backend == "static" else Defaults.start_timeout_s
        join_s = max(hosts.start_timeout_s, least_s) + hosts.connect_timeout_s
        may_wait_for_long = config.rendezvous.backend in _KEEP_TIME
        limits = limits._replace(
            capture_s=limits.capture_s + _OTHERS_S,
            join_s=join_s + _JOIN_BACKSTOP_S,
            awaited_s=_AWAITED_S if may_wait_for_long else 0.0,
            unreachable_s=hosts.host_timeout_s * _UNHEARD_TIMEOUTS,
        )
    return limits


def _own_limits(config: LaunchConfig) -> Limits:
    """The limits of a host that waits for no other."""
    from saferun.launch.attempt_record import CORE_BUDGET_S
    from saferun.supervisor.machine import Limits

    limits = Limits(
        # The capture ends itself at its budget; the phase is the backstop.
        capture_s=config.watch.capture_budget_s + _BACKSTOP_S,
        cause_s=config.watch.cause_wait_s,
        grace_s=config.shutdown_timeout_s,
        diagnose_s=CORE_BUDGET_S + _BACKSTOP_S,
        orphans_s=config.leftovers_timeout_s,
    )
    return limits if config.wraps else limits._replace(tools_s=0.0)


def _others_s(config: LaunchConfig) -> float:
    """How many seconds another host may take from the failure to its last message."""
    limits = _own_limits(config)
    others_s = limits.capture_s + limits.cause_s + limits.grace_s + limits.tools_s + limits.kill_s + limits.sweep_s
    return others_s + limits.diagnose_s


def _job_policy(config: LaunchConfig, others_s: float) -> JobPolicy:
    """The role of this process in its job. ``others_s``: as ``_others_s`` returns it."""
    from saferun.supervisor.policy import JobPolicy

    hosts = config.hosts
    return JobPolicy(
        spans_hosts=hosts.spans_hosts,
        outlives_leader=config.rendezvous.backend != "static",
        others_s=others_s if hosts.spans_hosts else 0.0,
        scheduler_kills_soon=bool(hosts.detected),
        least_hosts=hosts.most if config.keeps_all_hosts else hosts.least,
        moves_leader=config.moves_leader,
        awaits_replacement_host=config.rendezvous.backend != "static" and not config.in_batch_job,
        serves_tasks=hosts.task is not None and hosts.task.local_rank == 0 and hosts.task.local_world_size > 1,
        stop_signals=not_ignored(config.signals),
    )


def leave(exit_code: int) -> None:
    """End the process without the interpreter's shutdown, which a supervisor has no use for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)
