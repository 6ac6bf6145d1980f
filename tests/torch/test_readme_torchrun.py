"""What README.md shows of torchrun is what this torch prints."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

_README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def shown() -> str:
    """The example, without its command."""
    (block,) = re.findall(r"```console\n\$ torchrun .*?\n(.*?)\n```", _README, re.DOTALL)
    return str(block)


def is_shown_in(example: str, text: str) -> bool:
    """Whether an example is a text; a line with ``…`` alone stands for lines that are left out."""
    parts = re.split(r"^[ ]*…$", example, flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(re.escape(part.lstrip("\n")) for part in parts)
    return re.fullmatch(pattern, text) is not None


def test_the_summary_of_torchrun_is_what_torch_writes() -> None:
    """Three ranks were ended by torchrun's own signal, rank 3 had raised."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    example = shown().partition("ChildFailedError:\n")[2]
    failures = {}
    for rank, exit_code in [(3, 1), (0, -15), (1, -15), (2, -15)]:
        begin, end = (rf"rank      : {rank} \(local_rank: {rank}\)", r"\(pid: (\d+)\)")
        # The page shows two of the four.
        pid = re.search(rf"{begin}\n.*{end}", example)
        failures[rank] = ProcessFailure(rank, int(pid[1]) if pid else 13042 + rank, exit_code, error_file="")
        failures[rank].timestamp = 0
    written = str(ChildFailedError("examples/crash.py", failures)).strip("\n")
    assert is_shown_in(without_times(example), "\n".join(map(str.rstrip, without_times(written).splitlines())))


def without_times(text: str) -> str:
    return re.sub(r"(time      : ).*", r"\1then", text)


def test_the_lines_before_it_are_in_torch_s_source() -> None:
    """The error that its agent logs, and the statement that raises."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.launcher import api as launcher

    before = shown().partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")[0]
    match = re.search(r"(E.*)…/api.py:(\d+)\] (failed .*)", before)
    assert match is not None
    logged = re.sub(r"(exitcode: |local_rank: |pid: )\d+|(of binary: ).*", lambda m: f"{m[1] or m[2]}%s", match[3])
    assert f'"{logged}"' in inspect.getsource(api)
    assert "raise ChildFailedError(" in inspect.getsource(launcher)
    assert "    raise ChildFailedError(\n" in before


def test_another_example_would_not_do() -> None:
    assert is_shown_in("a\n  …\nd", "a\nb\nc\nd")
    assert not is_shown_in("a\n…\nd", "a\nb\nc\nx")
    assert not is_shown_in("a\nd", "a\nb\nd")
