"""Which of several units to try together next, until the smallest sets that fail are known. Pure.

A *unit* is what is not taken apart: a GPU, or a host with all its GPUs. A search is a generator: it yields what it
wants to have tried, disjoint groups at a time, and is sent which of them failed.

With few units, all pairs are tried, in rounds of disjoint pairs. With many, sets that fail are halved, all of them
at once; what is left is tried with partners that are known to work. So the number of trials grows with the logarithm
of the number of units, whichever one is bad. Two halves that work and fail together are laid across each other until
one pair is left.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import combinations
from typing import TypeVar

from saferun.model import Value
from saferun.preflight.bisect.trial_values import Group

Unit = Group
Units = tuple[Unit, ...]
_T = TypeVar("_T")

# Up to so many units the picture of all pairs is worth its number of rounds.
_FEW = 6
_SMALL_SET = 3
# How often what is left, after what was found has been taken out, is searched again.
_PASSES = 4
# How many trials suspects and their partners get where those that work are few.
_TURNS = 6


class TrialRequest(Value):
    """Disjoint groups to be tried at the same time, and the trial's name."""

    name: str
    groups: tuple[Group, ...]


Search = Generator[TrialRequest, Sequence[bool], _T]


class Blame(Value):
    """A smallest failing set.

    Attributes:
        kind: ``alone`` (several units: none of all works alone); ``unit``: it fails with whomever it is tried;
            ``pair``: two that each work with others; ``parted``: units that do not work with ``others``, though each
            side works; ``no_pair``: no two work together; ``together``: nothing smaller fails; ``untried``: they failed
            in every set, and too few work to try each with one of these.
        units: whom it is about.
        others: ``unit``: with whom it failed; ``parted``: the other side.
    """

    kind: str
    units: Units
    others: Units = ()


class Explained(Value):
    """Why units fail together. ``rest``: those that are left without the blamed ones; ``works``: whether they do."""

    blames: tuple[Blame, ...]
    rest: Units
    works: bool


def merge(units: Sequence[Unit]) -> Group:
    """One group of all members of some units."""
    return tuple(sorted(member for unit in units for member in unit))


def side_by_side(searches: Sequence[Search[_T]]) -> Search[list[_T]]:
    """Several searches among different units, each of whose requests are tried together with those of the others."""
    done: dict[int, _T] = {}
    requests: dict[int, TrialRequest] = {}
    for number, search in enumerate(searches):
        try:
            requests[number] = next(search)
        except StopIteration as end:
            done[number] = end.value
    while requests:
        name = next(iter(requests.values())).name
        failed = iter(
            (yield TrialRequest(name, tuple(group for request in requests.values() for group in request.groups)))
        )
        answers = {number: [next(failed) for _ in request.groups] for number, request in requests.items()}
        for number, answer in answers.items():
            try:
                requests[number] = searches[number].send(answer)
            except StopIteration as end:
                del requests[number]
                done[number] = end.value
    return [done[number] for number in range(len(searches))]


def explain(units: Sequence[Unit], noun: str, *, known_to_fail: bool) -> Search[Explained]:
    """Find the smallest failing sets of units.

    Args:
        units: at least one.
        noun: what they are: ``hosts``.
        known_to_fail: they have been tried, all together, and failed; with one unit, it alone has.
    """
    if len(units) == 1 and known_to_fail:
        return Explained((Blame("alone", tuple(units)),), (), works=True)
    alone = yield TrialRequest(f"each of {len(units)} {noun} alone", tuple(units))
    bad = tuple(unit for unit, failed in zip(units, alone, strict=True) if failed)
    if len(bad) == len(units):
        return Explained((Blame("alone", bad),), (), works=True)
    blames = [Blame("alone", (unit,)) for unit in bad]
    rest = tuple(unit for unit, failed in zip(units, alone, strict=True) if not failed)
    known_to_fail = known_to_fail and not blames
    for _ in range(_PASSES):
        if len(rest) < 2:  # noqa: PLR2004 - two make a group
            return Explained(tuple(blames), rest, works=True)
        if not known_to_fail:
            [known_to_fail] = yield TrialRequest(f"the other {len(rest)} {noun} together", (merge(rest),))
            if not known_to_fail:
                return Explained(tuple(blames), rest, works=True)
        found = yield from _narrow(rest, noun)
        blames += found
        rest = _without(rest, found)
        known_to_fail = False
    return Explained(tuple(blames), rest, works=len(rest) < 2)  # noqa: PLR2004


def _without(units: Units, blames: Sequence[Blame]) -> Units:
    """The units that may work together once the blamed ones are taken out: as many of them as is easily seen."""
    out: set[Unit] = set()
    pairs = [blame.units for blame in blames if blame.kind == "pair"]
    for blame in blames:
        match blame.kind:
            case "parted":
                out.update(blame.units if len(blame.units) < len(blame.others) else blame.others)
            case "pair":
                pass
            case _:
                out.update(blame.units)
    while left := [pair for pair in pairs if not out & set(pair)]:
        # Whoever is in most of the pairs goes first.
        out.add(max((unit for pair in left for unit in pair), key=lambda unit: sum(unit in pair for pair in left)))
    return tuple(unit for unit in units if unit not in out)


