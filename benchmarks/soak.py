"""Soak: many starts in a row and side by side, and restarts with real process groups; counts, not times.

python benchmarks/soak.py [--quick] [--sides saferun,torchrun] [--only starts,restarts] [--rounds STARTS_OR_RESTARTS]

torchrun runs a tenth as often as saferun (restarts: a fifth), spread over the whole run. Ends with status 1 where
saferun failed or left something behind.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import NamedTuple

from launcher_cost import BenchmarkError, marked_pids
from measure import Bar, Options, Scratch, Table, command, finish, kill, parse_options, progress, say, say_machine

RANKS, SIDE_BY_SIDE = 2, 4

EMPTY = """\
import os
with open(os.path.join(os.environ["BENCHMARK_DIR"], "rank." + os.environ["RANK"]), "w") as file:
    file.write("ran")
"""

FAILS_ONCE = """\
import datetime
import os
import sys
import time
import torch
import torch.distributed as dist
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
if attempt == 0:
    if rank == 1:
        sys.exit(1)
    time.sleep(600)
with open(os.path.join(os.environ["BENCHMARK_DIR"], f"rank.{rank}"), "w") as file:
    file.write("ran")
dist.destroy_process_group()
"""


class Counts:
    """What happened to one side; `words` holds the first few things that need words."""

    def __init__(self) -> None:
        self.runs = self.succeeded = self.processes_at_end = self.processes = self.files = self.sockets = 0
        self.seconds: list[float] = []
        self.words: list[str] = []

    def clean(self) -> bool:
        """Whether every run succeeded and left nothing behind."""
        return self.succeeded == self.runs and not (self.processes or self.files or self.sockets)


# ---------------------------------------------------------------------------------------------------------------------
# What is left behind


class Surroundings(NamedTuple):
    """What there was on this machine outside of the benchmark's own directory."""

    files: frozenset[str]
    sockets: frozenset[str]


def read_surroundings() -> Surroundings:
    """Entries of /tmp and /dev/shm that bear a launcher's name, listening TCP sockets, and named Unix sockets."""
    files = {
        str(path)
        for directory in ("/tmp", "/dev/shm")  # noqa: S108 - to look into, not to write to
        for path in Path(directory).iterdir()
        if any(word in path.name for word in ("saferun", "torch", "gloo"))
    }
    sockets: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # listening
                sockets.add(f"socket:[{fields[9]}]")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split(maxsplit=7)[7:]
        if name and "saferun" in name[0]:
            sockets.add(name[0])
    return Surroundings(frozenset(files), frozenset(sockets))


def sockets_of(pids: list[int]) -> set[str]:
    """The sockets these processes hold, as /proc/PID/fd names them."""
    found = set()
    for pid in pids:
        try:
            found |= {os.readlink(link) for link in Path("/proc", str(pid), "fd").iterdir()}
        except OSError:  # it ended meanwhile
            continue
    return found


def files_left(scratch: Scratch, directories: list[Path]) -> list[str]:
    """What runs left in their temporary directory, beside their results, or, as socket or FIFO, inside of them."""
    expected = {"stderr", "saferun-runs", *(f"rank.{rank}" for rank in range(RANKS))}
    left = list(scratch.temporary.iterdir())
    for directory in directories:
        left += [path for path in directory.iterdir() if path.name not in expected]
        for path in (directory / "saferun-runs").glob("**/*"):
            mode = path.lstat().st_mode
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                left.append(path)
    return [str(path) for path in left]


