"""What detectors make of the environments that launchers give to processes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from saferun.cluster.schedulers import detect
from saferun.cluster.schedulers.allocation import expand_process_mapping
from saferun.cluster.schedulers.mpi import expand_node_regex
from tests.unit.cluster.scheduling import (
    around,
    found,
    place,
)
from tests.unit.recorded_launchers import (
    INTEL_MPI_IN_SLURM,
    INTEL_PROXY_IN_SLURM,
    OPEN_MPI_IN_SLURM,
    OPEN_MPI_IN_SLURM_HEAD,
    SLURM_BATCH_SCRIPT,
    SLURM_HETEROGENEOUS,
    SLURM_INTERACTIVE_STEP,
    SLURM_PMI2,
    SLURM_TASK_A_HOST,
    SLURM_TASK_A_RANK,
    SLURM_UNEQUAL,
    hydra,
    hydra_proxy,
    intel_mpi,
    intel_proxy,
    mvapich2,
    mvapich2_tree,
    open_mpi_4,
    open_mpi_5,
    prted,
    slurm_step,
)

NODES = ("node1", "node2", "node3", "node4")


# --------------------------------------------------------------------------------------------------------------------
# Slurm


def test_a_step_with_one_task_a_host() -> None:
    """The step's variables count; those of the job tell of more hosts."""
    allocation = found(SLURM_TASK_A_HOST)
    assert place(allocation) == (2, 4, 0, 1)
    assert allocation.names == NODES
    assert allocation.master_addr == "node1"
    assert (allocation.source, allocation.key) == ("Slurm step 4711.0", "slurm-4711-0")
    assert not allocation.task_a_rank
    assert not allocation.alone
    assert allocation.above


def test_a_step_with_one_task_a_rank() -> None:
    """Each task is told its place on the host."""
    allocation = found(SLURM_TASK_A_RANK)
    assert place(allocation) == (2, 4, 1, 2)
    assert allocation.tasks_by_host == (2, 2, 2, 2)
    assert allocation.task_a_rank


def test_hosts_of_a_step_need_not_be_alike() -> None:
    """A host with one task is a host of a job with a task a rank all the same."""
    allocation = found(SLURM_UNEQUAL)
    assert place(allocation) == (0, 3, 2, 3)
    assert allocation.names == ("node1", "node3", "node4")
    assert allocation.tasks_by_host == (3, 1, 1)
    last = found(slurm_step(2, 4, 0, nodes="node[1,3-4]", hosts=3, tasks=5, tasks_by_host="3,1(x2)", gtids="4"))
    assert place(last) == (2, 3, 0, 1)
    assert last.task_a_rank


def test_the_components_of_a_heterogeneous_step_are_one_job() -> None:
    """Slurm numbers nodes and tasks through all of them, and lists all nodes."""
    allocation = found(SLURM_HETEROGENEOUS, "gpu7")
    assert place(allocation) == (2, 3, 1, 2)
    assert allocation.names == ("node1", "node2", "gpu7")
    assert allocation.key == "slurm-4711-0"


def test_slurms_own_pmi_is_slurm() -> None:
    """It sets PMI_RANK as well, and no local rank."""
    assert found(SLURM_PMI2, mapping="(vector,(0,4,2))") == found(SLURM_TASK_A_RANK)


@pytest.mark.parametrize("environ", [SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP], ids=["sbatch", "salloc"])
def test_what_runs_on_the_first_host_of_a_job_only_is_no_step(environ: Mapping[str, str]) -> None:
    """A batch script is alone, although it is told that it is task 0 of 6."""
    assert detect(around(environ, "node1")) is None


def test_a_later_step_has_a_key_of_its_own() -> None:
    """Steps of one job may run at the same time, with --overlap even on the same hosts."""
    again = {**SLURM_TASK_A_HOST, "SLURM_STEP_ID": "3", "SLURM_STEPID": "3"}
    assert (found(again).key, found(again).source) == ("slurm-4711-3", "Slurm step 4711.3")


@pytest.mark.parametrize(
    ("name", "value", "lost"),
    [
        ("SLURM_STEP_NODELIST", "node[1-", "names"),
        ("SLURM_STEP_NODELIST", "node[1-3]", "names"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x", "tasks_by_host"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3)", "tasks_by_host"),
    ],
)
def test_what_cannot_be_read_is_not_told(name: str, value: str, lost: str) -> None:
    """The rest still holds."""
    allocation = found({**SLURM_TASK_A_RANK, name: value})
    assert getattr(allocation, lost) == ()
    assert place(allocation) == (2, 4, 1, 2)


