"""Sampling: the CPU time that watching 8 ranks for hangs takes, at rest, at work and in a hang, with inspections.

python benchmarks/sampling.py [--quick] [--only asleep,working,hung]
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from measure import Bar, Options, Scratch, Table, parse_options, progress, say_machine, stop, wait_until
from saferun.captures.inspection import inspect_ranks
from saferun.linux.poller import Poller
from saferun.watchdog.monitor import RankMonitor, WatchedRank
from saferun.watchdog.wait_watch import SampledRank, WaitWatch

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from saferun.evidence.job_evidence import HangVerdict

RANKS = 8
HANG_TIMEOUT_S = 300.0
SLOW_WINDOW_S = 60.0
# Of ranks that do not move, in a timeout: three, and one before the verdict.
LOOKS = 4

# A rank like those of real jobs: many threads, some of which wake up now and then, and data-loader workers.
RANK = """\
import os
import socket
import sys
import threading
import time
for _ in range(4):
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
pairs = [socket.create_connection(listener.getsockname()) for listener in [socket.create_server(("127.0.0.1", 0))] * 50]
for number in range(30):
    interval_s = 0.01 if number == 0 else 3600
    threading.Thread(target=lambda s=interval_s: [time.sleep(s) for _ in iter(int, 1)], daemon=True).start()
null = open("/dev/null", "wb", 0)
open(os.path.join(os.environ["BENCHMARK_DIR"], "ready." + sys.argv[2]), "w").close()
while True:
    if sys.argv[1] == "working":
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        null.write(bytes(4096))
        time.sleep(0.02)
    elif sys.argv[1] == "hung":
        time.sleep(0.001)
    else:
        time.sleep(3600)
"""


def measure_sampling(scratch: Scratch, script: str, what: str, window_s: float) -> dict[str, float]:
    """Eight ranks, watched for a while: processor time of the watch in % of a core, per rank, and per sample."""
    directory = scratch.new_directory()
    processes = [scratch.start([sys.executable, script, what, str(rank)], directory) for rank in range(RANKS)]
    for rank in range(RANKS):
        wait_until((directory / f"ready.{rank}").exists, f"rank {rank}")
    poller = Poller()
    verdicts: list[HangVerdict] = []
    watch = RankMonitor(HANG_TIMEOUT_S, poller, on_verdict=verdicts.append, on_recovery=lambda _: None)
    ranks = [
        WatchedRank(rank, rank, process.pid, lambda: 0, "", os.path.join(directory, f"heartbeat.{rank}"))
        for rank, process in enumerate(processes)
    ]
    began = time.monotonic()
    watch.begin(began, ranks)
    used_s = -time.thread_time()
    samples = 0
    while (now := time.monotonic()) < began + window_s:
        assert watch.deadline is not None
        poller.wait(max(0.0, min(watch.deadline, began + window_s) - now))
        now = time.monotonic()
        if watch.deadline <= now:
            samples += 1
            watch.tick(now)
    used_s += time.thread_time()
    look_s = -time.thread_time()
    inspect_ranks([(rank.local_rank, rank.pid, rank.pid) for rank in ranks], 0, 0.05)
    look_s += time.thread_time()
    watch.end()
    compare_s = compare(poller, processes, window_s, is_alone=True)
    together_s = compare(poller, processes, window_s, is_alone=False)
    poller.close()
    assert not verdicts
    for process in processes:
        stop(process)
    share, compare_share, together = (seconds / window_s * 100 for seconds in (used_s, compare_s, together_s))
    return {
        "all ranks": share,
        "one rank": share / RANKS,
        "who waits": compare_share,
        "who waits, of several hosts": together,
        "who waits, of the sampling": compare_share / share,
        "a sample": used_s / max(samples, 1) * 1e3,
        "an inspection": look_s * 1e3,
        "inspections": look_s * LOOKS / HANG_TIMEOUT_S * 100,
    }


def compare(poller: Poller, processes: Sequence[subprocess.Popen[bytes]], window_s: float, *, is_alone: bool) -> float:
    """Processor time of seeing which of these ranks wait, and whether there are others on other hosts."""
    reports: list[list[list[int]]] = []
    waits = WaitWatch(SLOW_WINDOW_S, len(processes), is_alone=is_alone, on_report=reports.append)
    began = time.monotonic()
    waits.begin(
        began,
        {rank: SampledRank(rank, lambda pid=process.pid: pid) for rank, process in enumerate(processes)},  # type: ignore[misc]
    )
    used_s = -time.thread_time()
    while (now := time.monotonic()) < began + window_s and waits.deadline is not None:
        poller.wait(max(0.0, min(waits.deadline, began + window_s) - now))
        waits.tick(time.monotonic())
    used_s += time.thread_time()
    waits.end()
    assert reports
    return used_s


UNITS = {
    "all ranks": "% core",
    "one rank": "% core",
    "who waits": "% core",
    "who waits, of several hosts": "% core",
    "who waits, of the sampling": "ratio",
    "a sample": "ms",
    "an inspection": "ms",
    "inspections": "% core",
}
BARS = {
    "all ranks": (Bar(0.1),),
    "who waits": (Bar(0.05),),
    "who waits, of several hosts": (Bar(0.05),),
    "inspections": (Bar(0.1),),
}


def main(options: Options) -> None:
    """Measures each state of the ranks and prints one table."""
    say_machine("sampling", options)
    window_s = 31.0 if options.quick else 121.0
    table = Table(())
    with Scratch() as scratch:
        script = scratch.script("rank.py", RANK)
        for what in options.only:
            progress(f"{RANKS} ranks {what} for {window_s:g} s")
            rounds = [measure_sampling(scratch, script, what, window_s) for _ in range(options.rounds or 1)]
            for metric, unit in UNITS.items():
                values = {"saferun": [one[metric] for one in rounds]}
                bars = {"saferun": BARS[metric]} if metric in BARS else None
                table.add(f"{RANKS} ranks {what}: {metric}", unit, values, bars)
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__ or "", ("saferun",), ("asleep", "working", "hung")))
