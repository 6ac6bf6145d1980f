"""The picture of the ranks: read at a glance, never wider than a terminal, never longer than it may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.evidence.diagnosis_values import StackNode, WaitGroup
from saferun.evidence.job_evidence import Frame
from saferun.report.text_diagram import (
    WIDTH,
    branches_of,
    cut_in_middle,
    file_text,
    frame_text,
    group_lines,
    group_text,
    is_user_code,
    rank_ranges,
    tree_lines,
    whole_tree_lines,
)
from saferun.text.bounded_json import shown
from saferun.text.wording import ranks_text
from tests.unit.report.report_samples import ALL_REDUCE, IN_ALL_REDUCE, IN_LOAD, LOAD, MAIN, MODULE, SITE, STEP, merged

TEXT = st.text(st.characters(codec=None, categories=None), max_size=200)
FRAMES = st.builds(Frame, TEXT, TEXT, st.integers(-1, 10**6), st.booleans())
RANKS = st.sets(st.integers(0, 2000), min_size=1, max_size=40).map(lambda ranks: tuple(sorted(ranks)))
# Stacks of few different calls: they part and meet as those of a program do.
STACKS = st.dictionaries(
    st.integers(0, 300),
    st.lists(st.sampled_from([MODULE, MAIN, STEP, LOAD, ALL_REDUCE]), max_size=12),
    max_size=40,
)


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([0, 1, 2, 3, 4, 5, 7], "ranks 0-5,7 (7)"),
        ([7, 5, 7], "ranks 5,7 (2)"),
        (range(0, 64, 2), "ranks 0,2,4,6,8,10,… (32)"),
        (range(1000), "ranks 0-999 (1000)"),
        (range(100_000, 100_400, 2), "ranks 100000,… (200)"),
    ],
)
def test_ranks_as_ranges(ranks: list[int], words: str) -> None:
    """All of them where there is room, else the first ones; always how many."""
    assert rank_ranges(ranks) == words


def test_many_ranks_in_a_sentence_are_cut_too() -> None:
    """Every other of a thousand ranks is no news item of 2500 characters."""
    words = ranks_text(range(0, 1000, 2))
    assert words.startswith("ranks 0, 2, 4, ")
    assert words.endswith(", … (500)")
    assert len(words) <= 100
    assert ranks_text([]) == "no rank"


def test_a_name_is_cut_in_the_middle() -> None:
    """The beginning says whose it is, the end what it does."""
    assert cut_in_middle("abcdefghij", 10) == "abcdefghij"
    assert cut_in_middle("abcdefghij", 5) == "ab…ij"
    assert cut_in_middle("abcdefghij", 4) == "ab…j"
    assert [cut_in_middle("abc", width) for width in (2, 1, 0)] == ["a…", "…", ""]


def test_what_is_shown_is_one_line_without_control_characters() -> None:
    """Tabs keep their columns, because tracebacks are indented."""
    assert shown("\tx\x1b[2Jy\r\n\ud800\u202e") == "        x?[2Jy????"
    assert shown("x" * 10_000) == "x" * 299 + "…"
    assert shown("\t" * 10_000, 20) == " " * 19 + "…"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("/home/me/train.py", "train.py"),
        ("train.py", "train.py"),
        ("/home/me/models/__init__.py", "models/__init__.py"),
        (f"{SITE}/nn/functional.py", "torch/…/functional.py"),
        ("/v/site-packages/six.py", "six.py"),
        ("/v/site-packages/torch/functional.py", "torch/functional.py"),
        ("/usr/lib/python3/dist-packages/numpy/core/numeric.py", "numpy/…/numeric.py"),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "libc.so.6"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("", ""),
        ("///", ""),
    ],
)
def test_files_are_named_as_shortly_as_they_can_be(file: str, words: str) -> None:
    assert file_text(file) == words


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (STEP, "step  train.py:52"),
        (STEP._replace(line=0), "step  train.py"),
        (Frame("poll", "/lib/libc.so.6", 0, native=True), "poll  libc.so.6 [native]"),
        (Frame("poll", "", 0, native=True), "poll  [native]"),
        (
            Frame("std::vector<int>::at(long) const", f"{SITE}/lib/libc10.so", 0, native=True),
            "std::vector::at  libc10.so [native]",
        ),
        (Frame("", "", 0), "?"),
    ],
)
def test_a_call_is_its_function_and_its_place(frame: Frame, words: str) -> None:
    """Native calls are marked: there is no line of the user's to be looked at."""
    assert frame_text(frame) == words


