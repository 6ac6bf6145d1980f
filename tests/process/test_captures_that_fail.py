"""Every capture, where its process is gone, its tool missing or misbehaving, or its time over."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import capture_processes, stacks, strace
from saferun.captures.all_captures import CAPTURES, CaptureStep
from saferun.captures.process_state import read_snapshot
from saferun.captures.scene import Process, Scene
from saferun.captures.wire import NOT_READY, CaptureReader, CaptureRequest, CaptureTarget, encode
from saferun.evidence.job_evidence import CaptureNote
from tests.process.capturing import ROOT, SLEEP, UNDUMPABLE, capture, functions, python, without_ptrace
from tests.process.launching import state_of, until
from tests.process.one_capture import encode_request

# Whoever waits so long does not come back before the test is over.
FOR_EVER_S = 100_000.0


class Found:
    """Takes what a capture emits."""

    def __init__(self) -> None:
        self.reader = CaptureReader()

    def __call__(self, kind: str, value: object) -> None:
        self.reader.feed(encode(kind, value))

    @property
    def notes(self) -> tuple[CaptureNote, ...]:
        return self.reader.capture.notes


def do(step: CaptureStep, pid: int, left_s: float, directory: str = "") -> Found:
    """Run one capture in this process."""
    found = Found()
    look = read_snapshot(0, pid, is_rank=True)
    request = CaptureRequest((CaptureTarget(0, pid, "/nonexistent/hook"),), directory, native="always", strace=True)
    process = Process(0, pid, True, "/nonexistent/hook", look)
    step.run(Scene(request, (process,), time.monotonic() + left_s, found))
    return found


EVERY = pytest.mark.parametrize("step", CAPTURES, ids=[step.name for step in CAPTURES])


@EVERY
def test_a_process_that_is_gone_costs_a_capture_nothing(step: CaptureStep) -> None:
    """It may end between the request and the look."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    found = do(step, gone.pid, FOR_EVER_S)
    assert found.reader.capture.stacks == () or found.reader.capture.stacks[0].failure == "the process has ended"
    assert not [note for note in found.notes if note.pid and not note.failure]


@EVERY
def test_a_missing_tool_is_a_failure_and_no_exception(
    step: CaptureStep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing has to be installed but what the package needs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for module in (stacks, strace):
        monkeypatch.setattr(module, "find_tool", lambda _name: "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with python(SLEEP) as pid:
        found = do(step, pid, 8.0)
    failures = {note.capture: note.failure for note in found.notes}
    assert failures.get("py_spy", "py-spy is not installed") == "py-spy is not installed"
    assert failures.get("strace", "strace is not installed") == "strace is not installed"
    assert [dump.failure for dump in found.reader.capture.stacks] in ([], ["py-spy is not installed"])


@EVERY
def test_denied_ptrace_is_a_failure_and_no_exception(step: CaptureStep) -> None:
    """In a container it is the rule; whoever needs no ptrace finds what there is."""
    program = (
        "from saferun.captures import capture_processes as run\n"
        f"run.CAPTURES = tuple(step for step in run.CAPTURES if step.name == {step.name!r})\n"
        "from tests.process.one_capture import main\n"
        "main()\n"
    )
    with python(UNDUMPABLE + SLEEP, prepare=without_ptrace) as pid:
        reader = capture(CaptureTarget(0, pid), program=program, prepare=without_ptrace, native="always", strace=True)
        assert state_of(pid) == "S", "it sleeps on"
    assert reader.capture.timed_out == ()
    assert not [note for note in reader.capture.notes if re.match(r"\w*(Error|Exception)\b", note.failure)]
    denied = {note.capture for note in reader.capture.notes if "ptrace is denied" in note.failure}
    assert denied == {"stacks": {"py_spy"}, "strace": {"strace"}}.get(step.name, set())


@EVERY
def test_a_deadline_that_has_passed_ends_a_capture_at_once(step: CaptureStep) -> None:
    """Whatever is not ready is named."""
    with python(SLEEP) as pid:
        found = do(step, pid, -1.0)
    assert found.reader.capture.stacks == () or found.reader.capture.stacks[0].failure == NOT_READY
    if step.name in {"stacks", "process_state", "strace"}:
        assert found.reader.capture.timed_out


@pytest.mark.skipif(importlib.util.find_spec("pystack") is None, reason="pystack is an extra")
@pytest.mark.parametrize("stopped", [False, True])
def test_without_py_spy_pystack_is_asked(monkeypatch: pytest.MonkeyPatch, *, stopped: bool) -> None:
    """Without stopping the process where it could not be stopped."""
    monkeypatch.setattr(stacks, "find_tool", lambda _name: "")
    with python(SLEEP) as pid:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: state_of(pid) == "T", "stopped")
        found = do(CAPTURES[0], pid, 20.0)
        # Who was looked at with ptrace has to get a processor before it sleeps again.
        until(lambda: state_of(pid) == ("T" if stopped else "S"), "it is as before")
    (dump,) = found.reader.capture.stacks
    assert (dump.tool, functions(dump), dump.threads[0].is_main) == ("pystack", ["step", "<module>"], True)


def fake_tool(folder: Path, script: str) -> str:
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        pytest.param("exit 3", "it ended with code 3", marks=pytest.mark.slow),
        pytest.param("kill -TERM $$", "it ended with code -15", marks=pytest.mark.slow),
        pytest.param("echo '[]'", "what it says cannot be read: there is no thread in it", marks=pytest.mark.slow),
        ("echo no JSON", "what it says cannot be read: Expecting value: line 1 column 1 (char 0)"),
        ("head -c 20000000 /dev/zero; exec sleep 1000", "py-spy wrote more than 8 MiB"),
        ("exec 1>&- 2>&-; exec sleep 1000", "it ended with code -9"),
    ],
)
def test_what_a_broken_tool_says_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, failure: str
) -> None:
    """It costs its own evidence."""
    path = fake_tool(tmp_path, script)
    monkeypatch.setattr(stacks, "find_tool", lambda _name: path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with python(SLEEP) as pid:
        found = do(CAPTURES[0], pid, 10.0)
    assert [note.failure for note in found.notes] == [failure]
    assert [dump.failure for dump in found.reader.capture.stacks] == [failure]


def test_a_tool_that_never_ends_is_killed_with_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to tell is named as unfinished."""
    path = fake_tool(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    monkeypatch.setattr(stacks, "find_tool", lambda _name: path)
    with python(SLEEP) as pid:
        found = do(CAPTURES[0], pid, 6.0)
    assert found.reader.capture.timed_out == (f"py_spy of rank 0 (pid {pid})",)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_no_tool_outlives_a_capture_process_that_is_killed(tmp_path: Path) -> None:
    """The supervisor kills it when the budget is spent, whatever it is doing."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = fake_tool(tmp_path, f"echo $$ > {fifo}; exec sleep 1000")
    program = f"""
import saferun.captures.stacks as stacks
from tests.process.one_capture import main
stacks.find_tool = lambda name: {path!r}
main()
"""
    with (
        python(SLEEP) as pid,
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT
        ) as process,
    ):
        try:
            assert process.stdin is not None
            process.stdin.write(encode_request(CaptureRequest((CaptureTarget(0, pid),))))
            process.stdin.close()
            tool = int(fifo.read_text())
        finally:
            process.kill()
    until(lambda: not Path(f"/proc/{tool}").exists() or state_of(tool) == "Z", "the tool is gone")


