"""docs/do-no-harm.md and docs/security.md promise nothing that no test shows."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.syntax import parsed

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "do-no-harm.md", ROOT / "docs" / "security.md"]


@cache
def _tests() -> frozenset[str]:
    """The names of all tests."""
    return frozenset(
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_is_named_exists(page: Path) -> None:
    """A renamed test takes its promise along, or the page says more than is so."""
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    assert len(named) > 20
    assert named <= _tests()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_row_names_a_test(page: Path) -> None:
    """What nothing shows is no promise."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    promises = [row for row in rows if not re.match(r"\| (---|what |promise )", row) or "`test_" in row]
    assert promises
    assert [row for row in promises if "`test_" not in row] == []
