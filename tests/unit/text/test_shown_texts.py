"""Texts of several lines are shown on one, without their secrets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saferun.text.bounded_json import Page, redacted_command, redacted_command_line, redacted_line, shown
from saferun.text.redaction import REDACTED

S = "S3CR3TVALUE"

WAYS: dict[str, Callable[[str], str]] = {
    "shown": shown,
    "redacted_line": redacted_line,
    "redacted_command": lambda text: redacted_command([text])[0],
    "redacted_command_line": redacted_command_line,
    "Page.text": lambda text: Page(1 << 20).text(text),
    "Page.command": lambda text: Page(1 << 20).command(text),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("config:\npassword=ab#cdefgh&xyz", f"config:?password={REDACTED}"),
        ("config:\r\npassword=ab#cdefgh&xyz\r\nnext", f"config:??password={REDACTED}??next"),
        ("failed:\ncode=137\nkey=embedding", "failed:?code=137?key=embedding"),
        ("failed:\nauth=none\ntoken: indent", "failed:?auth=none?token: indent"),
        (f"config:\npassword='ab\n{S}'\nnext=1", f"config:?password='{REDACTED}'?next=1"),
        (f'{{"password":"ab\n{S}",\n"next":1}}', f'{{"password":"{REDACTED}",?"next":1}}'),
        (f"https://h/x?code={S}&a=1\nnext", f"https://h/x?code={REDACTED}&a=1?next"),
    ],
)
def test_a_text_of_several_lines_is_redacted_before_it_is_one_line(
    way: Callable[[str], str], text: str, line: str
) -> None:
    """Its line ends are no question marks as those of a URL; a quoted value of several lines is hidden whole."""
    assert way(text) == line
    assert S not in way(f"at api_key='ab\n{S}\nnext")  # the quote is not closed


@pytest.mark.parametrize("way", [shown, redacted_line])
def test_a_header_ends_with_its_line(way: Callable[[str], str]) -> None:
    assert way("Authorization: Bearer abcdefgh\nValueError: x") == f"Authorization: Bearer {REDACTED}?ValueError: x"


def test_an_option_on_a_line_of_its_own_is_redacted() -> None:
    """As a script has them: each line ends with a backslash, and an option begins the next one."""
    command = "python x.py \\\n--password hunter2 --lr 1\n--api-key=hunter2 \\\n  --token hunter2"
    line = f"python x.py \\?--password {REDACTED} --lr 1?--api-key={REDACTED} \\?  --token {REDACTED}"
    assert redacted_command_line(command) == line
    assert redacted_command_line("--password hunter2\n--token hunter3 x") == f"--password {REDACTED} {REDACTED} x"
    assert redacted_command_line("a " * 3000, 5000) == "a " * 999 + "a"


@pytest.mark.parametrize("value", [f"'abc\n--{S}'", f'"abc\r\n--{S}"', f"abc\n--{S}", f"abc\n--{S.lower()}"])
@pytest.mark.parametrize("option", ["--password ", "--password=", "SECRET=", "--env SECRET="])
def test_a_secret_with_a_line_that_looks_like_an_option_is_redacted(option: str, value: str) -> None:
    """It is one argument: only blanks separate them."""
    assert redacted_command_line(f"train {option}{value} --lr 1") == f"train {option}{REDACTED} --lr 1"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_secret_that_extends_across_the_limit_is_not_shown(way: Callable[[str], str]) -> None:
    """The beginning of one is one."""
    for length in (90, 280, 590, 980, 1980, 1995, 2100):
        found = way(f"{'x' * length} password={S * 9}")
        assert "S3C" not in found
        assert len(found) <= 2000
