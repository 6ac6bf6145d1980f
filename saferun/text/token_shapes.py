"""What tokens of well-known services look like: a fixed beginning, and a tail of a known alphabet. Pure.

Facts of the services' own documents and of the lists of two detectors, https://github.com/gitleaks/gitleaks
(``config/gitleaks.toml``) and https://github.com/Yelp/detect-secrets (``plugins/``).
"""

from __future__ import annotations

import re


class Shape:
    """A regular expression that is compiled when it is first used: that takes longer than most texts do.

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


# Possessive tails: each character is looked at once, whatever the text is.
_LETTERS = "[A-Za-z0-9]"
_WORDS = "[A-Za-z0-9_-]"

# How a token begins; its tail's alphabet; how long the tail is at least.
_BEGINNINGS: tuple[tuple[str, str, int], ...] = (
    # Code and packages: GitHub, GitLab, Bitbucket, Atlassian, npm, PyPI, RubyGems, Clojars, Docker, Artifactory
    *((prefix, _LETTERS, 20) for prefix in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "npm_", "rubygems_")),
    ("github_pat_", _WORDS, 20),
    *((f"gl{kind}-", _WORDS, 16) for kind in ("pat", "dt", "rt", "ft", "cbt", "ptt", "soat", "imt", "agent", "oas")),
    *((prefix, "[A-Za-z0-9_=-]", 20) for prefix in ("ATATT3", "ATCTT3", "ATBB", "CLOJARS_", "cmVmdGtu", "AKCp")),
    *((prefix, _WORDS, 16) for prefix in ("pypi-", "dckr_pat_", "dckr_oat_", "GR1348941", "sgp_", "slk_", "CCIPAT_")),
    # Models and training: Hugging Face, OpenAI, Anthropic and others, NVIDIA, Replicate, Groq, LangSmith, W&B
    *((prefix, _LETTERS, 20) for prefix in ("hf_", "api_org_", "r8_", "gsk_")),
    *((prefix, _WORDS, 20) for prefix in ("sk-", "nvapi-", "pplx-", "xai-", "tvly-", "lsv2_pt_", "lsv2_sk_")),
    *((prefix, _WORDS, 20) for prefix in ("wandb_v1_", "fw_", "jina_", "cfut_", "rpa_")),
    # Clouds: AWS, Google, Alibaba, Databricks, DigitalOcean, Yandex, Heroku, Fly.io, PlanetScale, Scalingo, Pulumi
    *((prefix, "[A-Z0-9]", 16) for prefix in ("AKIA", "ASIA", "ABIA", "ACCA")),
    *((prefix, "[A-Za-z0-9+/=]", 60) for prefix in ("FwoGZXIvYXdz", "IQoJb3JpZ2lu", "ABSK")),
    *((prefix, _WORDS, 20) for prefix in ("AIza", "ya29.", "GOCSPX-", "HRKU-", "AQVN", "t1.9eu", "tk-us-", "pul-")),
    ("LTAI", _LETTERS, 12),
    ("dapi", "[0-9a-f]", 32),
    *((prefix, "[0-9a-f]", 40) for prefix in ("dop_v1_", "doo_v1_", "dor_v1_")),
    *((prefix, "[A-Za-z0-9_=./+-]", 30) for prefix in ("fo1_", "fm1a_", "fm1r_", "fm2_")),
    *((prefix, "[A-Za-z0-9_=.-]", 20) for prefix in ("pscale_tkn_", "pscale_oauth_", "pscale_pw_")),
    # Secrets and accounts: JSON web tokens, Vault, age, 1Password, Doppler, OpenShift, Prefect, Okta-like
    ("eyJ", "[A-Za-z0-9_.=-]", 12),
    *((prefix, "[A-Za-z0-9_.-]", 20) for prefix in ("hvs.", "hvb.", "hvr.", "dp.pt.", "dp.st.", "dp.sa.", "dp.ct.")),
    *((prefix, _WORDS, 20) for prefix in ("AGE-SECRET-KEY-1", "ops_eyJ", "sha256~", "pnu_", "p8e-", "ntn_", "tfp_")),
    # Messages, tickets, metrics: Slack, SendGrid, Sendinblue, Mailgun, Linear, Postman, Grafana, New Relic, Sentry, …
    *((f"xox{kind}-", _WORDS, 10) for kind in "abceoprs"),
    *(
        (prefix, "[A-Za-z0-9_.-]", 16)
        for prefix in ("xapp-", "xoxe.xox", "SG.", "xkeysib-", "lin_api_", "glsa_", "PMAK-")
    ),
    ("key-", "[0-9a-f]", 32),
    *((prefix, "[A-Za-z0-9_+/=-]", 20) for prefix in ("glc_", "sntrys_", "sntryu_", "dt0c01.", "ico-")),
    *((prefix, _LETTERS, 20) for prefix in ("NRAK-", "NRII-", "NRJS-", "fio-u-", "rdme_")),
    # Money and shops: Stripe, Square, Shopify, Shippo, Flutterwave, Duffel, EasyPost
    *((f"{kind}_{mode}_", _LETTERS, 10) for kind in ("sk", "rk", "whsec") for mode in ("live", "test", "prod")),
    *((prefix, _WORDS, 16) for prefix in ("sq0atp-", "sq0csp-", "whsec_", "shippo_live_", "shippo_test_", "FLWSECK")),
    *((prefix, "[0-9a-fA-F]", 20) for prefix in ("shpat_", "shpca_", "shppa_", "shpss_")),
    *((prefix, _WORDS, 30) for prefix in ("duffel_live_", "duffel_test_", "EZAK", "EZTK", "EAAA")),
)
_PREFIXES = tuple(prefix for prefix, _, _ in _BEGINNINGS)
# Those that have no such beginning: something within them, and the whole.
_INNER: tuple[tuple[str, Shape], ...] = (
    (":AA", Shape(r"\b[0-9]{8,12}:AA[A-Za-z0-9_-]{30,64}+")),  # Telegram
    ("-us", Shape(r"\b[0-9a-f]{32}-us[0-9]{1,2}\b")),  # Mailchimp
    ("Q~", Shape(r"\b[A-Za-z0-9_.~]{3}[0-9]Q~[A-Za-z0-9_.~-]{30,40}+")),  # applications of Azure
    (".atlasv1.", Shape(r"\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,80}+")),  # Terraform Cloud
    ("pat", Shape(r"\bpat[A-Za-z0-9]{14}\.[0-9a-f]{40,64}+")),  # Airtable
    ("SK", Shape(r"\bSK[0-9a-f]{32}\b")),  # Twilio
)
_LEAST, _LEAST_INNER = 15, 30  # what is shorter is none
_PRIVATE_KEY = Shape(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----.*?(?:-----END[A-Z0-9 ]{0,60}-----|\Z)", re.DOTALL
)
# Where the posts of a web hook go: whoever knows the address may post.
_HOOKS = (
    *("hooks.slack.com/", "discord.com/api/webhooks/", "discordapp.com/api/webhooks/", ".webhook.office.com/"),
    *("outlook.office.com/webhook/", "hooks.zapier.com/hooks/", "open.feishu.cn/open-apis/bot/"),
    "api.telegram.org/bot",
)

_BEHIND_HOOK = Shape(rf"({'|'.join(map(re.escape, _HOOKS))})[^\s\"'<>]++")


def without_tokens(text: str, instead: str) -> str:
    """A text without tokens of well-known services, private keys, and what follows the address of a web hook."""
    if len(text) < _LEAST:
        return text
    for prefix in _PREFIXES:
        if prefix in text:
            text = _WITH_BEGINNINGS().sub(instead, text)
            break
    if len(text) < _LEAST_INNER:
        return text
    for mark, shape in _INNER:
        if mark in text:
            text = shape().sub(instead, text)
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY().sub(instead, text)
    if any(hook in text for hook in _HOOKS):
        text = _BEHIND_HOOK().sub(rf"\1{instead}", text)
    return text


def _with_beginnings() -> str:
    tails: dict[tuple[str, int], list[str]] = {}
    for prefix, alphabet, least in _BEGINNINGS:
        tails.setdefault((alphabet, least), []).append(re.escape(prefix))
    shapes = [f"(?:{'|'.join(prefixes)}){alphabet}{{{least},}}+" for (alphabet, least), prefixes in tails.items()]
    return f"(?<![A-Za-z0-9])(?:{'|'.join(shapes)})"


_WITH_BEGINNINGS = Shape(_with_beginnings())
