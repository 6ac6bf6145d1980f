"""What captures leave in files and on terminals holds no secret, and stays what it is: JSON, stacks, tables."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures import core_reading, host_captures
from saferun.captures.core_reading import CoreReading
from saferun.captures.cores import _Find, _moved, _write
from saferun.captures.scene import Process, Scene
from saferun.captures.wire import CaptureReader, CaptureRequest, CaptureTarget, CoreRequest, DeadProcess, encode
from saferun.ctl import core as ctl_core
from saferun.ctl import live_stacks as ctl_stacks
from saferun.ctl.answer import answer_json
from saferun.errors import UsageError
from saferun.evidence.job_evidence import (
    Capture,
    CoreDump,
    Frame,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    ThreadStack,
)
from saferun.linux.core_files import CoreFile
from saferun.linux.core_notes import CoreNotes
from saferun.text import json_redaction
from saferun.text.json_redaction import TooManyTextsError, redacted_json_text
from saferun.text.redaction import REDACTED, redacted_json

S = "S3CR3TVALUE"
LOOK = ProcessSnapshot(3, 1, 0, True, "python", "", "S", "", "", 1, 0, False, 0, "", 0.0)
ME = Process(3, os.getpid(), True, "", LOOK)
THREAD = ThreadStack("main", 9, True, True, False, (Frame("load", f"/data/key={S}/train.py", 12),))
NOTES = CoreNotes(9, 1, 1, "python", f"python t.py --token {S}", 11, 0, "", (9,), "/usr/bin/python", 100, 100)


def trace(**extra: Any) -> str:
    """A Flight Recorder's answer, as torch writes it."""
    frames = [{"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/key.py", "line": 2000}]
    entry = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "frames": frames, "retired": False}
    return json.dumps({"version": "2.9", "entries": [entry, entry], "pg_status": {"0": {"a": 1.5e300}}} | extra)


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "json_text",
    [
        trace(),
        ' {"a" : [1, -2.50, 1e5, true, null, "", "\\u00e9\\n", "\\/"] ,"key":"layer.0", "token": 5}\n',
        '["max_tokens", {"tokenizer": "gpt2", "b": {}, "secret": null}, "token: indent"]',
    ],
)
def test_json_without_secrets_stays_to_the_letter(json_text: str) -> None:
    """Whoever compares two of them, or has a tool read them, finds what torch wrote."""
    assert redacted_json_text(json_text) == json_text


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"api_key": S}, {"api_key": REDACTED}),
        ({"desc": f"https://me:{S}@h/x"}, {"desc": f"https://me:{REDACTED}@h/x"}),
        ({"desc": f'a "quoted" token="{S}"\n'}, {"desc": f'a "quoted" token="{REDACTED}"\n'}),
        ({f"token={S}": 1}, {f"token={REDACTED}": 1}),
        ({"passwords": {"a": [S, 1]}}, {"passwords": {"a": [REDACTED, 1]}}),
        ({"api_key": "", "password": None, "key": "-----BEGIN PRIVATE KEY-----"}, {"key": REDACTED}),
    ],
)
def test_json_without_its_secrets_is_json(extra: dict[str, Any], shown: dict[str, Any]) -> None:
    """The rest is as it was."""
    redacted = redacted_json_text(trace(**extra))
    assert S not in redacted
    assert json.loads(redacted) == json.loads(trace(**(extra if "api_key" in extra and len(extra) > 1 else {}))) | shown


def test_escaped_characters_hide_no_secret() -> None:
    """JSON may write any of its characters by its number."""
    redacted = redacted_json_text(f'{{"a": "api\\u005fkey\\u003d{S}", "\\u0061pi_key": "{S}"}}')
    assert json.loads(redacted) == {"a": f"api_key={REDACTED}", "api_key": REDACTED}


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from([S, f"token={S}", "token"])
KEYS = st.text(max_size=6) | st.sampled_from(["password", "api_key", "a"])


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4)))
def test_json_as_a_text_is_redacted_as_its_values_are(value: Any) -> None:
    """Two ways to the same."""
    for ascii_only in (True, False):
        shown = redacted_json_text(json.dumps(value, ensure_ascii=ascii_only))
        assert json.loads(shown) == redacted_json(value)


def test_texts_that_differ_without_end_are_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB of them would take a minute, which no capture has."""
    monkeypatch.setattr(json_redaction, "_MOST_PIECES", 100)
    redacted_json_text(json.dumps(["the same"] * 1000))
    with pytest.raises(TooManyTextsError):
        redacted_json_text(json.dumps([f"text {number}" for number in range(101)]))


def test_a_lot_of_different_text_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few long ones take as long as many short ones."""
    monkeypatch.setattr(json_redaction, "_MOST_CHARACTERS", 1000)
    redacted_json_text(json.dumps(["a" * 900] * 5))
    with pytest.raises(TooManyTextsError):
        redacted_json_text(json.dumps(["a" * 900, "b" * 900]))


# --------------------------------------------------------------------------------------------------------------- files


def scene_of(directory: Path) -> tuple[Scene, CaptureReader]:
    """A scene that is this process, and what has been told of it."""
    reader = CaptureReader()

    def emit(kind: str, value: Any) -> None:
        reader.feed(encode(kind, value))

    return Scene(CaptureRequest((), str(directory)), (ME,), time.monotonic() + 60, emit), reader


