"""What detectors make of PBS, LSF, Flux, HTCondor, pods, and what clouds provide."""

from __future__ import annotations

import pytest

from saferun.cluster.schedulers import BY_NAME, detect, unused_hosts
from tests.unit.cluster.scheduling import around, found, place
from tests.unit.recorded_launchers import PLAIN, SLURM_BATCH_SCRIPT, SLURM_TASK_A_HOST
from tests.unit.recorded_schedulers import (
    HTCONDOR,
    HTCONDOR_JOB_AD,
    INDEXED_JOB,
    INDEXED_JOB_HOSTS,
    JOB_SET,
    JOB_SET_HOSTS,
    LEADER_WORKER_SET,
    LSF_BATCH_SCRIPT,
    LSF_BLAUNCH,
    LSF_BLAUNCH_A_SLOT,
    PBS_BATCH_SCRIPT,
    PBS_NODE_FILE,
    PBS_SPAWNED,
    SAGEMAKER,
    aws_batch,
    flux,
    ray_train,
)

NODES = ("node1", "node2", "node3", "node4")
FILE = PBS_BATCH_SCRIPT["PBS_NODEFILE"]


# --------------------------------------------------------------------------------------------------------------------
# PBS and LSF


def test_what_pbsdsh_starts_is_told_its_number_and_no_more() -> None:
    """On other hosts than the first there is no list of hosts; it has to be asked for, and to be told the rest."""
    assert detect(around(PBS_SPAWNED, "node2")) is None
    allocation = BY_NAME["pbs"](around(PBS_SPAWNED, "node2"))
    assert allocation is not None
    assert (allocation.node_rank, allocation.hosts, allocation.key) == (1, None, "pbs-8817.pbs01")


def test_a_process_of_blaunch_for_each_slot_is_on_its_own() -> None:
    """A host has several of them, and which is which cannot be told; ``blaunch -z`` starts one for each host."""
    assert detect(around(LSF_BLAUNCH_A_SLOT, "node2")) is None
    assert place(found(LSF_BLAUNCH, "node2")) == (1, 2, 0, 1)


def test_elements_of_a_job_array_do_not_meet() -> None:
    """LSF gives them one id."""
    element = {**LSF_BLAUNCH, "LSB_JOBINDEX": "3"}
    assert (found(element, "node2").key, found(LSF_BLAUNCH, "node2").key) == ("lsf-90210[3]", "lsf-90210")
    assert found({**LSF_BLAUNCH, "LSB_JOBINDEX": "0"}, "node2").key == "lsf-90210"


def test_hosts_that_a_batch_script_leaves_out_are_counted() -> None:
    """For the line that says what would start saferun on all of them."""
    assert unused_hosts(around(SLURM_BATCH_SCRIPT)) == (6, "srun")
    assert unused_hosts(around(LSF_BATCH_SCRIPT))[0] == 2
    assert unused_hosts(around(PBS_BATCH_SCRIPT, files={FILE: PBS_NODE_FILE}))[0] == 2
    nothing = (SLURM_TASK_A_HOST, LSF_BLAUNCH, PBS_SPAWNED, PBS_BATCH_SCRIPT, PLAIN)
    assert [unused_hosts(around(environ)) for environ in nothing] == [(0, "")] * len(nothing)
    assert unused_hosts(around(PBS_BATCH_SCRIPT, files={FILE: "\udc80 a b c\n"})) == (0, "")


# --------------------------------------------------------------------------------------------------------------------
# Flux and HTCondor


