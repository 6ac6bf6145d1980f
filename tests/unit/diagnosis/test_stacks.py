"""Stacks of many ranks as one tree, with the user's calls in it and without what all programs have in common."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.diagnosis.frames import UserCode, file_name, is_nameless, location_text, native_name
from saferun.diagnosis.merged_stacks import best_dumps, folded, main_thread, merge
from saferun.evidence.diagnosis_values import StackNode
from saferun.evidence.job_evidence import Frame, StackDump, ThreadStack
from tests.unit.diagnosis.recorded_hangs import C10D, CWD, NAMES, SCRIPT, SITE, capture_of, dump_of, native
from tests.unit.operations import operations

MAIN = Frame("main", "/job/train.py", 80)
STEP = Frame("step", "/job/train.py", 52)
ALL_REDUCE = Frame("all_reduce", C10D, 3252)
WRAPPER = Frame("_exception_logger.<locals>.wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 83)


def paths(nodes: tuple[StackNode, ...], above: tuple[Frame, ...] = ()) -> Iterator[tuple[tuple[Frame, ...], StackNode]]:
    """Every node with the calls that lead to it."""
    for node in nodes:
        here = (*above, node.frame)
        yield here, node
        yield from paths(node.children, here)


def drawn(nodes: tuple[StackNode, ...], indent: str = "") -> list[str]:
    """The tree as text: ``0-2 main train.py:80``."""
    lines = []
    for node in nodes:
        ranks = ",".join(map(str, node.ranks))
        lines.append(f"{indent}[{ranks}] {node.frame.function} {file_name(node.frame.file)}:{node.frame.line}")
        lines += drawn(node.children, f"{indent} ")
    return lines


# ------------------------------------------------------------------------------------------------------------- one call


@pytest.mark.parametrize(
    ("file", "is_user"),
    [
        ("/job/train.py", True),
        ("train.py", True),
        ("/job/models/net.py", True),
        ("/home/me/lib/pipeline.py", True),
        ("/job/torch/model.py", True),
        (f"{SITE}/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("/usr/local/lib/python3.11/threading.py", False),
        ("/usr/lib64/python3.12/queue.py", False),
        ("/job/.venv/lib/python3.13/site-packages/lightning/trainer.py", False),
        ("/src/pytorch/torch/distributed/distributed_c10d.py", False),
        ("/src/pytorch/torch/_tensor.py", False),
        ("/tmp/torchinductor_me/ab/cab.py", False),
        ("/opt/saferun/inject/sitecustomize.py", False),
        ("/opt/saferun/inject/saferun_hook.py", False),
        ("/build/Python-3.11.7/Modules/socketmodule.c", False),
        ("<frozen runpy>", False),
        ("<string>", False),
        ("", False),
    ],
)
def test_the_users_code_is_what_no_package_brought(file: str, is_user: bool) -> None:
    """The place that is named must be one that the user can change."""
    assert UserCode(SCRIPT, CWD).owns(Frame("f", file, 1)) is is_user


def test_native_calls_are_never_the_users() -> None:
    """A library of the user's own is named by the Python line that called it."""
    assert not UserCode(SCRIPT, CWD).owns(Frame("f", "/job/libmine.so", 0, native=True))


@pytest.mark.parametrize(
    ("script", "file"),
    [
        (f"{SITE}/recipes/finetune.py", f"{SITE}/recipes/data/loader.py"),
        ("recipes.finetune", f"{SITE}/recipes/data/loader.py"),
        ("lib/python3.11/go.py", "/job/lib/python3.11/go.py"),
    ],
)
def test_the_package_that_the_job_was_started_from_is_the_users(script: str, file: str) -> None:
    """Projects are installed, too; then everything lies in site-packages."""
    assert UserCode(script, CWD).owns(Frame("f", file, 1))
    assert not UserCode(script, CWD).owns(ALL_REDUCE)


def test_a_launcher_of_torch_does_not_make_torch_the_users() -> None:
    """``-m torch.distributed.launch`` starts the user's script, which is another one."""
    assert not UserCode("torch.distributed.launch", CWD).owns(ALL_REDUCE)


