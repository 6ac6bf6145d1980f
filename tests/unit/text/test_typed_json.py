"""Named tuples from decoded JSON: what fits, and what a type may look like."""

from __future__ import annotations

import gc
import typing
import weakref
from typing import Annotated, NamedTuple

import pytest

from saferun.model import Value
from saferun.text.typed_json import fit, fit_or, list_of, number_of


class Node(Value):
    """A shape that is part of itself."""

    name: str
    size: float = 0.5
    below: tuple[Node, ...] = ()
    other: Node | None = None
    port: Annotated[int, number_of(65535)] = 1


class Flag(NamedTuple):
    """One of typing's own."""

    is_set: bool
    number: int = 3


def test_a_shape_may_be_part_of_itself() -> None:
    """As a list of its fields, or as an object with their names; what is missing gets its default."""
    raw = ["a", 2, [["b"], {"name": "c", "port": 7}], {"name": "d", "unknown": 1}]
    below = (Node("b"), Node("c", port=7))
    assert fit(Node, raw) == Node("a", 2.0, below, Node("d"))
    assert type(fit(Node, raw).size) is float


@pytest.mark.parametrize(
    ("shape", "raw"),
    [
        (bool, 1),
        (int, True),
        (int, 1.0),
        (int, 1 << 64),
        (float, True),
        (float, float("inf")),
        (float, 1 << 64),
        (str, None),
        (tuple[int, ...], {"a": 1}),
        (tuple[int, ...], [1, "2"]),
        (Flag, "is_set"),
        (Flag, [None]),
        (Flag, {}),
        (Node, ["a", 1, [["b", 1, [3]]]]),
        (Node, {"name": "a", "port": 65536}),
        (Annotated[int, number_of(5)], 6),
    ],
)
def test_what_does_not_fit_is_an_error(shape: object, raw: object) -> None:
    """ValueError or TypeError, and nothing else."""
    with pytest.raises((ValueError, TypeError)):
        fit(shape, raw)
    assert fit_or(shape, raw, "otherwise") == "otherwise"


def test_what_is_too_long_is_cut() -> None:
    """Strings and lists; items beyond a named tuple's fields as well."""
    assert fit(str, "a" * 5000) == "a" * 4096
    assert fit(str, "a\ud800") == "a?"
    assert len(fit(tuple[int, ...], [1] * 10000)) == 8192
    assert fit(Flag, [True, 4, 5]) == Flag(is_set=True, number=4)
    assert fit(Annotated[tuple[int, ...], list_of(int, 2, skips=True)], [1, "x", 2]) == (1,)


def test_types_that_are_made_for_one_call_are_not_kept() -> None:
    """A supervisor that decodes for weeks would keep one for each message."""

    class Reader:
        def __call__(self, raw: object) -> object:
            return raw

    reader = Reader()
    gone = weakref.ref(reader)
    assert fit(Annotated[int, reader], 5) == 5
    assert fit(tuple[Annotated[int, reader], ...], [5]) == (5,)
    del reader
    for clear in typing._cleanups:  # type: ignore[attr-defined]
        clear()  # what typing itself remembers
    gc.collect()
    assert gone() is None
