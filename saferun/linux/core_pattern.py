"""The kernel's core pattern, as far as a launch needs it. Loaded at every start.

Source: core(5); Linux, fs/coredump.c.
"""

from __future__ import annotations

import os

from saferun.linux.small_files import read_bytes, read_line
from saferun.model import Value

RENAMED_PREFIX = "core.saferun."
"""The beginning of the names to which cores are renamed before the next one overwrites them."""
_PATTERN = "/proc/sys/kernel/core_pattern"
_USES_PID = "/proc/sys/kernel/core_uses_pid"
_PID_SPECIFIERS = frozenset("pPiI")
_LEAST_ROOM_BYTES = 1 << 30


class CorePattern(Value):
    """``kernel.core_pattern`` and ``kernel.core_uses_pid``."""

    text: str
    uses_pid: bool = False

    @property
    def handler(self) -> str:
        """The name of the program that the kernel pipes cores to; empty if it writes files."""
        argv = self.text[1:].split() if self.text.startswith("|") else []
        return os.path.basename(argv[0]) if argv else ""

    @property
    def is_file(self) -> bool:
        """Whether the kernel itself writes a file."""
        return bool(self.text or self.uses_pid) and not self.text.startswith(("|", "@"))

    @property
    def is_relative(self) -> bool:
        """Whether the file is written to the current directory of the process, or below."""
        return self.is_file and not self.text.startswith("/")

    @property
    def specifiers(self) -> frozenset[str]:
        """The letters after its percent signs."""
        letters = set()
        at = self.text.find("%")
        while 0 <= at < len(self.text) - 1:
            letters.add(self.text[at + 1])
            at = self.text.find("%", at + 2)
        return frozenset(letters)

    @property
    def is_shared_name(self) -> bool:
        """Whether processes that die in the same directory write to the same file."""
        return self.is_file and not self.uses_pid and not _PID_SPECIFIERS & self.specifiers

    @property
    def repeated_name(self) -> str:
        """The name of the file that the next core replaces, perhaps with specifiers; empty: each core is a new file."""
        is_new = not self.is_shared_name or "t" in self.specifiers or "%" in os.path.dirname(self.text)
        return "" if is_new else os.path.basename(self.text)

    def directory(self, cwd: str) -> str:
        """The directory for cores of processes in ``cwd``, as far as it is the same for all."""
        directory = os.path.dirname(self.text)
        while "%" in directory:
            directory = os.path.dirname(directory)
        return os.path.join(cwd, directory) if directory else cwd

    def description(self) -> str:
        """The pattern, for messages."""
        uses_pid = ", core_uses_pid 1" if self.uses_pid and self.is_file else ""
        return f"kernel.core_pattern is {self.text!r}{uses_pid}"


def read_core_pattern() -> CorePattern:
    """Read the current pattern."""
    return CorePattern(os.fsdecode(read_bytes(_PATTERN).strip(b"\n")), read_line(_USES_PID) not in {"", "0"})


def are_together(pattern: CorePattern) -> bool:
    """Whether all processes that die in the same directory leave their cores in one directory, there or below."""
    return pattern.is_relative and "%" not in os.path.dirname(pattern.text)


def share_a_name(pattern: CorePattern) -> bool:
    """Whether all ranks' cores have the same path, so that each overwrites the previous one."""
    return are_together(pattern) and pattern.is_shared_name


def takes_files(pattern: CorePattern) -> bool:
    """Whether a core may replace a file of the user's, of its name, in whatever directory its process is in."""
    return pattern.is_relative and bool(pattern.repeated_name)


def file_in_place(directory: str, name: str) -> str:
    """The path of a file that the next core would replace; empty: there is none, or the directory cannot be read.

    The kernel deletes whatever has the name of a core, unless it is a directory.

    Args:
        directory: where cores go.
        name: :attr:`CorePattern.repeated_name`. Where it has specifiers, only what is before and after them counts.

    Source: Linux, fs/coredump.c, do_coredump.
    """
    names = [name] if name else []
    if "%" in name:
        before, after = name.partition("%")[0], name.rpartition("%")[2][1:]
        try:
            names = [found for found in os.listdir(directory) if found.startswith(before) and found.endswith(after)]
        except OSError:
            return ""
    paths = (os.path.join(directory, found) for found in sorted(names))
    return next((path for path in paths if os.path.lexists(path) and not _is_directory(path)), "")


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def room_for_core(directory: str, size_bytes: int) -> str:
    """Why a core should not be written to a directory, in one line; empty: it may be.

    Args:
        directory: where it would go.
        size_bytes: its maximum size. A gigabyte must be free in any case.
    """
    try:
        file_system = os.statvfs(directory)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} is not writable"
    free_bytes = file_system.f_bavail * file_system.f_frsize
    if free_bytes >= max(size_bytes, _LEAST_ROOM_BYTES):
        return ""
    needed = f", and a core may take {size_bytes / 1e9:.1f} GB" if size_bytes > free_bytes else ""
    return f"{directory} has {free_bytes / 1e9:.1f} GB free{needed}"
