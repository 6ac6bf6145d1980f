"""IOMMU and PCI access control between GPUs, as the files of hosts that do not exist tell them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.preflight.checks.platform import acs_control, check_platform
from tests.unit.preflight.host_roots import Root

ADDRESSES = ("0000:18:00.0", "0000:19:00.0")


def config(control: int) -> bytes:
    """A bridge's configuration space: an error-reporting capability, and ACS behind it."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x140 << 20 | 1 << 16 | 0x0001)
    struct.pack_into("<IHH", space, 0x140, 1 << 16 | 0x000D, 0x005F, control)
    return bytes(space)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Two GPUs behind bridges, each in an IOMMU group of its own."""
    root = Root(tmp_path)
    root.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu vme sse\n")
    (root.path / "sys/bus/pci/devices").mkdir(parents=True)
    for number, address in enumerate(ADDRESSES):
        bridge = f"0000:17:{number + 1:02x}.0"
        device = f"sys/devices/pci0000:17/{bridge}/{address}"
        root.write(f"{device}/vendor", "0x1002\n")
        root.write(f"sys/devices/pci0000:17/{bridge}/config", bytes(64))
        (root.path / "sys/bus/pci/devices" / address).symlink_to(root.path / device)
        group = root.write(f"sys/kernel/iommu_groups/{number + 40}/type", "identity\n").parent
        (root.path / device / "iommu_group").symlink_to(group)
        node = f"sys/class/kfd/kfd/topology/nodes/{number + 1}"
        root.write(f"{node}/gpu_id", f"{number + 51}")
        root.write(f"{node}/properties", f"simd_count 304\ndomain 0\nlocation_id {(0x18 + number) << 8}\n")
        root.write(f"proc/driver/nvidia/gpus/{address}/information")
    return root


def translate(root: Root) -> None:
    for number in (40, 41):
        root.write(f"sys/kernel/iommu_groups/{number}/type", "DMA-FQ\n")


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_gpus_that_are_passed_through_talk_to_each_other(root: Root, vendor: str) -> None:
    result = check_platform(root.context(vendor=vendor))
    assert (result.verdict, result.message, result.hint) == ("ok", "nothing stands between the 2 GPUs", "")


def test_amd_s_gpus_behind_a_translating_iommu_are_told(root: Root) -> None:
    """RCCL itself says that this "can lead to system instability or hang"."""
    translate(root)
    result = check_platform(root.context(vendor="amd", nproc=2))
    assert result.verdict == "warn"
    assert result.message.startswith("the IOMMU translates the addresses of 2 of 2 GPUs")
    assert "iommu=pt" in result.hint


def test_one_rank_talks_to_no_other_gpu(root: Root) -> None:
    translate(root)
    assert check_platform(root.context(vendor="amd", nproc=1)).verdict == "ok"
    assert check_platform(root.context(vendor="amd", nproc=1, spans_hosts=True)).verdict == "warn"


def test_a_processor_s_own_gpu_is_none_that_ranks_talk_through(root: Root) -> None:
    """Desktops have one beside the real one."""
    translate(root)
    node = "sys/class/kfd/kfd/topology/nodes/2"
    root.write(f"{node}/properties", f"cpu_cores_count 16\nsimd_count 4\ndomain 0\nlocation_id {0x19 << 8}\n")
    result = check_platform(root.context(vendor="amd", nproc=2))
    assert (result.verdict, result.message) == ("ok", "fewer than two GPUs")


def test_on_nvidia_s_it_is_a_hint(root: Root) -> None:
    """With NVLink it does not matter, and most hosts with several GPUs have it."""
    translate(root)
    result = check_platform(root.context(vendor="nvidia"))
    assert result.verdict == "ok"
    assert "iommu=pt" in result.hint


def test_a_virtual_machine_is_its_host_s_business(root: Root) -> None:
    translate(root)
    root.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu hypervisor sse\n")
    result = check_platform(root.context(vendor="amd"))
    assert (result.verdict, dict(result.facts)["virtual"]) == ("ok", "yes")


def test_bridges_that_redirect_are_named(root: Root) -> None:
    """Only root sees them."""
    root.write("sys/devices/pci0000:17/0000:17:02.0/config", config(0x1D))
    result = check_platform(root.context(vendor="nvidia"))
    assert result.verdict == "ok"
    assert "ACS redirects PCI" in result.message
    assert dict(result.facts)["acs_redirect"] == "0000:17:02.0"


def test_numa_balancing_is_a_hint_on_amd_s(root: Root) -> None:
    root.write("proc/sys/kernel/numa_balancing", "1\n")
    assert "numa_balancing=0" in check_platform(root.context(vendor="amd")).hint
    assert check_platform(root.context(vendor="nvidia")).hint == ""


def test_a_host_without_several_gpus_is_not_looked_at(tmp_path: Path) -> None:
    for vendor in ("none", "nvidia", "amd"):
        result = check_platform(Root(tmp_path).context(vendor=vendor))
        assert (result.verdict, result.message) == ("ok", "fewer than two GPUs")


def test_the_control_register_is_found_behind_other_capabilities() -> None:
    assert acs_control(config(0x1D)) == 0x1D
    assert acs_control(config(0)) == 0
    assert acs_control(bytes(64)) == 0, "what others than root may read"
    assert acs_control(b"") == 0


@given(st.binary(max_size=64), st.integers(0, 0xFFF))
def test_any_configuration_space_comes_to_an_end(garbage: bytes, start: int) -> None:
    """A list that leads to itself is walked no more than a few times."""
    space = bytearray((garbage * 65)[:4096].ljust(4096, b"\0"))
    struct.pack_into("<I", space, 0x100, start << 20 | 0x0001)
    assert 0 <= acs_control(bytes(space)) <= 0xFFFF
