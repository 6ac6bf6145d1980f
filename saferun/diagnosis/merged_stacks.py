"""Stacks of many ranks merged into one tree. Pure.

A stack of a torch program is thirty calls of which five are the user's. What every program has in common is left out,
so that ranks that differ differ early, and can be seen to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from saferun.diagnosis.frames import Calls, UserCode, is_nameless, is_native, last_name, native_name
from saferun.evidence.diagnosis_values import StackNode
from saferun.evidence.job_evidence import Frame, StackDump, ThreadStack

WORKER_NAME = "pt_data_worker"
"""What torch calls the processes of its data loaders."""
_MOST_CALLS = 64
"""A deeper stack is shown with a gap: deep trees are unreadable, and slow to process."""
_OUTER_CALLS = 20
_LIBRARY_HEAD, _LIBRARY_TAIL = 1, 2
_SHORTEST_GAP = 2
_NATIVE_TAIL = 3

# Tools, the one to be preferred first, where two of them saw the same process.
_TOOLS = ("pystack --native", "py-spy --native", "py-spy", "pystack", "faulthandler", "worker server", "gdb")

# Calls that stand between the user's in every program.
_BORING = Calls(
    ("<frozen runpy>", ()),
    ("/runpy.py", ()),
    ("<frozen importlib._bootstrap>", ()),
    ("<frozen importlib._bootstrap_external>", ()),
    ("/importlib/__init__.py", ()),
    ("/contextlib.py", ()),
    ("/functools.py", ()),
    ("/threading.py", ("run", "_bootstrap", "_bootstrap_inner")),
    ("/concurrent/futures/thread.py", ("run", "_worker")),
    ("/multiprocessing/process.py", ()),
    ("/multiprocessing/context.py", ()),
    ("/multiprocessing/popen_fork.py", ()),
    ("/multiprocessing/popen_spawn_posix.py", ()),
    ("/multiprocessing/popen_forkserver.py", ()),
    ("/multiprocessing/spawn.py", ()),
    ("/multiprocessing/forkserver.py", ()),
    ("/torch/nn/modules/module.py", ("_wrapped_call_impl", "_call_impl", "inner")),
    ("/torch/nn/modules/container.py", ("forward",)),
    ("/torch/nn/parallel/distributed.py", ("forward", "_run_ddp_forward")),
    ("/torch/distributed/fsdp/fully_sharded_data_parallel.py", ("forward",)),
    ("/torch/distributed/c10d_logger.py", ()),
    ("/torch/distributed/elastic/multiprocessing/errors/__init__.py", ("wrapper",)),
    ("/torch/utils/_contextlib.py", ()),
    ("/torch/_dynamo/eval_frame.py", ()),
    ("/torch/_dynamo/external_utils.py", ()),
    ("/torch/_jit_internal.py", ("fn",)),
    ("/torch/_compile.py", ()),
    ("/torch/autograd/grad_mode.py", ()),
    ("/torch/multiprocessing/spawn.py", ("_wrap",)),
    ("/torch/optim/optimizer.py", ("wrapper", "_use_grad")),
    ("/torch/optim/lr_scheduler.py", ("wrapper",)),
    ("/torch/utils/data/_utils/fetch.py", ("<listcomp>",)),
    ("/torch/utils/data/_utils/worker.py", ("_worker_loop",)),
    ("/torch/autograd/graph.py", ("_engine_run_backward",)),
    ("/saferun/inject/sitecustomize.py", ()),
    ("/saferun/inject/saferun_hook.py", ()),
    ("<saferun>", ()),  # the same, once it is at work
)
# Native calls that only lead from Python to what is called.
_BORING_NATIVE = tuple(
    """
    pybind11:: pybind11_ std:: _FUN _Py Py lock_PyThread c10::impl:: c10::Dispatcher c10::OperatorHandle
    c10::BoxedKernel torch::autograd::VariableHooks torch::autograd::GraphTask torch::autograd::python::
    torch::autograd::Engine:: THPEngine_ torch::jit:: at::_ops:: c10d::ops:: ffi_call _call_function_pointer
    _ctypes_callproc cfunction_ method_vectorcall vectorcall_ thread_run start_thread clone __libc_start _start
    main
