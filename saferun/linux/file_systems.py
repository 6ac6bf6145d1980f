"""The type of a directory's file system. The calls block while the file system does not respond.

Sources: statfs(2); Linux, include/uapi/linux/magic.h, and the sources of out-of-tree file systems.
"""

from __future__ import annotations

import ctypes
import os

from saferun.linux.system_call import libc

# Shared by several hosts, or on a server.
_NETWORK = {
    0x6969: "NFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "Ceph",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0x01021997: "9P",
    0x65735546: "FUSE",
}
# A container's own files: only its runtime knows how much space it may use.
_LAYERED = {0x794C7630: "overlayfs", 0x61756673: "aufs"}
_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
_UNSUITABLE = {**_NETWORK, **_LAYERED, **_MEMORY}

libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_char_p]


def is_in_memory(path: str) -> bool:
    """Whether a path is in memory, so that no access can block."""
    return kind_of(path) in _MEMORY.values()


def is_on_network(path: str) -> bool:
    """Whether a path is on a file system that other hosts may share."""
    return kind_of(path) in _NETWORK.values()


def kind_of(path: str) -> str:
    """The file system's type if it is no place for large files: a network file system, container layers, memory.

    Empty for a disk, and if it is unknown.
    """
    answer = ctypes.create_string_buffer(256)  # larger than any architecture's struct statfs, which begins with f_type
    try:
        if libc.statfs(os.fsencode(path), answer) != 0:
            return ""
    except (AttributeError, ctypes.ArgumentError):
        return ""
    return _UNSUITABLE.get(ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF, "")
