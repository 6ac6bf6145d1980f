"""The prefixes of ``saferunctl logs`` are those of the run's own console, and nothing in its files can do harm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from saferun import ctl
from saferun.cli.main import read_config
from saferun.ctl.log_prefixes import Prefixes
from saferun.ctl.log_reading import LogName
from tests.unit.described_runs import described_run, make_run

if TYPE_CHECKING:
    from pathlib import Path

NAME = "20260101-120000-abcdef"
DEFAULT = b"[node1:5] "


def prefix_of(folder: Path, prefix: object, *, wanted: str | None = None, rank: int = 5, attempt: int = 0) -> bytes:
    """Of a rank of the first host, whose run.json says this."""
    path = make_run(folder / "saferun-runs", NAME, prefix=prefix)
    placement = {"ranks": [{"local_rank": 0, "rank": 4}, {"local_rank": 1, "rank": 5}]}
    event = {"event": "HostsJoined", "attempt": 0, "placement": placement}
    (path / "node1" / "events.jsonl").write_text(json.dumps(event) + "\n{}\nno JSON\n")
    return Prefixes(str(path), wanted).of(LogName("node1", attempt, rank, "stdout"))


def said(template: object, **changes: object) -> dict[str, object]:
    """What run.json says of the prefix."""
    return {"template": template, "is_legacy": False, "role": "trainer", "hostname": "node1.example", **changes}


@pytest.mark.parametrize(
    ("template", "is_legacy", "shown"),
    [
        ("[{host}:{rank}] ", False, b"[node1:5] "),
        ("{role}{local_rank}@{host_digits}> ", False, b"trainer1@1> "),
        ("{rank:>4}|", False, b"   5|"),
        ("{{{rank:02d}}}\t", False, b"{05}\t"),
        ("", False, b""),
        (None, False, b""),
        ("[${role_name} ${rank} ${local_rank} ${hostname}]:", True, b"[trainer 5 1 node1.example]:"),
        ("${unknown} ", True, b"${unknown} "),
    ],
)
def test_the_prefix_is_that_of_the_console(tmp_path: Path, template: object, is_legacy: bool, shown: bytes) -> None:
    assert prefix_of(tmp_path, said(template, is_legacy=is_legacy)) == shown


@pytest.mark.parametrize(
    "prefix",
    [
        None,
        "x",
        {},
        said(5),
        said("{unknown}"),
        said("{"),
        said("{host:d}"),
        said("{rank:>99999999999}"),
        said("{rank:{rank}}"),
        said("{host.__class__}"),
        said("{rank!r}"),
        said("x" * 1001),
        said("{rank}", role=5),
    ],
    ids=str,
)
def test_what_cannot_be_filled_in_leaves_the_default_prefix(tmp_path: Path, prefix: object) -> None:
    """Somebody else may have written it, or an earlier version."""
    assert prefix_of(tmp_path, prefix) == DEFAULT


def test_control_characters_are_shown_and_not_sent(tmp_path: Path) -> None:
    assert prefix_of(tmp_path, said("\x1b[2J{rank}\n")) == b"\\x1b[2J5\\n"


def test_a_local_rank_that_is_not_known_leaves_the_default_prefix(tmp_path: Path) -> None:
    assert prefix_of(tmp_path, said("{local_rank} "), attempt=1) == DEFAULT


@pytest.mark.parametrize(("wanted", "shown"), [("none", b""), ("{role}:{rank} ", b"trainer:5 ")])
def test_another_prefix_may_be_asked_for(tmp_path: Path, wanted: str, shown: bytes) -> None:
    assert prefix_of(tmp_path, said("[{host}] "), wanted=wanted) == shown


def test_a_prefix_that_cannot_be_filled_in_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "saferun-runs", NAME)
    assert ctl.main(["logs", NAME, "--prefix", "{node}"]) == 2
    assert "--prefix '{node}' cannot be filled in" in capfd.readouterr().err


def test_each_host_has_its_own(tmp_path: Path) -> None:
    """Hosts may be started with different options; one that says nothing has the leader's."""
    path = make_run(tmp_path, NAME, prefix=said("A{rank} "))
    for host, template in (("node2", "B{rank} "), ("node3", None)):
        (path / host).mkdir()
        (path / host / "run.json").write_text(json.dumps({"prefix": said(template)}))
    (path / "node4").mkdir()
    prefixes = Prefixes(str(path), None)
    names = [LogName(f"node{host}", 0, host, "stdout") for host in (1, 2, 3, 4)]
    assert [prefixes.of(name) for name in names] == [b"A1 ", b"B2 ", b"", b"A4 "]
    assert prefixes.is_final


def test_a_run_that_is_described_later_gets_its_prefix_then(tmp_path: Path) -> None:
    """The ranks write before saferun describes the run."""
    path = make_run(tmp_path, NAME, prefix=said("A{rank} "))
    content = (path / "run.json").read_bytes()
    (path / "run.json").unlink()
    prefixes, name = Prefixes(str(path), None), LogName("node1", 0, 5, "stdout")
    assert prefixes.of(name) == DEFAULT
    assert not prefixes.is_final
    (path / "run.json").write_bytes(content)
    assert prefixes.of(name) == b"A5 "


@pytest.mark.parametrize(
    ("arguments", "environ", "template", "is_legacy"),
    [
        ((), {}, "[{host}:{rank}] ", False),
        (("--prefix", "{rank}: "), {}, "{rank}: ", False),
        (("--prefix", "none"), {}, None, True),
        (("--log-line-prefix-template", "${rank} "), {}, "${rank} ", True),
        ((), {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank} "}, "${rank} ", True),
    ],
)
def test_run_json_says_what_the_prefix_is_made_of(
    arguments: tuple[str, ...], environ: dict[str, str], template: str | None, is_legacy: bool
) -> None:
    config = read_config([*arguments, "--role", "trainer", "--no-python", "true"], environ)
    assert described_run(config)["prefix"] == said(template, is_legacy=is_legacy)
