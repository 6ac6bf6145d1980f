"""How the failure record of a rank is written: which names are those of secrets, as JSON, and in bounded time.

The hook holds it beside ``saferun_failure.py``; like that it uses ``os``, ``sys`` and modules in C only, and runs no
code of the script's. saferun reads more names as secrets' than this does (``saferun/text/secret_names.py``), and drops
their values where it takes the record: this is so that hardly any are in the rank's own file.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LONGEST_S = 2.0
"""How long a rank that fails waits for a file system at most."""
_IN_MEMORY = ("/dev/shm/", "/run/")  # noqa: S108 - no file is made under a fixed name
_LONGEST_NAME = 200

# -------------------------------------------------------------------------------------------------------------- secrets

# Anywhere in a name, whatever its words are.
_WHEREVER = (
    *("passw", "passphrase", "passcode", "secret", "credential", "apikey", "accesskey", "privatekey", "privkey"),
    *("authkey", "signingkey", "encryptionkey", "masterkey", "sshkey", "authtoken", "accesstoken", "bearer"),
)


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


_PARTS = _set(
    """auth cookie cookies cred creds csrf jwt key nonce nonces otp otps pass pat pin pins psk pw pwd salt salts sig
    signature token totp"""
)
# Of words that are written together: hftoken, dbpass, tokenvalue, authheader.
_BEGINNINGS, _ENDINGS = ("token", "key", "auth", "cred"), ("token", "key", "auth", "cred", "pass", "pwd", "pw")
_ORDINARY = _set(
    """tokens tokenid tokenids tokenizer tokenizers tokenize tokenized tokenization tokenwise keys keypoint keypoints
    keyword keywords keyframe keyframes keyed keyboard author authors authored credit credits bypass compass monkey
    turkey subtoken"""
)
# A word after or before such a word that makes it harmless: token_id, max_token, key_dim, pin_memory.
_BEHIND = {
    "token": _set(
        """id ids idx index indices count counts len length lengths size dim type types mask masks pos position
        positions embedding embeddings loss accuracy num budget limit rate drop dropout prob probs logprob logprobs
        weight weights shape dispatcher level throughput"""
    ),
    "key": _set(
        """dim dims size len length lengths head heads mask padding value values state states layer layers proj
        projection cache index count shape norm bias weight points frames"""
    ),
    "pin": _set("memory mem cpu cpus core cores thread threads numa gpu"),
    "pass": _set("id idx index count num"),
    "sig": _set("figs digits"),
}
_BEFORE = {
    "token": _set(
        """max min num n per bos eos pad unk sep cls mask avg mean total by first last next prev new input output image
        special start stop end"""
    ),
    "key": _set("sort cache state query num n rng prng group primary batch"),
    "pass": _set("forward backward fwd bwd num n per first second"),
}
# Plurals are counts and lists, but not after these.
_OF_SECRETS = _set("api access auth bearer refresh session private signing ssh secret")


def is_secret(name: str) -> bool:
    """Whether the number of this name is left out: one of its words is that of a secret, and none beside it says else.

    Words end at anything that is no letter, and at capitals: ``hf_token``, ``HFToken``, ``password2``, ``accessKeyId``.
    """
    name = name[:_LONGEST_NAME]
    parts = _parts_of(name)
    together = "".join(parts)
    if any(stem in together for stem in _WHEREVER):
        return True
    return any(_is_of_a_secret(parts, at) for at in range(len(parts)))


def _parts_of(name: str) -> list[str]:
    split: list[str] = []
    for at, one in enumerate(name):
        behind = name[at + 1 : at + 2]
        if not one.isalpha():
            split.append(" ")
        elif one.isupper() and at and (name[at - 1].islower() or (name[at - 1].isupper() and behind.islower())):
            split += (" ", one)
        else:
            split.append(one)
    return "".join(split).lower().split()


def _is_of_a_secret(parts: list[str], at: int) -> bool:
    part = parts[at]
    before, behind = parts[at - 1] if at else "", parts[at + 1] if at + 1 < len(parts) else ""
    if part in {"tokens", "keys"}:
        return before in _OF_SECRETS
    if before in _BEFORE.get(part, ()) or behind in _BEHIND.get(part, ()):
        return False
    if part in _PARTS:
        return True
    return (part.startswith(_BEGINNINGS) or part.endswith(_ENDINGS)) and part not in _ORDINARY


# -------------------------------------------------------------------------------------------------------------- as JSON


def as_json(value: object) -> str:
    """Numbers, texts, lists and dictionaries of these as JSON: the module ``json`` would have to be imported."""
    if value is None or type(value) is bool:
        return "null" if value is None else "true" if value else "false"
    if type(value) is dict:
        return "{" + ", ".join(f"{_text(name)}: {as_json(item)}" for name, item in value.items()) + "}"
    if type(value) is list or type(value) is tuple:
        return "[" + ", ".join(map(as_json, value)) + "]"
    return _text(value) if type(value) is str else repr(value)


def _text(text: str) -> str:
    return '"' + "".join(one if " " <= one <= "~" and one not in '"\\' else _escaped(ord(one)) for one in text) + '"'


def _escaped(number: int) -> str:
    if number < 0x10000:  # noqa: PLR2004 - as JSON has it
        return f"\\u{number:04x}"
    return _escaped(0xD7C0 + (number >> 10)) + _escaped(0xDC00 + (number & 0x3FF))


# ------------------------------------------------------------------------------------------------------------- the file


def write(path: str, content: bytes) -> None:
    """Write the record in one piece: whoever reads it finds all of it, or another one.

    It takes the place of a file, and of nothing else: not of a device. Where the path may be on a disk, a thread writes
    it, and this waits two seconds at most: a file system that hangs keeps no rank from ending.

    Raises:
        OSError: it cannot be written, or not in time.
    """
    if path.startswith(_IN_MEMORY):
        _write(path, content)
        return
    is_known = "_thread" in sys.modules
    import _thread

    if not is_known:
        del sys.modules["_thread"]
    failed: list[BaseException] = []
    is_over: Any = _thread.allocate_lock()
    is_over.acquire()

    def work() -> None:
        try:
            _write(path, content)
        except BaseException as error:
            failed.append(error)
        finally:
            is_over.release()

    _thread.start_new_thread(work, ())
    if not is_over.acquire(timeout=_LONGEST_S):
        raise TimeoutError(path)
    if failed:
        raise failed[0]


def _write(path: str, content: bytes) -> None:
    if os.path.lexists(path) and not os.path.isfile(path):
        return
    making = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(making, flags, 0o600)
    try:
        try:
            while content:
                content = content[os.write(fd, content) :]
        finally:
            os.close(fd)
        os.rename(making, path)
    except BaseException:
        os.unlink(making)
        raise
