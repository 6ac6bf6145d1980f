"""Jobs to which nothing happens, in every way in which people start them: all ranks are there, and no word is said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.cluster.fault_table.stage import Right, Row
from tests.cluster.jobs import PORT, SAFERUN, TELL_PLACE, WAYS, Job, Way, write
from tests.cluster.machines import launchers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.fault_table.stage import Stage

RUN = " ".join(SAFERUN)


def check_places(stage: Stage, world: int, *, exact: bool = True) -> None:
    """Every rank is there once and knows how many there are."""
    places = [json.loads(word.more) for word in stage.jobs[-1].words if word.word == "place"]
    if sorted((place[1], place[2]) for place in places) != [(rank, world) for rank in range(world)]:
        stage.remarks.append(f"other ranks ran: {places}")
    elif exact and [p[0] for p in places] != [f"node{1 + rank // 2}" for rank in range(world)]:
        stage.remarks.append(f"ranks on other hosts: {places}")


def way_of(way: Way) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        if way.launcher == "by_hand":
            stage.by_hand(TELL_PLACE, "--nproc-per-node", 2)
        else:
            stage.launch(way, TELL_PLACE, nproc=2)
        stage.await_end()
        check_places(stage, 8)

    return play


def c10d(stage: Stage) -> None:
    conf = ("--rdzv-conf", "last_call_timeout=5")
    stage.by_hand(TELL_PLACE, "--nproc-per-node", 2, *conf, backend="c10d", nnodes="2:4")
    stage.await_end()
    check_places(stage, 8, exact=False)


def shell(
    line: str, world: int, *, before: Callable[[Stage], None] = lambda _: None, name: str = "shell"
) -> Callable[[Stage], None]:
    """A command line on node1, with {run} for saferun and {script} for the script."""

    def play(stage: Stage) -> None:
        before(stage)
        folder = stage.folder / "job"
        folder.mkdir()
        script = write(folder, TELL_PLACE)
        words = line.replace("{run}", RUN).replace("{script}", script).replace("{folder}", str(folder))
        stage.take(Job(folder, [stage.host("node1").popen(["bash", "-c", words], cwd=folder)]), [name])
        stage.await_end()
        check_places(stage, world, exact=False)

    return play


def each(
    words: Callable[[str, int], str], world: int, *, before: Callable[[Stage], None] = lambda _: None
) -> Callable[[Stage], None]:
    """A command line on every host, of its name and number."""

    def play(stage: Stage) -> None:
        before(stage)
        folder = stage.folder / "job"
        folder.mkdir()
        script = write(folder, TELL_PLACE)
        job = launchers.by_hand(
            stage.cluster,
            lambda h: (
                "bash",
                "-c",
                words(h.name, h.index)
                .replace("{run}", RUN)
                .replace("{script}", script)
                .replace("{folder}", str(folder)),
            ),
            cwd=folder,
        )
        stage.take(Job(folder, job), [h.name for h in stage.hosts])
        stage.await_end()
        check_places(stage, world, exact=False)

    return play


def fqdn(stage: Stage) -> None:
    for host in stage.hosts:
        host.run(["hostname", f"{host.name}.cluster.example.org"], check=True)
        for other in stage.hosts:
            host.break_name(f"{other.name}.cluster.example.org", other.management)


STATIC = "{run} --nnodes 3 --master-addr node1"
WRAPPER = "echo '{run} {script}' > {folder}/wrapper.sh; srun -N3 --ntasks-per-node=1 sh {folder}/wrapper.sh"
BATCH = (
    "printf '#!/bin/sh\\nsrun {run} {script}\\n' > b.sh; "
    "sbatch --wait -N3 --ntasks-per-node=1 -o o.txt -e e.txt b.sh; c=$?; cat o.txt; cat e.txt >&2; exit $c"
)
ARRAY = (
    "printf '#!/bin/sh\\nsrun {run} --run-dir none {script}\\n' > b.sh; "
    "sbatch --wait --array=0-1 -N3 --ntasks-per-node=1 -o o%a.txt -e e%a.txt b.sh; c=$?; "
    "cat o0.txt; cat e0.txt e1.txt >&2; grep -c place o1.txt | grep -q 3 || exit 7; exit $c"
)
STEP = "srun --overlap --ntasks-per-node=1 {run} --run-dir none {script}"
OVERLAP = f"salloc -N3 bash -c '{STEP} >o1.txt & {STEP} & wait'; grep -c place o1.txt | grep -q 3"
TUTORIAL = (
    "srun -N3 --ntasks-per-node=1 {run} --nnodes 3 --nproc_per_node 1 --rdzv_id $RANDOM "
    f"--rdzv_backend c10d --rdzv_endpoint node1:{PORT} {{script}}"
)
ADDRESS = "$(getent hosts node1-v6 | cut -d' ' -f1)"
ENDPOINT = f'{{run}} --nnodes 3 --rdzv-backend c10d --rdzv-id j --rdzv-endpoint "[{ADDRESS}]:29400" {{script}}'
AT_LOOPBACK = "{run} --nnodes 2 --master-addr ::1 --node-rank "
BOTH = f"{AT_LOOPBACK} 1 {{script}} & {AT_LOOPBACK} 0 {{script}}; c=$?; wait $! && exit $c"


def in_long_directory(_: str, number: int) -> str:
    """A directory for temporary files whose name leaves no room for that of a socket."""
    make = f"export TMPDIR=/tmp/{'d' * 121}; mkdir -p $TMPDIR"
    return f"{make}; {STATIC} --node-rank {number} {{script}}; c=$?; rmdir $TMPDIR && exit $c"


HEALTHY = Right("", codes=0, end_s=90, sentences=0, hints=0)


def _row(
    name: str,
    launch: str,
    play: Callable[[Stage], None],
    *,
    slurm: bool = False,
    hosts: int = 3,
    right: Right = HEALTHY,
) -> Row:
    return Row(f"healthy-{name}", "none", launch, play, right, hosts=hosts, slurm=slurm)


ROWS = (
    *(
        _row(
            way.name,
            way.name.replace("_", " ").replace("-a-task-a-rank", ", one saferun per rank"),
            way_of(way),
            slurm=way.launcher == "srun",
            hosts=4,
        )
        for way in WAYS
    ),
    _row("c10d", "by hand, c10d, 2:4", c10d, hosts=4),
    _row("sbatch", "sbatch, srun in it", shell(BATCH, 3), slurm=True),
    _row("block", "srun -n5 -m block", shell("srun -N3 -n5 -m block {run} {script}", 5), slurm=True),
    _row("cyclic", "srun -n5 -m cyclic", shell("srun -N3 -n5 -m cyclic {run} {script}", 5), slurm=True),
    _row(
        "exported-master",
        "salloc, MASTER_ADDR and MASTER_PORT exported",
        shell(
            "salloc -N3 bash -c 'export MASTER_ADDR=node1 MASTER_PORT=29500; srun --ntasks-per-node=1 {run} {script}'",
            3,
        ),
        slurm=True,
    ),
    _row(
        "tutorial", "srun, the options of PyTorch's tutorial (c10d, --rdzv_id $RANDOM)", shell(TUTORIAL, 3), slurm=True
    ),
    _row(
        "bash-c",
        "srun bash -c, static",
        shell(f"srun -N3 --ntasks-per-node=1 bash -c '{STATIC} --node-rank $SLURM_NODEID {{script}}'", 3),
        slurm=True,
    ),
    _row("wrapper", "srun, a wrapper script", shell(WRAPPER, 3), slurm=True),
    _row(
        "two-by-two",
        "srun, 2 tasks a host, --nproc-per-node 2 (one rank each)",
        shell("srun -N3 --ntasks-per-node=2 {run} --nproc-per-node 2 {script}", 6),
        slurm=True,
    ),
    _row("overlap", "two steps of one allocation side by side", shell(OVERLAP, 3), slurm=True),
    _row("array", "an array of two jobs on the same hosts", shell(ARRAY, 3), slurm=True),
    _row("long-tmpdir", "TMPDIR of 126 characters", each(in_long_directory, 3)),
    _row(
        "fqdn",
        "hosts whose own names are fully qualified, --hosts without",
        each(lambda *_: "{run} --hosts node1,node2,node3 {script}", 3, before=fqdn),
    ),
    _row(
        "addresses",
        "--hosts with addresses",
        each(lambda *_: "{run} --hosts 10.77.0.1,10.77.0.2,10.77.0.3 {script}", 3),
    ),
    _row(
        "ipv6",
        "--master-addr with an IPv6 address",
        each(lambda _, n: f"{{run}} --nnodes 3 --node-rank {n} --master-addr {ADDRESS} {{script}}", 3),
    ),
    _row("ipv6-endpoint", "c10d at [IPv6 address]:29400", each(lambda *_: ENDPOINT, 3)),
    _row("ipv6-loopback", "two agents on one host at ::1", shell(BOTH, 2)),
    _row(
        "bare",
        "neither HOME nor TMPDIR, a working directory that cannot be written",
        each(lambda _, n: f"unset HOME TMPDIR USER LOGNAME; cd /proc/1; {STATIC} --node-rank {n} {{script}}", 3),
        right=Right(r"node\d: no run directory: /proc/1/saferun-runs", codes=0, end_s=90, sentences=1, hints=0),
    ),
)
