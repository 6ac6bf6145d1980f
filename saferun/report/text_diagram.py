"""Ranks drawn as a picture: who waits in what, and the merged stacks as a tree. Pure.

Made to be read at a glance: the odd one out comes first and has a ``>`` before
it, a thousand ranks that do the same are one line, and nothing is wider than a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.diagnosis.frames import UserCode, file_name, is_native, native_name
from saferun.evidence.diagnosis_values import StackNode, WaitGroup
from saferun.evidence.job_evidence import Frame
from saferun.model import Value
from saferun.text.bounded_json import shown
from saferun.text.wording import rank_spans

WIDTH = 120
"""Columns that a picture may have."""
_LONGEST_FUNCTION = 48
_LONGEST_LOCATION = 48
_LONGEST_NAME = 4096
_LONGEST_WHAT = 52
_LONGEST_LABEL = 26
# Indentation beyond this leaves no room for text; the innermost levels are kept.
_WIDEST_INDENT = 36
_USER_CODE = UserCode()
_IN_THAT_CALL = "(in that call itself)"
_KIND_NAMES = {
    "data_loading": "data loading",
    "file_io": "file I/O",
    "user_code": "user code",
    "unanswering": "no stacks",
}


# ------------------------------------------------------------------------------------------------------------- messages


def cut_in_middle(text: str, width: int) -> str:
    """A text with its middle left out where it is longer than ``width``: both ends of a name matter."""
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def rank_ranges(ranks: Iterable[int], width: int = _LONGEST_LABEL) -> str:
    """``rank 3``; ``ranks 0-5,7 (7)``; ``ranks 0,2,4,… (32)`` where all of them would be wider than ``width``."""
    spans, count = rank_spans(ranks)
    if count == 0:
        return "no rank"
    if count == 1:
        return f"rank {spans[0]}"
    tail = f" ({count})"
    text = ",".join(spans)
    if len("ranks ") + len(text) + len(tail) > width:
        text = spans[0]
        for span in spans[1:]:
            if len("ranks ") + len(text) + 1 + len(span) + len(",…") + len(tail) > width:
                break
            text = f"{text},{span}"
        text += ",…"
    return f"ranks {text}{tail}"


def is_user_code(frame: Frame) -> bool:
    """Whether a call is the user's own, by its file."""
    return _USER_CODE.owns(frame)


def file_text(file: str) -> str:
    """A file's name, with as much of its path as is needed: ``train.py``, ``torch/…/functional.py``."""
    parts = [part for part in file.split("/") if part]
    if not parts:
        return ""
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            below = parts[parts.index(folder) + 1 :]
            return "/".join(below) if len(below) < 3 else f"{below[0]}/…/{below[-1]}"  # noqa: PLR2004 - all is shown
    return file_name("/".join(parts))


