"""What file systems, and the storage below them, say when they fail. Pure.

Sources: errno(3); messages of the kernel's block layer and file systems, HDF5, MPI-IO, libraries in Go and Rust.
"""

from __future__ import annotations

from saferun.diagnosis.causes.texts import TextRule
from saferun.diagnosis.lazy_patterns import LazyPattern

# What a program of the system prints: its name, what it was about, strerror(3).
OF_A_TOOL = r"^(?:/?[\w.+/-]{1,120}): (?:[^:]{1,40}: )?.{1,300}: "
# Slurm's own clients speak of their connections in the same words.
_NOT_OF_SLURM = r"(?!(?:s(?:run|batch|alloc|info|queue|acct|control|cancel)|slurm\w{0,20})\b\S{0,80}: )"

FILE_SYSTEM = (
    TextRule(
        "file_system_error",
        LazyPattern(r"\[Errno 16\] .{0,200}(\.nfs[0-9a-f]{6,40})"),
        "a file on NFS was removed while a process still had it open: {0}",
        "close the file before its directory is removed, or put temporary directories (TMPDIR) on a local disk",
        in_context=True,
        must_be_last=True,
    ),
    TextRule(
        "file_system_error",
        LazyPattern(
            r"\b(?:f?read|f?write|fsync|fdatasync|p(?:read|write)v?\d?|open|close|mmap)\(.{0,160}"
            r"(Input/output error|Remote I/O error|[Tt]ransport endpoint.{1,40})"
        ),
        "a file system failed: {0}",
        "look at the mount that the file is on (dmesg, `df`, the state of Lustre, NFS or FUSE on this host)",
        in_context=True,
        in_last_lines=True,
    ),
    TextRule(
        "file_system_error",
        # EIO ENODEV EROFS ENOLCK ENOSYS ECOMM EPROTO EBADMSG EOPNOTSUPP ENOTCONN ESHUTDOWN EHOSTDOWN EUCLEAN EREMOTEIO
        # ENOMEDIUM, keys of Kerberos and AFS, and what NFS has of its own. ENOSYS and EOPNOTSUPP: locks that it lacks.
        LazyPattern(
            r"OSError: \[Errno (?:5|19|30|37|38|70|71|74|95|107|108|112|117|121|123|126|127|128|512|523"
            r"|524)\] (.{1,200})"
        ),
        "a file system failed: {0}",
        "look at the mount that the file is on (dmesg, `df`, the state of Lustre, NFS or FUSE on this host); locks "
        "need a file system that has them (on Lustre the mount option flock)",
        in_context=True,
        must_be_last=True,
    ),
    TextRule(
        "file_system_error",
        # By the name or the number alone, as libraries in C++, Go and Rust put it.
        LazyPattern(
            r"(\[OS error (?:5|19|30|37|71|74|107|108|112|121):.{0,80}"
            r"|\(os error (?:5|19|30|37|71|74|107|108|112|121)\)"
            r"|\b(?:EIO|EROFS|ENOLCK|ENOTCONN|ESHUTDOWN|EREMOTEIO|ECOMM)\b.{0,80}"
            r"|\b[Ff]ailed to (?:acquire|obtain|get|take) (?:a |an |the )?(?:\w{1,12} )?lock on (?:the )?file\b.{0,80}"
            r"|\bC[Uu][Ff]ile\b.{0,60}\b(?:fail\w{0,3}|error)\b.{0,80})"
        ),
        "a file system failed: {0}",
        "look at the mount that the file is on (dmesg, `df`, the state of Lustre, NFS, GPFS or FUSE on this host), and "
        "whether it knows locks and, for GPUDirect Storage, what gdscheck says",
        in_context=True,
        must_be_last=True,
    ),
    TextRule(
        "file_system_error",
        # As libraries of C put it, HDF5 before all. EAGAIN is none of them: another process has the lock.
        LazyPattern(
            r"\b(File locking failed in ADIOI_\w{1,20}\b"
            r"|errno = (?:5|19|30|37|38|70|71|74|95|107|108|112|117|121|123|126|127|128|512|523|524)\b.{0,120})"
        ),
        "a file system failed: {0}",
        "look at the mount that the file is on (dmesg, `df`, the state of Lustre, NFS or FUSE on this host); HDF5 does "
        "without locks with HDF5_USE_FILE_LOCKING=FALSE",
        in_context=True,
        in_last_lines=True,
    ),
    TextRule(
        "file_system_error",
        LazyPattern(
            _NOT_OF_SLURM
            + OF_A_TOOL
            + r"(Read-only file system|Transport endpoint is not connected|Input/output error|Remote I/O error"
            r"|Structure needs cleaning|Host is down|No locks available"
            r"|Cannot send after transport endpoint shutdown)$"
        ),
        "a file system failed: {0}",
        "look at the mount that the file is on (dmesg, `df`, the state of Lustre, NFS or FUSE on this host)",
        in_last_lines=True,
    ),
)


KERNEL = TextRule(
    "file_system_error",
    # Lines of the kernel's log, as scripts print them: the block layer, NVMe, file systems.
    LazyPattern(
        r"\b(Buffer I/O error on dev(?:ice)? .{1,80}|(?:I/O|critical \w{1,12}) error, dev \S{1,40}, sector \d.{0,60}"
        r"|nvme nvme\d{1,4}: .{0,60}(?:timeout(?!, completion polled)|not ready|controller is down|[Rr]emoving after"
        r"|reset failed|Abort status).{0,60}"
        r"|(?:EXT[234]-fs|BTRFS|XFS|F2FS-fs|FAT-fs|SQUASHFS)\b.{0,60}\b(?:error|ERROR|[Cc]orruption|shut(?:ting)? down"
        r"|I/O)\b.{0,80}|nfs: server \S{1,80} not responding, timed out"
        r"|CIFS: VFS: .{0,120}(?:has not responded|error|failed).{0,60}|md/raid\S{0,12}: Disk failure on .{1,60}"
        r"|LustreError: .{0,160}\b(?:evicted|rc = -(?:5|30|107|108|110))\b.{0,40}"
        r"|(?:sd \S{1,20}|blk_update_request): .{0,40}(?:I/O error|Medium Error|Hardware Error).{0,60})"
    ),
    "a disk or a file system of the host failed, as the kernel log says: {0}",
    "look at the host's disks and mounts (dmesg, smartctl, nvme smart-log, `df`) before it is used again",
    must_be_last=True,
)
