"""Hangs: how long from the verdict to the printed picture, and what being watched costs a training loop.

python benchmarks/hang.py [--quick] [--only 8,32,64,gloo,windows,launches] [--rounds 5]
"""

from __future__ import annotations

import functools
import json
import math
import os
import select
import signal
import subprocess
import time
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher_cost import BenchmarkError, cpu_s, marked_pids
from measure import (
    REPOSITORY,
    Bar,
    Options,
    Scratch,
    Table,
    alternate,
    command,
    finish,
    parse_options,
    progress,
    say_machine,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# ---------------------------------------------------------------------------------------------------------------------
# From the verdict to the picture

PICTURE_BARS_S = {8: 2.0, 64: 10.0}
GLOO_RANKS = 8
PRINTED = "verdict to picture printed"
LAST_LINE = b"saferun: job left running"

# Fifteen calls deep, all ranks in the same lock but the last, which is elsewhere.
HUNG = """\
import os
import signal
import threading
import time

signal.signal(signal.SIGINT, signal.SIG_DFL)
lock = threading.Lock()
lock.acquire()


def fetch_batch():
    time.sleep(3600)


def synchronize():
    lock.acquire()


def layer(depth):
    if depth:
        layer(depth - 1)
    elif int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        fetch_batch()
    else:
        synchronize()


def train():
    layer(11)


train()
"""


def measure_picture(scratch: Scratch, script: Sequence[str], ranks: int) -> dict[str, float]:
    """One hang: seconds from the verdict until all is captured, diagnosed, and the picture's last line can be read."""
    directory = scratch.new_directory()
    options = ["--nproc_per_node", str(ranks), "--hang-timeout", "2", "--run-dir", "runs"]
    process = subprocess.Popen(
        [*command("saferun"), *options, *script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=scratch.environment(directory, {"OMP_NUM_THREADS": "1"}),
    )
    picture, printed_at = read_picture(process)
    events = [json.loads(line) for path in directory.glob("runs/*/events.jsonl") for line in path.open()]
    incident = wait_until(functools.partial(read_incident, directory), "the report of the hang")
    # Ctrl-C, before which nothing is captured again.
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    wait_until(lambda: not marked_pids(scratch.mark), "the end of all processes")
    seen = {note["rank"] for note in incident["captures"] if note["capture"] == "py_spy" and not note["failure"]}
    if len(seen) < ranks or incident["timed_out"] or incident["cause"] is None:
        message = f"the picture is not complete: stacks of {len(seen)} of {ranks} ranks\n{picture}"
        raise BenchmarkError(message)
    moments: dict[str, float] = {}
    for event in events:
        moments.setdefault(event["event"], event["time"])
    verdict_at = moments["HangSuspected"]
    return {
        "capture process alone": incident["capture_elapsed_s"],
        "verdict to captured and diagnosed": moments["EvidenceCaptured"] - verdict_at,
        PRINTED: printed_at - verdict_at,
    }


def read_picture(process: subprocess.Popen[bytes], timeout_s: float = 180) -> tuple[str, float]:
    """What saferun says up to the end of the picture, and the moment (epoch seconds) when that end was there."""
    assert process.stderr is not None
    text = b""
    deadline = time.monotonic() + timeout_s
    while (begin := text.find(LAST_LINE)) < 0 or text.find(b"\n", begin) < 0:
        ready = select.select([process.stderr], [], [], max(0.0, deadline - time.monotonic()))[0]
        chunk = os.read(process.stderr.fileno(), 1 << 16) if ready else b""
        if not chunk:
            process.kill()
            message = f"no picture of the hang\n{text.decode(errors='replace')[-3000:]}"
            raise BenchmarkError(message)
        text += chunk
    return text.decode(errors="replace"), time.time()


def read_incident(directory: Path) -> dict[str, Any]:
    """What `report.json`, which may be written after the picture, says of the hang; empty until it is there."""
    path = directory / "runs" / "report.json"
    incident: dict[str, Any] = json.loads(path.read_text())["incidents"][0] if path.exists() else {}
    return incident


# ---------------------------------------------------------------------------------------------------------------------
# What being watched costs

TRAINING_RANKS = 2
TRAINING_PARTS = ("windows", "launches")
SLOW_DOWN_BAR = Bar(0.5)
WINDOW_S = 2.0
DENSE, OFF = "timeout 10 s", "no watchdog, no hook"
WATCHED = {DENSE: ["--hang-timeout", "10"], "timeout 300 s": ["--hang-timeout", "300"]}
LAUNCHES = {OFF: ["--hang-timeout", "0", "--no-inject"], **WATCHED}

# Steps of about a millisecond, until a file appears. Rank 0 writes down when each of its steps ended.
TRAINING = """\
import os
import time
from array import array

import torch
import torch.distributed as dist

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
directory, rank = os.environ["BENCHMARK_DIR"], dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch, target = torch.randn(32, 96), torch.randn(32, 10)
parameters = list(model.parameters())
message = torch.zeros(sum(parameter.numel() for parameter in parameters) + 1)
ends_ns = array("q")
while not message[-1]:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(batch), target).backward()
    torch.cat([parameter.grad.flatten() for parameter in parameters], out=message[:-1])
    message[-1] = rank == 0 and len(ends_ns) % 100 == 99 and os.path.exists(os.path.join(directory, "over"))
    dist.all_reduce(message)
    offset = 0
    for parameter in parameters:
        parameter.grad.copy_(message[offset : offset + parameter.numel()].view_as(parameter)).div_(2)
        offset += parameter.numel()
    optimizer.step()
    ends_ns.append(time.monotonic_ns())
    if rank == 0 and len(ends_ns) == 300:
        open(os.path.join(directory, "warm"), "w").close()
if rank == 0:
    with open(os.path.join(directory, "ends_ns"), "wb") as file:
        ends_ns.tofile(file)
dist.destroy_process_group()
# The interpreter's own end is not what is measured.
os._exit(0)
"""


class Span(NamedTuple):
    """A while of training.

    Attributes:
        began_ns: CLOCK_MONOTONIC.
        ended_ns: CLOCK_MONOTONIC.
        ranks_s: processor time of the ranks.
        supervisor_s: processor time of the supervisor, and of those helpers of it that have ended.
    """

    began_ns: int
    ended_ns: int
    ranks_s: float
    supervisor_s: float

    @property
    def supervisor_percent(self) -> float:
        """The supervisor's share of a core."""
        return self.supervisor_s / (self.ended_ns - self.began_ns) * 1e11

    def steps(self, ends_ns: array[int]) -> int:
        """How many steps ended in it."""
        return bisect_left(ends_ns, self.ended_ns) - bisect_left(ends_ns, self.began_ns)

    def step_ms(self, ends_ns: array[int]) -> float:
        """How long a step took."""
        return (self.ended_ns - self.began_ns) / self.steps(ends_ns) / 1e6

    def step_processor_ms(self, ends_ns: array[int]) -> float:
        """The processor time of all ranks that a step took."""
        return self.ranks_s / self.steps(ends_ns) * 1e3


class Training:
    """A launch of the training loop that is past its first steps.

    Args:
        scratch: where it runs.
        script: path of the training loop.
        options: of saferun.
    """

    def __init__(self, scratch: Scratch, script: str, options: Sequence[str]) -> None:
        self._directory = scratch.new_directory()
        arguments = [*command("saferun"), "--nproc_per_node", str(TRAINING_RANKS), *options, script]
        self.process = scratch.start(arguments, self._directory, extra={"OMP_NUM_THREADS": "1"})

        def is_warm() -> bool:
            if self.process.poll() is not None:
                finish(self.process, self._directory)
            return (self._directory / "warm").exists()

        wait_until(is_warm, "the first steps", step_s=0.1)
        self._ranks = sorted(set(marked_pids(scratch.mark)) - set(marked_pids(scratch.mark, without_ranks=True)))

    def watch(self, window_s: float) -> Span:
        """Lets it train for a while."""
        ranks_s, supervisor_s = -cpu_s(self._ranks), -self._supervisor_s()
        began_ns = time.monotonic_ns()
        time.sleep(window_s)
        ended_ns = time.monotonic_ns()
        return Span(began_ns, ended_ns, ranks_s + cpu_s(self._ranks), supervisor_s + self._supervisor_s())

    def _supervisor_s(self) -> float:
        # Time of children that have been waited for: fields 16 and 17, see proc(5).
        fields = Path("/proc", str(self.process.pid), "stat").read_text().rpartition(")")[2].split()
        return cpu_s([self.process.pid]) + sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> array[int]:
        """Ends it. Returns when each step ended, in nanoseconds of CLOCK_MONOTONIC."""
        (self._directory / "over").touch()
        finish(self.process, self._directory)
        path = self._directory / "ends_ns"
        ends_ns = array("q")
        with path.open("rb") as file:
            ends_ns.fromfile(file, path.stat().st_size // ends_ns.itemsize)
        return ends_ns


def slow_down_percent(watched: Sequence[float], unwatched: Sequence[float]) -> list[float]:
    """By how much each is longer than its neighbour."""
    return [(one / other - 1) * 100 for one, other in zip(watched, unwatched, strict=True)]


def add_windows(table: Table, scratch: Scratch, script: str, side: str, pairs: int) -> None:
    """One launch, in windows with and without its supervisor, which is stopped (SIGSTOP) in every other one.

    The same ranks, the same memory, seconds apart: most of what makes two launches differ is the same here.
    """
    training = Training(scratch, script, LAUNCHES[side])
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for number in range(2 * pairs):
        # On, off, off, on: what drifts hits both alike.
        is_watched = number % 4 in {0, 3}
        training.process.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)
        spans[is_watched].append(training.watch(WINDOW_S))
    training.process.send_signal(signal.SIGCONT)
    ends_ns = training.end()
    steps = {key: [span.step_ms(ends_ns) for span in spans[key]] for key in spans}
    processor = {key: [span.step_processor_ms(ends_ns) for span in spans[key]] for key in spans}
    what = "windows of a launch"
    table.add(f"{what}: step", "ms", {side: steps[True], "supervisor stopped": steps[False]})
    table.add(f"{what}: step, of all ranks", "ms CPU", {side: processor[True], "supervisor stopped": processor[False]})
    add_slow_down(table, f"{what}: slow-down", side, slow_down_percent(steps[True], steps[False]))
    more = slow_down_percent(processor[True], processor[False])
    add_slow_down(table, f"{what}: more processor time of ranks", side, more)
    add_share(table, what, {side: [span.supervisor_percent for span in spans[True]]})


def measure_launch(scratch: Scratch, side: str, script: str, window_s: float) -> dict[str, float]:
    """One launch of its own: its steps, and the supervisor's share of a core."""
    training = Training(scratch, script, LAUNCHES[side])
    span = training.watch(window_s)
    ends_ns = training.end()
    return {
        "step": span.step_ms(ends_ns),
        "processor": span.step_processor_ms(ends_ns),
        "supervisor": span.supervisor_percent,
    }


def add_launches(table: Table, scratch: Scratch, script: str, rounds: int, window_s: float) -> None:
    """Launches in turn, each with its watchdog and hook or without; those of a round are compared."""
    measure = functools.partial(measure_launch, scratch, script=script, window_s=window_s)
    values = alternate(tuple(LAUNCHES), rounds, measure, warm_up=False)
    what = "launches in turn"
    table.add(f"{what}: step", "ms", values["step"])
    table.add(f"{what}: step, of all ranks", "ms CPU", values["processor"])
    for side in WATCHED:
        add_slow_down(table, f"{what}: slow-down", side, slow_down_percent(values["step"][side], values["step"][OFF]))
        more = slow_down_percent(values["processor"][side], values["processor"][OFF])
        add_slow_down(table, f"{what}: more processor time of ranks", side, more)
    add_share(table, what, values["supervisor"])


def add_share(table: Table, what: str, shares: dict[str, list[float]]) -> None:
    """The supervisor's share of a core, than which it cannot hold the ranks up by much more."""
    table.add(f"{what}: supervisor", "% core", shares, dict.fromkeys(WATCHED, (SLOW_DOWN_BAR,)))


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which the true median lies, 19 times out of 20: order statistics, whatever the distribution."""
    ordered = sorted(values)
    rank = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered)) - 0.5))
    return ordered[rank], ordered[-1 - rank]


def add_slow_down(table: Table, what: str, side: str, values: Sequence[float]) -> None:
    """One row; without its bar where the noise is too large to tell on which side of it the true median lies."""
    low, high = median_bounds(values)
    is_decided = not low <= SLOW_DOWN_BAR.limit <= high
    noise = f"{low:.2g} to {high:.2g} %" + ("" if is_decided else f": {SLOW_DOWN_BAR.limit:g} % cannot be decided")
    table.add(f"{what} ({noise})", "%", {side: values}, {side: (SLOW_DOWN_BAR,)} if is_decided else None)


# ---------------------------------------------------------------------------------------------------------------------


def add_picture(table: Table, scratch: Scratch, part: str, rounds: int) -> None:
    """Hangs of so many plain ranks, or of gloo ranks; the picture's bar holds for the worst as well."""
    ranks = GLOO_RANKS if part == "gloo" else int(part)
    what = f"{ranks} gloo ranks" if part == "gloo" else f"{ranks} ranks"
    gloo = [str(REPOSITORY / "examples" / "hang.py"), "--how", "lock"]
    script = gloo if part == "gloo" else [scratch.script("hung.py", HUNG)]
    progress(f"{what} hang, {rounds} rounds")
    values = [measure_picture(scratch, script, ranks) for _ in range(rounds)]
    bars = {"saferun": (Bar(PICTURE_BARS_S[ranks]),)} if ranks in PICTURE_BARS_S else None
    for metric in values[0]:
        each = [one[metric] for one in values]
        table.add(f"{what}: {metric}", "s", {"saferun": each}, bars if metric == PRINTED else None)
        if metric == PRINTED:
            table.add(f"{what}: {metric}, the worst of {rounds}", "s", {"saferun": [max(each)]}, bars)


def main(options: Options) -> None:
    """Measures the parts asked for and prints one table."""
    say_machine("hang", options)
    table = Table(())
    with Scratch() as scratch:
        for part in options.only:
            if part not in TRAINING_PARTS:
                add_picture(table, scratch, part, options.rounds or (2 if options.quick else 7))
        script = scratch.script("training.py", TRAINING)
        if "windows" in options.only:
            pairs = options.rounds or (10 if options.quick else 60)
            progress(f"training, {pairs} pairs of windows of {WINDOW_S:g} s")
            add_windows(table, scratch, script, DENSE, pairs)
        if "launches" in options.only:
            rounds = options.rounds or (3 if options.quick else 10)
            progress(f"training, {rounds} rounds of {len(LAUNCHES)} launches")
            add_launches(table, scratch, script, rounds, 5.0 if options.quick else 15.0)
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__ or "", ("saferun",), ("8", "32", "64", "gloo", *TRAINING_PARTS)))
