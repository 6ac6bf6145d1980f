"""What --show-config and --dry-run print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from saferun.cli.main import read_config
from saferun.cli.options import OPTIONS
from saferun.config import LaunchConfig
from saferun.env.profiles import load_profiles, resolve
from saferun.errors import UsageError
from saferun.launch import dry_run
from saferun.launch.dry_run import config_lines, plan_lines
from saferun.launch.planned_wrappers import planned_wrappers
from saferun.report.run_json import run_text
from tests.unit.described_runs import described_run
from tests.unit.recorded_launchers import SLURM_TASK_A_HOST, SLURM_TASK_A_RANK

ENVIRON = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def _in_a_directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def config_of(*arguments: str, environ: Mapping[str, str] | None = None) -> LaunchConfig:
    return read_config(arguments, {**ENVIRON, **(environ or {})})


def plan_of(
    *arguments: str, environ: Mapping[str, str] | None = None, profiles: Mapping[str, str] | None = None
) -> list[str]:
    """The plan, with profiles from files of these contents."""
    folder = Path("profiles")
    folder.mkdir(exist_ok=True)
    for name, content in (profiles or {}).items():
        (folder / f"{name}.yaml").write_text(content)
    config = config_of(*arguments, environ=environ)
    around = {**ENVIRON, **(environ or {})}
    resolution = resolve(
        load_profiles([str(folder)]),
        config.environ.profiles,
        vendor="any",
        versions={"torch": "2.13.0"},
        user_environ=around,
        env=config.environ.env,
        unset=config.environ.unset,
    )
    wrappers, notes = planned_wrappers(config, resolution, around, "node0")
    return plan_lines(config, resolution, around, "node0", wrappers, notes)


def rows_of(lines: list[str]) -> dict[str, tuple[str, str]]:
    """Name -> value and origin. Columns are two blanks apart, and no value of these tests holds two."""
    rows = {}
    for line in lines:
        name, value, origin = (part.strip() for part in line.split("  ") if part.strip())
        rows[name] = (value, origin)
    return rows


# --------------------------------------------------------------------------------------------------------------------
# Settings


def test_every_setting_has_one_line_with_its_origin() -> None:
    """Why does it do that? has an answer."""
    Path("saferun.yaml").write_text("\nvendor: amd\nenv: {A: 1, B: 2}\n")
    environ = {"SAFERUN_LINT": "off", "PET_MAX_RESTARTS": "3"}
    lines = config_lines(config_of("--role", "trainer", "-r", "3", "train.py", environ=environ))
    rows = rows_of(lines)
    assert list(rows) == [option.dest.replace("_", "-") for option in OPTIONS]
    assert rows["role"] == ("trainer", "flag (--role)")
    assert rows["redirects"] == ("3", "flag (--redirects)")
    assert rows["lint"] == ("off", "environment (SAFERUN_LINT)")
    assert rows["max-restarts"] == ("3", "environment (PET_MAX_RESTARTS)")
    assert rows["vendor"] == ("amd", "file (saferun.yaml:2)")
    assert rows["env"] == ("A=1,B=2", "file (saferun.yaml:3)")
    assert rows["config"] == ("saferun.yaml", "default (found in the current directory)")
    assert rows["env-profile"] == ("production", "default")
    assert rows["standalone"] == ("False", "default")
    assert rows["run-dir"] == ("saferun-runs/<time>-<id>", "default")
    assert rows["unset"] == rows["rdzv-endpoint"] == ("-", "default")
    assert rows["node-rank"] == ("0", "default")


def test_settings_are_shown_without_a_script() -> None:
    """And a script's own argument of that name is the script's."""
    assert rows_of(config_lines(config_of("--show-config", "--role", "x")))["role"] == ("x", "flag (--role)")
    config = config_of("train.py", "--show-config", "y")
    assert config.command.argv[-2:] == ("--show-config", "y")
    assert not config.show_config


@pytest.mark.parametrize("option", ["--dry-run", "--dry_run"])
def test_ranks_are_not_shown_without_a_script(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There are none; it ends like a launch without one."""
    errors = []
    for arguments in (("--show-config", option), (option,)):
        with pytest.raises(SystemExit) as raised:
            config_of(*arguments)
        assert raised.value.code == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1] != ""
    assert config_of("--show-config", option, "train.py").dry_run


