"""The shapes of well-known services' tokens: a fixed prefix, and a tail of a known alphabet. Pure.

From the services' own documentation and the lists of two scanners, https://github.com/gitleaks/gitleaks
(``config/gitleaks.toml``) and https://github.com/Yelp/detect-secrets (``plugins/``).
"""

from __future__ import annotations

import re


class Shape:
    """A regular expression that is compiled on first use: compiling takes longer than most texts do.

    Args:
        pattern: as for ``re.compile``.
        flags: as for ``re.compile``.
    """

    __slots__ = ("_compiled", "_flags", "_pattern")

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self._pattern = pattern
        self._flags = flags
        self._compiled: re.Pattern[str] | None = None

    def __call__(self) -> re.Pattern[str]:
        """The compiled expression."""
        if self._compiled is None:
            self._compiled = re.compile(self._pattern, self._flags)
        return self._compiled


# Possessive tails: each character is read once, for every text.
_LETTERS = "[A-Za-z0-9]"
_WORD = "[A-Za-z0-9_-]"
_DOTTED = "[A-Za-z0-9_.-]"
_BASE64 = "[A-Za-z0-9+/=]"
_HEX = "[0-9a-f]"

# A token's prefix, the alphabet of its tail, and the tail's minimum length.
_BEGINNINGS: tuple[tuple[str, str, int], ...] = (
    # Code and packages: GitHub, GitLab, Bitbucket, Atlassian, npm, PyPI, RubyGems, Clojars, Docker, Artifactory
    *((prefix, _LETTERS, 20) for prefix in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "npm_")),
    ("github_pat_", _WORD, 20),
    *((f"gl{kind}-", _WORD, 20) for kind in ("pat", "dt", "rt", "ft", "ffct", "cbt", "ptt", "soat", "imt", "agent")),
    *((prefix, _WORD, 20) for prefix in ("gloas-", "GR1348941", "dckr_pat_", "dckr_oat_", "slk_", "CCIPAT_")),
    *((prefix, "[A-Za-z0-9_=-]", 20) for prefix in ("ATATT3", "ATCTT3", "ATBB", "CLOJARS_")),
    *((prefix, _LETTERS, 50) for prefix in ("AKCp", "cmVmd")),
    *((prefix, _WORD, 16) for prefix in ("pypi-AgEIcHlwaS5vcmc", "pypi-AgENdGVzdC5weXBpLm9yZ")),
    *((prefix, _HEX, 40) for prefix in ("rubygems_", "sgp_", "pul-", "dop_v1_", "doo_v1_", "dor_v1_", "sntryu_")),
    # Models and training: Hugging Face, OpenAI and Anthropic and others, NVIDIA, W&B, LangSmith, Replicate, Groq,
    # Fireworks, Together, Cerebras, Jina, Perplexity, xAI, Tavily, Pinecone, Supabase, Kaggle, RunPod, Anyscale
    *((prefix, _LETTERS, 30) for prefix in ("hf_", "api_org_")),
    *((prefix, _WORD, 20) for prefix in ("sk-", "nvapi-", "wandb_v1_", "lsv2_pt_", "lsv2_sk_", "xai-", "tvly-")),
    *((prefix, _LETTERS, 20) for prefix in ("r8_", "gsk_", "tgp_v1_", "csk-", "pplx-", "jina_", "rpa_")),
    *((prefix, _WORD, 20) for prefix in ("pcsk_", "sb_secret_", "sbp_", "KGAT_", "esecret_", "cfut_")),
    # Clouds: AWS, Google, Alibaba, Databricks, Yandex, Heroku, Fly.io, PlanetScale, Scalingo, Modal, Tailscale
    *((prefix, "[A-Z0-9]", 16) for prefix in ("AKIA", "ASIA", "ABIA", "ACCA")),
    *((prefix, _BASE64, 60) for prefix in ("FwoGZXIvYXdz", "IQoJb3JpZ2lu", "ABSK")),
    ("bedrock-api-key-", _BASE64, 20),
    *((prefix, _WORD, 20) for prefix in ("AIza", "ya29.", "GOCSPX-", "1//0", "HRKU-", "AQVN", "t1.9eu", "tk-us-")),
    ("LTAI", _LETTERS, 12),
    ("dapi", _HEX, 32),
    ("as-", _LETTERS, 22),
    *((f"tskey-{kind}-", _WORD, 16) for kind in ("auth", "api", "client", "scim")),
    *((prefix, "[A-Za-z0-9_=./+-]", 40) for prefix in ("fo1_", "fm1a_", "fm1r_", "fm2_")),
    *((prefix, "[A-Za-z0-9_=.-]", 20) for prefix in ("pscale_tkn_", "pscale_oauth_", "pscale_pw_")),
    # Secrets and accounts: JSON web tokens, Vault, age, 1Password, Doppler, OpenShift, Prefect, Adobe, Notion, Typeform
    ("eyJ", "[A-Za-z0-9_.=-]", 12),
    ("ZXlK", _BASE64, 40),
    *((prefix, _DOTTED, 20) for prefix in ("hvs.", "hvb.", "hvr.")),
    *((f"dp.{kind}.", "[A-Za-z0-9.]", 40) for kind in ("pt", "st", "sa", "ct", "scim", "audit")),
    *((prefix, _WORD, 20) for prefix in ("AGE-SECRET-KEY-1", "ops_eyJ", "sha256~", "tfp_")),
    *((prefix, _LETTERS, 30) for prefix in ("pnu_", "pnb_", "p8e-", "ntn_", "ico-")),
    # Messages, tickets, metrics: Slack, SendGrid, Sendinblue, Mailgun, Linear, Postman, Grafana, New Relic, Sentry, …
    *((f"xox{kind}-", _WORD, 10) for kind in "abceoprs"),
    *((prefix, _DOTTED, 16) for prefix in ("xapp-", "xoxe.xox", "xkeysib-", "lin_api_", "glsa_", "PMAK-")),
    ("SG.", _DOTTED, 40),
    ("key-", _HEX, 32),
    *((prefix, "[A-Za-z0-9_+/=-]", 20) for prefix in ("glc_", "sntrys_", "dt0c01.")),
    *((prefix, _LETTERS, 19) for prefix in ("NRAK-", "NRII-", "NRJS-", "rdme_")),
    ("fio-u-", _WORD, 40),
    # Money and shops: Stripe, Square, Shopify, Shippo, Flutterwave, Duffel, EasyPost
    *((f"{kind}_{mode}_", _LETTERS, 10) for kind in ("sk", "rk", "whsec") for mode in ("live", "test", "prod")),
    *((prefix, _WORD, 16) for prefix in ("sq0atp-", "sq0csp-", "whsec_", "shippo_live_", "shippo_test_", "FLWSECK")),
    *((prefix, "[0-9a-fA-F]", 20) for prefix in ("shpat_", "shpca_", "shppa_", "shpss_")),
    *((prefix, _WORD, 30) for prefix in ("duffel_live_", "duffel_test_", "EZAK", "EZTK", "EAAA")),
)
_PREFIXES = tuple(prefix for prefix, _, _ in _BEGINNINGS)
# Tokens whose tails need not hold a digit.
_LETTERS_ALONE = ("hf_", "api_org_", "AKIA", "ASIA", "ABIA", "ACCA", "AGE-")
# Parts of ordinary names: words, numbers, words with a number, sizes.
_WORD_OF_A_NAME = Shape(r"[A-Za-z]*+(?:[0-9]{1,4}(?![0-9]))?[A-Za-z]?|[0-9]++[A-Za-z]{0,3}")
_SEPARATORS = Shape(r"[^A-Za-z0-9]+")
# Tokens without such a prefix: a part that they hold, and the whole.
_INNER: tuple[tuple[str, Shape], ...] = (
    (":AA", Shape(r"\b[0-9]{8,12}:AA[A-Za-z0-9_-]{30,64}+")),  # Telegram
    # Fireworks; ``_fw_`` is in mangled names of C++.
    ("fw_", Shape(r"(?<!\w)fw_(?=[A-Za-z]*+[0-9])[A-Za-z0-9]{20,}+")),
    ("-us", Shape(r"\b[0-9a-f]{32}-us[0-9]{1,2}\b")),  # Mailchimp
    ("Q~", Shape(r"\b[A-Za-z0-9_.~]{3}[0-9]Q~[A-Za-z0-9_.~-]{30,40}+")),  # applications of Azure
    (".atlasv1.", Shape(r"\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,80}+")),  # Terraform Cloud
    ("pat", Shape(r"\bpat[A-Za-z0-9]{14}\.[0-9a-f]{40,64}+")),  # Airtable
    ("SK", Shape(r"\bSK[0-9a-f]{32}\b")),  # Twilio
    ("A3-", Shape(r"\bA3-[A-Z0-9]{6}-[A-Z0-9]{6}(?:-?[A-Z0-9]{5}){4}\b")),  # 1Password
    ("s.", Shape(r"(?<![\w.])s\.(?=[A-Za-z]*[0-9][A-Za-z]*[0-9])[A-Za-z0-9]{24}(?![\w.(-])")),  # Vault before 1.10
    (
        "secret_",
        Shape(r"(?<![A-Za-z0-9])secret_(?:[A-Za-z0-9-]{1,60}_[0-9a-f]{32}\.)?[A-Za-z0-9]{32,43}(?!\w)"),
    ),  # Lambda
)
_LEAST, _LEAST_INNER = 15, 26  # shorter texts hold none
# Webhook URLs: they are secrets, as everyone who has the URL may post.
_HOOKS = (
    *("hooks.slack.com/", "discord.com/api/webhooks/", "discordapp.com/api/webhooks/", ".webhook.office.com/"),
    *("outlook.office.com/webhook/", "hooks.zapier.com/hooks/", "open.feishu.cn/open-apis/bot/"),
    "api.telegram.org/bot",
)

