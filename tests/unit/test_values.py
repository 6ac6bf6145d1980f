"""Values are named tuples in every way but the cost of making the class."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple, get_type_hints

import pytest

from saferun.model import ExitStatus, Value


class Ours(Value):
    """A value."""

    a: int
    b: str = "x"
    c: tuple[int, ...] = ()

    @property
    def twice(self) -> int:
        return 2 * self.a


class Theirs(NamedTuple):
    a: int
    b: str = "x"
    c: tuple[int, ...] = ()

    @property
    def twice(self) -> int:
        return 2 * self.a


CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((1,), {}),
    ((1, "y"), {}),
    ((1, "y", (2,)), {}),
    ((), {"a": 1}),
    ((1,), {"c": (3,)}),
    ((1,), {"b": "z", "c": (3,)}),
)
WRONG_CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((), {}),
    ((1, "y", (), 4), {}),
    ((1,), {"d": 4}),
    ((1,), {"a": 4}),
    ((1, "y", ()), {"c": ()}),
)


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_it_is_made_and_read_like_a_named_tuple(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ours: Any = Ours(*args, **kwargs)
    theirs: Any = Theirs(*args, **kwargs)
    assert tuple(ours) == tuple(theirs)
    assert (ours.a, ours.b, ours.c, ours.twice) == (theirs.a, theirs.b, theirs.c, theirs.twice)
    assert ours._asdict() == theirs._asdict()
    assert repr(ours) == repr(theirs).replace("Theirs", "Ours")
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    assert tuple(ours._replace(b="new")) == tuple(theirs._replace(b="new"))
    a, *_ = ours
    assert a == ours[0] == 1


@pytest.mark.parametrize(("args", "kwargs"), WRONG_CALLS)
def test_what_no_named_tuple_takes_it_does_not_take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kinds: tuple[Any, ...] = (Ours, Theirs)
    for kind in kinds:
        with pytest.raises(TypeError):
            kind(*args, **kwargs)


def test_an_unknown_field_cannot_be_replaced() -> None:
    value: Any = Ours(1)
    with pytest.raises(ValueError, match="nothing"):
        value._replace(nothing=3)


def test_its_class_says_the_same_of_itself() -> None:
    """What reads JSON into values goes by these."""
    assert Ours._fields == Theirs._fields
    assert Ours._field_defaults == Theirs._field_defaults
    assert get_type_hints(Ours) == get_type_hints(Theirs)
    assert tuple(Ours._make([1, "y", ()])) == (1, "y", ())
    assert issubclass(Ours, tuple)
    assert Ours.__doc__ == "A value."


def test_it_is_immutable_and_has_no_room_for_more() -> None:
    value: Any = Ours(1)
    with pytest.raises(AttributeError):
        value.a = 2
    with pytest.raises(AttributeError):
        value.other = 2


def test_it_matches_by_position_and_travels() -> None:
    match Ours(1, "y"):
        case Ours(a, b):
            assert (a, b) == (1, "y")
    status = ExitStatus(None, 9)
    assert pickle.loads(pickle.dumps(status)) == status  # noqa: S301
    assert copy.deepcopy(status) == status


def test_the_fields_of_another_value_are_not_inherited() -> None:
    """Which fields such a class has would be a guess."""
    metaclass: Any = type(Ours)
    with pytest.raises(TypeError, match="inherit"):
        metaclass("More", (Ours,), {})
