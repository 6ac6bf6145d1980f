"""What keeps hosts from meeting: names, ports, firewalls, hosts that do not come, two jobs at one address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cluster.fault_table.stage import Right, Row
from tests.cluster.jobs import PORT, SAFERUN, Job, write
from tests.cluster.machines import launchers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.cluster.fault_table.stage import Stage
    from tests.cluster.machines.faults import Host

LIMIT_S = 14
LIMIT = ("--start-timeout", LIMIT_S)
MET = "tell('steps')\n"
FIRST_WORDS_S = 10.0  # 5 s after a host has begun to look for the master, on a machine that has other things to do
NOBODY = "10.77.0.99"


def hand(
    *, fault: Callable[[Stage], object] = lambda _: None, hosts: Sequence[int] = (1, 2, 3)
) -> Callable[[Stage], None]:
    """A job of three hosts, some of which are started, by torchrun's own options, without a port."""

    def play(stage: Stage) -> None:
        fault(stage)
        place = ("--nnodes", 3, "--master-addr", "node1", *LIMIT)
        command(stage, lambda host: (*place, "--node-rank", host.index), hosts=hosts)

    return play


def command(
    stage: Stage,
    words: Callable[[Host], Sequence[object]],
    *,
    hosts: Sequence[int] = (1, 2, 3),
    name: str = "",
    program: str = MET,
    script: str = "program.py",
) -> Job:
    """A job whose command line is said in full."""
    folder = stage.folder / (name.strip() or "job")
    folder.mkdir(exist_ok=True)
    path = write(folder, program)
    if script != "program.py":
        path = str(folder / script)
        (folder / script).write_text(f"# {script}\n{(folder / 'program.py').read_text()}")
    chosen = [stage.hosts[number - 1] for number in hosts]
    job = Job(
        folder,
        launchers.by_hand(stage.cluster, lambda h: (*SAFERUN, *map(str, words(h)), path), hosts=chosen, cwd=folder),
    )
    return stage.take(job, [f"{name}{host.name}" for host in chosen])


def default_place(host: Host) -> tuple[object, ...]:
    """By hand, without a port."""
    return ("--nnodes", 2, "--node-rank", host.index, "--master-addr", "node1")


def srun_job(fault: Callable[[Stage], object], *options: object) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        fault(stage)
        stage.srun(MET, *LIMIT, *options)

    return play


def drop(stage: Stage) -> None:
    stage.host("node1").firewall(PORT, "drop")


def reject(stage: Stage) -> None:
    stage.host("node1").firewall(PORT, "reject")


def only_29500(stage: Stage) -> None:
    for ports in ((1, PORT - 1), (PORT + 1, 65535)):
        stage.host("node1").firewall(ports, "drop", new_only=True)


def drop_all_high(stage: Stage) -> None:
    """Slurm's own ports are below."""
    stage.host("node1").firewall((20000, 32767), "drop")


def unknown_name(stage: Stage) -> None:
    stage.host("node3").break_name("node1", None)


def dead_address(stage: Stage) -> None:
    stage.host("node3").break_name("node1", NOBODY)


def held(stage: Stage) -> None:
    stage.host("node1").occupy(PORT)


def missing_by_list(stage: Stage) -> None:
    command(stage, lambda _: ("--hosts", "node1,node2,node3", *LIMIT), hosts=(1, 2))


def late(stage: Stage) -> None:
    options = ("--nnodes", 3, "--master-addr", "node1", "--start-timeout", 120)
    command(stage, lambda h: (*options, "--node-rank", h.index), hosts=(1, 2))
    stage.for_a_while(35)
    command(stage, lambda h: (*options, "--node-rank", h.index), hosts=(3,), name="late ")


def twice(stage: Stage) -> None:
    ranks = {"node1": 0, "node2": 1, "node3": 1}
    command(stage, lambda h: ("--nnodes", 3, "--node-rank", ranks[h.name], "--master-addr", "node1", *LIMIT))


def uneven(stage: Stage) -> None:
    command(
        stage,
        lambda h: (
            "--nnodes",
            3,
            "--node-rank",
            h.index,
            "--master-addr",
            "node1",
            "--nproc-per-node",
            1 + h.index % 2,
        ),
    )