@pytest.mark.parametrize(
    ("frame", "is_users"),
    [
        (STEP, True),
        (STEP._replace(native=True), False),
        (ALL_REDUCE, False),
        (STEP._replace(file="/usr/lib/python3.11/threading.py"), False),
        (STEP._replace(file="<frozen runpy>"), False),
        (STEP._replace(file=""), False),
        (STEP._replace(file="<string>"), False),
    ],
)
def test_the_users_code_is_known_by_its_file(frame: Frame, is_users: bool) -> None:
    assert is_user_code(frame) == is_users


# --------------------------------------------------------------------------------------------------------------- groups


def test_groups_are_in_the_words_of_the_field() -> None:
    assert group_text(WaitGroup("collective", "all_reduce", (0,), "")) == "collective: all_reduce"
    assert group_text(WaitGroup("file_io", "the FIFO /tmp/x", (0,), "")) == "file I/O: the FIFO /tmp/x"
    assert group_text(WaitGroup("sleep", "sleep", (0,), "")) == "sleep"
    assert group_text(WaitGroup("data_loading", "", (0,), "")) == "data loading"


def test_the_culprit_is_the_first_group_and_marked_then_the_smallest() -> None:
    """The odd one out is what one looks for; the crowd is what it is odd against."""
    groups = [
        WaitGroup("collective", "all_reduce", (0, 1, 2, 3), ""),
        WaitGroup("lock", "Lock.acquire", (4,), ""),
        WaitGroup("sleep", "", (5, 6), "train.py:47 in load_batch"),
    ]
    assert group_lines(groups, culprits=(5, 6)) == [
        "  > ranks 5-6 (2)  sleep                   train.py:47 in load_batch",
        "    rank 4         lock: Lock.acquire",
        "    ranks 0-3 (4)  collective: all_reduce",
    ]
    assert [line[2:4] for line in group_lines(groups)] == ["  ", "  ", "  "]


def test_where_everybody_is_to_blame_nobody_is_marked() -> None:
    """A mark before every line says nothing."""
    groups = [WaitGroup("lock", "", (0,), ""), WaitGroup("sleep", "", (1,), "")]
    assert not any(">" in line for line in group_lines(groups, culprits=(0, 1)))


def test_groups_that_find_no_room_are_counted_and_the_largest_stays() -> None:
    """A job whose ranks are all over the place has as many groups as ranks."""
    groups = [
        *(WaitGroup("user_code", f"f{rank}", (rank,), "") for rank in range(64)),
        WaitGroup("lock", "", (64, 65), ""),
    ]
    lines = group_lines(groups, culprits=(40,), budget=5)
    assert len(lines) == 5
    assert lines[0].startswith("  > rank 40 ")
    assert lines[-2] == "    … 61 more groups in report.txt: ranks 2-39,41-63 (61)"
    assert lines[-1] == "    ranks 64-65 (2)  lock"


# ----------------------------------------------------------------------------------------------------------------- tree


def test_one_odd_rank_stands_out() -> None:
    """What all have in common is one line; the branch of the culprit comes first and is marked."""
    tree = merged({rank: IN_LOAD if rank == 3 else IN_ALL_REDUCE for rank in range(8)})
    assert tree_lines(tree, culprits=(3,)) == [
        "    ranks 0-7 (8)         <module> train.py:88 → main train.py:80",
        "  > ├─ rank 3             load_batch  train.py:47",
        "    └─ ranks 0-2,4-7 (7)  step  train.py:52",
        "                          wrapper  torch/…/c10d_logger.py:83",
        "                          all_reduce  torch/…/distributed_c10d.py:3205",
    ]


def test_ranks_that_go_no_deeper_are_drawn_as_a_branch() -> None:
    """One rank computes in the very call from which the others went on into a collective: it must be seen."""
    tree = merged({0: IN_ALL_REDUCE[:3], 1: IN_ALL_REDUCE, 2: IN_ALL_REDUCE})
    assert tree_lines(tree, budget=3) == [
        "    ranks 0-2 (3)     <module> train.py:88 → main train.py:80 → step train.py:52",
        "    ├─ rank 0         (in that call itself)",
        "    └─ ranks 1-2 (2)  wrapper torch/…/c10d_logger.py:83 → all_reduce torch/…/distributed_c10d.py:3205",
    ]


def test_ranks_without_anything_in_common_are_trees_of_their_own() -> None:
    tree = merged({0: (STEP,), 1: (LOAD,)})
    assert tree_lines(tree) == ["    rank 0  step  train.py:52", "    rank 1  load_batch  train.py:47"]
    assert tree_lines(()) == []


