"""Whether the file systems that the job uses answer, and are still writable.

A server that is gone is not found by what the kernel remembers of its files, so each path is asked for three things,
of which at least one needs the server: its status, how full its file system is, and the first name in it. (Not of FUSE:
there the process that serves it is asked for the status anyway, and for a first name may list all of a bucket.) Each is
asked by a thread of its own. One that gets no answer stays behind in the check process, which is not waited for.

A path that the user has named has to exist: a file system that is not mounted is not there. Of the others the nearest
directory above counts, as a run directory is made later.

The ranks of several hosts wait for this check. What they may never use is not waited for as long as what they need.

Sources: stat(2), statfs(2), proc_pid_mountinfo(5); Linux, fs/ext4/super.c (errors=remount-ro, emergency_ro),
fs/ext4/sysfs.c (errors_count, last_error_time).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Sequence

from saferun.linux.procfs import file_system_of, mount_of, parse_mounts, without_escapes
from saferun.linux.small_files import read_line, read_link, read_text
from saferun.model import Value
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import own_path
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import UNUSABLE, CheckResult
from saferun.text.wording import duration_text

PATIENCE_S = 5.0
"""How long a path may take to answer: a metadata server that a thousand hosts ask at the same time is not dead."""
_NEEDLESS_S = 2.0
"""The same for what the ranks of a launch may do without: saferun's own files, HOME, TMPDIR."""
_CLASS = "file_system_error"
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
_BROKEN_HINT = "look at `dmesg`, at the server, and at the network to it; processes that use it hang, or fail"
_MISSING_HINT = "see whether its file system is mounted on this host, and whether the path is right"
_MOST_PATHS = 16
# What a file system answers that is broken; that there is no permission is an answer like others.
_BROKEN = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENXIO),
        *(errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.ENODEV),
    }
)
# File systems that the kernel sets read-only when they are damaged. A planned `mount -o remount,ro` leaves the same
# behind: it changes one mount and the file system, and bind mounts and those of other namespaces stay "rw".
_ON_DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "reiserfs"})
_DAMAGED = frozenset({"emergency_ro", "shutdown"})
_DEVICE, _POINT, _OPTIONS = 2, 4, 5  # fields of mountinfo: 8:2, /data, the mount's own options


class _Answer(Value):
    """What a path answered: ``error`` is an errno, 0: all is well."""

    path: str
    error: int
    took_s: float


class ReadOnly(Value):
    """A file system that is read-only although it was mounted to be written to.

    ``device`` is its number (``8:2``); ``is_certain``: the kernel itself says that damage is the reason.
    """

    point: str
    device: str
    is_certain: bool


def check_storage(context: CheckContext) -> CheckResult:
    """Whether the paths that the job uses answer, and whether a file system has become read-only by damage."""
    needed, others = _paths(context)
    mountinfo = read_text(context.path("proc/self/mountinfo"))
    mounts = parse_mounts(mountinfo)
    answers, silent = _ask(context, needed, others, mounts)
    problems = [
        f"{_path_text(path, mounts)} does not answer within {PATIENCE_S:g} s" for path in silent if path in needed
    ]
    problems += [
        f"{_path_text(answer.path, mounts)} answers with an error: {os.strerror(answer.error)}"
        for answer in answers
        if answer.error in _BROKEN
    ]
    missing = [answer.path for answer in answers if answer.error in _MISSING]
    problems += [f"{path} does not exist" for path in missing]
    used = {mount_of(path, mounts) for path in (*needed, *others)}
    # Late after so short a time is not proof enough to blame the host.
    late = [f"{_path_text(path, mounts)} does not answer within {_NEEDLESS_S:g} s" for path in silent if path in others]
    for one in read_only_file_systems(mountinfo):
        is_damaged = one.is_certain or _has_failed(context, one.device)
        if is_damaged or one.point in used:
            (problems if is_damaged else late).append(f"the file system at {one.point} has become read-only")
    facts = [
        (answer.path, "does not exist" if answer.path in missing else f"{answer.took_s:.4f} s") for answer in answers
    ]
    facts += [(path, "no answer") for path in silent]
    broken = [*silent, *(answer.path for answer in answers if answer.error in _BROKEN), *missing]
    facts[:0] = [(UNUSABLE, path) for path in broken if path in needed]
    if problems or late:
        texts = list(dict.fromkeys((*problems, *late)))
        hints = [_BROKEN_HINT] * (len(texts) > len(missing)) + [_MISSING_HINT] * bool(missing)
        return warning("; ".join(texts), "; ".join(hints), facts, class_name=_CLASS if problems else "")
    slowest = max(answers, key=lambda answer: answer.took_s, default=_Answer("", 0, 0.0))
    return ok(f"{len(answers)} paths answer, the slowest in {duration_text(slowest.took_s)}", facts)


