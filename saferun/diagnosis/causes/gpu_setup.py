"""GPU errors whose words tell what is wrong with the set-up: kernels for other GPUs, peer access, MPS. Pure.

They come at the call that they name: it shows nothing more to run the job without asynchronous launches.
"""

from __future__ import annotations

from saferun.diagnosis.causes.texts import TextRule
from saferun.diagnosis.lazy_patterns import LazyPattern

MPS_ADVICE = (
    "look at the MPS daemon of this host: whether nvidia-cuda-mps-control runs, what its log says "
    "(CUDA_MPS_LOG_DIRECTORY), and whether the ranks have the same CUDA_MPS_PIPE_DIRECTORY and see it in the container"
)
_NO_KERNEL = "the program has no kernel image for this GPU"
_FAILURE = r"(?:[Cc]uda|HIP) failure (?:\d{1,4} )?'"

IN_NCCL = (
    TextRule(
        "cuda_error",
        LazyPattern(
            rf"{_FAILURE}(named symbol not found|no kernel image is available.{{0,60}}|invalid device function"
            r"|(?:device )?kernel image is invalid|the provided PTX was compiled .{0,60})'"
        ),
        "NCCL has no kernel for this GPU: {0}",
        "install a build of NCCL (with torch, in most cases) that knows this GPU's architecture; look at "
        "LD_LIBRARY_PATH, LD_PRELOAD and VLLM_NCCL_SO_PATH for an older one",
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(rf"{_FAILURE}(peer access is not supported.{{0,60}}?)'"),
        "CUDA error in NCCL: {0}",
        "NCCL_P2P_DISABLE=1 does without; `nvidia-smi topo -p2p r` shows which GPUs of this host reach each other "
        "directly",
        in_last_lines=True,
    ),
)
"""Calls of CUDA or HIP that NCCL made."""

OF_SETUP = (
    TextRule(
        "hip_error",
        LazyPattern(
            r"\b(?:HIP|ROCm) (?:runtime )?error: (?:invalid device function|no kernel image is available"
            r"|(?:device )?kernel image is invalid)|hipError(?:InvalidDeviceFunction|NoBinaryForGpu)"
            r"|\brocBLAS error: Cannot read .{0,300}\bTensileLibrary"
        ),
        _NO_KERNEL,
        "install a build of torch and ROCm, and of each compiled extension (PYTORCH_ROCM_ARCH), that knows this GPU's "
        "architecture (rocminfo names it); HSA_OVERRIDE_GFX_VERSION lets it use the kernels of a GPU that is alike",
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(r"Triton Error \[CUDA\]: (device kernel image is invalid)"),
        "CUDA error: {0}",
        "Triton's kernel was compiled for another GPU, or by a ptxas that does not fit the driver: delete its cache "
        "(TRITON_CACHE_DIR, ~/.triton), give hosts with other GPUs one each, and update Triton for a newer GPU",
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            r"\bCUDA (?:driver |runtime )?error: (MPS (?:client|server) .{1,120}"
            r"|the remote procedural call to the MPS server failed)|\b(cudaErrorMps\w{1,40}|CUDA_ERROR_MPS_\w{1,40})"
        ),
        lambda _, match: f"CUDA error: {match[1] or match[2]}",
        MPS_ADVICE,
        in_last_lines=True,
    ),
)
"""All others."""
