"""Several saferuns form one job, fail as one, and end as one."""

from __future__ import annotations

import json
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import slow_but
from tests.ports import own_port
from tests.process.launching import END_AS_TOLD, STAY, Job, customized, in_saferun, kill, until
from tests.process.test_leftovers_wait import UPLOADING
from tests.torch.several import hosts
from tests.unit.recorded_launchers import PLAIN, slurm_step

TELL_PLACE = """
from rank import *
names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT")
print("place", *(os.environ[name] for name in names), flush=True)
"""


def places(jobs: list[Job]) -> list[tuple[str, ...]]:
    """What the ranks were told, in order of rank."""
    lines = [line.split("place ")[1] for job in jobs for line in job.out.splitlines() if "place " in line]
    return sorted((tuple(line.split()) for line in lines), key=lambda place: int(place[0]))


def report_of(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((job.run_dir / "report.json").read_text())
    return report


def test_ranks_are_told_what_torchrun_tells_them(tmp_path: Path) -> None:
    """Unequal numbers of ranks a host, and roles that lie across hosts."""
    options = {0: ("--nproc-per-node", "1", "--role", "a"), 1: ("--nproc-per-node", "2", "--role", "b")}
    options[2] = ("--nproc-per-node", "1", "--role", "a")
    with hosts(tmp_path, TELL_PLACE, count=3, nproc=None, each=lambda i: options[i]) as jobs:
        assert [job.wait() for job in jobs] == [0, 0, 0]
        assert places(jobs) == [
            ("0", "0", "0", "0", "4", "1", "2", "3", "a", "0"),
            ("1", "0", "0", "1", "4", "2", "2", "3", "b", "0"),
            ("2", "1", "1", "1", "4", "2", "2", "3", "b", "0"),
            ("3", "0", "1", "2", "4", "1", "2", "3", "a", "0"),
        ]


@pytest.mark.slow
def test_ranks_meet_where_torchs_launcher_would_share_no_store(tmp_path: Path) -> None:
    """Rank 0 would then serve the store itself, at a port that saferun has."""
    program = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()"
    given = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{own_port()}")
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with hosts(tmp_path, program, *given, "--start-retries", "0", place=False, environs=lambda _: environ) as jobs:
        assert [job.wait() for job in jobs] == [0, 0], [job.err for job in jobs]


@pytest.mark.slow
def test_a_host_whose_ranks_are_done_waits_for_the_job(tmp_path: Path) -> None:
    """Its exit code is the job's, which nobody knows before the last rank has ended."""
    program = "from rank import *\ntell('ready')\nawait_release('end')\nsys.exit(0)"
    with hosts(tmp_path, program) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[0].release("end")
        until(lambda: jobs[0].has_happened("RankExited"), "the rank of host 0 ends")
        assert jobs[0].process.poll() is None
        jobs[1].release("end")
        assert [job.wait() for job in jobs] == [0, 0]


@pytest.mark.slow
def test_work_that_goes_on_after_the_ranks_is_waited_for_on_all_hosts(tmp_path: Path) -> None:
    """The upload of one host's rank: its host names it, so does the one that leads, and the job ends well after it."""
    program = f"import os, sys\nif os.environ['RANK'] == '0':\n    sys.exit(0)\n{UPLOADING}"
    with hosts(tmp_path, program, "--shutdown-timeout", "1", arguments=["session"]) as jobs:
        jobs[1].hear("ready")
        until(lambda: "waiting for 1 process of rank 1: " in jobs[1].err, "its host names it")
        until(lambda: "waiting for 1 process of rank 1: " in jobs[0].err, "the host that leads names it")
        assert [job.process.poll() for job in jobs] == [None, None]
        jobs[1].release("upload")
        assert [job.wait() for job in jobs] == [0, 0]
        assert (jobs[1].folder / "uploaded.1").read_text() == "whole"
        assert "hidden" not in jobs[0].err


# The file system with saferun's files has died while the ranks started.
NO_MODULES = (
    "import saferun.launch.idle_imports as idle\n"
    "    idle.IdleImports._request = lambda self: None\n"
    "    idle.IdleImports._fetch = lambda self, name: False"
)


@pytest.mark.slow
@pytest.mark.parametrize("how", slow_but(["exit", "fail"], "exit"))
def test_hosts_on_which_nothing_can_be_imported_once_the_ranks_run_end_as_one(tmp_path: Path, how: str) -> None:
    """Whatever one host tells another, it is taken in, and the exit code is the job's."""
    program = f"from rank import *\ntell('ready')\nawait_release('end')\nsys.exit({how == 'fail'} and RANK == 1)"
    environ = customized(tmp_path, in_saferun(NO_MODULES))
    with hosts(tmp_path, program, environs=lambda _: environ) as jobs:
        for job in jobs:
            job.hear("ready")
        for job in jobs:
            job.release("end")
        assert [job.wait() for job in jobs] == [how == "fail"] * 2
        assert not [line for job in jobs for line in job.err.splitlines() if "Traceback" in line]


@pytest.mark.slow
@pytest.mark.parametrize("failing", slow_but([0, 1], "1"))
def test_a_rank_that_dies_ends_the_job_on_all_hosts(tmp_path: Path, failing: int) -> None:
    """Each console names the first failure and its host; the whole report is on the host that decides."""
    how = ["stay", "stay"]
    how[failing] = "3"
    with hosts(tmp_path, END_AS_TOLD, arguments=how) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[failing].release("end")
        assert [job.wait() for job in jobs] == [1, 1]
        (told,) = {line for job in jobs for line in job.err.splitlines() if "failed first" in line}
        assert f"rank {failing} (" in told
        assert "exit code 3" in told
        report = report_of(jobs[0])
        (incident,) = report["incidents"]
        assert incident["cause"]["ranks"] == [failing]
        # Each host keeps its own part.
        (own,) = jobs[1].run_dir.glob("*/report.json")
        assert json.loads(own.read_text())["incidents"]
        assert jobs[1 - failing].has_happened("EvidenceCaptured")


def test_a_restart_is_one_attempt_on_all_hosts(tmp_path: Path) -> None:
    """Each host's ranks fail once, and the count that ranks are told is the job's."""
    program = """
from rank import *
tell("ready")
await_release(f"end{ATTEMPT}")
sys.exit(3 if RANK == ATTEMPT else 0) if ATTEMPT < 2 else None
"""
    with hosts(tmp_path, program, "--max-restarts", "2") as jobs:
        for attempt in range(3):
            for job in jobs:
                (said,) = job.hear("ready")
                assert said.attempt == attempt
            for job in jobs:
                job.release(f"end{attempt}")
        assert [job.wait(60.0) for job in jobs] == [0, 0]


def test_a_killed_saferun_is_named_by_the_others(tmp_path: Path) -> None:
    """Its ranks die with it, and the host that decides finds out by knocking at its door."""
    with hosts(tmp_path, STAY, "--host-timeout", "4", sweeps=False) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[1].send(signal.SIGKILL)
        assert jobs[0].wait(60.0) == 1
        (incident,) = report_of(jobs[0])["incidents"]
        assert incident["cause"]["class"] == "host_lost"
        assert incident["cause"]["ranks"] == [1]
        jobs[1].assert_nothing_left(timeout_s=20.0)


# test_coordinator_lost_hosts.py has the leader's end as the coordinators notice it.
@pytest.mark.slow
def test_where_the_host_that_decides_is_gone_the_others_say_so(tmp_path: Path) -> None:
    """They cannot meet any more; their evidence stays with them."""
    with hosts(tmp_path, STAY, sweeps=False) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[0].send(signal.SIGKILL)
        assert jobs[1].wait(60.0) == 1
        assert "is up, but saferun is not running there" in jobs[1].err
        (own,) = jobs[1].run_dir.glob("*/report.json")
        assert json.loads(own.read_text())["incidents"]
        jobs[0].assert_nothing_left(timeout_s=20.0)


def test_a_rendezvous_that_is_lost_with_its_host_is_the_reason_why_nothing_starts_again(tmp_path: Path) -> None:
    """The ranks of the attempt before have nothing to do with that."""
    common = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job7", "--max-restarts", "1", "--rdzv-endpoint")
    endpoint = f"127.0.0.1:{own_port()}"

    def options(number: int) -> tuple[str, ...]:
        return (*common, endpoint, "--rdzv-conf", f"is_host={'false' if number else 'true'}")

    with hosts(tmp_path, STAY, place=False, each=options, sweeps=False) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[0].send(signal.SIGKILL)
        assert jobs[1].wait(60.0) == 1
        first, second = jobs[1].err.split("saferun: starting again (restart 1 of 1)")
        assert ": its saferun was killed" in first
        assert f"saferun: the rendezvous 'job7' at {endpoint} does not answer any more: " in second
        hint = "no host can join without what serves it (--rdzv-endpoint): start the job again on all hosts"
        assert f"\nhint: {hint}\n" in second
        assert "rank" not in second
        (report,) = jobs[1].run_dir.rglob("report.json")
        incidents = json.loads(report.read_text())["incidents"]
        assert [len(incident["stopped"]) for incident in incidents] == [1, 0]
        jobs[0].assert_nothing_left(timeout_s=20.0)


# Ranks that are seen to work.
WORK = """
from rank import *
import hashlib
tell("ready")
while not os.path.exists(f"{FOLDER}/release.end"):
    hashlib.sha256(bytes(1 << 22)).digest()
    time.sleep(0.02)
"""


def processes_of(job: Job) -> list[int]:
    """What speaks to other hosts for this one."""
    coordinator = job.coordinator()
    assert coordinator is not None
    return [job.process.pid, coordinator]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", slow_but([0, 1], "1"))
def test_a_frozen_saferun_is_a_warning_while_ranks_work(tmp_path: Path, frozen: int) -> None:
    """With its coordinator. Under torchrun they would train on; and when it goes on, it takes part again."""
    with hosts(tmp_path, WORK, "--host-timeout", "6") as jobs:
        for job in jobs:
            job.hear("ready")
        other, pids = jobs[1 - frozen], processes_of(jobs[frozen])
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        until(lambda: "the ranks make progress, so the job goes on" in other.err, "the other host warns")
        for pid in pids:
            kill(pid, signal.SIGCONT)
        until(lambda: " answers again after " in other.err, "it is heard")
        for job in jobs:
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0]


