"""The redaction of JSON that somebody else has written, as a text: all but its secrets stays as it is. Pure."""

from __future__ import annotations

import json
import re

from saferun.text.redaction import hides, redacted_json, redacted_text
from saferun.text.token_shapes import Shape

_STRING = r'"(?:[^"\\]|\\.)*+"'
# A text, and what it is the name of: another text, or what begins there.
_PIECE = Shape(rf"({_STRING})(?:(\s*+:\s*+)({_STRING}|[\[{{])?)?", re.DOTALL)
_MOST_PIECES, _MOST_CHARACTERS = 1 << 16, 4 << 20


class TooManyTextsError(ValueError):
    """There are more different texts in it than can be read in a moment."""


class _NestedError(Exception):
    """A list or an object stands under the name of a secret."""


def redacted_json_text(json_text: str) -> str:
    """JSON without the secrets in its texts.

    Texts in the JSON of tools repeat themselves; each different one is read once. A second is enough for 16 MiB.

    Args:
        json_text: JSON that has been parsed: of anything else the result is of no use.

    Raises:
        TooManyTextsError: see there.
        ValueError: it is no JSON.
    """
    known: dict[str, str] = {}
    size = 0

    def piece(match: re.Match[str]) -> str:
        whole = match.group()
        redacted = known.get(whole)
        if redacted is None:
            nonlocal size
            size += len(whole)
            if len(known) >= _MOST_PIECES or size > _MOST_CHARACTERS:
                raise TooManyTextsError("it has too many different texts")
            redacted = known[whole] = _redacted_piece(*match.groups())
        return redacted

    try:
        return _PIECE().sub(piece, json_text)
    except _NestedError:
        return json.dumps(redacted_json(json.loads(json_text)))


def _redacted_piece(name: str, colon: str | None, value: str | None) -> str:
    if colon is None:
        return _redacted_string(name)
    if value is None or not value.startswith('"'):
        if value is not None and hides(_text_of(name), ()):
            raise _NestedError
        return f"{_redacted_string(name)}{colon}{value or ''}"
    if not hides(_text_of(name), _text_of(value)):
        return f"{_redacted_string(name)}{colon}{_redacted_string(value)}"
    [shown] = redacted_json({_text_of(name): _text_of(value)}).values()
    return f"{_redacted_string(name)}{colon}{value if shown == _text_of(value) else json.dumps(shown)}"


def _redacted_string(string: str) -> str:
    text = _text_of(string)
    redacted = redacted_text(text)
    return string if redacted == text else json.dumps(redacted)


def _text_of(string: str) -> str:
    text: str = json.loads(string, strict=False) if "\\" in string else string[1:-1]
    return text
