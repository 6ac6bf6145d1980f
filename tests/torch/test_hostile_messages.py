"""Messages that make no sense in the store of a job that trains: they are ignored and counted, and end nothing."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from saferun.cluster.signed import unverified
from tests.process.launching import Job
from tests.torch.coordinating import DECISION, TROUBLE
from tests.torch.several import hosts

TRAIN = """
from rank import *
import torch
import torch.distributed as dist

def note(name, value):
    with open(FOLDER + "/note." + name, "w") as file:
        file.write(str(value))
    tell(name)


dist.init_process_group("gloo")
note("port", os.environ["MASTER_PORT"])
step, told = 0, set()
while True:
    ends = torch.tensor([int(os.path.exists(FOLDER + "/release.end"))])
    dist.all_reduce(ends)
    step += 1
    for name in ("first", "second"):
        if name not in told and os.path.exists(FOLDER + "/release." + name):
            told.add(name)
            note(name, step)
    if ends[0] == dist.get_world_size():
        break
    time.sleep(0.001)
dist.destroy_process_group()
"""
# No field of a message may hold one of these.
WRONG = [float("inf"), float("-inf"), float("nan"), 10**400, -5, [[]], {"a": 1}]
CHANGED = 1 << 32  # in a beat: the state is another one


def message(chance: random.Random) -> dict[str, Any]:
    """One that hosts do tell each other, with something wrong in it."""
    sample, names = chance.choice(
        [
            (TROUBLE, ("task", "signum", "ranks", "lost_task", "text", "label", "reason")),
            (DECISION, ("exit_code", "wait_s", "restarts", "excluded", "text")),
        ]
    )
    return {**sample, chance.choice(names): chance.choice(WRONG)}


def entry(chance: random.Random) -> str:
    """One of the job's log."""
    texts = [
        "[" * 3000,
        '{"h":' * 3000,
        "null",
        "7",
        "x",
        "{}",
        '{"h": 1e999, "n": 1, "m": {"kind": "abort"}}',
        "\ufffd",
    ]
    wrong = {"h": chance.choice([0, 1, *WRONG]), "n": 1, "m": message(chance)}
    forged = {"h": 1, "n": 1, "m": {**DECISION, "next": chance.choice(["finish", "restart"]), "exit_code": 0}}
    orders = {
        "h": 1,
        "n": 1,
        "m": {"kind": chance.choice(["hang", "judgement", "preflight", "watch", "notice"]), "host": 0},
    }
    nonsense = "".join(chance.choices('[]{}",:0123456789eE+-.nulltruefalse Infinity\\', k=chance.randrange(1, 80)))
    return chance.choice([chance.choice(texts), nonsense, *map(json.dumps, (wrong, wrong, forged, orders))])


def state(chance: random.Random) -> str:
    """One of host 1's: what is right says that it runs, with parts that were never asked for."""
    right = {
        "tasks": {"0": {"s": "run"}},
        "chunks": [[0, f"hang-{chance.randrange(2000)}"]],
        "stuck": {},
        "acked": False,
        "locations": {},
    }
    wrong = {**right, chance.choice(["t", "p", "x", "a"]): chance.choice([*WRONG, {"²": "D"}, {"9" * 5000: {}}])}
    return chance.choice([json.dumps(right), json.dumps(wrong), "[" * 3000])


def noted(job: Job, name: str) -> int:
    """A number that a rank has written down."""
    job.hear(name)
    return int((job.folder / f"note.{name}").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "is_signed"),
    [
        (300, False),
        (10_000, False),
        (10_000, True),
    ],
    ids=["few", "many", "many, with a job secret"],
)
def test_a_job_survives_messages_that_make_no_sense_while_it_trains(
    tmp_path: Path, count: int, is_signed: bool
) -> None:
    """On both hosts, to exit code 0; the host that leads says how many there were."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def connected(port: int) -> Any:
        return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)

    chance = random.Random(count)  # noqa: S311 - a sample, no secret
    secret = tmp_path / "secret"
    secret.write_bytes(b"correct horse battery staple")
    secret.chmod(0o600)
    options = ("--secret-file", str(secret)) if is_signed else ("--sign-messages", "off")
    with hosts(tmp_path, TRAIN, *options) as jobs:
        port, _ = (noted(job, "port") for job in jobs)
        control = json.loads(unverified(connected(port).get("saferun/control")))
        store = connected(control["control_port"])
        for job in jobs:
            job.release("first")
        before = [noted(job, "first") for job in jobs]
        k = 0
        for i in range(count):
            if chance.random() < 0.8:
                text = entry(chance) or "x"
                while store.compare_set(f"a0/log/{k}", "", text) != text.encode():
                    k += 1
                k += 1
            else:
                store.set(f"a0/chunk/1/0/hang-{chance.randrange(2000)}", chance.choice(["[" * 3000, "7", "{}", "x"]))
                store.set("a0/state/1", state(chance))
                if is_signed:
                    store.set("a0/heartbeat/1", str(i))  # no number that could be added to
                else:
                    store.add("a0/heartbeat/1", CHANGED + 1)
                store.set("a0/wake", str(i))
        for job in jobs:
            job.release("second")
        after = [noted(job, "second") for job in jobs]
        assert all(late > early for early, late in zip(before, after, strict=True))
        for job in jobs:
            job.release("end")
        assert [job.wait() for job in jobs] == [0, 0]
        ignored = "not signed with the job secret" if is_signed else "ignored an invalid message"
        assert ignored in jobs[0].err
        for job in jobs:
            assert "Traceback" not in job.err
            assert all(line.isprintable() for line in job.err.splitlines())
