"""Whether a process waits for its keyboard, without waiting for that process."""

from __future__ import annotations

import pytest

from saferun.linux import keyboard, procfs, syscalls
from saferun.linux.keyboard import StdinTerminal
from saferun.linux.procfs import Stat


@pytest.mark.parametrize("is_old", [True, False])
def test_a_process_that_may_be_in_exec_is_not_asked_on_an_old_kernel(
    monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    """Before Linux 5.7 its system call can be read once exec has read the program's file."""
    asked: list[int] = []
    monkeypatch.setattr(procfs, "_EXEC_IS_WAITED_FOR", is_old)
    monkeypatch.setattr(keyboard, "read_stat", lambda _pid: Stat("D", 1, 0.0, 1, 1))
    monkeypatch.setattr(syscalls, "read_syscall", asked.append)
    pid = 1 << 22
    terminal = StdinTerminal.__new__(StdinTerminal)
    assert not terminal.has_reader(pid)
    assert asked == ([] if is_old else [pid])
