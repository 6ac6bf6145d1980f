"""Records the last Python calls of each thread of a rank, for ``--trace-calls``: loaded by the hook where it is wanted.

They are in a file in memory that is mapped: whoever reads it needs no help of the process, which may be dead, or in C
code that holds the GIL. On Python 3.12 and newer ``sys.monitoring`` reports calls, under a tool number of its own; on
older ones a profile function does, in the main thread and those that ``threading`` starts. Calls of other code than the
chosen one are not recorded. Forked children record nothing.

``captures/call_rings.py`` reads the file. It consists of numbers of 8 bytes in the order of the machine:

* a page about the process: magic number, pid, mechanism, state, size of the names, start, threads without a ring;
* 64 threads: thread id, number of events so far, how many of these were lines, when it began;
* names, each written once: size, line, place of the file's name (4 bytes each), UTF-8;
* a ring of 256 events for each thread: time; kind, place of the function's name, line.

As ``saferun_hook.py`` this uses ``os``, ``sys`` and modules in C, and is silent; it ends at its first mistake. What
signal handlers of the script raise while a call is recorded is the script's.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

_MAGIC = int.from_bytes(b"SRCALLS1", sys.byteorder)
_MONITORING, _PROFILE, _TRACE = 1, 2, 3
_RECORDS, _FAILED, _GAVE_WAY, _AT_LIMIT = 1, 2, 3, 4
_CALL, _RETURN, _RAISE, _LINE = 1, 2, 3, 4
_PID, _MECHANISM, _STATE, _NAMES_SIZE, _BEGAN, _RINGLESS = 1, 2, 3, 4, 5, 6  # numbers in the first page
_SPARE_HEAD = 16  # the same page: what threads without a ring count
_THREADS, _THREAD_NUMBERS, _MOST_THREADS = 512, 8, 64
_NAMES, _RINGS = 8192, 131072  # in bytes
_ENTRIES = 256
_SIZE = _RINGS + (_MOST_THREADS + 1) * _ENTRIES * 16  # the last ring is shared by threads that have none
_LONGEST_NAME, _LONGEST_FILE, _HIGH_DESCRIPTOR, _MOST_FILES = 200, 400, 200, 1 << 16
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python")
_OTHER, _CHOSEN, _THREADING = 0, 1, 2  # a file that is not recorded, one that is, and threading's own
_EVENTS = {"call": 0, "return": _RETURN - _CALL}
_TOOLS = (4, 3)
"""Tool numbers of sys.monitoring that have no meaning of their own."""


def _imported(name: str) -> "Any":  # noqa: ANN401 - a module
    """A module in C, which is not in ``sys.modules`` unless it was there before."""
    is_known = name in sys.modules
    module = __import__(name)
    if not is_known:
        sys.modules.pop(name, None)
    return module


def _mapped(path: str) -> "Any":  # noqa: ANN401 - an mmap, whose module is not imported here
    """The new file, mapped, with all its memory; its descriptor stands above those of the script."""
    mmap = _imported("mmap")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, _SIZE)  # a page that cannot be had later would be a SIGBUS
        if sys.version_info >= (3, 13):
            return mmap.mmap(fd, _SIZE, trackfd=False)
        occupied = [fd]
        try:
            while occupied[-1] < _HIGH_DESCRIPTOR - 1:
                occupied.append(os.dup(fd))
        except OSError:  # the limit is lower
            if len(occupied) > 1:
                os.close(occupied.pop())
        try:
            return mmap.mmap(fd, _SIZE)
        finally:
            for number in occupied[1:]:
                os.close(number)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


class _Chosen:
    """Which files are recorded: those below directories (absolute paths), and those of packages and modules."""

    def __init__(self, wanted: list[str]) -> None:
        directories = [item for item in wanted if item.startswith("/")]
        self._directories = [f"{path.rstrip('/')}/" for path in directories]
        for path in directories:
            self._directories.append(f"{os.path.realpath(path).rstrip('/')}/")
        self._packages = [item for item in wanted if not item.startswith("/")]
        self._cwd = os.getcwd()

    def has(self, filename: str, names: "dict[str, Any]") -> bool:
        """Whether a file with this name, of a module with these global names, is recorded."""
        if filename.startswith("<"):
            return False
        module = names.get("__name__")
        if module == "__main__":
            module = getattr(names.get("__spec__"), "name", None) or os.path.splitext(os.path.basename(filename))[0]
        if type(module) is str:
            for package in self._packages:
                if module == package or module.startswith(f"{package}."):
                    return True
        path = filename if filename.startswith("/") else os.path.normpath(f"{self._cwd}/{filename}")
        for directory in self._directories:
            if path.startswith(directory):
                rest = path[len(directory) - 1 :]
                return not any(part in rest for part in _LIBRARIES)
        return False


class _Keeper:
    """Gives a thread's ring back when the thread is over."""

    def __init__(self, free: list[int], slot: int) -> None:
        self._free = free
        self._slot = slot

    def __del__(self) -> None:
        self._free.append(self._slot)