def test_of_a_deep_stack_the_users_call_and_the_innermost_are_shown() -> None:
    """A framework may have put thirty calls between them; they are counted."""
    between = [Frame(f"_call_{number}", f"{SITE}/nn/modules/module.py", number + 1) for number in range(30)]
    wait = Frame("pthread_cond_wait", "/lib/libc.so.6", 0, native=True)
    tree = merged({0: (MODULE, MAIN, LOAD), 1: (MODULE, MAIN, STEP, *between, ALL_REDUCE, wait)})
    assert tree_lines(tree, budget=6) == [
        "    ranks 0-1 (2)  <module> train.py:88 → main train.py:80",
        "    ├─ rank 0      load_batch  train.py:47",
        "    └─ rank 1      step  train.py:52  … 29 calls",
        "                   _call_29  torch/…/module.py:30",
        "                   all_reduce  torch/…/distributed_c10d.py:3205",
        "                   pthread_cond_wait  libc.so.6 [native]",
    ]
    assert tree_lines(tree, budget=3)[-1] == (
        "    └─ rank 1      step train.py:52 → … 30 calls … → all_reduce torch/…/distributed_c10d.py:3205 → … 1 call"
    )
    whole = whole_tree_lines(tree)
    assert sum("_call_" in line for line in whole) == 30


def test_a_tree_of_64_branches_shows_the_first_the_largest_and_how_many_more() -> None:
    """The others are in the report."""
    tree = merged({rank: (MODULE, Frame(f"f{min(rank, 62)}", "train.py", 1)) for rank in range(64)})
    lines = tree_lines(tree, culprits=(40,))
    assert len(lines) == 14
    assert lines[1] == "  > ├─ rank 40          f40 train.py:1"
    assert lines[2] == "    ├─ rank 0           f0 train.py:1"
    assert lines[-2] == "    ├─ … 51 more branches in report.txt: ranks 10-39,41-61 (51)"
    assert lines[-1] == "    └─ ranks 62-63 (2)  f62 train.py:1"


@pytest.mark.parametrize("count", [64, 1000])
def test_a_tree_is_no_longer_for_many_ranks_than_for_eight(count: int) -> None:
    def lines(ranks: int) -> list[str]:
        return tree_lines(merged({rank: IN_LOAD if rank == 3 else IN_ALL_REDUCE for rank in range(ranks)}))

    assert len(lines(count)) == len(lines(8))


def test_a_tree_that_parts_at_every_call_is_cut_and_not_recursed_into() -> None:
    """Every rank may be at another depth of an endless recursion; nothing here has a stack of its own to run out of."""
    depth = 3000
    node = StackNode(STEP, (depth,), ())
    for rank in range(depth - 1, -1, -1):
        node = StackNode(STEP, tuple(range(rank, depth + 1)), (node,))
    lines = tree_lines((node,))
    assert len(lines) == 14
    assert lines[-1].endswith("more branches in report.txt")
    assert max(map(len, lines)) <= WIDTH


def test_a_branch_comes_after_the_one_above_it() -> None:
    """Whoever cuts the list still has a tree."""
    tree = merged({0: IN_ALL_REDUCE, 1: IN_LOAD, 2: (MODULE,)})
    branches = branches_of(tree)
    assert [(branch.parent, branch.ranks, branch.is_leaf) for branch in branches] == [
        (-1, (0, 1, 2), False),
        (0, (2,), True),
        (0, (0, 1), False),
        (2, (0,), True),
        (2, (1,), True),
    ]
    assert branches[1].frames == ()


@given(STACKS, st.sets(st.integers(0, 300), max_size=3), st.integers(2, 20))
def test_every_rank_is_drawn_or_counted(stacks: dict[int, list[Frame]], culprits: set[int], budget: int) -> None:
    """Branches hold all calls of every rank, and a drawing keeps to its lines and columns."""
    stacks = {rank: frames for rank, frames in stacks.items() if frames}
    tree = merged(stacks)
    branches = branches_of(tree, culprits)
    for rank, frames in stacks.items():
        calls = [frame for branch in branches if rank in branch.ranks for frame in branch.frames]
        assert calls == list(frames)
        assert sum(rank in branch.ranks for branch in branches if branch.is_leaf) == 1
    lines = tree_lines(tree, culprits=culprits, budget=budget)
    assert len(lines) <= budget
    assert all(len(line) <= WIDTH for line in lines)
    assert bool(lines) == bool(stacks)


@given(
    st.lists(st.builds(WaitGroup, TEXT, TEXT, RANKS, TEXT), max_size=30),
    st.lists(st.builds(lambda frame, ranks: StackNode(frame, ranks, ()), FRAMES, RANKS), max_size=30),
    st.integers(3, 20),
)
def test_nothing_from_outside_leaves_its_line_or_its_column(
    groups: list[WaitGroup], tree: list[StackNode], budget: int
) -> None:
    """Functions and files have the names that the user's program gave them."""
    lines = [*group_lines(groups, budget=budget), *tree_lines(tree, budget=budget)]
    assert len(lines) <= 2 * budget
    assert all(line.isprintable() and len(line) <= WIDTH for line in lines)
