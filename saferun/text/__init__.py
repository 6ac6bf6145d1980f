"""Text from and for people and programs: bounded decoding of JSON, display lines, redaction of secrets. Pure.

For any input a decoder returns a value or raises one of ``decoding.MALFORMED``, and a function that formats a text
returns one that is safe to print. Nothing here depends on what the text means.
"""
