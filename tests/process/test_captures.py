"""The capture process, on real processes: sleeping, stopped, blocked, undumpable; and the process itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from saferun.captures.process_state import read_snapshot
from saferun.captures.wire import CaptureReader, CaptureTarget, CoreRequest
from saferun.evidence.job_evidence import ProcessSnapshot, StackDump
from saferun.linux.children import exit_status, spawn
from saferun.linux.signals import JOB_SIGNALS
from tests.process.capturing import ROOT, SLEEP, UNDUMPABLE, capture, functions, python, without_ptrace
from tests.process.launching import state_of, until
from tests.process.one_capture import encode_request

LOCK = "def step(): lock = threading.Lock(); lock.acquire(); print('ready', flush=True); lock.acquire()\nstep()"


REGISTER = "import faulthandler; faulthandler.register(63, open(f'{sys.argv[1]}.{os.getpid()}.stacks', 'w'))\n"


def await_syscall(pid: int, name: str) -> None:
    """Return when a process is in a system call."""
    until(lambda: read_snapshot(0, pid, is_rank=True).syscall == name, f"process {pid} is in {name}")


def look_of(reader: CaptureReader, pid: int) -> ProcessSnapshot:
    (look,) = (look for look in reader.capture.processes if look.pid == pid)
    return look


def python_dump_of(reader: CaptureReader, pid: int) -> StackDump:
    (dump,) = (dump for dump in reader.capture.stacks if dump.pid == pid and not dump.tool.endswith("--native"))
    return dump


def test_ranks_and_their_descendants_are_seen(tmp_path: Path) -> None:
    """Every rank, every Python process below it, and the rest by name; each in a file of its own."""
    family = (
        "import subprocess\n"
        f"worker = subprocess.Popen([sys.executable, '-c', 'import time\\n' + {SLEEP!r}], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        "other = subprocess.Popen(['sleep', '1000'])\n" + SLEEP
    )
    with python(SLEEP) as first, python(family) as second:
        reader = capture(CaptureTarget(0, first), CaptureTarget(5, second), directory=str(tmp_path), native="never")
        looks = {look.name: look for look in reader.capture.processes if not look.is_rank}
        assert looks["sleep"].rank == 5
        assert looks["sleep"].ppid == second
        worker = next(look.pid for look in reader.capture.processes if look.ppid == second and look.name != "sleep")
        assert {dump.pid for dump in reader.capture.stacks} == {first, second, worker}
        for pid, rank in ((first, 0), (second, 5), (worker, 5)):
            dump = python_dump_of(reader, pid)
            assert (dump.rank, dump.is_rank, dump.tool, dump.failure) == (rank, pid != worker, "py-spy", "")
            assert functions(dump)[:2] == ["step", "<module>"]
            assert dump.threads[0].is_main
            look = look_of(reader, pid)
            assert (look.state, look.syscall) == ("S", "clock_nanosleep")
            assert look.command.startswith(sys.executable)
    assert reader.capture.timed_out == ()
    assert reader.capture.elapsed_s > 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"rank_0.py_spy.json", "rank_0.process_state.json", f"rank_5.pid_{worker}.py_spy.json"}
    for note in reader.capture.notes:
        assert not note.path or Path(note.path).stat().st_mode & 0o777 == 0o600


SEIZE = """
import ctypes, sys, time
PTRACE_SEIZE = 0x4206
assert ctypes.CDLL(None).ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0) == 0
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_rank_that_something_else_traces_is_read_all_the_same() -> None:
    """By a strace of the user, or by a saferunctl that has asked for the same stacks a moment before."""
    with python(SLEEP) as pid:
        tracer = subprocess.Popen([sys.executable, "-c", SEIZE, str(pid)], stdout=subprocess.PIPE)
        try:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == b"ready\n"
            reader = capture(CaptureTarget(0, pid), native="never")
        finally:
            tracer.kill()
            tracer.communicate()
    dump = python_dump_of(reader, pid)
    assert (dump.tool, dump.failure) == ("py-spy", "")
    assert functions(dump)[:2] == ["step", "<module>"]


def test_native_frames_come_when_asked_for(tmp_path: Path) -> None:
    """They come on top of the Python frames, never in their place."""
    with python(SLEEP) as pid:
        reader = capture(CaptureTarget(0, pid), directory=str(tmp_path), native="always")
    python_dump, native_dump = reader.capture.stacks
    assert (python_dump.tool, native_dump.tool) == ("py-spy", "py-spy --native")
    assert native_dump.threads[0].frames[0].native
    assert "step" in functions(native_dump)


