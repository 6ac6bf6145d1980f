"""What detectors make of the environments that launchers give to processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster.schedulers import BY_NAME, DETECTORS, Allocation, Surroundings, detect
from saferun.cluster.schedulers.host_list import (
    ListedHost,
    compress_hosts,
    expand_counts,
    expand_hosts,
    matching_names,
    parse_host_file,
)
from saferun.cluster.schedulers.mpi import expand_node_regex, expand_process_mapping
from saferun.errors import UsageError
from tests.unit.recorded_launchers import (
    INDEXED_JOB,
    LSF_BLAUNCH,
    LSF_JSRUN,
    OPEN_MPI_IN_SLURM,
    OPEN_MPI_IN_SLURM_HEAD,
    PBS,
    PBS_NODE_FILE,
    PLAIN,
    PYTORCH_JOB,
    PYTORCH_JOB_ELASTIC,
    PYTORCH_JOB_WITH_PET,
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
    open_mpi_4,
    open_mpi_5,
    slurm_step,
)

NODES = ("node1", "node2", "node3", "node4")


def found(
    environ: Mapping[str, str],
    host: str = "node3",
    *,
    above: Sequence[Sequence[str]] = (),
    mapping: str | None = None,
    own: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
) -> Allocation:
    allocation = detect(around(environ, host, above=above, mapping=mapping, own=own, files=files))
    assert allocation is not None
    return allocation


def around(
    environ: Mapping[str, str],
    host: str = "node3",
    *,
    above: Sequence[Sequence[str]] = (),
    mapping: str | None = None,
    own: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
) -> Surroundings:
    return Surroundings(
        environ,
        host,
        (files or {}).get,
        lambda: above,
        lambda names: [name for name in names if name in own],
        lambda key: mapping if key == "PMI_process_mapping" else None,
    )


def place(allocation: Allocation) -> tuple[int | None, int | None, int, int]:
    """Node rank, hosts, local rank, processes of the host."""
    return allocation.node_rank, allocation.hosts, allocation.local_rank, allocation.tasks


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


def test_open_mpi_5_with_hosts_of_different_size_does_not_tell() -> None:
    """The number of hosts is not to be had."""
    allocation = found(open_mpi_5(1, 3, 0, size=5, local_size=2))
    assert (allocation.hosts, allocation.node_rank) == (None, None)


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
    """Nothing is made up, and nothing goes on for ever."""
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
    """Its proxy has other options, and the job a name that all processes are told."""
    allocation = found(intel_mpi(5, 1, size=8, local_size=2), above=intel_proxy(2))
    assert place(allocation) == (2, 4, 1, 2)
    assert allocation.master_addr == "node1"
    assert allocation.key == "mpi-5ee40000-6f2a-4c1e-9f0a-0605fe800000"


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


# --------------------------------------------------------------------------------------------------------------------
# Kubernetes, LSF, PBS


@pytest.mark.parametrize("environ", [PYTORCH_JOB, PYTORCH_JOB_WITH_PET], ids=["old", "new"])
def test_a_pytorch_job(environ: Mapping[str, str]) -> None:
    """The operator tells hosts and number; PET_NNODES where WORLD_SIZE counts ranks."""
    allocation = found(environ, "train-worker-1")
    assert place(allocation) == (2, 4, 0, 1)
    assert (allocation.master_addr, allocation.master_port) == ("train-master-0", 23456)
    assert allocation.key == "pytorchjob-train-master-0"
    assert not allocation.above


def test_the_master_of_an_old_pytorch_job_has_a_name() -> None:
    """It is told localhost, where the others are told its name."""
    environ = {**PYTORCH_JOB, "RANK": "0", "MASTER_ADDR": "localhost"}
    assert found(environ, "train-master-0").key == found(PYTORCH_JOB).key


def test_the_same_variables_outside_kubernetes_are_anybodys() -> None:
    """RANK and WORLD_SIZE are exported by many a script."""
    environ = {name: value for name, value in PYTORCH_JOB.items() if not name.startswith("KUBERNETES")}
    assert detect(around(environ)) is None


def test_a_pytorch_job_that_is_elastic_is_told_by_its_options() -> None:
    """PET_* variables are defaults of options, as under torchrun."""
    assert detect(around(PYTORCH_JOB_ELASTIC)) is None


def test_a_pod_of_an_indexed_job_knows_its_number_only() -> None:
    """Whether the pods belong together it does not."""
    allocation = found(INDEXED_JOB, "sweep-3.sweep.default.svc.cluster.local")
    assert (allocation.hosts, allocation.node_rank) == (None, 3)
    assert allocation.key == "job-sweep"


def test_blaunch_and_jsrun() -> None:
    """This host finds itself among LSF's; jsrun's do not include the batch host."""
    allocation = found(LSF_BLAUNCH, "node2.cluster")
    assert place(allocation) == (1, 2, 0, 1)
    assert allocation.names == ("node1", "node2")
    allocation = found(LSF_JSRUN, "a01n02")
    assert place(allocation) == (1, 2, 3, 6)
    assert allocation.names == ("a01n01", "a01n02")
    assert detect(around(LSF_BLAUNCH, "elsewhere")) is None
    assert detect(around({**PLAIN, "LSB_JOBID": "1", "LSB_MCPU_HOSTS": "node1 8 node2 8"}, "node1")) is None


def test_pbs_only_where_it_is_asked_for() -> None:
    """The batch script has the same variables as what pbsdsh starts."""
    surroundings = around(PBS, "node2", files={PBS["PBS_NODEFILE"]: PBS_NODE_FILE})
    assert detect(surroundings) is None
    allocation = BY_NAME["pbs"](surroundings)
    assert allocation is not None
    assert place(allocation) == (1, 2, 0, 1)
    assert allocation.names == ("node1.cluster", "node2.cluster")
    assert BY_NAME["pbs"](around(PBS, "node2")) is None


def test_nothing_is_detected_where_nothing_is() -> None:
    """A shell."""
    assert detect(around(PLAIN)) is None
    assert set(DETECTORS) <= set(BY_NAME.values())


@given(
    st.dictionaries(
        st.sampled_from(
            sorted(
                {
                    *SLURM_TASK_A_RANK,
                    *OPEN_MPI_IN_SLURM,
                    *PYTORCH_JOB,
                    *LSF_JSRUN,
                    *hydra(0, 0, 0, size=1, local_size=1),
                }
            )
        ),
        st.one_of(st.sampled_from(["0", "1", "2", "-1", "", "node[1-2]", "2(x2)", "²", "x"]), st.text(max_size=8)),
    ),
    st.text(max_size=20),
)
def test_no_environment_is_too_odd(environ: dict[str, str], mapping: str) -> None:
    """A detector answers or does not; what it answers holds together."""
    for detector in (*DETECTORS, *BY_NAME.values()):
        allocation = detector(around(environ, mapping=mapping))
        if allocation is not None:
            assert 0 <= allocation.local_rank < allocation.tasks
            if allocation.hosts is not None and allocation.node_rank is not None:
                assert 0 <= allocation.node_rank < allocation.hosts
            assert len(allocation.names) in {0, allocation.hosts}


# --------------------------------------------------------------------------------------------------------------------
# Lists of hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-4,7]", ["node1", "node2", "node3", "node4", "node7"]),
        ("node[1-2],gpu-a[01-02]b,x", ["node1", "node2", "gpu-a01b", "gpu-a02b", "x"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a b\nc", ["a", "b", "c"]),
        ("node[1]", ["node1"]),
        ("", []),
        (",,", []),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("[2001:db8::1],b", ["[2001:db8::1]", "b"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    """Slurm's and pdsh's, in Python."""
    assert list(expand_hosts(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        "node[1-",
        "node1]",
        "node[[1]]",
        "node[]",
        "node[a-b]",
        "node[4-1]",
        "node[1-9999999]",
        "a[1-999]b[1-999]",
        "a[-1]",
    ],
)
def test_what_is_no_host_list(text: str) -> None:
    """Refused, and quickly."""
    with pytest.raises(ValueError, match=r"\w"):
        expand_hosts(text)


NUMBERS = st.integers(0, 1100)
PREFIXES = st.sampled_from(["node", "gpu-a", "n", "x0y", "10.0.0.", ""])


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One item of a host list, and its names by definition."""
    before, after = draw(PREFIXES), draw(st.sampled_from(["", "b", "-ib"]))
    ranges = draw(st.lists(st.tuples(NUMBERS, st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=3))
    parts = [f"{low:0{width}}-{low + more}" for low, more, width in ranges]
    digits = [f"{i:0{max(width, len(str(low)))}}" for low, more, width in ranges for i in range(low, low + more + 1)]
    return f"{before}[{','.join(parts)}]{after}", [f"{before}{each}{after}" for each in digits]


@given(st.lists(brackets(), max_size=4))
def test_brackets_are_what_they_stand_for(items: list[tuple[str, list[str]]]) -> None:
    """Each range keeps the width of its first number."""
    text = ",".join(item for item, _ in items)
    assert list(expand_hosts(text)) == [name for _, names in items for name in names]


@given(st.lists(brackets(), min_size=2, max_size=2))
def test_two_brackets_are_all_pairs(items: list[tuple[str, list[str]]]) -> None:
    """The last one counts fastest."""
    (first, firsts), (second, seconds) = items
    assert list(expand_hosts(first + second)) == ["".join(pair) for pair in product(firsts, seconds)]


NAMES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["node", "n0", "gpu-a"]), st.integers(0, 120), st.sampled_from([1, 2, 3])).map(
            lambda made: f"{made[0]}{made[1]:0{made[2]}}"
        ),
        st.sampled_from(["login", "10.0.0.7", "node", "a1b", "7", "node1.cluster", "n00"]),
    ),
    max_size=12,
)


