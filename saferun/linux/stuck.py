"""What a process in uninterruptible sleep waits for, as far as that can be found without blocking."""

from __future__ import annotations

from saferun.linux.procfs import file_system_of, mounts_of
from saferun.linux.small_files import read_link, read_text
from saferun.linux.syscalls import descriptor_of, read_syscall

# Prefixes of the kernel functions in which a file system waits, its types in mountinfo, and its name. What waits for
# a server comes first: memory that a local file system asks for may have to be written to a server before.
# CIFS waits for an answer in ``wait_for_response``, and in ``wait_for_free_credits`` until it may send a request
# (Linux, fs/smb/client/transport.c).
_WAITS = (
    (("fuse", "request_wait_answer"), ("fuse", "fuseblk", "virtiofs"), "FUSE"),
    (("nfs", "rpc_"), ("nfs", "nfs4"), "NFS"),
    (("cl_", "ptlrpc", "ll_", "osc_", "obd_", "ldlm_", "lov_"), ("lustre",), "Lustre"),
    (("ceph",), ("ceph",), "Ceph"),
    (("gpfs", "cxi"), ("gpfs",), "GPFS"),
    (("p9_", "v9fs_"), ("9p",), "9P"),
    (("cifs", "smb", "wait_for_response", "wait_for_free_credits"), ("cifs", "smb3"), "CIFS"),
    (("xfs",), ("xfs",), "XFS"),
    (("ext4", "jbd2"), ("ext4", "ext3", "ext2"), "ext4"),
    (("btrfs",), ("btrfs",), "btrfs"),
)
# In these any file system waits for what is written to it.
_PAGES = ("folio_wait", "wait_on_page", "__filemap_fdatawait", "filemap_fdatawait")
# The server of a FUSE file system waits there for requests, and the driver of a network has the other name.
_OTHERS = ("fuse_dev", "cxi_")
_DELETED = " (deleted)"


def is_file_system_wait(wchan: str) -> bool:
    """Whether a file system waits in a kernel function, as its name begins."""
    starts = (start for starts, _, _ in _WAITS for start in starts)
    return wchan.startswith((*starts, *_PAGES)) and not wchan.startswith(_OTHERS)


def stuck_text(pid: int) -> str:
    """``waits in the kernel for the file system at /data (state D)``; without the file system if it is unknown.

    Reads nothing that could block: neither the process's memory nor its command line.
    """
    mount, _ = awaited_file_system(pid)
    return f"waits in the kernel for the file system at {mount} (state D)" if mount else "waits in the kernel (state D)"


def awaited_file_system(pid: int) -> tuple[str, str]:
    """The file system that a process in uninterruptible sleep waits for: its mount point, and what kind it is.

    Each is empty if it is unknown. Of a kind that is known by the kernel's function alone the mount point is unknown
    unless the process sees a single one.
    """
    mounts = mounts_of(pid)
    call = read_syscall(pid)
    fd = descriptor_of(call) if call is not None else None
    path = read_link(f"/proc/{pid}/fd/{fd}") if fd is not None else ""
    if path.startswith("/"):
        found = file_system_of(path.removesuffix(_DELETED), mounts)
        if found[0]:
            return found
    # The stack is for root only; other users can only read the innermost function.
    stack = read_text(f"/proc/{pid}/stack").splitlines()
    frames = [read_text(f"/proc/{pid}/wchan"), *(line.partition("]")[2].strip() for line in stack)]
    for starts, kinds, name in _WAITS:
        if any(frame.startswith(starts) for frame in frames):
            fitting = {point for point, kind in mounts if kind in kinds or kind.partition(".")[0] in kinds}
            return (fitting.pop() if len(fitting) == 1 else ""), name
    return "", ""
