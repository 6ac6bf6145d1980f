"""What several checks need: small files read, sizes put into words."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from saferun.errors import suppress
from saferun.linux.nccl_files import system_file, user_file, variables_in_nccl_files
from saferun.preflight.checks.context import CheckContext

GIB = 1 << 30
MIB = 1 << 20

# Less than any check has.
_FILES_S = 0.5


def own_path(context: CheckContext, path: str) -> str:
    """An absolute path below the context's root."""
    return context.path(path.lstrip("/"))


def with_nccl_conf(context: CheckContext) -> Mapping[str, str]:
    """The ranks' environment, and what NCCL's own files (RCCL's on hosts with AMD's GPUs) add to it. Variables win.

    A home directory that does not answer costs the user's file.
    """
    environ = context.environ
    if context.vendor == "none":
        return environ
    paths = user_file(environ, context.vendor), system_file(context.vendor, context.root)
    found: list[dict[str, str]] = []
    reader = threading.Thread(target=lambda: found.append(variables_in_nccl_files(paths)), daemon=True)
    with suppress(RuntimeError):  # there can be no other thread
        reader.start()
        reader.join(_FILES_S)
    variables = found[0] if found else variables_in_nccl_files(paths[1:])
    return {**{name: value for name, value in variables.items() if name.startswith("NCCL_")}, **environ}


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