_BEHIND_HOOK = Shape(rf"({'|'.join(map(re.escape, _HOOKS))})[^\s\"'<>]++")


def without_tokens(text: str, instead: str) -> str:
    """A text without tokens of well-known services and secret parts of webhook URLs."""
    if len(text) < _LEAST:
        return text
    for prefix in _PREFIXES:
        if prefix in text:
            text = _WITH_BEGINNINGS().sub(lambda match: match.group() if _is_a_name(match) else instead, text)
            break
    if len(text) < _LEAST_INNER:
        return text
    for mark, shape in _INNER:
        if mark in text:
            text = shape().sub(instead, text)
    if any(hook in text for hook in _HOOKS):
        text = _BEHIND_HOOK().sub(rf"\1{instead}", text)
    return text


def _is_a_name(match: re.Match[str]) -> bool:
    """``sk-experiment-2024-11`` and ``fw_compiler_freezing_v2`` begin like tokens, but are words and numbers."""
    found = match.group()
    if found.startswith(_LETTERS_ALONE):
        return False
    word = _WORD_OF_A_NAME()
    return all(word.fullmatch(part) for part in _SEPARATORS().split(found))


def _with_beginnings() -> str:
    tails: dict[tuple[str, int], list[str]] = {}
    for prefix, alphabet, least in _BEGINNINGS:
        tails.setdefault((alphabet, least), []).append(re.escape(prefix))
    shapes = [f"(?:{'|'.join(prefixes)}){alphabet}{{{least},}}+" for (alphabet, least), prefixes in tails.items()]
    return f"(?<![A-Za-z0-9])(?:{'|'.join(shapes)})"


_WITH_BEGINNINGS = Shape(_with_beginnings())
