"""Which numbers are left out of a failure record by their names, and that writing it takes bounded time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.inject import saferun_written
from saferun.inject.saferun_written import is_secret, write
from tests.unit.inject.test_hook import environ_of, run

SECRETS = """
    token auth key pin pwd password secret salt nonce otp credentials
    api_key apikey apiKey API_KEY my_api_key_2 hf_token HFToken HF_TOKEN hftoken HFTOKEN token2 _token __token
    password2 passwd db_passwd dbPassword userpass db_pass accessKeyId access_key secret_key clientSecret AWSSecretKey
    auth_header oauth oauth2 oauth2_token authorization Authorization authtoken bearer_token sessionToken
    user_pin pin_code PIN pins api_keys access_tokens apiTokens ssh_key ssh_keys private_key_value encryption_key_size
    jwt psk totp cookie cred creds aws_creds wifiPsk key1 sig signature saltValue tokenvalue token_value keyfile
    keyMaterial
""".split()
ORDINARY = """
    mapping tokenizer tokenizers tokens num_tokens n_tokens max_new_tokens tokens_per_s tokens_seen token_ids token_id
    bos_token_id eos_token_id padTokenId max_token token_count num_tokens_per_batch numTokens tokenized
    shape spin pinned
    pin_memory pinMemory pinv keys num_keys key_dim key_size n_key_value_heads num_key_value_heads key_padding_mask
    keypoints keyword_count query_key_dim author authors n_authors forward_pass backward_pass pass_id credit_rate
    bypass compass step lr loss batch_size hidden world_size rank i n x grad_norm happiness ping pingpong
    typing shipping
    clipping skipping opinion notpresent footprint option optim desalted_count
""".split()


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name: str) -> None:
    """Whatever stands around the word, and however words are joined."""
    assert is_secret(name)


@pytest.mark.parametrize("name", ORDINARY)
def test_names_of_other_things(name: str) -> None:
    """Letters within a word are no word."""
    assert not is_secret(name)


@given(st.text(max_size=300))
def test_any_name_has_an_answer(name: str) -> None:
    """Python allows the letters of all languages in names."""
    assert is_secret(name) in {True, False}


def test_a_record_takes_the_place_of_a_file_only(tmp_path: Path) -> None:
    """Not of a device, a directory or a FIFO, whatever is named."""
    os.mkfifo(tmp_path / "fifo")
    write(str(tmp_path / "fifo"), b"x")
    assert not (tmp_path / "fifo").is_file()
    write(str(tmp_path / "file"), b"1")
    write(str(tmp_path / "file"), b"2")
    assert (tmp_path / "file").read_bytes() == b"2"
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file"]


def test_an_error_of_the_file_system_is_raised(tmp_path: Path) -> None:
    """As it is where nothing is waited for."""
    with pytest.raises(FileNotFoundError):
        write(str(tmp_path / "missing" / "file"), b"x")


def test_a_file_system_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a FIFO that nobody reads lasts forever, as on a dead server."""
    monkeypatch.setattr(saferun_written, "_LONGEST_S", 0.2)
    stuck = f"{tmp_path}/file.{os.getpid()}.new"
    os.mkfifo(stuck)
    with pytest.raises(TimeoutError):
        write(str(tmp_path / "file"), b"x")
    reader = os.open(stuck, os.O_RDONLY | os.O_NONBLOCK)  # the thread goes on, and is over
    while not (tmp_path / "file").exists() and os.path.lexists(stuck):
        time.sleep(0.01)
    os.close(reader)


STUCK = """
import os{imports}
prefix = {prefix!r}
os.mkfifo(f"{{prefix}}.failure.{{os.getpid()}}.new")
{before}
raise ValueError("wrong")
"""


@pytest.mark.parametrize("before", ["", "sys.excepthook = lambda *args: sys.__stderr__.write('ValueError: wrong\\n')"])
def test_a_rank_that_fails_ends_while_the_file_system_hangs(before: str, tmp_path: Path) -> None:
    """With its own message and exit code; there is no record."""
    path = tmp_path / "script.py"
    prefix = tmp_path / "a0r0"
    path.write_text(STUCK.format(prefix=str(prefix), before=before, imports=", sys"))
    ended = run([str(path)], environ_of(prefix), tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: wrong\n")
    assert not (tmp_path / "a0r0.failure").exists()
