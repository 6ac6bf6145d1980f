"""The name that was meant: near misses by edit distance, by the order of words, by another prefix."""

from __future__ import annotations

from collections.abc import Callable, Collection

from saferun.env.lint.knowledge import MISSPELT_PREFIXES, SWAPPED_PREFIXES

_MAX_COMPARISONS = 4_000  # of one name with others; a hostile environment may hold many names
_MIN_LENGTH, _LONG, _MAX_LENGTH = 8, 12, 100  # in characters
_MAX_REST = 4  # of a word whose end is left off
_HANDICAP = 1  # a documented name may be this much farther off and still win over one that a file merely holds


def distance(one: str, other: str, limit: int) -> int:
    """Edit distance in which a swap of neighbours is one step (Damerau, optimal string alignment).

    Args:
        one: a name.
        other: another one.
        limit: from here on it does not matter how far apart they are; the answer is then ``limit + 1``.

    Source: https://en.wikipedia.org/wiki/Damerau-Levenshtein_distance
    """
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    previous = list(range(len(other) + 1))
    for row, char in enumerate(one, 1):
        current = [row]
        for column, against in enumerate(other, 1):
            cost = min(previous[column] + 1, current[column - 1] + 1, previous[column - 1] + (char != against))
            if row > 1 and column > 1 and char == other[column - 2] and one[row - 2] == against:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        if min(current) > limit:
            return limit + 1
        before, previous = previous, current
    return min(previous[-1], limit + 1)


def closest(name: str, documented: Collection[str], mentioned: Collection[str]) -> str:
    """The name that was most likely meant, or "" where none is near.

    Args:
        name: what is set.
        documented: names that vendors document; one of these is what is meant more often than not.
        mentioned: names that an installed library or module holds.
    """
    if not _MIN_LENGTH <= len(name) <= _MAX_LENGTH:
        return ""
    limit = 1 if len(name) < _LONG else 2  # two steps turn a short name into quite another one
    best, best_score = "", limit + _HANDICAP + 1
    for names, handicap in ((documented, 0), (mentioned, _HANDICAP)):
        for other in sorted(_similar(name, names, limit))[:_MAX_COMPARISONS]:
            apart = distance(name, other, limit)
            if apart <= limit and apart + handicap < best_score:
                best, best_score = other, apart + handicap
    return best or _same_words(name, documented) or _cut_short(name, documented)


def under_another_prefix(name: str, is_read: Callable[[str], bool]) -> str:
    """The same name under the prefix that is really read (TORCH_NCCL_ for NCCL_, say), or ""."""
    for wrong, right in SWAPPED_PREFIXES:
        if name.startswith(wrong):
            other = right + name[len(wrong) :]
            if other != name and is_read(other):
                return other
    return ""


def under_a_mended_prefix(name: str) -> str:
    """The name with a misspelt first word put right, or "" where that word is no known misspelling."""
    word = name[: name.find("_") + 1]
    right = MISSPELT_PREFIXES.get(word)
    return right + name[len(word) :] if right else ""


def _similar(name: str, names: Collection[str], limit: int) -> list[str]:
    # The first word has a table of its own; here the names of one family are compared.
    # An edit changes two letters of the set at most.
    start, letters = name[:2], set(name)
    return [
        other
        for other in names
        if abs(len(other) - len(name)) <= limit
        and other[:2] == start
        and other != name
        and len(letters.symmetric_difference(other)) <= 2 * limit
    ]


def _same_words(name: str, documented: Collection[str]) -> str:
    words = sorted(name.split("_"))
    return next((other for other in sorted(documented) if sorted(other.split("_")) == words), "")


def _cut_short(name: str, documented: Collection[str]) -> str:
    # CUDA_LAUNCH_BLOCK, NCCL_DEBUG_SUBSYSTEM: the last word with its end left off or added.
    found = []
    for other in documented:
        shorter, longer = sorted((name, other), key=len)
        rest = longer[len(shorter) :]
        if len(shorter) >= _LONG and longer.startswith(shorter) and len(rest) <= _MAX_REST and "_" not in rest:
            found.append(other)
    return found[0] if len(found) == 1 else ""
