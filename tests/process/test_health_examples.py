"""The scripts of examples/health and the recipes of docs/health.md: what takes a node out of use, and what does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process.launching import REPOSITORY

SCRIPTS = ("slurm_health_check.sh", "slurm_prolog.sh")
PAGE = REPOSITORY / "docs" / "health.md"
REAL = f"exec env PYTHONPATH={REPOSITORY} {sys.executable} -m saferun.ctl"


class Node(NamedTuple):
    """What a script did there: its exit code and output, what scontrol, syslog and saferunctl were given."""

    code: int
    output: str
    drained: list[str]
    logged: list[str]
    asked: list[str]


class Site:
    """A directory of programs that stand for those of a node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = folder / "bin"
        self._programs.mkdir()
        self.put("logger", f'echo "$@" >> {folder}/logged')
        self.put("scontrol", f'[ "$1" != show ] || exec cat {folder}/state\necho "$@" >> {folder}/drained')
        self.state("IDLE")

    def put(self, name: str, text: str) -> Path:
        path = self._programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def state(self, state: str) -> None:
        (self._folder / "state").write_text(f"NodeName=node7 Arch=x86_64 State={state} ThreadsPerCore=1\n")

    def saferunctl(self, text: str) -> None:
        self.put("saferunctl", f'echo "$@" >> {self._folder}/asked\n{text}')

    def runs(self, name: str, storage: str = "") -> Node:
        """With the settings of a site, which edits them; of the variables that slurmd sets, one is needed."""
        text = (REPOSITORY / "examples" / "health" / name).read_text(encoding="utf-8")
        for old, new in (
            ("/opt/saferun/bin/saferunctl", str(self._programs / "saferunctl")),
            ("STORAGE:-}", f"STORAGE:-{storage}}}"),
            ("\nPATH=", f"\nPATH={self._programs}:"),
        ):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        script = self._folder / name
        script.write_text(text)
        environ = {"SLURMD_NODENAME": "node7"}
        done = subprocess.run(
            ["/bin/sh", script], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        return Node(done.returncode, done.stdout + done.stderr, *map(self._lines, ("drained", "logged", "asked")))

    def _lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_healthy_node_is_left_alone_without_a_word(site: Site, name: str) -> None:
    """No path is checked that the site has not named: where it does not exist, all nodes would be drained at once."""
    site.saferunctl("exit 0")
    assert site.runs(name) == (0, "", [], [], ["health --brief --timeout 20"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_path_of_the_site_is_checked(site: Site, name: str) -> None:
    site.saferunctl("exit 0")
    assert site.runs(name, "/scratch /home").asked == ["health --brief --timeout 20 --path /scratch --path /home"]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("text", "code"),
    [("", 127), ("echo 'ModuleNotFoundError: saferun' >&2; exit 1", 1), ("exit 2", 2), ("kill -KILL $$", 137)],
    ids=["missing", "broken", "usage", "killed"],
)
def test_a_node_that_cannot_be_checked_is_not_drained_and_that_is_logged(
    site: Site, name: str, text: str, code: int
) -> None:
    """A missing saferun must not drain the whole cluster; nor may a check that never runs pass for a good one."""
    if text:
        site.saferunctl(text)
    node = site.runs(name)
    assert (node.code, node.drained) == (0, [])
    (line,) = node.logged
    assert re.search(rf"-t saferun .*-- node7 is not checked: \S+/saferunctl health ended with exit code {code}$", line)
    assert line.partition(" -- ")[2] in node.output


def test_the_health_check_drains_a_node_with_a_fault_and_ends_with_0(site: Site) -> None:
    """Some releases of slurmd do not register a node before it does."""
    site.saferunctl("echo GPU 3 fell off the bus; exit 1")
    node = site.runs("slurm_health_check.sh")
    assert (node.code, node.output, node.logged) == (0, "GPU 3 fell off the bus\n", [])
    assert node.drained == ["update NodeName=node7 State=DRAIN Reason=saferun: GPU 3 fell off the bus"]


def test_the_health_check_keeps_the_reason_of_a_node_that_is_drained(site: Site) -> None:
    """An administrator has written it."""
    site.saferunctl("echo GPU 3 fell off the bus; exit 1")
    site.state("IDLE+DRAIN")
    assert (site.runs("slurm_health_check.sh").code, site.runs("slurm_health_check.sh").drained) == (0, [])


def test_a_node_that_slurm_does_not_drain_is_logged(site: Site) -> None:
    """Its scontrol may be in another directory, or its controller may not answer."""
    site.saferunctl("echo GPU 3 fell off the bus; exit 1")
    site.put("scontrol", "exit 127")
    node = site.runs("slurm_health_check.sh")
    assert node.code == 0
    assert node.logged == ["-t saferun -p daemon.warning -- node7 cannot be drained: GPU 3 fell off the bus"]


def test_the_prolog_ends_with_1_for_a_fault_of_the_node_and_logs_it(site: Site) -> None:
    """Slurm drains the node because of that, and gives no other reason than an error of the prolog."""
    site.saferunctl("echo GPU 3 fell off the bus; exit 1")
    node = site.runs("slurm_prolog.sh")
    assert (node.code, node.drained) == (1, [])
    assert node.logged == ["-t saferun -p daemon.warning -- node7 is not fit for a job: GPU 3 fell off the bus"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_are_in_accord_with_saferunctl(site: Site, tmp_path: Path, name: str) -> None:
    """It understands what they pass, and its reason is on stdout."""
    site.saferunctl(f'{REAL} "$@" --record none')
    node = site.runs(name, str(tmp_path / "nowhere"))
    assert f"{tmp_path}/nowhere does not exist" in node.output
    assert (node.code, len(node.drained)) == ((0, 1) if name == "slurm_health_check.sh" else (1, 0))


# --------------------------------------------------------------------------------------------------------------------
# The list of bad hosts


def recipes() -> str:
    """The commands that read the list."""
    (block,) = re.findall(r"```bash\n(srun [^\n]*--exclude-file.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(block).partition("\n")[2].replace("…", "hostname")


@pytest.mark.parametrize(
    ("content", "excluded", "tainted"),
    [
        (None, ("", ""), []),
        ("", ("", ""), []),
        ("node3\nnode5\n", ("--exclude={}/bad-hosts ", "--exclude=node3,node5 "), ["node3", "node5"]),
    ],
    ids=["missing", "empty", "two hosts"],
)
def test_the_recipes_work_with_and_without_a_bad_host(
    tmp_path: Path, content: str | None, excluded: tuple[str, str], tainted: list[str]
) -> None:
    """The leader makes the file with the first bad host; srun and sbatch refuse one that is missing or empty."""
    site = Site(tmp_path)
    for name in ("srun", "sbatch", "kubectl"):
        site.put(name, 'echo "${0##*/} $*"')
    if content is not None:
        (tmp_path / "bad-hosts").write_text(content)
    environ = {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-euc", recipes()], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    of_srun, of_sbatch = (text.format(tmp_path) for text in excluded)
    assert done.stdout.splitlines() == [
        f"srun {of_srun}hostname",
        f"sbatch {of_sbatch}job.sh",
        *(f"kubectl taint nodes {name} saferun/bad-host=true:NoSchedule" for name in tainted),
    ]
