"""Values that are signed and sealed with the job secret: what counts as one, whatever others write."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster.secret import JobSecret
from saferun.cluster.signed import (
    MAGIC,
    OVERHEAD_BYTES,
    CannotSealError,
    Signer,
    cipher_of,
    is_confidential,
    is_signed,
    unverified,
)
from tests.examples import examples

SECRET = JobSecret(bytes(range(32)))
JOB = "job7"
KEY = "a0/heartbeat/1"
SEALED_KEY = "a0/chunk/1/0/end"
CONFIDENTIAL = (SEALED_KEY, "r0/host/1", "r0/assignment/1", "a0/state/1", "a0/log/0", "r0/fail", "r0/missing")
LEGIBLE = (KEY, "saferun/control", "saferun/leader", "saferun/job", "round", "r0/open", "r0/done")


def signer(raw: bytes = bytes(range(32)), job: str = JOB, *, seals: bool = True) -> Signer:
    return Signer(JobSecret(raw), job, seals=seals)


@pytest.mark.parametrize("key", [*CONFIDENTIAL, *LEGIBLE])
@pytest.mark.parametrize("content", [b"", b"7", "ünï".encode(), bytes(range(256)), b"x" * 100_000])
def test_what_one_host_says_another_one_reads(key: str, content: bytes) -> None:
    found = signer().open(key, signer().protect(key, content, 7))
    assert found is not None
    assert found == (content, 7)


@pytest.mark.parametrize("key", CONFIDENTIAL)
def test_evidence_cards_and_words_are_encrypted(key: str) -> None:
    """What a rank wrote, an interface's address, the token of a listener."""
    assert is_confidential(key)
    stored = signer().protect(key, b"S3CR3TVALUE" * 100)
    assert b"S3CR3T" not in stored
    assert unverified(stored) == b""
    assert signer().protect(key, b"S3CR3TVALUE" * 100) != stored


@pytest.mark.parametrize("key", LEGIBLE)
def test_where_the_store_is_can_be_read_without_the_secret(key: str) -> None:
    """So that a host with another one can say what is wrong."""
    stored = signer().protect(key, b"port 7")
    assert is_signed(stored)
    assert unverified(stored) == b"port 7"


@pytest.mark.parametrize("key", [KEY, SEALED_KEY])
@pytest.mark.parametrize(
    "other",
    [
        signer(bytes(32)),
        signer(job="job8"),
        signer(bytes(range(31))),
    ],
    ids=["another secret", "another job", "a shorter secret"],
)
def test_what_another_job_or_another_secret_has_signed_is_nothing(key: str, other: Signer) -> None:
    assert signer().open(key, other.protect(key, b"7")) is None


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("a0/log/3", "a1/log/3"),  # another attempt
        ("a0/log/3", "a0/log/4"),  # another number
        ("a0/heartbeat/1", "a0/heartbeat/2"),  # another host
        ("a0/chunk/1/0/end", "a0/chunk/1/0/hang-1"),  # another piece
        ("r0/assignment/1", "r1/assignment/1"),  # another meeting
        ("a0/log/1", "a0/state/1"),  # another use
        ("saferun/job", "saferun/control"),
    ],
)
def test_what_was_said_elsewhere_is_nothing_here(said: str, heard: str) -> None:
    """A signature is for one key, which tells the attempt, the host and the number of a message."""
    assert signer().open(heard, signer().protect(said, b"7", 3)) is None


@pytest.mark.parametrize("key", [KEY, SEALED_KEY])
def test_any_changed_or_missing_byte_makes_it_nothing(key: str) -> None:
    """Of the head, the counter, the signature and the content."""
    stored = signer().protect(key, b"seven and eight", 7)
    for at in range(len(stored)):
        for change in (1, 0x80):
            changed = bytearray(stored)
            changed[at] ^= change
            assert signer().open(key, bytes(changed)) is None
        assert signer().open(key, stored[:at]) is None
    assert signer().open(key, stored + b"x") is None


def test_what_is_to_be_encrypted_and_is_not_is_nothing() -> None:
    """The byte that says so is signed; whoever leaves encryption out has another signer than this job's hosts."""
    assert signer().open(SEALED_KEY, signer(seals=False).protect(SEALED_KEY, b"7")) is None
    assert signer(seals=False).open(SEALED_KEY, signer().protect(SEALED_KEY, b"7")) is None


def test_an_older_value_is_not_taken_for_a_newer_one() -> None:
    """A beat that somebody has kept and writes again."""
    host, leader = signer(), signer()
    stored = [host.protect(KEY, str(count), count) for count in range(5)]
    assert [leader.open_newest(KEY, stored[at]) is not None for at in (0, 1, 1, 3, 2, 0, 3, 4)] == [
        *(True, True, True, True, False, False, True, True)
    ]
    # Each key has its own.
    other = host.protect("a0/heartbeat/2", b"0", 0)
    assert leader.open_newest("a0/heartbeat/2", other) is not None


def test_a_huge_value_is_not_even_looked_at() -> None:
    """Its length alone says that nobody of the job wrote it."""
    stored = signer().protect(SEALED_KEY, b"x" * 1000)
    assert signer().open(SEALED_KEY, stored, longest=1000) is not None
    assert signer().open(SEALED_KEY, stored, longest=999) is None
    assert len(stored) == 1000 + OVERHEAD_BYTES
    assert signer().open(KEY, MAGIC + b"p" + bytes(30 << 20)) is None


def test_what_is_ignored_is_told() -> None:
    told: list[str] = []
    reader = Signer(SECRET, JOB, on_ignored=told.append)
    reader.open(KEY, b"7")
    reader.open_newest(KEY, b"8")
    reader.open(KEY, reader.protect(KEY, b"9"))
    assert told == [KEY, KEY]


def test_a_value_of_this_job_that_comes_late_is_no_stranger() -> None:
    """A host that changed its route wrote two heartbeats on two connections, and the first one arrived last."""
    told: list[str] = []
    reader = Signer(SECRET, JOB, on_ignored=told.append)
    for count in (1, 3, 2):
        reader.open_newest(KEY, signer().protect(KEY, str(count), count))
    assert told == []


def test_neither_keys_nor_secret_are_in_what_is_shown() -> None:
    assert repr(signer()) == "Signer(hidden)"


@given(st.binary(max_size=300), st.sampled_from([*CONFIDENTIAL, *LEGIBLE]))
@examples(400)
def test_any_bytes_are_read_or_refused(stored: bytes, key: str) -> None:
    """With the head that a true value has, and without."""
    for content in (stored, MAGIC + stored, MAGIC + b"p" + stored, MAGIC + b"s" + stored):
        assert signer().open(key, content) is None
        assert signer().open_newest(key, content) is None
        assert isinstance(unverified(content), bytes)


@given(st.binary(min_size=1, max_size=80), st.integers(0, 200), st.binary(min_size=1, max_size=20))
@examples(300)
def test_bytes_that_are_put_into_a_value_make_it_nothing(content: bytes, at: int, put: bytes) -> None:
    """Wherever, and however many."""
    for key in (KEY, SEALED_KEY):
        stored = signer().protect(key, content, 3)
        changed = stored[:at] + put + stored[at + len(put) :]
        found = signer().open(key, changed)
        assert found is None or changed == stored


def test_where_the_library_is_missing_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody is met; what is not encrypted does without it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(CannotSealError, match="cryptography"):
        cipher_of(bytes(32))
    with pytest.raises(CannotSealError):
        signer()
    assert signer(seals=False).open(KEY, signer(seals=False).protect(KEY, b"7")) is not None
