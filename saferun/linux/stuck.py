"""What a process in an uninterruptible sleep waits for, as far as that can be told without waiting as well."""

from __future__ import annotations

import os

from saferun.linux.syscalls import descriptor_of, read_syscall

# How kernel functions begin in which a file system waits for whoever serves it, and what that file system is called
# in /proc/self/mountinfo.
_WAITS = (
    (("fuse_", "request_wait_answer"), ("fuse",)),
    (("nfs", "rpc_"), ("nfs", "nfs4")),
    (("cl_", "ptlrpc_", "ll_", "osc_", "obd_"), ("lustre",)),
    (("ceph_",), ("ceph",)),
    (("gpfs", "cxi"), ("gpfs",)),
    (("p9_", "v9fs_"), ("9p", "virtiofs")),
    (("cifs_", "smb"), ("cifs", "smb3")),
)
_LIMIT_BYTES = 1 << 20


def stuck_words(pid: int) -> str:
    """``waits in the kernel for the file system at /data (state D)``; without the file system where it is unknown.

    Reads nothing that could wait for the process: neither its memory nor its command line.
    """
    mount = stuck_mount(pid)
    return f"waits in the kernel for the file system at {mount} (state D)" if mount else "waits in the kernel (state D)"


def stuck_mount(pid: int) -> str:
    """The mount point of the file system that a process waits for; empty where that cannot be told."""
    mounts = mounts_of(pid)
    call = read_syscall(pid)
    fd = descriptor_of(call) if call is not None else None
    if fd is not None:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            path = ""
        if path.startswith("/"):
            return mount_of(path, mounts)
    frames = [_read(f"/proc/{pid}/wchan"), *(line.partition("]")[2].strip() for line in _stack(pid))]
    for starts, kinds in _WAITS:
        if any(frame.startswith(starts) for frame in frames):
            fitting = [point for point, kind in mounts if kind in kinds or kind.partition(".")[0] in kinds]
            return fitting[0] if len(set(fitting)) == 1 else ""
    return ""


def mount_of(path: str, mounts: list[tuple[str, str]]) -> str:
    """The mount point that a path is below."""
    points = [point for point, _ in mounts if point in {"/", path} or path.startswith(f"{point}/")]
    return max(points, key=len, default="")


def mounts_of(pid: int) -> list[tuple[str, str]]:
    """Mount points with the types of their file systems, as a process sees them.

    Source: proc_pid_mountinfo(5).
    """
    found = []
    for line in _read(f"/proc/{pid}/mountinfo").splitlines():
        words = line.split(" ")
        if "-" in words and len(words) > words.index("-") + 1:
            found.append((words[4].replace("\\040", " "), words[words.index("-") + 1]))
    return found


def _stack(pid: int) -> list[str]:
    # For root only; whoever else asks learns the innermost function alone.
    return _read(f"/proc/{pid}/stack").splitlines()


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.read(_LIMIT_BYTES) or b"").decode(errors="replace")
    except OSError:
        return ""
