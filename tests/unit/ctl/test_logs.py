"""``saferunctl logs``: the output of ranks in the order of time, in bounded memory, harmless on a terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saferun import ctl
from saferun.ctl import log_reading, logs, open_files
from saferun.ctl.log_reading import RunLogs
from saferun.ctl.logs import harmless, since_time
from saferun.ctl.run_directory import FoundRun
from saferun.errors import UsageError
from saferun.files.file_server import FileServer
from saferun.files.file_stream import LAZY
from saferun.files.ring import DATA, OPEN, RingRecord
from saferun.files.run_files import RunState
from tests.unit.described_runs import make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "20260101-120000-abcdef"
AT = 1_700_000_000.0


class Host:
    """The files of a host, written as the writer process does."""

    def __init__(self, run: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, keep_bytes: int = 0) -> None:
        self._path = run / name
        self._path.mkdir(exist_ok=True)
        self._monkeypatch = monkeypatch
        self._server = FileServer(lambda _message: None)
        ask = json.dumps([1, "begin_run", [str(self._path / "output.index"), keep_bytes, ["", str(run), "", 0]]])
        self._server.handle(5, 0, memoryview(ask.encode()))
        self._streams: dict[tuple[int, int, str], int] = {}

    def write(self, at: float, *pieces: tuple[int, str | bytes], stream: str = "stdout", attempt: int = 0) -> None:
        """Pieces of output of ranks, which come at once."""
        records = []
        for rank, text in pieces:
            key = (attempt, rank, stream)
            if key not in self._streams:
                self._streams[key] = len(self._streams) + 1
                path = self._path / f"attempt_{attempt}" / f"rank_{rank}" / f"{stream}.log"
                self._server.handle(OPEN, self._streams[key], memoryview(json.dumps([str(path), LAZY]).encode()))
            content = memoryview(text.encode() if isinstance(text, str) else text)
            records.append(RingRecord(DATA, self._streams[key], content, 0))
            self._server.write(self._streams[key], [content])
        with self._monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda: at)
            self._server.note_times(records)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has ended."""
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "saferun-runs", NAME)


def printed(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of an answer."""
    assert ctl.main(["logs", NAME, *arguments]) == 0
    return capfd.readouterr().out.splitlines()


@pytest.fixture
def two_hosts(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hosts that share the run directory."""
    first, second = Host(run, "node1", monkeypatch), Host(run, "node2", monkeypatch)
    first.write(AT, (0, "a1\n"), (1, "b1\nb"), (0, "a2\n"))
    second.write(AT + 0.5, (2, "c1\n"))
    first.write(AT + 1.0, (1, "2\n"))
    first.write(AT + 1.5, (0, "error\n"), stream="stderr")
    second.write(AT + 2.0, (2, "again\n"), attempt=1)
    return run


@pytest.mark.usefixtures("two_hosts")
def test_lines_of_all_ranks_and_hosts_are_in_the_order_of_time(capfd: pytest.CaptureFixture[str]) -> None:
    """A line is where its end came."""
    assert printed(capfd) == [
        *("[node1:0] a1", "[node1:1] b1", "[node1:0] a2", "[node2:2] c1"),
        *("[node1:1] b2", "[node1:0] error", "[node2:2] again"),
    ]


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--rank", "0"), ["a1", "a2", "error"]),
        (("--rank", "0-1,7"), ["a1", "b1", "a2", "b2", "error"]),
        (("--host", "node2"), ["c1", "again"]),
        (("--stderr",), ["error"]),
        (("--stdout", "--rank", "0"), ["a1", "a2"]),
        (("--attempt", "1"), ["again"]),
        (("--grep", "^[ac]1$"), ["a1", "c1"]),
        (("--since", f"@{AT + 0.9}"), ["b2", "error", "again"]),
        (("-n", "2"), ["error", "again"]),
        (("-n", "0"), []),
    ],
    ids=str,
)
def test_lines_can_be_chosen(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], texts: list[str]) -> None:
    lines = printed(capfd, *arguments)
    assert [line.split("] ")[1] for line in lines] == (texts if "--since" not in arguments else ["2", *texts[1:]])


