from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from saferun.env.lint import name_cache, names_in_files
from saferun.env.lint.known_names import KnownNames
from saferun.env.lint.name_cache import Unit
from saferun.env.lint.scanner import scan
from tests.unit.env.lint_samples import (
    Packages,
    asking,
    strings,
)


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    return Packages(tmp_path)


# ------------------------------------------------------------------------------------------------------- the cache


def scan_kept(packages: Packages, tmp_path: Path, *names: str) -> KnownNames:
    return scan(packages.installation, cache_directory=str(tmp_path / "cache"), **asking(*names))


def test_what_was_found_is_not_read_again(packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"', "torch/lib/libtorch_cpu.so": strings("TORCH_A", "ONEDNN_")})
    packages.add("mything", {"mything/a.py": b'"TORCH_MINE"'})
    (packages.libraries / "libnccl.so.2").write_bytes(strings("NCCL_DEBUG", "NCCL version 2.27.3+cuda12.9"))
    first = scan_kept(packages, tmp_path, "TORCH_MINE", "TORCH_NOBODYS")

    def read(*_args: object) -> bytes:
        raise AssertionError("read again")

    monkeypatch.setattr(names_in_files, "source_text", read)
    monkeypatch.setattr(names_in_files, "library_strings", read)
    monkeypatch.setattr("saferun.env.lint.scanner.source_text", read)
    monkeypatch.setattr("saferun.env.lint.scanner.library_strings", read)
    assert scan_kept(packages, tmp_path, "TORCH_MINE", "TORCH_NOBODYS") == first
    assert scan_kept(packages, tmp_path).readers == {n: r for n, r in first.readers.items() if n != "TORCH_MINE"}
    assert scan_kept(packages, tmp_path, "TORCH_MINE").readers == first.readers  # still known after a launch without it


@pytest.mark.parametrize("changed", ["RECORD", "library"])
def test_what_has_changed_is_read_again(packages: Packages, tmp_path: Path, changed: str) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_OLD"', "torch/lib/libtorch_cpu.so": strings("TORCH_OLD_TOO")})
    assert scan_kept(packages, tmp_path).is_read("TORCH_OLD")
    if changed == "RECORD":
        packages.add("torch", {"torch/a.py": b'"TORCH_NEW"', "torch/b.py": b""})
    else:
        (packages.root / "torch/lib/libtorch_cpu.so").write_bytes(strings("TORCH_NEW", "longer"))
    known = scan_kept(packages, tmp_path)
    assert known.is_read("TORCH_NEW")
    assert known.is_read("TORCH_OLD") == (changed == "library")


def test_a_package_that_is_gone_is_forgotten(packages: Packages, tmp_path: Path) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"'})
    packages.add("triton", {"triton/a.py": b'"TRITON_X"'})
    scan_kept(packages, tmp_path)
    for path in (packages.root / "triton-1.0.dist-info").iterdir():
        path.unlink()
    (packages.root / "triton-1.0.dist-info").rmdir()
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS_MORE"'})
    assert not scan_kept(packages, tmp_path).is_read("TRITON_X")
    (kept,) = (tmp_path / "cache").iterdir()
    assert "TRITON_X" not in kept.read_text()


def test_an_own_change_to_the_users_code_is_seen_at_once(packages: Packages, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    installation = packages.installation._replace(source_directories=(str(project),))
    (project / "a.py").write_bytes(b'"TORCH_ONE"')
    assert scan(installation, cache_directory=str(tmp_path / "cache")).is_read("TORCH_ONE")
    (project / "a.py").write_bytes(b'"TORCH_TWO_"')
    assert not scan(installation, cache_directory=str(tmp_path / "cache")).is_read("TORCH_ONE")


BROKEN = (
    b"",
    b"\0" * 100,
    b"{",
    b"[]",
    b"null",
    b'{"format": 1}',
    b'{"format": 2, "units": {}}',
    b'{"format": 1, "units": []}',
    b'{"format": 1, "units": {"x": 3}}',
    b'{"format": 1, "units": {"x": ["s", "", [], [], [], [], {}, "", []]}}',
    b'{"format": 1, "units": {"x": ["s", [], [], [], [], [], [], "", []]}}',
    b'{"format": 1, "units": {"x": ["s", [1], [], [], [], [], {}, "", []]}}',
    b'{"format": 1, "units": {"x": ["s", [], [], [], [], [], {"a": "b"}, "", []]}}',
    b"[" * 200_000,
)


@pytest.mark.parametrize("content", BROKEN)
def test_a_cache_that_makes_no_sense_is_replaced(packages: Packages, tmp_path: Path, content: bytes) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"'})
    scan_kept(packages, tmp_path)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(content)
    assert scan_kept(packages, tmp_path).is_read("TORCH_LOGS")
    assert name_cache.load(str(kept))


def test_a_cache_too_large_or_of_another_kind_is_not_read(tmp_path: Path) -> None:
    large, link, fifo = tmp_path / "large", tmp_path / "link", tmp_path / "fifo"
    name_cache.save(str(large), {"x": Unit("s")})
    link.symlink_to(large)
    assert name_cache.load(str(large)) == {"x": Unit("s", asked={})}
    assert name_cache.load(str(link)) == {}
    os.mkfifo(fifo)
    assert name_cache.load(str(fifo)) == {}
    with large.open("ab") as file:
        file.truncate(9 << 20)
    assert name_cache.load(str(large)) == {}
    assert name_cache.load("/nowhere/at/all") == {}


def test_the_cache_is_private_and_leaves_nothing_half_written(packages: Packages, tmp_path: Path) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"'})
    scan_kept(packages, tmp_path)
    (kept,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_the_cache_keeps_a_bounded_number_of_installations(tmp_path: Path) -> None:
    for number in range(20):
        name_cache.save(name_cache.path_for(str(tmp_path), [str(number)]), {"x": Unit("s")})
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_cache_that_cannot_be_written_is_done_without(packages: Packages, tmp_path: Path) -> None:
    packages.add("torch", {"torch/a.py": b'"TORCH_LOGS"'})
    (tmp_path / "cache").write_bytes(b"in the way")
    assert scan_kept(packages, tmp_path).is_read("TORCH_LOGS")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/saferun"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/saferun"),
        ({"HOME": "/h"}, "/h/.cache/saferun"),
        ({}, None),
    ],
)
def test_the_cache_is_where_the_xdg_rules_say(environ: dict[str, str], expected: str | None) -> None:
    assert name_cache.default_directory(environ) == expected
