"""How often something is done again that may be slow: a listing of a network file system."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    Item = TypeVar("Item")

# At most 5 % of the time.
_TIMES_ITS_DURATION = 20.0


class Pace:
    """Leaves time between one time and the next: the longer it takes, the more.

    Args:
        least_s: at least so many seconds.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._due_at = 0.0

    def is_due(self) -> bool:
        """Whether it may be done again."""
        return time.monotonic() >= self._due_at

    def took(self, seconds: float) -> None:
        """It has been done, and took so long."""
        self._due_at = time.monotonic() + max(self._least_s, _TIMES_ITS_DURATION * seconds)

    def timed(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items. The time that making them takes counts, not that of whoever reads them."""
        iterator, seconds = iter(items), 0.0
        while True:
            began_at = time.monotonic()
            item = next(iterator, None)
            seconds += time.monotonic() - began_at
            if item is None:
                break
            yield item
        self.took(seconds)
