"""Work that hardly shows is work, and what only looks like it is none: ranks without torch, and a watch over them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saferun.captures import inspection
from saferun.linux import sock_diag
from saferun.watchdog import monitor
from tests.process.launching import DEADLINE_S, running
from tests.process.quiet_jobs import Together
from tests.process.quiet_servers import CALL, quiet_servers
from tests.process.watch_jobs import SLEEPS, Job

TIMEOUT_S = 4.0
TIMEOUTS = 2.6

# ---------------------------------------------------------------------------------------------------- ranks at work

DOWNLOADS = """
connection = call("drip {} {}")
while True: connection.recv(1 << 16)
"""
DOWNLOADS_BY_UNIX_SOCKET = """
connection = call("drip {} {}", unix=True)
connection.settimeout(60)
while True: connection.recv(1 << 16)
"""
AT_WORK = {
    "downloads 1 kB/s": DOWNLOADS.format(100, 0.1),
    "downloads 1 MB/s": DOWNLOADS.format(100_000, 0.1),
    "downloads 1 kB/s through a Unix socket": DOWNLOADS_BY_UNIX_SOCKET.format(100, 0.1),
    "downloads 1 MB/s through a Unix socket": DOWNLOADS_BY_UNIX_SOCKET.format(100_000, 0.1),
    "uploads": """
connection = call("sink 40000 0.1", SO_SNDBUF=4096)
while True: connection.send(bytes(4000))
""",
    "downloads in a thread": """
def download():
    connection = call("drip 100 0.1")
    while True: connection.recv(1 << 16)
in_thread(download).join()
""",
    "compresses now and then in a pool": """
import concurrent.futures, zlib
data = os.urandom(300_000)
def compress():
    while True:
        zlib.compress(data)
        time.sleep(0.5)
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    pool.submit(compress).result()
""",
    "writes a file slowly in a thread": """
def write():
    with open(os.environ["SERVER_PATH"] + ".checkpoint", "wb", 0) as file:
        while True:
            file.write(bytes(200))
            time.sleep(0.1)
in_thread(write).join()
""",
}

# -------------------------------------------------------------------------------------------------- ranks that hang

HANGING = {
    "keep-alives": """
def listen():
    connection = call("drip 20 0.5")
    while True: connection.recv(1 << 16)
in_thread(listen)
time.sleep(1000)
""",
    "a heartbeat to a server": """
def beat():
    connection = call("answer 100")
    while True:
        connection.sendall(bytes(150))
        connection.recv(1 << 16)
        time.sleep(0.7)
in_thread(beat)
time.sleep(1000)
""",
    "asks for work every two seconds": """
connection = call("answer 400")
while True:
    connection.sendall(bytes(200))
    connection.recv(1 << 16)
    time.sleep(2)
""",
    "asks for work through a Unix socket every two seconds": """
connection = call("answer 400", unix=True)
while True:
    connection.sendall(bytes(200))
    connection.recv(1 << 16)
    time.sleep(2)
""",
    "is sent what it does not read": """
connection = call("drip 100 0.1")
time.sleep(1000)
""",
    "is asked for metrics": """
listener = socket.create_server(("127.0.0.1", 0))
def fetch():
    connection = socket.create_connection(listener.getsockname())
    while True: connection.recv(1 << 16)
if os.fork() == 0:
    # Not of the rank's family any more.
    if os.fork() == 0: fetch()
    os._exit(0)
os.wait()
def serve():
    connection, _ = listener.accept()
    while True:
        connection.sendall(bytes(20_000))
        time.sleep(1)
in_thread(serve)
time.sleep(1000)
""",
    "a service of its own that it keeps awake": """
ours, theirs = socket.socketpair()
if os.fork() == 0:
    while True: theirs.recv(1 << 16)
def beat():
    while True:
        ours.send(bytes(20))
        time.sleep(0.2)
in_thread(beat)
time.sleep(1000)
""",
    "a thread that polls": """
def poll():
    while True: time.sleep(0.005)
in_thread(poll)
time.sleep(1000)
""",
}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    with contextlib.ExitStack() as stack:
        jobs = Together(stack, lambda: tmp_path_factory.mktemp("job"), {**AT_WORK, **HANGING}, TIMEOUT_S)
        jobs.run(TIMEOUTS)
        jobs.until_reported(*HANGING)
        yield jobs


@pytest.mark.parametrize("name", AT_WORK)
def test_bytes_from_outside_and_threads_at_work_are_progress(together: Together, name: str) -> None:
    """The main thread shows nothing of it."""
    assert together.jobs[name].verdicts == []


@pytest.mark.parametrize("name", HANGING)
def test_what_goes_on_in_a_hang_does_not_hide_it(together: Together, name: str) -> None:
    """Heartbeats, keep-alives and questions for work go on whether a rank works or hangs."""
    assert {(verdict.kind, verdict.certain) for verdict in together.jobs[name].verdicts} == {("quiescent", True)}


def test_ranks_that_talk_to_each_other_make_no_progress(tmp_path: Path) -> None:
    """That is what those do that wait for each other."""
    serves = """
