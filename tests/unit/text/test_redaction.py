"""Secrets do not reach a file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.config import Setting
from saferun.report.run_json import LaunchEnd
from saferun.text import redaction
from saferun.text.redaction import (
    REDACTED,
    redacted_arguments,
    redacted_environ,
    redacted_text,
)
from saferun.text.secret_names import is_secret
from tests.unit.described_runs import described_run
from tests.unit.samples import CONFIG

S = "S3CR3TVALUE"

SECRETS = """
HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY db_password PGPASSFILE_PASSWD --api-key SENTRY_DSN HTTP_AUTHORIZATION
GOOGLE_APPLICATION_CREDENTIALS Session-Cookie SLURM_JWT X_JWT MYSQL_PWD PGPASSWORD PGPASSFILE DB_PASS SMTP_PASS
LDAP_BINDPW GITHUB_PAT AZURE_SAS AZURE_STORAGE_CONNECTION_STRING SLACK_WEBHOOK_URL DATABASE_URL REDIS_URL BEARER
X_SIGNATURE SIGNATURE PIN USER_PIN apiKey clientSecret AccountKey SharedAccessKey hftoken access_tokens API_KEYS
NCCL_PSK OTP X-CSRF-Token oauth2_token DBPASS ROOTPW SSHPASS passphrase private_key SIGNING_KEY2 MY_KEY authToken
servicekey clientkey dbkey databasekey appkey applicationkey privkey priv_key keypass sessionid contrasena
NEPTUNE_API_TOKEN COMET_API_KEY MLFLOW_TRACKING_PASSWORD CLEARML_API_SECRET_KEY DATABRICKS_TOKEN SNOWFLAKE_PRIVATE_KEY
VAULT_TOKEN VAULT_SECRET_ID MODAL_TOKEN_SECRET RUNPOD_API_KEY LAMBDA_API_KEY DD_API_KEY DD_APP_KEY NGC_CLI_API_KEY
AZURE_STORAGE_KEY AZURE_STORAGE_SAS_TOKEN AWS_BEARER_TOKEN_BEDROCK DOCKER_AUTH_CONFIG KAGGLE_KEY identitytoken
"""

NO_SECRETS = """
PATH RANK MASTER_ADDR OMP_NUM_THREADS CUDA_VISIBLE_DEVICES --lr tokenizer --tokenizer-name TOKENIZERS_PARALLELISM
max_tokens --max-tokens num_tokens TOKENS_PER_BATCH eos_token bos_token_id pad_token_id token_type_ids image_token
key_size num_key_value_heads key_padding_mask --image-key --text_key sort_key primary_key keys state_keys KeyError
KEYBOARD MONKEY AUTHOR AUTHORS PASSED BYPASS COMPASS forward_pass backward-pass num_passes PWD OLDPWD INIT_PWD PATTERN
file_pat MANPATH PIN_MEMORY pin_memory I_MPI_PIN I_MPI_PIN_DOMAIN SIGNAL signals_to_handle SSH_AUTH_SOCK XAUTHORITY
auth_method InvalidTokenError MLFLOW_TRACKING_URI NCCL_IB_PKEY_NAME_SIZE input_signature DESIGN HOSTNAME SLURM_JOB_ID
TORCH_HOME rng_key prng_key PRNGKey qkv_key attn_key dataset_key token_embd tok_embeddings token_classes NCCL_IB_PKEY
MODAL_TOKEN_ID WANDB_RUN_ID AZURE_CLIENT_ID tokens_per_second special_tokens stop_token_ids kv_cache query_key_value
SAFERUN_JOB_SECRET_FILE job_secret_file --secret-file
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_of_secrets(name: str) -> None:
    """In any case of letters, as variable or option."""
    assert is_secret(name)
    assert redacted_environ({name: "s3cret"}) == {name: REDACTED}


