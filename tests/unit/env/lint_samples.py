"""Made-up installations and hosts that the tests of the lint share."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saferun.env.lint.findings import Finding
from saferun.env.lint.installation import Installation
from saferun.env.lint.known_names import HostFacts, KnownNames

CPU_TORCH = ("libtorch_cpu.so", "torch 2.13.0")
NOTHING = KnownNames({}, {}, {}, (), {}, (), (), {}, ())


def installed(*names: str, owners: Mapping[str, tuple[str, ...]] | None = None, **changes: Any) -> KnownNames:
    """A CPU build of torch that reads these names."""
    read = dict.fromkeys(names, CPU_TORCH)
    found = {"torch": ("libtorch_cpu.so",), "torchrun": ("libtorch_cpu.so",), "gloo": ("libtorch_cpu.so",)}
    known = NOTHING._replace(
        readers=read, owners={**found, **(owners or {})}, libraries=("libtorch_cpu.so",), modules=("torch 2.13.0",)
    )
    return known._replace(**changes)


def with_gpus(*names: str, **changes: Any) -> KnownNames:
    """A CUDA build of torch, with NCCL, that reads these names."""
    owners: dict[str, tuple[str, ...]] = {"NCCL": ("libnccl.so.2",), "torch for accelerators": ("libtorch_cuda.so",)}
    return installed(*names, owners=owners, **changes)


def only(findings: tuple[Finding, ...], name: str) -> Finding:
    """The one finding on a variable."""
    found = [finding for finding in findings if finding.variable == name]
    assert len(found) == 1, found
    return found[0]


TODAY = with_gpus(
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
    *(
        "TORCH_NCCL_DESYNC_DEBUG",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_USE_CUDA_DSA", "TORCH_DIST_INIT_BARRIER"),
    *("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG", "GLOO_SOCKET_IFNAME"),
)


ETH0 = HostFacts(
    interfaces=frozenset({"lo", "eth0", "ib0"}), gpu_count=4, vendor="nvidia", ib_devices=frozenset({"mlx5_0"})
)


class Packages:
    """A directory of installed packages, made up."""

    def __init__(self, root: Path) -> None:
        self.root = root / "site-packages"
        self.root.mkdir()
        self.libraries = root / "lib"
        self.libraries.mkdir()

    def add(self, name: str, files: dict[str, bytes], version: str = "1.0") -> None:
        """Install a distribution with these files."""
        info = self.root / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        for path, content in files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_bytes(content)
        rows = [f"{path},sha256=x,{len(content)}" for path, content in files.items()]
        (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")

    @property
    def installation(self) -> Installation:
        """What a scan is given."""
        return Installation((str(self.root),), (), (str(self.libraries),))


def elf(*sections: tuple[str, int, bytes]) -> bytes:
    """A shared object of these sections: name, flags (2 allocated, 4 executable), content."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    content, table, at = b"", b"\0" * 64, 64
    for name, flags, data in (*sections, (".shstrtab", 0, names)):
        table += struct.pack(
            "<IIQQQQIIQQ", names.index(b"\0" + name.encode() + b"\0") + 1, 1, flags, 0, at, len(data), 0, 0, 1, 0
        )
        content += data
        at += len(data)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQ", 3, 62, 1, 0, 0, at)
    header += struct.pack("<IHHHHHH", 0, 64, 0, 0, 64, len(sections) + 2, len(sections) + 1)
    return header + content + table


def strings(*texts: str) -> bytes:
    return elf((".text", 6, b"\x90" * 64), (".rodata", 2, b"\0" + b"".join(text.encode() + b"\0" for text in texts)))


def asking(*names: str) -> dict[str, Any]:
    return {"wanted": lambda _known: names}