def test_of_many_alike_the_odd_one_is_asked_for_native_frames() -> None:
    """It takes a second of a processor each: enough for the few that tell the most. Who sleeps is no puzzle."""
    patient = (
        "import runpy; from saferun.captures import stacks; stacks._NATIVE_AUTO_TIMEOUT_S = 30.0\n"
        "runpy.run_module('tests.process.one_capture', run_name='__main__')"
    )
    with ExitStack() as stack:
        pids = [stack.enter_context(python(LOCK)) for _ in range(3)]
        odd = stack.enter_context(python(LOCK.replace("step", "odd")))
        asleep = stack.enter_context(python(SLEEP))
        for pid in (*pids, odd):
            await_syscall(pid, "futex")
        targets = [CaptureTarget(rank, pid) for rank, pid in enumerate([*pids, odd, asleep])]
        reader = capture(*targets, program=patient)
    native = [dump.pid for dump in reader.capture.stacks if dump.tool == "py-spy --native"]
    assert set(native) == {odd, pids[0]}


@pytest.mark.parametrize("is_certain", [True, False])
def test_where_a_hang_is_certain_native_frames_may_take_long(is_certain: bool) -> None:
    """A suspect may be at work, and is stopped for a moment only."""
    impatient = (
        "import runpy; from saferun.captures import stacks; stacks._NATIVE_AUTO_TIMEOUT_S = 0.0001\n"
        "runpy.run_module('tests.process.one_capture', run_name='__main__')"
    )
    with python(LOCK) as pid:
        await_syscall(pid, "futex")
        reader = capture(CaptureTarget(0, pid), program=impatient, is_certain=is_certain)
    tools = [dump.tool for dump in reader.capture.stacks]
    assert ("py-spy --native" in tools) is is_certain


def test_a_blocked_process_says_on_what(tmp_path: Path) -> None:
    """The FIFO or the peer is often the whole story."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    listen = "server = socket.create_server(('127.0.0.1', 0)); client = socket.create_connection(server.getsockname())"
    with (
        python("print('ready', flush=True); open(sys.argv[1])", str(fifo)) as opening,
        python(f"{listen}\nprint('ready', flush=True); client.recv(1)") as receiving,
        python(
            "print('ready', flush=True); os.waitpid(os.fork() or os.pause(), 0)".replace("os.pause", "signal.pause")
        ) as waiting,
    ):
        for pid, syscall in ((opening, "openat"), (receiving, "recvfrom"), (waiting, "wait4")):
            await_syscall(pid, syscall)
        reader = capture(*(CaptureTarget(rank, pid) for rank, pid in enumerate((opening, receiving, waiting))))
        assert look_of(reader, opening).waits_on == f"the FIFO {fifo}"
        assert look_of(reader, receiving).waits_on.startswith("a connection to 127.0.0.1:")
        assert "(ESTABLISHED)" in look_of(reader, receiving).waits_on
        assert look_of(reader, waiting).waits_on.startswith("process ")


def test_what_a_process_waits_for_is_known_after_a_stop_too() -> None:
    """Whoever looks with ptrace stops it for a moment, and then it goes on in another system call."""
    source = "import select\nserver = socket.create_server(('127.0.0.1', 0))\nprint('ready', flush=True)\n"
    poll = "poll = select.poll(); poll.register(server.fileno()); poll.poll(1000_000)"
    with python(source + poll) as pid:
        await_syscall(pid, "poll")
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T", "stopped")
        os.kill(pid, signal.SIGCONT)
        await_syscall(pid, "poll")
        reader = capture(CaptureTarget(0, pid))
    assert look_of(reader, pid).waits_on.startswith("connections to 127.0.0.1:")


@pytest.mark.parametrize("call", ["recv", "epoll"])
def test_a_call_that_a_stop_would_end_is_not_ended(call: str) -> None:
    """These return EINTR when their thread was stopped, and C code may take that for a failure (signal(7))."""
    source = """
import ctypes, select, struct
libc = ctypes.CDLL(None, use_errno=True)
server = socket.create_server(("127.0.0.1", 0))
mine = socket.create_connection(server.getsockname())
theirs, _ = server.accept()
mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1000, 0))
epoll = select.epoll()
epoll.register(mine.fileno(), select.EPOLLIN)
events = ctypes.create_string_buffer(64)
wait = {
    "recv": lambda: libc.recv(mine.fileno(), events, 1, 0),
    "epoll": lambda: libc.epoll_wait(epoll.fileno(), events, 1, 1000_000),
}["CALL"]
def end():
    sys.stdin.read(1)
    theirs.send(b"x")
