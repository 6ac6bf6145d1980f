"""Names that users set and that were renamed, removed or never existed, with the right ones and the source."""

from __future__ import annotations

from typing import Final, Literal

from saferun.model import Value

TORCH_NCCL: Final = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
TORCH_NCCL_CODE: Final = (
    "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
)
TORCH_FR_CODE: Final = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/FlightRecorder.hpp"
TORCH_DISTRIBUTED: Final = "https://docs.pytorch.org/docs/stable/distributed.html"
TORCH_DEBUGGING: Final = "https://docs.pytorch.org/docs/stable/debugging_environment_variables.html"
TORCH_ALLOCATOR: Final = "https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDAAllocatorConfig.h"
TORCH_DSA_CODE: Final = "https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDADeviceAssertionHost.cpp"
NCCL_ENV: Final = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
RCCL_ENV: Final = "https://rocm.docs.amd.com/projects/rccl/en/latest/api-reference/env-variables.html"
RCCL_DEBUG_CODE: Final = "https://github.com/ROCm/rccl/blob/develop/src/debug.cc"
HIP_ENV: Final = "https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html"
CUDA_ENV: Final = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables"
MKL_ON_AMD: Final = "https://documentation.sigma2.no/jobs/mkl.html"


class Advice(Value):
    """What is known about a name.

    Args:
        kind: ``renamed``: another name has replaced it; ``misconception``: it never did, or no longer does, what
            people set it for.
        instead: the name that is read instead, or "".
        sentence: what is wrong, to follow the variable's name.
        hint: what to do.
        source: where that is documented.
        still_read: today's software reads the old name too. Otherwise the advice does not hold where something
            installed does read it: an older release, or the user's own script.
        at_launch: whether it is printed at every launch.
    """

    kind: Literal["renamed", "misconception"]
    instead: str
    sentence: str
    hint: str
    source: str
    still_read: bool = False
    at_launch: bool = True


_TIMEOUT_HINT = "give the timeout to torch.distributed.init_process_group(timeout=...)"


def _old(new: str, source: str) -> Advice:
    """A name that torch still reads, with a warning of its own."""
    return Advice("renamed", new, f"torch reads {new} now, and warns of the old name", f"set {new}", source, True)


def _alias(new: str, sentence: str, source: str) -> Advice:
    """A name that works like the new one."""
    return Advice("renamed", new, sentence, f"set {new} in new scripts", source, still_read=True, at_launch=False)


def _never(sentence: str, hint: str, source: str, instead: str = "") -> Advice:
    return Advice("misconception", instead, sentence, hint, source)


def _removed(release: str, instead: str) -> Advice:
    hint = f"set {instead}" if instead else "unset it"
    return Advice("misconception", instead, f"NCCL has not read this since {release}", hint, NCCL_ENV)


