"""What the writer process does besides appending: directories, and the small files of ranks and launcher.

Each is a function of JSON values whose answer is a JSON value; an OSError is an answer too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from saferun.errors import suppress
from saferun.files import trees
from saferun.files.earlier_run import SetAside, keep_own_files, set_aside
from saferun.files.exclude_list import add_hosts
from saferun.files.failure_files import take_failure_record
from saferun.files.live_records import LiveRecord
from saferun.files.trees import Tree, add_tree, log_tree
from saferun.linux.error_files import (
    copy_large,
    copy_root_cause,
    read_error_file,
    was_written_since,
    write_launcher_error,
)
from saferun.linux.scratch import Scratch, logs_id, remove_scratch
from saferun.model import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Words for people; what is longer is no message.
_LONGEST_MESSAGE = 64 << 10
# Temporary directories that were made here, by the run's id and what for: they are locked, which keeps cleaners away.
_scratches: dict[tuple[str, int], Scratch] = {}
# The record of the launch, where it keeps no files.
_records: list[LiveRecord] = []


def make_run_directory(
    path: str,
    host_path: str,
    ignored: str,
    latest: list[str],
    earlier: Sequence[int] = (),
    keeps: int = 0,
    hosts: Sequence[str] = (),
) -> tuple[str, float | None, str, str]:
    """Make the directory of a launch and of this host in it.

    Args:
        path: the run directory.
        host_path: where this host's files go.
        ignored: where a .gitignore is put if there is none; empty: the user has named the directory.
        latest: a temporary name and the name, beside the run directory, of a link to it; empty: there is to be none.
        earlier: whether this process writes what is about the whole job, 0 or 1, where the directory may have been used
            before; empty: what is there is left where it is.
        keeps: 1 where files of the user's own may be there, which this process would replace.
        hosts: the names of all hosts of the job; empty: they are not known.

    Returns:
        The name of the directory into which what an earlier run left was moved, empty: there was nothing; where another
        run may still use the directory, how long ago it wrote there, 0: its process is known to live, None: none does;
        why files of an earlier run that has ended are left where they are, empty: none are; and the name of the
        directory that has files of the user's own as well.

    Raises:
        NotOursError: it, or the directory of all runs, belongs to another user.
        OSError: it cannot be made.
    """
    tree = add_tree(Tree(ignored or path))
    tree.make()
    fd = tree.open()
    aside, kept = SetAside(), ""
    try:
        if ignored:
            with suppress(OSError):
                trees.write_gitignore(fd)
        for leads in earlier:
            with suppress(OSError):
                aside = set_aside(fd, os.path.basename(host_path), leads=bool(leads), hosts=hosts)
        if keeps and not aside.name and aside.unheard_s is None:
            with suppress(OSError):
                kept = keep_own_files(fd)
        trees.make_directories(host_path)
        if latest:
            with suppress(OSError):
                os.symlink(os.path.basename(path), latest[0], dir_fd=fd)
            try:
                os.replace(*latest, src_dir_fd=fd, dst_dir_fd=fd)
            except OSError:  # a directory has the name, or there are no links here
                with suppress(OSError):
                    os.unlink(latest[0], dir_fd=fd)
    finally:
        os.close(fd)
    return aside.name, aside.unheard_s, aside.left, kept


def make_directories(paths: list[str], outdated: list[str], again: int = 0) -> None:
    """Make directories, and remove files: a directory that is used again must not show the errors of the run before.

    Args:
        paths: the directories.
        outdated: the files.
        again: 1 while no rank runs: directories that were removed are made again; else 0.
    """
    for path in paths:
        trees.make_directories(path, again=bool(again))
    for path in outdated:
        trees.remove_file(path)


def make_log_directories(base: str, name: str, attempt: int, ranks: list[str], known: int) -> str:
    """Make torchrun's directories of an attempt: ``<base>/<name>/attempt_<N>/<local rank>``.

    Args:
        base: ``--log-dir``.
        name: the run's directory in it: the run's id and a random text of eight letters.
        attempt: the attempt's number.
        ranks: the names of the ranks' directories.
        known: 1 where the run's directory has been made for an earlier attempt, else 0.

    Returns:
        The name, which is another one where it was taken.
    """
    os.makedirs(base, exist_ok=True)
    while not known:
        try:
            os.mkdir(os.path.join(base, name), 0o700)
        except FileExistsError:
            name = name[:-8] + os.urandom(4).hex()
            continue
        break
    add_tree(log_tree(base, name))
    for rank in ranks:
        trees.make_directories(os.path.join(base, name, f"attempt_{attempt}", rank), again=True)
    return name


def read_error(path: str) -> JsonObject | None:
    """What a rank's error file says."""
    error = read_error_file(path)
    if error is None:
        return None
    return {"message": error.message[:_LONGEST_MESSAGE], "time": error.time, "content": error.content}


def write_error(path: str, message: str, source: str, returncode: int, since: float = 0.0) -> None:
    """Write the launcher's own error file.

    Args:
        path: the file.
        message: what it says where no rank has said anything.
        source: the error file of the rank that is the cause; empty: none is.
        returncode: how that rank ended.
        since: a file that was written since then (seconds since the epoch) is left where no rank has said anything;
            0: none is.
    """
    recorded = read_error_file(source) if source else None
    if recorded is not None:
        copy_root_cause(recorded, returncode, path)
    elif source:
        copy_large(source, path)
    elif not (since and was_written_since(path, since)):
        write_launcher_error(message, path)


def make_scratch_directories(run_id: str, is_large: int, names: list[str]) -> tuple[str, int, int]:
    """Make directories in a private temporary directory of the run.

    Args:
        run_id: the run's.
        is_large: 1 for logs that the user wants, which may be too large for memory and stay, else 0.
        names: the directories, relative to it.

    Returns:
        The temporary directory, its device and its inode.
    """
    scratch = _scratches.setdefault((run_id, is_large), Scratch(logs_id(run_id) if is_large else run_id))
    base = scratch.path(names) if is_large else scratch.memory_path(names)
    return next(made for made in scratch.made if made[0] == base)


def remove_directories(made: list[list[str | int]]) -> None:
    """Remove the run's temporary directories: paths, devices and inodes; and those that were made here but for logs."""
    remove_scratch(made)
    while _scratches:
        (_, is_large), scratch = _scratches.popitem()
        if is_large:
            scratch.forget()
        else:
            scratch.close()


def write_live_record(name: str, host: str, file: str, is_part: int, content: str) -> None:
    """Write the record of a launch that keeps no files. The arguments are those of ``LiveRecord``, and the content.

    Raises:
        OSError: there is no place for it.
    """
    if not _records:
        _records.append(LiveRecord(name, host, file, is_part=bool(is_part)))
    _records[0].write(content, os.environ)


def touch_live_record() -> None:
    """Show that the launch lives."""
    for record in _records:
        record.touch()


def remove_live_record() -> None:
    """The launch is over."""
    while _records:
        _records.pop().remove()


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "make_run_directory": make_run_directory,
    "make_directories": make_directories,
    "make_log_directories": make_log_directories,
    "read_error": read_error,
    "write_error": write_error,
    "take_failure_record": take_failure_record,
    "make_scratch_directories": make_scratch_directories,
    "remove_directories": remove_directories,
    "write_live_record": write_live_record,
    "remove_live_record": remove_live_record,
    "add_hosts": add_hosts,
}
