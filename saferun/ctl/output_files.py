"""Files that saferunctl writes where the user says."""

from __future__ import annotations

import os

from saferun.errors import SaferunError, suppress
from saferun.linux.ownership import open_temporary


def write_output(path: str, content: bytes) -> None:
    """Write a file as a whole, for this user only; a link that another user may have planted is replaced.

    Raises:
        SaferunError: it cannot be written; with a hint at ``--output``.
    """
    try:
        folder, name = os.path.split(os.path.abspath(path))
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd, temporary = open_temporary(f".{name}", dir_fd=folder_fd)
            try:
                with open(fd, "wb") as file:
                    file.write(content)
                os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder_fd)
                raise
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise SaferunError(f"{path}: {error.strerror}", "write elsewhere with --output") from None
