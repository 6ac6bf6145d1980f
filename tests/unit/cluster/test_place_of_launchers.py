"""The place that MPI, pods, lists of hosts and process managers give to this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from saferun.cluster.placement.pmi import ask_process_manager, processes_above
from saferun.cluster.placement.several_hosts import candidate_ports
from saferun.config import TaskConfig
from tests.unit.above import Above
from tests.unit.cluster.placing import (
    HERE,
    config_of,
    place,
    refusal,
)
from tests.unit.recorded_launchers import SLURM_TASK_A_HOST, SLURM_TASK_A_RANK, hydra, open_mpi_4, open_mpi_5, prted
from tests.unit.recorded_schedulers import (
    INDEXED_JOB,
    PYTORCH_JOB,
    PYTORCH_JOB_ELASTIC,
    PYTORCH_JOB_WITH_PET,
    TRAIN_JOB,
)


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


# --------------------------------------------------------------------------------------------------------------------
# MPI and Kubernetes


def test_open_mpi_needs_no_options() -> None:
    """On four hosts."""
    config = config_of(environ=open_mpi_4(2, 5, 1, size=8, local_size=2, hosts=4))
    assert place(config) == (4, 4, 2)
    assert config.hosts.task == TaskConfig(1, 2, "openmpi-2102788097-2")
    assert config.rendezvous.master_addr == "node1"


def test_all_processes_of_a_job_get_the_same_from_open_mpi() -> None:
    """But for mpirun's own host, which does not know the names; there it is its own."""
    configs = [
        config_of(environ=open_mpi_4(node, 2 * node + local, local, size=8, local_size=2, hosts=4))
        for node in range(4)
        for local in range(2)
    ]
    assert len({config.rendezvous.run_id for config in configs}) == 1
    assert len({config.rendezvous.ports for config in configs}) == 1
    assert {config.rendezvous.master_addr for config in configs} == {"node1", HERE}
    assert [config.hosts.node_rank for config in configs] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_mpi_does_not_tell_is_asked_for(above: Above) -> None:
    """In two lines; and an answer to it is enough."""
    unequal = open_mpi_5(1, 3, 0, size=5, local_size=2)
    above.lines = prted(1, 3)
    assert "how many hosts there are" in refusal(environ=unequal).what
    assert "--hosts" in refusal(environ=unequal).hint
    error = refusal("--scheduler", "auto", "--nnodes", "3", environ=unequal)
    assert "which of 3 hosts" in error.what
    assert "--hosts" in error.hint
    config = config_of("--nnodes", "3", "--node-rank", "1", "--master-addr", "node1", environ=unequal)
    assert place(config) == (3, 3, 1)
    named = config_of("--hosts", f"node1,{HERE},node3", environ=unequal)
    assert place(named) == (3, 3, 1)
    assert named.rendezvous.master_addr == "node1"


def test_the_master_that_mpiexec_does_not_tell(above: Above) -> None:
    """MASTER_ADDR is how people say it."""
    above.lines = [["/usr/bin/hydra_pmi_proxy", "--pmi-port", "0"]]
    environ = {name: value for name, value in hydra(2, 5, 1, size=8, local_size=2).items() if name != "PMI_FD"}
    error = refusal(environ=environ)
    assert "which host has rank 0" in error.what
    assert "--master-addr" in error.hint
    assert config_of(environ={**environ, "MASTER_ADDR": "node1"}).rendezvous.master_addr == "node1"
    asked = ("--scheduler", "pmi", "--master-addr", "n1")
    config = config_of(*asked, environ={**environ, "MASTER_ADDR": "node1"})
    assert config.rendezvous.master_addr == "n1"
    assert place(config) == (4, 4, 2)


