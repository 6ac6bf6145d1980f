"""The literals that a pattern needs leave out texts quickly, and none in which the pattern is found."""

from __future__ import annotations

import re

import pytest

from saferun.diagnosis.causes import literals
from saferun.diagnosis.causes.literals import first_match, is_found, literals_of
from tests.unit.diagnosis.rule_patterns import patterns_of_rules
from tests.unit.diagnosis.test_message_lines import (
    LATER_MESSAGES,
    MESSAGES,
    ORDINARY_LINES,
    TENTH_ASIDE_MESSAGES,
    TENTH_MESSAGES,
)

ALL_MESSAGES = (*MESSAGES, *LATER_MESSAGES, *TENTH_MESSAGES, *TENTH_ASIDE_MESSAGES)
ALL_TEXTS = (*(line for message in ALL_MESSAGES for line in message.lines), *ORDINARY_LINES)


@pytest.fixture(autouse=True)
def searched_for_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job of many ranks."""
    monkeypatch.setattr(literals, "_WORTH_IT", 0)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\bout of memory\b", ("out of memory",)),
        (r"cuda|hip \d", ("cuda", "hip ")),
        # Either part would do; the longer one is in fewer texts.
        (r"(?:a|ab) failed to load", (" failed to load",)),
        (r"(?:CUDA|HIP) error", (" error",)),
        (r"(?i:cuda)", ()),
        (r"(?:cuda)?", ()),
        (r"(?!cuda)\w+", ()),
        (r"(?:cuda ){2}", ("cuda ",)),
        (r"", ()),
    ],
)
def test_each_match_of_a_pattern_has_one_of_its_literals(pattern: str, expected: tuple[str, ...]) -> None:
    assert literals_of(re.compile(pattern)) == expected


def test_no_line_of_the_tables_is_left_out_by_the_literals_of_a_pattern_that_is_found_in_it() -> None:
    patterns = patterns_of_rules()
    assert sum(bool(literals_of(pattern)) for pattern in patterns) > 0.8 * len(patterns)
    for pattern in patterns:
        for line in ALL_TEXTS:
            assert is_found(pattern, line) == (pattern.search(line) is not None), (pattern.pattern, line)


def test_the_first_line_of_many_is_found_as_without_literals() -> None:
    lines = tuple(ALL_TEXTS)
    for pattern in patterns_of_rules():
        found = first_match(pattern, lines)
        plain = next(((line, match) for line in lines if (match := pattern.search(line))), None)
        assert (found is None) == (plain is None), pattern.pattern
        if found is not None and plain is not None:
            assert (found[0], found[1].span()) == (plain[0], plain[1].span()), pattern.pattern


@pytest.mark.parametrize("text", ["CUDA", "cuda", "Cuda is not there", "\u212aiss", "mi\u017fs"])
def test_letters_beyond_ascii_that_are_another_case_of_one_in_it_are_not_left_out(text: str) -> None:
    r"""The Kelvin sign is a K to ``re``, and "\u017f" is an s."""
    for literal in ("cuda", "kiss", "miss"):
        pattern = re.compile(literal, re.IGNORECASE)
        assert is_found(pattern, text) == (pattern.search(text) is not None)


def test_a_parser_of_another_python_leaves_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no public one: where it has gone, each text is searched."""
    monkeypatch.delattr(re, "_parser")
    pattern = re.compile("out of no memory")
    assert literals_of(pattern) == ()
    assert first_match(pattern, ("all well", "out of no memory")) is not None
    assert not is_found(pattern, "all well")
