"""What runs out on a host: memory, shared memory, disk, descriptors; and workers that die of it. Pure.

Sources: errno(3); messages of torch's shared-memory allocator and data loader; the kernel's OOM killer.
"""

from __future__ import annotations

import signal

from saferun.diagnosis.causes.calls import is_of_socket, would_wait
from saferun.diagnosis.causes.failure import Failure, cause
from saferun.diagnosis.causes.file_errors import FILE_SYSTEM, KERNEL, OF_A_TOOL
from saferun.diagnosis.causes.texts import TextRule, by_text, final_lines, first_line
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import OomKill
from saferun.text.wording import size_text

_LESS_MEMORY = "use fewer data-loader workers or ranks per host, load less at once, or ask for more memory"
# A call that fails does so because of a limit, or because the kernel promises no more than there is.
_LESS_MEMORY_OR_LIMIT = f"{_LESS_MEMORY}; `ulimit -v` and vm.overcommit_memory limit it too"
_OOM_LINE = LazyPattern(r"(?:Killed process|oom-kill:.{0,400}[,:]pid=) ?(\d{1,10})\b")
# Slurm (with its own limit and with a cgroup's), PBS, LSF, Kubernetes.
_SCHEDULER_OOM = LazyPattern(
    r"(?:slurmstepd|srun)\S{0,80}: (?:error: )?.{0,80}(?:oom[-_]kill|Out [Oo]f [Mm]emory"
    r"|[Ee]xceeded .{0,20}memory limit)"
    r"|PBS: job killed: v?mem |\bTERM_MEMLIMIT\b|\bOOM[ -]?[Kk]illed\b|\bnode was low on resource: memory\b"
    r"|\bMemory cgroup out of memory\b|\bMemoryPressure\b"
)
# Of a job's step, whoever of it was killed: the rank itself may be the shell or the launcher around that.
_STEP_OOM = LazyPattern(
    r"^slurmstepd\S{0,80}: error: Detected \d{1,8} oom[-_]kill event|^srun\S{0,40}: error: .{1,80}: Out Of Memory"
)
# The kernel's own lines, as a script prints them.
_KERNEL_OOM = LazyPattern(r"\b(?:Memory cgroup out|Out) of memory: Killed process \d|\boom-kill:constraint=CONSTRAINT_")
_KILLED_WORKER = LazyPattern(r"DataLoader worker \(pid (\d{1,10})\) is killed by signal: ([\w ]{1,40}?)\. ?")
_LOST_WORKER = LazyPattern(
    r"DataLoader (?:worker \(pid(?:\(s\))? (?=[\d, ]{1,80}\) exited unexpectedly)"
    r"|\d{1,4} workers? exit(?:ed)? unexpectedly, pids: )([\d, ]{1,80})"
)
# A child that SIGKILL has ended, or that left nothing behind: as process pools, subprocess, torch and joblib put it.
_LOST_CHILD = LazyPattern(
    r"\bBrokenProcessPool\b|\bdied with <Signals\.SIGKILL: 9>|\bterminated with signal SIGKILL\b"
    r"|DataLoader worker \(pid\(s\) [\d, ]{1,80}\) exited unexpectedly(?! with exit code \d)"
    r"|\bexit codes of the workers are .{0,120}SIGKILL\(-9\)"
)
_BUS_IN_WORKER = LazyPattern(r"Unexpected bus error encountered in worker|insufficient shared memory \(shm\)")
_SEGFAULT_IN_WORKER = LazyPattern(r"Unexpected segmentation fault encountered in worker")
_LOST_CONNECTIONS = frozenset({"ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError"})
_LOADER = "torch/utils/data/dataloader.py"
_SHM_ADVICE = (
    "give it a larger /dev/shm (docker: --shm-size or --ipc=host; Kubernetes: an emptyDir with medium Memory), "
    "or use fewer data-loader workers"
)
_NO_MEMORY = "the host has no memory left"
_REFUSED = "cannot create another process or thread: a limit is usually the reason"
_DISK_ADVICE = "make room (df -h, df -i, quota), or write elsewhere"
_PROCESS_ADVICE = (
    "look at `ulimit -u` and the pids limit of the container or cgroup (pids.max); OMP_NUM_THREADS and "
    "OPENBLAS_NUM_THREADS set how many threads each rank starts"
)
_FILES_ADVICE = (
    "raise `ulimit -n`, close what is opened, or call torch.multiprocessing.set_sharing_strategy('file_system')"
)

