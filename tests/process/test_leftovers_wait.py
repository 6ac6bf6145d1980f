"""What works on after ranks that ended with exit code 0: an upload of the last checkpoint, beside torchrun."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import DEADLINE_S, customized, in_saferun, kill, read_stat, running, until
from tests.process.reading import Pipe

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

# A rank that ends while a program of its own uploads: it works until it is told that the network is free.
UPLOADING = """
import subprocess
from rank import *
work = '''
import os, sys, time
folder, rank = sys.argv[1:3]
while not os.path.exists(folder + "/release.upload"):
    open("/dev/null", "wb").write(bytes(1 << 16))
    time.sleep(0.01)
open(f"{folder}/uploaded.{rank}", "w").write("whole")
'''
child = subprocess.Popen(
    [sys.executable, "-X", "token=hidden", "-c", work, FOLDER, str(RANK)], start_new_session="session" in sys.argv,
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
open(f"{FOLDER}/pid.{RANK}", "w").write(str(child.pid))
tell("ready")
"""


IDLE_AFTER_1_S = in_saferun("import saferun.supervisor.stopping as stopping; stopping._IDLE_S = 1.0")


@pytest.mark.parametrize(("where", "grace_s"), slow_but([("family", "1"), ("session", "0")], "session"))
def test_an_upload_is_waited_for_and_named(tmp_path: Path, where: str, grace_s: str) -> None:
    """However little grace the ranks have."""
    with running(tmp_path, UPLOADING, "--shutdown-timeout", grace_s, arguments=[where], store=False) as job:
        job.hear("ready")
        until(lambda: "waiting for 1 process of rank 0: " in job.err, "it is named")
        pid = (tmp_path / "pid.0").read_text()
        assert f"(pid {pid}), 10 min at most" in job.err
        assert "hidden" not in job.err
        assert job.process.poll() is None
        job.release("upload")
        assert job.wait() == 0
        assert (tmp_path / "uploaded.0").read_text() == "whole"
        assert "ending" not in job.err


@pytest.mark.slow
def test_under_torchrun_the_upload_is_whole_as_well(tmp_path: Path) -> None:
    """The promise that saferun keeps: what torchrun finishes, saferun finishes."""
    with running(tmp_path, UPLOADING, arguments=["session"], launcher=TORCHRUN, sweeps=False) as job:
        assert job.wait(120) == 0
        pid = int((tmp_path / "pid.0").read_text())
        assert read_stat(pid) is not None
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


def test_the_upload_of_a_rank_that_ended_before_the_others_is_not_touched_meanwhile(tmp_path: Path) -> None:
    program = UPLOADING + "\nif RANK == 1:\n    await_release('end')\n"
    with running(tmp_path, program, nproc=2, arguments=["family"], store=False) as job:
        job.hear("ready", 2)
        job.release("upload")
        until(lambda: (tmp_path / "uploaded.0").exists() and (tmp_path / "uploaded.1").exists(), "both are uploaded")
        job.release("end")
        assert job.wait() == 0


@pytest.mark.parametrize("signum", slow_but([signal.SIGINT, signal.SIGTERM], "SIGTERM"))
def test_a_signal_ends_the_wait(tmp_path: Path, signum: signal.Signals) -> None:
    with running(tmp_path, UPLOADING, arguments=["family"], store=False) as job:
        until(lambda: "waiting for 1 process of rank 0: " in job.err, "it is waited for")
        job.send(signum)
        assert job.wait() == 0
        assert f"{signum.name}: processes that the ranks left behind are not waited for" in job.err
        assert "ending 1 process of rank 0: " in job.err
        assert not (tmp_path / "uploaded.0").exists()


def test_a_signal_ends_the_wait_for_a_detached_upload_and_leaves_it(tmp_path: Path) -> None:
    with running(tmp_path, UPLOADING, arguments=["session"], sweeps=False, store=False) as job:
        until(lambda: "waiting for 1 process of rank 0: " in job.err, "it is waited for")
        job.send(signal.SIGTERM)
        assert job.wait() == 0
        assert "rank 0 left 1 process in a session of its own: " in job.err
        assert "ending" not in job.err
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


def test_what_works_for_longer_than_it_may_is_ended_and_named(tmp_path: Path) -> None:
    with running(tmp_path, UPLOADING, "--leftovers-timeout", "1", "--shutdown-timeout", "1", store=False) as job:
        assert job.wait() == 0
        assert "ending 1 process of rank 0: " in job.err
        assert "which had not ended in time" in job.err


IDLE = """
from rank import *
if os.fork() == 0:
    if "session" in sys.argv:
        os.setsid()
    tell("idle")
    stay()
await_release("end")
"""


@pytest.mark.parametrize("where", ["family", "session"])
def test_what_does_nothing_is_ended_after_a_while_and_named(tmp_path: Path, where: str) -> None:
    environ = customized(tmp_path, IDLE_AFTER_1_S)
    with running(tmp_path, IDLE, environ=environ, arguments=[where], store=False) as job:
        (idle,) = job.hear("idle")
        job.release("end")
        assert job.wait() == 0
        assert "ending 1 process of rank 0: " in job.err
        assert f"(pid {idle.pid}), idle for 1 s" in job.err


def test_an_idle_process_beside_one_that_works_is_ended_and_the_other_is_not(tmp_path: Path) -> None:
    program = UPLOADING + IDLE.replace("from rank import *", "")
    environ = customized(tmp_path, IDLE_AFTER_1_S)
    with running(tmp_path, program, environ=environ, arguments=["session"], store=False) as job:
        (idle,) = job.hear("idle")
        job.release("end")
        until(lambda: f"(pid {idle.pid}), idle for 1 s" in job.err, "the idle one is ended")
        until(lambda: read_stat(idle.pid) is None, "it is gone")
        assert read_stat(int((tmp_path / "pid.0").read_text())) is not None
        job.release("upload")
        assert job.wait() == 0
        assert (tmp_path / "uploaded.0").exists()


MONITORED = """
import subprocess
from rank import *
log = open(FOLDER + "/monitor.log", "w")
subprocess.Popen(["sh", "-c", "while :; do date; sleep 0.2; done"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
tell("ready")
"""


def test_a_monitor_is_ended_like_what_does_nothing(tmp_path: Path) -> None:
    """As with ``nvidia-smi -l 1 > gpu.log &``: it held up a finished job for ten minutes."""
    with running(tmp_path, MONITORED, environ=customized(tmp_path, IDLE_AFTER_1_S), store=False) as job:
        assert job.wait() == 0
        assert ", idle for 1 s" in job.err


SENDING = """
import socket
from rank import *
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    server.close()
    client = socket.create_connection(("127.0.0.1", int(open(FOLDER + "/port").read())))
    tell("connected")
    while not os.path.exists(FOLDER + "/release.upload"):
        client.send(b"x")
        time.sleep(0.1)
    open(FOLDER + "/uploaded.0", "w").write("whole")
    os._exit(0)
server.close()
await_release("end")
"""


def test_a_slow_upload_over_a_connection_is_waited_for(tmp_path: Path) -> None:
    """Bytes that are sent with send(2) are in no counter of the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "port").write_text(str(server.getsockname()[1]))
        environ = customized(tmp_path, IDLE_AFTER_1_S)
        with running(tmp_path, SENDING, environ=environ, store=False) as job:
            job.hear("connected")
            connection, _ = server.accept()
            with connection:
                job.release("end")
                # The line is repeated after 30 s only; the process is idle by all counters for seconds by then.
                until(lambda: "waiting for 1 process of rank 0: " in job.err, "it is waited for")
                for _ in range(30):
                    assert connection.recv(1) == b"x"
                job.release("upload")
                assert job.wait() == 0
        assert (tmp_path / "uploaded.0").exists()
        assert "idle" not in job.err


TUNNEL = SENDING.replace('client.send(b"x")', "pass")


def test_what_has_a_connection_over_which_nothing_moves_is_ended_like_what_does_nothing(tmp_path: Path) -> None:
    """The master of ssh's ControlPersist, or a tunnel: it held a finished job for ten minutes."""
    source = f"{IDLE_AFTER_1_S}    import saferun.linux.quiet_sockets as quiet; quiet._QUIET_S = 0.0\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "port").write_text(str(server.getsockname()[1]))
        with running(tmp_path, TUNNEL, environ=customized(tmp_path, source), store=False) as job:
            job.hear("connected")
            connection, _ = server.accept()
            with connection:
                job.release("end")
                assert job.wait() == 0
        assert ", idle for 1 s" in job.err
        assert not (tmp_path / "uploaded.0").exists()


SERVING = """
import socket
from rank import *
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    open(FOLDER + "/port", "w").write(f"{server.getsockname()[1]}\\n")
    clients = []
    while True:
        clients.append(server.accept())
        tell("serving")
server.close()
await_release("end")
"""


def test_a_server_with_a_client_is_ended_like_what_does_nothing(tmp_path: Path) -> None:
    """TensorBoard with a browser, or an exporter with Prometheus: it held up a finished job for ten minutes."""
    with running(tmp_path, SERVING, environ=customized(tmp_path, IDLE_AFTER_1_S), store=False) as job:
        path = tmp_path / "port"
        port = int(until(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text(), "it serves"))
        with socket.create_connection(("127.0.0.1", port)):
            job.hear("serving")
            job.release("end")
            assert job.wait() == 0
        assert ", idle for 1 s" in job.err


def test_with_leftovers_end_nothing_is_waited_for(tmp_path: Path) -> None:
    with running(tmp_path, UPLOADING, "--leftovers", "end", arguments=["session"], store=False) as job:
        assert job.wait() == 0
        assert "ending 1 process of rank 0: " in job.err
        assert "waiting" not in job.err
        assert not (tmp_path / "uploaded.0").exists()


def test_with_leftovers_leave_they_live_on(tmp_path: Path) -> None:
    with running(tmp_path, UPLOADING, "--leftovers", "leave", arguments=["session"], sweeps=False, store=False) as job:
        assert job.wait() == 0
        assert job.err == ""
        assert read_stat(int((tmp_path / "pid.0").read_text())) is not None
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


TALKING = """
import subprocess
from rank import *
work = '''
import os, sys, time
folder, rank = sys.argv[1:3]
while not os.path.exists(folder + "/release.upload"):
    time.sleep(0.01)
for number in range(3):
    print("line", number, "of rank", rank, flush=True)
    print("error", number, "of rank", rank, file=sys.stderr, flush=True)
open(f"{folder}/uploaded.{rank}", "w").write("whole")
'''
subprocess.Popen([sys.executable, "-c", work, FOLDER, str(RANK)], start_new_session=True, stdin=subprocess.DEVNULL)
tell("ready")
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--run-dir", "none"), marks=pytest.mark.slow),
        pytest.param(("-r", "3"), marks=pytest.mark.slow),
    ],
    ids=["files", "no files", "redirected"],
)
def test_with_leftovers_leave_they_may_write_as_before(tmp_path: Path, options: tuple[str, ...]) -> None:
    """As under torchrun, whose ranks have the console itself. They were killed by SIGPIPE."""
    with running(tmp_path, TALKING, "--leftovers", "leave", *options, nproc=2, sweeps=False, store=False) as job:
        assert job.wait() == 0
        job.release("upload")
        until(lambda: all((tmp_path / f"uploaded.{rank}").exists() for rank in (0, 1)), "they have worked on")
        if options != ("-r", "3"):
            until(lambda: job.out.count("line 2 of rank") == 2, "the last line is there")
            until(lambda: job.err.count("error 2 of rank") == 2, "the last line of stderr is there")
        until(lambda: not job.left(), "nothing of it is left")


# Nothing shows that it is a rank's; it ends by itself should the test fail.
UNKNOWN = """
import subprocess
from rank import *
work = '''
import os, sys, time
open(sys.argv[1] + "/running", "w").close()
for _ in range(6000):
    if os.path.exists(sys.argv[1] + "/release.upload"):
        break
    time.sleep(0.01)
for number in range(3):
    print("line", number, flush=True)
open(sys.argv[1] + "/uploaded", "w").write("whole")
'''
subprocess.Popen(["env", "-i", "setsid", sys.executable, "-c", work, FOLDER], stdin=subprocess.DEVNULL)
while not os.path.exists(FOLDER + "/running"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("options", slow_but(["", "--pty on", "--leftovers end", "--leftovers leave"], ""))
@pytest.mark.parametrize("code", slow_but([0, 3], "3"))
def test_a_process_of_which_nothing_shows_that_it_is_a_rank_s_may_write_as_before(
    tmp_path: Path, options: str, code: int
) -> None:
    """As under torchrun (``env -i``, ``su -``): it was killed by SIGPIPE."""
    with running(tmp_path, f"{UNKNOWN}\nsys.exit({code})", *options.split(), sweeps=False, store=False) as job:
        assert job.wait() == min(code, 1)
        job.release("upload")
        until((tmp_path / "uploaded").exists, "it has worked on")
        until(lambda: "line 2" in job.out, "the last line is there")
        until(lambda: not job.left(), "nothing of it is left")


@pytest.mark.parametrize("option", ["-r", "-t"])
def test_with_leftovers_leave_what_they_write_reaches_the_files_of_the_ranks(tmp_path: Path, option: str) -> None:
    """Under torchrun they hold the files themselves."""
    options = ("--leftovers", "leave", option, "3", "--log-dir", str(tmp_path / "logs"))
    with running(tmp_path, f"print('first', flush=True)\n{TALKING}", *options, sweeps=False, store=False) as job:
        assert job.wait() == 0
        job.release("upload")
        until(lambda: not job.left(), "nothing of it is left")
        (out,), (err,) = ([*(tmp_path / "logs").rglob(name)] for name in ("stdout.log", "stderr.log"))
        lines = out.read_text().splitlines()
        assert lines == ["first", *(f"line {number} of rank 0" for number in range(len(lines) - 1))]
        assert "line 2 of rank 0" in lines
        assert "error 2 of rank 0" in err.read_text()
        assert "line 2 of rank 0" not in job.out


@pytest.mark.parametrize("leftovers", slow_but(["wait", "leave"], "wait"))
def test_who_reads_from_saferun_does_not_wait_for_what_is_left(tmp_path: Path, leftovers: str) -> None:
    """``saferun -t 3 … | tee log``: the lines go to the rank's files, and the pipe comes to an end with the launch."""
    program = TALKING if leftovers == "leave" else TALKING + "\nsys.exit(3)"
    options = ("--leftovers", leftovers, "-t", "3", "--log-dir", str(tmp_path / "logs"))
    with Pipe() as pipe, running(tmp_path, program, *options, stdout=pipe.write_end, sweeps=False, store=False) as job:
        pipe.close_write_end()
        reader = pipe.reader()
        job.wait()
        reader.all()
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it has worked on")
        until(lambda: not job.left(), "nothing of it is left")
        (out,) = (tmp_path / "logs").rglob("stdout.log")
        assert "line 2 of rank 0" in out.read_text()


@pytest.mark.parametrize("name", ["_left_pipes", "_copy_left_output"])
def test_without_a_process_for_their_output_they_are_left_all_the_same(tmp_path: Path, name: str) -> None:
    """What saferun adds to it is absent, with one line."""
    broken = (
        "from saferun.launch.rank_actions import RankActions as owner\n"
        "    def fail(*_): raise RuntimeError('planted')\n"
        f"    owner.{name} = fail"
    )
    environ = customized(tmp_path, in_saferun(broken))
    with running(
        tmp_path, UPLOADING, "--leftovers", "leave", arguments=["session"], environ=environ, sweeps=False, store=False
    ) as job:
        assert job.wait() == 0
        assert job.err.count("cannot keep the output of what is left running: RuntimeError: planted") == 1
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


@pytest.mark.parametrize(
    ("leftovers", "where"), slow_but([("wait", "family"), ("leave", "family"), ("end", "session")], "wait")
)
def test_after_a_failure_they_are_ended_and_that_is_said(tmp_path: Path, leftovers: str, where: str) -> None:
    """They would hold the GPUs' memory, ports and files of the next attempt."""
    program = UPLOADING.replace('tell("ready")', "sys.exit(ATTEMPT == 0)")
    options = ("--leftovers", leftovers, "--max-restarts", "1")
    with running(tmp_path, program, *options, arguments=[where], sweeps=False, store=False) as job:
        until(lambda: "ending 1 process of rank 0: " in job.err, "it is ended")
        job.release("upload")
        assert job.wait() == 0


RESUMING = (
    UPLOADING.replace(
        'tell("ready")',
        """
if ATTEMPT == 0:
    sys.exit(1)
tell("again")
while not os.path.exists(f"{FOLDER}/uploaded.{RANK}"):
    time.sleep(0.01)
""",
    )
    .replace("child = ", "child = ATTEMPT == 0 and ")
    .replace("str(child.pid)", 'str(child.pid) if child else "none"')
)


@pytest.mark.parametrize("leftovers", slow_but(["wait", "leave"], "wait"))
def test_a_detached_upload_of_a_failed_attempt_lives_on(tmp_path: Path, leftovers: str) -> None:
    """Torchrun leaves it alone, and the next attempt resumes from what it has uploaded."""
    options = ("--max-restarts", "1", "--leftovers", leftovers)
    with running(tmp_path, RESUMING, *options, arguments=["session"], store=False) as job:
        job.hear("again")
        assert job.err.count("rank 0 left 1 process in a session of its own: ") == 1
        assert "it is not ended" in job.err
        assert "hidden" not in job.err
        job.release("upload")
        assert job.wait() == 0
        assert "ending" not in job.err


@pytest.mark.slow
def test_what_an_attempt_has_left_is_not_taken_for_the_next_one_s(tmp_path: Path) -> None:
    """Neither waited for after its success, nor ended with it."""
    program = UPLOADING.replace('tell("ready")', "sys.exit(ATTEMPT == 0)").replace(
        "child = ", "child = ATTEMPT == 0 and "
    )
    program = program.replace("str(child.pid)", 'str(child.pid) if child else ""')
    options = ("--max-restarts", "1")
    with running(tmp_path, program, *options, arguments=["session"], sweeps=False, store=False) as job:
        assert job.wait() == 0
        assert "waiting for" not in job.err
        assert "ending" not in job.err
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it is uploaded")


# A process in a session of its own, which begins an upload in yet another one when it is told to, and ends.
DETACHING = """
import subprocess
from rank import *
upload = '''
import os, sys, time
folder = sys.argv[1]
print(os.getpid(), file=open(folder + "/pid", "w"), flush=True)
while not os.path.exists(folder + "/release.upload"):
    time.sleep(0.01)
open(folder + "/uploaded", "w").write("whole")
'''
detach = '''
import os, subprocess, sys, time
folder, upload = sys.argv[1:]
while not os.path.exists(folder + "/release.detach"):
    time.sleep(0.01)
subprocess.Popen([sys.executable, "-c", upload, folder], start_new_session=True)
os._exit(0)
'''
if ATTEMPT == 0:
    none = subprocess.DEVNULL
    detached = [sys.executable, "-c", detach, FOLDER, upload]
    subprocess.Popen(detached, start_new_session=True, stdin=none, stdout=none, stderr=none)
    sys.exit(1)
tell("again")
await_release("end")
"""

DETACHES_AT_THE_END = """import os, time, saferun.launch.orphans as orphans
    real = orphans.Orphans.close
    def close(self):
        folder = os.environ["LAUNCHING_FOLDER"]
        open(folder + "/release.detach", "w").close()
        while not os.path.exists(folder + "/pid") or not open(folder + "/pid").read().endswith("\\n"):
            time.sleep(0.01)
        real(self)
    orphans.Orphans.close = close"""


@pytest.mark.parametrize("when", ["in the next attempt", "at the end"])
def test_what_a_detached_process_detaches_later_lives_on(tmp_path: Path, when: str) -> None:
    """It was killed without a word, or waited for after the success of an attempt that had not started it."""
    is_late = when == "at the end"
    options = () if is_late else ("--max-restarts", "1")
    environ = customized(tmp_path, in_saferun(DETACHES_AT_THE_END)) if is_late else None
    with running(tmp_path, DETACHING, *options, environ=environ, sweeps=False, store=False) as job:
        if not is_late:
            job.hear("again")
            job.release("detach")
            path = tmp_path / "pid"
            upload = until(
                lambda: path.exists() and path.read_text().endswith("\n") and path.read_text(), "it is there"
            )
            stat = Path(f"/proc/{int(upload)}/stat")
            until(lambda: stat.read_text().rpartition(")")[2].split()[1] == str(job.process.pid), "the other has ended")
            job.release("end")
        assert job.wait() == int(is_late)
        assert "rank 0 left 1 process in a session of its own: " in job.err
        assert "waiting for" not in job.err
        assert "ending" not in job.err
        job.release("upload")
        until((tmp_path / "uploaded").exists, "it is uploaded")


@pytest.mark.parametrize("end", slow_but(["fail", "SIGTERM", "SIGINT"], "fail"))
def test_at_the_end_of_a_failed_launch_a_detached_process_lives_on_and_may_write(tmp_path: Path, end: str) -> None:
    program = TALKING + "\nawait_release('end')\nsys.exit(1)"
    with running(tmp_path, program, sweeps=False, store=False) as job:
        job.hear("ready")
        if end == "fail":
            job.release("end")
        else:
            job.send(getattr(signal, end))
        assert job.wait() == 1
        assert "rank 0 left 1 process in a session of its own: " in job.err
        job.release("upload")
        until((tmp_path / "uploaded.0").exists, "it has worked on")
        until(lambda: "line 2 of rank" in job.out, "the last line is there")
        until(lambda: not job.left(), "nothing of it is left")


INNER_LAUNCHER = """
import subprocess
from rank import *
if "inner" in sys.argv:
    tell("inner rank")
    stay()
elif ATTEMPT == 0:
    options = ["--standalone", "--nproc-per-node", "2", "--log-dir", FOLDER + "/inner"]
    inner = [sys.executable, "-m", "torch.distributed.run", *options, sys.argv[0], "inner"]
    launcher = subprocess.Popen(inner, stdin=subprocess.DEVNULL)
    await_release("kill")
    launcher.kill()
    sys.exit(1)
tell("again")
await_release("end")
"""


@pytest.mark.slow
def test_the_ranks_of_a_killed_inner_torchrun_are_ended(tmp_path: Path) -> None:
    """They have sessions of their own, and would train beside the next attempt."""
    with running(tmp_path, INNER_LAUNCHER, "--max-restarts", "1") as job:
        inner = [said.pid for said in job.hear("inner rank", 2, timeout_s=4 * DEADLINE_S)]
        assert all(os.getsid(pid) == pid for pid in inner)
        job.release("kill")
        job.hear("again")
        assert all(read_stat(pid) is None for pid in inner)
        assert "session" not in job.err
        job.release("end")
        assert job.wait() == 0


@pytest.mark.slow
def test_a_detached_process_that_holds_the_port_of_the_store_is_ended(tmp_path: Path) -> None:
    """The next attempt could not begin."""
    program = """
import socket
from rank import *
os.environ["MASTER_PORT"] = open(FOLDER + "/port").read() if ATTEMPT == 0 else os.environ["MASTER_PORT"]
if ATTEMPT == 0:
    import subprocess
    work = '''
import signal, socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("on", flush=True)
signal.pause()
'''
    child = subprocess.Popen(
        [sys.executable, "-c", work, os.environ["MASTER_PORT"]], start_new_session=True, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    sys.exit(1)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "port").write_text(str(server.getsockname()[1]))
    with running(tmp_path, program, "--max-restarts", "1", store=False) as job:
        assert job.wait() == 0
        assert "ending 1 process of rank 0: " in job.err
        assert "session of its own" not in job.err


def test_helpers_that_end_by_themselves_are_not_talked_about(tmp_path: Path) -> None:
    """The resource tracker of multiprocessing notices that its process is gone, and ends."""
    program = """
import multiprocessing.shared_memory
from rank import *
segment = multiprocessing.shared_memory.SharedMemory(create=True, size=16)
segment.close()
segment.unlink()
"""
    with running(tmp_path, program, nproc=2, store=False) as job:
        assert job.wait() == 0
        assert job.err == ""


# ------------------------------------------------------------------------------------------------ what is not ours


def test_as_the_first_process_of_a_container_it_leaves_foreign_processes_alone(tmp_path: Path) -> None:
    """What ``docker exec`` left there is handed to it when its shell ends; a restart may not end that."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    # Its parent is a process from before, which waits until ranks run and then ends: the orphan goes to pid 1.
    foreign = """
        while ! test -e "$LAUNCHING_FOLDER/release.detach"; do sleep 0.01; done
        env -u LAUNCHING_MARK setsid sh -c 'echo $$ >"$LAUNCHING_FOLDER/foreign"
            while ! test -e "$LAUNCHING_FOLDER/release.foreign"; do sleep 0.02; done' &
    """
    inside = ["sh", "-c", f'({foreign}) & exec "$@"', "sh"]
    before = ["unshare", *user, "--pid", "--fork", "--mount-proc", *inside]
    program = """
from rank import *
if ATTEMPT == 0:
    tell("ready")
    await_release("fail")
    sys.exit(1)
tell("again")
path = FOLDER + "/foreign"
pid = int(open(path).read())
parent = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
tell(f"foreign is there, child of {parent}")
await_release("end")
"""
    try:
        with running(tmp_path, program, "--max-restarts", "1", before=before, sweeps=False, store=False) as job:
            until(lambda: job.said("ready"), "the rank runs")
            job.release("detach")
            until(lambda: (tmp_path / "foreign").exists() and (tmp_path / "foreign").read_text(), "it detached itself")
            job.release("fail")
            until(lambda: job.said("again"), "the second attempt runs")
            until(lambda: job.said("foreign is there, child of 1"), "the foreign process lives")
            job.release("end")
            assert job.wait() == 0
            assert "ending" not in job.err
    finally:
        (tmp_path / "release.foreign").touch()


def test_a_daemon_that_a_sidecar_starts_later_survives_a_restart_and_the_end(tmp_path: Path) -> None:
    """An entry point: ``( sidecar ) & exec saferun``; the sidecar starts a daemon with setsid while ranks train."""
    sidecar = """
        while ! test -e "$LAUNCHING_FOLDER/release.detach"; do sleep 0.01; done
        setsid sleep 600 &
        echo $! >"$LAUNCHING_FOLDER/daemon"
    """
    before = ["sh", "-c", f'({sidecar}) & exec "$@"', "sh"]
    program = """
from rank import *
tell(f"attempt {ATTEMPT}")
await_release(f"end{ATTEMPT}")
sys.exit(ATTEMPT == 0)
"""
    with running(tmp_path, program, "--max-restarts", "1", before=before, store=False) as job:
        job.hear("attempt 0")
        job.release("detach")
        path = tmp_path / "daemon"
        daemon = int(until(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text(), "detached"))
        job.spare(daemon)
        stat = Path(f"/proc/{daemon}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[1] == str(job.process.pid), "it is saferun's child")
        until(lambda: os.getsid(daemon) == daemon, "it has a session of its own")
        try:
            job.release("end0")
            job.hear("attempt 1")
            assert read_stat(daemon) is not None
            job.release("end1")
            assert job.wait() == 0
            assert read_stat(daemon) is not None
            assert "ending" not in job.err
        finally:
            kill(daemon, signal.SIGKILL)


# --------------------------------------------------------------------------------------------- environments overwritten

# What setproctitle does: the memory of the environment is used for the title.
OVERWRITTEN = """
import ctypes
from rank import *

def overwrite_environ():
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    assert not open("/proc/self/environ", "rb").read().strip(b"\\0")

if os.fork() == 0:
    overwrite_environ()
    ignore(signal.SIGTERM)
    tell("nameless")
    stay()
await_release("end")
"""

STANDS_STILL_ONCE_RANKS_ARE_FORKED = """import os, signal, saferun.launch.rank_group as ranks
    class Still(ranks.RankGroup):
        def start(self):
            started = super().start()
            os.kill(os.getpid(), signal.SIGSTOP)
            return started
    ranks.RankGroup = Still"""


def test_a_killed_supervisor_leaves_no_child_that_overwrote_its_environment(tmp_path: Path) -> None:
    """vLLM, Ray and others set their workers' titles; such a worker would hold its GPU."""
    with running(tmp_path, OVERWRITTEN, nproc=2, store=False) as job:
        nameless = job.hear("nameless", 2)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: all(read_stat(said.pid) is None for said in nameless), "they are gone")
        job.assert_nothing_left(DEADLINE_S)


def test_a_supervisor_killed_before_it_knows_that_its_ranks_run_leaves_none_of_their_children(tmp_path: Path) -> None:
    """Whose ranks these are is told before any of them is its program: on a busy machine they may be ahead."""
    environ = customized(tmp_path, in_saferun(STANDS_STILL_ONCE_RANKS_ARE_FORKED))
    with running(tmp_path, OVERWRITTEN, nproc=2, environ=environ, store=False) as job:
        nameless = job.hear("nameless", 2)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: all(read_stat(said.pid) is None for said in nameless), "they are gone")
        job.assert_nothing_left(DEADLINE_S)


@pytest.mark.slow
def test_an_overwritten_environment_does_not_pass_for_a_foreign_process_at_the_end(tmp_path: Path) -> None:
    with running(tmp_path, OVERWRITTEN, "--leftovers", "end", store=False) as job:
        (nameless,) = job.hear("nameless")
        job.release("end")
        assert job.wait() == 0
        assert f"(pid {nameless.pid})" in job.err


# -------------------------------------------------------------------------------------------------- the end of the run

BROKEN = """
import sys
import saferun.launch.host_launch
from saferun.cli.main import main

name = sys.argv.pop(1)
target, _, method = name.rpartition(".")
module, _, target = target.rpartition(":")
owner = getattr(__import__(module, fromlist=["x"]), target)
real = getattr(owner, method)

def fail(*arguments):
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_end":
            raise RuntimeError("injected")
        frame = frame.f_back
    return real(*arguments)

setattr(owner, method, fail)
sys.exit(main())
"""


@pytest.mark.parametrize(
    "step",
    slow_but(
        [
            "saferun.launch.rank_actions:RankActions.close",
            "saferun.launch.console_part:ConsolePart.drain",
            "saferun.launch.investigation:Investigation.close",
            "saferun.cluster.solo_job:SoloJob.close",
            "saferun.launch.orphaned_segments:OrphanedSegments.close",
            "saferun.launch.orphans:Orphans.close",
            "saferun.linux.poller:Poller.close",
        ],
        "saferun.launch.orphans:Orphans.close",
    ),
)
def test_each_step_of_the_end_may_fail_alone(tmp_path: Path, step: str) -> None:
    """One that fails keeps no other from being taken, and the reaper ends what is left."""
    launcher = [sys.executable, "-c", BROKEN, step]
    program = IDLE.replace('tell("idle")', 'tell("daemon")')
    with running(
        tmp_path, program, "--leftovers", "end", launcher=launcher, arguments=["session"], sweeps=False, store=False
    ) as job:
        job.hear("daemon")
        job.release("end")
        job.wait()
        assert "Traceback" not in job.err
        job.assert_nothing_left(DEADLINE_S)
