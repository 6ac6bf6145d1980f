"""The env profiles that come with saferun.

Written by ``python -m tests.compile_profiles`` from ``configs/*.yaml``: edit those.
"""

from __future__ import annotations

from saferun.env.profiles.profile_values import Location, Profile, RankValue, Variable

PROFILES: dict[str, Profile] = {
    "blocking": Profile(
        name="blocking",
        location=Location(path="configs/blocking.yaml", line=2),
        description="every kernel launch waits for its end, so that tracebacks name the failing line; slow",
        extends=("production",),
        variables=(
            Variable(
                name="CUDA_LAUNCH_BLOCKING",
                value="1",
                location=Location(path="configs/blocking.yaml", line=5),
                why=(
                    "A kernel's launch returns when the kernel has ended: an illegal access or a device-side "
                    "assertion is raised at the line that caused it, and not at some later call."
                ),
                cost="heavy",
                vendor="nvidia",
                breaks_with=(("nccl", "==2.14.3"),),
                source="https://docs.pytorch.org/docs/stable/cuda_environment_variables.html",
                reader=("libc10_cuda.so", "libnccl.so.2"),
            ),
            Variable(
                name="PYTORCH_USE_CUDA_DSA",
                value="1",
                location=Location(path="configs/blocking.yaml", line=16),
                why=(
                    "Device-side assertions report the block, thread and line. It acts only in a torch that was "
                    "compiled with TORCH_USE_CUDA_DSA, which is the flag of the build and is not read at run time."
                ),
                cost="moderate",
                vendor="nvidia",
                source="https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDADeviceAssertionHost.h",
                reader=("libc10_cuda.so",),
            ),
            Variable(
                name="HIP_LAUNCH_BLOCKING",
                value="1",
                location=Location(path="configs/blocking.yaml", line=26),
                why="HIP's name for the same thing; it waits after each kernel.",
                cost="heavy",
                vendor="amd",
                versions=(("rocm", ">=6.0"),),
                source="https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html",
                reader=("libamdhip64.so",),
            ),
            Variable(
                name="AMD_SERIALIZE_KERNEL",
                value="3",
                location=Location(path="configs/blocking.yaml", line=35),
                why="Waits before and after each kernel, which also tells apart two kernels of different streams.",
                cost="heavy",
                vendor="amd",
                source="https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html",
                reader=("libamdhip64.so",),
            ),
            Variable(
                name="AMD_SERIALIZE_COPY",
                value="3",
                location=Location(path="configs/blocking.yaml", line=43),
                why="Waits before and after each copy, as AMD_SERIALIZE_KERNEL does for kernels.",
                cost="heavy",
                vendor="amd",
                source="https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html",
                reader=("libamdhip64.so",),
            ),
        ),
    ),
    "compile-debug": Profile(
        name="compile-debug",
        location=Location(path="configs/compile-debug.yaml", line=2),
        description="what torch.compile did - graph breaks, recompilations, internal stacks - with a trace for tlparse",
        extends=("production",),
        variables=(
            Variable(
                name="TORCH_LOGS",
                value="dynamo,graph_breaks,recompiles",
                location=Location(path="configs/compile-debug.yaml", line=5),
                why="Where the graph broke and why, and which guard failed before each recompilation.",
                cost="moderate",
                source="https://docs.pytorch.org/docs/stable/logging.html",
                reader=("python: torch._logging._internal",),
            ),
            Variable(
                name="TORCH_LOGS_OUT",
                value="{rank_dir}/torch_logs.txt",
                location=Location(path="configs/compile-debug.yaml", line=12),
                why="A copy of these logs beside the rank's output.",
                source="https://docs.pytorch.org/docs/stable/logging.html",
                reader=("python: torch._logging._internal",),
            ),
            Variable(
                name="TORCHDYNAMO_VERBOSE",
                value="1",
                location=Location(path="configs/compile-debug.yaml", line=19),
                why="An exception out of the compiler keeps the compiler's own frames.",
                source="https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
                reader=("python: torch._dynamo.config",),
            ),
            Variable(
                name="TORCH_TRACE",
                value="{rank_dir}/torch_trace",
                location=Location(path="configs/compile-debug.yaml", line=26),
                why=(
                    "A structured trace of every compilation, one file per rank, which the program tlparse turns "
                    "into a report. It holds the model's code, and not its weights."
                ),
                cost="moderate",
                source="https://docs.pytorch.org/docs/stable/compile/programming_model.observability.html",
                reader=("python: torch._logging._internal",),
            ),
        ),
    ),
    "cpu-repro": Profile(
        name="cpu-repro",
        location=Location(path="configs/cpu-repro.yaml", line=4),
        description="hide the GPUs, to rerun on the CPU for a readable traceback",
        extends=("production",),
        variables=(
            Variable(
                name="TORCH_DISTRIBUTED_DEBUG",
                value="INFO",
                location=Location(path="configs/cpu-repro.yaml", line=9),
                why="DDP says how it was set up and which parameters got no gradient, at the size a CPU can bear.",
                cost="light",
                source="https://docs.pytorch.org/docs/stable/distributed.html",
                reader=("libtorch_cpu.so",),
            ),
            Variable(
                name="CUDA_VISIBLE_DEVICES",
                value="-1",
                location=Location(path="configs/cpu-repro.yaml", line=16),
                why=(
                    "CUDA shows the devices that stand before the first invalid number, so none. HIP heeds it too "
                    "where HIP_VISIBLE_DEVICES is not set."
                ),
                cost="heavy",
                source="https://docs.pytorch.org/docs/stable/cuda_environment_variables.html",
                reader=("libc10_cuda.so", "python: torch.cuda"),
                force=True,
            ),
            Variable(
                name="HIP_VISIBLE_DEVICES",
                value="-1",
                location=Location(path="configs/cpu-repro.yaml", line=25),
                why="HIP looks here first, and then at CUDA_VISIBLE_DEVICES.",
                cost="heavy",
                vendor="amd",
                source="https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html",
                reader=("libamdhip64.so", "python: torch.cuda"),
                force=True,
            ),
        ),
    ),
    "debug": Profile(
        name="debug",
        location=Location(path="configs/debug.yaml", line=3),
        description="everything about the communication, NCCL's part into files of each rank; slow",
        extends=("production",),
        variables=(
            Variable(
                name="TORCH_DISTRIBUTED_DEBUG",
                value="DETAIL",
                location=Location(path="configs/debug.yaml", line=8),
                why=(
                    "Compares every collective over all ranks before it runs, and names the ranks that differ in "
                    "operation, shape or type; DDP says which parameters got no gradient. Every collective waits for "
                    "a second one, over gloo, and for writes to the store. Not for DDP over gloo, which crashes with "
                    "it (seen with torch 2.13)."
                ),
                cost="heavy",
                vendor="nvidia",
                source="https://docs.pytorch.org/docs/stable/distributed.html",
                reader=("libtorch_cpu.so", "libtorch_cuda.so"),
            ),
            Variable(
                name="TORCH_DISTRIBUTED_DEBUG",
                value="DETAIL",
                location=Location(path="configs/debug.yaml", line=18),
                why=(
                    "Compares every collective over all ranks before it runs, and names the ranks that differ in "
                    "operation, shape or type; DDP says which parameters got no gradient. Every collective waits for "
                    "a second one, over gloo, and for writes to the store. Not for DDP over gloo, which crashes with "
                    "it (seen with torch 2.13)."
                ),
                cost="heavy",
                vendor="amd",
                source="https://docs.pytorch.org/docs/stable/distributed.html",
                reader=("libtorch_cpu.so", "libtorch_hip.so"),
            ),
            Variable(
                name="TORCH_DISTRIBUTED_DEBUG",
                value="INFO",
                location=Location(path="configs/debug.yaml", line=27),
                why=(
                    "DDP says how it was set up, how long its parts take, and which parameters got no gradient. "
                    "DETAIL compares the ranks' collectives as well, but makes DDP over gloo crash (seen with torch "
                    "2.13)."
                ),
                cost="moderate",
                source="https://docs.pytorch.org/docs/stable/distributed.html",
                reader=("libtorch_cpu.so",),
            ),
            Variable(
                name="TORCH_SHOW_CPP_STACKTRACES",
                value="1",
                location=Location(path="configs/debug.yaml", line=35),
                why=(
                    "An exception from torch's C++ code carries its C++ stack, some 30 lines for each. Exceptions "
                    "that the program catches cost the same: with TORCH_SYMBOLIZE_MODE=dladdr about 4 ms for each "
                    "place, the first time (measured with 2.13 on a CPU)."
                ),
                cost="light",
                source="https://docs.pytorch.org/docs/stable/debugging_environment_variables.html",
                reader=("libtorch_cpu.so",),
            ),
            Variable(
                name="TORCH_NCCL_ENABLE_TIMING",
                value="1",
                location=Location(path="configs/debug.yaml", line=46),
                why=(
                    "The Flight Recorder marks the collectives that have begun on the GPU, and how long each took. "
                    "It costs a CUDA event more for each collective."
                ),
                cost="moderate",
                source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
            ),
            Variable(
                name="NCCL_CHECK_MODE",
                value="DEBUG_GLOBAL",
                location=Location(path="configs/debug.yaml", line=55),
                why=(
                    "NCCL compares the arguments of each call between the ranks, and fails with a message where they "
                    "differ, instead of hanging."
                ),
                cost="heavy",
                vendor="nvidia",
                versions=(("nccl", ">=2.29.7"),),
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2",),
            ),
            Variable(
                name="TORCH_CPP_LOG_LEVEL",
                value="INFO",
                location=Location(path="configs/debug.yaml", line=66),
                why="Without it most of what TORCH_DISTRIBUTED_DEBUG has to say is not printed.",
                cost="moderate",
                source="https://docs.pytorch.org/docs/stable/debugging_environment_variables.html",
                reader=("libc10.so",),
            ),
            Variable(
                name="NCCL_DEBUG",
                value="INFO",
                location=Location(path="configs/debug.yaml", line=73),
                why=(
                    "NCCL and RCCL say which interfaces, devices and paths they chose, and what failed. RCCL reads "
                    "this name too; nothing reads RCCL_DEBUG."
                ),
                cost="moderate",
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
            ),
            Variable(
                name="NCCL_DEBUG_SUBSYS",
                value="INIT,ENV,NET,GRAPH,COLL",
                location=Location(path="configs/debug.yaml", line=82),
                why=(
                    "Start-up, variables that were read, network, topology, and each collective with its size and "
                    "count."
                ),
                cost="moderate",
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
            ),
            Variable(
                name="NCCL_DEBUG_FILE",
                value="{rank_dir}/nccl.%h.%p.log",
                location=Location(path="configs/debug.yaml", line=89),
                why=(
                    "One file a process instead of standard output (%h is the host, %p the process). Nothing reads "
                    "RCCL_DEBUG_FILE."
                ),
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
            ),
            Variable(
                name="TORCH_NCCL_TRACE_BUFFER_SIZE",
                value="20000",
                location=Location(path="configs/debug.yaml", line=97),
                why="The Flight Recorder reaches ten times as far back; a rank needs some tens of megabytes for it.",
                cost="light",
                versions=(("torch", "<2.8"),),
                source="https://docs.pytorch.org/docs/2.4/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_FR_BUFFER_SIZE",),
            ),
            Variable(
                name="TORCH_FR_BUFFER_SIZE",
                value="20000",
                location=Location(path="configs/debug.yaml", line=106),
                why="The Flight Recorder reaches ten times as far back; a rank needs some tens of megabytes for it.",
                cost="light",
                versions=(("torch", ">=2.8"),),
                source="https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
                reader=("libtorch_cpu.so",),
                same_as=("TORCH_NCCL_TRACE_BUFFER_SIZE",),
            ),
            Variable(
                name="TORCH_NCCL_TRACE_CPP_STACK",
                value="1",
                location=Location(path="configs/debug.yaml", line=115),
                why="The Flight Recorder keeps the C++ stack of each collective as well.",
                cost="moderate",
                versions=(("torch", "<2.8"),),
                source="https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_FR_CPP_STACK",),
            ),
            Variable(
                name="TORCH_FR_CPP_STACK",
                value="1",
                location=Location(path="configs/debug.yaml", line=124),
                why="The Flight Recorder keeps the C++ stack of each collective as well.",
                cost="moderate",
                versions=(("torch", ">=2.8"),),
                source="https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
                reader=("libtorch_cpu.so",),
                same_as=("TORCH_NCCL_TRACE_CPP_STACK",),
            ),
            Variable(
                name="TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
                value="{rank_dir}/flight_recorder_",
                location=Location(path="configs/debug.yaml", line=134),
                why=(
                    "Writing anything into this pipe (torch appends RANK.pipe) makes the rank dump its Flight "
                    "Recorder and go on. The file system of the run directory has to know FIFOs."
                ),
                cost="light",
                versions=(("torch", "<2.8"),),
                source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
            ),
            Variable(
                name="TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
                value="{rank_dir}/flight_recorder_",
                location=Location(path="configs/debug.yaml", line=143),
                why=(
                    "Writing anything into this pipe (torch appends RANK.pipe) makes the rank dump its Flight "
                    "Recorder and go on. The file system of the run directory has to know FIFOs."
                ),
                cost="light",
                versions=(("torch", ">=2.11"),),
                source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
            ),
            Variable(
                name="GLOO_LOG_LEVEL",
                value="INFO",
                location=Location(path="configs/debug.yaml", line=152),
                why="gloo says which device and address it chose.",
                cost="light",
                versions=(("torch", ">=2.11"),),
                source="https://github.com/pytorch/gloo/pull/467",
                reader=("libtorch_cpu.so",),
            ),
        ),
    ),
    "memory-debug": Profile(
        name="memory-debug",
        location=Location(path="configs/memory-debug.yaml", line=4),
        description="an allocator that fragments less, and on AMD the state of the waves at a fault",
        extends=("production",),
        variables=(
            Variable(
                name="PYTORCH_CUDA_ALLOC_CONF",
                value="expandable_segments:True",
                location=Location(path="configs/memory-debug.yaml", line=7),
                why=(
                    "Segments grow instead of being added: a job that runs out of memory without this and not with "
                    "it suffered from fragmentation. Programs that share the GPU's memory by cudaIpcGetMemHandle "
                    "themselves (some custom all-reduces) fail with it."
                ),
                cost="moderate",
                vendor="nvidia",
                versions=(("torch", "<2.9"),),
                source="https://docs.pytorch.org/docs/stable/notes/cuda.html",
                reader=("libc10_cuda.so",),
                same_as=("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
            ),
            Variable(
                name="PYTORCH_HIP_ALLOC_CONF",
                value="max_split_size_mb:512",
                location=Location(path="configs/memory-debug.yaml", line=21),
                why=(
                    "Large blocks are not split: the remedy against fragmentation that these releases of torch have "
                    "on ROCm, where segments cannot grow."
                ),
                cost="moderate",
                vendor="amd",
                versions=(("torch", "<2.9"),),
                source="https://docs.pytorch.org/docs/stable/notes/cuda.html",
                reader=("libc10_hip.so", "libc10.so"),
                same_as=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
            ),
            Variable(
                name="PYTORCH_ALLOC_CONF",
                value="expandable_segments:True",
                location=Location(path="configs/memory-debug.yaml", line=33),
                why=(
                    "Segments grow instead of being added: a job that runs out of memory without this and not with "
                    "it suffered from fragmentation. Programs that share the GPU's memory by cudaIpcGetMemHandle "
                    "themselves (some custom all-reduces) fail with it. It is the name from 2.9 on."
                ),
                cost="moderate",
                vendor="nvidia",
                versions=(("torch", ">=2.9"),),
                source="https://docs.pytorch.org/docs/2.15/cuda_environment_variables.html",
                reader=("libc10.so",),
                same_as=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
            ),
            Variable(
                name="PYTORCH_ALLOC_CONF",
                value="expandable_segments:True",
                location=Location(path="configs/memory-debug.yaml", line=45),
                why=(
                    "Segments grow instead of being added: a job that runs out of memory without this and not with "
                    "it suffered from fragmentation. Programs that share the GPU's memory by hipIpcGetMemHandle "
                    "themselves (some custom all-reduces) fail with it. On ROCm segments can grow from ROCm 7 and "
                    "torch 2.11 on."
                ),
                cost="moderate",
                vendor="amd",
                versions=(("torch", ">=2.11"), ("rocm", ">=7.0")),
                source="https://github.com/pytorch/pytorch/pull/177974",
                reader=("libc10.so",),
                same_as=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
            ),
            Variable(
                name="PYTORCH_ALLOC_CONF",
                value="max_split_size_mb:512",
                location=Location(path="configs/memory-debug.yaml", line=57),
                why=(
                    "Large blocks are not split: the remedy against fragmentation that every torch has on ROCm. It "
                    "is the name from 2.9 on."
                ),
                cost="moderate",
                vendor="amd",
                versions=(("torch", ">=2.9"),),
                source="https://docs.pytorch.org/docs/2.15/cuda_environment_variables.html",
                reader=("libc10.so",),
                same_as=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
            ),
            Variable(
                name="HSA_TOOLS_LIB",
                value="/opt/rocm/lib/librocm-debug-agent.so.2",
                location=Location(path="configs/memory-debug.yaml", line=68),
                why=(
                    "AMD's debug agent prints the registers and the code of the waves that caused a memory fault, "
                    "and of all waves on SIGQUIT. AMD says that it may hang on systems with SELinux."
                ),
                cost="moderate",
                vendor="amd",
                source="https://rocm.docs.amd.com/projects/rocr_debug_agent/en/latest/how-to/user-guide.html",
                reader=("libhsa-runtime64.so.1",),
                needs_file="/opt/rocm/lib/librocm-debug-agent.so.2",
            ),
            Variable(
                name="HSA_ENABLE_DEBUG",
                value="1",
                location=Location(path="configs/memory-debug.yaml", line=79),
                why="The debug agent of ROCm releases before 7.0 needs it.",
                cost="moderate",
                vendor="amd",
                versions=(("rocm", "<7.0"),),
                source="https://github.com/ROCm/rocr_debug_agent",
                reader=("libhsa-runtime64.so.1",),
                needs_file="/opt/rocm/lib/librocm-debug-agent.so.2",
            ),
        ),
    ),
    "minimal": Profile(
        name="minimal",
        location=Location(path="configs/minimal.yaml", line=3),
        description="a traceback for every crash, and an end for every failed collective; nothing else",
        variables=(
            Variable(
                name="SAFERUN_FAULTHANDLER",
                value="1",
                location=Location(path="configs/minimal.yaml", line=5),
                why=(
                    "The start-up hook calls faulthandler.enable(), and removes the variable: the Python stack of "
                    "every thread is printed when a rank dies of SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT; the "
                    "core is still written. PYTHONFAULTHANDLER, which wins over it, would be inherited by every "
                    "child of a rank, and would have signal.getsignal() answer None for these signals, which a "
                    "script cannot restore."
                ),
                source="https://docs.python.org/3/library/faulthandler.html",
                reader=("python: saferun",),
            ),
            Variable(
                name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
                value="1",
                location=Location(path="configs/minimal.yaml", line=16),
                why=(
                    "A collective that failed or timed out aborts its process instead of leaving it hanging. 1, "
                    "which also aborts the communicators, is what torchrun sets (torch by itself takes 3); the name "
                    "without TORCH_ is the old one."
                ),
                source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("NCCL_ASYNC_ERROR_HANDLING",),
            ),
        ),
    ),
    "nccl-debug": Profile(
        name="nccl-debug",
        location=Location(path="configs/nccl-debug.yaml", line=2),
        description="NCCL or RCCL prints on the console what it chose (rank 0) and what went wrong (all ranks)",
        extends=("production",),
        variables=(
            Variable(
                name="NCCL_DEBUG",
                value="WARN",
                location=Location(path="configs/nccl-debug.yaml", line=5),
                ranks=(RankValue(first=0, last=0, value="INFO"),),
                why=(
                    "Rank 0 says which interfaces, devices and paths were chosen; the others print only what went "
                    "wrong. RCCL reads this name too; nothing reads RCCL_DEBUG."
                ),
                cost="light",
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
            ),
            Variable(
                name="NCCL_DEBUG_SUBSYS",
                value="INIT,ENV,NET,GRAPH",
                location=Location(path="configs/nccl-debug.yaml", line=15),
                why="Start-up, variables that were read, network and topology; not each collective.",
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
            ),
            Variable(
                name="TORCH_CPP_LOG_LEVEL",
                value=None,
                location=Location(path="configs/nccl-debug.yaml", line=22),
                ranks=(RankValue(first=0, last=0, value="INFO"),),
                why="c10d says on rank 0 with which timeouts and settings each process group was made.",
                cost="light",
                source="https://docs.pytorch.org/docs/stable/debugging_environment_variables.html",
                reader=("libc10.so",),
            ),
        ),
    ),
    "none": Profile(
        name="none",
        location=Location(path="configs/none.yaml", line=2),
        description="no variables; the ranks get what torchrun would give them",
    ),
    "production": Profile(
        name="production",
        location=Location(path="configs/production.yaml", line=23),
        description="the default; evidence for failures, at little cost to a healthy job",
        extends=("minimal",),
        variables=(
            Variable(
                name="NCCL_DEBUG",
                value="WARN",
                location=Location(path="configs/production.yaml", line=28),
                why=(
                    "NCCL and RCCL write down what went wrong before a call failed: torch's exception quotes the "
                    "last warning only, which is a consequence in most cases. NVIDIA calls it the least for "
                    "production; a healthy job writes nothing but NCCL's version."
                ),
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
                together_with="NCCL_DEBUG_FILE",
            ),
            Variable(
                name="NCCL_DEBUG_FILE",
                value="{rank_dir}/nccl.%h.%p.log",
                location=Location(path="configs/production.yaml", line=39),
                why=(
                    "One file a process in the rank's directory instead of standard output (%h is the host, %p the "
                    "process)."
                ),
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
                together_with="NCCL_DEBUG",
            ),
            Variable(
                name="TORCH_SYMBOLIZE_MODE",
                value="dladdr",
                location=Location(path="configs/production.yaml", line=48),
                why=(
                    "Names the functions of C++ stacks from the symbol tables. The default starts addr2line, which "
                    "takes most of a second for the first exception on a CPU build and can take minutes on a CUDA "
                    "build; dladdr gives no line numbers."
                ),
                source="https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
                reader=("libtorch_cpu.so",),
                same_as=("TORCH_DISABLE_ADDR2LINE",),
            ),
            Variable(
                name="TORCH_NCCL_TRACE_BUFFER_SIZE",
                value="2000",
                location=Location(path="configs/production.yaml", line=60),
                why=(
                    "The Flight Recorder keeps the last 2000 collectives of each rank, with the Python line that "
                    "issued them: which shows the rank that fell out of step. It costs one walk of the Python stack "
                    "for each collective."
                ),
                cost="light",
                versions=(("torch", "<2.8"),),
                source="https://docs.pytorch.org/docs/2.4/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_FR_BUFFER_SIZE",),
            ),
            Variable(
                name="TORCH_FR_BUFFER_SIZE",
                value="2000",
                location=Location(path="configs/production.yaml", line=71),
                why=(
                    "The Flight Recorder keeps the last 2000 collectives of each rank, with the Python line that "
                    "issued them: which shows the rank that fell out of step. It is torch's own value from 2.11, and "
                    "costs one walk of the Python stack for each collective."
                ),
                cost="light",
                versions=(("torch", ">=2.8"),),
                source="https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
                reader=("libtorch_cpu.so",),
                same_as=("TORCH_NCCL_TRACE_BUFFER_SIZE",),
            ),
            Variable(
                name="TORCH_NCCL_DUMP_ON_TIMEOUT",
                value="1",
                location=Location(path="configs/production.yaml", line=83),
                why=(
                    "When a collective fails or times out on one rank, every rank writes its Flight Recorder to a "
                    "file before it ends. The ranks ask the store once a second whether one of them has failed. With "
                    "torch 2.4 that would end a rank when the store does, and with 2.5 a rank would hold its GPU for "
                    "8 minutes after each error."
                ),
                cost="light",
                versions=(("torch", ">=2.6,<2.15"),),
                source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_FR_DUMP_ON_TIMEOUT",),
            ),
            Variable(
                name="TORCH_FR_DUMP_ON_TIMEOUT",
                value="1",
                location=Location(path="configs/production.yaml", line=95),
                why=(
                    "When a collective fails or times out on one rank, every rank writes its Flight Recorder to a "
                    "file before it ends. The ranks ask the store once a second whether one of them has failed."
                ),
                cost="light",
                versions=(("torch", ">=2.15"),),
                source="https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/FlightRecorder.hpp",
                reader=("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_NCCL_DUMP_ON_TIMEOUT",),
            ),
            Variable(
                name="TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
                value="{rank_dir}/flight_recorder_",
                location=Location(path="configs/production.yaml", line=107),
                why=(
                    "Puts the Flight Recorder's dump beside the rank's output instead of into /tmp, where the next "
                    "job overwrites it."
                ),
                versions=(("torch", "<2.8"),),
                source="https://docs.pytorch.org/docs/2.4/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_FR_DUMP_TEMP_FILE",),
            ),
            Variable(
                name="TORCH_FR_DUMP_TEMP_FILE",
                value="{rank_dir}/flight_recorder_",
                location=Location(path="configs/production.yaml", line=116),
                why=(
                    "Puts the Flight Recorder's dump beside the rank's output instead of into the user's cache, "
                    "where the next job overwrites it."
                ),
                versions=(("torch", ">=2.8"),),
                source="https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/FlightRecorder.hpp",
                reader=("libtorch_cpu.so",),
                same_as=("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
            ),
        ),
    ),
    "slow-network": Profile(
        name="slow-network",
        location=Location(path="configs/slow-network.yaml", line=5),
        description="longer patience with a slow or lossy network; a dead host is noticed later",
        extends=("production",),
        variables=(
            Variable(
                name="NCCL_IB_TIMEOUT",
                value="22",
                location=Location(path="configs/slow-network.yaml", line=8),
                why=(
                    "An InfiniBand or RoCE adapter waits 4 µs * 2^22, about 17 s, for each answer before it repeats "
                    "(the default is 20, and 18 before NCCL 2.23): against ibv_poll_cq failing with error 12 on "
                    "large networks."
                ),
                cost="light",
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2", "librccl.so.1"),
                yields_to_nccl_conf=True,
            ),
            Variable(
                name="NCCL_SOCKET_RETRY_CNT",
                value="60",
                location=Location(path="configs/slow-network.yaml", line=18),
                why=(
                    "A TCP connection that is refused, times out or finds no host is tried again for about 3 minutes "
                    "instead of 1; the pause grows by 100 ms each time."
                ),
                cost="light",
                vendor="nvidia",
                versions=(("nccl", ">=2.24"),),
                source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
                reader=("libnccl.so.2",),
                yields_to_nccl_conf=True,
            ),
            Variable(
                name="TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
                value="30000",
                location=Location(path="configs/slow-network.yaml", line=31),
                why=(
                    "The Flight Recorder's dump gets 30 s to reach a slow file system (torch gives it 15 s). The "
                    "watchdog waits up to four times that: after an NCCL error every rank holds its GPU for up to 2 "
                    "minutes before it ends."
                ),
                cost="light",
                versions=(("torch", ">=2.8,<2.15"),),
                source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
                reader=("libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC",),
            ),
            Variable(
                name="TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC",
                value="30000",
                location=Location(path="configs/slow-network.yaml", line=42),
                why=(
                    "The Flight Recorder's dump gets 30 s to reach a slow file system (torch gives it 15 s). The "
                    "watchdog waits up to four times that: after an NCCL error every rank holds its GPU for up to 2 "
                    "minutes before it ends."
                ),
                cost="light",
                versions=(("torch", ">=2.15"),),
                source="https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/FlightRecorder.hpp",
                reader=("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so"),
                same_as=("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",),
            ),
        ),
    ),
}
