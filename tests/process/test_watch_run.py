"""The watch over real processes, which do what the ranks of healthy and of hanging jobs do; timeouts are of seconds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from saferun.captures import held_tools
from saferun.captures.tools import find_tool
from saferun.watchdog import monitor
from tests.descriptors import open_descriptors
from tests.process.launching import DEADLINE_S, state_of
from tests.process.watch_jobs import SLEEPS, TIMEOUT_S, Job, watched

LOOKS_EVERY_MS = "while True: time.sleep(0.001)"
POLLS_A_QUEUE = """
import queue
jobs = queue.Queue()
while True:
    try: jobs.get(timeout=0.3)
    except queue.Empty: pass
"""
WAITS_FOR_A_CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "100"])
while True:
    try: child.wait(timeout=0.3)
    except subprocess.TimeoutExpired: pass
"""
SPINS = "while True: pass"
SPINS_IN_A_THREAD = """
import threading
def spin():
    while True: pass
thread = threading.Thread(target=spin)
thread.start()
thread.join()
"""
SPINS_IN_A_WORKER = """
worker = os.fork()
while worker == 0: pass
os.waitpid(worker, 0)
"""
EVALUATES = """
import json
def adds(n): return sum(range(n))
def writes(n): return json.dumps(list(range(n)))
def sorts(n): return sorted(range(n), key=lambda number: -number)
while True:
    for step in (adds, writes, sorts):
        step(3000)
        step(60000)
"""
EVALUATES_IN_A_WORKER = "if os.fork() != 0: os.wait()" + EVALUATES
LONG_STEPS = """
null = open("/dev/null", "wb", 0)
while True:
    time.sleep(1.4)
    burn(0.02)
    null.write(bytes(1000))
"""
SLOW_LOADER = """
read_end, write_end = os.pipe()
while True:
    time.sleep(0.7)
    burn(0.005)
    os.write(write_end, bytes(20))
    os.read(read_end, 20)
"""
WRITES_NOW_AND_THEN = """
null = open("/dev/null", "wb", 0)
while True:
    time.sleep(1)
    null.write(bytes(100_000))
"""
BUSY_SUBPROCESS = """
import subprocess
subprocess.run([sys.executable, "-c", "while True: pass"])
"""
COMPILES = """
import subprocess
while True: subprocess.run([sys.executable, "-S", "-c", "sum(range(2_000_000))"])
"""
COPIES = """
import subprocess
subprocess.run(["sh", "-c", "while :; do head -c 300000 /dev/zero >/dev/null; sleep 0.3; done"])
"""
UNINTERRUPTIBLE = """
fifo = sys.argv[1]
os.mkfifo(fifo)
# Its parent sleeps uninterruptibly until the new process, which waits for a writer, has become the program.
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
"""


def served(answer: str, then: str) -> str:
    """A rank whose worker server answers so; ``count`` grows with each answer."""
    return f"""
import socket, threading
server = socket.socket(socket.AF_UNIX)
server.bind(f"{{sys.argv[2]}}.{{os.getpid()}}.sock")
server.listen(8)
def serve():
    count = 0
    kept = []
    while True:
        connection, _ = server.accept()
        count += 1
        kept.append(connection)
        connection.recv(4096)
        {answer}
threading.Thread(target=serve, daemon=True).start()
{then}
"""


def status(enqueued: str, completed: str) -> str:
    """The end of an answer, behind much of what nobody needs."""
    return f"""
        body = '{{"entries":[' + '1,' * 200000 + '1],"pg_status":{{"0":{{"last_completed_collective":"'
        body += str({completed}) + '","last_enqueued_collective":"' + str({enqueued})
        body += '","last_started_collective":"-1"}}}},"version":"2"}}'
        head = f"HTTP/1.1 200 OK\\r\\nContent-Length: {{len(body)}}\\r\\n\\r\\n"
        connection.sendall((head + body).encode())
        connection.close()
"""


# ------------------------------------------------------------------------------------------------- those that only wait

