"""The process of a launch: started, followed to its end, and never left behind."""

from __future__ import annotations

import codecs
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, NamedTuple

from saferun.errors import suppress

_CHUNK_BYTES = 1 << 16
_KEPT_BYTES = 64 << 20
_STOP_S = 90.0
_POLL_S = 0.2


class EndedLaunch(NamedTuple):
    """A launch that has ended.

    Attributes:
        pid: of its supervisor; 0: it is not known.
        exit_code: minus the number of a signal, where one has ended it.
        stdout: what is kept of it.
        stderr: likewise.
    """

    pid: int
    exit_code: int
    stdout: str
    stderr: str


def run_to_end(command: Sequence[str], environ: Mapping[str, str], *, capture: bool) -> EndedLaunch:
    """Run saferun, and wait for its end. Ctrl-C stops it first.

    Args:
        command: with its arguments.
        environ: its environment.
        capture: keep its output, at most the last 64 MiB of a stream, instead of passing it on.

    Raises:
        KeyboardInterrupt: it was stopped by Ctrl-C, and has ended.
    """
    with ExitStack() as stack:
        reported = _ReportedEnd(stack) if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN else None
        process = subprocess.Popen(
            command if reported is None else reported.command(command),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture or not _is_plain(sys.stdout, sys.__stdout__) else None,
            stderr=subprocess.PIPE if capture or not _is_plain(sys.stderr, sys.__stderr__) else None,
            # A Ctrl-C is sent on, once; a notebook's reaches this process alone.
            start_new_session=True,
            pass_fds=() if reported is None else (reported.write_fd,),
        )
        kept = _follow(process, capture=capture)
        pid, code = (process.pid, process.returncode) if reported is None else reported.read()
    return EndedLaunch(pid, code, kept[0].text(), kept[1].text())


def _is_plain(stream: object, original: object) -> bool:
    """Whether what is written to a stream goes to the descriptor that a child inherits: not so in a notebook."""
    return stream is original and stream is not None


class _ReportedEnd:
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
        """What runs the command, and reports its exit code."""
        own = [sys.executable, "-P", "-m", "saferun.api.exit_code_pipe", str(self.write_fd), str(os.getpid())]
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
