"""``saferunctl logs``: the output of a run's ranks, in the order of time, also while it runs."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from saferun.console.stderr import print_error
from saferun.ctl.durations import seconds_of
from saferun.ctl.pace import Pace
from saferun.ctl.rank_lists import ranks_of
from saferun.ctl.run_directory import LATEST, FoundRun, add_run_argument, find_run, is_below_here, state_of
from saferun.errors import UsageError, printable, suppress
from saferun.files.run_dir import shorter_path
from saferun.files.run_files import RUN_JSON, open_run, read_json
from saferun.linux.limits import raise_files
from saferun.model import Value
from saferun.text.decoding import MALFORMED
from saferun.text.wording import count_text, rank_spans, ranks_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from saferun.ctl.log_prefixes import Prefixes
    from saferun.ctl.log_reading import LogFile, LogName, Piece, RunLogs

_LONGEST_PATTERN = 1000
# A pattern that needs longer for one line needs forever.
_MATCH_S = 2.0
_AGAIN_S = 0.1
# The writer notes the times of what it has written at once; on a busy machine it may have to wait for a processor.
_NOTED_S = 0.05
_FIND_S = 1.0
_MOST_LAST = 1_000_000
_NAMED_HOSTS = 5
_MOST_RANKS = 1000
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
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
    parser.add_argument(
        "--prefix",
        metavar="TEMPLATE",
        help="the prefix of each line, as of saferun; none: no prefix (default: the run's own)",
    )
    parser.add_argument("--time", action="store_true", help="with the time of each line")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Print the lines; 1 where there are files that could not be read."""
    from saferun.ctl.log_prefixes import Prefixes
    from saferun.ctl.log_reading import RunLogs

    chosen = _chosen(arguments)
    since = since_time(arguments.since, time.time()) if arguments.since else 0.0
    pattern = _pattern(arguments.grep)
    if arguments.lines is not None and not 0 <= arguments.lines <= _MOST_LAST:
        raise UsageError(f"--lines {arguments.lines} is out of range", f"use 0 to {_MOST_LAST}")
    path = str(find_run(arguments.run_dir))
    raise_files()
    try:
        logs = RunLogs(path, chosen.is_wanted, since)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name another run; see saferunctl list") from None
    reason = None if logs.has_files() else _without_files(path)
    reason = reason or _unknown(chosen, logs, path, follows=arguments.follow)
    if reason is not None:
        logs.close()
        raise reason
    if arguments.run_dir == LATEST and not is_below_here(path):
        print_error(printable(f"saferunctl: the output of {shorter_path(path)}, a run of another directory"))
    matcher = _BoundedMatch(pattern) if pattern is not None else None
    harmless_only = sys.stdout.isatty()
    prefixes = None if arguments.json else Prefixes(path, arguments.prefix)
    show = _json_text if prefixes is None else _Text(prefixes, times=arguments.time, harmless=harmless_only).text
    out = sys.stdout.buffer
    # A million tuples and no cycle: looking for one takes a quarter of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        batches = _all_pieces(logs, path, out, follows=arguments.follow)
        wanted = (pieces if matcher is None or pieces is None else matcher.matching(pieces) for pieces in batches)
        for pieces in _last(wanted, arguments.lines):
            if pieces is None:
                out.flush()
            else:
                out.write(show(pieces))
        out.flush()
    finally:
        if collects:
            gc.enable()
        logs.close()
        if matcher is not None:
            matcher.close()
    return _exit_code(logs.failures)


def _exit_code(failures: Mapping[str, str]) -> int:
    """1, and a line that says so, where output may be missing."""
    if not failures:
        return 0
    path, why = next(iter(failures.items()))
    print_error(printable(f"saferunctl: {count_text(len(failures), 'file')} could not be read: {path}: {why}"))
    return 1


def _without_files(path: str) -> UsageError | None:
    """Why there is no file of output; None: it is a run, whose ranks may not have written anything yet."""
    from saferun.files.live_records import record_directories

    shown = shorter_path(path)
    if os.path.dirname(path) in map(os.path.realpath, record_directories(os.environ)):
        return UsageError(f"{shown} is a run with --run-dir none: its output is in no file", "see its console")
    if state_of(path).name == "unknown":
        return UsageError(f"{shown} is not the directory of a run", "see saferunctl list, or name another one")
    return None


