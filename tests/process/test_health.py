"""``saferunctl health``: its exit codes for schedulers; it waits for nothing and takes no host out by mistake."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.ctl import main
from saferun.linux.bare_socket import Socket
from saferun.linux.helper import Helper
from saferun.preflight import check_process, host_health
from tests.process.frozen import mirror, needs_mounts
from tests.process.launching import REPOSITORY, running

ASK = (sys.executable, "-m", "saferun.ctl", "health", "--record", "none")


def ask(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *ASK, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_healthy_host_is_fit_for_a_job(tmp_path: Path) -> None:
    done = ask(tmp_path, "--path", str(tmp_path), "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    content = json.loads(done.stdout)
    assert (content["schema"], content["healthy"], content["faults"]) == ("saferun.health/1", True, [])
    assert {result["check"] for result in content["results"]} >= {"gpus", "kernel_log", "nic_errors", "storage"}
    assert {result["verdict"] for result in content["results"]} <= {"ok", "skipped"}
    assert os.listdir(tmp_path) == []


def test_a_host_with_a_fault_of_its_own_gives_exit_code_1_and_one_line(tmp_path: Path) -> None:
    """The line is the reason with which Slurm drains the node."""
    done = ask(tmp_path, "--brief", "--gpus", "1024")
    assert done.returncode == 1, done
    (line,) = done.stdout.splitlines()
    assert line.endswith(", and 1024 are expected")


@pytest.mark.parametrize("wrong", [("--timeout", "0"), ("--gpus", "9999"), ("--no-such",)])
def test_bad_input_gives_two_lines_and_exit_code_2(wrong: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["health", *wrong])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert len(capfd.readouterr().err.splitlines()) == 2


def break_itself(**_arguments: object) -> None:
    raise RuntimeError("a mistake of our own")


def refuse(*_arguments: object, **_more: object) -> None:
    raise OSError(11, "Resource temporarily unavailable")


def test_a_health_check_that_is_broken_counts_as_passed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A prolog that fails takes the node away from everybody."""
    with monkeypatch.context() as patched:
        patched.setattr(host_health, "check_host", break_itself)
        assert main(["health"]) == 0
        assert capfd.readouterr().err == "saferunctl health: RuntimeError: a mistake of our own\n"
    monkeypatch.setattr(check_process, "CheckProcess", refuse)
    assert main(["health", "--record", "none", "--strict"]) == 0
    assert "the check process cannot be started" in capfd.readouterr().out


@pytest.mark.parametrize("where", [">&-", ">/dev/full", "| true"])
@pytest.mark.parametrize(("gpus", "code"), [("-1", 0), ("1024", 1)], ids=["healthy", "unfit"])
def test_the_exit_code_is_the_host_s_also_where_nothing_can_be_printed(
    tmp_path: Path, where: str, gpus: str, code: int
) -> None:
    command = f"set -o pipefail; {shlex.join([*ASK, '--gpus', gpus])} {where}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120,
        check=False,
    )
    assert done.returncode == code


def end_at_once(connection: Socket) -> None:
    connection.recv(1)


def hang(_connection: Socket) -> None:
    os.read(os.pipe()[0], 1)


def test_a_check_process_that_is_killed_or_hangs_counts_as_passed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Lost(Helper):
        """One that never says anything."""

        def __init__(self, **_: bool) -> None:
            super().__init__("sr-checks", end_at_once)

    class Hanging(Helper):
        """One that does not even end."""

        def __init__(self, **_: bool) -> None:
            super().__init__("sr-checks", hang)

    for kind, said in ((Lost, "the check process ended early"), (Hanging, "the checks took too long")):
        monkeypatch.setattr(check_process, "CheckProcess", kind)
        assert main(["health", "--record", "none", "--strict", "--timeout", "1"]) == 0
        assert said in capfd.readouterr().out


@needs_mounts
@pytest.mark.slow
def test_storage_that_does_not_answer_is_told_and_not_waited_for(tmp_path: Path) -> None:
    """Whatever asks it sleeps until it is back; what the kernel remembers of its files does not hide that."""
    (tmp_path / "data").mkdir()
    with mirror(tmp_path, tmp_path / "data") as system:
        well = ask(tmp_path, "--path", str(system.path), "--brief", before=tuple(system.before(str(tmp_path))))
        assert (well.returncode, well.stdout) == (0, ""), well
        system.freeze()
        done = ask(tmp_path, "--path", str(system.path), "--brief", before=tuple(system.before(str(tmp_path))))
        system.thaw()
    assert done.returncode == 1, done
    assert f"{system.path} (fuse" in done.stdout
    assert "does not answer within 5 s" in done.stdout


@pytest.mark.slow
def test_a_host_that_computes_right_is_fit_and_a_launch_goes_on_after_it(tmp_path: Path) -> None:
    """--health full: with torch, in processes that end before the ranks begin."""
    assert ask(tmp_path, "--full", "--brief").returncode == 0
    with running(tmp_path / "launch", "print('trained')", "--health", "full", nproc=2) as job:
        assert job.wait() == 0
        assert job.out.count("trained") == 2
        found = json.loads((job.run_dir / "preflight.json").read_text())["results"]
        (row,) = [result for result in found if result["check"] == "compute"]
        assert (row["verdict"], row["message"]) == ("ok", "2 ranks multiplied matrices right and ran all_reduce")


def test_health_off_leaves_its_checks_out_and_no_others(tmp_path: Path) -> None:
    with running(tmp_path / "launch", "pass", "--health", "off", "--nic", "lo", store=False) as job:
        assert job.wait() == 0
        found = {one["check"] for one in json.loads((job.run_dir / "preflight.json").read_text())["results"]}
    assert "disk" in found
    assert not {"kernel_log", "nic_errors", "storage"} & found
