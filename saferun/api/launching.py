"""Launches saferun as a process of its own, from a program, a notebook or a test."""

from __future__ import annotations

import codecs
import fcntl
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple

from saferun.api.rank_function import (
    CALL_NAME,
    failure_name,
    open_private,
    read_private,
    result_name,
    write_private,
)
from saferun.api.report import NAME, Report, read_report
from saferun.errors import SaferunError, UsageError, suppress
from saferun.files.run_dir import BASE
from saferun.files.run_files import host_names, names_in, open_run, read_record
from saferun.files.run_index import index_path, read_index
from saferun.files.run_removal import open_base, run_names
from saferun.text.decoding import MALFORMED, loads

_CHUNK_BYTES = 1 << 16
_KEPT_BYTES = 64 << 20
_LONGEST_EVENTS = 64 << 20
_CANDIDATES = 50
_CLOCK_S = 5.0
_STOP_S = 90.0
_POLL_S = 0.2
# A program within a step of a scheduler launches on its own host, and meets no other: options come after, and win.
_OWN_OPTIONS = ("--stop-with-parent", "on", "--scheduler", "none")


class RunResult(NamedTuple):
    """How a launch ended.

    Attributes:
        exit_code: saferun's.
        rank_exit_codes: those of the ranks of the last attempt on this host, minus the number of a signal; empty where
            the launch has no files.
        run_dir: the run directory; None: there is none.
        report: what report.json says; None: there is none, since nothing went wrong.
        values: what a function returned, in the order of the ranks, None of one that has left by ``sys.exit(0)``; empty
            where the launch failed, and for scripts.
        stdout: with ``capture``, at most the last 64 MiB.
        stderr: likewise.
    """

    exit_code: int
    rank_exit_codes: dict[int, int]
    run_dir: str | None
    report: Report | None
    values: tuple[Any, ...] = ()
    stdout: str = ""
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """Whether the launch has succeeded."""
        return self.exit_code == 0

    def check(self) -> RunResult:
        """This result, if the launch has succeeded.

        Raises:
            SaferunError: it has failed; the text says why.
        """
        if self.ok:
            return self
        failure = self.report.failure if self.report is not None else None
        headline = failure.headline if failure is not None else f"the launch ended with exit code {self.exit_code}"
        hint = failure.hint if failure is not None else ""
        raise SaferunError(headline, hint or f"see {self.run_dir or 'its output'}", self.exit_code)


