"""Runs a command for a program that ignores SIGCHLD, and reports the exit code, which the kernel would not, by a pipe.

``python -m saferun.api.exit_code_pipe FD PARENT COMMAND...``. FD is a pipe to the program, which is process PARENT. It
gets two lines: the command's process, and its exit code, minus the number of a signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from saferun.linux.prctl import die_with_parent

_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def main(fd: int, parent: int, command: Sequence[str]) -> None:
    """Run the command."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The ranks are stopped when the program exits, as without this process between the two.
    die_with_parent(parent, signal.SIGTERM)
    own = os.getpid()

    def prepare() -> None:
        die_with_parent(own)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)

    process = subprocess.Popen(command, preexec_fn=prepare)  # noqa: PLW1509 - there are no threads
    for signum in _PASSED_ON:
        signal.signal(signum, lambda received, _: process.send_signal(received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    _report(fd, process.pid)
    _report(fd, process.wait())


def _report(fd: int, number: int) -> None:
    with suppress(OSError):  # the program has been killed: the launch still ends in its own time
        os.write(fd, f"{number}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
