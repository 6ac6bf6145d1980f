"""What stands above this process, and what MPI's process manager, or a command of a scheduler, answers it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from saferun.cluster.schedulers import Ancestry
from saferun.linux.procfs import read_cmdline, read_name, read_stat

_MOST_ANCESTORS = 16
_ANSWER_S = 5.0
_MOST_BYTES = 1 << 16
_MOST_ANSWER_BYTES = 1 << 22


def processes_above() -> Ancestry:
    """The processes above this one, the nearest first, as far as they can be seen."""
    lines: list[list[str]] = []
    pids: list[int] = []
    at_terminal: set[int] = set()
    pid = os.getppid()
    while pid > 1 and len(lines) < _MOST_ANCESTORS:
        if _reads_a_terminal(pid):
            at_terminal.add(len(lines))
        lines.append(read_cmdline(pid))
        pids.append(pid)
        stat = read_stat(pid)
        pid = stat.ppid if stat is not None else -1
    # Every process descends from number 1 of its container, but for what was started from outside. Where containers of
    # a pod share their processes, number 1 is the pod's, and all else comes from outside.
    entered = pid == 0 and os.getpid() != 1 and read_name(1) not in {"", "pause", "pod", "catatonit"}
    return Ancestry(lines, at_terminal, entered, pids)


def _reads_a_terminal(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/0").startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
    except OSError:
        return False


def ask_process_manager(key: str, environ: Mapping[str, str]) -> str | None:
    """What MPI's process manager (hydra) has stored under a key; None: nothing, or it does not answer in time.

    It is spoken to over the descriptor that it left this process, in lines of ``name=value`` pairs (PMI-1). It learns
    at once that this process will not go on with it: without that the end of this process would count as a crash.

    Source: "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems", EuroMPI 2010.

    Args:
        key: such as ``PMI_process_mapping``.
        environ: tells the descriptor.
    """
    text = environ.get("PMI_FD", "")
    if not (text.isascii() and text.isdigit()):
        return None
    try:
        channel = socket.socket(fileno=os.dup(int(text)))
    except (OSError, OverflowError):
        return None  # inherited by name only
    with channel:
        if channel.family != socket.AF_UNIX or channel.type != socket.SOCK_STREAM:
            return None
        channel.settimeout(_ANSWER_S)
        try:
            _ask(channel, "cmd=init pmi_version=1 pmi_subversion=1")
            name = _ask(channel, "cmd=get_my_kvsname").get("kvsname", "")
            answer = _ask(channel, f"cmd=get kvsname={name} key={key}")
        except (OSError, ValueError):
            return None
        finally:
            with suppress(OSError, ValueError):
                _ask(channel, "cmd=finalize")
    return answer.get("value") if answer.get("rc", "0") == "0" else None


def _ask(channel: socket.socket, question: str) -> dict[str, str]:
    channel.sendall(f"{question}\n".encode())
    line = b""
    while not line.endswith(b"\n"):
        chunk = channel.recv(4096)
        if not chunk or len(line) > _MOST_BYTES:
            raise ValueError("no answer")
        line += chunk
    pairs = (word.partition("=") for word in line.decode(errors="replace").split())
    return {name: value for name, _, value in pairs}


def ask_command(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What a command of a scheduler prints; None: it is not there, fails, or takes longer than some seconds.

    Args:
        argv: its command line.
        environ: its environment.
    """
    import subprocess

    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(environ)
        )
    except (OSError, ValueError):
        return None
    try:
        out = process.communicate(timeout=_ANSWER_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: it may never end
        return None
    return out.decode(errors="replace") if process.returncode == 0 and len(out) <= _MOST_ANSWER_BYTES else None
