"""The output of the ranks on its way to the terminal: pipes, lines, prefixes, and targets that may be slow or full.

No line is lost or torn because a reader is slow, and no rank whose output is also in a file waits for a slow reader.
Ranks' bytes are not changed; saferun's own messages are single lines without control characters.
"""