def test_a_capture_that_crashes_or_hangs_costs_only_itself() -> None:
    """A driver may crash who asks it, or never answer."""

    def crash(_emit: Callable[[str, Any], None]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(_emit: Callable[[str, Any], None]) -> None:
        raise KeyError("x")

    def hang(emit: Callable[[str, Any], None]) -> None:
        emit("host_line", str(os.getpid()))
        time.sleep(1000)

    def answer(emit: Callable[[str, Any], None]) -> None:
        emit("kernel_line", "x" * 4000)

    reader = CaptureReader()
    steps = [("crash", crash), ("fail", fail), ("hang", hang), ("answer", answer)]
    capture_processes._run_in_parallel(steps, reader.feed, time.monotonic() + 6.0)
    assert {note.capture: note.failure for note in reader.capture.notes} == {
        "crash": "it was killed by SIGKILL",
        "fail": "KeyError: 'x'",
    }
    assert reader.kernel_lines == ("x" * 4000,)
    (hanging,) = reader.capture.host_lines
    until(lambda: state_of(int(hanging)) in {"Z", ""}, "it is killed")
    os.waitpid(int(hanging), 0)


def test_what_ranks_write_is_read_with_a_limit_of_memory() -> None:
    """A hostile answer costs its own capture; programs that other captures start map libraries of gigabytes."""
    limits = {}
    for step in (step._replace(run=tell_limit) for step in CAPTURES):
        reader = CaptureReader()
        steps = [(step.name, capture_processes._bound(step, Scene(CaptureRequest(()), (), 0.0, lambda *_: None)))]
        capture_processes._run_in_parallel(steps, reader.feed, time.monotonic() + 30.0)
        (limits[step.name],) = reader.capture.host_lines
    unlimited = str(resource.getrlimit(resource.RLIMIT_AS)[0])
    limited = {name for name, limit in limits.items() if limit != unlimited}
    assert limited == {"flight_recorder", "last_calls", "nccl_ras"}
    assert (1 << 30) < int(limits["flight_recorder"]) < (8 << 30)


def tell_limit(scene: Scene) -> None:
    scene.emit("host_line", str(resource.getrlimit(resource.RLIMIT_AS)[0]))
