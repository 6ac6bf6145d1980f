"""What the start-up hook costs a rank: one that never imports torch, one that does, and one with a process group.

python benchmarks/hook.py [--quick] [--sides plain,hook] [--only bare,torch,group] [--rounds N]

Both sides are the same Python process; one starts with the environment that saferun gives a rank. No launcher runs.
"""

from __future__ import annotations

import functools
import os
import sys
import time

from launcher_cost import BenchmarkError
from measure import REPOSITORY, Bar, Options, Scratch, Table, alternate, parse_options, progress, say_machine

SCRIPTS = {
    "bare": "pass",
    "torch": "import torch",
    "group": """\
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
sockets = [name for name in os.listdir(".") if name.endswith(".sock")]
assert len(sockets) == int(os.environ["BENCHMARK_SOCKETS"]), sockets
os._exit(0)
""",
}
NAMES = {"bare": "a script without torch", "torch": "import torch", "group": "import torch, init_process_group"}
ROUNDS = {"bare": 101, "torch": 11, "group": 11}
QUICK_ROUNDS = {"bare": 21, "torch": 3, "group": 3}
BARS = {"bare": {"hook": (Bar(15),)}}


def measure_start(scratch: Scratch, part: str, side: str) -> dict[str, float]:
    """One process from start to end: wall time and processor time in milliseconds."""
    directory = scratch.new_directory()
    extra = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "BENCHMARK_SOCKETS": "0"}
    if side == "hook":
        inject = str(REPOSITORY / "saferun" / "inject")
        extra |= {"PYTHONPATH": inject, "SAFERUN_HOOK": str(directory / "r"), "BENCHMARK_SOCKETS": "1"}
    started = time.perf_counter()
    process = scratch.start([sys.executable, "-c", SCRIPTS[part]], directory, extra=extra)
    _, status, usage = os.wait4(process.pid, 0)
    taken_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchmarkError(f"{part} of {side}: {process.returncode}\n{(directory / 'stderr').read_text()[-2000:]}")
    if (side == "hook") != any(path.suffix == ".stacks" for path in directory.iterdir()):
        raise BenchmarkError(f"{part} of {side}: the hook was not where it belongs")
    return {"wall": taken_s * 1000, "processor": (usage.ru_utime + usage.ru_stime) * 1000}


def main(options: Options) -> None:
    """Measures each part, and prints one table; "cost" is the difference of the two sides of one round."""
    say_machine("hook", options)
    table = Table(("plain",))
    with Scratch() as scratch:
        for part in options.only:
            rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)[part]
            progress(f"{NAMES[part]}, {rounds} rounds")
            found = alternate(options.sides, rounds, functools.partial(measure_start, scratch, part))
            for metric, values in found.items():
                table.add(f"{NAMES[part]}: {metric}", "ms", values)
                if len(values) > 1:
                    cost = [hooked - plain for plain, hooked in zip(values["plain"], values["hook"], strict=True)]
                    table.add(f"{NAMES[part]}: {metric}, cost", "ms", {"hook": cost}, BARS.get(part))
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("plain", "hook"), tuple(SCRIPTS)))