class _CallRecorder:
    """The mapping, and what writes into it.

    ``entries`` has the second number of a call's event by the ``id`` of the code, for chosen functions.
    ``record`` and ``record_line`` write an event of the current thread, of which they take the second number.
    """

    def __init__(self, path: str, wanted: list[str]) -> None:
        self.entries: dict[int, int] = {}
        self.is_full = False
        self.is_on = True
        self._chosen = _Chosen(wanted)
        self._mapping = _mapped(path)
        self.view: Any = memoryview(self._mapping).cast("Q")
        self._codes: list[CodeType] = []  # kept, so that no other code has the id of one
        self._files: dict[str, int] = {}
        self._used = 8  # the place 0 stands for an unknown name
        self._lock = _imported("_thread").allocate_lock()
        self._make_record()

    def begin(self, mechanism: int) -> None:
        """Say in the file that it is complete, and how calls are noticed."""
        view = self.view
        view[_PID], view[_MECHANISM], view[_STATE] = os.getpid(), mechanism, _RECORDS
        view[_NAMES_SIZE], view[_BEGAN] = self._used, _imported("time").monotonic_ns()
        view[0] = _MAGIC

    def end(self, state: int) -> None:
        """Record nothing more, and write down why."""
        self.is_on = False
        self.entries.clear()
        if state:
            self.view[_STATE] = state

    def _make_record(self) -> None:
        thread, clock, view = _imported("_thread"), _imported("time").monotonic_ns, self.view
        local, free = thread._local(), list(range(_MOST_THREADS))  # noqa: SLF001 - as threading uses it

        def join() -> list[int]:
            """Give the current thread a ring: how many events, its place, the place of its numbers, lines."""
            try:
                slot = free.pop(0)  # the one whose thread has been gone for longest
            except IndexError:
                slot, head = _MOST_THREADS, _SPARE_HEAD
                view[_RINGLESS] += 1
            else:
                head = _THREADS + slot * _THREAD_NUMBERS
                view[head + 1] = 0
                view[head] = thread.get_native_id()
                view[head + 2] = 0
                view[head + 3] = clock()
                local.keeper = _Keeper(free, slot)
            local.ring = ring = [0, (_RINGS >> 3) + slot * _ENTRIES * 2, head + 1, 0]
            return ring

        def record(word: int) -> None:
            try:
                ring = local.ring
            except AttributeError:
                ring = join()
            count = ring[0]
            at = ring[1] + (count & 255) * 2
            view[at] = clock()
            view[at + 1] = word
            ring[0] = count = count + 1
            view[ring[2]] = count

        def record_line(word: int) -> None:
            try:
                ring = local.ring
            except AttributeError:
                ring = join()
            ring[3] = lines = ring[3] + 1
            view[ring[2] + 1] = lines
            record(word)

        join()  # the main thread's is the first
        self.record, self.record_line = record, record_line

    def is_chosen(self, filename: str, names: "dict[str, Any]") -> bool:
        """Whether the functions of a file are recorded."""
        return self.is_on and self._chosen.has(filename, names)

    def learn(self, code: "CodeType", names: "dict[str, Any]") -> int:
        """The second number of its calls; 0 where it is not recorded. ``names``: the global names of its module."""
        if self.is_full or not self.is_chosen(code.co_filename, names):
            return 0
        with self._lock:
            word = self.entries.get(id(code), 0)
            if not word and self.is_on:
                index = self._write(getattr(code, "co_qualname", code.co_name)[:_LONGEST_NAME], code)
                if index:
                    self._codes.append(code)
                    self.entries[id(code)] = word = _CALL | index << 4
        return word

    def _write(self, name: str, code: "CodeType") -> int:
        """Write a function's name, and first that of its file; returns its index, 0 where there is no room."""
        path = code.co_filename
        file = self._files.get(path)
        if file is None:
            file = self._append(os.path.abspath(path)[-_LONGEST_FILE:], 0, 0)
            self._files[path] = file
        return self._append(name, code.co_firstlineno, file) if file else 0

    def _append(self, text: str, line: int, file: int) -> int:
        content = text.encode("utf-8", "backslashreplace")
        start, end = self._used, self._used + (12 + len(content) + 7) // 8 * 8
        if end > _RINGS - _NAMES:
            self.is_full = True
            return 0
        numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in (len(content), line & 0xFFFFFFFF, file))
        self._mapping[_NAMES + start : _NAMES + start + 12 + len(content)] = numbers + content
        self._used = self.view[_NAMES_SIZE] = end
        return start >> 3