@pytest.mark.slow
def test_a_host_whose_ranks_have_ended_asks_the_others_whether_the_job_goes_on(tmp_path: Path) -> None:
    """Before it gives up the one that it cannot hear."""
    program = f"import os, sys\nif os.environ['RANK'] == '0':\n    sys.exit(0)\n{WORK}"
    with hosts(tmp_path, program, "--host-timeout", "6", count=3) as jobs:
        for job in jobs[1:]:
            job.hear("ready")
        until(lambda: jobs[0].has_happened("RankExited"), "the rank of host 0 ends")
        pids = processes_of(jobs[2])
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        until(lambda: "the ranks make progress, so the job goes on" in jobs[0].err, "the first host warns")
        for pid in pids:
            kill(pid, signal.SIGCONT)
        until(lambda: " answers again after " in jobs[0].err, "it is heard")
        for job in jobs[1:]:
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0, 0]


@pytest.mark.slow
def test_a_host_whose_ranks_have_ended_is_not_lost_by_its_silence(tmp_path: Path) -> None:
    """Nobody waits for it; and it ends well itself, though it has not heard how the job ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def connected(port: int) -> Any:
        return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)

    program = f"import os, sys\nopen('port', 'w').write(os.environ['MASTER_PORT'])\n{WORK}"
    with hosts(tmp_path, program, "--host-timeout", "6") as (leader, other):
        for job in (leader, other):
            job.hear("ready")
        port = int((other.folder / "job" / "port").read_text())
        control = connected(json.loads(connected(port).get("saferun/control"))["control_port"])
        other.release("end")
        until(lambda: b'"done"' in control.get("a0/state/1"), "its coordinator has said so")
        pids = processes_of(other)
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        until(lambda: "its ranks have ended well, so the job goes on" in leader.err, "the leader says that it goes on")
        leader.release("end")
        assert leader.wait() == 0
        for pid in pids:
            kill(pid, signal.SIGCONT)
        assert other.wait() == 0
        assert "all ranks of this host ended well" in other.err
        assert "is lost" not in leader.err + other.err


@pytest.mark.parametrize("signalled", slow_but([0, 1], "1"))
def test_a_signal_to_one_host_stops_all(tmp_path: Path, signalled: int) -> None:
    """Whoever stops one of them means the job, and no restart is used for it."""
    with hosts(tmp_path, STAY, "--max-restarts", "3") as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[signalled].send(signal.SIGTERM)
        assert [job.wait() for job in jobs] == [1, 1]
        assert all("SIGTERM" in job.err for job in jobs)


# test_coordinator_meeting.py has these three of coordinators alone.
@pytest.mark.slow
def test_hosts_that_do_not_come_are_named(tmp_path: Path) -> None:
    """On every host that waits for them."""
    with hosts(tmp_path, STAY, "--start-timeout", "6", count=3, start=(0, 1), nproc=1) as jobs:
        assert [job.wait() for job in jobs] == [1, 1]
        for job in jobs:
            assert "node rank 2" in job.err
            assert "hint: " in job.err


@pytest.mark.slow
def test_a_host_waits_for_a_late_master(tmp_path: Path) -> None:
    """It may be started in any order."""
    with hosts(tmp_path, TELL_PLACE, start=(1, 0)) as jobs:
        assert [job.wait() for job in jobs] == [0, 0]
        assert len(places(jobs)) == 2


@pytest.mark.slow
def test_two_hosts_with_one_node_rank_are_told_so(tmp_path: Path) -> None:
    """A slip in a script that is easily made; every host hears of it."""
    with hosts(
        tmp_path, STAY, "--start-timeout", "20", count=3, each=lambda i: ("--node-rank", "1") if i == 2 else ()
    ) as jobs:
        assert [job.wait() for job in jobs] == [1, 1, 1]
        assert any("node rank 1" in job.err and ("two hosts" in job.err or "twice" in job.err) for job in jobs), [
            job.err for job in jobs
        ]


@pytest.mark.slow
def test_nobody_overwrites_anothers_files_in_a_shared_run_directory(tmp_path: Path) -> None:
    """Two hosts with the same name at that."""
    shared = tmp_path / "shared"
    options = ("--run-dir", str(shared), "--report-html", "off")
    with hosts(tmp_path, "import sys\nprint('hello')\nsys.exit(3)", *options, nproc=2) as jobs:
        assert [job.wait() for job in jobs] == [1, 1]
    folders = sorted(path.name for path in shared.iterdir() if path.is_dir())
    assert len(folders) == 2
    assert sorted(path.name for path in shared.glob("*/attempt_0/rank_*")) == [f"rank_{i}" for i in range(4)]
    assert sorted(path.name for path in shared.iterdir() if path.is_file()) == [
        ".gitignore",
        "preflight.json",
        "report.json",
        "report.txt",
        "run.json",
    ]
    assert len(json.loads((shared / "report.json").read_text())["incidents"][0]["hosts"]) == 2


def mpi_task(i: int, count: int, parent: int) -> dict[str, str]:
    """The environment of a task of MPICH's mpiexec."""
    task = {"PMI_RANK": i, "PMI_SIZE": count, "MPI_LOCALRANKID": i, "MPI_LOCALNRANKS": count, "PMI_FD": parent}
    return {**{name: str(value) for name, value in task.items()}, "SAFERUN_SCHEDULER": "pmi"}