# The more special first: full shared memory has the message of a full disk.
_EXHAUSTED = (
    TextRule(
        "too_many_open_files",
        LazyPattern(r"Too many open files|\[Errno 2[34]\]|received \d{1,6} items of ancdata|\bE[MN]FILE\b"),
        "too many open files",
        _FILES_ADVICE,
        in_context=True,
    ),
    TextRule(
        "too_many_open_files",
        LazyPattern(
            r"(?:" + OF_A_TOOL + r"|\b(?:[Ff]ail\w{0,3}|[Ee]rror|FATAL)\b.{0,200})Too many open files(?: in system)?$"
        ),
        "too many open files",
        _FILES_ADVICE,
        must_be_last=True,
    ),
    TextRule(
        "file_missing",
        LazyPattern(r"unable to open shared memory object </?torch_.{0,120}: No such file or directory"),
        "an object in shared memory is gone: the process that had made it has ended, or /dev/shm was cleared",
        "look at how the process that made it ended (a data-loader worker, torch_shm_manager), and at what clears "
        "/dev/shm (systemd at the end of a login: RemoveIPC=yes)",
        in_context=True,
        in_last_lines=True,
    ),
    TextRule(
        "shared_memory_exhausted",
        LazyPattern(
            r"shared memory ?\(shm\).{0,200}|unable to (?:write to file|resize file|mmap).{0,40}</?torch_"
            r"|out of shared memory|/dev/shm.{0,200}No space left|No space left.{0,80}/dev/shm"
            r"|creating shared memory segment(?!.{0,160}[Pp]ermission denied).{0,160}"
            r"|failed to extend /dev/shm|unable to open shared memory object </torch_(?!.{0,120}: Permission denied)"
            r"|BufferPool.{0,80}shm"
            r"|[Cc]ouldn't open shared (?:file mapping|event)|shmget\(.{0,120}No space left"
            r"|\b[Oo]bject ?[Ss]tore\b.{0,60}\b(?:is|because it is) full\b"
        ),
        "shared memory (/dev/shm) is full",
        _SHM_ADVICE,
        in_context=True,
        in_last_lines=True,
    ),
    TextRule(
        "stale_file_handle",
        LazyPattern(
            r"(?:\[Errno 116\] )?Stale (?:NFS )?file handle(?:: '(.{1,200}?)'|: (/.{1,200}))?|\[Errno 116\]|\bESTALE\b"
        ),
        lambda _, match: (
            "a file on a network file system was replaced or removed by another host (stale file handle)"
            + (f": {match[1] or match[2]}" if match[1] or match[2] else "")
        ),
        "do not replace or remove files that a job reads; if the error persists, remount the file system",
        in_context=True,
    ),
    TextRule(
        "stale_file_handle",
        LazyPattern(OF_A_TOOL + r"Stale (?:NFS )?file handle$"),
        "a file on a network file system was replaced or removed by another host (stale file handle)",
        "do not replace or remove files that a job reads; if the error persists, remount the file system",
        in_last_lines=True,
    ),
    TextRule(
        "disk_full",
        LazyPattern(r"(?:No space left on device|Disk quota exceeded)(?:: '(.{1,200}?)'|: (/.{1,200}))?$"),
        lambda _, match: (
            f"no space left: {match[1] or match[2]}" if match[1] or match[2] else "no space left on a disk"
        ),
        _DISK_ADVICE,
        in_context=True,
    ),
    TextRule(
        "disk_full",
        # Also of programs that report their own end by it.
        LazyPattern(
            r"(?:"
            + OF_A_TOOL
            + r"|\b(?:[Ff]ail\w{0,3}|[Ee]rror|FATAL)\b.{0,200})(No space left on device|Disk quota exceeded)$"
        ),
        "no space left on a disk: {0}",
        _DISK_ADVICE,
        in_last_lines=True,
    ),
    TextRule(
        "disk_full",
        # Kubernetes' kubelet.
        LazyPattern(
            r"\b(low on resource: (?:ephemeral-storage|inodes)\b.{0,120}|ephemeral local storage usage exceeds\b.{0,80}"
            r"|local ephemeral storage limit\b.{0,80}|[Uu]sage of EmptyDir volume .{1,80} exceeds the limit.{0,40})"
        ),
        "the pod ran out of ephemeral storage: {0}",
        "ask for more (ephemeral-storage, sizeLimit), or write to a volume; look at what fills /tmp and the caches",
        in_last_lines=True,
    ),
    TextRule(
        "disk_full",
        LazyPattern(
            r"No space left on device|[Dd]isk quota exceeded|\[Errno (?:28|122)\]|\b(?:ENOSPC|EDQUOT)\b"
            r"|database or disk is full|\b(?:[Dd]isk|[Ff]ile ?system|[Vv]olume|[Pp]artition) is full\b"
            r"|\b[Qq]uota (?:has been |is )?(?:exceeded|exhausted)\b.{0,80}\b(?:disk|file|inode|home|scratch|block)"
            r"|\b(?:[Nn]ot enough|[Ii]nsufficient|[Rr]an out of|[Oo]ut of) (?:free |available )?(?:disk|storage)\b"
        ),
        "no space left on a disk",
        _DISK_ADVICE,
        in_context=True,
    ),
    TextRule(
        "disk_full",
        LazyPattern(
            r"PytorchStreamWriter failed writing|inline_container\.cc:\d{1,6}\] \. unexpected pos|\biostream error"
        ),
        "torch.save could not write its file: the disk or the quota is full, in most cases",
        _DISK_ADVICE,
        in_context=True,
        must_be_last=True,
    ),
    TextRule(
        "host_out_of_memory",
        LazyPattern(r"can't allocate memory: you tried to allocate (\d{1,20}) bytes"),
        lambda _, match: f"no host memory left for this process: tried to allocate {size_text(int(match[1]))}",
        _LESS_MEMORY_OR_LIMIT,
        must_be_last=True,
    ),
    TextRule(
        "host_out_of_memory",
        LazyPattern(r"\bUnable to allocate (\S{1,12} [KMGTPE]i?B) for an array with shape (\(.{0,200}?\))"),
        "no host memory left for this process: tried to allocate {0} for an array of shape {1}",
        f"check whether that shape is meant: a wrong one may be larger than any host; else {_LESS_MEMORY_OR_LIMIT}",
        must_be_last=True,
    ),
    TextRule(
        "host_out_of_memory",
        LazyPattern(
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|bytes on host: CUDA_ERROR_OUT_OF_MEMORY"
            r"|could not allocate pinned host memory"
        ),
        _NO_MEMORY,
        _LESS_MEMORY,
        in_last_lines=True,
    ),
    TextRule(
        "host_out_of_memory",
        LazyPattern(r"\bpage allocation failure: order:\d"),
        _NO_MEMORY,
        _LESS_MEMORY,
        must_be_last=True,
    ),
    TextRule(
        "host_out_of_memory",
        LazyPattern(r"java\.lang\.OutOfMemoryError: (?:Java heap space|GC overhead)"),
        "the Java process that it uses has no heap left",
        "give it a larger heap (-Xmx; Spark: spark.driver.memory, spark.executor.memory), or load less at once",
        must_be_last=True,
    ),
    TextRule(
        "host_out_of_memory",
        LazyPattern(
            r"\b(?:node|host|machine|system) (?:is )?running (?:low on|out of) memory"
            r"|\d% of the memory on node \S{1,80} is used|java\.lang\.OutOfMemoryError"
            r"|\b(?:[Nn]ot enough|[Ii]nsufficient|[Rr]an out of) (?:free |available )?"
            r"(?:(?:system |host )(?:memory|RAM)\b(?! space)|RAM\b)"
        ),
        _NO_MEMORY,
        _LESS_MEMORY,
    ),
    TextRule(
        "cuda_out_of_memory",
        LazyPattern(
            r"\b(?:[Nn]ot enough|[Ii]nsufficient|[Rr]an out of) (?:free |available )?(?:GPU |device )?memory "
            r"(?:(?:left|free|available) )?(?:in|on) (?:the |a |this )?(?:GPU|HBM|[Cc][Uu][Dd][Aa]|device)\b"
        ),
        "a GPU has no memory left for what is asked of it",
        "ask for less (a smaller batch, shorter sequences), or for a larger share of its memory; nvidia-smi shows what "
        "else uses the GPU",
    ),
    TextRule(
        "host_out_of_memory",
        # Not of a GPU, or of NVSHMEM, in the same words.
        LazyPattern(
            r"^(?!.{0,500}(?:\b(?:GPUs?|HBM|VRAM|XPU|NPU|TPU)\b|\b[Dd]evices?\b(?! (?:cpu|CPU|host)\b)"
            r"|\b(?:cuda|CUDA|hip|HIP|xpu|npu)\b|\b[Ss]ymmetric (?:heap|memory)\b))"
            r".{0,500}(?:\b(?:[Nn]ot enough|[Ii]nsufficient|[Rr]an out of) (?:free |available )?memory\b(?! space)"
            r"|\b(?:[Uu]nable|[Ff]ailed) to allocate \S{1,20} ?(?:bytes|[KMGT]i?B)\b)"
        ),
        _NO_MEMORY,
        _LESS_MEMORY,
    ),
    TextRule(
        "process_limit",
        LazyPattern(r"\bcgroup: fork rejected by pids controller\b"),
        _REFUSED,
        _PROCESS_ADVICE,
        must_be_last=True,
    ),
    TextRule(
        "process_limit",
        LazyPattern(
            r"pthread_create\b(?:.{0,60}: Resource temporarily unavailable|(?:\(\))? is 11\b)"
            r"|can't start new thread"
            r"|\bfork: (?:retry: )?Resource temporarily unavailable|RLIMIT_NPROC \d{1,12} current"
            r"|Thread creation failed: Resource temporarily unavailable"
            r"|^RuntimeError: (?:Resource temporarily unavailable|thread constructor failed)"
        ),
        _REFUSED,
        _PROCESS_ADVICE,
        in_last_lines=True,
    ),
    TextRule(
        "host_out_of_memory",
        LazyPattern(
            r"^(?:numpy\..{0,60})?(?:_Array)?MemoryError\b|\bstd::bad_alloc\b|\[Errno 12\]|Cannot allocate memory"
        ),
        "no host memory left for this process",
        _LESS_MEMORY_OR_LIMIT,
    ),
)


