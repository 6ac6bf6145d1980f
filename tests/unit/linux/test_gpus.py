"""Counting accelerators without torch: NVML and sysfs are stand-ins, interpreters that answer wrongly are scripts."""

# ruff: noqa: N802 - the stand-ins have the names of what they stand for

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from saferun.linux import child_output, gpus
from saferun.linux.child_output import collect_output
from saferun.linux.children import Child, fork
from saferun.linux.gpu_drivers import (
    NvmlReading,
    count_visible_amd,
    count_visible_nvidia,
    parse_cuda_visible_devices,
    read_nvml,
    read_nvml_apart,
)
from saferun.linux.gpu_nodes import read_kfd_gpus
from saferun.linux.pidfd import open_pidfd

A, B, C = "GPU-aa11", "GPU-ab22", "GPU-cc33"


class Nvml:
    """NVIDIA's management library with these GPUs; ``failing`` names the call that raises."""

    def __init__(self, *uuids: str, mig: bool = False, cuda: int = 13000, failing: str = "") -> None:
        self.uuids = uuids
        self.mig = mig
        self.cuda = cuda
        self.failing = failing
        self.open = 0

    def _called(self, name: str) -> None:
        if name == self.failing:
            raise RuntimeError(name)

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._called("nvmlSystemGetCudaDriverVersion")
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        self._called("nvmlDeviceGetCount")
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._called("nvmlDeviceGetHandleByIndex")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        self._called("nvmlDeviceGetUUID")
        return self.uuids[handle].encode()

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        self._called("nvmlDeviceGetMigMode")
        return [int(self.mig and handle == 0), 0]


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host without any device: empty ``dev`` and ``sys``."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "sys").mkdir()
    return tmp_path


def add_nvidia(host: Path) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (host / "dev" / name).touch()


def add_amd(host: Path, *nodes: Mapping[str, int]) -> None:
    (host / "dev/kfd").touch()
    (host / "dev/dri").mkdir(exist_ok=True)
    for index, node in enumerate(nodes):
        folder = host / "sys/class/kfd/kfd/topology/nodes" / str(index)
        folder.mkdir(parents=True)
        (folder / "properties").write_text("".join(f"{key} {value}\n" for key, value in node.items()))
        if "drm_render_minor" in node:
            (host / f"dev/dri/renderD{node['drm_render_minor']}").touch()


CPU_NODE = {"cpu_cores_count": 64, "simd_count": 0}


def gpu_node(number: int) -> dict[str, int]:
    return {
        "cpu_cores_count": 0,
        "simd_count": 304,
        "gfx_target_version": 90402,
        "drm_render_minor": 128 + number,
        "unique_id": 0xA0 + number,
    }


def amd_uuid(number: int) -> str:
    return f"GPU-{0xA0 + number:016x}"


def count(host: Path, environ: Mapping[str, str] | None = None, **more: Any) -> int | None:
    return gpus.count_gpus(environ or {}, sysfs_root=str(host / "sys"), dev_root=str(host / "dev"), **more)


