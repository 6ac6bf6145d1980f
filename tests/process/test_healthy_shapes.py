"""Quiet work of many shapes, while another rank waits: none of it may be called a hang, at least not for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.quiet_jobs import Together
from tests.process.watch_jobs import SLEEPS, Job

TIMEOUT_S = 4.0
TIMEOUTS = 5.0

PRELUDE = """
import asyncio, concurrent.futures, hashlib, select, subprocess, zlib
def python(program, *arguments):
    return [sys.executable, "-S", "-c", program, *map(str, arguments)]
def scratch(name):
    return os.environ["SERVER_PATH"] + "." + name + str(os.getpid())
"""
SHAPES = {
    # Downloads; test_quiet_work.py has the plain ones.
    "download in an event loop": """
async def download():
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["SERVER_PORT"]))
    writer.write(b"drip 100 0.1\\n")
    while True: await reader.read(1 << 16)
asyncio.run(download())
""",
    "download through a Unix socket in an event loop": """
async def download():
    reader, writer = await asyncio.open_unix_connection(os.environ["SERVER_PATH"])
    writer.write(b"drip 100 0.1\\n")
    while True: await reader.read(1 << 16)
asyncio.run(download())
""",
    "download with a timeout by select": """
connection = call("drip 100 0.1")
while True:
    select.select([connection], [], [], 30)
    connection.recv(1 << 16)
""",
    "download through a Unix socket by select": """
connection = call("drip 100 0.1", unix=True)
while True:
    select.select([connection], [], [], 30)
    connection.recv(1 << 16)
""",
    "download through IPv6": """
connection = call("drip 100 0.1", address="::1" if os.path.exists("/proc/net/if_inet6") else "127.0.0.1")
while True: connection.recv(1 << 16)
""",
    "download of eight files at a time": """
def download():
    connection = call("drip 20 0.2")
    while True: connection.recv(1 << 16)
for thread in [in_thread(download) for _ in range(8)]: thread.join()
""",
    "download of datagrams": """
connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
connection.connect(("127.0.0.1", int(os.environ["SERVER_PORT"])))
connection.send(b"drip")
while True: connection.recv(1 << 16)
""",
    "download by a child": """
import subprocess
subprocess.run(python('''
import os, socket
connection = socket.create_connection(("127.0.0.1", int(os.environ["SERVER_PORT"])))
connection.sendall(b"drip 100 0.1\\\\n")
while True: connection.recv(1 << 16)
'''))
""",
    "download through a Unix socket in a thread": """
def download():
    connection = call("drip 100 0.1", unix=True)
    while True: connection.recv(1 << 16)
in_thread(download).join()
""",
    # Uploads
    "upload in a thread": """
def upload():
    connection = call("sink 40000 0.1", SO_SNDBUF=4096)
    while True: connection.send(bytes(4000))
in_thread(upload).join()
""",
    "slow upload": """
connection = call("sink 4000 0.01")
while True:
    connection.sendall(bytes(200))
    time.sleep(0.1)
""",
    # Databases and services
    "query that reports its progress": """
connection = call("drip 60 0.1")
connection.settimeout(30)
while True: connection.recv(1 << 16)
""",
    "rows of a database": """
connection = call("answer 4000")
while True:
    connection.sendall(bytes(50))
    connection.recv(1 << 16)
    time.sleep(0.1)
""",
    "service that is asked all the time": """
connection = call("answer 300")
while True:
    connection.sendall(bytes(60))
    connection.recv(1 << 16)
    time.sleep(0.1)
""",
    "compile server": """
connection = call("compute 60", unix=True)
connection.recv(1)
""",
    "compile server over TCP": """
connection = call("compute 60")
connection.recv(1)
""",
    # Threads
    "threads that compress": """
data = os.urandom(200_000)
def compress():
    while True:
        zlib.compress(data)
        time.sleep(0.4)
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(compress) for _ in range(4)]: future.result()
""",
    "a native thread that computes": """
def compute():
    while True: hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", 50_000)
in_thread(compute).join()
""",
    "a long native call": """
hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", 1 << 30)
""",
    "a thread that parses": """
def parse():
    while True:
        burn(0.006)
        time.sleep(0.7)
in_thread(parse).join()
""",
    "a thread that reads a slow pipe": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    while True:
        os.write(write_end, bytes(50))
        time.sleep(0.1)
def read():
    while True: os.read(read_end, 1000)
in_thread(read).join()
""",
    # Loaders
    "slow loader in a process": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    while True:
        time.sleep(0.8)
        burn(0.004)
        os.write(write_end, bytes(20))
while True:
    os.read(read_end, 20)
    burn(0.002)
