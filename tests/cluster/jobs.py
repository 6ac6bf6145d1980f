"""Jobs over the hosts of a cluster, started in each of the ways in which people start them.

Ranks tell the test where they are by lines on stdout, which is also how their output is seen to arrive, and wait for
files that the test makes in the folder that all hosts share.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tests.cluster.machines import launchers
from tests.cluster.machines.process import DEADLINE_S

if TYPE_CHECKING:
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host
    from tests.cluster.machines.process import Process

T = TypeVar("T")
SAFERUN = (sys.executable, "-m", "saferun")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PORT = 29500
_WORD = re.compile(r"told (\d+) (\d+) (\S+)(?: (.*?))?\r?$", re.MULTILINE)
_LOOK_AGAIN_S = 0.02

# What stands before every program of a rank.
PRELUDE = '''
import json, os, signal, socket, sys, time

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
WORLD = int(os.environ["WORLD_SIZE"])
FOLDER = os.path.dirname(os.path.abspath(__file__))


def tell(word, more=""):
    """Say a word to the test."""
    os.write(1, f"told {RANK} {ATTEMPT} {word} {more}\\n".encode())


def await_release(name):
    """Return when the test releases the name."""
    while not os.path.exists(f"{FOLDER}/release.{name}"):
        time.sleep(0.01)


def stay():
    """Stay until a signal ends this process."""
    while True:
        signal.pause()
'''

# Ranks that say what they were told of their place, and are done when all of them are there.
TELL_PLACE = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE")
tell("place", json.dumps([socket.gethostname(), *(int(os.environ[name]) for name in names)]))
"""

# Ranks that stay, or end themselves by a signal when they may.
DIE_WHEN_RELEASED = """
tell("ready")
await_release(f"die.{RANK}")
os.kill(os.getpid(), signal.SIGKILL)
"""
STAY = """
tell("ready")
stay()
"""

# A training that is small and a training all the same: the model is the same everywhere only if gloo works.
TRAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(RANK)
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)
weights = torch.zeros(8, 1, requires_grad=True)
for step in range(40):
    loss = ((inputs @ weights - targets) ** 2).mean()
    loss.backward()
    dist.all_reduce(weights.grad)
    with torch.no_grad():
        weights -= 0.1 * weights.grad / WORLD
        weights.grad = None
    if step == 2:
        tell("training")
        after_step_2()
everybodys = [torch.zeros_like(weights) for _ in range(WORLD)]
dist.all_gather(everybodys, weights.detach())
assert all(torch.equal(one, weights) for one in everybodys)
assert loss < 0.1, loss
tell("trained", WORLD)
dist.destroy_process_group()
"""


class Way(NamedTuple):
    """How a job is started.

    ``tasks``: how many saferuns there are on a host; with more than one, each has one rank. ``program``: the
    launcher's, if it is not Debian's.
    """

    launcher: str
    tasks: int = 1
    program: str = ""

    @property
    def name(self) -> str:
        """For a test's id."""
        return self.launcher if self.tasks == 1 else f"{self.launcher}-a-task-a-rank"


WAYS = (
    Way("srun"),
    Way("srun", 2),
    Way("mpirun"),
    Way("mpirun", 2),
    Way("hydra"),
    Way("hydra", 2),
    Way("pdsh"),
    Way("by_hand"),
)


class Word(NamedTuple):
    """What a rank said. ``attempt`` is TORCHELASTIC_RESTART_COUNT."""

    rank: int
    attempt: int
    word: str
    more: str


class Job:
    """A job that was started: one launcher, or one saferun per host.

    Args:
        folder: where its program is.
        processes: the launcher, or the saferuns.
    """

    def __init__(self, folder: Path, processes: Sequence[Process]) -> None:
        self.folder = folder
        self.processes = list(processes)

    @property
    def out(self) -> str:
        """Everything on stdout so far."""
        return "".join(process.out for process in self.processes)

    @property
    def err(self) -> str:
        """Everything on stderr so far."""
        return "".join(process.err for process in self.processes)

    @property
    def words(self) -> list[Word]:
        """What the ranks have said so far, in order of attempts and ranks."""
        found = _WORD.findall(self.out)
        return sorted(Word(int(rank), int(attempt), word, more) for rank, attempt, word, more in found)

    def hear(self, word: str, count: int, *, attempt: int = 0, timeout_s: float = DEADLINE_S) -> list[Word]:
        """Wait until so many ranks of an attempt have said a word, and return what they said."""

        def heard() -> list[Word]:
            said = [w for w in self.words if (w.word, w.attempt) == (word, attempt)]
            return said if len(said) >= count else []

        return self.until(heard, f"{count} ranks say {word!r} in attempt {attempt}", timeout_s=timeout_s)

    def until(self, condition: Callable[[], T], what: str, *, timeout_s: float = DEADLINE_S) -> T:
        """Wait for a condition; where it does not come true while anybody of the job lives, all output is shown."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            living = any(process.poll() is None for process in self.processes)
            if result := condition():
                return result
            assert living, self.story(f"ended, and it never happened: {what}")
            assert time.monotonic() < give_up_at, self.story(f"did not happen within {timeout_s:g} s: {what}")
            time.sleep(_LOOK_AGAIN_S)

    def release(self, name: object) -> None:
        """Let ranks go on that wait for this name."""
        (self.folder / f"release.{name}").touch()

    def finish(self, timeout_s: float = DEADLINE_S) -> list[int]:
        """Wait for the end, and return the exit codes."""
        return [process.finish(timeout_s) for process in self.processes]

    def story(self, what: str) -> str:
        """A message for a failed assertion."""
        return f"{what}\n" + "\n".join(process.story(str(process.returncode)) for process in self.processes)

    def saferun_said(self, pattern: str) -> list[str]:
        """Lines on stderr, without what a launcher puts before them, that match from their beginning on."""
        lines = (re.sub(r"^node\d+: ", "", line) for line in self.err.splitlines())
        return [line for line in lines if re.match(pattern, line)]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports of whole jobs, as opposed to those that each host keeps."""
        return [json.loads(path.read_text()) for path in self.folder.glob("saferun-runs/[0-9]*/report.json")]


