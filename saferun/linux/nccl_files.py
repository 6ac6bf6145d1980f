"""The variables that NCCL reads from files: ``~/.nccl.conf`` (or ``NCCL_CONF_FILE``), and ``/etc/nccl.conf``.

``~`` is the directory that getpwuid(3) has for the user, not HOME.

RCCL, AMD's, reads ``~/.rccl.conf`` and ``/etc/rccl.conf`` in the same way. A variable of the environment wins over
both, and the user's file over the system's.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, its first paragraph; NCCL and RCCL,
src/misc/param.cc (``userHomeDir``), and https://rocm.docs.amd.com/projects/rccl/en/latest/api-reference/env-variables.html.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from saferun.linux.small_files import read_at_once

_MOST_BYTES = 65536
_USERS = "/etc/passwd"
_FIELDS = 7  # passwd(5)
_MOST_USERS_BYTES = 1 << 20


def user_file(environ: Mapping[str, str], vendor: str) -> str:
    """The path of the user's file, whether or not it is there.

    Args:
        environ: the ranks' environment.
        vendor: whose GPUs the ranks use: ``amd`` for RCCL's file, else NCCL's.
    """
    return environ.get("NCCL_CONF_FILE") or f"{_home(environ)}/.{_name(vendor)}"


def _home(environ: Mapping[str, str]) -> str:
    """The user's directory in the password file; HOME for a user of a directory service, which may not answer."""
    uid = str(os.getuid())
    for line in read_at_once(_USERS, _MOST_USERS_BYTES, follow=True).decode(errors="surrogateescape").split("\n"):
        fields = line.split(":")
        if len(fields) == _FIELDS and fields[2] == uid:
            return fields[5]
    return environ.get("HOME", "")


def system_file(vendor: str) -> str:
    """The path of the system's file; ``vendor`` as above."""
    return f"/etc/{_name(vendor)}"


def variables_in_nccl_files(paths: Iterable[str]) -> dict[str, str]:
    """The variables that files set, with their values.

    Args:
        paths: of the files; the first one wins.
    """
    found: dict[str, str] = {}
    for path in paths:
        for line in read_at_once(path, _MOST_BYTES, follow=True).decode(errors="replace").splitlines():
            name, is_set, value = line.partition("=")
            if is_set and not name.startswith("#"):
                found.setdefault(name.strip(), value.strip())
    return found


def _name(vendor: str) -> str:
    return "rccl.conf" if vendor == "amd" else "nccl.conf"
