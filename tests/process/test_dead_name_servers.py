"""A host whose name servers never answer: one host needs no name, and several never wait for one in the loop."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.launching import kill, running, until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="other name servers take a mount namespace, and root"
)
# In namespaces of its own: nobody but the silent socket is asked, and nothing else knows this host's name.
WITHIN = (
    "hostname nobody-knows-this && mount --make-rprivate / && mount --bind {folder}/resolv.conf /etc/resolv.conf"
    ' && mount --bind {folder}/hosts /etc/hosts && exec "$@"'
)
KNOWN = "127.0.0.1 localhost\n"
RUN = "from rank import *\ntell('ran')"


@contextlib.contextmanager
def dead_name_server(folder: Path) -> Iterator[tuple[tuple[str, ...], socket.socket]]:
    """What goes before a command that is to have such a name server, and the socket at which nobody answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.53", 53))
        silent.setblocking(False)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.53\n")
        (folder / "hosts").write_text(KNOWN)
        yield ("unshare", "--mount", "--uts", "sh", "-c", WITHIN.format(folder=folder), "sh"), silent


@pytest.mark.parametrize("options", [(), ("--preflight", "off"), ("--master-port", "29519")])
def test_a_resolver_that_never_answers_keeps_one_host_from_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    """And nobody asks it: its socket has received nothing when all is over."""
    with dead_name_server(tmp_path) as (before, silent):
        with running(tmp_path / "run", RUN, *options, nproc=2, before=before) as job:
            assert job.wait() == 0, job.err
            assert len(job.said("ran")) == 2
        with pytest.raises(BlockingIOError):
            silent.recv(512)


def test_one_host_starts_though_nobody_says_whose_the_name_of_its_rendezvous_is(tmp_path: Path) -> None:
    """There is nobody to be met there."""
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "nobody-knows:29400")
    with dead_name_server(tmp_path) as (before, _), running(tmp_path / "run", RUN, *options, before=before) as job:
        assert job.wait() == 0, job.err


def test_one_host_starts_though_the_name_of_its_rendezvous_is_unknown(tmp_path: Path) -> None:
    """A pod's own name is published when its container has started; torchrun looks for it for a minute."""
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "trainer-0.job:29400")
    with dead_name_server(tmp_path) as (before, silent):
        silent.close()  # it refuses, and there is no answer to wait for
        with running(tmp_path / "run", RUN, *options, before=before) as job:
            assert job.wait() == 0, job.err
            assert job.err == ""


def test_one_host_starts_though_no_store_is_where_its_rendezvous_is_said_to_be(tmp_path: Path) -> None:
    """It may come later, and nothing is needed from there; but others may have been meant to take part."""
    options = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "elsewhere:29400")
    with dead_name_server(tmp_path) as (before, _):
        (tmp_path / "hosts").write_text(f"{KNOWN}192.0.2.1 elsewhere\n")
        with running(tmp_path / "run", RUN, *options, before=before) as job:
            assert job.wait() == 0, job.err
            (line,) = job.err.splitlines()
            assert "warning: --rdzv-endpoint elsewhere:29400 is another host, and no store answers there" in line


def test_a_list_of_hosts_is_not_looked_up_for_ever(tmp_path: Path) -> None:
    """Which of them this host is the user can say otherwise."""
    options = ("--hosts", "node[1-40]")
    with dead_name_server(tmp_path) as (before, _), running(tmp_path / "run", RUN, *options, before=before) as job:
        assert job.wait() == 2, job.err
        assert "is this host (named nobody-knows-this) by name, and the name server does not answer for node" in job.err


C10D = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "named")


