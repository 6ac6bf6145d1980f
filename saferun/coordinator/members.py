"""The hosts of a job with spares, in order of their numbers, from one rendezvous to the next. Pure.

A *seat* is the node rank that a host was started with. In a rendezvous the hosts that train have the numbers from 0 on,
the spares those behind. A spare that takes the place of another host gets its number, so that all others keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

__all__ = ["Members"]


class Members:
    """Who takes part.

    Args:
        needed: how many hosts train.
        seats: of all hosts that were started, in order.
    """

    def __init__(self, needed: int, seats: Iterable[int]) -> None:
        self._needed = needed
        self._started = tuple(seats)
        self._order = list(self._started)
        self.left_out: set[int] = set()  # seats whose hosts are not to come again, while the others are enough

    @property
    def order(self) -> tuple[int, ...]:
        """The seats in order of their numbers: those that train, then the spares."""
        return tuple(self._order)

    def leave_out(self, numbers: Collection[int]) -> list[int]:
        """Leave hosts out, by their numbers in the last rendezvous. Returns their seats."""
        seats = [seat for number, seat in enumerate(self._order) if number in numbers]
        self.left_out.update(seats)
        return seats

    def readmit(self) -> None:
        """There are too few without those that are left out: any of them may come again, as a spare."""
        self.left_out.clear()
        self._order += [seat for seat in self._started if seat not in self._order]

    def replace_leader(self, order: Sequence[int], seat: int) -> None:
        """This host, of that seat, takes the place of the first one, which does not come again.

        Args:
            order: of the last rendezvous.
            seat: of a spare in it.
        """
        self._order = [seat, *(one for one in order[1:] if one != seat)]
        self.left_out = {*self._started} - {*self._order}

    def expected(self, is_late: Callable[[int], bool]) -> list[int]:
        """Whose hosts are waited for: those of the last rendezvous that are not left out, and those that came late."""
        late = [seat for seat in self._started if seat not in self._order and is_late(seat)]
        return sorted({*self._order, *late} - self.left_out)

    def arrange(self, here: Collection[int]) -> tuple[int, ...]:
        """The order for a rendezvous to which these seats have come: the first spares replace those that have not.

        A host that comes later than the others is a spare, behind all that are there.
        """
        present = {*here} - self.left_out
        training = self._order[: self._needed]
        spares = [seat for seat in self._order[self._needed :] if seat in present]
        late = sorted(present.difference(self._order))
        spares += late
        for number, seat in enumerate(training):
            if seat not in present and spares:
                training[number] = spares.pop(0)
        # Without a spare there are fewer than the job needs: the rendezvous fails.
        self._order = [*(seat for seat in training if seat in present), *spares]
        return self.order

    def replaced(self, before: Sequence[int]) -> list[tuple[int, int]]:
        """Which seats have lost their place to which others since ``before``, with the order of then."""
        old, new = before[: self._needed], self._order[: self._needed]
        return [(was, now) for was, now in zip(old, new, strict=False) if was != now]