def _unknown(chosen: _Chosen, logs: RunLogs, path: str, *, follows: bool) -> UsageError | None:
    """Why nothing can be there that is asked for; None: it may be, or come."""
    if follows and state_of(path).is_living:
        return None
    hosts = logs.hosts() if chosen.hosts else []
    for host in chosen.hosts:
        if hosts and host not in hosts:
            more = f" and {len(hosts) - _NAMED_HOSTS} more" if len(hosts) > _NAMED_HOSTS else ""
            known = f"there are files of {', '.join(hosts[:_NAMED_HOSTS])}{more}"
            return UsageError(f"there is no host {host} in this run", known)
    attempts = logs.attempts() if chosen.attempt is not None else set()
    if attempts and chosen.attempt not in attempts:
        known = f"attempt{'s' if len(attempts) > 1 else ''} {', '.join(rank_spans(attempts)[0])}"
        return UsageError(f"there is no attempt {chosen.attempt} in this run", f"it has {known}; 0 is the first")
    count = _rank_count(path) if chosen.ranks else 0
    if count and min(span.start for span in chosen.ranks) >= count:
        known_ranks = {*range(count), *logs.ranks()}
        if not any(rank in span for rank in known_ranks for span in chosen.ranks):
            asked = ranks_text(rank for span in chosen.ranks for rank in span[:_MOST_RANKS])
            are = "are" if asked.startswith("ranks") else "is"
            return UsageError(f"there {are} no {asked} in this run", f"it has {ranks_text(known_ranks)}")
    return None


def _rank_count(path: str) -> int:
    """How many ranks a run has; 0: not known."""
    with suppress(OSError, *MALFORMED):
        fd = open_run(path)
        try:
            return int(read_json(fd, RUN_JSON)["environment"]["WORLD_SIZE"])
        finally:
            os.close(fd)
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
    ranks = ranks_of("--rank", arguments.rank) if arguments.rank is not None else ()
    return _Chosen(ranks, tuple(arguments.host or ()), arguments.attempt, arguments.stream)


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
    if found := re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?", text):
        clock = int(found[1]), int(found[2]), int(found[3] or 0)
        year, month, day = time.localtime(now)[:3]
        at = time.mktime((year, month, day, *clock, 0, 0, -1))
        # What is later than now was yesterday, which may have had 23 or 25 hours.
        return at if at <= now else time.mktime((year, month, day - 1, *clock, 0, 0, -1))
    for form in ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d"):
        try:
            return time.mktime(time.strptime(text, form))
        except (ValueError, OverflowError):
            continue
    try:
        return now - seconds_of("--since", text)
    except UsageError:
        hint = "write 10min, 14:05 or 2026-01-31T14:05"
        raise UsageError(f"--since {text} is neither a duration nor a time", hint) from None


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

    def matching(self, pieces: list[Piece]) -> list[Piece]:
        """The lines in which the pattern is found."""
        return [(file, at, line) for file, at, text in pieces for line in text.split(b"\n") if self._is_found(line)]

    def _is_found(self, line: bytes) -> bool:
        self._began_at = time.monotonic()
        try:
            return self._pattern.search(line) is not None
        finally:
            self._began_at = 0.0

    def _check(self, *_arguments: object) -> None:
        if self._began_at and time.monotonic() - self._began_at > _MATCH_S:
            self._began_at = 0.0
            raise UsageError(
                f"--grep {self._pattern.pattern.decode(errors='replace')}: one line takes longer than {_MATCH_S:g} s",
                "avoid nested repetitions such as (a+)+",
            )


