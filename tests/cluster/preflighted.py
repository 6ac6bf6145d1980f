"""Jobs that do nothing, on clusters with faults: what their checks say before any rank is started."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.cluster.faulted import FaultedJob, end_all

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster

EXIT_CHECKED = 2
# Ranks without torch that are done at once. As far as can be read, their way leads straight to gloo.
RAN = """
tell("ran")
getattr(os, "_exit")(0)
torch.distributed.init_process_group("gloo")
"""
ON_DATA_NETWORK = {"GLOO_SOCKET_IFNAME": "eth1"}


def no_fault(_: Cluster) -> None:
    """All is well but for what the environment says."""


class Scene(NamedTuple):
    """A fault, and what is to come of it.

    Attributes:
        says: what stands behind ``saferun: ``, or ``saferun: warning: `` where the job goes on, on the first host's
            console: a regular expression of the whole line. All hosts say it where it ends the job.
        hint: what is advised: a part of the line.
        do: makes the fault.
        fails: whether it stops the launch.
        environ: of saferun on all hosts.
        about: what every sentence on the first host's console is about, so that nobody else is blamed.
        hosts: how many there are.
        options: saferun's.
        own: what node3 itself says beside, where the job goes on: a regular expression of all of it.
    """

    says: str
    hint: str
    do: Callable[[Cluster], None] = no_fault
    fails: bool = True
    environ: Mapping[str, str] = ON_DATA_NETWORK
    about: str = r"node3: "
    hosts: int = 3
    options: Sequence[object] = ()
    own: str = ""


def play(make_cluster: MakeCluster, folder: Path, scenes: Mapping[str, Scene]) -> None:
    """Play scenes side by side, each on a cluster of its own, and look at what all consoles say."""
    jobs = {}
    for name, scene in scenes.items():
        cluster = make_cluster(scene.hosts)
        scene.do(cluster)
        jobs[name] = FaultedJob(cluster, folder / name.replace(" ", "_"), RAN, *scene.options, env=scene.environ)
    codes = end_all(jobs)
    for name, scene in scenes.items():
        check(jobs[name], scene, codes[name], name)
    for job in jobs.values():
        job.assert_nothing_left()


def check(job: FaultedJob, scene: Scene, codes: Mapping[str, int], name: str) -> None:
    """All hosts end as they should, and the right ones say the right thing."""
    assert set(codes.values()) == {EXIT_CHECKED if scene.fails else 0}, job.story(name)
    assert len(job.job.words) == (0 if scene.fails else scene.hosts), job.story(f"{name}: other ranks ran")
    leader, *others = job.hosts
    warning = "" if scene.fails else "warning: "
    for host in job.hosts if scene.fails else [leader]:
        assert_said(job, host.name, rf"saferun: {warning}{scene.says}", scene.hint, name)
    for line in re.findall(r"^saferun: (?:warning: )?(.*)", job.said(leader), re.MULTILINE):
        if re.match(r"saferun on \S+ \(pid \d+\) waits for I/O", line):
            # The disk of this machine has other tests to serve.
            continue
        assert re.match(scene.about, line), job.story(f"{name}: what is wrong is {scene.about!r}, and not {line!r}")
    if not scene.fails:
        for host in others:
            own = scene.own if host.name == "node3" else ""
            assert re.fullmatch(own, job.said(host).strip()), job.story(f"{name}: {host.name} says another thing")
    assert preflight(job)["verdict"] == ("fail" if scene.fails else "warn"), job.story(name)


def assert_said(job: FaultedJob, host: str, pattern: str, hint: str, name: str = "") -> None:
    """A host says it in a line, and the advice in the next one."""
    said = job.said(next(one for one in job.hosts if one.name == host))
    found = re.search(rf"^{pattern}\nhint: (.*)", said, re.MULTILINE)
    assert found, job.story(f"{name}: {host} does not say {pattern!r}")
    assert hint in found[found.re.groups], job.story(f"{name}: {host} does not advise {hint!r}")


def preflight(job: FaultedJob) -> dict[str, Any]:
    """What preflight.json holds."""
    found: dict[str, Any] = json.loads((job.run_dir / "preflight.json").read_text())
    return found
