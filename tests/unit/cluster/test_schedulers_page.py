"""What docs/schedulers.md says of each launcher, beside what tests/cluster/test_launchers.py measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from saferun.cluster.schedulers import BY_NAME
from tests.unit.cluster.placing import config_of
from tests.unit.recorded_launchers import (
    PLAIN,
    SLURM_TASK_A_HOST,
    hydra,
    intel_mpi,
    mvapich2_tree,
    open_mpi_4,
    open_mpi_5,
)
from tests.unit.recorded_schedulers import (
    HTCONDOR,
    INDEXED_JOB,
    LEADER_WORKER_SET,
    LSF_JSRUN,
    PBS_SPAWNED,
    PYTORCH_JOB,
    SAGEMAKER,
    TRAIN_JOB,
    aws_batch,
    flux,
    ray_train,
)

PAGE = Path(__file__).parents[3] / "docs" / "schedulers.md"
OF_TWO_HOSTS = {"MASTER_ADDR": "node1"}
# By the first words of a row: an environment that such a launcher gives.
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "Slurm": SLURM_TASK_A_HOST,
    "Open MPI 4": open_mpi_4(2, 4, 0, size=8, local_size=2, hosts=4),
    "Open MPI 5": open_mpi_5(2, 4, 0, size=8, local_size=2) | OF_TWO_HOSTS,
    "MPICH": hydra(2, 4, 0, size=8, local_size=2) | OF_TWO_HOSTS,
    "Intel MPI": intel_mpi(5, 1, size=8, local_size=2),
    "MVAPICH2": mvapich2_tree(2, 4, 0),
    "LSF": LSF_JSRUN | {"LSB_MCPU_HOSTS": "127.0.0.1 4 node2 4"},
    "PBS": PBS_SPAWNED,
    "Flux": flux(2, 0, size=4, hosts=4) | OF_TWO_HOSTS,
    "HTCondor": HTCONDOR | OF_TWO_HOSTS,
    "PyTorchJob": PYTORCH_JOB,
    "TrainJob": TRAIN_JOB,
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "indexed Job": INDEXED_JOB,
    "SageMaker": SAGEMAKER,
    "AWS Batch": aws_batch(1),
    "a worker of Ray Train": ray_train(1, size=2, local_size=1),
    "Kubernetes": PYTORCH_JOB,
    "`pdsh": PLAIN,
    "`docker": PLAIN,
}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def rows(column: str) -> list[tuple[str, str]]:
    """The first cell of each row of the tables that have such a column, and its cell there."""
    found: list[tuple[str, str]] = []
    index = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            index = None
        elif index is None:
            index = cells.index(column) if column in cells else -1
        elif index >= 0 and set(line) - set("| -"):
            found.append((cells[0], cells[index]))
    return found


def environment(row: str) -> Mapping[str, str]:
    (found,) = (environ for begins, environ in ENVIRONMENTS.items() if row.startswith(begins))
    return found


def test_the_page_has_every_name_of_a_scheduler() -> None:
    assert {cell.partition(",")[0].strip("`") for _, cell in rows("`--scheduler`") if cell} == set(BY_NAME)


@pytest.mark.parametrize(("row", "cell"), rows("`--stop-with-parent auto`"))
def test_whether_the_job_ends_with_its_launcher_is_as_the_page_says(row: str, cell: str) -> None:
    environ = environment(row)
    assert config_of(environ=environ).hosts.stop_with_parent == (cell == "on")
    if "; with " in cell:
        arguments = ("--nnodes", "2", "--master-addr", "node1", "--scheduler", "pbs")
        assert cell == "off; with `--scheduler pbs` on"
        assert config_of(*arguments, environ=environ).hosts.stop_with_parent


@pytest.mark.parametrize(("row", "cell"), rows("`--scheduler`"))
def test_each_launcher_is_found_by_the_name_that_the_page_gives_it(row: str, cell: str) -> None:
    """By itself, but where the page says otherwise; then by its name."""
    environ = environment(row)
    found = config_of(environ=environ).hosts.detected
    if not cell or ", " in cell:
        assert not found
    if cell:
        more = ("--nnodes", "2", "--master-addr", "node1") if ", " in cell and "PBS" in row else ()
        more = ("--nnodes", "4", "--master-addr", "node1") if "indexed" in row else more
        named = config_of("--scheduler", cell.partition(",")[0].strip("`"), *more, environ=environ).hosts.detected
        assert named
        assert found in {"", named}
        assert bool(found) == (", " not in cell)


def test_intel_mpi_finds_its_first_host_on_as_many_hosts_as_the_page_says() -> None:
    """Beyond the width of its tree, proxies start each other."""
    assert "without names on at most 17 hosts" in dict(rows("leader"))["Intel MPI `mpiexec.hydra`"]
    assert config_of(environ=intel_mpi(16, 0, size=17, local_size=1)).hosts.most == 17
    assert not config_of(environ=intel_mpi(17, 0, size=18, local_size=1)).hosts.spans_hosts
