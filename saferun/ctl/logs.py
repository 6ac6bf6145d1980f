"""``saferunctl logs``: the output of a run's ranks, in the order of time, also while it runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator

from saferun.ctl.durations import seconds_of
from saferun.ctl.run_directory import FoundRun, add_run_argument, find_run
from saferun.errors import UsageError, printable
from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.ctl.log_files import Line, LogName, RunLogs

_RANKS = re.compile(r"[0-9]{1,8}(-[0-9]{1,8})?(,[0-9]{1,8}(-[0-9]{1,8})?)*")
_LONGEST_PATTERN = 1000
# A pattern that needs longer for one line needs for ever.
_MATCH_S = 2.0
_AGAIN_S = 0.1
_FIND_S = 1.0
_MOST_LAST = 1_000_000
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_run_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N lines")
    parser.add_argument("--rank", metavar="3,5-7", help="only these ranks")
    parser.add_argument("--host", action="append", metavar="HOST", help="only of this host; can be given several times")
    parser.add_argument("--attempt", type=int, metavar="N", help="only of this attempt; 0 is the first")
    stream = parser.add_mutually_exclusive_group()
    stream.add_argument("--stdout", action="store_const", dest="stream", const="stdout", help="only stdout")
    stream.add_argument("--stderr", action="store_const", dest="stream", const="stderr", help="only stderr")
    parser.add_argument("--grep", metavar="RE", help="only lines in which this regular expression (of Python) is found")
    parser.add_argument(
        "--since", metavar="TIME", help="only what came since: 10min, 14:05, 2026-01-31T14:05, or @EPOCH"
    )
    parser.add_argument("--time", action="store_true", help="with the time of each line")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Print the lines."""
    from saferun.ctl.log_files import RunLogs

    chosen = _chosen(arguments)
    since = since_time(arguments.since, time.time()) if arguments.since else 0.0
    pattern = _pattern(arguments.grep)
    if arguments.lines is not None and not 0 <= arguments.lines <= _MOST_LAST:
        raise UsageError(f"--lines {arguments.lines} is out of range", f"use 0 to {_MOST_LAST}")
    path = str(find_run(arguments.run_dir, living_first=True))
    try:
        logs = RunLogs(path, chosen.is_wanted, since)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name another run; see saferunctl list") from None
    matcher = _BoundedMatch(pattern) if pattern is not None else None
    show = _json_text if arguments.json else _Text(times=arguments.time, harmless=sys.stdout.isatty()).text
    out = sys.stdout.buffer
    try:
        lines = _all_lines(logs, path, follows=arguments.follow)
        wanted = (line for line in lines if matcher is None or line is None or matcher.is_found(line))
        for line in _last(wanted, arguments.lines):
            if line is None:
                out.flush()
            else:
                out.write(show(line) + b"\n")
        out.flush()
    finally:
        logs.close()
        if matcher is not None:
            matcher.close()
    return 0


class _Chosen(Value):
    ranks: tuple[range, ...]
    hosts: tuple[str, ...]
    attempt: int | None
    stream: str | None

    def is_wanted(self, name: LogName) -> bool:
        """Whether a file is to be shown."""
        return (
            (not self.ranks or any(name.rank in span for span in self.ranks))
            and (not self.hosts or name.host in self.hosts)
            and (self.attempt is None or name.attempt == self.attempt)
            and (self.stream is None or name.stream == self.stream)
        )


def _chosen(arguments: argparse.Namespace) -> _Chosen:
    ranks = []
    if arguments.rank is not None:
        if _RANKS.fullmatch(arguments.rank) is None:
            raise UsageError(f"--rank {arguments.rank} is no list of ranks", "write it like 3,5-7")
        for span in arguments.rank.split(","):
            low, _, high = span.partition("-")
            ranks.append(range(int(low), int(high or low) + 1))
    return _Chosen(tuple(ranks), tuple(arguments.host or ()), arguments.attempt, arguments.stream)


def since_time(text: str, now: float) -> float:
    """The time that ``--since`` means, in seconds since the epoch.

    Args:
        text: a duration before now, a time of the day, a date and time, or ``@`` and seconds since the epoch.
        now: seconds since the epoch.

    Raises:
        UsageError: it is none of them.
    """
    if re.fullmatch(r"@[0-9]{1,12}(\.[0-9]{1,9})?", text):
        return float(text[1:])
    if found := re.fullmatch(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?", text):
        hour, minute, second = int(found[1]), int(found[2]), int(found[3] or 0)
        at = time.mktime((*time.localtime(now)[:3], hour, minute, second, 0, 0, -1))
        # What is later than now was yesterday.
        return at if at <= now else at - 86400
    for form in ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text, form))
        except (ValueError, OverflowError):
            continue
    return now - seconds_of("--since", text)