def test_a_loopback_master_is_none_of_several_hosts(above: Above) -> None:
    """Base images and shell profiles set it; the others would wait for their own host."""
    above.lines = [["sh"]]
    environ = {name: value for name, value in hydra(2, 5, 1, size=8, local_size=2).items() if name != "PMI_FD"}
    for master in ("localhost", "127.0.0.1", "::1"):
        config = config_of(environ={**environ, "MASTER_ADDR": master})
        assert not config.hosts.spans_hosts
        assert "so it is a job of its own" in config.hosts.note


def test_master_addr_in_the_environment_is_ignored_otherwise() -> None:
    """As under torchrun: it may be a left-over, and the scheduler knows better."""
    environ = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    assert config_of("--nnodes", "2", environ=environ).rendezvous.master_addr == "127.0.0.1"
    config = config_of(environ={**SLURM_TASK_A_HOST, **environ})
    assert config.rendezvous.master_addr == "node1"
    assert 1 not in config.rendezvous.ports


def test_a_pytorch_job_needs_no_options() -> None:
    """Its operator tells where to meet; PET_* say the same in newer releases."""
    for environ in (PYTORCH_JOB, PYTORCH_JOB_WITH_PET):
        config = config_of(environ=environ)
        assert place(config) == (4, 4, 2)
        assert (config.rendezvous.master_addr, config.rendezvous.ports) == ("train-master-0", (23456,))
    assert config_of(environ=PYTORCH_JOB_WITH_PET).nproc_per_node == 8


def test_pods_are_told_nothing_but_what_is_missing() -> None:
    """What PET_* and options say stands; the rest of an operator's words only where they are about the same hosts."""
    assert not config_of("--nnodes", "1", environ=PYTORCH_JOB_WITH_PET).hosts.spans_hosts
    config = config_of("--nnodes", "2", "--master-addr", "a", "--master-port", "9", environ=PYTORCH_JOB)
    assert (place(config), config.rendezvous.master_addr) == ((2, 2, 0), "a")
    config = config_of("--node-rank", "1", "--master-addr", "a", environ=PYTORCH_JOB_WITH_PET)
    assert (place(config), config.rendezvous.master_addr, config.rendezvous.ports) == ((4, 4, 1), "a", (29500,))


def test_pods_with_options_in_their_environment() -> None:
    """PET_* are defaults of options, and nothing has to be detected."""
    config = config_of(environ=PYTORCH_JOB_ELASTIC)
    assert place(config) == (1, 4, None)
    assert (config.rendezvous.backend, config.rendezvous.endpoint) == ("c10d", "train-worker-0:23456")
    config = config_of(environ=TRAIN_JOB)
    assert place(config) == (4, 4, 3)
    assert (config.rendezvous.master_addr, config.rendezvous.ports) == ("train-node-0-0.train", (29400,))


def test_pods_of_an_indexed_job_are_one_job_where_somebody_says_so() -> None:
    """A sweep has them too."""
    assert not config_of(environ=INDEXED_JOB).hosts.spans_hosts
    asked = ("--scheduler", "kubernetes", "--nnodes", "4")
    assert place(config_of(*asked, "--master-addr", "train-0.train", environ=INDEXED_JOB)) == (4, 4, 3)
    assert "--master-addr" in refusal(*asked, environ=INDEXED_JOB).hint
    other = config_of("--nnodes", "8", "--node-rank", "7", "--master-addr", "x", environ=INDEXED_JOB)
    assert place(other) == (8, 8, 7)


@pytest.mark.parametrize("of_environ", [False, True])
def test_options_that_leave_out_the_node_rank_mean_the_first_host_in_a_pod_as_well(of_environ: bool) -> None:
    """As under torchrun: a number of hosts that the user wrote switches detection off. A line says what it found."""
    written = () if of_environ else ("--nnodes", "4")
    environ = {**INDEXED_JOB, **({"PET_NNODES": "4"} if of_environ else {})}
    config = config_of(*written, "--master-addr", "train-0.train", environ=environ)
    assert place(config) == (4, 4, 0)
    assert config.hosts.note == (
        "this is node rank 0 by its options; JOB_COMPLETION_INDEX=3 counts with --scheduler kubernetes"
    )
    config = config_of("--nnodes", "4", "--master-addr", "train-0.train", environ=PYTORCH_JOB)
    assert place(config) == (4, 4, 0)
    assert not config_of("--nnodes", "4", "--node-rank", "0", "--master-addr", "a", environ=INDEXED_JOB).hosts.note