# ----------------------------------------------------------------------------------------- what the environment shows


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("", []),
        ("0", [0]),
        ("0,1", [0, 1]),
        ("1,0", [1, 0]),
        (" 1 , 2", [1, 2]),
        ("+1", [1]),
        ("007", [7]),
        ("1gpu2,2ampere", [1, 2]),
        ("-1", []),
        ("0,-1,2", [0]),
        ("0,,2", [0]),
        ("0,none,2", [0]),
        ("none", []),
        ("NoDevFiles", []),
        ("all", []),
        ("0,0", []),
        ("0,1,00", []),
        ("0,-1,0", [0]),
        ("99", [99]),
        ("0,GPU-aa", [0]),
        ("GPU-aa", ["GPU-aa"]),
        ("GPU-aa,GPU-bb", ["GPU-aa", "GPU-bb"]),
        ("GPU-aa,1", ["GPU-aa"]),
        ("GPU-aa, GPU-bb", ["GPU-aa"]),
        ("GPU-aa,GPU-aa", []),
        ("GPU-aa,MIG-bb", ["GPU-aa"]),
        ("MIG-aa,MIG-bb", ["MIG-aa", "MIG-bb"]),
        ("gpu-aa", []),
        ("-", None),
        ("0,+", None),
        ("²", None),
        ("9" * 5000, None),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(mask: str, expected: list[int | str] | None) -> None:
    assert parse_cuda_visible_devices(mask) == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, 3),
        ("", 0),
        ("2", 1),
        ("2,1", 2),
        ("0,3,1", 1),
        ("3", 0),
        ("1,1", 0),
        (A, 1),
        (f"{C},{A}", 2),
        ("GPU-c", 1),
        ("GPU-a", 0),
        (f"{C},GPU-a,{B}", 1),
        ("GPU-ff", 0),
        (f"GPU-aa,{A}", 0),
        ("MIG-aa11", None),
        ("MIG-aa11,MIG-aa11", 0),
        ("-", None),
    ],
)
def test_the_mask_is_laid_over_the_gpus_that_are_there(mask: str | None, expected: int | None) -> None:
    assert count_visible_nvidia(mask, NvmlReading(13, mig=False, uuids=(A, B, C))) == expected


