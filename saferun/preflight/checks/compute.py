"""``--health full``: do the host's processors or GPUs compute right, and do its ranks reach each other?

Each of the host's ranks multiplies matrices for a second, of numbers whose product is known exactly, and all of them
run a barrier and some all_reduces, over loopback or between the GPUs of the host. Both take place in the processes of
``saferunctl doctor --collective``, which may hang or die.

A host is blamed for a wrong result, for what the driver itself calls broken, and for a GPU that hangs in a product.
Whatever else fails may be a setting, a library, a limit of memory or a busy machine.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.poller import Poller
from saferun.preflight.bisect import LOOPBACK, Member, Trial, TrialResult
from saferun.preflight.bisect.trial_process import IMPORT_S, LOST, MARGIN_S, TrialPlace, TrialRun
from saferun.preflight.checks.answers import ok, skipped, warning
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import UNUSABLE, CheckResult
from saferun.text.wording import count_text

COMPUTE_S = 1.0
TRIAL_S = 30.0
DEADLINE_S = IMPORT_S + TRIAL_S + MARGIN_S + 3.0
"""When it is given up: its processes have ended by then, so that none is there beside the ranks."""
_MOST_MEMBERS = 64
_FEWEST = 2  # that reach each other
_STEP_S = 0.5
_REAP_S = 1.0
# By how much a GPU is slower that is broken, throttled or used by another program.
_SLOW = 0.5
_FEW = 3
_MOST_SHOWN = 3
_MULTIPLYING = "multiplying matrices"
_BROKEN = re.compile(
    r"a matrix product is wrong|a wrong sum|uncorrectable ECC error(?!s? ?[:=])|ECCUncorrectable|fallen off the bus"
    r"|GPU is lost|hardware stack error"
)
_MASK = "CUDA_VISIBLE_DEVICES"


def check_compute(context: CheckContext, *, trial_s: float = TRIAL_S) -> CheckResult:
    """Whether the host computes right. It only warns: the ranks may do without what is wrong here.

    Args:
        context: the launch.
        trial_s: how long it may take once torch is imported.
    """
    on_gpu = context.vendor in {"nvidia", "amd"}
    members = min(max(_members(context, on_gpu=on_gpu), 1), _MOST_MEMBERS)
    results, why = _run(context, on_gpu=on_gpu, members=members, trial_s=trial_s)
    if why:
        return skipped(f"no matrix was multiplied: {why}")
    # Parts of GPUs may be of different sizes.
    return judge(results, on_gpu=on_gpu, are_alike="MIG-" not in context.environ.get(_MASK, ""))


def _members(context: CheckContext, *, on_gpu: bool) -> int:
    """How many take part: the ranks of a launch, of a host by itself all GPUs, and never more than there are GPUs."""
    if not on_gpu:
        return _FEWEST if context.is_of_host else context.nproc
    from saferun.linux.gpus import count_gpus

    gpus = count_gpus(context.environ) or 0
    return gpus or 1 if context.is_of_host else min(context.nproc, gpus or context.nproc)


def _run(context: CheckContext, *, on_gpu: bool, members: int, trial_s: float) -> tuple[tuple[TrialResult, ...], str]:
    """How the members did; or why there was no trial."""
    poller, found, broken = Poller(), list[TrialResult](), list[str]()
    is_done: list[bool] = []

    def on_done(_trial: Trial, results: tuple[TrialResult, ...]) -> None:
        found.extend(results)
        is_done.append(True)

    place = TrialPlace(0, "nccl" if on_gpu else "gloo")
    run = TrialRun(place, context.environ, poller, on_ready=broken.append, on_done=on_done)
    group = tuple(Member(0, local_rank) for local_rank in range(members))
    trial = Trial(1, "this host alone", (group,), LOOPBACK, trial_s, COMPUTE_S)
    try:
        run.start(trial)
        give_up_at = time.monotonic() + IMPORT_S + trial_s + MARGIN_S
        while not is_done and time.monotonic() < give_up_at:
            poller.wait(_STEP_S)
            run.tick(time.monotonic())
    finally:
        pids = run.pids
        run.close()
        _reap(pids)
        poller.close()
    why = next(filter(None, broken), "")
    return tuple(found), why or ("" if is_done else "it took too long")


def _reap(pids: set[int]) -> None:
    """Wait a moment for processes that were killed; one that a driver holds is left."""
    until = time.monotonic() + _REAP_S
    while pids and time.monotonic() < until:
        for pid in tuple(pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    pids.discard(pid)
            except ChildProcessError:
                pids.discard(pid)
        time.sleep(0.01)


def judge(results: Sequence[TrialResult], *, on_gpu: bool, are_alike: bool = True) -> CheckResult:
    """What the members' answers mean. That of one that is well is how fast it computes, in GFLOP/s.

    Args:
        results: of all members.
        on_gpu: whether they have a GPU each.
        are_alike: whether all of these should be equally fast.
    """
    device = "GPU" if on_gpu else "rank"
    class_name = "gpu_hardware_error" if on_gpu else "machine_fault"
    facts = [(f"{device} {one.member.local_rank}", one.message or one.kind) for one in results]
    failed = [one for one in results if one.kind != "ok"]
    if lost := next((one.message for one in failed if one.message.startswith(LOST)), ""):
        return skipped(f"no matrix was multiplied: {lost}", facts)
    if failed:
        # Those that only waited for another one are no cause.
        wrong = [one for one in failed if one.kind == "error"] or failed
        shown = "; ".join(
            f"{device} {one.member.local_rank} {one.where}: {one.message or 'it did not come to an end'}"
            for one in wrong[:_MOST_SHOWN]
        )
        more = f" (and {len(wrong) - _MOST_SHOWN} more)" if len(wrong) > _MOST_SHOWN else ""
        if any("out of memory" in one.message for one in wrong):
            return warning(f"{shown}{more}", "see who uses the GPU: nvidia-smi", facts, class_name="gpu_busy")
        hint = "run `saferunctl doctor --collective` on this host, and look at `dmesg`"
        if not any(_is_proof(one, on_gpu=on_gpu) for one in wrong):
            return warning(f"{shown}{more}", hint, facts)
        facts.insert(0, (UNUSABLE, f"{device} {wrong[0].member.local_rank}"))
        return warning(f"{shown}{more}", f"{hint}; take the host out of the job", facts, class_name=class_name)
    rates = {one.member.local_rank: float(one.message) for one in results if _is_number(one.message)}
    if on_gpu and are_alike and len(rates) >= _FEW:
        usual = sorted(rates.values())[len(rates) // 2]
        slow = [number for number, rate in sorted(rates.items()) if rate < usual * _SLOW]
        if slow:
            name = f"GPU {slow[0]}"
            message = f"{name} computes at {rates[slow[0]]:g} GFLOP/s, and the others at {usual:g}"
            hint = f"look at clocks, temperature and other programs: nvidia-smi -q -i {slow[0]} -d PERFORMANCE"
            return warning(message, hint, facts)  # perhaps another program uses it
    return ok(f"{count_text(len(results), device)} multiplied matrices right and ran all_reduce", facts)


def _is_proof(result: TrialResult, *, on_gpu: bool) -> bool:
    """Whether a result can only come from broken hardware. A processor that is late is busy."""
    if result.kind == "timeout":
        return on_gpu and result.where == _MULTIPLYING
    return bool(_BROKEN.search(result.message))


def _is_number(message: str) -> bool:
    return message.replace(".", "", 1).isdecimal()