# A lock or a socket that is not to wait fails in the same words.
_WOULD_WAIT = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
_WOULD_WAIT_OR_REFUSED = TextRule(
    "process_limit",
    LazyPattern(r"^BlockingIOError: \[Errno 11\] Resource temp\w{1,8} \w{1,12}$"),
    _REFUSED,
    _PROCESS_ADVICE,
    in_last_lines=True,
)
# Without a path, as a socket has none.
# Communication error, not supported, not connected, shut down, host down: sockets have them, too.
_PATHLESS = LazyPattern(r"OSError: \[Errno (?:19|70|71|95|107|108|112)\] [^:]{1,80}$")
# Semaphores and blocks of shared memory, which are files in /dev/shm; the message has no path, or only the file's name.
_IN_SHARED_MEMORY = ("/multiprocessing/synchronize.py", "/multiprocessing/shared_memory.py")
_NO_SPACE = LazyPattern(r"^OSError: \[Errno 28\] ")


def host_oom_kill(failure: Failure) -> Cause | None:
    """The kernel's OOM killer ended the rank, or a worker of its data loader."""
    killed = _killed_worker(failure)
    if killed is not None:
        pid, who = killed, f"its data-loader worker {killed} was "
    elif failure.signum == signal.SIGKILL:
        pid, who = failure.end.pid, ""
    else:
        lost = _child_lost_to_oom(failure)
        if lost is not None:
            return lost
        step = first_line(_STEP_OOM, failure.closing_lines)
        message = "a process of its step was killed by the kernel's OOM killer"
        kernel = first_line(_KERNEL_OOM, final_lines(failure))
        if step is None and kernel is not None:
            message = "its last lines report a kill by the kernel's OOM killer"
            return cause(failure, "host_oom_kill", message, _LESS_MEMORY, proof=kernel[0])
        return cause(failure, "host_oom_kill", message, _LESS_MEMORY, proof=step[0]) if step is not None else None
    line = next((line for line in reversed(failure.kernel_lines) if _names(line, pid)), "")
    scheduler = first_line(_SCHEDULER_OOM, reversed(failure.last_lines))
    oom = failure.oom
    is_reported = oom is not None and oom.kills > 0
    # Where the log names others, a count for the whole host does not count for this one. A cgroup's does: its processes
    # are ours, and in a container their numbers differ from those in the log.
    if oom is not None and is_reported and oom.scope != "cgroup" and oom.pids and pid not in oom.pids:
        is_reported = False
    if not (is_reported or line or scheduler):
        return None
    limits: list[str] = []
    if oom is not None and is_reported:
        limits += _limit(oom)
        is_it = not oom.pids or pid in oom.pids
        limits += [f"it used {size_text(oom.rss_bytes)}"] if oom.rss_bytes and is_it else []
    known = f" ({', '.join(limits)})" if limits else ""
    message = f"{who}killed by the kernel's OOM killer{known}"
    source = oom.source if oom is not None and is_reported else ""
    return cause(failure, "host_oom_kill", message, _LESS_MEMORY, proof=line or (scheduler[0] if scheduler else source))


