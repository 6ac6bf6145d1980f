"""Network interfaces of a host that there is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saferun.cluster import leader_routes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest


def stand_in_for_nics(monkeypatch: pytest.MonkeyPatch, nics: Mapping[str, str]) -> None:
    """Have ``LeaderRoutes`` find these interfaces: what is wrong with each. eth1 leads to 10.78.*, eth0 to all else."""
    monkeypatch.setattr(leader_routes, "working_nics", lambda: list(nics))
    monkeypatch.setattr(leader_routes, "nic_state", lambda name: nics[name])
    monkeypatch.setattr(leader_routes, "_nic_to", lambda address: "eth1" if address.startswith("10.78") else "eth0")
