"""What torch says of GPUs, read without running it and asked of it, and the one way to the number of GPUs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from saferun.errors import SaferunError, UsageError
from saferun.linux import gpus
from saferun.linux.installed_torch import TorchBuild, may_load_backends, parse_version_file

CUDA_TORCH = TorchBuild(cuda="12.8", hip=None, for_cpu_only=False)
ROCM_TORCH = TorchBuild(cuda=None, hip="6.4.0", for_cpu_only=False)
XPU_TORCH = TorchBuild(cuda=None, hip=None, for_cpu_only=False)
CPU_TORCH = TorchBuild(cuda=None, hip=None, for_cpu_only=True)


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


@pytest.mark.parametrize("directory", ["npu-1.0.dist-info", "npu.egg-info", "EGG-INFO"])
def test_a_package_with_a_torch_backend_is_found_by_its_metadata(tmp_path: Path, directory: str) -> None:
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info/entry_points.txt").write_text("[console_scripts]\nother = other:main\n")
    assert not may_load_backends({}, [str(tmp_path), str(tmp_path / "missing")])
    (tmp_path / directory).mkdir()
    (tmp_path / directory / "entry_points.txt").write_text(
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


def ask(python: str, kind: str = "auto") -> int:
    return gpus.ask_torch(python, kind, {"PATH": os.environ["PATH"]})


def test_the_number_is_taken_out_of_what_else_is_printed(tmp_path: Path) -> None:
    python = interpreter(
        tmp_path, r"echo hello; echo warning >&2; printf 'no newline\nsaferun-answer count 8\n'; echo bye"
    )
    assert ask(python) == 8


def test_the_interpreter_is_told_the_kind_and_gets_the_ranks_environment(tmp_path: Path) -> None:
    python = interpreter(tmp_path, r'printf "\nsaferun-answer refused $1 $4 $CUDA_VISIBLE_DEVICES\n"')
    with pytest.raises(SaferunError, match=r"-P gpu 0,1\n"):
        gpus.ask_torch(python, "gpu", {"CUDA_VISIBLE_DEVICES": "0,1"})


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
    # What torch answers is about the value that was given; all else is about the interpreter.
    assert raised.value.exit_code == (2 if "torch says" in what else 1)
    lines = str(raised.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["saferun", "hint"]


def test_a_kind_that_torch_does_not_know_is_a_wrong_option(tmp_path: Path) -> None:
    python = interpreter(tmp_path, r"printf '\nsaferun-answer refused Unsupported nproc_per_node value: npu\n'")
    with pytest.raises(UsageError, match="'npu' is no device that torch knows here") as raised:
        ask(python, "npu")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("kind", "words"), [("xpu", ("xpu-smi", "ZE_AFFINITY_MASK")), ("gpu", ("nvidia-smi", "CUDA_VISIBLE_DEVICES"))]
)
def test_the_tools_of_the_kind_are_named_where_there_are_no_devices(
    tmp_path: Path, kind: str, words: tuple[str, ...]
) -> None:
    python = interpreter(tmp_path, r'printf "\nsaferun-answer refused $1 is not available.\n"')
    with pytest.raises(SaferunError) as raised:
        ask(python, kind)
    others = {"xpu-smi", "ZE_AFFINITY_MASK", "nvidia-smi", "CUDA_VISIBLE_DEVICES"} - set(words)
    assert all(word in raised.value.hint for word in words)
    assert not any(word in raised.value.hint for word in others)


def test_a_backend_without_devices_is_a_wrong_value(tmp_path: Path) -> None:
    python = interpreter(tmp_path, r"printf '\nsaferun-answer refused npu is not available.\n'")
    with pytest.raises(SaferunError, match="npu is not available") as raised:
        ask(python, "npu")
    assert raised.value.exit_code == 2


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(SaferunError, match=r"cannot start \S*/nowhere .*: No such file or directory"):
        ask(str(tmp_path / "nowhere"))


def test_a_torch_that_takes_its_time_is_waited_for(tmp_path: Path) -> None:
    """As torchrun waits: a busy network file system must not cost the job. The user learns what it waits for."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    waited: list[float] = []

    def note(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            fifo.write_text("on you go\n")

    python = interpreter(tmp_path, f"read line <{shlex.quote(str(fifo))}; printf '\\nsaferun-answer count 3\\n'")
    assert gpus.ask_torch(python, "gpu", {"PATH": os.environ["PATH"]}, note, notice_s=0.05) == 3
    assert waited == sorted(waited)
    assert len(waited) >= 3


def test_a_torch_that_takes_its_time_and_crashes_is_explained(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    python = interpreter(tmp_path, f"read line <{shlex.quote(str(fifo))}; kill -SEGV $$")

    def note(_seconds: float) -> None:
        fifo.write_text("on you go\n")

    with pytest.raises(SaferunError, match=r"\(killed by SIGSEGV\)"):
        gpus.ask_torch(python, "gpu", {"PATH": os.environ["PATH"]}, note, notice_s=0.05)


def test_a_process_left_behind_by_torch_delays_nothing(tmp_path: Path) -> None:
    assert ask(interpreter(tmp_path, r"sleep 3600 & printf '\nsaferun-answer count 3\n'")) == 3


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
    with pytest.raises(UsageError, match="'banana' is neither a number nor a device type"):
        resolve("banana", build=CPU_TORCH)
    with pytest.raises(UsageError, match="'mps' is no device that torch knows here"):
        resolve("mps", build=CPU_TORCH)
    with pytest.raises(
        UsageError, match="'cuda' is no device that torch knows here\nhint: these devices are called gpu"
    ):
        resolve("cuda", build=CPU_TORCH)
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