def test_flux_one_task_a_host() -> None:
    """``flux run -N4``: the order of its nodes is the process manager's, and their names are those of its command."""
    printed = {"flux hostlist local": "node[1-4]\n"}
    allocation = found(flux(2, 0, size=4, hosts=4), mapping="(vector,(0,4,1))", printed=printed)
    assert place(allocation) == (2, 4, 0, 1)
    assert (allocation.names, allocation.master_addr) == (NODES, "node1")
    assert allocation.source == "Flux job \u01922oJiLHBd"
    assert allocation.tasks_by_host == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("mapping", "rank", "local", "expected"),
    [
        ("(vector,(0,4,2))", 5, 1, (2, 4, 1, 2)),
        ("(vector,(0,4,1))", 6, 1, (2, 4, 1, 2)),  # --taskmap=cyclic
        (None, 5, 1, (2, 4, 1, 2)),  # -o pmi=off: blocks are the default
        (None, 6, 1, (None, 4, 1, 1)),
        ("(vector,(0,2,4))", 5, 1, (2, 4, 1, 2)),  # not of this job
        ("nonsense", 5, 1, (2, 4, 1, 2)),
    ],
)
def test_flux_several_tasks_a_host(
    mapping: str | None, rank: int, local: int, expected: tuple[int | None, int, int, int]
) -> None:
    """By the process manager's mapping, else in blocks, where the local number agrees."""
    assert place(found(flux(rank, local, size=8, hosts=4), mapping=mapping)) == expected


def test_flux_names_that_do_not_fit_are_none() -> None:
    """Of another job, or an old Flux that has no such command: then the user says who is first."""
    for text in (None, "node[1-3]", "node[", "node[4-1]", "other[1-4],node3"):
        printed = {} if text is None else {"flux hostlist local": text}
        allocation = found(flux(2, 0, size=4, hosts=4), mapping="(vector,(0,4,1))", printed=printed)
        assert (allocation.names, allocation.master_addr) == ((), None)
        assert place(allocation) == (2, 4, 0, 1)


def test_flux_on_one_host_asks_nobody() -> None:
    """And a batch script, which has no rank, is no task."""
    assert place(found(flux(3, 3, size=8, hosts=1))) == (0, 1, 3, 8)
    assert detect(around({**PLAIN, "FLUX_URI": "local:///tmp/flux/local-0"})) is None


def test_htcondor() -> None:
    """The parallel universe; a job of any other has no number of nodes."""
    files = {HTCONDOR["_CONDOR_JOB_AD"]: HTCONDOR_JOB_AD}
    allocation = found(HTCONDOR, files=files)
    assert place(allocation) == (2, 4, 0, 1)
    assert (allocation.source, allocation.key) == ("HTCondor job 118", "htcondor-118")
    assert allocation.master_addr is None
    assert allocation.uniform
    assert "cluster118" in found(HTCONDOR).key
    assert detect(around({**PLAIN, "_CONDOR_PROCNO": "2", "_CONDOR_SCRATCH_DIR": "/x"})) is None


# --------------------------------------------------------------------------------------------------------------------
# Pods


def test_the_first_pod_of_an_indexed_job_is_known_by_its_service() -> None:
    """A pod with a subdomain finds its own full name in its hosts file, and the first one's name is alike."""
    allocation = found({**INDEXED_JOB, "HOSTNAME": "train-3"}, "train-3", files={"/etc/hosts": INDEXED_JOB_HOSTS})
    assert (allocation.node_rank, allocation.master_addr) == (3, "train-0.train.default.svc.cluster.local")
    assert allocation.key == "job-train"
    allocation = found(JOB_SET, "llm-workers-0-2", files={"/etc/hosts": JOB_SET_HOSTS})
    assert allocation.master_addr == "llm-workers-0-0.llm.team.svc.cluster.local"


def test_a_pod_that_was_restarted_has_the_same_place() -> None:
    """Its pod has another name and address; its host name has only the job's name and its number."""
    again = INDEXED_JOB_HOSTS.replace("10.244.1.9", "10.244.7.2")
    pods = [found(INDEXED_JOB, "train-3", files={"/etc/hosts": text}) for text in (INDEXED_JOB_HOSTS, again)]
    assert pods[0] == pods[1]


@pytest.mark.parametrize("text", ["", "10.0.0.1 train-3\n", "10.0.0.1 x.y train-3", "# train-3.a train-3", "\udc80"])
def test_a_pod_without_a_service_does_not_know_the_first(text: str) -> None:
    """Nor one whose host name is not the job's, as with hostNetwork."""
    assert found(INDEXED_JOB, "train-3", files={"/etc/hosts": text}).master_addr is None
    assert found(INDEXED_JOB, "gpu7", files={"/etc/hosts": INDEXED_JOB_HOSTS}).master_addr is None


