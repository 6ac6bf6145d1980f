"""report.html in a real browser: what is seen at every width, without scripts too; and it asks for nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saferun.report.page.rendering import LIMIT_BYTES, render_page
from saferun.report.page.run_reading import read_run
from tests.breadth import slow_but
from tests.process.browser import Browser, Page, browsing, why_not
from tests.unit.report.page_samples import crash_run, hang_run, hostile_run, large_run

# Where CI is set a missing browser is a failure: `make test` installs it, as root.
pytestmark = pytest.mark.skipif(bool(why_not()) and not os.environ.get("CI"), reason=why_not() or "there is a browser")

RUNS: dict[str, Callable[[Path], Path]] = {
    "hang": hang_run,
    "crash": crash_run,
    "large": large_run,
    "hostile": hostile_run,
}
WIDTHS = (400, 768, 1280, 2560)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of all samples."""
    folder = tmp_path_factory.mktemp("pages")
    files = {}
    for name, make in RUNS.items():
        files[name] = folder / f"{name}.html"
        files[name].write_bytes(render_page(read_run(str(make(folder / name)))))
    return files


def is_quiet(page: Page) -> bool:
    """Whether nothing went wrong and nothing was asked for."""
    assert page.problems() == []
    assert page.requests() == []
    return True


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dark", slow_but([False, True], "False"), ids=["light", "dark"])
def test_no_page_is_wider_than_its_window_or_asks_for_anything(
    browser: Browser, pages: dict[str, Path], name: str, dark: bool
) -> None:
    """With everything that can be opened open, too."""
    page = browser.open(pages[name], dark=dark)
    for opened in (False, True):
        if opened:
            page.value("for (const one of document.querySelectorAll('details')) one.open = true")
        for width in WIDTHS:
            page.resize(width)
            assert page.overflow() <= 0, f"{name} at {width}, opened: {opened}"
    assert page.value("window.hostile") is None
    assert is_quiet(page)
    page.close()


def test_the_verdict_is_what_is_seen_first(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["hang"], 400)
    assert page.value("document.querySelector('h1').getBoundingClientRect().bottom") < 300
    assert page.text("h1").startswith("The job hangs: rank 3 (node1)")
    assert page.text(".hint").startswith("What to do")
    page.close()


def test_the_page_holds_what_the_run_has(browser: Browser, pages: dict[str, Path]) -> None:
    """Texts and counts as they are seen."""
    page = browser.open(pages["hang"])
    assert page.count("#timeline .row") == 6  # three groups of ranks, in the whole run and at its end
    assert page.count("#timeline .row .mark.step") == 1  # four seconds before the end begins
    assert page.count("#stacks .box") == 5
    assert page.count("#waits .node") == 2
    assert page.count("#waits .node.root") == 1
    assert page.count("#collectives tr.odd") == 1
    assert page.count("#checks .cell") == 8
    assert page.count("#checks .cell.bad") == 1
    assert page.count("#output .out") == 2
    assert "load_batch train.py:47" in page.text("#stacks .branch.root")
    assert page.text("#output .chip.root") == "rank 3"
    widths = page.value("[...document.querySelectorAll('#timeline .phase')].every(one => one.offsetWidth >= 1)")
    assert widths
    page.close()


def test_without_scripts_all_of_it_can_be_read(browser: Browser, pages: dict[str, Path]) -> None:
    """And nothing is offered that would not work."""
    with_scripts = browser.open(pages["crash"])
    texts = with_scripts.text("main")
    offered = [with_scripts.value(f"document.querySelector('{one}').offsetHeight > 0") for one in ("#search", "#rank")]
    assert offered == [True, True]
    with_scripts.close()
    page = browser.open(pages["crash"], scripts=False)
    hidden = page.value("[...document.querySelectorAll('input')].every(one => one.offsetHeight === 0)")
    assert hidden
    assert page.count("button") == 0
    for words in ("Fatal Python error: Segmentation fault", "KeyError: 'labels'", "Earlier incidents"):
        assert words in texts
        assert words in page.text("main")
    page.value(
        "document.querySelector('.out:not([open]) summary, .core:not([open]) summary, #earlier summary').click()"
    )
    assert page.count("details[open]") >= 1
    assert is_quiet(page)
    page.close()