threading.Thread(target=end, daemon=True).start()
print("ready", flush=True)
sys.exit(0 if wait() == 1 else 9)
""".replace("CALL", call)
    command = [sys.executable, "-c", f"import socket, sys, threading, time\n{source}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        await_syscall(process.pid, {"recv": "recvfrom", "epoll": "epoll_wait"}[call])
        reader = capture(CaptureTarget(0, process.pid), native="off")
        assert python_dump_of(reader, process.pid).threads
        process.stdin.write(b"x")
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_stopped_process_is_read_and_stays_stopped() -> None:
    """Waiting for it would take as long as it is stopped; setting it going is not ours."""
    with python(SLEEP) as pid:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T", "stopped")
        reader = capture(CaptureTarget(0, pid), native="always")
        assert state_of(pid) == "T"
    assert look_of(reader, pid).state == "T"
    assert functions(python_dump_of(reader, pid))[0] == "step"
    assert [dump.tool for dump in reader.capture.stacks] == ["py-spy"]
    assert reader.capture.timed_out == ()


def test_an_uninterruptible_process_is_read(tmp_path: Path) -> None:
    """Who attaches to it waits until it wakes. It waits for a child that has not yet become another program."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    source = (
        "actions = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]\n"
        "def step(): print('ready', flush=True); os.posix_spawn('/bin/true', ['true'], {}, file_actions=actions)\n"
        "step()"
    )
    with python(source, str(fifo)) as pid:
        until(lambda: state_of(pid) == "D", "in a vfork")
        reader = capture(CaptureTarget(0, pid), native="always", strace=True)
        assert state_of(pid) == "D"
    assert look_of(reader, pid).state == "D"
    assert functions(python_dump_of(reader, pid))[0] == "step"
    assert not any(dump.pid == pid and dump.tool == "py-spy --native" for dump in reader.capture.stacks)
    assert reader.capture.timed_out == ()


def test_a_rank_that_is_no_python_is_said_to_be_none() -> None:
    """A rank may be a shell script."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            reader = capture(CaptureTarget(0, process.pid))
        finally:
            process.kill()
    (dump,) = reader.capture.stacks
    assert (dump.failure, dump.threads, dump.tool) == ("sleep is not a Python process", (), "")


def test_denied_ptrace_is_explained_and_other_captures_go_on() -> None:
    """Without the hook there are no stacks then, and it is said which setting is in the way."""
    with python(UNDUMPABLE + SLEEP, prepare=without_ptrace) as pid:
        reader = capture(CaptureTarget(0, pid), prepare=without_ptrace, strace=True)
    (dump,) = reader.capture.stacks
    assert dump.failure == (
        "ptrace is denied: the process is not dumpable (PR_SET_DUMPABLE=0, or its program may not be read)"
    )
    assert look_of(reader, pid).state == "S"
    assert {note.capture for note in reader.capture.notes if not note.failure} >= {"process_state"}
    assert reader.capture.timed_out == ()


def test_where_ptrace_is_denied_the_process_writes_its_own_stacks(tmp_path: Path) -> None:
    """By the handler that the hook has registered."""
    prefix = str(tmp_path / "a0r0")
    reader = CaptureReader()
    with python(UNDUMPABLE + REGISTER + SLEEP, prefix, prepare=without_ptrace) as pid:
        for _ in range(2):  # the second time the file already holds something
            reader = capture(CaptureTarget(0, pid, prefix), prepare=without_ptrace, directory=str(tmp_path))
            (dump,) = reader.capture.stacks
            assert (dump.tool, functions(dump), dump.failure) == ("faulthandler", ["step", "<module>"], "")
            assert len(dump.threads) == 1
    notes = {note.capture: note for note in reader.capture.notes}
    assert notes["py_spy"].failure.startswith("ptrace is denied")
    assert Path(notes["faulthandler"].path).name == "rank_0.faulthandler.txt"


def test_a_handler_for_each_signal_with_a_name_costs_no_stacks(tmp_path: Path) -> None:
    """The signal that has faulthandler write them has none, unlike the next one."""
    prefix = str(tmp_path / "a0r0")
    handlers = "for one in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(one, print)\n"
    with python(UNDUMPABLE + REGISTER + handlers + SLEEP, prefix, prepare=without_ptrace) as pid:
        reader = capture(CaptureTarget(0, pid, prefix), prepare=without_ptrace)
    (dump,) = reader.capture.stacks
    assert (dump.tool, functions(dump), dump.failure) == ("faulthandler", ["step", "<module>"], "")


def test_a_script_that_counts_its_signals_from_the_top_gets_none(tmp_path: Path) -> None:
    """Its own handler may end it, or take the signal for the next batch."""
    prefix = str(tmp_path / "a0r0")
    handlers = "def end(*_): os._exit(1)\nfor one in (63, 64): signal.signal(one, end)\n"
    with python(UNDUMPABLE + REGISTER + handlers + SLEEP, prefix, prepare=without_ptrace) as pid:
        capture(CaptureTarget(0, pid, prefix), prepare=without_ptrace)
        until(lambda: state_of(pid) == "S", "it sleeps on")


def test_no_signal_is_sent_to_who_does_not_catch_it(tmp_path: Path) -> None:
    """It would die of it."""
    prefix = str(tmp_path / "a0r0")
    with python(UNDUMPABLE + SLEEP, prepare=without_ptrace) as pid:
        Path(f"{prefix}.{pid}.stacks").touch()
        capture(CaptureTarget(0, pid, prefix), prepare=without_ptrace)
        until(lambda: state_of(pid) == "S", "it sleeps on")


def test_where_nothing_else_is_left_torchs_worker_server_tells(tmp_path: Path) -> None:
    """It answers with faulthandler's text over HTTP."""
    prefix = str(tmp_path / "a0r0")
    server = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{sys.argv[1]}.{os.getpid()}.sock")