@pytest.mark.parametrize("preflight", [pytest.param("on", marks=pytest.mark.slow), "off"])
def test_signals_are_heard_while_a_name_server_does_not_answer(tmp_path: Path, preflight: str) -> None:
    """The loop asks nobody itself: it says what it waits for, and ends as soon as it is told to."""
    options = (*C10D, "--rdzv-endpoint", "nobody-knows:29400", "--preflight", preflight)
    with dead_name_server(tmp_path) as (before, silent):
        with running(tmp_path / "early", RUN, *options, before=before) as job:
            until(lambda: _has_received(silent), "the name is asked for")
            job.send(signal.SIGTERM)
            job.wait()
            assert "does not answer for" not in job.err
        with running(tmp_path / "late", RUN, *options, before=before) as job:
            told = r"the name server does not answer for nobody-knows \(\d+ s\)"
            until(lambda: re.search(told, job.err), "it is said")
            job.send(signal.SIGTERM)
            job.wait()


@pytest.mark.slow
def test_the_launch_goes_on_without_the_process_that_asks(tmp_path: Path) -> None:
    """Whoever wants to connect to that name finds out what there is to be known."""
    options = (*C10D, "--rdzv-endpoint", "nobody-knows:29400", "--preflight", "off")
    with dead_name_server(tmp_path) as (before, _), running(tmp_path / "run", RUN, *options, before=before) as job:
        asking = until(lambda: job.called("sr-names"), "the name is asked for")
        kill(asking[0], signal.SIGKILL)
        until(job.coordinator, "the coordinator looks for itself")
        until(lambda: "saferun: the name server does not answer for nobody-knows (" in job.err, "it is said")
        job.send(signal.SIGTERM)
        job.wait()


@pytest.mark.slow
def test_a_name_that_nobody_knows_ends_the_wait_for_the_rendezvous(tmp_path: Path) -> None:
    """After the time that torch's client tries to connect."""
    options = (*C10D, "--rdzv-endpoint", "nobody-knows:29400", "--rdzv-conf", "read_timeout=5")
    with dead_name_server(tmp_path) as (before, _), running(tmp_path / "run", RUN, *options, before=before) as job:
        assert job.wait() == 1, job.err
        assert "saferun: the name server does not answer for nobody-knows (" in job.err
        assert "hint: look at --rdzv-endpoint, and at /etc/hosts and the name servers of this host" in job.err


STATIC = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "nobody-knows", "--master-port", "29518")


def test_a_master_whose_name_nobody_tells_is_waited_for_with_words(tmp_path: Path) -> None:
    """The coordinator asks for it, and its supervisor hears signals meanwhile."""
    with dead_name_server(tmp_path) as (before, _), running(tmp_path / "run", RUN, *STATIC, before=before) as job:
        until(lambda: "saferun: the name server does not answer for nobody-knows (" in job.err, "it is said")
        job.send(signal.SIGTERM)
        job.wait()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_name_that_appears_late_is_found(tmp_path: Path, backend: str) -> None:
    """As that of a pod behind a headless service, which is published when the pod is ready."""
    options: dict[str, tuple[tuple[str, ...], ...]] = {
        "static": (
            ("--nnodes", "2", "--node-rank", "0", "--master-addr", "late", "--master-port", "29517"),
            ("--nnodes", "2", "--node-rank", "1", "--master-addr", "late", "--master-port", "29517"),
        ),
        "c10d": ((*C10D, "--rdzv-endpoint", "late:29517"), (*C10D, "--rdzv-endpoint", "late:29517")),
    }
    # What torch asks name servers for is not looked at here.
    known = "127.0.0.1 localhost nobody-knows-this\n"
    with dead_name_server(tmp_path) as (before, _), contextlib.ExitStack() as stack:
        (tmp_path / "hosts").write_text(known)
        jobs = [
            stack.enter_context(running(tmp_path / f"host{i}", RUN, *options[backend][i], before=before))
            for i in range(2)
        ]
        until(lambda: "the name server does not answer for late (" in jobs[1].err, "it is waited for")
        (tmp_path / "hosts").write_text(f"{known}127.0.0.1 late\n")
        assert [job.wait(90.0) for job in jobs] == [0, 0], [job.err for job in jobs]
        assert sum(len(job.said("ran")) for job in jobs) == 2


def _has_received(silent: socket.socket) -> bool:
    try:
        return bool(silent.recv(512))
    except BlockingIOError:
        return False