@pytest.mark.parametrize(("mask", "expected"), [(None, None), ("0", None), (A, None), ("", 0), ("-1", 0)])
def test_of_split_gpus_only_the_empty_choice_is_certain(mask: str | None, expected: int | None) -> None:
    """CUDA shows a process one instance at most, NVML the whole GPUs: what torch makes of it, torch may tell."""
    assert count_visible_nvidia(mask, NvmlReading(13, mig=True, uuids=(A, B, C))) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "2"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": amd_uuid(2)}, 1),
        ({"HIP_VISIBLE_DEVICES": f"{amd_uuid(2)},{amd_uuid(0)}"}, 2),
        ({"HIP_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        # HIP's index counts among what ROCR left: there is no second GPU.
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"}, None),
        ({"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"ROCR_VISIBLE_DEVICES": ""}, None),
        ({"HIP_VISIBLE_DEVICES": ""}, None),
        ({"HIP_VISIBLE_DEVICES": "0,0"}, None),
        ({"HIP_VISIBLE_DEVICES": "0,7"}, None),
        ({"HIP_VISIBLE_DEVICES": "00"}, None),
        ({"HIP_VISIBLE_DEVICES": "1 ,2"}, None),
        ({"HIP_VISIBLE_DEVICES": f"0,{amd_uuid(1)}"}, None),
        ({"HIP_VISIBLE_DEVICES": "GPU-"}, None),
        ({"GPU_DEVICE_ORDINAL": "0"}, None),
    ],
)
def test_rocms_variables_choose_one_after_the_other(environ: dict[str, str], expected: int | None) -> None:
    """Where releases of ROCm, or ROCm and torch, differ over a value, no number is given."""
    assert count_visible_amd(environ, [amd_uuid(0), amd_uuid(1), amd_uuid(2)]) == expected


# --------------------------------------------------------------------------------------------------- what the host has


def test_a_host_without_device_nodes_has_no_gpus(host: Path) -> None:
    assert gpus.gpu_vendor(str(host / "sys"), dev_root=str(host / "dev")) is None
    assert count(host) == 0


@pytest.mark.parametrize("node", ["dxg", "dri", "nvmap", "nvhost-ctrl-gpu", "accel", "davinci0"])
def test_nodes_of_other_accelerators_leave_the_answer_to_torch(host: Path, node: str) -> None:
    """Windows' GPUs, NVIDIA's boards and some vendors' builds of torch are CUDA too, without NVIDIA's usual nodes."""
    (host / "dev" / node).touch()
    assert count(host) is None


@pytest.mark.parametrize(
    ("pci_class", "expected"),
    [("0x030200", True), ("0x038000", True), ("0x120000", True), ("0x030000", False), ("0x020000", False)],
)
def test_an_accelerator_without_a_driver_is_seen_on_the_pci_bus(host: Path, pci_class: str, expected: bool) -> None:
    device = host / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "class").write_text(f"{pci_class}\n")
    assert gpus.shows_accelerators(str(host / "sys"), dev_root=str(host / "dev")) is expected


def test_what_cannot_be_looked_at_counts_as_an_accelerator(host: Path) -> None:
    assert gpus.shows_accelerators(str(host / "sys"), dev_root=str(host / "missing"))


def test_nvidias_gpus_are_counted(host: Path) -> None:
    add_nvidia(host)
    assert gpus.gpu_vendor(str(host / "sys"), dev_root=str(host / "dev")) == "nvidia"
    assert count(host, nvml=Nvml(A, B)) == 2
    assert count(host, {"CUDA_VISIBLE_DEVICES": "1"}, nvml=Nvml(A, B)) == 1
    assert count(host, nvml=Nvml()) == 0


def test_split_gpus_are_left_to_torch(host: Path) -> None:
    add_nvidia(host)
    assert count(host, nvml=Nvml(A, B, mig=True)) is None


def test_gpus_that_cannot_be_split_are_whole(host: Path) -> None:
    add_nvidia(host)
    assert count(host, nvml=Nvml(A, B, mig=True, failing="nvmlDeviceGetMigMode")) == 2


def test_a_driver_older_than_torchs_cuda_leaves_the_answer_to_torch(host: Path) -> None:
    """Such a driver lists every GPU, and CUDA finds none of them usable."""
    add_nvidia(host)
    old = Nvml(A, B, cuda=12040)
    assert count(host, nvml=old, cuda="13.0") is None
    assert count(host, nvml=old, cuda="12.8") == 2
    assert count(host, nvml=old, cuda="twelve") is None


def test_a_container_without_the_compute_node_leaves_the_answer_to_torch(host: Path) -> None:
    add_nvidia(host)
    (host / "dev/nvidia-uvm").unlink()
    assert count(host, nvml=Nvml(A, B)) is None


def test_an_environment_that_hides_every_gpu_needs_no_driver(host: Path) -> None:
    add_nvidia(host)
    assert count(host, {"CUDA_VISIBLE_DEVICES": ""}, nvml=Nvml(failing="nvmlInit")) == 0


@pytest.mark.parametrize(
    "failing",
    [
        "nvmlInit",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlSystemGetCudaDriverVersion",
    ],
)
def test_a_library_that_fails_leaves_the_answer_to_torch(host: Path, failing: str) -> None:
    """One lost GPU makes NVML's list shorter or longer than CUDA's: no part of it is then to be relied on."""
    add_nvidia(host)
    nvml = Nvml(A, B, failing=failing)
    assert count(host, nvml=nvml) is None
    assert nvml.open == 0


def test_amds_gpus_are_counted_and_processors_are_not(host: Path) -> None:
    add_amd(host, CPU_NODE, CPU_NODE, gpu_node(0), gpu_node(1))
    assert gpus.gpu_vendor(str(host / "sys"), dev_root=str(host / "dev")) == "amd"
    assert count(host) == 2
    assert count(host, {"ROCR_VISIBLE_DEVICES": amd_uuid(1)}) == 1


def test_amds_driver_without_a_gpu_is_no_gpu(host: Path) -> None:
    add_amd(host, CPU_NODE)
    assert gpus.gpu_vendor(str(host / "sys"), dev_root=str(host / "dev")) is None


def test_amds_gpus_keep_the_drivers_order(host: Path) -> None:
    """Node 10 comes after node 9: ROCm's indices follow the numbers, not their spelling."""
    add_amd(host, *(gpu_node(number) for number in range(11)))
    assert read_kfd_gpus(str(host / "sys"), str(host / "dev")) == [amd_uuid(number) for number in range(11)]


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_cores_count": 8},  # processor and GPU in one node
        {"gfx_target_version": 0},
        {"drm_render_minor": 99},
    ],
)
def test_an_amd_gpu_that_rocm_may_pass_over_leaves_the_answer_to_torch(host: Path, change: dict[str, int]) -> None:
    add_amd(host, gpu_node(0), gpu_node(1) | change)
    if "drm_render_minor" in change:
        (host / "dev/dri/renderD99").unlink()
    assert count(host) is None
    assert gpus.gpu_vendor(str(host / "sys"), dev_root=str(host / "dev")) == "amd"


