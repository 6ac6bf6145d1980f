"""Which host of which job this is where an option is wrong: only what is certain counts, as the others end by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from saferun.cli.main import read_config
from saferun.cli.refusal import leave_job
from saferun.config import JobMembership
from saferun.errors import RefusedExit, SaferunError, UsageError

PLACE = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "192.0.2.7")
FULL = (*PLACE, "--master-port", "29700")
ENVIRON = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def found(*arguments: str, **environ: str) -> JobMembership | None:
    """The membership that is known when the launch is refused; None: none is."""
    memberships: list[JobMembership] = []
    with pytest.raises((SaferunError, RefusedExit)) as refused:
        read_config(arguments, {**ENVIRON, **environ}, memberships.append)
    error = refused.value.error if isinstance(refused.value, RefusedExit) else refused.value
    assert isinstance(error, SaferunError)
    assert error.exit_code == 2
    several = [membership for membership in memberships if membership.hosts.started > 1]
    return several[-1] if several else None


@pytest.mark.parametrize(
    ("mistake", "environ"),
    [
        (("--nproc-per-node", "banana"), {}),
        (("--nproc-per-node", "0"), {}),
        ((), {"PET_NPROC_PER_NODE": "banana"}),
        (("--hang-timeout", "5m"), {}),
        (("--hang-timeout=5m",), {}),
        (("--hang-tim", "5m"), {}),
        (("--on-hang", "bad"), {}),
        (("--max-restarts", "x"), {}),
        (("--start-timeout", "5m"), {}),
        ((), {"PET_MAX_RESTARTS": "x"}),
        ((), {"SAFERUN_HANG_TIMEOUT": "x"}),
        ((), {"SAFERUN_ON_HANG": "x"}),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_wrong_value_of_an_option_that_says_nothing_about_the_job_leaves_it_known(
    mistake: tuple[str, ...], environ: dict[str, str], *, is_last: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The port is the default one."""
    arguments = (*PLACE, *mistake) if is_last else (*mistake, *PLACE)
    membership = found(*arguments, "train.py", "--nnodes", "3", **environ)
    assert membership is not None
    assert (membership.hosts.most, membership.hosts.node_rank) == (2, 1)
    assert membership.rendezvous.master_addr == "192.0.2.7"
    assert membership.rendezvous.ports == (29500,)
    assert capsys.readouterr().err.count("saferun: ") <= 1


@pytest.mark.parametrize(
    "mistake",
    [
        ("--bogus",),
        ("--bogus=5",),
        ("--config", "nope.yaml"),
    ],
)
def test_what_may_be_about_the_job_leaves_it_known_where_all_of_it_is_written(mistake: tuple[str, ...]) -> None:
    """A file that cannot be read may hold the port, and a word that is no option may be a misspelled one."""
    membership = found(*FULL, *mistake, "train.py")
    assert membership is not None
    assert membership.rendezvous.ports == (29700,)
    assert found(*mistake, *PLACE[2:], "--nnodes=2", "--rdzv-endpoint", "192.0.2.7:29700", "train.py") is not None
    assert found(*PLACE, *mistake, "train.py") is None
    assert found("--nnodes", "2", "--master-port", "29700", *mistake, "train.py") is None


