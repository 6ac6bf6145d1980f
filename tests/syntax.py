"""Sources as syntax trees, for the tests that read them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@contextmanager
def no_collector() -> Iterator[None]:
    """For as long as trees are made and kept: the garbage collector would look through them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a source."""
    with no_collector():
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
