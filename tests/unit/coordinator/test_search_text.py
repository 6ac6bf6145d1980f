"""What is said of a search for the master's store: one sentence a cause, and no advice about what was not done."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from saferun.coordinator.dial import REFUSED, SILENT, UNKNOWN_NAME, UNREACHABLE
from saferun.coordinator.host_probe import HostProbe, ProbedHost
from saferun.coordinator.search_text import FOREIGN, NO_STORE, PortResult, addresses_in, search_hint, search_text
from saferun.text.master_port import CHOSEN, DEFAULT, ENDPOINT, GIVEN, NEEDLESS, SCHEDULER, another_port_hint

PORTS = (31023, 25017, 20311, 30000)
UP = ProbedHost((22, 29501), is_up=True, addresses=("10.77.0.1",))
DOWN = ProbedHost((22, 29501), is_up=False, addresses=("10.77.0.99",))
SILENT_TEXT = "node1 (10.77.0.1) does not answer node3 on any of the 4 ports tried (20311 to 31023)"
REFUSED_TEXT = "node1 (10.77.0.1) refuses connections from node3 on"
NO_STORE_TEXT = "something listens on node1:20311 and does not answer as a store"
UP_TEXT = "node1 (10.77.0.1) answers node3, but not on any of the 4 ports tried"
WORDS = {
    UNKNOWN_NAME: "the name node1 cannot be resolved on node3",
    REFUSED: "node1:{port} (10.77.0.1) refuses connections from node3",
    SILENT: "node1:{port} (10.77.0.1) does not answer node3",
    UNREACHABLE: "node1:{port} (10.77.0.99) cannot be reached from node3 (no route to host)",
    NO_STORE: "something listens on node1:{port} and does not answer as a store",
    FOREIGN: "node1:{port} serves a store that is not saferun's",
}


def result(kind: str, port: int) -> PortResult:
    return PortResult(kind, WORDS[kind].format(port=port))


def said(kinds: Sequence[str], probed: ProbedHost | None = None, ports: Sequence[int] = PORTS) -> str:
    found = {port: result(kind, port) for port, kind in zip(ports, kinds, strict=False)}
    return search_text("node1", ports, found, "node3", probed)


def advised(kind: str, probed: ProbedHost | None = None, source: str = GIVEN, hosts_file: str = "") -> str:
    found = {29500: result(kind, 29500)}
    in_file = addresses_in(hosts_file, "node1")
    return search_hint("node1", (29500,), found, "node3", probed, source=source, hosts_file=in_file)


@pytest.mark.parametrize(
    ("kinds", "probed", "text"),
    [
        ([UNKNOWN_NAME] * 4, None, "the name node1 cannot be resolved on node3"),
        (
            [SILENT] * 4,
            None,
            SILENT_TEXT,
        ),
        (
            [SILENT] * 4,
            UP,
            f"{UP_TEXT} (20311 to 31023): a firewall drops connections",
        ),
        (
            [SILENT] * 4,
            DOWN,
            f"{SILENT_TEXT}, nor do its ports 22 and 29501",
        ),
        (
            [REFUSED] * 4,
            None,
            f"{REFUSED_TEXT} all of the 4 ports tried (20311 to 31023)",
        ),
        ([UNREACHABLE] * 4, DOWN, "node1 (10.77.0.99) cannot be reached from node3 (no route to host)"),
        (
            [REFUSED, REFUSED, NO_STORE, REFUSED],
            None,
            f"{REFUSED_TEXT} 3 of the 4 ports tried (31023, 25017, 30000); {NO_STORE_TEXT}",
        ),
    ],
)
def test_one_sentence_a_cause_and_not_one_a_port(kinds: Sequence[str], probed: ProbedHost | None, text: str) -> None:
    """A job that was given no port has eight of them."""
    assert said(kinds, probed) == text


def test_of_one_port_it_is_said_which() -> None:
    """And whether the host is up, which decides who is to look where."""
    assert said([REFUSED], ports=(29500,)) == "node1:29500 (10.77.0.1) refuses connections from node3"
    assert said([SILENT], ports=(29500,)) == "node1:29500 (10.77.0.1) does not answer node3"
    assert (
        said([SILENT], UP, ports=(29500,))
        == "node1 (10.77.0.1) answers node3, but its port 29500 does not: a firewall drops connections"
    )
    down = "node1:29500 (10.77.0.1) does not answer node3, nor do its ports 22 and 29501"
    assert said([SILENT], DOWN, ports=(29500,)) == down
    assert said([], ports=(29500,)) == ""


def test_a_firewall_is_advised_where_the_host_is_up() -> None:
    """A port without a listener would refuse at once."""
    hint = "let TCP port 29500 through, on node1 and on the way, or pass another --master-port to all hosts"
    assert advised(SILENT, UP) == hint
    assert "--master-port" not in advised(SILENT, DOWN)
    assert advised(REFUSED).startswith("node1 is up: see whether saferun runs on node1 with this --master-port, and")


@pytest.mark.parametrize(
    ("hosts_file", "origin"), [("10.77.0.99  node1 # old\n", " by its /etc/hosts"), ("10.77.0.1 node1\n", "")]
)
def test_a_wrong_address_is_named_with_where_it_is_from(hosts_file: str, origin: str) -> None:
    """The name in the message alone hides that only this host has another address for it."""
    hint = advised(UNREACHABLE, DOWN, hosts_file=hosts_file)
    assert hint.startswith(f"node3 takes node1 for 10.77.0.99{origin}: see whether that is right; else see whether")


@pytest.mark.parametrize("source", [DEFAULT, SCHEDULER, CHOSEN, ENDPOINT])
@pytest.mark.parametrize("kind", [REFUSED, SILENT, NO_STORE, FOREIGN])
def test_no_advice_about_an_option_that_was_not_given(source: str, kind: str) -> None:
    """People would look for what is not there."""
    for probed in (None, UP, DOWN):
        hint = advised(kind, probed, source=source)
        assert "this --master-port" not in hint
        assert "another --master-port" not in hint
        assert "free port is chosen" not in hint


def test_the_default_port_is_said_to_be_one() -> None:
    """The user has not named 29500."""
    text = "the default port 29500, because no --master-port was given"
    assert text in advised(REFUSED, source=DEFAULT)
    assert text in another_port_hint(DEFAULT, 29500)
    assert text not in another_port_hint(GIVEN, 29500)
    assert another_port_hint(NEEDLESS, 1) == "pass another --master-port (without one, a free port is chosen)"


def test_a_host_is_probed_until_it_answers() -> None:
    """At ports that are likely to answer, in a thread of its own; a host that is up stays so."""
    probes: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
    answers = [False, True]
    over = threading.Semaphore(0)

    def probe(addresses: Sequence[str], ports: Sequence[int]) -> bool:
        probes.append((tuple(addresses), tuple(ports)))
        over.release()
        return answers[len(probes) - 1]

    host = HostProbe("127.0.0.1", [29500, 29400], probe)
    assert host.result(0.0) is None
    assert over.acquire(timeout=60)
    found = None
    while found is None:
        found = host.result(0.0)
    assert found == ProbedHost((22, 29501), is_up=False, addresses=("127.0.0.1",))
    assert len(probes) == 1  # not again so soon
    while not (found is not None and found.is_up):
        found = host.result(float("inf"))
    assert found.is_up
    assert len(probes) == 2
    assert host.result(float("inf")) == found
    assert len(probes) == 2
    assert probes[0] == (("127.0.0.1",), (22, 29501))
