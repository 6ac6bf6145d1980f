"""What the tests of this room share."""

from __future__ import annotations

import pytest

from tests.unit.cluster.listening_job import Listening


@pytest.fixture
def listening() -> Listening:
    return Listening()