def script_missing(stage: Stage) -> None:
    folder = stage.folder / "job"
    folder.mkdir()
    script = write(folder, MET)

    def words(host: Host) -> tuple[str, ...]:
        place = ("--nnodes", "3", "--node-rank", str(host.index), "--master-addr", "node1")
        return (*SAFERUN, *place, "/nowhere/t.py" if host.name == "node3" else script)

    stage.take(Job(folder, launchers.by_hand(stage.cluster, words, cwd=folder)), [h.name for h in stage.hosts])


def script_missing_srun(stage: Stage) -> None:
    folder = stage.folder / "job"
    folder.mkdir()
    script = write(folder, MET)
    shell = f'[ "$SLURM_NODEID" = 2 ] && s=/nowhere/t.py || s={script}; exec {" ".join(SAFERUN)} $s'
    stage.take(Job(folder, [launchers.srun(stage.cluster, ("bash", "-c", shell), cwd=folder)]), ["srun"])


def other_torch(stage: Stage) -> None:
    stage.host("node3").fake_torch("2.12.1")
    hand()(stage)


def disk_full(stage: Stage) -> None:
    """Run directories are each host's own; node3's has no room."""
    for host in stage.hosts:
        host.run(["mkdir", "-p", "/run/runs"], check=True)
    node3 = stage.host("node3")
    node3.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", "/run/runs"], check=True)
    node3.run(["sh", "-c", "cat /dev/zero > /run/runs/full"])
    stage.by_hand(FAILS, "--run-dir", "/run/runs")


FAILS = """
tell("steps")
time.sleep(3)
if RANK == 0:
    raise ValueError("a label is out of range")
stay()
"""
STAYS = "tell('steps')\nawait_release('end')\n"


def two_jobs(script: str, later_s: float = 0.0) -> Callable[[Stage], None]:
    """Each of them begins without a port of its own; of the second job the hosts are numbered the other way."""

    def play(stage: Stage) -> None:
        at_once = () if later_s else LIMIT
        command(stage, lambda h: (*default_place(h), *at_once), hosts=(1, 2), name="a ", program=STAYS, script="a.py")
        if later_s:
            stage.jobs[0].hear("steps", 2)
            stage.for_a_while(later_s)
            stage.fault()
        command(stage, lambda h: (*default_place(h), *LIMIT), hosts=(1, 2), name="b ", program=STAYS, script=script)
        # Two of one job that meet first train, until the others have ended.
        stage.await_end_of_one_job()
        stage.release("end")

    return play


def met_crosswise(first: str, second: str) -> Right:
    """The first host of one job has met the second host of the other."""
    return Right(
        rf"node2: another job \(script {second}\.py of user root\) connects to this job's port on node1 "
        rf"\(script {first}\.py",
        "give each job its own --master-port or --rdzv-id, ",
        codes={f"{first} node1": 2, f"{first} node2": 1, f"{second} node1": 1, f"{second} node2": 2},
        words_s=15,
        end_s=40,
        sentences=5,
        hints=2,
        on=(f"{first} node1", f"{second} node2"),
        never=("with this --master-port", "two hosts have"),
        also=("node2 has come to this address twice", r"port 29500 on node1 is in use by pid \d+ \(saferun\)"),
    )


def begun_without(first: str, second: str) -> Right:
    """The hosts of one job have met before those of the other, which come to its port."""
    return Right(
        rf"the job at node1:29500 \(script {first}\.py\) has begun without node2 \(script {second}\.py\);"
        r" waiting .*\(\d s\)",
        "if that is another job, pass a free --master-port",
        codes={f"{first} node1": 0, f"{first} node2": 0, f"{second} node1": 1, f"{second} node2": 1},
        words_s=10,
        end_s=60,
        sentences=5,
        on=(f"{second} node2",),
        never=("with this --master-port",),
        also=(r"port 29500 on node1 is in use by pid \d+ \(saferun\)",),
    )


def mixed(stage: Stage) -> None:
    command(stage, default_place, hosts=(1,), name="a ", program=STAYS, script="a.py")
    command(stage, default_place, hosts=(2,), name="b ", program=STAYS, script="b.py")


def two_slurm_jobs(stage: Stage) -> None:
    port = ("--scheduler", "auto", "--master-port", PORT)
    stage.srun(STAYS, *port, name="a ", hosts=stage.hosts[:2])
    stage.steps()
    stage.fault()
    stage.srun(STAYS, *port, *LIMIT, name="b ", hosts=stage.hosts[:2])
    stage.await_end("a srun")
    stage.release("end")


