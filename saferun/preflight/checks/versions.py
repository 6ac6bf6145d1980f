"""What is installed here, in which environment, and which combinations of it are known to hang.

Nothing of it is imported or run: versions stand in files.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Mapping

from saferun import __version__
from saferun.env.profiles.version_ranges import numbers_of
from saferun.linux.small_files import list_directory, read_text
from saferun.model import Value
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import is_switched_on
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult, Pairs
from saferun.text.secret_names import is_secret

# ------------------------------------------------------------------------------------------------- what this host tells

# Larger scripts are hashed by their beginning, their end and their size.
_HASHED_WHOLE_BYTES = 8 << 20
_HASHED_PART_BYTES = 1 << 20

_MOST_NAMES = 256
_MOST_NAME_CHARS = 128
_MOST_VALUE_CHARS = 256

# Beginnings of the names that torch, the communication libraries and the runtimes below them read.
_PREFIXES = (
    *("TORCH_", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "ATEN_", "KINETO_", "TRITON_"),
    *("NCCL_", "RCCL_", "GLOO_", "NVSHMEM_", "UCX_", "UCC_", "FI_", "MSCCL_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NVIDIA_TF32_"),
    *("HIP_", "HSA_", "AMD_", "ROC_", "ROCR_", "GPU_MAX_HW_QUEUES", "ROCBLAS_", "HIPBLASLT_", "MIOPEN_"),
    *("OMP_", "KMP_", "MKL_", "OPENBLAS_"),
)
_NAMES = frozenset(["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "NCCL_TOPO_FILE"])
# What differs between hosts, tasks or ranks by its nature, and what the launcher itself sets.
_BY_NATURE = frozenset(
    [
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        *("NCCL_HOSTID", "OMP_PLACES", "KMP_AFFINITY", "CUDA_MPS_PIPE_DIRECTORY"),
    ]
)
# Where something lies, or what an image calls itself: versions and paths, not settings.
_AMBIENT = ("_DIR", "_DIRECTORY", "_PATH", "_FILE", "_OUT", "_TRACE", "_HOME", "_ROOT", "_VERSION", "_PREFIX", "_URL")


def describe_host(context: CheckContext) -> tuple[Pairs, str, Pairs]:
    """What must be the same on all hosts of a job: versions, hash of the script, relevant environment.

    What cannot be read is left out. Secrets are left out by their names, and so is what differs by nature.
    """
    return tuple(read_versions(context).items()), script_hash(context.script), relevant_environ(context.environ)


def read_versions(context: CheckContext) -> dict[str, str]:
    """Versions of saferun, Python, torch, NCCL, CUDA or ROCm, and the GPUs' driver, as far as files tell them."""
    from saferun.linux.installed_versions import read_package_versions

    versions = {"saferun": __version__}
    if context.python:
        directories, python = _interpreter(context)
        if python:
            versions["python"] = python
        versions.update(read_package_versions(directories))
    driver = _driver(context)
    if driver:
        versions["driver"] = driver
    return versions


def _interpreter(context: CheckContext) -> tuple[list[str], str]:
    """Where the ranks' interpreter finds packages, and its version."""
    named = [directory for directory in context.environ.get("PYTHONPATH", "").split(":") if directory]
    path = context.python if "/" in context.python else _which(context.python, context.environ.get("PATH", ""))
    if path in {"", sys.executable}:
        return [*named, *sys.path], ".".join(map(str, sys.version_info[:3]))
    # Another interpreter is not run for this: a virtual environment says what it is, others by the names of folders.
    prefix = os.path.dirname(os.path.dirname(path))
    version = ""
    for line in read_text(f"{prefix}/pyvenv.cfg").splitlines():
        key, _, value = line.partition("=")
        if key.strip() in {"version", "version_info"}:
            version = ".".join(value.strip().split(".")[:3])
    if not os.path.isfile(f"{prefix}/pyvenv.cfg"):
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(path)))
    folders = [name for name in list_directory(f"{prefix}/lib") if name.startswith("python3.")]
    if len(folders) == 1:
        version = version or folders[0].removeprefix("python")
    directories = [f"{prefix}/lib/{folder}/{kind}" for folder in folders for kind in ("site-packages", "dist-packages")]
    return [*named, *directories], version


def _which(name: str, path: str) -> str:
    for directory in path.split(":"):
        if directory and os.access(f"{directory}/{name}", os.X_OK):
            return f"{directory}/{name}"
    return ""


def _driver(context: CheckContext) -> str:
    """``535.104.05``: NVIDIA's; AMD's where it is not the kernel's own."""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
    for line in read_text(context.path("proc/driver/nvidia/version")).splitlines():
        if line.startswith("NVRM version:"):
            for word in line.split():
                if "." in word and word.replace(".", "").isdigit():
                    return word
    return read_text(context.path("sys/module/amdgpu/version")).strip()


