"""A private key spans lines: none of them reaches a report, a console or another host."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.evidence.diagnosis_values import Traceback
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.launch.rank_group import RankGroup
from saferun.model import RankEnd
from saferun.report.console_text import failure_text
from saferun.report.report_json import Incident, Run, build_report
from saferun.report.report_text import build_report_text
from saferun.text import private_keys
from saferun.text.bounded_json import Page, redacted_command, redacted_command_line, redacted_line, shown
from saferun.text.evidence_redaction import evidence_without_secrets
from saferun.text.failure_record import traceback_lines
from saferun.text.redaction import REDACTED, lines_without_keys, redacted_json, redacted_text
from tests.unit.report.report_samples import dead, diagnosis_of, evidence_with

BODY = base64.b64encode(hashlib.shake_256(b"").digest(2350)).decode()
ROWS = [BODY[at : at + 64] for at in range(0, len(BODY), 64)]
BEGIN, END = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
KEY = [BEGIN, *ROWS, END]
PGP = "-----BEGIN PGP PRIVATE KEY BLOCK-----"
BEFORE = ["Traceback (most recent call last):", '  File "/home/me/train.py", line 7, in main']
AFTER = ["RuntimeError: it cannot be parsed", "see /home/me/project/some/where/without/a/name"]

ENCRYPTED = [BEGIN, "Proc-Type: 4,ENCRYPTED", f"DEK-Info: AES-128-CBC,{'0123456789ABCDEF' * 2}", ""]

PRINTED = {
    "whole": [*BEFORE, *KEY, *AFTER],
    "in a message": [*BEFORE, f"ValueError: bad key: {BEGIN}", *ROWS, END, *AFTER],
    "without its beginning": [*ROWS[30:], END, *AFTER],
    "without its end": [*BEFORE, *KEY[:30]],
    "with torch's prefix": [f"[rank3]: {line}" for line in (*BEFORE, *KEY, *AFTER)],
    "with torch's prefix, without its end": [f"[rank3]: {line}" for line in (*BEFORE, *KEY[:30])],
    "with another prefix, without its beginning": [f"10:00:01 INFO {line}" for line in (*ROWS[30:], END, *AFTER)],
    "of two parts": [*ROWS[40:], END, *AFTER, *KEY[:9]],
    "as a value": [f"private_key={BEGIN}", *ROWS, END, *AFTER],
    "indented": [*BEFORE, *(f"    {line}" for line in KEY), *AFTER],
    "in a list": [f'"{line}",' for line in (*ROWS[30:], END, *AFTER)],
    "with a log's prefix, without its end": [f"10:00:01,123 INFO {line}" for line in (*BEFORE, *KEY[:30])],
    "with an older torchrun's prefix, without its end": [f"[default3]:{line}" for line in (*BEFORE, *KEY[:30])],
    "with srun's labels, without its end": [*BEFORE, *(f"3: {line}" for line in KEY[:30])],
    "with numbers of lines, without its end": [*BEFORE, *(f"{row:4} {line}" for row, line in enumerate(KEY[:30]))],
    "with colors, without its end": [*BEFORE, *(f"\x1b[31m{line}\x1b[0m" for line in KEY[:30])],
    "with colors, without its beginning": [*(f"\x1b[31m{line}\x1b[0m" for line in (*ROWS[30:], END)), *AFTER],
    "of PGP, without its end": [*BEFORE, PGP, "Version: GnuPG v2", "Comment: of the cluster", "", *ROWS[:30]],
    "of PGP with a log's prefix": [*BEFORE, *(f"INFO {line}" for line in (PGP, "Version: GnuPG v2", "", *ROWS[:30]))],
    "of PGP, without its beginning": [*ROWS[35:], "=mEfB", PGP.replace("BEGIN", "END"), *AFTER],
    "as bytes, without its end": [*BEFORE, repr([f"{line}\n".encode() for line in KEY[:30]])],
    "folded, without its beginning": [" ".join([*ROWS[30:], END]), *AFTER],
    "as a list of strings, without its beginning": [repr([*ROWS[30:], END]), *AFTER],
    "encrypted, as a list, without its end": [*BEFORE, repr([*ENCRYPTED, *ROWS[:30]])],
    "encrypted, folded, without its end": [*BEFORE, " ".join([*ENCRYPTED, *ROWS[:30]])],
    "encrypted, with long rows, folded, without its end": [
        *BEFORE,
        " ".join([*ENCRYPTED, *(BODY[at : at + 76] for at in range(0, 2280, 76))]),
    ],
    "of PGP, as a list, without its end": [*BEFORE, repr([PGP, "Version: GnuPG v2", "Comment: Bob's", "", *ROWS[:30]])],
    "of PGP, folded, without its end": [*BEFORE, " ".join([PGP, "Version: GnuPG v2", "", *ROWS[:30]])],
    "escaped as JSON, without its end": [*BEFORE, json.dumps("\n".join(KEY[:30])).replace("\\n", "\\u000a")],
}


def has_a_part(text: str) -> bool:
    """Whether 40 characters of the key are in it."""
    return any(BODY[at : at + 40] in text for at in range(len(BODY) - 40))


def evidence_of(lines: list[str]) -> tuple[Evidence, RankOutput, RankEnd]:
    """A rank has printed them, and failed."""
    end = dead(3, code=1)
    output = RankOutput(3, tuple(lines), "", "\n".join(lines), 1.0, tuple(lines), 3, failure=tuple(lines))
    return evidence_with(8, ends=(end,), outputs=(output._replace(traceback=tuple(lines)),)), output, end


@pytest.mark.parametrize("lines", PRINTED.values(), ids=PRINTED)
def test_no_part_of_a_private_key_that_a_rank_printed_is_in_a_report(lines: list[str]) -> None:
    """Also where the lines that are kept begin or end within it. What stands around it stays."""
    evidence, output, end = evidence_of(lines)
    for tracebacks in ((), (Traceback((3,), tuple(lines)),)):
        diagnosis = diagnosis_of(first_failure=end, output=output, tracebacks=tracebacks)
        incident = Incident("failure", 0, 1.7e9, evidence, diagnosis)
        run = Run("7", "node1", ("train.py",), 1.7e9, 1.7e9, 1, "failed")
        report = json.dumps(build_report(run, [incident]))
        text = build_report_text(run, [incident])
        console = "\n".join(failure_text(diagnosis, files=None, attempt=0, max_restarts=0, restarting=False))
        for found in (report, text, console):
            assert not has_a_part(found)
        last = lines[-1].strip()
        assert any(part in lines[-1] for part in ROWS) or all(last in found for found in (text, console))


@pytest.mark.parametrize("lines", PRINTED.values(), ids=PRINTED)
def test_no_part_of_a_private_key_leaves_a_host(lines: list[str]) -> None:
    """What one host hands to another, and what is written as an event, holds lists of lines."""
    evidence, *_ = evidence_of(lines)
    for content in (evidence_without_secrets(evidence), redacted_json({"lines": lines, "output": evidence.outputs})):
        assert not has_a_part(str(content))
        assert REDACTED in str(content)
    [output] = evidence_without_secrets(evidence).outputs
    of_key = sum(any(row in line for row in ROWS) for line in lines)
    assert len(output.last_lines) <= len(lines) - of_key + 1


@pytest.mark.parametrize("lines", PRINTED.values(), ids=PRINTED)
def test_a_private_key_in_a_failure_record_is_in_none_of_its_lines(lines: list[str]) -> None:
    """The exception's message has line ends of its own."""
    record = {"exceptions": [{"type": "ValueError", "message": "\n".join(lines), "frames": []}]}
    found = "\n".join(traceback_lines(record))
    assert not has_a_part(found)
    assert found.startswith("Traceback")


