"""What is counted without torch is what torch counts: the same variables and the same drivers are given to both."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.run import determine_local_world_size

from saferun.errors import SaferunError, UsageError
from saferun.linux import gpus
from saferun.linux.gpu_drivers import NvmlReading, count_visible_amd, count_visible_nvidia, parse_cuda_visible_devices
from saferun.linux.installed_torch import may_load_backends, read_torch_build
from tests.examples import examples

UUIDS = ("GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-cc34")
AMD_UUIDS = tuple(f"GPU-{number:016x}" for number in (0xA0, 0xA1, 0xB0, 0xB1))
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

TEXTS = st.text(alphabet="0123456789,-+ GPUMIabc_²٣", max_size=12)
ITEMS = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "3", "4", "-1", "", " 1", "+2", "2gpu", "GPU-", "GPU-a", "GPU-aa", "GPU-c", "MIG-a"]
    ),
    st.sampled_from(UUIDS + AMD_UUIDS),
    TEXTS,
)
MASKS = st.one_of(TEXTS, st.lists(ITEMS, max_size=5).map(",".join))


def environment(**variables: str | None) -> mock._patch_dict:
    """An environment with just these of the variables that choose GPUs."""
    given = {name: value for name, value in variables.items() if value is not None}
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return mock.patch.dict(os.environ, kept | given, clear=True)


@given(mask=MASKS)
@example(mask="0,0")
@example(mask="0,-1,0")
@example(mask="1gpu2,2ampere")
@example(mask="GPU-aa,GPU-aa")
@example(mask="0,+")
@examples(500)
def test_cuda_visible_devices_is_read_as_torch_reads_it(mask: str) -> None:
    with environment(CUDA_VISIBLE_DEVICES=mask):
        try:
            expected = torch.cuda._parse_visible_devices()
        except ValueError:
            expected = None
    assert parse_cuda_visible_devices(mask) == expected


@given(mask=st.none() | MASKS, uuids=st.sampled_from([UUIDS[:size] for size in range(len(UUIDS) + 1)]))
@examples(500)
def test_nvidias_gpus_are_counted_as_torch_counts_them(mask: str | None, uuids: tuple[str, ...]) -> None:
    """Where a number is given it is torch's; and torch's number is given wherever it has one."""
    with (
        environment(CUDA_VISIBLE_DEVICES=mask),
        mock.patch.object(torch.cuda, "_raw_device_count_nvml", return_value=len(uuids)),
        mock.patch.object(torch.cuda, "_raw_device_uuid_nvml", return_value=list(uuids)),
    ):
        try:
            expected: int | None = torch.cuda._device_count_nvml()
        except ValueError:
            expected = None
    assert count_visible_nvidia(mask, NvmlReading(13, mig=False, uuids=uuids)) == (None if expected == -1 else expected)


@given(cuda=st.none() | MASKS, hip=st.none() | MASKS, rocr=st.none() | MASKS)
@example(cuda=None, hip="-1", rocr=None)
@example(cuda=None, hip="0,2", rocr="1,2,3")
@example(cuda="1", hip=None, rocr="0,1")
@example(cuda=None, hip=f"{AMD_UUIDS[1]},{AMD_UUIDS[0]}", rocr=None)
@examples(500)
def test_amds_gpus_are_counted_as_torch_counts_them_or_not_at_all(
    cuda: str | None, hip: str | None, rocr: str | None
) -> None:
    """Torch does not always agree with ROCm itself; a number is given only where both do."""
    variables = {"CUDA_VISIBLE_DEVICES": cuda, "HIP_VISIBLE_DEVICES": hip, "ROCR_VISIBLE_DEVICES": rocr}
    count = count_visible_amd({name: mask for name, mask in variables.items() if mask is not None}, AMD_UUIDS)
    if count is None:
        return
    with (
        environment(**variables),
        mock.patch.object(torch.version, "hip", "6.4"),
        mock.patch.object(torch.cuda, "_raw_device_count_amdsmi", return_value=len(AMD_UUIDS)),
        mock.patch.object(torch.cuda, "_raw_device_uuid_amdsmi", return_value=[uuid[4:] for uuid in AMD_UUIDS]),
    ):
        assert count == torch.cuda._device_count_amdsmi()


def test_the_version_file_tells_what_torch_itself_tells() -> None:
    build = read_torch_build()
    assert build is not None
    assert (build.cuda, build.hip) == (torch.version.cuda, torch.version.hip)
    assert build.for_cpu_only == (torch.accelerator.current_accelerator() is None)


def test_backends_are_found_where_importlib_finds_them() -> None:
    assert may_load_backends({}) == bool(entry_points(group="torch.backends"))


@pytest.mark.parametrize("value", ["cpu", "auto", "3"])
def test_a_value_means_what_it_means_to_torchrun(value: str) -> None:
    assert gpus.resolve_nproc_per_node(value, sys.executable, os.environ) == determine_local_world_size(value)


def test_torch_is_asked_and_answers_as_torchrun() -> None:
    assert gpus.ask_torch(sys.executable, "auto", os.environ) == determine_local_world_size("auto")


@pytest.mark.slow
def test_devices_that_are_not_there_are_an_error_as_under_torchrun() -> None:
    with environment(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="-1"):
        with pytest.raises(ValueError, match="Cuda is not available"):
            determine_local_world_size("gpu")
        with pytest.raises(SaferunError, match=r"torch says: Cuda is not available\.\nhint: "):
            gpus.resolve_nproc_per_node("gpu", sys.executable, os.environ)


BACKEND = """
import types
import torch

def load():
    torch.utils.rename_privateuse1_backend("openchip")
    torch._register_device_module("openchip", types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 5))
"""


@pytest.mark.slow
def test_an_installed_backend_gives_its_name_a_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch loads it by its entry point, and torchrun then knows the backend's name and no other."""
    (tmp_path / "openchip.py").write_text(BACKEND)
    metadata = tmp_path / "openchip-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: openchip\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nopenchip = openchip:load\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpus.resolve_nproc_per_node("openchip", sys.executable, os.environ) == 5
    with pytest.raises(UsageError, match="'banana' is neither a number nor a device type"):
        gpus.resolve_nproc_per_node("banana", sys.executable, os.environ)
