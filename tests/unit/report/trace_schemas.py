"""What viewers of traces and stacks accept, as JSON schemas: speedscope, and Perfetto with chrome://tracing."""

from __future__ import annotations

from typing import Any

SPEEDSCOPE: dict[str, Any] = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {
                "frames": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string"},
                            "file": {"type": "string"},
                            "line": {"type": "number"},
                            "col": {"type": "number"},
                        },
                    },
                }
            },
        },
        "profiles": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
                "properties": {
                    "type": {"const": "sampled"},
                    "unit": {"enum": ["none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"]},
                    "samples": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                    "weights": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
        "activeProfileIndex": {"type": "number"},
        "exporter": {"type": "string"},
        "name": {"type": "string"},
    },
}
"""What speedscope's published schema demands of files with sampled profiles."""

_MICROSECONDS = {"type": "number", "minimum": 0}
_KINDS: dict[str, dict[str, Any]] = {
    # A span, an instant of a thread, a process or all of them, and a name or a place in the order.
    "X": {"required": ["ts", "dur"]},
    "i": {"required": ["ts"], "properties": {"s": {"enum": ["g", "p", "t"]}}},
    "M": {
        "required": ["args"],
        "oneOf": [
            {
                "properties": {
                    "name": {"enum": ["process_name", "thread_name"]},
                    "args": {"required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}},
                }
            },
            {
                "properties": {
                    "name": {"enum": ["process_sort_index", "thread_sort_index"]},
                    "args": {"required": ["sort_index"], "properties": {"sort_index": {"type": "integer"}}},
                }
            },
        ],
    },
}
TRACE_EVENTS: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid", "tid"],
                "properties": {
                    "ph": {"enum": [*_KINDS]},
                    "name": {"type": "string", "minLength": 1},
                    "cat": {"type": "string"},
                    "ts": _MICROSECONDS,
                    "dur": _MICROSECONDS,
                    # More are cut by JavaScript, which has no larger integers.
                    "pid": {"type": "integer", "minimum": 0, "maximum": 2**53},
                    "tid": {"type": "integer", "minimum": 0, "maximum": 2**53},
                    "args": {"type": "object"},
                },
                "allOf": [
                    {"if": {"properties": {"ph": {"const": kind}}}, "then": demanded}
                    for kind, demanded in _KINDS.items()
                ],
            },
        },
    },
}
"""The part of the "Trace Event Format" (Google, 2016) that saferun writes: the form with an object around the list."""