def count_left(scratch: Scratch, side: str, directories: list[Path], before: Surroundings, counts: Counts) -> None:
    """Counts what these runs of a side left, and removes it, so that nothing is counted twice."""
    counts.processes_at_end += len(marked_pids(scratch.mark))
    deadline = time.monotonic() + 1
    while (pids := marked_pids(scratch.mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    after = read_surroundings()
    held = sockets_of(pids)
    files = files_left(scratch, directories)
    # Others use this machine too: of the new files outside only those with this launcher's name, of the new TCP
    # sockets only those that a process of ours holds.
    files += [path for path in after.files - before.files if side in Path(path).name]
    sockets = [each for each in after.sockets - before.sockets if each in held or not each.startswith("socket:")]
    counts.processes += len(pids)
    counts.files += len(files)
    counts.sockets += len(sockets)
    for what in (*(f"process {pid}" for pid in pids), *files, *sockets):
        counts.words.append(f"left behind: {what}")
    for pid in pids:
        kill(pid)
    for path in scratch.temporary.iterdir():
        path.rename(scratch.new_directory() / path.name)


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def run(scratch: Scratch, side: str, script: str, options: list[str], at_once: int, counts: Counts) -> None:
    """Starts a side once, or several times side by side, and counts how it went and what it left."""
    before = read_surroundings()
    directories = [scratch.new_directory() for _ in range(at_once)]
    arguments = [*command(side), "--nproc_per_node", str(RANKS), *options, script]
    began_s = time.monotonic()
    processes = [scratch.start(arguments, directory) for directory in directories]
    for process, directory in zip(processes, directories, strict=True):
        counts.runs += 1
        try:
            finish(process, directory, timeout_s=90)
        except BenchmarkError as error:
            counts.words.append(f"failed: {error}")
            continue
        silent = [rank for rank in range(RANKS) if not (directory / f"rank.{rank}").exists()]
        if silent:
            counts.words.append(f"failed: status 0, but the script of rank {silent[0]} did not run to its end")
        else:
            counts.succeeded += 1
            counts.seconds.append(time.monotonic() - began_s)
    count_left(scratch, side, directories, before, counts)


def spread(often: int, seldom: int) -> list[bool]:
    """`often` times True with `seldom` times False spread evenly among them."""
    plan = [True] * often
    for number in range(seldom):
        plan.insert((number + 1) * (often + seldom) // (seldom + 1), False)
    return plan


def soak(
    scratch: Scratch, sides: tuple[str, ...], script: str, options: list[str], plan: list[tuple[bool, int]]
) -> dict[str, Counts]:
    """Carries out a plan of (saferun or torchrun, how many at once) for the sides wanted."""
    counts = {side: Counts() for side in sides}
    for number, (is_saferun, at_once) in enumerate(plan):
        side = "saferun" if is_saferun else "torchrun"
        if side in counts:
            run(scratch, side, script, options, at_once, counts[side])
        if number % 20 == 19:
            progress(f"{number + 1} of {len(plan)}")
    return counts


def add_counts(table: Table, what: str, counts: dict[str, Counts]) -> None:
    """One row a count and side."""
    runs = next((each.runs for side, each in counts.items() if side == "saferun"), 0)
    rows = {
        "runs": ({side: [each.runs] for side, each in counts.items()}, None),
        "succeeded": ({side: [each.succeeded] for side, each in counts.items()}, Bar(runs, at_least=True)),
        "processes alive when it ended": ({s: [each.processes_at_end] for s, each in counts.items()}, None),
        "processes left 1 s later": ({side: [each.processes] for side, each in counts.items()}, Bar(0)),
        "files left": ({side: [each.files] for side, each in counts.items()}, Bar(0)),
        "sockets left": ({side: [each.sockets] for side, each in counts.items()}, Bar(0)),
    }
    for name, (values, bar) in rows.items():
        table.add(f"{what}: {name}", "", values, {"saferun": (bar,)} if bar else None)
    table.add(f"{what}: duration of those that succeeded", "s", {side: each.seconds for side, each in counts.items()})


def main(options: Options) -> int:
    """Runs the parts asked for, prints one table and the first words of what went wrong; 1 where saferun failed."""
    say_machine("soak", options)
    table = Table(())
    results: dict[str, dict[str, Counts]] = {}
    with Scratch() as scratch:
        if "starts" in options.only:
            starts = options.rounds or (20 if options.quick else 200)
            groups = max(1, starts // 40)
            progress(f"{starts} starts, {groups * SIDE_BY_SIDE} of them {SIDE_BY_SIDE} at a time")
            singles = spread(max(0, starts - groups * SIDE_BY_SIDE), starts // 10)
            plan = [(is_saferun, 1) for is_saferun in singles]
            plan += [(is_saferun, SIDE_BY_SIDE) for is_saferun in spread(groups, 1)]
            script = scratch.script("empty.py", EMPTY)
            results["empty script"] = soak(scratch, options.sides, script, [], plan)
        if "restarts" in options.only:
            restarts = options.rounds or (5 if options.quick else 50)
            progress(f"{restarts} restarts")
            plan = [(is_saferun, 1) for is_saferun in spread(restarts, max(1, restarts // 5))]
            script = scratch.script("fails_once.py", FAILS_ONCE)
            results["gloo, one restart"] = soak(scratch, options.sides, script, ["--max-restarts", "1"], plan)
    for what, counts in results.items():
        add_counts(table, what, counts)
    table.say()
    for what, counts in results.items():
        for side, each in counts.items():
            # One text a kind is enough: what comes before the last line holds numbers that differ.
            kinds = {words.rpartition("\n")[2]: words for words in each.words}
            for words in list(kinds.values())[:5]:
                say(f"{what}, {side}: {words}")
    return int(
        not all(each.clean() for counts in results.values() for side, each in counts.items() if side == "saferun")
    )


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__, ("saferun", "torchrun"), ("starts", "restarts"))))
