"""Places and environments of ranks."""

from __future__ import annotations

import pytest

from saferun.config import RendezvousConfig
from saferun.errors import UsageError
from saferun.model import RankAssignment
from saferun.supervisor.topology import apply_changes, plugin_environs, rank_environ, single_host, substitute_local_rank
from tests.unit.samples import CONFIG, second_host


def test_on_one_host_all_ranks_are_the_same_number() -> None:
    """Local rank, rank and role rank."""
    placement = single_host(3, "127.0.0.1", 29500, "job7")
    assert placement.ranks == (RankAssignment(0, 0, 0), RankAssignment(1, 1, 1), RankAssignment(2, 2, 2))
    assert (placement.world_size, placement.role_world_size) == (3, 3)
    assert (placement.group_rank, placement.group_world_size) == (0, 1)
    assert (placement.master_addr, placement.master_port, placement.run_id) == ("127.0.0.1", 29500, "job7")


def test_a_rank_gets_all_of_torchruns_variables() -> None:
    """Torch's env:// rendezvous, and scripts, read them."""
    placement = second_host()._replace(restarts=2)
    assert rank_environ(CONFIG, placement, placement.ranks[1], {}) == {
        "RANK": "4",
        "GROUP_RANK": "1",
        "ROLE_RANK": "2",
        "ROLE_NAME": "trainer",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "7",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_threads_are_limited_only_where_several_ranks_share_a_host() -> None:
    """And only where the user has said nothing."""
    one = single_host(1, "127.0.0.1", 1, "job7")
    two = single_host(2, "127.0.0.1", 1, "job7")
    assert "OMP_NUM_THREADS" not in rank_environ(CONFIG, one, one.ranks[0], {})
    assert "OMP_NUM_THREADS" not in rank_environ(CONFIG, two, two.ranks[0], {"OMP_NUM_THREADS": ""})


def test_the_users_word_about_nccl_stands() -> None:
    """Only a missing variable is set."""
    placement = second_host()
    added = rank_environ(CONFIG, placement, placement.ranks[0], {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    assert added["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_ranks_are_told_when_rank_0_serves_the_store() -> None:
    """Python's True and False, as torchrun writes them."""
    config = CONFIG._replace(rendezvous=RendezvousConfig("c10d", "j", None, None, None, agent_store=False))
    placement = second_host()
    assert rank_environ(config, placement, placement.ranks[0], {})["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "1"), ("4,5", "5"), ("GPU-aa, GPU-bb", "GPU-bb"), ("7,6,5", "6")]
)
def test_with_virtual_local_ranks_each_sees_one_gpu(visible: str | None, device: str) -> None:
    """Its own of those that are visible."""
    config = CONFIG._replace(virtual_local_rank=True)
    placement = second_host()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    added = rank_environ(config, placement, placement.ranks[1], environ)
    assert added["LOCAL_RANK"] == "0"
    assert added["CUDA_VISIBLE_DEVICES"] == device
    assert added["RANK"] == "4"


def test_a_virtual_local_rank_without_a_gpu_is_refused() -> None:
    """Two ranks on one GPU would be a surprise."""
    config = CONFIG._replace(virtual_local_rank=True)
    placement = second_host()
    with pytest.raises(UsageError, match="local rank 1 has no GPU"):
        rank_environ(config, placement, placement.ranks[1], {"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    ("argument", "replaced"),
    [
        ("--rank=$local_rank", "--rank=3"),
        ("${local_rank}.log", "3.log"),
        ("$$HOME", "$HOME"),
        ("$HOME", "$HOME"),
        ("$local_ranks", "$local_ranks"),
        ("100$", "100$"),
        ("plain", "plain"),
    ],
)
def test_arguments_may_name_the_local_rank(argument: str, replaced: str) -> None:
    """As torchrun's string.Template has it; other dollars stay."""
    assert substitute_local_rank([argument, "x"], 3) == [replaced, "x"]


def test_a_plugin_gets_what_torchrun_hands_to_it() -> None:
    """Not the whole environment, but what the launcher copies from its own."""
    placement = second_host()
    environ = {"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": "4,5", "HOME": "/root"}
    handed = plugin_environs(CONFIG, placement, environ)
    assert [one["LOCAL_RANK"] for one in handed] == ["0", "1"]
    assert {(one["OMP_NUM_THREADS"], one["CUDA_VISIBLE_DEVICES"]) for one in handed} == {("8", "4,5")}
    assert not {"HOME", "TORCHELASTIC_SIGNALS_TO_HANDLE"} & handed[0].keys()
    assert "CUDA_VISIBLE_DEVICES" not in plugin_environs(CONFIG, placement, {})[0]


def test_only_what_a_plugin_changes_differs_from_what_a_rank_has_without_it() -> None:
    """Without a value a variable is the launcher's, as under torchrun, or none."""
    inherited = {"RANK": "9", "HOME": "/root"}
    environ = {**inherited, "RANK": "1", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1", "ROLE_NAME": "default"}
    apply_changes(environ, {"RANK": None, "LOCAL_RANK": None, "OMP_NUM_THREADS": None, "NEW": ""}, inherited)
    assert environ == {"RANK": "9", "HOME": "/root", "OMP_NUM_THREADS": "1", "ROLE_NAME": "default", "NEW": ""}