BEATS = """
while True:
    open(sys.argv[1].replace("fifo", "beat"), "w").close()
    time.sleep(0.5)
"""
HANGING = {
    "sleeps": SLEEPS,
    "looks every ms": LOOKS_EVERY_MS,
    "polls a queue": POLLS_A_QUEUE,
    "waits for a child": WAITS_FOR_A_CHILD,
}
# What their sockets answer who asks for the sequence numbers.
ANSWERS = {
    "none": "pass",
    "closed": "connection.close()",
    "never ends": "connection.sendall(b'x' * 10)",
    "deep": "connection.sendall(b'\"pg_status\":' + b'[' * 3_000_000); connection.close()",
    "long number": (
        'connection.sendall(b\'"pg_status":{"0":{"last_enqueued_collective":"\' + b\'9\' * 100000 + b\'"}}}\')'
        "; connection.close()"
    ),
}
AT_WORK = {"steps": LONG_STEPS, "loader": SLOW_LOADER, "writes": WRITES_NOW_AND_THEN, "copies": COPIES}
SERVED = {name: served(answer, SLEEPS) for name, answer in ANSWERS.items()}
# Where a rank answers, it does so with a thread that may wait for a processor for seconds.
ANSWERED_TIMEOUT_S = 3 * TIMEOUT_S
SERVED["advances"] = served(status("count", "count - 1"), SLEEPS)


@pytest.fixture(scope="module")
def watched_together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs that need next to no processor time, after their timeouts; each with a rank beside it that sleeps.

    All at once, and with one examiner: a timeout each would add up to a minute.
    """
    programs = {**HANGING, **SERVED, **AT_WORK, "beats": BEATS}
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Job] = {}
        for number, (name, program) in enumerate(programs.items()):
            folder = tmp_path_factory.mktemp(f"job{number}")
            timeout_s = ANSWERED_TIMEOUT_S if name == "advances" else TIMEOUT_S
            prefix = "r" if name in SERVED else ""
            first = next(iter(jobs.values()), None)
            jobs[name] = Job(folder, program, SLEEPS, prefix=prefix, timeout_s=timeout_s, shared=first)
            stack.callback(jobs[name].close)
        for job in jobs.values():
            job.begin()
        expected = [jobs[name] for name in (*HANGING, *ANSWERS)]
        enough_at = time.monotonic() + max(2.5 * TIMEOUT_S, 1.5 * ANSWERED_TIMEOUT_S)
        give_up_at = time.monotonic() + DEADLINE_S
        while (now := time.monotonic()) < enough_at or not all(job.verdicts for job in expected):
            assert now < give_up_at, [name for name, job in jobs.items() if not job.verdicts]
            for job in jobs.values():
                job.turn(wait_s=0.0)
            time.sleep(0.005)
    # What was told of them is all that is asked: they do not use processors while other tests run.
    return jobs


@pytest.mark.parametrize("name", HANGING)
def test_ranks_that_wait_for_nothing_hang(watched_together: dict[str, Job], name: str) -> None:
    """Whether they sleep or look again and again."""
    job = watched_together[name]
    assert {verdict[:2] for verdict in job.verdicts} == {("quiescent", (10, 11))}
    assert all(verdict.certain for verdict in job.verdicts)
    assert job.told_at - job.began >= TIMEOUT_S


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_rank_answers_the_watch_goes_on(watched_together: dict[str, Job], name: str) -> None:
    """The socket is the rank's: it may say anything, or nothing, forever."""
    assert {verdict.kind for verdict in watched_together[name].verdicts} == {"quiescent"}


@pytest.mark.parametrize("name", AT_WORK)
def test_work_that_hardly_shows_is_work(watched_together: dict[str, Job], name: str) -> None:
    """Most of the samples see nothing."""
    assert watched_together[name].verdicts == []


def test_collectives_that_advance_are_work(watched_together: dict[str, Job]) -> None:
    """Nothing else may be seen of them."""
    assert watched_together["advances"].verdicts == []


def test_a_rank_that_beats_is_alive(watched_together: dict[str, Job]) -> None:
    """Whatever else it does, or does not."""
    assert watched_together["beats"].verdicts == []


# --------------------------------------------------------------------------------------------------------------- hangs


