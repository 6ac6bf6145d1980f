"""What the failure record costs a rank that an exception ends, with and without torch, and calls of what is decorated.

python benchmarks/failure_record.py [--quick] [--sides plain,record] [--only bare,torch,call] [--rounds N]

Of ``bare`` and ``torch`` both sides are the same Python process, which raises an exception with 21 frames of ten locals
each and times what Python does about it; one of them writes the record. No launcher runs.
"""

from __future__ import annotations

import functools
import sys

from launcher_cost import BenchmarkError
from measure import REPOSITORY, Options, Scratch, Table, alternate, parse_options, progress, say_machine

FAIL = """
import os, sys, time
def step(depth, a=1, b=2.0, c="text", d=(1, 2), e=None, f=True):
    x, y, z = {values}
    if not depth:
        raise ValueError("wrong")
    step(depth - 1)
hook = sys.excepthook
def timed(*error):
    began = time.perf_counter()
    hook(*error)
    open("time", "w").write(str(1000 * (time.perf_counter() - began)))
sys.excepthook = timed
step(20)
"""
CALL = """
import sys, time
sys.path.insert(0, {root!r})
import saferun
def add(first, second): return first + second
if {is_recorded}: add = saferun.record(add)
best = min(_timed for _ in range(20) for began in [time.perf_counter()] for _timed in [
    [add(1, 2) for _ in range(10000)] and (time.perf_counter() - began) / 10000])
open("time", "w").write(str(best * 1e6))
"""
VALUES = {
    "bare": "1, [1], {'x': 2}",
    "torch": "torch.ones(8, 512), torch.ones(64, 64, dtype=torch.bfloat16), {'ids': torch.arange(99)}",
}
NAMES = {
    "bare": "a traceback of 21 frames",
    "torch": "the same with 63 tensors",
    "call": "a call of a function",
}
UNITS = {"bare": "ms", "torch": "ms", "call": "µs"}
ROUNDS = {"bare": 41, "torch": 11, "call": 11}
QUICK_ROUNDS = {"bare": 11, "torch": 3, "call": 3}


def measure(scratch: Scratch, part: str, side: str) -> dict[str, float]:
    """One process, which prints what it has measured."""
    directory = scratch.new_directory()
    extra = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    if part == "call":
        code = CALL.format(root=str(REPOSITORY), is_recorded=side == "record")
    else:
        code = ("import torch\n" if part == "torch" else "") + FAIL.replace("{values}", VALUES[part])
        if side == "record":
            inject = str(REPOSITORY / "saferun" / "inject")
            extra |= {"PYTHONPATH": inject, "SAFERUN_HOOK": str(directory / "r")}
    process = scratch.start([sys.executable, "-c", code], directory, extra=extra)
    process.wait()
    if (side == "record" and part != "call") != (directory / "r.failure").exists():
        raise BenchmarkError(f"{part} of {side}: the record was not where it belongs")
    return {"time": float((directory / "time").read_text())}


def main(options: Options) -> None:
    """Measures each part, and prints one table; "cost" is the difference of the two sides of one round."""
    say_machine("failure_record", options)
    table = Table(("plain",))
    with Scratch() as scratch:
        for part in options.only:
            rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)[part]
            progress(f"{NAMES[part]}, {rounds} rounds")
            for values in alternate(options.sides, rounds, functools.partial(measure, scratch, part)).values():
                table.add(NAMES[part], UNITS[part], values)
                if len(values) > 1:
                    cost = [own - plain for plain, own in zip(values["plain"], values["record"], strict=True)]
                    table.add(f"{NAMES[part]}: cost", UNITS[part], {"record": cost})
    table.say()


if __name__ == "__main__":
    main(parse_options(__doc__, ("plain", "record"), tuple(NAMES)))
