"""What stands above this process, and what MPI's process manager, or a command of a scheduler, answers it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from saferun.linux.procfs import read_cmdline, read_stat

_MOST_ANCESTORS = 16
_ANSWER_S = 5.0
_MOST_BYTES = 1 << 16
_MOST_ANSWER_BYTES = 1 << 22


def command_lines_above() -> list[list[str]]:
    """The command lines of the processes above this one, the nearest first, as far as they can be seen."""
    found: list[list[str]] = []
    pid = os.getppid()
    while pid > 1 and len(found) < _MOST_ANCESTORS:
        found.append(read_cmdline(pid))
        stat = read_stat(pid)
        pid = stat.ppid if stat is not None else 0
    return found


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
