"""Cost at rest: processor time and memory of each launcher process while its ranks sleep and say nothing.

python benchmarks/rest.py [--quick] [--sides saferun,torchrun] [--only 2,8,64]
"""

from __future__ import annotations

import functools
import time

from launcher_cost import BenchmarkError, cpu_s, marked_pids, read_memory, read_wakeups, role_of, settle
from measure import (
    Bar,
    Bars,
    Options,
    Scratch,
    Table,
    alternate,
    command,
    parse_options,
    progress,
    say_machine,
    stop,
    wait_until,
)

SLEEP_S = 3600
MOST_MB = {"supervisor": 20, "sr-reaper": 12, "sr-writer": 12, "sr-examiner": 30}


def measure_rest(scratch: Scratch, side: str, ranks: int, window_s: float) -> dict[str, float]:
    """One launcher with sleeping ranks, at rest; of each of its processes, named by its role, what the window cost."""
    directory = scratch.new_directory()
    arguments = [*command(side), "--nproc_per_node", str(ranks), "--no-python", "sleep", str(SLEEP_S)]
    process = scratch.start(arguments, directory)

    def launcher_pids() -> list[int]:
        return marked_pids(scratch.mark, without_ranks=True)

    def all_ranks_run() -> bool:
        if process.poll() is not None:
            message = f"{side} ended with {process.returncode}\n{(directory / 'stderr').read_text()[-2000:]}"
            raise BenchmarkError(message)
        return len(marked_pids(scratch.mark)) - len(launcher_pids()) >= ranks

    wait_until(all_ranks_run, f"{ranks} ranks of {side}", step_s=0.1)
    settle(launcher_pids, window_s=0.5)
    roles: dict[str, list[int]] = {}
    for pid in launcher_pids():
        roles.setdefault(role_of(pid, process.pid), []).append(pid)
    before = {pid: (cpu_s([pid]), read_wakeups(pid)) for pids in roles.values() for pid in pids}
    time.sleep(window_s)
    result: dict[str, float] = {}
    for role, pids in roles.items():
        memory = [read_memory(pid) for pid in pids]
        result |= {
            f"{role}, processor": sum(cpu_s([pid]) - before[pid][0] for pid in pids) / window_s * 100,
            f"{role}, wake-ups": sum(read_wakeups(pid) - before[pid][1] for pid in pids) / window_s,
            f"{role}, RSS": sum(each.rss_mib for each in memory),
            f"{role}, PSS": sum(each.pss_mib for each in memory),
        }
    result["all launcher processes, processor"] = sum(result[f"{role}, processor"] for role in roles)
    result["all launcher processes, PSS"] = sum(result[f"{role}, PSS"] for role in roles)
    result["all launcher processes, count"] = sum(len(pids) for pids in roles.values())
    stop(process)
    wait_until(lambda: not marked_pids(scratch.mark), f"the end of all processes of {side}")
    return result


UNITS = {"processor": "% core", "wake-ups": "/s", "RSS": "MiB", "PSS": "MiB", "count": ""}


def main(options: Options) -> None:
    """Measures 2, 8 and 64 ranks and prints one table."""
    say_machine("rest", options)
    window_s = 10.0 if options.quick else 60.0
    table = Table(("torchrun",))
    with Scratch() as scratch:
        for ranks in map(int, options.only):
            rounds = options.rounds or 1
            progress(f"{ranks} ranks asleep for {window_s:g} s, {rounds} rounds")
            measure = functools.partial(measure_rest, scratch, ranks=ranks, window_s=window_s)
            for metric, values in sorted(alternate(options.sides, rounds, measure, warm_up=False).items()):
                bars: Bars = {}
                role, _, quantity = metric.rpartition(", ")
                if quantity == "RSS" and role in MOST_MB:
                    bars = {"saferun": (Bar(MOST_MB[role] * 1e6 / 2**20),)}
                elif metric == "all launcher processes, processor" and ranks <= 8:
                    bars = {"saferun": (Bar(0.05),)}
                table.add(f"{ranks} ranks asleep: {metric}", UNITS[metric.rpartition(", ")[2]], values, bars)
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("saferun", "torchrun"), ("2", "8", "64")))
