"""Running tools: several at a time, each with a timeout.

Everything runs in one thread, because a child dies with the *thread* that started it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress

from saferun.linux.children import Child, SpawnError, begin_spawn, spawn_error
from saferun.linux.descriptors import close_all_but, open_null
from saferun.linux.memory_limit import limit_files, limit_memory
from saferun.linux.prctl import die_with_parent
from saferun.linux.procfs import mount_of, own_mounts, read_stat
from saferun.model import Value

_OUTPUT_LIMIT_BYTES = 8 << 20
_ERRORS_LIMIT_BYTES = 64 << 10
_REAP_WAIT_S = 0.5
_ANSWER_BYTES = 4096  # one atomic write to a pipe
# A killed process that is still in uninterruptible sleep will not exit before its wait ends.
_STUCK_S = 0.1


class Tool(Value):
    """A program to run: ``argv[0]`` is its path."""

    argv: tuple[str, ...]
    timeout_s: float
    interrupt_s: float = 0.0
    """After this many seconds it gets SIGINT, on which some tools print a summary. 0: never."""
    stdin: int = -1
    """The descriptor of its standard input; -1: /dev/null."""
    stdout: int = -1
    """The descriptor of its standard output; -1: the output is in its ``ToolEnd``."""
    keep: tuple[int, ...] = ()
    """Further descriptors that it inherits under their own numbers."""
    memory_bytes: int = 0
    """A limit on its address space; 0: none."""
    file_bytes: int = -1
    """A limit on the size of the files that it writes; -1: none."""


class ToolEnd(Value):
    """How a tool ended.

    ``failure`` says in one line why there is no result; ``was_killed``: it timed out; ``is_stuck``: it was killed and
    has not exited, because it blocks in the kernel; ``is_started``: the program was started.
    """

    code: int
    stdout: bytes
    stderr: bytes
    failure: str = ""
    was_killed: bool = False
    is_stuck: bool = False
    is_started: bool = True


Steps = Generator[Tool, ToolEnd, None]
"""A work item: yields the tools to run, one after another, and is sent how each ended."""


_remembered: dict[str, str] = {}


def remember_tool(name: str, path: str) -> None:
    """Cache a program's path (empty: not installed), so that no file system is accessed when it is needed."""
    _remembered[name] = path


def has_module(name: str) -> bool:
    """Whether this interpreter has a package; cached if ``remember_tool`` was called for it."""
    if name in _remembered:
        return bool(_remembered[name])
    import importlib.util

    return importlib.util.find_spec(name) is not None


def responds(path: str, patience_s: float) -> bool:
    """Whether the file system of a path responds in time, even if the path does not exist."""

    def stat() -> str:
        with suppress(OSError):
            os.stat(path)
        return ""

    return call_in_child(stat, patience_s) is not None


def call_in_child(call: Callable[[], str], patience_s: float) -> str | None:
    """Call a function that may block on a file system, in a child; None if it does not return in time."""
    me = os.getpid()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        # A process and not a thread, which could not be killed.
        try:
            die_with_parent(me)
            # It may outlive this process: it must not keep descriptors open.
            close_all_but(write_end, low=0)
            os.write(write_end, call().encode(errors="surrogateescape") + b"\n")
        finally:
            os._exit(0)
    os.close(write_end)
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    has_answered = bool(poll.poll(patience_s * 1000))
    answer = os.read(read_end, _ANSWER_BYTES).decode(errors="surrogateescape") if has_answered else ""
    os.close(read_end)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0 if has_answered else os.WNOHANG)
    return answer.removesuffix("\n") if answer else None


def name_of(path: str) -> str:
    """A program's name; the path of one in memory has only a number."""
    names = [name for name, remembered in _remembered.items() if remembered == path]
    return names[0] if names else os.path.basename(path)