def _paths(context: CheckContext) -> tuple[list[str], list[str]]:
    """What the job is known to need, and what it may do without, each once."""
    environ = context.environ
    script = os.path.dirname(os.path.abspath(context.script)) if context.script else ""
    needed, others = [*context.storage, script], [context.run_dir, environ.get("HOME", ""), environ.get("TMPDIR", "")]
    try:
        needed.append(os.getcwd())
    except OSError:  # it has been removed: no other path depends on it
        others = list(filter(os.path.isabs, others))
    if context.is_of_host:
        needed, others = needed + others, []  # no ranks wait
    first = list(dict.fromkeys(os.path.abspath(path) for path in needed if path))[:_MOST_PATHS]
    second = list(dict.fromkeys(os.path.abspath(path) for path in others if path))
    return first, [path for path in second if path not in first][: _MOST_PATHS - len(first)]


def _ask(
    context: CheckContext, needed: Sequence[str], others: Sequence[str], mounts: list[tuple[str, str]]
) -> tuple[list[_Answer], list[str]]:
    """What the paths answer, and those that do not, in their order."""
    named = {os.path.abspath(path) for path in context.storage}
    found: dict[str, _Answer] = {}
    asked = []

    def ask(path: str) -> None:
        began_at = time.monotonic()
        lists = not file_system_of(path, mounts)[1].startswith("fuse")
        own = own_path(context, path)
        error = _error_of(own, lists=lists)
        while error in _MISSING and path not in named:
            above = os.path.dirname(own)
            own, error = above, _error_of(above, lists=lists) if above != own else 0
        found[path] = _Answer(path, error, time.monotonic() - began_at)

    began_at = time.monotonic()
    for path in (*needed, *others):
        thread = threading.Thread(target=ask, args=(path,), daemon=True, name="storage")
        thread.start()
        asked.append((path, thread))
    for path, thread in asked:
        until = began_at + (PATIENCE_S if path in needed else min(_NEEDLESS_S, PATIENCE_S))
        thread.join(max(until - time.monotonic(), 0.0))
    known = dict(found)
    return [known[path] for path, _ in asked if path in known], [path for path, _ in asked if path not in known]


def _error_of(path: str, *, lists: bool = True) -> int:
    """What is wrong with a path; an errno, or 0."""
    try:
        status = os.stat(path)
        os.statvfs(path)
        if lists and stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                next(entries, None)
    except OSError as error:
        return error.errno or errno.EIO
    except ValueError:
        return errno.EINVAL  # no path: it has a character that no file name can have here
    return 0


def _path_text(path: str, mounts: list[tuple[str, str]]) -> str:
    """``/lustre/job (lustre at /lustre)``."""
    point, kind = file_system_of(path, mounts)
    return f"{path} ({kind} at {point})" if point and kind and point != "/" else path


def read_only_file_systems(mountinfo: str) -> list[ReadOnly]:
    """The file systems that are read-only although they were mounted to be written to, each mount point once.

    Args:
        mountinfo: the content of /proc/self/mountinfo.
    """
    found: dict[str, ReadOnly] = {}
    for line in mountinfo.splitlines():
        about, _, source = line.partition(" - ")
        fields, of_system = about.split(" "), source.split(" ")
        if len(fields) <= _OPTIONS or len(of_system) < 3:  # noqa: PLR2004 - type, device, options
            continue
        own, whole = set(fields[_OPTIONS].split(",")), set(of_system[2].split(","))
        is_certain = bool(_DAMAGED & whole)
        if of_system[0] in _ON_DISKS and (is_certain or ("rw" in own and "ro" in whole)):
            point = without_escapes(fields[_POINT])
            found.setdefault(point, ReadOnly(point, fields[_DEVICE], is_certain))
    return list(found.values())


def _has_failed(context: CheckContext, device: str) -> bool:
    """Whether ext4 has met an error on a device since the boot. Errors of before may have been repaired by now."""
    name = os.path.basename(read_link(context.path("sys/dev/block", device)))
    errors, at = (read_line(context.path("sys/fs/ext4", name, file)) for file in ("errors_count", "last_error_time"))
    if not name or not errors.isdecimal() or not at.isdecimal():
        return False
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return int(errors) > 0 and int(at) >= booted_at
