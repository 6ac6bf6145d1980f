"""What the ranks see of env profiles, --env and --unset, and what a launch says of its settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.breadth import slow_but
from tests.process.launching import Job, read_stat, running, two_lines, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Every rank leaves its environment for the test. An argument N lets attempts before the Nth fail.
SHOW = """
from rank import *
import json
with open(f"{FOLDER}/environ.{RANK}.{ATTEMPT}", "w") as file:
    json.dump(dict(os.environ), file)
sys.exit(len(sys.argv) > 1 and ATTEMPT < int(sys.argv[1]))
"""

# The ranks stay until they are released, and leave with the code that stands in the argument of their attempt.
STAY_A_WHILE = """
from rank import *
tell("ready")
await_release(f"end.{ATTEMPT}")
sys.exit(int(sys.argv[1 + ATTEMPT]))
"""

# NCCL's exception is as vague as this, and its warnings are in the file that the profile names.
NCCL_FAILS = """
from rank import *
path = os.environ["NCCL_DEBUG_FILE"].replace("%h", "n1").replace("%p", str(os.getpid()))
with open(path, "w") as file:
    file.write("n1:7:99 [0] misc/ibvwrap.cc:270 NCCL WARN Call to ibv_reg_mr failed: Cannot allocate memory\\n")
raise RuntimeError("NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details)")
"""

# What torchrun tells a rank, and saferun beside it.
TOLD = frozenset(
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "SAFERUN_RUN_ID", "SAFERUN_RUN_DIR", "SAFERUN_HEARTBEAT_FILE"),
    ]
)
# Of an interpreter in the C locale (PEP 538), and of a shell before saferun.
_OTHERS = frozenset({"LC_CTYPE", "PWD", "OLDPWD", "SHLVL", "_"})


def environ_of(job: Job, rank: int = 0, attempt: int = 0) -> dict[str, str]:
    """The environment that a rank has left."""
    found: dict[str, str] = json.loads((job.folder / f"environ.{rank}.{attempt}").read_text())
    return found


def added(job: Job, rank: int = 0) -> dict[str, str]:
    """What a rank has beyond saferun's own environment and what every rank is told."""
    environ = environ_of(job, rank)
    extra = {name: value for name, value in environ.items() if job.environ.get(name) != value}
    return {name: value for name, value in extra.items() if name not in TOLD | _OTHERS}


def words_of(job: Job) -> list[str]:
    """Saferun's own lines, without what stands before each."""
    return [line.removeprefix("saferun: ") for line in job.err.splitlines() if line.startswith("saferun: ")]


def with_files(**files: str) -> list[str]:
    """A command before saferun that puts files into its directory; underscores in names become dots."""
    script, arguments = "", []
    for name, content in files.items():
        script += f'printf %s "$1" >{name.replace("_", ".")}; shift; '
        arguments.append(content)
    return ["sh", "-c", f'{script}exec "$@"', "sh", *arguments]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of one launch, with room for files beside it."""
    return tmp_path / "launch"


def launch(folder: Path, *options: str, program: str = SHOW, lint: bool = False, **more: Any) -> Any:
    """One launch with nothing of its user's around: no profiles, no cache.

    ``lint`` False: what this machine's own variables come to is not told among the lines that the test looks at.
    """
    around = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config"), "XDG_CACHE_HOME": str(folder / "cache")}
    around["SAFERUN_LINT"] = "on" if lint else "off"
    environ: Mapping[str, str] = more.pop("environ", {})
    return running(folder, program, *options, store=False, environ={**around, **environ}, **more)


# --------------------------------------------------------------------------------------------------------------------
# What a rank sees


def test_the_default_profile_gives_evidence_for_a_failure(folder: Path) -> None:
    """And it is silent about it: nothing of it costs a healthy job anything."""
    with launch(folder, nproc=2) as job:
        assert job.wait() == 0
        assert words_of(job) == []
        for rank in range(2):
            environ = environ_of(job, rank)
            assert "PYTHONFAULTHANDLER" not in environ, "children would inherit it"
            assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
            assert environ["TORCH_SYMBOLIZE_MODE"] == "dladdr"
            assert environ["NCCL_DEBUG_FILE"].endswith(f"/rank_{rank}/nccl.%h.%p.log")
            dump = environ.get("TORCH_FR_DUMP_TEMP_FILE") or environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
            (attempt_dir,) = job.run_dir.resolve().glob("*/attempt_0")
            assert Path(dump).parent == attempt_dir / f"rank_{rank}"


@pytest.mark.parametrize("profile", ["production", "none"])
def test_a_launch_from_within_a_rank_does_not_write_over_that_rank_s_files(folder: Path, profile: str) -> None:
    """Its environment, and a job's that it submits, has the paths of the outer run."""
    outer = "/outer/runs/1"
    environ = {
        "SAFERUN_RUN_ID": "1",
        "SAFERUN_RUN_DIR": outer,
        "TORCH_FR_DUMP_TEMP_FILE": f"{outer}/vm/attempt_0/rank_0/flight_recorder_",
        "NCCL_DEBUG_FILE": f"{outer}/vm/attempt_0/rank_0/nccl.%h.%p.log",
        "NCCL_DEBUG": "WARN",
        "TORCH_TRACE": f"{outer}/mine",
    }
    with launch(folder, "--env-profile", profile, environ=environ) as job:
        assert job.wait() == 0
        assert words_of(job) == []
        found = environ_of(job)
        assert found["TORCH_TRACE"] == f"{outer}/mine"
        own = {name for name in environ if found.get(name, "").startswith(outer)} - {"TORCH_TRACE"}
        assert not own
        assert ("NCCL_DEBUG" in found) is (profile == "production")


