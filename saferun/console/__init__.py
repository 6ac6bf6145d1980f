"""What ranks write, on its way to the terminal: pipes, lines, prefixes, and a target that may be slow or full.

No line is lost or torn because a reader is slow, and no rank that has a file waits for one. Bytes are passed on as
they are; saferun's own words are single lines without control characters.
"""