def _limit(oom: OomKill) -> list[str]:
    return [f"{oom.scope} limit {size_text(oom.limit_bytes)}"] if oom.limit_bytes else []


def _child_lost_to_oom(failure: Failure) -> Cause | None:
    """A process that the rank had started is gone without a word, and the OOM killer was at work in its cgroup."""
    oom = failure.oom
    if oom is None or oom.kills <= 0 or oom.scope != "cgroup" or oom.source == "/proc/vmstat":
        return None
    ranks = {failure.end.pid, *(pid for pid, _ in failure.others)}
    if oom.pids and ranks.issuperset(oom.pids):
        return None
    found = first_line(_LOST_CHILD, (*failure.messages, *failure.context))
    if found is None or any(first_line(fault, failure.lines) for fault in (_BUS_IN_WORKER, _SEGFAULT_IN_WORKER)):
        return None
    known = "".join(f" ({limit})" for limit in _limit(oom))
    message = "a process that it had started was lost, and a process of its host was killed by the OOM killer meanwhile"
    return cause(failure, "host_oom_kill", f"{message}{known}", _LESS_MEMORY, proof=found[0])


def _names(line: str, pid: int) -> bool:
    match = _OOM_LINE.search(line[:1000])
    return match is not None and int(match[1]) == pid


