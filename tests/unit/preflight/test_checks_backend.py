"""Whether the ranks are certain to use gloo: only then may what gloo cannot use stop a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saferun.preflight.checks.backend import backend_of, known_backend
from saferun.preflight.nic_links import uses_of
from saferun.preflight.results import HostInfo
from tests.unit.preflight.host_roots import Root
from tests.unit.preflight.preflight_samples import infos_of, judged, probes_of, told, where

MAIN = """
import argparse
import torch.distributed as dist

def set_up(rank):
    dist.init_process_group({})

def main():
    args = argparse.ArgumentParser().parse_args()
    with open("/dev/null") as log:
        set_up(0)

if __name__ == "__main__":
    main()
"""
STRAIGHT = MAIN.format('"gloo"')


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ('"gloo"', "gloo"),
        ('backend="gloo"', "gloo"),
        ("'GLOO', timeout=limit, init_method='env://'", "gloo"),
        ('"nccl"', "nccl"),
        ("'gloo', None, timeout=limit", "gloo"),
        ("'gloo', 'env://'", "gloo"),
        ("'gloo', init_method=None, pg_options=None, group_name='x'", "gloo"),
        ("'nccl', rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE'])", "nccl"),
        ("", ""),
    ],
)
def test_a_backend_that_stands_on_the_straight_way_is_certain(given: str, backend: str) -> None:
    assert backend_of(MAIN.format(given)) == backend
    assert backend_of(f"from torch.distributed import *\ninit_process_group({given})\n") == backend


@pytest.mark.parametrize(
    "text",
    [
        MAIN.format("args.backend"),
        MAIN.format('"mpi"'),
        MAIN.format('"cpu:gloo,cuda:nccl"'),
        'if torch.cuda.is_available():\n    init_process_group("nccl")\nelse:\n    init_process_group("gloo")\n',
        'if size > 1:\n    init_process_group("gloo")\n',
        'if "--check" in sys.argv:\n    sys.exit(0)\ninit_process_group("gloo")\n',
        'def main():\n    if alone:\n        return\n    init_process_group("gloo")\nmain()\n',
        'try:\n    init_process_group("gloo")\nexcept RuntimeError:\n    pass\n',
        'def never():\n    init_process_group("gloo")\n',
        'later = lambda: init_process_group("gloo")\n',
        'found = [init_process_group("gloo") for _ in some]\n',
        'os._exit(0)\ninit_process_group("gloo")\n',
        'size > 1 and init_process_group("gloo")\n',
        "def again():\n    again()\nagain()\n",
        'import settings\ninit_process_group("gloo")\n',
        'from settings.network import set_up\ninit_process_group("gloo")\n',
        'from . import settings\ninit_process_group("gloo")\n',
        'def main():\n    import dotenv\n    init_process_group("gloo")\nmain()\n',
        'exec(open("settings.py").read())\ninit_process_group("gloo")\n',
        'init_process_group("gloo", "file:///tmp/meet", rank=local_rank, world_size=local_size)\n',
        'init_process_group("gloo", init_method="tcp://127.0.0.1:29501")\n',
        'init_process_group("gloo", store=HashStore(), rank=0, world_size=1)\n',
        'init_process_group("gloo", rank=0, world_size=1)\n',
        'init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))\n',
        'init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["LOCAL_WORLD_SIZE"]))\n',
        'init_process_group("gloo", rank=rank, world_size=size)\n',
        'init_process_group("gloo", None, None, 1, 0)\n',
        'init_process_group("gloo", group_name=name)\n',
        'init_process_group("gloo", pg_options=options)\n',
        'init_process_group("gloo", **more)\n',
        "init_process_group(*given)\n",
        'def init_process_group(name):\n    pass\ninit_process_group("gloo")\n',
        'os.environ["RANK"] = "0"\ninit_process_group("gloo")\n',
        'os.environ.update(RANK="0", WORLD_SIZE="1")\ninit_process_group("gloo")\n',
        'from os import environ\nenviron.setdefault("A", "b")\ninit_process_group("gloo")\n',
        'class Own:\n    os.putenv("RANK", "0")\ninit_process_group("gloo")\n',
        'variables = os.environ\nvariables["RANK"] = "0"\ninit_process_group("gloo")\n',
        'init_process_group("gloo"',
        "\0",
        "",
    ],
)
def test_whatever_depends_on_something_is_unknown(text: str) -> None:
    """An unknown backend refuses nothing."""
    assert backend_of(text) == ""


def test_modules_that_set_no_variable_change_nothing() -> None:
    modules = "from __future__ import annotations\nimport os, sys\nimport numpy as np\nfrom torch import nn\n"
    assert backend_of(f"{modules}from torch.distributed import *\ninit_process_group('gloo')\nimport mine\n") == "gloo"


def test_a_script_that_only_reads_variables_leaves_them_as_they_are() -> None:
    reads = 'rank = int(os.environ["RANK"])\nsize = os.environ.get("WORLD_SIZE", "1")\nhost = os.getenv("HOSTNAME")\n'
    assert backend_of(f"import os\n{reads}{STRAIGHT}") == "gloo"


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["OMP_NUM_THREADS"] = "1"',
        'os.environ["TOKENIZERS_PARALLELISM"] = "false"',
        'environ["OMP_NUM_THREADS"] = str(threads)',
        'is_slurm = "SLURM_JOB_ID" in os.environ',
        'is_alone = "RANK" not in os.environ',
        "print(os.environ)",
        'def later():\n    if "X" in os.environ:\n        pass',
    ],
)
def test_variables_of_no_network_leave_the_backend_as_it_is(line: str) -> None:
    assert backend_of(f"import os\n{line}\n{STRAIGHT}") == "gloo"


@pytest.mark.parametrize(
    "line",
    [
        *(
            f'os.environ["{name}"] = "0"'
            for name in (
                *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR"),
                *("NCCL_IB_HCA", "GLOO_X", "TORCH_X", "PET_X", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
                *("ROCR_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HOSTALIASES"),
            )
        ),
        "os.environ[name] = '0'",
        "os.environb[b'A'] = b'0'",
        "del os.environ['RANK']",
        "os.environ = {}",
        "there = os.environ in known",
        "show(os.environ)",
    ],
)
def test_variables_that_may_decide_where_ranks_meet_leave_the_backend_unknown(line: str) -> None:
    assert backend_of(f"import os\n{line}\n{STRAIGHT}") == ""


def test_gloo_is_believed_where_the_host_shows_no_accelerator_of_any_vendor(tmp_path: Path) -> None:
    root = Root(tmp_path)
    (tmp_path / "dev").mkdir()
    script = str(root.write("train.py", STRAIGHT))
    context = root.context(nproc=2, script=script)
    assert known_backend(context) == "gloo"
    assert known_backend(context._replace(nproc=1, spans_hosts=True)) == "gloo"
    changes: tuple[dict[str, Any], ...] = (
        {"nproc": 1},
        {"script": ""},
        {"script": f"{tmp_path}/nothing.py"},
        {"script": str(tmp_path)},
        {"vendor": "nvidia"},
        {"script_args": ("--help",)},
        # It may set variables, or enter a container with a network of its own.
        {"environ": {"PYTHON_EXEC": "/opt/bin/in-container"}},
        {"is_wrapped": True},
        {"script": str(root.write("own.py", f"os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n{STRAIGHT}"))},
    )
    for change in changes:
        assert known_backend(context._replace(**change)) == "", change


@pytest.mark.parametrize("device", ["accel0", "hl0", "davinci0", "neuron0", "dri", "vfio", "dxg", "nvidia0", "kfd"])
def test_tpus_gaudi_ascend_trainium_and_others_are_not_judged_by_gloo_s_rules(tmp_path: Path, device: str) -> None:
    """hccl, xla and mpi never ask for what gloo asks for."""
    root = Root(tmp_path)
    root.write(f"dev/{device}")
    script = str(root.write("train.py", STRAIGHT))
    assert known_backend(root.context(nproc=2, script=script)) == ""


def test_nccl_is_believed_where_there_are_gpus_of_its_vendors(tmp_path: Path) -> None:
    root = Root(tmp_path)
    script = str(root.write("train.py", MAIN.format('"nccl"')))
    assert known_backend(root.context(nproc=2, script=script, vendor="amd")) == "nccl"
    assert known_backend(root.context(nproc=2, script=script)) == ""


@pytest.mark.parametrize("kind", ["timeout", "refused", "no_route", "black_hole", "self", "stranger"])
def test_no_fault_between_hosts_stops_ranks_that_may_not_need_the_network(kind: str) -> None:
    """MPI on processors, a TPU's own network, a program without torch: all of it is told, and the ranks start."""
    for infos in (infos_of(4, backend=""), infos_of(2, backend="")):
        for change in (where(kind=kind), where(touching=1, nic="eth0", kind=kind), where(target=1, kind=kind)):
            found = judged(infos, probes_of(len(infos), ("eth0", "eth1"), change))
            assert {result.verdict for result in told(found)} == {"warn"}
            assert judged(infos, [], missing={1: "it did not say"}).verdict in {"ok", "warn"}


def test_what_ranks_of_an_unknown_backend_use_is_possible_and_never_certain() -> None:
    info = HostInfo(gloo=("eth0",), nccl=("ib0", "ib1"))
    assert uses_of(info, ()).certain == frozenset()
    assert uses_of(info, ("eth7",)).certain == frozenset()
    assert uses_of(info._replace(backend="gloo"), ()).certain == {"eth0"}
    assert uses_of(info._replace(backend="nccl"), ()).certain == {"ib0"}
    assert uses_of(info._replace(backend="gloo"), ("eth7",)).certain == {"eth7"}
