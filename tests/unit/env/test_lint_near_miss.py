from __future__ import annotations

from saferun.env.lint.near_miss import closest, under_a_mended_prefix, under_another_prefix


def test_of_two_as_near_the_documented_name_is_meant() -> None:
    assert closest("NCCL_DEBUG_FILF", {"NCCL_DEBUG_FILE"}, {"NCCL_DEBUG_FILL"}) == "NCCL_DEBUG_FILE"


def test_a_name_that_a_library_merely_holds_is_suggested_where_no_documented_one_is_near() -> None:
    assert closest("NCCL_FLUX_CAPACITY", (), {"NCCL_FLUX_CAPACITE"}) == "NCCL_FLUX_CAPACITE"


def test_short_and_endless_names_are_near_to_nothing() -> None:
    """Two letters turn CUDA_XY into half of all names."""
    assert closest("CUDA_X", {"CUDA_Y"}, ()) == ""
    assert closest("NCCL_" + "A" * 200, {"NCCL_" + "A" * 199}, ()) == ""


def test_two_edits_are_too_many_for_a_short_name() -> None:
    assert closest("NCCL_NETAB", {"NCCL_NET"}, ()) == ""
    assert closest("NCCL_PROTOS", {"NCCL_PROTO"}, ()) == "NCCL_PROTO"


def test_an_ending_left_off_is_ambiguous_where_several_names_go_on_so() -> None:
    assert closest("CUDA_LAUNCH_B", {"CUDA_LAUNCH_BLUE", "CUDA_LAUNCH_BIRD"}, ()) == ""


def test_another_prefix_is_only_suggested_where_the_name_is_real() -> None:
    assert (
        under_another_prefix("NCCL_DESYNC_DEBUG", {"TORCH_NCCL_DESYNC_DEBUG"}.__contains__) == "TORCH_NCCL_DESYNC_DEBUG"
    )
    assert under_another_prefix("NCCL_FLUX", {"TORCH_NCCL_DESYNC_DEBUG"}.__contains__) == ""


def test_a_first_word_is_mended_only_from_the_table() -> None:
    assert under_a_mended_prefix("NCLL_DEBUG") == "NCCL_DEBUG"
    assert under_a_mended_prefix("HCCL_DEBUG") == ""
    assert under_a_mended_prefix("PLAIN") == ""
