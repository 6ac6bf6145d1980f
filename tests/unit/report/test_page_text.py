"""report.html as text: what is on it, that nothing from outside acts on it, and that it stays small."""

from __future__ import annotations

import html
import itertools
import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.report.page import compiled_template, rendering
from saferun.report.page.building import build_page
from saferun.report.page.contents import ReportPart
from saferun.report.page.rendering import LIMIT_BYTES, PageTooLargeError, render_page, script_json
from saferun.report.page.run_contents import RunFiles
from saferun.report.page.run_reading import read_run
from saferun.report.report_values import Launch
from tests.unit.report.page_samples import HOSTILE, crash_run, hang_run, hostile_run, large_run, write_run
from tests.unit.report.report_checking import ANY_TEXT

_VOID = {"meta", "link", "input", "br"}


class Reader(HTMLParser):
    """Reads a page: its elements, its text, and whether all that is opened is closed."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.ids: set[str] = set()
        self._open: list[str] = []
        self._texts: list[str] = []
        self.feed(page.decode())
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @property
    def text(self) -> str:
        """What a person reads, with single spaces."""
        return " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID and tag not in {"path", "rect"}:
            self._open.append(tag)
        if identity := dict(attrs).get("id"):
            assert identity not in self.ids, f"twice: {identity}"
            self.ids.add(identity)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, tag
        assert self._open.pop() == tag, (tag, self._open[-3:])

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif not self._open or self._open[-1] != "style":
            self._texts.append(data)


def read(folder: Path) -> Reader:
    """The page of a run directory."""
    return Reader(render_page(read_run(str(folder))))


def test_the_page_of_a_hang_has_the_verdict_first_and_all_that_proves_it(tmp_path: Path) -> None:
    reader = read(hang_run(tmp_path / "run"))
    text = reader.text
    assert text.index("Hang The job hangs: rank 3 (node1) has not called the all_reduce") < 200
    for words in (
        "Proof rank 3 has not called collective 5 (all_reduce) of group default_pg",
        "What to do find out why it sleeps at train.py:47 in load_batch",
        "Outcome failed, exit code 1",
        "saferun --nproc-per-node 8 train.py --api-key <redacted>",
        "no progress: the cause from 0:09.00 to 5:10.00; being stopped from 5:10.00 to 5:10.50",
        "ranks 0-2, 4-7 wait for rank 3 in default_pg",
        "rank 3 sleep: time.sleep train.py:47 in load_batch",
        "ranks 0-2,4-7 (7) 5 - 4 5: all_reduce [[1024, 1024]] not done",
        "load_batch train.py:47",
        "rank 3 loads a batch",
        "ranks 0-2,4-7 (7) stderr node1 1 line",
        "gpu of host: no NVIDIA driver",
        "fail links node3 hsn0 does not answer",
        "torch 2.12.0 node4",
        "nproc_per_node 8 flag",
        "hang_timeout 300.0",
    ):
        assert words in text, words
    assert {"timeline", "waits", "stacks", "collectives", "output", "machine", "checks", "versions"} <= reader.ids


def test_the_page_of_a_crash_has_what_came_before_it(tmp_path: Path) -> None:
    text = read(crash_run(tmp_path / "run")).text
    for words in (
        "Failure Rank 2 (node1, local rank 2, pid 4002) failed first",
        "rank 2: Fatal Python error: Segmentation fault",
        "rank 2 failed first killed by SIGSEGV",
        "the others wait for rank 2",
        "KeyError: 'labels' (6 lines)",
        "rank 2, pid 4002, SIGSEGV, address 0x10: read by pystack",
        "Earlier incidents",
        "The job recovered after 312 s.",
        "killed by SIGSEGV, core dumped at 70.00 s",
    ):
        assert words in text, words


def test_sections_without_content_are_left_out(tmp_path: Path) -> None:
    """An empty heading is a question to the reader."""
    reader = Reader(render_page(RunFiles("run", ReportPart(run=Launch("5f2c1a", outcome="succeeded", exit_code=0)))))
    assert "Succeeded All ranks ended with exit code 0." in reader.text
    sections = {attributes["id"] for tag, attributes in reader.elements if tag == "section"}
    assert sections == {"run"}
    links = {attributes["href"] for tag, attributes in reader.elements if tag == "a"}
    assert links == {"#main", "#run"}
    bare = write_run(tmp_path / "bare")
    (bare / "report.json").unlink()
    assert "Running The launch had not ended" in read(bare).text


def test_a_run_without_a_report_is_shown_as_run_json_has_it(tmp_path: Path) -> None:
    """Nothing went wrong in it."""
    bare = write_run(tmp_path / "bare")
    (bare / "report.json").unlink()
    content = json.loads((bare / "run.json").read_text())
    content |= {"host": "node1", "started_at": 1.7e9}
    content["end"] = {"time": 1.7e9 + 90, "exit_code": 0, "outcome": "succeeded", "headline": ""}
    (bare / "run.json").write_text(json.dumps(content))
    text = read(bare).text
    assert "Succeeded All ranks ended with exit code 0." in text
    assert "Lasted 90 s" in text
    assert "saferun --nproc-per-node 8 train.py" in text
    (bare / "run.json").unlink()
    assert "No report" in read(bare).text


def test_the_page_can_be_used_with_a_keyboard_and_a_screen_reader(tmp_path: Path) -> None:
    """Landmarks, one first heading, names of what is focused, and headers of rows and columns."""
    reader = read(hang_run(tmp_path / "run"))
    tags = [tag for tag, _ in reader.elements]
    assert [tags.count(tag) for tag in ("h1", "main", "nav", "header", "footer")] == [1, 1, 1, 1, 1]
    assert ("html", {"lang": "en"}) in reader.elements
    for tag, attributes in reader.elements:
        if tag == "section":
            assert attributes["aria-labelledby"] in reader.ids
        if attributes.get("tabindex") == "0":
            assert attributes["role"] == "region"
            assert attributes["aria-label"]
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-labelledby"] in reader.ids
        if tag == "a":
            assert (attributes["href"] or "")[1:] in reader.ids
        if tag == "th":
            assert attributes["scope"] in {"row", "col"}
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-4]", tag)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), levels


# --------------------------------------------------------------------------------------------------- texts from outside


def acts(reader: Reader) -> list[object]:
    """Whatever on a page could act, or load something, beyond what the template has."""
    found: list[object] = []
    for tag, attributes in reader.elements:
        if tag in {"img", "iframe", "object", "embed", "base", "video", "audio"}:
            found.append(tag)
        for name, value in attributes.items():
            if name.startswith("on") or name in {"src", "srcdoc", "action", "formaction"}:
                found.append((tag, name, value))
            if name in {"href", "xlink:href"} and not re.match(r"#|data:,\Z", value or ""):
                found.append((tag, name, value))
            if name == "style" and re.search(r"url|expression|@import", value or ""):
                found.append((tag, name, value))
    return found


def test_nothing_that_a_rank_or_a_host_writes_acts_on_the_page(tmp_path: Path) -> None:
    """Output, names, commands, environment and errors are passed on; the page has one script, and loads nothing."""
    page = render_page(read_run(str(hostile_run(tmp_path / "run"))))
    reader = Reader(page)
    assert acts(reader) == []
    plain = read(hang_run(tmp_path / "plain"))
    scripts = [attributes for tag, attributes in reader.elements if tag == "script"]
    assert scripts == [attributes for tag, attributes in plain.elements if tag == "script"]
    assert len(scripts) == 2
    assert json.loads(reader.scripts[0])["schema"] == "saferun.page/1"
    assert "<script>window.hostile = 1</script>" in reader.text  # it is there, and it is text
    assert "{{ 7 * 7 }}" in reader.text
    assert "S3CR3TVALUE" not in reader.text
    assert "hf_abcdefghijklmnopqrstuvwxyz" not in reader.text


def test_no_control_character_reaches_the_page(tmp_path: Path) -> None:
    """Neither escape sequences, nor what turns the direction of the text around it."""
    text = render_page(read_run(str(hostile_run(tmp_path / "run")))).decode()
    assert {char for char in text if not char.isprintable()} == {"\n"}
    references = {int(number) for number in re.findall(r"&#([0-9]+);", text)}
    assert references <= {34, 39}


@given(st.lists(ANY_TEXT | st.sampled_from(HOSTILE), min_size=1, max_size=5))
def test_any_text_comes_out_as_it_went_in(texts: list[str]) -> None:
    """But for what no page can show."""
    run = Launch("5f2c1a", "node1", tuple(texts), outcome="failed", exit_code=1, run_dir=texts[0])
    files = RunFiles("run", ReportPart(run=run))
    page = build_page(files, str)
    reader = Reader(rendering.render_model(page))
    assert acts(reader) == []
    assert " ".join(page.command.split()) in reader.text
    assert [tag for tag, _ in reader.elements].count("script") == 2


@given(ANY_TEXT | st.sampled_from(HOSTILE))
def test_json_in_a_script_cannot_end_it(text: str) -> None:
    """Nor a comment, nor a line: U+2028 ends one in older scripts."""
    found = script_json({"text": text})
    assert json.loads(found) == {"text": text}
    assert not set("<>&\u2028\u2029") & set(found)


def test_the_page_allows_its_own_script_alone(tmp_path: Path) -> None:
    """If a text were not escaped after all, no browser would run it."""
    import base64
    import hashlib

    page = render_page(read_run(str(hang_run(tmp_path / "run")))).decode()
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    script = re.findall(r"<script>(.*)</script>", page, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}';" in policy
    assert "unsafe-eval" not in policy


# ------------------------------------------------------------------------------------------------------------- the size


@pytest.mark.slow
def test_a_thousand_ranks_stay_readable(tmp_path: Path) -> None:
    """What is alike is one row, whatever it is."""
    page = render_page(read_run(str(large_run(tmp_path / "run"))))
    assert len(page) <= LIMIT_BYTES
    reader = Reader(page)
    assert "rank 3" in reader.text
    rows = [attributes for tag, attributes in reader.elements if "row" in (attributes.get("class") or "").split()]
    assert 2 <= len(rows) <= 140
    assert len([tag for tag, attributes in reader.elements if attributes.get("class") == "out"]) >= 1000
    assert "1024 on 128 hosts" in reader.text


@pytest.mark.slow
def test_a_page_that_would_be_too_large_is_shortened(tmp_path: Path) -> None:
    """All of the output may be characters that take five bytes each."""
    folder = large_run(tmp_path / "run", 256)
    for path in folder.glob("*/attempt_0/*/stderr.log"):
        path.write_bytes(b'<">&' * 9000 + b"\n" + (path.parent.name.encode() + b'<">&' * 40 + b"\n") * 50)
    files = read_run(str(folder))
    assert len(rendering.render_model(build_page(files, str))) > 1_000_000
    page = render_page(files, limit_bytes=400_000)
    assert len(page) <= 400_000
    assert "The job hangs: rank 3" in Reader(page).text
    with pytest.raises(PageTooLargeError):
        render_page(files, limit_bytes=1000)


@pytest.mark.slow
def test_a_report_of_any_size_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    """Whoever writes a report.json by hand may fill it with what is longest on a page."""
    folder = hang_run(tmp_path / "run")
    report = json.loads((folder / "report.json").read_text())
    incident = report["incidents"][0]
    incident["findings"] = ["<" * 4000] * 100
    frames = [{"function": "<" * 900}] * 10
    incident["tree"] = [
        {"parent": index - 1 if index else None, "ranks": [index], "frames": frames} for index in range(300)
    ]
    incident["processes"] = [{"rank": rank, "name": f"{rank}{'&' * 900}"} for rank in range(900)]
    few = {"kind": "hang", "headline": '"' * 4000, "findings": ["'" * 4000] * 20}
    report["incidents"] = [*({**few, "capture_dir": str(number)} for number in range(15)), incident]
    report["decisions"] = [{"attempt": 0, "message": "'" * 4000}] * 150
    (folder / "report.json").write_text(json.dumps(report))
    files = read_run(str(folder))
    assert files.report is not None
    assert len(files.report.incidents) == 16
    assert len(render_page(files)) <= LIMIT_BYTES


def pages(*folders: Path) -> list[list[str]]:
    """What is rendered of some runs, line by line, with the template loaded for it."""
    rendering.load_template.cache_clear()
    return [render_page(read_run(str(folder))).decode().splitlines() for folder in folders]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """A hang, a crash and a run of hostile texts, at a moment that stands still."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    yield [hang_run(tmp_path / "hang"), crash_run(tmp_path / "crash"), hostile_run(tmp_path / "hostile")]
    rendering.load_template.cache_clear()


def test_the_compiled_template_is_that_of_the_file(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of template/page.html run: python -m tests.compile_page."""
    assert rendering.template_digest() == compiled_template.DIGEST
    compiled = pages(*runs)
    assert rendering.load_template().root_render_func is compiled_template.root
    monkeypatch.setattr(compiled_template, "DIGEST", "")
    assert pages(*runs) == compiled
    assert rendering.load_template().root_render_func is not compiled_template.root


@pytest.mark.parametrize(
    ("name", "value"), [("DIGEST", "of another template"), ("BYTECODE_VERSION", 0), ("root", None), ("blocks", None)]
)
def test_a_compiled_template_that_does_not_fit_is_compiled_again(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """It may be another release of jinja2 that renders it, or a file that was damaged."""
    whole = pages(*runs)
    if value is None:
        monkeypatch.delattr(compiled_template, name)
    else:
        monkeypatch.setattr(compiled_template, name, value)
    assert pages(*runs) == whole