@pytest.mark.parametrize("devices", [2, 5])
def test_devices_are_counted_once(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may have to be asked, which takes as long as importing it."""
    asked: list[str] = []

    def count(value: str, *_: object) -> int:
        asked.append(value)
        return devices

    monkeypatch.setattr("saferun.linux.gpus.resolve_nproc_per_node", count)
    config = config_of("--nproc-per-node", "gpu", environ=SLURM_TASK_A_RANK)
    assert asked == ["gpu"]
    assert (config.nproc_per_node, config.hosts.spans_hosts) == ((1, True) if devices == 2 else (devices, False))
    assert config.settings["nproc_per_node"].value == "gpu"


def test_jobs_that_share_a_console_report_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep, ``srun -n8 saferun --standalone sweep.py``: no other process knows of the failure of this one."""
    monkeypatch.setattr("saferun.linux.streams.is_own_output", lambda _: False)
    together = config_of(environ=SLURM_TASK_A_RANK).hosts
    assert (together.shares_console, together.prints_start_lines) == (True, False)
    for arguments in (("--standalone",), ("--nnodes", "1"), ("--nproc-per-node", "5"), ("--rdzv-id", "7")):
        alone = config_of(*arguments, environ=SLURM_TASK_A_RANK).hosts
        # What all would say at the start, one says.
        assert (alone.shares_console, alone.prints_start_lines) == (False, False)
        assert not config_of(*arguments, "--console", "shared", environ=SLURM_TASK_A_RANK).hosts.shares_console


# --------------------------------------------------------------------------------------------------------------------
# Lists of hosts


def test_a_list_of_hosts() -> None:
    """For pdsh: the same command on each host."""
    config = config_of("--hosts", f"node[1-2],{HERE},node4")
    assert place(config) == (4, 4, 2)
    assert config.hosts.names == ("node1", "node2", HERE, "node4")
    assert config.rendezvous.master_addr == "node1"
    assert config.rendezvous.ports == (29500,)
    assert not config_of("--hosts", HERE).hosts.spans_hosts


def test_a_host_finds_itself_by_any_address() -> None:
    """Where the list has addresses, or names that are not what the host calls itself."""
    assert place(config_of("--hosts", "203.0.113.1,127.0.0.1")) == (2, 2, 1)
    error = refusal("--hosts", "127.0.0.1,localhost")
    assert "127.0.0.1, localhost are all this host" in error.what
    assert HERE in error.what
    assert place(config_of("--hosts", "127.0.0.1,localhost", "--node-rank", "1")) == (2, 2, 1)
    assert "--node-rank 0, but --hosts" in refusal("--hosts", "203.0.113.1,127.0.0.1", "--node-rank", "0").what


def test_a_host_that_is_not_in_the_list_says_what_it_compared() -> None:
    """Its own name, and the list's."""
    what = refusal("--hosts", "203.0.113.[1-3]").what
    assert HERE in what
    assert "203.0.113.1,203.0.113.2,203.0.113.3" in what
    assert "203.0.113.9" in refusal("--hosts", "203.0.113.9").what


def test_a_host_file_may_say_how_many_ranks() -> None:
    """Slots are ranks; an option may ask for fewer."""
    Path("hosts").write_text(f"node1 slots=4\n{HERE} slots=2\n")
    config = config_of("--hostfile", "hosts")
    assert place(config) == (2, 2, 1)
    assert config.nproc_per_node == 2
    assert config_of("--hostfile", "hosts", "--nproc-per-node", "1").nproc_per_node == 1
    assert "room for 2 ranks" in refusal("--hostfile", "hosts", "--nproc-per-node", "3").what
    Path("hosts").write_text(f"{HERE} slots=3\n")
    assert config_of("--hostfile", "hosts").nproc_per_node == 3


def test_hosts_of_a_list_with_c10d() -> None:
    """They meet at the first one."""
    config = config_of("--hosts", f"node1,{HERE}", "--rdzv-backend", "c10d")
    assert config.rendezvous.endpoint == "node1:29400"
    assert place(config) == (2, 2, None)
    assert config.hosts.names == ("node1", HERE)


def test_candidate_ports() -> None:
    """The same everywhere, different for each job, below those that Linux hands out."""
    ports = candidate_ports("slurm-4711-0")
    assert ports == candidate_ports("slurm-4711-0")
    assert len(set(ports)) == 8
    assert all(20000 <= port < 32768 for port in ports)
    assert not set(ports) & set(candidate_ports("slurm-4711-1"))


# --------------------------------------------------------------------------------------------------------------------
# What stands above


def test_the_processes_above_are_seen() -> None:
    """The nearest first."""
    above = processes_above()
    assert above.lines
    assert all(isinstance(word, str) for line in above.lines for word in line)
    assert all(i < len(above.lines) for i in above.at_terminal)


def serve(answers: Mapping[str, str]) -> tuple[socket.socket, list[str], threading.Thread]:
    """A process manager that answers commands by their first words, and what it was asked."""
    ours, theirs = socket.socketpair()
    asked: list[str] = []

    def answer() -> None:
        with theirs, theirs.makefile("rw", encoding="ascii") as lines:
            for line in lines:
                asked.append(line.strip())
                known = [text for begin, text in answers.items() if line.startswith(begin)]
                if not known:
                    return
                lines.write(f"{known[0]}\n")
                lines.flush()

    thread = threading.Thread(target=answer)
    thread.start()
    return ours, asked, thread


def test_the_process_manager_is_asked_and_left() -> None:
    """In lines; and told that nobody goes on with it."""
    ours, asked, thread = serve(
        {
            "cmd=init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "cmd=get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1",
            "cmd=get ": "cmd=get_result rc=0 msg=success value=(vector,(0,2,2))",
            "cmd=finalize": "cmd=finalize_ack",
        }
    )
    with ours:
        assert ask_process_manager("PMI_process_mapping", {"PMI_FD": str(ours.fileno())}) == "(vector,(0,2,2))"
    thread.join()
    assert asked == [
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_my_kvsname",
        "cmd=get kvsname=kvs_1 key=PMI_process_mapping",
        "cmd=finalize",
    ]


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"cmd=init": "cmd=response_to_init rc=0"},
        {"cmd=init": "x", "cmd=get_my": "kvsname=k", "cmd=get ": "cmd=get_result rc=-1 msg=no", "cmd=fin": "x"},
    ],
)
def test_a_process_manager_that_does_not_know_is_no_trouble(answers: Mapping[str, str]) -> None:
    """It went away, or has nothing under that key."""
    ours, _, thread = serve(answers)
    with ours:
        assert ask_process_manager("PMI_process_mapping", {"PMI_FD": str(ours.fileno())}) is None
    thread.join()


@pytest.mark.parametrize("text", ["", "x", "-1", "999999", "9" * 30])
def test_a_descriptor_that_is_none(text: str) -> None:
    """The variable was inherited, the descriptor was not."""
    assert ask_process_manager("PMI_process_mapping", {"PMI_FD": text}) is None


def test_a_descriptor_of_something_else_is_left_alone() -> None:
    """A file that has that number."""
    with open("other", "w+b") as file:
        assert ask_process_manager("PMI_process_mapping", {"PMI_FD": str(file.fileno())}) is None
    assert Path("other").read_bytes() == b""
