"""What one rank waits in: a table of rules, of which the first that knows decides. Pure."""

from __future__ import annotations

from saferun.diagnosis.frames import Calls, is_native, last_name, location_text, native_name
from saferun.diagnosis.merged_stacks import WORKER_NAME, main_thread, started_in_child
from saferun.diagnosis.peer_rules import (
    found_in_collective,
    in_backward,
    in_collective,
    in_native_collective,
    in_pending_collective,
    in_store,
    on_gpu,
)
from saferun.diagnosis.rank_view import (
    Found,
    RankView,
    Rule,
    first_found,
    is_at_work,
    library_call,
    library_calls,
    native_call,
    native_calls,
    syscall,
    user_frame,
    waits_on,
    wchan,
)
from saferun.evidence.job_evidence import StackDump, ThreadStack
from saferun.text.wording import NOT_PYTHON

# ------------------------------------------------------------------------------------- states of the process as a whole


def _ended(view: RankView) -> Found | None:
    if view.ended:
        return Found("dead", view.ended, f"has ended ({view.ended})")
    if view.process is None or view.frames:
        return None
    if view.process.state in {"Z", "X", "?"}:
        return Found("dead", "exited during the capture", "has ended")
    if view.process.core_dumping:
        return Found("dead", "the kernel writes its core", "crashes: the kernel writes its core")
    return None


def _traced(view: RankView) -> Found | None:
    process = view.process
    if process is not None and (process.tracer_pid or process.state == "t"):
        who = f"process {process.tracer_pid}" if process.tracer_pid else "a debugger"
        return Found("debugger", f"traced by {who}", f"is held by {who}, which traces it")
    frame = library_call(view, _DEBUGGERS)
    if frame is not None:
        name = next(name for name in _DEBUGGER_NAMES if name in frame.file)
        return Found("debugger", name, f"waits at a prompt of the debugger ({name})")
    return None


_DEBUGGERS = Calls(
    ("/pdb.py", ()),
    ("/bdb.py", ()),
    ("/IPython/core/debugger.py", ()),
    ("/debugpy/adapter/__main__.py", ()),
    ("/pydevd.py", ("do_wait_suspend", "_do_wait_suspend")),
    ("/torch/distributed/__init__.py", ("interaction", "breakpoint")),
)
_DEBUGGER_NAMES = ("IPython", "debugpy", "pydevd", "pdb", "bdb", "torch")


def _stopped(view: RankView) -> Found | None:
    if view.process is not None and view.process.state == "T":
        return Found("stopped", "state T", "is stopped (state T)")
    return None


def _uninterruptible(view: RankView) -> Found | None:
    process = view.process
    if process is None or process.state != "D" or (view.hang is not None and view.rank in view.hang.busy):
        return None
    where = " in ".join(filter(None, (process.syscall, process.wchan)))
    what = ", ".join(filter(None, (where, process.waits_on))) or "state D"
    return Found("uninterruptible", what, f"is in uninterruptible sleep (state D: {what})")


def _unanswering(view: RankView) -> Found | None:
    if view.frames:
        return None
    if view.pending:
        return found_in_collective(view.pending)
    found = first_found(view, _KERNEL_RULES)
    if found is not None:
        return found
    if view.is_bare:
        return Found("interpreter", "Python is starting or shutting down", "is starting or shutting down")
    why = view.failure or "no stacks of it"
    return Found("unanswering", why, f"cannot be inspected ({why})")


# -------------------------------------------------------------------------------------------------------- data loading

_LOADER = Calls(("/torch/utils/data/dataloader.py", ()))
_LOADER_WAIT = Calls(
    ("/torch/utils/data/dataloader.py", ("_try_get_data", "_get_data", "_next_data", "_shutdown_workers")),
)
_IN_PROCESS = "_SingleProcessDataLoaderIter"


def _data_loading(view: RankView) -> Found | None:
    frame = library_call(view, _LOADER_WAIT)
    if frame is None or any(_IN_PROCESS in call.function for call in library_calls(view)):
        return None
    short, problem = worker_problem(view)
    return Found("data_loading", short or "its workers", "waits for its data loader", problem=problem)