def test_a_leader_worker_set() -> None:
    """Each group is a job, with the leader as its first host."""
    allocation = found(LEADER_WORKER_SET, "llm-1-2")
    assert place(allocation) == (2, 4, 0, 1)
    assert (allocation.master_addr, allocation.key) == ("llm-1.llm.default", "lws-llm-1.llm.default")
    assert not allocation.above
    for name in ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"):
        for value in ("", "x", "-1"):
            if (name, value) not in {("LWS_LEADER_ADDRESS", "x"), ("LWS_LEADER_ADDRESS", "-1")}:
                assert detect(around({**LEADER_WORKER_SET, name: value})) is None


# --------------------------------------------------------------------------------------------------------------------
# Clouds


def test_sagemaker() -> None:
    """The order of its list is that of the node ranks; jobs are told apart by the training job's name."""
    allocation = found(SAGEMAKER, "ip-10-0-5-17.ec2.internal")
    assert place(allocation) == (1, 3, 0, 1)
    assert allocation.names == ("algo-1", "algo-2", "algo-3")
    assert (allocation.master_addr, allocation.key) == ("algo-1", "sagemaker-llm-2026-11-25-18-00-00-000")
    assert found({**SAGEMAKER, "TRAINING_JOB_NAME": "other"}).key == "sagemaker-other"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (("SM_HOSTS", value))
            for value in ("", "[", "{}", "null", "[]", '["algo-1"]', '"algo-2"', "[1,2]", "[" * 5000)
        ),
        *((("SM_HOSTS", value)) for value in ('["algo-2","algo-2"]', '["algo-2",""]', '["algo-2",null]')),
        ("SM_HOSTS", '["algo-2","a\\u001b[31m"]'),
        ("SM_HOSTS", '["algo-2","' + "a" * 300 + '"]'),
        ("SM_CURRENT_HOST", "algo-9"),
        ("SM_CURRENT_HOST", ""),
    ],
)
def test_a_list_of_sagemakers_that_makes_no_sense_is_none(name: str, value: str) -> None:
    """Whatever somebody has exported."""
    assert detect(around({**SAGEMAKER, name: value})) is None


def test_what_else_sagemaker_says_may_be_anything() -> None:
    """Only the job's name is taken from it."""
    for value in ("", "[", "7", "[]", '{"job_name": 7}', '{"job_name": null}', "[" * 5000):
        assert place(found({**SAGEMAKER, "SM_TRAINING_ENV": value})) == (1, 3, 0, 1)


def test_aws_batch() -> None:
    """The main node is host 0, whatever its number; it is not told its own address."""
    assert [found(aws_batch(i)).node_rank for i in range(4)] == [0, 1, 2, 3]
    assert [found(aws_batch(i, main=2)).node_rank for i in range(4)] == [1, 2, 0, 3]
    assert found(aws_batch(3)).master_addr == "10.0.5.17"
    assert found(aws_batch(0), "ip-10-0-5-17").master_addr == "ip-10-0-5-17"
    assert len({found(aws_batch(i)).key for i in range(4)}) == 1
    assert detect(around({**aws_batch(1), "AWS_BATCH_JOB_NODE_INDEX": "4"})) is None


def test_ray_train() -> None:
    """Only its workers are told ranks; their own process group has the port that they are told."""
    assert place(found(ray_train(5, size=8, local_size=2))) == (2, 4, 1, 2)
    assert place(found(ray_train(3, size=4, local_size=1))) == (3, 4, 0, 1)
    allocation = found(ray_train(5, size=8, local_size=2))
    assert (allocation.master_addr, allocation.master_port) == ("10.0.5.17", None)
    assert detect(around({**PLAIN, "RAY_JOB_ID": "02000000"})) is None
    assert detect(around({**ray_train(5, size=8, local_size=2), "NODE_RANK": "1"})) is None
    assert detect(around({**ray_train(5, size=7, local_size=2)})) is None
