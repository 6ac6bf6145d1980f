"""Pickles of ranks that are dead: what is read of them, and what is not."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures import plain_pickle
from saferun.captures.plain_pickle import read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(0, 5))
def test_plain_values_are_read(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol=protocol)) == value


def test_tuples_are_lists() -> None:
    assert read_pickle(pickle.dumps({"process_group": ("0", "default_pg")})) == {"process_group": ["0", "default_pg"]}


class Calls:
    """What a pickle would call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Calls()), "it names posix.abort"),
        (pickle.dumps([{"a": Calls()}]), "it names posix.abort"),
        (b"cos\nabort\n(tR.", "it names os.abort"),
        (b"(S'id'\nQ.", "it refers to something outside"),
        (b"Pid\n.", "it refers to something outside"),
        (pickle.dumps(b"bytes"), "it holds a bytes"),
        (pickle.dumps({1: 2}), "it has keys that are not strings"),
        (pickle.dumps(1 << 80), "it holds a number that is too large"),
        (pickle.dumps({1, 2}), "it holds a set"),
        (pickle.dumps([[[]]])[:-1], "."),
        (b"", "."),
        (b"\x80\x02}q\x00(X", "."),
        (b"{not a pickle}", "."),
    ],
)
def test_anything_else_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pickle(content)


def test_what_is_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    many: Any = "x"
    for _ in range(20):
        many = [many, many]  # a short pickle of a million values
    monkeypatch.setattr(plain_pickle, "_MOST_VALUES", 10_000)
    for value in (deep, endless, many):
        assert len(pickle.dumps(value)) < 1000
        with pytest.raises(ValueError, match="it holds too much"):
            read_pickle(pickle.dumps(value))
    with pytest.raises(ValueError, match="it is too long"):
        read_pickle(pickle.dumps("x" * 100), longest=50)


@given(content=st.binary(max_size=60), cut=st.integers(0, 80))
def test_whatever_a_pickle_is_it_is_read_or_a_value_error(content: bytes, cut: int) -> None:
    whole = pickle.dumps({"entries": [{"a": 1}, {"b": [None, 2.5]}]}, protocol=2)
    for broken in (content, whole[:cut] + content, content + whole[cut:]):
        try:
            read_pickle(broken)
        except ValueError:
            pass
