"""What the examiner does for ``saferunctl stacks``: takes the stacks of this host's ranks, and packs them."""

from __future__ import annotations

import time
from typing import Any

from saferun.captures.wire import CaptureReader, Request, Target
from saferun.model import Value
from saferun.text.typed_json import fit

# What is kept of the budget for packing.
_PACKING_S = 2.0
_LEAST_BUDGET_S = 1.0


class StacksWanted(Value):
    """Whose stacks are wanted.

    Attributes:
        targets: the ranks of this host that live.
        host: the name of this host in the job.
        world_size: how many ranks the job has.
        script: the training script, or its module.
        cwd: the directory that the ranks run in.
        native: whether to take native stacks as well.
        budget_s: how long all of it may take.
        limit_bytes: how long the answer may be.
    """

    targets: tuple[Target, ...]
    host: str
    world_size: int
    script: str
    cwd: str
    native: bool
    budget_s: float
    limit_bytes: int


def take_stacks(value: Any) -> None:  # noqa: ANN401 - checked when it is decoded
    """Take them, and write the packed evidence as the answer; nothing where it finds no room in it."""
    started_at = time.monotonic()
    from saferun.linux.prctl import set_name

    set_name("sr-stacks")
    from saferun.captures.capture_processes import run_request
    from saferun.captures.serve import write
    from saferun.cluster.evidence import encode_part
    from saferun.evidence import Evidence

    wanted: StacksWanted = fit(StacksWanted, value)
    request = Request(
        wanted.targets,
        budget_s=max(_LEAST_BUDGET_S, wanted.budget_s - _PACKING_S),
        native="always" if wanted.native else "never",
        gpu=False,
        since=time.time(),
        by_signal=False,
    )
    reader = CaptureReader()
    run_request(request, reader.feed, started_at)
    evidence = Evidence(
        host=wanted.host,
        started_at=started_at,
        ends=(),
        outputs=(),
        abandoned=(),
        stop_signum=None,
        ranks=tuple(target.rank for target in wanted.targets),
        capture=reader.capture,
        script=wanted.script,
        cwd=wanted.cwd,
        world_size=wanted.world_size,
    )
    write(encode_part(evidence, wanted.limit_bytes).encode())
