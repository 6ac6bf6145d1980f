"""Counting accelerators without torch: NVML and sysfs are stand-ins, interpreters that answer wrongly are scripts."""

# ruff: noqa: N802 - the stand-ins have the names of what they stand for

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from saferun.errors import SaferunError, UsageError
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
from saferun.linux.installed_torch import TorchBuild, may_load_backends, parse_version_file
from saferun.linux.pidfd import open_pidfd

A, B, C = "GPU-aa11", "GPU-ab22", "GPU-cc33"
CUDA_TORCH = TorchBuild(cuda="12.8", hip=None, for_cpu_only=False)
ROCM_TORCH = TorchBuild(cuda=None, hip="6.4.0", for_cpu_only=False)
XPU_TORCH = TorchBuild(cuda=None, hip=None, for_cpu_only=False)
CPU_TORCH = TorchBuild(cuda=None, hip=None, for_cpu_only=True)


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


def test_a_driver_that_does_not_return_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never, still_open = os.pipe()

    class Hanging(Nvml):
        def nvmlInit(self) -> None:
            os.read(never, 1)

    forked: list[int] = []

    def fork_and_note(work: Callable[[], None]) -> int:
        forked.append(fork(work))
        return forked[-1]

    monkeypatch.setattr(child_output, "fork", fork_and_note)
    monkeypatch.setitem(sys.modules, "pynvml", Hanging(A))
    assert read_nvml_apart(0.05) is None
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)
    os.close(never)
    os.close(still_open)


def test_only_the_end_of_a_long_output_is_kept() -> None:
    """A child that prints for ever may not fill the memory of the process that watches."""
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


# -------------------------------------------------------------------------------------------- torch, without running it

VERSION_FILE = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'cf30153c'
hip: Optional[str] = {hip}
"""


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "xpu", "expected"),
    [
        ("2.13.0+cu130", "'13.0'", "None", "None", TorchBuild("13.0", None, for_cpu_only=False)),
        ("2.9.0+rocm6.4", "None", "'6.4.43482'", "None", TorchBuild(None, "6.4.43482", for_cpu_only=False)),
        ("2.9.0+xpu", "None", "None", "'20250201'", XPU_TORCH),
        ("2.9.0+cpu", "None", "None", "None", CPU_TORCH),
        ("2.9.0", "None", "None", "None", CPU_TORCH),
        ("2.4.0+cpu", "None", "None", "", CPU_TORCH),
        ("2.4.0", "None", "None", "", XPU_TORCH),  # not told: not certain to be for the CPU only
    ],
)
def test_the_version_file_tells_what_torch_was_built_for(
    version: str, cuda: str, hip: str, xpu: str, expected: TorchBuild
) -> None:
    text = VERSION_FILE.format(version=version, cuda=cuda, hip=hip) + (f"xpu: Optional[str] = {xpu}\n" if xpu else "")
    assert parse_version_file(text) == expected


def test_a_file_of_another_kind_tells_nothing() -> None:
    assert parse_version_file("") is None
    assert parse_version_file("from torch._fbcode_version import *\ncuda = None\n") is None


@pytest.mark.parametrize("place", ["npu-1.0.dist-info", "npu.egg-info", "EGG-INFO"])
def test_a_package_with_a_torch_backend_is_found_by_its_metadata(tmp_path: Path, place: str) -> None:
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info/entry_points.txt").write_text("[console_scripts]\nother = other:main\n")
    assert not may_load_backends({}, [str(tmp_path), str(tmp_path / "missing")])
    (tmp_path / place).mkdir()
    (tmp_path / place / "entry_points.txt").write_text(
        "[console_scripts]\nx = x:x\n\n[torch.backends]\nnpu = npu:load\n"
    )
    assert may_load_backends({}, [str(tmp_path)])
    assert may_load_backends({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, [str(tmp_path)])
    assert not may_load_backends({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, [str(tmp_path)])


def test_an_archive_on_the_search_path_may_hold_a_backend(tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    archive.touch()
    assert may_load_backends({}, [str(archive)])


# -------------------------------------------------------------------------------------------------------- asking torch


def interpreter(tmp_path: Path, body: str) -> str:
    """A program in the place of an interpreter."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def ask(python: str, kind: str = "auto", timeout_s: float = 60) -> int:
    return gpus.ask_torch(python, kind, {"PATH": os.environ["PATH"]}, timeout_s)


def test_the_number_is_taken_out_of_what_else_is_printed(tmp_path: Path) -> None:
    python = interpreter(
        tmp_path, r"echo hello; echo warning >&2; printf 'no newline\nsaferun-answer count 8\n'; echo bye"
    )
    assert ask(python) == 8


