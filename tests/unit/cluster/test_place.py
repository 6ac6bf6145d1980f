"""The place of a process in its job, from options and what schedulers told."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun.cli.main import read_config
from saferun.cluster.placement.pmi import ask_process_manager, command_lines_above
from saferun.cluster.placement.several_hosts import candidate_ports
from saferun.config import HostsConfig, LaunchConfig, TaskConfig
from saferun.errors import UsageError
from tests.unit.recorded_launchers import (
    INDEXED_JOB,
    LSF_JSRUN,
    OPEN_MPI_IN_SLURM,
    PLAIN,
    PYTORCH_JOB,
    PYTORCH_JOB_ELASTIC,
    PYTORCH_JOB_WITH_PET,
    SLURM_BATCH_SCRIPT,
    SLURM_INTERACTIVE_STEP,
    SLURM_LOGIN_SHELL,
    SLURM_TASK_A_HOST,
    SLURM_TASK_A_RANK,
    SLURM_UNEQUAL,
    TRAIN_JOB,
    hydra,
    open_mpi_4,
    open_mpi_5,
    slurm_step,
)

ENVIRON = {"PATH": "/usr/bin:/bin"}
NODES = ("node1", "node2", "node3", "node4")
HERE = socket.gethostname()
ALONE_IN_A_STEP = slurm_step(0, 0, 0, nodes="node1", hosts=1, tasks=1, tasks_by_host="1")
EIGHT_ON_A_HOST = slurm_step(0, 5, 5, nodes="node1", hosts=1, tasks=8, tasks_by_host="8", gtids="0,1,2,3,4,5,6,7")


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def config_of(*arguments: str, environ: Mapping[str, str] | None = None) -> LaunchConfig:
    return read_config([*arguments, "train.py"], {**ENVIRON, **(environ or {})})


def refusal(*arguments: str, environ: Mapping[str, str] | None = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        config_of(*arguments, environ=environ)
    assert caught.value.exit_code == 2
    assert re.fullmatch(r"saferun: [^\n]+\nhint: [^\n]+", str(caught.value))
    return caught.value


def place(config: LaunchConfig) -> tuple[int, int, int | None]:
    return config.hosts.least, config.hosts.most, config.hosts.node_rank


# --------------------------------------------------------------------------------------------------------------------
# Options alone, as under torchrun


def test_a_launch_without_options_is_alone() -> None:
    """Nothing about hosts is known or needed."""
    config = config_of()
    assert config.hosts == HostsConfig()
    assert not config.hosts.together
    assert config.rendezvous.ports == ()
    assert config.rendezvous.endpoint == ""


def test_static_hosts_by_hand() -> None:
    """Torchrun's command line."""
    arguments = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "29511")
    config = config_of(*arguments, "--nproc-per-node", "3")
    assert place(config) == (2, 2, 1)
    assert config.nproc_per_node == 3
    rendezvous = config.rendezvous
    assert (rendezvous.backend, rendezvous.run_id) == ("static", "none")
    assert (rendezvous.master_addr, rendezvous.master_port, rendezvous.ports) == ("127.0.0.1", 29511, (29511,))
    assert config.hosts.detected == ""
    assert not config.hosts.stop_with_parent


def test_the_port_of_several_hosts_is_torchruns() -> None:
    """Without one; one host alone gets a free one."""
    assert config_of("--nnodes", "2").rendezvous.ports == (29500,)
    assert config_of("--nnodes", "1:2").rendezvous.ports == (29500,)


def test_static_rendezvous_counts_no_hosts() -> None:
    """A range says how many there may be, and static rendezvous waits for that many, as under torchrun."""
    assert place(config_of("--nnodes", "1:3", "--master-port", "1234")) == (3, 3, 0)
    assert place(config_of("--nnodes", "1:3", "--rdzv-backend", "c10d")) == (1, 3, None)


def test_static_endpoint_of_several_hosts() -> None:
    """It wins over the master's address; IPv6 in brackets."""
    arguments = ("--nnodes=2", "--rdzv-endpoint=[2001:db8::1]:1234", "--master-addr=x", "--master-port=9")
    rendezvous = config_of(*arguments).rendezvous
    assert (rendezvous.master_addr, rendezvous.ports) == ("2001:db8::1", (1234,))


