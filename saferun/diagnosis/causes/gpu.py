"""What goes wrong on GPUs, by the messages of CUDA, HIP and torch. Pure.

Sources: the error names of the CUDA and HIP runtimes; messages of torch's CUDA allocator and device checks.
"""

from __future__ import annotations

from saferun.diagnosis.causes.failure import Failure, cause, shortened
from saferun.diagnosis.causes.gpu_setup import IN_NCCL, MPS_ADVICE, OF_SETUP
from saferun.diagnosis.causes.kernel_checks import after_check
from saferun.diagnosis.causes.quotations import without_quotations
from saferun.diagnosis.causes.shared_gpus import others_use_it
from saferun.diagnosis.causes.texts import TextRule, by_text, final_lines, first_line, in_all, reported_lines
from saferun.diagnosis.gpu_errors import GpuError, error_in, failure_text
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_ILLEGAL = LazyPattern(
    r"an illegal memory access was encountered|(?:cuda|hip)ErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS"
    r"|Memory access fault by GPU node-\d{1,3}"
)
# In the kernel log.
_PAGE_FAULT = LazyPattern(r"\bamdgpu\b.{0,80}\[(?:gfx|mm)hub\d{0,3}\] .{0,30}page fault")
_HIP = LazyPattern(
    r"\bHIP\b|\bamdgpu\b|\bHIP[A-Z]{1,12}_|\bhip[A-Z_]|\bhipify\b|HSA_|by GPU node-|ROCm|rocm|MIOpen|miopen"
    r"|\b(?:roc|hip)(?:[Bb][Ll][Aa][Ss]|FFT|fft|SOLVER|SPARSE|solver|sparse|rand|RAND)"
)
_ASSERT = LazyPattern(
    r"device-side assert triggered|(?:cuda|hip)ErrorAssert\b|CUDA_ERROR_ASSERT|HSA_STATUS_ERROR_EXCEPTION.{0,120}0x1016"
    r"|\bblock: \[\d.{0,40}thread: \[\d.{0,40}Assertion .{1,300} failed"
)
_ASSERTION = LazyPattern(r"(?:block: \[|thread: \[).{0,200}?Assertion (.{1,300}?) failed")
_LATE = "GPU errors are reported at a later call than the one that made them"
_SYNCHRONOUS = f"run it once with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer: {_LATE}"
_SYNCHRONOUS_HIP = f"run it once with AMD_SERIALIZE_KERNEL=3 and HIP_LAUNCH_BLOCKING=1: {_LATE}"

_OUT_OF_MEMORY = LazyPattern(
    r"(?:CUDA|HIP|XPU|MPS) (?:(?:driver |runtime )?error: )?out of memory|RESOURCE_EXHAUSTED: Out of memory"
    r"|\bcupy\S{1,60}OutOfMemoryError|\bOOM when allocating tensor|torch\.(?:cuda\.)?OutOfMemoryError"
    r"|C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED|(?<!on host: )CUDA_ERROR_OUT_OF_MEMORY"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|(?:[Cc]uda|HIP) failure (?:\d{1,4} )?'out of memory'|Failed to CUDA (?:host )?[mc]alloc (?:async )?\d{6}"
    # SGLang.
    r"|\bNot enough memory\b.{0,40}\bmem-fraction-static"
)
# What Python code raises of a wrong value, and no wrapper of such an error.
_OF_A_VALUE = LazyPattern(
    r"(?:Key|Value|Type|Assertion)Error: (?!.{0,400}(?:[Tt]ried to allocate|out of memory(?:[.:;,!)'\"]|$)))"
)
_WHOSE_MEMORY = LazyPattern(r"\b(CUDA|HIP|XPU|MPS) (?:error: )?out of memory")
_TRIED = LazyPattern(r"[Tt]ried to allocate (?:more than )?([\d.]{1,12} ?\w{1,5})")
_CAPACITY = LazyPattern(
    r"GPU (\d{1,3}).{0,3}? has a total capacity of ([\d.]{1,12} \w{1,5}) of which ([\d.]{1,12} \w{1,5}) is free"
)
_OLD_CAPACITY = LazyPattern(
    r"\(GPU (\d{1,3}); ([\d.]{1,12} \w{1,5}) total capacity;.{0,160}?([\d.]{1,12} \w{1,5}) free;"
)