""".split()
)
_INTERPRETER = ("/libpython", "/Modules/")
_C_LIBRARY = "/libc.so"
_WAITS_FOR_A_THREAD = Calls(
    ("/threading.py", ("join", "_wait_for_tstate_lock", "_shutdown")),
    ("/concurrent/futures/thread.py", ("shutdown",)),
    ("/concurrent/futures/_base.py", ("result", "exception", "wait", "as_completed", "__exit__", "result_iterator")),
)
_CHILD_STARTS = Calls(
    ("/multiprocessing/process.py", ("_bootstrap",)),
    ("/multiprocessing/spawn.py", ("_main",)),
    ("/multiprocessing/popen_fork.py", ("_launch",)),
)


# -------------------------------------------------------------------------------------------------------------- choices


def best_dumps(dumps: Iterable[StackDump]) -> dict[int, StackDump]:
    """The best dump of each rank, by rank: one with native frames where there is one."""
    best: dict[int, StackDump] = {}
    for dump in dumps:
        if dump.is_rank and (dump.rank not in best or _merit(dump) > _merit(best[dump.rank])):
            best[dump.rank] = dump
    return best


def worker_dumps(dumps: Iterable[StackDump]) -> list[StackDump]:
    """The best dump of each process that descends from a rank, by rank and pid."""
    best: dict[tuple[int, int], StackDump] = {}
    for dump in dumps:
        process = dump.rank, dump.pid
        if not dump.is_rank and (process not in best or _merit(dump) > _merit(best[process])):
            best[process] = dump
    return [dump for _, dump in sorted(best.items(), key=lambda item: item[0])]


def _merit(dump: StackDump) -> tuple[bool, bool, bool, int]:
    thread = main_thread(dump)
    frames = thread.frames if thread is not None else ()
    has_python = any(not is_native(frame) for frame in frames)
    # One that has both shows where in Python the native call is made.
    has_native = any(is_native(frame) for frame in frames)
    order = _TOOLS.index(dump.tool) if dump.tool in _TOOLS else len(_TOOLS)
    return bool(frames), has_python, has_python and has_native, -order


def main_thread(dump: StackDump) -> ThreadStack | None:
    """The thread that runs the script; None where there is no stack at all.

    Not every tool marks it: then it is the one with the process's number, the one called ``MainThread``, or
    the one that no thread library started.
    """
    threads = [thread for thread in dump.threads if thread.frames]
    tests = (
        lambda thread: thread.is_main,
        lambda thread: thread.tid == dump.pid,
        lambda thread: thread.name == "MainThread",
        lambda thread: any(frame.function == "<module>" for frame in thread.frames),
        lambda thread: not any(last_name(frame.function) == "_bootstrap" for frame in thread.frames),
        lambda _: True,
    )
    for test in tests:
        for thread in threads:
            if test(thread):
                return thread
    return None


def waits_for_a_thread(main: ThreadStack, user: UserCode) -> bool:
    """Whether the user's innermost call has led to a call that waits for another thread."""
    for frame in main.frames:
        if user.owns(frame):
            return False
        if frame in _WAITS_FOR_A_THREAD:
            return True
    return False


def followed_threads(dump: StackDump, user: UserCode) -> tuple[ThreadStack, ...]:
    """The threads that the main thread waits for, if that is what it does, and that are in the user's code."""
    main = main_thread(dump)
    if main is None or not waits_for_a_thread(main, user):
        return ()
    return tuple(
        thread for thread in dump.threads if thread is not main and any(user.owns(frame) for frame in thread.frames)
    )


