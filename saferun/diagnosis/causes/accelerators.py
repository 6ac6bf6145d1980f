"""What goes wrong on accelerators other than NVIDIA's and AMD's GPUs, and in the memory of any of them. Pure.

Sources: messages of torch_npu and HCCL, Habana's SynapseAI, Level Zero and Unified Runtime (their result names),
oneCCL, the Neuron runtime, XLA and its clients, TensorFlow, RAPIDS' memory manager.
"""

from __future__ import annotations

from saferun.diagnosis.causes.failure import Failure
from saferun.diagnosis.causes.quotations import without_quotations
from saferun.diagnosis.causes.texts import TextRule, by_text
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_DEVICE = r"(?:GPU|NPU|HPU|XPU|TPU|[Nn]euron ?[Cc]ore|NeuronDevice|[Nn]euron|[Gg]audi|[Aa]scend|[Aa]ccelerator)"
_SMALLER = "use a smaller batch, activation checkpointing or sharding; check whether other processes use the device"
_TOOLS = "look at the device with its own tool on this host (npu-smi, hl-smi, xpu-smi, neuron-ls, tpu-info)"
_MEMORY = (
    TextRule(
        "cuda_out_of_memory",
        LazyPattern(
            r"(?:UR|ZE|PI|SYCL|ACL)_\w{0,20}ERROR_(?:\w{0,10}_)?OUT_OF_DEVICE_MEMORY"
            r"|(?:RESOURCE_EXHAUSTED|Resource exhausted|ResourceExhaustedError)\b.{0,200}\b(?:[Mm]emory|HBM|hbm|OOM)\b"
            r"|(?:RESOURCE_EXHAUSTED|Resource exhausted)(?:\b.{0,80})?: From /job:"
            r"|\b(?:[Oo]ut of|in|exceed\w{0,3}|[Nn]ot enough|[Ii]nsufficient) (?:memory space |the )?(?:device memory"
            r"|global memory|HBM|hbm|VMEM|vmem|VRAM|vram|GPU memory|video memory)\b(?!.{0,80}: 0\b)"
            rf"|\b{_DEVICE}(?: device)?(?: \d{{1,4}})?:? (?:is |ran |has run )?[Oo]ut of memory\b"
            rf"|\b[Oo]ut of memory (?:on|in|of) .{{0,20}}\b{_DEVICE}\b"
            r"|\bworkspace [Aa]llocation .{0,60}failed|\bRMM(?: failure|_ERROR_OUT_OF_MEMORY)"
            r"|\b[Ff]ailed to alloc\w{0,4} (?:\d{1,14} bytes of )?(?:DEVICE|HBM) memory\b"
            # vLLM.
            r"|\bNo available memory for the cache blocks\b"
            r"|\bFree memory on device .{1,40} on startup is less than desired\b"
            r"|[Dd]st tensor is not initialized|Failed copying input tensor from .{1,120}/device:GPU:"
        ),
        "the accelerator is out of memory",
        _SMALLER,
        in_last_lines=True,
    ),
)
_RULES = (
    TextRule(
        "collective_timeout",
        LazyPattern(r"\b(?:EI000[26]\b.{0,120}\b(?:times? out|timed out|[Tt]imeout)|Getting socket times out)\b"),
        "another rank did not come to a collective in time",
        "look at what the other ranks did; where it only takes long, raise HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT",
        in_last_lines=True,
    ),
    TextRule(
        "collective_timeout",
        LazyPattern(
            r"\b(?:EI000[26]|HCCL)\b.{0,120}\b(?:times? out|timed out|[Tt]imeout)\b"
            r"|\b(?:[Tt]imes? out|[Tt]imed out)\b.{0,200}\b(?:[Rr]emote|[Pp]eer|[Oo]ther) (?:[Rr]ank|[Tt]ask"
            r"|[Pp]rocess)"
            r"|\b[Bb]arrier (?:\S{1,80} )?(?:has )?timed out\b|\bDEADLINE_EXCEEDED\b.{0,120}\b[Bb]arrier\b"
        ),
        "another rank did not come to a collective in time",
        "look at what the other ranks did; where it only takes long, raise the timeout of the communication library",
    ),
    TextRule(
        "gpu_busy",
        LazyPattern(
            rf"\b[Ll]ast (?:\w{{1,20}} )?process is (?:still )?running|\b{_DEVICE}s?\b.{{0,60}}\b(?:is"
            rf"|are) (?:already )?"
            r"(?:busy|in use|occupied|acquired)\b|[Dd]evice or resource busy.{0,60}/dev/(?:accel|davinci|hl|neuron)"
            r"|/dev/(?:accel|davinci|hl|neuron)\S{0,20}.{0,40}(?:busy|in use)"
        ),
        "another process uses the accelerator",
        "wait for the previous job's processes to end, or see what uses the device",
    ),
    TextRule(
        "missing_gpu",
        LazyPattern(
            rf"\b(?:[Nn]o|[Uu]nable to|[Cc]annot|[Cc]ould not|[Ff]ailed to)\b.{{0,60}}\b{_DEVICE}s?\b.{{0,40}}"
            r"\b(?:available|found|detected|visible|[Dd]river\b|version)"
            rf"|\b[Nn]o (?:visible|usable|supported) (?:CUDA |ROCM )?{_DEVICE} devices?\b|\bNVRM: RmInitAdapter failed"
            r"|\bTPU initialization failed: (?:open\(|No \w)|\bROCk module is NOT loaded\b"
            r"|\b[Uu]nable to open /dev/kfd\b"
            r"|\bNVRM: API mismatch: the client\b"
            r"|\b[Rr]untime cannot be initialized\b|\baccelerator is not available\b"
            r"|\b[Yy]ou requested GPUs?: .{1,60}|\bError 80[57]: MPS\b|\bMPS client failed to connect\b"
        ),
        "the accelerator, or its driver, cannot be used",
        _TOOLS + "; nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES, for GPUs",
        in_last_lines=True,
    ),
    TextRule(
        "accelerator_error",
        LazyPattern(
            r"(\b(?:UR|ZE|PI|SYCL)_RESULT_ERROR_\w{1,40}|\bsynStatus[ =]\S{0,20}.{0,60}"
            r"|\bsyn[A-Z]\w{1,60} failed.{0,80}"
            r"|\bFATAL ERROR :: MODULE:.{1,120}|\b(?:NPU|OPS) (?:function )?error\b.{0,160}"
            r"|\bHCCL (?:function )?error\b.{0,120}"
            r"|\bERR\d{5} \w{2,6} .{1,80}|\b[Nn]rt(?:::|_)\w{1,40}.{0,20}\b(?:failed|status=[1-9]).{0,80}"
            r"|\bNERR_\w{1,40}"
            r"|\bNRT_\w{1,20}_?(?:ERROR|FAIL)\w{0,20}|\bacl(?:rt|nn|op)?[A-Z]\w{1,60}.{0,40}(?:failed|error code is \d)"
            r"|\b(?:mu|MU|cn|CN|mc|MC|ix|IX)(?:DNN|BLAS|CCL|FFT|dnn|blas|ccl|fft)\b.{0,20}(?:[Ff]ail|[Ee]rror).{0,80}"
            r"|\bDevice(?:Lost| lost)\b|\bDEVICE_LOST\b|\bMUSA error.{0,120}|\bMLU .{0,20}error.{0,120}"
            r"|\bXlaRuntimeError: (?:INTERNAL|UNKNOWN|DATA_LOSS|ABORTED): .{1,160}"
            r"|\bNative API failed\. Native API returns: .{1,80}|\bACL .{1,60} failed, error code ?: ?\d{1,9}"
            r"|\bInner error is reported as above\b"
            r"|\bcn(?:rt|cl|nl)Error\w{0,40}|\bBad StatusOr access: INTERNAL.{0,120})"
        ),
        "the accelerator or its runtime failed: {0}",
        _TOOLS + ", and at the kernel log (dmesg)",
        must_be_last=True,
    ),
    TextRule(
        "accelerator_error",
        # What libraries log before they abort: CANN with its codes, oneCCL, XLA with its status codes.
        LazyPattern(
            r"^(?:\[PID: \d{1,10}\] )?(E[A-Z]\d{4}: .{1,160})|\|CCL_ERROR\| (.{1,160})"
            # The Neuron runtime: process, level, part and function; its daemon.
            r"|\b\d{1,7}:\d{1,7} {1,4}(?:ERROR|FATAL) {1,4}((?:TDRV|NMGR|NRT|KMGR|NEFF|ENC|CCOM|NLA|HAL):"
            r"(?!nrt_close)\w{1,60} .{1,160})"
            r"|\bnrtd\[\d{1,10}\]: (\[NRTD:\w{1,40}\] .{0,40}\b(?:[Ff]ail\w{0,3}|[Ee]rror|[Uu]nable|[Cc]annot)\b"
            r".{0,120})"
            r"|\boneCCL: (ze_\S{1,80}:\d{1,6} .{1,160})"
            r"|\bException in device=(?:TPU|XLA|NEURON)\S{0,8}: ((?:Failed precondition|Internal|Unknown|Aborted"
            r"|Data loss|Unimplemented|FAILED_PRECONDITION|INTERNAL|UNKNOWN|ABORTED)\b.{0,160})"
        ),
        lambda _, match: f"the accelerator or its runtime failed: {next(filter(None, match.groups()))}",
        _TOOLS + ", and at the kernel log (dmesg)",
        in_last_lines=True,
    ),
)


@without_quotations
def device_memory(failure: Failure) -> Cause | None:
    """The accelerator's memory is full."""
    return by_text(failure, _MEMORY)


@without_quotations
def accelerator_error(failure: Failure) -> Cause | None:
    """An accelerator, or the library that moves its data between ranks, failed."""
    return by_text(failure, _RULES)
