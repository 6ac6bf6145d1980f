"""File systems that stop answering while a test runs.

``frozen_disk`` is ext4 on a loop device: while it is frozen, whoever writes sleeps uninterruptibly, and reads go on.
``mirror`` shows a directory through FUSE: while it is frozen, nothing there answers, neither ``stat`` nor ``open`` nor
a read of what is not in the page cache.

Both are mounted in a mount namespace of their own, which a keeper process holds: no other process of the machine sees
them, and they are thawed and gone when the keeper's standard input closes, whatever became of the test. A command gets
there with ``before``, and the test looks at files there with ``inside``.

They need root; where that is missing the tests that use them are left out, and fail where ``CI`` is set.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEADLINE_S = 60.0
_KEEPER = Path(__file__).with_name("frozen_keeper.py")


def can_mount() -> bool:
    """Whether this process may mount file systems, and has the devices for it."""
    tools = all(shutil.which(name) for name in ("mount", "mkfs.ext4", "nsenter"))
    return os.geteuid() == 0 and tools and os.path.exists("/dev/fuse") and os.path.exists("/dev/loop-control")


needs_mounts = pytest.mark.skipif(
    not can_mount() and not os.environ.get("CI"), reason="needs root, mkfs.ext4, loop devices and FUSE"
)


class FileSystem:
    """A file system that freezes and thaws when it is told to.

    Args:
        path: where it is mounted, for those who enter its mount namespace.
        keeper: the process that holds it.
    """

    def __init__(self, path: Path, keeper: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._keeper = keeper

    def before(self, directory: Path | str | None = None) -> list[str]:
        """A command before another one, which is then run where this file system is mounted.

        Args:
            directory: its working directory, entered once it is there; None: the one that the command is started in.
        """
        enter = f"nsenter --mount=/proc/{self._keeper.pid}/ns/mnt"
        # Entering a mount namespace leads to its root directory.
        quoted = shlex.quote(str(directory)) if directory is not None else '"$PWD"'
        return ["sh", "-c", f"""exec {enter} sh -c 'cd "$0" && exec "$@"' {quoted} "$@\"""", "sh"]

    def inside(self, path: Path | str) -> Path:
        """A path as it is seen where the file system is mounted, for this process."""
        return Path(f"/proc/{self._keeper.pid}/root") / str(path).lstrip("/")

    def freeze(self) -> None:
        """From now on it does not answer. What is under way is finished first."""
        self._command(b"freeze\n")

    def slow_down(self) -> None:
        """From now on it takes some 200 KiB a second. A mirror alone can do that."""
        self._command(b"slow\n")

    def thaw(self) -> None:
        """It answers again, also those who have waited."""
        self._command(b"thaw\n")

    def _command(self, words: bytes) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(words)
        self._keeper.stdin.flush()
        self.await_answer()

    def await_answer(self) -> None:
        """Wait until the keeper has done what it was told last.

        Raises:
            AssertionError: it could not.
        """
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], _DEADLINE_S)
        answer = self._keeper.stdout.readline() if ready else b"no answer"
        assert answer == b"done\n", answer


@contextlib.contextmanager
def frozen_disk(folder: Path, *, size_mib: int = 64) -> Iterator[FileSystem]:
    """An ext4 file system of its own, mounted at ``folder/disk``, which can be frozen.

    Args:
        folder: a folder of the test's own.
        size_mib: how large it is.
    """
    image = folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], check=True, capture_output=True)
    with _keeper("disk", folder / "disk", image) as system:
        yield system
    image.unlink()


@contextlib.contextmanager
def mirror(folder: Path, source: Path) -> Iterator[FileSystem]:
    """What is in ``source``, through FUSE, at ``folder/mirror``, which can be frozen.

    Args:
        folder: a folder of the test's own.
        source: the directory that it shows.
    """
    with _keeper("mirror", folder / "mirror", source) as system:
        yield system


@contextlib.contextmanager
def _keeper(kind: str, path: Path, source: Path) -> Iterator[FileSystem]:
    path.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-S", _KEEPER, kind, path, source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A Ctrl-C at the tests must not end it before it has thawed what others wait for.
        start_new_session=True,
    )
    system = FileSystem(path, process)
    try:
        system.await_answer()
        yield system
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(_DEADLINE_S)
        process.stdout.close()
