"""``saferunctl diff``: what differs between two runs, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from saferun import ctl
from tests.unit.described_runs import make_run

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "20260101-120000-abcdef", "20260102-120000-fedcba"
COMMON: dict[str, Any] = {
    "rank_command": ["python", "train.py"],
    "cwd": "/x",
    "nproc_per_node": 8,
    "versions": {"saferun": "0.1.0", "torch": "2.12.0"},
    "settings": {"max_restarts": {"value": 0, "origin": "default"}, "run_dir": {"value": None, "origin": "default"}},
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, alike but for their directories."""
    monkeypatch.chdir(tmp_path)
    for name in (OLD, NEW):
        path = tmp_path / "saferun-runs" / name
        environment = {"NCCL_DEBUG": "INFO", "TORCH_FR_DUMP_TEMP_FILE": f"{path}/dump", "MASTER_PORT": name}
        make_run(tmp_path / "saferun-runs", name, **COMMON, environment=environment)
    return tmp_path / "saferun-runs"


def change(run: Path, **changes: object) -> None:
    """Change what run.json says."""
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, **changes}))


@pytest.mark.usefixtures("runs")
def test_runs_that_were_asked_for_the_same_do_not_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """Their directories and ports are always their own."""
    assert ctl.main(["diff", OLD, NEW]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"- saferun-runs/{OLD}",
        f"+ saferun-runs/{NEW}",
        "",
        "no differences",
    ]


@pytest.mark.parametrize("chosen", [None, "logs/{name}", "/data/{name}"])
def test_a_run_that_was_moved_does_not_differ_by_where_it_was(
    runs: Path, capsys: pytest.CaptureFixture[str], chosen: str | None
) -> None:
    """Its variables have the path that the run had."""
    for name in (OLD, NEW):
        there = chosen.format(name=name) if chosen else None
        path = f"/x/{there or f'saferun-runs/{name}'}" if not (there or "").startswith("/") else there
        change(
            runs / name,
            directory="" if there else name,
            settings={"run_dir": {"value": there, "origin": "flag" if there else "default"}},
            environment={"NCCL_DEBUG_FILE": f"{path}/node1/nccl.log", "TORCH_FR_DUMP_TEMP_FILE": f"{path}/dump"},
        )
    (runs / OLD).rename(runs.parent / "a moved run")
    assert ctl.main(["diff", "a moved run", NEW]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no differences"


def test_each_difference_is_two_lines_below_its_section(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / NEW / "node2").mkdir()
    change(
        runs / NEW,
        end={"time": 1.0, "exit_code": 1, "outcome": "failed", "headline": "rank 1: \x1b[2JKeyError"},
        versions={"saferun": "0.1.0", "torch": "2.13.0"},
        settings={"max_restarts": {"value": 3, "origin": "flag"}},
        environment={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"},
    )
    assert ctl.main(["diff", OLD, NEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert sections == ["outcome:", "versions:", "settings:", "hosts:", "environment:"]
    for line in (
        *("  - state: succeeded", "  + state: failed", "  - headline: (not set)"),
        *("  + headline: rank 1: \\x1b[2JKeyError", "  - torch: 2.12.0", "  + torch: 2.13.0"),
        *("  - max_restarts: 0", "  + max_restarts: 3", "  - hosts: node1", "  + hosts: node1 node2"),
        *("  - NCCL_DEBUG: INFO", "  + NCCL_DEBUG: WARN", "  - OMP_NUM_THREADS: (not set)", "  + OMP_NUM_THREADS: 1"),
    ):
        assert line in lines
    assert not any("saferun: 0.1.0" in line for line in lines)
    assert ctl.main(["diff", OLD, NEW, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"]["settings"] == {"max_restarts": ["0", "3"]}


@pytest.mark.parametrize("changes", [{"settings": 3}, {"settings": {"a": 1}}, {"versions": "x"}, {"environment": [1]}])
def test_a_description_that_is_none_is_said(
    runs: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object]
) -> None:
    change(runs / NEW, **changes)
    assert ctl.main(["diff", OLD, NEW]) == 2
    assert "run.json cannot be read" in capsys.readouterr().err
    (runs / NEW / "run.json").unlink()
    assert ctl.main(["diff", OLD, NEW]) == 2
    assert "No such file" in capsys.readouterr().err


def test_no_secret_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though run.json has none, unless it was written by hand."""
    change(runs / NEW, rank_command=["python", "train.py", "--api-key", "s3cret"])
    assert ctl.main(["diff", OLD, NEW]) == 0
    assert "s3cret" not in capsys.readouterr().out
