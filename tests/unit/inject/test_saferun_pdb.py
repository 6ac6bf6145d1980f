"""Which rank of a job ``--pdb`` opens a debugger in, as the ranks' store has it."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from saferun.inject import saferun_pdb
from tests.descriptors import large_descriptors

if TYPE_CHECKING:
    from pathlib import Path

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


def test_only_an_exception_that_nothing_handles_opens_the_debugger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script may handle one and print it by ``sys.excepthook``, long before another one ends it."""
    debugged: list[object] = []
    monkeypatch.setattr(saferun_pdb, "_debug", lambda *arguments: debugged.append(arguments[-1]))
    monkeypatch.setattr(sys, "__excepthook__", lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    saferun_pdb.begin(f"{tmp_path}/a0r0")
    with pytest.raises(KeyError) as raised:
        STORE["labels"]
    handled = raised.value
    sys.excepthook(KeyError, handled, handled.__traceback__)
    assert debugged == []
    monkeypatch.setattr(sys, "last_value", handled, raising=False)
    monkeypatch.setattr(sys, "last_traceback", handled.__traceback__, raising=False)
    sys.excepthook(ValueError, ValueError("of a hook of the script's"), handled.__traceback__)
    assert debugged == [handled.__traceback__]


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


def test_a_torch_without_a_store_asks_none(store: type[Store], monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = SimpleNamespace()
    store.keys["saferun/pdb/a0"] = "7"
    monkeypatch.setitem(sys.modules, "torch.distributed", found)
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "5") == "5"


STORE_OF_A_TORCH = """
print("some library greets on stdout")
class TCPStore:
    def __init__(self, host, port, *_, **__):
        assert (host, port) == ("node1", 29500)
    def compare_set(self, key, expected, value):
        path = __file__ + key.replace("/", "-")
        try:
            with open(path, "x") as file:
                file.write(value)
        except FileExistsError:
            pass
        return open(path, "rb").read()
"""


@pytest.fixture
def torch_elsewhere(store: type[Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The script has not imported torch; returns the module that this would load."""
    assert store.answers
    monkeypatch.delitem(sys.modules, "torch.distributed")
    module = tmp_path / "torch" / "distributed.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").touch()
    module.write_text(STORE_OF_A_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return module


@pytest.mark.usefixtures("torch_elsewhere")
def test_a_script_without_torch_has_another_process_ask(capsys: pytest.CaptureFixture[str]) -> None:
    """What fails before its ``import torch`` fails on every host alike."""
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "5") == "5"
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "1") == "5"
    assert "torch.distributed" not in sys.modules
    assert "saferun: rank 1 asks which rank of the job failed first" in capsys.readouterr().out


@pytest.mark.usefixtures("torch_elsewhere")
def test_a_rank_with_many_descriptors_asks_as_well() -> None:
    with large_descriptors():
        assert saferun_pdb._first_of_job("saferun/pdb/a0", "5") == "5"
        assert saferun_pdb._first_of_job("saferun/pdb/a0", "1") == "5"


@pytest.mark.parametrize(
    "module",
    ["import time; time.sleep(3600)", "import os; os.abort()", "raise ImportError", "print('first: x' * 9999)"],
)
def test_a_torch_that_cannot_be_imported_holds_up_no_rank(
    torch_elsewhere: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    torch_elsewhere.write_text(module)
    monkeypatch.setattr(saferun_pdb, "_IMPORT_S", 0.5)
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "1") == "1"
    for child in saferun_pdb._unwaited:
        child.wait()


def test_a_python_that_cannot_be_started_is_a_failure_as_ever(
    torch_elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(torch_elsewhere))
    assert saferun_pdb._first_of_job("saferun/pdb/a0", "1") == "1"
