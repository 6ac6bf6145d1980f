"""The torch that the ranks will import: what its files tell, and running it in a child."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NoReturn

from saferun.errors import EXIT_USAGE, SaferunError, UsageError
from saferun.linux.child_output import run_program
from saferun.linux.children import SpawnError
from saferun.linux.installed_versions import parse_assignments
from saferun.linux.small_files import read_text
from saferun.model import ExitStatus, Value

_KINDS = frozenset({"auto", "cpu", "gpu", "xpu"})
# c10/core/DeviceType.h, and names of backends that are installed beside torch.
_DEVICE_TYPES = frozenset(
    "cuda mkldnn opengl opencl ideep hip ve fpga maia xla lazy vulkan mps meta hpu mtia ipu xpu privateuseone npu mlu "
    "musa gcu tpu rocm".split()
)
_INSTEAD = "give --nproc-per-node as a number, or as cpu for one rank a processor"
_NOTICE_S = 60.0
_ANSWER = b"\nsaferun-answer "  # importing torch may print something before it

# One write below PIPE_BUF, which output of other threads cannot split, and then a quick exit: a driver's destructors
# may take seconds. A ValueError during the import is not caught: it means a broken torch, and no refusal.
_ASK = """
import os, sys
from torch.distributed.run import determine_local_world_size
try:
    answer = "count %s" % determine_local_world_size(sys.argv[1])
except ValueError as error:
    answer = "refused " + " ".join(str(error).split())
sys.stdout.flush()
os.write(1, ("\\nsaferun-answer " + answer[:500] + "\\n").encode())
os._exit(0)
"""


def _ignore(_waited_s: float) -> None:
    """No line is printed."""


class TorchBuild(Value):
    """What torch was built for: a CUDA release (``12.8``), a HIP release, or neither."""

    cuda: str | None
    hip: str | None
    for_cpu_only: bool

    @property
    def vendor(self) -> Literal["nvidia", "amd"] | None:
        """The vendor of the GPUs that it calls ``cuda``."""
        return "amd" if self.hip else "nvidia" if self.cuda else None


def read_torch_build() -> TorchBuild | None:
    """Read the version file of the torch that this interpreter would import; None if there is none."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
    except (ImportError, ValueError, AttributeError):
        return None
    directories = spec.submodule_search_locations if spec is not None else None
    return parse_version_file(read_text(f"{directories[0]}/version.py")) if directories else None


def parse_version_file(text: str) -> TorchBuild | None:
    """Parse ``torch/version.py``; None if it is not the file of a released torch."""
    values = parse_assignments(text)
    if not {"__version__", "cuda", "hip"} <= values.keys():
        return None
    cuda, hip = values["cuda"], values["hip"]
    # Older releases do not have Intel's GPUs here; their version tells whether they are for the CPU only.
    other = values["xpu"] is not None if "xpu" in values else not str(values["__version__"]).endswith("+cpu")
    return TorchBuild(cuda, hip, not (cuda or hip or other))


def may_load_backends(environ: Mapping[str, str], path: Sequence[str] | None = None) -> bool:
    """Whether importing torch may load an out-of-tree backend: a package with a ``torch.backends`` entry point.

    The packages' metadata are searched as text: importing ``importlib.metadata`` takes longer than all of the start-up.

    Args:
        environ: the ranks' environment; ``TORCH_DEVICE_BACKEND_AUTOLOAD`` switches such backends off.
        path: the directories with packages, by default this interpreter's.

    Source: PyTorch documentation, "Autoloading Out-of-Tree Extension"; PyPA, "Entry points specification".
    """
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    for directory in sys.path if path is None else path:
        if os.path.isfile(directory):
            return True  # an archive, which is not searched
        try:
            names = os.listdir(directory or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) or name == "EGG-INFO":
                text = read_text(os.path.join(directory, name, "entry_points.txt"))
                if any(line.strip() == "[torch.backends]" for line in text.splitlines()):
                    return True
    return False


def ask_torch(
    python: str,
    kind: str,
    environ: Mapping[str, str],
    on_wait: Callable[[float], None] = _ignore,
    *,
    notice_s: float = _NOTICE_S,
) -> int:
    """The number of ranks that torchrun itself would get from that interpreter's torch.

    As under torchrun it may take as long as it wants: importing torch from a busy network file system takes minutes.

    Args:
        python: the interpreter.
        kind: ``auto``, ``cpu``, ``gpu``, ``xpu`` or the name of an out-of-tree backend.
        environ: the ranks' environment.
        on_wait: takes how long it has taken so far, in seconds, while there is no answer.
        notice_s: how often that is called.

    Raises:
        UsageError: torch has no such device.
        SaferunError: there are no such devices, or torch is missing or broken.
    """
    try:
        # -P: a torch.py in the current directory is not torch.
        output, status = run_program([python, "-P", "-c", _ASK, kind], environ, notice_s, errors=True, on_wait=on_wait)
    except SpawnError as error:
        raise SaferunError(
            f"cannot start {python} to ask torch what --nproc-per-node {kind} means: {os.strerror(error.errno)}",
            "check the path of the interpreter, or give --nproc-per-node as a number",
        ) from None
    _, found, rest = output.rpartition(_ANSWER)
    if not found:
        _explain_failure(python, kind, output, status)
    word, _, text = rest.partition(b"\n")[0].decode(errors="replace").partition(" ")
    if word == "count" and text.isdecimal() and int(text) >= 1:
        return int(text)
    if word == "refused" and kind not in _KINDS and "nsupported" in text:
        refuse_name(kind)
    tools, mask = "nvidia-smi or rocm-smi lists", "CUDA_VISIBLE_DEVICES"
    if kind == "xpu":
        tools, mask = "xpu-smi lists", "ZE_AFFINITY_MASK"
    raise SaferunError(
        f"--nproc-per-node {kind}: torch says: {text if word == 'refused' else f'the number of devices is {text}'}",
        f"see whether {tools} the devices, {mask} hides none and the torch of {python} is built for them; or "
        f"{_INSTEAD}",
        exit_code=EXIT_USAGE,
    )


def refuse(value: str, why: str) -> NoReturn:
    """Refuse a value of ``--nproc-per-node``."""
    raise UsageError(
        f"--nproc-per-node {value[:80]!r} {why}",
        "give a number of ranks, or one of auto, cpu, gpu, xpu, or the name of an installed torch backend",
    )


def refuse_name(value: str) -> NoReturn:
    """Refuse a name in ``--nproc-per-node`` that stands for no devices of the torch here."""
    if value in {"cuda", "hip", "rocm"}:
        raise UsageError(
            f"--nproc-per-node {value!r} is no device that torch knows here", "these devices are called gpu"
        )
    is_device = value in _DEVICE_TYPES
    refuse(value, "is no device that torch knows here" if is_device else "is neither a number nor a device type")


def _explain_failure(python: str, kind: str, output: bytes, status: ExitStatus | None) -> NoReturn:
    lines = [line.rstrip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    # An exception's message may have several lines: the one with its name tells most.
    named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    last = (named or lines or ["no output"])[-1].strip()[:300]
    if "No module named 'torch'" in last:
        raise SaferunError(
            f"{python} has no torch, so it is not known what --nproc-per-node {kind} means",
            f"install torch there, or start saferun with the interpreter that has it; or {_INSTEAD}",
        )
    how = status.description if status is not None else "its exit code is not known"
    raise SaferunError(
        f"torch could not be asked what --nproc-per-node {kind} means ({how}): {last}",
        f"see whether `{python} -c 'import torch'` works; or {_INSTEAD}",
    )