def script_hash(path: str) -> str:
    """A hash of a script's content; empty where there is no such file. Of a huge one only parts are read."""
    try:
        from _blake2 import blake2b  # hashlib loads OpenSSL first, which takes ten times as long
    except ImportError:
        from hashlib import blake2b

    if not path:
        return ""
    digest = blake2b(digest_size=16)
    try:
        # Without O_NONBLOCK, a named pipe without a writer would block its reader.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return ""
            if status.st_size <= _HASHED_WHOLE_BYTES:
                digest.update(os.pread(fd, _HASHED_WHOLE_BYTES, 0))
            else:
                digest.update(f"{status.st_size} bytes ".encode())
                digest.update(os.pread(fd, _HASHED_PART_BYTES, 0))
                digest.update(os.pread(fd, _HASHED_PART_BYTES, status.st_size - _HASHED_PART_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return ""
    return digest.hexdigest()


def relevant_environ(environ: Mapping[str, str]) -> Pairs:
    """The variables that change how torch and the libraries below it work, sorted, within bounds."""
    names = sorted(name for name in environ if _is_relevant(name))
    return tuple((name, _bounded(environ[name])) for name in names[:_MOST_NAMES] if "@" not in environ[name])


def _is_relevant(name: str) -> bool:
    if name in _NAMES:
        return True
    return (
        name.startswith(_PREFIXES)
        and not name.endswith(_AMBIENT)
        and name not in _BY_NATURE
        and len(name) <= _MOST_NAME_CHARS
        and not is_secret(name)
    )


def _bounded(value: str) -> str:
    """The value, or its beginning and a checksum: a difference behind the beginning is one too."""
    if len(value) <= _MOST_VALUE_CHARS:
        return value
    import zlib

    checksum = zlib.crc32(value.encode(errors="surrogateescape"))
    return f"{value[:_MOST_VALUE_CHARS]}… ({len(value)} characters, {checksum:08x})"


# ------------------------------------------------------------------------------------------------ what is known to hang


class _Host(Value):
    """What the rules look at. ``versions``: numbers of nccl and torch; () where unknown."""

    context: CheckContext
    nccl: tuple[int, ...]
    torch: tuple[int, ...]
    machine: str

    def sets(self, name: str) -> bool:
        """Whether a variable is switched on."""
        return is_switched_on(self.context.environ, name)


class _KnownHang(Value):
    """A combination that hangs.

    ``is_certain``: jobs of any kind run into it. One that needs something that only the script knows is a fact for the
    report and worth no warning.
    """

    applies: Callable[[_Host], bool]
    message: str
    hint: str
    source: str
    is_certain: bool = True


# Only what maintainers or vendors have said.
_KNOWN: tuple[_KnownHang, ...] = (
    _KnownHang(
        lambda host: host.sets("CUDA_LAUNCH_BLOCKING") and (2, 13) <= host.nccl < (2, 17),
        "collectives of NCCL {nccl} are known to hang with CUDA_LAUNCH_BLOCKING",
        "unset CUDA_LAUNCH_BLOCKING, or install NCCL 2.17 or newer",
        "https://github.com/NVIDIA/nccl/issues/750, https://github.com/pytorch/pytorch/pull/97843",
    ),
    _KnownHang(
        # torch 2.7.0 alone chooses this mode by itself, where the script passes device_id.
        lambda host: (
            (2, 26) <= host.nccl < (2, 27)
            and (
                host.sets("TORCH_NCCL_USE_COMM_NONBLOCKING")
                or (host.torch[:3] == (2, 7, 0) and "TORCH_NCCL_USE_COMM_NONBLOCKING" not in host.context.environ)
            )
        ),
        "non-blocking communicators of NCCL {nccl}, which this torch may use, are known to hang",
        "set TORCH_NCCL_USE_COMM_NONBLOCKING=0, or install torch 2.7.1 or newer",
        "https://github.com/pytorch/pytorch/issues/153960, https://github.com/pytorch/pytorch/pull/154055",
    ),
    _KnownHang(
        lambda host: host.nccl[:3] == (2, 29, 2) and host.machine == "aarch64",
        "NCCL {nccl} is known to hang on Arm",
        "install NCCL 2.29.3 or newer",
        "https://github.com/NVIDIA/nccl/releases/tag/v2.29.3-1, https://github.com/pytorch/pytorch/pull/174338",
    ),
    _KnownHang(
        lambda host: host.nccl[:3] == (2, 25, 1),
        "NCCL {nccl} is known to hang when a communicator is aborted",
        "install NCCL 2.26.2 or newer",
        "https://github.com/pytorch/pytorch/issues/149153",
        is_certain=False,
    ),
    _KnownHang(
        lambda host: (2, 20) <= host.nccl < (2, 22),
        "NCCL {nccl} is known to hang when several CUDA graphs hold collectives",
        "install NCCL 2.22.3 or newer",
        "https://github.com/NVIDIA/nccl/issues/1251",
        is_certain=False,
    ),
    _KnownHang(
        lambda host: (2, 29, 7) <= host.nccl < (2, 30, 7) and host.context.spans_hosts,
        "NCCL {nccl} is known to hang on some clusters with InfiniBand",
        "set NCCL_PXN_DISABLE=1, or install NCCL 2.30.7 or newer",
        "https://docs.nvidia.com/cuda/cuest/troubleshooting/index.html",
        is_certain=False,
    ),
)


def check_versions(context: CheckContext) -> CheckResult:
    """What is installed, and whether it is known to hang together. Matters to NVIDIA's GPUs."""
    versions = read_versions(context)
    facts: list[tuple[str, str]] = list(versions.items())
    message = ", ".join(f"{name} {version}" for name, version in versions.items())
    if context.vendor != "nvidia" or "nccl" not in versions:
        return ok(message, facts)
    numbers = {name: numbers_of(version) for name, version in versions.items()}
    host = _Host(context, numbers["nccl"], numbers.get("torch", ()), os.uname().machine)
    found = [known for known in _KNOWN if known.applies(host)]
    facts += [
        ("known_hang", f"{known.message.format(nccl=versions['nccl'])} ({known.source}): {known.hint}")
        for known in found
    ]
    alone = context.nproc == 1 and not context.spans_hosts
    certain = [known for known in found if known.is_certain]
    if not certain or alone:
        return ok(message, facts)
    sentence = "; ".join(known.message.format(nccl=versions["nccl"]) for known in certain)
    return warning(sentence, "; ".join(known.hint for known in certain), facts)
