"""Every condition under which a check refuses a launch: the check says so, and without saferun the job breaks, too.

A refusal is a ``"fail"`` somewhere in ``saferun/preflight/checks`` or ``saferun/preflight``. Each of them has a row in
``REFUSALS``, and each row is proven: by what torchrun does there as well (bind, fork, gloo's own init).
"""

from __future__ import annotations

import ast
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from saferun.linux.cgroups import process_room
from saferun.preflight.checks import name_resolution
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.interfaces import check_interfaces
from saferun.preflight.checks.limits import check_processes
from saferun.preflight.checks.name_resolution import check_names
from saferun.preflight.checks.ports import check_ports
from saferun.preflight.results import CheckResult, HostInfo
from tests.process.gloo_ranks import Ranks
from tests.process.test_probing_networks import Host, in_namespaces
from tests.syntax import parsed
from tests.unit.preflight.preflight_samples import infos_of, judged, probes_of, where

REPOSITORY = Path(__file__).resolve().parents[2]
GLOO_SCRIPT = """
import torch.distributed as dist

def main():
    dist.init_process_group(backend="gloo")

if __name__ == "__main__":
    main()
"""
SOMEBODY = 54321
FEW_PROCESSES = 4


class World:
    """Two hosts on two networks, a script that is certain to use gloo, and ranks that do."""

    def __init__(self, ranks: Ranks, script: str, root: str, stack: ExitStack) -> None:
        self.ranks = ranks
        self.script = script
        self.root = root
        self._stack = stack
        self.hosts: list[Host] = []

    def make_hosts(self) -> None:
        """Two namespaces with a cable for each network between them."""
        self.hosts = [Host(0), Host(1)]
        for host in self.hosts:
            self._stack.callback(host.close)
        for i in range(2):
            peer = ("peer", "name", f"eth{i}", "netns", str(self.hosts[1].thread_id))
            self.hosts[0].do("ip", "link", "add", f"eth{i}", "type", "veth", *peer)
        for host in self.hosts:
            host.do("ip", "link", "set", "lo", "up")
            for nic in host.nics[:2]:
                host.do("ip", "addr", "add", nic.networks[0], "dev", nic.name)
                host.do("ip", "link", "set", nic.name, "up")

    def context(self, name: str = "", **changed: object) -> CheckContext:
        """A launch of two hosts whose ranks use gloo, over an interface of this name."""
        environ = {"GLOO_SOCKET_IFNAME": name} if name else {}
        base = CheckContext(nproc=2, environ=environ, script=self.script, python="python3", root=self.root)
        return base._replace(**changed)  # type: ignore[arg-type]

    def alone(self, name: str) -> list[str]:
        """What a job on one host fails with."""
        thread = self.hosts[0].thread_id if self.hosts else 0
        return self.ranks.errors((thread, {"GLOO_SOCKET_IFNAME": name}))

    def together(self, name: str) -> list[str]:
        """What a job of both hosts fails with; its store is reached over the other network."""
        environ = {"GLOO_SOCKET_IFNAME": name}
        ranks = [(host.thread_id, environ) for host in self.hosts]
        return self.ranks.errors(*ranks, master=self.hosts[0].nics[0].addresses[0])


# ------------------------------------------------------------------------------------------------------------ one host


