"""What a command answers, on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from saferun.errors import printable_lines
from saferun.model import JsonObject
from saferun.text.redaction import redacted_json, redacted_text


def answer(text: str) -> None:
    """Print lines without secrets. Names of functions and messages of tools may contain secrets."""
    _print(redacted_text(text))


def answer_json(content: JsonObject, *, in_one_line: bool = False) -> None:
    """Print JSON without secrets."""
    _print(json.dumps(redacted_json(content), indent=None if in_one_line else 1) + "\n")


def plain(value: Any) -> Any:  # noqa: ANN401 - a value of the evidence
    """A value of the evidence as JSON: named tuples as objects."""
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    return [plain(part) for part in value] if isinstance(value, tuple) else value


def discard_output() -> None:
    """Have nothing written at exit of what is left in the buffer of standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    lines = printable_lines(text.expandtabs())
    sys.stdout.write(lines.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
