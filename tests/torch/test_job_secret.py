"""Jobs of two saferuns with a job secret: what somebody who has none writes into their store does nothing."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from saferun.cluster.signed import is_signed, unverified
from saferun.linux.bare_socket import short_host_name
from tests.ports import own_port
from tests.process.launching import Job, customized, running, until
from tests.torch.coordinating import DECISION
from tests.torch.several import hosts

WAIT = """
from rank import *
with open(FOLDER + "/port", "w") as file:
    file.write(os.environ["MASTER_PORT"])
tell("ready")
await_release("end")
"""


def secret_in(folder: Path, name: str = "secret", content: bytes = b"correct horse battery staple\n") -> str:
    path = folder / name
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


def connected(port: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)


def control_store_of(job: Job) -> tuple[Any, bytes]:
    """The store that the hosts' messages go through, as anybody finds it who reaches the port; and what says where."""
    ranks = connected(int((job.folder / "port").read_text()))
    stored = ranks.get("saferun/control")
    control = json.loads(unverified(stored))
    return ranks if control["one_port"] else connected(control["control_port"]), stored


def decide(store: Any, prefix: str = "") -> None:
    """Somebody says in the name of the host that leads that the job has ended."""
    text = json.dumps({"h": 0, "n": os.urandom(4).hex(), "m": {**DECISION, "exit_code": 7}})
    assert any(store.compare_set(f"{prefix}a0/log/{k}", "", text) == text.encode() for k in range(100))


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--control-port", "same"), marks=pytest.mark.slow)], ids=["", "one port"]
)
def test_a_decision_that_somebody_else_writes_is_ignored(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The job goes on to its own end, on both hosts, with exit code 0 and a warning."""
    with hosts(tmp_path, WAIT, *options, "--secret-file", secret_in(tmp_path)) as jobs:
        for job in jobs:
            job.hear("ready")
        store, said = control_store_of(jobs[0])
        assert is_signed(said)
        prefix = "saferun/own/" if options else ""
        for _ in range(3):
            decide(store, prefix)
        # What the hosts have told each other is of no use to anybody.
        recorded = store.get(f"{prefix}r0/host/1")
        assert is_signed(recorded)
        assert b"addresses" not in recorded
        for job in jobs:
            until(lambda job=job: "not signed with the job secret" in job.err, "the warning")  # type: ignore[misc]
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0]
        for job in jobs:
            assert "Traceback" not in job.err
            assert "battery" not in job.err + job.out


def test_without_a_secret_a_decision_of_anybody_ends_the_job(tmp_path: Path) -> None:
    """docs/security.md says so: whoever reaches the port can do what a host of the job can."""
    with hosts(tmp_path, WAIT, "--sign-messages", "off") as jobs:
        for job in jobs:
            job.hear("ready")
        store, said = control_store_of(jobs[0])
        assert not is_signed(said)
        decide(store)
        assert jobs[1].wait() == 7
        # The host that leads has decided nothing, and goes by the signal.
        jobs[0].send(signal.SIGTERM)
        jobs[0].wait()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param(b"a secret of some length", b"another secret of some length", "have different job secrets"),
        pytest.param(b"a secret of some length", None, "has none", marks=pytest.mark.slow),
        pytest.param(None, b"a secret of some length", "has none", marks=pytest.mark.slow),
    ],
    ids=["another", "none on the second", "none on the first"],
)
def test_hosts_with_different_secrets_say_so_on_both(
    tmp_path: Path, first: bytes | None, second: bytes | None, words: str
) -> None:
    """With two lines and exit code 2, long before the time is up for which late hosts are waited for."""
    files = [secret_in(tmp_path, f"secret{i}", raw) if raw else "" for i, raw in enumerate((first, second))]
    options = [("--secret-file", file) if file else () for file in files]
    with hosts(tmp_path, WAIT, each=lambda i: options[i]) as jobs:
        assert [job.wait() for job in jobs] == [2, 2]
        for job in jobs:
            lines = job.err.splitlines()
            assert any(words in line for line in lines), lines
            assert lines[-1].startswith("hint: pass the same secret on all hosts"), lines


@pytest.mark.parametrize(
    ("running", "newcomer", "leads", "words"),
    [
        pytest.param("secret", "", False, "has a job secret, and "),
        pytest.param("", "secret", False, "has a job secret, and ", marks=pytest.mark.slow),
        pytest.param("secret", "other", True, "have different job secrets", marks=pytest.mark.slow),
        pytest.param("secret", "", True, "has a job secret, and ", marks=pytest.mark.slow),
        pytest.param("", "secret", True, "has a job secret, and ", marks=pytest.mark.slow),
        pytest.param("off", "required", False, "the hosts share no secret", marks=pytest.mark.slow),
        pytest.param("off", "required", True, "the hosts share no secret", marks=pytest.mark.slow),
        pytest.param("required", "off", False, "the hosts share no secret", marks=pytest.mark.slow),
    ],
)
def test_a_running_elastic_job_goes_on_without_a_newcomer_that_has_another_secret(
    tmp_path: Path, running: str, newcomer: str, words: str, *, leads: bool
) -> None:
    """It was started in a wrong way, and the job was not; under torchrun there is nothing to be wrong about."""
    signing = {"": (), "off": ("--sign-messages", "off"), "required": ("--sign-messages", "required")}
    given = {
        **signing,
        "secret": ("--secret-file", secret_in(tmp_path)),
        "other": ("--secret-file", secret_in(tmp_path, "other", b"another secret of some length\n")),
    }
    program = "from rank import *\ntell('one of ' + os.environ['WORLD_SIZE'])\nawait_release('end')"
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{own_port()}", "--rdzv-id", "job7")
    options = (*endpoint, "--rdzv-conf", "last_call_timeout=1", "--nnodes", "1:2")
    # torch orders hosts by their addresses.
    first_address, second_address = ("127.0.0.2", "127.0.0.1") if leads else ("127.0.0.1", "127.0.0.2")
    own = (*options, *given[running], "--local-addr", first_address)
    with hosts(tmp_path / "first", program, *own, count=1, place=False) as (first,):
        first.hear("one of 1")
        own = (*options, *given[newcomer], "--local-addr", second_address)
        with hosts(tmp_path / "second", program, *own, count=1, place=False) as (second,):
            assert second.wait() == 2
            lines = second.err.splitlines()
            assert any(words in line for line in lines), lines
            assert lines[-1].startswith("hint: "), lines
        first.hear("one of 1")
        first.release("end")
        assert first.wait() == 0


@pytest.mark.slow
def test_a_running_elastic_job_takes_in_one_newcomer_and_goes_on_without_another(tmp_path: Path) -> None:
    """The one that was started rightly does not end with the other, though torch takes in both at once."""
    program = "from rank import *\ntell('one of ' + os.environ['WORLD_SIZE'])\nawait_release('end')"
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{own_port()}", "--rdzv-id", "job7")
    options = (*endpoint, "--rdzv-conf", "last_call_timeout=3", "--nnodes", "1:4")
    secret = (*options, "--secret-file", secret_in(tmp_path))
    # torch has the host lead that comes first by its address and then by its process ID, which may begin again at 1. A
    # round that a newcomer leads ends the other one as well.
    first, second = (*secret, "--local-addr", "127.0.0.1"), (*secret, "--local-addr", "127.0.0.2")
    with hosts(tmp_path / "first", program, *first, count=2, place=False) as running_hosts:
        for job in running_hosts:
            job.hear("one of 2")
        with (
            hosts(tmp_path / "wrong", program, *options, count=1, place=False) as (wrong,),
            hosts(tmp_path / "right", program, *second, count=1, place=False) as (right,),
        ):
            assert wrong.wait() == 2
            for job in (*running_hosts, right):
                job.hear("one of 3")
                job.release("end")
            assert [job.wait() for job in (*running_hosts, right)] == [0, 0, 0]


@pytest.mark.slow
def test_a_host_that_cannot_read_its_secret_says_so_and_may_come_again(tmp_path: Path) -> None:
    """Before anything is started there; the other one waits for it as for any host that is late."""
    path = secret_in(tmp_path)
    secret_in(tmp_path, "open")
    os.chmod(tmp_path / "open", 0o644)
    with hosts(tmp_path, WAIT, each=lambda i: ("--secret-file", path if i == 0 else str(tmp_path / "open"))) as jobs:
        assert jobs[1].wait() == 2
        assert jobs[1].err.splitlines() == [
            f"saferun: --secret-file {tmp_path}/open: everyone may read or write it (on {short_host_name()})",
            f"hint: it must belong to this user or root, and be readable by no other user: chmod 600 {tmp_path}/open",
        ]
        # With the right one it takes its place.
        own = [str(argument) for argument in jobs[0].process.args]  # type: ignore[union-attr]
        own[own.index("--node-rank") + 1] = "1"
        place = own[own.index("--nnodes") : own.index("--secret-file") + 2]
        with running(tmp_path / "again", WAIT, *place) as again:
            for job in (jobs[0], again):
                job.hear("ready")
            for job in (jobs[0], again):
                job.release("end")
            assert [jobs[0].wait(), again.wait()] == [0, 0]


def test_where_nothing_can_encrypt_it_is_said_before_anybody_is_met(tmp_path: Path) -> None:
    """The library is a dependency; where it is broken, evidence does not travel in the clear."""
    hidden = customized(tmp_path, "import sys\nsys.modules['cryptography'] = None\n")
    with hosts(tmp_path, WAIT, "--secret-file", secret_in(tmp_path), start=[0], environs=lambda _: hidden) as jobs:
        assert jobs[0].wait() == 2
        assert "evidence cannot be encrypted on this host" in jobs[0].err
        assert "cryptography" in jobs[0].err.splitlines()[-1]


def test_one_host_alone_does_not_look_at_the_file(tmp_path: Path) -> None:
    """It tells nobody anything; the variable may be set for all jobs of a user."""
    with hosts(
        tmp_path, WAIT, count=1, place=False, environs=lambda _: {"SAFERUN_JOB_SECRET_FILE": "/nonexistent/secret"}
    ) as jobs:
        jobs[0].hear("ready")
        jobs[0].release("end")
        assert jobs[0].wait() == 0


def mpi_task(i: int, count: int) -> dict[str, str]:
    """The environment of a task of MPICH's mpiexec on one host."""
    task = {"PMI_RANK": i, "PMI_SIZE": count, "MPI_LOCALRANKID": i, "MPI_LOCALNRANKS": count, "PMI_FD": 7}
    return {**{name: str(value) for name, value in task.items()}, "SAFERUN_SCHEDULER": "pmi"}


@pytest.mark.slow
def test_one_saferun_a_rank_signs_too(tmp_path: Path) -> None:
    """The secret is the head's to hand to the coordinator; the others look whether they could read it."""
    environ = {"SAFERUN_JOB_SECRET_FILE": secret_in(tmp_path)}
    with hosts(
        tmp_path, WAIT, count=3, place=False, nproc=None, environs=lambda i: {**mpi_task(i, 3), **environ}
    ) as jobs:
        for job in jobs:
            job.hear("ready")
        store, said = control_store_of(jobs[0])
        assert is_signed(said)
        decide(store)
        until(lambda: "not signed with the job secret" in jobs[0].err, "the warning")
        for job in jobs:
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0, 0]


FAIL_ONCE = """
from rank import *
tell("ready")
await_release("fail" if ATTEMPT == 0 else "end")
if ATTEMPT == 0 and RANK == 1:
    print("ValueError: S3CR3TPLACE is none", file=sys.stderr)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_job_that_is_restarted_signs_on_and_its_own_messages_are_never_ignored(tmp_path: Path, backend: str) -> None:
    """Evidence gets to the host that leads, and each attempt has its own signatures."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{own_port()}", "--rdzv-id", "x")
    options = ("--secret-file", secret_in(tmp_path), "--max-restarts", "1")
    place = ("--nnodes", "2", *meeting) if backend == "c10d" else ()
    with hosts(tmp_path, FAIL_ONCE, *options, *place, place=not place) as jobs:
        for name in ("fail", "end"):
            for job in jobs:
                job.hear("ready")
            for job in jobs:
                job.release(name)
        assert [job.wait() for job in jobs] == [0, 0]
        assert any("S3CR3TPLACE is none" in job.err for job in jobs)
        assert all("ignored" not in job.err for job in jobs), [job.err for job in jobs]