@pytest.mark.parametrize(
    ("demangled", "short"),
    [
        ("std::vector<int, std::allocator<int> >::push_back(int&&)", "std::vector::push_back"),
        ("c10d::Work::wait(std::chrono::duration<long, std::ratio<1l, 1000l> >)", "c10d::Work::wait"),
        ("at::native::(anonymous namespace)::kernel(at::Tensor const&) const", "at::native::kernel"),
        ("bool operator<(A const&, B const&)", "operator<"),
        ("operator new(unsigned long)", "operator new"),
        ("std::function<void (int)>::operator()(int) const", "std::function::operator()"),
        ("A::operator->() const", "A::operator->"),
        ("poll_loop(int) [clone .constprop.0]", "poll_loop"),
        ("pthread_cond_wait@@GLIBC_2.3.2", "pthread_cond_wait"),
        ("do_futex_wait.constprop.0", "do_futex_wait"),
        ("void (anonymous namespace)::run<(X)3>(X*)", "run"),
        ("c10d::TCPStore::wait(std::vector<std::basic_string<char", "c10d::TCPStore::wait"),
        ("clock_nanosleep", "clock_nanosleep"),
    ],
)
def test_native_names_lose_templates_and_arguments(demangled: str, short: str) -> None:
    """A name of libtorch's is longer than a screen is wide."""
    assert native_name(demangled) == short


@given(st.text(alphabet="ab:<>()-_ {}[]~&*,.", max_size=60))
def test_any_name_has_a_short_one(name: str) -> None:
    """Demanglers, and those who cut their output, write anything."""
    assert len(native_name(name)) <= 200
    assert bool(native_name(name)) == bool(name.partition("@")[0] or name) or not name.strip()


def test_a_place_reads_as_file_line_and_function() -> None:
    """It is what one types into an editor."""
    assert (
        location_text(Frame("Trainer.fit.<locals>.step", "/job/models/__init__.py", 7))
        == "models/__init__.py:7 in step"
    )
    assert location_text(Frame("<module>", "/job/train.py", 3)) == "train.py:3"
    assert location_text(None) == ""


def test_an_address_is_no_name() -> None:
    """Addresses differ from rank to rank, and would tell alike ranks apart."""
    assert is_nameless(native("0x7fac078a3f16"))
    assert is_nameless(native(""))
    assert not is_nameless(native("read"))


# -------------------------------------------------------------------------------------------------------------- folding


def test_what_all_programs_have_in_common_is_left_out() -> None:
    """Thirty calls of a torch stack are a handful that differ."""
    module = f"{SITE}/torch/nn/modules/module.py"
    calls = [
        Frame("linear", f"{SITE}/torch/nn/functional.py", 9),
        Frame("Module._call_impl", module, 1789),
        Frame("Module._wrapped_call_impl", module, 1778),
        Frame("Sequential.forward", f"{SITE}/torch/nn/modules/container.py", 253),
        Frame("Module._call_impl", module, 1789),
        Frame("Net.forward", "/job/net.py", 24),
        Frame("Module._call_impl", module, 1789),
        Frame("DistributedDataParallel._run_ddp_forward", f"{SITE}/torch/nn/parallel/distributed.py", 1),
        Frame("DistributedDataParallel.forward", f"{SITE}/torch/nn/parallel/distributed.py", 2),
        STEP,
        MAIN,
        Frame(
            "record.<locals>.wrap.<locals>.wrapper",
            f"{SITE}/torch/distributed/elastic/multiprocessing/errors/__init__.py",
            3,
        ),
        Frame("<module>", "/job/train.py", 90),
        Frame("_run_code", "<frozen runpy>", 88),
        Frame("_run_module_as_main", "<frozen runpy>", 198),
    ]
    assert [frame.function for frame in folded(calls, UserCode(SCRIPT, CWD))] == [
        "<module>",
        "main",
        "step",
        "Net.forward",
        "linear",
    ]


def test_the_users_calls_and_the_innermost_are_never_left_out() -> None:
    """Even where they are named like what is left out, or stand in its file."""
    own = Frame("Module._call_impl", "/job/module.py", 5)
    innermost = Frame("Module._call_impl", f"{SITE}/torch/nn/modules/module.py", 1789)
    assert folded([innermost, own, MAIN], UserCode(SCRIPT, CWD)) == [MAIN, own, innermost]


def test_of_a_library_s_own_calls_the_first_and_the_last_remain() -> None:
    """What the user called, and where it ended; what lies between is the library's affair."""
    inside = [Frame(f"f{number}", f"{SITE}/lightning/loop.py", number) for number in range(30)]
    assert [frame.function for frame in folded([*inside, STEP], UserCode(SCRIPT, CWD))] == ["step", "f29", "f1", "f0"]


