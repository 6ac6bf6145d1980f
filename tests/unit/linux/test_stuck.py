"""Which file system a process waits for."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from saferun.linux import stuck
from saferun.linux.procfs import file_system_of, mount_of, parse_mounts
from saferun.linux.stuck import awaited_file_system, stuck_text
from saferun.linux.syscalls import SystemCall

MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw
31 22 0:41 / /data\040sets rw shared:3 - nfs4 server:/data rw
32 30 0:42 / /scratch rw - tmpfs none rw
33 22 0:43 no separator
34 22 0:44 / /sets/one rw - fuse.sshfs one rw
35 22 0:45 / /sets/two rw - virtiofs two rw
"""
PID = 4711
Process = Callable[..., None]


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
    mounts = parse_mounts(MOUNTS)
    assert file_system_of(path, mounts) == (directory, kind)
    assert mount_of(path, mounts) == directory


def test_where_nothing_can_be_read_nothing_is_said() -> None:
    """The process may be gone, or somebody else's."""
    assert file_system_of("/x", []) == ("", "")
    assert file_system_of("/x", parse_mounts("nonsense\n - \n")) == ("", "")
    assert awaited_file_system(1 << 22) == ("", "")
    assert awaited_file_system(os.getpid()) == ("", "")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """Makes the process that is asked about."""

    def make(call: SystemCall | None = None, link: str = "", wchan: str = "", *frames: str) -> None:
        stack = "".join(f"[<0>] {frame}+0x10/0x20\n" for frame in frames)
        files = {f"/proc/{PID}/wchan": wchan, f"/proc/{PID}/stack": stack}
        monkeypatch.setattr(stuck, "mounts_of", lambda _pid: parse_mounts(MOUNTS))
        monkeypatch.setattr(stuck, "read_syscall", lambda _pid: call)
        monkeypatch.setattr(stuck, "read_link", lambda _path: link)
        monkeypatch.setattr(stuck, "read_text", lambda path: files[path])

    return make


def test_the_file_of_a_call_tells_before_the_kernels_function_does(process: Process) -> None:
    """A file that was deleted is where it was."""
    process(SystemCall("fsync", (3,)), "/data sets/log (deleted)", "rpc_wait_bit_killable")
    assert awaited_file_system(PID) == ("/data sets", "nfs4")
    process(SystemCall("wait4", (3,)), "/data sets/log", "jbd2_log_wait_commit")
    assert awaited_file_system(PID) == ("/", "ext4")
    process(SystemCall("read", (3,)), "socket:[1]", "")
    assert awaited_file_system(PID) == ("", "")


@pytest.mark.parametrize(
    ("wchan", "frames", "found"),
    [
        ("rpc_wait_bit_killable", (), ("/data sets", "NFS")),
        ("ptlrpc_set_wait", (), ("/scratch", "Lustre")),
        ("request_wait_answer", (), ("", "FUSE")),  # one of two, as virtiofs waits there as well
        ("ceph_mdsc_do_request", (), ("", "Ceph")),  # none is mounted that this process sees
        ("wait_for_response", (), ("", "CIFS")),
        ("wait_for_free_credits", (), ("", "CIFS")),
        ("btrfs_commit_transaction", (), ("", "btrfs")),
        ("folio_wait_bit_common", ("ext4_writepages", "nfs4_do_close"), ("/data sets", "NFS")),
        ("do_wait", ("kernel_clone",), ("", "")),
    ],
)
def test_the_kernels_function_tells_the_kind_and_a_single_mount_of_it_where(
    process: Process, wchan: str, frames: tuple[str, ...], found: tuple[str, str]
) -> None:
    """Of several it may be any; a server that a local file system waits for comes first."""
    process(None, "", wchan, *frames)
    assert awaited_file_system(PID) == found
    where = f" for the file system at {found[0]}" if found[0] else ""
    assert stuck_text(PID) == f"waits in the kernel{where} (state D)"
