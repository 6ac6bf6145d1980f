"""Kubernetes, LSF and PBS; lists of hosts and host files."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster.schedulers import BY_NAME, DETECTORS, detect
from saferun.cluster.schedulers.host_list import (
    ListedHost,
    compress_hosts,
    expand_counts,
    expand_hosts,
    matching_names,
    parse_host_file,
)
from saferun.errors import UsageError
from tests.unit.cluster.scheduling import (
    around,
    found,
    place,
)
from tests.unit.recorded_launchers import OPEN_MPI_IN_SLURM, PLAIN, SLURM_TASK_A_RANK, hydra
from tests.unit.recorded_schedulers import (
    INDEXED_JOB,
    LSF_BLAUNCH,
    LSF_JSRUN,
    PBS,
    PBS_BATCH_SCRIPT,
    PBS_NODE_FILE,
    PYTORCH_JOB,
    PYTORCH_JOB_ELASTIC,
    PYTORCH_JOB_WITH_PET,
)

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
    assert BY_NAME["pbs"](around(PBS_BATCH_SCRIPT, "node1")) is None


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
    ("names", "host", "indexes"),
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
def test_a_host_knows_its_name(names: list[str], host: str, indexes: list[int]) -> None:
    """In full, or up to the first dot where one of the two is short; two full names that differ are two hosts."""
    assert matching_names(names, host) == indexes