def test_nccl_s_own_log_of_a_rank_counts_as_evidence(folder: Path) -> None:
    with launch(folder, "--max-restarts", "0", program=NCCL_FAILS) as job:
        assert job.wait() == 1
        assert "RDMA cannot lock the memory that it needs" in job.err
        assert "proof: Call to ibv_reg_mr failed: Cannot allocate memory" in job.err


def test_none_gives_what_torchrun_gives(folder: Path) -> None:
    """The way out, when a profile is under suspicion."""
    with launch(folder, "--env-profile", "none", nproc=2) as job:
        assert job.wait() == 0
        assert added(job) == {}
        assert words_of(job) == []


def test_later_profiles_are_laid_over_earlier_ones(tmp_path: Path, folder: Path) -> None:
    """From left to right, out of a directory of the user's, with what they extend."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.yaml").write_text("variables: {X: a, Y: a, Z: a}")
    (mine / "b.yaml").write_text("extends: minimal\nunset: [Z]\nvariables: {Y: b}")
    options = ("--env-profile-path", str(mine), "--env-profile", "a,b")
    with launch(folder, *options) as job:
        assert job.wait() == 0
        assert added(job) == {"X": "a", "Y": "b"}


def test_a_single_file_may_be_the_path(tmp_path: Path, folder: Path) -> None:
    """Its name is the profile's."""
    (tmp_path / "one.yaml").write_text("variables: {X: {value: others, ranks: {1: first}}}")
    options = ("--env-profile-path", str(tmp_path / "one.yaml"), "--env-profile", "one")
    with launch(folder, *options, nproc=3) as job:
        assert job.wait() == 0
        assert [added(job, rank)["X"] for rank in range(3)] == ["others", "first", "others"]


def test_values_may_differ_by_rank(folder: Path) -> None:
    """The placeholders of a profile are those of --env."""
    env = ("--env", "A={rank}/{local_rank}/{world_size}", "--env", "B={rank_dir}/x", "--env", "C={run_dir}{{rank}}")
    with launch(folder, "--env-profile", "none", *env, nproc=2) as job:
        assert job.wait() == 0
        run_dir = job.run_dir.resolve()
        for rank in range(2):
            (attempt_dir,) = run_dir.glob("*/attempt_0")
            path = f"{attempt_dir}/rank_{rank}/x"
            assert added(job, rank) == {"A": f"{rank}/{rank}/2", "B": path, "C": f"{run_dir}{{rank}}"}


