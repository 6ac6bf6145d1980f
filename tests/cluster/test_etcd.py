"""A job whose hosts meet in etcd: what torch's own handlers can do, saferun's hosts can."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.ports import own_port
from tests.process.launching import STAY, until
from tests.torch.several import hosts

PLACES = """
from rank import *
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
print("place", *(os.environ[name] for name in names), flush=True)
sys.exit(3 if RANK == 1 and ATTEMPT == 0 else 0)
"""


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[str]:
    """An etcd of this test's own, which speaks both of its protocols."""
    port, peers = own_port(), own_port()
    while peers == port:
        peers += 1
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    command = ["etcd", "--enable-v2", "--data-dir", str(folder / "data"), "--listen-client-urls", client]
    command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:

        def answers() -> bool:
            assert process.poll() is None, (folder / "etcd.log").read_text()
            asked = f"{client}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=5.0) as answer:  # noqa: S310 - http
                return b"true" in answer.read()
            return False

        until(answers, "etcd answers")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("backend", slow_but(["etcd-v2", "etcd"], "etcd-v2"))
def test_hosts_meet_in_etcd_and_meet_again_after_a_failure(tmp_path: Path, backend: str) -> None:
    """The first attempt fails, and the second has the same world."""
    (tmp_path / "etcd").mkdir()
    with (
        etcd(tmp_path / "etcd") as endpoint,
        hosts(
            tmp_path,
            PLACES,
            *("--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "job7"),
            *("--max-restarts", "1"),
            place=False,
        ) as jobs,
    ):
        assert [job.wait(90.0) for job in jobs] == [0, 0]
        said = sorted(line.split("place ")[1] for job in jobs for line in job.out.splitlines() if "place " in line)
        assert said == ["0 2 0 0", "0 2 0 1", "1 2 0 0", "1 2 0 1"]


@pytest.mark.slow
def test_a_job_that_a_signal_has_ended_meets_again_by_the_same_id(tmp_path: Path) -> None:
    """As a scheduler starts it again; torchrun leaves the rendezvous open, too."""
    (tmp_path / "etcd").mkdir()
    with etcd(tmp_path / "etcd") as endpoint:
        given = ("--nnodes", "2", "--rdzv-backend", "etcd-v2", "--rdzv-endpoint", endpoint, "--rdzv-id", "job7")
        with hosts(tmp_path / "first", STAY, *given, place=False) as jobs:
            for job in jobs:
                job.hear("ready")
            for job in jobs:
                job.send(signal.SIGTERM)
            assert [job.wait() for job in jobs] == [1, 1]
        with hosts(tmp_path / "second", "", *given, place=False) as jobs:
            assert [job.wait(90.0) for job in jobs] == [0, 0], [job.err for job in jobs]
