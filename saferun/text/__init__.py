"""How things are written for people, and what of them is not: decoding with bounds, lines, secrets. Pure.

Whatever comes in, a decoder answers with a value or with one of ``decoding.MALFORMED``, and a text comes back as one
that can be shown. Nothing here knows what the words are about.
"""
