"""Munge daemons of a test's own: each stands for a host, and those with the same key form a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.linux.munge import Munge
from tests.process.somebody import directory_for_all

_DAEMON = shutil.which("munged") or "/usr/sbin/munged"
has_munge = os.path.exists(_DAEMON) and shutil.which("munge") is not None and os.geteuid() == 0
# Where CI is set, nothing is left out: the fixtures fail.
needs_munge = pytest.mark.skipif(not has_munge and not os.environ.get("CI"), reason="there is no munged, or no root")


@contextlib.contextmanager
def munge_hosts(count: int) -> Iterator[list[Munge]]:
    """Hosts of one cluster, as far as munge is concerned. Every user reaches their sockets."""
    with directory_for_all(0o755) as directory, contextlib.ExitStack() as stack:
        key = directory / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        yield [stack.enter_context(_daemon(directory / f"host{number}", key)) for number in range(count)]


@contextlib.contextmanager
def _daemon(directory: Path, key: Path) -> Iterator[Munge]:
    directory.mkdir(mode=0o755)
    socket = directory / "socket"
    options = {"socket": socket, "key-file": key, "pid-file": directory / "pid", "seed-file": directory / "seed"}
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [_DAEMON, "--foreground", "--force", *(f"--{name}={path}" for name, path in options.items())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        while not socket.exists():  # it is put there when the daemon listens
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        yield Munge("/usr/bin/munge", "/usr/bin/unmunge", str(socket))
    finally:
        process.terminate()
        process.wait()


def credential_of(munge: Munge, payload: bytes, *, uid: int, readable_for: int) -> str:
    """A credential that a user has made, by munge's own program."""
    argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", munge.encoder]
    argv += [f"--socket={munge.socket}", f"--restrict-uid={readable_for}"]
    return subprocess.run(argv, input=payload, capture_output=True, check=True).stdout.decode().strip()
