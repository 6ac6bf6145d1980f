"""Which run a word of the command line means: the same for every subcommand.

A run is named by its directory, by its name below saferun-runs, by its id, by the beginning of either, or by
``latest``. Runs are looked for below ./saferun-runs, in the index of this user's runs, and among those that live
without files. A run that lives comes before one that has ended, and one of this directory before others.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from saferun.errors import UsageError, suppress
from saferun.files.live_records import recorded_runs
from saferun.files.run_dir import BASE, shorter_path
from saferun.files.run_files import RUN_JSON, RunState, open_run, read_state
from saferun.files.run_index import Entry, index_path, read_index
from saferun.files.run_removal import RUN_NAME, open_base, run_names
from saferun.linux.ownership import ROOT, NotOursError, followed
from saferun.model import Value

LATEST = "latest"
_NAMES = "a run: its directory, its name below saferun-runs, its id, or the beginning of either"
RUN_HELP = (
    f"{_NAMES}; 'latest' is the default: the newest run that is still running, of the current directory if there is "
    "one, else of all; if there is none, the newest run"
)
ENDED_RUN_HELP = (
    f"{_NAMES}; 'latest' is the default: of the current directory the newest run that is still running, else the newest"
)
TARGET_HELP = f"a process, or instead of it the ranks below it, if there are any; or {RUN_HELP}"
PLAIN_RUN_HELP = f"{_NAMES}; or 'latest'"
REQUIRED_HELP = f"{_NAMES}; or 'latest': the newest run of the current directory that is still running"
_MOST_CANDIDATES = 100
_NAMED = 5
_DATE_CHARS = len("20260131-140500")
# A directory's name has six digits of the run's id.
_NAME_DIGITS = 6
_LONG_ID = re.compile(r"[0-9a-f]{7,16}")


class NoRunError(UsageError):
    """There is no run that a word could mean."""


class FoundRun(Value):
    """A run directory that was found.

    Attributes:
        path: the directory, without links.
        is_here: whether it is in the current directory's saferun-runs.
        run_id: the run's; empty: not known.
        date: date and time of its start, as in the names that saferun gives to directories; empty: not known.
    """

    path: str
    is_here: bool
    run_id: str = ""
    date: str = ""

    @property
    def name(self) -> str:
        """The name of the directory."""
        return os.path.basename(self.path)

    @property
    def shown(self) -> str:
        """The directory as it is shown."""
        return shorter_path(self.path)

    def read_state(self) -> RunState:
        """The state of the run."""
        return state_of(self.path)


def state_of(path: str | os.PathLike[str]) -> RunState:
    """The state of the run with this directory, as that has it now."""
    try:
        fd = open_run(os.fspath(path))
    except OSError:
        return RunState("unknown")
    try:
        return read_state(fd)
    finally:
        os.close(fd)


def add_run_argument(parser: argparse.ArgumentParser, *, is_required: bool = False, living_first: bool = False) -> None:
    """The argument that names a run.

    Args:
        parser: of the subcommand.
        is_required: a subcommand that ends a job does not choose which.
        living_first: as the subcommand has it for ``find_run``.
    """
    if is_required:
        parser.add_argument("run_dir", metavar="RUN", help=REQUIRED_HELP)
        return
    text = RUN_HELP if living_first else ENDED_RUN_HELP
    parser.add_argument("run_dir", nargs="?", default=LATEST, metavar="RUN", help=text)


def find_run(word: str, *, living_first: bool = False, ends: bool = False) -> Path:
    """The directory of the run that a word means.

    Args:
        word: as on the command line.
        living_first: whether ``latest`` is a run that lives elsewhere rather than one that has ended here.
        ends: whether the subcommand ends the ranks: ``latest`` is then a run of this directory, and of several runs
            that a word may mean none is chosen because it alone lives.

    Raises:
        NoRunError: there is none of that name or id.
        UsageError: there is none, or there are several, or a link to it is another user's.
    """
    named = _directory(word, ends=ends)
    if named is not None:
        return named
    if word == LATEST:
        return Path(_latest(living_first=living_first, ends=ends).path)
    matches = _matches(word)
    if len(matches) > 1 and not ends:
        matches = [run for run in matches if run.read_state().is_living] or matches
    if len(matches) > 1:
        names = ", ".join(run.shown for run in matches[:_NAMED])
        more = f" and {len(matches) - _NAMED} more" if len(matches) > _NAMED else ""
        raise UsageError(f"{word} may be several runs: {names}{more}", "give more of the name or id")
    if not matches:
        raise NoRunError(f"there is no run {word}", "see saferunctl list, or name a directory")
    return Path(matches[0].path)


def is_below_here(path: str) -> bool:
    """Whether a directory is below the current one, or below a saferun-runs there that is a link."""
    try:
        return any(Path(path).is_relative_to(os.path.realpath(base)) for base in (".", BASE))
    except OSError:  # the current directory is gone
        return False


def _directory(word: str, *, ends: bool) -> Path | None:
    # A directory of that name may be anything, such as the newest checkpoint.
    if word == LATEST and state_of(word).name == "unknown":
        return None
    for path in (word, os.path.join(BASE, word)):
        if word and os.path.isdir(path):
            if ends or word == LATEST:
                _check_link(path.rstrip("/") or "/", or_by_root=not ends)
            return Path(os.path.realpath(path))
    return None


def _check_link(path: str, *, or_by_root: bool) -> None:
    """Check that a path is no link of another user, who would choose the run. ``or_by_root``: root may follow it."""
    if or_by_root and os.geteuid() == ROOT:
        return
    with suppress(OSError):
        try:
            followed(path, None)
        except NotOursError as error:
            hint = "name a run by its own directory, or its id"
            raise UsageError(f"{path} leads through a link of another user: {error.strerror}", hint) from None


def _latest(*, living_first: bool, ends: bool) -> FoundRun:
    here = runs_here()
    link = _latest_link()
    # The link has the newest one that was started here, which may be on a host whose clock is behind.
    newest = next((run for run in here if run.path == link), None)
    if newest is None and link and not ends:
        newest = FoundRun(link, is_here=True)
    newest = newest or next(iter(here), None)
    # Others are examined only when they are wanted: their file systems may not answer.
    elsewhere = _runs_elsewhere(here) if not ends and (living_first or not here) else ()
    seen: list[FoundRun] = []
    for run in islice(chain(here, elsewhere), _MOST_CANDIDATES):
        if run.read_state().is_living:
            return run
        seen.append(run)
    newest = newest or next(iter(seen), None)
    if newest is None:
        others = "" if ends else ", and no other run"
        raise UsageError(f"there is no {BASE}/{LATEST} here{others}", "name a run by its directory")
    return newest  # a subcommand that ends a job is refused by how this one has ended


def _latest_link() -> str:
    """The directory that saferun-runs/latest leads to; empty: there is none."""
    path = os.path.join(BASE, LATEST)
    if not os.path.isdir(path):
        return ""
    for part in (BASE, path):
        _check_link(part, or_by_root=True)
    return os.path.realpath(path)


def _matches(word: str) -> list[FoundRun]:
    """The runs that a word may mean. If there are any, no others are examined: their file systems may not answer."""
    digits = word[:_NAME_DIGITS] if _LONG_ID.fullmatch(word) else ""
    runs = list(known_runs(lambda name, run_id: _is_meant(word, name, run_id) or _ends_with(name, digits)))
    matches = [run for run in runs if _is_meant(word, run.name, run.run_id)]
    if not matches and digits:
        # The index, which has whole ids, may lack the run.
        alike = [run for run in runs if _ends_with(run.name, digits)]
        matches = [run for run in alike if _run_id_of(run.path).startswith(word)]
    if not matches:
        # A directory that the user named may be a link to one of that name.
        linked = known_runs(lambda name, _: not RUN_NAME.fullmatch(name))
        matches = [run for run in linked if _is_meant(word, run.name, run.run_id)]
    return matches


def _is_meant(word: str, name: str, run_id: str) -> bool:
    ids = (run_id, name, name[_DATE_CHARS + 1 :])  # after the date and the time comes the beginning of the id
    return bool(word) and any(one.startswith(word) for one in ids if one)


def _ends_with(name: str, digits: str) -> bool:
    return bool(digits) and name.endswith(digits)


def known_runs(may_be: Callable[[str, str], bool] | None = None) -> Iterator[FoundRun]:
    """The runs below ./saferun-runs, and those in the index or without files, each once, the newest first in both.

    Args:
        may_be: whether a run of the index may be wanted, by its directory's name there and its id; None: all are.
    """
    here = runs_here()
    yield from here
    yield from _runs_elsewhere(here, may_be)


def runs_here() -> list[FoundRun]:
    """The runs below ./saferun-runs, the newest first. The file systems of others need not answer."""
    ids = _ids_of(read_index(index_path(os.environ)))
    return [FoundRun(path, True, ids.get(path, ""), os.path.basename(path)[:_DATE_CHARS]) for path in _below(BASE)]


def _runs_elsewhere(here: Sequence[FoundRun], may_be: Callable[[str, str], bool] | None = None) -> Iterator[FoundRun]:
    entries = read_index(index_path(os.environ))
    ids = _ids_of(entries)
    seen = {run.path for run in here}
    # Both kinds of names begin with the date and the time.
    elsewhere = [(entry.name[:_DATE_CHARS], entry.path) for entry in entries]
    elsewhere += [(os.path.basename(path)[:_DATE_CHARS], path) for path in recorded_runs(os.environ)]
    for date, path in sorted(elsewhere, key=lambda one: one[0], reverse=True):
        is_noted = path in ids
        if path in seen or (is_noted and may_be is not None and not may_be(os.path.basename(path), ids[path])):
            continue
        real = os.path.realpath(path)
        if real not in seen and (not is_noted or _is_ours(real)):
            seen.add(real)
            yield FoundRun(real, False, ids.get(path) or _run_id_of(real), date)


def _ids_of(entries: Iterable[Entry]) -> dict[str, str]:
    """The ids of the runs of directories, the newest run's of each: of entries, the newest first."""
    return {entry.path: entry.run_id for entry in reversed(list(entries))}


def _run_id_of(path: str) -> str:
    record = state_of(path).record
    return record.run_id if record is not None else ""


def _below(base: str) -> Iterable[str]:
    try:
        fd = open_base(base)
    except OSError:
        return
    try:
        names = run_names(fd)
    finally:
        os.close(fd)
    try:
        real = os.path.realpath(base)
    except OSError:  # the current directory is gone
        return
    yield from (os.path.join(real, name) for name in names)


def _is_ours(path: str) -> bool:
    """Whether there is a run of this user: the index may be out of date, or hold what it should not."""
    with suppress(OSError):
        return os.stat(path).st_uid == os.geteuid() and os.path.isfile(os.path.join(path, RUN_JSON))
    return False
