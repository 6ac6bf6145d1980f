"""The module search path of this process."""

from __future__ import annotations

import os
import sys

# As Python has put it there: the directory of what was started, or the current one.
_first_entry: list[str] = []
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def search_pythons_own_first() -> None:
    """Have modules of Python's found before those of the same name in PYTHONPATH or the current directory.

    torchrun needs fewer of Python's modules than saferun: a ``resource.py`` of the user's does it no harm. The order of
    all other entries stays, as it decides which torch there is.
    """
    library = os.path.dirname(getattr(os, "__file__", ""))
    if not library:
        return
    _first_entry[:] = sys.path[:1]
    own = {library, os.path.join(library, "lib-dynload")}
    sys.path.sort(key=lambda entry: entry not in own)


def path_without_first() -> list[str]:
    """The search path without the directory of what was started, if Python has put it there: that is saferun's."""
    path = list(sys.path)
    if not sys.flags.safe_path:
        for entry in _first_entry or path[:1]:
            if entry in path:
                path.remove(entry)
    return path


def search_theirs_last(python_path: str) -> None:
    """Move the user's PYTHONPATH to the end of the search path, and drop the current directory.

    A module there with the name of one of Python's is meant for the ranks.

    Args:
        python_path: the value of PYTHONPATH.
    """
    theirs = [entry for entry in python_path.split(os.pathsep) if entry]
    doubtful = {"", os.curdir, *theirs}
    try:
        doubtful.add(os.getcwd())
    except OSError:
        pass  # it has been deleted
    kept = [entry for entry in sys.path if entry not in doubtful]
    sys.path[:] = [*kept, *([] if _ROOT in kept else [_ROOT]), *theirs]