listener.listen()
def answer():
    while True:
        link, _ = listener.accept()
        link.recv(1000)
        link.sendall(b'HTTP/1.1 200 OK\\r\\n\\r\\n')
        link.sendall(b'Thread 0x01 (most recent call first):\\n  File "t.py", line 5 in f\\n')
        link.close()
threading.Thread(target=answer, daemon=True).start()
"""
    with python(UNDUMPABLE + server + SLEEP, prefix, prepare=without_ptrace) as pid:
        reader = capture(CaptureTarget(0, pid, prefix), prepare=without_ptrace)
    (dump,) = reader.capture.stacks
    assert (dump.tool, functions(dump)) == ("worker server", ["f"])


def test_a_budget_that_does_not_suffice_is_kept() -> None:
    """The picture comes when it was promised, with what there is."""
    with python(SLEEP) as pid:
        reader = capture(CaptureTarget(0, pid), budget_s=0.01)
    assert reader.capture.timed_out
    assert look_of(reader, pid).state == "S"


def test_eight_ranks_are_ready_before_the_budget_is_spent() -> None:
    """Two seconds where nothing else runs, which a benchmark measures; somebody at a terminal waits for it."""
    with ExitStack() as stack:
        pids = [stack.enter_context(python(SLEEP)) for _ in range(8)]
        reader = capture(*(CaptureTarget(rank, pid) for rank, pid in enumerate(pids)), gpu=False)
    assert len({dump.rank for dump in reader.capture.stacks if dump.threads}) == 8
    assert reader.capture.timed_out == ()


def test_cores_are_asked_for_in_the_same_way() -> None:
    """No dead, no cores; but an answer."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.process.one_capture"],
        input=encode_request(CoreRequest((), budget_s=5.0)),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    reader = CaptureReader()
    reader.feed(done.stdout)
    assert reader.is_done
    assert (reader.cores, reader.capture.notes) == ((), ())


@pytest.mark.parametrize("content", [b"", b"x", b'{"kind": "live", "value": 3}'])
def test_what_is_no_request_is_refused_in_two_lines(content: bytes) -> None:
    """Somebody may start it by hand."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.process.one_capture"],
        input=content,
        capture_output=True,
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    first, second = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (2, b"")
    assert first.startswith("saferun: ")
    assert second.startswith("hint: ")


def test_reading_results_loads_nothing_that_takes_them() -> None:
    """The supervisor reads them in its only thread."""
    program = "import sys; import saferun.captures.wire; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, check=True, timeout=60)
    loaded = set(done.stdout.decode().split())
    assert not loaded & {"ctypes", "subprocess", "dataclasses", "inspect", "socket", "saferun.captures.stacks"}


def test_what_a_scheduler_sends_to_every_process_of_a_job_does_not_end_who_looks_at_it() -> None:
    """The capture process may be on its way when it comes; neither it nor a tool that it starts has a handler yet."""
    child = spawn([sys.executable, "-c", "import os; os.execvp('sleep', ['sleep', '1000'])"], {}, ignored=JOB_SIGNALS)
    for signum in (*JOB_SIGNALS, signal.SIGKILL):
        os.kill(child.pid, signum)
    assert exit_status(os.waitpid(child.pid, 0)[1]).signum == signal.SIGKILL
    if child.pidfd >= 0:
        os.close(child.pidfd)