@pytest.mark.parametrize(
    ("name", "value"), [("SLURM_NODEID", "4"), ("SLURM_NODEID", "x"), ("SLURM_LOCALID", "2"), ("SLURM_LOCALID", "")]
)
def test_a_place_that_does_not_exist_is_none(name: str, value: str) -> None:
    """Variables that were left over from somewhere."""
    assert detect(around({**SLURM_TASK_A_RANK, name: value})) is None


# --------------------------------------------------------------------------------------------------------------------
# Open MPI


def test_open_mpi_4_on_four_hosts() -> None:
    """The daemons' numbers are the hosts'; all but the first host are told the names."""
    for rank in range(8):
        node, local = divmod(rank, 2)
        allocation = found(open_mpi_4(node, rank, local, size=8, local_size=2, hosts=4), NODES[node])
        assert place(allocation) == (node, 4, local, 2)
        assert allocation.master_addr == "node1"
        assert allocation.names == (NODES if node else ())
        assert (allocation.source, allocation.key) == ("Open MPI job 2102788097", "openmpi-2102788097")


def test_open_mpi_4_one_process_a_host() -> None:
    """``mpirun -N 1``: each starts as many ranks as the option says."""
    allocation = found(open_mpi_4(3, 3, 0, size=4, local_size=1, hosts=4), "node4")
    assert place(allocation) == (3, 4, 0, 1)
    assert not allocation.task_a_rank


def test_open_mpi_4_with_hosts_of_different_size() -> None:
    """Six processes on slots for 3, 1 and 2: no division would tell."""
    for node, rank, local, local_size in [(0, 0, 0, 3), (0, 2, 2, 3), (1, 3, 0, 1), (2, 4, 0, 2), (2, 5, 1, 2)]:
        environ = open_mpi_4(node, rank, local, size=6, local_size=local_size, hosts=3, regex="node[1:1-3]@0(3)")
        assert place(found(environ, NODES[node])) == (node, 3, local, local_size)


def test_open_mpi_4_with_ranks_dealt_out_by_node() -> None:
    """``--map-by node``: ranks 0 and 4 are on node1, 1 and 5 on node2."""
    for rank in range(8):
        local, node = divmod(rank, 4)
        environ = open_mpi_4(node, rank, local, size=8, local_size=2, hosts=4)
        assert place(found(environ, NODES[node])) == (node, 4, local, 2)


def test_open_mpi_4_from_a_host_that_takes_no_part() -> None:
    """A login node, or the launcher of an MPIJob: it is daemon 0, and the hosts begin with daemon 1."""
    for rank in range(6):
        node, local = divmod(rank, 2)
        regex = "login[1:1],node[1:1-3]@0(4)"
        environ = open_mpi_4(node + 1, rank, local, size=6, local_size=2, hosts=3, regex=regex)
        allocation = found(environ, NODES[node])
        assert place(allocation) == (node, 3, local, 2)
        assert allocation.names == NODES[:3]
        assert allocation.master_addr == "node1"


def test_open_mpi_4_with_a_host_too_many() -> None:
    """Four hosts were given, and the six processes fit on three."""
    environ = open_mpi_4(2, 5, 1, size=6, local_size=2, hosts=3)
    assert place(found(environ, "node3")) == (2, 3, 1, 2)
    assert found(environ, "node3").names == NODES[:3]
    # Not by division either: nobody knows which of the four has none.
    uneven = open_mpi_4(3, 5, 0, size=6, local_size=1, hosts=3)
    assert found(uneven, "node4").node_rank is None


def test_open_mpi_on_one_host() -> None:
    """``mpirun -np 8`` on a workstation."""
    allocation = found(open_mpi_4(0, 3, 3, size=8, local_size=8, hosts=1), "box")
    assert place(allocation) == (0, 1, 3, 8)
    assert not allocation.alone


def test_open_mpi_5() -> None:
    """No names and no number of hosts, but the daemon's number; mpirun's host is part of the job's name."""
    for rank in range(8):
        node, local = divmod(rank, 2)
        allocation = found(open_mpi_5(node, rank, local, size=8, local_size=2), NODES[node])
        assert place(allocation) == (node, 4, local, 2)
        assert allocation.master_addr == "node1"
        assert allocation.key == "openmpi-prterun-node1-71423@1"


