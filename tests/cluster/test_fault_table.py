"""Rows of the table of faults (docs/faults.md) of each kind; ``python -m tests.cluster faults`` plays all of them."""

from __future__ import annotations

import pytest

from tests.cluster.fault_table.page import ROWS, play, told

# What other tests of this folder do not make in the same way.
NAMES = ("healthy-fqdn", "reaper-killed", "data-cut-cable", "loopback-names", "port-held", "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_has_to_be_said_of_a_fault_is_said(name: str) -> None:
    """In time, once, on the right consoles, and nothing is left."""
    (row,) = (row for row in ROWS if row.name == name)
    result = play(row)
    assert not result.wrong, f"{told(result)}\n{result.consoles}"


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