def test_native_calls_are_shown_where_a_stack_ends_in_them_only() -> None:
    """Those between two Python calls are the interpreter's and the dispatcher's; of the last ones the names remain."""
    frames = [
        native("0x7fac078a3f16"),
        native("pthread_cond_wait"),
        native("std::condition_variable::wait", "/usr/lib/libstdc++.so.6"),
        native("c10d::Work::wait(long)", "/venv/torch/lib/libtorch_cpu.so"),
        native("pybind11::cpp_function::dispatcher", "/venv/torch/lib/libtorch_python.so"),
        ALL_REDUCE,
        native("cfunction_call", "/usr/lib/libpython3.11.so"),
        STEP,
        native("0x7fac0784524a"),
    ]
    assert [frame.function for frame in folded(frames, UserCode(SCRIPT, CWD))] == [
        "step",
        "all_reduce",
        "c10d::Work::wait",
        "pthread_cond_wait",
    ]


def test_a_stack_of_nothing_but_addresses_still_ends_somewhere() -> None:
    """The library's name is better than nothing, and the same on all ranks."""
    assert folded([native("0x1"), native("0x2"), STEP], UserCode()) == [STEP, native("?")]
    assert folded([native("lock_PyThread_acquire_lock"), STEP], UserCode())[-1].function == "lock_PyThread_acquire_lock"


def test_recursion_is_told_once_and_depth_is_bounded() -> None:
    """A thousand calls of themselves are one finding; and trees that deep break whoever walks them."""
    again = [Frame("visit", "/job/tree.py", 7)] * 900
    assert len(folded([STEP, *again, MAIN], UserCode(SCRIPT, CWD))) == 4
    mutual = [Frame(f"visit{number % 3}", "/job/tree.py", number) for number in range(900)]
    shown = folded([STEP, *mutual, MAIN], UserCode(SCRIPT, CWD))
    assert len(shown) == 64
    assert (shown[0], shown[-1]) == (MAIN, STEP)
    assert any("more calls" in frame.function for frame in shown)


# -------------------------------------------------------------------------------------------------------------- merging


def test_ranks_part_where_their_calls_do() -> None:
    """This is what a person looks for."""
    sleeping = Frame("wait_for_batch", "/job/data.py", 3)
    tree = merge(
        [dump_of(rank, ALL_REDUCE, WRAPPER, STEP, MAIN) for rank in (2, 0)] + [dump_of(1, sleeping, STEP, MAIN)],
        SCRIPT,
        CWD,
    )
    assert drawn(tree) == [
        "[0,1,2] main train.py:80",
        " [0,1,2] step train.py:52",
        "  [0,2] all_reduce distributed_c10d.py:3252",
        "  [1] wait_for_batch data.py:3",
    ]


def test_a_rank_taken_twice_counts_with_its_native_calls() -> None:
    """The plain stack comes first and always; the native one may come later, or not."""
    plain = dump_of(0, STEP, MAIN)
    better = dump_of(0, native("read"), STEP, MAIN, tool="py-spy --native")
    for dumps in ([plain, better], [better, plain]):
        assert best_dumps(dumps)[0] == better
    only_native = dump_of(0, native("read"), tool="gdb")
    assert best_dumps([only_native, plain])[0] == plain
    failed = StackDump(0, 100, True, "python", "", (), "ptrace is denied")
    assert best_dumps([failed, plain])[0] == plain
    assert best_dumps([failed])[0] == failed


def test_ranks_that_do_the_same_are_not_told_apart_by_the_tool_that_looked() -> None:
    """Native calls are taken of one of many ranks that stand in the same line."""
    tree = merge([dump_of(0, native("read"), STEP, tool="py-spy --native"), dump_of(1, STEP)], SCRIPT, CWD)
    assert drawn(tree) == ["[0,1] step train.py:52"]


def test_ranks_without_stacks_are_not_in_the_tree() -> None:
    """They are told of by the groups."""
    failed = StackDump(1, 101, True, "python", "", (), "ptrace is denied")
    assert drawn(merge([dump_of(0, STEP), failed], SCRIPT, CWD)) == ["[0] step train.py:52"]
    assert merge([failed]) == ()
    assert merge([]) == ()


def test_the_main_thread_is_found_whatever_the_tool_tells() -> None:
    """py-spy tells its number, faulthandler's text only the order, a vforked child's stack the parent's number."""

    def thread(name: str, tid: int, *frames: Frame, is_main: bool = False) -> ThreadStack:
        return ThreadStack(name, tid, is_main, active=False, owns_gil=False, frames=frames)

    bootstrap = Frame("Thread._bootstrap", "/usr/local/lib/python3.11/threading.py", 1002)
    other = thread("", 0, STEP, bootstrap)
    for main in (
        thread("", 0, MAIN, is_main=True),
        thread("", 7, MAIN),
        thread("MainThread", 0, MAIN),
        thread("", 0, MAIN, Frame("<module>", "/job/train.py", 1)),
        thread("", 0, MAIN),
    ):
        found = main_thread(StackDump(0, 7, True, "python", "py-spy", (other, main)))
        assert found == main
    assert (
        main_thread(StackDump(0, 7, True, "python", "py-spy", (thread("MainThread", 7, is_main=True), other))) == other
    )


