"""Whether a thread waits for a file system, where its system call has no descriptor of a file."""

from __future__ import annotations

import os

import pytest

from saferun.captures import other_ends
from saferun.captures.other_ends import OtherEnds
from saferun.captures.waiting import PATH_CALLS, Ends
from saferun.evidence.job_evidence import Frame
from saferun.evidence.wait_evidence import ThreadWait
from saferun.linux.stuck import is_file_system_wait
from saferun.linux.syscalls import SystemCall, descriptor_of, from_proc_syscall
from tests.unit.diagnosis.test_external_waits import PID, external, job

SAVE = Frame("save", "/usr/lib/python3.11/site-packages/torch/serialization.py", 800)


def wait_in(monkeypatch: pytest.MonkeyPatch, name: str, wchan: str, *arguments: int) -> ThreadWait:
    """What of_call makes of a thread in this call and this kernel function."""
    monkeypatch.setattr(other_ends, "_wchan", lambda _pid, _tid: wchan)
    call = SystemCall(name, (arguments + (0,) * 6)[:6])
    return OtherEnds(Ends([(1, PID, "python")])).of_call(PID, PID, call, is_readable=True)


@pytest.mark.parametrize(
    ("name", "wchan"),
    [
        ("close", "request_wait_answer"),  # gcsfuse and s3fs upload then
        ("close", "rpc_wait_bit_killable"),
        ("close", "folio_wait_bit_common"),
        ("close", "wait_for_response"),  # CIFS
        ("close", "wait_for_free_credits"),
        ("close", "0"),  # it may not be read
        ("close_range", "request_wait_answer"),
        ("dup2", "cl_sync_io_wait"),
        ("msync", "request_wait_answer"),
        ("munmap", "request_wait_answer"),
        ("exit_group", "request_wait_answer"),
        ("system call 999", "fuse_direct_io"),
        ("rmdir", "0"),
        ("utimensat", "0"),
        ("renameat2", "0"),
    ],
)
def test_a_file_system_may_answer_after_any_time(monkeypatch: pytest.MonkeyPatch, name: str, wchan: str) -> None:
    """An upload of minutes in ``close`` was a certain hang, on which ``--on-hang stop`` acted."""
    wait = wait_in(monkeypatch, name, wchan, os.getpid())
    assert wait.outside
    assert external(job(SAVE, syscall=name, wchan=wchan, waits=(wait,))) == (1,)


@pytest.mark.parametrize(
    ("name", "wchan"),
    [
        ("close", "sk_stream_wait_close"),  # SO_LINGER
        ("close", "uvm_release"),
        ("munmap", "uvm_vma_close"),
        ("munmap", "0"),
        ("exit_group", "nvidia_close"),
        ("exit_group", "cxi_service_remove"),
        ("ioctl", "request_wait_answer"),  # descriptor 0 of a process that is not there
    ],
)
def test_what_drivers_and_sockets_wait_for_is_not_known(monkeypatch: pytest.MonkeyPatch, name: str, wchan: str) -> None:
    assert not wait_in(monkeypatch, name, wchan).outside


def test_a_closed_descriptor_may_be_another_file_s_by_now() -> None:
    assert descriptor_of(SystemCall("close", (0, 0, 0, 0, 0, 0))) is None


def test_the_server_of_a_file_system_waits_for_requests() -> None:
    assert [is_file_system_wait(name) for name in ("fuse_dev_do_read", "futex_wait_queue", "")] == [False] * 3


@pytest.mark.parametrize(
    ("name", "x86_64", "aarch64"),
    [
        ("close_range", 436, 436),
        ("fchmodat", 268, 53),
        ("linkat", 265, 37),
        ("mkdirat", 258, 34),
        ("renameat2", 316, 276),
        ("rmdir", 84, None),
        ("utimensat", 280, 88),
    ],
)
def test_both_architectures_have_their_own_numbers(name: str, x86_64: int, aarch64: int | None) -> None:
    for machine, number in (("x86_64", x86_64), ("aarch64", aarch64)):
        call = from_proc_syscall(f"{number} 0x0 0x0", machine) if number is not None else None
        assert call is None or call.name == name
    assert name in PATH_CALLS or name == "close_range"
