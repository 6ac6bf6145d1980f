"""Processes that die, stand still, fail or end too early: ranks, saferun's own, and what started them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.fault_table.stage import Right, Row
from tests.cluster.faulted import GLOO, GLOO_UNTIL_RELEASED, STEPS
from tests.cluster.jobs import SAFERUN, STAY, Job, Way, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.fault_table.stage import Stage

QUICK = ("--hang-timeout", 15, "--host-timeout", 10)
ENV = {"OMP_NUM_THREADS": "1"}
BEGIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(8)
"""
# Rank 2 does something in step 10, when all have been seen at work.
IN_STEP_10 = """
for step in range(1 << 30):
    dist.all_reduce(ones)
    if step == 3:
        tell("steps")
    if RANK == 2 and os.path.exists(f"{{FOLDER}}/release.fault"):
        {fault}
    time.sleep(0.02)
"""


def at_rank_2(fault: str, before: str = "") -> str:
    """A training in which rank 2 does this once the test says so."""
    return before + BEGIN + IN_STEP_10.format(fault=fault)


def started(launch: str, program: str, *options: object) -> Callable[[Stage], None]:
    """Start it, and make the fault in the script once all ranks train."""

    def play(stage: Stage) -> None:
        if launch == "by hand":
            stage.by_hand(program, *QUICK, *options, env=ENV)
        else:
            stage.launch(Way(launch), program, *QUICK, *options, env=ENV)
        stage.steps()
        stage.fault()
        stage.release("fault")

    return play


def kill_rank(stage: Stage) -> None:
    stage.srun(GLOO, *QUICK, env=ENV)
    stage.steps()
    pid = stage.rank("node3")
    stage.fault()
    stage.host("node3").kill(pid)


LOCKED = at_rank_2("lock.acquire()", "import threading\nlock = threading.Lock()\nlock.acquire()\n")
EARLY = at_rank_2("sys.exit(0)")
RAISES = at_rank_2("raise ValueError('a label is out of range')")


def raises_by_address(stage: Stage) -> None:
    addresses = ",".join(host.management for host in stage.hosts)
    folder = stage.folder / "job"
    folder.mkdir()
    script = write(folder, RAISES)
    command = (*SAFERUN, "--hosts", addresses, *map(str, QUICK), script)
    stage.take(Job(folder, [h.popen(command, cwd=folder, env=ENV) for h in stage.hosts]), [h.name for h in stage.hosts])
    stage.steps()
    stage.fault()
    stage.release("fault")


GREEDY = at_rank_2("kept = [bytearray(os.urandom(1 << 20) * 8) for _ in range(1 << 20)]")