def test_the_interpreter_is_told_the_kind_and_gets_the_ranks_environment(tmp_path: Path) -> None:
    python = interpreter(tmp_path, r'printf "\nsaferun-answer refused $1 $4 $CUDA_VISIBLE_DEVICES\n"')
    with pytest.raises(SaferunError, match=r"-P gpu 0,1\n"):
        gpus.ask_torch(python, "gpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, 60)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("echo rubbish", "(exit code 0): rubbish"),
        ("exit 1", "(exit code 1): no output"),
        ("kill -SEGV $$", "(killed by SIGSEGV): no output"),
        (
            "echo ImportError: libcudart.so.13: cannot open >&2; echo it is gone >&2; exit 1",
            "ImportError: libcudart.so.13",
        ),
        (r"printf '\nsaferun-answer\n'", "(exit code 0): saferun-answer"),
        (r"printf '\nsaferun-answer count 0\n'", "torch says: the number of devices is 0"),
        (r"printf '\nsaferun-answer count None\n'", "torch says: the number of devices is None"),
        (r"printf '\nsaferun-answer refused Cuda is not available.\n'", "torch says: Cuda is not available."),
        ("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "has no torch"),
        ("head -c 300000 /dev/zero; exit 3", "(exit code 3)"),
    ],
)
def test_an_interpreter_that_gives_no_number_is_explained(tmp_path: Path, body: str, what: str) -> None:
    with pytest.raises(SaferunError) as raised:
        ask(interpreter(tmp_path, body), "gpu")
    assert what in raised.value.what
    assert raised.value.exit_code == 1
    lines = str(raised.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["saferun", "hint"]


def test_a_kind_that_torch_does_not_know_is_a_wrong_option(tmp_path: Path) -> None:
    python = interpreter(tmp_path, r"printf '\nsaferun-answer refused Unsupported nproc_per_node value: npu\n'")
    with pytest.raises(UsageError, match="'npu' is no device that torch knows here") as raised:
        ask(python, "npu")
    assert raised.value.exit_code == 2


def test_a_backend_without_devices_is_no_wrong_option(tmp_path: Path) -> None:
    python = interpreter(tmp_path, r"printf '\nsaferun-answer refused npu is not available.\n'")
    with pytest.raises(SaferunError, match="npu is not available") as raised:
        ask(python, "npu")
    assert raised.value.exit_code == 1


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(SaferunError, match=r"cannot start \S*/nowhere .*: No such file or directory"):
        ask(str(tmp_path / "nowhere"))


def test_a_torch_that_hangs_is_given_up_and_leaves_no_process(tmp_path: Path) -> None:
    """A driver can hold the import of torch for ever, and what it started holds on to the pipe."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    read_end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    python = interpreter(tmp_path, f"exec 3>{shlex.quote(str(fifo))}\necho started >&3\nsleep 3600 &\nwait")
    with pytest.raises(SaferunError, match=r"did not report within 1\.5 s"):
        ask(python, timeout_s=1.5)
    assert os.read(read_end, 100) == b"started\n"
    os.set_blocking(read_end, True)
    assert os.read(read_end, 100) == b""  # the last process that held the other end is gone
    os.close(read_end)


def test_a_process_left_behind_by_torch_delays_nothing(tmp_path: Path) -> None:
    assert ask(interpreter(tmp_path, r"sleep 3600 & printf '\nsaferun-answer count 3\n'"), timeout_s=3600) == 3


# ----------------------------------------------------------------------------------------------------- the one way in


class AskedError(Exception):
    """Torch was asked."""


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``resolve_nproc_per_node`` on a host described by the arguments, where asking torch raises ``AskedError``."""

    def ask_torch(*_: Any) -> int:
        raise AskedError

    def resolve_on(
        value: str,
        *,
        build: TorchBuild | None = None,
        vendor: str | None = None,
        devices: int | None = None,
        others: bool = False,
        backends: bool = False,
        python: str = sys.executable,
        environ: Mapping[str, str] = os.environ,
    ) -> int:
        monkeypatch.setattr(gpus, "ask_torch", ask_torch)
        monkeypatch.setattr(gpus, "read_torch_build", lambda: build)
        monkeypatch.setattr(gpus, "gpu_vendor", lambda: vendor)
        monkeypatch.setattr(gpus, "count_gpus", lambda _environ, **_options: devices)
        monkeypatch.setattr(gpus, "shows_accelerators", lambda: others or vendor is not None)
        monkeypatch.setattr(gpus, "may_load_backends", lambda _environ: backends)
        monkeypatch.setattr(gpus, "count_cpus", lambda: 64)
        return gpus.resolve_nproc_per_node(value, python, environ)

    return resolve_on


@pytest.mark.parametrize(
    ("value", "expected"), [("1", 1), ("8", 8), (" 8 ", 8), ("+8", 8), ("4096", 4096), ("1_0", 10)]
)
def test_a_number_stands_for_itself(resolve: Any, value: str, expected: int) -> None:
    assert resolve(value) == expected


@pytest.mark.parametrize("value", ["0", "-1", "4097", "1000000000"])
def test_a_number_out_of_bounds_is_refused(resolve: Any, value: str) -> None:
    with pytest.raises(UsageError, match=f"--nproc-per-node '{value}' is not between 1 and 4096\nhint: ") as raised:
        resolve(value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("value", ["", " ", "1.5", "2:4", "gpu,cpu", "--help", "a b", "9" * 5000])
def test_what_can_be_no_devices_name_is_refused_without_torch(resolve: Any, value: str) -> None:
    with pytest.raises(UsageError, match="is neither a number of ranks nor the name of a device"):
        resolve(value, backends=True)


def test_an_unknown_name_is_refused_without_torch_where_no_backend_is_installed(resolve: Any) -> None:
    with pytest.raises(UsageError, match="'banana' is no device that torch knows here"):
        resolve("banana", build=CPU_TORCH)
    with pytest.raises(AskedError):
        resolve("banana", build=CPU_TORCH, backends=True)
    with pytest.raises(AskedError):
        resolve("banana", build=None)


def test_cpu_needs_no_torch(resolve: Any) -> None:
    assert resolve("cpu", python="/other/python") == 64


def test_cpus_are_those_this_process_may_run_on() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert gpus.count_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert gpus.count_cpus() == len(allowed)


@pytest.mark.parametrize("value", ["gpu", "auto"])
@pytest.mark.parametrize(("build", "vendor"), [(CUDA_TORCH, "nvidia"), (ROCM_TORCH, "amd")])
def test_gpus_that_torch_is_built_for_are_counted_without_it(
    resolve: Any, value: str, build: TorchBuild, vendor: str
) -> None:
    assert resolve(value, build=build, vendor=vendor, devices=8) == 8
    with pytest.raises(AskedError):
        resolve(value, build=build, vendor=vendor, devices=None)


@pytest.mark.parametrize("value", ["gpu", "auto"])
@pytest.mark.parametrize(
    ("build", "vendor"), [(CUDA_TORCH, "amd"), (ROCM_TORCH, "nvidia"), (XPU_TORCH, "nvidia"), (None, "nvidia")]
)
def test_gpus_of_another_vendor_are_left_to_torch(
    resolve: Any, value: str, build: TorchBuild | None, vendor: str
) -> None:
    with pytest.raises(AskedError):
        resolve(value, build=build, vendor=vendor, devices=8)


@pytest.mark.parametrize("build", [CUDA_TORCH, CPU_TORCH])
def test_that_there_is_no_gpu_is_torchs_to_tell(resolve: Any, build: TorchBuild) -> None:
    for vendor, devices in ((None, 0), ("nvidia", 0)):
        with pytest.raises(AskedError):
            resolve("gpu", build=build, vendor=vendor, devices=devices)


@pytest.mark.parametrize("value", ["xpu", "privateuseone"])
def test_other_devices_are_torchs_to_count(resolve: Any, value: str) -> None:
    with pytest.raises(AskedError):
        resolve(value, build=XPU_TORCH)


def test_auto_means_processors_where_torch_is_built_for_them_only(resolve: Any) -> None:
    assert resolve("auto", build=CPU_TORCH, vendor="nvidia", devices=8) == 64


@pytest.mark.parametrize("build", [CUDA_TORCH, ROCM_TORCH, XPU_TORCH])
def test_auto_means_processors_where_nothing_is_an_accelerator(resolve: Any, build: TorchBuild) -> None:
    assert resolve("auto", build=build) == 64
    with pytest.raises(AskedError):
        resolve("auto", build=build, others=True)


def test_auto_means_processors_where_the_environment_hides_every_gpu(resolve: Any) -> None:
    assert resolve("auto", build=CUDA_TORCH, vendor="nvidia", devices=0) == 64


def test_auto_is_left_to_torch_where_a_package_brings_a_backend(resolve: Any) -> None:
    """Torch loads it by itself, and it goes before CUDA."""
    for build in (CUDA_TORCH, CPU_TORCH):
        with pytest.raises(AskedError):
            resolve("auto", build=build, vendor="nvidia", devices=8, backends=True)


def test_another_interpreter_may_have_another_torch(resolve: Any) -> None:
    with pytest.raises(AskedError):
        resolve("auto", build=CPU_TORCH, python="/other/python")
    with pytest.raises(AskedError):
        resolve("auto", build=CPU_TORCH, environ=dict(os.environ) | {"PYTHONPATH": "/other"})


def test_counting_loads_neither_torch_nor_the_drivers_library() -> None:
    """What watches must not depend on what it watches."""
    program = (
        "import os, sys; from saferun.linux.gpus import resolve_nproc_per_node as resolve; "
        "resolve('auto', sys.executable, os.environ); sys.exit(bool({'torch', 'pynvml'} & sys.modules.keys()))"
    )
    root = Path(gpus.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
