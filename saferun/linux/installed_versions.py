"""The versions of the packages that the ranks' interpreter would import, without importing them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from saferun.linux.small_files import list_directory, read_text

_MAX_BYTES = 64 * 1024  # of torch/version.py, which has some ten lines


def read_package_versions(directories: Sequence[str]) -> dict[str, str]:
    """Read the versions of ``torch``, ``nccl``, and the ``cuda`` or ``hip`` and ``rocm`` it was built for, from files.

    NCCL's is that of the package beside torch: if torch has NCCL built in, or loads the system's, no file has its
    version.

    Args:
        directories: those with packages: ``sys.path`` of the ranks' interpreter.
    """
    for directory in directories:
        text = read_text(os.path.join(directory or ".", "torch", "version.py"), _MAX_BYTES)
        if text:
            versions = _torch_versions(text)
            nccl = _packaged_nccl(directory or ".") if "rocm" not in versions else None
            return {**versions, **({"nccl": nccl} if nccl is not None else {})}
    return {}


def _torch_versions(text: str) -> dict[str, str]:
    """Parse ``torch/version.py``: ``__version__ = '2.13.0+rocm7.1'``, ``hip: Optional[str] = '7.1.25424-…'``."""
    values = parse_assignments(text)
    names = (("torch", "__version__"), ("cuda", "cuda"), ("hip", "hip"), ("rocm", "rocm"))
    found = {key: word for key, name in names if (word := values.get(name))}
    # HIP is released with ROCm and has its version, except for the last number, which counts builds.
    hip = found.get("hip")
    if hip is not None and "rocm" not in found:
        found["rocm"] = ".".join(hip.split(".")[:2])
    return found


def parse_assignments(text: str) -> dict[str, str | None]:
    """The names in a file of assignments, with or without a type, and their string values; None: another value."""
    values: dict[str, str | None] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        value = value.strip()
        is_text = len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]
        values[name.partition(":")[0].strip()] = value[1:-1] if is_text else None
    return values


def _packaged_nccl(directory: str) -> str | None:
    for name in list_directory(directory):
        # nvidia_nccl_cu13-2.29.7.dist-info
        package, _, version = name.removesuffix(".dist-info").partition("-")
        if name.endswith(".dist-info") and package.lower().startswith("nvidia_nccl_cu") and version:
            return version
    return None