@pytest.mark.slow
def test_one_task_a_rank_looks_like_one_saferun_to_the_ranks(tmp_path: Path) -> None:
    """And the host has one coordinator, whatever the number of its tasks."""
    program = TELL_PLACE + "tell('ready')\nawait_release('end')\n"
    shared = tmp_path / "shared"
    with hosts(
        tmp_path,
        program,
        "--run-dir",
        str(shared),
        count=3,
        place=False,
        nproc=None,
        environs=lambda i: mpi_task(i, 3, 7),
    ) as jobs:
        for job in jobs:
            job.hear("ready")
        assert [job.coordinator() is not None for job in jobs] == [True, False, False]
        for job in jobs:
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0, 0]
        assert places(jobs) == [(str(i), str(i), str(i), "0", "3", "3", "3", "1", "default", "0") for i in range(3)]
        (host,) = (path for path in shared.iterdir() if path.is_dir())
        assert sorted(path.name for path in (host / "attempt_0").glob("rank_*")) == ["rank_0", "rank_1", "rank_2"]


def test_one_task_a_rank_on_one_host_with_c10d(tmp_path: Path) -> None:
    """The tasks of a Slurm step meet on their host whatever the rendezvous; node ranks are no question there."""
    given = ("--scheduler", "slurm", "--rdzv-backend", "c10d", "--run-dir", str(tmp_path / "shared"))
    job = str(own_port())  # the ports of a step follow from its job's number

    def task(i: int) -> dict[str, str]:
        step = slurm_step(0, i, i, nodes="node1", hosts=1, tasks=2, tasks_by_host="2", gtids="0,1")
        return {**{name: value for name, value in step.items() if name not in PLAIN}, "SLURM_JOB_ID": job}

    with hosts(tmp_path, TELL_PLACE, *given, place=False, nproc=None, environs=task) as jobs:
        assert [job.wait() for job in jobs] == [0, 0], [job.err for job in jobs]
        assert places(jobs) == [(str(i), str(i), str(i), "0", "2", "2", "2", "1", "default", "0") for i in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("killed", slow_but([0, 2], "2"))
def test_a_task_that_is_killed_ends_its_host_and_the_job(tmp_path: Path, killed: int) -> None:
    """The first one takes the host's coordinator with it."""
    environs = {"count": 3, "place": False, "nproc": None, "sweeps": False}
    with hosts(tmp_path, STAY, environs=lambda i: mpi_task(i, 3, 7), **environs) as jobs:  # type: ignore[arg-type]
        for job in jobs:
            job.hear("ready")
        jobs[killed].send(signal.SIGKILL)
        left = [job for i, job in enumerate(jobs) if i != killed]
        assert [job.wait() for job in left] == [1, 1]
        assert any(f"local rank {killed}" in job.err for job in left), [job.err for job in left]
        for job in jobs:
            job.assert_nothing_left(timeout_s=20.0)


@pytest.mark.parametrize("stops", ["on", "off"])
def test_ranks_end_with_what_started_saferun_where_that_is_wanted(tmp_path: Path, stops: str) -> None:
    """An ssh session that is gone stops nobody by itself; nohup in a shell must go on."""
    starter = ("sh", "-c", '"$@" & echo $! > pid; wait', "sh")
    options = ("--stop-with-parent", stops)
    from tests.process.launching import running

    with running(tmp_path / "job", STAY, *options, before=starter, sweeps=False, start_new_session=True) as job:
        job.hear("ready")
        job.process.kill()
        job.process.wait()
        pid = int((tmp_path / "job" / "job" / "pid").read_text())
        if stops == "on":
            job.assert_nothing_left(timeout_s=30.0)
            assert "parent process " in job.err
        else:
            assert Path(f"/proc/{pid}").exists()
            kill(pid, signal.SIGTERM)
            job.assert_nothing_left(timeout_s=30.0)


@pytest.mark.slow
def test_the_port_for_saferuns_own_messages_can_be_chosen(tmp_path: Path) -> None:
    """For a firewall in which it is open; it is the first host's, and on others any will do."""
    port = own_port()
    program = f"""
from rank import *
import socket
socket.create_connection(("127.0.0.1", {port}), 10).close()
tell("ready")
"""
    with hosts(tmp_path, program, "--control-port", str(port)) as jobs:
        for job in jobs:
            job.hear("ready")
        assert [job.wait() for job in jobs] == [0, 0]
    with socket.create_server(("", port)), hosts(tmp_path / "in_use", program, "--control-port", str(port)) as jobs:
        assert jobs[0].wait() == 1
        assert f"port {port} on " in jobs[0].err
        assert "pass another --control-port" in jobs[0].err
        jobs[1].send(signal.SIGTERM)


def test_a_host_that_joins_with_another_number_of_hosts_is_welcome(tmp_path: Path) -> None:
    """A running elastic job whose user, or operator, has raised its MAX."""
    program = "from rank import *\ntell('one of ' + os.environ['WORLD_SIZE'])\nawait_release('end')"
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{own_port()}", "--rdzv-id", "job7")
    options = (*endpoint, "--rdzv-conf", "last_call_timeout=1")
    with hosts(tmp_path / "first", program, *options, "--nnodes", "1:2", count=1, place=False) as (first,):
        first.hear("one of 1")
        with hosts(tmp_path / "second", program, *options, "--nnodes", "1:3", count=1, place=False) as (second,):
            for job in (first, second):
                job.hear("one of 2")
            for job in (first, second):
                job.release("end")
            assert [job.wait() for job in (first, second)] == [0, 0]