def _pattern(pattern: str | None) -> re.Pattern[bytes] | None:
    if pattern is None:
        return None
    if len(pattern) > _LONGEST_PATTERN:
        raise UsageError(f"--grep: the pattern has more than {_LONGEST_PATTERN} characters", "use a shorter one")
    try:
        return re.compile(pattern.encode(errors="surrogateescape"))
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--grep {pattern}: {error}", "see the syntax of Python's re") from None


class _BoundedMatch:
    """Matches with a bound on the time for one line: the matcher lets a signal handler in, which ends it."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        import signal

        self._pattern = pattern
        self._began_at = 0.0
        self._handler = signal.signal(signal.SIGALRM, self._check)
        signal.setitimer(signal.ITIMER_REAL, _MATCH_S / 2, _MATCH_S / 2)

    def close(self) -> None:
        """No more lines."""
        import signal

        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._handler)

    def is_found(self, line: Line) -> bool:
        self._began_at = time.monotonic()
        try:
            return self._pattern.search(line.text) is not None
        finally:
            self._began_at = 0.0

    def _check(self, *_arguments: object) -> None:
        if self._began_at and time.monotonic() - self._began_at > _MATCH_S:
            self._began_at = 0.0
            raise UsageError(
                f"--grep {self._pattern.pattern.decode(errors='replace')}: one line takes longer than {_MATCH_S:g} s",
                "avoid nested repetitions such as (a+)+",
            )


def _all_lines(logs: RunLogs, path: str, *, follows: bool) -> Iterator[Line | None]:
    """The lines; None: that is all for now."""
    found = FoundRun(path, is_here=False)
    has_ended = not follows or not found.read_state().is_living
    found_at = time.monotonic()
    while True:
        yield from logs.read_timed()
        if has_ended:
            break
        if not logs.has_times:
            yield from logs.read_rest()
        yield None
        time.sleep(_AGAIN_S)
        if time.monotonic() - found_at >= _FIND_S:
            found_at = time.monotonic()
            logs.find_indexes()
            has_ended = not found.read_state().is_living
    for number, line in enumerate(logs.read_rest()):
        if not number:
            yield None
            sys.stderr.write("saferunctl: the times of what follows are not known: one file comes after the other\n")
        yield line
    yield from logs.finish()


def _last(lines: Iterable[Line | None], count: int | None) -> Iterator[Line | None]:
    """The last so many of the lines up to the first None, and all that follow."""
    if count is None:
        yield from lines
        return
    kept: deque[Line] = deque(maxlen=count)
    iterator = iter(lines)
    for line in iterator:
        if line is None:
            break
        kept.append(line)
    yield from kept
    yield None
    yield from iterator


class _Text:
    """A line as text, with its prefix.

    Args:
        times: whether the time is shown.
        harmless: whether control characters are taken out: on a terminal.
    """

    def __init__(self, *, times: bool, harmless: bool) -> None:
        self._times = times
        self._harmless = harmless
        self._prefixes: dict[tuple[str, int], bytes] = {}

    def text(self, line: Line) -> bytes:
        name = line.name
        prefix = self._prefixes.get((name.host, name.rank))
        if prefix is None:
            prefix = self._prefixes[name.host, name.rank] = f"[{printable(name.host)}:{name.rank}] ".encode()
        if self._times:
            prefix = time_text(line.time).encode() + b" " + prefix
        return prefix + (harmless(line.text).encode(errors="replace") if self._harmless else line.text)


def time_text(at: float | None) -> str:
    """``14:05:03.250``, in local time."""
    if at is None:
        return "--:--:--.---"
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"


def harmless(line: bytes) -> str:
    """A line that a terminal only prints: without control sequences, and of a progress bar its last state."""
    states = [state for state in line.decode(errors="replace").split("\r") if state]
    return printable(_CONTROLS.sub("", states[-1] if states else "").expandtabs())


def _json_text(line: Line) -> bytes:
    name = line.name
    fields = {"time": line.time, **name._asdict(), "text": line.text.decode(errors="replace")}
    return json.dumps(fields).encode()
