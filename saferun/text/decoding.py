"""Decoding of untrusted JSON and values: from other hosts, ranks, tools and files. Pure.

Length, depth, number of items and digits are bounded before anything is parsed. Malformed input raises ValueError or
another of ``MALFORMED``, nothing else; infinity and numbers that do not fit into a float are rejected.
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
"""What decoding a malformed value may raise."""
_LARGEST = 1 << 63
# Those of 2**64. No float that is written with fewer, and without an exponent, is infinite.
_MOST_DIGITS = 20
_UNUSUAL_NUMBER = re.compile(r"[0-9]{20}|[0-9][eE]")
# An unterminated string is the rest of the text: scanning on would take a pass for each quote in it.
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
    """Decode JSON.

    Args:
        content: the JSON; bytes are UTF-8.
        longest: the maximum length, in bytes or characters.
        deepest: the maximum nesting of lists and objects.
        most: the maximum number of items in all of them together.

    Raises:
        ValueError: it is not JSON, or exceeds a bound.
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
    """Decode the JSON that begins at an offset, and ignore what follows it. Only its length bounds its depth.

    Raises:
        ValueError: there is none, or it cannot be decoded.
    """
    try:
        return _CAREFUL.raw_decode(json_text, start)[0]
    except RecursionError:
        raise ValueError("too deep") from None


def _check_shape(json_text: str, deepest: int, most: int) -> None:
    """Raise ValueError if it is nested too deeply or has too many items; the contents of strings do not count."""
    bare = _STRING.sub("", json_text)
    brackets = bare.encode("utf-8", "surrogatepass").translate(_TO_LISTS, _NO_BRACKETS)
    if len(brackets) // 2 + bare.count(",") > most:
        raise ValueError("too many items")
    # Each pass removes the innermost pairs.
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
    """An integer within inclusive bounds.

    Raises:
        ValueError: it is anything else; a bool is not an integer.
    """
    if type(value) is not int or not low <= value <= high:
        raise ValueError("not a number within bounds")
    return value


def measure(value: object, low: float = 0.0, high: float = float(_LARGEST)) -> float:
    """A finite number within inclusive bounds, as a float.

    Raises:
        ValueError: it is anything else, such as infinity or a bool.
    """
    if type(value) not in {int, float} or not low <= value <= high:  # type: ignore[operator]
        raise ValueError("not a number within bounds")
    return float(value)  # type: ignore[arg-type]


def text(value: object, longest: int) -> str:
    """A string of at most ``longest`` characters, of any kind.

    Raises:
        ValueError: it is not a string, or longer.
    """
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError("not a text within bounds")
    return value


def display_text(value: object, longest: int) -> str:
    """A string as one printable line of at most ``longest`` characters; longer ones are cut.

    Raises:
        ValueError: it is not a string.
    """
    if not isinstance(value, str):
        raise ValueError("not a text")  # noqa: TRY004 - all of these raise the same
    return printable(value[:longest])[:longest]


# ---------------------------------------------------------------------------------------------- values with a fallback


def number_or(otherwise: int, value: object, low: int = 0, high: int = _LARGEST) -> int:
    """An integer within inclusive bounds; ``otherwise`` for anything else."""
    return value if type(value) is int and low <= value <= high else otherwise


def text_or_empty(value: object, longest: int) -> str:
    """A string, cut after so many characters; empty for anything else."""
    return value[:longest] if isinstance(value, str) else ""