@pytest.mark.parametrize(
    "program",
    [SPINS, *(pytest.param(program, marks=pytest.mark.slow) for program in (SPINS_IN_A_THREAD, SPINS_IN_A_WORKER))],
    ids=["main thread", "thread", "worker"],
)
def test_a_rank_that_spins_is_a_suspicion(tmp_path: Path, program: str) -> None:
    """In its main thread, in another, or in a worker."""
    with watched(tmp_path, SLEEPS, program) as job:
        verdict = job.until_told()
        assert verdict[:2] == ("spinning", (11,))
        assert (verdict.certain, verdict.busy) == (False, (11,))


def test_a_stopped_rank_is_told_and_so_is_that_it_goes_on(tmp_path: Path) -> None:
    """At once, and not after the timeout."""
    with watched(tmp_path, WRITES_NOW_AND_THEN, WRITES_NOW_AND_THEN, timeout_s=100_000.0) as job:
        job.ranks[1].send_signal(signal.SIGSTOP)
        verdict = job.until_told()
        assert verdict[:2] == ("stopped", (11,))
        job.ranks[1].send_signal(signal.SIGCONT)
        job.until(lambda: job.recovered_s, "a recovery")
        assert len(job.verdicts) == 1


def test_a_rank_in_an_uninterruptible_sleep_is_told_beside_the_hang(tmp_path: Path) -> None:
    """Looking at it never waits for it."""
    with watched(tmp_path, UNINTERRUPTIBLE, WRITES_NOW_AND_THEN) as job:
        verdict = job.until_told()
        assert state_of(job.ranks[0].pid) == "D"
        assert verdict[:2] == ("uninterruptible", (10,))
        fd = os.open(tmp_path / "fifo0", os.O_WRONLY)
        os.close(fd)


def test_a_heart_that_stops_beating_is_told(tmp_path: Path) -> None:
    """The rank burns, and the other one is at work."""
    (tmp_path / "beat0").touch()
    with watched(tmp_path, SPINS, WRITES_NOW_AND_THEN) as job:
        verdict = job.until_told()
        assert verdict[:2] == ("heartbeat", (10,))


# ------------------------------------------------------------------------------------------------------------ no hangs


@pytest.mark.parametrize(
    "program",
    [
        EVALUATES,
        pytest.param(EVALUATES_IN_A_WORKER, marks=pytest.mark.slow),
        pytest.param(BUSY_SUBPROCESS, marks=pytest.mark.slow),
        # Children at work: "copies" above.
        pytest.param(COMPILES, marks=pytest.mark.slow),
    ],
    ids=["evaluates", "worker", "subprocess", "compiles"],
)
def test_one_at_work_keeps_the_job_from_being_called_hung(tmp_path: Path, program: str) -> None:
    """Everybody else waits for it."""
    with watched(tmp_path, program, SLEEPS, POLLS_A_QUEUE) as job:
        assert job.run(2.5 * TIMEOUT_S) == []


@pytest.mark.slow
def test_the_python_below_a_shell_is_the_rank(tmp_path: Path) -> None:
    """``--no-python ./run.sh``: the shell only waits."""
    shell = ("sh", "-c", '"$@"; exit $?', "sh")
    with watched(tmp_path, LONG_STEPS, SLEEPS, through=shell) as job:
        assert job.run(2.5 * TIMEOUT_S) == []
    with watched(tmp_path, SPINS, SLEEPS, through=shell) as job:
        assert job.until_told()[:2] == ("spinning", (10,))


def test_output_is_a_sign_of_life(tmp_path: Path) -> None:
    """The loop knows of it; the rank's own numbers would not show a write so small."""
    with watched(tmp_path, SLEEPS) as job:
        for _ in range(6):
            assert job.run(TIMEOUT_S / 2) == []
            job.output_bytes[0] += 1


