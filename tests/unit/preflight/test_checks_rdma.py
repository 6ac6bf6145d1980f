"""GPUDirect RDMA, PCI ACS and RoCE's addresses: hosts as sysfs shows them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from saferun.preflight.checks.fabric import read_ports
from saferun.preflight.checks.rdma import check_rdma, read_gids, redirecting_ports
from saferun.preflight.results import CheckResult
from tests.unit.preflight.host_roots import Root

# show_gids of a ConnectX-7 in RoCE mode: link-local v1 and v2, then the IPv4 address, v1 and v2.
ROCE_GIDS = (
    ("fe80:0000:0000:0000:a288:c2ff:fe31:d3f4", "IB/RoCE v1"),
    ("fe80:0000:0000:0000:a288:c2ff:fe31:d3f4", "RoCE v2"),
    ("0000:0000:0000:0000:0000:ffff:0a01:0003", "IB/RoCE v1"),
    ("0000:0000:0000:0000:0000:ffff:0a01:0003", "RoCE v2"),
    ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
)
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
ENDPOINT, ROOT_PORT, DOWNSTREAM = 0, 4, 6
ALL_ON = 0x1D  # source validation, request and completion redirect, upstream forwarding
SWITCH = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def port(root: Root, device: str = "mlx5_0", layer: str = "InfiniBand", **files: str) -> None:
    """A port that is up."""
    folder = f"sys/class/infiniband/{device}/ports/1"
    known = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": layer}
    for name, content in {**known, **files}.items():
        root.write(f"{folder}/{name}", f"{content}\n")
    if layer == "Ethernet":
        for number, (gid, version) in enumerate(ROCE_GIDS):
            root.write(f"{folder}/gids/{number}", f"{gid}\n")
            if version:
                root.write(f"{folder}/gid_attrs/types/{number}", f"{version}\n")


def config(kind: int, control: int, size: int = 4096) -> bytes:
    """The registers of a PCI device: the list of capabilities, PCI Express, and ACS behind AER."""
    registers = bytearray(4096)
    registers[0x34] = 0x40
    registers[0x40:0x44] = bytes((0x01, 0x50, 3, 0))  # power management
    registers[0x50:0x54] = bytes((0x10, 0x00)) + (kind << 4 | 2).to_bytes(2, "little")
    registers[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    registers[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    registers[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(registers[:size])


def gpu_below(root: Root, above: bytes, kind: str = "0x030200") -> None:
    """A GPU behind a port of a switch."""
    gpu = f"{SWITCH}/0000:18:00.0"
    root.write(f"{gpu}/vendor", "0x10de\n")
    root.write(f"{gpu}/class", f"{kind}\n")
    for path in (gpu, SWITCH, SWITCH.rpartition("/")[0]):
        link = root.path / "sys/bus/pci/devices" / path.rpartition("/")[2]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root.path / path)
    root.write(f"{SWITCH}/config", above)
    root.write(f"{SWITCH.rpartition('/')[0]}/config", config(5, ALL_ON))


def check(root: Root, environ: dict[str, str] | None = None, **changed: Any) -> CheckResult:
    return check_rdma(root.context(environ, **{"spans_hosts": True, "vendor": "nvidia", **changed}))


# ----------------------------------------------------------------------------------------------------------- no trouble


def test_a_host_without_rdma_has_nothing_to_check(root: Root) -> None:
    assert (check(root).verdict, check(root).message) == ("ok", "no RDMA ports that NCCL would use")
    port(root)
    assert check(root, {"NCCL_IB_DISABLE": "1"}).message == "no RDMA ports that NCCL would use"
    port(root, state="1: DOWN")
    assert check(root).message == "no RDMA ports that NCCL would use"


@pytest.mark.parametrize("driver", ["peermem", "open"])
def test_a_healthy_host_has_no_warning(root: Root, driver: str) -> None:
    port(root)
    port(root, "mlx5_1", "Ethernet")
    gpu_below(root, config(DOWNSTREAM, 0))
    if driver == "open":
        root.write("proc/driver/nvidia/version", OPEN_DRIVER)
    else:
        root.write("proc/driver/nvidia/version", CLOSED_DRIVER)
        root.write("sys/module/nvidia_peermem/refcnt", "0\n")
    result = check(root, {"NCCL_IB_GID_INDEX": "3"})
    route = "DMA-BUF" if driver == "open" else "nvidia_peermem"
    assert (result.verdict, result.message) == ("ok", f"2 RDMA ports, GPUDirect by {route}")
    assert result.facts == (("gpudirect", route), ("acs", "none"))


@pytest.mark.parametrize("changed", [{"spans_hosts": False}, {"vendor": "amd"}, {"vendor": ""}])
def test_one_host_and_other_gpus_need_none_of_it(root: Root, changed: dict[str, Any]) -> None:
    port(root)
    gpu_below(root, config(DOWNSTREAM, ALL_ON))
    assert check(root, **changed).verdict == "ok"


# ----------------------------------------------------------------------------------------------------------- GPUDirect


def test_infiniband_without_a_way_to_the_gpus_memory_is_told(root: Root) -> None:
    port(root)
    root.write("proc/driver/nvidia/version", CLOSED_DRIVER)
    result = check(root)
    assert (result.verdict, result.class_name) == ("warn", "fabric_degraded")
    assert result.message == "InfiniBand cannot reach the GPUs' memory: neither nvidia_peermem nor DMA-BUF is there"
    assert "modprobe" in result.hint


def test_gaming_gpus_have_no_direct_way_to_miss(root: Root) -> None:
    """The driver does not offer it for them."""
    port(root)
    root.write("proc/driver/nvidia/version", CLOSED_DRIVER)
    for number in (1, 2):
        root.write(f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information", "Model: \t\t NVIDIA GeForce RTX 4090\n")
    assert check(root).verdict == "ok"
    root.write("proc/driver/nvidia/gpus/0000:03:00.0/information", "Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ: 16\n")
    assert check(root).verdict == "warn"


def test_ethernet_cards_that_can_do_rdma_are_no_fault(root: Root) -> None:
    port(root, "mlx5_0", "Ethernet")
    root.write("proc/driver/nvidia/version", CLOSED_DRIVER)
    assert check(root).verdict == "ok"


# -------------------------------------------------------------------------------------------------------------- PCI ACS


def test_a_switch_that_sends_peers_data_up_is_told(root: Root) -> None:
    port(root)
    root.write("proc/driver/nvidia/version", OPEN_DRIVER)
    gpu_below(root, config(DOWNSTREAM, ALL_ON))
    result = check(root)
    assert result.message == "PCI ACS sends data between GPUs and RDMA devices through the CPU (0000:17:00.0)"
    assert "setpci" in result.hint


@pytest.mark.parametrize(
    "above",
    [
        config(DOWNSTREAM, 0x11),  # source validation and forwarding only
        config(ROOT_PORT, ALL_ON),  # no switch: everything goes through the CPU anyhow
        config(DOWNSTREAM, ALL_ON, 64),  # what may be read without root
        config(DOWNSTREAM, ALL_ON, 256),
        b"",
        b"\xff" * 4096,  # the device is gone
        bytes(4096),
    ],
)
def test_other_ports_and_unreadable_registers_are_no_fault(root: Root, above: bytes) -> None:
    gpu_below(root, above)
    assert redirecting_ports(str(root.path)) == []


def test_only_gpus_matter(root: Root) -> None:
    gpu_below(root, config(DOWNSTREAM, ALL_ON), kind="0x040300")  # the sound device of a graphics card
    assert redirecting_ports(str(root.path)) == []


# ------------------------------------------------------------------------------------------------------------ RoCE GIDs


def test_the_addresses_of_a_port_are_read(root: Root) -> None:
    port(root, "mlx5_0", "Ethernet")
    gids = read_gids(str(root.path), read_ports(str(root.path))[0])
    assert [(gid.number, gid.address[-9:], gid.version) for gid in gids] == [
        (0, "fe31:d3f4", "RoCE v1"),
        (1, "fe31:d3f4", "RoCE v2"),
        (2, "0a01:0003", "RoCE v1"),
        (3, "0a01:0003", "RoCE v2"),
        (4, "", ""),
    ]


def test_an_index_without_an_address_is_told(root: Root) -> None:
    """Connections time out: the peer gets packets of the address 0."""
    port(root, "mlx5_0", "Ethernet")
    for index in ("4", "7"):
        result = check(root, {"NCCL_IB_GID_INDEX": index})
        assert result.message.startswith(f"NCCL_IB_GID_INDEX={index}: mlx5_0:1 has no GID there")
        assert result.verdict == "warn"


def test_an_address_of_the_first_roce_is_told(root: Root) -> None:
    port(root, "mlx5_0", "Ethernet")
    result = check(root, {"NCCL_IB_GID_INDEX": "2"})
    assert result.message == "NCCL_IB_GID_INDEX=2 is a RoCE v1 address of mlx5_0:1, which no router forwards"
    assert result.hint.endswith("RoCE v2 has 3")
    assert check(root, {"NCCL_IB_GID_INDEX": "2", "NCCL_IB_ROCE_VERSION_NUM": "1"}).verdict == "ok"


@pytest.mark.parametrize("index", ["", "-1", "0x3", "99999", "three"])
def test_an_index_that_says_nothing_is_none(root: Root, index: str) -> None:
    port(root, "mlx5_0", "Ethernet")
    assert check(root, {"NCCL_IB_GID_INDEX": index}).verdict == "ok"


def test_devices_that_nccl_does_not_use_do_not_matter(root: Root) -> None:
    port(root, "mlx5_0", "Ethernet")
    assert check(root, {"NCCL_IB_GID_INDEX": "7", "NCCL_IB_HCA": "^mlx5_0"}).verdict == "ok"


def test_an_index_in_nccls_own_file_counts(root: Root) -> None:
    port(root, "mlx5_0", "Ethernet")
    root.write("etc/nccl.conf", "NCCL_IB_GID_INDEX=7\n")
    result = check(root)
    assert result.message.startswith("NCCL_IB_GID_INDEX=7 (from /etc/nccl.conf): mlx5_0:1 has no GID there")
    assert result.hint.startswith("take NCCL_IB_GID_INDEX out of /etc/nccl.conf: NCCL finds the right one")
    root.write(".nccl.conf", "NCCL_IB_DISABLE=1\n")
    assert check(root, {"HOME": str(root.path)}).verdict == "ok"


def test_an_index_that_the_users_file_may_replace_is_no_warning(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a home directory that does not answer, or no thread can be started to read it."""

    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    port(root, "mlx5_0", "Ethernet")
    root.write("etc/nccl.conf", "NCCL_IB_GID_INDEX=7\n")
    monkeypatch.setattr(threading.Thread, "start", start)
    assert check(root).verdict == "ok"
    assert check(root, {"NCCL_IB_GID_INDEX": "7"}).verdict == "warn", "a variable wins over both files"
