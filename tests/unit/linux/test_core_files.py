from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.linux import core_files
from saferun.linux.core_files import (
    CoreFile,
    core_directories,
    delete_core,
    find_cores,
    find_cores_below,
    move_core,
    name_pattern,
    names_process,
    why_none,
)
from saferun.linux.core_limits import why_no_cores
from saferun.linux.core_notes import CoreError, is_core, read_core_notes, was_started_with
from saferun.linux.core_pattern import CorePattern, room_for_core

PAGE_FAULT_AT, MAPERR = 0x10, 1
UNLIMITED = (-1, -1)


def _note(kind: int, content: bytes) -> bytes:
    return struct.pack("<III", 5, len(content), kind) + b"CORE\0\0\0\0" + content + bytes(-len(content) % 4)


def make_core(
    pid: int,
    *,
    tid: int = 0,
    ppid: int = 1,
    sid: int = 0,
    signum: int = 11,
    code: int = MAPERR,
    detail: bytes = struct.pack("<Q", PAGE_FAULT_AT),
    threads: int = 1,
    memory: bytes = bytes(4096),
    environ: Sequence[str] = (),
) -> bytes:
    """A core as the kernel writes it, small: notes, and one stretch of memory. Source: elf(5)."""
    executable_name_at = 0
    if environ:
        memory += b"python\0t.py\0" + b"".join(entry.encode() + b"\0" for entry in environ)
        executable_name_at = 0x7000 + len(memory)
        memory += b"/usr/bin/python3\0" + bytes(8)
    prstatus = struct.pack("<3ih2xQQ4i", signum, 0, 0, signum, 0, 0, tid or pid, ppid, pid, sid or pid) + bytes(288)
    psinfo = struct.pack(
        "<4c4xQIIiiii16s80s", *[b"R"] * 4, 0, 0, 0, pid, ppid, pid, sid or pid, b"python", b"python t.py "
    )
    siginfo = struct.pack("<3i4x", signum, 0, code) + detail
    executable = b"/usr/bin/python3"
    file = struct.pack("<QQQQQ", 1, 4096, 0x1000, 0x2000, 0) + executable + b"\0"
    notes = _note(1, prstatus) + _note(3, psinfo) + _note(0x53494749, siginfo.ljust(128, b"\0"))
    notes += _note(6, struct.pack("<6Q", 3, 0x1040, 31, executable_name_at, 0, 0)) + _note(0x46494C45, file)
    for index in range(1, threads):
        notes += _note(1, struct.pack("<3ih2xQQ4i", 0, 0, 0, 0, 0, 0, pid + index, ppid, pid, sid or pid) + bytes(288))
    notes_at = 64 + 2 * 56
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 4, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    )
    segments = struct.pack("<IIQQQQQQ", 4, 0, notes_at, 0, 0, len(notes), 0, 0)
    segments += struct.pack("<IIQQQQQQ", 1, 6, notes_at + len(notes), 0x7000, 0, len(memory), len(memory), 4096)
    return header + segments + notes + memory


# --------------------------------------------------------------------------------------------------------- its notes


def test_the_notes_tell_whose_core_it_is_and_what_it_died_of(tmp_path: Path) -> None:
    """The name of the file tells nothing."""
    path = tmp_path / "anything"
    path.write_bytes(make_core(71, tid=73, ppid=5, sid=70, threads=3))
    notes = read_core_notes(str(path))
    assert (notes.pid, notes.ppid, notes.sid, notes.signum, notes.address) == (71, 5, 70, 11, "0x10")
    assert (notes.name, notes.command, notes.executable) == ("python", "python t.py", "/usr/bin/python3")
    assert notes.tids == (73, 72, 73)
    assert not notes.is_cut_off
    assert is_core(str(path))


def test_a_signal_that_was_sent_has_a_sender_and_no_address(tmp_path: Path) -> None:
    """SI_USER, SI_QUEUE and SI_TKILL; what the process did to itself is nobody's doing."""
    path = tmp_path / "core"
    for code in (0, -1, -6):
        path.write_bytes(make_core(71, code=code, detail=struct.pack("<ii", 4711, 1000)))
        assert (read_core_notes(str(path)).sender_pid, read_core_notes(str(path)).address) == (4711, "")
        path.write_bytes(make_core(71, code=code, detail=struct.pack("<ii", 71, 1000)))
        assert read_core_notes(str(path)).sender_pid == 0


