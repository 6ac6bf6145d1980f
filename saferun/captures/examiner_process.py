"""The examiner: the process that runs captures for the supervisor, with all that it needs in memory.

It is a fork of the supervisor, so it needs no file to begin. While it has no request, it imports what captures need,
one module at a time, and keeps py-spy in memory; after that a capture needs no file at all, and the file system with
saferun, Python and the script may hang. Each request runs in a child of its own, so that one that hangs only loses its
own answer. One request is for modules that only the supervisor needs: they take no memory here.

A request is a JSON line with the descriptor that the answer is written to: ``{"ask": number, "kind": ..., "value":
..., "budget_s": ...}``; ``{"end": number}`` ends it early, and ``{"hurry": true}`` says that the supervisor waits for
modules; ``{"started": seconds}`` says when the ranks of an attempt were. The examiner sends ``{"tools": [names]}``
when it has its tools, ``{"ready": true}`` when all is in memory, and ``{"began": number, "pid": pid}`` for each
request.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from saferun.captures.held_tools import held_fds, held_tool, hold_tools
from saferun.linux.bare_socket import Socket
from saferun.linux.children import reset_signals
from saferun.linux.descriptors import close_all_but
from saferun.linux.json_lines import JsonLines
from saferun.linux.prctl import become_subreaper, die_with_parent, set_name
from saferun.linux.search_path import search_theirs_last
from saferun.model import JsonObject, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.files.inbox import Outbox
    from saferun.linux.held_code import ImportRecorder

EXAMINER_MODULES = (
    "saferun.evidence.job_evidence",
    "saferun.captures.wire",
    "saferun.captures.stacks",
    "saferun.captures.process_state",
    "saferun.captures.inspection",
    "saferun.captures.links",
    "saferun.captures.strace",
    "saferun.captures.capture_processes",
    "saferun.captures.faulthandler_dump",
    "saferun.captures.flight_recorder",
    "saferun.captures.worker_server",
    "saferun.captures.kernel_log",
    "saferun.captures.rdma_errors",
    "saferun.captures.nccl_log",
    "saferun.captures.ras_content",
    "saferun.captures.nccl_ras",
    "saferun.captures.gpu_nvidia",
    "saferun.captures.gpu_amd",
    "saferun.captures.cores",
    "saferun.captures.recorder_dumps",
    "saferun.captures.last_calls",
    "saferun.captures.beside_slow",
    "saferun.captures.asked_recorders",
    "saferun.captures.rank_usage",
    "saferun.captures.native_stacks",
)
"""The modules that captures of any kind import."""
_READS_MODULES = "code"
"""The kind of request whose answer is the code of modules."""
_FDS_AT_ONCE = 16
# After each module the CPU is left to the starting ranks for three times as long.
_PAUSE_FACTOR = 3.0
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
# The supervisor ends requests in time; this is the limit if it does not.
_MARGIN_S = 2.0


class _Work(Value):
    pid: int
    ends_at: float
    reads_modules: bool


def serve(
    connection: Socket,
    environ: Mapping[str, str],
    recorder: ImportRecorder,
    outbox: Outbox | None,
    *,
    kinds: Mapping[str, Callable[[Any], None]],
    modules: Sequence[str],
) -> None:
    """Serve requests until the supervisor closes its end.

    Args:
        connection: the connection to the supervisor.
        environ: the new environment of this process, and of every tool.
        recorder: writes the code of modules for the supervisor.
        outbox: connects to the writer of the run directory; None: captures write their files themselves.
        kinds: more kinds of requests: each with what writes the answer to standard output.
        modules: what these import.
    """
    _take_environ(environ)
    become_subreaper()  # orphaned processes of a killed capture must not count as the ranks'
    search_theirs_last(environ.get("PYTHONPATH", ""))
    if outbox is not None:
        from saferun.captures.capture_files import hand_files_to

        hand_files_to(outbox)
    fds = outbox.fds if outbox is not None else ()
    lines, pace = JsonLines(connection, most_fds=_FDS_AT_ONCE), _Pace()

    def write_code(names: Any) -> None:  # noqa: ANN401 - a list of names
        set_name("sr-modules")
        recorder.write(names, write, pause=pace.pause)

    server = _Server(lines, {**_KINDS, **kinds, _READS_MODULES: write_code}, (*fds, pace.fd), pace.hurry)
    server.run(_Warming(lines, (*EXAMINER_MODULES, *modules)))


def _take_environ(environ: Mapping[str, str]) -> None:
    """Have this environment, without what the system refuses: ``env "=x"`` makes an entry without a name."""
    for name in list(os.environ):
        with suppress(OSError):
            del os.environ[name]
    for name, value in environ.items():
        with suppress(OSError, ValueError):
            os.environ[name] = value


class _Pace:
    """Leaves the CPU to the starting ranks while modules are read for the supervisor, until it waits for them."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()

    def hurry(self) -> None:
        """End all pauses, in the children too: what they read from ends."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def pause(self, took_s: float) -> None:
        """In a child, which must not have inherited the other end: wait, unless there is to be no pause."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(_pause_s(took_s) * 1000)


