"""Which rows of a table of cases `make test` runs; `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(rows: Iterable[Any], *fast: str) -> list[Any]:
    """The rows of a parametrised test, all marked slow but those named.

    A row's name is its ``id`` or ``name``, that of its first column, or its text. Every name has to be that of a row.
    """
    marked, missing = [], set(fast)
    for row in rows:
        name = _name(row)
        missing.discard(name)
        if name in fast:
            marked.append(row)
        elif isinstance(row, type(pytest.param())):
            marked.append(pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.slow]))
        else:
            marked.append(pytest.param(*(row if _is_columns(row) else (row,)), marks=pytest.mark.slow))
    if missing:
        raise ValueError(f"no row is called {', '.join(sorted(missing))}")
    return marked


def _is_columns(row: object) -> bool:
    # A named tuple is one value.
    return type(row) is tuple


def _name(row: Any) -> str:
    if isinstance(row, type(pytest.param())):
        return row.id if isinstance(row.id, str) else _name(row.values[0])
    if _is_columns(row):
        return _name(row[0])
    return str(getattr(row, "name", row))
