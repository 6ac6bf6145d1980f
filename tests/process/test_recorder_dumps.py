"""What a rank wrote of its collectives before it died is read, as torch's watchdog leaves it in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.launching import running

TIMES_OUT = """
import os, pickle, sys
frames = [{"name": "step", "filename": os.path.abspath(sys.argv[0]), "line": 7}]
def entry(seq, state):
    return {
        "frames": frames, "record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq,
        "p2p_seq_id": 0, "is_p2p": False, "profiling_name": "nccl:all_reduce", "input_sizes": [[4]],
        "output_sizes": [[4]], "state": state, "retired": state == "completed", "time_created_ns": seq,
    }
rank = int(os.environ["RANK"])
calls = [entry(1, "completed")] + ([entry(2, "scheduled")] if rank == 0 else [])
config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
    pickle.dump({"version": "2.10", "entries": calls, "pg_config": config, "pg_status": {}}, file, 2)
raise RuntimeError(
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=4, "
    "NumelOut=4, Timeout(ms)=600000) ran for 600021 milliseconds before timing out."
)
"""
QUIET = ("--env-profile", "minimal", "--env", "TORCH_FR_DUMP_TEMP_FILE={rank_dir}/flight_recorder_")


def test_the_rank_that_had_not_called_is_named_by_the_files_of_dead_ranks(tmp_path: Path) -> None:
    with running(tmp_path, TIMES_OUT, *QUIET, nproc=2, store=False) as job:
        assert job.wait() == 1
        report = json.loads((job.run_dir / "report.json").read_text(encoding="utf-8"))
        (incident,) = report["incidents"]
        recorders = {one["rank"]: one["groups"][0] for one in incident["collectives"]}
        assert recorders[0]["enqueued"] == 2, job.err
        assert (incident["cause"]["class"], incident["cause"]["ranks"]) == ("nccl_timeout", [1])
        assert any("called all_reduce at" in line for line in incident["findings"])
        notes = [note for note in incident["captures"] if note["capture"] == "flight_recorder" and note["file"]]
        assert notes, incident["captures"]


@pytest.mark.slow
def test_a_file_that_is_no_recorder_costs_nothing(tmp_path: Path) -> None:
    """The failure is reported as ever."""
    spoiled = TIMES_OUT.replace("pickle.dump({", "file.write(b'no pickle'); str({").replace("}, file, 2)", "})")
    with running(tmp_path, spoiled, *QUIET, nproc=2, store=False) as job:
        assert job.wait() == 1
        report = json.loads((job.run_dir / "report.json").read_text(encoding="utf-8"))
        (incident,) = report["incidents"]
        assert incident["cause"]["class"] == "nccl_timeout"
        assert "the file that it wrote cannot be read" in json.dumps(incident["captures"])
