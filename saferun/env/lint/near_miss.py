"""The name that was probably meant: by similar letters, by the order of parts, by another prefix."""

from __future__ import annotations

from collections.abc import Callable, Collection

from saferun.env.lint.knowledge import MISSPELT_PREFIXES, SWAPPED_PREFIXES

_MAX_COMPARISONS = 4_000  # per name; a hostile environment may hold many names
_MIN_LENGTH, _LONG, _MAX_LENGTH = 8, 12, 100  # in characters
_MAX_REST = 4  # characters missing at the end of a word
_MAX_LONGER = 2  # or shorter
_ALIKE = 0.9  # similarity: one typing error in eight letters, two in twenty


def closest(name: str, documented: Collection[str], mentioned: Collection[str]) -> str:
    """The name that was most likely meant, or "" if none is similar.

    Args:
        name: the name that is set.
        documented: names that vendors document, which are the most likely.
        mentioned: names that an installed library or module holds.
    """
    if not _MIN_LENGTH <= len(name) <= _MAX_LENGTH:
        return ""
    from difflib import get_close_matches

    for names in (documented, mentioned):
        # Prefixes have a table of their own; here the names of one family are compared.
        alike = (other for other in names if other[:2] == name[:2] and abs(len(other) - len(name)) <= _MAX_LONGER)
        near = get_close_matches(name, sorted(set(alike) - {name})[:_MAX_COMPARISONS], 1, _ALIKE)
        if near:
            return near[0]
    return _reordered(name, documented) or _cut_short(name, documented)


def under_another_prefix(name: str, is_read: Callable[[str], bool]) -> str:
    """The same name with the prefix that is really read (TORCH_NCCL_ for NCCL_, for example), or ""."""
    for wrong, right in SWAPPED_PREFIXES:
        if name.startswith(wrong):
            other = right + name[len(wrong) :]
            if other != name and is_read(other):
                return other
    return ""


def under_a_mended_prefix(name: str) -> str:
    """The name with a misspelt prefix corrected, or "" if that is not a known misspelling."""
    word = name[: name.find("_") + 1]
    right = MISSPELT_PREFIXES.get(word)
    return right + name[len(word) :] if right else ""


def _reordered(name: str, documented: Collection[str]) -> str:
    parts = sorted(name.split("_"))
    return next((other for other in sorted(documented) if sorted(other.split("_")) == parts), "")


def _cut_short(name: str, documented: Collection[str]) -> str:
    # CUDA_LAUNCH_BLOCK, NCCL_DEBUG_SUBSYSTEM: the end of the last word is missing, or one is added.
    found = []
    for other in documented:
        shorter, longer = sorted((name, other), key=len)
        rest = longer[len(shorter) :]
        if len(shorter) >= _LONG and longer.startswith(shorter) and len(rest) <= _MAX_REST and "_" not in rest:
            found.append(other)
    return found[0] if len(found) == 1 else ""
