"""What a host that finds no master is advised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster.join_messages import JoinRequest
from saferun.coordinator import control_finder
from saferun.coordinator.control_finder import ControlFinder
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.served_stores import ServedStores
from saferun.text.typed_json import fit


class Vain:
    """A search that finds nothing."""

    is_in_vain = True
    is_accepted = False

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait(self, seconds: float) -> None:
        del seconds

    def message(self) -> str:
        return "127.0.0.1:29500 refuses connections"

    def hint(self, source: str) -> str:
        return f"the hint for {source}"

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("is_given", "hint"),
    [
        (True, "the hint for default"),
        (False, "no --master-addr was given, so this host looks on itself: pass --master-addr HOST, or --hosts"),
    ],
)
def test_a_host_that_looks_on_itself_is_advised_to_name_another(
    monkeypatch: pytest.MonkeyPatch, *, is_given: bool, hint: str
) -> None:
    """A firewall within one host is a rare thing, and a forgotten address a frequent one."""
    monkeypatch.setattr(control_finder, "StoreSearch", Vain)
    master = {"address": "127.0.0.1", "ports": [29500], "source": "default", "is_given": is_given}
    request = {"backend": "static", "least": 2, "most": 2, "run_id": "none", "timeout_s": 0, "probe_after_s": 30.0}
    rdzv = RendezvousRound(fit(JoinRequest, {**request, "name": "node2", "tasks": 1, "master": master}))
    with pytest.raises(JoinFailedError) as raised:
        ControlFinder(ServedStores(object, -1, -1, lambda _: None)).find(rdzv)
    assert hint == raised.value.hint


@pytest.mark.parametrize(
    ("since_s", "script", "outcome"),
    [(1.0, "train.py", "found"), (1.0, "prepare.py", "needless"), (60.0, "train.py", "needless")],
)
def test_a_host_joins_the_next_launch_of_its_step_only_if_it_may_be_part_of_it(
    monkeypatch: pytest.MonkeyPatch, since_s: float, script: str, outcome: str
) -> None:
    """A leader stays a moment after its job has ended. Who came earlier, or runs another script, was late for that."""
    request = {"backend": "static", "least": 2, "most": 2, "run_id": "none", "timeout_s": 900, "probe_after_s": 30.0}
    master = {"address": "127.0.0.1", "ports": [29500], "source": "default"}
    rdzv = RendezvousRound(
        fit(JoinRequest, {**request, "name": "node1", "tasks": 1, "master": master, "script": script})
    )
    rdzv.began_at -= since_s
    finder = ControlFinder(ServedStores(object, -1, -1, lambda _: None))
    client: Any = SimpleNamespace(end=lambda: None)

    def find(_rdzv: RendezvousRound) -> Any:
        finder.script = "train.py"
        return client

    monkeypatch.setattr(finder, "find", find)
    if outcome == "found":
        assert finder.find_next(rdzv, has_met=False) is client
        return
    with pytest.raises(JoinFailedError, match="the job has ended without node1, which came late") as raised:
        finder.find_next(rdzv, has_met=False)
    assert raised.value.kind == outcome