def started_in_child(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """What a child process has called itself: a forked one also shows what its parent had called before."""
    for index, frame in enumerate(frames):
        if frame in _CHILD_STARTS:
            return tuple(frames[:index])
    return tuple(frames)


# -------------------------------------------------------------------------------------------------------------- folding


def folded(frames: Sequence[Frame], user: UserCode) -> list[Frame]:
    """A stack as it is shown, outermost call first.

    The user's calls and the innermost one are always there. Of what a library calls within itself, the first call and
    the last ones are.

    Args:
        frames: the calls, innermost first.
        user: distinguishes the user's own code.
    """
    ordered = [frame for frame in reversed(frames) if frame.function or frame.file]
    last_python = max((index for index, frame in enumerate(ordered) if not is_native(frame)), default=-1)
    python = [frame for frame in ordered[: last_python + 1] if not is_native(frame)]
    kept = [
        frame
        for index, frame in enumerate(python)
        if index == len(python) - 1 or user.owns(frame) or frame not in _BORING
    ]
    return _bounded(_without_library_runs(_without_repeats(kept), user) + _native_tail(ordered[last_python + 1 :]))


def _without_repeats(frames: Sequence[Frame]) -> list[Frame]:
    """Of a call that calls itself from the same line again and again, the first and the last."""
    kept: list[Frame] = []
    for frame in frames:
        if len(kept) > 1 and frame == kept[-1] == kept[-2]:
            continue
        kept.append(frame)
    return kept


def _without_library_runs(frames: Sequence[Frame], user: UserCode) -> list[Frame]:
    kept: list[Frame] = []
    run: list[Frame] = []
    for frame in frames:
        if user.owns(frame):
            kept += [*_shortened(run), frame]
            run = []
        else:
            run.append(frame)
    return kept + _shortened(run)


def _shortened(run: list[Frame]) -> list[Frame]:
    if len(run) < _LIBRARY_HEAD + _LIBRARY_TAIL + _SHORTEST_GAP:
        return run
    return [*run[:_LIBRARY_HEAD], *run[-_LIBRARY_TAIL:]]


def _native_tail(frames: Sequence[Frame]) -> list[Frame]:
    """What was called from Python last, and where that ended up."""
    named = [
        Frame(native_name(frame.function), frame.file, frame.line, native=True)
        for frame in frames
        if not is_nameless(frame)
    ]
    telling = [frame for frame in named if not _is_boring_native(frame)]
    if not telling:
        # Better the interpreter's own name for it than none.
        telling = named[-1:] or [Frame("?", frame.file, 0, native=True) for frame in frames[-1:]]
    # Within the C library, the innermost of its functions is enough.
    telling = [
        frame
        for frame, inner in zip(telling, [*telling[1:], None], strict=False)
        if inner is None or not (_C_LIBRARY in frame.file and _C_LIBRARY in inner.file)
    ]
    if len(telling) > _NATIVE_TAIL:
        telling = [telling[0], *telling[1 - _NATIVE_TAIL :]]
    return telling


def _is_boring_native(frame: Frame) -> bool:
    return frame.function.startswith(_BORING_NATIVE) or any(part in frame.file for part in _INTERPRETER)


def _bounded(frames: list[Frame]) -> list[Frame]:
    if len(frames) <= _MOST_CALLS:
        return frames
    gap = Frame(f"… {len(frames) - _MOST_CALLS + 1} more calls", "", 0)
    return [*frames[:_OUTER_CALLS], gap, *frames[_OUTER_CALLS + 1 - _MOST_CALLS :]]


# -------------------------------------------------------------------------------------------------------------- merging


def merge(dumps: Sequence[StackDump], script: str = "", cwd: str = "") -> tuple[StackNode, ...]:
    """The stacks of all ranks as one tree, from the outermost call inwards.

    Each rank is represented by its main thread. Where that waits for another thread, or for a data-loader worker, which
    is in the user's code, that one is shown as a tree of its own. Ranks without a stack are not in it.

    Args:
        dumps: what was taken of the ranks and of their descendants, in any order; of a rank taken twice the better.
        script: the path of the script, or its module; empty where unknown.
        cwd: the ranks' working directory.
    """
    user = UserCode(script, cwd)
    best = best_dumps(dumps)
    paths = sorted(_paths(best, worker_dumps(dumps), user), key=lambda path: path[0])
    roots = _Roots()
    for rank, calls in _without_uneven_ends(paths):
        roots.add(rank, calls)
    return roots.nodes()


def _paths(
    best: Mapping[int, StackDump], workers: Iterable[StackDump], user: UserCode
) -> Iterator[tuple[int, list[Frame]]]:
    for rank, dump in best.items():
        main = main_thread(dump)
        if main is None:
            continue
        yield rank, folded(main.frames, user)
        for thread in followed_threads(dump, user):
            yield rank, [Frame("another thread", "", 0), *folded(thread.frames, user)]
    for dump in workers:
        worker = main_thread(dump)
        if worker is None or dump.name != WORKER_NAME:
            continue
        calls = started_in_child(worker.frames)
        if any(user.owns(frame) for frame in calls):
            yield dump.rank, [Frame("data-loader worker", "", 0), *folded(calls, user)]


def _without_uneven_ends(paths: Sequence[tuple[int, list[Frame]]]) -> Iterator[tuple[int, list[Frame]]]:
    """Cut native calls where other ranks end at the same Python call because theirs were not captured.

    Ranks that do the same would differ only by the tool that captured them.
    """
    ends = {_python_calls(calls) for _, calls in paths if calls and not calls[-1].native}
    for rank, calls in paths:
        python = _python_calls(calls)
        yield rank, list(python) if python in ends else calls


def _python_calls(calls: Sequence[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in calls if not is_native(frame))


class _Roots:
    """A tree in the making. Without recursion: what is merged may be as deep as it likes."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._ranks: list[set[int]] = []
        self._children: list[dict[Frame, int]] = []
        self._tops: dict[Frame, int] = {}

    def add(self, rank: int, calls: Iterable[Frame]) -> None:
        level = self._tops
        for frame in calls:
            index = level.get(frame)
            if index is None:
                index = level[frame] = len(self._frames)
                self._frames.append(frame)
                self._ranks.append(set())
                self._children.append({})
            self._ranks[index].add(rank)
            level = self._children[index]

    def nodes(self) -> tuple[StackNode, ...]:
        made: list[StackNode | None] = [None] * len(self._frames)

        def sorted_nodes(indices: Iterable[int]) -> tuple[StackNode, ...]:
            found = [node for index in indices if (node := made[index]) is not None]
            return tuple(sorted(found, key=lambda node: (node.ranks, node.frame)))

        # A child is always younger than its parent.
        for index in range(len(made) - 1, -1, -1):
            ranks = tuple(sorted(self._ranks[index]))
            made[index] = StackNode(self._frames[index], ranks, sorted_nodes(self._children[index].values()))
        return sorted_nodes(self._tops.values())