def test_a_fault_without_an_address_has_none(tmp_path: Path) -> None:
    """A general protection fault: the processor does not say where, and the kernel says 0."""
    path = tmp_path / "core"
    path.write_bytes(make_core(71, code=0x80, detail=bytes(8)))
    assert read_core_notes(str(path)).address == ""


def test_a_core_that_was_cut_off_says_so(tmp_path: Path) -> None:
    """No tool reads it, and the reason is the disk or a limit."""
    path = tmp_path / "core"
    path.write_bytes(make_core(71)[:-1])
    assert read_core_notes(str(path)).is_cut_off


@pytest.mark.parametrize(
    ("entry", "has"),
    [
        ("SAFERUN_RUN_ID=ab", True),
        ("HOME=/root", True),
        ("TERM=xterm", True),
        ("SAFERUN_RUN_ID=a", False),
        ("RUN_ID=ab", False),
    ],
)
def test_what_a_program_was_started_with_is_in_its_core(tmp_path: Path, entry: str, has: bool) -> None:
    """Its run, for one: numbers of processes come again, and in another container."""
    core = tmp_path / "core"
    for memory in (b"", bytes(4096), bytes(3 << 20)):
        core.write_bytes(make_core(71, memory=memory, environ=["HOME=/root", "SAFERUN_RUN_ID=ab", "TERM=xterm"]))
        with core.open("rb") as file:
            assert was_started_with(file.fileno(), entry) is has
    whole = core.read_bytes()
    for content in (b"", b"no core", whole[:100], whole[:500], whole[:-60], make_core(71)):
        core.write_bytes(content)
        with core.open("rb") as file:
            assert not was_started_with(file.fileno(), entry)


def test_neither_links_nor_fifos_are_opened_as_cores(tmp_path: Path) -> None:
    """A FIFO would be waited for, and a link may lead anywhere."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").write_bytes(make_core(1))
    for name in ("fifo", "link", ".", "missing"):
        with pytest.raises(CoreError):
            read_core_notes(str(tmp_path / name))


@given(st.data())
def test_no_content_of_a_file_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Truncated, overwritten, made up: it is a core or a CoreError."""
    core = bytearray(make_core(71, code=0, detail=struct.pack("<ii", 71, 0), memory=bytes(600)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(core) - 8))
        core[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8) | st.just(b"\xff" * 8))
    path = tmp_path_factory.mktemp("garbage") / "core"
    path.write_bytes(core[: data.draw(st.integers(0, len(core)))])
    with suppress(CoreError):
        assert read_core_notes(str(path)).size_bytes == path.stat().st_size


# -------------------------------------------------------------------------------------------------------- the pattern


@pytest.mark.parametrize(
    ("pattern", "uses_pid", "name"),
    [
        ("core", False, "core"),
        ("core", True, "core.71"),
        ("core.%p", True, "core.71"),
        ("/cores/%h/core.%e.%p.%s.%t", False, "core.python3.11.71.11.1700000000"),
        ("core.%P.%i.%I.%u.%g.%d.%c.%C", False, "core.71.71.71.0.0.1.18446744073709551615.3"),
        ("%E.core", False, "!usr!bin!python.core"),
        ("100%%.%p", False, "100%.71"),
        ("core%", False, "core"),
        ("core.%x.%p", False, "core..71"),
        ("co+re.(%p)", False, "co+re.(71)"),
    ],
)
def test_names_are_recognised_whatever_the_pattern(pattern: str, uses_pid: bool, name: str) -> None:
    """Source: core(5)."""
    assert name_pattern(CorePattern(pattern, uses_pid)).fullmatch(name)
    assert not name_pattern(CorePattern(pattern, uses_pid)).fullmatch(name + "x")


