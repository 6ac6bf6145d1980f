"""Munge credentials, by real daemons and by programs that behave badly."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.linux import munge as munge_module
from saferun.linux.munge import Munge, MungeError, decode, encode, find_munge
from tests.breadth import slow_but
from tests.process.munge_daemons import credential_of, munge_hosts, needs_munge
from tests.process.somebody import SOMEBODY, as_user


@pytest.fixture(name="hosts", scope="module")
def _hosts() -> Iterator[list[Munge]]:
    with munge_hosts(2) as hosts:
        yield hosts


@needs_munge
def test_what_is_encoded_on_one_host_is_decoded_on_another(hosts: list[Munge]) -> None:
    """That is what it is for. The payload is any bytes."""
    payload = b'{"a": 1}\n\nb\0c'
    assert decode(hosts[1], encode(hosts[0], payload, 300)) == payload


@needs_munge
def test_a_credential_is_decoded_more_than_once_on_a_host(hosts: list[Munge]) -> None:
    """Several processes of a user on one host are given the same one, and munged calls that a replay."""
    credential = encode(hosts[0], b"payload", 300)
    assert [decode(hosts[1], credential) for _ in range(3)] == [b"payload"] * 3


@needs_munge
def test_a_credential_of_somebody_else_is_refused(hosts: list[Munge]) -> None:
    """Anybody can make one that this user can read, with a secret in it that they know."""
    theirs = credential_of(hosts[0], b"payload", uid=SOMEBODY, readable_for=os.geteuid())
    with pytest.raises(MungeError, match="made by user 54321"):
        decode(hosts[1], theirs)


@needs_munge
def test_nobody_else_reads_a_credential(hosts: list[Munge]) -> None:
    """It is published in the clear."""
    credential = encode(hosts[0], b"payload", 300)

    def read() -> str:
        try:
            return decode(hosts[1], credential).decode()
        except MungeError as error:
            return str(error)

    assert as_user(read) == "the credential is another user's"
    assert decode(hosts[1], credential) == b"payload"


@needs_munge
def test_root_is_believed_by_every_user(hosts: list[Munge]) -> None:
    """Root can do in a user's name whatever it wants."""
    credential = credential_of(hosts[0], b"payload", uid=0, readable_for=SOMEBODY)
    assert as_user(lambda: decode(hosts[1], credential).decode()) == "payload"


@needs_munge
def test_an_expired_credential_is_refused(hosts: list[Munge]) -> None:
    """The secret of an old job that became known later must not come back in its old credential."""
    credential = encode(hosts[0], b"payload", 1)

    def read_on() -> None:
        while decode(hosts[1], credential) == b"payload":
            time.sleep(0.05)

    with pytest.raises(MungeError, match="has expired"):
        read_on()


@needs_munge
@pytest.mark.parametrize("credential", ["", "MUNGE:AAAA:", "MUNGE:\0:", "MUNGE:A:\nMUNGE:A:", "x" * 100_000, "--help"])
def test_what_is_no_credential_is_refused(hosts: list[Munge], credential: str) -> None:
    """Whoever can write to the store chooses it."""
    with pytest.raises(MungeError):
        decode(hosts[1], credential)


@needs_munge
def test_a_changed_credential_is_refused(hosts: list[Munge]) -> None:
    """Its content is authenticated."""
    credential = encode(hosts[0], b"payload", 300)
    middle = len(credential) // 2
    changed = credential[:middle] + ("B" if credential[middle] == "A" else "A") + credential[middle + 1 :]
    with pytest.raises(MungeError):
        decode(hosts[1], changed)


@needs_munge
def test_a_daemon_that_is_gone_is_said(tmp_path: Path) -> None:
    """Its socket may still be there."""
    with pytest.raises(MungeError, match="the munge daemon of this host does not answer"):
        encode(Munge("/usr/bin/munge", "/usr/bin/unmunge", str(tmp_path / "socket")), b"payload", 300)


# ---------------------------------------------------------------------------------------------------- bad programs


def fake(directory: Path, script: str) -> Munge:
    program = directory / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Munge(str(program), str(program), "/nowhere")


