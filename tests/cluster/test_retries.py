"""Starts that fail for a reason that passes succeed without a person; all others end after one try, on all hosts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.faulted import FaultedJob
from tests.cluster.jobs import PORT, SAFERUN, Job, by_hand, write

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster

QUICK = ("--retry-wait", "0.2")
# Else 30 s pass before a job of fewer hosts than it may have gets going.
ELASTIC = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1")
RAN = "tell('ran')"

# As torch's file of this name, as far as a traceback shows it.
INIT = '''
class DistBackendError(RuntimeError):
    """What torch raises."""

    __module__ = "torch.distributed"


def init_process_group(message):
    raise DistBackendError(message)
'''
# Ranks without torch, one of which fails in init_process_group so often, and then works.
FAILS_AT_FIRST = """
sys.path.insert(0, f"{{FOLDER}}/distributed")
import distributed_c10d

tries = f"{{FOLDER}}/tries.{{socket.gethostname()}}"
with open(tries, "a") as file:
    file.write("x")
tell("ran")
if {who} and os.path.getsize(tries) <= {times}:
    distributed_c10d.init_process_group("{message}")
tell("done")
"""
SYSTEM_ERROR = "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)"


def fails_at_first(folder: Path, *, who: str, times: int, message: str) -> str:
    """A program whose ranks fail for so many attempts.

    Args:
        folder: where it will be.
        who: an expression that says which of them do.
        times: how often.
        message: of the exception.
    """
    (folder / "distributed").mkdir(parents=True)
    (folder / "distributed" / "distributed_c10d.py").write_text(INIT)
    return FAILS_AT_FIRST.format(who=who, times=times, message=message)


def report(job: FaultedJob) -> dict[str, Any]:
    """What report.json holds."""
    found: dict[str, Any] = json.loads((job.run_dir / "report.json").read_text())
    return found


def decisions(job: FaultedJob) -> list[str]:
    """What followed each failed attempt, as the report has it."""
    return [row["next_step"] for row in report(job)["decisions"]]


def ran(job: Job, word: str = "ran") -> int:
    """How many ranks said it, in all attempts."""
    return sum(said.word == word for said in job.words)


# ------------------------------------------------------------------------------------------------ what passes by itself


@pytest.mark.slow
def test_hosts_wait_until_the_port_is_free(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The job before has it still, for one. The other hosts hear somebody else there, and go on waiting."""
    cluster = make_cluster(3)
    occupant = cluster.hosts[0].occupy(PORT)
    job = FaultedJob(cluster, tmp_path / "job", RAN, *QUICK)
    job.wait_said(cluster.hosts[0], rf"starting again in .* \(retry 1 of 3\): port {PORT} on node1 is in use")
    occupant.kill()
    assert set(job.end().values()) == {0}, job.story("failed")
    assert ran(job.job) == 3
    assert set(decisions(job)) == {"retry"}
    job.assert_nothing_left()


@pytest.mark.slow
def test_hosts_wait_for_a_master_that_comes_late(cluster: Cluster, tmp_path: Path) -> None:
    """Its machine boots more slowly; nobody has to be started again, and nothing has to be told."""
    script = write(tmp_path, RAN)
    job = Job(tmp_path, [])
    _, node2, node3, _ = cluster.hosts

    def begin(*numbers: int) -> None:
        for number in numbers:
            place = ("--nnodes", "3", "--node-rank", str(number), "--master-addr", "node1", "--master-port", str(PORT))
            job.processes.append(cluster.hosts[number].popen((*SAFERUN, *place, script), cwd=tmp_path))

    begin(1, 2)
    for host in (node2, node3):
        _until_asked(job, host.in_network)
    begin(0)
    assert job.finish() == [0, 0, 0], job.story("failed")
    assert ran(job) == 3
    assert not job.saferun_said("saferun: warning"), job.story("warned")


def _until_asked(job: Job, in_network: Any) -> None:
    """Wait until a host has asked the master for a while, and was refused each time."""

    def refused() -> int:
        rows = [line.split() for line in in_network("cat", "/proc/net/snmp").splitlines() if line.startswith("Tcp:")]
        return int(dict(zip(*rows, strict=True))["AttemptFails"])

    job.until(lambda: refused() >= 5, "five refused connections")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--sign-messages", "required")], ids=["auto", "signed"])