def find_tool(name: str) -> str:
    """The path of a program: beside this interpreter, where pip installs it, or on PATH; empty if there is none."""
    if name in _remembered:
        return _remembered[name]
    for folder in (os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin"), *os.get_exec_path()):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


class _Running:
    """A running tool of a work item."""

    def __init__(self, steps: Steps, tool: Tool, deadline: float) -> None:
        self.steps = steps
        self.tool = tool
        now = time.monotonic()
        self.ends_at = min(now + tool.timeout_s, deadline)
        self.interrupted_at = now + tool.interrupt_s if tool.interrupt_s else float("inf")
        self.stdout, self.stderr = bytearray(), bytearray()
        null = open_null()
        (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
        self.child: Child
        try:
            # Not waited for: if the program's file system hangs, the tool times out.
            self.child, self._report = begin_spawn(
                tool.argv,
                os.environ,
                stdin=tool.stdin if tool.stdin >= 0 else null,
                stdout=tool.stdout if tool.stdout >= 0 else out_write,
                stderr=err_write,
                keep=tool.keep,
                prepare=lambda: _limit(tool),
            )
        except BaseException:
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            for fd in (null, out_write, err_write):
                os.close(fd)
        self.open = {out_read: self.stdout, err_read: self.stderr}

    def read(self, fd: int) -> str:
        """Read from a pipe. Returns an error message, or nothing."""
        kept = self.open[fd]
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            del self.open[fd]
            os.close(fd)
        elif kept is self.stderr:
            kept += chunk[: _ERRORS_LIMIT_BYTES - len(kept)]
        elif len(kept) + len(chunk) > _OUTPUT_LIMIT_BYTES:
            return f"{self.name} wrote more than {_OUTPUT_LIMIT_BYTES >> 20} MiB"
        else:
            kept += chunk
        return ""

    @property
    def name(self) -> str:
        return name_of(self.tool.argv[0])

    def finish(self, failure: str = "") -> ToolEnd:
        """End the tool, by SIGKILL if there is a failure, and return the result."""
        is_started, start_failure = self._start_report()
        failure = start_failure or failure
        if failure:
            with suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGKILL)
        for fd in self.open:
            os.close(fd)
        self.open = {}
        code = self._reap(failed=bool(failure))
        if self.child.pidfd >= 0:
            os.close(self.child.pidfd)
        stuck = code is None
        if stuck and not is_started:
            failure = self._hung_start_text()
        code = -signal.SIGKILL if code is None else code
        was_killed = bool(failure) and not start_failure
        return ToolEnd(code, bytes(self.stdout), bytes(self.stderr), failure, was_killed, stuck, is_started)

    def _start_report(self) -> tuple[bool, str]:
        """Whether the program was started, and why not, if that is known."""
        try:
            error = spawn_error(self._report)
        except BlockingIOError:
            os.close(self._report)
            return False, ""
        return error is None, f"{self.name} cannot be started: {error}" if error is not None else ""

    def _hung_start_text(self) -> str:
        path = self.tool.argv[0]
        mount = mount_of(path, own_mounts()) or path
        return f"{self.name} cannot be started: the file system at {mount} does not answer"

    def _reap(self, *, failed: bool) -> int | None:
        # A process that has closed its streams is about to exit; a killed one may block in the kernel, and is left.
        began = time.monotonic()
        for _ in range(2):
            give_up_at = time.monotonic() + _REAP_WAIT_S
            while time.monotonic() <= give_up_at:
                pid, status = os.waitpid(self.child.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.001)
                stat = read_stat(self.child.pid) if failed else None
                if stat is not None and stat.state == "D":
                    give_up_at = min(give_up_at, began + _STUCK_S)
            with suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGKILL)
        return None


def _limit(tool: Tool) -> None:
    if tool.memory_bytes:
        limit_memory(tool.memory_bytes)
    if tool.file_bytes >= 0:
        limit_files(tool.file_bytes)


def run_steps(work: Iterable[Steps], *, at_once: int, deadline: float) -> None:
    """Run several work items, each of which runs tools one after another.

    After the deadline running tools are killed and no more are started; the items are sent failures until they end.

    Args:
        work: the items, begun in this order.
        at_once: how many tools run at the same time.
        deadline: in monotonic seconds.
    """
    waiting = iter(work)
    running: list[_Running] = []
    is_more = True
    while running or is_more:
        while is_more and len(running) < at_once:
            steps = next(waiting, None)
            if steps is None:
                is_more = False
            else:
                _go_on(steps, None, running, deadline)
        if running:
            _turn(running, deadline)


def _go_on(steps: Steps, end: ToolEnd | None, running: list[_Running], deadline: float) -> None:
    while True:
        try:
            tool = next(steps) if end is None else steps.send(end)
        except StopIteration:
            return
        if time.monotonic() >= deadline:
            end = ToolEnd(-1, b"", b"", "timed out", was_killed=True)
            continue
        try:
            running.append(_Running(steps, tool, deadline))
            return
        except (OSError, SpawnError) as error:
            end = ToolEnd(-1, b"", b"", f"{name_of(tool.argv[0])} cannot be started: {error}")


def _turn(running: list[_Running], deadline: float) -> None:
    """Wait for events of the running tools, and handle them."""
    poll = select.poll()
    owner = {}
    for one in running:
        for fd in one.open:
            poll.register(fd, select.POLLIN)
            owner[fd] = one
    next_at = min(min(one.ends_at, one.interrupted_at) for one in running)
    failures: dict[int, str] = {}
    for fd, _ in poll.poll(max(0.0, next_at - time.monotonic()) * 1000 + 1):
        if failure := owner[fd].read(fd):
            failures[id(owner[fd])] = failure
    now = time.monotonic()
    for one in tuple(running):
        if now >= one.interrupted_at:
            one.interrupted_at = float("inf")
            with suppress(ProcessLookupError):
                os.kill(one.child.pid, signal.SIGINT)
        failure = failures.get(id(one), "")
        if not failure and one.open and now >= one.ends_at:
            failure = f"{one.name} took longer than {one.tool.timeout_s:g} s"
        if failure or not one.open:
            running.remove(one)
            _go_on(one.steps, one.finish(failure), running, deadline)
