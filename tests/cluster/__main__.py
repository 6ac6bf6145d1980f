"""``python -m tests.cluster up|down|shell|install``: a cluster for people, and what the tests' needs of the machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.cluster.fault_table import page
from tests.cluster.machines import plan
from tests.cluster.machines.cluster import Cluster, end_keeper, end_stale, keepers
from tests.cluster.machines.requirements import install, why_not


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description="A cluster of real hosts on one machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="set up a cluster that stays until `down`")
    up.add_argument("--hosts", type=int, default=4, choices=range(1, plan.MOST_HOSTS + 1), metavar="N")
    up.add_argument("--slurm", action="store_true", help="with Slurm")
    commands.add_parser("down", help="end it, and whatever dead tests have left behind")
    shell = commands.add_parser("shell", help="a shell, or a command, on a host")
    shell.add_argument("host", help="node1, node2, ...")
    shell.add_argument("words", nargs=argparse.REMAINDER, metavar="command")
    faults = commands.add_parser("faults", help="play the table of faults (docs/faults.md)")
    faults.add_argument("--keep", type=Path, metavar="DIR", help="keep what all consoles said")
    faults.add_argument("--write", action="store_true", help="write docs/faults.md, with the rows in DIR, too")
    faults.add_argument("names", nargs="*", metavar="NAME", help="rows, by regular expressions of their names")
    commands.add_parser("install", help="install the Debian packages that the tests need, where that is possible")
    arguments = parser.parse_args()
    match arguments.command:
        case "up":
            return set_up(arguments.hosts, slurm=arguments.slurm)
        case "down":
            return take_down()
        case "shell":
            return open_shell(arguments.host, arguments.words)
        case "faults":
            return page.main(arguments.names, arguments.keep, write=arguments.write)
        case _:
            if said := install():
                print(said, file=sys.stderr)
            return 0


def set_up(hosts: int, *, slurm: bool) -> int:
    """Set up a cluster that outlives this command."""
    if reason := why_not():
        print(f"no cluster here: {reason}", file=sys.stderr)
        return 1
    cluster = Cluster.start(hosts, slurm=slurm, visible=[os.getcwd()], owned=False)
    for host in cluster.hosts:
        print(f"{host.name}\t{host.management}\t{host.data}")
    print("a shell there: python -m tests.cluster shell node1")
    return 0


def take_down() -> int:
    """End clusters that nobody owns."""
    ended = end_stale()
    for pid, spec in keepers().items():
        if spec["owner"] is None:
            end_keeper(pid)
            ended.append(pid)
    end_stale()  # once more, for what the last of them had changed on the machine
    print(f"clusters ended: {len(ended)}")
    return 0


def open_shell(name: str, words: list[str]) -> int:
    """Become a command on a host of the cluster that was set up by ``up``, or else of one that tests use just now."""
    found = sorted(keepers().items(), key=lambda one: (one[1]["owner"] is not None, -one[0]))
    for pid, _ in found:
        for host in Cluster.attach(pid).hosts:
            if host.name == name:
                kinds = ("--mount", "--uts", "--ipc", "--net", "--pid")
                enter = ("nsenter", f"--target={host.pid}", *kinds, "--", "env", f"--chdir={plan.SHARED}")
                environ = {**host.environ, "TERM": os.environ.get("TERM", "dumb")}
                os.execvpe(enter[0], [*enter, *(words or ["bash", "-i"])], environ)
    print(f"there is no host {name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
