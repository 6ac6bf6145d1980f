"""The GPUs that the drivers report, and which of them the environment leaves visible."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from saferun.linux.child_output import run_forked
from saferun.model import Value

# ------------------------------------------------------------------------------------------------------------- NVIDIA


class NvmlLike(Protocol):
    """The part of ``pynvml`` that is used. Any call may raise."""

    def nvmlInit(self) -> object: ...  # noqa: D102, N802 - pynvml's names
    def nvmlShutdown(self) -> object: ...  # noqa: D102, N802
    def nvmlSystemGetCudaDriverVersion(self) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...  # noqa: ANN401, D102, N802 - an opaque pointer
    def nvmlDeviceGetUUID(self, handle: Any, /) -> str | bytes: ...  # noqa: ANN401, D102, N802
    def nvmlDeviceGetMigMode(self, handle: Any, /) -> Sequence[int]: ...  # noqa: ANN401, D102, N802


class NvmlReading(Value):
    """NVIDIA's GPUs: the newest major CUDA release that the driver supports, whether any uses MIG, and UUIDs."""

    cuda_major: int
    mig: bool
    uuids: tuple[str, ...]


def read_nvml(nvml: NvmlLike) -> NvmlReading | None:
    """Query NVIDIA's driver; None if any part of it fails."""
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
            return NvmlReading(
                nvml.nvmlSystemGetCudaDriverVersion() // 1000,
                any(_is_split(nvml, handle) for handle in handles),
                tuple(uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in uuids),
            )
        finally:
            nvml.nvmlShutdown()
    except Exception:
        return None


def _is_split(nvml: NvmlLike, handle: object) -> bool:
    try:
        return nvml.nvmlDeviceGetMigMode(handle)[0] != 0
    except Exception:  # most GPUs have no MIG, and report that as an error
        return False


def read_nvml_apart(timeout_s: float) -> NvmlReading | None:
    """``read_nvml`` with the real ``pynvml``, in a child: a faulty driver may block its caller forever."""

    def answer(write_end: int) -> None:
        reading = read_nvml(cast("NvmlLike", import_module("pynvml")))
        if reading is not None:
            lines = [str(reading.cuda_major), "split" if reading.mig else "whole", *reading.uuids]
            os.write(write_end, "\n".join([*lines, "end"]).encode())

    try:
        output, status = run_forked(answer, timeout_s)
    except OSError:
        return None
    lines = output.decode(errors="replace").split("\n")
    if status is None or lines[-1] != "end":
        return None
    return NvmlReading(int(lines[0]), lines[1] == "split", tuple(lines[2:-1]))


def count_visible_nvidia(mask: str | None, reading: NvmlReading) -> int | None:
    """How many of these GPUs CUDA shows a process; None if only torch can tell.

    Args:
        mask: the value of ``CUDA_VISIBLE_DEVICES``, None if it is not set.
        reading: the GPUs.
    """
    visible = visible_nvidia(mask, reading.uuids, mig=reading.mig)
    return None if visible is None else len(visible)


def visible_nvidia(mask: str | None, uuids: Sequence[str], *, mig: bool = False) -> list[int] | None:
    """The indices of the GPUs that CUDA shows a process; None if only torch can tell.

    Args:
        mask: the value of ``CUDA_VISIBLE_DEVICES``, None if it is not set.
        uuids: the GPUs.
        mig: whether any of them uses MIG.
    """
    if mask is None:
        # With MIG, CUDA shows a process one instance at most, while torch counts the GPUs.
        return None if mig else list(range(len(uuids)))
    wanted = parse_cuda_visible_devices(mask)
    if wanted is None:
        return None
    if not wanted:
        return []
    if mig or mask.startswith("MIG-"):
        return None
    chosen: list[int] = []
    for name in wanted:
        matching = [index for index, uuid in enumerate(uuids) if _means(name, index, uuid)]
        if len(matching) != 1:
            break  # unknown or ambiguous: this one and all after it stay invisible
        if matching[0] in chosen:
            return []
        chosen += matching
    return chosen


def _means(name: int | str, index: int, uuid: str) -> bool:
    return name == index if isinstance(name, int) else uuid.startswith(name)


def parse_cuda_visible_devices(mask: str) -> list[int | str] | None:
    """The devices in a value of ``CUDA_VISIBLE_DEVICES``, as torch parses it; None if torch fails on it.

    The beginning decides: with ``GPU-`` or ``MIG-`` it is a list of UUIDs or their prefixes, else a list of indices,
    each of them the number that its item begins with. The first invalid or negative item ends the list. A list that
    names a device twice is empty.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    prefix = mask[:4] if mask.startswith(("GPU-", "MIG-")) else ""
    names: list[int | str] = []
    for item in mask.split(","):
        try:
            name = _leading_number(item.strip()) if not prefix else item if item.startswith(prefix) else None
        except ValueError:
            return None  # only a sign, or a digit that is not decimal
        if name is None or (isinstance(name, int) and name < 0):
            break
        if name in names:
            return []
        names.append(name)
    return names


def _leading_number(text: str) -> int | None:
    end = 1 if text.startswith(("+", "-")) else 0
    while end < len(text) and text[end].isdigit():
        end += 1
    return int(text[:end]) if end else None


# ---------------------------------------------------------------------------------------------------------------- AMD


def count_visible_amd(environ: Mapping[str, str], gpus: Sequence[str]) -> int | None:
    """How many of these GPUs HIP shows a process; None if only torch can tell.

    ``ROCR_VISIBLE_DEVICES`` chooses first; ``HIP_VISIBLE_DEVICES``, or else ``CUDA_VISIBLE_DEVICES``, chooses among the
    rest. Releases of ROCm and torch differ over all but the simplest values, so only these are counted: distinct
    indices, or full UUIDs, of existing GPUs, and ``-1``.

    Source: ROCm documentation, "GPU isolation techniques".
    """
    rocr = environ.get("ROCR_VISIBLE_DEVICES")
    hip = environ.get("HIP_VISIBLE_DEVICES")
    cuda = environ.get("CUDA_VISIBLE_DEVICES")
    # OpenCL's variable applies to HIP by the documentation, not by the code; and torch ignores CUDA's if ROCR's is set.
    if "GPU_DEVICE_ORDINAL" in environ or (rocr is not None and hip is None and cuda is not None):
        return None
    visible = list(gpus)
    if rocr is not None:
        chosen = _choose(rocr, visible)
        if chosen is None:
            return None
        visible = chosen
    mask = cuda if hip is None else hip
    if mask is None:
        return len(visible)
    if mask == "-1":
        return 0
    chosen = _choose(mask, visible)
    return None if chosen is None else len(chosen)


def _choose(mask: str, gpus: Sequence[str]) -> list[str] | None:
    by_index = {str(index): index for index in range(len(gpus))}
    by_uuid = {uuid: index for index, uuid in enumerate(gpus) if uuid}
    names = by_uuid if mask.startswith("GPU-") else by_index  # mixed lists are parsed differently by each
    indices = [names.get(item, -1) for item in mask.split(",")]
    if -1 in indices or len(set(indices)) != len(indices):
        return None
    return [gpus[index] for index in indices]
