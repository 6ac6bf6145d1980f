"""What `--trace-calls` costs a loop of 1 ms steps whose calls are recorded.

python benchmarks/recorded_calls.py [--quick] [--sides plain,calls,lines] [--only own,library] [--rounds N]

All sides are the same Python process, which calls a package of its own; they differ in what saferun puts into the
environment of a rank. No launcher runs. The work of a step is measured once, and is the same for all sides.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from launcher_cost import BenchmarkError
from measure import REPOSITORY, Bar, Options, Scratch, Table, alternate, parse_options, progress, say_machine

SCRIPTS = {
    # Ten calls a step, and a millisecond in C.
    "own": """\
import hashlib, sys, time
DATA = bytes(int(sys.argv[1]))
def layer(data): hashlib.sha256(data).digest()
def forward():
    for _ in range(8): layer(DATA)
def step(): forward()
""",
    # One call a step, and a millisecond in Python code of others, which consists of small calls.
    "library": """\
import sys, time
from json.encoder import JSONEncoder
VALUE = [[number, {"a": number}] for number in range(int(sys.argv[1]))]
ENCODER = JSONEncoder(indent=1)
def step():
    for _ in ENCODER.iterencode(VALUE): pass
""",
}
LOOP = """
def main():
    steps = int(sys.argv[2])
    step()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps): step()
    print((time.perf_counter() - began) / steps * 1e3, (time.process_time() - used) / steps * 1e3)
main()
"""
NAMES = {"own": "1 ms in C, 10 calls of its own", "library": "1 ms of Python code of others, 1 call of its own"}
STEPS, QUICK_STEPS = 2000, 300
ROUNDS, QUICK_ROUNDS = 21, 5
# What is left to be wished for where the interpreter has nothing but a profile function.
BARS = {"own": {"calls": (Bar(1.03, "plain"),)}}
_STEP_S = 1e-3
_DIRECTORY = "/dev/shm"  # noqa: S108 - as saferun has it


def work_of(part: str) -> int:
    """How much makes a step of a millisecond on this machine."""
    best_s = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        if part == "own":
            hashlib.sha256(bytes(1 << 20)).digest()
        else:
            from json.encoder import JSONEncoder

            for _ in JSONEncoder(indent=1).iterencode([[number, {"a": number}] for number in range(100)]):
                pass
        best_s = min(best_s, time.perf_counter() - began)
    return max(1, int((1 << 20) * _STEP_S / best_s / 8 if part == "own" else 100 * _STEP_S / best_s))


def measure_steps(scratch: Scratch, part: str, work: int, steps: int, side: str) -> dict[str, float]:
    """One process: milliseconds a step, of time and of processor time."""
    directory = scratch.new_directory()
    script = directory / "train.py"
    script.write_text(SCRIPTS[part] + LOOP)
    prefix = f"{_DIRECTORY}/saferun-benchmark-{os.getpid()}"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": ""}
    if side != "plain":
        environ |= {"PYTHONPATH": str(REPOSITORY / "saferun" / "inject"), "SAFERUN_HOOK": prefix}
        environ["SAFERUN_TRACE"] = f"{side}\n{directory}"
    command = [sys.executable, str(script), str(work), str(steps)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    left = list(Path(_DIRECTORY).glob(f"{Path(prefix).name}.*"))
    has_recorded = any(path.suffix == ".calls" for path in left)
    for path in left:
        path.unlink()
    if done.returncode or has_recorded != (side != "plain"):
        raise BenchmarkError(f"{part} of {side}: {done.returncode}\n{done.stderr[-2000:]}")
    wall, processor = map(float, done.stdout.split())
    return {"wall": wall, "processor": processor}


def main(options: Options) -> None:
    """Measures each part, and prints one table."""
    say_machine("recorded_calls", options)
    table = Table(("plain",))
    with Scratch() as scratch:
        for part in options.only:
            rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
            work = work_of(part)
            progress(f"{NAMES[part]}, {rounds} rounds")
            steps = QUICK_STEPS if options.quick else STEPS
            found = alternate(options.sides, rounds, functools.partial(measure_steps, scratch, part, work, steps))
            for metric, values in found.items():
                table.add(f"{NAMES[part]}: {metric}", "ms", values, BARS.get(part) if metric == "processor" else None)
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("plain", "calls", "lines"), tuple(SCRIPTS)))
