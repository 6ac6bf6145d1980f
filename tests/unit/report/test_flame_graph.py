"""Recorded stacks as a flame graph and for speedscope."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import jsonschema

from saferun.report.flame_graph import flame_svg, speedscope_profiles
from tests.unit.report.trace_schemas import SPEEDSCOPE

SVG = "{http://www.w3.org/2000/svg}"
STACKS = [
    (("rank 0", "main (/w/train.py:9)", "step (/w/train.py:5)"), 75),
    (("rank 0", "main (/w/train.py:9)", "load (/w/data.py:2)"), 25),
    (("rank 1", "main (/w/train.py:9)"), 100),
]


def boxes(svg: str) -> dict[str, tuple[float, float, float]]:
    """Offset, level and width of each box, by its title."""
    root = ET.fromstring(svg)  # noqa: S314 - our own
    found = {}
    for group in root.iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        assert rect is not None
        assert title is not None
        found[str(title.text)] = (float(rect.get("x", "")), float(rect.get("y", "")), float(rect.get("width", "")))
    return found


def test_a_box_is_as_wide_as_its_samples_and_stands_below_its_caller() -> None:
    found = boxes(flame_svg(STACKS, "run: 2 ranks"))
    assert found["rank 0: 100 samples, 50.0 %"] == (0.0, 28.0, 600.0)
    assert found["rank 1: 100 samples, 50.0 %"] == (600.0, 28.0, 600.0)
    load, step = found["load (/w/data.py:2): 25 samples, 12.5 %"], found["step (/w/train.py:5): 75 samples, 37.5 %"]
    assert (load[0], load[2], step[0], step[2]) == (0.0, 150.0, 150.0, 450.0)
    assert load[1] == step[1] == 28.0 + 2 * 17
    assert len(found) == 5  # main of both ranks has the same title


def test_names_from_outside_are_text() -> None:
    """Of a function, a file, a thread: whoever opens the picture runs nothing, and loads nothing."""
    name = '</text><script>alert(1)</script>&"\x1b[31m\x00\ud800'
    svg = flame_svg([((name,), 1)], name)
    assert "<script" not in svg
    assert not re.search("[\x00-\x08\x0e-\x1f]", svg)
    assert len(boxes(svg.encode(errors="backslashreplace").decode())) == 1


def test_it_has_bounds() -> None:
    """Also of stacks that are deep, and where nothing was seen."""
    deep = tuple(f"f{i}" for i in range(2000))
    assert len(boxes(flame_svg([(deep, 5)], ""))) == 2000
    many = [((f"f{i}",), 1) for i in range(100_000)]
    assert len(boxes(flame_svg(many, ""))) < 5000
    assert boxes(flame_svg([], "")) == {}


def test_speedscope_has_a_profile_a_rank_in_seconds() -> None:
    stacks = [(frames[1:], samples) for frames, samples in STACKS[:2]]
    content = speedscope_profiles({"rank 0 (node1)": stacks, "rank 1": []}, 100, "run")
    jsonschema.validate(content, SPEEDSCOPE)
    assert content["shared"]["frames"] == [
        {"name": "main", "file": "/w/train.py", "line": 9},
        {"name": "step", "file": "/w/train.py", "line": 5},
        {"name": "load", "file": "/w/data.py", "line": 2},
    ]
    first, second = content["profiles"]
    assert (first["name"], first["samples"], first["weights"]) == ("rank 0 (node1)", [[0, 1], [0, 2]], [0.75, 0.25])
    assert (first["endValue"], first["unit"]) == (1.0, "seconds")
    assert second["samples"] == []
