"""Settings and profiles that nobody named: they count only where nobody else can have planted them.

What a user names, with ``--config`` or ``--env-profile-path``, counts wherever it lies and whoever wrote it.
"""

from __future__ import annotations

import errno
import os
import sys

from saferun.errors import UsageError, printable, suppress
from saferun.linux.ownership import NotOursError
from saferun.linux.trusted_files import open_found, open_found_directory

# Not there (any more), a link that leads nowhere, or nothing that can be read like a file.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO)

_said: set[str] = set()


def open_found_file(path: str, option: str) -> int | None:
    """A descriptor of a file that was found; None: there is none, or it is ignored, which is said once.

    Args:
        path: the file.
        option: by which it can be named.

    Raises:
        UsageError: it would count, but cannot be read.
    """
    try:
        return open_found(path)
    except NotOursError as error:
        _say_ignored(path, error, option)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise UsageError(f"{path}: {error.strerror or error}", "give a YAML file that can be read") from None
    return None


def counts(path: str, option: str, *, is_directory: bool = False) -> bool:
    """Whether a file or directory that was found counts. Where it does not, that is said once."""
    try:
        os.close(open_found_directory(path) if is_directory else open_found(path))
    except NotOursError as error:
        _say_ignored(path, error, option)
    except OSError as error:
        # Why it cannot be read is told by whoever wants to.
        return error.errno not in _NO_FILE
    else:
        return True
    return False


def _say_ignored(path: str, error: NotOursError, option: str) -> None:
    shown = os.path.normpath(path)
    if shown in _said:
        return
    _said.add(shown)
    words = f"{shown} is ignored: {error.strerror} (to use it all the same, pass {option} {shown})"
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"saferun: {printable(words)}\n")
