"""Families of environment variables: their prefixes, and the libraries that read them."""

from __future__ import annotations

import re

from saferun.model import Value


class Family(Value):
    """The variables of one software.

    Args:
        name: the software's name.
        prefixes: the prefixes of its variables.
        owners: how the file names of the libraries that read them start. Only with one of these searched may it be said
            that nothing reads a name.
        sentinels: a library that holds all of these as separate strings is an owner too (static linking).
        composed: the library composes names at run time, so a name may be read that its file does not hold.
    """

    name: str
    prefixes: tuple[str, ...]
    owners: tuple[str, ...]
    sentinels: tuple[str, ...] = ()
    composed: bool = False


_HIP_OWNERS = ("libamdhip64.so",)
_TORCH_PREFIXES = ("TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCHELASTIC_")
_TORCH_OWNERS = ("libtorch_cpu.so", "libtorch.so")
_MCA_OWNERS = ("libopen-pal.so", "libmpi.so", "libprrte.so")

FAMILIES: tuple[Family, ...] = (
    # TorchX, TorchServe and the like, which may be installed elsewhere: on the host that launched the job, say.
    Family("torch-like", ("TORCH",), (), composed=True),
    Family("torch", (*_TORCH_PREFIXES, "KINETO_", "ATEN_", "FBGEMM_", "AOTINDUCTOR_", "AOT_INDUCTOR_"), _TORCH_OWNERS),
    Family("torchrun", ("PET_",), _TORCH_OWNERS),
    Family("gloo", ("GLOO_",), ("libtorch_cpu.so", "libgloo.so"), ("GLOO_SOCKET_IFNAME",)),
    Family("NCCL", ("NCCL_",), ("libnccl.so", "librccl.so"), ("NCCL_BUFFSIZE", "NCCL_SHM_DISABLE")),
    Family("RCCL", ("RCCL_",), ("librccl.so",)),
    Family("CUDA", ("CUDA",), ("libcuda.so",)),
    Family("cuBLAS", ("CUBLAS_", "CUBLASLT_"), ("libcublas.so", "libcublasLt.so")),
    Family("cuDNN", ("CUDNN_",), ("libcudnn.so",)),
    Family("NVSHMEM", ("NVSHMEM_",), ("libnvshmem_host.so",)),
    Family("HIP", ("HIP_", "AMD_", "ROC_"), _HIP_OWNERS),
    Family("ROCr", ("HSA_", "ROCR_"), ("libhsa-runtime64.so",)),
    Family("ROCm", ("ROCM_", "HIPCC_", "ROCPROF", "ROCTRACER_"), ("librocprofiler",), composed=True),
    Family("rocBLAS", ("ROCBLAS_", "TENSILE_"), ("librocblas.so",)),
    Family("hipBLASLt", ("HIPBLASLT_",), ("libhipblaslt.so",)),
    Family("MIOpen", ("MIOPEN_",), ("libMIOpen.so",)),
    Family("UCX", ("UCX_",), ("libucs.so",), composed=True),
    Family("UCC", ("UCC_",), ("libucc.so",), composed=True),
    Family("libfabric", ("FI_",), ("libfabric.so",), composed=True),
    Family("Open MPI", ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_"), _MCA_OWNERS, composed=True),
    Family("OpenMP", ("OMP_",), ("libgomp", "libiomp5", "libomp")),
    Family("GNU OpenMP", ("GOMP_",), ("libgomp",)),
    Family("LLVM and Intel OpenMP", ("KMP_",), ("libiomp5", "libomp")),
    Family("MKL", ("MKL_",), ("libmkl_core", "libmkl_rt"), ("MKL_VERBOSE", "MKL_DISABLE_FAST_MM")),
    Family("oneDNN", ("ONEDNN_", "DNNL_", "MKLDNN_"), ("libdnnl.so",), ("ONEDNN_", "ONEDNN_CACHE_CONTEXT_UNSAFE")),
    Family("XLA", ("XLA_", "PJRT_"), ("_XLAC", "libtpu.so")),
    Family("Triton", ("TRITON_",), ("libtriton.so",)),
)

# Variables that name a library which NCCL loads, and which may read names of its own.
NCCL_PLUGINS = ("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_ENV_PLUGIN", "NCCL_GIN_PLUGIN")

PREFIXES: tuple[str, ...] = tuple(prefix for family in FAMILIES for prefix in family.prefixes)

# Prefixes that a library keeps as a string of their own and joins with a second string: ONEDNN_ and VERBOSE.
COMPOSED_PREFIXES: tuple[str, ...] = ("ONEDNN_", "DNNL_", "MKLDNN_", "UCX_", "UCC_")

_BY_PREFIX = sorted(
    ((prefix, family) for family in FAMILIES for prefix in family.prefixes), key=lambda row: -len(row[0])
)

# Set by container images, module files and build scripts for paths and releases: these are no settings, and no library
# reads them.
_AMBIENT = re.compile(
    r"_(?:VERSION|VER|HOME|ROOT|DIR|PATH|PREFIX|BASE|BIN|INC|INCLUDES?|INCLUDE_(?:DIRS?|PATH)|LIBS?|LIBRAR(?:Y|IES)"
    r"|LIB(?:RARY)?_(?:DIRS?|PATH)|SRC|SOURCE|INSTALL|MODULE|TARGETS?|ARCH(?:S|_LIST|ITECTURES?)?|[CX]*FLAGS|PKG|URL"
    r"|INSTALL_(?:DIR|PATH|PREFIX)|TOOLKIT_ROOT_DIR|BUILD|RELEASE|GITHUB|NUMBER|COMPONENT_LIST"
    r"|COMPILER|RUNTIME|PLATFORM)$|^(?:CUDA(?:CXX|HOSTCXX|FLAGS|ARCHS))$"
)

# Parts of the names of variables that only torch's GPU builds read.
_ACCELERATOR = re.compile(
    r"(?:^|_)(?:NCCL2?|CUDA|CUDNN|CUBLAS|CUBLASLT|CUSOLVER|HIP|HIPBLASLT|HIPSOLVER|ROCM|ROCBLAS|MIOPEN|XPU|GPU|MPS|MTIA"
    r"|SYMMM?EM|SYMM|NVSHMEM|TUNABLEOP|TF32|NVRTC|KERNEL|ROCSHMEM|DSA)(?:_|$)"
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{1,127}")


def family_of(name: str) -> Family | None:
    """The family of a variable by its longest prefix; None if it is not a known library's setting."""
    if not name.startswith(PREFIXES) or not _NAME.fullmatch(name):
        return None
    for prefix, family in _BY_PREFIX:
        if name.startswith(prefix):
            return family
    return None


def is_ambient(name: str) -> bool:
    """Whether a variable only names a path or a release."""
    return _AMBIENT.search(name) is not None


def is_for_accelerators(name: str) -> bool:
    """Whether only GPU builds of torch can read a name."""
    return _ACCELERATOR.search(name) is not None
