"""Connections between rendezvous: nothing is sent on them for hours, and a firewall may forget them without a word."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.coordinator.static_rendezvous import StaticRendezvous
from saferun.coordinator.store_client import StoreBrokenError, StoreClient


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_connection_that_was_idle_is_kept_only_where_no_other_can_be_made(
    monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    """A leader that takes no more connections may still answer on those that there are."""
    made = StoreClient(object(), ("node1", 29501))

    def another(_: StoreClient) -> StoreClient:
        if is_refused:
            raise StoreBrokenError("node1:29501 does not answer")
        return made

    monkeypatch.setattr(StoreClient, "another", another)
    stores: Any = None
    idle = StoreClient(object(), ("node1", 29501))
    found = StaticRendezvous(stores)._renewed(idle)
    assert found is (idle if is_refused else made)
    assert (idle.store is None) is not is_refused