""",
    "loader that downloads": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    connection = call("drip 100 0.1")
    got = 0
    while True: got += len(connection.recv(1 << 16))
os.read(read_end, 20)
""",
    "loader that downloads through a Unix socket": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    connection = call("drip 100 0.1", unix=True)
    while True: connection.recv(1 << 16)
os.read(read_end, 20)
""",
    # Subprocesses
    "evaluation in a subprocess": """
subprocess.run(python("while True: sum(range(100_000))"))
""",
    "light evaluation in a subprocess": """
subprocess.run(python("import time\\nwhile True: sum(range(300_000)); time.sleep(0.3)"))
""",
    "subprocess that writes slowly": """
program = "import sys, time\\nf = open(sys.argv[1], 'wb', 0)\\nwhile True: f.write(bytes(100)); time.sleep(0.1)"
subprocess.run(python(program, scratch("out")))
""",
    "tests in many short processes": """
while True: subprocess.run(python("sum(range(1_000_000))"))
""",
    # Checkpoints
    "checkpoint to a slow disk": """
with open(scratch("checkpoint"), "wb", 0) as file:
    while True:
        file.write(bytes(2000))
        os.fsync(file.fileno())
        time.sleep(0.2)
""",
    "checkpoint to a slow disk in a thread": """
def write():
    with open(scratch("checkpoint"), "wb", 0) as file:
        while True:
            file.write(bytes(300))
            time.sleep(0.1)
in_thread(write).join()
""",
    "disk that makes the rank wait uninterruptibly": """
fifo = scratch("fifo")
os.mkfifo(fifo)
if os.fork() == 0:
    while True:
        time.sleep(0.15)
        os.close(os.open(fifo, os.O_WRONLY))
while True:
    # Its parent sleeps uninterruptibly until the new process, which waits for a writer, has become the program.
    pid = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
    os.waitpid(pid, 0)
""",
    "disk that makes a thread wait uninterruptibly": """
fifo = scratch("fifo")
os.mkfifo(fifo)
if os.fork() == 0:
    while True:
        time.sleep(0.15)
        os.close(os.open(fifo, os.O_WRONLY))
def write():
    while True:
        pid = os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
        os.waitpid(pid, 0)
in_thread(write).join()
""",
    # Others
    "long steps": """
while True:
    time.sleep(3)
    burn(0.02)
""",
}

# Ranks that hang, and do what ranks do that hang; test_quiet_work.py has the plain ones.
HANGS = {
    "waits with a timeout for a silent Unix socket": """
connection = call("drip 1 1000", unix=True)
connection.recv(1)
connection.settimeout(1)
while True:
    try: connection.recv(1 << 16)
    except TimeoutError: pass
""",
    "waits with short timeouts for a silent Unix socket": """
connection = call("drip 1 1000", unix=True)
connection.recv(1)
while True: select.select([connection], [], [], 0.05)
""",
    "waits for a silent server": """
connection = call("drip 1 1000")
connection.recv(1)
connection.recv(1)
""",
    "an event loop with timers": """
async def tick():
    while True: await asyncio.sleep(0.05)
asyncio.run(tick())
""",
    "an event loop that beats": """
async def beat():
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["SERVER_PORT"]))
    writer.write(b"answer 60\\n")
    while True:
        await asyncio.sleep(1)
        writer.write(bytes(60))
        await reader.read(1 << 16)
asyncio.run(beat())
""",
    "an event loop that threads wake up": """
def wake(loop):
    while True:
        loop.call_soon_threadsafe(lambda: None)
        time.sleep(0.1)
async def wait():
    in_thread(wake, asyncio.get_running_loop())
    await asyncio.Event().wait()
asyncio.run(wait())
""",
    "ships its log": """
def ship():
    connection = call("sink 10000 0.1")
    while True:
        connection.sendall(bytes(200))
        time.sleep(1)
in_thread(ship)
time.sleep(1000)
""",
    "pushes metrics": """
def push():
    connection = call("sink 10000 0.1")
    while True:
        connection.sendall(bytes(4000))
        time.sleep(5)
in_thread(push)
time.sleep(1000)
""",
    "beats by new connections": """
def beat():
    while True:
        connection = call("answer 2000")
        connection.sendall(bytes(300))
        connection.recv(1 << 16)
        connection.close()
        time.sleep(2)
in_thread(beat)
time.sleep(1000)
""",
    "asks for datagrams": """
connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
connection.settimeout(2)
while True:
    connection.sendto(b"x", ("127.0.0.1", 9))
    try: connection.recv(1 << 16)
    except OSError: time.sleep(2)
""",
    "a pool that has nothing to do": """
pool = concurrent.futures.ThreadPoolExecutor(8)
for future in [pool.submit(time.sleep, 0.1) for _ in range(8)]: future.result()
time.sleep(1000)
""",
    "a forked worker that waits for its queue": """