def test_output_can_be_searched(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["large"])
    total = page.count("#output .out")
    assert total >= 1000
    page.type("#search", "loss 77.199")
    assert page.text("#search-count") == f"1 of {total}"
    shown = page.value("[...document.querySelectorAll('#output .out')].filter(one => one.offsetHeight > 0).length")
    assert shown == 1
    assert "rank 77" in page.text("#output .outputs")
    page.type("#search", "nothing of the kind")
    assert page.text("#search-count") == f"0 of {total}"
    assert is_quiet(page)
    page.close()


def test_a_rank_is_found_wherever_it_is(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["large"])
    page.type("#rank", "3")
    marked = page.value("[...document.querySelectorAll('#timeline .found')].map(one => one.textContent)")
    assert marked == ["rank 3"] * len(marked)
    assert marked
    assert page.text("#rank-count").endswith("places")
    page.type("#rank", "1e3")
    assert page.text("#rank-count") == "0 places"
    page.close()


def test_a_box_of_the_flame_view_can_be_enlarged(browser: Browser, pages: dict[str, Path]) -> None:
    """The one rank of a thousand is too narrow to be read."""
    page = browser.open(pages["large"])
    width = "document.querySelector('.box.culprit').getBoundingClientRect().width"
    narrow = page.value(width)
    page.value("document.querySelector('.box.culprit').click()")
    assert page.value(width) > 100 * narrow
    page.value("document.querySelector('.flame').previousElementSibling.click()")
    assert page.value(width) == pytest.approx(narrow, abs=0.5)
    page.close()


def test_the_page_can_be_walked_through_with_the_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    """What has the focus is seen to have it; the first thing leads past the contents."""
    page = browser.open(pages["hang"])
    page.press("Tab")
    assert page.value("document.activeElement.textContent") == "Skip to the report"
    assert page.value("document.activeElement.getBoundingClientRect().width") > 50
    seen = set()
    for _ in range(60):
        page.press("Tab")
        tag = page.value("document.activeElement.tagName")
        seen.add(tag)
        if tag not in {"BODY", "HTML"}:
            outline = page.value("getComputedStyle(document.activeElement).outlineStyle")
            assert outline not in {"none", ""}, page.value("document.activeElement.outerHTML.slice(0, 200)")
    assert {"A", "INPUT", "SUMMARY", "DIV"} <= seen
    page.value("document.querySelector('#settings summary').focus()")
    before = page.count("#settings details[open]")
    page.press("Enter")
    assert page.count("#settings details[open]") == before + 1
    page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1."""
    page = browser.open(pages["hang"], dark=dark)
    found = page.value(_CONTRAST)
    assert found == []
    page.close()


@pytest.mark.slow
def test_on_paper_text_is_dark_whatever_the_screen_was(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["crash"], 800, dark=True)
    page.lay_out_for_print()
    assert page.value(_CONTRAST) == []
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.value("document.querySelector('nav').offsetHeight") == 0
    page.close()


@pytest.mark.slow
def test_the_page_prints(browser: Browser, pages: dict[str, Path]) -> None:
    """A few sheets, whatever is closed."""
    page = browser.open(pages["crash"])
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF")
    assert 1 <= pdf.count(b"/Type /Page\n") <= 20
    assert is_quiet(page)
    page.close()


@pytest.mark.slow
def test_a_page_of_a_thousand_ranks_is_small(pages: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size <= LIMIT_BYTES


_CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || (colour.length === 4 && colour[3] > 0.99)) return colour;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim() !== "");
    if (!own || one.closest("svg, script, style, .skip, .hidden") || one.offsetHeight === 0) continue;
    const [a, b] = [light(parse(getComputedStyle(one).color)), light(behind(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push([one.className, one.textContent.slice(0, 30), Math.round(ratio * 100) / 100]);
  }
  return bad.slice(0, 20);
})()
"""
