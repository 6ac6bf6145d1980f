"""The GPUs that the ranks will use: how many, how healthy, in whose use, and whether the driver serves torch.

Where no device node of a GPU's driver exists, no driver is asked.

Sources: NVML API Reference Guide; NVIDIA GPU Memory Error Management (row remapping, page retirement); CUDA
Compatibility guide; Linux, Documentation/gpu/amdgpu.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from saferun.env.profiles.version_ranges import numbers_of
from saferun.linux.gpus import gpu_vendor
from saferun.model import JsonObject, Value
from saferun.preflight.checks.answers import ok, skipped, warning
from saferun.preflight.checks.common import GIB, MIB
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.gpu_fabric import fabric_faults
from saferun.preflight.checks.versions import read_versions
from saferun.preflight.results import HELD_BY_OLD_RANK, UNUSABLE, CheckResult
from saferun.text.wording import count_text, size_text

# Without persistence mode the driver initialises every GPU again for whoever asks first: some seconds for each, and
# some hosts have sixteen.
DRIVER_TIMEOUT_S = 25.0
# A host is blamed for a driver that does not answer: for a single call, which concerns one GPU in general, that lasts.
_STUCK_S = 8.0
_SYSFS_TIMEOUT_S = 3.0

# A desktop's programs and an idle CUDA context share a GPU with any job. Who holds this much has a job there.
_NOTABLE_BYTES = 512 * MIB
_NOTABLE_SHARE = 0.05
# Memory in use that no process is seen to hold, after ranks of ours ended: beyond what drivers and desktops keep.
_UNOWNED_SHARE = 0.2

# How many processes a launcher started on this host, which then each see their own GPUs.
_TASKS_PER_HOST = (
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_MPS_SERVER = "nvidia-cuda-mps"  # it opens a GPU of exclusive mode to many processes
_MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"


class _Fault(Value):
    message: str
    hint: str
    class_name: str = "gpu_hardware_error"
    transient: bool = False


def check_gpus(context: CheckContext, *, nvml: Any = None) -> CheckResult:  # noqa: ANN401 - a module
    """Whether the GPUs that the ranks will see can be used. It only warns: a script may use other GPUs, or none.

    Where no GPU is free, but one that is in use may come free, or a dead rank of the previous attempt still holds
    memory, it is transient, of class ``gpu_busy``.

    Args:
        context: the launch.
        nvml: a stand-in for ``pynvml``. The real one is asked in a process of its own.
    """
    dev, sysfs = context.path("dev"), context.path("sys")
    vendor = gpu_vendor(sysfs, dev_root=dev)
    # The kernel's files tell of AMD's GPUs in containers that have been granted none.
    if vendor is None or (vendor == "amd" and not os.path.exists(f"{dev}/kfd")):
        missing = next(iter(_missing_faults(context, ())), None)
        if missing is not None:
            return warning(missing.message, missing.hint, (("gpus", "0"),), class_name=missing.class_name)
        return ok("there is no GPU that torch could use", (("gpus", "0"),))
    content = _ask_nvidia(nvml) if vendor == "nvidia" else _ask_amd(sysfs, dev)
    if content is None:
        return skipped("the GPUs' driver could not be asked")
    return _judge(context, vendor, content)


def _ask_nvidia(nvml: Any) -> JsonObject | None:  # noqa: ANN401
    from saferun.linux.nvidia_gpus import read_nvidia_state, read_nvidia_state_apart

    if nvml is not None:
        return read_nvidia_state(time.monotonic() + DRIVER_TIMEOUT_S, nvml=nvml)
    return read_nvidia_state_apart(DRIVER_TIMEOUT_S)


def _ask_amd(sysfs: str, dev: str) -> JsonObject:
    from saferun.linux.amd_gpus import SYSFS_STEP, read_amd_sysfs
    from saferun.linux.gpu_reading import Snapshot, read_until
    from saferun.linux.small_files import list_directory

    snapshot = Snapshot()
    done = read_until(time.monotonic() + _SYSFS_TIMEOUT_S, lambda: read_amd_sysfs(snapshot, frozenset(), sysfs))
    content = snapshot.as_json()
    for gpu in content["gpus"]:
        nodes = [name for name in list_directory(f"{sysfs}/bus/pci/devices/{gpu['pci']}/drm") if name[:7] == "renderD"]
        if nodes and not any(os.path.exists(f"{dev}/dri/{node}") for node in nodes):
            gpu["denied"] = True
    if not done:
        content["stuck_in"] = SYSFS_STEP
    return content


# -------------------------------------------------------------------------------------------------------------- verdict


def _judge(context: CheckContext, vendor: str, content: JsonObject) -> CheckResult:
    """What the state of the GPUs means for this launch."""
    versions = read_versions(context) if context.python else {}
    cuda = versions.get("cuda", "")
    # Whether the ranks' torch calls these GPUs its own: then, and only then, what breaks them breaks the job.
    serves = bool(cuda) if vendor == "nvidia" else "rocm" in versions
    gpus: list[JsonObject] = [gpu for gpu in content["gpus"] if not gpu.get("denied")]
    visible = _visible(context, vendor, gpus)
    used = _used(context, gpus, visible)
    # What was not read yet, or not at all, is not missing.
    is_whole = not content.get("stuck_in")
    is_answered = not content.get("failure") or bool(content.get("broken"))
    too_few = list(_count_faults(context, visible, serves=serves)) if is_whole else []
    # Without a launch what is broken counts on each GPU of the host, whatever the caller's environment shows. What is
    # in use does not: another job may well hold the other GPUs.
    judged = gpus if context.is_of_host else used
    faults = [
        *_driver_faults(context, content, cuda),
        *too_few,
        *(_missing_faults(context, content["gpus"]) if is_whole and is_answered else ()),
        *(fault for gpu in judged for fault in _hardware_faults(gpu, vendor)),
        *(_Fault(*fault) for fault in fabric_faults(context, content, judged)),
        *_busy_faults(context, used, gpus if visible is None else [gpus[index] for index in visible]),
    ]
    facts = [
        *((UNUSABLE, what) for what in _unusable(context, content, judged, visible, too_few) if serves),
        ("gpus", str(len(gpus))),
        ("visible", "unknown" if visible is None else str(len(visible))),
        *((name, str(content[name])) for name in ("driver", "runtime", "failure") if content.get(name)),
        *((f"gpu {gpu['index']}", _gpu_text(gpu)) for gpu in gpus[:64]),
        *((HELD_BY_OLD_RANK, f"GPU {gpu['index']}") for gpu in used if _has_old_rank(gpu, context.old_pids)),
    ]
    if not faults:
        names = " and ".join(sorted({str(gpu["name"]) for gpu in gpus if gpu.get("name")})[:3])
        message = f"{count_text(len(gpus), 'GPU')}{f' ({names})' if names else ''}"
        if content.get("failure"):
            return skipped(f"the GPUs are not known: {content['failure']}", facts)
        return ok(message, facts)
    return warning(
        "; ".join(dict.fromkeys(fault.message for fault in faults)),
        "; ".join(dict.fromkeys(fault.hint for fault in faults)),
        facts,
        class_name=next((fault.class_name for fault in faults if fault.class_name), ""),
        transient=all(fault.transient for fault in faults),
    )


def _unusable(
    context: CheckContext,
    content: JsonObject,
    used: Sequence[JsonObject],
    visible: Sequence[int] | None,
    too_few: Sequence[_Fault],
) -> Iterable[str]:
    """What ranks that use GPUs cannot work with; not what is merely worth a repair."""
    hides_all = any(context.environ.get(name, "0") in {"", "-1"} for name in _MASKS)
    if content.get("unusable") or (_is_stuck(content) and not hides_all):
        yield "the driver"
    elif too_few:
        yield f"{count_text(context.nproc - len(visible or ()), 'GPU')} too few"
    yield from (f"GPU {gpu['index']}" for gpu in used if gpu.get("fault"))


def _visible(context: CheckContext, vendor: str, gpus: Sequence[JsonObject]) -> list[int] | None:
    """Which of the GPUs a rank sees, by their places in the list; None where only torch can tell."""
    from saferun.linux.gpu_drivers import visible_nvidia

    environ = context.environ
    if vendor == "nvidia":
        uuids = [str(gpu.get("uuid", "")) for gpu in gpus]
        mig = any(gpu.get("mig") for gpu in gpus)
        return visible_nvidia(environ.get("CUDA_VISIBLE_DEVICES"), uuids, mig=mig)
    masks = [environ[name] for name in _MASKS if name in environ]
    if not masks:
        return list(range(len(gpus)))
    # Several masks count within each other, and full UUIDs are not known here.
    numbers = [int(item) for item in masks[0].split(",") if item.isdecimal() and len(item) < 4]  # noqa: PLR2004
    if len(masks) > 1 or len(numbers) != len(masks[0].split(",")) or any(number >= len(gpus) for number in numbers):
        return [] if masks in ([""], ["-1"]) else None
    return numbers


def _used(context: CheckContext, gpus: Sequence[JsonObject], visible: Sequence[int] | None) -> list[JsonObject]:
    """The GPUs that the ranks of this launch take, by the custom that a rank takes that of its local rank."""
    if visible is None:
        return list(gpus)
    chosen = [gpus[index] for index in visible]
    return chosen if _has_several_tasks(context.environ) else chosen[: context.nproc]


def _has_several_tasks(environ: Mapping[str, str]) -> bool:
    for name in _TASKS_PER_HOST:
        digits = environ.get(name, "").partition("(")[0].partition(",")[0]
        if digits.isdecimal() and int(digits[:6]) > 1:
            return True
    return False


# --------------------------------------------------------------------------------------------------------------- faults


def _driver_faults(context: CheckContext, content: JsonObject, cuda: str) -> Iterable[_Fault]:
    if content.get("unusable"):
        yield _Fault(str(content["failure"]), "reload the NVIDIA driver, or reboot", "missing_gpu")
    stuck = content.get("stuck_in")
    if stuck and not _is_stuck(content):
        yield _Fault(f"the GPUs' driver is slow ({stuck})", "switch persistence mode on (`nvidia-smi -pm 1`)", "")
    elif stuck:
        hint = "see whether `nvidia-smi` or `rocm-smi` answers, and what `dmesg` says (Xid); reset the GPU, or reboot"
        yield _Fault(f"the GPUs' driver does not answer ({stuck})", hint)
    runtime = str(content.get("runtime", "")).removeprefix("CUDA ")
    served, wanted = numbers_of(runtime)[:1], numbers_of(cuda)[:1]
    # Without a launch the torch is that of saferun's own Python, and the jobs on this host may have others.
    is_older = bool(served and wanted and served < wanted) and not context.is_of_host
    if is_older and not _has_forward_compatibility(context):
        message = f"the driver serves CUDA {runtime}, and torch is built for CUDA {cuda}: it will see no GPU"
        hint = f"update the driver, or install a torch that is built for CUDA {served[0]}"
        yield _Fault(message, hint, "missing_gpu")


def _is_stuck(content: JsonObject) -> bool:
    """Whether the driver does not answer; else it may only need its time."""
    return bool(content.get("stuck_in")) and content.get("stuck_s", _STUCK_S) >= _STUCK_S


def _has_forward_compatibility(context: CheckContext) -> bool:
    """Whether a newer CUDA driver library is brought along. Source: CUDA Compatibility, "Forward Compatibility"."""
    paths = context.environ.get("LD_LIBRARY_PATH", "")
    return "compat" in paths or os.path.isdir(context.path("usr/local/cuda/compat"))


def _count_faults(context: CheckContext, visible: Sequence[int] | None, *, serves: bool) -> Iterable[_Fault]:
    if visible is None or not serves or _has_several_tasks(context.environ):
        return
    # None at all is a decision: ranks on the processors.
    if 0 < len(visible) < context.nproc:
        message = f"{context.nproc} ranks have {count_text(len(visible), 'GPU')} between them"
        hidden = [name for name in _MASKS if name in context.environ]
        also = f", or look at {' and '.join(hidden)}" if hidden else ""
        hint = f"pass --nproc-per-node {len(visible)}{also}; NCCL refuses two ranks on one GPU"
        yield _Fault(message, hint, "missing_gpu")


def _missing_faults(context: CheckContext, gpus: Sequence[JsonObject]) -> Iterable[_Fault]:
    if len(gpus) < context.gpus:
        message = f"the driver shows {count_text(len(gpus), 'GPU')}, and {context.gpus} are expected"
        yield _Fault(message, "see `dmesg` (Xid 79), `lspci` and the driver's log; reboot the host")


def _hardware_faults(gpu: JsonObject, vendor: str) -> Iterable[_Fault]:
    index = gpu["index"]
    name = f"GPU {index}"
    replace = "take the host out of the job and have it repaired"
    tool = f"nvidia-smi --gpu-reset -i {index}" if vendor == "nvidia" else f"rocm-smi --gpureset -d {index}"
    reset = f"reset it when it is idle (`{tool}`), or reboot"
    if fault := gpu.get("fault"):
        yield _Fault(f"{name} {fault}", f"{reset}; if it comes again, {replace}")
        return
    if gpu.get("compute_mode") == "prohibited":
        # A setting of the administrator's: ranks cannot use the GPU, and the host is no worse for it.
        yield _Fault(f"{name} is in compute mode Prohibited", f"run `nvidia-smi -i {index} -c 0`", "")
    if gpu.get("remapping_failed"):
        yield _Fault(f"{name} has defective memory (row remapping failed)", replace)
    elif gpu.get("remapping_pending"):
        yield _Fault(f"{name} has memory rows to be remapped at the next reset", reset)
    if gpu.get("retirement_pending"):
        yield _Fault(f"{name} has memory pages to be retired at the next reset", reset)
    if count := gpu.get("ecc_uncorrected"):
        yield _Fault(
            f"{name} has had {count_text(count, 'uncorrectable memory error')}",
            f"{reset}; if they come again, {replace}",
        )
    if wanted := gpu.get("recovery"):
        yield _Fault(f"{name}: the driver asks for {wanted}", reset)


class _Use(Value):
    """A GPU that is in use. ``is_ours``: by ranks of the previous attempt, or by memory that they held."""

    message: str
    is_ours: bool = False


def _busy_faults(context: CheckContext, used: Sequence[JsonObject], visible: Sequence[JsonObject]) -> Iterable[_Fault]:
    # In a container, where the driver names pids of the host, the ranks look like another job.
    uses = [use for gpu in used if not context.beside and (use := _use_of(context, gpu)) is not None]
    if not uses:
        return
    # What dead ranks hold comes free soon; with nothing free at all there is nothing to start on.
    is_waited_for = any(use.is_ours for use in uses) or all(_use_of(context, gpu) is not None for gpu in visible)
    message = "; ".join(use.message for use in uses[:4]) + (f" (and {len(uses) - 4} more)" if len(uses) > 4 else "")  # noqa: PLR2004
    hint = "wait for it, or end that process, or choose other GPUs (CUDA_VISIBLE_DEVICES)"
    yield _Fault(message, hint, "gpu_busy", transient=is_waited_for)


def _use_of(context: CheckContext, gpu: JsonObject) -> _Use | None:
    """What of a GPU is taken, if it is worth a word."""
    old_pids = frozenset(context.old_pids)
    total, in_use = gpu.get("memory_total_bytes") or 0, gpu.get("memory_used_bytes") or 0
    processes = [one for one in gpu.get("processes", ()) if not str(one.get("name", "")).startswith(_MPS_SERVER)]
    has_mps = len(processes) < len(gpu.get("processes", ())) or _MPS_PIPE in context.environ
    is_ours = _has_old_rank(gpu, old_pids)
    # MPS may run outside of the container.
    may_be_mps = has_mps or (not old_pids and all(one.get("whose") == "hidden" for one in processes))
    is_exclusive = str(gpu.get("compute_mode", "")).startswith("exclusive") and not may_be_mps
    name = f"GPU {gpu['index']}"
    held = sum(one.get("memory_bytes") or 0 for one in processes)
    if processes and is_exclusive:
        mode = gpu["compute_mode"].title()
        return _Use(f"{name} is in {mode} mode, and {_who(processes[:1], old_pids)} has it", is_ours)
    if processes and (held >= max(_NOTABLE_BYTES, total * _NOTABLE_SHARE) or is_ours):
        largest = sorted(processes, key=lambda one: -(one.get("memory_bytes") or 0))
        size = f"{size_text(held)} of its {size_text(total)}" if total else size_text(held)
        return _Use(
            f"{name} is in use: {_who(largest, old_pids)} {'hold' if len(largest) > 1 else 'holds'} {size}", is_ours
        )
    if "processes" in gpu and not processes and old_pids and total and in_use >= total * _UNOWNED_SHARE:
        message = (
            f"{size_text(in_use)} of {name}'s {size_text(total)} are in use, by no process that can be seen from here"
        )
        return _Use(message, is_ours=True)
    return None


def _has_old_rank(gpu: JsonObject, old_pids: Collection[int]) -> bool:
    """Whether a rank of the previous attempt is on it."""
    return any(one["pid"] in old_pids for one in gpu.get("processes", ()))


def _who(processes: Sequence[JsonObject], old_pids: frozenset[int]) -> str:
    one = processes[0]
    name = str(one.get("name", ""))
    seen = f"pid {one['pid']}{f' ({name})' if name else ''}"
    if one["pid"] in old_pids:
        seen = f"pid {one['pid']}, a rank of the previous attempt,"
    elif one.get("whose") == "hidden":
        seen = "a process that cannot be seen from here"
    return seen + (f" and {len(processes) - 1} more" if len(processes) > 1 else "")


def _gpu_text(gpu: JsonObject) -> str:
    total, in_use = gpu.get("memory_total_bytes"), gpu.get("memory_used_bytes")
    memory = f"{in_use / GIB:.1f} of {total / GIB:.1f} GiB in use" if total and in_use is not None else ""
    parts = [str(gpu[key]) for key in ("name", "pci", "uuid", "fault") if gpu.get(key)]
    return ", ".join([*parts, memory] if memory else parts)
