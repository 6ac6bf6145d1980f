"""What GPUDirect RDMA needs of a host, and the addresses of its RoCE ports, as sysfs shows them.

Sources: NVIDIA, "GPUDirect RDMA" and NCCL's "Troubleshooting" (PCI access control services) and "Environment variables"
(NCCL_IB_GID_INDEX); PCI Express Base Specification, 7.7.11 (ACS); Linux, sysfs-class-infiniband.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from saferun.linux.small_files import list_directory, read_bytes, read_line, read_text
from saferun.model import Value
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import NcclEnviron, with_nccl_conf
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.fabric import Port, read_ports
from saferun.preflight.default_nics import fits
from saferun.preflight.results import CheckResult

_GID_INDEX = "NCCL_IB_GID_INDEX"
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "nvidia_peer_memory")
_CONFIG_BYTES = 4096
_PCIE_CAPABILITY, _ACS_CAPABILITY = 0x10, 0x0D
_SWITCH_DOWNSTREAM = 6
_REDIRECTS = 0x0C  # requests and completions between devices go up to the root complex
_MOST_CAPABILITIES = 64


class Gid(Value):
    """One address of a port: its number, the address (empty: none), and ``RoCE v1`` or ``RoCE v2``."""

    number: int
    address: str
    version: str


def check_rdma(context: CheckContext) -> CheckResult:
    """Whether GPUs and RDMA devices of this host can exchange data directly, and RoCE ports have the address in use.

    Only jobs of several hosts that use NVIDIA's GPUs need any of it. EFA has ways of its own.
    """
    ports = [port for port in read_ports(context.root) if port.state == "ACTIVE" and not port.driver.startswith("efa")]
    settings = with_nccl_conf(context) if ports else None
    ports = [port for port in ports if settings and _is_used(port, settings.environ)]
    if not settings or not ports:
        return ok("no RDMA ports that NCCL would use")
    route = _peer_route(context)
    acs = redirecting_ports(context.root)
    facts = (("gpudirect", route or "none"), ("acs", ", ".join(acs) or "none"))
    if not context.spans_hosts or context.vendor != "nvidia":
        return ok(f"{len(ports)} RDMA ports", facts)
    wrong = _wrong_gid(context, settings, ports)
    if wrong is not None:
        return wrong._replace(facts=facts)
    # Ethernet devices of any server may have RDMA ports that are not meant for GPUs.
    if not route and any(port.layer == "InfiniBand" for port in ports) and not _are_gaming_gpus(context):
        message = "InfiniBand cannot reach the GPUs' memory: neither nvidia_peermem nor DMA-BUF is there"
        hint = "load nvidia_peermem (modprobe), or use NVIDIA's open kernel modules; until then data goes via the host"
        return warning(message, hint, facts, class_name="fabric_degraded")
    if acs:
        message = f"PCI ACS sends data between GPUs and RDMA devices through the CPU ({', '.join(acs[:4])})"
        hint = "switch ACS off in the BIOS, or with setpci for these ports (NCCL's manual, Troubleshooting)"
        return warning(message, hint, facts, class_name="fabric_degraded")
    return ok(f"{len(ports)} RDMA ports, GPUDirect by {route}" if route else f"{len(ports)} RDMA ports", facts)


def _is_used(port: Port, environ: Mapping[str, str]) -> bool:
    value = environ.get("NCCL_IB_HCA", "")
    return environ.get("NCCL_IB_DISABLE", "0") != "1" and (not value or fits(port.device, value))


def _peer_route(context: CheckContext) -> str:
    """How RDMA devices reach the GPUs' memory: ``nvidia_peermem``, ``DMA-BUF``; empty: they do not."""
    for module in _PEER_MODULES:
        if os.path.isdir(context.path("sys/module", module)):
            return module
    # Only the open modules export the GPUs' memory.
    return "DMA-BUF" if "Open Kernel Module" in read_text(context.path("proc/driver/nvidia/version")) else ""


def _are_gaming_gpus(context: CheckContext) -> bool:
    """Whether the driver lets no RDMA device reach the memory of any of the GPUs, whatever is loaded."""
    base = context.path("proc/driver/nvidia/gpus")
    texts = [read_text(f"{base}/{name}/information") for name in list_directory(base)]
    models = [line for text in texts for line in text.splitlines() if line.startswith("Model:")]
    return bool(models) and all("GeForce" in model for model in models)


