"""Two hosts of which one cannot take part: both end with the reason."""

from __future__ import annotations

from pathlib import Path

from tests.ports import own_port
from tests.process.launching import STAY, running


def place(port: int, number: int) -> tuple[str, ...]:
    return ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port))


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
