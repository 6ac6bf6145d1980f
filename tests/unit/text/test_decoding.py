"""JSON and values from outside: bounded before they are parsed, and wrong in one way only."""

from __future__ import annotations

import json
import math
import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.linux.poller import Poller
from saferun.text.decoding import DEEPEST, MALFORMED, display_text, loads, measure, number, text


@pytest.mark.parametrize(
    "content",
    [
        *("Infinity", "-Infinity", "NaN", '{"a": NaN}', "1e999", "-1E400", "1" * 400, "[-" + "9" * 21 + "]"),
        *("1" * 400 + ".5", "[" * 100_000, '{"a":' * 100_000, "[" * 65 + "]" * 65, "[" * 5000 + "]" * 5000),
        *("[0]," * 300_000, "[" + "0," * (1 << 20) + "0]", "", "[", b"\xff\xfe[\x00", b'"\xff"'),
    ],
    ids=lambda content: repr(content)[:24],
)
def test_what_is_out_of_bounds_is_refused_with_one_kind_of_error(content: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(content)


@pytest.mark.parametrize(
    "value",
    [
        *({"a": [1, 2.5, None, True, "x"]}, "[" * 1000, '"[{\\' * 500, 1e300, 1e-300, (1 << 64) - 1, -(1 << 63)),
        *([[]] * 1000, [{"a": {}}] * 1000, "é\N{GRINNING FACE}\ud800", [[[", [" * 500]] * 100]),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_within_bounds_is_what_it_was(value: object) -> None:
    """Brackets and commas within strings are no depth and no items."""
    assert loads(json.dumps(value)) == value
    assert loads(json.dumps(value).encode()) == value


@pytest.mark.parametrize("unit", ['\\"', '"', '"\\', '\\\\"', '""', '":{', '"a":"', "1", "1e", "[]", "\\u00"], ids=repr)
@pytest.mark.parametrize("end", ["", '"', "]"])
def test_a_hostile_text_is_read_in_linear_time(unit: str, end: str) -> None:
    """What took time by the square of the length would not end before the limit on a test, nor on a loop that waits."""
    content = "[" * (DEEPEST + 1) + '"' + unit * ((1 << 20) // len(unit)) + end
    for some in (content, content.encode()):
        with pytest.raises(ValueError, match=r"."):
            loads(some)


def test_the_depth_is_counted_to_the_last_one() -> None:
    assert loads("[" * DEEPEST + "]" * DEEPEST)
    assert loads("[" * 3 + "]" * 3, deepest=3) == [[[]]]
    with pytest.raises(ValueError, match="too deep"):
        loads("[" * 4 + "]" * 4, deepest=3)
    with pytest.raises(ValueError, match="too long"):
        loads("[1, 2]", longest=5)
    with pytest.raises(ValueError, match="too many"):
        loads("[1, 2, 3]", most=2)


@given(st.text(st.sampled_from('[]{}",:\\0123456789eE+-.nulltrue Infinity'), max_size=60))
def test_any_text_is_read_as_json_reads_it_or_refused(content: str) -> None:
    try:
        expected = json.loads(content)
    except ValueError:
        with pytest.raises(ValueError, match=r"."):
            loads(content)
        return
    try:
        assert loads(content) == expected
    except ValueError:
        found = [expected] if isinstance(expected, int | float) else []
        assert any(abs(one) > 1e19 or math.isnan(one) for one in found) or "Infinity" in content or len(content) > 19


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400)))
def test_single_values_are_within_bounds_or_refused(value: object) -> None:
    for read in (
        lambda: number(value, 0, 9),
        lambda: measure(value, 0.0, 9.0),
    ):
        try:
            found = read()
        except MALFORMED:
            continue
        assert 0 <= found <= 9
        assert type(value) in {int, float}


def test_texts_are_cut_or_refused() -> None:
    assert display_text("a\x1b[2J\n" + "b" * 99, 20) == r"a\x1b[2J\nbbbbbbbbbbb"[:20]
    assert text("a\n", 2) == "a\n"
    with pytest.raises(ValueError, match="bounds"):
        text("abc", 2)
    for value in (None, 7, b"x", ["x"]):
        with pytest.raises(ValueError, match="text"):
            display_text(value, 10)


def test_no_wait_is_too_long_for_the_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts the milliseconds in an int; a deadline beyond that ended the launch with an OverflowError."""
    poller = Poller()
    waited: list[float] = []

    class Epoll:
        def poll(self, timeout_s: float) -> list[tuple[int, int]]:
            waited.append(timeout_s)
            epoll = select.epoll()
            assert timeout_s < (1 << 31) / 1000
            epoll.close()
            return []

        def close(self) -> None:
            pass

    poller._epoll.close()
    monkeypatch.setattr(poller, "_epoll", Epoll())
    for timeout_s in (1e300, float("inf"), 30 * 86400.0, 5.0):
        poller.wait(timeout_s)
    poller.close()
    assert waited[-1] == 5.0