def test_unset_takes_a_variable_out(folder: Path) -> None:
    """Of the user's, of a profile's, and of what torchrun adds by itself."""
    names = ("MINE", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NEVER_SET")
    unset = [part for name in names for part in ("--unset", name)]
    with launch(folder, *unset, nproc=2, environ={"MINE": "1"}) as job:
        assert job.wait() == 0
        assert not environ_of(job).keys() & set(names)
        assert environ_of(job)["TORCH_SYMBOLIZE_MODE"] == "dladdr"


def test_the_users_own_variable_wins_over_a_profile(folder: Path) -> None:
    """And a line says so, where it makes a difference."""
    name = "TORCH_SYMBOLIZE_MODE"
    with launch(folder, environ={name: "fast", "NCCL_DEBUG": "INFO"}) as job:
        assert job.wait() == 0
        assert environ_of(job)[name] == "fast"
        assert "NCCL_DEBUG_FILE" not in environ_of(job)
        assert words_of(job) == [
            f"{name} stays as your environment sets it; profile production would set {name}=dladdr"
        ]


def test_force_in_a_profile_wins_over_the_user_and_says_so(folder: Path) -> None:
    """Nobody's variable disappears without a word."""
    file = "profiles: {mine: {variables: {X: !force 1}, unset: [!force Y]}}"
    environ = {"X": "own", "Y": "own"}
    with launch(folder, "--env-profile", "mine", before=with_files(saferun_yaml=file), environ=environ) as job:
        assert job.wait() == 0
        assert environ_of(job)["X"] == "1"
        assert "Y" not in environ_of(job)
        assert words_of(job) == [
            "settings from saferun.yaml",
            "profile mine (./saferun.yaml:1) replaces X of your environment: X=1",
            "profile mine (./saferun.yaml:1) removes Y",
        ]


def test_env_wins_over_all(folder: Path) -> None:
    """Over the user's environment, over a profile that forces, over --unset, over what torchrun adds."""
    file = "profiles: {mine: {variables: {X: !force 1}}}"
    env = [part for name in ("X", "Y", "OMP_NUM_THREADS") for part in ("--env", f"{name}=flag")]
    options = ("--env-profile", "mine", *env, "--unset", "Y")
    environ = {"X": "own", "Y": "own"}
    with launch(folder, *options, nproc=2, before=with_files(saferun_yaml=file), environ=environ) as job:
        assert job.wait() == 0
        seen = environ_of(job)
        assert [seen[name] for name in ("X", "Y", "OMP_NUM_THREADS")] == ["flag"] * 3


@pytest.mark.slow
def test_every_attempt_has_directories_of_its_own(folder: Path) -> None:
    """The dump of the first failure must not be overwritten by the second."""
    options = ("--env-profile", "none", "--env", "D={rank_dir}", "--max-restarts", "2")
    with launch(folder, *options, nproc=2, arguments=("2",)) as job:
        assert job.wait() == 0
        # The last attempt has ended well on both; in the earlier ones a rank may have been stopped before it told.
        seen = {path.name: json.loads(path.read_text())["D"] for path in job.folder.glob("environ.*.2")}
        assert len(seen) == 2
        for name, directory in seen.items():
            rank = name.split(".")[1]
            assert Path(directory).parts[-2:] == ("attempt_2", f"rank_{rank}")
            assert Path(directory).parent.is_dir()
        assert len(list(job.run_dir.glob("*/attempt_*"))) == 3


def test_without_a_run_directory_what_needs_one_is_left_out(folder: Path) -> None:
    """Of what was asked for a line says so; for the default's dump torch has a place of its own."""
    with launch(folder, "--run-dir", "none", "--env", "D={rank_dir}/x") as job:
        assert job.wait() == 0
        assert not environ_of(job).keys() & {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "D"}
        assert words_of(job) == ["without a run directory these are left out: D"]


# --------------------------------------------------------------------------------------------------------------------
# What a launch says


def test_a_profile_that_costs_much_says_so_in_one_line(folder: Path) -> None:
    """Forgotten in a job script it would be paid for weeks."""
    with launch(folder, "--env-profile", "blocking", "--vendor", "nvidia") as job:
        assert job.wait() == 0
        assert environ_of(job)["CUDA_LAUNCH_BLOCKING"] == "1"
        assert words_of(job) == [
            "env profile blocking makes the job much slower (CUDA_LAUNCH_BLOCKING=1); not for production"
        ]


@pytest.mark.parametrize("place", ["flag", "environment", "file"])
def test_an_unknown_profile_is_refused_with_the_nearest_one(folder: Path, place: str) -> None:
    """Wherever it was named, before anything has begun."""
    options = ("--env-profile", "produktion") if place == "flag" else ()
    environ = {"SAFERUN_ENV_PROFILE": "produktion"} if place == "environment" else {}
    before = with_files(saferun_yaml="env-profile: produktion") if place == "file" else []
    with launch(folder, *options, environ=environ, before=before) as job:
        assert job.wait() == 2
        what, hint = two_lines(job.err)
        assert what == "no env profile is named 'produktion'"
        assert hint == "did you mean production?"
        assert not (job.folder / "job" / "saferun-runs").exists()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--env", ""), "--env is empty"),
        (("--env", "=x"), "'' cannot be the name"),
        (("--env", "RANK=3"), "RANK is set by saferun itself"),
        (("--env", "X={rnak}"), "unknown placeholder {rnak}"),
        (("--unset", "MASTER_ADDR"), "MASTER_ADDR is set by saferun itself"),
        (("--env-profile-path", "nowhere"), "no env profiles at 'nowhere'"),
    ],
)
def test_what_cannot_be_set_is_refused(folder: Path, options: Sequence[str], word: str) -> None:
    with launch(folder, *options) as job:
        assert job.wait() == 2
        assert word in two_lines(job.err)[0]
        assert not (job.folder / "job" / "saferun-runs").exists()


