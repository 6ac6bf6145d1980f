"""Untrusted pickles of a rank as plain values: dicts, lists, strings, numbers, bools and None.

A pickle is a program. Python's own reader can be kept from calling what one names, but not from hashing a tuple that
holds itself a million times, or from reserving memory for a place in its memo that is far behind the last one. So only
the instructions are carried out that put plain values together (protocol 2 and newer; torch writes 2). The result is
bounded: in length before it is read, in depth and number when it is copied, since a short pickle may hold one list a
million times in another.

Source: ``Lib/pickletools.py``; ``torch/csrc/jit/serialization/pickler.cpp``.
"""

from __future__ import annotations

import struct
from typing import Any

LONGEST_BYTES = 64 << 20
_DEEPEST = 24
_MOST_VALUES = 4 << 20
_LARGEST = 1 << 63
_LONGEST_NUMBER = 9

_MALFORMED = (AttributeError, IndexError, KeyError, MemoryError, TypeError, struct.error)
_CONSTANTS: dict[int, bool | None] = {0x4E: None, 0x88: True, 0x89: False}
# Instruction -> how the number behind it is written.
_NUMBERS = {0x4A: "<i", 0x4B: "<B", 0x4D: "<H", 0x47: ">d"}
_LENGTHS = {0x58: "<I", 0x8C: "<B", 0x8D: "<Q"}
_PUTS = {0x71: "<B", 0x72: "<I"}
_GETS = {0x68: "<B", 0x6A: "<I"}
_SKIPPED = {0x80: 1, 0x95: 8}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_CODES = {one: struct.Struct(one) for one in ("<i", "<B", "<H", ">d", "<I", "<Q")}
_READERS = {
    instruction: (_CODES[code].unpack_from, _CODES[code].size)
    for table in (_NUMBERS, _LENGTHS, _PUTS, _GETS)
    for instruction, code in table.items()
}
_MARK, _STOP, _LONG1, _MEMOIZE = 0x28, 0x2E, 0x8A, 0x94
_EMPTY_LIST, _EMPTY_DICT, _EMPTY_TUPLE, _TUPLE = 0x5D, 0x7D, 0x29, 0x74
_APPEND, _APPENDS, _SETITEM, _SETITEMS = 0x61, 0x65, 0x73, 0x75


def read_pickle(content: bytes, longest: int = LONGEST_BYTES) -> Any:  # noqa: ANN401 - any plain value
    """Decode a pickle like JSON: tuples become lists, and keys must be strings.

    Raises:
        ValueError: it is not a pickle, holds other than plain values, or exceeds a bound.
    """
    if len(content) > longest:
        raise ValueError("it is too long")
    try:
        raw = _load(content)
    except _MALFORMED:
        raise ValueError("it is malformed, or breaks off") from None
    return _Copy().of(raw, _DEEPEST)


def _load(content: bytes) -> object:  # noqa: C901, PLR0915 - one branch for each kind of instruction
    at = 0
    stack: list[Any] = []
    outer: list[list[Any]] = []
    memo: dict[int, object] = {}
    while True:
        instruction = content[at]
        at += 1
        if instruction in _READERS:
            read, size = _READERS[instruction]
            number = read(content, at)[0]
            at += size
            if instruction in _GETS:
                stack.append(memo[number])
            elif instruction in _NUMBERS:
                stack.append(number)
            elif instruction in _PUTS:
                memo[number] = stack[-1]
            else:
                if number > len(content) - at:
                    raise IndexError
                stack.append(content[at : at + number].decode(errors="replace"))
                at += number
        elif instruction in _CONSTANTS:
            stack.append(_CONSTANTS[instruction])
        elif instruction == _LONG1:
            size = content[at]
            if size > _LONGEST_NUMBER:
                raise ValueError("it holds a number that is too large")
            stack.append(int.from_bytes(content[at + 1 : at + 1 + size], "little", signed=True))
            at += 1 + size
        elif instruction == _MARK:
            outer.append(stack)
            stack = []
        elif instruction in {_APPENDS, _SETITEMS, _TUPLE}:
            items, stack = stack, outer.pop()
            if instruction == _TUPLE:
                stack.append(items)
            elif instruction == _APPENDS:
                stack[-1].extend(items)
            else:
                _set(stack[-1], items)
        elif instruction == _EMPTY_DICT:
            stack.append({})
        elif instruction in {_EMPTY_LIST, _EMPTY_TUPLE}:
            stack.append([])
        elif instruction == _APPEND:
            stack[-2].append(stack.pop())
        elif instruction == _SETITEM:
            items = stack[-2:]
            del stack[-2:]
            _set(stack[-1], items)
        elif instruction in _TUPLES:
            size = _TUPLES[instruction]
            stack[-size:] = [stack[-size:]]
        elif instruction == _MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif instruction in _SKIPPED:
            at += _SKIPPED[instruction]
        elif instruction == _STOP:
            return stack[-1]
        else:
            raise ValueError(f"it does more than hold plain values (instruction {instruction:#04x})")


def _set(target: Any, items: list[Any]) -> None:  # noqa: ANN401 - whatever the pickle has there
    keys = items[::2]
    if type(target) is not dict or len(items) % 2 or any(type(key) is not str for key in keys):
        raise ValueError("it has keys that are not strings")
    target.update(zip(keys, items[1::2], strict=True))


class _Copy:
    """Copies a value without shared references."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, raw: object, depth: int) -> Any:  # noqa: ANN401 - any plain value
        """Copy a value.

        Raises:
            ValueError: it exceeds a bound.
        """
        self._left -= 1
        if depth <= 0 or self._left < 0:
            raise ValueError("it holds too much")
        if type(raw) is dict:
            return {key: self.of(value, depth - 1) for key, value in raw.items()}
        if type(raw) is list:
            return [self.of(item, depth - 1) for item in raw]
        if type(raw) is int and not -_LARGEST <= raw < 2 * _LARGEST:
            raise ValueError("it holds a number that is too large")
        return raw
