"""What to do about an exception that no rule knows, by what its message is about. Pure.

Sources: messages of torch, its compiler and its distributed parts, DeepSpeed, Megatron, vLLM, transformers, tokenizers,
wandb, readers of data and configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from saferun.diagnosis.causes.texts import first_line
from saferun.diagnosis.lazy_patterns import LazyPattern

COMPILING = LazyPattern(
    r"CppCompileError|\bC(?:\+\+)? compiler\b|\bCommand .{0,40}/?(?:gcc|g\+\+|cc|c\+\+|clang(?:\+\+)?|nvcc|hipcc|icpx"
    r"|ninja)\b"
    r"|fatal error: .{1,80}\.h(?:pp)?: No such file|\bnvcc\b.{0,40}(?:not found|failed)"
    r"|\bcannot find -l[a-z]\w{0,40}|CompilationError|\bptxas\b.{0,60}(?:error|fatal|failed)"
    # What torch.compile reports where it does not get as far as the code: the compiler's processes and files.
    r"|(?:BackendCompilerFailed|InductorError)\b.{0,80}: (?:\w{1,60}\.){0,4}(?:TimeoutExpired|(?:CalledProcess|OS"
    r"|Permission|FileNotFound|FileExists|NotADirectory|BlockingIO|CppCompile)Error)\b"
    r"|(?:BackendCompilerFailed|InductorError)\b.{0,120}\b[Cc]annot find .{0,20}triton install"
)
OF_TORCH_COMPILE = LazyPattern(r"BackendCompilerFailed|InductorError")
VERSIONS = (
    "versions of packages do not fit each other: compare them (pip list) with those that this program was "
    "written for, also tokenizers with transformers, and torch with what is compiled for it"
)
CIRCULAR = (
    "two modules import each other (import it where it is used, or move what both need into a third one), or your own "
    "file has the name of a package: the message names it"
)
_OTHER_CHECKPOINT = "the checkpoint does not fit the model, or is not whole: look at the file"
# Names of a program's own may have any word in them.
_CALL = LazyPattern(r"^(?:\w{1,40}\.){0,4}(?:Attribute|Type|Name|UnboundLocal)Error\b")
_OF_SYSTEM = LazyPattern(
    r"^(?:\w{1,40}\.){0,4}(?:(?:FileExists|IsADirectory|Import|ModuleNotFound)Error\b|\w{1,40}: \[Errno )"
)
# What is quoted, and paths.
_NAMED = LazyPattern(r"""(?<!\w)'[^']{0,300}'|"[^"]{0,300}"|(?<!\S)\(?[^\s()]{0,200}/[^\s()]{0,300}\)?""")
_UNREADABLE = LazyPattern(
    r"\bMDB_(?:CORRUPTED|PAGE_NOTFOUND|INVALID|VERSION_MISMATCH|PANIC)|DECORDError|\bav_read_frame\b"
    r"|\bavcodec_\w{1,30}"
    r"|Invalid data found when processing|TProtocolException|[Cc]ould(?:n't| not) deserialize"
    r"|UnidentifiedImageError"
    r"|cannot identify image|image file is truncated|\b[Cc]orrupt(?:ed|ion)?\b|moov atom|[Cc]hecksum mismatch"
    r"|\bCRC\b"
    r"|NVJPEG error|\b(?:[Jj]peg|JPEG|PNG|TIFF|[Ii]mage|[Vv]ideo|[Aa]udio)\w{0,20}\b.{0,120}\b(?:fail"
    r"|decod(?:e|ing|er error)\b|invalid|broken)"
    r"|\b(?:[Ff]ailed to|[Cc]ould not|[Cc]annot|[Uu]nable to|[Ee]rror (?:in|while)"
    r"|unknown error in) (?:\w{1,20} ){0,3}"
    r"(?:decod(?:e|ing)\b|(?:pars|deseriali|decompress)\w{0,10}\b)|\b(?:Libsndfile|Decode|Decoding|Image|Video|Audio|Zip|Tar"
    r"|Zlib"
    r"|LZMA|Parquet|HDF5|TFRecord)\w{0,12}Error\b|\bAssertion failed\) !\w{0,10}\.empty\(\)|\bParseFrom(?:Array"
    r"|String)\b"
    r"|\berror in \w{1,12} decoder\b|DataLossError|[Tt]runcated (?:file|record|data|input)|\b(?:tar|zip)file\."
    r"|\bin (?:a |the )?(?:tar|zip|archive|shard(?= \S{0,200}[./]\w))\b"
    r"|[Uu]nexpected end of (?:file|data|stream|input)"
)
# Not of activations, which are computed once more instead of being kept; nor of one that is written.
_CHECKPOINT = LazyPattern(
    r"^(?!.{0,500}(?:\brecomput|\b[Aa]ctivation|\b[Gg]radient[ -]checkpoint|utils\.checkpoint))"
    r"(?=.{0,500}\b(?:[Cc]heckpoints?|state_dict|ckpt)\b)"
    r".{0,500}\b(?:[Ll]oad|[Rr]estor|[Rr]esum|[Rr]ead(?:ing)?\b|[Mm]issing|[Uu]nexpected|[Mm]ismatch|[Mm]atch|[Ii]ncompatib"
    r"|[Ii]nvalid|[Cc]onvert|[Dd]eserial|[Pp]artition|world size"
    r"|not equal|expected\b|[Dd]ifferent|[Uu]nrecogni[sz]|parallel size)"
)
HINTS = (
    (
        LazyPattern(r"\blibcuda\.so cannot found\b"),
        (
            "Triton finds no libcuda.so: link it to the libcuda.so.1 of the driver, or name the directory of that one "
            "in TRITON_LIBCUDA_PATH; in a container check whether the driver's libraries are there"
        ),
    ),
    (
        LazyPattern(r"^FileExistsError: \[Errno 17\] "),
        "another rank or an earlier run has made it; a directory: os.makedirs(..., exist_ok=True), or on rank 0 alone",
    ),
    (
        LazyPattern(r"^BlockingIOError: \[Errno 11\] "),
        (
            "the call would have to wait: another process holds the lock, or there is nothing to read yet, or no "
            "room to write to"
        ),
    ),
    (
        LazyPattern(r"^AttributeError: (?:partially initialized module\b|.{0,300}\bcircular import\b)"),
        CIRCULAR,
    ),
    (
        LazyPattern(r"^(?:triton\.compiler\.errors\.)?CompilationError: at \d{1,6}:\d"),
        (
            "the source of a Triton kernel has an error, or what this GPU or this Triton does not know: look at the "
            "line that the message marks, and at what stands below it"
        ),
    ),
    (
        LazyPattern(r"\bOutOfResources\b|\bout of resources?: "),
        (
            "a kernel needs more registers or shared memory of the GPU than this GPU has: give it smaller blocks or "
            "fewer stages, or use another kernel"
        ),
    ),
    (
        COMPILING,
        (
            "a kernel is compiled while the job runs: check whether every host has a compiler with its headers (CC, "
            "CUDA_HOME), "
            "room in the cache (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR), and what the compiler printed"
        ),
    ),
    (
        LazyPattern(r"MDB_MAP_FULL|MapFullError"),
        "the database has reached its map_size: open it with a larger one",
    ),
    (
        LazyPattern(r"MDB_READERS_FULL|ReadersFullError"),
        "too many readers of one LMDB file: open it once a process, with lock=False or a larger max_readers",
    ),
    (
        LazyPattern(r"Weights only load failed|WeightsUnpickler error|\bCannot use \W{0,3}weights_only=True"),
        (
            "torch.load reads only weights since torch 2.6: torch.serialization.add_safe_globals allows what the "
            "message names; weights_only=False runs any code in the checkpoint: only if you trust it"
        ),
    ),
    (LazyPattern(r"Error\(s\) in loading state_dict"), _OTHER_CHECKPOINT),
    (
        LazyPattern(r"\bExpected state_dict to be dict-like\b"),
        (
            "what was loaded is no state_dict: print its type, and its keys if it has some (a checkpoint often has the "
            "weights under 'model' or 'state_dict')"
        ),
    ),
    (
        LazyPattern(
            r"\bNot a gzipped file\b|\bfile signature not found\b|version https://git-lfs"
            r"|\bdeserializing header: (?:HeaderTooLarge|InvalidHeaderDeserialization|header too large"
            r"|invalid (?:JSON|UTF-8) in header)"
            r"|\binvalid load key, '[v<]'"
        ),
        (
            "the file is not of this format: look at its first bytes (head -c 100); a text there is an error page that "
            "was downloaded in its place, or a pointer of Git LFS (git lfs pull); else it is broken"
        ),
    ),
    (
        _UNREADABLE,
        (
            "a file that it reads is broken, cut off, missing or of another format: find it (the message or a try "
            "around the reader names it), and replace it or leave it out"
        ),
    ),
    (
        LazyPattern(
            r"gladLoadGL|\b(?:EGL|GLX|GLFW|GLEW|OpenGL|OSMesa|Vulkan)\w{0,20}\b.{0,120}(?:[Ee]rror|[Ff]ail|[Mm]issing"
            r"|[Cc]annot)"
            r"|\bEGLError|\bGLError|\bGLFWError|[Cc]annot (?:connect to|open) (?:the )?(?:X server|(?:X )?display)"
            r"|DISPLAY environment"
        ),
        (
            "there is no screen to draw on: render with EGL (MUJOCO_GL=egl, PYOPENGL_PLATFORM=egl); a container needs "
            "the driver's graphics libraries (NVIDIA_DRIVER_CAPABILITIES=all)"
        ),
    ),
    (
        LazyPattern(r"^(?:\w{1,40}\.){0,4}JSONDecodeError\b"),
        (
            "the text that it reads is no JSON, or not whole: a file of the data set, a configuration or a service's "
            "answer; the calls above show which"
        ),
    ),
    (
        LazyPattern(
            r"^(?:omegaconf|hydra|pydantic(?:_core)?|jsonargparse|gin|yaml|tomllib|toml|tomli|configparser|jsonschema"
            r"|confection"
            r"|ml_collections|draccus|tyro)\."
            r"|\bError (?:instantiating|merging|locating target|in call to target|loading config)\b"
        ),
        "look at the configuration file at that place, and at the values given on the command line",
    ),
    (
        LazyPattern(
            r"\b(?:[Ll]oss|[Gg]rad\w{0,12}|[Ww]eights?|[Ll]ogits?|[Oo]utputs?|[Pp]arameters?|[Tt]ensor"
            r"|[Pp]robabilit\w{0,4}|[Nn]orm)"
            r"\b.{0,80}\b(?:NaNs?|nan|nans|[Ii]nf|[Ii]nfinite|[Ii]nfinity|[Nn]on-?finite)\b"
            r"|\b(?:NaNs?|nan|[Ii]nf|[Nn]on-?finite)\b.{0,60}\b(?:[Ll]oss|[Gg]rad\w{0,12}|[Ww]eights?|[Ll]ogits?"
            r"|[Oo]utputs?)\b"
            r"|returned nan values in its"
        ),
        (
            "the training diverges: lower the learning rate or clip gradients, look for bad samples; "
            "torch.autograd.set_detect_anomaly(True) names the operation"
        ),
    ),
    (
        LazyPattern(
            r"Expected to have finished reduction in the prior iteration|parameters that were not used in producing"
        ),
        "some parameters had no part in the loss: DistributedDataParallel(..., find_unused_parameters=True)",
    ),
    (
        LazyPattern(r"Expected to mark a variable ready only once"),
        (
            "a parameter gets its gradient twice in a step: use checkpoint(..., use_reentrant=False); or, if each step "
            "uses the same parameters, DistributedDataParallel(..., static_graph=True)"
        ),
    ),
    (
        LazyPattern(r"\bCurrent loss scale already at minimum\b|\bMinimum loss scale reached\b"),
        (
            "gradients have overflowed in every step: train in bfloat16 instead of float16, or lower the learning rate "
            "and look for bad samples"
        ),
    ),
    (
        LazyPattern(r"\bOne of the subprocesses has abruptly died during map operation\b"),
        (
            "a process of datasets' map() was killed or crashed, most often for lack of memory: see the kernel log "
            "(dmesg), use a smaller num_proc, batch_size or writer_batch_size"
        ),
    ),
    (
        LazyPattern(r"Default process group has not been initialized"),
        "call torch.distributed.init_process_group before it",
    ),
    (
        LazyPattern(
            r"PytorchStreamReader failed|invalid load key|unexpected EOF"
            r"|storage has wrong size|pickle data was truncated|deserializing header|\bCheckpointException\b"
            r"|\bBadZipFile\b"
        ),
        _OTHER_CHECKPOINT,
    ),
    (
        LazyPattern(
            r"\b[Nn]o (?:valid |usable )?checkpoints? (?:was |were |is |are )?(?:found|available)\b"
            r"|\b(?:[Cc]an't|[Cc]an ?not|[Cc]ould(?:n't| not)) find (?:a |any )?(?:valid )?checkpoints?\b"
            r"|\b[Cc]heckpoint (?:file |directory )?(?:\S{1,300} )?(?:was )?not found\b"
        ),
        "there is no checkpoint to resume from: check the path, and that every host has it; else start without one",
    ),
    (
        _CHECKPOINT,
        (
            "the checkpoint fits this model, this number of ranks or this version of torch only in part, or is not "
            "whole: look at how it was written, and load it as it was"
        ),
    ),
    (
        LazyPattern(
            r"^(?:torch\.(?:_dynamo|_inductor|_functorch)\.[\w.]{1,80}|Unsupported|InternalTorchDynamoError"
            r"|TorchRuntimeError|BackendCompilerFailed|InductorError)\b"
        ),
        (
            "torch.compile fails on this code: TORCHDYNAMO_DISABLE=1 runs without it, torch.compiler.disable leaves a "
            "function out, TORCH_LOGS=graph_breaks shows the places"
        ),
    ),
    (
        LazyPattern(r"Error initializing torch\.distributed|environment variable \w{1,40} expected, but not set"),
        (
            "it was not started as a rank: launch it as one, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
            "and do not unset them in the script"
        ),
    ),
    (
        LazyPattern(
            r"\b(?:allocat\w{1,5}|not enough|out of|no)\b.{0,80}\bsymmetric heap\b"
            r"|\bsymmetric heap\b.{0,80}\b(?:exhausted|full|too small|out of)\b"
        ),
        "the symmetric heap is too small, in most cases: NVSHMEM_SYMMETRIC_SIZE sets its size",
    ),
    (
        LazyPattern(r"\bKV[ -]?[Cc]ache\b|\bgpu_memory_utilization\b|\bmem[-_]fraction[-_]static\b|\bcache blocks\b"),
        (
            "the engine's share of the GPU's memory is too small for this: raise it (vLLM: gpu_memory_utilization, "
            "SGLang: mem_fraction_static), allow shorter sequences (max_model_len), or use more GPUs"
        ),
    ),
    (
        LazyPattern(
            r"\b(?:[Ff]lash|[Mm]emory.efficient|[Ss]age|[Ff]used|[Pp]aged)[ _-]?[Aa]tt(?:entio)?n\w{0,40}\b.{0,160}"
            r"\b(?:only|not|requires?|unsupported|must|at least|invalid)\b|\b(?:xformers|SDPA|sdpa)\b"
            r"|[Nn]o (?:available|operator found).{0,60}attention"
        ),
        (
            "this kernel for attention does not know this GPU, type or shape: use bfloat16 or float16, or another "
            "implementation (transformers: attn_implementation='sdpa' or 'eager')"
        ),
    ),
    (
        LazyPattern(
            r"unscale FP16|expected scalar type|(?:must|to) have the same dtype"
            r"|not implemented for '(?:Half|BFloat16|Float8)|[Ii]nput type .{1,60} and (?:weight|bias) type"
            r"|[Ff]ound dtype \w{1,20} but expected|should be the same type"
        ),
        (
            "the types of numbers differ: keep parameters that are trained in float32 and compute under "
            "torch.autocast, or convert model and inputs to one type"
        ),
    ),
    (
        LazyPattern(
            r"\bapi[_ -]?key\b|\b[Nn]ot logged in\b|\b(?:access|auth\w{0,12}|API|HF|user) token\b"
            r"|\b[Cc]redentials?\b.{0,60}\b(?:not|missing|locate|find|found|expired|invalid|required)\b"
            r"|\b(?:no|No|[Mm]issing|[Ii]nvalid|expired|locate|find) (?:\w{1,20} ){0,2}credentials\b",
            re.IGNORECASE,
        ),
        (
            "the ranks have no key or token for this service: give it to them on every host (WANDB_API_KEY, HF_TOKEN, "
            "AWS_*), or do without the service (WANDB_MODE=offline, HF_HUB_OFFLINE=1)"
        ),
    ),
    (
        LazyPattern(
            r"\buntagged enum\b|^AttributeError: (?:partially initialized )?module '"
            r"|\b[Vv]ersions?\b.{0,60}\b(?:mismatch\w{0,4}|incompatible|conflicts?|too (?:old|new)|not supported)\b"
            r"|\b(?:[Ii]ncompatible|[Mm]ismatched|[Uu]nsupported) versions?\b"
            r"|\bincompatible (?:function|constructor) arguments"
            r"|\bplease (?:upgrade|downgrade|update)\b"
            r"|\brequires? (?:\S{1,40} ){0,4}(?:>=|<=|==|version|at least)"
        ),
        VERSIONS,
    ),
    (
        LazyPattern(
            r"\bDatasetGenerationCastError\b|\bCastError: Couldn't cast\b|^TypeError: Couldn't cast array of type\b"
        ),
        (
            "the files of the data set differ in their columns or types: make them alike, name the types (features=), "
            "or load the files apart (data_files=)"
        ),
    ),
    (
        LazyPattern(r"\bSchemaInferenceError\b"),
        "no example came out of the data: look at the files and at what filters leave, or name the types (features=)",
    ),
    (
        LazyPattern(
            r"magic bytes not found|Not an Arrow file|Invalid flatbuffers|ArrowInvalid|SplitsSizesError"
            r"|\bDatasetGeneration\w{0,20}Error\b|^datasets\.\S{0,60}(?:Checksum|Splits|Download)\w{0,20}"
        ),
        "a file of the data set is not whole, or has another format: delete it from the cache and write it again",
    ),
    (
        LazyPattern(
            r"Error building extension|CUDAMismatchException|Ninja is required|[Cc]annot find .{0,20}triton install"
        ),
        "build it once before the job, with a compiler and a CUDA toolkit that fit this torch",
    ),
    (
        LazyPattern(
            r"is not a valid model identifier|does not appear to have a file named"
            r"|[Nn]o file named .{1,200} found in directory"
            r"|Can't load (?:tokenizer|the model|the configuration)|HFValidationError"
        ),
        "look at the model's name or path; a path must exist on every host, and a name needs access to the Hub",
    ),
    (
        LazyPattern(r"EOFError: Ran out of input|ended before the end-of-stream marker|EOF read where"),
        "the file is empty or cut off: a rank may have read it before another had written all of it",
    ),
    (
        LazyPattern(r"EOFError: EOF when reading a line"),
        "nothing can be typed here: ask before the launch, or pass the answer as an option of the script",
    ),
    (
        LazyPattern(
            r"mat1 and mat2 shapes cannot be multiplied|\bsize mismatch\b|[Tt]he size of tensor a \("
            r"|Sizes of tensors must match"
            r"|shape '\[.{0,80}\]' is invalid for input|stack expects each tensor to be equal size|\bshape mismatch\b"
            r"|could not be broadcast together|inconsistent tensor size|[Ii]ncompatible shapes?\b"
            r"|must match except in dimension"
        ),
        (
            "the shapes do not fit: print the shapes of both at that line; a last batch that is smaller, an input of "
            "another size "
            "or a layer of the wrong width are the usual reasons"
        ),
    ),
    (
        LazyPattern(r"Expected all tensors to be on the same device"),
        "move model and batch to the same GPU: torch.device('cuda', int(os.environ['LOCAL_RANK']))",
    ),
    (
        LazyPattern(
            r"\b(?:in|with) (?:a )?forked subprocess\b|\b(?:[Cc]an't|[Cc]annot|[Cc]ould not) pickle\b"
            r"|\b[Cc]an't get local object\b|bootstrapping phase|\bcontext has already been set\b|\bstart method\b"
        ),
        (
            "your own processes: if CUDA was used before, start them with spawn, not fork, from below "
            "`if __name__ == '__main__'`, and pass only what can be pickled"
        ),
    ),
    (
        LazyPattern(r"\b[Cc]an't get attribute '[\w.]{1,100}' on <module '__main__'"),
        (
            "what was pickled names a class or function that this script does not define: put it in a module that both "
            "import; of a checkpoint save the state_dict alone"
        ),
    ),
    (
        LazyPattern(r"\b(?:GEMM|gemm|Gemm|cutlass|CUTLASS)\b|\bno kernel found\b"),
        (
            "the kernel for this product of matrices does not know these shapes, this type or this GPU: look at the "
            "sizes (multiples of 8 or 16), the type, and whether the library is built for this GPU"
        ),
    ),
    (
        LazyPattern(
            r"\bname '\w{0,40}(?:cuda|ext|kernel|_C\b|triton)\w{0,40}' is not defined"
            r"|\b(?:CUDA )?extension\b.{0,60}\bnot (?:installed|found|built|compiled)"
        ),
        (
            "a compiled extension is missing or was not loaded: look at the warnings above it, and install or build "
            "it on every host"
        ),
    ),
    (
        LazyPattern(
            r"\bmpiSize\b|\b[Aa]ssert(?:ion)? fail\w{0,3}\b|\b[Cc]heck failed\b"
            r"|\bworld size\b.{0,60}(?:!=|does not|must|divisible)"
        ),
        "a check of the library failed: look at what it compares, the number of ranks, sizes and types above all",
    ),
    (
        LazyPattern(r"\b(?:via|by|over|through) ssh\b|\bpasswordless\b|^paramiko\."),
        "check that this user reaches every host by ssh without a password (ssh HOST true), or use another launcher",
    ),
    (
        LazyPattern(r"Invalid key: \"\.|\bmust be (?:an )?absolute\b|\babsolute path\b|\brelative path\b"),
        "give it an absolute path: relative ones are not understood there",
    ),
    (
        LazyPattern(r"\b[Pp]in[ _-]memory thread\b"),
        (
            "look at the exception of that thread, further up in the output; where there is none, pin_memory=False, or "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        ),
    ),
    (
        LazyPattern(r"HTTP Error|HTTPSConnectionPool|Max retries exceeded|ConnectTimeout|hf_hub|URLError"),
        "download it once before the job, or on rank 0 alone",
    ),
)


def hint_for(lines: Iterable[str]) -> str:
    """What to do, the special hints first; empty where nothing is known.

    Args:
        lines: the first lines of the messages, nearest first.
    """
    kept = tuple(lines)
    bare = tuple(line for line in kept if _CALL.match(line) is None)
    nameless = tuple(_NAMED.sub("", line) for line in bare if _OF_SYSTEM.match(line) is None)
    # What a backend of torch.compile has raised stands in the next line.
    joined = tuple(f"{line} {below}" for line, below in pairwise(kept) if line.endswith(" raised:"))
    reduced = {_UNREADABLE: bare, _CHECKPOINT: nameless, COMPILING: (*kept, *joined)}
    return next((hint for pattern, hint in HINTS if first_line(pattern, reduced.get(pattern, kept))), "")