def test_a_tool_s_json_is_written_without_secrets(tmp_path: Path) -> None:
    """Names of files and functions are what somebody has called them."""
    scene, _ = scene_of(tmp_path)
    path = scene.write("py_spy", json.dumps([{"name": f"f(token={S})", "line": 3}]).encode(), "json", ME)
    assert json.loads(Path(path).read_text(encoding="utf-8")) == [{"name": f"f(token={REDACTED})", "line": 3}]


def test_json_that_cannot_be_read_for_secrets_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says so, and is JSON."""
    monkeypatch.setattr(json_redaction, "_MOST_PIECES", 1)
    scene, reader = scene_of(tmp_path)
    path = scene.write("py_spy", f'["{S}", "token={S}"]'.encode(), "json", ME)
    assert list(json.loads(Path(path).read_text(encoding="utf-8"))) == ["missing"]
    assert reader.unwritten == ()


def test_a_flight_recorder_is_told_before_its_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may take what is left of the time; what the verdict needs must not be lost with it."""
    scene, reader = scene_of(tmp_path)
    told_before: list[tuple[RankCollectives, ...]] = []
    write = Scene.write

    def writing(*args: Any) -> str:
        told_before.append(reader.capture.collectives)
        return write(*args)

    monkeypatch.setattr(Scene, "write", writing)
    found = RankCollectives(3, ())
    raw = trace(api_key=S).encode()
    host_captures._record(scene, CaptureTarget(3, ME.pid, "x"), ME, lambda _target, _deadline: (found, raw))
    assert told_before == [(found,)]
    (note,) = reader.capture.notes
    assert json.loads(Path(note.path).read_text(encoding="utf-8")) == json.loads(trace(api_key=REDACTED))


def test_what_gdb_says_of_a_core_is_written_without_secrets(tmp_path: Path) -> None:
    """It prints arguments, and the command that the core is of."""
    request = CoreRequest((DeadProcess(3, 9, 11),), str(tmp_path))
    look = CoreDump(3, 9, 11, "/core", 100, kept=True, tool="gdb", threads=(THREAD,))
    reading = CoreReading((THREAD,), "gdb", "", f"$ gdb\nCore was generated by `python t.py --token {S}'.\n")
    find = _Find(3, CoreFile("/core", NOTES, (0, 0)), -1, NOTES, is_rank=True, executable="")
    assert _write(request, find, look, reading, time.monotonic() + 5) == ""
    [path] = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8")
    assert S not in text
    assert "/data/key=<redacted>/train.py:12" in text
    assert "Core was generated by `python t.py --token <redacted>" in text


def test_a_core_that_cannot_be_moved_says_why(tmp_path: Path) -> None:
    """A directory that cannot be made is no file system that does not answer."""
    (tmp_path / "file").write_bytes(b"")
    core = CoreFile(str(tmp_path / "core"), NOTES, (0, 0))
    path, failure = _moved(core, str(tmp_path / "file" / "captures" / "core"))
    assert path == core.path
    assert failure == "it stays where it is: Not a directory"


# ----------------------------------------------------------------------------------------------------------- terminals


def test_a_core_is_shown_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Command lines are in cores, and gdb prints them."""
    output = f"$ gdb\nCore was generated by `python t.py --token {S}'.\n#0 run (password={S})\n"
    (tmp_path / "core").write_bytes(b"")
    monkeypatch.setattr(ctl_core, "read_core_notes", lambda _fd: NOTES)
    monkeypatch.setattr(
        core_reading, "read_cores", lambda *_args, **_named: [CoreReading((THREAD,), "gdb", "", output)]
    )
    assert ctl_core.run(argparse.Namespace(file=str(tmp_path / "core"), exe=None, gdb=True, json=False)) == 0
    shown = capsys.readouterr().out
    assert S not in shown
    assert "/data/key=<redacted>/train.py:12" in shown
    assert re.search(r"#0 run \(password=<redacted>", shown)


def test_why_there_are_no_stacks_is_told_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools quote command lines when they fail, too."""
    (tmp_path / "core").write_bytes(b"")
    monkeypatch.setattr(ctl_core, "read_core_notes", lambda _fd: NOTES)
    failed = CoreReading(failure=f"gdb: cannot run with --token {S}")
    monkeypatch.setattr(core_reading, "read_cores", lambda *_args, **_named: [failed])
    with pytest.raises(UsageError, match="--token <redacted>") as error:
        ctl_core.run(argparse.Namespace(file=str(tmp_path / "core"), exe=None, gdb=True, json=False))
    assert S not in str(error.value)
    capture = Capture(stacks=(StackDump(0, 9, True, "python", "", (), f"denied: token={S}"),))
    here = ctl_stacks.AskedProcesses("here", (CaptureTarget(0, os.getpid(), ""),))
    monkeypatch.setattr(ctl_stacks, "find_asked_processes", lambda *_args: here)
    monkeypatch.setattr(ctl_stacks, "_capture_asked", lambda *_args, **_named: (capture, ""))
    with pytest.raises(UsageError, match="denied: token=<redacted>"):
        ctl_stacks.run(argparse.Namespace(target=str(os.getpid()), native=False, json=False))


def test_json_on_a_terminal_has_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    """And is JSON."""
    answer_json({"target": f'a "token={S}"', "ranks": [1]})
    assert json.loads(capsys.readouterr().out) == {"target": f'a "token={REDACTED}"', "ranks": [1]}
