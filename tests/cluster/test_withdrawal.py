"""A host that cannot start tells the others, which end with its words instead of waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import SAFERUN, STAY, assert_nothing_left, by_hand, write
from tests.cluster.machines.launchers import srun
from tests.cluster.machines.process import DEADLINE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster

# One is found while the settings are read, the other one before anything is started.
MISTAKES = {"an option": ("--leftovers-timeout", "-1"), "a profile": ("--env-profile", "nonsense")}


@pytest.mark.parametrize(("faulty", "mistake"), slow_but([(0, "an option"), (1, "a profile"), (3, "an option")], "0"))
def test_all_hosts_end_with_the_words_of_the_one_that_cannot_start(
    cluster: Cluster, tmp_path: Path, faulty: int, mistake: str
) -> None:
    """Also where it is the one at which the others meet."""
    job = by_hand(
        cluster,
        tmp_path,
        STAY,
        *("--start-timeout", "100"),
        hosts=cluster.hosts,
        each=lambda number: MISTAKES[mistake] if number == faulty else (),
    )
    codes = job.finish(DEADLINE_S)
    assert codes == [2] * len(cluster.hosts), job.story("not 2 everywhere")
    name = cluster.hosts[faulty].name
    for number, process in enumerate(job.processes):
        if number != faulty:
            assert f"saferun: {name} cannot start: " in process.err, job.story(f"not told on host {number}")
            assert "(on node" not in process.err, job.story("the host twice")
        else:
            assert f"(on {name})" in process.err, job.story("its own words do not name it")
    assert_nothing_left(cluster)


def test_where_all_hosts_have_the_mistake_none_waits_for_long(cluster: Cluster, tmp_path: Path) -> None:
    """Each says it once."""
    job = by_hand(cluster, tmp_path, STAY, *MISTAKES["an option"], hosts=cluster.hosts)
    assert set(job.finish(DEADLINE_S)) == {2}, job.story("not 2 everywhere")
    assert all(process.err.count("saferun: ") == 1 for process in job.processes), job.story("more than its own words")


@pytest.mark.slow
@pytest.mark.parametrize("faulty", slow_but([0, 2], "2"))
def test_signed_messages_and_a_single_port_change_nothing(cluster: Cluster, tmp_path: Path, faulty: int) -> None:
    """The reason is signed where the job's messages are."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef0123")
    secret.chmod(0o600)
    job = by_hand(
        cluster,
        tmp_path,
        STAY,
        *("--start-timeout", "100", "--secret-file", str(secret), "--control-port", "same"),
        hosts=cluster.hosts,
        each=lambda number: MISTAKES["a profile"] if number == faulty else (),
    )
    assert job.finish(DEADLINE_S) == [2] * len(cluster.hosts), job.story("not 2 everywhere")


def test_under_srun_a_script_that_one_host_lacks_ends_all(cluster: Cluster, tmp_path: Path) -> None:
    """As one step of Slurm, whose console has all of it."""
    script = write(tmp_path, STAY)
    name = cluster.hosts[2].name
    shell = f'[ "$SLURM_NODEID" = 2 ] && script=/nowhere.py || script={script}; exec {" ".join(SAFERUN)} $script'
    job = srun(cluster, ("bash", "-c", shell), hosts=cluster.hosts, cwd=tmp_path)
    assert job.finish(DEADLINE_S) == 2, job.story("not 2")
    assert f"there is no script /nowhere.py (on {name})" in job.err, job.story("its own words")
    assert job.err.count("there is no script") == job.err.count("hint: ") == 1, job.story("said twice")
    assert_nothing_left(cluster)


def test_without_a_meeting_place_it_ends_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    """Nobody else was started."""
    host = cluster.hosts[1]
    job = by_hand(
        cluster,
        tmp_path,
        STAY,
        *MISTAKES["an option"],
        hosts=[host],
        nnodes="2",
        each=lambda _: ("--node-rank", "1", "--master-addr", cluster.hosts[0].name),
    )
    assert job.finish(DEADLINE_S) == [2], job.story("not 2")
    assert job.err.count("saferun: ") == 1, job.story("more than its own words")


@pytest.mark.slow
def test_what_starts_nothing_ends_nobody(cluster: Cluster, tmp_path: Path) -> None:
    """One looks at the settings while the others wait."""
    first, second = cluster.hosts[:2]
    waiting = by_hand(cluster, tmp_path, STAY, hosts=[first], nnodes="2")
    place = ("--node-rank", "1", "--master-addr", first.name, "--dry-run", *MISTAKES["an option"])
    looking = by_hand(cluster, tmp_path, STAY, hosts=[second], nnodes="2", each=lambda _: place)
    assert looking.finish(DEADLINE_S) == [2], looking.story("not 2")
    rest = by_hand(cluster, tmp_path, STAY, hosts=[second], nnodes="2", each=lambda _: place[:4])
    waiting.hear("ready", 1)
    for process in (*waiting.processes, *rest.processes):
        process.terminate()
    waiting.finish()
    rest.finish()


@pytest.mark.slow
def test_a_job_that_has_begun_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Somebody types a command once more, and wrongly."""
    job = by_hand(cluster, tmp_path, STAY, hosts=cluster.hosts)
    job.hear("ready", len(cluster.hosts))
    folder = tmp_path / "again"
    folder.mkdir()
    again = by_hand(cluster, folder, STAY, *MISTAKES["an option"], hosts=cluster.hosts)
    assert set(again.finish(DEADLINE_S)) == {2}, again.story("not 2 everywhere")
    assert all(process.poll() is None for process in job.processes), job.story("the job was ended")
    for process in job.processes:
        process.terminate()
    job.finish()