@pytest.mark.parametrize("limit", [100, 300, 1000, 2000, 4000])
@pytest.mark.parametrize("lines", PRINTED.values(), ids=PRINTED)
def test_a_private_key_that_is_longer_than_what_is_shown_is_not_shown(lines: list[str], limit: int) -> None:
    """Where its end is cut off, the beginning tells what it is."""
    text = "\n".join(lines)
    begins_before = not any(row in lines[0] for row in ROWS)
    if begins_before or len(text) < 2 * limit:
        for found in (shown(text, limit), redacted_line(text, limit), redacted_command_line(text, limit)):
            assert not has_a_part(found)
            assert len(found) <= limit
    if begins_before:
        assert not has_a_part(str(redacted_command(["train.py", "--deploy", text, text])))
        assert not has_a_part(Page(1 << 20).text(text))


def test_no_part_of_a_private_key_is_in_what_a_diagnosis_is_made_of() -> None:
    """A headline quotes the last line of a rank, which may be one of a key."""
    rank = SimpleNamespace(
        assignment=SimpleNamespace(rank=3, local_rank=3),
        recorded=None,
        stderr_path="",
        lines_before_stop=(),
        failure=(),
        traceback=(),
        uncaught_time=0.0,
    )
    lines = tuple(PRINTED["without its end"])
    last_lines = {3: (lines, lines)}
    group: Any = SimpleNamespace(ranks=[rank], is_closed=True, _last_lines=last_lines, _tools_of=lambda _: ())
    [output] = RankGroup.outputs(group)
    for found in (output.last_lines, output.last_stdout_lines):
        assert found == (*BEFORE, REDACTED)


