"""Two hosts, of which one has a wrong option: it ends at once, and the other one with its reason."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.breadth import slow_but
from tests.ports import own_port
from tests.process.launching import STAY, running, two_lines

# Two machines with saferun's own time limits need a small part of it.
LATEST_S = 40.0


class Mistake(NamedTuple):
    """What is wrong on one host, and what its message has to say."""

    options: tuple[str, ...]
    says: str
    environ: tuple[str, str] = ("LANG", "C.UTF-8")


MISTAKES = {
    "no GPU": Mistake(("--nproc-per-node", "gpu"), "--nproc-per-node gpu: torch says: ", ("CUDA_VISIBLE_DEVICES", "")),
    "no number of ranks": Mistake(("--nproc-per-node", "banana"), "'banana' is neither a number"),
    "a value": Mistake(("--hang-timeout", "5m"), "--hang-timeout 5m is not a number of seconds"),
    "a choice": Mistake(("--on-hang", "bad"), "argument --on-hang/--on_hang: invalid choice: 'bad'"),
    "a word that is no option": Mistake(("--bogus",), "unrecognized arguments: --bogus"),
    "a file": Mistake(("--config", "nope.yaml"), "nope.yaml: "),
    "a variable": Mistake((), "--hang-timeout: 'x' is not a number", ("SAFERUN_HANG_TIMEOUT", "x")),
}


def place(port: int, number: int) -> tuple[str, ...]:
    return ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port))


@pytest.mark.parametrize("faulty", slow_but([0, 1], "1"))
@pytest.mark.parametrize("name", slow_but(list(MISTAKES), "no number of ranks", "a value"))
def test_the_other_host_ends_with_the_reason(tmp_path: Path, name: str, faulty: int) -> None:
    """It would wait for ``--start-timeout``."""
    mistake = MISTAKES[name]
    port = own_port()
    began_at = time.monotonic()
    with (
        running(tmp_path / "good", STAY, *place(port, 1 - faulty)) as good,
        running(
            tmp_path / "bad",
            STAY,
            *place(port, faulty),
            *mistake.options,
            nproc=None,
            environ=dict((mistake.environ,)),
        ) as bad,
    ):
        assert bad.wait() == 2
        assert good.wait() == 2
    assert time.monotonic() - began_at < LATEST_S
    what, hint = two_lines(bad.err)
    assert mistake.says in what
    reason = f"cannot start: {what.partition(' (on ')[0]}\nhint: {hint}"
    assert reason in good.err


@pytest.mark.parametrize("name", slow_but(["no number of ranks", "a value", "a file"], "a value"))
def test_a_job_that_has_begun_goes_on(tmp_path: Path, name: str) -> None:
    """Somebody types the command of one of its hosts once more, and wrongly."""
    mistake = MISTAKES[name]
    port = own_port()
    with (
        running(tmp_path / "first", STAY, *place(port, 0)) as first,
        running(tmp_path / "second", STAY, *place(port, 1)) as second,
    ):
        first.hear("ready", 1)
        second.hear("ready", 1)
        with running(tmp_path / "again", STAY, *place(port, 1), *mistake.options, nproc=None) as again:
            assert again.wait() == 2
            two_lines(again.err)
        assert first.process.poll() is None
        assert second.process.poll() is None
        for job in (first, second):
            job.process.terminate()


def test_hosts_with_different_numbers_of_hosts_have_wrong_input(tmp_path: Path) -> None:
    """No rank has run, and the exit code says so."""
    port = own_port()
    with (
        running(tmp_path / "two", STAY, *place(port, 0)) as two,
        running(tmp_path / "three", STAY, *place(port, 1), "--nnodes", "3") as three,
    ):
        assert (two.wait(), three.wait()) == (2, 2)
        assert "give all hosts the same --nnodes" in two.err
        assert "give all hosts the same --nnodes" in three.err