def worker_problem(view: RankView) -> tuple[str, str]:
    """What the data-loader workers of a rank are stuck in: in short, and with the numbers of the processes.

    Both are empty where none is stuck.
    """
    processes = {process.pid: process for process in view.children if process.name == WORKER_NAME}
    dumps = {dump.pid: dump for dump in view.workers if dump.name == WORKER_NAME}
    stuck: dict[tuple[str, str, str], list[int]] = {}
    for pid in sorted({*processes, *dumps}):
        thread = main_thread(dumps[pid]) if pid in dumps else None
        frames = started_in_child(thread.frames) if thread is not None else ()
        active = thread is not None and thread.active
        inner = RankView(view.rank, view.user, frames, active, processes.get(pid))
        frame = user_frame(frames, view.user)
        # One that waits for the next index to load has nothing to do.
        found = first_found(inner, RULES if frame is not None else _STATE_RULES)
        if found is not None:
            stuck.setdefault((found.detail or found.kind, found.doing, location_text(frame)), []).append(pid)
    if not stuck:
        gone = "" if processes or dumps or not view.children else "no worker of its data loader is left"
        return gone, gone
    (what, doing, location), pids = max(stuck.items(), key=lambda item: (len(item[1]), -item[1][0]))
    at = f" at {location}" if location else ""
    more = f" (and {len(pids) - 1} more)" if len(pids) > 1 else ""
    return f"{what}{at.partition(' in ')[0]} in a worker", f"its data-loader worker pid {pids[0]}{more} {doing}{at}"


# ---------------------------------------------------------------------------------------------------- compile, children

_COMPILERS = frozenset(
    """
        as c++ cc1 cc1plus cicc clang clang++ collect2 cudafe++ fatbinary g++ gcc hipcc ld ld.lld lld ninja nvcc
        ptxas
    """.split()
)
_COMPILE_CALLS = Calls(
    ("/torch/_inductor/async_compile.py", ()),
    ("/torch/_inductor/cpp_builder.py", ()),
    ("/torch/_inductor/graph.py", ()),
    ("/torch/_inductor/scheduler.py", ()),
    ("/torch/_inductor/codecache.py", ("compile", "load", "load_async", "load_by_key_path", "compile_and_load")),
    ("/torch/_dynamo/convert_frame.py", ()),
    ("/torch/utils/cpp_extension.py", ()),
    ("/triton/compiler/compiler.py", ()),
    ("/triton/runtime/build.py", ()),
)
_CHILD_WAITS = Calls(
    ("/subprocess.py", ()),
    ("/multiprocessing/popen_fork.py", ("poll", "wait")),
    ("/multiprocessing/process.py", ("join",)),
)
_POOL_WAITS = Calls(("/multiprocessing/pool.py", ("get", "wait", "next", "join", "apply", "map", "starmap")))


def _compile(view: RankView) -> Found | None:
    compiler = next((process for process in view.children if process.name in _COMPILERS), None)
    frame = library_call(view, _COMPILE_CALLS)
    if compiler is None and frame is None:
        return None
    if library_call(view, _FILE_LOCKS) is not None:
        return None
    by = compiler.name if compiler is not None else "torch.compile"
    if frame is not None and frame.file.endswith("/cpp_extension.py") and compiler is None:
        by = "the build of an extension"
    return Found("compile", by, f"compiles ({by})")


def _subprocess(view: RankView) -> Found | None:
    pool = library_call(view, _POOL_WAITS)
    if pool is not None:
        return Found("subprocess", "a process pool", "waits for its process pool", problem=_child_problem(view))
    is_waiting = library_call(view, _CHILD_WAITS) is not None or syscall(view) in {"wait4", "waitid"}
    if not is_waiting and not native_call(view, "wait4", "waitpid", "waitid", "__waitpid", "os_waitpid"):
        return None
    what, message = _awaited_child(view)
    return Found("subprocess", what, f"waits for {message}", problem=_child_problem(view))


