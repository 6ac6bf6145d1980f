"""The place of a process in its job, from options and what schedulers told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun.cluster.placement.several_hosts import candidate_ports
from saferun.config import HostsConfig, LaunchConfig, TaskConfig
from saferun.errors import UsageError
from saferun.text.master_port import CHOSEN, DEFAULT, ENDPOINT, GIVEN, NEEDLESS
from tests.unit.cluster.placing import (
    HERE,
    config_of,
    place,
    refusal,
)
from tests.unit.recorded_launchers import (
    OPEN_MPI_IN_SLURM,
    PLAIN,
    SLURM_BATCH_SCRIPT,
    SLURM_INTERACTIVE_STEP,
    SLURM_LOGIN_SHELL,
    SLURM_TASK_A_HOST,
    SLURM_TASK_A_RANK,
    SLURM_UNEQUAL,
    open_mpi_5,
    slurm_step,
)
from tests.unit.recorded_schedulers import INDEXED_JOB, LSF_JSRUN, PYTORCH_JOB, TRAIN_JOB

NODES = ("node1", "node2", "node3", "node4")
ALONE_IN_A_STEP = slurm_step(0, 0, 0, nodes="node1", hosts=1, tasks=1, tasks_by_host="1")
EIGHT_ON_A_HOST = slurm_step(0, 5, 5, nodes="node1", hosts=1, tasks=8, tasks_by_host="8", gtids="0,1,2,3,4,5,6,7")


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


# --------------------------------------------------------------------------------------------------------------------
# Options alone, as under torchrun


def test_a_launch_without_options_is_alone() -> None:
    """Nothing about hosts is known or needed."""
    config = config_of()
    assert config.hosts == HostsConfig()
    assert not config.hosts.spans_hosts
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


@pytest.mark.parametrize(
    ("options", "is_given"),
    [
        ((), False),
        (("--master-port", "29511"), False),
        (("--master-addr", "127.0.0.1"), True),
        (("--rdzv-endpoint", "127.0.0.1:29511"), True),
    ],
)
def test_an_address_of_the_master_that_nobody_gave_is_known_as_such(options: tuple[str, ...], is_given: bool) -> None:
    rendezvous = config_of("--nnodes", "2", "--node-rank", "1", *options).rendezvous
    assert (rendezvous.master_addr, rendezvous.is_master_given) == ("127.0.0.1", is_given)


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
    for written, read in (("TCP", "tcp"), (" File", "file")):
        config = config_of(
            "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:1", f"--rdzv-conf=store_type={written}"
        )
        assert dict(config.rendezvous.conf) == {"store_type": read}


def test_a_wait_for_ever_may_be_written_with_nines() -> None:
    """As many as one likes; torch gets them as they are."""
    arguments = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--rdzv-conf=join_timeout=99999999999")
    config = config_of(*arguments)
    assert config.hosts.start_timeout_s == 1e9
    assert dict(config.rendezvous.conf) == {"join_timeout": "99999999999"}
    with pytest.raises(UsageError, match="not a number of seconds"):
        config_of(*arguments[:-1], "--rdzv-conf=join_timeout=000")


def test_standalone_wins() -> None:
    """Over options and over a scheduler."""
    assert not config_of("--standalone", "--nnodes", "4").hosts.spans_hosts
    config = config_of("--standalone", environ=SLURM_TASK_A_RANK)
    assert not config.hosts.spans_hosts
    assert config.rendezvous.backend == "c10d"


def test_the_node_rank_of_a_host_that_meets_nobody_is_ignored() -> None:
    """As under torchrun, which takes a free port of its own then; with a port there is no host 0 to wait for."""
    for arguments in (("--node-rank", "3"), ("--node-rank", "3", "--rdzv-backend", "c10d")):
        assert config_of(*arguments).hosts == HostsConfig()
    assert "--node-rank 3" in refusal("--node-rank", "3", "--master-port", "29511").what
    assert "--node-rank 3" in refusal("--node-rank", "3", "--rdzv-endpoint", "localhost:29511").what


C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.0.0.1:29511")


def waits_for_silent_hosts(
    config: LaunchConfig, *, restarts: int = 0, spares: tuple[str, ...] = (), leads: bool = True
) -> bool:
    return config.patience_after_s(restarts, spares, leads=leads) != float("inf")


@pytest.mark.parametrize(
    ("options", "leader_waits", "others_wait"),
    [
        ((), True, True),
        (("--host-timeout", "30"), False, False),
        (("--max-restarts", "1"), False, True),
        (C10D, True, True),
        ((*C10D, "--max-restarts", "1"), False, False),
        (("--nnodes", "2:4", *C10D), True, True),
        (("--nnodes", "2:4", *C10D, "--max-restarts", "1"), False, False),
        (("--max-restarts", "1", "--restart-limit", "progress"), False, True),
    ],
)
def test_a_silent_host_is_waited_for_where_no_other_attempt_can_follow(
    options: tuple[str, ...], leader_waits: bool, others_wait: bool
) -> None:
    """A static job has none without its leader, whatever --max-restarts says; an elastic job, none without restarts."""
    config = config_of("--nnodes", "2", *options)
    waits = [waits_for_silent_hosts(config, leads=leads) for leads in (True, False)]
    assert waits == [leader_waits, others_wait]


@pytest.mark.parametrize(
    ("options", "spares", "leader_waits", "others_wait"),
    [
        ((), ("node2",), False, False),
        ((), (), True, True),
        (("--max-restarts", "1"), (), False, True),
        (("--control-port", "same"), ("node2",), False, True),
        (("--control-port", "same", "--max-restarts", "1"), ("node2",), False, True),
    ],
)
def test_a_silent_host_is_waited_for_where_no_spare_can_take_its_place(
    options: tuple[str, ...], spares: tuple[str, ...], leader_waits: bool, others_wait: bool
) -> None:
    """None is left, or none may take that of the leader."""
    config = config_of("--nnodes", "2", "--spares", "1", *options)
    waits = [waits_for_silent_hosts(config, spares=spares, leads=leads) for leads in (True, False)]
    assert waits == [leader_waits, others_wait]


def test_in_an_elastic_job_without_restarts_a_silent_host_is_waited_for_from_the_beginning_of_an_attempt() -> None:
    """A start is tried again without that host only if it fails within ``init_process_group``, and so it is later."""
    elastic = ("--nnodes", "2:4", *C10D)
    assert config_of(*elastic).patience_after_s() == 0.0
    assert config_of(*elastic, "--max-restarts", "1").patience_after_s() == float("inf")


@pytest.mark.parametrize(
    "hang", [("--on-hang", "stop"), ("--on-hang", "restart", "--max-restarts", "1"), ("--hang-timeout", "0")]
)
def test_where_a_hang_ends_an_elastic_job_a_silent_host_is_not_waited_for_while_its_start_may_be_tried_again(
    hang: tuple[str, ...],
) -> None:
    """The hang might be found first, or never. A static job needs that host for another try, too."""
    elastic = ("--nnodes", "2:4", *C10D, *hang)
    assert config_of(*elastic).patience_after_s(restarts=1) == 120.0
    assert config_of(*elastic, "--start-window", "30").patience_after_s(restarts=1) == 30.0
    assert config_of(*elastic, "--start-retries", "0").patience_after_s(restarts=1) == 0.0
    assert config_of("--nnodes", "2", *hang).patience_after_s(restarts=1) == 0.0


def test_a_silent_host_is_waited_for_once_all_restarts_are_used_up() -> None:
    config = config_of("--nnodes", "2", "--max-restarts", "2")
    assert [waits_for_silent_hosts(config, restarts=restarts) for restarts in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("option", [("--restart-limit", "progress"), ("--spares", "1")])
def test_restarts_that_may_have_used_up_none_are_not_counted(option: tuple[str, str]) -> None:
    """Those after which ranks got further, and those by which spares took the places of hosts."""
    assert not waits_for_silent_hosts(config_of("--nnodes", "2", "--max-restarts", "2", *option), restarts=7)


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


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Torch's registry of handlers, as a sitecustomize has filled it."""
    registry: dict[str, object] = {"mine": print}
    module = SimpleNamespace(rendezvous_handler_registry=SimpleNamespace(_registry=registry))
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.rendezvous.api", module)
    return registry