def _pause_s(took_s: float) -> float:
    return min(max(took_s * _PAUSE_FACTOR, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)


class _Warming:
    """Imports modules in advance, one per call."""

    def __init__(self, lines: JsonLines, modules: Sequence[str]) -> None:
        self._lines = lines
        self._modules = list(modules)
        self._has_tools = False
        self.is_over = False

    def step(self) -> float:
        """Do one step. Returns how long to leave the CPU to others, in seconds."""
        began = time.monotonic()
        if not self._has_tools:
            # Tools before modules: modules can be imported later, tools not.
            self._has_tools = True
            self._lines.send({"tools": sorted(hold_tools())})
        elif self._modules:
            with suppress(Exception):  # the code that needs it reports why
                import_module(self._modules.pop(0))
        else:
            self.is_over = True
            _remember_errors()
            with suppress(Exception):
                from saferun.linux.heap import trim_heap

                trim_heap()
            self._lines.send({"ready": True})
            gc.freeze()  # pages that no child's garbage collector touches stay shared
        return _pause_s(time.monotonic() - began)

    def finish_tools(self) -> None:
        """Find the tools now, for an early request."""
        if not self._has_tools:
            self.step()


def _remember_errors() -> None:
    with suppress(Exception):  # the capture reports that they are not known
        from saferun.captures.rdma_errors import remember_errors

        remember_errors()


def _mark_start(started_at: Any) -> None:  # noqa: ANN401 - monotonic seconds
    if "saferun.captures.kernel_log" in sys.modules:  # else its file may not answer
        with suppress(Exception):  # the captures go by time
            from saferun.captures.kernel_log import mark_start

            mark_start(float(started_at))


class _Server:
    def __init__(
        self,
        lines: JsonLines,
        kinds: Mapping[str, Callable[[Any], None]],
        keep: Sequence[int],
        hurry: Callable[[], None],
    ) -> None:
        self._lines = lines
        self._kinds = kinds
        self._keep = tuple(keep)
        self._hurry = hurry
        self._work: dict[int, _Work] = {}

    def run(self, warming: _Warming) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._lines.fd, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        pause_s = 0.0
        while True:
            # Except children that were killed and are stuck in the kernel.
            works = [work for work in self._work.values() if work.ends_at < float("inf")]
            moments = [work.ends_at - time.monotonic() for work in works]
            # While a child reads modules, which takes a processor, this process imports none.
            is_warming = not warming.is_over and not any(work.reads_modules for work in works)
            if is_warming:
                moments.append(pause_s)
            ready = [fd for fd, _ in poll.poll(max(0.0, min(moments)) * 1000 if moments else None)]
            if wake_read in ready:
                os.read(wake_read, 4096)
            if self._lines.fd in ready:
                messages = self._lines.receive()
                if messages is None:
                    self._end_all()
                    return
                for message in messages:
                    self._take(message, warming)
            self._reap()
            if not ready and is_warming:
                pause_s = warming.step()

    def _take(self, message: JsonObject, warming: _Warming) -> None:
        if "end" in message:
            work = self._work.get(message["end"])
            if work is not None:
                _kill(work.pid)
            return
        if "hurry" in message:
            self._hurry()
            return
        if "started" in message:
            _mark_start(message["started"])
            return
        out = self._lines.fds.popleft()
        try:
            warming.finish_tools()
            number, kind = int(message["ask"]), str(message["kind"])
            budget_s = float(message["budget_s"])
            run = self._kinds[kind]
            pid = _fork(lambda: run(message["value"]), out, self._keep)
        finally:
            os.close(out)
        self._work[number] = _Work(pid, time.monotonic() + budget_s + _MARGIN_S, reads_modules=kind == _READS_MODULES)
        self._lines.send({"began": number, "pid": pid})

    def _reap(self) -> None:
        now = time.monotonic()
        for number, work in list(self._work.items()):
            if work.ends_at <= now:
                _kill(work.pid)
                # One that does not die blocks in the kernel; it is reaped when it exits.
                self._work[number] = work._replace(ends_at=float("inf"))
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for number in [number for number, work in self._work.items() if work.pid == pid]:
                del self._work[number]

    def _end_all(self) -> None:
        for work in self._work.values():
            _kill(work.pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _ignore(_signum: int, _frame: object) -> None:
    """The wake-up pipe reports the signal."""


# --------------------------------------------------------------------------------------------------------- the children


def _fork(run: Callable[[], None], out: int, keep: Sequence[int]) -> int:
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(me)
        reset_signals(signal.pthread_sigmask(signal.SIG_BLOCK, ()), is_program=False)
        os.setsid()
        _keep_only(out, keep)
        run()
    except BrokenPipeError:
        pass  # the supervisor has ended the request
    finally:
        # Threads may block in the kernel; an ordinary exit would wait for them.
        os._exit(0)


def _keep_only(out: int, keep: Sequence[int]) -> None:
    """Make the answer standard output, and only keep the tools' memory files and the connection to the writer open."""
    os.dup2(out, 1)
    close_all_but(*held_fds(), *keep)


def write(content: bytes) -> None:
    """Write everything to standard output, which is the answer."""
    while content:
        content = content[os.write(1, content) :]


def _capture(value: Any) -> None:  # noqa: ANN401 - checked when it is decoded
    started_at = time.monotonic()
    set_name("sr-capture")
    from saferun.captures.capture_processes import run_request
    from saferun.captures.wire import request_from

    run_request(request_from(value), write, started_at)


def _dump(value: Any) -> NoReturn:  # noqa: ANN401
    """Run py-spy on one process without stopping it."""
    from saferun.captures.py_spy import argv_of

    tool = held_tool("py-spy")
    os.dup2(0, 2)
    environ = {name: text for name, text in os.environ.items() if name}
    os.execve(tool.path, argv_of("py-spy", int(value), "--nonblocking"), environ)


def _inspect(value: Any) -> None:  # noqa: ANN401
    """An inspection of ranks that seem quiet."""
    set_name("sr-inspect")
    from saferun.captures.inspection import inspection_json

    write(inspection_json(value))


def _lint(value: Any) -> None:  # noqa: ANN401
    """Run the lint of a rank's environment."""
    set_name("sr-lint")
    _take_environ(value["environ"])
    from saferun.env.lint.__main__ import main

    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it ends with the process
    main([str(value["python"]), str(value["script"])])
    sys.stdout.flush()


def _waits(value: Any) -> None:  # noqa: ANN401
    """Compute the waits before retries of a start, from the first wait and their number."""
    from saferun.supervisor.policy.backoff import retry_waits_s

    first_s, count = value
    write(json.dumps(retry_waits_s(float(first_s), int(count))).encode())


def _copy_hook(value: Any) -> None:  # noqa: ANN401
    """Copy the start-up hook from one directory to another."""
    from saferun.linux.hook_copy import copy_hook

    with suppress(OSError):
        copy_hook(*map(str, value))


def _beside(value: Any) -> None:  # noqa: ANN401
    """What may make ranks slow, by their processes."""
    set_name("sr-beside")
    from saferun.captures.beside_slow import beside_json

    write(beside_json([int(pid) for pid in value]))


def _recorders(value: Any) -> None:  # noqa: ANN401
    """How much ranks wait for each other, by their Flight Recorders."""
    set_name("sr-recorders")
    from saferun.captures.asked_recorders import waits_json

    write(waits_json(value))


def _usage(value: Any) -> None:  # noqa: ANN401
    """What ranks use, by their processes."""
    set_name("sr-usage")
    from saferun.captures.rank_usage import usage_json

    write(usage_json([int(pid) for pid in value]))


_KINDS: dict[str, Callable[[Any], None]] = {
    "capture": _capture,
    "dump": _dump,
    "inspect": _inspect,
    "beside": _beside,
    "recorders": _recorders,
    "usage": _usage,
    "lint": _lint,
    "waits": _waits,
    "hook": _copy_hook,
}
