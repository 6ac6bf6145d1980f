"""What plugins of torchrun's do with the ranks' environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saferun.coordinator.torchrun_parts import changes_of

RAW: dict[Any, Any] = {b"RAW": b"\xff", "FILE": Path("/x")}
BEFORE = {"RANK": "0", "ROLE_NAME": "default", "OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    ("after", "changes"),
    [
        (BEFORE, {}),
        ({**BEFORE, "RANK": "1", "NEW": "x"}, {"RANK": "1", "NEW": "x"}),
        ({"RANK": "0"}, {"ROLE_NAME": None, "OMP_NUM_THREADS": None}),
        (BEFORE | RAW, {"RAW": "\udcff", "FILE": "/x"}),
    ],
)
def test_what_a_plugin_has_changed_is_reported(after: dict[Any, Any], changes: dict[str, str | None]) -> None:
    """And nothing else: what it was handed is not all that a rank gets."""
    assert changes_of(BEFORE, after) == changes


def test_a_variable_that_is_no_text_is_an_error() -> None:
    """As under torchrun, which cannot start a rank with it."""
    with pytest.raises(TypeError):
        changes_of(BEFORE, {**BEFORE, "RANK": 1})