@given(NAMES)
def test_compressing_and_expanding_gives_the_same_hosts(names: list[str]) -> None:
    """In the same order, with the same zeros."""
    assert list(expand_hosts(compress_hosts(names))) == names


def test_many_hosts_are_few_words() -> None:
    """They stand in one line for people."""
    assert compress_hosts(f"node{i}" for i in range(1, 1001)) == "node[1-1000]"
    assert compress_hosts(["node1", "node2", "node4", "login"]) == "node[1-2,4],login"
    assert compress_hosts(["node07"]) == "node07"


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("3,1(x2)", [3, 1, 1]), ("1(x1)", [1])]
)
def test_counts(text: str, counts: list[int]) -> None:
    """Slurm's short form."""
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "2(x9999999)", "-1", "1,,2"])
def test_what_are_no_counts(text: str) -> None:
    """Refused."""
    with pytest.raises(ValueError, match="neither N nor"):
        expand_counts(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1 slots=8\nnode2 slots=4 max-slots=8\n", [("node1", 8), ("node2", 4)]),
        ("# MPICH\nnode1:8\n\nnode2:4   # the small one\n", [("node1", 8), ("node2", 4)]),
        ("node1\nnode2", [("node1", None), ("node2", None)]),
        ("node1\nnode1\nnode2\nnode2\n", [("node1", 2), ("node2", 2)]),
        ("node[1-2] slots=8", [("node1", 8), ("node2", 8)]),
        ("[2001:db8::1]:4\n2001:db8::2\n", [("[2001:db8::1]", 4), ("2001:db8::2", None)]),
    ],
)
def test_host_files(text: str, hosts: list[tuple[str, int | None]]) -> None:
    """Open MPI's and DeepSpeed's, MPICH's, and PBS's with a line a rank."""
    assert parse_host_file(text, "hosts") == tuple(ListedHost(*host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "place_of_it"),
    [
        ("node1\nnode2:x\n", "hosts:2"),
        ("node1 slots=0", "hosts:1"),
        ("a b", "hosts:1"),
        ("\n#\n", "hosts"),
        ("n[1", "hosts:1"),
    ],
)
def test_what_is_wrong_with_a_host_file_is_told_with_its_line(text: str, place_of_it: str) -> None:
    """File and line."""
    with pytest.raises(UsageError) as caught:
        parse_host_file(text, "hosts")
    assert caught.value.what.startswith(place_of_it)


@pytest.mark.parametrize(
    ("names", "host", "places"),
    [
        (["node1", "node2"], "node2", [1]),
        (["node1", "node2"], "node2.cluster", [1]),
        (["node1.cluster", "node2.cluster"], "node2", [1]),
        (["node1.a", "node1.b"], "node1.b", [1]),
        (["node1.a", "node1.b"], "node1", [0, 1]),
        (["node1.a"], "node1.b", []),
        (["node1"], "node10", []),
    ],
)
def test_a_host_knows_its_name(names: list[str], host: str, places: list[int]) -> None:
    """In full, or up to the first dot where one of the two is short; two full names that differ are two hosts."""
    assert matching_names(names, host) == places
