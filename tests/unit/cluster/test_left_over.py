"""Variables of a launcher that did not start this process, or does not say all: as under torchrun, with one line."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from saferun.cluster.schedulers import Ancestry, started_by
from saferun.cluster.schedulers.allocation import takes_commands
from saferun.config import HostsConfig
from saferun.linux.procfs import has_variable
from tests.process.launching import until
from tests.unit.above import Above
from tests.unit.cluster.placing import config_of, place, refusal
from tests.unit.cluster.scheduling import found
from tests.unit.recorded_launchers import (
    PLAIN,
    SLURM_TASK_A_HOST,
    SLURM_TASK_A_RANK,
    hydra,
    hydra_proxy,
    intel_mpi,
    mvapich2,
    open_mpi_4,
    open_mpi_5,
    prted,
    slurm_step,
)
from tests.unit.recorded_schedulers import (
    HTCONDOR,
    LEADER_WORKER_SET,
    LSF_BATCH_SCRIPT,
    LSF_JSRUN,
    PBS_BATCH_SCRIPT,
    PBS_NODE_FILE,
    PYTORCH_JOB,
    SAGEMAKER,
    aws_batch,
    flux,
    ray_train,
)

SSH = (["-bash"], ["sshd: me@pts/3"], ["sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups"])
TMUX = (["bash"], ["/usr/bin/tmux", "new", "-s", "train"])
STARTED = {
    "slurm": (SLURM_TASK_A_HOST, (["bash", "-c", "saferun"], ["slurmstepd: [4711.0]"])),
    "openmpi4": (open_mpi_4(2, 4, 0, size=8, local_size=2, hosts=4), (["/usr/bin/orted", "-mca", "x"], *SSH)),
    "openmpi5": (open_mpi_5(2, 4, 0, size=8, local_size=2), prted(2, 4)),
    "hydra": (hydra(2, 4, 0, size=8, local_size=2), hydra_proxy(2)),
    "mpirun in tmux": (open_mpi_4(0, 1, 1, size=8, local_size=2, hosts=4), (["mpirun", "-np", "8"], *TMUX)),
}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("launcher", STARTED)
@pytest.mark.parametrize("login", [SSH, TMUX], ids=["ssh", "tmux"])
def test_a_shell_into_which_variables_have_come_is_on_its_own(
    above: Above, launcher: str, login: Sequence[Sequence[str]]
) -> None:
    """Exported once, sent along by ssh, or of a tmux that was started within a job: nobody else would come."""
    environ, _ = STARTED[launcher]
    above.lines = login
    config = config_of("--nproc-per-node", "2", environ=environ)
    assert config.hosts._replace(note="") == HostsConfig()  # nor does it end with the shell
    assert config.nproc_per_node == 2
    assert "did not start this process" in config.hosts.note
    assert "\n" not in config.hosts.note
    name = config.hosts.note.partition("--scheduler ")[2].partition(" ")[0]
    assert config_of("--scheduler", name, environ={**environ, "MASTER_ADDR": "node1"}).hosts.most == 4


@pytest.mark.parametrize("launcher", STARTED)
def test_a_launcher_that_is_above_has_started_this_process(above: Above, launcher: str) -> None:
    """Although an sshd, or a tmux, may be above that."""
    environ, above.lines = STARTED[launcher]
    assert config_of(environ=environ).hosts.most == 4
    assert not config_of(environ=environ).hosts.note


@pytest.mark.parametrize("way", [SSH, TMUX], ids=["ssh", "tmux"])
def test_a_descriptor_that_is_left_over_is_not_written_to(above: Above, way: Sequence[Sequence[str]]) -> None:
    """Of the process manager's number, it is a socket of somebody else's by now."""
    above.lines = way
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environ = {**hydra(2, 4, 0, size=8, local_size=2), "PMI_FD": str(theirs.fileno())}
        assert not config_of(environ=environ).hosts.spans_hosts
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)


def test_where_neither_is_to_be_seen_the_variables_count(above: Above) -> None:
    """In a container with processes of its own."""
    for lines in ((), [["/sbin/docker-init", "--", "saferun"]], [[], ["bash"]]):
        above.lines = lines
        assert place(config_of(environ=SLURM_TASK_A_HOST)) == (4, 4, 2)
        assert config_of(environ=SLURM_TASK_A_HOST).hosts.stop_with_parent


def test_pods_and_clouds_have_nothing_above(above: Above) -> None:
    """The container's own first process at most."""
    for lines in (
        (),
        [["/bin/sh", "-c", "saferun train.py"]],
        [["ray::RayTrainWorker"], ["/opt/ray/raylet", "--x"], *SSH],
    ):
        above.lines = lines
        for environ in (PYTORCH_JOB, SAGEMAKER, aws_batch(1), ray_train(1, size=2, local_size=1)):
            assert config_of(environ=environ).hosts.most > 1
            assert not config_of(environ=environ).hosts.note


