"""Secrets do not leave the process: one redaction for all that is written, shown or sent. Pure.

A value is a secret by the name beside it (``HF_TOKEN=…``, ``--api-key …``, ``"password": "…"``, ``Authorization: …``),
by its place in an address (``https://user:…@host``, ``?sig=…``), or by its own shape (``token_shapes``). The time that
it takes is proportional to the length of the text, whatever the text is. What ranks write to their own files is theirs,
and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from saferun.text.secret_names import is_secret, may_name_a_secret
from saferun.text.token_shapes import Shape, without_tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["REDACTED", "is_secret", "redacted_arguments", "redacted_environ", "redacted_json", "redacted_text"]

REDACTED = "<redacted>"
_SHORTEST = 6  # what is shorter holds no name with a value

# A name and a sign behind it; an option and white space; a word that announces a value.
_SIGNED = Shape(
    r"""(?<![\w.-])(-{0,2})([A-Za-z_][\w.-]{0,199}+)(\\{0,2}["'`]?[ \t]{0,3}(?:=>|:=|=|:)(?![=:])[ \t]{0,3})"""
)
_OPTION = Shape(r"(?<![\w.-])(-{1,2})([A-Za-z_][\w.-]{0,199}+)(?=\s|\Z)[ \t]{0,3}")
_WORD = Shape(
    r"\b(?:key|token|password|passwd|passphrase|secret|bearer|jwt)[ \t]{1,3}(?=[A-Za-z0-9+=~!@#$%^*]{8})", re.IGNORECASE
)
_QUOTE = Shape(r"""(?:[bBfFrRuU]{1,2}(?=["']))?("{3}|'{3}|\\{0,2}["'`])""")
_PLAIN = Shape(r"""[^\s,;"'`\\]+""")
_OF_A_QUERY = Shape(r"""[^\s,;"'`\\&#]+""")
_LINE = Shape(r"""[^\r\n"'`\\]+""")
_SCHEME = Shape(r"(?:bearer|basic|digest|token|apikey|negotiate|aws4-hmac-sha256)\s+", re.IGNORECASE)
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
# Nothing that anybody wants to hide; a structure is looked into.
_OPEN_VALUES = frozenset({"none", "null", "nil", "true", "false", "yes", "no", "on", "off", "0", "1", REDACTED.lower()})
_EMPTY = frozenset("*.…xX-")
# Words of everyday texts. With them a value counts that looks like a secret.
_EVERYDAY = frozenset({"key", "pass", "pin", "pw", "signature", "otp", "sig"})
_EVERYDAY_BEFORE_COLON = _EVERYDAY | {"token", "auth", "credential", "credentials", "creds", "oauth"}
# In the query of an address.
_OF_QUERIES = frozenset({"sig", "key", "code", "token", "auth"})
_RANDOM = Shape(r"(?=[^0-9]*+[0-9])(?=[^A-Za-z]*+[A-Za-z])[A-Za-z0-9+=~!@#$%^*]+")
_LEAST_RANDOM = 8
_AN_OPTION = Shape(r"--[a-z][a-z0-9]*+(?:[-_.][a-z0-9]++)*+(?:=.*)?", re.DOTALL)
# Programs whose options of one letter hold passwords.
_PROGRAMS = {
    **dict.fromkeys(("mysql", "mysqldump", "mysqladmin", "mariadb", "sshpass", "mongo", "mongosh", "twine"), "p"),
    **dict.fromkeys(("sqlcmd", "bcp"), "P"),
    **dict.fromkeys(("curl", "wget", "smbclient"), "uU"),
    **dict.fromkeys(("ldapsearch", "ldapadd", "ldapmodify"), "w"),
    "redis-cli": "a",
}
_PROGRAM = Shape(rf"(?<![\w.-])(?:{'|'.join(_PROGRAMS)})(?![\w.-])")
_NEAR = 120  # a program stands so near to its options
_PASSWORD_LETTERS = frozenset("pP")
_USER_LETTERS = frozenset("uU")
_USER_OPTIONS = frozenset({"user", "proxy-user"})

_ADDRESS = Shape(r"""[^\s"'<>`\\]{0,500}+""")
_AUTHORITY = Shape(r"[^/?#]*+")
_NO_PORT = Shape(r":(?![0-9]*+(?:[/?#]|\Z))")
_SCHEMES_OF_DATABASES = Shape(
    r"(?:postgres(?:ql)?|mysql|mariadb|mongodb|redis|rediss|amqps?|clickhouse|mssql|oracle|snowflake)[\w+]*+\Z",
    re.IGNORECASE,
)
_USERS = frozenset({"git", "hg", "svn", "ssh", "anonymous", "ftp", "root", "ubuntu", "ec2-user"})
_LONGEST_SCHEME = 30


def redacted_text(text: str) -> str:
    """A text without the secrets in it."""
    if len(text) < _SHORTEST:
        return text
    if "://" in text:
        text = _without_logins(text)
    if may_name_a_secret(text):
        text = _cut(text, _WORD, _behind_word)
        text = _cut(text, _SIGNED, _behind_sign)
    if "-" in text and _has_space(text):
        text = _cut(text, _OPTION, _behind_option)
    return without_tokens(text, REDACTED)


def redacted_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the values of secrets."""
    return {
        name: _redacted_value(value) if is_secret(name) else redacted_text(value) for name, value in environ.items()
    }


def redacted_json(value: Any) -> Any:  # noqa: ANN401 - JSON is of any type
    """JSON, or values made of tuples, without the secrets in texts. What is nested too deep to be read is left out."""
    try:
        return _redacted_json(value)
    except RecursionError:
        return REDACTED


def _redacted_json(value: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        return {
            redacted_text(str(name)): _redacted_under(str(name), item)
            if isinstance(item, str)
            else _redacted_json(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted_json(item) for item in value]
    if isinstance(value, tuple):
        items = [_redacted_json(item) for item in value]
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
    return value


def _redacted_under(name: str, value: str) -> str:
    return _redacted_value(value) if is_secret(name) else redacted_text(value)


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without the values of options that hold secrets: ``--api-key=…``, ``--token …``, ``KEY=…``."""
    shown: list[str] = []
    hide_next = ""
    letters = ""
    for argument in arguments:
        letters = _PROGRAMS.get(argument.rpartition("/")[2], letters)
        if hide_next and not (argument.startswith("--") and _AN_OPTION().fullmatch(argument)):
            shown.append(_hidden(hide_next, argument))
            hide_next = ""
            continue
        name, equals, value = argument.partition("=")
        inner, inner_equals, _ = value.partition("=")
        hide_next = ""
        if equals and is_secret(name) and not _has_space(name):
            shown.append(f"{name}={_redacted_value(value)}")
        elif inner_equals and is_secret(inner) and not _has_space(name + inner):
            shown.append(f"{name}={inner}={REDACTED}")  # --env=API_KEY=…, where … may hold anything
        elif _is_attached_password(argument, letters):
            shown.append(f"{argument[:2]}{REDACTED}")
        else:
            shown.append(redacted_text(argument))
            if argument.startswith("-") and not equals:
                hide_next = _hides(argument.lstrip("-"), len(argument) - len(argument.lstrip("-")), letters)
    return shown


def _hides(name: str, dashes: int, letters: str) -> str:
    """What is hidden of the argument behind an option: "all", what looks like a "password", that of a "user", or ""."""
    if is_secret(name):
        return "all"
    if dashes == 1 and len(name) == 1:
        if name in _USER_LETTERS:
            return "user" if name in letters else "login"
        if name in letters:
            return "all"
        return "password" if name in _PASSWORD_LETTERS else ""
    return "user" if name in _USER_OPTIONS else ""


def _hidden(how: str, value: str) -> str:
    """The argument behind an option without what is hidden of it."""
    match how:
        case "all":
            return _redacted_value(value)
        case "password":
            return REDACTED if _looks_random(value) else redacted_text(value)
        case _:
            user, separator, password = _split_login(value)
            if _is_password(password, how):
                return f"{user}{separator}{REDACTED}"
            return redacted_text(value)


def _split_login(value: str) -> tuple[str, str, str]:
    """``user:password``, or ``user%password`` as Samba has it."""
    separator = ":" if ":" in value else "%"
    user, found, password = value.partition(separator)
    return (user, found, password) if not password.startswith("//") else (value, "", "")


def _is_password(password: str, how: str) -> bool:
    """Of a ``user:password``: numbers are those of a user and a group, as containers have them."""
    if not _hides_something(password, 0, len(password)) or password.isdigit():
        return False
    return how == "user" or _looks_random(password)


def _is_attached_password(argument: str, letters: str) -> bool:
    """``-pV``: of programs that are known for it, and where it looks like one."""
    if len(argument) <= len("-p") or argument[0] != "-" or argument[1] not in _PASSWORD_LETTERS:
        return False
    return argument[1] in letters or _looks_random(argument[2:])


# --------------------------------------------------------------------------------------------------------------------
# By name


def _cut(text: str, shape: Shape, find: Callable[[str, re.Match[str]], tuple[int, int] | None]) -> str:
    """The text without what is found behind each match of a shape; ``find`` says from where to where it goes."""
    pieces: list[str] = []
    done = 0
    for match in shape().finditer(text):
        if match.start() >= done and (found := find(text, match)) is not None:
            begin, end = found
            pieces += (text[done:begin], REDACTED)
            done = end
    if not pieces:
        return text
    pieces.append(text[done:])
    return "".join(pieces)


def _behind_word(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    plain = _PLAIN().match(text, match.end())
    if plain is not None and _looks_random(word := plain.group().rstrip(".)]}>:")):
        return match.end(), match.end() + len(word)
    return None


def _behind_sign(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    dashes, name, between = match.groups()
    begin = match.end()
    asked = text[match.start() - 1] in "?&" if match.start() else False
    lower = name.lower()
    if not (is_secret(name) or (asked and lower in _OF_QUERIES)):
        return None
    is_colon = ":" in between
    if is_colon and lower in _HEADERS:
        return _value(text, begin, _LINE)
    found = _value(text, begin, _OF_A_QUERY if asked else _PLAIN)
    if found is None:
        return None
    # A key in quotes is one of a program's, not a word of a sentence.
    everyday = _EVERYDAY_BEFORE_COLON if is_colon and between[0] in ": \t" else _EVERYDAY
    if lower in everyday and not dashes and not asked and not _looks_random(text[slice(*found)]):
        return None
    return found


def _behind_option(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    dashes, name = match.groups()
    begin = match.end()
    letters = ""
    if dashes == "-" and (len(name) == 1 or name[0] in _PASSWORD_LETTERS):
        programs = _PROGRAM().findall(text, max(0, begin - _NEAR), begin)
        letters = _PROGRAMS[programs[-1]] if programs else ""
        if _is_attached_password(f"-{name}", letters):
            return match.start() + len("-p"), match.end(2)
    how = _hides(name, len(dashes), letters)
    found = _value(text, begin, _PLAIN) if how else None
    if found is None or (text.startswith("--", begin) and _AN_OPTION().fullmatch(text, *found)):
        return None
    value = text[slice(*found)]
    if how == "all" or (how == "password" and _looks_random(value)):
        return found
    user, separator, password = _split_login(value)
    if how != "password" and _is_password(password, how):
        return found[0] + len(user) + len(separator), found[1]
    return None


def _value(text: str, begin: int, plain: Shape) -> tuple[int, int] | None:
    """From where to where the value at a place goes; None: there is none to hide."""
    quote = _QUOTE().match(text, begin)
    if quote is not None:
        begin = quote.end()
        end = _end_of_quote(text, begin, quote.group(1))
    elif text.startswith("[", begin):
        begin += 1
        end = text.find("]", begin)
        end = len(text) if end < 0 else end
    elif text.startswith(("{", "<"), begin):
        return None
    else:
        match = plain().match(text, begin)
        if match is None:
            return None
        word = match.group()
        end = begin + len(word if word.endswith(REDACTED) else word.rstrip(")]}>"))
    scheme = _SCHEME().match(text, begin, end) if quote is not None else _SCHEME().match(text, begin)
    if scheme is not None:
        begin = scheme.end()
        if begin >= end:  # the value is the word behind the scheme
            match = plain().match(text, begin)
            end = match.end() if match is not None else begin
    return (begin, end) if _hides_something(text, begin, end) else None


def _end_of_quote(text: str, begin: int, quote: str) -> int:
    """Where a quoted value ends; the end of the line where the quote is not closed."""
    at = begin
    while (at := text.find(quote, at)) >= 0:
        if len(quote) > 1 or text[at - 1] != "\\" or at == begin:
            return at
        at += 1
    end = text.find("\n", begin)
    return len(text) if end < 0 else end


def _hides_something(text: str, begin: int, end: int) -> bool:
    if end <= begin:
        return False
    if end - begin > len(REDACTED):
        return True
    value = text[begin:end]
    return value.lower() not in _OPEN_VALUES and not _EMPTY.issuperset(value)


def _redacted_value(value: str) -> str:
    return REDACTED if _hides_something(value, 0, len(value)) else value


def _looks_random(value: str) -> bool:
    return len(value) >= _LEAST_RANDOM and _RANDOM().fullmatch(value) is not None


def _has_space(text: str) -> bool:
    return any(map(str.isspace, text))


# --------------------------------------------------------------------------------------------------------------------
# By place in an address


def _without_logins(text: str) -> str:
    pieces: list[str] = []
    done = at = 0
    while (at := text.find("://", at)) >= 0:
        scheme = text[max(0, at - _LONGEST_SCHEME) : at]
        at += len("://")
        address = _ADDRESS().match(text, at)
        found = _login(address.group(), scheme) if address is not None else None
        if found is not None:
            pieces += (text[done : at + found[0]], REDACTED)
            done = at = at + found[1]
    pieces.append(text[done:])
    return "".join(pieces)


def _login(address: str, scheme: str) -> tuple[int, int] | None:
    """Where the secret part of ``user:password@host/…`` is.

    A password may hold what ends the name of a host, if it was not quoted as it should be: ``u:p/w@h``, ``u:a@b@h``.
    """
    if "@" not in address:
        return None
    authority = _AUTHORITY().match(address)
    end = authority.end() if authority is not None else 0
    of_database = _SCHEMES_OF_DATABASES().search(scheme) is not None
    no_port = None if address.startswith("[") else _NO_PORT().search(address, 0, end + 1)
    at = address.rfind("@", 0, end)
    if of_database or (at < 0 and no_port is not None):
        at = max(at, address.rfind("@", 0, address.find("?") if "?" in address[end:] else len(address)))
    if at <= 0:
        return None
    user, colon, password = address[:at].partition(":")
    if not colon or not password or _looks_random(user):
        # A token alone, or in place of the user.
        plain = scheme.endswith(("http", "https")) and user not in _USERS
        return (0, at) if plain or _looks_random(user) else None
    return (len(user) + 1, at) if _hides_something(password, 0, len(password)) else None