listener = socket.create_server(("127.0.0.1", 0))
open(sys.argv[1] + ".part", "w").write(str(listener.getsockname()[1]))
os.rename(sys.argv[1] + ".part", sys.argv[1])
def serve():
    connection, _ = listener.accept()
    while True:
        connection.sendall(bytes(100))
        time.sleep(0.1)
in_thread(serve)
time.sleep(1000)
"""
    reads = """
path = sys.argv[1].replace("fifo1", "fifo0")
while not os.path.exists(path): time.sleep(0.01)
connection = socket.create_connection(("127.0.0.1", int(open(path).read())))
def read():
    while True: connection.recv(1 << 16)
in_thread(read)
time.sleep(1000)
"""
    with contextlib.closing(Job(tmp_path, CALL + serves, CALL + reads, timeout_s=TIMEOUT_S)) as job:
        job.begin()
        assert job.until_told()[:2] == ("quiescent", (10, 11))


def test_what_the_store_sends_is_no_progress(tmp_path: Path) -> None:
    """Torch's watchdogs ask it once a second."""
    with quiet_servers(tmp_path) as servers:
        job = Job(
            tmp_path,
            CALL + AT_WORK["downloads 1 kB/s"],
            SLEEPS,
            timeout_s=TIMEOUT_S,
            environ=servers.environ,
            store_port=servers.port,
        )
        with contextlib.closing(job):
            job.begin()
            assert job.until_told().certain


def test_without_socket_diagnosis_wake_ups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seccomp may deny it. A thread that data wakes up all the time is at work; one that asks now and then is not."""
    monkeypatch.setattr(sock_diag, "_NETLINK_SOCK_DIAG", 31)  # such a protocol there is not
    programs = {name: AT_WORK[name] for name in ("downloads 1 kB/s", "downloads 1 MB/s through a Unix socket")}
    with contextlib.ExitStack() as stack:
        folders = (tmp_path / str(number) for number in range(10))

        def new_folder() -> Path:
            folder = next(folders)
            folder.mkdir()
            return folder

        hangs = "asks for work every two seconds"
        jobs = Together(stack, new_folder, {**programs, hangs: HANGING[hangs]}, TIMEOUT_S)
        jobs.run(TIMEOUTS)
        jobs.until_reported(hangs)
        assert [name for name, job in jobs.jobs.items() if job.verdicts] == [hangs]


def _never(_value: object) -> bytes:
    time.sleep(1000)
    return b""


def _fails(_value: object) -> bytes:
    raise PermissionError


@pytest.mark.parametrize("look", [_never, _fails, lambda _value: b"{"], ids=["hangs", "fails", "answers nonsense"])
def test_a_look_that_fails_costs_its_evidence_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[object], bytes]
) -> None:
    """A hang is found as before, and a job at work is none."""
    monkeypatch.setattr(inspection, "inspection_json", look)
    monkeypatch.setattr(monitor, "_INSPECTION_DEADLINE_S", 0.5)
    works = "while True:\n    time.sleep(0.5)\n    burn(0.02)\n"
    (tmp_path / "works").mkdir()
    with (
        contextlib.closing(Job(tmp_path, SLEEPS, SLEEPS)) as hangs,
        contextlib.closing(Job(tmp_path / "works", works, SLEEPS, shared=hangs)) as healthy,
    ):
        hangs.begin()
        healthy.begin()
        give_up_at = time.monotonic() + DEADLINE_S
        while not hangs.verdicts:
            assert time.monotonic() < give_up_at
            hangs.turn()
            healthy.turn(wait_s=0.0)
        assert hangs.verdicts[0][:2] == ("quiescent", (10, 11))
        assert hangs.verdicts[0].certain
        assert healthy.verdicts == []


def test_a_rank_whose_descriptors_cannot_be_read_is_judged_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with hidepid, and of ranks that are not dumpable."""
    monkeypatch.setattr(inspection, "list_fds", lambda *_: [])
    with contextlib.closing(Job(tmp_path, SLEEPS, SLEEPS)) as job:
        job.begin()
        assert job.until_told().certain


def test_a_job_that_downloads_goes_on_until_the_download_stands_still(tmp_path: Path) -> None:
    """From the command to the verdict: only then nothing moves any more."""
    program = f"""
from rank import *
{CALL}
if RANK == 0:
    connection = call("drip 100 0.1")
    tell("downloads")
    while connection.recv(1 << 16): pass
stay()
"""
    options = ("--env-profile", "minimal", "--hang-timeout", "3", "--on-hang", "stop", "--shutdown-timeout", "2")
    with (
        quiet_servers(tmp_path) as servers,
        running(tmp_path / "run", program, *options, nproc=2, environ=servers.environ, store=False) as job,
    ):
        job.hear("downloads", 1)
        time.sleep(7)
        assert "hangs" not in job.err
        servers.close()
        assert job.wait() != 0
        assert "saferun: the job hangs" in job.err
        assert "stopping all ranks (--on-hang stop)" in job.err