NODE_1_MISSES = r"1 of 3 hosts did not come within 14 s: node"
ANSWERS = r"node1 \(10\.77\.0\.1\) answers node[23], but its port {}"
ROWS = (
    *(
        Row(
            f"port-{how}",
            f"node1's firewall {words} connections to the master's port",
            "by hand",
            hand(fault=fault),
            right=Right(says, hint, on=("node2", "node3"), words_s=FIRST_WORDS_S, end_s=30, sentences=4, hints=3),
            torchrun=torchrun,
        )
        for how, words, fault, says, hint, torchrun in (
            (
                "dropped",
                "drops",
                drop,
                ANSWERS.format(r"29500 does not: a firewall drops") + r".*\(\d s\)",
                "let TCP port 29500 through",
                "144 s: server socket timed out",
            ),
            (
                "rejected",
                "rejects",
                reject,
                r"node1:29500 \(10\.77\.0\.1\) refuses connections from node[23] \(\d s\)",
                "whether saferun runs on node1, and whether a firewall rejects connections",
                "nothing",
            ),
        )
    ),
    Row(
        "only-29500",
        "of node1 only port 29500 is open",
        "by hand",
        hand(fault=only_29500),
        right=Right(
            r"node1: eth0 does not answer \(timeout\) from 2 of 2 hosts, while it .*; the same over eth1",
            "a firewall on node1 keeps connections out",
            on=("node1",),
            codes=0,
            words_s=30,
            end_s=60,
            sentences=1,
        ),
    ),
    Row(
        "candidate-ports",
        "node1's firewall drops connections to the ports that are tried under Slurm",
        "srun",
        srun_job(drop_all_high),
        slurm=True,
        right=Right(
            r"node1 \(10\.77\.0\.1\) answers node[23], but not on any of the 8 ports tried .*: a firewall .*\(\d s\)",
            "let the hosts of the job through, on node1",
            words_s=FIRST_WORDS_S,
            end_s=30,
            times=2,
            sentences=6,
            hints=3,
            never=(r"this is node[23]",),
        ),
    ),
    Row(
        "name-missing",
        "node3 cannot resolve node1",
        "by hand",
        hand(fault=unknown_name),
        right=Right(
            r"the name node1 cannot be resolved on node3 \(\d s\)",
            "hosts|DNS|resolv",
            on=("node3",),
            words_s=FIRST_WORDS_S,
            end_s=30,
            sentences=4,
            hints=3,
            also=(NODE_1_MISSES,),
        ),
        torchrun="3 s, repeated; the others silent",
    ),
    Row(
        "name-missing-srun",
        "the same",
        "srun",
        srun_job(unknown_name),
        slurm=True,
        right=Right(
            r"the name node1 cannot be resolved on node3 \(\d s\)",
            "",
            words_s=FIRST_WORDS_S,
            end_s=30,
            sentences=7,
            hints=4,
            never=(r"cannot be resolved.*cannot be resolved",),
        ),
        torchrun="3 s, repeated; the others silent",
    ),
    Row(
        "dead-address",
        "node3's /etc/hosts has a wrong address for node1",
        "by hand",
        hand(fault=dead_address),
        right=Right(
            r"node1:29500 \(10\.77\.0\.99\) cannot be reached from node3 .*\(\d s\)",
            r"node3 takes node1 for 10\.77\.0\.99 by its /etc/hosts",
            on=("node3",),
            words_s=12,
            end_s=30,
            sentences=4,
            hints=3,
        ),
        torchrun="6-7 s: errno 113 and the address; the others silent",
    ),
    Row(
        "port-held",
        "another program has the master's port",
        "by hand",
        hand(fault=held),
        right=Right(
            r"port 29500 on node1 is in use by pid \d+ \(python",
            "stop that process, or pass a free --master-port",
            on=("node1",),
            words_s=FIRST_WORDS_S,
            end_s=30,
            sentences=5,
            also=(r"something listens on node1:29500 \(10\.77\.0\.1\) and does not answer as a store",),
            never=("cannot be reached", "with this --master-port"),
        ),
        torchrun="2-4 s on the first host; the others hang",
    ),
    Row(
        "host-missing",
        "node3 is never started",
        "by hand",
        hand(hosts=(1, 2)),
        right=Right(
            r"1 of 3 hosts did not come within 14 s: node rank 2", "", words_s=30, end_s=30, sentences=2, hints=1
        ),
        torchrun="no host is named",
    ),
    Row(
        "host-missing-list",
        "the same, by --hosts",
        "--hosts",
        missing_by_list,
        right=Right(r"1 of 3 hosts did not come within 14 s: node3", "", words_s=30, end_s=30, sentences=2, hints=1),
        torchrun="no host is named",
    ),
    Row(
        "master-missing",
        "node1 is never started",
        "by hand",
        hand(hosts=(2, 3)),
        right=Right(
            r"node1:29500 \(10\.77\.0\.1\) refuses connections from node[23] \(\d s\)",
            "whether saferun runs on node1",
            words_s=FIRST_WORDS_S,
            end_s=30,
            sentences=3,
            hints=2,
        ),
        torchrun="nothing",
    ),
    Row(
        "late",
        "node3 is started 35 s later",
        "by hand",
        late,
        right=Right(
            r"waiting for 1 of 3 hosts: node rank 2 \(30 s\)",
            None,
            on=("node1",),
            codes=0,
            words_s=45,
            end_s=70,
            sentences=1,
            hints=0,
        ),
    ),
    Row(
        "twice",
        "two hosts have node rank 1",
        "by hand",
        twice,
        right=Right(r".*node rank 1.*node[23].*", "", codes=None, words_s=8, end_s=20, sentences=3, hints=2),
    ),
    Row("uneven", "1, 2 and 1 ranks per host", "by hand", uneven, right=Right("", codes=0, end_s=60, hints=0)),
    Row(
        "script-missing",
        "node3 has no such script",
        "by hand",
        script_missing,
        right=Right(
            r"node3 cannot start: there is no script /nowhere/t\.py",
            "check the path",
            on=("node1", "node2"),
            codes=2,
            words_s=8,
            end_s=10,
            sentences=1,
            also=(r"there is no script /nowhere/t\.py \(on node3\)",),
        ),
    ),
    Row(
        "script-missing-srun",
        "the same",
        "srun",
        script_missing_srun,
        slurm=True,
        right=Right(
            r"there is no script /nowhere/t\.py \(on node3\)",
            "check the path",
            codes=2,
            words_s=8,
            end_s=10,
            sentences=1,
            never=("node3 cannot start",),
        ),
    ),
    Row(
        "torch-version",
        "node3 has another release of torch",
        "by hand",
        other_torch,
        right=Right(r".*torch.*2\.12\.1", "same", on=("node1",), codes=0, words_s=20, end_s=60, sentences=1),
        torchrun="nothing",
    ),
    Row(
        "disk-full",
        "node3's disk has no room for its run directory, and a rank fails",
        "by hand",
        disk_full,
        right=Right(
            r"rank 0 \(node1.*ValueError",
            None,
            words_s=15,
            end_s=20,
            sentences=5,
            hints=2,
            also=(r"node3: .*No space left on device",),
        ),
    ),
    Row(
        "two-jobs",
        "two jobs by hand at the default port, at the same time, of different scripts",
        "by hand",
        two_jobs("b.py"),
        hosts=2,
        right=Right(
            r"node2: another job \(script [ab]\.py of user root\) connects to this job's port on node1 "
            r"\(script [ab]\.py",
            "give each job its own --master-port or --rdzv-id, ",
            codes=2,
            words_s=15,
            end_s=40,
            sentences=5,
            hints=2,
            never=("with this --master-port", "two hosts have"),
        ),
        or_right=(*(outcome(*jobs) for outcome in (met_crosswise, begun_without) for jobs in ("ab", "ba")),),
        torchrun="mixes them",
    ),
    Row(
        "two-jobs-later",
        "the second one 6 s after the first has begun",
        "by hand",
        two_jobs("b.py", 6.0),
        hosts=2,
        right=begun_without("a", "b"),
        torchrun="mixes them",
    ),
    Row(
        "mixed",
        "two hosts, each meant for another job, meet at the default port",
        "by hand",
        mixed,
        hosts=2,
        right=Right(
            r".*another job \(script b\.py of user",
            "--rdzv-id",
            codes=None,
            words_s=15,
            end_s=20,
            sentences=1,
        ),
        torchrun="they train together",
    ),
    Row(
        "two-slurm-jobs",
        "two Slurm jobs with the same --master-port",
        "srun",
        two_slurm_jobs,
        hosts=2,
        slurm=True,
        right=Right(
            r"port 29500 on node1 is in use by pid \d+ \(saferun\)",
            "stop that process, or pass another --master-port",
            on=("b srun",),
            codes={"a srun": 0, "b srun": 1},
            words_s=10,
            end_s=60,
            sentences=8,
            hints=2,
        ),
        torchrun="mixes them",
    ),
)