RAY = [["ray::train"], ["/opt/ray/raylet", "--x"], ["ray", "start", "--block"], ["slurmstepd: [4711.0]"]]


def test_a_ray_task_is_none_of_the_step_in_which_ray_was_started(above: Above) -> None:
    """`srun -N4 ray start --block`: each task below would wait for three others that no one starts."""
    above.lines = RAY
    config = config_of("--nproc-per-node", "2", environ=SLURM_TASK_A_HOST)
    assert config.hosts._replace(note="") == HostsConfig()
    assert config.hosts.note.endswith("did not start this process, but raylet: its variables are ignored")
    assert config_of(environ={**ray_train(1, size=2, local_size=1)}).hosts.most > 1
    above.lines = [["srun", "x"], ["slurmstepd: [4712.0]"], *RAY]
    assert config_of(environ=SLURM_TASK_A_HOST).hosts.most > 1


ALONE = slurm_step(0, 0, 0, nodes="node1", hosts=1, tasks=1, tasks_by_host="1")


@pytest.mark.parametrize("step", [SLURM_TASK_A_HOST, SLURM_TASK_A_RANK, ALONE], ids=["host", "rank", "one process"])
def test_a_worker_of_ray_train_has_its_place_by_ray_also_within_a_step(above: Above, step: Mapping[str, str]) -> None:
    """Ray has told it all; the step in which Ray was started tells of Ray's own daemons."""
    above.lines = RAY
    config = config_of(environ={**step, **ray_train(3, size=4, local_size=2)})
    assert config.hosts.detected.startswith("Ray Train")
    assert (place(config), config.nproc_per_node) == ((2, 2, 1), 1)
    assert not config.hosts.note
    assert not config_of("--nnodes", "1", environ={**step, **ray_train(3, size=4, local_size=2)}).hosts.spans_hosts