def test_a_store_that_is_killed_while_ranks_start_is_served_again(
    make_cluster: MakeCluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """By a coordinator that the out-of-memory killer chose, say: all hosts meet once more, and start their ranks.

    Its successor has another secret, which they take.
    """
    cluster = make_cluster(3)
    node1 = cluster.hosts[0]
    program = "tell('ran')\nawait_release('go')\ntell('done')"
    job = FaultedJob(cluster, tmp_path / "job", program, *QUICK, *options)
    job.job.hear("ran", 3)
    job.now()
    node1.kill(job.coordinator(node1))
    job.job.until(lambda: ran(job.job) == 6, "all ranks are started again")
    job.job.release("go")
    assert set(job.end().values()) == {0}, job.story("failed")
    assert ran(job.job, "done") == 3
    for host in cluster.hosts:
        assert job.said(host).count("starting again in") == 1, job.story(f"{host.name} does not say so")
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_rank_that_fails_twice_in_init_process_group_works_the_third_time(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Networks settle. Every host tells each decision in one line, with its reason."""
    cluster = make_cluster(3)
    program = fails_at_first(tmp_path / "job", who="RANK == 2", times=2, message=SYSTEM_ERROR)
    job = FaultedJob(cluster, tmp_path / "job", program, *QUICK)
    assert set(job.end().values()) == {0}, job.story("failed")
    assert ran(job.job) == 9
    for host in cluster.hosts:
        for retry in (1, 2):
            line = f"(retry {retry} of 3): NCCL system error"
            assert job.said(host).count(line) == 1, job.story(f"{host.name} does not say {line}")
    assert decisions(job) == ["retry", "retry"]
    job.assert_nothing_left()


# --------------------------------------------------------------------------------------------------- what does not pass


@pytest.mark.slow
def test_a_failure_that_will_come_again_is_reported_by_all_hosts_after_one_try(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """And where restarts were asked for, after the second one that is the same."""
    cluster = make_cluster(3)
    program = "tell('ran')\nif RANK == 1:\n    import no_such_module\nstay()"
    job = FaultedJob(cluster, tmp_path / "once", program, *QUICK)
    assert set(job.end().values()) == {1}, job.story("another exit code")
    assert ran(job.job) == 3
    failed = r"saferun: rank 1 \(node2, .*ModuleNotFoundError: No module named 'no_such_module'"
    assert len(job.job.saferun_said(failed)) == 3, job.story("not named by every host")
    assert not job.job.saferun_said("saferun: starting again"), job.story("tried again")

    # A module may come later, but an argument stays wrong.
    program = "import argparse\ntell('ran')\nif RANK == 1:\n    argparse.ArgumentParser().parse_args(['--x'])\nstay()"
    job = FaultedJob(cluster, tmp_path / "twice", program, *QUICK, "--max-restarts", 3)
    assert set(job.end().values()) == {1}, job.story("another exit code")
    assert ran(job.job) == 6
    ended = r"saferun: not started again: the same failure twice in a row \(usage_error, rank 1\)"
    assert len(job.job.saferun_said(ended)) == 3, job.story("not told by every host")
    assert decisions(job) == ["restart", "finish"]
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_host_that_fails_twice_alike_is_left_out_where_the_others_suffice(cluster: Cluster, tmp_path: Path) -> None:
    """It is named, and ends with 0, so that no launcher ends the rest, which goes on with the world of then."""
    who = "socket.gethostname() == 'node3'"
    program = fails_at_first(tmp_path, who=who, times=99, message="this host is bad")
    hosts = cluster.hosts[:3]
    options = (*QUICK, *ELASTIC, "--exclude-bad-hosts", "--max-restarts", "3")
    job = by_hand(cluster, tmp_path, program, *options, hosts=hosts, backend="c10d", nnodes="2:3")
    assert job.finish() == [0, 0, 0], job.story("other exit codes")
    line = r"saferun: starting again .*: without node3, which caused the same failure twice \(.*rank \d"
    assert len(job.saferun_said(line)) == 3, job.story("not told by every host")
    assert len((tmp_path / "tries.node3").read_text()) == 2
    assert len((tmp_path / "tries.node1").read_text()) == 3
