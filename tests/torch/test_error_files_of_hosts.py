"""TORCHELASTIC_ERROR_FILE on several hosts: for the program that started saferun on each of them."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.torch.several import hosts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.process.launching import Job

# Ranks do as their argument says as soon as they may. What one records is what torch's @record writes.
RECORDING = """
from rank import *
import json
how = sys.argv[1 + RANK]
tell("ready")
if ATTEMPT == 0:
    await_release("end")
if how == "stays" and ATTEMPT == 0:
    stay()
if how == "fails" and ATTEMPT == 0:
    extra = {"py_callstack": "Traceback", "timestamp": str(int(time.time()))}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": f"ValueError: of rank {RANK}", "extraInfo": extra}}, file)
    sys.exit(3)
if how == "exits" and ATTEMPT == 0:
    sys.exit(3)
"""


def two(folder: Path, *options: str, how: tuple[str, str], shared: bool = False) -> AbstractContextManager[list[Job]]:
    """Two hosts, each with one rank."""
    names = ["shared.json" if shared else f"{number}.json" for number in (0, 1)]
    environs = [{"TORCHELASTIC_ERROR_FILE": str(folder / name)} for name in names]
    return hosts(
        folder, RECORDING, "--preflight", "off", *options, environs=lambda number: environs[number], arguments=how
    )


def end(jobs: list[Job]) -> list[int]:
    for job in jobs:
        job.hear("ready")
    for job in jobs:
        job.release("end")
    return [job.wait(60.0) for job in jobs]


def error_of(path: Path) -> Any:
    """What the file says: the message and the exit code of the rank that recorded it; None: there is none."""
    if not path.exists():
        return None
    message = json.loads(path.read_text())["message"]
    return message["message"], message.get("errorCode")


def test_a_host_whose_rank_has_failed_has_its_error_and_the_others_why_the_job_has_ended(tmp_path: Path) -> None:
    """Under torchrun, too, each host writes what its own ranks have recorded."""
    with two(tmp_path, how=("stays", "fails")) as jobs:
        assert end(jobs) == [1, 1]
    assert error_of(tmp_path / "1.json") == ("ValueError: of rank 1", 3)
    headline, code = error_of(tmp_path / "0.json")
    assert headline.startswith("rank 1 (")
    assert "ValueError: of rank 1" in headline
    assert code is None


@pytest.mark.slow
def test_a_host_whose_rank_has_failed_writes_it_where_the_leader_has_no_failure(tmp_path: Path) -> None:
    """The other way round: the leader's own, and a host that follows with nothing but the reason."""
    with two(tmp_path, how=("fails", "stays")) as jobs:
        assert end(jobs) == [1, 1]
    assert error_of(tmp_path / "0.json") == ("ValueError: of rank 0", 3)
    assert error_of(tmp_path / "1.json")[0].startswith("rank 0 (")


@pytest.mark.slow
@pytest.mark.parametrize("how", [("stays", "exits"), ("exits", "stays")])
def test_a_host_whose_rank_has_failed_without_a_record_has_none(tmp_path: Path, how: tuple[str, str]) -> None:
    """Nor has it under torchrun."""
    with two(tmp_path, how=how) as jobs:
        assert end(jobs) == [1, 1]
    failed = how.index("exits")
    assert error_of(tmp_path / f"{failed}.json") is None
    assert error_of(tmp_path / f"{1 - failed}.json")[0].startswith(f"rank {failed} (")


@pytest.mark.slow
@pytest.mark.parametrize("how", [("stays", "fails"), ("fails", "stays")])
def test_hosts_with_one_file_in_common_keep_what_a_rank_has_recorded(tmp_path: Path, how: tuple[str, str]) -> None:
    """In a shared directory, or with one saferun for each rank of a host."""
    (tmp_path / "shared.json").write_text('{"message": {"message": "of an earlier job"}}')
    with two(tmp_path, how=how, shared=True) as jobs:
        assert end(jobs) == [1, 1]
    assert error_of(tmp_path / "shared.json") == (f"ValueError: of rank {how.index('fails')}", 3)


@pytest.mark.slow
def test_a_failure_that_a_restart_follows_leaves_no_file(tmp_path: Path) -> None:
    """The job ends well."""
    with two(tmp_path, "--max-restarts", "1", how=("stays", "fails")) as jobs:
        assert end(jobs) == [0, 0]
    assert [error_of(tmp_path / f"{number}.json") for number in (0, 1)] == [None, None]


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_host_has_the_signal_that_has_come_to_it(tmp_path: Path, first: int) -> None:
    """In torchrun's words. One that it has not come to has what ended the job."""
    with two(tmp_path, how=("stays", "stays")) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[first].send(signal.SIGTERM)
        assert [job.wait(60.0) for job in jobs] == [1, 1]
        pid = jobs[first].process.pid
    assert error_of(tmp_path / f"{first}.json") == (f"SignalException: Process {pid} got signal: 15", None)
    assert error_of(tmp_path / f"{1 - first}.json")[0].startswith("stopped by SIGTERM on ")


@pytest.mark.slow
def test_a_signal_to_all_hosts_is_in_the_file_of_each(tmp_path: Path) -> None:
    """It comes to some of them when their ranks have ended because of the others."""
    with two(tmp_path, how=("stays", "stays")) as jobs:
        for job in jobs:
            job.hear("ready")
        for job in jobs:
            job.send(signal.SIGTERM)
        assert [job.wait(60.0) for job in jobs] == [1, 1]
        for number, job in enumerate(jobs):
            message = f"SignalException: Process {job.process.pid} got signal: 15"
            assert error_of(tmp_path / f"{number}.json") == (message, None)
