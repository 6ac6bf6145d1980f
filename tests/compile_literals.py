"""Writes ``saferun/diagnosis/known_literals.py``: ``python -m tests.compile_literals``.

The literals are found in the parsed patterns, so that no rule has to name them. To parse a pattern takes as long as to
compile it, so it is done here. A test compares the written file with the patterns.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import saferun.diagnosis
from saferun.diagnosis.lazy_patterns import LazyPattern, key_of

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.join(_ROOT, "saferun/diagnosis/known_literals.py")
_WIDTH = 120

# Shorter ones are in every text.
_SHORTEST = 2
# Beyond that a longer literal leaves out no more, and few literals are found faster than many.
_LONG_ENOUGH = 6

_HEAD = '''"""Literals of the diagnosis' patterns: every match of a pattern has at least one of its literals.

Written by ``python -m tests.compile_literals`` from the patterns: edit those. A pattern that is not in here is searched
for in every text.
"""

from __future__ import annotations

'''


def literals_of(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Literals of which each match of the pattern has at least one; none where nothing is known.

    Where the pattern does not distinguish upper and lower case, they are in lower case.
    """
    parsed = re._parser.parse(pattern.pattern, pattern.flags)  # type: ignore[attr-defined]
    literals = _literals(parsed)
    if pattern.flags & re.IGNORECASE:
        return tuple(sorted({literal.lower() for literal in literals})) if all(map(str.isascii, literals)) else ()
    return tuple(sorted(literals))


def _literals(parsed: Iterable[tuple[object, object]]) -> frozenset[str]:
    """The best set of literals of which a match of this sequence has one; empty where there is none."""
    found: list[frozenset[str]] = []
    run = ""
    for kind, argument in (*parsed, ("END", None)):
        if str(kind) == "LITERAL" and isinstance(argument, int):
            run += chr(argument)
            continue
        found.append(frozenset({run}))
        run = ""
        found.append(_literals_in(str(kind), argument))
    kept = [literals for literals in found if literals and min(map(len, literals)) >= _SHORTEST]
    return max(kept, key=lambda literals: (min(*map(len, literals), _LONG_ENOUGH), -len(literals)), default=frozenset())


def _literals_in(kind: str, argument: Any) -> frozenset[str]:
    match kind, argument:
        case "SUBPATTERN", (_, int(added), _, parsed) if not added & re.IGNORECASE:
            return _literals(parsed)
        case "BRANCH", (_, list(branches)):
            sets = [_literals(branch) for branch in branches]
            return frozenset().union(*sets) if all(sets) else frozenset()
        case (("MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT"), (int(least), _, parsed)) if least > 0:
            return _literals(parsed)
        case "ATOMIC_GROUP", parsed:
            return _literals(parsed)
    return frozenset()


def patterns() -> list[tuple[str, int]]:
    """The patterns of all modules of the diagnosis, with their flags."""
    for module in pkgutil.walk_packages(saferun.diagnosis.__path__, "saferun.diagnosis."):
        import_module(module.name)
    return sorted({(one.pattern, one.flags) for one in gc.get_objects() if isinstance(one, LazyPattern)})


def source_text(found: Iterable[tuple[str, int]]) -> str:
    """The Python source of ``known_literals.py``, formatted as the project's formatter would have it.

    Raises:
        ValueError: two patterns have one key.
    """
    known: dict[int, tuple[str, ...]] = {}
    in_any_case: list[int] = []
    for pattern, flags in found:
        compiled = re.compile(pattern, flags)
        literals, key = literals_of(compiled), key_of(pattern, flags)
        if not literals:
            continue
        if key in known:
            raise ValueError(f"another pattern has the key of {pattern!r}: change one of them a little")
        known[key] = literals
        if compiled.flags & re.IGNORECASE:
            in_any_case.append(key)
    lines = [line for key in sorted(known) for line in _entry(f"    0x{key:08X}: ", known[key])]
    body = "\n".join(lines)
    keys = "".join(f"        0x{key:08X},\n" for key in sorted(in_any_case))
    return (
        f"{_HEAD}LITERALS: dict[int, tuple[str, ...]] = {{\n{body}\n}}\n"
        f"IN_ANY_CASE: frozenset[int] = frozenset(\n    {{\n{keys}    }}\n)\n"
    )


def _entry(prefix: str, literals: tuple[str, ...]) -> list[str]:
    texts = [_quoted(literal) for literal in literals]
    comma = "," if len(texts) == 1 else ""
    whole = f"{prefix}({', '.join(texts)}{comma}),"
    return [whole] if len(whole) <= _WIDTH else [f"{prefix}(", *(f"        {text}," for text in texts), "    ),"]


def _quoted(text: str) -> str:
    plain = ascii(text)
    if plain.startswith('"') or '"' in text:
        return plain
    return f'"{plain[1:-1]}"'


def main() -> int:
    """Write the file; with ``--print``, print what would be written."""
    text = source_text(patterns())
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text)
        return 0
    with open(TARGET, "w", encoding="ascii") as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
