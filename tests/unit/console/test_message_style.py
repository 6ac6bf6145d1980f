"""saferun's own messages on a terminal."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from saferun.console.message_style import styled

REPORT = """\
saferun: rank 2 (node1, local rank 2, pid 4002) failed first at 03:15:33: KeyError: 'labels', at train.py:52 in step
  the traceback of rank 2:
  | Traceback (most recent call last): and a line of it that is wider than the terminal, and that keeps its shape
  > rank 3             sleep: time.sleep       train.py:47 in load_batch
hint: find out why it sleeps at train.py:47: every rank must come to the same collectives in the same order"""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


def colors(text: str) -> dict[str, str]:
    return {found[1]: found[0] for found in re.findall(r"\x1b\[(\d+)m(.*?)\x1b\[0m", text)}


def test_the_parts_of_a_report_have_their_colours() -> None:
    shown = styled(REPORT, columns=1000, is_colored=True)
    assert plain(shown) == REPORT
    by_text = {text[:12]: color for text, color in colors(shown).items()}
    assert by_text == {"rank 2 (node": "31", "> rank 3    ": "1", "hint: find o": "36"}


def test_a_suspicion_and_a_warning_are_yellow_and_other_lines_plain() -> None:
    suspicion = "saferun: the job may hang: rank 0 computes (it may be a long step; no action is taken)\n  more"
    assert list(colors(styled(suspicion, columns=0, is_colored=True)).values()) == ["33"]
    assert list(colors(styled("saferun: warning: low memory", columns=0, is_colored=True)).values()) == ["33"]
    assert styled("saferun: restart 1 of 2", columns=0, is_colored=True) == "saferun: restart 1 of 2"


def test_sentences_are_wrapped_between_words_and_quotations_are_not() -> None:
    shown = styled(REPORT, columns=60, is_colored=False).split("\n")
    assert shown[0] == "saferun: rank 2 (node1, local rank 2, pid 4002) failed first"
    assert shown[1].startswith("  at 03:15:33: KeyError")
    quoted = next(row for row in shown if row.startswith("  | "))
    assert quoted in REPORT
    assert all(len(row) <= 60 for row in shown if not row.startswith(("  | ", "  > ")))


@given(st.text(alphabet="ab |>\n", max_size=200), st.integers(0, 100), st.booleans())
def test_no_word_is_lost(text: str, columns: int, is_colored: bool) -> None:
    assert plain(styled(text, columns=columns, is_colored=is_colored)).split() == text.split()
