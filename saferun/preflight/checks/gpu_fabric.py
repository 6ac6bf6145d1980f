"""What connects the GPUs of a host, as NVIDIA's library shows it: the fabric manager, IMEX, direct access between GPUs.

Sources: NVIDIA, NVML API Reference Guide (nvmlDeviceGetGpuFabricInfo, nvmlDeviceGetP2PStatus), Fabric Manager User
Guide, IMEX Service Guide.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from saferun.model import JsonObject, Value
from saferun.preflight.checks.context import CheckContext
from saferun.text.wording import rank_spans

_IMEX_CHANNELS = "dev/nvidia-caps-imex-channels"
# Parts of the names of GPUs with NVIDIA's own processors: they alone have NVLink between hosts.
_SUPERCHIPS = ("GH200", "GB200", "GB300")
_NOT_SUPPORTED = 3  # a code of NVML's; as the status of a fabric: there is none
# nvmlGpuP2PStatus_t: not supported, unknown. 1 to 4 are how the machine is built or set up: its chipset, the GPU, where
# the GPUs are, the driver's settings.
_MAY_BE_BROKEN = frozenset({5, 6})
_FEW = 4  # GPUs; fewer are bridged in pairs, and one is left over


class FabricFault(Value):
    """What is wrong, what to do, and the class of the failure that it leads to; empty: it is no fault of the host."""

    message: str
    hint: str
    class_name: str = "gpu_fabric"


def _is_superchip(gpu: JsonObject) -> bool:
    """Whether a GPU is one with an NVIDIA processor."""
    return any(part in str(gpu.get("name", "")) for part in _SUPERCHIPS)


def fabric_faults(context: CheckContext, content: JsonObject, used: Sequence[JsonObject]) -> Iterable[FabricFault]:
    """The faults of what connects the GPUs that the ranks use.

    Args:
        context: the launch.
        content: the state of all GPUs.
        used: of those the ranks use.
    """
    yield from _manager_faults(context, used)
    yield from _imex_faults(context, used)
    yield from _direct_access_faults(content, used)


def _manager_faults(context: CheckContext, used: Sequence[JsonObject]) -> Iterable[FabricFault]:
    """GPUs behind NVSwitches work once the fabric manager has set those up; until then CUDA fails with error 802."""
    used = [gpu for gpu in used if not gpu.get("mig")]  # a divided GPU does not use NVLink
    waiting = [gpu["index"] for gpu in used if gpu.get("fabric_state") in {"not started", "in progress"}]
    if waiting:
        message = f"{_gpus(waiting)}: the NVIDIA fabric manager has not set up the NVSwitches (CUDA error 802)"
        hint = "install the driver's version of it, and run `systemctl start nvidia-fabricmanager`"
        yield FabricFault(message, hint, "missing_gpu")
    failed = [
        gpu
        for gpu in used
        if gpu.get("fabric_state") == "completed" and gpu.get("fabric_status") not in {None, 0, _NOT_SUPPORTED}
    ]
    if failed and (len(used) > 1 or context.spans_hosts):
        status = failed[0]["fabric_status"]
        message = f"{_gpus([gpu['index'] for gpu in failed])}: NVLink could not be set up (NVML status {status})"
        yield FabricFault(message, "check the log of nvidia-fabricmanager; reset all GPUs of the host, or reboot")


def _imex_faults(context: CheckContext, used: Sequence[JsonObject]) -> Iterable[FabricFault]:
    """NVLink between hosts: without an IMEX channel NCCL may not map the memory of other hosts' GPUs.

    Slurm's switch/nvidia_imex and Kubernetes' DRA driver make channels for each job: a host without a job has none.
    """
    if context.is_of_host or not context.spans_hosts or context.environ.get("NCCL_MNNVL_ENABLE") == "0":
        return
    # Boards of eight H100 have the UUID of a cluster, too.
    if not any(gpu.get("fabric_cluster") and _is_superchip(gpu) for gpu in used):
        return
    channels = context.path(_IMEX_CHANNELS)
    if os.path.isdir(channels) and any(name.startswith("channel") for name in os.listdir(channels)):
        return
    message = f"NVLink connects this host to others, and there is no IMEX channel (/{_IMEX_CHANNELS})"
    hint = "start nvidia-imex on all hosts and give the job a channel; with NCCL_MNNVL_ENABLE=0 NCCL uses the network"
    yield FabricFault(message, hint, "")  # it is for the launcher to give the job one


def _direct_access_faults(content: JsonObject, used: Sequence[JsonObject]) -> Iterable[FabricFault]:
    """A GPU that none of the others can access, while all of them access each other by NVLink.

    Pairs are often apart by design: on other sockets, without a bridge, of another model.
    """
    pairs = content.get("p2p_missing", ())
    missing = {frozenset(pair[:2]) for pair in pairs}
    broken = {frozenset(pair[:2]) for pair in pairs if pair[2] in _MAY_BE_BROKEN}
    has_links = {gpu["index"] for gpu in used if gpu.get("nvlinks")}
    is_linked = {gpu["index"] for gpu in used if gpu.get("nvlinks_up")}
    numbers = [gpu["index"] for gpu in used if not gpu.get("mig")]
    if not missing or len(numbers) < _FEW or len({gpu.get("name") for gpu in used}) > 1:
        return
    alone = [one for one in numbers if all(frozenset((one, other)) in broken for other in numbers if other != one)]
    others = [one for one in numbers if one not in alone]
    apart = any(frozenset((one, other)) in missing for one in others for other in others if one < other)
    is_of_nvlink = has_links.issuperset(alone) and is_linked.issuperset(others)
    if alone and not apart and is_of_nvlink and len(alone) < len(others):
        message = f"{_gpus(alone)} cannot access the memory of the others (P2P), which access each other's"
        hint = "run `nvidia-smi topo -p2p r`; check NVLink (`nvidia-smi nvlink -s`), the IOMMU and PCI ACS"
        yield FabricFault(message, hint)


def _gpus(numbers: Sequence[int]) -> str:
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(rank_spans(numbers)[0])}"