def test_a_broken_profile_is_refused_with_file_and_line(tmp_path: Path, folder: Path) -> None:
    """Where to look, and what was meant."""
    (tmp_path / "mine.yaml").write_text("variables:\n  X:\n    value: 1\n    csot: heavy\n")
    options = ("--env-profile-path", str(tmp_path / "mine.yaml"), "--env-profile", "mine")
    with launch(folder, *options) as job:
        assert job.wait() == 2
        what, hint = two_lines(job.err)
        assert f"{tmp_path}/mine.yaml:4:5" in what
        assert "cost" in hint


def test_a_settings_file_that_is_found_is_told(folder: Path) -> None:
    """A job that behaves differently in another directory would be a riddle."""
    file = "nproc-per-node: 3\nenv: {X: 1}\nenv-profile: none\n"
    with launch(folder, nproc=None, before=with_files(saferun_yaml=file)) as job:
        assert job.wait() == 0
        assert words_of(job) == ["settings from saferun.yaml"]
        assert [added(job, rank) for rank in range(3)] == [{"X": "1"}] * 3


def test_a_settings_file_that_is_named_is_not_told(folder: Path) -> None:
    """Whoever named it knows."""
    files = with_files(saferun_yaml="env: {X: 1}", other_yaml="env: {Y: 2}\nenv-profile: none")
    with launch(folder, "--config", "other.yaml", before=files) as job:
        assert job.wait() == 0
        assert words_of(job) == []
        assert added(job) == {"Y": "2"}


def test_run_json_tells_where_settings_come_from(folder: Path) -> None:
    """Months later too."""
    with launch(folder, "--env", "HF_TOKEN=s3cret", before=with_files(saferun_yaml="role: r")) as job:
        assert job.wait() == 0
        text = (job.run_dir / "run.json").read_text()
        settings = json.loads(text)["settings"]
        assert (settings["role"]["value"], settings["role"]["origin"]) == ("r", "file")
        assert settings["env"]["origin"] == "flag"
        assert "s3cret" not in text


# --------------------------------------------------------------------------------------------------------------------
# Questions


@pytest.mark.parametrize("options", [("--dry-run",), ("--show-config",), ("--dry-run", "--show-config")])
def test_questions_start_nothing_and_leave_nothing(folder: Path, options: Sequence[str]) -> None:
    """Safe to try anywhere."""
    program = "from rank import *\ntell('ran')"
    with launch(folder, *options, "--env", "X=1", "--master-port", "29500", program=program, nproc=2) as job:
        assert job.wait() == 0
        assert job.err == ""
        assert ("rank 1 (" in job.out) == ("X=1  [--env]" in job.out) == ("--dry-run" in options)
        assert ("flag (--env)" in job.out) == ("--show-config" in options)
        assert not job.said()
        assert sorted(path.name for path in (job.folder / "job").iterdir()) == ["rank.py", "train.py"]
        assert not (job.folder / "cache").exists()


def test_a_question_whose_reader_has_seen_enough_is_no_error(folder: Path) -> None:
    """`saferun --dry-run … | head -1`: more than a pipe takes, and a reader that is gone."""
    before = ["sh", "-c", '{ "$@"; echo $? >code; } | head -1', "sh"]
    with launch(folder, "--dry-run", nproc=4000, before=before) as job:
        assert job.wait() == 0
        assert job.err == ""
        assert job.out.startswith("4000 ranks on 1 host")
        assert (job.folder / "job" / "code").read_text() == "0\n"


# --------------------------------------------------------------------------------------------------------------------
# The lint beside a job

BAD_VALUE = {"NCCL_SOCKET_IFNAME": "eht0"}


@pytest.mark.slow
def test_a_value_that_cannot_be_is_told_beside_the_job(folder: Path) -> None:
    """On a build for CPUs too: the script is tried there before it goes where it hangs for want of that interface."""
    with launch(folder, lint=True, program=STAY_A_WHILE, nproc=2, arguments=("0",), environ=BAD_VALUE) as job:
        until(lambda: "NCCL_SOCKET_IFNAME=eht0" in job.err, "the line about NCCL_SOCKET_IFNAME")
        job.release("end.0")
        assert job.wait() == 0
        (line,) = (line for line in words_of(job) if "NCCL_SOCKET_IFNAME" in line)
        assert line.startswith("NCCL_SOCKET_IFNAME=eht0: this host has no interface starting with eht0")


