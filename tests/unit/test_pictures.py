"""The pictures that README.md and docs/ show: they are there, small, and say nothing of the machine that made them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "docs" / "pictures"
PICTURES = sorted(path.name for path in DIRECTORY.iterdir())
_MOST_BYTES = 200_000


def shown() -> set[str]:
    """The pictures that a document shows."""
    documents = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    texts = [document.read_text(encoding="utf-8") for document in documents]
    return {name for text in texts for name in re.findall(r"!\[[^]]+\]\((?:docs/)?pictures/([^)]+)\)", text)}


def test_each_picture_is_shown_and_each_that_is_shown_is_there() -> None:
    assert set(PICTURES) == shown()
    assert {"failure.svg", "page.png"} <= set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small(name: str) -> None:
    """Every clone and every reader of the README loads it."""
    assert 1000 < (DIRECTORY / name).stat().st_size < _MOST_BYTES


@pytest.mark.parametrize("name", [name for name in PICTURES if name.endswith(".svg")])
def test_a_terminal_asks_for_nothing_and_has_no_path_of_a_machine(name: str) -> None:
    text = (DIRECTORY / name).read_text(encoding="utf-8")
    links = re.findall(r"https?://[^\"<]+", text)
    assert set(links) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(?<![\w…])/(?:work|tmp|root|home|usr|opt)/", text)
    assert "@font-face" not in text
    assert "<script" not in text


def test_the_picture_of_the_failure_has_the_verdict_and_its_colour() -> None:
    text = (DIRECTORY / "failure.svg").read_text(encoding="utf-8")
    assert "rank&#160;3&#160;(node1" in text
    assert "fill: #e06c75" in text  # the verdict is red