ADVICE: Final[dict[str, Advice]] = {
    # torch.distributed
    "NCCL_ASYNC_ERROR_HANDLING": _old("TORCH_NCCL_ASYNC_ERROR_HANDLING", TORCH_NCCL_CODE),
    "NCCL_BLOCKING_WAIT": _old("TORCH_NCCL_BLOCKING_WAIT", TORCH_NCCL_CODE),
    "NCCL_DESYNC_DEBUG": _old("TORCH_NCCL_DESYNC_DEBUG", TORCH_NCCL_CODE),
    "NCCL_ENABLE_TIMING": _old("TORCH_NCCL_ENABLE_TIMING", TORCH_NCCL_CODE),
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": _old("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", TORCH_NCCL_CODE),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": _old("TORCH_FR_BUFFER_SIZE", TORCH_FR_CODE),
    "TORCH_NCCL_TRACE_CPP_STACK": _old("TORCH_FR_CPP_STACK", TORCH_FR_CODE),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": _old("TORCH_FR_DUMP_TEMP_FILE", TORCH_FR_CODE),
    "NCCL_ENABLE_MONITORING": _never(
        "nothing reads this name", "set TORCH_NCCL_ENABLE_MONITORING", TORCH_NCCL_CODE, "TORCH_NCCL_ENABLE_MONITORING"
    ),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Advice(
        "misconception",
        "",
        "what it asks for is torch's default now",
        "unset it",
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
        still_read=True,
        at_launch=False,
    ),
    "NCCL_TIMEOUT": _never("neither torch nor NCCL reads this name", _TIMEOUT_HINT, TORCH_DISTRIBUTED),
    "RCCL_TIMEOUT": _never("neither torch nor RCCL reads this name", _TIMEOUT_HINT, RCCL_ENV),
    "TORCH_NCCL_TIMEOUT": _never("torch does not read this name", _TIMEOUT_HINT, TORCH_NCCL_CODE),
    "TORCH_DISTRIBUTED_TIMEOUT": _never("torch does not read this name", _TIMEOUT_HINT, TORCH_DISTRIBUTED),
    "GLOO_TIMEOUT": _never("neither torch nor gloo reads this name", _TIMEOUT_HINT, TORCH_DISTRIBUTED),
    "GLOO_TIMEOUT_SECONDS": _never("neither torch nor gloo reads this name", _TIMEOUT_HINT, TORCH_DISTRIBUTED),
    "TORCHELASTIC_TIMEOUT": _never(
        "torch does not read this name", "pass --rdzv-conf join_timeout=SECONDS", TORCH_DISTRIBUTED
    ),
    "TORCH_DIST_INIT_BARRIER_TIMEOUT": _never(
        "torch does not read this name: it has TORCH_DIST_INIT_BARRIER (0 or 1), and no variable for the timeout",
        _TIMEOUT_HINT,
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/distributed_c10d.py",
    ),
    "TORCH_DISTRIBUTED_DETAIL": _never(
        "torch does not read this name: DETAIL is a value of TORCH_DISTRIBUTED_DEBUG",
        "set TORCH_DISTRIBUTED_DEBUG=DETAIL",
        TORCH_DISTRIBUTED,
        "TORCH_DISTRIBUTED_DEBUG",
    ),
    "TORCH_LOG_LEVEL": _never(
        "torch does not read this name",
        "set TORCH_CPP_LOG_LEVEL for the C++ side, TORCH_LOGS for Python's",
        TORCH_DEBUGGING,
    ),
    # torch: memory, assertions
    "TORCH_USE_CUDA_DSA": _never(
        "this is a flag for building torch; at run time PYTORCH_USE_CUDA_DSA is read, and only by a torch so built",
        "set CUDA_LAUNCH_BLOCKING=1 to find the failing kernel, or build torch with the flag",
        TORCH_DSA_CODE,
        "PYTORCH_USE_CUDA_DSA",
    ),
    "PYTORCH_CUDA_ALLOC_CONF": _alias(
        "PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF is the name for all devices; this one still works", TORCH_ALLOCATOR
    ),
    "PYTORCH_HIP_ALLOC_CONF": _alias(
        "PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF is the name for all devices; this one still works", TORCH_ALLOCATOR
    ),
    # NCCL
    "NCCL_IB_CUDA_SUPPORT": _removed("2.4.0", "NCCL_NET_GDR_LEVEL"),
    "NCCL_IB_GDR_LEVEL": Advice(
        "renamed",
        "NCCL_NET_GDR_LEVEL",
        "it has been called NCCL_NET_GDR_LEVEL since NCCL 2.4.0",
        "set NCCL_NET_GDR_LEVEL",
        NCCL_ENV,
    ),
    "NCCL_SINGLE_RING_THRESHOLD": _removed("2.3", ""),
    "NCCL_LL_THRESHOLD": _removed("2.5", "NCCL_PROTO"),
    "NCCL_TREE_THRESHOLD": _removed("2.5", "NCCL_ALGO"),
    "NCCL_MAX_NRINGS": _alias("NCCL_MAX_CTAS", "NCCL_MAX_CTAS has replaced it; this name still works", NCCL_ENV),
    "NCCL_MIN_NRINGS": _alias("NCCL_MIN_CTAS", "NCCL_MIN_CTAS has replaced it; this name still works", NCCL_ENV),
    "NCCL_MAX_NCHANNELS": _alias("NCCL_MAX_CTAS", "NCCL_MAX_CTAS has replaced it; this name still works", NCCL_ENV),
    "NCCL_MIN_NCHANNELS": _alias("NCCL_MIN_CTAS", "NCCL_MIN_CTAS has replaced it; this name still works", NCCL_ENV),
    "NCCL_IFNAME": _never("nothing reads this name", "set NCCL_SOCKET_IFNAME", NCCL_ENV, "NCCL_SOCKET_IFNAME"),
    "NCCL_LOG_LEVEL": _never("nothing reads this name", "set NCCL_DEBUG", NCCL_ENV, "NCCL_DEBUG"),
    "NCCL_DEBUG_LEVEL": _never("nothing reads this name", "set NCCL_DEBUG", NCCL_ENV, "NCCL_DEBUG"),
    # RCCL takes NCCL's names.
    "RCCL_DEBUG": _never("RCCL reads NCCL_DEBUG", "set NCCL_DEBUG", RCCL_DEBUG_CODE, "NCCL_DEBUG"),
    "RCCL_DEBUG_FILE": _never("RCCL reads NCCL_DEBUG_FILE", "set NCCL_DEBUG_FILE", RCCL_DEBUG_CODE, "NCCL_DEBUG_FILE"),
    "RCCL_DEBUG_SUBSYS": _never(
        "RCCL reads NCCL_DEBUG_SUBSYS", "set NCCL_DEBUG_SUBSYS", RCCL_DEBUG_CODE, "NCCL_DEBUG_SUBSYS"
    ),
    # gloo
    "GLOO_IFNAME": _never("nothing reads this name", "set GLOO_SOCKET_IFNAME", TORCH_DISTRIBUTED, "GLOO_SOCKET_IFNAME"),
    # CUDA, MKL
    "CUDA_DEVICES": _never(
        "CUDA does not read this name", "set CUDA_VISIBLE_DEVICES", CUDA_ENV, "CUDA_VISIBLE_DEVICES"
    ),
    "MKL_DEBUG_CPU_TYPE": _never("MKL has not read this since its 2020 releases", "unset it", MKL_ON_AMD),
}