def test_a_thread_that_the_main_thread_waits_for_is_shown_too() -> None:
    """Frameworks train in threads; the main thread then stands in a join for hours."""
    lines = drawn(merge(capture_of("thread").stacks, SCRIPT, CWD))
    assert "[1] another thread :0" in lines
    assert " [1] bad_sleep train.py:41" in lines


def test_a_data_loader_worker_is_shown_from_where_it_began() -> None:
    """A forked worker's stack has the rank's calls at its outer end, which are not its own."""
    tree = merge(capture_of("loader_deadlocked").stacks, SCRIPT, CWD)
    (worker,) = [node for node in tree if node.frame.function == "data-loader worker"]
    inside = [node.frame.function for _, node in paths((worker,))]
    assert worker.ranks == (1,)
    assert "Deadlocked.__getitem__" in inside
    assert "main" not in inside


@pytest.mark.parametrize("name", NAMES)
def test_recorded_stacks_become_a_handful_of_lines(name: str) -> None:
    """And nobody gets lost: each rank with a stack is in the tree, with its user's calls."""
    dumps = capture_of(name).stacks
    tree = merge(dumps, SCRIPT, CWD)
    shown = list(paths(tree))
    assert {rank for node in tree for rank in node.ranks} == {dump.rank for dump in dumps if dump.is_rank}
    assert len(shown) <= 26
    user = UserCode(SCRIPT, CWD)
    for rank, dump in best_dumps(dumps).items():
        thread = main_thread(dump)
        assert thread is not None
        calls = [frame for frame in reversed(thread.frames) if user.owns(frame)]
        assert any([frame for frame in path if user.owns(frame)] == calls for path, node in shown if rank in node.ranks)


FRAMES = st.builds(
    Frame,
    st.sampled_from(["main", "step", "wait", "_call_impl", "0x12", "std::x<int>", "", "<module>"]),
    st.sampled_from(["/job/train.py", C10D, "/usr/lib/python3.11/threading.py", "libc.so.6", "<frozen runpy>", ""]),
    st.integers(0, 3),
    st.booleans(),
)
DUMPS = st.builds(
    lambda rank, pid, name, frames, tool: dump_of(rank, *frames, pid=pid, name=name, tool=tool),
    st.integers(0, 4),
    st.sampled_from([0, 0, 700, 701]),
    st.sampled_from(["python", "pt_data_worker"]),
    st.lists(FRAMES, max_size=12),
    st.sampled_from(["py-spy", "py-spy --native", "gdb"]),
)


@given(st.lists(DUMPS, max_size=10), st.randoms(use_true_random=False))
def test_a_tree_is_well_formed_and_does_not_depend_on_the_order(dumps: list[StackDump], shuffle: random.Random) -> None:
    """Ranks below a call are among those above it; two captures of the same hang look the same."""
    # Of two equally good dumps of one process the first counts; an order of them is not to be had.
    unique = list({(dump.rank, dump.pid): dump for dump in dumps}.values())
    tree = merge(unique, SCRIPT, CWD)
    for path, node in paths(tree):
        assert path
        assert list(node.ranks) == sorted(set(node.ranks))
        assert all(set(child.ranks) <= set(node.ranks) for child in node.children)
    again = unique[:]
    shuffle.shuffle(again)
    assert merge(again, SCRIPT, CWD) == tree


def test_twice_the_ranks_are_merged_by_twice_the_work() -> None:
    """The picture has to be there within seconds of the verdict, and most of them belong to the tools."""
    inside = [Frame(f"f{number}", f"{SITE}/torch/m{number % 7}.py", number) for number in range(40)]
    own = [Frame(f"g{number}", "/job/model.py", number) for number in range(19)]
    dumps = [dump_of(rank, Frame("leaf", "/job/leaf.py", rank % 8), *inside, *own, MAIN) for rank in range(64)]
    half = operations(lambda: merge(dumps[:32], SCRIPT, CWD))
    assert operations(lambda: merge(dumps, SCRIPT, CWD)) < 2.2 * half