@pytest.mark.parametrize(
    ("endpoint", "written", "address"),
    [
        ("node1:1234", "node1:1234", ("node1", 1234)),
        ("node1", "node1:29400", ("node1", 29400)),
        ("", "localhost:29400", ("localhost", 29400)),
        ("[2001:db8::1]:5", "[2001:db8::1]:5", ("2001:db8::1", 5)),
        ("[2001:db8::1]", "[2001:db8::1]:29400", ("2001:db8::1", 29400)),
        ("node1:0", "node1:0", ("node1", 0)),
    ],
)
def test_c10d_endpoints(endpoint: str, written: str, address: tuple[str, int]) -> None:
    """With torch's port where there is none."""
    config = config_of("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--node-rank=1")
    assert (config.rendezvous.endpoint, config.rendezvous.address) == (written, address)
    assert config.hosts.node_rank is None  # the rendezvous decides, as under torchrun
    assert (config.rendezvous.master_addr, config.rendezvous.master_port) == (None, None)


def test_what_a_rendezvous_is_handed() -> None:
    """Its settings and address as they are, for whichever backend torch knows."""
    arguments = ("--nnodes=2:4", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=etcd:2379", "--rdzv-id=job7")
    config = config_of(*arguments, "--rdzv-conf=timeout=60,protocol=https", "--local-addr=10.0.0.9")
    rendezvous = config.rendezvous
    assert (rendezvous.backend, rendezvous.endpoint, rendezvous.run_id) == ("etcd-v2", "etcd:2379", "job7")
    assert rendezvous.conf == (("timeout", "60"), ("protocol", "https"))
    assert rendezvous.local_addr == "10.0.0.9"
    assert place(config) == (2, 4, None)
    file = config_of("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=/srv/x", "--rdzv-conf=store_type=file")
    assert (file.rendezvous.endpoint, file.rendezvous.address) == ("/srv/x", None)


def test_standalone_wins() -> None:
    """Over options and over a scheduler."""
    assert not config_of("--standalone", "--nnodes", "4").hosts.together
    config = config_of("--standalone", environ=SLURM_TASK_A_RANK)
    assert not config.hosts.together
    assert config.rendezvous.backend == "c10d"


def test_the_node_rank_of_a_host_that_meets_nobody_is_ignored() -> None:
    """As under torchrun, which takes a free port of its own then; with a port there is no host 0 to wait for."""
    for arguments in (("--node-rank", "3"), ("--node-rank", "3", "--rdzv-backend", "c10d")):
        assert config_of(*arguments).hosts == HostsConfig()
    assert "--node-rank 3" in refusal("--node-rank", "3", "--master-port", "29511").what
    assert "--node-rank 3" in refusal("--node-rank", "3", "--rdzv-endpoint", "localhost:29511").what


def test_time_limits() -> None:
    """In seconds."""
    hosts = config_of("--start-timeout", "60", "--host-timeout", "2.5").hosts
    assert (hosts.start_timeout_s, hosts.host_timeout_s) == (60.0, 2.5)


@pytest.mark.parametrize(
    ("backend", "conf", "limits"),
    [
        ("static", "timeout=4", (4.0, 0.0)),
        ("static", "join_timeout=4,read_timeout=5", (60.0, 0.0)),
        ("c10d", "timeout=4", (60.0, 0.0)),
        ("c10d", "join_timeout=4", (4.0, 60.0)),
        ("c10d", "join_timeout=4,read_timeout=5,last_call_timeout=1,close_timeout=2", (4.0, 5.0)),
        ("c10d", "read_timeout=5", (60.0, 5.0)),
        ("etcd", "timeout=4,join_timeout=5", (4.0, 0.0)),
        ("etcd-v2", "timeout=4,join_timeout=5", (5.0, 60.0)),
    ],
)
def test_time_limits_of_the_rendezvous_are_torchruns(backend: str, conf: str, limits: tuple[float, float]) -> None:
    """As each of torch's handlers reads --rdzv-conf; --start-timeout is for where it says nothing."""
    where = ("--rdzv-backend", backend, "--rdzv-endpoint", "127.0.0.1:29511", "--rdzv-conf", conf)
    hosts = config_of("--nnodes", "2", "--start-timeout", "60", *where).hosts
    assert (hosts.start_timeout_s, hosts.connect_timeout_s) == limits


def test_the_port_for_saferuns_own_messages() -> None:
    """A number that is that of the ranks' store is the same port."""
    for text, control in (
        ("auto", "auto"),
        ("same", "same"),
        ("29501", "29501"),
        ("29500", "same"),
    ):
        assert config_of("--nnodes", "2", "--control-port", text).rendezvous.control == control
    for text in ("0", "65536", "-1", "x", ""):
        assert "--control-port" in refusal("--nnodes", "2", "--control-port", text).what


@pytest.mark.parametrize("text", ["0", "-4", "4.5", "four", "9" * 30])
def test_a_time_limit_that_is_none_is_told(text: str) -> None:
    """It would be told in the middle of the start else."""
    assert f"timeout={text}" in refusal("--nnodes", "2", "--rdzv-conf", f"timeout={text}").what


# --------------------------------------------------------------------------------------------------------------------
# A scheduler


def test_a_slurm_step_needs_no_options() -> None:
    """Hosts, place, names, where to meet and what the job is called."""
    config = config_of("--nproc-per-node", "8", environ=SLURM_TASK_A_HOST)
    assert place(config) == (4, 4, 2)
    assert config.hosts.names == NODES
    assert config.hosts.detected == "Slurm step 4711.0"
    assert config.hosts.stop_with_parent
    assert config.hosts.task is None
    assert config.nproc_per_node == 8
    rendezvous = config.rendezvous
    assert (rendezvous.backend, rendezvous.run_id, rendezvous.master_addr) == ("static", "slurm-4711-0", "node1")
    assert rendezvous.ports == candidate_ports("slurm-4711-0")
    assert rendezvous.master_port is None


def test_one_task_a_rank() -> None:
    """Each process starts one, whatever the option's default is; masks are for all ranks of the host."""
    for arguments in ((), ("--nproc-per-node", "2"), ("--nproc-per-node", "1")):
        config = config_of(*arguments, "--tee", "1:3", environ=SLURM_TASK_A_RANK)
        assert config.nproc_per_node == 1
        assert config.hosts.task == TaskConfig(1, 2, "slurm-4711-0-2")
        assert place(config) == (4, 4, 2)
        assert config.logs.tee == (0, 3)


def test_a_host_with_one_task_among_hosts_with_several() -> None:
    """It has one rank, and no tasks to meet."""
    last = slurm_step(2, 4, 0, nodes="node[1,3-4]", hosts=3, tasks=5, tasks_by_host="3,1(x2)", gtids="4")
    config = config_of(environ=last)
    assert (config.hosts.task, config.nproc_per_node) == (None, 1)
    assert "has started 1 process on" in refusal("--nproc-per-node", "3", environ=last).what
    assert config_of(environ=SLURM_UNEQUAL).hosts.task == TaskConfig(2, 3, "slurm-4711-0-0")


def test_several_tasks_on_one_host() -> None:
    """They meet on the host alone, under a port of the host's choice."""
    config = config_of(environ=EIGHT_ON_A_HOST)
    assert place(config) == (1, 1, 0)
    assert config.hosts.task == TaskConfig(5, 8, "slurm-4711-0-0")
    assert config.hosts.together
    assert (config.rendezvous.backend, config.rendezvous.master_addr) == ("static", None)
    assert len(config.rendezvous.ports) == 8


@pytest.mark.parametrize(
    "environ", [SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP, ALONE_IN_A_STEP], ids=["sbatch", "salloc", "one"]
)
def test_a_process_that_is_alone_is_a_plain_launch(environ: Mapping[str, str]) -> None:
    """One host, a free port, a random name."""
    config = config_of("--nproc-per-node", "4", environ=environ)
    assert config.hosts._replace(stop_with_parent=False, note="") == HostsConfig()
    assert config.rendezvous.backend == "c10d"
    assert config.nproc_per_node == 4
    assert config.hosts.stop_with_parent == (environ is ALONE_IN_A_STEP)


@pytest.mark.parametrize("environ", [SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP, SLURM_LOGIN_SHELL])
def test_hosts_that_were_allocated_and_left_out_are_mentioned(environ: Mapping[str, str]) -> None:
    """Who forgets srun gets one host's job, as under torchrun, and learns of it; who says what is meant does not."""
    note = config_of(environ=environ).hosts.note
    assert note == f"this job has 6 nodes; saferun runs on {HERE.partition('.')[0]} only: start it with srun"
    for arguments in (("--standalone",), ("--nnodes", "1"), ("--scheduler", "none"), ("--master-port", "29511")):
        assert config_of(*arguments, environ=environ).hosts.note == ""
    for more in ({"SLURM_JOB_NUM_NODES": "1"}, {"SAFERUN_RUN_ID": "0"}):
        assert config_of(environ={**environ, "SLURM_NNODES": "1", **more}).hosts.note == ""
    assert config_of(environ=ALONE_IN_A_STEP).hosts.note == ""
    assert config_of(environ=PLAIN).hosts.note == ""


# --------------------------------------------------------------------------------------------------------------------
# What the user wrote wins

SAYING_IT_ALL = {
    "--nnodes": "1",
    "--node-rank": "0",
    "--master-addr": "127.0.0.1",
    "--master-port": "29511",
    "--rdzv-backend": "c10d",
    "--rdzv-endpoint": "localhost:0",
    "--rdzv-id": "job7",
    "--rdzv-conf": "timeout=60",
}
IN_A_JOB = (SLURM_TASK_A_HOST, SLURM_TASK_A_RANK, EIGHT_ON_A_HOST, OPEN_MPI_IN_SLURM, PYTORCH_JOB)


@pytest.mark.parametrize("environ", IN_A_JOB, ids=["a_task_a_host", "a_task_a_rank", "one_host", "open_mpi", "pods"])
@pytest.mark.parametrize("option", SAYING_IT_ALL)
def test_any_word_of_the_users_about_place_or_meeting_turns_detection_off(
    option: str, environ: Mapping[str, str]
) -> None:
    """It means what it means to torchrun: with one host, each process is a job of its own, whoever started it."""
    value = SAYING_IT_ALL[option]
    more = ("--rdzv-backend", "c10d") if option == "--rdzv-endpoint" else ()
    alone = config_of(option, value, *more)
    where = f"PET_{option[2:].replace('-', '_').upper()}"
    Path("saferun.yaml").write_text(f"{option[2:]}: {value}\n")
    by_file = config_of(*more, environ=environ)
    Path("saferun.yaml").unlink()
    for config in (
        by_file,
        config_of(option, value, *more, environ=environ),
        config_of(*more, environ={**environ, where: value}),
        config_of(*more, environ={**environ, where.replace("PET_", "SAFERUN_"): value}),
    ):
        assert config.hosts._replace(stop_with_parent=False) == alone.hosts == HostsConfig()
        assert config.nproc_per_node == 1
        assert config.rendezvous._replace(run_id="") == alone.rendezvous._replace(run_id="")


def test_launches_that_are_independent_share_nothing() -> None:
    """A sweep, one process a point: torchrun's way to put several jobs on one host."""
    configs = [
        config_of(*arguments, environ={**EIGHT_ON_A_HOST, "SLURM_LOCALID": "3", "SLURM_PROCID": "3"})
        for arguments in (
            ("--standalone", "--nproc-per-node", "1"),
            ("--nnodes", "1", "--nproc-per-node", "1"),
            ("--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=7"),
        )
    ]
    for config in configs:
        assert not config.hosts.together
        assert (config.rendezvous.backend, config.rendezvous.master_port, config.rendezvous.ports) == ("c10d", None, ())


def test_two_agents_on_a_host_with_places_of_their_own() -> None:
    """Each may have several ranks, although Slurm has started two processes on the host."""
    for rank in (0, 1):
        environ = slurm_step(0, rank, rank, nodes="node1", hosts=1, tasks=2, tasks_by_host="2", gtids="0,1")
        where = ("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "node1", "--master-port", "29511")
        config = config_of(*where, "--nproc-per-node", "2", environ=environ)
        assert place(config) == (2, 2, rank)
        assert (config.hosts.task, config.nproc_per_node, config.rendezvous.run_id) == (None, 2, "none")
        assert (config.rendezvous.master_addr, config.rendezvous.ports) == ("node1", (29511,))


def test_processes_of_one_host_that_start_several_ranks_each_are_jobs_of_their_own() -> None:
    """As under torchrun, which knows of no other process; and a line says so."""
    for environ in (EIGHT_ON_A_HOST, SLURM_TASK_A_RANK):
        config = config_of("--nproc-per-node", "4", environ=environ)
        assert not config.hosts.together
        assert config.nproc_per_node == 4
        assert "is a job of its own, as --nproc-per-node is 4" in config.hosts.note


def test_steps_of_one_host_may_make_a_job_by_hand() -> None:
    """A loop over hosts with ``srun -N1 -w HOST``: each step knows of itself only."""
    arguments = ("--nnodes", "4", "--node-rank", "3", "--master-addr", "node1", "--master-port", "29500")
    config = config_of(*arguments, environ=ALONE_IN_A_STEP)
    assert place(config) == (4, 4, 3)
    assert config.rendezvous.run_id == "none"


def test_scripts_that_work_out_everything_themselves_are_taken_at_their_word() -> None:
    """As torchrun wants it; also where the scheduler would say something else."""
    arguments = ("--nnodes", "3", "--node-rank", "1", "--master-addr", "node1-ib", "--master-port", "6000")
    config = config_of(*arguments, "--rdzv-id", "mine", environ=SLURM_TASK_A_HOST)
    assert place(config) == (3, 3, 1)
    assert (config.rendezvous.master_addr, config.rendezvous.ports) == ("node1-ib", (6000,))
    assert config.rendezvous.run_id == "mine"
    assert config.hosts.names == ()
    assert config.hosts.stop_with_parent  # that it was started by Slurm remains true


def test_c10d_under_a_scheduler() -> None:
    """By itself where detection is asked for; else as under torchrun."""
    asked = config_of("--scheduler", "auto", "--rdzv-backend", "c10d", environ=SLURM_TASK_A_HOST)
    assert asked.rendezvous.endpoint == f"node1:{candidate_ports('slurm-4711-0')[0]}"
    assert place(asked) == (4, 4, None)
    arguments = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29500", "--nnodes", "2:4", "--rdzv-id", "7")
    config = config_of(*arguments, environ=SLURM_TASK_A_HOST)
    assert (config.rendezvous.endpoint, place(config)) == ("node1:29500", (2, 4, None))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nnodes", "3"), ("--nnodes 3", "4 hosts", "SLURM_STEP_NUM_NODES=4")),
        (("--nnodes", "5:8", "--rdzv-backend", "c10d"), ("--nnodes 5:8", "4 hosts")),
        (("--nnodes", "1"), ("--nnodes 1", "4 hosts")),
        (("--node-rank", "0"), ("--node-rank 0", "number 2", "SLURM_NODEID=2")),
        (("--nproc-per-node", "4"), ("--nproc-per-node 4", "2 processes", "SLURM_STEP_TASKS_PER_NODE=2(x4)")),
        (("--hosts", "node[1-3]"), ("--hosts node[1-3] names 3 hosts", "4 hosts")),
        (("--hosts", f"{HERE},b,c,d"), ("number 0", "Slurm step 4711.0 calls it number 2")),
    ],
)
def test_a_contradiction_names_both(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Both values, and where the scheduler's stands: whoever asks for its word is not to be ignored either."""
    what = refusal("--scheduler", "auto", *arguments, environ=SLURM_TASK_A_RANK).what
    for word in words:
        assert word in what


def test_a_scheduler_that_is_not_there_is_told() -> None:
    """It was asked for."""
    assert "--scheduler openmpi" in refusal("--scheduler", "openmpi", environ=SLURM_TASK_A_RANK).what


def test_a_contradiction_from_the_environment_names_the_variable() -> None:
    """It was set long ago and far away."""
    assert refusal("--scheduler", "slurm", environ={**SLURM_TASK_A_HOST, "PET_NNODES": "2"}).what.startswith(
        "PET_NNODES: --nnodes 2, but Slurm"
    )


def test_a_scheduler_may_be_ignored_or_named() -> None:
    """By options alone; or one of several."""
    config = config_of("--scheduler", "none", environ=SLURM_TASK_A_HOST)
    assert config.hosts == HostsConfig()
    config = config_of("--scheduler", "slurm", environ=OPEN_MPI_IN_SLURM)
    assert config.hosts.detected == "Slurm step 4711.0"
    assert config_of(environ=OPEN_MPI_IN_SLURM).hosts.detected.startswith("Open MPI job")


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "SAFERUN_RUN_ID"])
def test_within_a_rank_nothing_is_detected(name: str) -> None:
    """A launch within a rank is a job of its own; the scheduler told the launcher above."""
    config = config_of(environ={**SLURM_TASK_A_RANK, name: "0123456789abcdef"})
    assert config.hosts == HostsConfig()
    assert config_of("--scheduler=slurm", environ={**SLURM_TASK_A_RANK, name: "0"}).hosts.most == 4


