"""The merged stacks as a tree, and as a flame view, where a box is as wide as the number of ranks in a call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.evidence.job_evidence import Frame
from saferun.report.page.contents import BranchPart, FramePart
from saferun.report.page.page_model import LABEL_CHARACTERS, Call, FlameBox, StackBranch, Stacks
from saferun.report.text_diagram import file_text, is_user_code, rank_ranges
from saferun.text.bounded_json import shown

_MOST_BRANCHES = 400
_MOST_CALLS = 60
_MOST_BOXES = 1500
_MOST_LEVELS = 60
_DEEPEST = 24
_LONGEST = 160
# Of calls that the same ranks make, the flame view shows so many.
_FLAME_CALLS = 14


def call_of(frame: FramePart) -> Call:
    """A call, as it is shown."""
    file = shown(frame.file, 400)
    location = file_text(file)
    if frame.line and not frame.native:
        location = f"{location}:{frame.line}"
    is_user = is_user_code(Frame(frame.function, frame.file, max(frame.line, 0), native=frame.native))
    return Call(shown(frame.function, _LONGEST), location, file, frame.line, frame.native, is_user)


def build_stacks(tree: Sequence[BranchPart], culprits: frozenset[int], scale: float = 1.0) -> Stacks | None:
    """The stacks of an incident; None where there are none.

    Args:
        tree: the branches, each after the one above it.
        culprits: the ranks that are the cause.
        scale: how much of what there is room for is used.
    """
    everyone = {rank for part in tree for rank in part.ranks}
    blamed = culprits if not culprits.issuperset(everyone) else frozenset()
    most = max(int(_MOST_BRANCHES * scale), 8)
    branches: list[StackBranch] = []
    children: dict[int, list[int]] = {}
    depths: dict[int, int] = {}
    for index, part in enumerate(tree[:most]):
        parent = part.parent if part.parent is not None and 0 <= part.parent < index else -1
        # The elements of a page cannot be nested without end: what is deeper stands beside it.
        while parent >= 0 and depths[parent] >= _DEEPEST:
            parent = branches[parent].parent
        depths[index] = depths[parent] + 1 if parent >= 0 else 0
        frames = part.frames[-_MOST_CALLS:]
        omitted = max(part.frames_omitted, 0) + len(part.frames) - len(frames)
        is_culprit = bool(part.ranks) and blamed.issuperset(part.ranks)
        children.setdefault(parent, []).append(index)
        calls = tuple(map(call_of, frames))
        label = rank_ranges(part.ranks, LABEL_CHARACTERS)
        branches.append(StackBranch(index, parent, depths[index], label, part.ranks, calls, omitted, is_culprit, ()))
    if not branches:
        return None
    whole = tuple(branch._replace(children=tuple(children.get(branch.position, ()))) for branch in branches)
    roots = tuple(children.get(-1, ()))
    flame, width, levels = _flame(whole, roots)
    return Stacks(whole, roots, flame, width, levels, len(tree) - len(whole))


def _flame(branches: Sequence[StackBranch], roots: Iterable[int]) -> tuple[tuple[FlameBox, ...], float, int]:
    boxes: list[FlameBox] = []
    total = 0.0
    deepest = 0
    todo: list[tuple[int, float, int]] = []
    for root in roots:
        todo.append((root, total, 0))
        total += max(len(branches[root].ranks), 1)
    while todo and len(boxes) < _MOST_BOXES:
        index, offset, level = todo.pop()
        branch = branches[index]
        width = float(max(len(branch.ranks), 1))
        for name, title, tone in _flame_calls(branch):
            if level >= _MOST_LEVELS:
                break
            boxes.append(FlameBox(level, offset, width, name, f"{title} — {branch.label}", tone))
            level += 1
            deepest = max(deepest, level)
        at = offset
        for child in branch.children:
            todo.append((child, at, level))
            at += max(len(branches[child].ranks), 1)
    boxes.sort(key=lambda box: (box.level, box.offset))
    return tuple(boxes), max(total, 1.0), deepest


def _flame_calls(branch: StackBranch) -> list[tuple[str, str, str]]:
    calls = branch.calls
    rows = [(call.function, f"{call.function} {call.location}", _tone(call, branch)) for call in calls]
    if not rows:
        return [("in that call itself", "these ranks go no deeper", "plain")]
    hidden = len(rows) - _FLAME_CALLS
    if hidden > 0:
        half = _FLAME_CALLS // 2
        gap = (f"… {hidden} calls …", f"{hidden} calls", "plain")
        rows = [*rows[:half], gap, *rows[len(rows) - half :]]
    return rows


def _tone(call: Call, branch: StackBranch) -> str:
    if branch.is_culprit:
        return "culprit"
    if call.is_native:
        return "native"
    return "user" if call.is_user else "library"
