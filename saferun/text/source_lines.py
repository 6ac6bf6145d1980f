"""Which values are expressions of a program's source, as tracebacks quote it, and not secrets themselves. Pure.

In doubt a value is none: ``token = logits.argmax(-1)`` is an expression, ``TOKEN=abc(def`` may be a secret.
"""

from __future__ import annotations

from saferun.text.token_shapes import Shape

# A call or an item, whose bracket is closed on its line and ends a value; and a variable.
_CALL = Shape(
    r"(?P<what>[a-z_]\w{0,80}+(?:\.[A-Za-z_]\w{0,80}+){0,9}+)"
    r"(?:\([^)\r\n\v]{0,300}+\)|\[[^]\r\n\v]{0,300}+\])(?=[\s.,:;()\[\]}]|\Z)"
)
_VARIABLE = Shape(r"(?P<what>[a-z_][a-z0-9_]{0,80}+(?:\.[a-z_][a-z0-9_]{0,80}+){0,9}+)(?=[\s,:)\]}]|\Z)")
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
    line = text[max(0, begin - _NEAR) : begin].rpartition("\n")[2]
    if sign == "=":  # an argument of a call
        return line.endswith("(") or (line.endswith(", ") and "(" in line)
    is_statement = sign[0] in _BLANKS and sign[-1] in _BLANKS
    return is_statement and (line.endswith(("  ", "\t")) or "." in name or "." in what)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