def _awaited_child(view: RankView) -> tuple[str, str]:
    """The child that a rank waits for, without and with its number."""
    own = view.process
    awaited = waits_on(view)
    direct = [
        process
        for process in view.children
        if own is not None and process.ppid == own.pid and process.name != WORKER_NAME
    ]
    named = [process for process in direct if f"process {process.pid} " in f"{awaited} "] or (
        direct if len(direct) == 1 else []
    )
    if not named:
        awaited = awaited.removesuffix(" to end") or "a child process"
        return "a child process", awaited
    child = named[0]
    if own is not None and child.command and child.command == own.command:
        return "a forked child", f"its forked child pid {child.pid}"
    program, blank, arguments = (child.command or child.name).partition(" ")
    what = f"{program.rpartition('/')[2]}{blank}{arguments}"
    return what, f"pid {child.pid} ({what})"


def _child_problem(view: RankView) -> str:
    """What a Python child stands in."""
    for dump in view.workers:
        thread = main_thread(dump)
        if thread is None or dump.name == WORKER_NAME:
            continue
        process = next((process for process in view.children if process.pid == dump.pid), None)
        inner = RankView(view.rank, view.user, started_in_child(thread.frames), thread.active, process)
        found = first_found(inner, RULES)
        if found is not None:
            location = location_text(user_frame(inner.frames, view.user))
            return f"its child pid {dump.pid} {found.doing}{f' at {location}' if location else ''}"
    return ""


# --------------------------------------------------------------------------------------------------------------- locks

# Locks that are files which their holder removes: one that is killed leaves its file behind.
_LEFT_BEHIND = (("/torch/utils/file_baton.py", ()), ("/filelock/_soft.py", ()))
# Locks of the kernel on a file, by flock(2) or fcntl(2): they end with their holder, and the file stays.
_FILELOCK = (("/filelock/_api.py", ()), ("/filelock/_unix.py", ()))
_FASTENERS = (("/fasteners/process_lock.py", ()),)
_PORTALOCKER = (("/portalocker/utils.py", ()), ("/portalocker/portalocker.py", ()))
_FILE_LOCKS = Calls(*_LEFT_BEHIND, *_FILELOCK, *_FASTENERS, *_PORTALOCKER)
LOCK_FILE = "a lock file"
KERNEL_LOCK_FILE = f"{LOCK_FILE} ("
_LOCKS: tuple[tuple[Calls, str], ...] = (
    (Calls(*_LEFT_BEHIND), LOCK_FILE),
    (Calls(*_FILELOCK), f"{KERNEL_LOCK_FILE}filelock)"),
    (Calls(*_FASTENERS), f"{KERNEL_LOCK_FILE}fasteners)"),
    (Calls(*_PORTALOCKER), f"{KERNEL_LOCK_FILE}portalocker)"),
    (Calls(("/multiprocessing/queues.py", ()), ("/multiprocessing/connection.py", ())), "a queue between processes"),
    (Calls(("/multiprocessing/synchronize.py", ()), ("/multiprocessing/managers.py", ())), "a lock between processes"),
    (Calls(("/queue.py", ())), "a queue"),
    (Calls(("/concurrent/futures/_base.py", ())), "a future"),
    (Calls(("/concurrent/futures/thread.py", ("shutdown", "__exit__"))), "its thread pool"),
    (Calls(("/threading.py", ("join", "_wait_for_tstate_lock", "_shutdown"))), "another thread to end"),
    (Calls(("/threading.py", ("wait", "wait_for", "acquire", "__enter__"))), ""),
)
_LOCK_NATIVE = tuple(
    """
    PyThread_acquire_lock lock_PyThread rlock_acquire PyMutex _PyMutex _PySemaphore pthread_mutex_lock
    __lll_lock_wait sem_wait __new_sem_wait do_futex_wait semlock_acquire
""".split()
)
_GIL_NATIVE = ("take_gil", "PyEval_RestoreThread", "PyEval_AcquireThread", "PyGILState_Ensure", "pybind11::gil_scoped")


