"""The contract of ``saferun/linux`` names every file of the room."""

from __future__ import annotations

import re
from pathlib import Path

from saferun import linux


def test_the_contract_names_every_file() -> None:
    """A feature without a line there has a fallback that nobody can look up."""
    assert linux.__doc__ is not None
    files = {path.stem for path in Path(linux.__file__).parent.glob("*.py")} - {"__init__"}
    assert files - set(re.findall(r"``(\w+)``", linux.__doc__)) == set()