read_end, write_end = os.pipe()
if os.fork() == 0:
    while True: select.select([read_end], [], [], 5)
time.sleep(1000)
""",
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    with contextlib.ExitStack() as stack:
        programs = {name: PRELUDE + program for name, program in SHAPES.items()}
        jobs = Together(stack, lambda: tmp_path_factory.mktemp("job"), programs, TIMEOUT_S)
        jobs.run(TIMEOUTS)
        yield jobs


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    # Their server is at work for no other job.
    with contextlib.ExitStack() as stack:
        programs = {name: PRELUDE + program for name, program in HANGS.items()}
        jobs = Together(stack, lambda: tmp_path_factory.mktemp("job"), programs, TIMEOUT_S)
        jobs.run(1.0)
        jobs.until_reported(*HANGS)
        yield jobs


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_quiet_work_is_no_hang(shapes: Together, name: str) -> None:
    """``--on-hang stop`` would have ended the job. What cannot be told from a loop may be suspected."""
    assert all(rank.poll() is None for rank in shapes.jobs[name].ranks)
    assert [verdict for verdict in shapes.jobs[name].verdicts if verdict.certain] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_found_whatever_goes_on_beside_it(hangs: Together, name: str) -> None:
    """Else all of this would be worth nothing."""
    assert {(verdict.kind, verdict.certain) for verdict in hangs.jobs[name].verdicts} == {("quiescent", True)}


# ----------------------------------------------------------------------------------------------- ranks that may not run

STEPS = "while True:\n    time.sleep(0.05)\n    burn(0.01)\n"


@contextlib.contextmanager
def two_ranks(folder: Path, timeout_s: float = 2.0) -> Iterator[Job]:
    job = Job(folder, STEPS, STEPS, timeout_s=timeout_s)
    try:
        job.begin()
        yield job
    finally:
        job.close()


def test_a_job_that_is_stopped_and_continued_does_not_hang(tmp_path: Path) -> None:
    """A scheduler that suspends jobs stops all ranks. That they are stopped is reported, as suspected."""
    with two_ranks(tmp_path) as job:
        for process in job.ranks:
            process.send_signal(signal.SIGSTOP)
        assert set(job.run(5.0)) <= {"stopped"}
        for process in job.ranks:
            process.send_signal(signal.SIGCONT)
        assert set(job.run(3.0)) <= {"stopped"}
        assert not any(verdict.certain for verdict in job.verdicts)


@pytest.mark.slow
def test_a_job_that_is_stopped_again_and_again_does_not_hang(tmp_path: Path) -> None:
    """Ranks share their GPUs and take turns."""
    with two_ranks(tmp_path) as job:
        for _ in range(6):
            for process in job.ranks:
                process.send_signal(signal.SIGSTOP)
            job.run(1.3)
            for process in job.ranks:
                process.send_signal(signal.SIGCONT)
            job.run(0.2)
        assert not any(verdict.certain for verdict in job.verdicts)


@pytest.mark.slow
def test_a_suspended_laptop_does_not_hang(tmp_path: Path) -> None:
    """Nothing runs for a while, the watch neither."""
    with two_ranks(tmp_path) as job:
        for _ in range(2):
            for process in job.ranks:
                process.send_signal(signal.SIGSTOP)
            time.sleep(5.0)
            for process in job.ranks:
                process.send_signal(signal.SIGCONT)
            assert job.run(1.5) == []


def _cpu_quota(name: str, percent: int) -> Path:
    """A control group of this machine whose processes get so much of a processor."""
    for parent, first in (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"), ("/sys/fs/cgroup", "cpu.max")):
        group = Path(parent) / name
        try:
            group.mkdir()
            content = f"{percent * 1000}" if "quota" in first else f"{percent * 1000} 100000"
            (group / first).write_text(content)
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        return group
    pytest.skip("no control group for processors can be made here")


@pytest.mark.slow
def test_a_throttled_container_does_not_hang(tmp_path: Path) -> None:
    """Its ranks want to run, and get 2 % of a processor together."""
    group = _cpu_quota(f"saferun-test-{os.getpid()}", 2)
    try:
        with contextlib.closing(Job(tmp_path, "while True: sum(range(3000))", SLEEPS, timeout_s=3.0)) as job:
            for process in job.ranks:
                (group / "cgroup.procs").write_text(str(process.pid))
            job.begin()
            job.run(15.0)
            # A process that ends takes CPU time for that, too.
            for process in job.ranks:
                (group.parent / "cgroup.procs").write_text(str(process.pid))
            assert not any(verdict.certain for verdict in job.verdicts)
    finally:
        group.rmdir()
