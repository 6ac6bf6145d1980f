"""Which values are expressions of a program's source, as tracebacks quote it, and not secrets themselves. Pure.

In doubt a value is none: ``token = logits.argmax(-1)`` is an expression, ``TOKEN=abc(def`` may be a secret.
"""

from __future__ import annotations

import re

from saferun.text.token_shapes import Shape

# A call or an item, whose bracket is closed on its line and ends a value; and a variable, which no bare word follows,
# and a sign only behind a blank: ``password@2024`` may be a password.
_CALL = Shape(
    r"(?P<what>[a-z_]\w{0,80}+(?:\.[A-Za-z_]\w{0,80}+){0,9}+)"
    r"(?:\([^)\r\n\v]{0,300}+\)|\[[^]\r\n\v]{0,300}+\])(?=[\s.,:;()\[\]}]|\Z)"
)
_VARIABLE = Shape(
    r"(?P<what>[a-z_][a-z0-9_]{0,80}+(?:\.[a-z_][a-z0-9_]{0,80}+){0,9}+)"
    r"(?=[,:)\]}]|[ \t]*+(?:[\r\n\v]|\Z)|[ \t]++(?:[,:;)\]}#+\-*/%|&<>=!@^]|(?:if|else|or|and|for|in|is|not)\b))"
)
# A digit ahead of a letter, as names and numbers of a program seldom have it.
_PART = Shape(r"[A-Za-z0-9]++|'[^']*+'|\"[^\"]*+\"")
_ODD = Shape(r"[A-Za-z0-9]*?[0-9][A-Za-z]")
_USUAL = Shape(
    r"[0-9]{1,9}[a-z]{1,5}|[0-9]{1,9}e[0-9]{1,3}|0x[0-9a-f]+|[a-z]+2[a-z]+[0-9]?"
    r"|e[0-9]m[0-9](?:b11)?(?:fn)?(?:uz)?|layer[0-9]{1,3}[a-z]{1,9}"
    r"|(?:a85|b16|b32|b64|b85|base16|base32|base64|h5|i18n|k8s|md5|s3|sha1|sha256|sha512|x509)[a-z]*",
    re.IGNORECASE,
)
_LEAST_SECRET = 8
_REST = Shape(r"[^\s,;]{0,60}+")
_OWN = ("self.", "cls.")
_BLANKS = " \t"
_NEAR = 200


def is_expression(text: str, begin: int, name: str, sign: str, value_begin: int) -> bool:
    """Whether what is assigned to a name is an expression.

    Args:
        text: the text.
        begin: the offset of the name.
        name: the name.
        sign: the sign behind it, with the blanks around it.
        value_begin: the offset of the value.
    """
    if not name.islower() or sign.strip(_BLANKS) != "=":
        return False
    found = _CALL().match(text, value_begin) or _VARIABLE().match(text, value_begin)
    if found is None:
        return False
    what: str = found["what"]
    if found.re is _VARIABLE() and not (what.startswith(_OWN) or _last(what) == _last(name)):
        return False
    if _is_key_like(text, value_begin, found.end()):
        return False
    line = text[max(0, begin - _NEAR) : begin].rpartition("\n")[2]
    if sign == "=":  # an argument of a call
        return line.endswith("(") or (line.endswith(", ") and "(" in line)
    is_statement = sign[0] in _BLANKS and sign[-1] in _BLANKS
    return is_statement and (line.endswith(("  ", "\t")) or "." in name or "." in what)


def _is_key_like(text: str, begin: int, end: int) -> bool:
    """Whether a value that has the form of an expression may be a password all the same: ``klltfw8td(m1bc5m2q)``."""
    rest = _REST().match(text, end)
    end = rest.end() if rest is not None else end
    parts = [part for part in _PART().findall(text, begin, end) if part.isalnum()]  # in quotes it has a name of its own
    return sum(map(len, parts)) >= _LEAST_SECRET and any(
        _ODD().match(part) is not None and _USUAL().fullmatch(part) is None for part in parts
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
