"""JSON and values from outside: other hosts, ranks, tools and files, none of which is to be trusted. Pure.

All of it is bounded before it is parsed: length, depth, the number of items, digits. What is wrong is a ValueError or
one more of ``MALFORMED``, and nothing else: no infinity, no number that cannot become a float, no recursion error.
"""

from __future__ import annotations

import json
import math
import re

from saferun.errors import printable

TYPE_CHECKING = False  # importing typing would cost every launch some 5 % of its start
if TYPE_CHECKING:
    from typing import Any

LONGEST_BYTES = 16 << 20
DEEPEST = 64
MOST_ITEMS = 1 << 20
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a value may raise that is not what was expected."""
_LARGEST = 1 << 63
# Those of 2**64. No float that is written with fewer, and without an exponent, is infinite.
_MOST_DIGITS = 20
_UNUSUAL_NUMBER = re.compile(r"[0-9]{20}|[0-9][eE]")
# One that does not end is the rest of the text: whoever looked further would do so once for each quote in it.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_TO_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def loads(
    content: bytes | bytearray | str,
    *,
    longest: int = LONGEST_BYTES,
    deepest: int = DEEPEST,
    most: int = MOST_ITEMS,
) -> Any:  # noqa: ANN401 - JSON
    """What JSON holds.

    Args:
        content: JSON; bytes are UTF-8.
        longest: how many bytes or characters it may have.
        deepest: how many lists and objects may be within each other.
        most: how many items all of them together may have.

    Raises:
        ValueError: it is no JSON, or out of bounds.
    """
    if len(content) > longest:
        raise ValueError("too long")
    json_text = content if isinstance(content, str) else str(content, "utf-8", "surrogatepass")
    brackets = json_text.count("[") + json_text.count("{")
    if brackets > deepest or brackets + json_text.count(",") > most:
        _check_shape(json_text, deepest, most)
    decoder = _CAREFUL if _UNUSUAL_NUMBER.search(json_text) is not None else _PLAIN
    try:
        return decoder.decode(json_text)
    except RecursionError:
        raise ValueError("too deep") from None


def loads_first(json_text: str, start: int = 0) -> Any:  # noqa: ANN401 - JSON
    """The JSON that begins at a place in a text, whatever follows it. How deep it is only its length bounds.

    Raises:
        ValueError: there is none, or none that can be read.
    """
    try:
        return _CAREFUL.raw_decode(json_text, start)[0]
    except RecursionError:
        raise ValueError("too deep") from None


def _check_shape(json_text: str, deepest: int, most: int) -> None:
    """Whether it is too deep or has too many items, without what stands in strings."""
    bare = _STRING.sub("", json_text)
    brackets = bare.encode("utf-8", "surrogatepass").translate(_TO_LISTS, _NO_BRACKETS)
    if len(brackets) // 2 + bare.count(",") > most:
        raise ValueError("too many items")
    # Each time the innermost ones go.
    for _ in range(deepest):
        outer = brackets.replace(b"[]", b"")
        if len(outer) in {0, len(brackets)}:
            break
        brackets = outer
    else:
        outer = brackets
    if outer:
        raise ValueError("too deep")


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > _MOST_DIGITS:
        raise ValueError("a number of too many digits")
    return int(digits)


def _fraction(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


_PLAIN = json.JSONDecoder(parse_constant=_constant)
_CAREFUL = json.JSONDecoder(parse_constant=_constant, parse_int=_integer, parse_float=_fraction)


# ------------------------------------------------------------------------------------------------------- single values


def number(value: object, low: int = 0, high: int = _LARGEST) -> int:
    """An integer within bounds, both of which are allowed.

    Raises:
        ValueError: it is none; neither is a truth value.
    """
    if type(value) is not int or not low <= value <= high:
        raise ValueError("not a number within bounds")
    return value


def measure(value: object, low: float = 0.0, high: float = float(_LARGEST)) -> float:
    """A number that need not be whole, within bounds, both of which are allowed.

    Raises:
        ValueError: it is none; neither is infinity or a truth value.
    """
    if type(value) not in {int, float} or not low <= value <= high:  # type: ignore[operator]
        raise ValueError("not a number within bounds")
    return float(value)  # type: ignore[arg-type]


def text(value: object, longest: int) -> str:
    """A text of at most so many characters, whatever they are.

    Raises:
        ValueError: it is none, or longer.
    """
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError("not a text within bounds")
    return value


def words(value: object, longest: int) -> str:
    """A text for people, as one line of at most so many characters that a terminal only prints.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str):
        raise ValueError("not a text")  # noqa: TRY004 - all of these raise the same
    return printable(value[:longest])[:longest]
