"""Shared memory, which is /dev/shm: whether it is there, how large it is, and what is free.

Python's semaphores, torch's data loaders and NCCL all put their shared memory there.
"""

from __future__ import annotations

import os

from saferun.linux.small_files import read_text
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import MIB
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult
from saferun.text.wording import size_text

# One connection of NCCL by way of shared memory takes about 9 MiB (its error message: "Error while creating shared
# memory segment … (size 9637888)"); a batch of a data loader is rarely smaller. With less nothing can be done.
_FULL_BYTES = 10 * MIB
_FULL_SHARE = 0.25  # what was made small on purpose is full when most of it is taken
# What docker gives a container that asks for nothing. It does for many jobs on CPUs; for those on several GPUs NVIDIA's
# own images print a warning: https://docs.nvidia.com/deeplearning/frameworks/user-guide/index.html (Setting the Shared
# Memory Flag), https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html (Docker).
_DOCKER_DEFAULT_BYTES = 64 * MIB
_FEW_INODES = 16
_SHM = "/dev/shm"  # noqa: S108 - it is only read
_LARGER = "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory on /dev/shm"


def check_shared_memory(context: CheckContext) -> CheckResult:
    """Whether shared memory can be had."""
    path = context.path("dev/shm")
    if not os.path.isdir(path):
        message = "there is no /dev/shm, and Python's semaphores, data loaders and NCCL need one"
        return warning(message, f"mount a tmpfs on /dev/shm ({_LARGER})", class_name="shared_memory_exhausted")
    status = os.statvfs(path)
    size_bytes, free_bytes = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    kind = _mount_kind(context)
    facts = (
        ("size_bytes", str(size_bytes)),
        ("free_bytes", str(free_bytes)),
        ("mount", kind or "none"),
        *((("free_inodes", str(status.f_favail)),) if status.f_files else ()),
    )
    if status.f_flag & os.ST_RDONLY:
        message = f"{_SHM} is mounted read-only"
        return warning(message, "mount it read-write, with mode 1777", facts, class_name="shared_memory_exhausted")
    if not os.access(path, os.W_OK | os.X_OK):
        message = f"this user cannot write to {_SHM}"
        return warning(message, "mount it with mode 1777", facts, class_name="shared_memory_exhausted")
    message = f"{_SHM} has {size_text(size_bytes)}, {size_text(free_bytes)} of it free"
    # A ramfs, and whatever tells no sizes, says 0 of everything.
    is_full = free_bytes < min(_FULL_BYTES, size_bytes * _FULL_SHARE)
    if size_bytes and (is_full or (status.f_files and status.f_favail < _FEW_INODES)):
        hint = f"give it more ({_LARGER})"
        if size_bytes >= 2 * _FULL_BYTES:
            hint = f"look at `ls -lS /dev/shm` and delete what dead jobs left{_largest(path)}, or {hint}"
        full = f"{_SHM} is full: " if is_full else f"{_SHM} takes no more files: "
        message = f"{full}{size_text(free_bytes)} of {size_text(size_bytes)} free"
        return warning(message, hint, facts, class_name="shared_memory_exhausted")
    if size_bytes and size_bytes <= _DOCKER_DEFAULT_BYTES and context.nproc > 1 and context.vendor != "none":
        message = (
            f"{_SHM} has only {size_text(size_bytes)}, and NCCL and data loaders of {context.nproc} ranks need more"
        )
        return warning(message, f"give it more ({_LARGER})", facts, class_name="shared_memory_exhausted")
    return ok(message if kind else f"{message} (no file system of its own)", facts)


def _mount_kind(context: CheckContext) -> str:
    """The type of the file system that is mounted there; empty: none is."""
    from saferun.linux.procfs import parse_mounts

    # The last one covers those before.
    return dict(parse_mounts(read_text(context.path("proc/self/mountinfo")))).get(_SHM, "")


def _largest(path: str) -> str:
    """The largest file there, to be put behind a word."""
    largest, name = 0, ""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                size = entry.stat(follow_symlinks=False).st_blocks * 512 if entry.is_file(follow_symlinks=False) else 0
                if size > largest:
                    largest, name = size, entry.name
    except OSError:
        return ""
    printable = "".join(char if char.isprintable() else "?" for char in name)[:64]
    return f" (the largest: {printable}, {size_text(largest)})" if name else ""
