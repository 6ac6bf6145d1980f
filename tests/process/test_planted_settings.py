"""Settings that another user of the machine can have planted do not count, and that is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root

PLANTED = "env: {PLANTED: 'yes'}\n"
PROFILES = "profiles: {production: {variables: {PLANTED: 'yes'}}}\n"
PROFILE = "variables: {PLANTED: 'yes'}\n"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory like /tmp: everybody may make files, and remove their own."""
    with directory_for_all(0o1777) as found:
        yield found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """It lies elsewhere, and prints whether it was got at."""
    path = tmp_path / "train.py"
    path.write_text("import os\nprint('planted:', os.environ.get('PLANTED', 'no'))\n")
    return path


def launched(directory: Path, script: Path, *options: str, **environ: str) -> tuple[str, list[str]]:
    """What the rank printed, and saferun's own lines."""
    command = [sys.executable, "-m", "saferun", "--run-dir", "none", "--prefix", "none", *options, str(script)]
    home = {"HOME": str(directory / "home"), "XDG_CONFIG_HOME": ""}
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **home, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def plant(path: Path, content: str, uid: int = SOMEBODY) -> None:
    def write() -> None:
        os.makedirs(path.parent, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content.encode())

    as_user(write, uid)


@needs_root
def test_planted_settings_are_ignored_and_named(directory: Path, script: Path) -> None:
    """Whoever may make a file in /tmp would run code as whoever starts a job there."""
    plant(directory / "saferun.yaml", PLANTED)
    said = f"saferun: saferun.yaml is ignored: it belongs to user {SOMEBODY} (to use it all the same, "
    assert launched(directory, script) == ("planted: no", [f"{said}pass --config saferun.yaml)"])
    assert launched(directory, script, "--config", "saferun.yaml") == ("planted: yes", [])
    assert launched(directory, script, SAFERUN_CONFIG="saferun.yaml") == ("planted: yes", [])


@needs_root
def test_planted_profiles_are_ignored_and_named(directory: Path, script: Path) -> None:
    """One named like the default profile would be in every launch; beside settings from elsewhere too."""
    plant(directory / "saferun.yaml", PROFILES)
    said = f"saferun: saferun.yaml is ignored: it belongs to user {SOMEBODY} (to use it all the same, "
    assert launched(directory, script) == ("planted: no", [f"{said}pass --config saferun.yaml)"])
    lines = [f"{said}pass --env-profile-path saferun.yaml)"]
    assert launched(directory, script, SAFERUN_CONFIG="") == ("planted: no", lines)
    for options in (("--config", "saferun.yaml"), ("--env-profile-path", "saferun.yaml")):
        assert launched(directory, script, *options)[0] == "planted: yes"


@needs_root
@pytest.mark.parametrize("whose", ["directory", "file"])
def test_planted_profiles_of_the_home_directory_are_ignored_and_named(
    directory: Path, script: Path, whose: str
) -> None:
    """As with ``sudo -E``, where HOME is another user's."""
    profiles = directory / "home" / ".config" / "saferun" / "profiles"
    path = profiles / "production.yaml"
    plant(path, PROFILE)
    if whose == "file":
        for folder in (profiles, *list(profiles.parents)[:3]):
            os.chown(folder, 0, 0)
    named, reason = (path, "it") if whose == "file" else (profiles, "its directory")
    line = f"saferun: {named} is ignored: {reason} belongs to user {SOMEBODY} (to use it all the same, "
    assert launched(directory, script) == ("planted: no", [f"{line}pass --env-profile-path {named})"])
    assert launched(directory, script, "--env-profile-path", str(profiles))[0] == "planted: yes"


@needs_root
def test_what_is_ignored_is_neither_listed_nor_an_error(directory: Path, script: Path) -> None:
    profiles = directory / "home" / ".config" / "saferun" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "mine.yaml").write_text("variables: {X: 1}\n")
    (profiles / "theirs.yaml").write_text(PROFILE)
    os.chown(profiles / "theirs.yaml", SOMEBODY, -1)
    program = "from saferun.ctl import main; main(['env', 'list'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HOME": str(directory / "home"), "XDG_CONFIG_HOME": ""},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert "mine" in listed
    assert "theirs" not in listed
    assert done.stderr.count("theirs.yaml is ignored") == len(done.stderr.splitlines()) == 1
    assert launched(directory, script, "--env-profile", "mine") == ("planted: no", [])


@needs_root
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("the file", "it is writable by everyone"),
        ("its directory", "its directory is writable by everyone"),
        ("a directory above", "a directory above it is writable by everyone"),
    ],
)
def test_settings_that_others_may_write_are_ignored(directory: Path, script: Path, what: str, words: str) -> None:
    job = directory / "job"
    job.mkdir()
    (job / "saferun.yaml").write_text(PLANTED)
    {"the file": job / "saferun.yaml", "its directory": job, "a directory above": directory}[what].chmod(0o777)
    out, lines = launched(job, script)
    assert out == "planted: no"
    assert [line for line in lines if words in line] == lines != []


def test_settings_of_our_own_count(directory: Path, script: Path) -> None:
    """Also in a directory like /tmp, where nobody else can replace them, and through a link of our own."""
    (directory / "settings.yaml").write_text(PLANTED)
    (directory / "saferun.yaml").symlink_to("settings.yaml")
    assert launched(directory, script) == ("planted: yes", ["saferun: settings from saferun.yaml"])


@needs_root
def test_planted_settings_that_cannot_be_read_end_nothing(directory: Path, script: Path) -> None:
    """Nor does a pipe that nobody writes, or a link that leads nowhere."""
    plant(directory / "saferun.yaml", "[")
    assert launched(directory, script)[0] == "planted: no"
    for make in (os.mkfifo, lambda path: os.symlink("nowhere", path), lambda path: os.symlink(path, path)):
        (directory / "saferun.yaml").unlink()
        as_user(lambda make=make: make(directory / "saferun.yaml"))  # type: ignore[misc]
        assert launched(directory, script) == ("planted: no", [])