def test_a_wrong_setting_in_a_file_that_can_be_read_leaves_the_job_known(tmp_path: Path) -> None:
    """The file's other settings count."""
    (tmp_path / "job.yaml").write_text("master-port: 29701\nhang-timeout: 5m\n")
    membership = found(*PLACE, "--config", "job.yaml", "train.py")
    assert membership is not None
    assert membership.rendezvous.ports == (29701,)
    (tmp_path / "job.yaml").write_text("master-port: http\n")
    assert found(*PLACE, "--config", "job.yaml", "train.py") is None
    (tmp_path / "job.yaml").write_text("master-prot: 29701\n")
    assert found(*PLACE, "--config", "job.yaml", "train.py") is None


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        # about the job itself
        ((*PLACE, "--master-port", "http", "train.py"), {}),
        ((*PLACE[:2], *PLACE[4:], "--node-rank", "one", "train.py"), {}),
        ((*PLACE, "--scheduler", "bad", "train.py"), {}),
        (("--spares", "x", *PLACE, "train.py"), {}),
        ((*PLACE, "train.py"), {"SAFERUN_SPARES": "x"}),
        ((*PLACE, "train.py"), {"SAFERUN_SIGN_MESSAGES": "x"}),
        # several mistakes
        ((*FULL, "--hang-timeout", "5m", "--bogus", "train.py"), {}),
        ((*FULL, "--hang-timeout", "5m", "--max-restarts", "x", "train.py"), {}),
        ((*FULL, "--hang-timeout", "5m", "train.py"), {"SAFERUN_ON_HANG": "x"}),
        ((*FULL, "train.py"), {"SAFERUN_ON_HANG": "x", "SAFERUN_HANG_TIMEOUT": "x"}),
        ((*FULL, "--config", "nope.yaml", "train.py"), {"SAFERUN_ON_HANG": "x"}),
        # the value of a word that is no option was taken for the script
        ((*FULL, "--bogus", "5", "--master-port", "29800", "train.py"), {}),
        # no script, or none that is known
        ((*FULL, "--hang-timeout", "5m"), {}),
        ((*FULL, "--hang-timeout"), {}),
        ((*FULL, "--hang-timeout", "train.py"), {}),
        # nothing is to be started
        ((*FULL, "--hang-timeout", "5m", "--dry-run", "train.py"), {}),
        ((*FULL, "--hang-timeout", "5m", "--show-config", "train.py"), {}),
        ((*FULL, "--config", "nope.yaml", "--dry-run", "train.py"), {}),
        ((*FULL, "--nproc-per-node", "banana", "--dry-run", "train.py"), {}),
        ((*FULL, "--hang-timeout", "5m", "--help", "train.py"), {}),
        ((*FULL, "--hang-timeout", "5m", "--version", "train.py"), {}),
        # one host
        (("--hang-timeout", "5m", "train.py"), {}),
        (("--standalone", "--nproc-per-node", "banana", "train.py"), {}),
    ],
)
def test_in_doubt_no_other_host_ends(
    arguments: tuple[str, ...], environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It waits, as before. What is said about the mistake is said once."""
    assert found(*arguments, **environ) is None
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("saferun: ") <= 1


def test_torch_is_not_asked_for_ranks_that_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take minutes."""

    def asked(*_: object) -> int:
        raise AssertionError("torch is asked")

    monkeypatch.setattr("saferun.linux.gpus.ask_torch", asked)
    monkeypatch.setattr("saferun.linux.gpus.read_torch_build", asked)
    assert found(*PLACE, "--nproc-per-node", "gpu", "--hang-timeout", "5m", "train.py") is not None


def test_the_job_is_known_before_the_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a broken driver counts none."""

    def refused(*_: object) -> int:
        raise SaferunError("torch says: Cuda is not available", "see nvidia-smi", exit_code=2)

    monkeypatch.setattr("saferun.linux.gpus.resolve_nproc_per_node", refused)
    assert found(*PLACE, "--nproc-per-node", "gpu", "train.py") is not None


def test_with_spares_a_host_without_a_driver_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong option is most likely the same on all hosts; a broken driver is one host's."""
    told: list[SaferunError] = []
    monkeypatch.setattr("saferun.launch.withdrawal.withdraw", lambda _membership, error, _environ: told.append(error))
    membership = found(*PLACE, "--spares", "1", "--nproc-per-node", "banana", "train.py")
    assert membership is not None
    leave_job(UsageError("banana", "hint"), [membership], {})
    leave_job(SaferunError("torch says", "hint", exit_code=2), [membership], {})
    membership = found(*PLACE, "--nproc-per-node", "banana", "train.py")
    assert membership is not None
    leave_job(SaferunError("torch says", "hint", exit_code=2), [membership], {})
    assert [error.exit_code for error in told] == [2, 1, 2]
