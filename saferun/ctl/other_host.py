"""The way of a subcommand to the host of a rank: by srun within the job, or by ssh, with this terminal."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import termios
from typing import TYPE_CHECKING, Any, NoReturn

from saferun.captures.tools import find_tool
from saferun.console.stderr import print_error
from saferun.ctl.live_run import SilentError, connections, open_own_run
from saferun.errors import UsageError, printable, suppress
from saferun.files.run_files import host_names, living_records, names_in
from saferun.linux.prctl import die_with_parent
from saferun.linux.process_identity import is_living
from saferun.model import JsonObject, Value, signal_name
from saferun.text.decoding import MALFORMED, display_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from saferun.ctl.live_run import LiveRun

# What a scheduler calls a host. A name that begins with a dash would be an option of ssh.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,254}")
_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_CONNECT_S = 10
_MOST_NAMES = 100_000
_LONGEST_NAME = 255
# ssh's own failure, as opposed to that of the command. Source: ssh(1), EXIT STATUS.
_SSH_FAILED = 255
_PASSED_OVER = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)


class Destination(Value):
    """The host of a rank.

    Attributes:
        host: its name in the job.
        run: what names the run there.
        slurm_job: the id of the job of Slurm that the host belongs to; empty: of none.
        is_elsewhere: whether its saferun lives, as far as is known, and is not one of this host's processes.
    """

    host: str
    run: str
    slurm_job: str = ""
    is_elsewhere: bool = False


def add_here_argument(parser: argparse.ArgumentParser) -> None:
    """The option that keeps a subcommand on this host."""
    parser.add_argument(
        "--here", action="store_true", help="only on this host: if the rank runs on another one, say on which"
    )


def find_rank(directory: Path, rank: str, op: str, sign: str) -> tuple[LiveRun, JsonObject] | Destination | None:
    """The saferun of a rank, and its answer, if they are on this host; else the host of the rank, if that is known.

    Args:
        directory: the run's.
        rank: its number; empty: the saferun chooses one.
        op: what is asked of a saferun.
        sign: what an answer has where the rank is there, or is refused.

    Raises:
        UsageError: the run has ended, or the request is refused, or nothing is known of where the rank is.
    """
    elsewhere = ""
    silent: SilentError | None = None
    more: dict[str, Any] = {"rank": rank} if rank else {}
    try:
        for live in connections(directory):
            try:
                reply = live.ask(op, **more)
                if sign in reply or "refused" in reply:
                    return live, reply
                with suppress(*MALFORMED):
                    elsewhere = elsewhere or display_text(reply["elsewhere"], _LONGEST_NAME)
            except SilentError as error:
                silent = silent or error  # the others of the job on this host may have the rank
            except BaseException:
                live.close()
                raise
            live.close()
        if silent is not None and not elsewhere:
            raise silent
    except UsageError:
        # Perhaps all that live are on other hosts, as seen from a login node.
        to = destination(directory, rank) if rank else None
        if to is None or not to.is_elsewhere:
            raise
        return to
    return destination(directory, rank, elsewhere)


def destination(directory: Path, rank: str, named: str = "") -> Destination | None:
    """The host of a rank, as the run directory has it; None: it has nothing of that rank.

    Args:
        directory: the run's.
        rank: its number.
        named: the host that a saferun of the job has named.

    Raises:
        UsageError: the directory is another user's, who would choose the host.
    """
    try:
        fd = open_own_run(directory)
    except OSError:
        return None
    try:
        hosts = host_names(fd)
        host = named or _host_with(fd, hosts, rank)
        records = living_records(fd)
    finally:
        os.close(fd)
    if not host:
        return None
    own = next((one for one in records if one.host == host), None)
    record = own or next(iter(records), None)
    # Of hosts that share no run directory each has one of its own, whose name is another one.
    run = str(directory) if host in hosts or record is None else record.run_id
    is_elsewhere = own is not None and own.process is not None and is_living(own.process) is None
    return Destination(host, run, record.slurm_job if record is not None else "", is_elsewhere)


def _host_with(fd: int, hosts: Sequence[str], rank: str) -> str:
    """The host whose files have this rank in the newest attempt."""
    newest, found = -1, ""
    for host in hosts:
        with suppress(OSError):
            below = os.open(host, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                for name in names_in(below, _MOST_NAMES):
                    attempt = _ATTEMPT.fullmatch(name)
                    if attempt is not None and int(attempt[1]) > newest and _has(below, f"{name}/rank_{rank}"):
                        newest, found = int(attempt[1]), host
            finally:
                os.close(below)
    return found


def _has(fd: int, path: str) -> bool:
    try:
        os.stat(path, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def command_line(subcommand: str, rank: str, to: Destination, options: Sequence[str] = ()) -> list[str]:
    """What runs the subcommand there, with this terminal; empty: nothing here can.

    Args:
        subcommand: of saferunctl.
        rank: the rank's number.
        to: where.
        options: more of the subcommand's.
    """
    own = [sys.executable, "-m", "saferun.ctl", subcommand, to.run, "--rank", rank, *options, "--here"]
    srun = find_tool("srun") if to.slurm_job else ""
    if srun:
        # As a step of the job, which needs nothing of the host for itself. Source: srun(1).
        step = ("--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={to.host}", "--mpi=none", "--pty")
        return [srun, f"--jobid={to.slurm_job}", *step, *own]
    ssh = find_tool("ssh")
    return [ssh, "-t", "-o", f"ConnectTimeout={_CONNECT_S}", "--", to.host, shlex.join(own)] if ssh else []


def by_hand(subcommand: str, rank: str, to: Destination, options: Sequence[str] = ()) -> str:
    """The command that a user types to do the same."""
    own = shlex.join(("saferunctl", subcommand, to.run, "--rank", rank, *options))
    is_plain = shlex.quote(to.run) == to.run
    return f"ssh -t {shlex.quote(to.host)} {own if is_plain else shlex.quote(own)}"


def refuse(subcommand: str, rank: str, to: Destination | None, options: Sequence[str] = ()) -> NoReturn:
    """The rank is on another host, and this process stays here.

    Raises:
        UsageError: always, with the host, and what to run there.
    """
    if to is None:
        raise UsageError(f"rank {rank} runs on another host of the job", "saferunctl status names it", exit_code=1)
    raise UsageError(f"rank {rank} runs on {to.host}", f"there: {by_hand(subcommand, rank, to, options)}", exit_code=1)


def go(subcommand: str, rank: str, to: Destination | None, options: Sequence[str] = (), *, stays: bool) -> int:
    """Run the subcommand on the host of the rank. Returns its exit code.

    Args:
        subcommand: of saferunctl.
        rank: the rank's number.
        to: where; None: that is not known.
        options: more of the subcommand's.
        stays: whether the user wants nothing to be done elsewhere.

    Raises:
        UsageError: it is not to be done elsewhere, or cannot be.
    """
    if to is None or stays or not _HOST.fullmatch(to.host):
        refuse(subcommand, rank, to, options)
    command = command_line(subcommand, rank, to, options)
    if not command:
        refuse(subcommand, rank, to, options)
    tool = os.path.basename(command[0])
    print_error(printable(f"saferun: rank {rank} runs on {to.host}: going there by {tool}"))
    code = _run(command)
    if code == _SSH_FAILED or (tool == "srun" and code):
        what = f"{tool} ended with {signal_name(-code) if code < 0 else f'exit code {code}'}"
        raise UsageError(what, f"if it did not get to {to.host}: {by_hand(subcommand, rank, to, options)}", exit_code=1)
    return code


def _run(command: Sequence[str]) -> int:
    """Run a command on this terminal, which is left as it was."""
    import subprocess  # slow, and not needed for --help

    terminal = termios.tcgetattr(0)
    own = os.getpid()
    environ = {name: value for name, value in os.environ.items() if not _is_of_step(name)}
    before = {signum: signal.signal(signum, lambda *_: None) for signum in _PASSED_OVER}  # not inherited
    try:
        child = subprocess.Popen(
            command,
            env=environ,
            preexec_fn=lambda: die_with_parent(own, signal.SIGHUP),  # noqa: PLW1509 - there are no threads
        )
        return child.wait()
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}", "", exit_code=1) from None
    finally:
        with suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, terminal)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _is_of_step(name: str) -> bool:
    """Whether srun would take a variable for an option: those of the job that this shell is in, or of a step."""
    return name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"