def as_somebody(what: Callable[[], str], processes: int = 0) -> str:
    """What a function says in a process of a user without privileges, in a network of its own."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(SOMEBODY)
            if processes:
                resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
            os.setuid(SOMEBODY)
            said = what()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def too_few_processes(_: World) -> tuple[str, str]:
    """The fork limit: the fifth rank cannot be started."""
    process_room("/")  # its modules are imported by now: the other user may not read them

    def refuse() -> str:
        return check_processes(CheckContext(nproc=8)).verdict

    def launch() -> str:
        for _ in range(8):
            if os.fork() == 0:
                time.sleep(60)
        return ""

    refused = as_somebody(refuse, FEW_PROCESSES)
    return refused, as_somebody(lambda: _killed_after(launch), FEW_PROCESSES)


def _killed_after(launch: Callable[[], str]) -> str:
    os.setsid()
    try:
        return launch()
    except OSError as error:
        return error.strerror or "it failed"
    finally:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def a_port_in_use(_: World) -> tuple[str, str]:
    with socket.socket() as holder, socket.socket() as other:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        return check_ports(CheckContext(ports=(port,))).verdict, _error(lambda: other.bind(("", port)))


def a_port_that_is_forbidden(_: World) -> tuple[str, str]:
    with ExitStack() as stack:
        host = Host(7)  # where nobody has changed ip_unprivileged_port_start
        stack.callback(host.close)

        def forked(what: Callable[[], str]) -> str:
            return host.run(as_somebody, what)

        refused = forked(lambda: check_ports(CheckContext(ports=(80,))).verdict)
        return refused, forked(lambda: _error(lambda: socket.socket().bind(("", 80))))


def a_number_that_is_no_port(_: World) -> tuple[str, str]:
    with socket.socket() as one:
        return check_ports(CheckContext(ports=(70000,))).verdict, _error(lambda: one.bind(("", 70000)))


def _error(what: Callable[[], object]) -> str:
    try:
        what()
    except (OSError, OverflowError) as error:
        return str(error)
    return ""


def an_interface_that_is_asked_for_and_is_not_there(world: World) -> tuple[str, list[str]]:
    refused = check_interfaces(CheckContext(nics=("nosuch0",))).verdict
    return refused, world.alone("nosuch0")


def an_interface_that_gloo_does_not_find(world: World) -> tuple[str, list[str]]:
    return check_interfaces(world.context("nosuch0")).verdict, world.alone("nosuch0")


# -------------------------------------------------------------------------------------------------------- between hosts


def a_name_of_the_master_that_leads_to_this_host(world: World) -> tuple[str, str]:
    """Nobody listens there."""
    result = _names(world, own="10.9.0.2", master="127.0.1.1")

    def connect() -> str:
        return _error(lambda: socket.create_connection(("127.0.1.1", 29517), 5).close())

    return result.verdict, world.hosts[1].run(connect)


def an_own_name_that_leads_to_loopback(world: World) -> tuple[str, list[str]]:
    """Gloo listens on lo then, as if it had been told so."""
    return _names(world, own="127.0.1.1", master="10.9.0.1").verdict, world.together("lo")


def _names(world: World, *, own: str, master: str) -> CheckResult:
    context = world.context(spans_hosts=True, serves=False, master="node0", hosts=("node0", "node1"), node_rank=1)
    with pytest.MonkeyPatch.context() as patch:
        known = {"node1": own, "node0": master}
        patch.setattr(socket, "gethostname", lambda: "node1")
        patch.setattr(
            name_resolution,
            "resolve",
            lambda wanted, *_: tuple(name_resolution.Lookup(name, (known[name],)) for name in wanted),
        )
        return world.hosts[1].run(check_names, context)


def an_interface_that_is_down(world: World) -> tuple[str, list[str]]:
    world.hosts[1].do("ip", "link", "set", "eth1", "down")
    context = world.context("eth1", spans_hosts=True, master="10.9.0.1", serves=False)
    return world.hosts[1].run(check_interfaces, context).verdict, world.together("eth1")


def an_interface_that_leads_nowhere(world: World) -> tuple[str, list[str]]:
    context = world.context("lo", spans_hosts=True, master="10.9.0.1", serves=False)
    return world.hosts[1].run(check_interfaces, context).verdict, world.together("lo")


def loopback_of_a_host_among_several(world: World) -> tuple[str, list[str]]:
    infos = {
        host.number: HostInfo(f"node{host.number}", nics=host.nics[:2], gloo=("lo",), backend="gloo")
        for host in world.hosts
    }
    return judged(infos, []).verdict, world.together("lo")


def cut(world: World) -> list[str]:
    """What a job fails with whose network does not pass packets."""
    world.hosts[1].rule('iifname "eth1" drop')
    return world.together("eth1")


def a_pair_that_is_cut(world: World) -> tuple[str, list[str]]:
    return _links(2, source=0, target=1), cut(world)


def a_host_that_is_cut_off(world: World) -> tuple[str, list[str]]:
    return _links(4, touching=2), cut(world)


def a_network_that_passes_nothing(world: World) -> tuple[str, list[str]]:
    return _links(4), cut(world)


def two_halves_of_a_network(world: World) -> tuple[str, list[str]]:
    probes = [
        probe._replace(kind="timeout") if probe.nic == "eth1" and (probe.source < 8) != (probe.target < 8) else probe
        for probe in probes_of(16, full=True)
    ]
    return judged(infos_of(16, gloo="eth1"), probes).verdict, cut(world)


def an_interface_that_is_down_on_one_of_several_hosts(world: World) -> tuple[str, list[str]]:
    infos = infos_of(4, gloo="eth1")
    nics = tuple(nic._replace(is_up=nic.name != "eth1") for nic in infos[3].nics)
    infos[3] = infos[3]._replace(nics=nics, probed=("eth0",))
    probes = [probe for probe in probes_of(4) if not (probe.nic == "eth1" and 3 in {probe.source, probe.target})]
    world.hosts[1].do("ip", "link", "set", "eth1", "down")
    return judged(infos, probes).verdict, world.together("eth1")


def a_bridge_that_all_hosts_have(world: World) -> tuple[str, list[str]]:
    for host in world.hosts:
        host.do("ip", "link", "add", "docker0", "type", "bridge")
        host.do("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.do("ip", "link", "set", "docker0", "up")
    return judged(infos_of(4, gloo="docker0"), probes_of(4)).verdict, world.together("docker0")


def another_job_at_the_default_port(_: World) -> tuple[str, str]:
    """Its own first host cannot listen there, so that its others meet the job that does."""
    infos = {host: info._replace(launch=(("user", "alice"), ("script", "a.py"))) for host, info in infos_of(2).items()}
    infos[1] = infos[1]._replace(launch=(("user", "alice"), ("script", "b.py")), script="0" * 64)
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        first.listen()
        return judged(infos, probes_of(2)).verdict, _error(lambda: second.bind(("", first.getsockname()[1])))


def _links(hosts: int, *, source: int | None = None, target: int | None = None, touching: int | None = None) -> str:
    change = where(source=source, target=target, touching=touching, nic="eth1", kind="timeout")
    return judged(infos_of(hosts, gloo="eth1"), probes_of(hosts, ("eth0", "eth1"), change)).verdict


# ------------------------------------------------------------------------------------------------------------ the table


class Refusal(NamedTuple):
    """A place that refuses, and the conditions under which it does; ``hosts``: whether two hosts are needed for it."""

    location: str
    conditions: tuple[Callable[[World], tuple[str, str | list[str]]], ...]
    hosts: bool = True


REFUSALS = (
    Refusal("checks/limits.py _room_result", (too_few_processes,), hosts=False),
    Refusal(
        "checks/ports.py _none_free", (a_port_in_use, a_port_that_is_forbidden, a_number_that_is_no_port), hosts=False
    ),
    Refusal("checks/interfaces.py _judge_wanted", (an_interface_that_is_asked_for_and_is_not_there,), hosts=False),
    Refusal("checks/interfaces.py _verdict", (an_interface_that_gloo_does_not_find,), hosts=False),
    Refusal("checks/interfaces.py _verdict", (an_interface_that_is_down, an_interface_that_leads_nowhere)),
    Refusal("checks/name_resolution.py _judge_master", (a_name_of_the_master_that_leads_to_this_host,)),
    Refusal("checks/name_resolution.py _judge_own", (an_own_name_that_leads_to_loopback,)),
    Refusal("preflight/default_nics.py _may_listen_on_loopback", (loopback_of_a_host_among_several,)),
    Refusal(
        "preflight/faults.py _result",
        (a_pair_that_is_cut, a_host_that_is_cut_off, a_network_that_passes_nothing, two_halves_of_a_network),
    ),
    Refusal("preflight/judge.py _down_results", (an_interface_that_is_down_on_one_of_several_hosts,)),
    Refusal("preflight/judge.py _decoy_results", (a_bridge_that_all_hosts_have,)),
    Refusal("preflight/skew.py _other_jobs", (another_job_at_the_default_port,), hosts=False),
)


def _cases(*, hosts: bool) -> list[object]:
    return [
        pytest.param(condition, id=f"{row.location.split('/')[1]}-{condition.__name__}")
        for row in REFUSALS
        if row.hosts is hosts
        for condition in row.conditions
    ]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    one = Ranks()
    yield one
    one.close()


@pytest.fixture
def world(ranks: Ranks, tmp_path: Path) -> Iterator[World]:
    """A host that shows no accelerator, for whatever this machine may have."""
    (tmp_path / "dev").mkdir()
    script = tmp_path / "train.py"
    script.write_text(GLOO_SCRIPT)
    with ExitStack() as stack:
        yield World(ranks, str(script), f"{tmp_path}/", stack)


def _prove(condition: Callable[[World], tuple[str, str | list[str]]], world: World) -> None:
    refused, broken = condition(world)
    assert refused == "fail"
    assert all(broken) if isinstance(broken, list) else broken, "it works without saferun"


@in_namespaces
@pytest.mark.parametrize("condition", _cases(hosts=False))
def test_what_is_refused_on_one_host_cannot_work(
    condition: Callable[[World], tuple[str, str | list[str]]], world: World
) -> None:
    """A false refusal costs a job, a missed warning a look at the log."""
    _prove(condition, world)


@pytest.mark.slow
@in_namespaces
@pytest.mark.parametrize("condition", _cases(hosts=True))
def test_what_is_refused_between_hosts_cannot_work(
    condition: Callable[[World], tuple[str, str | list[str]]], world: World
) -> None:
    """The same, with ranks on two hosts that try to connect."""
    world.make_hosts()
    _prove(condition, world)


@pytest.mark.slow
@in_namespaces
def test_where_nothing_is_broken_the_ranks_of_these_tests_do_connect(world: World) -> None:
    """So that what fails above fails for its reason."""
    world.make_hosts()
    assert world.together("eth1") == ["", ""]


# What verdicts are, and how they are shown.
WORDS_OF_VERDICTS = {"results.py", "findings_text.py", "json_report.py", "answers.py"}


def test_every_refusal_has_its_proof() -> None:
    """A ``"fail"`` that makes a verdict, or a check's ``failure``, stands nowhere but in the places of the table."""
    folder = REPOSITORY / "saferun" / "preflight"
    found = Counter(location for path in (folder, folder / "checks") for location in _locations(path))
    assert sorted(found) == sorted({row.location for row in REFUSALS})
    several = {location: count for location, count in found.items() if count > 1}
    assert several == {"checks/ports.py _none_free": 3}, "each of several in one place needs a condition of its own"


def _locations(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.py")):
        if path.name in WORDS_OF_VERDICTS:
            continue
        tree = parsed(path)
        compared = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Compare) for inner in ast.walk(node)}
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    is_verdict = isinstance(node, ast.Constant) and node.value == "fail" and id(node) not in compared
                    if is_verdict or (isinstance(node, ast.Name) and node.id == "failure"):
                        yield f"{folder.name}/{path.name} {function.name}"
        outside = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        constants = [node for top in outside for node in ast.walk(top) if isinstance(node, ast.Constant)]
        assert not any(node.value == "fail" for node in constants), f"{path}: a refusal outside of a function"
