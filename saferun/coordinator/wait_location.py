"""Which file system a process in an uninterruptible sleep waits for, as far as /proc tells.

Only what can be read without waiting for that process or that file system is read: its system call, the target of a
link, its mounts. Source: proc(5); fs/proc/base.c of Linux.
"""

from __future__ import annotations

import os

# Kernel functions of file systems whose waits are known by their names; the first part of the name is enough.
_OF_WCHAN = {
    "nfs": "NFS",
    "rpc_": "NFS",
    "ll_": "Lustre",
    "ldlm_": "Lustre",
    "ptlrpc": "Lustre",
    "osc_": "Lustre",
    "lov_": "Lustre",
    "fuse": "FUSE",
    "ceph": "Ceph",
    "gpfs": "GPFS",
    "xfs": "XFS",
    "ext4": "ext4",
    "jbd2": "ext4",
    "btrfs": "btrfs",
    "cifs": "CIFS",
}
_LONGEST_BYTES = 1 << 20
_HIGHEST_FD = 1 << 20
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def wait_location(pid: int) -> str:
    """``ext4 at /scratch``, ``NFS``; empty where that cannot be found."""
    path = _path_of_call(pid)
    if path:
        kind, location = mount_of(path, _read(f"/proc/{pid}/mountinfo"))
        if location:
            return f"{kind} at {location}"
    wchan = _read(f"/proc/{pid}/wchan")
    return next((kind for start, kind in _OF_WCHAN.items() if wchan.startswith(start)), "")


def _path_of_call(pid: int) -> str:
    """The file that a system call works on whose first argument is a descriptor: read, write, fsync, close."""
    fields = _read(f"/proc/{pid}/syscall").split()
    try:
        fd = int(fields[1], 16)
        target = os.readlink(f"/proc/{pid}/fd/{fd}") if fd < _HIGHEST_FD else ""
    except (IndexError, ValueError, OSError):
        return ""
    return target.removesuffix(" (deleted)") if target.startswith("/") else ""


def mount_of(path: str, mountinfo: str) -> tuple[str, str]:
    """The kind of the file system that a path is on, and where that is mounted; empty where it is not in the list.

    Args:
        path: absolute, without links.
        mountinfo: what /proc/PID/mountinfo says.
    """
    found = ("", "")
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5 or not after:  # noqa: PLR2004 - the fifth is the mount point
            continue
        location = fields[4]
        for escaped, plain in _ESCAPES:
            location = location.replace(escaped, plain)
        # Of those that are mounted on each other the last one is seen.
        if (path == location or path.startswith(location.rstrip("/") + "/")) and len(location) >= len(found[1]):
            found = (after.split(" ")[0], location)
    return found


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    content = b""
    try:
        while len(content) < _LONGEST_BYTES and (chunk := os.read(fd, 1 << 16)):
            content += chunk
    except OSError:
        pass
    finally:
        os.close(fd)
    return content.decode(errors="replace")