def out_of_memory(stage: Stage) -> None:
    """All of saferun on node3 is in a control group with too little memory, as in a container or a step of Slurm."""
    group = Path(f"/sys/fs/cgroup/memory/saferun-faults-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(1200 << 20))
        stage.host("node3").wrapping = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        stage.by_hand(GREEDY, *QUICK, env=ENV)
        stage.steps()
        stage.fault()
        stage.release("fault")
        stage.await_end()
        stage.host("node3").wrapping = ()
    finally:
        stage.for_a_while(1)
        group.rmdir()


def stopped_rank(on_hang: str) -> Callable[[Stage], None]:
    """It is let go on after a while; a stopped rank is a suspicion only, with which nothing is ended."""

    def play(stage: Stage) -> None:
        stage.by_hand(GLOO_UNTIL_RELEASED, *QUICK, "--on-hang", on_hang, env=ENV)
        stage.steps()
        pid = stage.rank("node3")
        stage.fault()
        stage.host("node3").freeze([pid])
        stage.await_said("job left running")
        stage.for_a_while(5)
        stage.host("node3").thaw([pid])
        stage.await_said("job resumed")
        stage.release("end")

    return play


def kill_saferun(name: str) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        stage.by_hand(GLOO, *QUICK, env=ENV)
        stage.steps()
        pid = stage.saferun(name)
        stage.fault()
        stage.host(name).kill(pid)

    return play


def kill_one_of_two(stage: Stage) -> None:
    stage.expected_ranks = 4
    stage.srun(GLOO, *QUICK, tasks=2, hosts=stage.hosts[:2], env=ENV)
    stage.steps()
    node2 = stage.host("node2")
    pid = next(p for p in node2.pids(r"-m saferun ") if b"SLURM_LOCALID=1" in Path(f"/proc/{p}/environ").read_bytes())
    stage.fault()
    node2.kill(pid)


def freeze_saferun(stage: Stage) -> None:
    """With its coordinator; when the others have ended, what they advise is done."""
    stage.by_hand(STEPS, *QUICK)
    stage.steps()
    node3 = stage.host("node3")
    pids = [stage.saferun("node3"), stage.coordinator("node3")]
    stage.fault()
    node3.freeze(pids)
    stage.await_end("node3")
    node3.thaw(pids)


def kill_coordinator(name: str, *, fails: bool = False, hangs: bool = False) -> Callable[[Stage], None]:
    """The job goes on; then it ends well, or rank 2 fails, or rank 2 is stopped so that nothing moves any more."""

    def play(stage: Stage) -> None:
        stage.by_hand(RAISES if fails else GLOO_UNTIL_RELEASED, *QUICK, env=ENV)
        stage.steps()
        pid = stage.coordinator(name)
        stage.fault()
        stage.host(name).kill(pid)
        stage.await_said("the job goes on", *(("node2",) if name == "node2" else stage.consoles))
        if hangs:
            rank = stage.rank("node3")
            stage.host("node3").freeze([rank])
            stage.await_end("node3")
            stage.host("node3").thaw([rank])
        elif fails:
            stage.release("fault")
        else:
            stage.for_a_while(15)
            stage.release("end")

    return play


def kill_reaper(stage: Stage) -> None:
    """And, once there is another one, the supervisor itself: nothing may be left of its host."""
    stage.by_hand(GLOO, *QUICK, env=ENV)
    stage.steps()
    node2 = stage.host("node2")
    old = stage.reaper("node2")
    node2.kill(old)
    stage.await_said("another one has taken its place", "node2")
    stage.jobs[-1].until(lambda: stage.reaper("node2") not in {0, old}, "another reaper", timeout_s=20)
    pid = stage.saferun("node2")
    stage.fault()
    node2.kill(pid)


# The first host's rank has ended when rank 2 fails.
LEADER_FIRST = """
tell("steps")
if RANK > 0:
    await_release("fault")
    if RANK == 2:
        raise ValueError("a label is out of range")
    stay()
"""


def leader_ends_first(stage: Stage) -> None:
    stage.by_hand(LEADER_FIRST, "--hang-timeout", 60)
    stage.steps()
    stage.for_a_while(2)
    stage.fault()
    stage.release("fault")


def own_reason(stage: Stage) -> None:
    """A tool that one host lacks is missed when the hosts have met."""
    wrap = ("--wrap", "*:nosuchtool")
    stage.by_hand(STAY, *QUICK, each=lambda number: wrap if number == 2 else ())


def lose_of_elastic_job(stage: Stage, host: str) -> None:
    """Kill saferun on a host of a job that may go on with two of its three hosts."""
    stage.by_hand(
        GLOO_UNTIL_RELEASED,
        *QUICK,
        *("--max-restarts", 2, "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=3"),
        backend="c10d",
        nnodes="2:3",
        env=ENV,
    )
    stage.steps()
    pid = stage.saferun(host)
    stage.fault()
    stage.host(host).kill(pid)


def elastic(stage: Stage) -> None:
    lose_of_elastic_job(stage, "node3")
    stage.jobs[-1].hear("steps", 2, attempt=1)
    stage.release("end")


def elastic_leader(stage: Stage) -> None:
    """The rendezvous is lost with it, which no other host can serve."""
    lose_of_elastic_job(stage, "node1")


# -------------------------------------------------------------------------------------------- signals of the scheduler


def scancel(*options: str, signal_name: str = "") -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        stage.srun(GLOO, *QUICK, *options, env=ENV)
        stage.steps()
        number = stage.consoles["srun"].err.split("from Slurm step ")[1].split(".")[0]
        stage.fault()
        word = ("--signal", signal_name) if signal_name else ()
        stage.host("node1").run(["scancel", *word, number], check=True)

    return play


def ctrl_c_twice(stage: Stage) -> None:
    """Slurm kills every process of the step then; what they leave in memory goes with the user's next launch."""
    stage.srun(GLOO, *QUICK, env=ENV)
    stage.steps()
    stage.fault()
    for _ in range(2):
        stage.consoles["srun"].send_signal(signal.SIGINT)
        stage.for_a_while(0.3)
    stage.await_end()
    script = write(stage.folder / "job", "time.sleep(2)\n")
    for host in stage.hosts:
        for path in host.path("/dev/shm").glob("saferun-*"):
            os.utime(path, (1e9, 1e9))  # a launch leaves alone what is younger than a minute
        host.run([*SAFERUN, "--scheduler", "none", script], cwd=stage.folder, check=True)


def sbatch_without_srun(stage: Stage) -> None:
    folder = stage.folder / "job"
    folder.mkdir()
    script = write(folder, "tell('steps')\n")
    (folder / "batch.sh").write_text(f"#!/bin/sh\n{' '.join(SAFERUN)} --run-dir none {script} >&2\n")
    line = "sbatch --wait --nodes=2 --error=words.txt batch.sh; code=$?; cat words.txt >&2; exit $code"
    stage.take(Job(folder, [stage.host("node1").popen(["sh", "-c", line], cwd=folder)]), ["sbatch"])


RANK_2 = r"rank 2 \(node3, local rank 0, pid \d+\)"
STORE_ENDED = r"the coordinator of node1 ended \(killed by SIGKILL\), and with it the job's store"
HOST_ALIVE = ("is lost", "is dead", "has no power", "its saferun was killed")
ROWS = (
    Row(
        "rank-killed",
        "a rank is killed (SIGKILL)",
        "srun",
        kill_rank,
        slurm=True,
        right=Right(rf"{RANK_2} .*SIGKILL", "dmesg", words_s=6, end_s=10, sentences=4),
        torchrun="0.2-1.2 s, a box per host, 1 of 4 right; end 2-11 s",
    ),
    *(
        Row(
            f"deadlock-{launch.replace(' ', '-')}",
            "rank 2 waits for a lock that no thread releases (hang timeout 15 s)",
            launch,
            started(launch, LOCKED, "--on-hang", "stop"),
            slurm=launch == "srun",
            right=Right(
                r"the job hangs: rank 2 \(node3\)",
                "",
                words_s=30,
                end_s=40,
                sentences=4,
                never=(r"rank [01] \(.*lock",),
                codes=None if launch == "hydra" else 1,
            ),
            torchrun="nothing in 180 s",
        )
        for launch in ("srun", "hydra", "by hand")
    ),
    Row(
        "exits-early",
        "rank 2 calls sys.exit(0) while the others train: it exits with 0, or aborts (SIGABRT) if a thread still runs",
        "by hand",
        started("by hand", EARLY),
        right=Right(
            r"rank [012] \(node\d.*|.*rank 2 .*(ended|exit code 0)",
            words_s=30,
            end_s=40,
            sentences=4,
            also=(r"rank 2.*exit code 0|rank 2.*ended",),
        ),
    ),
    Row(
        "raises",
        "rank 2 raises an exception",
        "--hosts with addresses",
        raises_by_address,
        right=Right(
            rf"{RANK_2} .*ValueError: a label is out of range",
            words_s=6,
            end_s=10,
            sentences=4,
            never=("rank [01] .*failed first",),
        ),
    ),
    Row(
        "out-of-memory",
        "rank 2 is killed by the kernel: out of memory",
        "by hand",
        out_of_memory,
        right=Right(
            rf"{RANK_2} .*(?:out of memory|out-of-memory|OOM)", "memory|batch", words_s=30, end_s=35, sentences=4
        ),
    ),
    *(
        Row(
            f"rank-stopped-{on_hang}",
            f"rank 2 is stopped (SIGSTOP) and let go on later, --on-hang {on_hang}",
            "by hand",
            stopped_rank(on_hang),
            right=Right(
                r"the job may hang: rank 2 \(node3\).* is stopped \(state T\)",
                r"SIGSTOP.*kill -CONT",
                on=("node1",),
                words_s=30,
                end_s=60,
                codes=0,
                sentences=5,
                also=(more, "job resumed"),
                never=("the job moves again", "ended because"),
            ),
            torchrun="nothing in 180 s",
        )
        for on_hang, more in (
            ("stop", r"job left running \(--on-hang stop acts on certain hangs only\)"),
            ("report", "job left running"),
        )
    ),
    Row(
        "saferun-killed",
        "saferun is killed on node2 (SIGKILL)",
        "by hand",
        kill_saferun("node2"),
        right=Right(
            r"node2 is lost \(rank 1\): its saferun was killed \(the host is up\)",
            "node2",
            on=("node1", "node3"),
            codes={"node2": -9},
            words_s=8,
            end_s=12,
        ),
        torchrun="the orphan trains on for 60 s, or until the job ends",
    ),
    Row(
        "one-of-two-killed",
        "one of the two saferuns of node2 is killed",
        "srun, one saferun per rank",
        kill_one_of_two,
        slurm=True,
        hosts=2,
        right=Right(
            r"a saferun process of node2 is gone: that of rank 3 \(local rank 1\)",
            "node2",
            codes=137,
            words_s=6,
            end_s=10,
            sentences=4,
        ),
    ),
    Row(
        "saferun-frozen",
        "saferun is stopped on node3 with its coordinator (SIGSTOP); kill -CONT when the others have ended",
        "by hand",
        freeze_saferun,
        right=Right(
            r"node3 is lost \(rank 2\): its saferun accepts connections but does not respond: it is stopped",
            r"on node3.*kill -CONT",
            on=("node1", "node2"),
            words_s=25,
            end_s=60,
            sentences=4,
        ),
        torchrun="nothing; the ranks train without supervision",
    ),
    Row(
        "coordinator-killed",
        "the coordinator is killed on node2",
        "by hand",
        kill_coordinator("node2"),
        right=Right(
            r"the coordinator of node2 ended \(killed by SIGKILL\); another one has taken its place",
            None,
            on=("node2",),
            codes=0,
            words_s=10,
            end_s=60,
            sentences=1,
            hints=0,
            never=HOST_ALIVE,
        ),
    ),
    Row(
        "coordinator-killed-store",
        "the coordinator is killed on node1, which serves the job's store; the ranks train on",
        "by hand",
        kill_coordinator("node1"),
        right=Right(
            rf"{STORE_ENDED}.*the job goes on",
            codes=0,
            words_s=10,
            end_s=60,
            sentences=2,
            hints=0,
            never=HOST_ALIVE,
        ),
    ),
    Row(
        "coordinator-killed-then-fails",
        "the same, and then rank 2 raises an exception",
        "by hand",
        kill_coordinator("node1", fails=True),
        right=Right(
            rf"{STORE_ENDED}.*the job goes on",
            words_s=10,
            end_s=60,
            sentences=4,
            never=HOST_ALIVE,
            also=(r"rank 2 \(node3.*ValueError: a label is out of range",),
        ),
    ),
    Row(
        "coordinator-killed-then-stops",
        "the same, and then nothing moves any more (rank 2 is stopped)",
        "by hand",
        kill_coordinator("node1", hangs=True),
        right=Right(
            rf"{STORE_ENDED}.*the job goes on",
            words_s=10,
            end_s=90,
            sentences=4,
            never=HOST_ALIVE,
        ),
    ),
    Row(
        "reaper-killed",
        "the reaper is killed on node2, another one starts; then saferun itself is killed",
        "by hand",
        kill_reaper,
        right=Right(
            r"node2 is lost \(rank 1\): its saferun was killed \(the host is up\)",
            "node2",
            on=("node1", "node3"),
            codes={"node2": -9},
            words_s=8,
            end_s=12,
        ),
    ),
    Row(
        "leader-ends-first",
        "rank 2 raises when node1's rank has ended with 0",
        "by hand",
        leader_ends_first,
        right=Right(rf"{RANK_2} .*ValueError: a label is out of range", words_s=6, end_s=12, sentences=4),
    ),
    Row(
        "cannot-start",
        "a host that lacks the tool of --wrap, when the hosts have met",
        "by hand",
        own_reason,
        right=Right(
            r".*nosuchtool",
            "",
            words_s=25,
            end_s=40,
            codes=None,
            sentences=2,
            also=("node3 could not start its ranks: .*nosuchtool",),
            never=("is lost", "was killed"),
        ),
    ),
    Row(
        "elastic",
        "saferun is killed on node3 of an elastic job (2:3, --max-restarts 2)",
        "by hand, c10d",
        elastic,
        right=Right(
            r"node3 is lost \(rank \d\): its saferun was killed",
            on=("node1", "node2"),
            codes={"node1": 0, "node2": 0, "node3": -9},
            words_s=25,
            end_s=120,
            sentences=5,
            also=(r"restart 1 of 2",),
            never=("at once", r": its saferun is gone"),
        ),
    ),
    Row(
        "elastic_leader",
        "saferun is killed on node1 of an elastic job, which serves its rendezvous (2:3, --max-restarts 2)",
        "by hand, c10d",
        elastic_leader,
        right=Right(
            r"node1, which had the job's store, is lost: its saferun was killed",
            on=("node2", "node3"),
            codes={"node1": -9, "node2": 1, "node3": 1},
            words_s=25,
            end_s=40,
            sentences=5,
            hints=2,
            also=("the rendezvous 'j' at node1:29500 does not answer any more",),
            never=(": its saferun is gone",),
        ),
    ),
    Row(
        "scancel",
        "scancel",
        "srun",
        scancel(),
        slurm=True,
        right=Right(
            r"stopped by the scheduler \(SIGTERM to all 3 hosts\)",
            "look in the scheduler's log",
            codes=None,
            words_s=3,
            end_s=6,
            hints=1,
            sentences=3,
            never=("failed", "look on node"),
        ),
    ),
    Row(
        "scancel-usr1",
        "scancel --signal=USR1, ranks that do not handle it",
        "srun",
        scancel(signal_name="USR1"),
        slurm=True,
        right=Right(
            r"rank \d \(node\d, .*SIGUSR1, which it does not handle",
            "install a handler",
            codes=None,
            words_s=4,
            end_s=8,
            sentences=2,
            never=("supervisor.* was killed",),
        ),
    ),
    Row(
        "scancel-usr1-handled",
        "the same with --signals-to-handle SIGUSR1",
        "srun",
        scancel("--signals-to-handle", "SIGUSR1", signal_name="USR1"),
        slurm=True,
        right=Right(
            r"stopped by the scheduler \(SIGUSR1 to all 3 hosts\)",
            "look in the scheduler's log",
            codes=None,
            words_s=4,
            end_s=8,
            sentences=3,
            hints=1,
            never=("failed after it", "look on node"),
        ),
    ),
    Row(
        "ctrl-c-twice",
        "Ctrl-C twice at srun (what is left in memory goes with the next launch on the host)",
        "srun",
        ctrl_c_twice,
        slurm=True,
        right=Right(r".*(SIGINT|Ctrl-C)", None, codes=None, words_s=3, end_s=8, sentences=4, hints=0),
    ),
    Row(
        "no-srun",
        "sbatch with 2 nodes, saferun without srun",
        "sbatch",
        sbatch_without_srun,
        slurm=True,
        right=Right(
            r"this job has 2 nodes; saferun runs on node1 only: start it with srun",
            None,
            codes=0,
            words_s=30,
            end_s=40,
            sentences=1,
            hints=0,
        ),
        torchrun="nothing",
    ),
)
