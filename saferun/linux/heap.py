"""Gives memory that is free inside the heap back to the system, after imports and compiled patterns have left holes.

Source: malloc_trim(3), of glibc; with other C libraries nothing is given back.
"""

from __future__ import annotations

from saferun.linux.system_call import libc


def trim_heap() -> bool:
    """Give back what is free. Returns whether anything was."""
    trim = getattr(libc, "malloc_trim", None)
    return bool(trim(0)) if trim is not None else False