def test_a_default_that_is_no_value_is_shown_as_what_holds() -> None:
    """``auto`` is another mode of ``--nic``; with ``--preflight only`` there are no files."""
    rows = rows_of(config_lines(config_of("train.py")))
    assert rows["nic"] == ("<each library chooses>", "default")
    assert rows["shutdown-timeout"] == ("30", "default")
    assert rows["prefix"] == ("[{host}:{rank}]", "default")
    assert rows_of(config_lines(config_of("--nic", "auto", "train.py")))["nic"] == ("auto", "flag (--nic)")
    assert rows_of(config_lines(config_of("--preflight", "only", "train.py")))["run-dir"] == ("none", "default")


@pytest.mark.parametrize(
    ("arguments", "value", "shown"),
    [
        ((), "7", ("7", "environment (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)")),
        ((), "-5", ("0", "environment (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)")),
        (("--shutdown-timeout", "9"), "7", ("9", "flag (--shutdown-timeout)")),
    ],
)
def test_a_timeout_of_torchruns_variable_has_that_origin(
    arguments: tuple[str, ...], value: str, shown: tuple[str, str]
) -> None:
    """In run.json, too, so that ``saferunctl diff`` sees it."""
    config = config_of(*arguments, "train.py", environ={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": value})
    assert rows_of(config_lines(config))["shutdown-timeout"] == shown
    found = described_run(config)["settings"]["shutdown_timeout"]
    assert (str(found["value"]), found["origin"]) == (shown[0], shown[1].partition(" ")[0])


def test_a_template_of_torchruns_variable_has_that_origin() -> None:
    """And there is no prefix of saferun's own beside it."""
    name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    rows = rows_of(config_lines(config_of("train.py", environ={name: "${rank}|"})))
    assert rows["log-line-prefix-template"] == ("${rank}|", f"environment ({name})")
    assert rows["prefix"] == ("-", "default")
    rows = rows_of(config_lines(config_of("--prefix", "{rank}|", "train.py", environ={name: "${rank}|"})))
    assert rows["log-line-prefix-template"] == ("-", "default"), "--prefix wins"
    rows = rows_of(config_lines(config_of("--log-line-prefix-template", "a", "train.py", environ={name: "b"})))
    assert rows["log-line-prefix-template"] == ("a", "flag (--log-line-prefix-template)")


def test_a_long_value_does_not_push_the_origins_of_the_others_away() -> None:
    """The table stays one."""
    lines = config_lines(config_of("--role", "x" * 200, "train.py"))
    assert sum(len(line) > 120 for line in lines) == 1


SECRETS = [
    ("--env", "HF_TOKEN=s3cret"),
    ("--env", "HF_TOKEN=s3cret with s3cret words, and s3cret commas; s3cret all"),
    ("--env=HF_TOKEN=a b s3cret",),
    ("--env", "URL=https://me:s3cret@example.com/x"),
    ("--rdzv-conf", "password=s3cret,timeout=3"),
]


@pytest.mark.parametrize("arguments", SECRETS, ids=lambda arguments: arguments[-1])
def test_no_secret_is_shown(arguments: tuple[str, ...]) -> None:
    """These lines, and run.json, are what people paste into issues."""
    script = ("train.py", "--api-key", "s3cret", "--login=me", "--passwd=s3cret")
    config = config_of(*arguments, *script)
    assert "s3cret" not in "\n".join(config_lines(config))
    described = described_run(config)
    assert "s3cret" not in str(described)
    plan = "\n".join(plan_of(*arguments, *script))
    assert "s3cret" not in plan
    assert "--login=me" in plan


def test_run_json_has_a_line_for_each_setting() -> None:
    """It is read by people as well; and it is JSON, whatever a value is."""
    config = config_of("--nproc-per-node", "2", "train.py", "--odd", "\u2028\x1b")
    described = described_run(config, cwd="/\ud800")
    text = run_text(described)
    assert json.loads(text) == json.loads(json.dumps(described, default=str))
    assert len(text.splitlines()) == len(described) + len(config.settings) + 3
    assert '\n  "nproc_per_node": {"value": ' in text


def test_secrets_of_the_environment_are_not_shown() -> None:
    """What the user's own environment holds is never printed, whatever its name."""
    profiles = {"mine": "variables: {HF_TOKEN: {value: x}, PLAIN: 1, FORCED: !force 1}"}
    environ = dict.fromkeys(("HF_TOKEN", "PLAIN", "FORCED", "OTHER"), "s3cret")
    plan = "\n".join(plan_of("--env-profile", "mine", "train.py", environ=environ, profiles=profiles))
    assert "s3cret" not in plan
    assert "PLAIN stays as your environment sets it" in plan
    assert "FORCED=1  [profile mine" in plan
    assert "replaces the value of your environment" in plan


# --------------------------------------------------------------------------------------------------------------------
# The plan


def test_the_plan_names_ranks_commands_and_changes() -> None:
    """The whole of it, as it is printed."""
    plan = plan_of(
        *("--nproc-per-node", "2", "--master-port", "29500", "--env-profile", "mine", "--env", "B=r{rank}"),
        *("--env", "API_KEY=s3cret", "--unset", "C", "--role", "trainer"),
        *("train.py", "--shard", "$local_rank", "two words"),
        environ={"A": "own", "C": "gone", "OMP_NUM_THREADS": "4"},
        profiles={"mine": "variables: {A: 1, D: {value: '{rank_dir}/d', cost: heavy}, E: {value: 1, vendor: amd}}"},
    )
    run_id = next(line for line in plan if "TORCHELASTIC_RUN_ID" in line)
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert plan == [
        "2 ranks on 1 host; store at 127.0.0.1:29500 (static)",
        f"rank 0 (node0, local rank 0): {sys.executable} -u train.py --shard 0 'two words'",
        f"rank 1 (node0, local rank 1): {sys.executable} -u train.py --shard 1 'two words'",
        "environment of rank 0, as torchrun has it:",
        *("  GROUP_RANK=0", "  GROUP_WORLD_SIZE=1", "  LOCAL_RANK=0", "  LOCAL_WORLD_SIZE=2"),
        *("  MASTER_ADDR=127.0.0.1", "  MASTER_PORT=29500", "  RANK=0"),
        *("  ROLE_NAME=trainer", "  ROLE_RANK=0", "  ROLE_WORLD_SIZE=2"),
        *("  TORCHELASTIC_MAX_RESTARTS=0", "  TORCHELASTIC_RESTART_COUNT=0", run_id),
        *(f"  TORCHELASTIC_SIGNALS_TO_HANDLE={signals}", "  TORCHELASTIC_USE_AGENT_STORE=True"),
        *("  TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "  WORLD_SIZE=2"),
        "changes by env profiles (mine) and options:",
        "  API_KEY=<redacted>  [--env]",
        "  B='r{rank}'  [--env]",
        "  D='{rank_dir}/d'  [profile mine (profiles/mine.yaml:1), cost: heavy]",
        "  C is removed  [--unset]",
        "  A stays as your environment sets it  [profile mine would set A=1]",
        "  E is left out  [profile mine: it is for AMD's GPUs]",
    ]


def test_what_is_decided_at_the_start_only_is_said_to_be() -> None:
    """No port is taken, no address looked up."""
    plan = plan_of("--env-profile", "none", "train.py")
    assert plan[0] == "1 ranks on 1 host; store at <this host>:<a free port> (c10d)"
    assert "  MASTER_ADDR=<this host>" in plan
    assert "  MASTER_PORT=<a free port>" in plan
    assert not any("changes by" in line for line in plan)


def test_what_a_launch_would_refuse_the_plan_refuses() -> None:
    """A dry run that passes promises something."""
    with pytest.raises(UsageError, match="--virtual-local-rank"):
        plan_of("--virtual-local-rank", "--nproc-per-node=2", "train.py", environ={"CUDA_VISIBLE_DEVICES": "0"})


# What is on the PATH of these tests.
TOOL = f"{sys.executable} -X dev"


def commands_of(plan: list[str]) -> list[str]:
    """The command of each rank."""
    return [line.partition("): ")[2] for line in plan if line.startswith("rank ")]


def test_a_wrapped_rank_is_shown_with_its_tools() -> None:
    """The first one is the outermost; the directory of a rank is not known yet."""
    script = f"{sys.executable} -u train.py"
    wraps = ("--wrap", "1:nice -n {rank}", "--wrap", f"local:1:{TOOL} {{rank_dir}}/x")
    assert commands_of(plan_of("--nproc-per-node", "2", *wraps, "train.py")) == [
        script,
        f"nice -n 1 {TOOL} '{{rank_dir}}/x' {script}",
    ]
    memray = f"{sys.executable} -u -m memray run -q -f -o '{{rank_dir}}/memray.bin' train.py"
    assert commands_of(plan_of("--wrap", "0:memray", "train.py")) == [memray]


def test_a_rank_of_run_path_is_shown_as_it_is_run() -> None:
    """By the interpreter, which may run a module in place of the script."""
    (command,) = commands_of(plan_of("--run-path", "train.py", "$local_rank"))
    assert command.startswith(f"{sys.executable} ")
    assert "run_path.py " in command
    assert command.endswith(" train.py 0")
    (command,) = commands_of(plan_of("--run-path", "--wrap", "0:memray", "train.py"))
    assert " -m memray run " in command.partition("run_path.py")[0]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--wrap", "0:no-such-tool"), "no-such-tool is not installed here"),
        (("--wrap", "7:nice"), "there is no rank 7 to run under nice"),
        (("--wrap", "local:2:nice"), "there is no local rank 2 to run under nice"),
        (("--wrap", "0:strace", "--run-dir", "none"), "there is no run directory"),
        (("--wrap", "0:memray", "--no-python"), "memray runs Python scripts only"),
        (("--wrap", "0:nice", "--env", "PATH=/nowhere"), "nice is not installed here"),
    ],
)
def test_a_tool_that_a_launch_would_refuse_the_plan_refuses(arguments: tuple[str, ...], what: str) -> None:
    Path("train.py").chmod(0o700)
    with pytest.raises(UsageError, match=what) as raised:
        plan_of("--nproc-per-node", "2", *arguments, "./train.py")
    assert raised.value.exit_code == 2


def test_a_tool_is_searched_for_where_the_rank_searches() -> None:
    """On the PATH that a profile or ``--env`` gives it."""
    tool = Path("bin/mine")
    tool.parent.mkdir()
    tool.write_text("")
    tool.chmod(0o700)
    plan = plan_of("--wrap", "0:mine", "--env", f"PATH={tool.parent.resolve()}:/usr/bin", "train.py")
    assert commands_of(plan) == [f"mine {sys.executable} -u train.py"]


def test_where_no_rank_is_started_no_tool_is_missed() -> None:
    """With ``--preflight only`` such a launch ends with exit code 0."""
    plan_of("--preflight", "only", "--wrap", "7:no-such-tool", "--wrap", "0:strace", "train.py")


def test_without_a_run_directory_what_needs_it_is_left_out() -> None:
    """As the ranks will find it."""
    profiles = {
        "mine": "variables: {A: {value: '{rank_dir}/a', together_with: B}, B: {value: 1, together_with: A}, C: 1, "
        "D: {value: 'd', ranks: {0: '{run_dir}/d'}}}"
    }
    mine = "profile mine (profiles/mine.yaml:1)"
    arguments = ("--env-profile", "mine", "--env", "E={rank_dir}/e", "train.py")
    kept = plan_of(*arguments, profiles=profiles)
    assert not any("left out" in line for line in kept)
    assert f"  A='{{rank_dir}}/a'  [{mine}]" in kept
    plan = plan_of("--run-dir", "none", *arguments, profiles=profiles)
    assert plan[plan.index("changes by env profiles (mine) and options:") + 1 :] == [
        f"  C=1  [{mine}]",
        f"  D='{{run_dir}}/d' on rank 0, d on the others  [{mine}, left out where the value needs a run directory]",
        f"  A is left out  [{mine}: there is no run directory]",
        f"  B is left out  [{mine}: it is set only together with A]",
        "  E is left out  [--env: there is no run directory]",
    ]


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31m", "\udcff", "\u2028"])
def test_every_line_is_one_line_of_print(text: str) -> None:
    """Arguments and values hold anything, and a terminal obeys some of it."""
    arguments = ("--env", f"A={text}", "--role", text, "train.py", text)
    for line in (*config_lines(config_of(*arguments)), *plan_of(*arguments)):
        assert line.isprintable()


def test_it_starts_nothing_and_asks_nobody() -> None:
    """Printing has no way to touch a machine: its module imports none that does."""
    program = (
        "import sys; import saferun.launch.dry_run; "
        "names = 'subprocess', 'socket', 'saferun.launch.host_launch', 'saferun.linux.children', 'torch'; "
        "print([name for name in names if name in sys.modules])"
    )
    room = Path(dry_run.__file__).parents[1]
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(room)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------------------------------
# Several hosts


def test_a_plan_of_several_hosts_shows_this_ones_ranks() -> None:
    """Numbered as they are if all hosts are alike; nobody has been asked."""
    lines = plan_of("--nproc-per-node", "2", "train.py", environ=SLURM_TASK_A_HOST)
    assert lines[0].startswith("4 hosts (node[1-4]); 2 ranks on this host; store at node1:<")
    assert lines[1] == "this is host 2, from Slurm step 4711.0"
    assert lines[2:5] == [
        "  4 hosts: SLURM_STEP_NUM_NODES=4",
        "  node rank 2: SLURM_NODEID=2",
        "  master node1: the first of SLURM_STEP_NODELIST",
    ]
    assert lines[5] == "messages between hosts are signed, where they can share a secret"
    ranks = [line for line in lines if line.startswith("rank ")]
    assert [line.partition(":")[0] for line in ranks] == [
        "rank 4 (node0, local rank 0)",
        "rank 5 (node0, local rank 1)",
    ]
    for line in ("  WORLD_SIZE=8", "  LOCAL_WORLD_SIZE=2", "  GROUP_RANK=2", "  MASTER_ADDR=node1"):
        assert line in lines


def test_a_plan_says_whether_messages_are_signed() -> None:
    """As far as that is known before the hosts have met."""
    required = plan_of("--sign-messages", "required", "train.py", environ=SLURM_TASK_A_HOST)
    assert "messages between hosts are signed, and there is no job unless they can share a secret" in required
    off = plan_of("--sign-messages", "off", "train.py", environ=SLURM_TASK_A_HOST)
    one = plan_of("train.py", environ={})
    assert not any("signed" in line for line in (*off, *one))


def test_a_plan_of_one_task_a_rank_shows_one_rank() -> None:
    """With the place that this process has on its host."""
    lines = plan_of("train.py", environ=SLURM_TASK_A_RANK)
    assert "local rank 1 of 2 on this host" in lines[0]
    assert [line.partition(":")[0] for line in lines if line.startswith("rank ")] == ["rank 5 (node0, local rank 1)"]
    for line in ("  RANK=5", "  LOCAL_RANK=1", "  LOCAL_WORLD_SIZE=2", "  WORLD_SIZE=8"):
        assert line in lines


def test_a_rank_that_another_host_may_have_refuses_no_plan() -> None:
    """Hosts may have more ranks than this one; a line says what is known."""
    arguments = ("--nproc-per-node", "2", "--wrap", "8:nice", "--wrap", "4:nice", "train.py")
    plan = plan_of(*arguments, environ=SLURM_TASK_A_HOST)
    assert "--wrap: there is no rank 8 to run under nice, if all hosts have as many ranks as this one" in plan
    script = f"{sys.executable} -u train.py"
    assert commands_of(plan) == [f"nice {script}", script]
    with pytest.raises(UsageError, match="no local rank 2"):
        plan_of("--nproc-per-node", "2", "--wrap", "local:2:nice", "train.py", environ=SLURM_TASK_A_HOST)


def test_a_tool_of_another_host_is_not_searched_for_here() -> None:
    """It is the other host that refuses it; and a host that has another name than Slurm has for it refuses none."""
    plan = plan_of(
        "--wrap", "host:node1:no-tool", "--wrap", "host:other:no-tool", "train.py", environ=SLURM_TASK_A_HOST
    )
    assert commands_of(plan) == [f"{sys.executable} -u train.py"]


def test_a_plan_does_not_claim_to_know_what_a_rendezvous_decides() -> None:
    """How many hosts come, and which of them this is."""
    lines = plan_of("--nnodes", "2:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:1234", "train.py")
    assert lines[0] == "2 to 4 hosts; 1 ranks on this host; hosts meet at node1:1234 (c10d)"
    assert "the rendezvous decides" in lines[1]
    assert "  MASTER_ADDR=<a host>" in lines


def test_the_place_of_the_job_secret_is_shown_and_not_what_is_in_it() -> None:
    """By both, and in run.json; the ranks keep the variable, as they keep all others."""
    path = Path("S3CR3TPLACE")
    path.write_text("correct horse battery staple")
    path.chmod(0o600)
    arguments = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "node0", "train.py")
    config = config_of(*arguments, environ={"SAFERUN_JOB_SECRET_FILE": str(path)})
    assert rows_of(config_lines(config))["job-secret-file"] == (
        "S3CR3TPLACE",
        "environment (SAFERUN_JOB_SECRET_FILE)",
    )
    plan = plan_of(*arguments, environ={"SAFERUN_JOB_SECRET_FILE": str(path)})
    assert "messages between hosts are signed with the secret in S3CR3TPLACE" in plan
    for text in ("\n".join(plan), repr(config), repr(config_lines(config))):
        assert "horse" not in text


def test_one_host_signs_nothing() -> None:
    """Whatever the variable of the user says."""
    assert not [line for line in plan_of("train.py", environ={"SAFERUN_JOB_SECRET_FILE": "x"}) if "signed" in line]
