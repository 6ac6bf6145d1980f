"""``saferunctl report``: text, JSON, a page, or a trace of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from saferun.ctl import main
from tests.process.somebody import SOMEBODY, needs_root
from tests.unit.report.page_samples import hang_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = hang_run(tmp_path / "run")
    (folder / "report.txt").write_text("saferun: rank 3 sleeps\x1b[31m\nHF_TOKEN=hf_abcdefghijklmnop0123456789abcdef\n")
    return folder


def answer_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command prints."""
    assert main(["report", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_the_text_is_printed_as_a_terminal_can_take_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--text",)):
        text = answer_of(capsys, str(run_dir), *arguments)
        assert "saferun: rank 3 sleeps\\x1b[31m" in text
        assert "hf_abc" not in text


def test_json_is_the_report_itself(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert json.loads(answer_of(capsys, str(run_dir), "--json")) == json.loads((run_dir / "report.json").read_text())
    out = tmp_path / "out.json"
    assert answer_of(capsys, str(run_dir), "--json", "--output", str(out)) == ""
    assert out.read_bytes() == (run_dir / "report.json").read_bytes()


def test_the_page_is_made_again(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the run directory, or wherever it is wanted."""
    assert answer_of(capsys, str(run_dir), "--html").strip().endswith("report.html")
    assert b"The job hangs: rank 3" in (run_dir / "report.html").read_bytes()
    assert answer_of(capsys, str(run_dir), "--html", "--output", str(tmp_path / "p.html")).strip().endswith("p.html")
    assert (tmp_path / "p.html").read_bytes().startswith(b"<!DOCTYPE html>")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@needs_root
def test_the_page_belongs_to_the_user_whose_run_it_is(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Root makes it for that user, who could not read it otherwise. What root asks for elsewhere is root's."""
    for path in (run_dir, *run_dir.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY)
    answer_of(capsys, str(run_dir), "--html")
    assert (run_dir / "report.html").stat().st_uid == SOMEBODY
    assert b"The job hangs: rank 3" in (run_dir / "report.html").read_bytes()
    answer_of(capsys, str(run_dir), "--html", "--output", str(tmp_path / "p.html"))
    assert (tmp_path / "p.html").stat().st_uid == 0


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1"])
def test_standard_output_gets_the_page_and_nothing_else(
    run_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    assert main(["report", str(run_dir), "--html", "--output", name]) == 0
    printed = capfdbinary.readouterr().out
    assert printed.startswith(b"<!DOCTYPE html>")
    assert printed.rstrip().endswith(b"</html>")


@pytest.mark.parametrize(("kind", "key"), [("perfetto", "traceEvents"), ("speedscope", "profiles")])
def test_traces_are_json_for_other_viewers(
    run_dir: Path, capfdbinary: pytest.CaptureFixture[bytes], kind: str, key: str
) -> None:
    assert main(["report", str(run_dir), "--format", kind]) == 0
    assert json.loads(capfdbinary.readouterr().out)[key]


def test_what_is_not_there_is_said_with_what_to_do(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (run_dir / "report.txt").unlink()
    assert "there is no report.txt in" in answer_of(capsys, str(run_dir), code=2)
    assert "there is no run nothing" in answer_of(capsys, "nothing", code=2)
    (tmp_path / "empty").mkdir()
    assert "is not the directory of a run" in answer_of(capsys, str(tmp_path / "empty"), "--html", code=2)
    missing = str(tmp_path / "missing" / "x.json")
    assert "No such file" in answer_of(capsys, str(run_dir), "--json", "--output", missing, code=1)


@pytest.mark.parametrize("content", ["", "[]", "half"])
@pytest.mark.parametrize("arguments", [("--html",), ("--json",), ("--format", "perfetto"), ("--format", "speedscope")])
def test_a_report_that_is_broken_is_an_error_of_two_lines(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], content: str
) -> None:
    """A page without the verdict would take the place of the good one, and a program would get half an object."""
    (run_dir / "report.html").write_text("the good one")
    whole = (run_dir / "report.json").read_text()
    (run_dir / "report.json").write_text(whole[: len(whole) // 2] if content == "half" else content)
    assert main(["report", str(run_dir), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    what, hint = printed.err.splitlines()
    assert what.endswith("report.json is no report, or not a whole one")
    assert hint == "hint: see report.txt there"
    assert (run_dir / "report.html").read_text() == "the good one"


def test_a_run_without_a_report_has_a_page(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "report.json").unlink()
    assert answer_of(capsys, str(run_dir), "--html").strip().endswith("report.html")


def test_a_page_opens_in_the_browser(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import webbrowser

    opened: list[str] = []

    def open_page(url: str) -> bool:
        opened.append(url)
        return len(opened) == 1

    monkeypatch.setattr(webbrowser, "open", open_page)
    answer_of(capsys, str(run_dir), "--open")
    assert opened == [f"file://{run_dir}/report.html"]
    assert "no browser could be opened" in answer_of(capsys, str(run_dir), "--open", code=1)
