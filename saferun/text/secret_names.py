"""Which names are those of secrets, whose values reach no file, no terminal and no other host. Pure.

A name is read word by word (``HF_TOKEN``, ``apiKey``, ``--client-secret``), because many names in training code hold
such a word but no secret: ``tokenizer``, ``max_tokens``, ``eos_token``, ``key_padding_mask``, ``forward_pass``. A name
with such a word that is not known to be harmless is taken for a secret's.

Word lists of secret scanners: https://github.com/gitleaks/gitleaks (``generic-api-key``) and
https://github.com/Yelp/detect-secrets (``plugins/keyword.py``).
"""

from __future__ import annotations

import re

_LONGEST = 200
_MOST_KNOWN = 4096


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Anywhere in a name, however its words are joined.
_WHEREVER = (
    *("password", "passwd", "passphrase", "passcode", "passwort", "secret", "credential", "apikey", "accesskey"),
    *("privatekey", "authkey", "signingkey", "encryptionkey", "accountkey", "licensekey", "masterkey", "sshkey"),
    *("servicekey", "clientkey", "dbkey", "databasekey", "appkey", "applicationkey", "privkey", "keypass", "contrase"),
    *("authtoken", "accesstoken", "refreshtoken", "bearer", "pgpass", "connectionstring", "connstr", "webhook"),
)
# Words that suffice anywhere, and words that do only at the end.
_ALONE = _set("JWT COOKIE COOKIES CRED CREDS DSN PSK CSRF XSRF OTP TOTP OAUTH AUTHORIZATION SESSIONID")
_LAST = _set("PASS PW PIN SIGNATURE")
_LAST_OF_SEVERAL = _set("PAT PWD SAS SIG")
# Plurals are counts and lists, except these.
_PLURALS = _set("TOKENS KEYS")
_BEFORE_PLURALS = _set("API ACCESS AUTH BEARER REFRESH SESSION PRIVATE SIGNING ENCRYPTION SSH")
# Endings of names of one word.
_ENDINGS = ("TOKEN", "PASS", "PWD", "PW")
_SHORTEST_ENDED = 5
_NO_SECRETS = _set(
    """DETOKEN RETOKEN SUBTOKEN MULTITOKEN NONTOKEN BYPASS COMPASS ENCOMPASS SURPASS TRESPASS LOWPASS HIGHPASS BANDPASS
    SINGLEPASS MULTIPASS PREPASS SUBPASS OLDPWD"""
)
# Words before or after such a word that make it harmless.
_HARMLESS_BEFORE = {
    "TOKEN": _set(
        """BOS EOS PAD UNK SEP CLS MASK SPECIAL IMAGE VIDEO AUDIO IMG VISION SPEECH TEXT PROMPT STOP START END BEGIN EOT
        EOD EOM FIRST LAST NEXT PREV PREVIOUS PER EACH MAX MIN NUM AVG MEAN TOTAL GLOBAL DRAFT TARGET INPUT OUTPUT NEW
        OLD CROSS UNEXPECTED LATENT CLASS DISTILLATION REGISTER BY ONE SINGLE PLACEHOLDER PATCH"""
    ),
    "KEY": _set(
        """PRIMARY FOREIGN SORT SORTING CACHE PARTITION GROUP DICT STATE ROW BATCH FEATURE METRIC METRICS DATA IMAGE
        TEXT LABEL LABELS INPUT OUTPUT MONITOR REWARD MISSING UNEXPECTED QUERY PUBLIC TARGET PROMPT RESPONSE CHOSEN
        REJECTED RNG PRNG JAX RANDOM QKV ATTN ATTENTION HEAD DATASET
        CONTENT AUDIO VIDEO COLUMN FIELD MAP HASH LOOKUP STORE INDEX JOIN ORDER DEDUP PER"""
    ),
    "PASS": _set(
        """FORWARD BACKWARD FWD BWD FIRST SECOND THIRD LAST NEXT ONE TWO SINGLE MULTI LOW HIGH BAND NUM PER EACH MAX MIN
        BY COMPILER FX OPTIMIZER OPTIMIZATION GRAPH FUSION LLVM INDUCTOR SHADER RENDER GRAD CUSTOM PRE POST OPT MUST
        DID CAN ALL TEST"""
    ),
    "PWD": _set(
        "OLD INIT INITIAL START ORIG ORIGINAL HOST JOB LAST CURRENT PREV PREVIOUS LOCAL LOGICAL WORK LAUNCH SUBMIT"
    ),
    "PAT": _set("FILE FILES GLOB NAME NAMES INCLUDE EXCLUDE MATCH DATA PATH SEARCH REGEX TEXT IGNORE SKIP"),
    "PIN": _set("CPU THREAD THREADS CORE CORES NUMA MEM MEMORY MPI GPU PROC PROCESS RANK TASK AUTO"),
    "SIG": _set("SEND STOP KILL TERM EXIT HANDLE RECV"),
    "SIGNATURE": _set("INPUT OUTPUT FUNCTION FUNC MODEL METHOD CALL TYPE OP KERNEL SCHEMA SERVING"),
    "PW": _set("CONV DW"),
}
_HARMLESS_BEHIND = {
    "TOKEN": _set(
        """ID IDS IDX INDEX INDICES LEN LENGTH LENGTHS SIZE COUNT COUNTS TYPE TYPES NUM DIM LIMIT BUDGET RATE DROP
        DROPPING DROPOUT POS POSITION POSITIONS EMB EMBED EMBEDDING EMBEDDINGS LEVEL PROB PROBS LOGPROB LOGPROBS MASK
        MASKS WEIGHT WEIGHTS SHIFT MIXING MERGING PRUNING DISPATCHER ACCURACY LOSS COL COLUMN PER STATS THROUGHPUT
        CLASSIFICATION CLASSES EMBD PADDING FREQ STRIDE PARALLEL PARALLELISM"""
    ),
    "KEY": _set(
        """SIZE LEN LENGTH LENGTHS DIM DIMS NAME NAMES TYPE VALUE VALUES PADDING MASK STATE STATES CACHE HEAD HEADS
        INDEX PROJ PROJECTION LAYER LAYERS PRESS BOARD WORD WORDS POINT POINTS FRAME FRAMES MAP MAPPING COLUMN COL SEP
        PREFIX WEIGHT BIAS NORM LORA QUERY AVERAGES FN FUNC FUNCTION ORDER COUNT BITS BYTES"""
    ),
    "AUTH": _set(
        "SOCK TYPE METHOD METHODS MODE PROVIDER SCOPE SCOPES URL URI HOST DOMAIN BACKEND ENABLED REQUIRED SERVER"
    ),
    "COOKIE": _set("CUTTER"),
}
_DATABASES = _set(
    """DATABASE DB REDIS MONGO MONGODB POSTGRES POSTGRESQL PG MYSQL MARIADB AMQP RABBITMQ BROKER CELERY CLICKHOUSE
    SQLALCHEMY CLOUDAMQP"""
)
_ADDRESSES = _set("URL URI")
# Last words of names of exceptions and functions.
_NO_VALUES = _set("ERROR ERRORS EXCEPTION WARNING")
# saferun's own: paths of files that hold a secret.
_PATHS = frozenset({"secretfile", "jobsecretfile", "saferunjobsecretfile"})