_LONGEST_MESSAGE = 4000

_HARDWARE = LazyPattern(
    r"uncorrectable ECC error(?!s? ?[:=])|ECCUncorrectable|fallen off the bus|GPU is lost|hardware stack error"
    r"|Invalid access of peer GPU memory"
    r"|uncorrectable NVLink error|cudaErrorNvlinkUncorrectable|Unable to determine the device handle for G[Pp][Uu]"
    r"|\bGPU\b.{0,40}\brequires (?:a )?re(?:set|boot)\b|Reboot the system to recover this GPU"
)
_GPU_TERMS = LazyPattern(r"CUDA|\bHIP(?:\b|[A-Z]{0,12}_|Error)|NCCL|RCCL|[Cc]uda failure|HSA_")
_OUT_OF_USE = "take this GPU out of use, and report it to whoever runs this host"
_FEWER_GPUS = "there are fewer GPUs than ranks: look at --nproc-per-node and CUDA_VISIBLE_DEVICES"
_DRIVER = "look at what nvidia-smi or rocm-smi says on this host, in this container"
_MISSING: tuple[TextRule, ...] = tuple(
    TextRule("missing_gpu", LazyPattern(pattern), message, advice, in_context=True, in_last_lines=True)
    for pattern, message, advice in (
        (
            r"system not yet initialized|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY",
            "the GPUs are not ready: the NVIDIA fabric manager has not set up the NVSwitches (CUDA error 802)",
            "install the driver's version of it, and run `systemctl start nvidia-fabricmanager`",
        ),
        (
            r"forward compatibility was attempted|unsupported display driver / cuda driver combination",
            "the CUDA libraries and the GPU's driver are incompatible",
            "use a build of torch for the CUDA that this driver knows (nvidia-smi shows it), or a newer driver",
        ),
        (
            r"\bError 805: MPS client failed to connect\b",
            "the GPU cannot be used: its MPS server does not answer (CUDA error 805)",
            MPS_ADVICE,
        ),
        (
            r"driver on your system is too old|CUDA driver version is insufficient|cudaErrorInsufficientDriver",
            "the GPU's driver is too old for the CUDA of this torch",
            "install a newer driver on the host, or a build of torch for the CUDA that this driver knows (nvidia-smi)",
        ),
        (
            (
                r"invalid device ordinal|(?:cuda|hip)ErrorInvalidDevice\b"
                r"|\bdevice >= 0 && device < (?:num_gpus|device_count) INTERNAL ASSERT FAILED"
            ),
            "no GPU of that number (invalid device ordinal)",
            _FEWER_GPUS,
        ),
        (
            r"Torch not compiled with (CUDA|ROCm|XPU) enabled",
            "torch is built without {0}",
            "install a build of torch for this host's GPUs, or run on the CPU with the backend gloo",
        ),
        (
            r"module 'torch\._C' has no attribute '_cuda_\w{1,60}'",
            "torch is built without GPU support",
            "install a build of torch for this host's GPUs, or run on the CPU with the backend gloo",
        ),
        (
            r"doesn't have (NCCL|RCCL) built in",
            "torch is built without {0}",
            "use the backend gloo, or install a build of torch for this host's GPUs",
        ),
        (
            (
                r"No (?:CUDA|HIP) GPUs are available|no (?:CUDA|ROCm)-capable device|(?:cuda|hip)ErrorNoDevice"
                r"|no GPUs found|torch\.cuda\.is_available\(\) is False|^No devices were found$"
                r"|\b[Nn]umber of (?:\w{1,12} )?devices should be greater than (?:zero|0)\b"
            ),
            "no GPU is visible",
            f"{_DRIVER}, and at CUDA_VISIBLE_DEVICES",
        ),
        (
            (
                r"\bNVMLError_(?!GpuIsLost|NotSupported|NoPermission|NotFound|InsufficientSize)\w{1,40}"
                r"|NVML Shared Library Not Found|could not select device driver|[Ff]ailed to initialize NVML"
                r"|NVIDIA-SMI has failed because|nvml error: (?:driver|no|insufficient)"
                r"|Found no NVIDIA driver|CUDA unknown error - this may be due to"
                r"|CUDA driver initialization failed"
                r"|Unexpected error from (?:cuda|hip)GetDeviceCount"
            ),
            "the GPU's driver cannot be used",
            _DRIVER,
        ),
    )
)
_WHO_USES_IT = "see what uses it (nvidia-smi, rocm-smi)"
_BUSY = (
    TextRule(
        "gpu_busy",
        LazyPattern(
            r"exclusive-thread device already in use|(?:cuda|hip)ErrorDeviceAlreadyInUse|hipErrorContextAlreadyInUse"
        ),
        "the GPU is in exclusive mode, and another process has it",
        f"{_WHO_USES_IT}; `nvidia-smi -c 0` lets several processes use it",
        in_context=True,
        in_last_lines=True,
    ),
    TextRule(
        "gpu_busy",
        LazyPattern(
            r"(?:CUDA|HIP|ROCm)-capable device(?:\(s\)|s) (?:is/)?are busy or unavailable"
            r"|(?:cuda|hip)ErrorDevicesUnavailable|CUDA_ERROR_DEVICE_UNAVAILABLE"
        ),
        "the GPU is busy or unavailable",
        f"{_WHO_USES_IT}, whether it is in exclusive mode, and whether an MPS server holds it",
        in_context=True,
        in_last_lines=True,
    ),
)
_IN_NCCL = (
    *IN_NCCL,
    TextRule(
        "cuda_error",
        LazyPattern(
            r"(?:[Cc]uda|HIP) failure (?:\d{1,4} )?'(.{1,160}?)'"
            r"|NCCL WARN ((?:hip|cu(?:da)?)[A-Z]\w{1,40} failed ?:.{1,120})"
        ),
        lambda _, match: f"CUDA error: {match[1] or match[2]}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
)
_NO_HANDLE = LazyPattern(r"\bCU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED\b")
_ABOUT_A_HANDLE = (
    "most often the GPU has no memory left for the library: look at what uses it (nvidia-smi), use a smaller batch; "
    f"else an earlier kernel failed: {_SYNCHRONOUS}"
)
# What cudaGetErrorString() and hipGetErrorString() say of a call, where the text is no other program's.
_GPU_MESSAGES = (
    r"(?:unspecified launch failure|misaligned address|an illegal instruction was encountered|invalid program counter"
    r"|operation not supported on (?:global/shared|global or shared) address space"
    r"|invalid device (?:pointer|function|symbol)"
    r"|too many resources requested for launch|the launch timed out and was terminated|invalid resource handle"
    r"|(?:device kernel image|kernel image) is invalid|no kernel image is available|invalid kernel image"
    r"|peer access (?:is|has|was) (?:not|already) \w{1,12}|operation (?:not permitted"
    r"|would make .{1,40}) when stream is captur"
    r"|PTX JIT compil\w{1,12}|PTX was compiled with an unsupported toolchain|invalid configuration argument"
    r"|driver shutting down|context is destroyed|exclusive-thread device already in use|invalid device context"
    r"|__(?:global|device)__ function call is not configured|cooperative launch too large"
    r"|setting the device when a process is active|stale (?:graph|stream) handle|peer mapping resources exhausted"
    r"|the operation cannot be performed in the present state|CUDA driver is a stub library"
    r"|shared object (?:symbol not found|initialization failed)|named symbol not found"
    r"|(?:API call is not supported|system has unsupported) .{0,20}(?:CUDA|display) driver"
    r"|the remote procedural call to the MPS server failed|MPS server is not ready"
    r"|part or all of the requested memory range is already mapped|maximum number of MPS)"
)
# What other programs report too.
_GENERAL_MESSAGES = (
    r"(?:invalid argument|initialization error|unknown error|out of memory|not supported|invalid value|not initialized"
    r"|execution failed|internal error|mapping (?:error|failed)|not permitted|not ready|not found)"
)
_OTHER = (
    *OF_SETUP,
    TextRule(
        "cuda_error",
        LazyPattern(r"THCudaCheck FAIL .{0,300}error=\d{1,4} ?: (.{1,160})"),
        "CUDA error: {0}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            r"no kernel image is available for execution|\bCUDA error: invalid device function"
            r"|(?:cuda|hip)ErrorNoKernelImageForDevice"
            r"|\binvalid value for .{0,4}gpu-architecture"
            r"|[Uu]nsupported (?:gpu|GPU|CUDA|compute) (?:architecture|capability)"
            r"|\b(?:sm_|gfx)\d{2,4}\w?\b.{0,60}\b(?:not (?:compatible|supported|defined)|unsupported)"
        ),
        "the program has no kernel image for this GPU",
        "install a build of torch, and of each compiled extension, that knows this GPU's architecture",
    ),
    TextRule(
        "cuda_error",
        LazyPattern(r"^(?:nvcc|ptxas) {1,2}fatal {1,4}: (?!\(C\d)(.{1,160})|\b(PTXAS error\b.{0,160})"),
        lambda _, match: f"code for the GPU could not be compiled: {match[1] or match[2]}",
        "look at what nvcc or ptxas says above; a GPU that is newer than the CUDA toolkit needs a newer one",
        must_be_last=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            r"\b(CUDA|HIP|ROCm) (?:driver |runtime |API )?error(?: \(\S{1,200}\)| \d{1,4})?: (.{1,160})"
            r"|Triton Error \[(CUDA|HIP)\]: (.{1,160})"
        ),
        lambda _, match: f"{match[1] or match[3]} error: {match[2] or match[4]}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            r"(cu(?:da|blas) runtime error.{1,160}|kernel execution error\. .{1,120}"
            r"|(?:cu|CU|roc|hip)(?:BLAS|DNN|Blas|blas|FFT|SPARSE|SOLVER|blasLt|BLASLt)(?:Lt)? [Ee]rror\b.{0,120}"
            r"|MIOpen Error: .{1,120}|NVML_SUCCESS == .{1,60})"
        ),
        "{0}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            r"\b(\w{0,20}graph\S{0,12}\w{1,40}\(.{0,60}\)\.is_good\(\)|(?:FIND|GET) was unable to find an engine\b)"
        ),
        "cuDNN failed: {0}",
        "cuDNN has no plan for these shapes, or found another version of its libraries than it was built with: try "
        "torch.backends.cuda.enable_cudnn_sdp(False), and look at LD_LIBRARY_PATH",
    ),
    TextRule(
        "cuda_error",
        LazyPattern(r"\b((?:cuda|hip)Error(?!NotReady\b)[A-Z]\w{1,60})"),
        "a GPU call failed: {0}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            r"(?<!=)\b((?:CU(?:BLAS|BLASLT|DNN|SOLVER|SPARSE|RAND|TENSOR|FILE)|HIP(?:BLAS|BLASLT|SPARSE|SOLVER))_STATUS"
            r"_(?!SUCCESS)[A-Z_]{1,40}|(?:CUDA_ERROR|NVRTC_ERROR|HIPRTC_ERROR|NVJPEG_STATUS"
            r"|CUFFT)_(?!SUCCESS)[A-Z_]{1,40}"
            r"|(?:miopen|rocblas_|rocsparse_)[Ss]tatus_?(?!Success|success)\w{1,40})\b"
        ),
        "a GPU library failed: {0}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(rf"(?:^|[:\]'(] ?(?:\. )?|\b[Ee]rror.{{0,40}}|\b[Cc]uda.{{0,60}})({_GPU_MESSAGES})"),
        "a GPU call failed: {0}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            r"\b(?:cuda|hip|CUDA|HIP)\w{0,60}(?:\(\w{0,40}\))? ?(?:[Ff]ail\w{0,5}|[Ee]rr(?:or)?)\b.{0,40}"
            rf"({_GENERAL_MESSAGES})"
        ),
        "a GPU call failed: {0}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(
            # Of libraries that have their own words for a call or a kernel that failed.
            r"(\b(?:GPU|CUDA|[Cc]uda)\b.{0,80}\bfail\w{0,3}(?: to launch\b.{0,40}|!? (?:with error )?(?:[1-9]\d\d)\b)"
            r"|\b[Cc]alls? (?:to|of) (?:a |an |the )?(?:cu[A-Z]\w{2,12}|CUDA|HIP|roc\w{3,10}|MIOpen)(?: \w{1,20})?"
            r" failed\b(?!:? ?\d)"
            r"|\bcu[A-Z]\w{3,40}(?:\(\))? failed\b.{0,80}|\b[Cc]uda context manager error\b"
            r"|\bCUDA kernel launch\b.{0,80}|\b(?:Blas|BLAS|cuDNN|FFT|DNN) [A-Za-z]{2,20} launch failed\b.{0,80}"
            r"|\b[Ff]ailed to \w{1,10} (?:cuda )?ipc mem\w{0,4} handle\b.{0,80}"
            r"|^(?:cudnn|cupy(?:_backends)?|pycuda|cuda|numba\.cuda|cutlass|hip)\.[\w.]{1,100}Error\b.{0,160}"
            r"|\bCU[A-Z]{3,10} ERROR: ?[1-9]\d{0,3}\b|<unknown> at \S{1,160}\.cuh?:\d{1,6}"
            r"|\bOn entry to (?:cu|roc|hip)\w{4,60}\(\) parameter number .{1,120})"
        ),
        "a GPU call failed: {0}",
        _SYNCHRONOUS,
        in_last_lines=True,
    ),
    TextRule(
        "cuda_error",
        LazyPattern(r"\[(?:TRT|TensorRT)\] \d{1,2}: .{0,160}?(Error Code \d{1,2}: .{1,160})"),
        "TensorRT failed: {0}",
        "an engine fits only the TensorRT and the GPU that it was built with: build it again on this host",
        in_last_lines=True,
    ),
    TextRule(
        "hip_error",
        LazyPattern(r"(?:[Ee]xception|[Ee]rror) by (?:GPU|agent) node-\d{1,3}\b.{0,120}\b[Rr]eason ?: ?(.{1,60})"),
        "the GPU stopped: {0}",
        _SYNCHRONOUS_HIP,
        in_last_lines=True,
    ),
    TextRule(
        "hip_error",
        # amdgpu in the kernel log.
        LazyPattern(
            r"\bamdgpu\b.{0,80}(\bring \S{1,20} timeout\b.{0,60}|\bMES (?:might be|failed to|ring)\b.{0,80}"
            r"|\bGPU reset (?:begin|failed)\b.{0,60}|\b[Ff]ailed to (?:evict|suspend|remove|unmap) .{0,40}queue.{0,40})"
        ),
        "the GPU's driver reports that the GPU is stuck: {0}",
        _SYNCHRONOUS_HIP,
        must_be_last=True,
    ),
    TextRule(
        "hip_error",
        LazyPattern(r"(HSA_STATUS_ERROR_\w{1,60})"),
        "the GPU's queue was aborted: {0}",
        _SYNCHRONOUS_HIP,
        in_last_lines=True,
    ),
)