@pytest.mark.parametrize(
    ("text", "uses_pid", "expected"),
    [
        ("core", False, ("", True, True, True)),
        ("core", True, ("", True, True, False)),
        ("core.%e.%t", False, ("", True, True, True)),
        ("core.%%p", False, ("", True, True, True)),
        ("/cores/core.%p", False, ("", True, False, False)),
        ("|/usr/lib/systemd/systemd-coredump %P %u", False, ("systemd-coredump", False, False, False)),
        ("|", False, ("", False, False, False)),
        ("@/run/coredump.socket", False, ("", False, False, False)),
        ("", False, ("", False, False, False)),
        ("", True, ("", True, True, False)),
    ],
)
def test_a_pattern_says_where_cores_go(text: str, uses_pid: bool, expected: tuple[str, bool, bool, bool]) -> None:
    """To a program, to the process's directory, under names that repeat."""
    pattern = CorePattern(text, uses_pid)
    assert (pattern.handler, pattern.is_file, pattern.is_relative, pattern.is_shared_name) == expected


@given(st.text(alphabet="%pPe/.|@core", max_size=20), st.booleans())
def test_any_pattern_can_be_understood(text: str, uses_pid: bool) -> None:
    """An administrator's slip of the hand must not end a launch."""
    pattern = CorePattern(text, uses_pid)
    name_pattern(pattern)
    assert pattern.description()
    assert isinstance(pattern.directory("/x"), str)


def test_directories_with_specifiers_are_looked_up(tmp_path: Path) -> None:
    """``/cores/%h/%p/core``: the kernel makes no directories, so those that there are can be listed."""
    (tmp_path / "node0" / "71").mkdir(parents=True)
    (tmp_path / "node0" / "other").mkdir()
    pattern = CorePattern(f"{tmp_path}/%h/%p/core")
    assert core_directories(pattern, ["/elsewhere"]) == [f"{tmp_path}/node0/71"]
    assert pattern.directory("/x") == str(tmp_path)


# ----------------------------------------------------------------------------------------------------------- finding


def test_cores_are_found_by_place_name_and_age_and_known_by_their_notes(tmp_path: Path) -> None:
    """Old ones, garbage and other files stay out."""
    since = time.time()
    (tmp_path / "core.71").write_bytes(make_core(9))
    (tmp_path / "core.saferun.1.0").write_bytes(make_core(10))
    (tmp_path / "core.72").write_bytes(b"garbage")
    (tmp_path / "score.73").write_bytes(make_core(11))
    (tmp_path / "core.74").write_bytes(make_core(12))
    os.utime(tmp_path / "core.74", (since - 60, since - 60))
    os.mkfifo(tmp_path / "core.75")
    found = find_cores(CorePattern("core.%p"), [str(tmp_path), str(tmp_path)], since)
    assert sorted(core.notes.pid for core in found if core.notes is not None) == [9, 10]


def test_directories_that_have_changed_are_searched(tmp_path: Path) -> None:
    """A process may have changed its directory, mostly to one for its output."""
    since = time.time()
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "core").write_bytes(make_core(9))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "core").write_bytes(make_core(10))
    os.utime(tmp_path / "old", (since - 60, since - 60))
    found = find_cores_below(CorePattern("core"), [str(tmp_path)], since)
    assert [core.path for core in found] == [str(tmp_path / "a" / "b" / "core")]
    assert find_cores_below(CorePattern("/cores/core"), [str(tmp_path)], since) == []
    avoided = {os.path.dirname(core.path) for core in found}
    assert find_cores_below(CorePattern("core"), [str(tmp_path)], since, avoided=avoided) == []
    assert find_cores_below(CorePattern("core"), [str(tmp_path)], since, within_s=-1.0) == []


def _core_file(path: Path, *, managed: bool = False) -> CoreFile:
    status = path.stat()
    return CoreFile(str(path), None, (status.st_dev, status.st_ino), managed)


def test_only_the_very_file_that_was_found_is_deleted(tmp_path: Path) -> None:
    """Between finding and deleting another core may have come to the same name."""
    path = tmp_path / "core"
    path.write_bytes(b"x")
    core = _core_file(path)
    (tmp_path / "new").write_bytes(b"y")
    (tmp_path / "new").rename(path)
    assert delete_core(core)
    assert path.exists()
    assert delete_core(_core_file(path, managed=True))
    assert path.exists()
    assert delete_core(_core_file(path)) == ""
    assert not path.exists()
    assert delete_core(core)


