"""Secrets of a launch stand in none of its files but those that hold what its ranks wrote, and on no terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.process.launching import Job, running
from tests.process.somebody import as_user, needs_root

SECRET = "S3CR3TVALUE"  # noqa: S105 - of no service
# As libraries do: a name with its value, and a URL, in what a rank says last and what it ends with.
FAIL = f"""
from rank import *
print("wandb: ERROR login failed for wandb key {SECRET}", file=sys.stderr)
print("Authorization: Bearer {SECRET}", file=sys.stderr)
raise RuntimeError("HF_TOKEN={SECRET} https://me:{SECRET}@host/x?sig={SECRET} " + '{{"password": "{SECRET}"}}')
"""
# What ranks write is theirs.
OF_RANKS = {"stdout.log", "stderr.log", "error.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def told(job: Job) -> str:
    """All that saferun itself wrote: its lines on the console, and its files."""
    texts = [line for line in (job.out + job.err).splitlines() if line.startswith(("saferun:", "hint:"))]
    files = [path for path in job.run_dir.rglob("*") if path.is_file() and path.name not in OF_RANKS]
    return "\n".join([*texts, *(path.read_text(errors="replace") for path in files)])


def test_a_failed_launch_tells_no_secret(folder: Path) -> None:
    """Neither those of its own command line, nor those in the words of the rank that failed: reports are passed on."""
    options = ("--env", f"SLURM_JWT={SECRET}", "--env", f"SLACK_WEBHOOK_URL={SECRET}", "--preflight", "off")
    script = ("--db-password", SECRET, f"GITHUB_PAT={SECRET}", "-p", SECRET)
    with running(folder, FAIL, *options, nproc=1, arguments=script, store=False) as job:
        assert job.wait() == 1
        text = told(job)
        assert SECRET not in text
        assert "HF_TOKEN=<redacted>" in text
        assert "https://me:<redacted>@host" in text
        assert (job.run_dir / "report.json").exists()
        run = json.loads((job.run_dir / "run.json").read_text())
        assert "SLURM_JWT=<redacted>" in run["command"]
        assert [event for event in job.events() if event["event"] == "Diagnosed"]
        # What the rank wrote stands in its own file as it was.
        assert SECRET in job.rank_file(0, "stderr.log").decode()
        assert "everyone on this host can read the value of SLURM_JWT, SLACK_WEBHOOK_URL in ps" in job.err


@pytest.mark.parametrize("question", ["--dry-run", "--show-config"])
def test_a_question_about_a_launch_is_answered_without_secrets(folder: Path, question: str) -> None:
    script = ("--db-password", SECRET, "--url", f"postgres://u:p/{SECRET}@h/db")
    environ = {"AZURE_SAS": SECRET}
    options = (question, "--env", "AZURE_SAS", "--env", f"MYSQL_PWD={SECRET}")
    with running(folder, "", *options, nproc=1, arguments=script, environ=environ, store=False) as job:
        assert job.wait() == 0
        assert SECRET not in job.out + job.err
        assert "AZURE_SAS" in job.out


WAIT = """
from rank import *
tell("same" if os.environ["HF_TOKEN"] == "S3CR3T{rank}VALUE" else "other")
await_release("end")
"""


@needs_root
def test_a_secret_that_is_taken_from_the_environment_is_on_nobodys_ps(folder: Path) -> None:
    """Command lines are everyone's to read; environments are not. The value comes as it is, braces and all."""
    secret = "S3CR3T{rank}VALUE"  # noqa: S105 - of no service
    with running(folder, WAIT, "--env", "HF_TOKEN", nproc=1, environ={"HF_TOKEN": secret}, store=False) as job:
        job.hear("same")

        def read_all() -> str:
            seen = []
            for pid in job_pids:
                for name in ("cmdline", "environ"):
                    try:
                        with open(f"/proc/{pid}/{name}", "rb") as file:
                            seen.append(file.read())
                    except PermissionError:
                        pass
                    except (FileNotFoundError, ProcessLookupError):
                        seen.append(b"")  # a check has ended meanwhile
            return f"{len(seen)} {any(secret.encode() in text for text in seen)}"

        job_pids = job.processes()
        assert len(job_pids) >= 3
        count, is_seen = as_user(read_all).split()
        assert int(count) >= len(job_pids)
        assert is_seen == "False"
        job.release("end")
        assert job.wait() == 0
        assert os.fsencode(secret) not in (job.run_dir / "run.json").read_bytes()