@without_quotations
def illegal_memory_access(failure: Failure) -> Cause | None:
    """A kernel read or wrote where it may not."""
    found = in_all(failure, _ILLEGAL) or first_line(_PAGE_FAULT, final_lines(failure))
    if found is None:
        return None
    hip = _HIP.search(found[0]) is not None
    name, advice = ("HIP", _SYNCHRONOUS_HIP) if hip else ("CUDA", _SYNCHRONOUS)
    return cause(
        failure, f"{name.lower()}_illegal_memory_access", f"{name}: an illegal memory access", advice, proof=found[0]
    )


@without_quotations
def side_assert(failure: Failure) -> Cause | None:
    """A kernel's own check failed: an index out of range, in most cases."""
    found = in_all(failure, _ASSERT) or after_check(failure)
    if found is None:
        return None
    # Each thread that finds it prints a line, well before the exception.
    assertion = first_line(_ASSERTION, reversed(failure.lines))
    message = (
        f"device-side assert: {shortened(assertion[1][1], 160)}" if assertion is not None else "device-side assert"
    )
    advice = (
        f"most often an index beyond a table's size (a label, a token); CUDA_LAUNCH_BLOCKING=1 shows the call: {_LATE}"
    )
    return cause(
        failure, "device_side_assert", message, advice, proof=assertion[0] if assertion is not None else found[0]
    )