@pytest.mark.parametrize(
    "lines",
    [
        [f"ERROR: the key file must begin with {BEGIN}", *BEFORE, *AFTER],
        [*KEY[:30], *BEFORE, *AFTER],
        [f"ValueError: the file lacks {BEGIN}", *AFTER],
        [f"ValueError: the file lacks {BEGIN}", "Killed", *AFTER],
        [f"ValueError: the file lacks {BEGIN}", "KeyError", *AFTER],
        [f"ValueError: the file lacks {BEGIN}", "Version: 2.3.0", *BEFORE, *AFTER],
        [f"ValueError: the file lacks {BEGIN}", f"INFO read /home/Me/Project/{'Run7/' * 9}key", *AFTER],
        [*KEY[:30], "Killed", *AFTER],
        [*KEY[:30], "Killed"],
        [*KEY[:30], "OSError"],
        [*KEY[:30], "KeyboardInterrupt"],
        [*KEY[:30], "KeyboardInterrupt", *AFTER],
        [*KEY[:30], "train/checkpoints", *AFTER],
        [*(f"INFO {line}" for line in KEY[:30]), "INFO done", *BEFORE, *AFTER],
    ],
    ids=[
        "only its beginning",
        "without its end",
        "in a message",
        "ahead of a word",
        "ahead of a name",
        "ahead of a header",
        "ahead of a path",
        "without its end, ahead of a word",
        "and ahead of nothing else",
        "without its end, ahead of an error",
        "without its end, ahead of an interrupt",
        "without its end, ahead of an interrupt and others",
        "without its end, ahead of a path",
        "in a log",
    ],
)
def test_lines_behind_a_private_key_that_is_cut_off_stay(lines: list[str]) -> None:
    """A traceback among them is what a diagnosis is made of."""
    found = lines_without_keys(lines)
    behind = [line for line in lines if BEGIN not in line and not any(row in line for row in ROWS)]
    assert found[-len(behind) :] == behind
    assert not any(row in "\n".join(found) for row in ROWS)


@pytest.mark.parametrize(
    "last",
    ["hFxQZwPGMk", "xxgHkvKOCuzn", f"{'hFxQ' * 8}Zw", "/hFxQZwPGMk7", "hFx+QZwPGM/k7s", "Q/l1xUW22HD3nj", "+Zv2J9Qe"],
)
@pytest.mark.parametrize("form", ["{}", "    {}", "INFO {}"])
def test_a_row_that_is_cut_off_is_redacted_with_its_key(form: str, last: str) -> None:
    """It may have letters only, or begin with a sign."""
    lines = [form.format(line) for line in (*KEY[:30], last)]
    assert lines_without_keys([*lines, *AFTER]) == [form.format(REDACTED), *AFTER]
    assert redacted_text(repr("\n".join([*KEY[:30], last]))) == f"'{REDACTED}'"


@pytest.mark.parametrize("form", ["\n".join, " ".join, repr, lambda lines: json.dumps("\n".join(lines))])
def test_a_first_row_that_is_cut_off_is_redacted_behind_headers(form: Callable[[list[str]], str]) -> None:
    """The text ends within it."""
    for length in (9, 20, 39):
        text = form([*ENCRYPTED, ROWS[0][:length]])
        assert ROWS[0][:8] not in redacted_text(text)
        assert ROWS[0][:8] not in redacted_text(text.rstrip("]\"'"))
        assert AFTER[0] in redacted_text(f"{text}\n{AFTER[0]}")


def test_lines_without_a_private_key_stay_as_they_are() -> None:
    """Words about keys are none, and neither is what stands ahead of them."""
    path = "/home/me/project/" + "some/where/" * 9 + "train"
    for lines in ([*BEFORE, *AFTER], [path, "but", f"no line {END} in it", path], ["a\nb", path, "no PRIVATE KEY"]):
        assert lines_without_keys(lines) == lines
        assert redacted_text("\n".join(lines)) == "\n".join(lines)
        assert redacted_json({"a": lines}) == {"a": lines}


