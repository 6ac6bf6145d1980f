"""What several checks need: small files read, sizes put into words."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from saferun.errors import suppress
from saferun.linux.nccl_files import system_file, user_file, variables_in_nccl_files
from saferun.model import Value
from saferun.preflight.checks.context import CheckContext

GIB = 1 << 30
MIB = 1 << 20

# Less than any check has.
_FILES_S = 0.5


def own_path(context: CheckContext, path: str) -> str:
    """An absolute path below the context's root."""
    return context.path(path.lstrip("/"))


class NcclEnviron(Value):
    """The ranks' environment, and what NCCL's own files (RCCL's on hosts with AMD's GPUs) add to it.

    Attributes:
        environ: the variables; those of the environment win.
        files: what names the file that a variable is from, by the variable's name.
        users_file: what names the user's file, which wins over the system's.
        is_complete: whether that one could be read.
    """

    environ: Mapping[str, str]
    files: Mapping[str, str]
    users_file: str = ""
    is_complete: bool = True

    def is_known(self, name: str) -> bool:
        """Whether it is certain what NCCL gets for a variable, which the user's file may set otherwise."""
        return self.is_complete or (bool(self.environ.get(name)) and name not in self.files)

    def known(self, name: str) -> str:
        """The value of a variable; empty where there is none, or it is not certain."""
        return self.environ.get(name, "") if self.is_known(name) else ""

    def named(self, name: str) -> str:
        """``NCCL_SOCKET_IFNAME``, or ``NCCL_SOCKET_IFNAME of /etc/nccl.conf``."""
        return f"{name} of {self.files[name]}" if name in self.files else name

    def without(self, name: str) -> str:
        """What to do so that a variable is not set: ``unset …``, or ``take … out of /etc/nccl.conf``."""
        return f"take {name} out of {self.files[name]}" if name in self.files else f"unset {name}"

    def where(self, name: str) -> str:
        """`` (from /etc/nccl.conf)`` behind a value that the user does not find in the environment; else nothing."""
        return f" (from {self.files[name]})" if name in self.files else ""


def with_nccl_conf(context: CheckContext) -> NcclEnviron:
    """The ranks' environment with what NCCL's own files add to it.

    A home directory that does not answer costs the user's file.
    """
    environ = context.environ
    if context.vendor == "none":
        return NcclEnviron(environ, {})
    path, system = user_file(environ, context.vendor), system_file(context.vendor)
    own: list[dict[str, str]] = []
    reader = threading.Thread(target=lambda: own.append(variables_in_nccl_files([path])), daemon=True)
    with suppress(RuntimeError):  # there can be no other thread
        reader.start()
        reader.join(_FILES_S)
    users, is_complete = (own[0], True) if own else ({}, False)
    users_name = "NCCL_CONF_FILE" if environ.get("NCCL_CONF_FILE") else f"~/{os.path.basename(path)}"
    variables, files = dict(environ), {}
    for file, found in ((users_name, users), (system, variables_in_nccl_files([own_path(context, system)]))):
        for name, value in found.items():
            if name.startswith("NCCL_") and name not in variables:
                variables[name], files[name] = value, file
    return NcclEnviron(variables, files, users_name, is_complete)


def is_switched_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to something that switches it on."""
    return environ.get(name, "").strip().lower() in {"1", "y", "yes", "t", "true", "on"}


def list_of_numbers(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it: ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def listed(names: Sequence[str], most: int) -> str:
    """``a``, ``a and b``, ``a, b and c``; of many, the first ones and how many others."""
    shown = [*names[:most], *([f"{len(names) - most} others"] if len(names) > most else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def listed_are(names: Sequence[str], most: int) -> str:
    """The same as the subject of a sentence: ``a is``, ``a and b are``."""
    return f"{listed(names, most)} {'is' if len(names) == 1 else 'are'}"
