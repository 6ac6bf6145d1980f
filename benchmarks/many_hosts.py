"""Memory of a job of many hosts with one rank each, by process: saferun's, the ranks, and what makes the hosts.

python benchmarks/many_hosts.py [--quick] [--only 64]

The hosts are network namespaces of this machine with Slurm (tests/cluster), which takes root. Shared pages are divided
among the processes that share them (PSS), and most of saferun's code is shared by all hosts here: a host of a real
cluster has no other one to share with. ``--quick``: 8 hosts.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from launcher_cost import BenchmarkError, read_memory
from measure import REPOSITORY, Bar, Options, Table, parse_options, progress, say_machine

sys.path.insert(0, str(REPOSITORY))

from tests.cluster.jobs import DIE_WHEN_RELEASED, Way, assert_nothing_left, start
from tests.cluster.machines.cluster import Cluster
from tests.cluster.machines.host import command_line
from tests.cluster.machines.requirements import why_not

HOSTS = (64,)
QUICK_HOSTS = (8,)
# The process that shares the job secret exits after ten seconds without a request.
REST_S = 20.0
MOST_MIB = 4096
OTHERS = "the hosts themselves (sshd, slurmd, srun)"
RANKS = "ranks"
SUM, ALL = "saferun", "all"


def role_of(pid: int, own: set[int]) -> str:
    """Which row of the table a process of the cluster counts in."""
    name = Path("/proc", str(pid), "comm").read_text(encoding="utf-8", errors="replace").strip()
    line = command_line(pid)
    if pid in own:
        return OTHERS
    if name.startswith("sr-"):
        return f"{SUM}: {name}"
    if re.search(r" -u \S*program\.py", line):
        return RANKS
    if "coordinator" in line:
        return f"{SUM}: coordinator"
    return f"{SUM}: supervisor" if "-m saferun" in line and not line.startswith("srun") else OTHERS


def measure_memory(hosts: int) -> dict[str, float]:
    """MiB by role, with the ranks waiting; then one of them is killed, and the job has to end as it should."""
    with tempfile.TemporaryDirectory(prefix="many-hosts-") as name:
        folder = Path(name)
        with Cluster.start(hosts, slurm=True, visible=[folder]) as cluster:
            own = {pid for host in cluster.hosts for pid in host.pids()} | {cluster.keeper_pid}
            job = start(cluster, Way("srun"), folder, DIE_WHEN_RELEASED, nproc=1)
            job.hear("ready", hosts)
            time.sleep(REST_S)
            found: defaultdict[str, float] = defaultdict(float)
            for pid in {pid for host in cluster.hosts for pid in host.pids()} | own:
                try:
                    found[role_of(pid, own)] += read_memory(pid).pss_mib
                except (OSError, KeyError):
                    continue  # it has ended, or has no memory
            job.release(f"die.{hosts - 2}")
            codes = job.finish()
            if codes != [1]:
                raise BenchmarkError(job.story("another exit code"))
            assert_nothing_left(cluster)
    saferun = sum(size for role, size in found.items() if role.startswith(SUM))
    return {**dict(sorted(found.items())), SUM: saferun, ALL: sum(found.values())}


def main(options: Options) -> int:
    """Measures each number of hosts once and prints one table."""
    if reason := why_not():
        sys.stderr.write(f"no cluster here: {reason}\n")
        return 1
    say_machine("many_hosts", options)
    table = Table(())
    for hosts in QUICK_HOSTS if options.quick else map(int, options.only):
        progress(f"{hosts} hosts")
        for role, size in measure_memory(hosts).items():
            bar = [Bar(MOST_MIB)] if role == ALL and hosts == HOSTS[0] else []
            table.add(f"{hosts} hosts, {role}", "MiB", {SUM: [size]}, {SUM: bar})
    table.say()
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(str(__doc__), (SUM,), tuple(map(str, HOSTS)))))
