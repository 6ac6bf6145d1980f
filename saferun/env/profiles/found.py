"""Settings and profiles that were found by search: they are used only if no other user can have planted them.

What the user names, with ``--config`` or ``--env-profile-path``, is used wherever it is and whoever wrote it.
"""

from __future__ import annotations

import errno
import os
import sys

from saferun.errors import UsageError, printable, suppress
from saferun.linux.ownership import NotOursError
from saferun.linux.trusted_files import open_found, open_found_directory

# Missing, a dangling link, or not readable like a file.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)

_reported: set[str] = set()


def open_found_file(path: str, option: str) -> int | None:
    """Open a file that was found; None if there is none, or it is ignored, which is reported once.

    Args:
        path: the file.
        option: the option that names such a file.

    Raises:
        UsageError: it would be used, but cannot be read.
    """
    try:
        return open_found(path)
    except NotOursError as error:
        _report_ignored(path, error, option)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise UsageError(f"{path}: {error.strerror or error}", "give a YAML file that can be read") from None
    return None


def counts(path: str, option: str, *, is_directory: bool = False) -> bool:
    """Whether a file or directory that was found is used. If not, that is reported once."""
    try:
        os.close(open_found_directory(path) if is_directory else open_found(path))
    except NotOursError as error:
        _report_ignored(path, error, option)
    except OSError as error:
        # The code that reads it reports why it cannot.
        return error.errno not in _NO_FILE
    else:
        return True
    return False


def report_unused(error: UsageError, instead: str) -> None:
    """Report once that what was found cannot be used.

    Args:
        error: why.
        instead: what is done.
    """
    _report(f"warning: {error.what}: {instead}")


def report_silent(path: str) -> None:
    """Report that a file or directory of the user's was not read."""
    _report(
        f"warning: the file system of {path} does not answer: the user's env profiles and NCCL settings are not read"
    )


def _report_ignored(path: str, error: NotOursError, option: str) -> None:
    shown = os.path.normpath(path)
    _report(f"{shown} is ignored: {error.strerror} (to use it all the same, pass {option} {shown})", about=shown)


def _report(message: str, about: str = "") -> None:
    """Print a line, once for each message, or for what it is about: two options may search for one file."""
    if (about or message) in _reported:
        return
    _reported.add(about or message)
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"saferun: {printable(message)}\n")
