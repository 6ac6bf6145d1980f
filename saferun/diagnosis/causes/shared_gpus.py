"""Whether other processes have a part of a GPU's memory, by what torch lists when that is full. Pure.

Source: ``reportProcessMemoryInfo`` and the message of torch's CUDA allocator (2.1 to 2.13).
"""

from __future__ import annotations

from saferun.diagnosis.lazy_patterns import LazyPattern

_SIZE = r"([\d.]{1,12}) (bytes|[KMG]iB)"
_LISTED = LazyPattern(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
_ITSELF = LazyPattern(r"this process has [\d.]{1,12} \w{1,5} memory in use")
_OF_TORCH = LazyPattern(rf"{_SIZE} is (?:allocated|reserved) by PyTorch")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# A screen and the contexts of idle processes have less.
_MATTERS = 1 << 30
# What a process has beside torch's memory: its context, and buffers of NCCL and of other libraries.
_MOST_BESIDE_TORCH = 2 << 30


def others_use_it(text: str) -> bool:
    """Whether other processes have so much of this GPU's memory that it matters.

    Where the process has other numbers than the driver knows it by (a container), torch does not recognize it, and
    lists it as any other.

    Args:
        text: the message, in one line.
    """
    sizes = sorted({match[1]: _bytes(match[2], match[3]) for match in _LISTED.finditer(text)}.values())
    if not sizes or _ITSELF.search(text):
        return sum(sizes) >= _MATTERS
    of_torch = [_bytes(match[1], match[2]) for match in _OF_TORCH.finditer(text)]
    own = sum(of_torch)
    if len(sizes) == 1:
        return bool(of_torch) and sizes[0] > 2 * own + _MOST_BESIDE_TORCH
    # It has at least what torch has.
    itself = next((size for size in sizes if of_torch and size >= own), sizes[-1])
    return sum(sizes) - itself >= _MATTERS


def _bytes(number: str, unit: str) -> float:
    try:
        return float(number) * _UNITS[unit]
    except ValueError:
        return 0.0
