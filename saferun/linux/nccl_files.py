"""The variables that NCCL reads from files: ``~/.nccl.conf`` (or ``NCCL_CONF_FILE``), and ``/etc/nccl.conf``.

RCCL, AMD's, reads ``~/.rccl.conf`` and ``/etc/rccl.conf`` in the same way. A variable of the environment wins over
both, and the user's file over the system's.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, its first paragraph; RCCL,
src/misc/param.cc, and https://rocm.docs.amd.com/projects/rccl/en/latest/api-reference/env-variables.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from saferun.linux.small_files import read_at_once

_MOST_BYTES = 65536


def user_file(environ: Mapping[str, str], vendor: str) -> str:
    """The path of the user's file, whether or not it is there.

    Args:
        environ: the ranks' environment.
        vendor: whose GPUs the ranks use: ``amd`` for RCCL's file, else NCCL's.
    """
    return environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.{_name(vendor)}"


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
