"""``saferunctl doctor`` is a launch with nothing to start: its own options, and all of a launch's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saferun import ctl
from saferun.errors import EXIT_USAGE
from saferun.launch import entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from saferun.config import LaunchConfig


class Launches:
    """Launches that were asked for, and how they end."""

    def __init__(self) -> None:
        self.configs: list[LaunchConfig] = []
        self.exit_code = 0

    def launch(self, config: LaunchConfig, environ: Mapping[str, str]) -> int:
        assert environ
        self.configs.append(config)
        return self.exit_code


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Nothing is launched, and nothing outside has a say."""
    launches = Launches()
    monkeypatch.setattr(entry, "launch", launches.launch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return launches


def test_it_is_a_launch_with_checks_only(launches: Launches) -> None:
    """What is checked is what a launch with the same options would meet."""
    options = ["--hosts", "a,b", "--node-rank=1", "--nproc-per-node", "8", "--nic", "eth0", "--start-timeout", "5"]
    assert ctl.main(["doctor", *options, "train.py"]) == 0
    (config,) = launches.configs
    assert config.checks.preflight == "only"
    assert config.checks.nics == ("eth0",)
    assert not config.checks.as_json
    assert config.hosts.names == ("a", "b")
    assert config.hosts.node_rank == 1
    assert config.hosts.start_timeout_s == 5
    assert config.nproc_per_node == 8
    assert not config.output.keep_files


def test_it_needs_no_script(launches: Launches) -> None:
    """There may be none on a new cluster."""
    assert ctl.main(["doctor"]) == 0
    assert launches.configs[0].checks.preflight == "only"


def test_its_own_options_may_stand_anywhere(launches: Launches) -> None:
    """Between those of the launch, too; --node-rank is not --no…, and --json is not taken for a value."""
    arguments = ["doctor", "--nnodes=1", "--collective", "--preflight-full", "--backend", "gloo", "--json", "train.py"]
    assert ctl.main(arguments) == 0
    (config,) = launches.configs
    assert config.checks.as_json
    assert config.checks.collective
    assert config.checks.backend == "gloo"
    assert config.checks.full


def test_files_are_kept_where_a_directory_is_given(launches: Launches) -> None:
    assert ctl.main(["doctor", "--run-dir", "here", "train.py"]) == 0
    assert launches.configs[0].output.run_dir == "here"
    assert launches.configs[0].output.keep_files


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (EXIT_USAGE, 1), (1, 1), (130, 130)])
def test_the_exit_code_tells_whether_a_check_failed(launches: Launches, ended: int, code: int) -> None:
    """2 is for wrong questions, as with the other subcommands."""
    launches.exit_code = ended
    assert ctl.main(["doctor", "train.py"]) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "gloo"], "saferun: --backend gloo is for --collective\n"),
        (["--preflight", "off"], "saferun: --preflight off: nothing would be checked here\n"),
        (["--nproc-per-node", "banana"], "saferun: --nproc-per-node 'banana' "),
        (["--nic", ","], "saferun: --nic , is not a list of interfaces\n"),
    ],
)
def test_wrong_questions_are_told_in_two_lines(
    launches: Launches, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert ctl.main(["doctor", *arguments, "train.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(words)
    assert said.count("\n") == 2
    assert "\nhint: " in said
    assert launches.configs == []


def test_other_verbs_still_refuse_what_they_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    """Only doctor hands on."""
    with pytest.raises(SystemExit) as ended:
        ctl.main(["env", "list", "--nproc-per-node", "8"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --nproc-per-node 8" in capsys.readouterr().err


def test_its_help_names_both_kinds_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ctl.main(["doctor", "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for option in ("--json", "--collective", "--backend", "--nnodes", "--hostfile", "srun saferunctl doctor"):
        assert option in said
