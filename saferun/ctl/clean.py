"""``saferunctl clean``: removes old run directories, and nothing unless it is asked for."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence

from saferun.console.stderr import print_error
from saferun.ctl.answer import answer, answer_json
from saferun.ctl.durations import seconds_of
from saferun.ctl.list_runs import age_text, outcome_text
from saferun.errors import UsageError
from saferun.files.run_dir import BASE, shorter_path
from saferun.files.run_index import index_path, read_index
from saferun.files.run_removal import RUN_NAME, OldRun, old_run, open_base, remove_run, run_names, size_of
from saferun.model import JsonObject, Value
from saferun.text.wording import count_text, size_text

_COUNTING_S = 60.0


class Candidate(Value):
    """A run that is to be removed. ``base`` is the directory of runs that it is in."""

    base: str
    run: OldRun
    size_bytes: int

    @property
    def path(self) -> str:
        """Its directory."""
        return os.path.join(self.base, self.run.name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument(
        "directories",
        nargs="*",
        metavar="DIR",
        help=f"a directory of runs (default: ./{BASE})",
    )
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N runs of each directory")
    parser.add_argument("--older-than", metavar="DURATION", help="remove runs that ended longer ago: 12h, 7d, 4w")
    parser.add_argument("--everywhere", action="store_true", help="in all directories of runs of the index")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.epilog = (
        "With both --keep and --older-than a run is removed only if neither keeps it. A run that may still be running "
        "is never removed, nor a directory that is not a run directory of yours that saferun has named."
    )


def run(arguments: argparse.Namespace) -> int:
    """Remove, and say what; 1 where something could not be removed."""
    if arguments.keep is None and arguments.older_than is None:
        raise UsageError("neither --keep nor --older-than is given", "pass --keep 20, or --older-than 7d, or both")
    if arguments.keep is not None and arguments.keep < 0:
        raise UsageError(f"--keep {arguments.keep} is negative", "use 0 to keep none")
    older_s = seconds_of("--older-than", arguments.older_than) if arguments.older_than is not None else 0.0
    chosen: list[Candidate] = []
    has_failed = False
    for base in _bases(arguments.directories, everywhere=arguments.everywhere):
        try:
            chosen += candidates(base, arguments.keep or 0, older_s, time.time())
        except UsageError as error:
            if not arguments.everywhere:
                raise
            print_error(error)
            has_failed = True
    left = [] if arguments.dry_run else [one for one in chosen if not _remove(one)]
    if arguments.json:
        gone = [] if arguments.dry_run else [one for one in chosen if one not in left]
        answer_json({"dry_run": arguments.dry_run, "runs": [_as_json(one, is_removed=one in gone) for one in chosen]})
        return 1 if left or has_failed else 0
    removed = [one for one in chosen if one not in left]
    total = count_text(len(removed), "run") + f", {size_text(sum(one.size_bytes for one in removed))}"
    lines = list(_lines(removed)) if arguments.dry_run else []
    lines += [f"{shorter_path(one.path)}: cannot be removed" for one in left]
    lines.append(f"would remove {total}" if arguments.dry_run else f"removed {total}")
    answer("".join(f"{line}\n" for line in lines))
    return 1 if left or has_failed else 0


def _bases(directories: Sequence[str], *, everywhere: bool) -> list[str]:
    bases = [os.path.realpath(path) for path in directories]
    for path, base in zip(directories, bases, strict=True):
        if not os.path.isdir(base):
            what = f"{path} is not a directory" if os.path.lexists(path) else f"there is no directory {path}"
            raise UsageError(what, f"name a directory of runs, such as {BASE}")
    if everywhere:
        paths = [os.path.realpath(entry.path) for entry in read_index(index_path(os.environ))]
        # What is beside a directory of --run-dir is no run.
        bases += [os.path.dirname(path) for path in paths if RUN_NAME.fullmatch(os.path.basename(path))]
    if not bases and not everywhere:
        if not os.path.isdir(BASE):
            raise UsageError(f"there is no {BASE} here", "name a directory of runs, or pass --everywhere")
        bases = [os.path.realpath(BASE)]
    return [base for base in dict.fromkeys(bases) if os.path.isdir(base)]


def candidates(base: str, keep: int, older_s: float, now: float) -> Iterator[Candidate]:
    """The runs of a directory that are to be removed, the newest first.

    Raises:
        UsageError: the directory is another user's, or cannot be read.
    """
    try:
        fd = open_base(base)
    except OSError as error:
        raise UsageError(f"{shorter_path(base)}: {error.strerror}", "name a directory of runs of yours") from None
    try:
        until = time.monotonic() + _COUNTING_S
        for name in run_names(fd)[keep:]:
            run = old_run(fd, name)
            if run is not None and now - run.ended_at >= older_s:
                yield Candidate(base, run, size_of(fd, name, until))
    finally:
        os.close(fd)


def _remove(one: Candidate) -> bool:
    try:
        fd = open_base(one.base)
    except OSError:
        return False
    try:
        return remove_run(fd, one.run.name)
    finally:
        os.close(fd)


def _lines(chosen: Iterable[Candidate]) -> Iterator[str]:
    now = time.time()
    for one in chosen:
        state = one.run.state
        age = age_text(max(now - one.run.ended_at, 0.0))
        size = size_text(one.size_bytes)
        yield f"{state.name:<9}  {age:>7}  {size:>9}  {shorter_path(one.path)}  {outcome_text(state)}"


def _as_json(one: Candidate, *, is_removed: bool) -> JsonObject:
    return {
        "path": one.path,
        "state": one.run.state.name,
        "ended_at": one.run.ended_at,
        "size_bytes": one.size_bytes,
        "is_removed": is_removed,
    }
