"""The store's port: never raced for, never shared, and named with its holder where it is taken."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.ports import own_port
from tests.process.launching import REPOSITORY, Job, running, two_lines, until, without

HOLDER = """
import socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family, socket.SOCK_STREAM) as listener:
    listener.bind((sys.argv[1], 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("address", slow_but(["127.0.0.1", "0.0.0.0", "::", "::1"], "127.0.0.1", "::"))  # noqa: S104
def test_a_port_in_use_is_refused_with_the_name_of_its_holder_before_any_rank_starts(
    tmp_path: Path, address: str
) -> None:
    (tmp_path / "holder.py").write_text(HOLDER)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "holder.py"), address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        options = ("--master-port", str(port), "--start-retries", "0")
        with running(tmp_path / "run", "from rank import *\ntell('ran')", *options, nproc=2) as job:
            assert job.wait() == 1
            assert not job.said("ran")
            assert job.out == ""
            what, hint = two_lines(job.err)
            assert f"port {port} " in what
            assert f"pid {holder.pid} (holder.py)" in what
            assert "--master-port" in hint
        assert holder.stdin is not None
        holder.stdin.close()


def test_a_port_that_another_saferun_holds_is_refused(tmp_path: Path) -> None:
    """The second job on a host, started with a copied command line. To stop the other's coordinator frees no port."""
    port = str(own_port())
    with running(tmp_path / "first", READY, "--master-port", port) as first:
        first.hear("ready")
        until(first.coordinator, "the coordinator has the port too")
        with running(tmp_path / "second", READY, "--master-port", port, "--start-retries", "0") as second:
            assert second.wait() == 1
            assert f"pid {first.process.pid} (" in two_lines(second.err)[0]
        first.release("end")
        assert first.wait() == 0


READY = "from rank import *\ntell('ready')\nawait_release('end')"


def test_a_given_port_can_be_used_again_at_once(tmp_path: Path) -> None:
    """Connections of the job before linger for a minute; they may not keep the next job from its port."""
    port = own_port()
    program = """
import os, socket
with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as connection:
    print("connected to", connection.getpeername()[1])
"""
    for name in ("first", "second", "third"):
        with running(tmp_path / name, program, "--master-port", str(port)) as job:
            assert job.wait() == 0
            assert f"connected to {port}\n" in job.out


def test_saferun_holds_the_port_while_the_ranks_start(tmp_path: Path) -> None:
    """Between choosing a port and using it nobody else can take it, and a rank that connects at once is not refused."""
    program = """
from rank import *
import socket
port = int(os.environ["MASTER_PORT"])
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")):
    with socket.socket(family) as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            thief.bind((address, port))
            thief.listen()
            tell("stolen")
        except OSError:
            pass
socket.create_connection((os.environ["MASTER_ADDR"], port)).close()
tell(f"port {port}")
await_release("end")
"""
    with running(tmp_path, program, nproc=2) as job:
        until(lambda: len(job.processes()) >= 3, "it has started")
        port = until(lambda: port_told(job), "a rank has connected")
        assert not job.said("stolen")
        job.release("end")
        assert job.wait() == 0
    with socket.socket() as next_user:
        next_user.bind(("127.0.0.1", port))


def port_told(job: Job) -> int:
    """The port that a rank has connected to; 0 before."""
    said = [word.word for word in job.said() if word.word.startswith("port ")]
    return int(said[0].split()[1]) if len(said) == 2 else 0


@pytest.mark.slow
def test_all_attempts_have_the_same_port(tmp_path: Path) -> None:
    program = "from rank import *\nprint(os.environ['MASTER_PORT'])\nsys.exit(ATTEMPT < 2)"
    with running(tmp_path, program, "--max-restarts", "2") as job:
        assert job.wait() == 0
        ports = [line.split("] ")[1] for line in job.out.splitlines()]
        assert len(ports) == 3
        assert len(set(ports)) == 1


@pytest.mark.slow
def test_ten_launches_at_once_never_collide(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(running(tmp_path / str(number), PORT, nproc=2)) for number in range(10)]
        ports = []
        for job in jobs:
            job.hear("ready", 2)
            (job_port,) = {(job.folder / "job" / f"port{rank}").read_text() for rank in range(2)}
            ports.append(job_port)
        assert len(set(ports)) == 10
        for job in jobs:
            job.release("end")
        assert [job.wait() for job in jobs] == [0] * 10


PORT = """
from rank import *
open(f"port{RANK}", "w").write(os.environ["MASTER_PORT"])
tell("ready")
await_release("end")
"""


@pytest.mark.skipif(
    int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 80,
    reason="every user may use port 80 here",
)
def test_a_port_that_takes_privileges_is_refused_in_two_lines(tmp_path: Path) -> None:
    with running(tmp_path, READY, "--master-port", "80", before=without([10])) as job:  # CAP_NET_BIND_SERVICE
        assert job.wait() == 1
        what, hint = two_lines(job.err)
        assert "port 80 " in what
        assert "1023" in hint


def test_a_host_without_ipv6_is_no_obstacle(tmp_path: Path) -> None:
    """Kernels with ipv6.disable=1 have no such sockets at all."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import _socket; _socket.has_ipv6 = False\n")
    program = "import os, socket; socket.create_connection(('127.0.0.1', int(os.environ['MASTER_PORT']))); print('yes')"
    environ = {"PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}"}
    with running(tmp_path / "run", program, environ=environ) as job:
        assert job.wait() == 0
        assert "yes" in job.out
