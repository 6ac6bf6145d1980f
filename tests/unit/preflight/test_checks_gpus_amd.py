"""What the state of AMD's GPUs means for a launch: /dev and sysfs are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from saferun.preflight.checks.gpus import check_gpus
from tests.unit.preflight.fake_nvml import GIB, OTHER, launch
from tests.unit.preflight.host_roots import Root


@pytest.fixture
def amd(tmp_path: Path) -> Root:
    """Two GPUs of AMD's, of which somebody uses the second."""
    root = Root(tmp_path)
    root.write("dev/kfd")
    root.write("venv/pyvenv.cfg", "version = 3.12.1\n")
    root.write(
        "venv/lib/python3.12/site-packages/torch/version.py", "__version__ = '2.13.0'\ncuda = None\nhip = '7.1.25424'\n"
    )
    for card in (0, 1):
        device = f"sys/class/drm/card{card}/device"
        root.write(f"{device}/vendor", "0x1002\n")
        root.write(f"{device}/mem_info_vram_total", str(192 * GIB))
        root.write(f"{device}/mem_info_vram_used", str(GIB))
        (root.path / f"sys/devices/0000:{card + 3:02x}:00.0").mkdir(parents=True)
        node = f"sys/class/kfd/kfd/topology/nodes/{card + 1}"
        root.write(f"{node}/gpu_id", f"{card + 51}")
        root.write(f"{node}/properties", f"simd_count 304\ndomain 0\nlocation_id {(card + 3) << 8}\n")
    return root


def _placed(root: Root) -> None:
    """Devices are links into the tree of PCI addresses."""
    for card in (0, 1):
        device = root.path / f"sys/class/drm/card{card}/device"
        target = root.path / f"sys/devices/0000:{card + 3:02x}:00.0"
        target.rmdir()
        device.rename(target)
        device.symlink_to(target)


def test_amd_s_gpus_are_read_from_the_kernel_s_files(amd: Root) -> None:
    """No tool is run for it."""
    _placed(amd)
    assert check_gpus(launch(amd, vendor="amd")).message == "2 GPUs"
    amd.write(f"sys/class/kfd/kfd/proc/{OTHER}/vram_52", str(100 * GIB))
    result = check_gpus(launch(amd, vendor="amd"))
    assert (result.verdict, result.class_name, result.transient) == ("warn", "gpu_busy", False)
    assert f"GPU 1 is in use: pid {OTHER}" in result.message


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({"HIP_VISIBLE_DEVICES": "0"}, "ok"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "warn"),
        ({"ROCR_VISIBLE_DEVICES": ""}, "ok"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, "ok"),
        ({"HIP_VISIBLE_DEVICES": "GPU-1234"}, "warn"),
    ],
)
def test_the_environment_chooses_among_amd_s_gpus(amd: Root, environ: dict[str, str], verdict: str) -> None:
    """Where it is not certain which are meant, all are looked at."""
    _placed(amd)
    amd.write("sys/devices/0000:04:00.0/ras/umc_err_count", "ue: 2\nce: 0\n")
    assert check_gpus(launch(amd, environ, vendor="amd", nproc=1)).verdict == verdict


def test_amd_s_pages_that_wait_for_a_reset_are_told(amd: Root) -> None:
    amd.write("sys/class/drm/card0/device/ras/gpu_vram_bad_pages", "0x01 : 0x1000 : R\n0x02 : 0x1000 : P\n")
    result = check_gpus(launch(amd, vendor="amd"))
    assert (result.verdict, result.message) == ("warn", "GPU 0 has memory pages to be retired at the next reset")


def test_gpus_that_a_container_was_not_granted_are_others(amd: Root) -> None:
    """The kernel's files tell of all of them, and of whoever uses them."""
    _placed(amd)
    amd.write(f"sys/class/kfd/kfd/proc/{OTHER}/vram_52", str(100 * GIB))
    for card in (0, 1):
        amd.write(f"sys/bus/pci/devices/0000:{card + 3:02x}:00.0/drm/renderD{128 + card}/dev")
    amd.write("dev/dri/renderD128")
    result = check_gpus(launch(amd, vendor="amd", nproc=1))
    assert (result.verdict, result.message) == ("ok", "1 GPU")
    (amd.path / "dev/kfd").unlink()
    assert check_gpus(launch(amd)).message == "there is no GPU that torch could use"
