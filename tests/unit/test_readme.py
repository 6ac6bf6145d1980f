"""README and docs say what the code does, and are where a reader looks for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from saferun.env.profiles.search import default_search_path
from tests.option_table import option_table

_ROOT = Path(__file__).parents[2]
_README = _ROOT / "README.md"
_DOCS = sorted((_ROOT / "docs").glob("*.md"))
_PAGES = [_README, _ROOT / "ARCHITECTURE.md", _ROOT / "CONTRIBUTING.md", *_DOCS]
_LONGEST_README = 200
# A link of Markdown: its path, and its heading.
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", _without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_option_table_is_the_one_that_the_options_give() -> None:
    """An option that is added, renamed or gets another default must reach the reader."""
    text = (_ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert option_table() in text, "python -m tests.option_table docs/options.md writes it again"


def test_the_readme_can_be_read_in_one_go() -> None:
    """What is longer belongs to docs/."""
    assert len(_README.read_text(encoding="utf-8").splitlines()) <= _LONGEST_README


def test_the_readme_leads_to_every_document() -> None:
    """A page that nothing links to is not read."""
    links = {path for path, _ in _LINK.findall(_README.read_text(encoding="utf-8"))}
    assert {f"docs/{page.name}" for page in _DOCS} <= links


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files move, and headings are renamed."""
    for path, anchor in _LINK.findall(_without_code(page.read_text(encoding="utf-8"))):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {path}"
        if anchor:
            assert anchor in _anchors(target), f"{page.name}: {path}#{anchor}"


def test_profiles_lie_where_the_docs_say(tmp_path: Path) -> None:
    """Who puts one elsewhere waits for it in vain."""
    named = {path for page in _DOCS for path in re.findall(r"`~/([\w./-]*profiles)`", page.read_text(encoding="utf-8"))}
    assert len(named) == 1
    (tmp_path / named.pop()).mkdir(parents=True)
    assert default_search_path((), {"HOME": str(tmp_path)}, str(tmp_path))
