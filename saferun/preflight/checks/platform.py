"""Whether the platform lets GPUs of one host talk to each other directly: IOMMU, PCI access control, NUMA balancing.

Sources: RCCL, "Missing iommu=pt from kernel command line which can lead to system instablity or hang" (src/init.cc,
github.com/ROCm/rccl/issues/1454); ROCm documentation, "Application hangs on Multi-GPU systems" and "Disable NUMA
auto-balancing"; NCCL User Guide, "Troubleshooting", PCI Access Control Services; CUDA C++ Programming Guide, "IOMMU on
Linux"; Linux, Documentation/ABI/testing/sysfs-kernel-iommu_groups; PCI Express Base Specification, ACS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from saferun.linux.small_files import list_directory, read_bytes, read_text
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult
from saferun.text.wording import count_text

_CONFIG_BYTES = 4096
_EXTENDED = 0x100  # where the list of extended capabilities begins
_ACS = 0x000D
_REDIRECTS = 0x04 | 0x08  # bits of the control register: peer-to-peer requests and completions go to the processor
_MOST_CAPABILITIES = 64
_CPUINFO_BYTES = 4096  # the first processor is enough


def check_platform(context: CheckContext) -> CheckResult:
    """IOMMU and ACS of a host with several GPUs.

    Only what AMD says may hang is worth a warning. On NVIDIA's, NVLink makes most of it meaningless, so it is a
    hint behind a good result.
    """
    addresses = _gpu_addresses(context)
    facts: list[tuple[str, str]] = [("gpus", str(len(addresses)))]
    if len(addresses) < 2:  # noqa: PLR2004 - several
        return ok("fewer than two GPUs", facts)
    is_virtual = "hypervisor" in read_text(context.path("proc/cpuinfo"), _CPUINFO_BYTES).split()
    balancing = read_text(context.path("proc/sys/kernel/numa_balancing")).strip()
    translated = [address for address in addresses if _iommu_type(context, address).startswith("DMA")]
    redirecting = sorted({bridge for address in addresses for bridge in _redirecting_bridges(context, address)})
    facts += [
        ("virtual", "yes" if is_virtual else "no"),
        ("translated_by_iommu", str(len(translated))),
        ("acs_redirect", ",".join(redirecting[:16])),
        *((("numa_balancing", balancing),) if balancing else ()),
    ]
    gpus = count_text(len(addresses), "GPU")
    # A virtual machine needs both, and its host has seen to them.
    if is_virtual or not (translated or redirecting):
        hint = "AMD recommends `sysctl kernel.numa_balancing=0`" if context.vendor == "amd" and balancing == "1" else ""
        return ok(f"nothing stands between the {gpus}", facts, hint=hint)
    is_alone = context.nproc == 1 and not context.spans_hosts  # a single rank, which needs no RCCL
    if translated and context.vendor == "amd" and not is_alone:
        message = f"the IOMMU translates the addresses of {len(translated)} of {gpus}, and RCCL is known to hang then"
        return warning(message, "boot with iommu=pt on the kernel's command line", facts)
    what = [
        *(["the IOMMU translates addresses"] if translated else []),
        *(["ACS redirects PCI"] if redirecting else []),
    ]
    message = f"{' and '.join(what)} between the {gpus}, which matters to those without NVLink"
    hint = "boot with iommu=pt, and disable ACS on PCI bridges, if traffic between GPUs over PCI is slow or hangs"
    return ok(message, facts, hint=hint)


def _gpu_addresses(context: CheckContext) -> list[str]:
    """PCI addresses of the GPUs of the vendor in use."""
    if context.vendor == "nvidia":
        return list_directory(context.path("proc/driver/nvidia/gpus"))
    if context.vendor == "amd":
        from saferun.linux.amd_gpus import read_kfd_ids

        return sorted(read_kfd_ids(context.path("sys"), with_apus=False))
    return []


def _iommu_type(context: CheckContext, address: str) -> str:
    """How the IOMMU treats a device: ``identity`` (passed through), ``DMA``, ``DMA-FQ``; empty: not at all."""
    group = context.path("sys/bus/pci/devices", address, "iommu_group")
    if not os.path.exists(group):
        return ""
    # The link leads out of any other root than the real one; its last part is the group's number.
    number = os.path.basename(os.path.realpath(group))
    return read_text(context.path("sys/kernel/iommu_groups", number, "type")).strip()


def _redirecting_bridges(context: CheckContext, address: str) -> Iterator[str]:
    """The bridges above a device that send what one device says to another by way of the processor.

    Only root may read that far into a device's configuration; for others there are none.
    """
    path = os.path.dirname(os.path.realpath(context.path("sys/bus/pci/devices", address)))
    while (name := os.path.basename(path)).count(":") == 2:  # noqa: PLR2004 - 0000:17:00.0
        if acs_control(read_bytes(f"{path}/config", _CONFIG_BYTES)) & _REDIRECTS:
            yield name
        path = os.path.dirname(path)


def acs_control(config: bytes) -> int:
    """The ACS control register in a device's configuration space; 0 where it has none, or it cannot be seen. Pure."""
    offset = _EXTENDED
    for _ in range(_MOST_CAPABILITIES):
        if offset < _EXTENDED or offset + 8 > len(config):
            return 0
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return 0
