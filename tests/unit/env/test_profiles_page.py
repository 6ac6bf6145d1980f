"""The examples of docs/profiles.md are what the code takes and prints today."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from saferun.ctl import env
from saferun.env.lint.findings import one_line
from saferun.env.lint.known_names import HostFacts
from saferun.env.lint.rules import lint
from saferun.env.profiles import load_profiles
from saferun.errors import UsageError
from tests.unit.env.lint_samples import TODAY, only
from tests.unit.env.profile_steps import rendered, resolved

_PAGE = (Path(__file__).parents[3] / "docs" / "profiles.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """The only example of a kind."""
    (found,) = re.findall(rf"```{kind}\n(.*?)\n```", _PAGE, re.DOTALL)
    return str(found)


def test_the_finding_of_the_page_is_printed_today() -> None:
    (line,) = [line for line in block("console").splitlines() if not line.startswith("$ ")]
    name, _, value = line.partition(":")[0].partition("=")
    assert line == one_line(only(lint({name: value}, TODAY, HostFacts()), name))


def test_the_questions_of_the_page_can_be_asked() -> None:
    """With profiles that there are."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    env.add_arguments(parser)
    asked = re.findall(r"^\$ saferunctl env ([^#\n]*)", block("console"), re.MULTILINE)
    assert len(asked) >= 4
    profiles = load_profiles([])
    for words in asked:
        arguments = vars(parser.parse_args(words.split()))
        named = [arguments[key] for key in ("profile", "first", "second") if key in arguments]
        assert set(named) <= set(profiles.names()), words


def test_the_profile_of_the_page_is_read_and_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(block("yaml"), encoding="utf-8")
    profiles = load_profiles([str(tmp_path)])
    production = rendered(resolved(profiles, "production"))
    first, other = (rendered(resolved(profiles, "ours"), rank=rank) for rank in (0, 1))
    kept = production.keys() - {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}
    assert other == {name: other[name] for name in kept} | {"NCCL_SOCKET_IFNAME": "=hsn0"}
    assert first["NCCL_DEBUG"] == "INFO"
    assert "NCCL_DEBUG_FILE" not in first


def test_a_profile_that_differs_by_a_word_is_refused(tmp_path: Path) -> None:
    """The test above would pass on a reader that takes everything."""
    (tmp_path / "ours.yaml").write_text(block("yaml").replace("extends:", "extend:"), encoding="utf-8")
    with pytest.raises(UsageError):
        resolved(load_profiles([str(tmp_path)]), "ours")
