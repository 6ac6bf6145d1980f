r"""What one rank writes to a terminal that it has for itself, without what does more than to write on the screen. Pure.

Movements of the cursor, colours, erasing and the modes of line editors pass. What a terminal answers (the answer is as
if it had been typed), what sets its title, clipboard or fonts, and other control characters do not.

Sources: ECMA-48; ctlseqs of xterm; what GNU readline, prompt_toolkit and Python's own line editor write.
"""

from __future__ import annotations

import re

# A sequence that has not ended after so many bytes is none.
_LONGEST_BYTES = 4 << 10
# Movements (A-H, d, f, `, a, e), erasing and inserting (J, K, L, M, P, X, @), scrolling (S), colours (m), tabs (I, Z),
# repetition (b), and the private modes of _MODES.
_FINALS = b"ABCDEFGHJKLMPSXZI@`abdefm"
# Cursor keys (1), line wrapping (7), cursor (12, 25), bracketed paste (2004).
_MODES = rb"\?(?:1|7|12|25|2004)[hl]"
_PASSED = (
    rb"[\x20-\x7e\x80-\xff\x07-\x0a\x0d]+"
    rb"|\x1b\[[0-9;:]*[" + re.escape(_FINALS) + rb"]"
    rb"|\x1b\[" + _MODES + rb"|\x1b[()][0B]|\x1b[=>78M]"
)
_DROPPED = rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-OQ-WYZ\\`-~]|[\x00-\x1f\x7f]"
_BEGUN = rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)\Z"
# Control characters of eight bits, in UTF-8.
_EIGHT_BITS = rb"\xc2[\x80-\x9f]"


class HarmlessText:
    """The filter of one stream of bytes, which may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        # Half a millisecond the first time: every launch on a terminal loads this module, and few ever use it.
        self._passed, self._dropped, self._begun, self._eight_bits = map(
            re.compile, (_PASSED, _DROPPED, _BEGUN, _EIGHT_BITS)
        )

    def feed(self, chunk: bytes) -> bytes:
        """What of these bytes may be shown."""
        text, self._rest = self._rest + chunk, b""
        if text.endswith(b"\xc2"):
            text, self._rest = text[:-1], b"\xc2"
        if (begun := self._begun.search(text)) is not None and len(text) - begun.start() <= _LONGEST_BYTES:
            text, self._rest = text[: begun.start()], text[begun.start() :] + self._rest
        shown = []
        at = 0
        while at < len(text):
            if (passed := self._passed.match(text, at)) is not None:
                shown.append(passed[0])
                at = passed.end()
            else:
                dropped = self._dropped.match(text, at)
                at = dropped.end() if dropped is not None else at + 1
        return self._eight_bits.sub(b"", b"".join(shown))