def frame_text(frame: Frame, width: int = 2 * _LONGEST_FUNCTION) -> str:
    """One call: ``step  train.py:52``, ``poll  libc.so.6 [native]``."""
    native = is_native(frame)
    file = file_name(frame.file) if native else file_text(frame.file)
    location = cut_in_middle(shown(file, 2 * _LONGEST_LOCATION), _LONGEST_LOCATION)
    if frame.line > 0:
        location = f"{location}:{frame.line}"
    if native:
        location = f"{location} [native]".lstrip()
    name = frame.function[:_LONGEST_NAME]
    function = shown(native_name(name) if native else name, _LONGEST_NAME) or "?"
    room = min(max(_LONGEST_FUNCTION, width // 2), max(width - len(location) - 2, 8))
    return cut_in_middle(f"{cut_in_middle(function, room)}  {location}".rstrip(), width)


# --------------------------------------------------------------------------------------------------------------- groups


def group_text(group: WaitGroup) -> str:
    """What a group waits in: ``collective: all_reduce``, ``sleep``."""
    kind = _KIND_NAMES.get(group.kind, shown(group.kind.replace("_", " "), 40))
    what = shown(group.detail)
    return f"{kind}: {what}" if what and what != kind else kind


def group_lines(
    groups: Sequence[WaitGroup],
    *,
    culprits: Iterable[int] = (),
    budget: int = 8,
    width: int = WIDTH,
    rest: str = " in report.txt",
) -> list[str]:
    """Who waits in what, one line a group: culprits first, then from the smallest group to the largest.

    Args:
        groups: the groups.
        culprits: ranks to be marked.
        budget: how many lines there may be, at least 3.
        width: columns a line may have.
        rest: where the groups are to be found that found no room.
    """
    blamed = _odd(culprits, (rank for group in groups for rank in group.ranks))
    ordered = sorted(groups, key=lambda group: (*_order(group.ranks, blamed), group.kind, group.detail))
    # The largest group stays: it is what the others are measured against.
    drawn = ordered if len(ordered) <= budget else [*ordered[: budget - 2], ordered[-1]]
    labels = [rank_ranges(group.ranks) for group in drawn]
    column = max(map(len, labels), default=0)
    whats = [cut_in_middle(group_text(group), _LONGEST_WHAT) for group in drawn]
    what_column = max(map(len, whats), default=0)
    lines = []
    for group, label, what in zip(drawn, labels, whats, strict=True):
        mark = _mark(group.ranks, blamed)
        line = f"  {mark} {label:<{column}}  {what:<{what_column}}  {shown(group.location)}".rstrip()
        lines.append(cut_in_middle(line, width))
    if len(drawn) < len(ordered):
        hidden = ordered[budget - 2 : -1]
        ranks = rank_ranges(rank for group in hidden for rank in group.ranks)
        lines.insert(-1, f"    … {len(hidden)} more groups{rest}: {ranks}")
    return lines


def _odd(culprits: Iterable[int], all_ranks: Iterable[int]) -> frozenset[int]:
    # Where all of them are to blame, none of them is the odd one.
    blamed = frozenset(culprits)
    return frozenset() if blamed.issuperset(all_ranks) else blamed


def _order(ranks: tuple[int, ...], culprits: frozenset[int]) -> tuple[bool, int, tuple[int, ...]]:
    return culprits.isdisjoint(ranks), len(ranks), ranks


def _mark(ranks: tuple[int, ...], culprits: frozenset[int]) -> str:
    return ">" if ranks and culprits.issuperset(ranks) else " "


# ------------------------------------------------------------------------------------------------------ merged stacks


class Branch(Value):
    """Calls that the same ranks make one below the other, up to where they part.

    Attributes:
        parent: the place of the branch above it in the sequence; -1 for an outermost one.
        ranks: whose they are.
        frames: the calls, outermost first; none for ranks that go no deeper than the branch above.
        is_leaf: whether nothing follows.
    """

    parent: int
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    is_leaf: bool


def branches_of(tree: Sequence[StackNode], culprits: Iterable[int] = ()) -> list[Branch]:
    """The tree as branches, each after the one above it; among siblings culprits first, then the smallest.

    Works without recursion: the stacks of a program that recursed without end are as deep as they are.
    """
    blamed = frozenset(culprits)
    branches: list[Branch] = []
    todo: list[tuple[StackNode | None, tuple[int, ...], int]] = [
        (node, node.ranks, -1) for node in sorted(tree, key=lambda node: _order(node.ranks, blamed), reverse=True)
    ]
    while todo:
        node, ranks, parent = todo.pop()
        if node is None:
            branches.append(Branch(parent, ranks, (), is_leaf=True))
            continue
        frames = [node.frame]
        while len(node.children) == 1 and node.children[0].ranks == ranks:
            node = node.children[0]
            frames.append(node.frame)
        below: list[tuple[StackNode | None, tuple[int, ...]]] = [(child, child.ranks) for child in node.children]
        if below:
            deeper = {rank for child in node.children for rank in child.ranks}
            here = tuple(rank for rank in ranks if rank not in deeper)
            if here:
                below.append((None, here))
        index = len(branches)
        branches.append(Branch(parent, ranks, tuple(frames), is_leaf=not below))
        below.sort(key=lambda item: _order(item[1], blamed), reverse=True)
        todo.extend((child, child_ranks, index) for child, child_ranks in below)
    return branches


def tree_lines(
    tree: Sequence[StackNode],
    *,
    culprits: Iterable[int] = (),
    budget: int = 14,
    width: int = WIDTH,
    rest: str = " in report.txt",
) -> list[str]:
    """The merged stacks as a tree, outermost calls first.

    What the ranks have in common is one line; of each branch the most important calls are shown, as many as there is
    room for.

    Args:
        tree: the merged stacks.
        culprits: ranks whose branches come first and are marked.
        budget: how many lines there may be, at least 2.
        width: columns a line may have.
        rest: where the branches are to be found that found no room.
    """
    blamed = _odd(culprits, (rank for node in tree for rank in node.ranks))
    branches = branches_of(tree, blamed)
    if not branches:
        return []
    if len(branches) <= budget:
        for calls in (4, 3, 2, 1):
            if sum(_height(branch, calls) for branch in branches) <= budget:
                return _drawn(branches, {}, blamed, calls=calls, width=width, rest=rest)
    for most in range(budget - 1, 1, -1):
        hidden = _hidden(branches, most)
        if len(branches) - sum(map(len, hidden.values())) + len(hidden) <= budget:
            return _drawn(branches, hidden, blamed, calls=1, width=width, rest=rest)
    # More forks below each other than lines: what comes first is what matters most.
    lines = _drawn(branches[: budget - 1], {}, blamed, calls=1, width=width, rest=rest)
    left = sum(branch.is_leaf for branch in branches[budget - 1 :])
    return [*lines[: budget - 1], f"    … {left} more branches{rest}"]


def whole_tree_lines(tree: Sequence[StackNode], *, culprits: Iterable[int] = (), most_calls: int = 400) -> list[str]:
    """The merged stacks with all branches and calls; of a branch with more than ``most_calls`` not the middle."""
    blamed = _odd(culprits, (rank for node in tree for rank in node.ranks))
    return _drawn(branches_of(tree, blamed), {}, blamed, calls=most_calls, width=2 * WIDTH, rest="", whole=True)


def _height(branch: Branch, calls: int) -> int:
    return min(calls, max(len(branch.frames), 1)) if branch.is_leaf else 1


def _hidden(branches: Sequence[Branch], most: int) -> dict[int, list[int]]:
    """Which branches are left out where each fork shows at most so many lines, the last of them its largest branch.

    Keyed by the first branch that is left out at a fork.
    """
    siblings: dict[int, list[int]] = {}
    for index, branch in enumerate(branches):
        siblings.setdefault(branch.parent, []).append(index)
    hidden: dict[int, list[int]] = {}
    first_of: dict[int, int] = {}
    for branch_siblings in siblings.values():
        if len(branch_siblings) > most:
            out = branch_siblings[most - 2 : -1] if most > 2 else branch_siblings[1:]  # noqa: PLR2004 - the first and "more"
            first_of.update(dict.fromkeys(out, out[0]))
    # What is below a branch goes where it goes. A branch always comes after the one above it.
    for index, branch in enumerate(branches):
        owner = first_of.get(branch.parent, first_of.get(index))
        if owner is not None:
            first_of[index] = owner
            hidden.setdefault(owner, []).append(index)
    return hidden


def _drawn(
    branches: Sequence[Branch],
    hidden: dict[int, list[int]],
    culprits: frozenset[int],
    *,
    calls: int,
    width: int,
    rest: str,
    whole: bool = False,
) -> list[str]:
    left_out = {index for indices in hidden.values() for index in indices}
    last_of: dict[int, int] = {}
    for index, branch in enumerate(branches):
        if index not in left_out or index in hidden:
            last_of[branch.parent] = index
    indents: dict[int, str] = {}
    heads: list[tuple[int, str, str]] = []
    for index, branch in enumerate(branches):
        if index in left_out and index not in hidden:
            continue
        knot, below = ("", "") if branch.parent < 0 else ("├─ ", "│  ")
        if knot and last_of.get(branch.parent) == index:
            knot, below = "└─ ", "   "
        above = indents.get(branch.parent, "")[-_WIDEST_INDENT:]
        indents[index] = above + below
        label = "…" if index in left_out else rank_ranges(branch.ranks)
        heads.append((index, above + knot + label, indents[index]))
    column = max((len(head) for index, head, _ in heads if index not in left_out), default=0)
    lines: list[str] = []
    for index, head, below in heads:
        branch = branches[index]
        if index in hidden:
            lines.append(f"    {head} {_more_branches(branches, hidden[index], rest)}")
            continue
        mark = _mark(branch.ranks, culprits)
        texts = _branch_texts(branch, calls, width - column - 6, whole=whole)
        lines.append(f"  {mark} {head:<{column}}  {texts[0]}")
        lines.extend(f"    {below:<{column}}  {text}" for text in texts[1:])
    return [cut_in_middle(line.rstrip(), width) for line in lines]


def _more_branches(branches: Sequence[Branch], hidden: Sequence[int], rest: str) -> str:
    count = sum(branches[index].is_leaf for index in hidden)
    ranks = rank_ranges(rank for index in hidden for rank in branches[index].ranks)
    return f"{count} more branches{rest}: {ranks}"


def _branch_texts(branch: Branch, calls: int, width: int, *, whole: bool) -> list[str]:
    frames = branch.frames
    if not frames:
        return [_IN_THAT_CALL]
    if not whole and (not branch.is_leaf or calls == 1):
        # Of what ranks have in common, the calls next to where they part; of an end, the user's and the innermost.
        order = _from_telling(frames) if branch.is_leaf else range(len(frames) - 1, -1, -1)
        return [_path(frames, order, width)]
    if len(frames) <= calls:
        return [frame_text(frame, width) for frame in frames]
    if whole:
        outer = calls // 4
        picks = [*range(outer), *range(len(frames) - calls + outer, len(frames))]
    else:
        picks = sorted(_from_telling(frames)[:calls])
    texts = []
    for pick, after in zip(picks, [*picks[1:], len(frames)], strict=True):
        gap = after - pick - 1
        tail = f"  … {_calls(gap)}" if gap else ""
        texts.append(frame_text(frames[pick], max(width - len(tail), 12)) + tail)
    if picks[0] > 0:
        texts[0] = f"… {_calls(picks[0])}  {texts[0]}"
    return texts


def _from_telling(frames: Sequence[Frame]) -> list[int]:
    """The calls of a stack's end, the most important first: the user's last, Python's last, innermost, first."""
    users = max((index for index, frame in enumerate(frames) if is_user_code(frame)), default=0)
    pythons = max((index for index, frame in enumerate(frames) if not is_native(frame)), default=0)
    last = len(frames) - 1
    return list(dict.fromkeys([users, pythons, last, 0, *range(last, -1, -1)]))


def _path(frames: Sequence[Frame], order: Iterable[int], width: int) -> str:
    """Calls in one line, ``main train.py:80 → step train.py:52``: the first of ``order`` for which there is room."""
    picks: list[int] = []
    text = ""
    for index in order:
        longer = sorted([*picks, index])
        candidate = _joined(frames, longer)
        if picks and len(candidate) > width:
            break
        picks, text = longer, candidate
    return cut_in_middle(text, width)


def _joined(frames: Sequence[Frame], picks: Sequence[int]) -> str:
    parts: list[str] = []
    before = -1
    for pick in picks:
        if pick - before > 1:
            parts.append(f"… {_calls(pick - before - 1)} …")
        parts.append(frame_text(frames[pick]).replace("  ", " "))
        before = pick
    if before < len(frames) - 1:
        parts.append(f"… {_calls(len(frames) - 1 - before)}")
    return " → ".join(parts)


def _calls(count: int) -> str:
    return f"{count} call{'s' if count > 1 else ''}"
