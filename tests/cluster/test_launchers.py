"""Every launcher that can be had here: a place without options, and what its signals and exit codes are.

The table in docs/schedulers.md has what these tests measure.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import (
    SAFERUN,
    TELL_PLACE,
    Job,
    Way,
    assert_nothing_left,
    await_no_ranks,
    ranks_on,
    start,
    write,
)
from tests.packaged import launcher
from tests.process.launching import until

if TYPE_CHECKING:
    from tests.cluster.machines.cluster import Cluster

pytestmark = pytest.mark.slow

_TABLE = Path(__file__).resolve().parents[2] / "docs" / "schedulers.md"
# The name in the table: the way, and the program without which it cannot be measured.
LAUNCHERS = {
    "Slurm `srun`": Way("srun"),
    "Open MPI 4 `mpirun`": Way("mpirun"),
    "Open MPI 5 `mpirun`": Way("mpirun", program=str(launcher("openmpi", "mpirun"))),
    "MPICH 4 `mpiexec`": Way("hydra"),
    "MPICH 5 `mpiexec`": Way("hydra", program=str(launcher("mpich", "mpiexec"))),
    "Intel MPI 2021 `mpiexec.hydra`": Way("hydra", program=str(launcher("impi-rt", "mpiexec.hydra"))),
    "`pdsh -S`": Way("pdsh"),
}
PACKAGED = [name for name, way in LAUNCHERS.items() if way.program]
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}

# Longer than any of them takes to end ranks, and shorter than a person waits.
_SURVIVAL_S = 12.0

FAIL_WHEN_RELEASED = """
tell("ready")
await_release(f"fail.{RANK}")
sys.exit(3)
"""
# Ranks note SIGTERM in a file: the launcher, which would pass on their output, may be gone.
STAY_AND_NOTE = """
def note(signum, frame):
    open(f"{FOLDER}/got.{RANK}", "w").close()
    sys.exit(0)


signal.signal(signal.SIGTERM, note)
open(f"{FOLDER}/there.{RANK}", "w").close()
stay()
"""


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Way:
    """The way of a row, where its program is there."""
    found = LAUNCHERS[request.param]
    if found.program and not Path(found.program).exists():
        pytest.skip(f"{found.program} is not there (python -m tests.packaged)")
    return found


@pytest.mark.parametrize("tasks", [1, 2])
@pytest.mark.parametrize("way", PACKAGED, indirect=True)
def test_every_rank_has_its_place_without_options(cluster: Cluster, tmp_path: Path, way: Way, tasks: int) -> None:
    """Open MPI 5, MPICH 5 and Intel MPI: one saferun per host, and one per rank."""
    job = start(cluster, way._replace(tasks=tasks), tmp_path, TELL_PLACE)
    assert set(job.finish()) == {0}, job.story("failed")
    assert [json.loads(said.more) for said in job.words] == [
        [f"node{1 + rank // 2}", rank, 8, rank % 2, 2, rank // 2, 4, rank, 8] for rank in range(8)
    ]
    assert len(job.saferun_said("saferun: 4 hosts .*, 8 ranks, 2 on each, from ")) == 1, job.story("not reported once")
    assert_nothing_left(cluster)


@pytest.mark.parametrize("way", ["MPICH 5 `mpiexec`", "Intel MPI 2021 `mpiexec.hydra`"], indirect=True)
def test_mpiexec_within_a_slurm_job_finds_the_hosts_of_the_job(cluster: Cluster, tmp_path: Path, way: Way) -> None:
    """Their proxies are started by srun then, and the names come from the step."""
    job = start(cluster, way, tmp_path, TELL_PLACE, within=("salloc", "--nodes=4"))
    assert set(job.finish()) == {0}, job.story("failed")
    assert [json.loads(said.more)[:2] for said in job.words] == [[f"node{1 + rank // 2}", rank] for rank in range(8)]
    assert_nothing_left(cluster)


def test_variables_of_a_step_that_came_by_ssh_make_no_job(cluster: Cluster, tmp_path: Path) -> None:
    """A shell on a host of the job, with the environment of a task: torchrun would run there, and so does this."""
    here, there = cluster.hosts[:2]
    keep = f"export -p > {tmp_path}/environ.$SLURM_NODEID"
    assert here.run(["srun", "--nodes=2", "--ntasks-per-node=1", "sh", "-c", keep], cwd=tmp_path).returncode == 0
    command = shlex.join((*SAFERUN, "--run-dir", "none", write(tmp_path, TELL_PLACE)))
    line = f". {tmp_path}/environ.1; cd {tmp_path}; {command}"
    job = Job(tmp_path, [here.popen(["ssh", there.name, line], cwd=tmp_path)])
    assert job.finish() == [0], job.story("failed")
    assert [said.rank for said in job.words] == [0]
    (line,) = job.saferun_said("saferun: Slurm step .* did not start this process, but sshd")
    assert "--scheduler slurm" in line
    assert_nothing_left(cluster)


def test_an_interactive_shell_of_a_step_starts_a_job_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    """``srun --pty`` ends the shells of all other tasks at once: nobody else comes."""
    here = cluster.hosts[0]
    command = shlex.join((*SAFERUN, "--run-dir", "none", "--nproc-per-node", "2", write(tmp_path, TELL_PLACE)))
    (tmp_path / "typed").write_text(f"cd {tmp_path}\n{command}\n")
    shell = "srun --nodes=2 --ntasks-per-node=2 --pty sh"
    job = Job(tmp_path, [here.popen(["sh", "-c", f"script -qec '{shell}' /dev/null < {tmp_path}/typed"], cwd=tmp_path)])
    assert job.finish() == [0], job.story("failed")
    assert sorted(json.loads(said.more)[:4] for said in job.words) == [["node1", rank, 2, rank] for rank in (0, 1)]
    assert_nothing_left(cluster)


def test_a_batch_script_that_was_submitted_from_within_a_step_is_no_task_of_that_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Sbatch hands on the environment of where it is called, with the variables of the step."""
    here = cluster.hosts[0]
    command = shlex.join((*SAFERUN, "--run-dir", "none", write(tmp_path, TELL_PLACE)))
    (tmp_path / "batch").write_text(f"#!/bin/sh\necho step $SLURM_STEP_ID\ncd {tmp_path}\n{command}\n")
    submit = f"test $SLURM_PROCID != 0 || sbatch --wait --nodelist=node3 -o {tmp_path}/out {tmp_path}/batch"
    step = ["srun", "--nodes=2", "--ntasks-per-node=2", "sh", "-c", submit]
    job = Job(tmp_path, [here.popen(step, cwd=tmp_path)])
    assert job.finish() == [0], job.story("failed")
    step_id, note, told = (tmp_path / "out").read_text().strip().splitlines()
    assert step_id == "step 0"
    assert "did not start this process, but a batch script" in note
    assert 'place ["node3", 0, 1, 0' in told
    assert_nothing_left(cluster)