def _killed_worker(failure: Failure) -> int | None:
    found = first_line(_KILLED_WORKER, (*failure.messages, *failure.context))
    return int(found[1][1]) if found is not None and found[1][2] == "Killed" else None


def data_loader_worker(failure: Failure) -> Cause | None:
    """A worker of the rank's data loader died."""
    messages = (*failure.messages, *failure.context)
    found = first_line(_KILLED_WORKER, messages)
    if found is not None:
        line, match = found
        # Workers report bus errors so, whatever they come from; of all places /dev/shm is where they come from.
        if match[2] == "Bus error":
            message = f"shared memory (/dev/shm) is full: data-loader worker {match[1]} died of a bus error"
            return cause(failure, "shared_memory_exhausted", message, _SHM_ADVICE, proof=line)
        message = f"its data-loader worker {match[1]} died ({match[2]})"
        return cause(failure, "data_loader_worker_killed", message, _worker_advice(match[2]), proof=line)
    found = first_line(_LOST_WORKER, messages)
    if found is None:
        return _lost_while_it_sent(failure)
    line, match = found
    fuller = first_line(LazyPattern(r"exited unexpectedly with exit code (\d{1,3})"), messages)
    message = f"its data-loader worker {match[1].strip()} ended unexpectedly"
    if fuller is not None:
        line = fuller[0]
        message += f" with exit code {fuller[1][1]}"
    elif first_line(_BUS_IN_WORKER, failure.lines) is not None:
        message = f"shared memory (/dev/shm) is full: data-loader worker {match[1].strip()} died of a bus error"
        return cause(failure, "shared_memory_exhausted", message, _SHM_ADVICE, proof=line)
    segfault = first_line(_SEGFAULT_IN_WORKER, failure.lines)
    advice = _worker_advice("Segmentation fault" if segfault else "")
    return cause(failure, "data_loader_worker_killed", message, advice, proof=line)