def test_what_stands_ahead_of_the_end_of_a_key_stays() -> None:
    """Only its own rows go, of which the last is shorter."""
    lines = ["loading", "key", *ROWS[-3:], END, "next"]
    assert lines_without_keys(lines) == ["loading", "key", REDACTED, "next"]
    assert redacted_text("\\n".join(lines)) == f"loading\\nkey\\n{REDACTED}\\nnext"


def test_texts_with_line_ends_within_stay_as_many() -> None:
    """Of a list of texts that are no lines each is redacted by itself."""
    texts = ["a\nb", "\n".join(KEY), "c"]
    assert redacted_json(texts) == ["a\nb", REDACTED, "c"]


@pytest.mark.parametrize(
    "unit",
    [
        END,
        f"{END}\n",
        f"{'a' * 64}\n",
        f"{'a' * 64}\n" * 300 + END,
        "a" * 20_000 + END,
        "\\n" * 4000 + END,
        f"{BEGIN}{END}",
        "[rank1]: " + BEGIN,
        f"{BEGIN}\n[rank1]: ",
        "x\n" * 9000 + END,
        f"{BEGIN}\n" + "Hash: a\n" * 9000,
        f"{BEGIN}\n" + "INFO Hash: a\n     \n" * 3000,
        BEGIN + f"\n3: {'Ab1' * 20}" * 300,
        f"{BEGIN}\n" + "a." * 7000,
        BEGIN + "\\" * 9000,
        BEGIN + "\x1b[0m" * 3000,
        "\x1b[0m" * 3000 + END,
        f"{'Ab1' * 20} " * 200 + END,
        f"{'Ab1' * 20} " * 200 + "!" + END,
        "\nabcd" * 3000 + END,
        f"{BEGIN}\n" + f"Hash: {'a' * 39}." * 400,
        f"{BEGIN}\n" + ("Hash: " + ("a" * 39 + ".") * 4 + "\n") * 100,
        f"{BEGIN}\n{'xz' * 8000}\n",
        f"{BEGIN}\n{'A' * 40}\n{'AAxa' * 4000}\n",
        f"{BEGIN}\n" + f"INFO Hash: a\n{'xz' * 400}\n" * 20,
        f"{BEGIN}\nINFO Hash: a\n" + "|\n" * 8000,
        f"{BEGIN}\nINFO Hash: a\n" + "\\n'" * 5000,
        f"[rank0]: {BEGIN}\n[rank0]: Version: 2\n" + "[rank0]: \n" * 1500,
    ],
)
def test_the_time_for_hostile_keys_is_proportional_to_their_length(unit: str) -> None:
    """What took time by the square of the length would not end before the limit on a test."""
    text = f"PRIVATE KEY{unit * ((1 << 18) // len(unit))}"
    redacted_text(text)
    lines_without_keys(text.split("\n"))


@pytest.mark.parametrize("unit", ["|\n", "\\n'", "[rank0]: \n", "     \n"])
def test_of_what_follows_a_header_in_a_log_few_lines_are_examined(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From each of them on, what may separate rows is read as far as it goes."""
    read: list[int] = []
    rows = private_keys._ROWS()

    def match(text: str, at: int, limit: int) -> re.Match[str] | None:
        read.append(at)
        return rows.match(text, at, limit)

    monkeypatch.setattr(private_keys, "_ROWS", lambda: SimpleNamespace(match=match))
    for header in ("INFO Hash: a", "[rank0]: Version: 2"):
        read.clear()
        redacted_text(f"{BEGIN}\n{header}\n" + unit * 1500)
        assert 1 <= len(read) <= 8


@pytest.mark.parametrize("unit", ['"++++', "++++ ", "|=aaaa"])
def test_a_short_row_is_looked_for_at_the_end_of_a_line(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From each sign of it on, the rest is read."""
    read: list[int] = []
    for name in ("_SHORT_ROW", "_CHECKSUM"):
        shape = getattr(private_keys, name)()

        def search(text: str, at: int, shape: re.Pattern[str] = shape) -> re.Match[str] | None:
            read.append(len(text) - at)
            return shape.search(text, at)

        monkeypatch.setattr(private_keys, name, lambda search=search: SimpleNamespace(search=search))
    text = f"{unit * 3000}x\n{END}"
    assert redacted_text(text) == text
    assert read
    assert max(read) <= 256


def test_a_short_row_is_found_ahead_of_any_number_of_blanks() -> None:
    """A table has as many as its widest cell."""
    blanks = " " * 400
    row = "Ab1" * 21 + "a"
    assert redacted_text(f"step 1\n{row}{blanks}\nQmFzZTY0{blanks}\n{END}\ndone") == f"step 1\n{REDACTED}\ndone"