def test_a_name_that_is_wrong_is_told_beside_the_job(folder: Path) -> None:
    """What --env sets is looked at like everything else."""
    options = ("--env", "TORCH_SHOW_CPP_STACKTRACE=1")
    with launch(folder, *options, lint=True, program=STAY_A_WHILE, arguments=("0",)) as job:
        until(lambda: "TORCH_SHOW_CPP_STACKTRACE=1: " in job.err, "the line about TORCH_SHOW_CPP_STACKTRACE")
        job.release("end.0")
        assert job.wait() == 0
        (line,) = (line for line in words_of(job) if "TORCH_SHOW_CPP_STACKTRACE=" in line)
        assert "TORCH_SHOW_CPP_STACKTRACES" in line


# A saferun with another lint in the place of its own: the examiner is a fork of it, and the lint one of the examiner's.
STAND_IN = """
import os, signal, time
import saferun.env.lint.__main__ as lint
def stand_in(arguments):
    fd = os.open(os.environ["LAUNCHING_FOLDER"] + "/words", os.O_WRONLY)
    os.write(fd, f"-1 -1 {os.getpid()} lint\\n".encode())
    os.close(fd)
    HAPPENS
lint.main = stand_in
from saferun.cli.main import main
main()
"""
BROKEN = {
    "ends with an error": "os._exit(3)",
    "raises": "raise ValueError(arguments)",
    "crashes": "os.abort()",
    "says nothing": "os._exit(0)",
    "says no JSON": r"os.write(1, b'\xff{]'); os._exit(0)",
    "says other JSON": """os.write(1, b'[{"findings": 7}]'); os._exit(0)""",
    "says no findings": """os.write(1, b'{"findings": [{"variable": 1}]}'); os._exit(0)""",
    "says half of it": """os.write(1, b'{"findings": ['); os._exit(0)""",
    "says too much": """
    while True:
        os.write(1, b'x' * 65536)
""",
}


def with_stand_in(happens: str, *, before: str = "") -> tuple[str, ...]:
    """The command of a saferun in which this happens where the lint would be, and something else at the start."""
    return sys.executable, "-c", before + STAND_IN.replace("HAPPENS", happens)


@pytest.mark.parametrize("name", slow_but(BROKEN, *list(BROKEN)[::3]))
def test_a_lint_that_is_broken_is_worth_no_word(folder: Path, name: str) -> None:
    """The job does not depend on it."""
    more: dict[str, Any] = {"launcher": with_stand_in(BROKEN[name]), "environ": BAD_VALUE, "arguments": ("0",)}
    with launch(folder, lint=True, program=STAY_A_WHILE, **more) as job:
        (lint,) = job.hear("lint")
        until(lambda: read_stat(lint.pid) is None, "the end of the lint")
        job.release("end.0")
        assert job.wait() == 0
        assert job.err == ""


def test_a_lint_that_hangs_ends_with_the_job(folder: Path) -> None:
    """Through a restart, whatever signals it ignores: it is no leftover of a rank, and nobody waits for it."""
    launcher = with_stand_in("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    more: dict[str, Any] = {"launcher": launcher, "environ": BAD_VALUE, "arguments": ("1", "0")}
    with launch(folder, "--max-restarts", "1", lint=True, program=STAY_A_WHILE, **more) as job:
        (lint,) = job.hear("lint")
        job.release("end.0")
        job.hear("ready", 2)
        assert read_stat(lint.pid) is not None
        job.release("end.1")
        assert job.wait() == 0
        assert not any(str(lint.pid) in line for line in words_of(job))


@pytest.mark.slow
def test_with_lint_off_there_is_none(folder: Path) -> None:
    """The rank stays until the checks beside it are over; the lint would have begun before them."""
    at_once = "import saferun.launch.lint_part\nsaferun.launch.lint_part._DELAY_S = 0.0\n"
    launcher = with_stand_in("pass", before=at_once)
    more: dict[str, Any] = {"launcher": launcher, "environ": BAD_VALUE, "arguments": ("0",)}
    with launch(folder, "--lint", "off", lint=True, program=STAY_A_WHILE, **more) as job:
        until((job.run_dir / "preflight.json").exists, "the checks are made")
        job.release("end.0")
        assert job.wait() == 0
        assert job.err == ""
        assert [said.word for said in job.said()] == ["ready"]