def start(
    cluster: Cluster,
    way: Way,
    folder: Path,
    program: str,
    *options: str,
    hosts: Sequence[Host] | None = None,
    nproc: int = 2,
    **more: Any,
) -> Job:
    """Start saferun on hosts, in one of the ways, with as many options as that way needs.

    Args:
        cluster: where.
        way: in which way.
        folder: an empty folder that all hosts share; the working directory.
        program: what every rank runs, behind ``PRELUDE``.
        options: saferun's, on all hosts.
        hosts: on which; on all of them unless given.
        nproc: ranks a host.
        more: goes to the launcher.
    """
    script = write(folder, program)
    chosen = cluster.hosts if hosts is None else hosts
    assert way.tasks in {1, nproc}
    ranks = ("--nproc-per-node", str(nproc)) if way.tasks == 1 else ()
    if way.launcher == "by_hand":
        return by_hand(cluster, folder, program, *ranks, *options, hosts=chosen, **more)
    if way.launcher == "pdsh":
        names = ",".join(host.name for host in chosen)
        command = (*SAFERUN, "--hosts", names, "--stop-with-parent", "on", *ranks, *options, script)
        return Job(folder, [launchers.pdsh(cluster, command, hosts=chosen, cwd=folder, **more)])
    command = (*SAFERUN, *ranks, *options, script)
    launch = {"srun": launchers.srun, "mpirun": launchers.mpirun, "hydra": launchers.hydra}[way.launcher]
    if way.program:
        more["program"] = way.program
    return Job(folder, [launch(cluster, command, tasks_per_host=way.tasks, hosts=chosen, cwd=folder, **more)])


def by_hand(
    cluster: Cluster,
    folder: Path,
    program: str,
    *options: str,
    hosts: Sequence[Host],
    each: Callable[[int], Sequence[str]] = lambda _: (),
    backend: str = "static",
    nnodes: str = "",
    launcher: Sequence[str] = SAFERUN,
    **more: Any,
) -> Job:
    """Start one saferun per host as one would in as many shells, by torchrun's own options.

    Args:
        cluster: where.
        folder: an empty folder that all hosts share.
        program: what every rank runs.
        options: on all hosts.
        hosts: on which; the first is the master.
        each: more options of a host, by its number in this list.
        backend: ``static``, or another rendezvous, whose endpoint is on the first host then.
        nnodes: unless it is the number of hosts.
        launcher: torchrun, for comparison.
        more: goes to the launcher.
    """
    script = write(folder, program)
    count = ("--nnodes", nnodes or str(len(hosts)))

    def command(host: Host) -> tuple[str, ...]:
        number = hosts.index(host)
        place: tuple[str, ...] = (
            "--node-rank",
            str(number),
            "--master-addr",
            hosts[0].name,
            "--master-port",
            str(PORT),
        )
        if backend != "static":
            place = ("--rdzv-backend", backend, "--rdzv-endpoint", f"{cluster.hosts[0].name}:{PORT}", "--rdzv-id", "j")
        return (*launcher, *count, *place, *options, *each(number), script)

    return Job(folder, launchers.by_hand(cluster, command, hosts=hosts, cwd=folder, **more))


def write(folder: Path, program: str) -> str:
    """Write a program that ranks run; the same one as before may be running."""
    script = folder / "program.py"
    text = PRELUDE + program
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
    return str(script)


def assert_nothing_left(cluster: Cluster, timeout_s: float = DEADLINE_S) -> None:
    """No process of any job is left on any host. A launcher's own daemons take a moment."""
    give_up_at = time.monotonic() + timeout_s
    while strays := cluster.strays():
        assert time.monotonic() < give_up_at, f"left behind: {strays}"
        time.sleep(_LOOK_AGAIN_S)


def ranks_on(host: Host) -> list[int]:
    """Pids of the ranks that live on a host."""
    return host.pids(r" -u \S*program\.py")


def await_no_ranks(*hosts: Host, timeout_s: float = DEADLINE_S) -> None:
    """Wait until no rank lives on these hosts."""
    give_up_at = time.monotonic() + timeout_s
    while living := [host.name for host in hosts if ranks_on(host)]:
        assert time.monotonic() < give_up_at, f"ranks live on {living}"
        time.sleep(_LOOK_AGAIN_S)
