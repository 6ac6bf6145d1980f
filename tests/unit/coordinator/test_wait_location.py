"""Which file system a process waits for."""

from __future__ import annotations

import os

import pytest

from saferun.coordinator.wait_location import mount_of, wait_location

MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw
31 22 0:41 / /data\040sets rw shared:3 - nfs4 server:/data rw
32 30 0:42 / /scratch rw - tmpfs none rw
33 22 0:43 no separator
"""


@pytest.mark.parametrize(
    ("path", "kind", "directory"),
    [
        ("/home/me/run/log", "ext4", "/"),
        ("/data sets/a", "nfs4", "/data sets"),
        ("/scratch", "tmpfs", "/scratch"),
        ("/scratchy/run", "ext4", "/"),
    ],
)
def test_a_path_is_on_the_innermost_and_latest_mount(path: str, kind: str, directory: str) -> None:
    """Names that begin alike are other directories."""
    assert mount_of(path, MOUNTS) == (kind, directory)


def test_where_nothing_can_be_read_nothing_is_said() -> None:
    """The process may be gone, or somebody else's."""
    assert mount_of("/x", "") == ("", "")
    assert mount_of("/x", "nonsense\n - \n") == ("", "")
    assert wait_location(1 << 22) == ""
    assert wait_location(os.getpid()) == ""
