"""How much is kept of runs and of what ranks write."""

from __future__ import annotations

import pytest

from saferun.cli.main import read_config
from saferun.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("all", 0), ("64K", 65536), ("100M", 100 << 20), ("2GiB", 2 << 30), ("1tb", 1 << 40), ("65536", 65536)],
)
def test_a_size_may_have_any_usual_unit(text: str, size_bytes: int) -> None:
    assert read_config(["--keep-output", text, "--no-python", "true"], {}).output.keep_bytes == size_bytes


@pytest.mark.parametrize("text", ["", "K", "1K", "0", "-5M", "1.5G", "10X", "1KM", "9" * 20, "²M"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size of at least 64K"):
        read_config([f"--keep-output={text}", "--no-python", "true"], {})


def test_a_number_of_runs_is_none_below_zero() -> None:
    assert read_config(["--keep-runs", "5", "--no-python", "true"], {}).output.keep_runs == 5
    with pytest.raises(UsageError, match="--keep-runs -1 is negative"):
        read_config(["--keep-runs", "-1", "--no-python", "true"], {})