def answer(status: str = "0", uid: str = "", length: int = 7, payload: str = "payload") -> str:
    uid = uid or str(os.geteuid())
    return "printf %s " + shlex.quote(f"STATUS:   {status}\nUID:   {uid}\nLENGTH:   {length}\n\n{payload}")


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Munged may be stopped; nothing of the program is left behind."""
    monkeypatch.setattr(munge_module, "_TIMEOUT_S", 0.3)
    munge = fake(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    for call in (lambda: encode(munge, b"", 300), lambda: decode(munge, "MUNGE:A:")):
        with pytest.raises(MungeError, match="did not end within"):
            call()
    pid = int((tmp_path / "pid").read_text() or "0")
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    "script",
    slow_but(
        [
            "exit 3",
            "exec yes",
            "kill -9 $$",
            "printf 'STATUS: 0\\n'",
            answer(status="15"),
            answer(status="Failure (1)"),
            answer(status="99999999999999999999"),
            answer(uid="-1"),
            answer(uid="4294967295"),
            answer(uid="0 (54321)"),
            answer(length=8),
            answer(length=6),
            answer(payload=""),
        ],
        *("exit 3", "exec yes", answer(uid="-1"), answer(length=6)),
    ),
)
def test_what_makes_no_sense_is_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Whatever the program does, there is a payload of this user's or none at all."""
    monkeypatch.setattr(munge_module, "_TIMEOUT_S", 0.3)
    with pytest.raises(MungeError):
        decode(fake(tmp_path, script), "MUNGE:A:")
    with pytest.raises(MungeError):
        encode(fake(tmp_path, script), b"payload", 300)


def test_a_program_without_the_option_for_numbers_is_understood(tmp_path: Path) -> None:
    """Old ones write names, and the numbers in brackets after them."""
    script = 'test "$1" = --numeric && { echo "Unrecognized option" >&2; exit 1; }\n'
    script += answer(status="Success (0)", uid=f"some (1) body ({os.geteuid()})")
    assert decode(fake(tmp_path, script), "MUNGE:A:") == b"payload"


def test_a_program_that_cannot_be_run_is_said(tmp_path: Path) -> None:
    """It may be for another architecture."""
    (tmp_path / "program").write_bytes(b"\x7fELF")
    (tmp_path / "program").chmod(0o755)
    program = str(tmp_path / "program")
    with pytest.raises(MungeError, match="cannot be run"):
        encode(Munge(program, program, "/nowhere"), b"payload", 300)


# ------------------------------------------------------------------------------------------------------- where it is


@needs_munge
def test_munge_is_not_there_without_its_socket_or_its_programs(hosts: list[Munge]) -> None:
    """PATH is not asked, and no daemon."""
    socket = hosts[0].socket
    assert find_munge(sockets=[socket]) == hosts[0]
    assert find_munge(sockets=()) is None
    assert find_munge(sockets=[str(Path(socket).parent / "log"), "/nowhere/socket"]) is None
    assert find_munge(["/nowhere"], [socket]) is None


@needs_munge
def test_programs_of_others_are_passed_over(hosts: list[Munge], tmp_path: Path) -> None:
    """A directory may come before the system's own."""
    socket = hosts[0].socket
    tmp_path.chmod(0o755)
    for name in ("munge", "unmunge"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        os.chown(program, SOMEBODY, SOMEBODY)
    system = ["/usr/bin"]
    assert find_munge([str(tmp_path), *system], [socket]) == hosts[0]
    for name in ("munge", "unmunge"):
        os.chown(tmp_path / name, 0, 0)
    assert find_munge([str(tmp_path), *system], [socket]) == Munge(
        str(tmp_path / "munge"), str(tmp_path / "unmunge"), socket
    )
    (tmp_path / "munge").chmod(0o757)
    found = find_munge([str(tmp_path), *system], [socket])
    assert found is not None
    assert found.encoder == "/usr/bin/munge"


@needs_munge
def test_a_socket_in_a_directory_that_others_write_is_passed_over(hosts: list[Munge]) -> None:
    """Who asks a daemon of somebody else's tells them the secret."""
    folder = Path(hosts[0].socket).parent
    assert find_munge(sockets=[hosts[0].socket]) == hosts[0]
    for changed in (folder, folder.parent):
        mode = stat.S_IMODE(changed.stat().st_mode)
        changed.chmod(0o777)
        assert find_munge(sockets=[hosts[0].socket]) is None
        changed.chmod(mode)
    os.chown(folder.parent, SOMEBODY, SOMEBODY)
    assert find_munge(sockets=[hosts[0].socket]) is None
    os.chown(folder.parent, 0, 0)
    assert find_munge(sockets=[hosts[0].socket]) == hosts[0]