def test_without_the_compute_node_amds_gpus_are_left_to_torch(host: Path) -> None:
    add_amd(host, gpu_node(0))
    (host / "dev/kfd").unlink()
    assert count(host) is None


def test_an_amd_gpu_that_the_container_was_not_granted_is_not_there(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel then refuses to let its properties be read, to root as well."""
    add_amd(host, gpu_node(0), gpu_node(1))
    hidden = str(host / "sys/class/kfd/kfd/topology/nodes/0/properties")

    def open_but_one(path: str, **options: Any) -> Any:
        if path == hidden:
            raise PermissionError(path)
        return Path(path).open(**options)

    monkeypatch.setattr("builtins.open", open_but_one)
    assert read_kfd_gpus(str(host / "sys"), str(host / "dev")) == [amd_uuid(1)]


def test_properties_that_cannot_be_understood_leave_the_answer_to_torch(host: Path) -> None:
    add_amd(host, gpu_node(0), gpu_node(1))
    (host / "sys/class/kfd/kfd/topology/nodes/1/properties").write_text("simd_count many\n")
    assert count(host) is None


def test_gpus_of_both_vendors_are_told_apart_by_the_build_of_torch(host: Path) -> None:
    add_nvidia(host)
    add_amd(host, gpu_node(0))
    assert gpus.gpu_vendor(str(host / "sys"), dev_root=str(host / "dev")) == "nvidia"
    assert count(host, nvml=Nvml(A, B)) is None
    assert count(host, nvml=Nvml(A, B), cuda="12.8") == 2


# ------------------------------------------------------------------------------------- NVML in a process of its own


def test_nvml_is_asked_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(A, B, mig=True, cuda=12080)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert read_nvml_apart(60) == NvmlReading(12, mig=True, uuids=(A, B)) == read_nvml(nvml)


def test_a_host_without_gpus_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert read_nvml_apart(60) == NvmlReading(13, mig=False, uuids=())


@pytest.mark.parametrize("pynvml", [None, object(), Nvml(A, failing="nvmlInit")], ids=["missing", "broken", "failing"])
def test_a_missing_or_broken_library_is_no_answer(monkeypatch: pytest.MonkeyPatch, pynvml: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert read_nvml_apart(60) is None


def test_a_crash_of_the_driver_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crashing(Nvml):
        def nvmlInit(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setitem(sys.modules, "pynvml", Crashing(A))
    assert read_nvml_apart(60) is None


def test_a_host_that_forks_no_more_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_work: Callable[[], None]) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(child_output, "fork", refuse)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(A))
    assert read_nvml_apart(60) is None


def test_a_driver_that_does_not_return_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Nvml):
        def nvmlInit(self) -> None:
            signal.pause()

    forked: list[int] = []

    def fork_and_note(work: Callable[[], None]) -> int:
        forked.append(fork(work))
        return forked[-1]

    monkeypatch.setattr(child_output, "fork", fork_and_note)
    monkeypatch.setitem(sys.modules, "pynvml", Hanging(A))
    assert read_nvml_apart(0.05) is None
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_only_the_end_of_a_long_output_is_kept() -> None:
    """A child that prints forever may not fill the memory of the process that watches."""
    read_end, write_end = os.pipe()

    def write() -> None:
        for _ in range(300):
            os.write(write_end, b"x" * 4096)
        os.write(write_end, b"end")

    pid = fork(write)
    os.close(write_end)
    output, status = collect_output(Child(pid, open_pidfd(pid)), read_end, 60)
    assert (len(output), output[-4:]) == (65536, b"xend")
    assert status is not None
    assert status.ok


def test_without_pidfds_the_end_of_the_output_is_the_end() -> None:
    read_end, write_end = os.pipe()
    pid = fork(lambda: print(os.write(write_end, b"done")))
    os.close(write_end)
    output, status = collect_output(Child(pid, -1), read_end, 60)
    assert output == b"done"
    assert status is not None