# Families whose names users confuse: the same variable with the other's prefix. Left: what users write. Right: what may
# be meant.
SWAPPED_PREFIXES: Final[tuple[tuple[str, str], ...]] = (
    ("NCCL_", "TORCH_NCCL_"),
    ("TORCH_NCCL_", "NCCL_"),
    ("TORCH_NCCL_", "TORCH_FR_"),
    ("TORCH_INDUCTOR_", "TORCHINDUCTOR_"),
    ("TORCH_DYNAMO_", "TORCHDYNAMO_"),
    ("TORCH_ELASTIC_", "TORCHELASTIC_"),
    ("TORCH_", "PYTORCH_"),
    ("PYTORCH_", "TORCH_"),
    ("RCCL_", "NCCL_"),
    ("TORCH_RCCL_", "TORCH_NCCL_"),
    ("GLOO_", "TORCH_GLOO_"),
    ("TORCH_", "TORCHELASTIC_"),
    ("TORCH_", "TORCHINDUCTOR_"),
    ("TORCH_", "TORCHDYNAMO_"),
)

# Misspelt prefixes. They cannot be found by similarity: HCCL_, CCL_, ACCL_ and MSCCL_ exist.
MISSPELT_PREFIXES: Final[dict[str, str]] = {
    "NCLL_": "NCCL_",
    "NNCL_": "NCCL_",
    "NCL_": "NCCL_",
    "NCCCL_": "NCCL_",
    "NVCCL_": "NCCL_",
    "RCLL_": "RCCL_",
    "GLO_": "GLOO_",
    "GLLO_": "GLOO_",
    "GOLO_": "GLOO_",
    "TROCH_": "TORCH_",
    "TOCH_": "TORCH_",
    "TORHC_": "TORCH_",
    "PYTROCH_": "PYTORCH_",
    "PYTOCH_": "PYTORCH_",
    "TORCHINDUCTER_": "TORCHINDUCTOR_",
    "TORCHINDUCTR_": "TORCHINDUCTOR_",
    "TORCHDYANMO_": "TORCHDYNAMO_",
    "TORCHDYNMO_": "TORCHDYNAMO_",
    "CDUA_": "CUDA_",
    "CUAD_": "CUDA_",
    "CUD_": "CUDA_",
    "OPM_": "OMP_",
}
