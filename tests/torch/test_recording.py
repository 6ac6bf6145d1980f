"""A recording holds what torchrun does, and nothing of the machine on which it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torch.differential import Case
from tests.torch.recording import FOLDER, Recordings, Scene, _without_words, case_digest, kept, restored

CASE = Case("one_rank")


def scene(number: int) -> Scene:
    """One of several machines."""
    alone = {
        "environment: PATH": f"/opt/{number}/bin",
        "environment: LANG": "C",
        "cpus": list(range(number)),
        "path": [f"/jobs/{number}", f"/python/{number}", f"/packages/{number}"],
        "ended by itself": True,
    }
    names = ((f"/jobs/{number}", "<job>"), (f"2900{number}", "<port>"))
    return Scene(alone, names, ((f"host{number}", "<host>"),))


def observed(number: int) -> dict[str, Any]:
    """What torchrun would do on that machine."""
    of_rank = {
        "environment: PATH": f"/opt/{number}/bin",
        "environment: MASTER_ADDR": f"host{number}",
        "environment: ENDPOINT": f"localhost:2900{number}",
        "cpus": list(range(number)),
        "path": ["", f"/python/{number}", f"/packages/{number}"],
        "argv": [f"/jobs/{number}/probe.py"],
        "ended by itself": False,
    }
    seen = {f"rank 0 attempt 0: {field}": value for field, value in of_rank.items()}
    return seen | {"exit codes": [1], f"logs: 2900{number}9": {"file": [f"/jobs/{number}/train.py", "3", "fail"]}}


def test_a_recording_made_on_one_machine_is_true_on_another() -> None:
    """Paths, ports, processors and names are the machine's own."""
    recording = json.loads(json.dumps(kept(CASE, observed(1), scene(1))))
    assert restored(recording, scene(1)) == observed(1)
    elsewhere = observed(2)
    # A longer number that begins with the port's is none.
    elsewhere["logs: 290019"] = elsewhere.pop("logs: 290029")
    assert restored(recording, scene(2)) == elsewhere
    for machines_own in ("/jobs/1", "/opt/1", "/python/1", "host1", '"29001"'):
        assert machines_own not in json.dumps(recording)


@pytest.mark.parametrize("field", ["environment: LANG", "environment: MASTER_ADDR", "ended by itself", "path"])
def test_one_changed_value_is_another_recording(field: str) -> None:
    """What is taken away, added or changed; and what is left as it is where it was changed before."""
    seen = observed(1)
    path = f"rank 0 attempt 0: {field}"
    changed = seen | {path: scene(1).alone.get(field, "another")}
    assert kept(CASE, changed, scene(1)) != kept(CASE, seen, scene(1))


def test_a_changed_case_has_no_recording(tmp_path: Path) -> None:
    """Nor has any, once the code that observes has changed."""
    path = tmp_path / "recorded" / "torch.json"
    path.parent.mkdir()
    recordings = Recordings(path)
    assert not recordings
    assert recordings.find(CASE) is None
    recordings.write({CASE.name: {"case": case_digest(CASE), "ranks": {}, "rest": {}}})
    assert Recordings(path)
    assert Recordings(path).find(CASE) is not None
    assert Recordings(path).find(CASE._replace(exit_code=1)) is None
    path.write_text(path.read_text().replace('"code": "', '"code": "0'))
    assert Recordings(path).find(CASE) is None


def test_comments_and_docstrings_may_change() -> None:
    before = 'def read(path):\n    """Read."""\n    return open(path)  # now\n'
    after = '# first\ndef read(path):\n    """Read\n\n    all."""\n\n    return open(path)\n'
    assert _without_words(before) == _without_words(after)
    assert _without_words(before) != _without_words(before.replace("open", "close"))


def test_no_recording_names_this_machine() -> None:
    """Whatever else it is, it is public."""
    files = sorted(FOLDER.glob("*.json"))
    assert files
    for path in files:
        assert not [word for word in ("/root/", "/home/", "site-packages", str(Path.cwd())) if word in path.read_text()]
