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


@given(value=PLAIN, protocol=st.integers(2, 5))
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
        (pickle.dumps(Calls()), "it does more than hold plain values"),
        (pickle.dumps([{"a": Calls()}]), "it does more than hold plain values"),
        (b"cos\nabort\n(tR.", "it does more than hold plain values"),
        (b"(S'id'\nQ.", "it does more than hold plain values"),
        (b"Pid\n.", "it does more than hold plain values"),
        (pickle.dumps(b"bytes"), "it does more than hold plain values"),
        (pickle.dumps(bytearray(9), protocol=5), "it does more than hold plain values"),
        (pickle.dumps(pickle.PickleBuffer(b"x"), protocol=5, buffer_callback=lambda _buffer: None), "it does more"),
        (pickle.dumps({1: 2}), "it has keys that are not strings"),
        (pickle.dumps({(1, 2): 2}), "it has keys that are not strings"),
        (pickle.dumps(1 << 80), "it holds a number that is too large"),
        (pickle.dumps(1 << 4000), "it does more than hold plain values"),
        (pickle.dumps({1, 2}), "it does more than hold plain values"),
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


NESTED = b"\x80\x02})" + b"\x85" * 400_000 + b"Ns."
SHARED = b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(100)) + b"Ns."
FAR_MEMO = b"\x80\x02Nr\xff\xff\xff\x7f."
LIES = (b"\x80\x02X\xff\xff\xff\xff.", b"\x80\x04\x8d" + b"\xff" * 8 + b".", b"\x80\x04\x95" + b"\xff" * 8 + b".")


@pytest.mark.parametrize("content", [NESTED, SHARED, *LIES], ids=["nested", "shared", "long", "longer", "frame"])
def test_what_would_crash_or_occupy_python_s_own_reader_is_refused(content: bytes) -> None:
    """It hashes keys of any depth, without an end where they share their parts."""
    with pytest.raises(ValueError, match=r"it has keys that are not strings|it is malformed"):
        read_pickle(content)


def test_a_place_far_behind_in_the_memo_takes_no_memory() -> None:
    """Python's own reader reserves room for all places before it: 16 GiB here."""
    assert read_pickle(FAR_MEMO) is None


@given(content=st.binary(max_size=60), cut=st.integers(0, 80))
def test_whatever_a_pickle_is_it_is_read_or_a_value_error(content: bytes, cut: int) -> None:
    whole = pickle.dumps({"entries": [{"a": 1}, {"b": [None, 2.5]}]}, protocol=2)
    for broken in (content, whole[:cut] + content, content + whole[cut:]):
        try:
            read_pickle(broken)
        except ValueError:
            pass