def _narrow(units: Units, noun: str) -> Search[list[Blame]]:
    """The smallest failing sets among two or more units that each work alone and fail together. Never empty."""
    if len(units) == 2:  # noqa: PLR2004
        return [Blame("pair", units)]
    found = yield from (_all_pairs(units, noun) if len(units) <= _FEW else _halves(units, noun))
    return found or [Blame("together", units)]


# ------------------------------------------------------------------------------------------------------------ all pairs


def rounds(units: Sequence[_T]) -> Iterator[list[tuple[_T, _T]]]:
    """All pairs, in rounds in each of which everybody has at most one partner: a round-robin tournament."""
    seats: list[_T | None] = [*units, *([None] if len(units) % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _all_pairs(units: Units, noun: str) -> Search[list[Blame]]:
    bad: set[frozenset[Unit]] = set()
    for number, pairs in enumerate(rounds(units), 1):
        failed = yield TrialRequest(f"pairs of {noun}, round {number}", tuple(merge(pair) for pair in pairs))
        bad.update(frozenset(pair) for pair, is_bad in zip(pairs, failed, strict=True) if is_bad)
    return judge_pairs(units, bad)


def judge_pairs(units: Units, bad: set[frozenset[Unit]]) -> list[Blame]:
    """Who is to blame when these of all pairs fail. Empty: no pair fails."""
    if len(bad) == len(units) * (len(units) - 1) // 2:
        return [Blame("no_pair", units)]
    guilty: list[Unit] = []
    left = list(units)
    while True:
        # Whoever fails with all others, or with most of them, who for their part work with each other.
        worst = max(left, key=lambda unit: _failures(unit, left, bad), default=None)
        if worst is None or (count := _failures(worst, left, bad)) < 2 or count * 2 <= len(left) - 1:  # noqa: PLR2004
            break
        if _sides(left, bad):
            break
        left.remove(worst)
        guilty.append(worst)
    blames = [
        Blame("unit", (unit,), tuple(other for other in left if frozenset((unit, other)) in bad)) for unit in guilty
    ]
    if sides := _sides(left, bad):
        return [*blames, Blame("parted", *sides)]
    pairs = [pair for pair in combinations(left, 2) if frozenset(pair) in bad]
    return blames + [Blame("pair", pair) for pair in pairs]


def _failures(unit: Unit, units: Sequence[Unit], bad: set[frozenset[Unit]]) -> int:
    return sum(frozenset((unit, other)) in bad for other in units if other != unit)


def _sides(units: Sequence[Unit], bad: set[frozenset[Unit]]) -> tuple[Units, Units] | None:
    """Two sets of two or more that work among themselves, while no pair across them does."""
    one = tuple(unit for unit in units if frozenset((units[0], unit)) not in bad)
    other = tuple(unit for unit in units if unit not in one)
    if min(len(one), len(other)) < 2:  # noqa: PLR2004 - one that fails with all others is just bad
        return None
    for pair in combinations(units, 2):
        across = (pair[0] in one) != (pair[1] in one)
        if (frozenset(pair) in bad) != across:
            return None
    return one, other


# --------------------------------------------------------------------------------------------------------------- halves


def _halves(units: Units, noun: str) -> Search[list[Blame]]:
    """Halve all failing sets at once, down to two or three, and find out who of these is to blame."""
    sets: list[Units] = [units]
    good: list[Unit] = []
    small: list[Units] = []
    crosses: list[tuple[Units, Units]] = []
    while sets:
        halves = [half for failing in sets for half in (failing[: len(failing) // 2], failing[len(failing) // 2 :])]
        failed = yield TrialRequest(f"halves of {len(sets[0])} {noun}", tuple(merge(half) for half in halves))
        firsts = range(0, len(halves), 2)
        crosses += [(halves[at], halves[at + 1]) for at in firsts if not failed[at] and not failed[at + 1]]
        good += [unit for half, is_bad in zip(halves, failed, strict=True) if not is_bad for unit in half]
        bad = [half for half, is_bad in zip(halves, failed, strict=True) if is_bad]
        small += [half for half in bad if len(half) <= _SMALL_SET]
        sets = [half for half in bad if len(half) > _SMALL_SET]
    blames: list[Blame] = []
    if small:
        suspects = [unit for failing in small for unit in failing]
        if not good:
            good = yield from _first_good(units, noun)
            suspects = [unit for unit in suspects if unit not in good]
        if not good:
            return [Blame("no_pair", units)]
        blames = yield from _with_partners(suspects, good, noun)
        guilty = {unit for blame in blames if blame.kind != "pair" for unit in blame.units}
        unexplained = [failing for failing in small if not guilty & set(failing)]
        blames += yield from _within(unexplained, noun)
    for one, other in crosses:
        blames += yield from _across(one, other, noun)
    return blames


def _first_good(units: Units, noun: str) -> Search[list[Unit]]:
    """Some that work, where every half fails: from a few rounds of pairs. Empty: there are none."""
    good: list[Unit] = []
    for number, pairs in zip(range(1, len(units).bit_length() + 1), rounds(units), strict=False):
        failed = yield TrialRequest(f"pairs of {noun}, round {number}", tuple(merge(pair) for pair in pairs))
        works = [unit for pair, is_bad in zip(pairs, failed, strict=True) if not is_bad for unit in pair]
        good += [unit for unit in works if unit not in good]
        if len(good) >= len(units) // _SMALL_SET:
            break
    return good


def _with_partners(suspects: Sequence[Unit], good: Sequence[Unit], noun: str) -> Search[list[Blame]]:
    """Each suspect with a unit that works; those that fail, with another one."""
    partners = list(good)
    waiting = list(suspects)
    failures: list[tuple[Unit, Unit]] = []
    for _ in range(_TURNS):
        pairs = list(zip(waiting, partners, strict=False))
        if not pairs:
            break
        waiting = waiting[len(pairs) :]
        failed = yield TrialRequest(f"suspected {noun}, each with one that works", tuple(merge(pair) for pair in pairs))
        failures += [pair for pair, is_bad in zip(pairs, failed, strict=True) if is_bad]
        partners += [pair[0] for pair, is_bad in zip(pairs, failed, strict=True) if not is_bad]
    # Those whose turn has not come have failed in every set that they were in, which may be the others' doing.
    blames = [Blame("untried", tuple(waiting))] if waiting else []
    for _ in range(_TURNS):
        free = list(partners)
        chosen: list[tuple[Unit, Unit, Unit]] = []
        for suspect, first in failures:
            second = next((partner for partner in free if partner != first), None)
            if second is not None:
                free.remove(second)
                chosen.append((suspect, first, second))
        if not chosen:
            break
        failures = [pair for pair in failures if pair not in {turn[:2] for turn in chosen}]
        failed = yield TrialRequest(
            f"suspected {noun}, each with another one that works",
            tuple(merge((suspect, second)) for suspect, _, second in chosen),
        )
        for (suspect, first, second), is_bad in zip(chosen, failed, strict=True):
            blames.append(Blame("unit", (suspect,), (first, second)) if is_bad else Blame("pair", (suspect, first)))
    return blames + [Blame("unit", (suspect,), (first,)) for suspect, first in failures]


def _within(sets: Sequence[Units], noun: str) -> Search[list[Blame]]:
    """Failing sets of two or three, each of whose units works with others."""
    blames = [Blame("pair", failing) for failing in sets if len(failing) == 2]  # noqa: PLR2004
    larger = [failing for failing in sets if len(failing) > 2]  # noqa: PLR2004
    found: dict[Units, list[Blame]] = {failing: [] for failing in larger}
    for index in range(_SMALL_SET if larger else 0):
        pairs = [list(combinations(failing, 2))[index] for failing in larger]
        failed = yield TrialRequest(f"pairs of {noun}, round {index + 1}", tuple(merge(pair) for pair in pairs))
        for failing, pair, is_bad in zip(larger, pairs, failed, strict=True):
            if is_bad:
                found[failing].append(Blame("pair", pair))
    for failing, pairs_found in found.items():
        blames += pairs_found or [Blame("together", failing)]
    return blames


def _across(one: Units, other: Units, noun: str) -> Search[list[Blame]]:
    """Two sets that work, and fail together: the pair that does not, and how far that goes."""
    left, right = one, other
    while len(left) + len(right) > 2:  # noqa: PLR2004
        cut = [(part[: (len(part) + 1) // 2], part[(len(part) + 1) // 2 :]) for part in (left, right)]
        (left_1, left_2), (right_1, right_2) = cut
        for ways in (((left_1, right_1), (left_2, right_2)), ((left_1, right_2), (left_2, right_1))):
            tried = [way for way in ways if way[0] and way[1]]
            if not tried:
                continue
            name = f"{len(left) + len(right)} {noun}, crosswise"
            failed = yield TrialRequest(name, tuple(merge(way[0] + way[1]) for way in tried))
            if any(failed):
                left, right = tried[list(failed).index(True)]
                break
        else:
            return [Blame("together", left + right)]
    pair = (left[0], right[0])
    left_more = [unit for unit in one if unit != pair[0]]
    right_more = [unit for unit in other if unit != pair[1]]
    wider = [(pair[0], right_more[0])] if right_more else []
    wider += [(left_more[0], pair[1])] if left_more else []
    wider += [(left_more[1], right_more[1])] if min(len(left_more), len(right_more)) > 1 else []
    failed = yield TrialRequest(f"other pairs of {noun} across", tuple(merge(way) for way in wider))
    if len(wider) == 3 and all(failed):  # noqa: PLR2004
        return [Blame("parted", one, other)]
    more = [way for way, is_bad in zip(wider, failed, strict=True) if is_bad]
    return [Blame("pair", pair), *(Blame("pair", way) for way in more)]