OTHER_WAYS = {
    "ssh": (SSH, (), False, "sshd"),
    "tmux": (TMUX, (), False, "tmux"),
    "kubectl exec": ((), (), True, "docker exec, kubectl exec or the like"),
    "a shell by kubectl exec": ([["sh", "-c", "saferun train.py"], ["bash"]], (), True, "docker exec"),
    "a terminal of the IDE": ([["/bin/bash", "--init-file", "/x/bash.sh"], ["node", "x"]], (0,), False, "interactive"),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.parametrize(
    "environ",
    [PYTORCH_JOB, SAGEMAKER, aws_batch(1), LEADER_WORKER_SET, SLURM_TASK_A_HOST],
    ids=["pytorch job", "sagemaker", "batch", "lws", "slurm, in a container"],
)
def test_a_shell_in_a_container_of_a_job_is_on_its_own(above: Above, way: str, environ: Mapping[str, str]) -> None:
    """It has the container's environment, and the job's own process may be training there: nobody waits for another."""
    above.lines, above.at_terminal, above.entered, starter = OTHER_WAYS[way]
    config = config_of("--nproc-per-node", "2", environ=environ)
    assert config.hosts._replace(note="") == HostsConfig()
    assert (config.nproc_per_node, config.rendezvous.backend) == (2, "c10d")
    assert starter in config.hosts.note
    name = config.hosts.note.partition("--scheduler ")[2].partition(" ")[0]
    assert config_of("--scheduler", name, environ=environ).hosts.most > 1


def test_an_interactive_shell_within_a_step_is_no_task(above: Above) -> None:
    """``srun -n8 --pty bash``: the other seven have ended at once, and torchrun starts what it is asked for there."""
    step = slurm_step(0, 0, 0, nodes="node1", hosts=1, tasks=8, tasks_by_host="8", gtids="0,1,2,3,4,5,6,7")
    above.lines, above.at_terminal = [["/bin/bash", "-l"], ["slurmstepd: [4711.0]"]], (0,)
    for ranks in (1, 2, 8):
        config = config_of("--nproc-per-node", str(ranks), environ=step)
        assert config.hosts._replace(note="") == HostsConfig()
        assert config.nproc_per_node == ranks
        assert "an interactive shell" in config.hosts.note
    hosts = slurm_step(0, 0, 0, nodes="node[1-4]", hosts=4, tasks=4, tasks_by_host="1(x4)")
    assert config_of(environ=hosts).hosts._replace(note="") == HostsConfig()
    # srun --pty with the script itself, or with a script of the shell's, is a task on each host.
    for line in (["bash", "run.sh"], ["bash", "-c", "saferun train.py"], ["bash", "-lc", "x"], ["python", "x.py"]):
        above.lines = [line, ["slurmstepd: [4711.0]"]]
        assert config_of(environ=hosts).hosts.most == 4
    above.lines, above.at_terminal = [["bash"], ["slurmstepd: [4711.0]"]], ()  # srun bash < script
    assert config_of(environ=hosts).hosts.most == 4
    # A launcher that was called in that shell is nearer.
    above.lines, above.at_terminal = [["slurmstepd: [4711.1]"], ["bash"], ["slurmstepd: [4711.0]"]], (1,)
    assert config_of(environ=hosts).hosts.most == 4


@pytest.mark.parametrize("step", ["4712.batch", "4712.interactive", "4712.extern"])
def test_a_batch_script_that_was_submitted_from_within_a_step_is_no_task_of_that_step(above: Above, step: str) -> None:
    """Sbatch hands the environment of where it is called on, the variables of the step there among it."""
    above.lines = [["/bin/bash", "/var/spool/slurmd/job04712/slurm_script"], [f"slurmstepd: [{step}]"]]
    config = config_of("--nproc-per-node", "2", environ=SLURM_TASK_A_RANK)
    assert config.hosts._replace(note="") == HostsConfig()
    assert "Slurm" in config.hosts.note
    # mpirun's own host: whatever its daemon is called there, the others decide by theirs.
    environ, _ = STARTED["openmpi4"]
    assert config_of(environ=environ).hosts.most == 4


RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environ", [SLURM_TASK_A_HOST, SLURM_TASK_A_RANK, SAGEMAKER], ids=["host", "rank", "cloud"])
def test_a_rank_of_another_launcher_starts_a_job_of_its_own(environ: Mapping[str, str]) -> None:
    """An evaluation that one rank of DeepSpeed's or Accelerate's starts, with its environment: no other rank does."""
    config = config_of("--nproc-per-node", "2", environ={**environ, **RANK})
    assert config.hosts._replace(note="") == HostsConfig()
    assert "RANK, LOCAL_RANK, WORLD_SIZE" in config.hosts.note
    assert not config_of("--standalone", environ={**environ, **RANK}).hosts.note


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_pod_that_is_to_meet_others_at_its_own_address_is_none_of_a_pytorch_job(rank: str) -> None:
    """Somebody has set MASTER_ADDR=localhost, for scripts without a launcher: torchrun reads none of it."""
    environ = {**PYTORCH_JOB, "MASTER_ADDR": "localhost", "RANK": rank, "WORLD_SIZE": "8"}
    config = config_of("--nproc-per-node", "8", environ=environ)
    assert (config.hosts, config.nproc_per_node) == (HostsConfig(), 8)
    assert (
        found({**PYTORCH_JOB, "MASTER_ADDR": "localhost", "RANK": "0"}, "train-master-0").master_addr
        == "train-master-0"
    )


def test_a_rank_within_a_pod_is_no_pod() -> None:
    """The same variables, of another launcher; Ray Train's workers in pods are told all by Ray."""
    pod = {name: value for name, value in PYTORCH_JOB.items() if name.startswith("KUBERNETES")}
    assert config_of(environ={**pod, **RANK}).hosts == HostsConfig()
    config = config_of(environ={**pod, **ray_train(3, size=4, local_size=2)})
    assert config.hosts.detected.startswith("Ray Train")
    assert (place(config), config.nproc_per_node) == ((2, 2, 1), 1)


def test_a_ranks_own_launch_is_not_looked_into(above: Above) -> None:
    """What the user wrote says it all, and no line is needed."""
    above.lines = SSH
    for arguments in (("--nnodes", "1"), ("--standalone",), ("--scheduler", "none"), ("--master-port", "29511")):
        config = config_of(*arguments, environ=SLURM_TASK_A_HOST)
        assert not config.hosts.spans_hosts
        assert not config.hosts.note


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([["slurmstepd: [4711.0]"]], (True, "slurmstepd")),
        ([["/opt/prrte/bin/prted", "--x"], ["sshd: me@notty"]], (True, "prted")),
        ([["sshd-session: me@pts/0"], ["slurmstepd: [4711.extern]"]], (False, "sshd-session")),
        ([["mpirun.lsf", "x"], ["sshd: me@notty"]], (True, "mpirun.lsf")),
        ([["/gnu/store/bin/.prterun-wrapped", "x"], ["sshd: me@notty"]], (True, "prterun-wrapped")),
        ([["/bin/login", "--"]], (False, "login")),
        ([[""], [" "], ["/"], ["sh", "sshd"]], (None, "")),
        ([], (None, "")),
    ],
)
def test_the_nearest_of_launchers_and_logins_decides(
    lines: Sequence[Sequence[str]], expected: tuple[bool | None, str]
) -> None:
    """By the name of a program, never by its arguments."""
    assert started_by(Ancestry(lines)) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bash", True),
        ("-bash", True),
        ("/usr/bin/zsh -i -l", True),
        ("bash --norc --rcfile x", True),
        ("bash --init-file /x/shell.sh -i", True),
        ("bash -o pipefail -x", True),
        ("fish --interactive", True),
        ("sh -c x", False),
        ("bash -lc x", False),
        ("bash -o pipefail -c x", False),
        ("bash run.sh", False),
        ("bash -x run.sh --norc", False),
        ("fish --command=x", False),
        ("python3", False),
        ("", False),
    ],
)
def test_a_shell_that_reads_its_commands_has_none_on_its_command_line(line: str, *, expected: bool) -> None:
    """Neither a script nor ``-c``."""
    assert takes_commands(line.split()) is expected


