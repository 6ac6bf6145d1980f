"""What the examiner does for ``saferunctl stacks`` and ``record``: reads this host's ranks, and packs what it finds."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

from saferun.captures.wire import (
    FASTEST_RECORDING,
    LONGEST_RECORDING_S,
    MOST_RECORDED,
    CaptureReader,
    CaptureRequest,
    CaptureTarget,
)
from saferun.model import Value
from saferun.text.typed_json import fit, line_of, list_of, number_of, seconds_of

RECORDING = "recording"
"""The kind of request that lasts as long as the user says."""
BUDGET_S = 20.0
# Native frames take about a second a process.
NATIVE_BUDGET_S = 120.0
# What is kept of the budget for packing, and what py-spy takes before and after a recording.
_PACKING_S = 2.0
_RECORDING_S = 15.0


class Wanted(Value):
    """What a user wants of the ranks.

    Attributes:
        kind: ``stacks``: where they are now; ``recording``: where they are over some seconds.
        native: of ``stacks``: native stacks as well.
        ranks: of ``recording``: whose; empty: of all.
        seconds: of ``recording``: how long.
        rate: of ``recording``: samples a second.
        idle: of ``recording``: whether threads count that wait.
        limit_bytes: how long the answer of a host may be; 0: as long as evidence.
    """

    kind: Annotated[str, line_of(20)]
    native: bool = False
    ranks: Annotated[tuple[int, ...], list_of(Annotated[int, number_of(1 << 31)], MOST_RECORDED)] = ()
    seconds: Annotated[float, seconds_of(LONGEST_RECORDING_S)] = 30.0
    rate: Annotated[int, number_of(FASTEST_RECORDING, 1)] = 100
    idle: bool = False
    limit_bytes: Annotated[int, number_of(1 << 24)] = 0

    @property
    def budget_s(self) -> float:
        """How long a host may take."""
        if self.kind == RECORDING:
            return self.seconds + _RECORDING_S
        return NATIVE_BUDGET_S if self.native else BUDGET_S


class HostRequest(Value):
    """What the examiner is asked for.

    Attributes:
        wanted: what the user wants.
        targets: the ranks of this host that it is of.
        host: the name of this host in the job.
        world_size: how many ranks the job has.
        script: the training script, or its module.
        cwd: the directory that the ranks run in.
        limit_bytes: how long the answer may be.
    """

    wanted: Wanted
    targets: tuple[CaptureTarget, ...]
    host: str
    world_size: int
    script: str
    cwd: str
    limit_bytes: int


def read_ranks(value: Any) -> None:  # noqa: ANN401 - checked when it is decoded
    """Read them, and write what was found as the answer, packed; nothing where it finds no room in it."""
    started_at = time.monotonic()
    from saferun.linux.prctl import set_name

    set_name("sr-stacks")
    from saferun.captures.examiner_process import write

    request: HostRequest = fit(HostRequest, value)
    packed = _recordings(request) if request.wanted.kind == RECORDING else _stacks(request, started_at)
    write(packed.encode())


def _recordings(request: HostRequest) -> str:
    from saferun.captures.recording import RecordOptions, encode_recordings, record

    wanted = request.wanted
    options = RecordOptions(wanted.seconds, wanted.rate, wanted.idle)
    return encode_recordings(record(request.targets, options), request.limit_bytes)


def _stacks(request: HostRequest, started_at: float) -> str:
    from saferun.captures.capture_processes import run_request
    from saferun.captures.native_stacks import with_native_stacks
    from saferun.cluster.evidence import encode_part
    from saferun.evidence.job_evidence import Evidence

    wanted = request.wanted
    reader = CaptureReader()
    capture = CaptureRequest(
        request.targets,
        budget_s=wanted.budget_s - _PACKING_S,
        native="always" if wanted.native else "never",
        gpu=False,
        since=time.time(),
        is_asked=True,
    )
    run_request(capture, reader.feed, started_at)
    found = reader.capture
    stacks = found.stacks
    if wanted.native:
        stacks = with_native_stacks(stacks, os.environ, started_at + wanted.budget_s - _PACKING_S)
    evidence = Evidence(
        host=request.host,
        started_at=started_at,
        ends=(),
        outputs=(),
        abandoned=(),
        stop_signum=None,
        ranks=tuple(target.rank for target in request.targets),
        capture=found._replace(stacks=stacks),
        script=request.script,
        cwd=request.cwd,
        world_size=request.world_size,
    )
    return encode_part(evidence, request.limit_bytes)
