"""The module search path of this process."""

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


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