def run(
    target: str | os.PathLike[str] | Callable[..., object],
    *,
    nproc: int | str = 1,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    capture: bool = False,
) -> RunResult:
    """Launch a script or a function on this host, by saferun as a process of its own, and wait for its end.

    Args:
        target: the path of a script, or a function, which every rank calls. Ranks have to be able to import it, unless
            cloudpickle is installed.
        nproc: the number of ranks: a number, or ``auto``, ``cpu``, ``gpu`` or ``xpu``.
        args: arguments of the script or the function.
        env: variables that are set for this launch.
        options: more options of saferun, as on the command line: ``["--max-restarts", "1"]``.
        capture: return the output instead of passing it on to this process's stdout and stderr.

    Raises:
        SaferunError: the function cannot be launched, or what it returned cannot be pickled; its text has a hint. A
            launch that fails is a result.
        UsageError: ``args`` or ``options`` is one string.
        KeyboardInterrupt: Ctrl-C; the launch has been stopped.
    """
    for name, value in (("args", args), ("options", options)):
        if isinstance(value, (str, bytes)):
            hint = f"pass a list, one element for each word: {name}={os.fsdecode(value).split()}"
            raise UsageError(f"saferun.run: {name} is one string", hint)
    with ExitStack() as stack:
        directory = -1
        if callable(target):
            path = stack.enter_context(_private_directory())
            directory = open_private(path)
            stack.callback(os.close, directory)
            write_private(CALL_NAME, pickle.dumps((sys.path, _pickled(target, tuple(args)))), directory)
            program = ["--module", "saferun.api.rank_function", path]
        else:
            program = [os.fspath(target), *map(str, args)]
        # -P: a module in the current directory would stand in for one of Python's.
        command = [
            sys.executable,
            "-P",
            "-m",
            "saferun",
            *_OWN_OPTIONS,
            "--nproc-per-node",
            str(nproc),
            *options,
            *program,
        ]
        environ = _environ(env or {})
        began = time.time()
        told = _ToldEnd(stack) if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN else None
        process = subprocess.Popen(
            command if told is None else told.command(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture or not _is_plain(sys.stdout, sys.__stdout__) else None,
            stderr=subprocess.PIPE if capture or not _is_plain(sys.stderr, sys.__stderr__) else None,
            # A Ctrl-C is sent on, once; a notebook's reaches this process alone.
            start_new_session=True,
            pass_fds=() if told is None else (told.write_fd,),
        )
        kept = _follow(process, capture=capture)
        pid, code = (process.pid, process.returncode) if told is None else told.read()
        found = _run_dir(pid, began, options, environ)
        codes = _rank_exit_codes(found) if found is not None else {}
        values = tuple(_values(directory)) if directory >= 0 and code == 0 else ()
    report = None
    if found is not None and os.path.exists(os.path.join(found, NAME)):
        with suppress(SaferunError):
            report = read_report(found)
    return RunResult(code, codes, found, report, values, kept[0].text(), kept[1].text())


def _is_plain(stream: object, original: object) -> bool:
    """Whether what is written to a stream goes to the descriptor that a child inherits: not so in a notebook."""
    return stream is original and stream is not None


def _environ(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of saferun, in which this package is found as it is found here."""
    environ = {**os.environ, **changes}
    directory = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if os.path.basename(directory) not in {"site-packages", "dist-packages"} and directory not in entries:
        environ["PYTHONPATH"] = os.pathsep.join([*entries, directory])
    return environ


# ---------------------------------------------------------------------------------------------------------- functions


@contextmanager
def _private_directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="saferun-call-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _pickled(function: Callable[..., object], args: tuple[Any, ...]) -> bytes:
    """The call: by reference where ranks can import the function, else by cloudpickle.

    Raises:
        UsageError: neither is possible.
    """
    is_found = _is_importable(function)
    try:
        if is_found:
            return pickle.dumps((function, args))
        import cloudpickle  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        name = getattr(function, "__qualname__", repr(function))
        raise UsageError(
            f"{name} cannot be imported by the ranks: it is defined in a notebook, in __main__ or in a function",
            "move it into a module, or install cloudpickle",
        ) from None
    except Exception as error:
        raise UsageError(f"the arguments cannot be pickled: {error}", "pass numbers, strings or lists") from None
    try:
        content: bytes = cloudpickle.dumps((function, args))
    except Exception as error:
        raise UsageError(f"the function cannot be pickled: {error}", "move it into a module") from None
    return content


def _is_importable(function: Callable[..., object]) -> bool:
    """Whether the name of a function leads to it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module is None or module == "__main__":
        return False
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _values(directory: int) -> Iterable[Any]:
    """What the ranks returned, in their order. Only files of this user are unpickled.

    Raises:
        SaferunError: it cannot be pickled.
    """
    with os.scandir(directory) as entries:
        names = {entry.name for entry in entries if entry.name.startswith(("result_", "failure_"))}
    for rank in sorted({int(name.partition("_")[2]) for name in names}):
        if failure_name(rank) in names:
            text = read_private(failure_name(rank), directory).decode(errors="replace")
            raise SaferunError(text, "return numbers, strings, lists or CPU tensors; the ranks themselves ended well")
        yield pickle.loads(read_private(result_name(rank), directory))  # noqa: S301


# ------------------------------------------------------------------------------------------------------- the process


class _ToldEnd:
    """How a launch ends where SIGCHLD is ignored: the kernel reaps it, and Python takes that for exit code 0.

    Args:
        stack: closes the pipe.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._read_fd, write_fd = os.pipe()
        # A daemon may have closed the first three, which are others in the process.
        self.write_fd = fcntl.fcntl(write_fd, fcntl.F_DUPFD_CLOEXEC, 3)
        for fd in (self._read_fd, write_fd, self.write_fd):
            stack.callback(os.close, fd)
        os.set_blocking(self._read_fd, False)

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs the command, and tells its end."""
        own = [sys.executable, "-P", "-m", "saferun.api.told_end", str(self.write_fd), str(os.getpid())]
        return [*own, *command]

    def read(self) -> tuple[int, int]:
        """The process of the command and its exit code, once both processes have ended."""
        content = b""
        with suppress(BlockingIOError):  # it could tell nothing
            content = os.read(self._read_fd, _CHUNK_BYTES)
        numbers = [int(number) for number in content.split()]
        return numbers[0] if numbers else 0, numbers[1] if len(numbers) > 1 else -signal.SIGKILL


def _follow(process: subprocess.Popen[bytes], *, capture: bool) -> tuple[_Kept, _Kept]:
    """Wait for the end of the launch, and pass on what it prints. Ctrl-C stops it first.

    Raises:
        KeyboardInterrupt: it was stopped by Ctrl-C, and has ended.
    """
    kept = (_Kept(), _Kept())
    signals = iter((signal.SIGINT, signal.SIGTERM))
    interrupted: KeyboardInterrupt | None = None
    try:
        with selectors.DefaultSelector() as selector:
            for pipe, stream, own in (
                (process.stdout, sys.stdout, kept[0]),
                (process.stderr, sys.stderr, kept[1]),
            ):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, own if capture else _PassedOn(stream))
            while True:
                try:
                    _pump(process, selector)
                    break
                except KeyboardInterrupt as error:
                    interrupted = error
                    process.send_signal(next(signals, signal.SIGKILL))
    finally:
        _end(process)
    if interrupted is not None:
        raise interrupted
    return kept


def _pump(process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> None:
    while process.poll() is None or selector.get_map():
        if not selector.get_map():
            process.wait()
            return
        ready = selector.select(_POLL_S)
        if not ready and process.poll() is not None:
            return  # what a rank left behind may keep the pipe open
        for key, _ in ready:
            chunk = os.read(key.fd, _CHUNK_BYTES)
            if not chunk:
                selector.unregister(key.fileobj)
            key.data.write(chunk)


class _Kept:
    """The last that was printed."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size_bytes = 0

    def write(self, chunk: bytes) -> None:
        """Keep one piece, and no more in all than there is room for."""
        self._chunks.append(chunk)
        self._size_bytes += len(chunk)
        while self._size_bytes > _KEPT_BYTES:
            self._size_bytes -= len(self._chunks.popleft())

    def text(self) -> str:
        """All that is kept."""
        return b"".join(self._chunks).decode(errors="replace")


class _PassedOn:
    """What is printed goes on to a stream of the caller, whatever that stream does with it.

    Args:
        stream: that of a notebook, a test or a log; it may be closed, or its disk full. None: there is none.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        # A character may come in two pieces.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_failed = False

    def write(self, chunk: bytes) -> None:
        """Pass on one piece; empty: the end. A stream that fails costs its text, and not the launch."""
        text = self._decoder.decode(chunk, final=not chunk)
        if self._stream is None or not text:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = getattr(self._stream, "encoding", None) or "ascii"
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            if hasattr(self._stream, "flush"):
                self._stream.flush()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                what = f"saferun: the output of the ranks cannot be written: {type(error).__name__}: {error}"
                # With -W error, a warning is an exception, too.
                with suppress(RuntimeWarning):
                    warnings.warn(what, RuntimeWarning, stacklevel=2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever happens here, the launch does not go on without its caller."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


# --------------------------------------------------------------------------------------------------- the run directory


def _run_dir(pid: int, began: float, options: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The run directory of the launch that this process was."""
    for path in _candidates(options, environ):
        with suppress(OSError):
            fd = open_run(path)
            try:
                record = read_record(fd)
            finally:
                os.close(fd)
            is_it = record is not None and record.process is not None and record.process.pid == pid
            if is_it and record is not None and record.started_at >= began - _CLOCK_S:
                return os.path.abspath(path)
    return None


def _candidates(options: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    named = environ.get("SAFERUN_RUN_DIR", "")
    for option, value in zip(options, [*options[1:], ""], strict=False):
        flag, equals, rest = option.replace("_", "-").partition("=")
        if flag == "--run-dir":
            named = option.partition("=")[2] if equals and rest else value
    if named:
        yield named
    with suppress(OSError):
        fd = open_base(BASE)
        try:
            names = run_names(fd)
        finally:
            os.close(fd)
        yield from (os.path.join(BASE, name) for name in names[:_CANDIDATES])
    yield from (entry.path for entry in read_index(index_path(environ))[:_CANDIDATES])


def _rank_exit_codes(path: str) -> dict[int, int]:
    """How the ranks of the last attempt ended, as the events of the run say."""
    codes: dict[int, dict[int, int]] = {}
    with suppress(OSError):
        fd = open_run(path)
        try:
            for host in host_names(fd):
                ranks: dict[tuple[int, int], int] = {}
                for event in _events(fd, host):
                    with suppress(*MALFORMED):
                        _take(event, ranks, codes)
        finally:
            os.close(fd)
    return dict(sorted(codes[max(codes)].items())) if codes else {}


def _take(event: dict[str, Any], ranks: dict[tuple[int, int], int], codes: dict[int, dict[int, int]]) -> None:
    attempt = int(event["attempt"])
    if event["event"] == "HostsJoined":
        for assignment in event["placement"]["ranks"]:
            ranks[attempt, int(assignment["local_rank"])] = int(assignment["rank"])
    elif event["event"] == "RankExited":
        status, local_rank = event["status"], int(event["local_rank"])
        code = int(status["code"]) if status["code"] is not None else -int(status["signum"])
        codes.setdefault(attempt, {})[ranks.get((attempt, local_rank), local_rank)] = code


def _events(fd: int, host: str) -> Iterator[dict[str, Any]]:
    below = os.open(host, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        for name in names_in(below, _CANDIDATES):
            if name.startswith("events") and name.endswith(".jsonl"):
                content = read_private(name, below)[:_LONGEST_EVENTS]
                for line in content.splitlines():
                    if b'"RankExited"' in line or b'"HostsJoined"' in line:
                        with suppress(*MALFORMED):
                            yield loads(line)
    finally:
        os.close(below)
