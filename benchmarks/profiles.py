"""What an env profile costs a healthy job: time of a training step under `none`, `minimal` and `production`.

The step is a small DDP step on the CPU with two ranks, where a collective and the Python around it are most of the
work: whatever a profile adds to each collective shows here more than in any real training.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from measure import Bar, Scratch, Table, alternate, finish, parse_options, progress, say_machine

SIDES = ("none", "minimal", "production")
STEPS = {"full": 1000, "quick": 200}
SCRIPT = """
import gc, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.ones(32, 64)
steps = int(sys.argv[1])
for step in range(steps + 50):
    if step == 50:
        dist.barrier()
        started = time.perf_counter()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    with open(sys.argv[2], "w") as file:
        file.write(str((time.perf_counter() - started) / steps * 1e6))
# The group must be gone before the interpreter is: see the training example.
del model, optimizer
gc.collect()
dist.destroy_process_group()
"""


def main() -> None:
    """Measure and print."""
    options = parse_options(__doc__ or "", SIDES, ())
    say_machine("env profiles", options)
    steps = STEPS["quick" if options.quick else "full"]
    rounds = options.rounds or (5 if options.quick else 15)
    with Scratch() as scratch:
        script = scratch.path / "step.py"
        script.write_text(SCRIPT)

        def measure(side: str) -> Mapping[str, float]:
            directory = scratch.new_directory()
            result = directory / "result"
            own = ["--nproc_per_node", "2", "--env-profile", side, str(script), str(steps), str(result)]
            finish(scratch.start([sys.executable, "-m", "saferun", *own], directory), directory)
            return {"us": float(result.read_text())}

        progress(f"{steps} steps, {rounds} rounds")
        values = alternate(options.sides, rounds, measure)
    table = Table(["none"])
    table.add("one training step", "us", values["us"], {"production": [Bar(1.03, "none")]})
    table.say()


if __name__ == "__main__":
    main()