@pytest.mark.parametrize("name", NO_SECRETS.split())
def test_names_of_other_things(name: str) -> None:
    """What helps to find a fault stays readable."""
    assert not is_secret(name)
    assert redacted_environ({name: "value-1"}) == {name: "value-1"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-key=s3cret", "x"], ["--api-key=<redacted>", "x"]),
        (["--token", "s3cret", "x"], ["--token", "<redacted>", "x"]),
        (["--token", "--lr", "0.1"], ["--token", "--lr", "0.1"]),
        (["WANDB_API_KEY=s3cret"], ["WANDB_API_KEY=<redacted>"]),
        (["+logger.api_key=s3cret"], ["+logger.api_key=<redacted>"]),
        (["--set", "password=s3cret"], ["--set", "password=<redacted>"]),
        (["--token"], ["--token"]),
        (["train.py", "--lr", "0.1"], ["train.py", "--lr", "0.1"]),
        (["--api-key=a=b"], ["--api-key=<redacted>"]),
        (["--api-key=", "x"], ["--api-key=", "x"]),
        (["--use_auth_token=True"], ["--use_auth_token=True"]),
        (["--token", "--S3cret"], ["--token", "<redacted>"]),
        (["curl", "-u", "me:s3cret", "http://h"], ["curl", "-u", "me:<redacted>", "http://h"]),
        (["docker", "run", "-u", "1000:1000", "-p", "8080:80"], ["docker", "run", "-u", "1000:1000", "-p", "8080:80"]),
        (["mysql", "-ps3cret", "db"], ["mysql", "-p<redacted>", "db"]),
        (["sshpass", "-p", "s3cret", "ssh", "h"], ["sshpass", "-p", "<redacted>", "ssh", "h"]),
        (["srun", "-p", "gpu", "-n2"], ["srun", "-p", "gpu", "-n2"]),
        (["srun", "-p", "gpuA100x4", "python", "t.py"], ["srun", "-p", "gpuA100x4", "python", "t.py"]),
        (["srun", "-pgpuA100x4", "t.py", "-p", S], ["srun", "-pgpuA100x4", "t.py", "-p", "<redacted>"]),
        (["docker", "login", "-u", "me", "-p", "s3cret"], ["docker", "login", "-u", "me", "-p", "<redacted>"]),
        (["t.py", "-precision16", "-p", "bfloat16"], ["t.py", "-precision16", "-p", "bfloat16"]),
        (["--eos-token", "</s>"], ["--eos-token", "</s>"]),
        ([], []),
    ],
)
def test_a_command_line_without_its_secrets(arguments: list[str], shown: list[str]) -> None:
    """The value goes, the option stays."""
    assert redacted_arguments(arguments) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set=api_key=s3cret"],
        ["--rdzv-conf=token=s3cret,timeout=3"],
        ["-api_key", "s3cret"],
        ["--api_key", "-s3cret"],
        ["--url", "https://me:s3cret@example.com/x"],
    ],
)
def test_secrets_in_less_usual_places(arguments: list[str]) -> None:
    """Settings within a setting, options with one dash, values that begin with one, and URLs."""
    assert "s3cret" not in " ".join(redacted_arguments(arguments))


def test_run_json_holds_no_secret_of_the_command_line() -> None:
    """Neither in the command, nor in the ranks' command, nor among the settings."""
    arguments = ("--rdzv-conf", "token=s3cret", "train.py", "--api-key", "s3cret")
    config = CONFIG._replace(
        argv=arguments,
        rendezvous=CONFIG.rendezvous._replace(run_id="job-token=s3cret"),
        command=CONFIG.command._replace(argv=("python", "-u", "train.py", "--api-key", "s3cret")),
        settings={"rdzv_conf": Setting("token=s3cret", "flag"), "nnodes": Setting("1:1", "default")},
    )
    environ = {"NCCL_PSK": "s3cret", "TORCH_HOME": "https://me:s3cret@host/x", "NCCL_DEBUG": "INFO", "HOME": "/s3cret"}
    end = LaunchEnd(1.0, 1, "failed", "no login with --password s3cret")
    described = described_run(config, end, cwd="/data/token=s3cret/src", environ=environ)
    assert described["environment"]["NCCL_DEBUG"] == "INFO"
    assert described["cwd"] == "/data/token=<redacted>/src"
    assert "s3cret" not in str(described)
    assert described["settings"]["nnodes"] == {"value": "1:1", "origin": "default"}


