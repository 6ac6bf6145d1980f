"""Connections to other hosts with unacknowledged data, by rank."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import links
from saferun.captures.all_captures import CAPTURES
from saferun.captures.scene import Process, Scene
from saferun.captures.wire import CaptureReader, CaptureRequest, encode
from saferun.evidence.job_evidence import ProcessSnapshot, StuckLink
from saferun.linux.sockets import TcpState

LOOK = ProcessSnapshot(5, 1, 0, True, "python", "", "S", "", "", 1, 0, False, 0, "", 0.0)
ME = Process(5, os.getpid(), True, "", LOOK)
STUCK = TcpState("10.0.0.1:40000", "10.0.0.3:50123", "ESTABLISHED", 4096, 8)


def scene_of(directory: Path) -> tuple[Scene, CaptureReader]:
    """A scene that is this process, and what has been told of it."""
    reader = CaptureReader()

    def emit(kind: str, value: Any) -> None:
        reader.feed(encode(kind, value))

    return Scene(CaptureRequest((), str(directory)), (ME,), time.monotonic() + 60, emit), reader


def test_a_stuck_connection_is_told_with_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which process has it open says whose it is; two processes may share one."""
    with socket.socket() as mine, socket.socket() as other:
        inode = os.fstat(mine.fileno()).st_ino
        table = {inode: STUCK, inode + 10**9: STUCK._replace(remote="10.0.0.4:1")}
        table[os.fstat(other.fileno()).st_ino] = TcpState("10.0.0.1:5", "10.0.0.1:6", "ESTABLISHED", 1, 9)
        monkeypatch.setattr(links, "sending_again", lambda _pid, _least: table)
        scene, reader = scene_of(tmp_path)
        links.capture_links(scene)
    assert reader.capture.links == (StuckLink(5, *STUCK),)
    (note,) = reader.capture.notes
    assert (note.capture, note.rank, note.failure) == ("links", -1, "")
    assert "10.0.0.3:50123" in Path(note.path).read_text(encoding="utf-8")


def test_where_nothing_is_stuck_nothing_is_told(tmp_path: Path) -> None:
    """A job on one host has nothing to do with this."""
    scene, reader = scene_of(tmp_path)
    links.capture_links(scene)
    assert reader.capture.links == ()
    assert reader.capture.notes == ()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_gone_has_no_connections() -> None:
    """Ranks die while they are looked at."""
    assert links.stuck_links([ME._replace(pid=1 << 30)]) == []


def test_the_capture_is_in_the_list() -> None:
    """It is run with the others."""
    assert links.capture_links in {step.run for step in CAPTURES}