# ------------------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("way", LAUNCHERS, indirect=True)
def test_the_exit_code_of_a_job_whose_rank_fails(
    cluster: Cluster, tmp_path: Path, way: Way, request: pytest.FixtureRequest
) -> None:
    """Whatever the rank's was."""
    job = start(cluster, way, tmp_path, FAIL_WHEN_RELEASED, hosts=cluster.hosts[:2], nproc=1)
    job.hear("ready", 2)
    job.release("fail.1")
    (code,) = job.finish()
    assert_nothing_left(cluster)
    assert str(code) == row(request)["a rank fails"]


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("way", LAUNCHERS, indirect=True)
def test_what_a_signal_to_the_launcher_does(
    cluster: Cluster, tmp_path: Path, way: Way, name: str, request: pytest.FixtureRequest
) -> None:
    """To the ranks, and its exit code. Whatever it does, nothing is left in the end."""
    job = start(cluster, way, tmp_path, STAY_AND_NOTE, hosts=cluster.hosts[:2], nproc=1)
    until(lambda: len(list(tmp_path.glob("there.*"))) == 2, "both ranks are there")
    job.processes[0].send_signal(SIGNALS[name])
    measured = outcome(cluster, tmp_path, job)
    print(f"{request.node.callspec.params['way']}: {name}: {measured}")
    # A host on which saferun is killed later may hear from the other one first, and stop its rank.
    expected = row(request)[name]
    assert measured in {expected, expected.replace("are killed", "get SIGTERM or are killed")}, job.story(events(job))


def events(job: Job) -> str:
    """What each saferun has done: a launcher that has been killed passes nothing on."""
    return "\n".join(f"{path}:\n{path.read_text()}" for path in job.folder.rglob("events.jsonl"))


def outcome(cluster: Cluster, folder: Path, job: Job) -> str:
    """What has become of the ranks, and the exit code of the launcher, if it has not been killed."""
    hosts = cluster.hosts[:2]
    give_up_at = time.monotonic() + _SURVIVAL_S
    while any(ranks_on(host) for host in hosts) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    if any(ranks_on(host) for host in hosts):
        what = "ranks go on"
        for host in hosts:
            for pid in host.pids(r"-m saferun"):
                host.kill(pid, signal.SIGTERM)
        await_no_ranks(*hosts)
        job.processes[0].send_signal(signal.SIGKILL)
        job.finish()
    else:
        noted = len(list(folder.glob("got.*")))
        what = {0: "ranks are killed", 2: "ranks get SIGTERM"}.get(noted, "ranks get SIGTERM or are killed")
        (code,) = job.finish()
        what += f", {code}" if code >= 0 else ""
    assert_nothing_left(cluster)
    return what


def row(request: pytest.FixtureRequest) -> dict[str, str]:
    """The row of the table for the launcher of a test."""
    table = _TABLE.read_text(encoding="utf-8").partition("\n| launcher |")
    header, *rows = f"| launcher |{table[2].partition(chr(10) * 2)[0]}".splitlines()
    (found,) = [row for row in map(cells, rows) if row[0] == request.node.callspec.params["way"]]
    return dict(zip(cells(header), found, strict=True))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
