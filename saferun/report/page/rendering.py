"""The page as HTML: one file that needs nothing from anywhere else.

jinja2 escapes every text. What scripts read is JSON in which nothing can end the element that it is in. A
Content-Security-Policy allows this page's own script, by its hash, and no other; and nothing to be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from jinja2.bccache import bc_version

from saferun.errors import suppress
from saferun.model import JsonObject, Value
from saferun.report.page.building import PHASES, build_page
from saferun.report.page.outputs import rank_numbers
from saferun.report.page.page_model import PageModel, Stacks, Timeline
from saferun.report.page.run_contents import RunFiles

LIMIT_BYTES = 2 << 20
"""How large a page is at most."""
_SCALES = (1.0, 0.6, 0.35, 0.2, 0.1, 0.04, 0.01)
_CLOCK = "%Y-%m-%d %H:%M:%S %Z"
_FOLDER = os.path.join(os.path.dirname(__file__), "template")
_MOST_TICKS = 8


class PageTooLargeError(ValueError):
    """Not even the smallest form of the page is small enough."""


def render_page(files: RunFiles, *, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """The page of a run, at most so large: where there would be more, long lists are shortened.

    Raises:
        PageTooLargeError: it cannot be made so small.
    """
    for scale in _SCALES:
        page = render_model(build_page(files, clock_text, scale))
        if len(page) <= limit_bytes:
            return page
    raise PageTooLargeError("the page is too large")


def render_model(page: PageModel) -> bytes:
    """The HTML of a model."""
    script = _read("page.js").strip()
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    text = load_template().render(
        page=page,
        style=_read("page.css").strip(),
        script=script,
        digest=digest,
        data=script_json(_data(page)),
        phases=PHASES,
        percent=_percent,
        ticks=_ticks,
        ranks=rank_numbers,
        clock=clock_text,
        moment=_moment,
        level_share=_level_share,
        now=clock_text(time.time()),
    )
    return text.encode(errors="replace")


def prepare() -> None:
    """Load the template, or compile it, before a page is wanted."""
    load_template()
    _read("page.js")
    _read("page.css")


def clock_text(seconds: float) -> str:
    """A moment by the clock of this host; empty for one that no clock shows."""
    try:
        return time.strftime(_CLOCK, time.localtime(seconds)).strip()
    except (OverflowError, OSError, ValueError):
        return ""


def script_json(content: JsonObject) -> str:
    """JSON that can stand in a script element: nothing in it can end the element, a comment or a line."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def make_environment() -> Environment:
    """What compiles the template, and what it is rendered with."""
    return Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        optimized=False,  # each process renders it once
    )


def template_source() -> str:
    """What jinja2 compiles."""
    return _read("page.html")


def template_digest() -> str:
    """What tells whether a compiled template was made of this source."""
    return hashlib.sha256(template_source().encode()).hexdigest()


@cache
def load_template() -> Template:
    """The template: compiled already where the file and jinja2 are those that it was compiled of."""
    environment = make_environment()
    with suppress(Exception):  # another release of jinja2, which compiles it otherwise
        from saferun.report.page import compiled_template as compiled

        if (template_digest(), bc_version) == (compiled.DIGEST, compiled.BYTECODE_VERSION):
            return Template.from_module_dict(environment, vars(compiled), environment.make_globals(None))
    return environment.get_template("page.html")


@cache
def _read(name: str) -> str:
    with open(os.path.join(_FOLDER, name), encoding="utf-8") as file:
        return file.read()


# ------------------------------------------------------------------------------------------------ what the script reads


def _data(page: PageModel) -> JsonObject:
    """The verdict and the timeline for programs, and for the script."""
    timeline = page.timeline
    return {
        "schema": "saferun.page/1",
        "title": page.title,
        "verdict": {"kind": page.verdict.kind, "headline": page.verdict.headline},
        "world_size": page.world_size,
        "timeline": {"start": _whole(timeline.start), "end": _whole(timeline.end)} if timeline is not None else None,
    }


def _whole(seconds: float) -> float:
    return round(seconds, 3) if math.isfinite(seconds) else 0.0


# ------------------------------------------------------------------------------------------------------------ positions


class _Tick(Value):
    at: float
    text: str


def _percent(timeline: Timeline, seconds: float) -> str:
    """Where a moment is on the line, in per cent."""
    span = max(timeline.end - timeline.start, 1e-6)
    return f"{min(max((seconds - timeline.start) / span, 0.0), 1.0) * 100:.3f}"


def _level_share(stacks: Stacks, value: float) -> str:
    return f"{min(max(value / max(stacks.flame_width, 1.0), 0.0), 1.0) * 100:.4f}"


def _moment(timeline: Timeline, seconds: float, start: float) -> str:
    """A moment as it is named: seconds since the start of the run."""
    return _since(max(seconds - start, 0.0), 0.01, timeline.end - start)


def _ticks(timeline: Timeline, start: float) -> Sequence[_Tick]:
    """Round moments, counted from the start of the run."""
    span = max(timeline.end - timeline.start, 1e-3)
    step = _step(span / _MOST_TICKS)
    first = math.ceil((timeline.start - start) / step)
    ticks = []
    for number in range(first, first + 2 * _MOST_TICKS):
        at = start + number * step
        if at > timeline.end - 0.03 * span:  # there would be no room for its text
            break
        ticks.append(_Tick(at, _since(number * step, step, timeline.end - start)))
    return ticks


def _step(least: float) -> float:
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600):
        if step >= least:
            return float(step)
    return 43200.0 * math.ceil(least / 43200.0)


def _since(seconds: float, step: float, longest: float) -> str:
    """``12 s``, or ``3:25`` and ``1:03:25`` where there are minutes or hours in the same timeline."""
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 2  # noqa: PLR2004 - decimals that differ
    if longest < 120:  # noqa: PLR2004 - two minutes
        return f"{seconds:.{digits}f} s"
    whole = math.floor(round(seconds, digits))
    rest = f"{round(seconds, digits) - whole:.{digits}f}"[1:] if digits else ""
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}{rest}" if longest >= 3600 else f"{minutes}:{whole:02d}{rest}"  # noqa: PLR2004