# --------------------------------------------------------------------------------------------------------------------
# Not all that a job needs

PARTIAL = {
    "HTCondor": (HTCONDOR, "which host has rank 0"),
    "Open MPI": (open_mpi_5(1, 3, 0, size=5, local_size=2), "how many hosts there are"),
    "mpiexec": (intel_mpi(30, 0, size=60, local_size=1), "which host has rank 0"),
    "Flux": (flux(6, 1, size=8, hosts=4), "which of 4 hosts it is on"),
    "Ray": ({**ray_train(1, size=2, local_size=1), "MASTER_ADDR": ""}, "which host has rank 0"),
}


@pytest.mark.parametrize("launcher", PARTIAL)
def test_a_launcher_that_does_not_say_all_leaves_a_process_on_its_own(launcher: str) -> None:
    """As under torchrun. One line says what is missing, and which options would help."""
    environ, missing = PARTIAL[launcher]
    config = config_of("--nproc-per-node", "2", environ={**environ, "PMI_FD": "x"})
    assert not config.hosts.spans_hosts
    assert config.nproc_per_node == 2
    assert config.hosts.note.startswith(launcher)
    assert f"does not tell this process {missing}" in config.hosts.note
    assert "--master-addr" in config.hosts.note
    assert "\n" not in config.hosts.note


def test_where_only_some_processes_lack_it_the_user_is_asked(above: Above) -> None:
    """Those that know more would wait for the others; and mpirun ends all of them when one ends."""
    for environ, lines in (
        (open_mpi_5(1, 3, 0, size=5, local_size=2), prted(1, 3)),
        (mvapich2(0, 0, 0, size=8, local_size=2, hosts=4), [["/opt/mvapich2/bin/mpispawn", "0"]]),
    ):
        above.lines = lines
        assert "does not tell this process" in refusal(environ=environ).what


def test_master_addr_completes_it() -> None:
    """Users have long exported it."""
    config = config_of(environ={**HTCONDOR, "MASTER_ADDR": "node1"})
    assert place(config) == (4, 4, 2)
    assert config.rendezvous.master_addr == "node1"


