"""What kind of file system a directory is on. The call waits for a file system that does not answer.

Sources: statfs(2); Linux, include/uapi/linux/magic.h, and the sources of the file systems that stand outside of it.
"""

from __future__ import annotations

import ctypes
import os

# What several hosts share, or a server keeps.
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
# What a container's own files are on: how much of it the container may use is known to its runtime alone.
_LAYERED = {0x794C7630: "overlayfs", 0x61756673: "aufs"}
_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
_UNSUITABLE = {**_NETWORK, **_LAYERED, **_MEMORY}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_char_p]


def is_in_memory(path: str) -> bool:
    """Whether what lies there lies in memory: whoever looks at it waits for nobody."""
    return kind_of(path) in _MEMORY.values()


def kind_of(path: str) -> str:
    """The kind of file system, where large files should not be left there: a network's, a container's layers, memory.

    Empty where it is a disk, and where it cannot be told.
    """
    answer = ctypes.create_string_buffer(256)  # larger than any architecture's struct statfs, which begins with f_type
    try:
        if _libc.statfs(os.fsencode(path), answer) != 0:
            return ""
    except (AttributeError, ctypes.ArgumentError):
        return ""
    return _UNSUITABLE.get(ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF, "")