@pytest.mark.parametrize(
    ("conf", "limits"),
    [
        ("join_timeout=10m,read_timeout=soon", (60.0, 0.0)),
        ("join_timeout=4", (4.0, 60.0)),
        ("timeout=x", (60.0, 0.0)),
    ],
)
def test_settings_of_a_registered_handler_mean_what_it_likes(
    registry: dict[str, object], conf: str, limits: tuple[float, float]
) -> None:
    """It is found where it was registered in this process, and what is no number of seconds is its own affair."""
    where = ("--rdzv-backend", "mine", "--rdzv-endpoint", "somewhere", "--rdzv-conf", conf)
    hosts = config_of("--nnodes", "2", "--start-timeout", "60", *where).hosts
    assert (hosts.start_timeout_s, hosts.connect_timeout_s) == limits
    registry.clear()
    assert "torch knows no such rendezvous" in refusal("--nnodes", "2", *where).what


def test_a_job_without_a_limit_of_hosts_runs() -> None:
    """As under torchrun. That many are not needed by any job."""
    hosts = config_of("--nnodes", "1:1000000", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29511").hosts
    assert (hosts.least, hosts.most) == (1, 1 << 17)
    assert "--nnodes 1000000 is more than 131072 hosts" in refusal("--nnodes", "1000000").what


def test_a_handler_that_an_out_of_tree_backend_may_register_is_asked_for_where_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing torch loads the package (``torch.backends``), and saferun itself imports no torch."""
    where = ("--rdzv-backend", "parallel", "--rdzv-endpoint", "somewhere")
    assert "torch knows no such rendezvous" in refusal("--nnodes", "2", *where).what
    monkeypatch.setattr("saferun.linux.installed_torch.may_load_backends", lambda _environ: True)
    assert config_of("--nnodes", "2", *where).rendezvous.backend == "parallel"


@pytest.mark.parametrize("number", [(), ("--nnodes", "1"), ("--nnodes", "1", "--node-rank", "3")])
@pytest.mark.usefixtures("registry")
def test_a_registered_handler_says_who_takes_part_even_where_the_options_name_one_host(number: tuple[str, ...]) -> None:
    """Under torchrun it may make one job of many launches that name no number of hosts."""
    config = config_of(*number, "--rdzv-backend", "mine", "--rdzv-endpoint", "somewhere", "--rdzv-id", "job7")
    assert place(config) == (1, 1, None)
    assert config.hosts.spans_hosts
    assert config.hosts.may_have_others
    assert (config.rendezvous.backend, config.rendezvous.endpoint) == ("mine", "somewhere")
    assert config_of("--rdzv-backend", "mine", "--rdzv-id", "").rendezvous.run_id.isdecimal()
    alone = config_of("--standalone", "--rdzv-backend", "mine")
    assert (alone.hosts.spans_hosts, alone.rendezvous.backend) == (False, "c10d")


@pytest.mark.usefixtures("registry")
def test_a_registered_handler_is_asked_by_the_tasks_of_one_host() -> None:
    """By the first of them, for all."""
    config = config_of("--scheduler", "slurm", "--rdzv-backend", "mine", environ=EIGHT_ON_A_HOST)
    assert config.hosts.task is not None
    assert config.hosts.task.local_world_size == 8
    assert config.rendezvous.backend == "mine"


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


@pytest.mark.parametrize("text", ["0", "-4", "4.5", "four", "000"])
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
    asked = refusal("--scheduler", "auto", "--nproc-per-node", "3", environ=last)
    assert "has started 1 process on" in asked.what
    assert config_of(environ=SLURM_UNEQUAL).hosts.task == TaskConfig(2, 3, "slurm-4711-0-0")


def test_several_tasks_on_one_host() -> None:
    """They meet on the host alone, under a port of the host's choice."""
    config = config_of(environ=EIGHT_ON_A_HOST)
    assert place(config) == (1, 1, 0)
    assert config.hosts.task == TaskConfig(5, 8, "slurm-4711-0-0")
    assert config.hosts.spans_hosts
    assert (config.rendezvous.backend, config.rendezvous.master_addr) == ("static", None)
    assert len(config.rendezvous.ports) == 8


@pytest.mark.parametrize(
    "given", [("c10d",), ("c10d", "--node-rank", "3"), ("etcd-v2", "--rdzv-endpoint", "node9:2379")]
)
def test_several_tasks_on_one_host_with_a_rendezvous_that_numbers_hosts(given: tuple[str, ...]) -> None:
    """They meet on the host as with a static one, and the host has node rank 0: without one it would be refused."""
    config = config_of("--scheduler", "slurm", "--rdzv-backend", *given, environ=EIGHT_ON_A_HOST)
    assert place(config) == (1, 1, 0)
    assert config.hosts.task == TaskConfig(5, 8, "slurm-4711-0-0")
    assert (config.rendezvous.backend, len(config.rendezvous.ports)) == ("static", 8)


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
        assert not config.hosts.spans_hosts
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
        assert not config.hosts.spans_hosts
        assert config.nproc_per_node == 4
        assert "is a job of its own, as --nproc-per-node is 4" in config.hosts.note
    # Where hosts have three processes, one and one, all of them decide alike.
    for node, proc, local in ((0, 2, 2), (2, 4, 0)):
        environ = slurm_step(node, proc, local, nodes="node[1-3]", hosts=3, tasks=5, tasks_by_host="3,1(x2)")
        for ranks in (2, 3):
            config = config_of("--nproc-per-node", str(ranks), environ=environ)
            assert (config.hosts.spans_hosts, config.nproc_per_node) == (False, ranks)
            assert "is a job of its own" in config.hosts.note


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
    assert not alone.hosts.spans_hosts
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
    assert not config.hosts.spans_hosts
    assert config.hosts.note == "ignored, as the value is not a valid number: SLURM_STEP_NUM_NODES, SLURM_NODEID"
    assert config_of("--nnodes", "1", environ=environ).hosts.note == ""
    assert config_of("--scheduler", "none", environ=environ).hosts.note == ""


@pytest.mark.parametrize(
    ("arguments", "environ", "source"),
    [
        (("--nnodes", "2"), {}, DEFAULT),
        (("--nnodes", "2", "--master-port", "29500"), {}, GIVEN),
        (("--nnodes", "2", "--rdzv-endpoint", "node1:1234"), {}, ENDPOINT),
        (("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:1234"), {}, ENDPOINT),
        ((), SLURM_TASK_A_HOST, CHOSEN),
        (("--master-port", "29500"), SLURM_TASK_A_HOST, NEEDLESS),
        (("--master-port", "29500"), {}, NEEDLESS),
    ],
)
def test_it_is_known_where_the_port_comes_from(
    arguments: tuple[str, ...], environ: Mapping[str, str], source: str
) -> None:
    """Only who has passed an option can pass another value."""
    assert config_of(*arguments, environ=environ).rendezvous.port_source == source