GIL = "the GIL, which another thread holds"
OWN_GIL = "a thread of its process group that needs the GIL, which it holds"
"""What a rank waits for in a deadlock within torch."""
_DESTRUCTORS = ("c10d::ProcessGroup::~", "c10d::ProcessGroupGloo::~", "c10d::ProcessGroupNCCL::~")


def keeps_gil(dump: StackDump) -> bool:
    """Whether the main thread destroys a process group and waits for a thread of it that needs the GIL.

    Whoever destroys a Python object holds it. Seen in torch 2.4: gloo's thread frees the last reference to a tensor.
    """
    main = main_thread(dump)
    if main is None or not _native_names(main, _DESTRUCTORS):
        return False
    others = (thread for thread in dump.threads if thread is not main)
    return any(_native_names(thread, _GIL_NATIVE) and _native_names(thread, ("c10d::",)) for thread in others)


def _native_names(thread: ThreadStack, starts: tuple[str, ...]) -> bool:
    return any(is_native(frame) and native_name(frame.function).startswith(starts) for frame in thread.frames)


def _own_gil(view: RankView) -> Found | None:
    return _in_lock(OWN_GIL) if view.keeps_gil else None


def _lock(view: RankView) -> Found | None:
    if native_call(view, *_GIL_NATIVE):
        return _in_lock(GIL)
    for table, message in _LOCKS:
        frames = [frame for frame in library_calls(view) if frame in table]
        if frames and not is_at_work(view):
            return _in_lock(message or _THREADING.get(frames[-1].function.partition(".")[0], "a lock"))
    if syscall(view) == "flock" or waits_on(view).startswith("a lock on "):
        return _in_lock(waits_on(view) or "a lock on a file")
    if native_call(view, *_LOCK_NATIVE):
        return _in_lock("a lock")
    return None


def _in_lock(what: str) -> Found:
    return Found("lock", what, f"waits for {what}")


_THREADING = {
    "Event": "an event",
    "Barrier": "a barrier between threads",
    "Semaphore": "a semaphore",
    "BoundedSemaphore": "a semaphore",
    "Condition": "a condition",
}


def _futex(view: RankView) -> Found | None:
    if syscall(view).startswith("futex") or "futex" in wchan(view):
        return _in_lock("a lock")
    return None


# ---------------------------------------------------------------------------------------- the kernel's side of the rest

_SLEEPS = frozenset({"nanosleep", "clock_nanosleep"})
_FILE_CALLS = frozenset(
    """
        open openat openat2 creat read write pread64 pwrite64 readv writev preadv pwritev fsync fdatasync sync
        syncfs fallocate ftruncate truncate rename renameat unlink unlinkat stat fstat newfstatat statx
        getdents64 close copy_file_range sendfile mkdir mkdirat renameat2 rmdir link linkat symlink symlinkat
        readlink readlinkat chmod fchmodat fchmodat2 utimes utimensat setxattr getxattr lgetxattr listxattr
        close_range dup2 dup3 msync
    """.split()
)
_SOCKET_CALLS = frozenset(
    """
        recvfrom recvmsg recvmmsg sendto sendmsg sendmmsg connect accept accept4 poll ppoll select pselect6
        epoll_wait epoll_pwait epoll_pwait2 read write readv writev
    """.split()
)
_SOCKETS = ("a connection", "connections to ", "a UDP socket", "the Unix socket", "a Unix socket", "a socket")
_FILES = ("the FIFO", "a FIFO", "the file", "the device", "a pipe")
_NETWORK_CALLS = Calls(
    ("/socket.py", ()),
    ("/ssl.py", ()),
    ("/http/client.py", ()),
    ("/urllib/request.py", ()),
    ("/urllib3/connectionpool.py", ()),
    ("/requests/sessions.py", ()),
    ("/botocore/httpsession.py", ()),
    ("/grpc/_channel.py", ()),
)
_FILE_IO_CALLS = Calls(
    ("/torch/serialization.py", ()),
    ("/numpy/lib/npyio.py", ()),
    ("/numpy/lib/_npyio_impl.py", ()),
    ("/safetensors/torch.py", ()),
    ("/shutil.py", ()),
    ("/zipfile.py", ()),
    ("/tarfile.py", ()),
    ("/pathlib.py", ()),
    ("/h5py/_hl/files.py", ()),
)


