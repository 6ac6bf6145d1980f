"""The literals that a pattern needs leave out texts quickly, and none in which the pattern is found."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saferun.diagnosis import lazy_patterns
from saferun.diagnosis.lazy_patterns import LazyPattern, first_match, is_found, key_of
from tests.compile_literals import TARGET, literals_of, source_text
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
COMPILED = [(pattern, re.compile(pattern.pattern, pattern.flags)) for pattern in patterns_of_rules()]


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


def test_the_written_literals_are_those_of_the_patterns() -> None:
    """Otherwise run ``python -m tests.compile_literals``."""
    command = [sys.executable, "-m", "tests.compile_literals", "--print"]
    written = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert written == Path(TARGET).read_text(encoding="ascii")


def test_two_patterns_with_one_key_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.compile_literals.key_of", lambda _pattern, _flags: 0)
    with pytest.raises(ValueError, match="another pattern has the key"):
        source_text([("one thing", 0), ("another thing", 0)])


def test_no_line_of_the_tables_is_left_out_by_the_literals_of_a_pattern_that_is_found_in_it() -> None:
    assert sum(bool(pattern.literals) for pattern, _ in COMPILED) > 0.8 * len(COMPILED)
    for pattern, compiled in COMPILED:
        for line in ALL_TEXTS:
            assert is_found(pattern, line) == (compiled.search(line) is not None), (pattern.pattern, line)


def test_the_first_line_of_many_is_found_as_without_literals() -> None:
    lines = tuple(ALL_TEXTS)
    for pattern, compiled in COMPILED:
        found = first_match(pattern, lines)
        plain = next(((line, match) for line in lines if (match := compiled.search(line))), None)
        assert (found is None) == (plain is None), pattern.pattern
        if found is not None and plain is not None:
            assert (found[0], found[1].span()) == (plain[0], plain[1].span()), pattern.pattern


@pytest.mark.parametrize("text", ["CUDA", "cuda", "Cuda is not there", "\u212aiss", "mi\u017fs"])
def test_letters_beyond_ascii_that_are_another_case_of_one_in_it_are_not_left_out(
    text: str, known: Callable[..., LazyPattern]
) -> None:
    r"""The Kelvin sign is a K to ``re``, and "\u017f" is an s."""
    for literal in ("cuda", "kiss", "miss"):
        plain = re.compile(literal, re.IGNORECASE)
        assert is_found(known(literal, re.IGNORECASE), text) == (plain.search(text) is not None)


@pytest.fixture(name="known")
def _known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LazyPattern]:
    """Makes patterns whose literals are known."""

    def make(pattern: str, flags: int = 0) -> LazyPattern:
        key, compiled = key_of(pattern, flags), re.compile(pattern, flags)
        monkeypatch.setattr(lazy_patterns, "LITERALS", {key: literals_of(compiled)})
        monkeypatch.setattr(lazy_patterns, "IN_ANY_CASE", {key} if flags & re.IGNORECASE else set())
        return LazyPattern(pattern, flags)

    return make


USES: dict[str, Callable[[Any, str], object]] = {
    "search": lambda pattern, text: bool(pattern.search(text)),
    "search from": lambda pattern, text: bool(pattern.search(text, 3)),
    "match": lambda pattern, text: bool(pattern.match(text)),
    "match from": lambda pattern, text: bool(pattern.match(text, 3)),
    "fullmatch": lambda pattern, text: bool(pattern.fullmatch(text)),
    "findall": lambda pattern, text: pattern.findall(text),
    "finditer": lambda pattern, text: [match.span() for match in pattern.finditer(text)],
    "split": lambda pattern, text: pattern.split(text),
    "split once": lambda pattern, text: pattern.split(text, 1),
    "sub": lambda pattern, text: pattern.sub("-", text),
    "sub once": lambda pattern, text: pattern.sub("-", text, 1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_pattern_behaves_as_a_compiled_one(
    use: Callable[[Any, str], object], known: Callable[..., LazyPattern]
) -> None:
    texts = ("", "all well", "no memory", "memory", "---memory", "memory memory", "memory\nno memory")
    for text in texts:
        assert use(known(r"memory\b"), text) == use(re.compile(r"memory\b"), text), text
    pattern = known(r"memory\b")
    assert [use(pattern, text) for text in texts] == [use(re.compile(r"memory\b"), text) for text in texts]


def test_a_pattern_is_compiled_by_the_first_text_that_may_match_it(
    known: Callable[..., LazyPattern], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    pattern = known(r"out of (\w+)")
    plain = re.compile

    def counting(source: str, flags: int = 0) -> re.Pattern[str]:
        compiled.append(source)
        return plain(source, flags)

    monkeypatch.setattr(re, "compile", counting)
    assert pattern.search("all well") is None
    assert compiled == []
    assert [bool(pattern.search(text)) for text in ("out of memory", "all well", "out of ...")] == [True, False, False]
    assert compiled == [r"out of (\w+)"]


def test_a_pattern_without_known_literals_is_searched_for_in_every_text() -> None:
    """One that was changed, and whose literals have not been written anew."""
    pattern = LazyPattern("out of no memory")
    assert pattern.literals == ()
    assert first_match(pattern, ("all well", "out of no memory")) is not None
    assert not is_found(pattern, "all well")
