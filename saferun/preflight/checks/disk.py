"""Free space and inodes where the run directory and temporary files are written."""

from __future__ import annotations

import os

from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import MIB, own_path
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult
from saferun.text.wording import size_text

# Less than this is what is left of a full disk. torch.compile's and Triton's caches take some ten megabytes, and so do
# the logs of a few ranks; how large checkpoints get only the script knows.
_LITTLE_BYTES = 64 * MIB
_LITTLE_SHARE = 0.1  # of small file systems: a tmpfs in a container may have no more than that in all
_FEW_INODES = 100


def check_disk(context: CheckContext) -> CheckResult:
    """Whether there is room for logs and temporary files. A full disk stops no rank, so this only warns."""
    facts: list[tuple[str, str]] = []
    problems: list[str] = []
    devices: set[int] = set()
    temporary = context.environ.get("TMPDIR", "")
    if temporary and not os.path.isdir(own_path(context, temporary)):
        # As Python's tempfile does; schedulers often pass on a TMPDIR of the host where the job was submitted.
        facts.append(("TMPDIR", "no such directory"))
        temporary = ""
    for name, directory in (("run directory", context.run_dir), ("TMPDIR", temporary or "/tmp")):  # noqa: S108
        if not directory:
            continue
        found = _existing(own_path(context, os.path.abspath(directory)))
        status = os.statvfs(found)
        free_bytes = status.f_bavail * status.f_frsize
        facts += [(f"{name} free_bytes", str(free_bytes))]
        if status.f_files:  # btrfs and others have no fixed number
            facts += [(f"{name} free_inodes", str(status.f_favail))]
        device = os.stat(found).st_dev
        if device in devices:
            continue
        devices.add(device)
        if free_bytes < min(_LITTLE_BYTES, status.f_blocks * status.f_frsize * _LITTLE_SHARE):
            problems.append(f"{directory} ({name}) has {size_text(free_bytes)} free")
        elif status.f_files and status.f_favail < _FEW_INODES:
            problems.append(f"{directory} ({name}) takes {status.f_favail} more files (no free inodes)")
    if not problems:
        return ok("there is room for logs and temporary files", facts)
    hint = "delete what is not needed there, or choose other places (--run-dir, TMPDIR)"
    return warning(" and ".join(problems), hint, facts, class_name="disk_full")


def _existing(path: str) -> str:
    """A directory, or the nearest one above it that exists."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