@given(st.lists(st.text(max_size=12), max_size=8))
def test_a_redacted_command_line_has_as_many_arguments_as_before(arguments: list[str]) -> None:
    """Nothing moves; what is no secret is as it was."""
    shown = redacted_arguments(arguments)
    assert len(shown) == len(arguments)
    for before, after in zip(arguments, shown, strict=True):
        assert after == before or REDACTED in after


# What a text has, and what of it has to stay.
HIDDEN = [
    (f"SLURM_JWT={S}", "SLURM_JWT="),
    (f"export HF_TOKEN={S}; python train.py", "; python train.py"),
    (f"https://{S}@github.com/o/r.git", "github.com/o/r.git"),
    (f"https://me:{S}@host/x", "https://me:"),
    (f"https://{S}:x-oauth-basic@github.com/o", "@github.com/o"),
    (f"https://h/blob?sv=1&sig={S}&se=2", "&se=2"),
    (f"https://b.s3.amazonaws.com/k?X-Amz-Signature={S}&x=1", "&x=1"),
    (f"https://hooks.slack.com/services/T0/B0/{S}", "hooks.slack.com"),
    (f"https://discord.com/api/webhooks/12/{S}", "discord.com"),
    (f"postgres://u:p/{S}@h:5432/db", "@h:5432/db"),
    (f"mysql+pymysql://u:a@{S}@h/db?charset=utf8", "@h/db?charset=utf8"),
    (f"http://u:a@{S}@h/", "@h/"),
    (f'{{"api_key": "{S}", "user": "me"}}', '"user": "me"'),
    (f"{{'password': '{S}', 'user': 'me'}}", "'user': 'me'"),
    (rf"{{\"token\": \"{S}\", \"user\": \"me\"}}", "me"),
    (f'password: "a \\" {S}" next', "next"),
    (f"password: {S}", "password: "),
    (f"  db_password : {S}", "db_password"),
    (f"token => {S}", "token =>"),
    (f"wandb: ERROR login failed for wandb key {S}, sorry", ", sorry"),
    (f"mysql -u root -p{S} db", " db"),
    (f"train.py -p {S} --lr 1", " --lr 1"),
    (f"train.py -p{S} --lr 1", " --lr 1"),
    (f"curl -u me:{S} http://h", "http://h"),
    (f"curl --user me:{S} http://h", "http://h"),
    (f"train.py --token --{S} --lr 1", " --lr 1"),
    (f"train.py --token '{S} and more' --lr 1", " --lr 1"),
    (f"curl -H 'Authorization: Bearer {S}' http://h", "http://h"),
    (f"Authorization: Basic {S}", "Basic"),
    (f"Cookie: a=b; session={S}", "Cookie: "),
    (f"X-Api-Key: {S}", "X-Api-Key"),
    (f'password = """{S}""" # x', "# x"),
    (f"redis://:{S}@h:6379/0", "@h:6379/0"),
    (f"jdbc:sqlserver://h;user=sa;password={S};x=1", ";x=1"),
    (f'{{"headers": {{"authorization": "Bearer {S}"}}}}', "headers"),
    (f"api_keys: ['{S}', 'x']", "api_keys: ["),
    (f"AccountName=n;AccountKey={S}==;EndpointSuffix=core", "EndpointSuffix=core"),
    (f"login(token=f'{S}', user='me')", "user='me'"),
    (f"optimizer.api_key={S},lr=1", "lr=1"),
    (f"-----BEGIN RSA PRIVATE KEY-----\\n{S}\\n-----END RSA PRIVATE KEY-----", ""),
    (f"password={S}\nnext line", "\nnext line"),
    (f"api_key='{S}\nwhat went wrong, 'twas this", "\nwhat went wrong, 'twas this"),
    (f"tokens_of_us = secrets: [{S},\nwhat went wrong", "\nwhat went wrong"),
    (f'write(2, "-----BEGIN PRIVATE KEY-----\\n{S * 6}"..., 64) = 64\nfutex(1) = 0', '"..., 64) = 64\nfutex(1) = 0'),
    (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{S * 6}\n{S * 6}\n{S}\nTraceback (most", "\nTraceback (most"),
    (f"aws configure set aws_secret_access_key {S}/{S}+{S} --profile x", " --profile x"),
    (f"wandb login {S}{S}{S}{S} && python train.py", " && python train.py"),
    (f"wandb login --relogin --host=https://w.me {S}{S}{S}{S}", "https://w.me"),
    (f'File "/data/token={S}/src/train.py", line 7, in f', '/src/train.py", line 7, in f'),
    (f"step (/data/key={S}/src/train.py:7)", "/src/train.py:7)"),
    (f"machine api.wandb.ai\n  login user\n  password {S}", "login user"),
    (f"docker login nvcr.io -u x -p {S} && ls", " && ls"),
    (f"enroot import docker://$oauthtoken:{S}@nvcr.io#nvidia/pytorch:25.01-py3", "@nvcr.io#nvidia/pytorch:25.01-py3"),
    (f"DefaultEndpointsProtocol=https;AccountName=n;SharedAccessSignature=sv=1&sig={S}&se=2", "AccountName=n"),
    (f'{{"auths": {{"nvcr.io": {{"auth": "{S}"}}}}}}', "nvcr.io"),
    (f"snowflake://me:{S}@org-account/db", "@org-account/db"),
    (f"SENTRY_DSN=https://{S}@o1.ingest.sentry.io/2", "SENTRY_DSN="),
    (f"DB_PASS={{{S}}}", "DB_PASS="),
    (f"DB_PASS={{{S}}} next", " next"),
    (f"password={{{{x}}}}{S}", "password="),
    (f"password={{x}}{S}, next", ", next"),
    # What only begins like a line of a source.
    (f"TOKEN={S}(def", "TOKEN="),
    (f"TOKEN={S}(def)", "TOKEN="),
    (f"token={S}(def)", "token="),
    (f"TOKEN = {S}(def)", "TOKEN = "),
    (f"TOKEN = abc({S})", "TOKEN = "),
    (f"TOKEN=abc({S}", "TOKEN="),
    (f"token=abc({S})", "token="),
    (f"password = abc({S})", "password = "),
    (f"    password = abc({S}", "    password = "),
    (f"    password = abc({S})def", "    password = "),
    (f"    password = {S.lower()}", "    password = "),
    (f"    password = my.{S.lower()}", "    password = "),
    (f"train.py --set token=abc({S})", "--set token="),
    (f"    password = {S.lower()}(def)", "    password = "),
    (f"    password = {S[:7].lower()}(def)", "    password = "),
    (f"    password = abc({S.lower()})", "    password = "),
    (f"    password = ab(c).{S.lower()}", "    password = "),
    (f"connect(host=h, password=abc({S.lower()}))", "connect(host=h, password="),
    (f"    token = token {S.lower()}", "    token = token "),
    *(
        (f"{name} = {value}{sign}{S.lower()}", f"{name} = ")
        for name, value in (
            ("db.password", "password"),
            ("    password", "password"),
            ("    password", "tiger.password"),
            ("    password", "self.password"),
        )
        for sign in "#+-*/%|&<>=!@^"
    ),
    (f"password = {S}(def", "password = "),
    (f"password = {S}[def]ghi", "password = "),
    (f"password = self.{S}!x", "password = "),
    (f"password = abc.{S}", "password = "),
    (f"--token={S}(def) x", "--token="),
    (f"train.py (token={S}(def", "train.py (token="),
    (f"ALL,token={S}[def],x", "ALL,token="),
    (f"https://h/f(x?token={S}(def)&a=1", "&a=1"),
    (f"api_key = '{S}'", "api_key = '"),
    (f"me.api_key = load('a', token='{S}')", "me.api_key = load('a', token="),
    (f"https://{S}{S}@o1.ingest.sentry.io/2", "@o1.ingest.sentry.io/2"),
]

LETTERS, HEX = "aB3dE5gH1jK2mN4pQ6sT8vW0xY7z", "0123456789abcdef"

TOKENS = [
    *(f"{prefix}{LETTERS}{LETTERS}" for prefix in ("hf_", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "npm_")),
    *(
        f"{prefix}{LETTERS}"
        for prefix in ("sk-", "sk-proj-", "sk-ant-api03-", "nvapi-", "AIza", "ya29.", "gsk_", "r8_")
    ),
    *(f"{prefix}ABCDEFGHIJ234567" for prefix in ("AKIA", "ASIA")),
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1g",
    *(f"xox{kind}-1234567890-{LETTERS}" for kind in "bap"),
    # Those whose tails are letters alone, as two detectors know them.
    *(f"{prefix}{'abcdefghijKLMNOPQRSTUVwxyzABCDEFGH'}" for prefix in ("hf_", "api_org_")),
    *(
        f"{prefix}{LETTERS}"
        for prefix in ("fw_", "tgp_v1_", "csk-", "pplx-", "jina_", "rpa_", "xai-", "pcsk_", "lsv2_pt_")
    ),
    *(f"{prefix}{LETTERS}" for prefix in ("KGAT_", "esecret_", "sb_secret_", "tskey-auth-", "glffct-", "glrt-t1_")),
    *(f"{prefix}{LETTERS}{LETTERS}" for prefix in ("1//0", "GOCSPX-", "dp.pt.", "dp.st.dev.")),
    f"as-{LETTERS[:22]}",
    f"secret_{LETTERS}{LETTERS[:12]}",
    f"secret_my-key_{HEX}{HEX}.{LETTERS}{LETTERS[:4]}",
    f"s.{LETTERS[:24]}",
    "A3-ABC234-DEF567-AB123-CD456-EF789-GH123",
    f"sk_live_{LETTERS}",
    f"SG.{LETTERS}.{LETTERS}",
    f"dapi{HEX}{HEX}",
    f"dop_v1_{HEX * 4}",
    f"pypi-AgEIcHlwaS5vcmc{LETTERS}",
    f"dckr_pat_{LETTERS}",
    f"hvs.{LETTERS}",
    f"glsa_{LETTERS}_{HEX}",
    f"wandb_v1_{LETTERS}",
    f"key-{HEX}{HEX}",
    f"123456789:AA{LETTERS}{LETTERS[:5]}",
    f"{HEX}{HEX}-us12",
    f"SK{HEX}{HEX}",
    f"shpat_{HEX}{HEX}",
    f"AGE-SECRET-KEY-1{LETTERS.upper()}",
]


# Log lines, arguments and pieces of tracebacks in which nothing is hidden.
OPEN = [
    "tokenizer=gpt2 max_tokens=512 eos_token=</s> key_size=64 num_key_value_heads=8",
    "INFO step 100 loss 2.31 tokens/s 12345.6 lr 1e-4",
    "PWD=/home/x AUTHOR=me PASSED tests/test_x.py::test_y",
    "KeyError: 'model.layers.0.weight'",
    'RuntimeError: Missing key(s) in state_dict: "a.weight", "b.bias"',
    "sorted(items, key=lambda item: item.name)",
    "SyntaxError: unexpected token: indent",
    "dist_init_required: pin_memory=True, use_auth_token=None, token: null",
    "AuthenticationError: 401 Client Error for url: https://huggingface.co/api/whoami-v2",
    "git+https://github.com/pytorch/pytorch@v2.13.0#egg=torch",
    "ssh://git@github.com/o/r.git and https://pypi.org/@scope/x?page=2",
    "tcp://10.0.0.1:29500 file:///data/@x http://[::1]:8080/a@b",
    "srun -p gpu -N2 -n16 --mem 64G python -u train.py -p 0.1",
    "def forward(self, query, key, value, key_padding_mask=None):",
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "commit 0123456789abcdef0123456789abcdef01234567, run 20261122-101500-ab12cd",
    "secret: None, password='', api_key=**** token=<redacted>",
    "Flash attention: key=value, sk-learn, hf_transfer, pattern pat, eyJ",
    "mkdir -p /data/a1b2c3d4 && tar -xpf x.tar -u root:root",
    "if key == value: std::Token::Parse(); a != b",
    # Partitions, types, layers, shards, kernels and commits beside words that secrets stand behind, too.
    "srun -p gpuA100x4 -N2 --gpus-per-node=8 python train.py",
    "sbatch -pgpuH200x8 job.sh",
    "KeyError: missing key encoder12 in state_dict, unexpected token layer0012",
    "key=bfloat16 key: shard000123 token: rank0000 key=0123abcd key 16777216",
    "train-00012-of-00512.parquet token shard00012of00512 model-00001-of-00030.safetensors",
    "NCCL INFO comm 0x55d0c0ffee00 rank 0 nranks 16 busId 1b000 commId 0x7a1f3b2c4d5e6f70 - Init START",
    "ncclUniqueId 0x0200c3a80a0000000000000000000000, store key default_pg//cuda//0, key 0/1",
    "run 550e8400-e29b-41d4-a716-446655440000 GPU-3f1c9a52-8b7d-4e60-9f2a-1c2d3e4f5a6b",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 git 3fa9c1d",
    "kernel fw_compiler_freezing_subgraph_of_attention took 3 ms in triton_poi_fused_add_mul_0d1d2d3de",
    "/home/me/sk-experiment-with-long-name-2024-11/train.py and ~/runs/as-llama-7b-sft-v2-128k",
    "pypi-mirror-of-the-cluster.example.com SG.forward.method.of.this.module dp.pt.model_layers_0_weight_of_expert",
    "ico-images-for-the-dashboard xai-explainability-for-vision-models jina_embeddings_v3_for_retrieval",
    "s.attention_layer_weight_of_head, s.abcdefghijklmnopqrstuvwx = 1, secret_sharing_with_threshold_of_parties",
    "_ZN2at4_ops10_fw_primal10redispatchEN3c1014DispatchKeySetERKNS_6TensorEl fw_compilerfreezinggraphs",
    "_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEE+0x2d",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x6_nn_align8>(Params)",
    "tensor blob 'AAAAgD8AAABAAABAQAAAgEAAAKBAAADAQAAA4EAAAABBAAAQQQ=='",
    # Templates, and names of structures.
    "password={{ vault.password }} api_key={api_key} token={{token}} auth={host}/{port}&user={user}",
    "API_KEY=<your key> credentials={} SECRET={} secrets={'a': 1}",
    # Lines of a source, as tracebacks have them.
    "    token = logits.argmax(-1)",
    "    token = tokens[i]",
    "    token = self.sampler.sample(logits[:, -1], top_k=5) + 1",
    "    token = self.next_token",
    "    loss = model(batch, token=batch['token'])",
    "    out = decode(token=tokens[0], auth=auth)",
    "  |     self.api_key = api_key",
    "    hub.login(token=self.token, secret=cfg.secret)",
    "    secret_key = get_secret('name')",
    "    self.token = self.token + 1 if self.token else sha256(data).hexdigest()",
    "    secret = b64decode(raw)  # as it was stored",
    "    token = model.sample(logits[:, -1], temperature=0.8, floor=1e4, mask=0x7fff, seed=s1)",
    "    token = gpt2tokenizer(text)['input_ids']",
    "    token = x.to(torch.float8_e4m3fn)",
    "    token = model.layer1block(hidden)",
    "token indices sequence length is longer than 4096; tokens: 12345678; tokens/s: 1.2e6; 401 tokens left",
]


@pytest.mark.parametrize(("text", "stays"), HIDDEN)
def test_a_text_without_its_secrets(text: str, stays: str) -> None:
    """By the name beside it, by its place in an address or a command."""
    shown = redacted_text(text)
    assert S not in shown
    assert S.lower() not in shown
    assert REDACTED in shown
    assert stays in shown
    assert redacted_text(shown) == shown


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("around", ["%s", "x %s, y", '"%s"', "https://h/%s/x", "a-%s", "(%s)"])
def test_tokens_of_well_known_services_are_known_by_their_shape(token: str, around: str) -> None:
    """Whatever the name beside them is, or none."""
    shown = redacted_text(around % token)
    assert token[-12:] not in shown
    assert shown == around.replace("%s", REDACTED) or around == "a-%s"


@pytest.mark.parametrize("prefix", ["bedrock-api-key-", "ZXlK", "FwoGZXIvYXdz", "IQoJb3JpZ2lu", "ABSK"])
def test_tokens_of_base64_are_known_by_how_they_begin(prefix: str) -> None:
    """Slashes are of it."""
    assert redacted_text(f"x {prefix}{LETTERS}/{LETTERS}+{LETTERS}== y") == f"x {REDACTED} y"


@pytest.mark.parametrize("text", OPEN)
def test_other_texts_stay_as_they_are(text: str) -> None:
    """A report in which the cause is redacted is worth nothing."""
    assert redacted_text(text) == text
    assert redacted_text(f"{text}\n{text}") == f"{text}\n{text}"


@given(st.text(max_size=200))
def test_a_text_without_signs_and_dashes_is_as_it_was(text: str) -> None:
    """Nothing but secrets is changed, whatever the text is."""
    shown = redacted_text(text)
    assert shown == text or REDACTED in shown


@given(
    st.lists(st.sampled_from([S, *"=:\"'\\ -?&@/[{,;\n", "://", "token", "--token ", "-p ", "key", "eyJ", "Bearer "]))
)
def test_any_text_can_be_redacted_and_stays_so(parts: list[str]) -> None:
    shown = redacted_text("".join(parts))
    redacted_text(shown)


# What would take a backtracking expression forever, or a scan for each beginning.
UNITS = [
    *(
        "key=[",
        "key=/",
        "pass:/",
        "key=(",
        "-p [",
        "-u [x",
        "--token [--x=",
        "token='",
        "token='\\'",
        "key='",
        "token=\n'",
        "  token = a(",
        "DB_PASS={",
        "DB_PASS={a}",
        "f(token=a[",
        "  token = self.",
    ),
    *(
        "password a_",
        "a_key b1",
        "wandb login --",
        "wandb login --a=",
        "s.",
        "A3-",
        "secret_",
        "tskey-auth-",
        'key="x ',
    ),
    *("-----BEGIN PRIVATE KEY-----\n", "-----END X-----", "-----BEGIN PRIVATE KEY-----aaaa-----END", "mysql -p"),
    *(
        "a",
        "a=",
        "token=",
        'token="',
        'token="\\',
        "token='",
        "token=[",
        "token=\n",
        "--token ",
        "-p ",
        "-",
        " ",
        '"',
        "\\",
    ),
    *("://", "http://a:b@", "http://x:y/", "key ", "ghp_", "eyJ.", "sk-", "a_token1b.", "Authorization: Bearer "),
    *(
        "?sig=&",
        "curl -u ",
        "1:AA",
        "-----BEGIN PRIVATE KEY-----",
        "é=",
        "\N{NO-BREAK SPACE}",
        "a.b-c",
        "hooks.slack.com/",
    ),
]


@pytest.mark.parametrize("unit", UNITS)
def test_a_long_hostile_line_is_read_in_linear_time(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at behind names and signs is counted: of twice as long a text it is twice as much."""
    looked_at = 0

    def counting(text: str, begin: int, *args: Any) -> tuple[int, int] | None:
        nonlocal looked_at
        found = value(text, begin, *args)
        looked_at += 1 if found is None else found[1] - begin
        return found

    value = redaction._value
    monkeypatch.setattr(redaction, "_value", counting)
    counts = []
    for size in (1 << 13, 1 << 14):
        looked_at = 0
        redacted_text(unit * (size // len(unit)))
        counts.append(looked_at)
    assert counts[1] <= 2.2 * counts[0] + 1000


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_a_hostile_line_of_a_megabyte_is_read(unit: str) -> None:
    """What took time by the square of the length would not end before the limit on a test."""
    redacted_text(unit * ((1 << 20) // len(unit)))


@pytest.mark.parametrize("name", ["token", "auth", "password", "creds"])
def test_a_key_in_quotes_has_a_secret_of_any_kind(name: str) -> None:
    """In a sentence it has to look like one: ``unexpected token: indent``."""
    assert redacted_text(f'{{"{name}": "open sesame"}}') == f'{{"{name}": "{REDACTED}"}}'