def test_open_mpi_5_from_a_host_that_takes_no_part() -> None:
    """Then nobody can tell where host 0 is."""
    for node in range(3):
        allocation = found(open_mpi_5(node + 1, node, 0, size=3, local_size=1), NODES[node])
        assert place(allocation) == (node, 3, 0, 1)
        assert allocation.master_addr is None


@pytest.mark.parametrize(("node", "rank", "local_size", "hosts"), [(1, 3, 1, 3), (2, 4, 2, 3), (1, 4, 4, 3)])
def test_open_mpi_5_with_hosts_of_different_size_does_not_tell(
    node: int, rank: int, local_size: int, hosts: int
) -> None:
    """The number of hosts is not to be had; that of the daemons shows that dividing would be wrong."""
    size = 6 if local_size < 4 else 8
    allocation = found(open_mpi_5(node, rank, 0, size=size, local_size=local_size), above=prted(node, hosts))
    told = size // local_size in {hosts, hosts - 1}
    assert (allocation.hosts is not None) == told
    assert found(open_mpi_5(1, 3, 0, size=5, local_size=2)).hosts is None


@pytest.mark.parametrize(("environ", "node", "local"), [(OPEN_MPI_IN_SLURM, 2, 0), (OPEN_MPI_IN_SLURM_HEAD, 0, 1)])
def test_mpirun_within_a_slurm_job_is_open_mpi(environ: Mapping[str, str], node: int, local: int) -> None:
    """Slurm's variables tell of mpirun's daemons, of which the first host has none."""
    allocation = found(environ, NODES[node])
    assert allocation.source.startswith("Open MPI")
    assert place(allocation) == (node, 4, local, 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[1:1-4]@0(4)", NODES),
        ("node[1:1],node[1:2-4]@0(4)", NODES),
        ("login,nid[5:12-13,40]x@0(2),1(2)", ("login", "nid00012x", "nid00013x", "nid00040x")),
        ("10.0.0.1,10.0.0.2@0(2)", ("10.0.0.1", "10.0.0.2")),
        ("", ()),
        ("node[1-4]@0(4)", ()),
        ("node[1:1-999999999]", ()),
    ],
)
def test_open_mpis_list_of_hosts(text: str, names: tuple[str, ...]) -> None:
    """The digits' number, a colon, ranges."""
    assert expand_node_regex(text) == names


# --------------------------------------------------------------------------------------------------------------------
# MPICH and Intel MPI


@pytest.mark.parametrize(
    ("mapping", "size", "nodes"),
    [
        ("(vector,(0,3,2))", 5, [0, 0, 1, 1, 2]),
        ("(vector,(0,1,3),(1,1,1),(2,1,2))", 6, [0, 0, 0, 1, 2, 2]),
        ("(vector,(0,3,1))", 6, [0, 1, 2, 0, 1, 2]),
        ("(vector, (0,2,1))", 2, [0, 1]),
    ],
)
def test_hydra_knows_which_rank_is_where(mapping: str, size: int, nodes: list[int]) -> None:
    """In blocks of any size, or dealt out one by one."""
    assert expand_process_mapping(mapping, size) == tuple(nodes)
    for rank, node in enumerate(nodes):
        local, local_size = nodes[:rank].count(node), nodes.count(node)
        environ = hydra(node, rank, local, size=size, local_size=local_size)
        allocation = found(environ, NODES[node], above=hydra_proxy(node), mapping=mapping, own=(NODES[node],))
        assert place(allocation) == (node, max(nodes) + 1, local, local_size)
        assert allocation.tasks_by_host == tuple(nodes.count(each) for each in range(max(nodes) + 1))
        assert allocation.master_addr == "node1"
        assert (allocation.source, allocation.key) == ("mpiexec on node1", "mpi-node1-37517")


@pytest.mark.parametrize("text", ["", "(vector", "(vector,)", "(0,3,2)", "(vector,(0,0,2))", "(vector,(1,2,2))", "x"])
def test_a_mapping_that_is_none(text: str) -> None:
    """Nothing is made up, and nothing goes on forever."""
    assert expand_process_mapping(text, 4) == ()