@pytest.mark.parametrize(
    ("option", "environ", "stops"),
    [
        ("auto", {}, False),
        ("on", {}, True),
        ("auto", SLURM_TASK_A_HOST, True),
        ("off", SLURM_TASK_A_HOST, False),
        ("auto", PYTORCH_JOB, False),
    ],
)
def test_whether_to_stop_with_what_started_saferun(option: str, environ: Mapping[str, str], *, stops: bool) -> None:
    """Nohup and tmux go on working."""
    assert config_of("--stop-with-parent", option, environ=environ).hosts.stop_with_parent is stops


NONSENSE = ("abc", "", " ", "-1", "1.5", "1e9", "0x10", "9" * 12, "9" * 40, "\udce4", "²", "٣", "node[", "2(x", "\n")
ENVIRONMENTS = (
    *(SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP, SLURM_TASK_A_HOST, SLURM_TASK_A_RANK, SLURM_UNEQUAL, EIGHT_ON_A_HOST),
    *(OPEN_MPI_IN_SLURM, open_mpi_5(1, 3, 1, size=8, local_size=2), PYTORCH_JOB, TRAIN_JOB, INDEXED_JOB, LSF_JSRUN),
)
OF_LAUNCHERS = ("SLURM", "OMPI", "PMI", "LSB", "LSF", "JSM", "MPI", "KUBERNETES", "JOB_COMPLETION")


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_a_launchers_variable_is_too_odd(data: st.DataObject) -> None:
    """What makes no sense counts as not there; a job may need to be told its place then, and nothing breaks."""
    environ = dict(data.draw(st.sampled_from(ENVIRONMENTS)))
    names = [name for name in sorted(environ) if name.startswith(OF_LAUNCHERS)]
    for name in data.draw(st.sets(st.sampled_from(names))):
        environ[name] = data.draw(st.sampled_from(NONSENSE) | st.text(max_size=9))
    alone = config_of("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2", environ=environ)
    assert not alone.hosts.together
    try:
        config = config_of(environ={**environ, "PMI_FD": "x"})
    except UsageError as error:
        what = error.what
    else:
        what = ""
        assert config.hosts.most <= 1 << 17
        assert config.hosts.node_rank is None or 0 <= config.hosts.node_rank < config.hosts.most
    assert not what or "does not tell this process" in what


