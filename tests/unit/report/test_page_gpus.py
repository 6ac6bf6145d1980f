"""The state of the GPUs on the page, as the captures of the hosts have it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.report.page.gpu_rows import build_gpus
from saferun.report.page.rendering import render_page
from saferun.report.page.run_contents import HostGpus
from saferun.report.page.run_reading import read_run
from tests.unit.report.page_samples import HOSTILE, hang_run

if TYPE_CHECKING:
    from pathlib import Path

    from saferun.model import JsonObject


def gpu(index: int, **more: Any) -> JsonObject:
    """A GPU at work, as a capture has it."""
    healthy = {
        "name": "NVIDIA H100 80GB HBM3",
        "busy_percent": 98,
        "memory_used_bytes": 60 << 30,
        "memory_total_bytes": 80 << 30,
        "temperature_c": 61 + index,
        "clock_mhz": 1980,
        "clock_max_mhz": 1980,
        "power_w": 640.2,
        "power_limit_w": 700.0,
        "clock_reasons": 0,
        "ecc_uncorrected": 0,
        "ecc_corrected": 0,
    }
    return {"index": index, **healthy, **more}


def rows(*hosts: list[JsonObject], scale: float = 1.0) -> tuple[tuple[str, ...], ...]:
    table = build_gpus([HostGpus(f"node{n}", {"gpus": gpus}) for n, gpus in enumerate(hosts, 1)], scale)
    return table.rows if table is not None else ()


def test_gpus_that_do_alike_are_one_row() -> None:
    assert rows([gpu(index) for index in range(8)]) == (
        (
            "GPUs 0-7 of node1",
            "NVIDIA H100 80GB HBM3",
            "98 %",
            "60 GiB of 80 GiB",
            "61 °C … 68 °C",
            "1980 MHz of 1980 MHz",
            "640 W of 700 W",
            "0 uncorrected, 0 corrected",
            "-",
        ),
    )


def test_what_is_wrong_with_a_gpu_comes_first_and_one_that_is_idle_has_its_own_row() -> None:
    """Seven that spin in a collective and one that has nothing to do tell which rank is behind."""
    gpus = [gpu(index) for index in range(8)]
    gpus[2] |= {"busy_percent": 0}
    gpus[5] |= {"slowed_by": ["heat"], "clock_mhz": 345, "ecc_uncorrected": 3, "recovery": "a reset of the GPU"}
    gpus[7] = {"index": 7, "fault": "fell off the bus (NVML: GPU is lost)"}
    found = rows(gpus)
    wrong = "slowed down by heat; uncorrectable ECC errors; the driver asks for a reset of the GPU"
    assert [(row[0], row[2], row[8]) for row in found] == [
        ("GPU 5 of node1", "98 %", wrong),
        ("GPU 7 of node1", "-", "fell off the bus (NVML: GPU is lost)"),
        ("GPU 2 of node1", "0 %", "-"),
        ("GPUs 0-1,3-4,6 of node1", "98 %", "-"),
    ]
    table = build_gpus([HostGpus("node1", {"gpus": gpus})], 1.0)
    assert table is not None
    assert table.odd == {0, 1}


def test_a_thousand_gpus_are_few_rows() -> None:
    hosts = [[gpu(index) for index in range(8)] for _ in range(128)]
    hosts[9][3] |= {"clock_reasons": 0x04}
    found = rows(*hosts)
    assert [row[0] for row in found] == ["GPU 3 of node10", "1023 GPUs of 128 hosts"]
    assert found[0][8] == "clock limited by the power cap"


def test_gpus_that_all_differ_are_shortened_and_counted() -> None:
    gpus = [[gpu(index, name=f"model {host} {index}") for index in range(8)] for host in range(40)]
    table = build_gpus([HostGpus(f"n{n}", {"gpus": one}) for n, one in enumerate(gpus)], 0.1)
    assert table is not None
    assert len(table.rows) == 8
    assert table.note == "312 more not shown."


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.lists(st.none(), max_size=2)
KEYS = st.sampled_from([*gpu(0), "slowed_by", "fault", "recovery", "remapping_failed"])


@given(st.lists(st.dictionaries(KEYS, VALUES) | VALUES, max_size=3) | VALUES)
def test_a_capture_of_any_content_gives_a_table_or_none(gpus: object) -> None:
    build_gpus([HostGpus("node1", {"gpus": gpus})], 1.0)


# --------------------------------------------------------------------------------------------------------- the page


def capture(folder: Path, name: str, content: object, host: str = "node1") -> Path:
    """Put a capture into a run directory."""
    directory = folder / host / "attempt_0" / name
    directory.mkdir(parents=True)
    path = directory / "gpu_nvidia.json"
    path.write_text(json.dumps(content))
    return path


def test_the_page_has_the_gpus_of_the_newest_capture_and_records_refer_to_them(tmp_path: Path) -> None:
    """A failure after a hang: what they were then."""
    folder = hang_run(tmp_path / "run")
    capture(folder, "hang_2", {"gpus": [gpu(0, temperature_c=50)]})
    capture(folder, "failure_10", {"gpus": [gpu(0, temperature_c=51)]})
    (folder / "node1" / "attempt_0" / "cores_11").mkdir()
    page = render_page(read_run(str(folder))).decode()
    assert "51 °C" in page
    assert "50 °C" not in page
    assert 'The state of the GPUs when ranks were captured: <a href="#machine">' in page


@pytest.mark.parametrize("kind", ["link", "link of the directory", "fifo", "huge", "deep", "list", "text"])
def test_what_is_no_capture_is_left_out(kind: str, tmp_path: Path) -> None:
    """Nothing is followed or waited for."""
    folder = hang_run(tmp_path / "run")
    path = capture(folder, "hang_1", {"gpus": [gpu(0)]})
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "other").write_bytes(content)
        path.symlink_to(tmp_path / "other")
    elif kind == "link of the directory":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / path.name).write_bytes(content)
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        bad = {"huge": content + b" " * (1 << 20), "deep": b"[" * 9000, "list": b'[{"gpus": [1]}]', "text": b"no JSON"}
        path.write_bytes(bad[kind])
    files = read_run(str(folder))
    assert files.gpus == ()
    assert b"GPUs, when" not in render_page(files)


def test_what_a_driver_calls_its_gpus_does_not_act_on_the_page(tmp_path: Path) -> None:
    folder = hang_run(tmp_path / "run")
    capture(folder, "hang_1", {"gpus": [gpu(at, name=text, fault=text) for at, text in enumerate(HOSTILE)]})
    page = render_page(read_run(str(folder))).decode()
    assert "<img" not in page
    assert page.count("</script>") == 2
