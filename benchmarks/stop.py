"""A stop from outside: how long after SIGTERM at the launcher the handlers of its ranks run.

python benchmarks/stop.py [--quick] [--sides saferun,torchrun] [--only rest,output]

The ranks make progress, so that saferun has no reason to look at them first: at rest they work for a moment now and
then, under output each of them writes as fast as it may to a pipe that somebody reads.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import threading
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
    from typing import IO

RANKS = {"rest": 4, "output": 8}
# Longer than saferun takes to begin its watch, which is when it may look at ranks before it passes a signal on.
BEFORE_S = 4.0
MOST_MS = 20

RANK = (
    NOTING_RANK
    + """\
block = (b"x" * 99 + b"\\n") * 100
while True:
    if os.environ["BENCHMARK_LOAD"] == "output":
        os.write(1, block)
        time.sleep(0.001)  # else the processors, and nothing else, would be measured
    else:
        sum(range(100000))
        time.sleep(0.05)
"""
)


def _swallow(pipe: IO[bytes]) -> None:
    while pipe.read1(1 << 20):  # type: ignore[attr-defined]  # it is buffered
        pass


def measure_stop(scratch: Scratch, side: str, script: str, load: str) -> dict[str, float]:
    """One launch that is told to stop while its ranks work: milliseconds from then."""
    directory = scratch.new_directory()
    ranks = RANKS[load]
    gates = Gates(directory, "go", ranks)
    own = ["--run-dir", "runs"] if side.startswith("saferun") else []
    arguments = [*command(side), "--nproc_per_node", str(ranks), *own, script]
    process = scratch.start(arguments, directory, extra={"BENCHMARK_LOAD": load}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    reader = threading.Thread(target=_swallow, args=(process.stdout,), daemon=True)
    reader.start()
    gates.wait(process)
    settle(lambda: marked_pids(scratch.mark, without_ranks=True))
    gates.open()
    time.sleep(BEFORE_S)
    told_ns = time.monotonic_ns()
    process.send_signal(signal.SIGTERM)
    wait(process, 120)
    reader.join(30)
    notes = [(directory / f"note.{rank}").read_text() for rank in range(ranks)]
    if not all(notes):
        message = f"{side}: {notes.count('')} of {ranks} ranks got no SIGTERM\n{(directory / 'stderr').read_text()}"
        raise BenchmarkError(message)
    wait_until(lambda: not marked_pids(scratch.mark), f"the end of all processes of {side}")
    got_ns = [int(text) for text in notes]
    return {"first": (min(got_ns) - told_ns) / 1e6, "last": (max(got_ns) - told_ns) / 1e6}


def main(options: Options) -> None:
    """Measures ranks at rest and ranks that write, and prints one table."""
    say_machine("stop", options)
    rounds = options.rounds or (3 if options.quick else 15)
    table = Table(("torchrun",))
    with Scratch() as scratch:
        script = scratch.script("work.py", RANK)
        for load in options.only:
            progress(f"{load}, {rounds} rounds")
            values = alternate(
                options.sides, rounds, functools.partial(measure_stop, scratch, script=script, load=load)
            )
            what = f"{RANKS[load]} ranks, {load}"
            table.add(f"{what}: handler of the first rank", "ms", values["first"], {"saferun": (Bar(MOST_MS),)})
            table.add(f"{what}: handler of the last rank", "ms", values["last"], {"saferun": (Bar(MOST_MS),)})
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("saferun", "torchrun"), ("rest", "output")))