def test_values_that_make_no_sense_are_one_warning() -> None:
    """Who meant them to be there learns why nothing came of them."""
    environ = {**SLURM_TASK_A_HOST, "SLURM_NODEID": "abc", "SLURM_STEP_NUM_NODES": "9" * 40}
    config = config_of(environ=environ)
    assert not config.hosts.together
    assert config.hosts.note == "ignored, as the value is not a valid number: SLURM_STEP_NUM_NODES, SLURM_NODEID"
    assert config_of("--nnodes", "1", environ=environ).hosts.note == ""
    assert config_of("--scheduler", "none", environ=environ).hosts.note == ""


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


def test_what_mpi_does_not_tell_is_asked_for() -> None:
    """In two lines; and an answer to it is enough."""
    unequal = open_mpi_5(1, 3, 0, size=5, local_size=2)
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


def test_the_master_that_mpiexec_does_not_tell() -> None:
    """MASTER_ADDR is how people say it."""
    environ = {name: value for name, value in hydra(2, 5, 1, size=8, local_size=2).items() if name != "PMI_FD"}
    error = refusal(environ=environ)
    assert "which host has rank 0" in error.what
    assert "--master-addr" in error.hint
    assert config_of(environ={**environ, "MASTER_ADDR": "node1"}).rendezvous.master_addr == "node1"
    asked = ("--scheduler", "pmi", "--master-addr", "n1")
    config = config_of(*asked, environ={**environ, "MASTER_ADDR": "node1"})
    assert config.rendezvous.master_addr == "n1"
    assert place(config) == (4, 4, 2)


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
    assert not config_of("--nnodes", "1", environ=PYTORCH_JOB_WITH_PET).hosts.together
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
    assert not config_of(environ=INDEXED_JOB).hosts.together
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


# --------------------------------------------------------------------------------------------------------------------
# Lists of hosts


def test_a_list_of_hosts() -> None:
    """For pdsh: the same command on each host."""
    config = config_of("--hosts", f"node[1-2],{HERE},node4")
    assert place(config) == (4, 4, 2)
    assert config.hosts.names == ("node1", "node2", HERE, "node4")
    assert config.rendezvous.master_addr == "node1"
    assert config.rendezvous.ports == (29500,)
    assert not config_of("--hosts", HERE).hosts.together


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
    lines = command_lines_above()
    assert lines
    assert all(isinstance(word, str) for line in lines for word in line)


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
