"""Clients of a launch's control socket, good ones and others."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.process.launching import DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.process.launching import Job


def described(job: Job) -> dict[str, Any]:
    """The content of run.json; empty where there is none yet."""
    path = job.run_dir / "run.json"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    assert isinstance(content, dict)
    return content


def control_socket(job: Job) -> str:
    """Where the launch listens, once it does."""
    return str(until(lambda: described(job).get("control_socket"), "the control socket"))


def connected(path: str) -> socket.socket:
    """A connection to a control socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(DEADLINE_S)
    connection.connect(f"\0{path[1:]}" if path.startswith("@") else path)
    return connection


def answer_to(path: str, content: bytes) -> bytes:
    """All that comes back for some bytes until the launch closes the connection."""
    with connected(path) as connection:
        received = b""
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(1 << 16):
                received += chunk
        except OSError:
            pass  # closed while there was more to be read
        return received


def saferunctl(job: Job, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, in the launch's own directory."""
    return subprocess.run(
        control_command(*arguments),
        cwd=folder or job.folder / "job",
        env=job.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def control_command(*arguments: str) -> Sequence[str]:
    """The command line."""
    return (sys.executable, "-m", "saferun.ctl", *arguments)