def test_hydra_without_an_answer_from_its_process_manager() -> None:
    """Blocks are taken where the proxy's number agrees, and nothing where it does not."""
    allocation = found(hydra(2, 5, 1, size=8, local_size=2), above=hydra_proxy(2))
    assert place(allocation) == (2, 4, 1, 2)
    unequal = found(hydra(2, 4, 0, size=6, local_size=2), above=hydra_proxy(1))
    assert (unequal.hosts, unequal.node_rank) == (None, None)


def test_mpiexec_on_a_host_that_takes_no_part() -> None:
    """Host 0 knows that the others look for it in the wrong place."""
    environ = hydra(0, 0, 0, size=8, local_size=2)
    first = found(environ, "node1", above=hydra_proxy(0, "login1"), mapping="(vector,(0,4,2))", own=("node1",))
    assert first.node_rank == 0
    assert first.master_addr is None
    assert first.guessed_master


def test_intel_mpi() -> None:
    """Its proxy tells its number in the environment, and where its ssh comes from is mpiexec's host."""
    allocation = found(intel_mpi(5, 1, size=8, local_size=2), above=intel_proxy(2), mapping="(vector,(0,4,2))")
    assert place(allocation) == (2, 4, 1, 2)
    assert (allocation.master_addr, allocation.guessed_master) == ("10.77.0.1", True)
    assert allocation.key == "mpi-81000000-a051-abe6-1d61-0600c787c41b"
    first = found(intel_mpi(0, 0, size=8, local_size=2), "node1", above=intel_proxy(0), own=("node1",))
    assert place(first) == (0, 4, 0, 2)
    assert first.master_addr == "node1"


def test_intel_mpi_beyond_the_width_of_its_tree() -> None:
    """Proxies start each other there, and ssh comes from any of them."""
    environ = intel_mpi(18, 0, size=18 * 2, local_size=1)
    assert found(environ, above=intel_proxy(18)).master_addr is None


def test_intel_mpi_within_a_slurm_job() -> None:
    """Its hosts are those of the step of its proxies."""
    allocation = found(INTEL_MPI_IN_SLURM, above=INTEL_PROXY_IN_SLURM)
    assert place(allocation) == (2, 4, 1, 2)
    assert (allocation.names, allocation.master_addr) == (NODES, "node1")
    assert not allocation.guessed_master
    # Not where this host should be another of them: hosts of a list of mpiexec's own.
    other = found(INTEL_MPI_IN_SLURM, "node2", above=INTEL_PROXY_IN_SLURM)
    assert (other.names, other.master_addr) == ((), None)


def test_mvapich2() -> None:
    """Its mpispawns leave their own number and how many they are; and mpirun_rsh's host, if it has started them all."""
    environ = mvapich2(2, 5, 1, size=8, local_size=2, hosts=4)
    allocation = found(environ)
    assert place(allocation) == (2, 4, 1, 2)
    assert (allocation.master_addr, allocation.key) == ("node1", "mvapich-node1-3187")
    assert found(mvapich2(0, 0, 0, size=8, local_size=2, hosts=4), "node1", own=("node1",)).master_addr == "node1"
    assert found(mvapich2(0, 0, 0, size=8, local_size=2, hosts=4), "node9").master_addr is None
    tree = found(mvapich2_tree(2, 5, 1))
    assert (place(tree), tree.names, tree.master_addr) == ((2, 4, 1, 2), NODES, "node1")
    assert tree.key == found(mvapich2_tree(3, 6, 0), "node4").key
    for text in ("node1", "node1:2:0", "node1:x:0", "node1:2:0:1:node2:9999999", ":::"):
        assert found({**mvapich2_tree(2, 5, 1), "MPISPAWN_HOSTLIST": text}).names == ()


def test_mpi_on_one_host_asks_nobody() -> None:
    """All is in the environment."""
    allocation = found(hydra(0, 3, 3, size=4, local_size=4), mapping="(vector,(0,9,9))")
    assert place(allocation) == (0, 1, 3, 4)


@pytest.mark.parametrize(
    "environ",
    [
        hydra(0, 8, 0, size=8, local_size=2),
        hydra(0, 0, 2, size=8, local_size=2),
        hydra(0, 0, 0, size=8, local_size=9),
        hydra(0, 0, 0, size=8, local_size=0),
        {**hydra(0, 0, 0, size=8, local_size=2), "PMI_SIZE": "8" * 30},
    ],
)
def test_numbers_that_contradict_each_other_tell_nothing(environ: Mapping[str, str]) -> None:
    """Left-overs of an outer launcher, or anything."""
    assert detect(around(environ)) is None