@pytest.mark.parametrize("environ", [LSF_BATCH_SCRIPT, PBS_BATCH_SCRIPT], ids=["lsf", "pbs"])
def test_a_batch_script_is_alone_and_told_what_it_leaves_out(environ: Mapping[str, str], tmp_path: Path) -> None:
    """Also a shell in such a job, and what ssh starts from there."""
    file = tmp_path / "nodes"
    file.write_text(PBS_NODE_FILE)
    there = {**environ, **({"PBS_NODEFILE": str(file)} if "PBS_NODEFILE" in environ else {})}
    config = config_of("--nproc-per-node", "8", environ=there)
    assert config.hosts._replace(note="") == HostsConfig()
    assert config.hosts.note.startswith("this job has 2 nodes; saferun runs on ")
    assert "start it with" in config.hosts.note
    for arguments in (("--standalone",), ("--nnodes", "1"), ("--scheduler", "none")):
        assert not config_of(*arguments, environ=there).hosts.note
    unknown = {"PBS_NODEFILE": "/nonexistent", "LSB_MCPU_HOSTS": "", "LSB_HOSTS": ""}
    assert not config_of(environ={**there, **unknown}).hosts.note


def test_it_is_known_where_each_value_stands() -> None:
    """For --dry-run."""
    assert config_of(environ=SLURM_TASK_A_HOST).hosts.found == (
        "4 hosts: SLURM_STEP_NUM_NODES=4",
        "node rank 2: SLURM_NODEID=2",
        "master node1: the first of SLURM_STEP_NODELIST",
    )
    assert config_of(environ=PLAIN).hosts.found == ()
    sagemaker = config_of(environ=SAGEMAKER).hosts
    assert sagemaker.found[1] == "node rank 1: SM_CURRENT_HOST=algo-2"
    assert place(config_of(environ=LSF_JSRUN | {"LSB_MCPU_HOSTS": "x"}))[1] == 1


def test_jobs_of_one_user_on_the_same_hosts_do_not_meet() -> None:
    """Their names differ, and so do their ports."""
    pairs = (
        (SLURM_TASK_A_HOST, {"SLURM_JOB_ID": "4712"}),
        (flux(0, 0, size=2, hosts=2) | {"MASTER_ADDR": "a"}, {"FLUX_JOB_ID": "f2"}),
        (SAGEMAKER, {"TRAINING_JOB_NAME": "other"}),
        (aws_batch(1), {"AWS_BATCH_JOB_ID": "other#1"}),
        (ray_train(1, size=2, local_size=1), {"MASTER_PORT": "41508"}),
        (mvapich2(1, 1, 0, size=2, local_size=1, hosts=2), {"MPISPAWN_MPIRUN_ID": "3188"}),
    )
    for environ, other in pairs:
        first, second = config_of(environ=environ).rendezvous, config_of(environ={**environ, **other}).rendezvous
        assert first.run_id != second.run_id
        assert first.ports != second.ports


@pytest.mark.parametrize("child", ["saferun", "shell"])
def test_a_job_that_a_rank_has_submitted_is_one_job_all_the_same(child: str, above: Above) -> None:
    """``sbatch next.sh`` in train.py: srun's tasks have the variables of the rank, from before the launcher."""
    rank = {
        **RANK,
        "TORCHELASTIC_RUN_ID": "slurm-1-0",
        "SAFERUN_RUN_ID": "01",
        "MASTER_ADDR": "old",
        "MASTER_PORT": "9",
    }
    with subprocess.Popen(["sleep", "1000"], env=rank) as process:
        try:
            above.lines = (["slurmstepd: [4711.0]"],) if child == "saferun" else (["bash"], ["slurmstepd: [4711.0]"])
            above.pids = (1,) if child == "saferun" else (process.pid, 1)
            until(lambda: has_variable(process.pid, "RANK", rank["RANK"]), "it has its environment")
            config = config_of(environ={**SLURM_TASK_A_HOST, **rank})
            assert config.hosts.detected == "Slurm step 4711.0"
            assert config.rendezvous.master_addr == "node1"
        finally:
            process.kill()


def test_a_launch_within_a_rank_of_a_step_is_a_job_of_its_own(above: Above) -> None:
    """What the daemon has started is the launcher of the rank, and has none of its variables."""
    above.lines = (["python", "train.py"], ["saferun"], ["slurmstepd: [4711.0]"])
    above.pids = (os.getpid(), os.getpid(), 1)
    assert config_of(environ={**SLURM_TASK_A_HOST, "SAFERUN_RUN_ID": "01"}).hosts == HostsConfig()
    above.lines = (["python", "train.py"], ["saferun"], ["-bash"], ["sshd: me@pts/3"])
    assert config_of(environ={**SLURM_TASK_A_HOST, "SAFERUN_RUN_ID": "01"}).hosts == HostsConfig()
