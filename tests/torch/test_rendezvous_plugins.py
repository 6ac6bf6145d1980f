"""Rendezvous handlers that packages register with torch: which hosts take part is theirs to say, as under torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import REPOSITORY, STAY, running, two_lines
from tests.torch.several import hosts

# It notes what is asked of it. Of its settings, ``world`` is how many hosts there are, which meet by a file.
# ``fails`` is where it fails.
PLUGIN = """
import os, sys
from datetime import timedelta
from torch.distributed import FileStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo


class Mine(RendezvousHandler):
    def __init__(self, parameters):
        self.parameters, self.round = parameters, 0
        self.fails = parameters.get("fails", "")
        self.note(f"opened for {parameters.min_nodes}:{parameters.max_nodes}")
        if self.fails == "open":
            raise RuntimeError("no seats are left")
        self.store = FileStore(parameters.endpoint, -1)

    def note(self, text):
        with open(os.environ["NOTES"], "a") as file:
            file.write(text + "\\n")

    def get_backend(self): return "mine"
    def is_closed(self): return False
    def set_closed(self): pass
    def num_nodes_waiting(self): return 0
    def get_run_id(self): return "run-of-the-plugin"

    def shutdown(self):
        self.note("shut down")
        return True

    def next_rendezvous(self):
        self.note("met")
        if self.fails == "meet":
            raise RuntimeError("no seats are left")
        if self.fails == "exit":
            sys.exit("no seats are left")
        world = int(self.parameters.get("world", "1"))
        store = PrefixStore(str(self.round), self.store)
        self.round += 1
        rank = store.add("hosts", 1) - 1
        store.set("here%d" % rank, "1")
        store.wait(["here%d" % i for i in range(world)], timedelta(seconds=60))
        return RendezvousInfo(store, rank, world, RendezvousStoreInfo("192.0.2.77", 4242))


def register():
    return Mine
"""
NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
# The ranks of a job meet at their store, which the last one to come finds out.
RANK = f"""
from rank import *
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
store.set(f"{{ATTEMPT}}/{{RANK}}", "here")
store.wait([f"{{ATTEMPT}}/{{rank}}" for rank in range(int(os.environ["WORLD_SIZE"]))])
print("place", *(os.environ[name] for name in {NAMES}), flush=True)
if len(sys.argv) > 1 and ATTEMPT == 0:
    sys.exit(3)
"""


def environment(folder: Path) -> dict[str, str]:
    """An environment in which the plugin is installed."""
    info = folder / "plugin" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "plugin" / "mine_rendezvous.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nmine = mine_rendezvous:register\n")
    return {"PYTHONPATH": f"{folder / 'plugin'}:{REPOSITORY}", "NOTES": str(folder / "notes")}


def options(folder: Path, conf: str = "") -> tuple[str, ...]:
    """The rendezvous of the plugin, without a number of hosts."""
    more = ("--rdzv-conf", conf) if conf else ()
    return "--rdzv-backend", "mine", "--rdzv-endpoint", str(folder / "meeting"), *more


def places(out: str) -> list[str]:
    """What the ranks know of their places, in order of rank."""
    return sorted(line.split("place ")[1] for line in out.splitlines() if "place " in line)


def notes(folder: Path) -> list[str]:
    """What was asked of the plugin."""
    return (folder / "notes").read_text().splitlines()


def test_a_registered_handler_is_asked_on_one_host_too(tmp_path: Path) -> None:
    """Before each attempt. Its address may be that of a store elsewhere; the ranks meet at saferun's."""
    given = (*options(tmp_path), "--max-restarts", "1")
    environ = environment(tmp_path)
    with running(tmp_path / "run", RANK, *given, nproc=2, environ=environ, arguments=["fails once"]) as job:
        assert job.wait() == 0, job.err
        assert set(places(job.out)) == {"0 2 0 1 run-of-the-plugin", "1 2 0 1 run-of-the-plugin"}
    assert notes(tmp_path) == ["opened for 1:1", "met", "met", "shut down"]


@pytest.mark.slow
def test_torchrun_asks_the_handler_in_the_same_way(tmp_path: Path) -> None:
    """The reference for what the plugin and the ranks see."""
    program = f"import os; print('place', *(os.environ[name] for name in {NAMES}))"
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options(tmp_path), str(tmp_path / "train.py")],
        env={"PATH": "/usr/bin:/bin", **environment(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == ["0 1 0 1 run-of-the-plugin"]
    assert notes(tmp_path) == ["opened for 1:1", "met", "shut down"]


def test_a_handler_that_decides_the_number_of_hosts_makes_one_job_of_them(tmp_path: Path) -> None:
    """Without --nnodes, too: each of them would train alone."""
    environ = environment(tmp_path)
    given = options(tmp_path, "world=2")
    with hosts(tmp_path, RANK, *given, place=False, nproc=2, environs=lambda _: environ) as jobs:
        assert [job.wait() for job in jobs] == [0, 0], [job.err for job in jobs]
        assert places("".join(job.out for job in jobs)) == [
            f"{rank} 4 {rank // 2} 2 run-of-the-plugin" for rank in range(4)
        ]


@pytest.mark.parametrize("where", slow_but(["open", "meet", "exit"], "meet"))
def test_a_handler_that_fails_ends_the_launch_as_under_torchrun(tmp_path: Path, where: str) -> None:
    """With exit code 1, and its own words instead of a traceback."""
    program = "from rank import *\ntell('ran')"
    given = options(tmp_path, f"fails={where}")
    with running(tmp_path / "run", program, *given, environ=environment(tmp_path)) as job:
        assert job.wait() == 1
        what, _ = two_lines(job.err)
        assert "no seats are left" in what
        assert not job.said("ran")
    assert notes(tmp_path)[-1] == ("opened for 1:1" if where == "open" else "shut down")


def test_a_signal_does_not_shut_the_handler_down(tmp_path: Path) -> None:
    """That may close the rendezvous for good, and the scheduler starts the job again, with the same id."""
    with running(tmp_path / "run", STAY, *options(tmp_path), environ=environment(tmp_path)) as job:
        job.hear("ready")
        job.send(signal.SIGTERM)
        assert job.wait() == 1, job.err
    assert notes(tmp_path) == ["opened for 1:1", "met"]
