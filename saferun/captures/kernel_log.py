"""The kernel log during the job: dead GPUs, OOM kills, crashes, failing disks.

The log is read from /dev/kmsg, else by syslog(2), else from the journal, whichever is permitted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator

from saferun.captures.kernel_lines import relevant, shown
from saferun.captures.wire import HostCapture
from saferun.model import Value

_RECORD_BYTES = 8192  # the kernel's own limit
_HEAD_BYTES = 64  # more than level and number take
_RECORDS = 1 << 17
# The newest lines that are read: more than any job needs, within bounded memory.
_LINES = 1 << 15
_KEPT = 500
_SYSLOG_READ_ALL, _SYSLOG_SIZE = 3, 10
_JOURNAL_TIMEOUT_S = 5.0
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_SYSLOG_LINE = re.compile(r"<(\d{1,9})>\[ *(\d{1,15}\.\d{1,15})\](?:\[ *[TC]\d+\])? ?(.*)")
_FACILITY_SHIFT = 3
# The clock of the kernel's timestamps is not adjusted, unlike the system's: they drift apart by some millionths of the
# time since boot.
_DRIFT = 30e-6
_SLACK_S = 1.0
# A later mark would leave out what came since the start. So does this one: of what comes so soon, nothing ends a rank.
_MARK_S = 0.5
_KMSG = "/dev/kmsg"
# The number of the newest record of /dev/kmsg at the start of the ranks, and when that was, if it is known.
_MARK: list[tuple[int, float]] = []


class KernelLog(Value):
    """Lines of the kernel log, oldest first.

    ``source`` is where they were read, ``failure`` says in one line why none could be read.
    """

    lines: tuple[str, ...]
    source: str
    failure: str = ""


def capture_kernel_log(since: float, deadline: float) -> HostCapture:
    """The kernel log since then, as far as it may explain a hang or a crash.

    Args:
        since: seconds since the epoch.
        deadline: in monotonic seconds.
    """
    log = read_kernel_log(since, deadline)
    lines = relevant(log.lines)
    kept = lines[: _KEPT // 2] + lines[max(_KEPT // 2, len(lines) - _KEPT // 2) :]
    return HostCapture(shown(lines), {"source": log.source, "lines": kept}, log.failure)


def read_kernel_lines(since: float) -> list[str]:
    """The lines since then that may explain a hang or a crash; none if the log is not readable.

    Args:
        since: seconds since the epoch.
    """
    return relevant(read_kernel_log(since, time.monotonic() + _JOURNAL_TIMEOUT_S).lines)


def read_kernel_log(since: float, deadline: float, *, kmsg: str = _KMSG, may_ask_journal: bool = True) -> KernelLog:
    """All kernel lines since then.

    Args:
        since: seconds since the epoch. Slightly older lines may be included.
        deadline: in monotonic seconds.
        kmsg: the device with the kernel's records.
        may_ask_journal: whether a program may be run for it, which takes longer.
    """
    failures = []
    oldest_s = _since_boot(since)
    sources: tuple[tuple[str, Callable[[], list[str]]], ...] = (
        (kmsg, lambda: _read_kmsg(kmsg, oldest_s, deadline)),
        ("syslog(2)", lambda: _read_syslog(oldest_s)),
        ("journalctl -k", lambda: _read_journal(since, deadline)),
    )
    for source, read in sources if may_ask_journal else sources[:2]:
        try:
            return KernelLog(tuple(read()), source)
        except OSError as error:
            failures.append(f"{source}: {error.strerror or error}")
    return KernelLog((), "", _why_denied(failures))


def _since_boot(since: float) -> float:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    return since - (time.time() - now) - _SLACK_S - _DRIFT * now


def _why_denied(failures: list[str]) -> str:
    restricted = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/dmesg_restrict", encoding="ascii") as file:
        restricted = file.read().strip()
    if restricted == "1":
        return "the kernel log cannot be read: kernel.dmesg_restrict=1, and no CAP_SYSLOG"
    return f"the kernel log cannot be read: {'; '.join(failures)}"


# ----------------------------------------------------------------------------------------------------------- /dev/kmsg


def mark_start(started_at: float, kmsg: str = _KMSG) -> None:
    """Note which records are older than the ranks, for what reads them in this process and in forks of it later.

    The stamps say it less well: after months their clock differs from the system's by minutes.

    Args:
        started_at: when the ranks were started, in monotonic seconds.
        kmsg: the device with the kernel's records.
    """
    _MARK.clear()
    newest, deadline = -1, started_at + _MARK_S
    if stat.S_ISCHR(os.lstat(kmsg).st_mode):
        for record in _records(kmsg, deadline):
            newest = _number_of(record)
    if newest >= 0 and time.monotonic() < deadline:
        _MARK.append((newest, started_at))


def _read_kmsg(path: str, oldest_s: float, deadline: float) -> list[str]:
    lines: deque[str] = deque(maxlen=_LINES)
    after, started_at = _MARK[0] if _MARK else (None, 0.0)
    if after is not None and oldest_s <= started_at:
        oldest_s = 0.0  # all that is newer than the mark is wanted
    for record in _records(path, deadline):
        if after is None or _number_of(record) > after:
            lines += parse_record(record, oldest_s)
    return list(lines)


def _number_of(record: bytes) -> int:
    """The number of a record of /dev/kmsg, counted from the boot; -1 if it has none."""
    number = record[:_HEAD_BYTES].split(b",", 2)[1:2]
    return int(number[0]) if number and number[0].isdigit() else -1


def _records(path: str, deadline: float) -> Iterator[bytes]:
    # In some containers it is a link to the console, which must not become this session's terminal, nor be read from.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if os.isatty(fd):
            raise OSError(errno.ENODEV, "it is a terminal")
        for _ in range(_RECORDS):
            try:
                record = os.read(fd, _RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the oldest records have been overwritten; the next read continues after them
                raise
            if not record or time.monotonic() > deadline:
                break
            yield record
    finally:
        os.close(fd)


def parse_record(record: bytes, oldest_s: float) -> list[str]:
    """The lines of one record of /dev/kmsg; none if it is too old, or not the kernel's own.

    Args:
        record: ``level,number,microseconds,flags;text`` and a line end, then lines that begin with a space.
        oldest_s: seconds since boot.

    Source: Linux, Documentation/ABI/testing/dev-kmsg.
    """
    head, separator, rest = record.partition(b";")
    fields = head.split(b",")
    try:
        priority, microseconds = int(fields[0]), int(fields[2])
    except (IndexError, ValueError):
        return []
    # Programs may write here too: those records carry their facility, the kernel's is 0.
    if not separator or priority >> _FACILITY_SHIFT or microseconds < oldest_s * 1e6:
        return []
    text = rest.split(b"\n", 1)[0].decode("ascii", errors="replace")
    unescaped = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    return [line for line in unescaped.split("\n") if line]


# -------------------------------------------------------------------------------------------------- the syslog call


def _read_syslog(oldest_s: float) -> list[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    size = libc.klogctl(_SYSLOG_SIZE, None, 0)
    if size > 0:
        buffer = ctypes.create_string_buffer(size)
        size = libc.klogctl(_SYSLOG_READ_ALL, buffer, size)
        if size >= 0:
            return parse_syslog(buffer.raw[:size], oldest_s)
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def parse_syslog(content: bytes, oldest_s: float) -> list[str]:
    """The kernel's own lines from syslog(2) that are not too old: ``<6>[   12.345678] text``."""
    lines: list[str] = []
    for raw in content.decode(errors="replace").split("\n"):
        match = _SYSLOG_LINE.match(raw)
        # Without timestamps (printk.time=0) the age of a line is unknown.
        if match and not int(match[1]) >> _FACILITY_SHIFT and float(match[2]) >= oldest_s:
            lines.append(match[3])
    return lines


# --------------------------------------------------------------------------------------------------------- the journal


def _read_journal(since: float, deadline: float) -> list[str]:
    lines = _ask_journal(f"--since=@{max(0.0, since - _SLACK_S):.0f}", deadline)
    # Lines that this user may not see are silently missing: only a line of any age proves that the log is readable.
    if not lines and not _ask_journal("--lines=1", deadline):
        raise OSError(errno.EACCES, "no kernel lines that this user may see")
    return lines


def _ask_journal(option: str, deadline: float) -> list[str]:
    import subprocess

    timeout_s = max(0.1, min(_JOURNAL_TIMEOUT_S, deadline - time.monotonic()))
    # The option comes last, so that its --lines overrides the other.
    command = ["journalctl", "-k", "-o", "cat", "--no-pager", f"--lines={_LINES}", option]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, "no answer in time") from None
    if done.returncode != 0:
        error = done.stderr.decode(errors="replace").strip()
        raise OSError(errno.EACCES, error.splitlines()[0] if error else f"exit code {done.returncode}")
    return done.stdout.decode(errors="replace").splitlines()
