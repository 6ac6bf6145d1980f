"""Writes ``builtin.py`` from ``configs/*.yaml``: ``python -m tests.compile_profiles``.

Every launch uses the built-in profiles, and reading their YAML would cost it more than all the rest of its start-up.
A test compares the written file with the profiles.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from saferun.env.profiles.search import read_profile

if TYPE_CHECKING:
    from saferun.env.profiles.profile_values import Profile

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.join(_ROOT, "saferun/env/profiles/builtin.py")
WIDTH = 120

_TYPES = ("Location", "Profile", "RankValue", "Removal", "Variable")

_HEAD = '''"""The env profiles that come with saferun.

Written by ``python -m tests.compile_profiles`` from ``configs/*.yaml``: edit those.
"""

from __future__ import annotations

from saferun.env.profiles.profile_values import {types}

PROFILES: dict[str, Profile] = {{
'''


def configs_directory() -> str:
    """Where the YAML of the built-in profiles lies."""
    return os.path.join(_ROOT, "configs")


def read_builtin(directory: str) -> dict[str, Profile]:
    """The profiles of all YAML files of a directory, by name. Places are named ``configs/FILE``."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(".yaml"))
    found: dict[str, Profile] = {}
    for name in names:
        stem = name.removesuffix(".yaml")
        found[stem] = read_profile(os.path.join(directory, name), stem, shown=f"configs/{name}")
    return found


def source_text(profiles: dict[str, Profile]) -> str:
    """The Python source of ``builtin.py``, formatted as the project's formatter would have it."""
    lines = [line for name, profile in profiles.items() for line in _entry(f'"{name}": ', profile, 1)]
    body = "\n".join(lines)
    types = sorted({"Profile", *(name for name in _TYPES if f"{name}(" in body)})
    return _HEAD.format(types=", ".join(types)) + body + "\n}\n"


def _entry(prefix: str, value: object, depth: int) -> list[str]:
    """One item of a call, tuple or dict, with its trailing comma: on one line where it fits, else one part a line."""
    indent = "    " * depth
    flat = f"{indent}{prefix}{_flat(value)},"
    if len(flat) <= WIDTH or not _parts(value):
        return [flat] if len(flat) <= WIDTH or not isinstance(value, str) else _long_text(prefix, value, depth)
    opening, closing = _brackets(value)
    inner = [line for name, part in _parts(value) for line in _entry(name, part, depth + 1)]
    return [f"{indent}{prefix}{opening}", *inner, f"{indent}{closing},"]


def _long_text(prefix: str, text: str, depth: int) -> list[str]:
    """A text too long for a line, as pieces that Python joins."""
    indent = "    " * (depth + 1)
    room = WIDTH - len(indent) - 2
    pieces: list[str] = []
    words = [word + " " for word in text.split(" ")]
    words[-1] = words[-1][:-1]
    for word in words:
        if pieces and len(_flat(pieces[-1] + word)) <= room:
            pieces[-1] += word
        else:
            pieces.append(word)
    outer = "    " * depth
    return [f"{outer}{prefix}(", *(f"{indent}{_flat(piece)}" for piece in pieces), f"{outer}),"]


def _parts(value: object) -> list[tuple[str, object]]:
    """What a named tuple or tuple is made of, with ``name=`` where there is one; defaults are left out."""
    if isinstance(value, tuple):
        fields: tuple[str, ...] = getattr(value, "_fields", ())
        defaults: dict[str, object] = getattr(value, "_field_defaults", {})
        if not fields:
            return [("", part) for part in value]
        return [
            (f"{field}=", part)
            for field, part in zip(fields, value, strict=True)
            if field not in defaults or defaults[field] != part
        ]
    return []


def _brackets(value: object) -> tuple[str, str]:
    name = type(value).__name__ if hasattr(value, "_fields") else ""
    return f"{name}(", ")"


def _flat(value: object) -> str:
    if isinstance(value, str):
        double = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        # The formatter prefers double quotes unless they need more escapes.
        return repr(value) if '"' in value and "'" not in value else double
    parts = _parts(value)
    if not parts:
        return "()" if isinstance(value, tuple) else repr(value)
    opening, closing = _brackets(value)
    comma = "," if opening == "(" and len(parts) == 1 else ""
    return opening + ", ".join(f"{name}{_flat(part)}" for name, part in parts) + comma + closing


if __name__ == "__main__":
    with open(TARGET, "w", encoding="utf-8") as file:
        file.write(source_text(read_builtin(sys.argv[1] if len(sys.argv) > 1 else configs_directory())))
