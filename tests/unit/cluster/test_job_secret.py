"""The job secret: which files it is read from, and the keys that follow from it."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest

from saferun.cluster.secret import MOST_BYTES, JobSecret, read_secret
from saferun.errors import UsageError

RAW = bytes(range(32))


def written(path: Path, content: bytes = RAW, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def refusal(path: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read_secret(path)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) == 2
    assert path in caught.value.what
    return caught.value


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n"])
def test_a_line_feed_at_the_end_is_none_of_the_secret(tmp_path: Path, end: bytes) -> None:
    """Editors put it there; the same secret came to another host without it."""
    assert read_secret(written(tmp_path / "secret", RAW + end)).raw == RAW


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o644])
def test_a_secret_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    """It is none then."""
    refused = refusal(written(tmp_path / "secret", mode=mode))
    assert "may read or write it" in refused.what
    assert "chmod 600" in refused.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give files away")
def test_a_secret_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Who owns the file knows it, and can change it."""
    path = written(tmp_path / "secret")
    os.chown(path, 54321, 54321)
    assert "it belongs to user 54321" in refusal(path).what


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 15, b"x" * 15 + b"\n", b"x" * (MOST_BYTES + 1), b"x" * 10**6])
def test_a_secret_that_is_too_short_or_too_long_is_refused(tmp_path: Path, content: bytes) -> None:
    """What can be guessed protects nothing; and no more is read than there can be."""
    assert "16 to 4096 are wanted" in refusal(written(tmp_path / "secret", content)).what


@pytest.mark.parametrize("size", [16, MOST_BYTES])
def test_the_shortest_and_the_longest_secret_are_read(tmp_path: Path, size: int) -> None:
    assert len(read_secret(written(tmp_path / "secret", b"x" * size + b"\n")).raw) == size


def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """A pipe, a directory, a name that nobody can have, and nothing at all."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "not a regular file" in refusal(str(tmp_path / "pipe")).what
    assert "cannot be read" in refusal(str(tmp_path)).what
    assert "no such file" in refusal(str(tmp_path / "none")).what
    with pytest.raises(UsageError):
        read_secret("\0")


def test_a_link_of_this_user_is_followed(tmp_path: Path) -> None:
    """Volumes of Kubernetes are made of such links: the file, and a directory on the way."""
    (tmp_path / "..2026").mkdir()
    written(tmp_path / "..2026" / "secret")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "secret").symlink_to("..data/secret")
    assert read_secret(str(tmp_path / "secret")).raw == RAW


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give links away")
def test_a_link_of_somebody_else_is_not_followed(tmp_path: Path) -> None:
    """It could lead to a secret that its owner knows."""
    written(tmp_path / "file")
    (tmp_path / "secret").symlink_to("file")
    os.chown(tmp_path / "secret", 54321, 54321, follow_symlinks=False)
    assert "belongs to user 54321" in refusal(str(tmp_path / "secret")).what


def test_what_named_the_file_stands_in_the_message(tmp_path: Path) -> None:
    """A variable of the environment is changed elsewhere than an option."""
    with pytest.raises(UsageError, match=r"^saferun: SAFERUN_JOB_SECRET_FILE "):
        read_secret(str(tmp_path / "none"), "SAFERUN_JOB_SECRET_FILE")


def test_each_use_and_each_job_has_a_key_of_its_own() -> None:
    """What was signed for one of them is worth nothing for another one."""
    keys = {
        key
        for raw in (RAW, RAW[::-1])
        for job in ("a", "b", "")
        for key in (JobSecret(raw).signing_key(job), JobSecret(raw).sealing_key(job))
    }
    assert len(keys) == 12
    assert {len(key) for key in keys} == {32}
    assert JobSecret(RAW).signing_key("a") == JobSecret(RAW).signing_key("a")


def test_a_name_of_a_job_may_hold_anything() -> None:
    """It comes from the command line."""
    assert JobSecret(RAW).signing_key("\udcff\0ü") != JobSecret(RAW).signing_key("")


def test_the_secret_is_in_nothing_that_is_made_of_it() -> None:
    """A log, a traceback, a file of settings."""
    secret = JobSecret(b"correct horse battery staple")
    for text in (repr(secret), str(secret), f"{secret!r}", repr([secret]), repr({"secret": secret})):
        assert "horse" not in text
    for storing in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not to be copied"):
            storing(secret)
    assert not hasattr(secret, "__dict__")
