"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from saferun.cli.option_table import option_table
from saferun.env.profiles.search import default_search_path

_README = Path(__file__).parents[2] / "README.md"


def test_the_option_table_is_the_one_that_the_options_give() -> None:
    """An option that is added, renamed or gets another default must reach the reader."""
    assert option_table() in _README.read_text(encoding="utf-8")


def test_profiles_lie_where_the_readme_says(tmp_path: Path) -> None:
    """Who puts one elsewhere waits for it in vain."""
    named = set(re.findall(r"`~/([\w./-]*profiles)`", _README.read_text(encoding="utf-8")))
    assert len(named) == 1
    (tmp_path / named.pop()).mkdir(parents=True)
    assert default_search_path((), {"HOME": str(tmp_path)}, str(tmp_path))
