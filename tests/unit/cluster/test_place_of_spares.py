"""The number of hosts that train, and of those that wait, from options and what schedulers told."""

from __future__ import annotations

from pathlib import Path

import pytest

from saferun.cluster.placement.several_hosts import candidate_ports
from tests.unit.cluster.placing import config_of, place, refusal
from tests.unit.recorded_launchers import slurm_step


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


STEP = slurm_step(3, 3, 0, nodes="node[1-4]", hosts=4, tasks=4, tasks_by_host="1(x4)")


def test_without_spares_nothing_is_different() -> None:
    assert (config_of().hosts.spares, config_of().hosts.spans_hosts) == (0, False)


def test_under_a_scheduler_the_number_of_hosts_says_how_many_train() -> None:
    """And which one this is, and where they meet, is the scheduler's, as without --nnodes."""
    config = config_of("--nnodes", "3", "--spares", "1", environ=STEP)
    assert place(config) == (3, 3, 3)
    assert (config.hosts.spares, config.hosts.started) == (1, 4)
    assert config.rendezvous.ports == candidate_ports(config.rendezvous.run_id)


def test_without_a_number_all_hosts_but_the_spares_train() -> None:
    assert place(config_of("--spares", "1", environ=STEP)) == (3, 3, 3)


def test_by_hand_a_spare_has_a_node_rank_behind_those_that_train() -> None:
    config = config_of("--nnodes", "3", "--spares", "1", "--node-rank", "3", "--master-addr", "node1")
    assert (place(config), config.hosts.spares) == ((3, 3, 3), 1)


def test_one_host_may_have_a_spare() -> None:
    config = config_of("--spares", "1", "--node-rank", "1", "--master-addr", "node1")
    assert (place(config), config.hosts.spans_hosts) == ((1, 1, 1), True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--spares", "-1"), "--spares -1 is negative"),
        (("--standalone", "--spares", "1"), "one host has no spares"),
        (("--nnodes", "2:4", "--spares", "1", "--rdzv-backend", "c10d"), "static rendezvous"),
        (("--nnodes", "3", "--spares", "1", "--node-rank", "4"), "node-rank 4 does not exist in a job of 4 hosts"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal(*arguments).what


@pytest.mark.parametrize(("arguments", "given"), [(("--nnodes", "4"), "--nnodes 4 and --spares 1"), ((), "--spares 4")])
def test_the_hosts_that_were_started_are_those_that_train_and_the_spares(
    arguments: tuple[str, ...], given: str
) -> None:
    """Else some would wait for others that nobody has started."""
    spares = () if "--nnodes" not in arguments else ("--spares", "1")
    error = refusal(*arguments, *(spares or ("--spares", "4")), environ=STEP)
    assert error.what.startswith(given)
    assert "--nnodes and --spares together" in error.hint
