"""Which rank of a job ``--pdb`` opens a debugger in, as the ranks' store has it."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from saferun.inject import saferun_pdb

STORE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


class Store:
    """The ranks' store."""

    keys: ClassVar[dict[str, str]] = {}
    answers = True
    never = threading.Event()

    def __init__(self, host: str, port: int, *_: object, **__: object) -> None:
        assert (host, port) == ("node1", 29500)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        if not self.answers:
            self.never.wait(60.0)
        return self.keys.setdefault(key, value).encode()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[Store]:
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(TCPStore=Store))
    for name, value in STORE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Store, "keys", {})
    return Store


def test_the_host_that_asks_first_has_the_debugger(store: type[Store]) -> None:
    """In every attempt again."""
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "5") == "5"
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "1") == "5"
    assert saferun_pdb._first_of_job("saferun/pdb/a1", "1") == "1"
    assert len(store.keys) == 2


@pytest.mark.parametrize("stored", ["", "x", "1" * 400, "-1", "1\n2"])
def test_what_is_no_rank_holds_up_no_rank(store: type[Store], stored: str) -> None:
    """Whoever reaches the store may write there."""
    store.keys["saferun/pdb/a0"] = stored
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "1") == "1"


def test_a_store_that_does_not_answer_holds_up_no_rank(store: type[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saferun_pdb, "_STORE_S", 0.05)
    monkeypatch.setattr(store, "answers", False)
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "1") == "1"
    store.never.set()


@pytest.mark.parametrize(
    ("name", "value"),
    [("LOCAL_WORLD_SIZE", "8"), ("TORCHELASTIC_USE_AGENT_STORE", "False"), ("MASTER_PORT", "x"), ("MASTER_ADDR", "")],
)
def test_no_store_is_asked_where_there_is_no_other_host_or_a_rank_serves_it(
    store: type[Store], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """It may have ended with that rank."""
    store.keys["saferun/pdb/a0"] = "7"
    monkeypatch.setenv(name, value)
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "5") == "5"


def test_a_script_without_torch_asks_none(store: type[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = SimpleNamespace()
    store.keys["saferun/pdb/a0"] = "7"
    monkeypatch.setitem(sys.modules, "torch.distributed", found)
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "5") == "5"