def test_a_rank_that_is_debugged_does_not_hang(tmp_path: Path) -> None:
    """Nor does whoever waits for it; when the debugger has gone the watch goes on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with watched(tmp_path, SLEEPS, SLEEPS) as job:
        pid = job.ranks[0].pid
        assert libc.ptrace(0x4206, pid, None, None) == 0, os.strerror(ctypes.get_errno())  # PTRACE_SEIZE
        assert job.run(2.5 * TIMEOUT_S) == []
        # Detaching wants it stopped.
        assert libc.ptrace(0x4207, pid, None, None) == 0  # PTRACE_INTERRUPT
        os.waitpid(pid, 0x40000000)  # __WALL
        assert libc.ptrace(17, pid, None, None) == 0  # PTRACE_DETACH
        assert job.until_told().kind == "quiescent"


# ---------------------------------------------------------------------------------------------------- sequence numbers


def test_ranks_that_burn_in_a_collective_are_stuck_in_it(tmp_path: Path) -> None:
    """As all ranks of an NCCL job do that wait for one."""
    in_it, elsewhere = served(status("6", "5"), SPINS), served(status("5", "5"), SLEEPS)
    with watched(tmp_path, in_it, elsewhere, prefix="r") as job:
        verdict = job.until_told()
        assert verdict[:2] == ("stuck_collective", (10,))
        assert (verdict.certain, verdict.busy) == (True, (10,))


# ------------------------------------------------------------------------------------------------------ its own helpers


@pytest.mark.slow
def test_without_py_spy_nobody_is_suspected_of_spinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be seen may be work."""
    monkeypatch.setattr(held_tools, "find_tool", lambda _name: "")
    with watched(tmp_path, SPINS, SLEEPS) as job:
        assert job.run(2 * TIMEOUT_S) == []


@pytest.mark.slow
def test_a_py_spy_that_hangs_costs_its_evidence_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is started has a deadline."""
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(held_tools, "find_tool", lambda _name: str(program))
    monkeypatch.setattr(monitor, "_DUMP_DEADLINE_S", 0.2)
    with watched(tmp_path, SPINS, SLEEPS) as job:
        job.until(lambda: job.looks, "a look")
        first = set(job.looks)
        job.until(lambda: not first & job.looks, "the end of the first looks")
        assert job.run(TIMEOUT_S) == []


def test_a_paused_watch_does_nothing_until_what_it_told_is_captured(tmp_path: Path) -> None:
    """What is done to the ranks meanwhile is not their doing."""
    with watched(tmp_path, SLEEPS, SLEEPS) as job:
        job.until_told()
        assert job.watch.deadline is None
        assert job.looks == set()
        for process in job.ranks:
            process.send_signal(signal.SIGSTOP)
            process.send_signal(signal.SIGCONT)
        job.run(TIMEOUT_S / 2)
        assert job.recovered_s == []
        assert len(job.verdicts) == 1


def test_a_watch_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    """Also where it had been looking at somebody."""
    before = len(open_descriptors())
    with watched(tmp_path, SPINS, SLEEPS) as job:
        job.until(lambda: job.looks, "a look")
        job.watch.end()
        assert job.watch.deadline is None
        for rank in (0, 1):
            job.watch.rank_ended(rank)
    assert len(open_descriptors()) == before


def test_ranks_that_have_ended_are_left_out(tmp_path: Path) -> None:
    """The others wait for one that went away with 0: they hang, and it does not."""
    with watched(tmp_path, "time.sleep(0.5)", SLEEPS, SLEEPS) as job:
        job.until(lambda: job.ranks[0].poll() is not None, "the end of the first rank")
        job.watch.rank_ended(0)
        assert job.until_told()[:2] == ("quiescent", (11, 12))


def test_py_spy_is_found_beside_python_and_then_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed with saferun; whoever runs saferun from a checkout may have it elsewhere."""
    beside, elsewhere = tmp_path / "bin" / "py-spy", tmp_path / "elsewhere" / "py-spy"
    monkeypatch.setattr(sys, "executable", str(beside.parent / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{elsewhere.parent}")
    assert find_tool("py-spy") == ""
    for path in (elsewhere, beside):
        path.parent.mkdir()
        path.touch()
        assert find_tool("py-spy") != str(path)
        path.chmod(0o755)
        assert find_tool("py-spy") == str(path)
