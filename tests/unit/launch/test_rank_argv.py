"""The options of the interpreter that ranks of ``--run-path`` get, as under torchrun."""

from __future__ import annotations

import sys

import pytest

from saferun.launch.rank_argv import run_path_command


def options(monkeypatch: pytest.MonkeyPatch, *version: int, **given: str | bool) -> list[str]:
    """The options of ``-X`` of a rank's command line."""
    monkeypatch.setattr(sys, "_xoptions", given)
    monkeypatch.setattr(sys, "version_info", version)
    return [word for word in run_path_command(["train.py"]) if word.startswith("-X")]


def test_a_script_without_the_global_lock_keeps_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.13 passes it on; a rank without it would run with the lock again."""
    assert options(monkeypatch, 3, 13, gil="0", utf8=True) == ["-Xutf8", "-Xgil=0"]


def test_python_3_14_passes_all_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options(monkeypatch, 3, 14, new="1", gil="0", utf8=True) == ["-Xgil=0", "-Xnew=1", "-Xutf8"]
    assert options(monkeypatch, 3, 13, new="1") == []
