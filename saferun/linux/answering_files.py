"""Which files are there, found without waiting for a file system that does not answer.

A home directory on a network file system whose server is gone holds forever whoever opens a file there. Where a file
system may be of that kind, another process does it first, for a bounded time.

Sources: proc_pid_mountinfo(5), path_resolution(7).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence

from saferun.errors import suppress
from saferun.linux.procfs import parse_mounts
from saferun.linux.small_files import read_text

DEADLINE_S = 10.0  # a home directory that is mounted only now may take seconds
_PROCESS = "sr-files"
# They are on disks of this machine or in its memory. All others may wait for a server.
_LOCAL_KINDS = frozenset(
    {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "rootfs", "squashfs", "tmpfs", "xfs", "zfs"}
)
_MOST_LINKS = 40  # as the kernel's
_MOUNTS = "/proc/self/mountinfo"


def present_files(
    paths: Sequence[str], deadline_s: float | None = None, *, mounts_file: str = _MOUNTS
) -> tuple[frozenset[str], str]:
    """Find which files or directories are there.

    Args:
        paths: files and directories. They are tried in this order.
        deadline_s: for all of them together, in seconds; None: ``DEADLINE_S``.
        mounts_file: the mounts of this process.

    Returns:
        Those that are there, and the first whose file system did not answer in time; it and those after it count as
        missing. Empty: all have answered. Where no other process can ask, or it ends before, this one does.
    """
    kinds = dict(parse_mounts(read_text(mounts_file)))  # of those over each other the last one is seen
    # A relative path leads through the working directory, which the script needs as well.
    remote = [path for path in paths if os.path.isabs(path) and not _is_local(os.path.normpath(path), kinds)]
    present = {path for path in paths if path not in remote and os.path.exists(path)}
    if not remote:
        return frozenset(present), ""
    from saferun.linux.child_output import run_forked

    output, is_late = b"", False
    limit_s = DEADLINE_S if deadline_s is None else deadline_s
    with suppress(OSError):
        output, status = run_forked(lambda write_fd: _answer(remote, write_fd), limit_s, _PROCESS)
        is_late = status is None
    present.update(path for path, answer in zip(remote, output, strict=False) if answer == ord("1"))
    left = remote[len(output) :]
    if left and is_late:
        return frozenset(present), left[0]
    present.update(path for path in left if os.path.exists(path))
    return frozenset(present), ""


def is_at_hand(path: str, *, mounts_file: str = _MOUNTS) -> bool:
    """Whether an absolute path leads through file systems of this machine only; no other one is accessed."""
    return _is_local(os.path.normpath(path), dict(parse_mounts(read_text(mounts_file))))


def _answer(paths: Sequence[str], write_fd: int) -> None:
    for path in paths:
        os.write(write_fd, b"1" if _is_there(path) else b"0")


def _is_there(path: str) -> bool:
    """Whether it is there; what can be read has been, as a cache may still know what the server does not answer for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
    with suppress(OSError):
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            os.listdir(fd)
        elif stat.S_ISREG(mode):
            os.read(fd, 1)
    return True


def _is_local(path: str, kinds: Mapping[str, str]) -> bool:
    """Whether a path, with the links in it, leads through local file systems only.

    Args:
        path: an absolute path.
        kinds: the type of the file system at each mount point.
    """
    at, rest, links = "/", path.split("/")[::-1], 0
    while rest:
        name = rest.pop()
        if name == "..":
            at = os.path.dirname(at)
        if name in {"", ".", ".."}:
            continue
        at = os.path.join(at, name)
        if _kind_at(at, kinds) not in _LOCAL_KINDS:
            return False
        try:
            target = os.readlink(at)
        except FileNotFoundError:
            return True  # what is missing is not waited for
        except OSError:
            continue  # no link
        links += 1
        if links > _MOST_LINKS:
            return True
        at = "/" if target.startswith("/") else os.path.dirname(at)
        rest += target.split("/")[::-1]
    return True


def _kind_at(path: str, kinds: Mapping[str, str]) -> str:
    while path not in kinds and path != "/":
        path = os.path.dirname(path)
    return kinds.get(path, "")