def _lost_while_it_sent(failure: Failure) -> Cause | None:
    """A worker that died while the rank took something from it leaves a broken connection behind."""
    error = failure.error
    if error is None or error.last.exception not in _LOST_CONNECTIONS:
        return None
    if not any(frame.file.endswith(_LOADER) for frame in error.last.frames):
        return None
    proof = error.last.message[0]
    if (found := first_line(_BUS_IN_WORKER, failure.lines)) is not None:
        message = "shared memory (/dev/shm) is full: a data-loader worker died of a bus error"
        return cause(failure, "shared_memory_exhausted", message, _SHM_ADVICE, proof=found[0])
    if (found := first_line(_SEGFAULT_IN_WORKER, failure.lines)) is not None:
        message, proof = "a data-loader worker died (Segmentation fault)", found[0]
        return cause(failure, "data_loader_worker_killed", message, _worker_advice("Segmentation fault"), proof=proof)
    message = "a data-loader worker died while it transferred a batch"
    return cause(failure, "data_loader_worker_killed", message, _worker_advice(""), proof=proof)


def _worker_advice(signal_text: str) -> str:
    if signal_text == "Killed":
        return "check dmesg for the OOM killer; else another process or user sent SIGKILL"
    if signal_text == "Segmentation fault":
        return "run it once with num_workers=0, to see the crash in the rank itself; look at the decoders it uses"
    return (
        "run it once with num_workers=0, to see what the worker dies of; where it leaves no message, look in the "
        "kernel log for the OOM killer (dmesg)"
    )


def exhausted(failure: Failure) -> Cause | None:
    """No room, no memory, no descriptors; or a file that has gone stale."""
    if (line := _no_room_for_a_semaphore(failure)) is not None:
        return cause(failure, "shared_memory_exhausted", "shared memory (/dev/shm) is full", _SHM_ADVICE, proof=line)
    found = by_text(failure, (*_EXHAUSTED, _WOULD_WAIT_OR_REFUSED))
    if found is not None and found.proof.startswith(_WOULD_WAIT) and would_wait(failure.error, found.proof):
        return None
    return found


def _no_room_for_a_semaphore(failure: Failure) -> str | None:
    """The message where a call of multiprocessing's that makes a file in /dev/shm has found no room for it."""
    error = failure.error
    frames = error.innermost.frames if error is not None else ()
    if error is None or not frames or not frames[-1].file.endswith(_IN_SHARED_MEMORY):
        return None
    line = error.innermost.message[0] if error.innermost.message else ""
    return line if _NO_SPACE.match(line) else None


def file_system_error(failure: Failure) -> Cause | None:
    """A file system, or the storage below it, did not do what it must."""
    found = by_text(failure, (*FILE_SYSTEM, KERNEL))
    if found is not None and _PATHLESS.search(found.proof) and is_of_socket(failure.error, found.proof):
        return None
    return found


def shared_memory(failure: Failure) -> Cause | None:
    """A rank that died of a bus error, and whose output names shared memory."""
    if failure.signum != signal.SIGBUS:
        return None
    found = first_line(
        LazyPattern(r"insufficient shared memory|/dev/shm|out of shared memory"), reversed(failure.last_lines)
    )
    if found is None:
        return None
    message = "shared memory (/dev/shm) is full: bus error"
    return cause(failure, "shared_memory_exhausted", message, _SHM_ADVICE, proof=found[0])
