"""A function that ranks call: which ones get to them, and what comes back, in this process."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.api.function_call import FunctionCall, function_call
from saferun.api.rank_function import failure_name, main, name_of, result_name
from saferun.errors import SaferunError, UsageError

KEY = "hunter2"


class Trainer:
    """A program's own."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    @classmethod
    def run(cls, number: int) -> int:
        return cls().factor * number

    def __call__(self, number: int) -> int:
        return self.factor * number


class Inherited(Trainer):
    """``Inherited.run`` has the name of ``Trainer.run``."""

    def __init__(self) -> None:
        super().__init__(3)


class OfMain(Trainer):
    """As a script or a notebook defines it."""


class Unreadable:
    """Pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (failing, (self.__class__.__name__,))


def failing(_name: str) -> object:
    raise KeyError("vocabulary")


def scaled(factor: Any, number: int) -> Any:
    return factor * number


def of_main(*_: object) -> int:
    return 1


def unpicklable(_factor: int) -> object:
    return lambda: None


class Unpicklable:
    """It has no name of its own."""

    def __call__(self, factor: int) -> object:
        return unpicklable(factor)


def unreadable() -> Unreadable:
    return Unreadable()


@pytest.fixture(autouse=True)
def _as_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for one in (of_main, OfMain):
        monkeypatch.setattr(one, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], one.__name__, one, raising=False)


def called(function: Callable[..., object], *args: object) -> tuple[Any, ...]:
    """What comes back from a rank."""
    with function_call(function, args) as call:
        main(call.path)
        return call.values()


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (partial(scaled, 5), 35),
        (partial(partial(scaled, 5)), 35),
        (Trainer.run, 14),
        (Inherited.run, 21),
        (Trainer(4), 28),
        (Trainer(4).__call__, 28),
        (Trainer, None),
        (partial(scaled, factor=2), None),
        (abs, 7),
    ],
)
def test_whatever_consists_of_what_ranks_can_import_is_called(function: Callable[..., Any], value: int | None) -> None:
    with function_call(function, (7,)) as call:
        if value is not None:
            main(call.path)
            assert call.values() == (value,)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda _number: 1, ".*<lambda>"),
        (of_main, "of_main"),
        (partial(of_main, KEY), "of_main"),
        (OfMain, "OfMain"),
        (OfMain(), "OfMain"),
        (OfMain.run, "Trainer.run"),
        (partial(scaled, OfMain()), "scaled"),
        (cache(of_main), "of_main"),
    ],
)
def test_what_ranks_cannot_import_is_an_error_that_names_it(function: Callable[..., Any], name: str) -> None:
    """Not by its representation, which may have a key among the arguments in it."""
    with pytest.raises(UsageError, match=f"saferun: {name} cannot be imported by the ranks: it, or what it ") as caught:
        called(function, 7)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "argument", [OfMain(), OfMain, [{"config": OfMain()}], of_main], ids=["object", "class", "held", "function"]
)
def test_arguments_of_what_ranks_cannot_import_are_an_error_before_any_rank(
    monkeypatch: pytest.MonkeyPatch, argument: object
) -> None:
    """``__main__`` is another module there, where each rank would fail; cloudpickle takes such a class along."""
    with pytest.raises(
        UsageError, match=r"in the arguments of scaled cannot be imported[^\n]*\nhint: [^\n]*cloudpickle"
    ):
        called(scaled, argument, 2)
    given: list[object] = []

    def dumps(call: object) -> bytes:
        given.append(call)
        return pickle.dumps((scaled, (5, 7)))

    monkeypatch.setitem(sys.modules, "cloudpickle", SimpleNamespace(dumps=dumps))
    assert called(scaled, argument, 2) == (35,)
    assert given == [(scaled, (argument, 2))]


def test_arguments_that_cannot_be_pickled_are_named_as_such() -> None:
    """Whether or not they are of ``__main__``."""
    with pytest.raises(UsageError, match=r"the arguments cannot be pickled: .*\nhint: pass numbers, strings or lists"):
        called(scaled, threading.Lock(), 2)


def test_an_argument_whose_attributes_are_code_of_the_program_is_one() -> None:
    with function_call(scaled, (Eager(), 2)) as call:
        assert call.path


@pytest.mark.parametrize(
    ("function", "name"),
    [(partial(unpicklable, 1), "unpicklable"), (Unpicklable(), "Unpicklable"), (unpicklable, "unpicklable")],
)
def test_a_value_that_cannot_be_pickled_fails_no_rank(function: Callable[..., Any], name: str) -> None:
    """Whether or not the function has a name."""
    arguments = () if isinstance(function, partial) else (1,)
    with pytest.raises(SaferunError, match=f"rank 0: what {name} returned cannot be pickled"):
        called(function, *arguments)


def test_a_value_that_cannot_be_unpickled_is_an_error_with_a_hint() -> None:
    """The ranks have ended well, and the classes of a program may raise anything."""
    with pytest.raises(
        SaferunError, match="what rank 0 returned cannot be unpickled: KeyError: 'vocabulary'"
    ) as caught:
        called(unreadable)
    assert "ended well" in caught.value.hint


def test_what_an_attempt_before_has_left_is_gone(tmp_path: Path) -> None:
    """Its value could not be pickled; that of the next one can."""
    with function_call(scaled, (5, 7)) as call:
        Path(call.path, failure_name(0)).write_text("rank 0: what scaled returned cannot be pickled")
        Path(call.path, result_name(0)).write_bytes(pickle.dumps(1))
        main(call.path)
        assert call.values() == (35,)
        assert isinstance(call, FunctionCall)
    assert not os.listdir(tmp_path)


class Eager:
    """It is pickled, although its attributes raise."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Eager, ())


class Odd:
    """Its attributes are the program's own code."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def __call__(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (scaled, "scaled"),
        (Trainer.run, "Trainer.run"),
        (Trainer(), "Trainer"),
        (partial(scaled, KEY), "scaled"),
        (partial(partial(Trainer())), "Trainer"),
    ],
)
def test_a_function_has_a_name_for_messages(function: object, name: str) -> None:
    assert name_of(function) == name


def test_so_has_an_object_whose_attributes_are_code_of_the_program() -> None:
    assert name_of(partial(Odd())) == "Odd"