# Every name of a secret holds one of these: a cheap test first.
_STEMS = (
    *("token", "key", "pass", "secret", "cred", "auth", "jwt", "cookie", "dsn", "psk", "csrf", "xsrf", "otp", "pw"),
    *("sessionid", "contrase", "pin", "sig", "pat", "sas", "bearer", "webhook", "web_hook", "web-hook", "conn", "url"),
    *("uri", "code"),
)

_known: dict[str, bool] = {}


def may_name_a_secret(text: str) -> bool:
    """Whether a text may hold a secret's name; most do not."""
    lower = text.lower()
    for stem in _STEMS:  # noqa: SIM110 - a generator takes twice the time
        if stem in lower:
            return True
    return False


def is_secret(name: str) -> bool:
    """Whether a variable, an option, a JSON key or a header of this name is taken for a secret."""
    known = _known.get(name)
    if known is None:
        known = may_name_a_secret(name) and _decide(name[-_LONGEST:])
        if len(_known) < _MOST_KNOWN and len(name) <= _LONGEST:
            _known[name] = known
    return known


def _name_parts(name: str) -> list[str]:
    parts = name.upper().replace("-", "_").replace(".", "_").split("_")
    if (name.islower() or name.isupper()) and all(part.isalnum() or not part for part in parts):
        return [word for part in parts if (word := part.strip("0123456789"))]
    return [word.upper() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _decide(name: str) -> bool:
    parts = _name_parts(name)
    if not parts or parts[-1] in _NO_VALUES:
        return False
    together = "".join(parts).lower()
    if together in _PATHS:
        return False
    if any(stem in together for stem in _WHEREVER):
        return True
    if parts[-1] in _ADDRESSES and not _DATABASES.isdisjoint(parts):
        return True
    return any(_is_of_a_secret(parts, index) for index in range(len(parts)))


def _is_of_a_secret(parts: list[str], index: int) -> bool:
    word = parts[index]
    before = parts[index - 1] if index else ""
    behind = parts[index + 1] if index + 1 < len(parts) else ""
    if before in _HARMLESS_BEFORE.get(word, ()) or behind in _HARMLESS_BEHIND.get(word, ()):
        return False
    if word in _PLURALS:
        return before in _BEFORE_PLURALS
    if word in {"TOKEN", "KEY", "AUTH"} or word in _ALONE:
        return True
    if behind:
        # Words that count only at the end of a name.
        return False
    if word in _LAST or (word in _LAST_OF_SEVERAL and before):
        return True
    return word.endswith(_ENDINGS) and len(word) >= _SHORTEST_ENDED and word not in _NO_SECRETS
