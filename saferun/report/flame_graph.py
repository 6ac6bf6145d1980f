"""Recorded stacks as a flame graph (SVG) and for speedscope (JSON). Pure.

A box of the flame graph is as wide as the number of samples in which a call was seen; what it calls stands below it.
Formats: SVG 1.1; speedscope's: ``report/speedscope.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from zlib import crc32

from saferun import __version__
from saferun.errors import printable
from saferun.model import JsonObject
from saferun.report.speedscope import SpeedscopeFile

_WIDTH = 1200.0
_ROW = 17
_TOP = 28
_LETTER = 6.4
# Narrower boxes cannot be seen, and would make a file of megabytes.
_LEAST_WIDTH = 0.3
_MOST_BOXES = 50_000
_LOCATION = re.compile(r"(?P<function>.*) \((?P<file>.*?)(?::(?P<line>[0-9]+))?\)")

Counted = Iterable[tuple[Sequence[str], int]]
"""Stacks from the outermost call inwards, each with its number of samples."""


class _Box:
    def __init__(self) -> None:
        self.samples = 0
        self.below: dict[str, _Box] = {}


def flame_svg(stacks: Counted, title: str) -> str:
    """A flame graph.

    Args:
        stacks: what was seen.
        title: stands above it.
    """
    root = _Box()
    for frames, samples in stacks:
        box = root
        box.samples += samples
        for frame in frames:
            box = box.below.setdefault(frame, _Box())
            box.samples += samples
    boxes: list[str] = []
    scale = _WIDTH / max(1, root.samples)
    levels = 0
    # No recursion: stacks are deep.
    waiting = [(root, 0.0, 0)]
    while waiting and len(boxes) < _MOST_BOXES:
        box, x, level = waiting.pop()
        for name, below in sorted(box.below.items()):
            width = below.samples * scale
            if width >= _LEAST_WIDTH:
                boxes.append(_box(name, below.samples, root.samples, x, level, width))
                levels = max(levels, level + 1)
                waiting.append((below, x, level + 1))
            x += width
    height = _TOP + levels * _ROW + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height}" font-family="monospace" '
        f'font-size="11">\n<style>g:hover rect{{stroke:#000}}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n<text x="4" y="18" font-size="13">{_text(title)}</text>\n'
    )
    return head + "".join(boxes) + "</svg>\n"


def _box(name: str, samples: int, of: int, x: float, level: int, width: float) -> str:
    y = _TOP + level * _ROW
    whole = f"{name}: {samples} samples, {samples / of * 100:.1f} %"
    room = int(width / _LETTER) - 1
    location = _LOCATION.fullmatch(name)
    short = location["function"] if location is not None else name
    if len(short) > room:
        short = f"{short[: room - 1]}…" if room > 3 else ""  # noqa: PLR2004 - a letter or two say nothing
    # The same call has the same colour everywhere.
    hue = crc32(name.encode(errors="replace")) % 50
    label = f'<text x="{x + 3:.2f}" y="{y + 12}">{_text(short)}</text>' if short else ""
    return (
        f"<g><title>{_text(whole)}</title>"
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 1}" fill="hsl({hue},80%,70%)"/>{label}</g>\n'
    )


def _text(text: str) -> str:
    return escape(printable(text))


def speedscope_profiles(profiles: Mapping[str, Counted], rate: int, title: str) -> JsonObject:
    """A file for speedscope.

    Args:
        profiles: the stacks of each rank, by its name.
        rate: samples a second.
        title: of the file.
    """
    file = SpeedscopeFile(title, __version__)
    for name, stacks in profiles.items():
        samples, weights = [], []
        for stack, count in stacks:
            samples.append([_number(file, frame) for frame in stack])
            weights.append(round(count / rate, 6))
        file.add_profile(name, samples, weights, "seconds")
    return file.as_json()


def _number(file: SpeedscopeFile, frame: str) -> int:
    location = _LOCATION.fullmatch(frame)
    if location is None:
        return file.number(printable(frame))
    return file.number(printable(location["function"]), printable(location["file"]), int(location["line"] or 0))