# ------------------------------------------------------------------------------------------------------------ RoCE GIDs


def read_gids(root: str, port: Port) -> list[Gid]:
    """The addresses of a port, in their order."""
    device, _, number = port.name.partition(":")
    folder = os.path.join(root, f"sys/class/infiniband/{device}/ports/{number}")
    found = []
    for name in list_directory(f"{folder}/gids"):
        if name.isdecimal():
            version = read_line(f"{folder}/gid_attrs/types/{name}").removeprefix("IB/")
            address = read_line(f"{folder}/gids/{name}")
            found.append(Gid(int(name), "" if address == _NO_GID else address, version))
    return sorted(found)


def _wrong_gid(context: CheckContext, settings: NcclEnviron, ports: Sequence[Port]) -> CheckResult | None:
    """The index that was set points to no address, or to one that routers do not know."""
    value = settings.known(_GID_INDEX)
    named = f"{_GID_INDEX}={value}{settings.where(_GID_INDEX)}"
    if not value.isdecimal() or len(value) > 3:  # noqa: PLR2004 - a port has at most some hundred
        return None
    for port in ports:
        gids = read_gids(context.root, port) if port.layer == "Ethernet" else []
        if not gids:
            continue
        gid = next((gid for gid in gids if gid.number == int(value) and gid.address), None)
        hint = f"{settings.without(_GID_INDEX)}: NCCL finds the right one, from 2.21 on; `show_gids` shows them"
        if gid is None:
            message = f"{named}: {port.name} has no GID there: connections time out"
            return warning(message, hint, class_name="fabric_degraded")
        same = [other.number for other in gids if other.address == gid.address and other.version == "RoCE v2"]
        if gid.version == "RoCE v1" and same and settings.environ.get("NCCL_IB_ROCE_VERSION_NUM") != "1":
            message = f"{named} is a RoCE v1 address of {port.name}, which no router forwards"
            return warning(message, f"{hint}; RoCE v2 has {same[0]}", class_name="fabric_degraded")
    return None


# -------------------------------------------------------------------------------------------------------------- PCI ACS


def redirecting_ports(root: str) -> list[str]:
    """The ports of PCI switches above NVIDIA's GPUs whose ACS sends peers' data up to the processor.

    Empty where there is none, and where the devices' registers may not be read (without root).
    """
    base = os.path.join(root, "sys/bus/pci/devices")
    found: dict[str, None] = {}
    for device in list_directory(base):
        if read_line(f"{base}/{device}/vendor") != _NVIDIA:
            continue
        if not read_line(f"{base}/{device}/class").startswith(_GPU_CLASSES):
            continue
        for above in _devices_above(f"{base}/{device}"):
            if above not in found and _redirects(read_bytes(f"{base}/{above}/config", _CONFIG_BYTES)):
                found[above] = None
    return sorted(found)


def _devices_above(path: str) -> list[str]:
    """The bridges above a device, as its path in /sys/devices names them."""
    parts = os.path.realpath(path).split("/")
    return [part for part in parts[:-1] if part.count(":") == 2 and "." in part]  # noqa: PLR2004 - 0000:3a:00.0


def _redirects(config: bytes) -> bool:
    pcie = next((at for number, at in _capabilities(config) if number == _PCIE_CAPABILITY), 0)
    if not pcie or (_word(config, pcie + 2) >> 4) & 0xF != _SWITCH_DOWNSTREAM:
        return False
    acs = next((at for number, at in _extended_capabilities(config) if number == _ACS_CAPABILITY), 0)
    return bool(acs and _word(config, acs + 6) & _REDIRECTS)


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    at = config[0x34] & 0xFC if len(config) > 0x34 else 0  # noqa: PLR2004 - the list's first entry
    for _ in range(_MOST_CAPABILITIES):
        if not 0x40 <= at < len(config) - 1:  # noqa: PLR2004 - behind the standard header
            return
        yield config[at], at
        at = config[at + 1] & 0xFC


def _extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    at = 0x100
    for _ in range(_MOST_CAPABILITIES):
        if not 0x100 <= at <= len(config) - 8:  # noqa: PLR2004 - where they begin
            return
        head = int.from_bytes(config[at : at + 4], "little")
        yield head & 0xFFFF, at
        at = head >> 20 & 0xFFC


def _word(config: bytes, at: int) -> int:
    return int.from_bytes(config[at : at + 2], "little")
