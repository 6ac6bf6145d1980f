"""What the subcommands of saferunctl change of their own process is undone: here it is that of the tests."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def same_limits() -> Iterator[None]:
    """The limit on open files, which ``logs`` raises."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