def _sleep(view: RankView) -> Found | None:
    native = next(native_calls(view), "")
    if syscall(view) in _SLEEPS or native in {"clock_nanosleep", "nanosleep", "__nanosleep", "usleep", "time_sleep"}:
        is_python = not (native_call(view, "sleep", "usleep") or view.failure.endswith(NOT_PYTHON))
        return Found("sleep", "time.sleep" if is_python else "sleep", "sleeps")
    return None


def _file_io(view: RankView) -> Found | None:
    what = waits_on(view)
    if syscall(view) in _FILE_CALLS and (what.startswith(_FILES) or not what):
        if "partner" in wchan(view) or what.startswith(("the FIFO", "a FIFO")):
            what = what or "a FIFO to be opened at its other end"
            return Found("file_io", what, f"waits for {what}")
        if what == "a pipe" or what.startswith("a pipe,"):
            return Found("file_io", what, f"waits for {what}")
        verb = "writes to" if "write" in syscall(view) or "sync" in syscall(view) else "waits for"
        return Found("file_io", what or syscall(view), f"{verb} {what}" if what else f"is in {syscall(view)}()")
    if what.startswith("the terminal"):
        return Found("file_io", what, f"waits for input from {what}")
    if library_call(view, _FILE_IO_CALLS) is not None and not is_at_work(view):
        return Found("file_io", what or "a file", f"waits for {what or 'a file'}")
    return None


def _network(view: RankView) -> Found | None:
    what = waits_on(view)
    if what.startswith(_SOCKETS) and syscall(view) in _SOCKET_CALLS:
        return Found("network", what, f"waits for {what}")
    native = native_call(view, "recv", "send", "connect", "accept", "SSL_read", "sock_")
    if (library_call(view, _NETWORK_CALLS) is not None or native) and not is_at_work(view):
        return Found("network", what or "a connection", f"waits for {what or 'a connection'}")
    return None


# --------------------------------------------------------------------------------------------------------- what is left


def _spinning(view: RankView) -> Found | None:
    if view.hang is None or view.hang.kind != "spinning" or view.rank not in view.hang.ranks:
        return None
    return Found("spinning", "a long step, or a loop that does not end", "computes")


def _loading_in_process(view: RankView) -> Found | None:
    if any(frame in _LOADER for frame in view.frames):
        return Found("data_loading", "the dataset, in the rank itself", "loads data")
    return None


def _user_code(view: RankView) -> Found | None:
    call, own = next(library_calls(view), None), user_frame(view.frames, view.user)
    in_library = call is not None and own is not None
    if is_at_work(view):
        return Found("user_code", "", "computes")
    what = last_name(call.function) if call is not None and in_library else ""
    call_name = syscall(view)
    if call_name.isidentifier():
        return Found("user_code", what, f"waits in {call_name}()")
    if not view.is_main:
        return Found("user_code", what, "waits")
    return Found("user_code", what, IS_AT if own is not None else "is in no line of the script")


IS_AT = "is"
"""What a rank does of which only the line is known: ``is at train.py:47``."""
_STATE_RULES: tuple[Rule, ...] = (_ended, _traced, _stopped, _uninterruptible)
_KERNEL_RULES: tuple[Rule, ...] = (_subprocess, _sleep, _file_io, _network, _futex)
RULES: tuple[Rule, ...] = (
    *_STATE_RULES,
    _unanswering,
    _own_gil,
    in_store,
    in_collective,
    in_native_collective,
    on_gpu,
    _spinning,
    _data_loading,
    _compile,
    in_backward,
    _subprocess,
    _lock,
    _sleep,
    _file_io,
    _network,
    in_pending_collective,
    _futex,
    _loading_in_process,
    _user_code,
)
"""What is sure comes before what is likely, and the specific before the general."""
