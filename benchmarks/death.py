"""Death of a rank: how soon the launcher notices, how soon the peers are told, how soon the whole group has ended.

python benchmarks/death.py [--quick] [--sides saferun,torchrun] [--only exit,kill]

saferun writes down when it noticed. torchrun does not: its first SIGTERM to a peer is the nearest that can be seen.
saferun-no-page makes no report.html, for which the launcher waits at its end.
"""

from __future__ import annotations

import functools
import json
import time
from typing import TYPE_CHECKING

from launcher_cost import BenchmarkError, marked_pids, settle
from measure import (
    NOTING_RANK,
    Bar,
    Gates,
    Options,
    Scratch,
    Table,
    alternate,
    command,
    parse_options,
    progress,
    say_machine,
    wait,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

RANKS, DYING = 4, 2

RANK = (
    NOTING_RANK
    + """\
if rank == int(os.environ["BENCHMARK_DYING"]):
    os.write(note, str(time.monotonic_ns()).encode())
    if os.environ["BENCHMARK_DEATH"] == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
"""
)


def read_noticed_ns(directory: Path) -> int | None:
    """When saferun noticed the first rank's end, from the `events.jsonl` of its run directory."""
    for path in directory.glob("runs/**/events.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if "RankExited" in event.values():
                return int(event["monotonic_s"] * 1e9)
    return None


def measure_death(scratch: Scratch, side: str, script: str, death: str) -> dict[str, float]:
    """One rank of four ends badly while all is at rest: milliseconds from then."""
    directory = scratch.new_directory()
    gates = Gates(directory, "go", RANKS)
    run_directory = ["--run-dir", "runs"] if side.startswith("saferun") else []
    if side == "saferun-no-page":
        run_directory += ["--report-html", "off"]
    arguments = [*command(side), "--nproc_per_node", str(RANKS), *run_directory, script]
    process = scratch.start(arguments, directory, extra={"BENCHMARK_DEATH": death, "BENCHMARK_DYING": str(DYING)})
    gates.wait(process)
    settle(lambda: marked_pids(scratch.mark, without_ranks=True))
    gates.open()
    status = wait(process, 120)
    ended_ns = time.monotonic_ns()
    if status == 0:
        message = f"{side} ended with 0 although rank {DYING} failed"
        raise BenchmarkError(message)
    notes = {rank: (directory / f"note.{rank}").read_text() for rank in range(RANKS)}
    died_ns = int(notes.pop(DYING))
    told_ns = [int(text) for text in notes.values() if text]
    if len(told_ns) < RANKS - 1:
        message = f"{side} sent SIGTERM to {len(told_ns)} of {RANKS - 1} peers\n{(directory / 'stderr').read_text()}"
        raise BenchmarkError(message)
    noticed_ns = read_noticed_ns(directory)
    wait_until(lambda: not marked_pids(scratch.mark), f"the end of all processes of {side}", step_s=0.001)
    gone_ns = time.monotonic_ns()
    return {
        "noticed": ((min(told_ns) if noticed_ns is None else noticed_ns) - died_ns) / 1e6,
        "first told": (min(told_ns) - died_ns) / 1e6,
        "last told": (max(told_ns) - died_ns) / 1e6,
        "ended": (ended_ns - died_ns) / 1e6,
        "gone": (gone_ns - died_ns) / 1e6,
    }


def main(options: Options) -> None:
    """Measures a bad exit and a SIGKILL and prints one table."""
    say_machine("death", options)
    rounds = options.rounds or (3 if options.quick else 15)
    table = Table(("torchrun",))
    deaths = {"exit": "os._exit(3)", "kill": "SIGKILL"}
    with Scratch() as scratch:
        script = scratch.script("die.py", RANK)
        for death in options.only:
            progress(f"{deaths[death]}, {rounds} rounds")
            measure = functools.partial(measure_death, scratch, script=script, death=death)
            values = alternate(options.sides, rounds, measure)
            table.add(f"{deaths[death]}: noticed", "ms", values["noticed"], {"saferun": (Bar(10),)})
            table.add(f"{deaths[death]}: SIGTERM at the first peer", "ms", values["first told"])
            table.add(f"{deaths[death]}: SIGTERM at the last peer", "ms", values["last told"])
            table.add(f"{deaths[death]}: the launcher has ended", "ms", values["ended"])
            table.add(f"{deaths[death]}: every process has ended", "ms", values["gone"])
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("saferun", "saferun-no-page", "torchrun"), ("exit", "kill")))