@without_quotations
def out_of_memory(failure: Failure) -> Cause | None:
    """The GPU's memory is full."""
    lines = (*failure.messages, *reported_lines(failure))
    found = first_line(_OUT_OF_MEMORY, lines)
    if found is not None and _OF_A_VALUE.match(found[0]):
        found = first_line(_OUT_OF_MEMORY, tuple(line for line in lines if _OF_A_VALUE.match(line) is None))
    if found is None:
        return None
    line = found[0]
    text = " ".join(failure.messages)[:_LONGEST_MESSAGE] or line
    whose = _WHOSE_MEMORY.search(text)
    name = whose[1] if whose is not None else "HIP" if _HIP.search(text) else "CUDA"
    tried = _TRIED.search(text)
    capacity = _CAPACITY.search(text) or _OLD_CAPACITY.search(text)
    sizes = [f"tried to allocate {tried[1]}"] if tried is not None else []
    sizes += [f"GPU {capacity[1]} has {capacity[3]} free of {capacity[2]}"] if capacity is not None else []
    message = f"{name} out of memory{': ' if sizes else ''}{', and '.join(sizes)}"
    if others_use_it(text):
        advice = "other processes use this GPU too: check (nvidia-smi) that each rank has its own, by LOCAL_RANK"
    else:
        advice = (
            "use a smaller batch, activation checkpointing or sharding; where much is reserved but unallocated, "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    return cause(failure, "cuda_out_of_memory", message, advice, proof=line)


@without_quotations
def hardware_error(failure: Failure) -> Cause | None:
    """The GPU, or what connects it, is broken."""
    found = in_all(failure, _HARDWARE)
    if found is not None:
        return cause(failure, "gpu_hardware_error", f"the GPU failed: {found[1][0]}", _OUT_OF_USE, proof=found[0])
    for line in failure.closing_lines:
        # Of the kernel log, which the script has printed itself, and each rank of its host may print.
        error = error_in(line)
        if error is not None and error.is_fatal and failure.gpu_owners.rank_of(error) == failure.end.rank:
            return broken_gpu(failure, error)
    # What the program asked of its GPU is its own fault, whatever has become of another GPU of the host.
    is_programs = any(in_all(failure, pattern) is not None for pattern in (_OUT_OF_MEMORY, _ASSERT))
    if is_programs or after_check(failure) is not None or in_all(failure, _GPU_TERMS) is None:
        return None
    for line in reversed(failure.kernel_lines):
        error = error_in(line)
        if error is not None and error.is_fatal and failure.gpu_owners.is_probably_of(error, failure.end.rank):
            return broken_gpu(failure, error)
    return None


def broken_gpu(failure: Failure, error: GpuError) -> Cause:
    """The cause that a line of the kernel log shows."""
    what, advice = failure_text(error)
    message = f"the GPU failed, as the kernel log says{f': {what}' if what else ''}"
    return cause(failure, "gpu_hardware_error", message, advice or _OUT_OF_USE, proof=error.line)


@without_quotations
def missing_gpu(failure: Failure) -> Cause | None:
    """There is no GPU, or none of that number, or no driver."""
    return by_text(failure, _MISSING)


@without_quotations
def busy_gpu(failure: Failure) -> Cause | None:
    """Another process has the GPU; it may be free soon."""
    return by_text(failure, _BUSY)


@without_quotations
def error_in_nccl(failure: Failure) -> Cause | None:
    """A call of CUDA or HIP that NCCL made and names."""
    return _named(by_text(failure, _IN_NCCL))


@without_quotations
def gpu_error(failure: Failure) -> Cause | None:
    """Whatever else CUDA and HIP report."""
    return _named(by_text(failure, _OTHER))


def _named(found: Cause | None) -> Cause | None:
    if found is not None and _NO_HANDLE.search(found.message):
        found = found._replace(advice=_ABOUT_A_HANDLE)
    if found is not None and found.class_name == "cuda_error" and _HIP.search(found.proof):
        advice = _SYNCHRONOUS_HIP if found.advice == _SYNCHRONOUS else found.advice
        return found._replace(class_name="hip_error", advice=advice)
    return found
