"""--metrics-port: numbers for Prometheus; whatever clients do, the launch goes on and ends as it would without it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import re
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from saferun.launch.metrics_port import MOST_CONNECTIONS
from saferun.report.metrics_text import METRICS
from tests.breadth import slow_but
from tests.ports import own_port
from tests.process.launching import DEADLINE_S, END_AS_TOLD, Job, customized, running, until

if TYPE_CHECKING:
    from pathlib import Path

QUIET = ("--preflight", "off")
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
_AT = re.compile(r"metrics are at http://127\.0\.0\.1:(\d+)/metrics\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def port_of(job: Job) -> int:
    """The free port that was chosen."""
    until(lambda: _AT.search(job.err), "the port is printed")
    found = _AT.search(job.err)
    assert found is not None
    return int(found[1])


def asked(port: int, path: str = "/metrics", *, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Status, kind and content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def is_open(port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def value(text: str, name: str) -> float:
    """Of the only sample with this name."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}{{"))
    return float(line.rpartition(" ")[2])


def test_it_answers_while_the_launch_runs(folder: Path) -> None:
    """In both formats, on the loopback interface alone, and at no other path."""
    port = own_port()  # which no connection of another test gets when it is free again
    with running(folder, END_AS_TOLD, "--metrics-port", str(port), *QUIET, nproc=2, arguments=("0", "0")) as job:
        job.hear("ready", 2)
        until(lambda: is_open(port), "it listens")
        status, kind, text = asked(port)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert (value(text, "saferun_up"), value(text, "saferun_ranks")) == (1, 2)
        names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
        assert names == set(METRICS) - {
            "saferun_retries_total",
            "saferun_exit_code",
            "saferun_step",
            "saferun_step_metric",
        }
        status, kind, text = asked(port, **OPENMETRICS)
        assert (status, kind) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        assert "# TYPE saferun_restarts counter\n" in text
        assert text.endswith("\n# EOF\n")
        assert {family.name for family in openmetrics_families(text)} == {name.removesuffix("_total") for name in names}
        assert asked(port, method="HEAD")[::2] == (200, "")
        assert asked(port, "/")[0] == 200
        assert asked(port, "/other")[0] == 404
        assert asked(port, method="POST")[0] == 405
        with socket.create_server(("127.0.0.2", port)):
            pass  # all others of this host's addresses are free
        job.release("end")
        assert job.wait() == 0
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.slow
def test_captures_are_counted(folder: Path) -> None:
    """The survivors of a failure are captured before the next attempt."""
    source = """
from rank import *
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and RANK == 1:
    sys.exit(3)
tell(f"attempt {attempt}")
await_release("end" if attempt else "never")
"""
    options = ("--metrics-port", "0", "--max-restarts", "1", *QUIET)
    with running(folder, source, *options, nproc=2, store=False) as job:
        port = port_of(job)
        job.hear("attempt 1", 2)
        until(lambda: value(asked(port)[2], "saferun_captures_total") == 1, "the capture is counted")
        until(lambda: value(asked(port)[2], "saferun_restarts_total") == 1, "the restart is counted")
        job.release("end")
        assert job.wait() == 0


@pytest.mark.parametrize("code", slow_but(["0", "3"], "0"))
def test_a_port_that_is_in_use_changes_nothing(folder: Path, code: str) -> None:
    """There is one line."""
    port = own_port()
    with socket.create_server(("127.0.0.1", port)):
        options = ("--metrics-port", str(port), *QUIET)
        with running(folder, END_AS_TOLD, *options, arguments=(code,)) as job:
            job.hear("ready")
            job.release("end")
            assert job.wait() == (1 if code == "3" else 0)
            (line,) = (line for line in job.err.splitlines() if "--metrics-port" in line)
            assert f"--metrics-port 127.0.0.1:{port}: Address already in use; there are no metrics" in line


def test_an_error_of_its_own_changes_nothing(folder: Path) -> None:
    """There is one line, and nothing listens any more."""
    folder.mkdir()
    source = """
import sys
if sys.orig_argv[1:3] == ["-m", "saferun"]:
    import saferun.launch.metrics_samples as module
    def fail(*_arguments, **_options):
        raise RuntimeError("no numbers")
    module.MetricsSamples.text = fail
"""
    environ = customized(folder, source)
    options = ("--metrics-port", "0", *QUIET)
    with running(folder, END_AS_TOLD, *options, arguments=("0",), environ=environ) as job:
        port = port_of(job)
        job.hear("ready")
        with pytest.raises(OSError, match=r"."):
            asked(port)
        until(lambda: is_refused(port), "nothing listens")
        job.release("end")
        assert job.wait() == 0
        assert job.err.count("RuntimeError: no numbers; there are no metrics") == 1


def is_refused(port: int) -> bool:
    """Whether nothing listens on the port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def connected(port: int, content: bytes = b"") -> socket.socket:
    """A client that has sent something."""
    client = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    if content:
        with contextlib.suppress(OSError):
            client.sendall(content)
    return client


HOSTILE = {
    "nothing": b"",
    "half a request": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a head without an end": b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 20000,
    "a line without an end": b"G" * 200_000,
    "binary": bytes(range(256)) * 10 + b"\r\n\r\n",
}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(content, marks=[] if name == "a head without an end" else pytest.mark.slow)
        for name, content in HOSTILE.items()
    ],
    ids=HOSTILE,
)
def test_no_client_keeps_others_from_an_answer(folder: Path, content: bytes) -> None:
    """However many there are at once, whether they stay or are reset, and whatever they send."""
    with running(folder, END_AS_TOLD, "--metrics-port", "0", *QUIET, arguments=("0",)) as job:
        port = port_of(job)
        job.hear("ready")
        clients = [connected(port, content) for _ in range(2 * MOST_CONNECTIONS)]
        until(lambda: answers(port), "an answer while they are there")
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        until(lambda: answers(port), "an answer when they are gone")
        job.release("end")
        assert job.wait() == 0
        assert "there are no metrics" not in job.err


def answers(port: int) -> bool:
    """Whether there is a whole answer."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return asked(port)[0] == 200
    return False


def test_a_client_that_does_not_read_is_left_alone(folder: Path) -> None:
    """The loop never waits for it, and the launch ends with its own exit code."""
    with running(folder, END_AS_TOLD, "--metrics-port", "0", *QUIET, arguments=("3",)) as job:
        port = port_of(job)
        job.hear("ready")
        clients = []
        for _ in range(MOST_CONNECTIONS):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.settimeout(DEADLINE_S)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            clients.append(client)
        job.release("end")
        assert job.wait() == 1
        for client in clients:
            client.close()


@pytest.mark.slow
def test_thousands_of_connections_are_taken_a_few_at_a_time(folder: Path) -> None:
    """The rank's lines come meanwhile, and the processor time stays bounded; afterwards there is an answer."""
    source = """
from rank import *
tell("ready")
await_release("say")
print("still here", flush=True)
await_release("end")
"""
    with running(folder, source, "--metrics-port", "0", *QUIET, store=False) as job:
        port = port_of(job)
        job.hear("ready")
        clients: list[socket.socket] = []
        until_at = time.monotonic() + 3.0
        while time.monotonic() < until_at and len(clients) < 3000:
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            clients.append(client)
            if len(clients) > 500:
                clients.pop(0).close()
        job.release("say")
        until(lambda: "still here" in job.out, "the line of the rank")
        for client in clients:
            client.close()
        until(lambda: answers(port), "an answer")
        job.release("end")
        assert job.wait() == 0
