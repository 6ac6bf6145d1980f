"""The control socket: only for this user, and whatever comes by it, the job goes on as if it were not there."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.process.control_clients import answer_to, connected, control_socket, described
from tests.process.launching import END_AS_TOLD, STAY, Job, customized, in_saferun, running, until

QUIET = ("--preflight", "off")
NO_REQUESTS = (
    b"",
    b"\n" * 5000,
    b"\0" * 100_000,
    b"{" * 60_000,
    b"[" * 15_000 + b"\n",
    b'{"op": "' + b"x" * 300_000,
    b'{"op": ' + b"9" * 12_000 + b"}\n",
    b'{"op": "nothing of the kind"}\n',
    b'{"op": ["stop"]}\n',
    b'{"op": null, "user": "x"}\n',
    b'{"op": "stop", "user": 5}\n',
    b'"stop"\n',
    b'{"op": "x"}\n' * 3000,
    b"\xff\xfe\n",
    b"GET / HTTP/1.1\r\n\r\n",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def assert_goes_on(job: Job, nproc: int = 1) -> None:
    """The ranks end when the test lets them, and so does saferun, with nothing to say."""
    assert job.process.poll() is None
    job.release("end")
    assert job.wait() == 0, job.err
    assert "Traceback" not in job.err
    assert len(job.said("ready")) == 0, nproc


def test_it_is_private_named_in_run_json_and_gone_afterwards(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        assert len(os.fsencode(path)) < 108
        found = os.stat(path)
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
        directory = os.stat(os.path.dirname(path))
        assert (stat.S_IMODE(directory.st_mode), directory.st_uid) == (0o700, os.geteuid())
        assert_goes_on(job)
        assert not os.path.exists(path)
        assert described(job)["control_socket"] == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_gets_no_answer(folder: Path) -> None:
    """Not even where the permissions would let the connection through."""
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
                    os.setresuid(54321, 54321, 54321)
                    with contextlib.suppress(PermissionError):
                        connection.connect(path)
                        os._exit(2)
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.chmod(os.path.dirname(path), 0o755)  # noqa: S103 - what the kernel says counts
        os.chmod(path, 0o666)  # noqa: S103
        pid = os.fork()
        if pid == 0:
            os.setresuid(54321, 54321, 54321)
            received = b"?"
            with contextlib.suppress(BaseException):
                received = answer_to(path, b'{"op": "kill"}\n')
            os._exit(0 if received == b"" else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.chmod(os.path.dirname(path), 0o700)
        assert_goes_on(job)


def test_bytes_that_are_no_request_cost_their_connection_only(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        for content in NO_REQUESTS:
            if content:
                for line in answer_to(path, content).splitlines():
                    assert "error" in json.loads(line), content[:40]
            with connected(path) as connection:
                connection.send(content)  # and gone at once
        assert json.loads(answer_to(path, b'{"op": "what?"}\n'))["error"]
        assert_goes_on(job)


def test_clients_that_neither_ask_nor_read_nor_close_are_dropped(folder: Path) -> None:
    """They are more than are served at a time; the next one is answered all the same."""
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(connected(path)) for _ in range(40)]
            for connection in silent[::2]:
                with contextlib.suppress(BrokenPipeError):  # it has been dropped already
                    connection.send(b'{"op": ')
            assert json.loads(answer_to(path, b'{"op": "what?"}\n'))["error"]
        assert_goes_on(job)


@pytest.mark.slow
def test_ten_thousand_connections_are_nothing_to_it(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        made = 0
        for _ in range(10_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):  # the queue is full
                    connection.connect(path)
                    made += 1
        assert made > 50
        assert_goes_on(job)


def test_no_descriptor_left_is_no_end(folder: Path) -> None:
    """accept(2) fails; the connections wait until there are descriptors again."""
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        before = resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir(f"/proc/{job.process.pid}/fd"))
        resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        assert highest > 3
        with connected(path) as connection:
            connection.send(b'{"op": "what?"}\n')
            until(lambda: job.process.poll() is None, "it lives")
            resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, before)
            assert json.loads(connection.recv(1 << 16))["error"]
        assert_goes_on(job)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import saferun.linux.control_socket as c; c.listen = None", marks=pytest.mark.slow),
        "sys.modules['saferun.launch.control_part'] = None",
        "import saferun.linux.control_socket as c; c.accept = None",
        pytest.param(
            "import saferun.linux.control_socket as c\n"
            "    c._listen = lambda path: (_ for _ in ()).throw(OSError(28, 'full'))",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["listen", "module", "accept", "full"],
)
def test_a_control_socket_that_fails_is_absent_with_one_line(folder: Path, source: str) -> None:
    folder.mkdir()
    environ = customized(folder, in_saferun(source))
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), environ=environ, store=False) as job:
        job.hear("ready")
        if "accept" in source:
            with connected(control_socket(job)) as connection, contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        until(lambda: "control socket" in job.err, "the line")
        assert len([line for line in job.err.splitlines() if "control socket" in line]) == 1
        assert_goes_on(job)


@pytest.mark.slow
def test_it_has_no_name_in_a_file_system_where_there_is_no_private_directory_in_memory(folder: Path) -> None:
    """An abstract name is one that any user can connect to: the kernel says who it is."""
    folder.mkdir()
    source = """
import sys
if sys.orig_argv[1:3] == ["-m", "saferun"]:
    import saferun.launch.rank_hook as hook
    hook.is_in_memory = lambda path: False
"""
    environ = customized(folder, source)
    with running(folder, END_AS_TOLD, *QUIET, arguments=("0",), environ=environ, store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        assert path.startswith("@saferun-")
        assert json.loads(answer_to(path, b'{"op": "what?"}\n'))["error"]
        assert_goes_on(job)


def test_it_is_gone_with_a_supervisor_that_is_killed(folder: Path) -> None:
    with running(folder, STAY, *QUIET, store=False) as job:
        job.hear("ready")
        path = control_socket(job)
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        until(lambda: not os.path.exists(path), "the reaper removes it")
