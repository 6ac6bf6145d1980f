"""The versions that profiles ask for, of what the ranks' interpreter would import, without importing it."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.linux.installed_versions import read_package_versions

_ASKED_FOR = ("torch", "rocm", "nccl")


def read_versions(places: Sequence[str]) -> dict[str, str]:
    """The versions of ``torch``, ``nccl`` and ``rocm``, as far as files tell them.

    Args:
        places: the directories where packages are, in the order of import: ``sys.path`` of the ranks' interpreter.
    """
    found = read_package_versions(places)
    return {name: found[name] for name in _ASKED_FOR if name in found}
