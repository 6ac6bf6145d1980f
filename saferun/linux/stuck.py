"""What a process in uninterruptible sleep waits for, as far as that can be found without blocking."""

from __future__ import annotations

from saferun.linux.small_files import read_link, read_text
from saferun.linux.syscalls import descriptor_of, read_syscall

# Prefixes of kernel functions in which a file system waits for its server, and its types in /proc/self/mountinfo.
_WAITS = (
    (("fuse_", "request_wait_answer"), ("fuse",)),
    (("nfs", "rpc_"), ("nfs", "nfs4")),
    (("cl_", "ptlrpc_", "ll_", "osc_", "obd_"), ("lustre",)),
    (("ceph_",), ("ceph",)),
    (("gpfs", "cxi"), ("gpfs",)),
    (("p9_", "v9fs_"), ("9p", "virtiofs")),
    (("cifs_", "smb"), ("cifs", "smb3")),
)
_MOUNT_POINT = 4  # which field of mountinfo it is


def stuck_text(pid: int) -> str:
    """``waits in the kernel for the file system at /data (state D)``; without the file system if it is unknown.

    Reads nothing that could block: neither the process's memory nor its command line.
    """
    mount = stuck_mount(pid)
    return f"waits in the kernel for the file system at {mount} (state D)" if mount else "waits in the kernel (state D)"


def stuck_mount(pid: int) -> str:
    """The mount point of the file system that a process waits for; empty if unknown."""
    mounts = mounts_of(pid)
    call = read_syscall(pid)
    fd = descriptor_of(call) if call is not None else None
    if fd is not None:
        path = read_link(f"/proc/{pid}/fd/{fd}")
        if path.startswith("/"):
            return mount_of(path, mounts)
    # The stack is for root only; other users can only read the innermost function.
    stack = read_text(f"/proc/{pid}/stack").splitlines()
    frames = [read_text(f"/proc/{pid}/wchan"), *(line.partition("]")[2].strip() for line in stack)]
    for starts, kinds in _WAITS:
        if any(frame.startswith(starts) for frame in frames):
            fitting = [point for point, kind in mounts if kind in kinds or kind.partition(".")[0] in kinds]
            return fitting[0] if len(set(fitting)) == 1 else ""
    return ""


def mount_of(path: str, mounts: list[tuple[str, str]]) -> str:
    """The mount point of a path."""
    points = [point for point, _ in mounts if point in {"/", path} or path.startswith(f"{point}/")]
    return max(points, key=len, default="")


def mounts_of(pid: int) -> list[tuple[str, str]]:
    """Mount points with the types of their file systems, as a process sees them.

    Source: proc_pid_mountinfo(5).
    """
    return parse_mounts(read_text(f"/proc/{pid}/mountinfo"))


def parse_mounts(mountinfo: str) -> list[tuple[str, str]]:
    """Parse mountinfo, in mount order."""
    found = []
    for line in mountinfo.splitlines():
        about, _, file_system = line.partition(" - ")
        fields = about.split(" ")
        if file_system and len(fields) > _MOUNT_POINT:
            found.append((fields[_MOUNT_POINT].replace("\\040", " "), file_system.partition(" ")[0]))
    return found
