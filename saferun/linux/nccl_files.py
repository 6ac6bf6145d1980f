"""The variables that NCCL reads from files: ``~/.nccl.conf`` (or ``NCCL_CONF_FILE``), and ``/etc/nccl.conf``.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, its first paragraph. A variable of the
environment wins over both, and the user's file over the system's.
"""

from __future__ import annotations

from collections.abc import Mapping

from saferun.linux.small_files import read_at_once

SYSTEM_FILE = "/etc/nccl.conf"
_MOST_BYTES = 65536


def user_file(environ: Mapping[str, str]) -> str:
    """The path of the user's file, whether or not it is there."""
    return environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"


def variables_in_nccl_files(
    environ: Mapping[str, str], system_file: str = SYSTEM_FILE, *, with_user: bool = True
) -> dict[str, str]:
    """The variables that the files set, with their values.

    Args:
        environ: the ranks' environment.
        system_file: path of the system's file.
        with_user: whether to read the user's file; False: it is missing, or does not answer.
    """
    found: dict[str, str] = {}
    for path in (*([user_file(environ)] if with_user else []), system_file):
        for line in read_at_once(path, _MOST_BYTES, follow=True).decode(errors="replace").splitlines():
            name, is_set, value = line.partition("=")
            if is_set and not name.startswith("#"):
                found.setdefault(name.strip(), value.strip())
    return found