@pytest.mark.usefixtures("two_hosts")
def test_as_json_each_line_is_an_object(capfd: pytest.CaptureFixture[str]) -> None:
    first, *_ = (json.loads(line) for line in printed(capfd, "--json"))
    assert first == {"time": AT, "host": "node1", "attempt": 0, "rank": 0, "stream": "stdout", "text": "a1"}


def test_without_an_index_files_come_one_after_the_other(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And it is said that their times are not known."""
    for rank in (1, 0):
        folder = run / "node1" / "attempt_0" / f"rank_{rank}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"one {rank}\ntwo {rank}")
    assert ctl.main(["logs", NAME]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == ["[node1:0] one 0", "[node1:1] one 1", "[node1:0] two 0", "[node1:1] two 1"]
    assert err.count("times of the output that follows are unknown") == 1


def test_what_is_not_in_the_index_yet_is_shown_too(
    run: Path, two_hosts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The writer process may have been killed between the two."""
    assert two_hosts == run
    with (run / "node1" / "attempt_0" / "rank_0" / "stdout.log").open("a") as file:
        file.write("last words")
    assert printed(capfd)[-1] == "[node1:0] last words"


@pytest.mark.parametrize("index", [b"", b"\xff" * 100, b"\x01\x01\x00\x0b../../x/y.z", b"\x03\x00\xff\xff\x7f"])
def test_an_index_that_is_none_costs_the_order_alone(
    run: Path, capfd: pytest.CaptureFixture[str], index: bytes
) -> None:
    folder = run / "node1" / "attempt_0" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("one\n")
    (run / "node1" / "output.index").write_bytes(index)
    assert printed(capfd) == ["[node1:0] one"]


def test_a_link_in_place_of_a_file_is_not_followed(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That its output is missing is said."""
    (tmp_path / "secret").write_text("secret\n")
    folder = run / "node1" / "attempt_0" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "stderr.log")
    (run / "node1" / "attempt_0" / "rank_1").symlink_to(folder)
    assert ctl.main(["logs", NAME]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("saferunctl: 4 files could not be read: node1/attempt_0/rank_0/stdout.log: Too many levels")


def test_a_file_without_newlines_is_read_in_pieces(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """However large it is, and whatever bytes it has."""
    size = 3 * log_reading.LONGEST_LINE_BYTES + 5
    Host(run, "node1", monkeypatch).write(AT, (0, b"\x00\xff" * (size // 2)))
    longest = 0
    reader = RunLogs(str(run), lambda _name: True)
    try:
        for pieces in (*reader.read_timed(), *reader.read_rest(), *reader.finish()):
            longest = max(longest, *(len(text) for _, _, text in pieces), 0)
    finally:
        reader.close()
    assert 0 < longest <= log_reading.LONGEST_LINE_BYTES
    assert len(printed(capfd)) >= 3


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", "plain"),
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]0;never ended", ""),
        (b"10%\r20%\r30%", "30%"),
        (b"done\r", "done"),
        (b"a\x07b\x9bc", "a\\x07b\ufffdc"),
        (b"\xc2\x9b2J", "\\x9b2J"),
        (b"a\tb", "a       b"),
        (b"\r\r", ""),
    ],
)
def test_a_terminal_gets_no_control_characters(line: bytes, shown: str) -> None:
    assert harmless(line) == shown


def test_a_pattern_that_never_ends_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Host(run, "node1", monkeypatch).write(AT, (0, "a" * 60 + "b\n"))
    monkeypatch.setattr(logs, "_MATCH_S", 0.1)
    assert ctl.main(["logs", NAME, "--grep", "^(a+)+$"]) == 2
    assert "avoid nested repetitions" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--rank", "x"), "--rank x is no list of ranks"),
        (("--rank", "1-"), "--rank 1- is no list of ranks"),
        (("--grep", "("), "--grep (: "),
        (("--grep", "a" * 1001), "--grep: the pattern has more than 1000 characters"),
        (("--since", "soon"), "--since soon is neither a duration nor a time"),
        (("-n", "-1"), "--lines -1 is out of range"),
        (("--stdout", "--stderr"), "not allowed with"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("run")
def test_a_wrong_question_is_answered_in_two_lines(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str
) -> None:
    try:
        code = ctl.main(["logs", NAME, *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    lines = capfd.readouterr().err.splitlines()
    assert what in lines[0]
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (("--rank", "99"), "there is no rank 99 in this run", "it has ranks 0-4"),
        (("--rank", "7-8"), "there are no ranks 7-8 in this run", "it has ranks 0-4"),
        (("--attempt", "7"), "there is no attempt 7 in this run", "it has attempts 0-1; 0 is the first"),
        (("--host", "node1", "--host", "nohost"), "there is no host nohost in this run", "files of node1, node2"),
    ],
    ids=str,
)
def test_what_the_run_does_not_have_is_no_empty_answer(
    two_hosts: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str, hint: str
) -> None:
    """Ranks 3 and 4 have written nothing, which is no error."""
    described = json.loads((two_hosts / "run.json").read_text())
    (two_hosts / "run.json").write_text(json.dumps({**described, "environment": {"WORLD_SIZE": "5"}}))
    assert ctl.main(["logs", NAME, *arguments]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first == f"saferun: {what}"
    assert hint in second
    assert printed(capfd, "--rank", "4") == []


def test_times_are_understood_in_many_forms() -> None:
    now = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
    assert since_time("10min", now) == now - 600
    assert since_time("@12.5", now) == 12.5
    assert since_time("11:30", now) == now - 1800
    assert since_time("12:00:01", now) == now + 1 - 86400
    assert since_time("2026-03-04T11:59:59", now) == since_time("2026-03-04 11:59:59", now) == now - 1
    assert since_time("2026-03-04", now) == now - 12 * 3600
    for wrong in ("25:00:00:00", "24:00", "25:00", "99:99", "14:75", "14:05:60"):
        with pytest.raises(UsageError, match="neither a duration nor a time"):
            since_time(wrong, now)


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A time zone with summer time, by its rules: there may be no files of time zones."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("new_york")
def test_yesterday_may_have_had_another_number_of_hours() -> None:
    for day in ((2026, 3, 8), (2026, 11, 1)):  # these change their time at 02:00
        now = time.mktime((*day[:2], day[2] + 1, 1, 0, 0, 0, 0, -1))
        assert time.localtime(since_time("01:30", now))[:5] == (*day, 1, 30)
        now = time.mktime((*day, 12, 0, 0, 0, 0, -1))
        assert time.localtime(since_time("14:00", now))[3:5] == (14, 0)
    first = time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1))
    assert time.localtime(since_time("14:00", first))[:5] == (2026, 2, 28, 14, 0)


def test_more_files_than_may_be_open_are_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(open_files, "_MOST_OPEN", 3)
    host = Host(run, "node1", monkeypatch)
    for at in range(3):
        host.write(AT + at, *((rank, f"{at}\n") for rank in range(10)))
    assert printed(capfd) == [f"[node1:{rank}] {at}" for at in range(3) for rank in range(10)]


def test_what_was_left_out_is_one_mark_at_its_place(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """``--keep-output``: lines before and after it have their times."""
    host = Host(run, "node1", monkeypatch, keep_bytes=10_000)
    for number in range(1000):
        host.write(AT + number, (0, f"line {number:044d}\n"), (1, "x\n"))
    objects = [json.loads(line) for line in printed(capfd, "--json", "--rank", "0")]
    numbers = [int(one["text"][5:]) for one in objects if one["text"].startswith("line ")]
    first = next(index for index, number in enumerate(numbers) if number != index)
    assert 50 <= first < 110
    assert numbers == [*range(first), *range(numbers[first], 1000)]
    assert len(numbers) < 210
    (mark,) = (one for one in objects if not one["text"].startswith("line "))
    left_out = (numbers[first] - first) * 50
    assert mark["text"] == f"[saferun: {left_out} bytes of this stream are left out here: --keep-output]"
    assert [one["time"] - AT for one in objects if one is not mark] == numbers
    assert (run / "node1" / "attempt_0" / "rank_0" / "stdout.log").stat().st_size <= 10_000


def test_of_a_file_that_others_truncated_every_line_is_shown_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left out of it any more, whatever was before."""
    host = Host(run, "node1", monkeypatch, keep_bytes=10_000)
    path = run / "node1" / "attempt_0" / "rank_0" / "stdout.log"
    for number in range(1000):
        host.write(AT + number, (0, f"line {number:044d}\n"))
    os.truncate(path, 1000)
    for number in range(1000, 1170):
        host.write(AT + number, (0, f"line {number:044d}\n"))
    lines = path.read_text().splitlines()
    assert len(lines) == 190
    assert [json.loads(line)["text"] for line in printed(capfd, "--json", "--rank", "0")] == lines


def test_a_clock_that_goes_back_changes_the_times_and_not_the_order(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of its own host. What others write meanwhile comes in between."""
    first, second = Host(run, "node1", monkeypatch), Host(run, "node2", monkeypatch)
    for at, text in ((0, "a\n"), (10, "b\n"), (-100, "c\n"), (20, "e\n")):
        first.write(AT + at, (0, text))
    second.write(AT + 15, (1, "d\n"))
    assert [line[-1] for line in printed(capfd)] == list("abcde")
    since = [json.loads(line) for line in printed(capfd, "--json", "--since", f"@{AT + 5}")]
    assert [(one["text"], one["time"] - AT) for one in since] == [("b", 10), ("c", -100), ("d", 15), ("e", 20)]


Written = list[tuple[int, int, list[tuple[int, str]]]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.lists(
                st.tuples(st.integers(0, 2), st.sampled_from(["x\n", "y", "\n", "z\nx\n", "\n\ny", "long" * 9])),
                min_size=1,
                max_size=4,
            ),
        ),
        max_size=12,
    ),
    most_bytes=st.sampled_from([4, 100, 1 << 20]),
)
def test_however_much_is_read_at_once_lines_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, writes: Written, most_bytes: int
) -> None:
    """Three hosts with three ranks each: each line where its newline came; what has none yet comes last."""
    monkeypatch.setattr(log_reading, "_MOST_READ_BYTES", most_bytes)
    monkeypatch.setattr(log_reading, "_PIECE_BYTES", 64)
    monkeypatch.setattr(log_reading, "_LEAST_PIECE_BYTES", 16)
    path = make_run(tmp_path_factory.mktemp("runs"), NAME)
    hosts = [Host(path, f"node{number}", monkeypatch) for number in (1, 2, 3)]
    wanted: list[tuple[float, str, int, str]] = []
    rests: dict[tuple[str, int], str] = {}
    at, last = AT, 0
    for host, later, pieces in writes:
        at += later or (host != last)  # what several hosts write in one millisecond has no order
        last = host
        hosts[host].write(at, *pieces)
        for rank, text in pieces:
            key = (f"node{host + 1}", rank)
            *lines, rests[key] = (rests.get(key, "") + text).split("\n")
            wanted += [(at, *key, line) for line in lines]
    reader = RunLogs(str(path), lambda _name: True)
    try:
        timed, rest = [*reader.read_timed()], [*reader.read_rest(), *reader.finish()]
    finally:
        reader.close()
    assert lines_of(timed) == wanted
    assert {(host, rank): text for _, host, rank, text in lines_of(rest)} == {k: v for k, v in rests.items() if v}


def test_what_comes_while_the_indexes_are_read_is_not_printed_without_its_time(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that lives writes a file first, and then notes when. Its lines were out of order, with a warning."""
    host = Host(run, "node1", monkeypatch)
    host.write(AT, (0, "first\n"))
    file = run / "node1/attempt_0/rank_0/stdout.log"
    read_timed = RunLogs.read_timed

    def later(reader: RunLogs) -> Iterator[list[log_reading.Piece]]:
        yield from read_timed(reader)
        file.write_bytes(file.read_bytes() + b"not noted yet\n")

    with monkeypatch.context() as patched:
        patched.setattr(RunLogs, "read_timed", later)
        assert ctl.main(["logs", NAME]) == 0
    assert capfd.readouterr() == ("[node1:0] first\n", "")


def test_output_whose_time_is_noted_a_moment_later_has_its_place(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between the two there are microseconds, or the time in which others have the processor."""
    host = Host(run, "node1", monkeypatch)
    host.write(AT, (0, "first\n"), (1, "other\n"))
    file = run / "node1/attempt_0/rank_0/stdout.log"
    written = file.read_bytes()
    file.write_bytes(written + b"second\n")

    def note(_seconds: float) -> None:
        file.write_bytes(written)
        host.write(AT + 1, (0, "second\n"))

    monkeypatch.setattr(time, "sleep", note)
    assert ctl.main(["logs", NAME]) == 0
    assert capfd.readouterr() == ("[node1:0] first\n[node1:1] other\n[node1:0] second\n", "")


def lines_of(batches: list[list[log_reading.Piece]]) -> list[tuple[float | None, str, int, str]]:
    """The lines of pieces, with their times, hosts and ranks."""
    return [
        (ms / 1000 if ms is not None else None, file.name.host, file.name.rank, line.decode())
        for pieces in batches
        for file, ms, text in pieces
        for line in text.split(b"\n")
    ]


def test_each_file_is_read_once_a_batch(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces its output came in: a read for each line took most of the time."""
    host = Host(run, "node1", monkeypatch)
    for number in range(200):
        host.write(AT + number, *((rank, f"{number}\n") for rank in range(5)))
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, count: int, at: int) -> bytes:
        reads.append(fd)
        return pread(fd, count, at)

    monkeypatch.setattr(os, "pread", counted)
    reader = RunLogs(str(run), lambda _name: True)
    try:
        assert sum(map(len, reader.read_timed())) == 1000
    finally:
        reader.close()
    assert len(reads) < 20


# ------------------------------------------------------------------------------------------------ files and failures


def test_output_that_cannot_be_read_is_no_success(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Silence and exit code 0 would look like a rank without output."""
    Host(run, "node1", monkeypatch).write(AT, (0, "a\n"), (1, "b\n"))
    opened = os.open

    def fail(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "stdout.log" and "rank_1" in os.readlink(f"/proc/self/fd/{dir_fd}"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return opened(path, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        assert ctl.main(["logs", NAME]) == 1
    out, err = capfd.readouterr()
    assert out == "[node1:0] a\n"
    assert err == ("saferunctl: 1 file could not be read: node1/attempt_0/rank_1/stdout.log: Too many open files\n")


def test_the_limit_on_open_files_is_raised_and_bounds_them(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each host has an index, each rank two files."""
    for number in range(40):
        Host(run, f"node{number}", monkeypatch).write(AT + number, (number, f"{number}\n"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
    assert len(printed(capfd)) == 40
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    monkeypatch.setattr(logs, "raise_files", lambda: None)
    monkeypatch.setattr(open_files, "_SPARE_FILES", used + 6)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    assert len(printed(capfd)) == 40


@pytest.mark.parametrize("follow", [(), ("-f",)])
def test_the_last_lines_are_so_many_without_times_too(
    run: Path, capfd: pytest.CaptureFixture[str], follow: tuple[str, ...]
) -> None:
    """Also those that no newline ends."""
    for rank in range(3):
        folder = run / "node1" / "attempt_0" / f"rank_{rank}"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("one\ntwo\nlast")
    assert printed(capfd, "-n", "4", *follow) == ["[node1:2] two", *(f"[node1:{rank}] last" for rank in range(3))]


def entry(*numbers: int, path: str = "") -> bytes:
    """An entry of an index."""
    content = bytearray()
    for number in numbers:
        rest = number
        while rest >= 0x80:
            content.append(rest & 0x7F | 0x80)
            rest >>= 7
        content.append(rest)
    return bytes(content) + path.encode()


LOG = "attempt_0/rank_0/stdout.log"
FILE = entry(1, 1, 0, len(LOG), path=LOG)
GROWN = entry(4, 0, 4)


@pytest.mark.parametrize(
    "damage",
    [
        FILE + entry(2, 1, 2, 2, 1 << 62) + GROWN,
        FILE + entry(2, 1, 2, 1 << 68, 2) + GROWN,
        FILE + entry(2, 1, 0, 0, 1 << 68) + GROWN,
        FILE + entry(4, 0, 12) + entry(1, 1, 0, len(LOG), path=LOG) + GROWN,
        FILE + GROWN + entry(1, 1, 12, len(LOG), path=LOG) + GROWN + FILE + entry(4, 0, 8),
        FILE + GROWN + entry(1, 1, 1 << 68, len(LOG), path=LOG) + GROWN,
        FILE + entry(4, 0, 1 << 60) + GROWN,
    ],
    ids=["long mark", "much left out", "absurd mark", "back", "back and on", "far", "long"],
)
def test_positions_that_make_no_sense_cost_the_order_alone(
    run: Path, capfd: pytest.CaptureFixture[str], damage: bytes
) -> None:
    folder = run / "node1" / "attempt_0" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("".join(f"{number:03d}\n" for number in range(5)))
    (run / "node1" / "output.index").write_bytes(entry(0, int(AT * 1000)) + damage)
    assert printed(capfd) == [f"[node1:0] {number:03d}" for number in range(5)]


def test_a_position_out_of_range_is_a_failure_and_no_traceback(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a file that is said to be older than wanted up to there."""
    folder = run / "node1" / "attempt_0" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("one\n")
    far = entry(1, 1, 1 << 68, len(LOG), path=LOG) + GROWN
    (run / "node1" / "output.index").write_bytes(entry(0, int(AT * 1000)) + far)
    assert ctl.main(["logs", NAME, "--since", f"@{AT + 1}"]) == 1
    assert "node1/attempt_0/rank_0/stdout.log: Value too large" in capfd.readouterr().err


# ----------------------------------------------------------------------------------------------------------- following


def test_following_spares_a_slow_file_system(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a second is done again after twenty; how long the reader takes does not count."""
    folder = run / "node1" / "attempt_0" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("one\n")
    now, done = [0.0], [""]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slept(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", slept)
    reader = RunLogs(str(run), lambda _name: True)
    names, find = reader._all_names, reader.find_indexes

    def slow_names() -> Iterator[log_reading.LogName]:
        done.append("names")
        now[0] += 0.5
        yield from names()

    def slow_find() -> None:
        done.append("find")
        now[0] += 1.0
        find()

    monkeypatch.setattr(reader, "_all_names", slow_names)
    monkeypatch.setattr(reader, "find_indexes", slow_find)
    monkeypatch.setattr(FoundRun, "read_state", lambda _self: RunState("running" if now[0] < 60 else "failed"))
    try:
        for pieces in logs._all_pieces(reader, str(run), io.BytesIO(), follows=True):
            now[0] += 3.0 if pieces else 0.0
    finally:
        reader.close()
    assert 3 <= done.count("find") <= 5
    assert 4 <= done.count("names") <= 9, "each 10 s, and afresh at the end"


def test_a_file_that_appears_while_a_run_is_followed_is_found(run: Path) -> None:
    """At the latest when the run has ended, however old the listing is."""
    reader = RunLogs(str(run), lambda _name: True)
    try:
        assert list(reader.read_rest(known=True)) == []
        folder = run / "node1" / "attempt_0" / "rank_0"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("one\n")
        assert list(reader.read_rest(known=True)) == []
        assert [text for pieces in reader.read_rest() for _, _, text in pieces] == [b"one"]
    finally:
        reader.close()
