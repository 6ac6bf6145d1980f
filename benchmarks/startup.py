"""Start-up: how long until the script runs, and until all is over, against torchrun and against bare Python.

python benchmarks/startup.py [--quick] [--sides bare,saferun,saferun-script,torchrun] [--only empty,help,init]
"""

from __future__ import annotations

import resource
import socket
import sys
import time
from typing import TYPE_CHECKING

from measure import Bar, Bars, Options, Scratch, Table, alternate, command, finish, parse_options, progress, say_machine

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

RANKS = 2

EMPTY = """\
import time; at_ns = time.monotonic_ns()
import os
with open(os.path.join(os.environ["BENCHMARK_DIR"], "rank." + os.environ["RANK"]), "w") as file:
    file.write(str(at_ns))
"""

ALL_REDUCE = """\
import os
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
at_ns = time.monotonic_ns()
assert ones.item() == dist.get_world_size()
with open(os.path.join(os.environ["BENCHMARK_DIR"], "rank." + os.environ["RANK"]), "w") as file:
    file.write(str(at_ns))
dist.destroy_process_group()
"""


def read_last_ms(directory: Path, began_ns: int) -> float:
    """Milliseconds from the start to the moment the last of the ranks wrote down."""
    moments = [int((directory / f"rank.{rank}").read_text()) for rank in range(RANKS)]
    return (max(moments) - began_ns) / 1e6


def processor_ms() -> float:
    """User and system time of all children waited for so far, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1e3


def hold_port() -> socket.socket:
    """A port for the bare side, which has no launcher that serves it one: held, so that nobody else is given it.

    Whoever binds it by its number with SO_REUSEADDR, as torch's store does, can listen on it nevertheless.
    """
    is_dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    if is_dual:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def start_bare(scratch: Scratch, directory: Path, script: str, port: int) -> list[subprocess.Popen[bytes]]:
    """The ranks side by side, without any launcher: the floor."""
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-u", script]
    return [scratch.start(arguments, directory, extra={**common, "RANK": str(rank)}) for rank in range(RANKS)]


def measure_script(scratch: Scratch, side: str, script: str) -> dict[str, float]:
    """One run of the script by two ranks: milliseconds to the moment it notes, to the end, and of processor time."""
    directory = scratch.new_directory()
    used_ms = processor_ms()
    with hold_port() as held:
        began_ns = time.monotonic_ns()
        if side == "bare":
            processes = start_bare(scratch, directory, script, held.getsockname()[1])
        else:
            arguments = [*command(side), "--nproc_per_node", str(RANKS), script]
            processes = [scratch.start(arguments, directory)]
        for process in processes:
            finish(process, directory)
        ended_ns = time.monotonic_ns()
    return {
        "noted": read_last_ms(directory, began_ns),
        "end": (ended_ns - began_ns) / 1e6,
        "processor": processor_ms() - used_ms,
    }


def measure_help(scratch: Scratch, side: str) -> dict[str, float]:
    """One `--help`, in milliseconds; bare is a Python that does nothing."""
    directory = scratch.new_directory()
    arguments = [sys.executable, "-c", "pass"] if side == "bare" else [*command(side), "--help"]
    began_ns = time.monotonic_ns()
    finish(scratch.start(arguments, directory), directory)
    return {"end": (time.monotonic_ns() - began_ns) / 1e6}


def main(options: Options) -> None:
    """Measures the parts asked for and prints one table."""
    say_machine("start-up", options)
    table = Table(("torchrun", "bare"))
    bars: Bars
    with Scratch() as scratch:
        if "empty" in options.only:
            rounds = options.rounds or (7 if options.quick else 21)
            progress(f"empty script, {rounds} rounds")
            script = scratch.script("empty.py", EMPTY)
            values = alternate(options.sides, rounds, lambda side: measure_script(scratch, side, script))
            bars = {"saferun": (Bar(0.06, "torchrun"), Bar(7, "bare"))}
            table.add("empty script, first line of the last rank", "ms", values["noted"], bars)
            table.add("empty script, end of the launcher", "ms", values["end"], bars)
            table.add("empty script, processor time of all processes", "ms", values["processor"])
        if "help" in options.only:
            rounds = options.rounds or (7 if options.quick else 21)
            progress(f"--help, {rounds} rounds")
            values = alternate(options.sides, rounds, lambda side: measure_help(scratch, side))
            table.add("--help", "ms", values["end"], {"saferun": (Bar(40),)})
        if "init" in options.only:
            rounds = options.rounds or (4 if options.quick else 11)
            progress(f"init_process_group and all_reduce, {rounds} rounds")
            script = scratch.script("all_reduce.py", ALL_REDUCE)
            values = alternate(options.sides, rounds, lambda side: measure_script(scratch, side, script))
            bars = {"saferun": (Bar(0.75, "torchrun"),)}
            table.add("init + all_reduce (gloo), result at the last rank", "ms", values["noted"], bars)
            table.add("init + all_reduce (gloo), end of the launcher", "ms", values["end"], bars)
            table.add("init + all_reduce (gloo), processor time of all processes", "ms", values["processor"])
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("bare", "saferun", "saferun-script", "torchrun"), ("empty", "help", "init")))
