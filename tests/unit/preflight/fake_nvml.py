"""A stand-in for NVML, with GPUs of any state."""

# ruff: noqa: N802, N815 - it has the names of what it stands for

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

from saferun.preflight.checks.context import CheckContext
from tests.unit.preflight.host_roots import Root

GIB = 1 << 30
MIB = 1 << 20


class NvmlError(Exception):
    def __init__(self, value: int, words: str) -> None:
        super().__init__(words)
        self.value = value


NOT_SUPPORTED, IS_LOST = NvmlError(3, "Not Supported"), NvmlError(15, "GPU is lost")
MISMATCH, NO_DRIVER = NvmlError(18, "Driver/library version mismatch"), NvmlError(9, "Driver Not Loaded")


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h."""

    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


class Gpu:
    """One GPU, as the library would tell of it."""

    def __init__(self, **facts: Any) -> None:
        self.uuid = ""
        self.name = "NVIDIA H200"
        self.used, self.total = 600 * MIB, 140 * GIB
        self.processes: list[tuple[int, int | None]] | None = []
        self.uncorrected = 0
        self.rows = (0, 0, 0, 0)
        self.mode = 0
        self.lost = False
        self.fabric: tuple[int, int, bytes] | None = None  # state, status, cluster
        self.links: tuple[int, ...] = (1, 1)  # states of NVLinks
        self.alone = 0  # the status where it has no direct access to the other ones
        vars(self).update(facts)


class Nvml:
    """NVIDIA's management library; what it does not have is not supported."""

    def __init__(self, *gpus: Gpu, cuda: int = 13000, start: Exception | None = None) -> None:
        self.gpus = gpus
        self.cuda = cuda
        self.start = start
        for index, gpu in enumerate(gpus):
            gpu.uuid = gpu.uuid or f"GPU-{index:04x}"

    def nvmlInit(self) -> None:
        if self.start is not None:
            raise self.start

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].lost:
            raise IS_LOST
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(used=gpu.used, total=gpu.total)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        if gpu.processes is None:
            raise NOT_SUPPORTED
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        return gpu.uncorrected if (kind, counter) == (1, 0) else 0

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, ...]:
        return gpu.rows

    def nvmlDeviceGetComputeMode(self, gpu: Gpu) -> int:
        return gpu.mode

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:
        if link >= len(gpu.links):
            raise NOT_SUPPORTED
        return gpu.links[link]

    def nvmlDeviceGetMigMode(self, _gpu: Gpu) -> list[int]:
        raise NOT_SUPPORTED

    c_nvmlGpuFabricInfo_t = FabricInfo

    def nvmlDeviceGetGpuFabricInfo(self, gpu: Gpu, info: Any) -> int:
        if gpu.fabric is None:
            raise NOT_SUPPORTED
        info._obj.state, info._obj.status, cluster = gpu.fabric
        ctypes.memmove(info, cluster.ljust(16, b"\0"), 16)
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Gpu, other: Gpu, _index: int) -> int:
        return one.alone or other.alone


def launch(root: Root, environ: dict[str, str] | None = None, **changed: Any) -> CheckContext:
    python = f"{root.path}/venv/bin/python"
    return root.context(environ, **{"nproc": 2, "vendor": "nvidia", "python": python, **changed})


OTHER = os.getppid()  # a process that lives and is none of ours
