"""Why a launch is refused before it begins: for the user, the program that started saferun, and the other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from saferun.config import JobMembership
from saferun.console.stderr import print_error
from saferun.errors import SaferunError, printable

_FILE_S = 5.0
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def give_up(error: SaferunError, memberships: Sequence[JobMembership], environ: Mapping[str, str]) -> None:
    """Say why nothing is started, here and on the other hosts, which would wait for this one."""
    several = [membership for membership in memberships if membership.hosts.started > 1]
    if not several:
        print_error(error)
        _write_error_file(error, environ)
        return
    from saferun.launch.withdrawal import with_host, withdraw

    reason, error = error, with_host(error)
    print_error(error)
    withdraw(several[-1], reason, environ)
    _write_error_file(error, environ)


def _write_error_file(error: SaferunError, environ: Mapping[str, str]) -> None:
    """Write the error to TORCHELASTIC_ERROR_FILE, if that is set, as torchrun does with what its main function raises.

    Its parser writes nothing, nor does saferun's, which does not come here. Another process writes, since the file
    system may not answer.
    """
    path = environ.get(_ERROR_FILE)
    if not path:
        return
    from saferun.linux.child_output import run_forked
    from saferun.linux.error_files import write_launcher_error

    def write(write_fd: int) -> None:
        try:
            write_launcher_error(error.what, path)
        except OSError as refused:
            os.write(write_fd, os.fsencode(refused.strerror or str(refused)))

    try:
        output, status = run_forked(write, _FILE_S)
        why = os.fsdecode(output) if status is not None else "the file system does not answer"
    except OSError as refused:
        why = refused.strerror or str(refused)
    if why:
        print_error(f"saferun: {_ERROR_FILE} {printable(path)}: {printable(why)}")
