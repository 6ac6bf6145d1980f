"""The README says what the code does."""

from __future__ import annotations

from pathlib import Path

from saferun.cli.option_table import option_table

_README = Path(__file__).parents[2] / "README.md"


def test_the_option_table_is_the_one_that_the_options_give() -> None:
    """An option that is added, renamed or gets another default must reach the reader."""
    assert option_table() in _README.read_text(encoding="utf-8")