def _is_own(error: Exception) -> bool:
    """Whether an exception is of this file: a signal handler may have raised it, and then it is the script's."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is None or traceback.tb_frame.f_code.co_filename == _is_own.__code__.co_filename


class _Monitoring:
    """Python 3.12 and newer."""

    def __init__(self, recorder: _CallRecorder, *, has_lines: bool) -> None:
        self._recorder = recorder
        self._has_lines = has_lines
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self._tool: int | None = None

    def begin(self) -> "Callable[[int], None] | None":
        """Start. Returns what ends it; None where all tool numbers are taken."""
        monitoring = self._monitoring
        self._recorder.begin(_MONITORING)
        self._tool = tool = next((number for number in _TOOLS if monitoring.get_tool(number) is None), None)
        if tool is None:
            self._recorder.end(_GAVE_WAY)
            return None
        monitoring.use_tool_id(tool, "saferun")
        events = monitoring.events
        callbacks = {
            events.PY_START: self._on_start(),
            events.PY_RESUME: self._on_event(0),
            events.PY_THROW: self._on_event(0),
            events.PY_RETURN: self._on_event(_RETURN - _CALL),
            events.PY_YIELD: self._on_event(_RETURN - _CALL),
            events.PY_UNWIND: self._on_event(_RAISE - _CALL),
            events.LINE: self._on_line(),
        }
        for event, callback in callbacks.items():
            monitoring.register_callback(tool, event, callback)
        monitoring.set_events(tool, events.PY_START | events.PY_THROW | events.PY_UNWIND)
        return self._end

    def _end(self, state: int) -> None:
        self._recorder.end(state)
        monitoring, events = self._monitoring, self._monitoring.events
        monitoring.set_events(self._tool, 0)
        for name in ("PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND", "LINE"):
            monitoring.register_callback(self._tool, getattr(events, name), None)

    def _failed(self, error: Exception) -> None:
        if not _is_own(error):
            raise error
        self._end(_FAILED)

    def _on_start(self) -> "Callable[[CodeType, int], object]":
        monitoring, tool, recorder, failed = self._monitoring, self._tool, self._recorder, self._failed
        entries, record, frame_of, disable = recorder.entries, recorder.record, sys._getframe, monitoring.DISABLE  # noqa: SLF001
        events = monitoring.events
        of_chosen = events.PY_RETURN | events.PY_YIELD | events.PY_RESUME | (events.LINE if self._has_lines else 0)

        def on_start(code: "CodeType", _offset: int) -> object:
            try:
                word = entries.get(id(code))
                if word is None:
                    word = recorder.learn(code, frame_of(1).f_globals)
                    if not word:
                        return disable
                    monitoring.set_local_events(tool, code, of_chosen)
                record(word)
            except RecursionError:
                pass  # the script's: it has come as deep as Python allows
            except Exception as error:
                failed(error)
            return None

        return on_start

    def _on_event(self, step: int) -> "Callable[..., None]":
        entries, record, failed = self._recorder.entries, self._recorder.record, self._failed

        def on_event(code: "CodeType", _offset: int, _value: object = None) -> None:
            word = entries.get(id(code))
            if word is not None:
                try:
                    record(word + step)
                except RecursionError:
                    pass
                except Exception as error:
                    failed(error)

        return on_event

    def _on_line(self) -> "Callable[[CodeType, int], None]":
        entries, record_line, failed = self._recorder.entries, self._recorder.record_line, self._failed

        def on_line(code: "CodeType", line: int) -> None:
            word = entries.get(id(code))
            if word is not None:
                try:
                    record_line(word + _LINE - _CALL | line << 24)
                except RecursionError:
                    pass
                except Exception as error:
                    failed(error)

        return on_line


class _Profile:
    """Python 3.11 and older: a profile function, or a trace function if lines are wanted.

    Only the interpreter holds the main thread's function: where another one takes its place it is deleted, and that is
    written down.
    """

    def __init__(self, recorder: "_CallRecorder", *, has_lines: bool) -> None:
        self._recorder = recorder
        self._name = "settrace" if has_lines else "setprofile"
        self._has_lines = has_lines
        self._get, self._put = getattr(sys, f"get{self._name[3:]}"), getattr(sys, self._name)
        self._files: dict[str, int] = {}
        self._main: Any = None
        self._in_threads: Any = None

    def begin(self) -> "Callable[[int], None] | None":
        self._recorder.begin(_TRACE if self._has_lines else _PROFILE)
        if self._get() is not None:
            self._recorder.end(_GAVE_WAY)
            return None
        if "threading" in sys.modules:
            self._begin_in_threads()
        function = self._new_function()
        self._main = _imported("_weakref").ref(function, self._on_lost)
        self._put(function)
        return self._end

    def _on_lost(self, _reference: object) -> None:
        if self._recorder.is_on and not sys.is_finalizing():
            self._recorder.end(_GAVE_WAY)

    def _end(self, state: int) -> None:
        self._recorder.end(state)
        for filename in list(self._files):
            self._files[filename] = _OTHER
        if self._main is not None and self._get() is self._main():
            self._put(None)
        if self._hook_of_threads() is self._in_threads is not None:
            getattr(sys.modules["threading"], self._name)(None)

    def _failed(self, error: Exception) -> None:
        if not _is_own(error):
            raise error
        self._end(_FAILED)

    def _hook_of_threads(self) -> object:
        return getattr(sys.modules.get("threading"), f"_{self._name[3:]}_hook", None)

    def _begin_in_threads(self) -> None:
        if hasattr(sys.modules["threading"], self._name) and self._hook_of_threads() is None:
            self._in_threads = self._new_function()
            getattr(sys.modules["threading"], self._name)(self._in_threads)

    def _kind_of(self, frame: "FrameType") -> int:
        """What a file is that comes up for the first time."""
        filename, names = frame.f_code.co_filename, frame.f_globals
        kind = _CHOSEN if self._recorder.is_chosen(filename, names) else _OTHER
        if names.get("__name__") == "threading" and self._recorder.is_on:
            kind = _THREADING
        if len(self._files) < _MOST_FILES:
            self._files[filename] = kind
        return kind

    def _new_function(self) -> "Callable[..., object]":
        profile = self._new_profile()
        return self._new_trace(profile) if self._has_lines else profile

    def _new_profile(self) -> "Callable[[FrameType, str, object], None]":
        recorder, files, kind_of, failed = self._recorder, self._files, self._kind_of, self._failed
        entries, record, begin_in_threads, view = (
            recorder.entries,
            recorder.record,
            self._begin_in_threads,
            recorder.view,
        )

        def profile(frame: "FrameType", event: str, _argument: object) -> None:
            if event not in _EVENTS:
                return
            code = frame.f_code
            try:
                kind = files.get(code.co_filename)
                if kind is None:
                    kind = kind_of(frame)
                if kind == _CHOSEN:
                    word = entries.get(id(code)) or recorder.learn(code, frame.f_globals)
                    if word:
                        record(word + _EVENTS[event])
                elif kind == _THREADING and event == "return" and code.co_name == "<module>":
                    files[code.co_filename] = _OTHER
                    begin_in_threads()
            except RecursionError:
                view[_STATE] = _AT_LIMIT  # one call deeper, Python itself drops this function
            except Exception as error:
                failed(error)

        return profile

    def _new_trace(self, profile: "Callable[[FrameType, str, object], None]") -> "Callable[..., object]":
        files, entries, record_line, failed = (
            self._files,
            self._recorder.entries,
            self._recorder.record_line,
            self._failed,
        )

        def of_frame(frame: "FrameType", event: str, argument: object) -> object:
            if event == "line":
                try:
                    word = entries.get(id(frame.f_code))
                    if word:
                        record_line(word + _LINE - _CALL | frame.f_lineno << 24)
                except RecursionError:
                    pass
                except Exception as error:
                    failed(error)
            else:
                profile(frame, event, argument)
            return of_frame

        def trace(frame: "FrameType", event: str, argument: object) -> object:
            profile(frame, event, argument)
            return of_frame if files.get(frame.f_code.co_filename) else None

        return trace


def begin(prefix: str, wanted: str) -> None:
    """Record this process's calls in ``PREFIX.PID.calls``, in memory.

    ``wanted``: ``calls`` or ``lines``, and the directories and packages that are recorded; separated by newlines.
    """
    what, *chosen = wanted.split("\n")
    path = f"{prefix}.{os.getpid()}.calls"
    try:
        os.unlink(path)  # of a process that had the number before
    except OSError:
        pass
    recorder = _CallRecorder(path, chosen)
    has_lines = what == "lines"
    if sys.version_info >= (3, 12):
        end = _Monitoring(recorder, has_lines=has_lines).begin()
    else:
        end = _Profile(recorder, has_lines=has_lines).begin()
    if end is not None:

        def follow_fork() -> None:
            try:
                end(0)
            except Exception:  # noqa: S110 - silent
                pass

        os.register_at_fork(after_in_child=follow_fork)
