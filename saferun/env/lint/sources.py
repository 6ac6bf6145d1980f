"""What to search in an installation: distributions, shared objects, the user's own code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Literal

from saferun.env.lint.installation import Installation
from saferun.linux.small_files import list_directory, read_text
from saferun.model import Value

_MAX_TREE_FILES = 3_000
_MAX_TREE_ENTRIES = 30_000
_MAX_RECORD_BYTES = 32 << 20

# Distributions whose code reads settings of the families, by the prefix of their names.
_CENTRAL = re.compile(
    r"(?:torch|pytorch|functorch|triton|nvidia|cuda|cupy|nccl|rccl|rocm|amd|ucx|libucx|ucc|mpi4py|intel|mkl|onemkl|numpy"
    r"|deepspeed|accelerate|lightning|megatron|transformer[-_.]?engine|apex|vllm|xformers|flash|horovod|jax|libtpu"
    r"|nvshmem|faiss|tensorrt|bitsandbytes)",
    re.IGNORECASE,
)
_SYSTEM_LIBRARY = re.compile(
    r"lib(?:nccl(?:-[^/.]+)?|rccl(?:-[^/.]+)?|cuda|cudart|uc[cpst]|fabric|mpi|open-pal|prrte|gomp|iomp5|omp\d*|mkl_core"
    r"|mkl_rt|amdhip64|hsa-runtime64|rocblas|hipblaslt|MIOpen|rocprofiler[^/.]*|gloo|dnnl|cublas(?:Lt)?|cudnn"
    r"|nvshmem_host)\.so(?:\.[0-9.]+)?$"
)
_RECORDED = re.compile(rb"^([^\"\n,/][^\"\n,]*?(?:\.py|\.so(?:\.[0-9.]+)?)),", re.MULTILINE)
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})


class Source(Value):
    """Something to search.

    Args:
        kind: a distribution, a shared object, or a directory of the user's code.
        path: of a distribution, its RECORD; else its own.
        name: its name.
        version: a distribution's version.
        root: the directory that a distribution is installed in.
    """

    kind: Literal["distribution", "library", "tree"]
    path: str
    name: str
    version: str = ""
    root: str = ""

    @property
    def title(self) -> str:
        """The name for messages."""
        return f"{self.name} {self.version}" if self.kind == "distribution" else self.name

    @property
    def is_central(self) -> bool:
        """Whether its code reads settings, so that it is searched for all names."""
        return self.kind != "distribution" or _CENTRAL.match(self.name) is not None


def find_sources(installation: Installation) -> Iterator[Source]:
    """Everything to search, the system's libraries first."""
    seen: set[tuple[int, int]] = set()
    for path in _system_libraries(installation):
        try:
            status = os.stat(path)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) not in seen:  # libnccl.so, libnccl.so.2 and libnccl.so.2.21.5 are one
            seen.add((status.st_dev, status.st_ino))
            yield Source("library", path, os.path.basename(path))
    for root in installation.package_directories:
        yield from _distributions(root)
    for path in installation.source_directories:
        yield Source("tree", path, path)


def _system_libraries(installation: Installation) -> Iterator[str]:
    yield from installation.preloaded
    for directory in installation.library_directories:
        for name in list_directory(directory):
            if _SYSTEM_LIBRARY.match(name):
                yield f"{directory}/{name}"


def _distributions(root: str) -> Iterator[Source]:
    names = list_directory(root)
    found = set()
    for entry in names:
        if entry.endswith(".dist-info"):
            name, _, version = entry.removesuffix(".dist-info").rpartition("-")
            if name and name.lower() != "saferun":  # its tables hold names that nothing reads
                found.add(name.lower())
                editable = _editable(f"{root}/{entry}/direct_url.json")
                if editable:
                    yield Source("tree", editable, name, version)
                elif os.path.isfile(f"{root}/{entry}/RECORD"):
                    yield Source("distribution", f"{root}/{entry}/RECORD", name, version, root)
                elif os.path.isdir(f"{root}/{name}"):
                    yield Source("tree", f"{root}/{name}", name, version)
    if "torch" in names and "torch" not in found:
        yield Source("tree", f"{root}/torch", "torch")  # not installed by pip


def _editable(path: str) -> str:
    # An editable installation has the path of its code here.
    text = read_text(path, 65_536)
    found = re.search(r'"url"\s*:\s*"file://(/[^"]+)"', text)
    return found[1] if found and re.search(r'"editable"\s*:\s*true', text) and os.path.isdir(found[1]) else ""


def files_of(source: Source) -> Iterator[tuple[str, bool]]:
    """The files of a source, each with whether it is a shared object.

    Raises:
        OSError: the list of a distribution's files cannot be read.
    """
    if source.kind == "library":
        yield source.path, True
    elif source.kind == "tree":
        yield from _walk(source.path)
    else:
        with open(source.path, "rb") as file:
            record = file.read(_MAX_RECORD_BYTES)
        for found in _RECORDED.findall(record):
            path = os.fsdecode(found)
            if not path.startswith("../") and "/../" not in path:
                yield f"{source.root}/{path}", not path.endswith(".py")


def _walk(root: str) -> Iterator[tuple[str, bool]]:
    folders, entries, files = [root], 0, 0
    while folders and entries < _MAX_TREE_ENTRIES and files < _MAX_TREE_FILES:
        try:
            with os.scandir(folders.pop(0)) as listing:
                for entry in listing:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        if not entry.name.startswith(".") and entry.name not in _SKIPPED_FOLDERS:
                            folders.append(entry.path)
                    elif entry.name.endswith((".py", ".so")) and entry.is_file():
                        files += 1
                        yield entry.path, entry.name.endswith(".so")
                    if entries >= _MAX_TREE_ENTRIES or files >= _MAX_TREE_FILES:
                        return
        except OSError:
            continue


def stamp_of(source: Source, libraries: Iterable[str] = ()) -> str:
    """A text that changes whenever a source does.

    Args:
        source: the source.
        libraries: the shared objects of a distribution, which may change without its RECORD.

    Raises:
        OSError: one of its files is gone.
    """
    if source.kind != "tree":
        return ",".join(stamp_of_file(path) for path in (source.path, *libraries))
    newest, size_bytes, count = 0, 0, 0
    for path, _is_library in _walk(source.path):
        status = os.stat(path)
        newest, size_bytes, count = max(newest, status.st_mtime_ns), size_bytes + status.st_size, count + 1
    return f"{newest}:{size_bytes}:{count}"


def stamp_of_file(path: str) -> str:
    """A text that changes whenever a file does.

    Raises:
        OSError: it is gone.
    """
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"
