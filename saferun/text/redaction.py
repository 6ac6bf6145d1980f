"""The one redaction for everything that is written, shown or sent. Pure.

A value is a secret by its name (``HF_TOKEN=…``, ``--api-key …``, ``"password": "…"``, ``Authorization: …``),
by its position in a URL (``https://user:…@host``, ``?sig=…``), or by its own shape (``token_shapes``,
``private_keys``). The time is linear in the length of the text, for every text. What ranks write to their own files is
not redacted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from saferun.text.private_keys import MARK, lines_without_private_keys, without_private_keys
from saferun.text.secret_names import is_secret, may_name_a_secret
from saferun.text.source_lines import is_expression
from saferun.text.token_shapes import Shape, without_tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

REDACTED = "<redacted>"
_SHORTEST = 6  # too short for a name with a value

# A name and a sign behind it; an option and white space; a word that introduces a value.
_SIGNED = Shape(
    r"""(?<![\w.-])(-{0,2})([A-Za-z_][\w.-]{0,199}+)(\\{0,2}["'`]?[ \t]{0,3}(?:=>|:=|=|:)(?![=:])[ \t]{0,3})"""
)
_OPTION = Shape(r"(?<![\w.-])(-{1,2})([A-Za-z_][\w.-]{0,199}+)(?=\s|\Z)[ \t]{0,3}")
_WORD = Shape(
    r"(?<![A-Za-z0-9.])(key|token|password|passwd|passphrase|secret|bearer|jwt)[ \t]{1,3}(?=[A-Za-z0-9+/=~!@#$%^*]{8})",
    re.IGNORECASE,
)
_NAME_BEFORE = Shape(r"[A-Za-z][\w-]{0,60}+\Z")
# ``wandb login KEY``
_LOGIN = Shape(
    r"\bwandb[ \t]{1,9}login(?:[ \t]{1,9}--[a-z-]{1,20}+(?:=\S{0,200}+)?){0,4}+[ \t]{1,9}(?=[0-9A-Za-z_-]{32})"
)
_QUOTE = Shape(r"""(?:[bBfFrRuU]{1,2}(?=["']))?("{3}|'{3}|\\{0,2}["'`])""")
_BLOCKS = frozenset({'"""', "'''"})
_PLAIN = Shape(r"""[^\s,;"'`\\]+""")
_OF_A_QUERY = Shape(r"""[^\s,;"'`\\&#]+""")
_OF_A_PATH = Shape(r"""[^\s,;"'`\\/]+""")
_LINE = Shape(r"""[^\r\n\v"'`\\]+""")
# Braces around a whole value, as of an environment, or a template with more behind it.
_BRACED = Shape(r"""(\{[^\s"'`:,;={}\\]+\}(?=[\s,;]|\Z))|\{{1,2}[^\s"'`,;{}\\]+\}{1,2}[^\s"'`,;&{}\\]{4,}+""")
_SCHEME = Shape(r"(?:bearer|basic|digest|token|apikey|negotiate|aws4-hmac-sha256)\s+", re.IGNORECASE)
_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
# Values that are no secrets; structures are redacted recursively.
_OPEN_VALUES = frozenset({"none", "null", "nil", "true", "false", "yes", "no", "on", "off", "0", "1", REDACTED.lower()})
_EMPTY = frozenset("*.…xX-")
# Common words: after these only a value that looks like a secret is one.
_EVERYDAY = frozenset({"key", "pass", "pin", "pw", "signature", "otp", "sig"})
_EVERYDAY_BEFORE_COLON = _EVERYDAY | {"token", "auth", "credential", "credentials", "creds", "oauth"}
# Parameters in the query of a URL.
_OF_QUERIES = frozenset({"sig", "key", "code", "token", "auth"})
_RANDOM = Shape(r"(?=[^0-9]*+[0-9])(?=[^A-Za-z]*+[A-Za-z])[A-Za-z0-9+=~!@#$%^*]+")
_LEAST_RANDOM = 8
# No secrets after common words: bfloat16, layer0012, shard3of512, 80GB, and the beginning of a commit.
_ORDINARY = Shape(r"[A-Za-z][0-9]{1,9}|(?:[A-Za-z]{2,}[0-9]{1,9}){1,3}[A-Za-z]{0,3}|[0-9]+[A-Za-z]{1,5}|[0-9a-f]{8,12}")
# Longer values after common words are no secrets; longer lists hold none.
_LONGEST_EVERYDAY = 512
_LONGEST_LIST = 4096
_AS_IT_IS = 1 << 62
_AN_OPTION = Shape(r"--[a-z][a-z0-9]*+(?:[-_.][a-z0-9]++)*+(?:=.*)?", re.DOTALL)
# Programs whose options of one letter hold passwords. For other programs, values that look like a password are
# redacted.
_NONE = "-"
_PROGRAMS = {
    **dict.fromkeys(("mysql", "mysqldump", "mysqladmin", "mariadb", "sshpass", "mongo", "mongosh", "twine"), "p"),
    **dict.fromkeys(("sqlcmd", "bcp"), "P"),
    **dict.fromkeys(("curl", "wget", "smbclient"), "uU"),
    **dict.fromkeys(("ldapsearch", "ldapadd", "ldapmodify"), "w"),
    "redis-cli": "a",
    "login": "p",  # of registries: docker, podman, helm
    # For these, -p is a partition, a port, a path or a process.
    **dict.fromkeys(("srun", "sbatch", "salloc", "squeue", "sinfo", "scontrol", "sacct"), _NONE),
    **dict.fromkeys(("mkdir", "cp", "tar", "ssh", "docker", "podman", "py-spy", "gdb", "strace", "perf"), _NONE),
}
_COMMAND_TOKENS = Shape(r"""[^\s"'`,;|&()\[\]]+""")
_NEAR = 120  # a program is at most this far from its options
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
    text = without_private_keys(text, REDACTED)
    if "://" in text:
        text = _without_logins(text)
    if may_name_a_secret(text):
        # Most have none of this, and compiling an expression takes longer than many texts do.
        if " " in text or "\t" in text:
            text = _cut(text, _WORD, _behind_word)
        if "=" in text or ":" in text:
            text = _cut(text, _SIGNED, _behind_sign)
    if "wandb" in text:
        text = _cut(text, _LOGIN, _behind_login)
    if "-" in text and _has_space(text):
        text = _cut(text, _OPTION, _behind_option)
    return without_tokens(text, REDACTED)


def lines_without_keys(lines: Sequence[str]) -> list[str]:
    """Lines without private keys, which span lines; all other secrets are redacted line by line, by ``redacted_text``.

    Of a key of which the lines hold the beginning or the end alone, the rest goes as well.
    """
    return lines_without_private_keys(lines, REDACTED)


def redacted_path(path: str) -> str:
    """A path without the secrets in it, component by component: what follows a secret stays."""
    if "://" in path:
        return redacted_text(path)
    return "/".join(map(redacted_text, path.split("/")))


def redacted_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the values of secrets."""
    return {
        name: _redacted_value(value) if is_secret(name) else redacted_text(value) for name, value in environ.items()
    }


def redacted_json(value: Any) -> Any:  # noqa: ANN401 - JSON is of any type
    """JSON, or values made of tuples, without the secrets in strings. Values nested too deeply are left out."""
    try:
        return _redacted_json(value)
    except RecursionError:
        return REDACTED


def _redacted_json(value: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        return {
            redacted_text(str(name)): _hidden_json(item) if hides(str(name), item) else _redacted_json(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted_json(item) for item in _items(value)]
    if isinstance(value, tuple):
        if hasattr(value, "_make"):
            return type(value)._make(map(_redacted_json, value))
        return tuple([_redacted_json(item) for item in _items(value)])
    return value


def _items(values: Sequence[Any]) -> Sequence[Any]:
    """The items of a list; if they are lines, without private keys."""
    if not any(isinstance(item, str) and MARK in item for item in values):
        return values
    return lines_without_keys(values) if all(isinstance(item, str) and "\n" not in item for item in values) else values


def hides(name: str, value: Any) -> bool:  # noqa: ANN401 - as above
    """Whether a JSON key marks its value as a secret; in ``"key": "layer.0"`` it does not."""
    if name.lower() in _EVERYDAY:
        return isinstance(value, str) and _is_key_like(value)
    return is_secret(name)


def _hidden_json(value: Any) -> Any:  # noqa: ANN401 - as above
    """The value of a secret's key: all strings in it are redacted."""
    if isinstance(value, str):
        return _redacted_value(value)
    if isinstance(value, Mapping):
        return {redacted_text(str(name)): _hidden_json(item) for name, item in value.items()}
    return [_hidden_json(item) for item in value] if isinstance(value, list | tuple) else value


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without the values of options that hold secrets: ``--api-key=…``, ``--token …``, ``KEY=…``."""
    shown: list[str] = []
    hide_next = ""
    letters = ""
    for argument in arguments:
        letters = _letters(argument, letters)
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
            shown.append(f"{name}={inner}={REDACTED}")  # --env=API_KEY=…, where … may be anything
        elif _is_attached_password(argument, letters):
            shown.append(f"{argument[:2]}{REDACTED}")
        else:
            shown.append(redacted_text(argument))
            if argument.startswith("-") and not equals:
                hide_next = _hides(argument.lstrip("-"), len(argument) - len(argument.lstrip("-")), letters)
    return shown


def _letters(word: str, letters: str) -> str:
    """The password options of a program, if the token is a known one; else those of the previous program."""
    program = word.rpartition("/")[2]
    return "" if program.endswith(".py") or program.startswith("python") else _PROGRAMS.get(program, letters)


def _letters_of(text: str, end: int) -> str:
    letters = ""
    for word in _COMMAND_TOKENS().findall(text, max(0, end - _NEAR), end):
        letters = _letters(word, letters)
    return letters


def _hides(name: str, dashes: int, letters: str) -> str:
    """What to redact of an option's argument: "all", what looks like a "password", that of a "user", or ""."""
    if is_secret(name):
        return "all"
    if dashes == 1 and len(name) == 1:
        if name in _USER_LETTERS:
            return "user" if name in letters else "login"
        if name in letters:
            return "all"
        return "password" if name in _PASSWORD_LETTERS and not letters else ""
    return "user" if name in _USER_OPTIONS else ""


def _hidden(how: str, value: str) -> str:
    """An option's argument, redacted."""
    match how:
        case "all":
            return _redacted_value(value)
        case "password":
            return REDACTED if _is_key_like(value) else redacted_text(value)
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
    """Of a ``user:password``; numbers are user and group IDs, as containers have them."""
    if not _hides_something(password, 0, len(password)) or password.isdigit():
        return False
    return how == "user" or _is_random(password)


def _is_attached_password(argument: str, letters: str) -> bool:
    """``-pV``: of programs that are known to have it, or if the value looks like a password."""
    if len(argument) <= len("-p") or argument[0] != "-" or argument[1] not in _PASSWORD_LETTERS:
        return False
    return argument[1] in letters or (not letters and _is_key_like(argument[2:]))


# --------------------------------------------------------------------------------------------------------------------
# By name


def _cut(text: str, shape: Shape, find: Callable[[str, re.Match[str]], tuple[int, int] | None]) -> str:
    """The text without the value after each match of a shape; ``find`` returns its span."""
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
    begin = match.end()
    plain = _PLAIN().match(text, begin, begin + _LONGEST_EVERYDAY)
    word = plain.group().rstrip(".)]}>:") if plain is not None else ""
    name = match.group(1).lower()
    before = _NAME_BEFORE().search(text, max(0, match.start() - _NEAR), match.start())
    if before is not None:
        # ``configure set aws_secret_access_key V``; base64 may hold slashes.
        is_one = is_secret(before.group() + name) and _is_key_like(word.replace("/", ""))
    else:
        is_one = _is_key_like(word) if name in _EVERYDAY_BEFORE_COLON else _is_random(word)
    return (begin, begin + len(word)) if is_one else None


def _behind_login(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    plain = _PLAIN().match(text, match.end())
    return plain.span() if plain is not None else None


def _behind_sign(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    dashes, name, between = match.groups()
    begin = match.end()
    before = text[match.start() - 1] if match.start() else ""
    asked = bool(before) and before in "?&"
    lower = name.lower()
    if not (is_secret(name) or (asked and lower in _OF_QUERIES)):
        return None
    is_colon = ":" in between
    if not (asked or dashes) and is_expression(text, match.start(), name, between, begin):
        return None
    if is_colon and lower in _HEADERS:
        return _value(text, begin, _LINE)
    # A quoted key belongs to a program, not to a sentence.
    everyday = _EVERYDAY_BEFORE_COLON if is_colon and between[0] in ": \t" else _EVERYDAY
    shape = _OF_A_QUERY if asked else _OF_A_PATH if before == "/" else _PLAIN
    if lower in everyday and not dashes and not asked:
        near = _value(text, begin, shape, _LONGEST_EVERYDAY)
        if near is None or not _is_key_like(text[slice(*near)]):
            return None
    if not is_colon and text.startswith("{", begin):
        braced = _BRACED().match(text, begin, begin + _LONGEST_EVERYDAY)
        return braced.span() if braced is not None and (name.isupper() or braced[1] is None) else None
    return _value(text, begin, shape)


def _behind_option(text: str, match: re.Match[str]) -> tuple[int, int] | None:
    dashes, name = match.groups()
    begin = match.end()
    letters = ""
    if dashes == "-" and (len(name) == 1 or name[0] in _PASSWORD_LETTERS):
        letters = _letters_of(text, match.start())
        if _is_attached_password(f"-{name}", letters):
            return match.start() + len("-p"), match.end(2)
    how = _hides(name, len(dashes), letters)
    if not how or (text.startswith("--", begin) and _is_an_option(text, begin)):
        return None
    found = _value(text, begin, _PLAIN) if how == "all" else _value(text, begin, _PLAIN, _LONGEST_EVERYDAY)
    if found is None:
        return None
    value = text[slice(*found)]
    if how == "all" or (how == "password" and _is_key_like(value)):
        return found
    user, separator, password = _split_login(value)
    if how != "password" and _is_password(password, how):
        return found[0] + len(user) + len(separator), found[1]
    return None


def _is_an_option(text: str, begin: int) -> bool:
    plain = _PLAIN().match(text, begin)
    return plain is not None and _AN_OPTION().fullmatch(text, *plain.span()) is not None


def _value(text: str, begin: int, plain: Shape, longest: int = _AS_IT_IS) -> tuple[int, int] | None:
    """The span of the value at an offset; None if there is nothing to redact.

    Args:
        text: the text that holds it.
        begin: the offset.
        plain: matches the value if it is not quoted.
        longest: how much of it is read.
    """
    quote = _QUOTE().match(text, begin)
    if quote is not None:
        begin = quote.end()
        end = _end_of_quote(text, begin, quote.group(1), longest)
    elif text.startswith("[", begin):
        begin += 1
        end = text.find("]", begin, begin + min(longest, _LONGEST_LIST))
        end = _end_of_line(text, begin, longest) if end < 0 else end
    elif text.startswith(("{", "<"), begin):
        return None
    else:
        match = plain().match(text, begin, min(len(text), begin + longest))
        if match is None:
            return None
        word = match.group()
        end = begin + len(word if word.endswith(REDACTED) else word.rstrip(")]}>"))
    scheme = _SCHEME().match(text, begin, end) if quote is not None else _SCHEME().match(text, begin)
    if scheme is not None:
        begin = scheme.end()
        if begin >= end:  # the value is the word after the scheme
            match = plain().match(text, begin)
            end = match.end() if match is not None else begin
    return (begin, end) if _hides_something(text, begin, end) else None


def _end_of_quote(text: str, begin: int, quote: str, longest: int) -> int:
    """Where a quoted value ends; the end of the line if the quote is not closed on it.

    A quote that a tool or a log has cut off must not swallow what follows it.
    """
    end = min(len(text), begin + longest)
    at = begin
    while (found := text.find(quote, at, end)) >= 0:
        newline = -1 if quote in _BLOCKS else text.find("\n", at, found)
        if newline >= 0:
            return newline
        if len(quote) > 1 or text[found - 1] != "\\" or found == begin:
            return found
        at = found + 1
    return _end_of_line(text, at, end - at)


def _end_of_line(text: str, begin: int, longest: int) -> int:
    end = min(len(text), begin + longest)
    newline = text.find("\n", begin, end)
    return end if newline < 0 else newline


def _hides_something(text: str, begin: int, end: int) -> bool:
    if end <= begin:
        return False
    if end - begin > len(REDACTED):
        return True
    value = text[begin:end]
    return value.lower() not in _OPEN_VALUES and not _EMPTY.issuperset(value)


def _redacted_value(value: str) -> str:
    return REDACTED if _hides_something(value, 0, len(value)) else value


def _is_random(value: str) -> bool:
    return len(value) >= _LEAST_RANDOM and _RANDOM().fullmatch(value) is not None


def _is_key_like(value: str) -> bool:
    """The same where a name or a number is possible as well."""
    return _is_random(value) and _ORDINARY().fullmatch(value) is None


def _has_space(text: str) -> bool:
    return any(map(str.isspace, text))


# --------------------------------------------------------------------------------------------------------------------
# By position in a URL


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
    """The span of the secret part of ``user:password@host/…``.

    An unquoted password may hold characters that end a host name: ``u:p/w@h``, ``u:a@b@h``.
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
    if not colon or not password or _is_random(user):
        # A token alone, or instead of the user.
        plain = scheme.endswith(("http", "https")) and user not in _USERS
        return (0, at) if plain or _is_random(user) else None
    return (len(user) + 1, at) if _hides_something(password, 0, len(password)) else None