def test_a_core_is_never_moved_over_something_else(tmp_path: Path) -> None:
    """What cannot be moved stays where it is."""
    path = tmp_path / "core"
    path.write_bytes(b"x")
    (tmp_path / "taken").write_bytes(b"y")
    core = _core_file(path)
    assert move_core(core, str(tmp_path / "taken")) == str(path)
    assert move_core(core, str(tmp_path / "no" / "such")) == str(path)
    assert move_core(core, str(tmp_path / "free")) == str(tmp_path / "free")


def test_a_compressed_core_names_its_process() -> None:
    """``core.NAME.USER.BOOT.PID.TIME.zst``: it has to be unpacked before anything better is known."""
    name = "/var/lib/systemd/coredump/core.python.1000.0123456789abcdef.71.1700000000000000"
    assert names_process(CoreFile(f"{name}.zst", None, (0, 0), is_managed=True), 71)
    assert not names_process(CoreFile(f"{name}.zst", None, (0, 0), is_managed=True), 1000)
    assert not names_process(CoreFile(name, None, (0, 0), is_managed=True), 71)


# --------------------------------------------------------------------------------------------------------------- why


def test_the_reason_for_a_missing_core_is_told(tmp_path: Path) -> None:
    """Each of them has a remedy of its own."""
    here = str(tmp_path)
    assert "hard limit" in why_none(CorePattern("core"), here, (0, 0), [])
    assert "piped to handler, " in why_none(CorePattern("|/opt/handler %p"), here, UNLIMITED, [])
    assert "kernel.core_pattern is ''" in why_none(CorePattern(""), here, UNLIMITED, [])
    assert "/no/such: No such" in why_none(CorePattern("/no/such/core.%p"), here, UNLIMITED, [])
    (tmp_path / "core").write_bytes(make_core(9))
    others = find_cores(CorePattern("core"), [here], 0.0)
    assert "that of pid 9 took its place" in why_none(CorePattern("core"), here, UNLIMITED, others)
    assert "took its place" not in why_none(CorePattern("core.%p"), here, UNLIMITED, others)
    assert "may change its directory" in why_none(CorePattern("core.%p"), here, UNLIMITED, [])
    assert f"it would have replaced {here}/core" in why_none(CorePattern("core"), here, (0, -1), [])
    assert "replaced" not in why_none(CorePattern("core.%p"), here, (0, -1), [])
    assert "replaced" not in why_none(CorePattern("core"), here, UNLIMITED, [])


@pytest.mark.parametrize(
    ("name", "is_contained", "remedy"),
    [
        ("core.%p", True, "in a container only if --cores backtrace is passed, and where a local disk has room"),
        ("core", False, "as cores have one name here, only if --cores backtrace is passed, and where a local disk"),
        ("core.%p", False, "(ulimit -c); saferun raises it where a local disk has room for the cores of all ranks"),
    ],
)
def test_where_the_limit_was_left_at_0_the_reason_says_what_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_contained: bool, remedy: str
) -> None:
    """The default is no remedy for what it has not done."""
    monkeypatch.setattr(core_files, "in_container", lambda _environ: is_contained)
    assert remedy in why_none(CorePattern(name), str(tmp_path), (0, -1), [])
    assert "ulimit" not in why_none(CorePattern(name), str(tmp_path), (0, -1), [], is_raised=True)


def test_a_core_is_wanted_only_where_there_is_room(tmp_path: Path) -> None:
    """A full disk is worse than a missing core."""
    here = str(tmp_path)
    free = os.statvfs(here).f_bavail * os.statvfs(here).f_frsize
    assert "a core may take" in room_for_core(here, free * 2)
    assert room_for_core("/no/such", 0)
    assert "cores go to systemd-coredump" in why_no_cores(here, 1, CorePattern("|/lib/systemd-coredump"))
    assert "/no/such" in why_no_cores(here, 1, CorePattern("/no/such/core"), asked=True)