def _all_pieces(logs: RunLogs, path: str, out: BinaryIO, *, follows: bool) -> Iterator[list[Piece] | None]:
    """The lines; None: that is all for now. ``out``: where they are written."""
    found = FoundRun(path, is_here=False)
    has_ended = not follows or not found.read_state().is_living
    rest, finding = Pace(_FIND_S), Pace(_FIND_S)
    if not follows:
        logs.note_sizes()
    while True:
        yield from logs.read_timed()
        if has_ended:
            break
        if not logs.has_times and rest.is_due():
            yield from rest.timed(logs.read_rest(known=True))
        yield None
        time.sleep(_AGAIN_S)
        if finding.is_due():
            began_at = time.monotonic()
            logs.find_indexes()
            has_ended = not found.read_state().is_living
            finding.took(time.monotonic() - began_at)
    if not follows and logs.has_times and logs.has_rest():
        # A run that lives notes when its output came a moment after it has written it.
        time.sleep(_NOTED_S)
        yield from logs.read_timed()
    for number, pieces in enumerate(filter(None, logs.read_rest())):
        if not number:
            out.flush()
            print_error("saferunctl: the times of the output that follows are unknown: it is printed file by file")
        yield pieces
    yield from logs.finish()


def _last(batches: Iterable[list[Piece] | None], count: int | None) -> Iterator[list[Piece] | None]:
    """The last so many of the lines up to the first None, or of all, and all that follow it."""
    if count is None:
        yield from batches
        return
    kept: deque[tuple[Piece, int]] = deque()
    total = 0
    iterator = iter(batches)
    for pieces in iterator:
        if pieces is None:
            break
        for piece in pieces:
            lines = piece[2].count(b"\n") + 1
            kept.append((piece, lines))
            total += lines
            while kept and total - kept[0][1] >= count:
                total -= kept.popleft()[1]
    result = [piece for piece, _ in kept]
    if total > count:
        file, at, text = result[0]
        result[0] = (file, at, text.split(b"\n", total - count)[-1])
    yield result
    yield None
    yield from iterator


class _Text:
    """Lines as text, with their prefixes.

    Args:
        prefixes: of the ranks.
        times: whether the time is shown.
        harmless: whether control characters are taken out: on a terminal.
    """

    def __init__(self, prefixes: Prefixes, *, times: bool, harmless: bool) -> None:
        self._known = prefixes
        self._times = times
        self._harmless = harmless
        self._prefixes: dict[LogFile, bytes] = {}

    def text(self, pieces: list[Piece]) -> bytes:
        prefixes = self._prefixes
        for file in {piece[0] for piece in pieces}.difference(prefixes):
            prefixes[file] = self._known.of(file.name)
        try:
            return self._all(pieces)
        finally:
            if not self._known.is_final:
                self._known.is_final = True
                prefixes.clear()

    def _all(self, pieces: list[Piece]) -> bytes:
        prefixes = self._prefixes
        if self._times or self._harmless:
            return b"".join([line for piece in pieces for line in self._lines(piece)])
        return b"".join(
            [
                prefixes[file] + (text if b"\n" not in text else text.replace(b"\n", b"\n" + prefixes[file])) + b"\n"
                for file, _, text in pieces
            ]
        )

    def _lines(self, piece: Piece) -> Iterator[bytes]:
        file, at, text = piece
        prefix = self._prefixes[file]
        if self._times:
            prefix = time_text(at / 1000 if at is not None else None).encode() + b" " + prefix
        for line in text.split(b"\n"):
            yield prefix + (harmless(line).encode(errors="replace") if self._harmless else line) + b"\n"


def time_text(at: float | None) -> str:
    """``14:05:03.250``, in local time."""
    if at is None:
        return "--:--:--.---"
    try:
        return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
    except (OverflowError, ValueError, OSError):
        return "--:--:--.---"


def harmless(line: bytes) -> str:
    """A line that a terminal only prints: without control sequences, and of a progress bar its last state."""
    states = [state for state in line.decode(errors="replace").split("\r") if state]
    return printable(_CONTROLS.sub("", states[-1] if states else "").expandtabs())


def _json_text(pieces: list[Piece]) -> bytes:
    lines = []
    for file, at, text in pieces:
        fields = {"time": at / 1000 if at is not None else None, **file.name._asdict()}
        lines += [json.dumps({**fields, "text": line.decode(errors="replace")}) + "\n" for line in text.split(b"\n")]
    return "".join(lines).encode()
