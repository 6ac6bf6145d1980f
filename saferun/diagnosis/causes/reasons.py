"""Whether a line of a program's own says why it ends. Pure.

What stands above such a line the program had got over. That takes words which say so: most of what a program prints
last is about its end, its files and its times, and the reason stands above.
"""

from __future__ import annotations

import re

from saferun.diagnosis.lazy_patterns import LazyPattern, is_found

# What launchers and schedulers write below the reason, also in a line that they have broken.
OF_A_TOOL = LazyPattern(
    r"(?:\d{1,6}: )?(?:slurmstepd|srun|prterun|mpirun|mpiexec|orterun)\b\S{0,80}: "
    r"|\[(?:mpiexec|proxy:\S{1,12})@\S{1,80}\] |ABORT {1,2}: |\S{1,120}\.[ch] at line \d"
    r"|(?:See|Run) '(?:docker|podman) "
)
# How a tool, Python or C++ reports the end of a process, whose reason stands above.
OF_A_PROCESS = LazyPattern(
    r"^(?:make(?:\[\d{1,3}\])?: \*\*\* |ninja: build stopped|Command (?:terminated by|exited with)"
    r"|terminate called |Fatal Python error: |(?:Current thread|Thread) 0x|(?:\S{1,120}: line \d{1,6}: {1,8}\d{1,10} )?"
    r"(?:Aborted|Killed|Segmentation fault|Bus error)\b)"
    r"|\bexits with return code = |\bexited with exit code \d|\breturned non-zero exit status "
)
# What a parser of arguments says last; the script's own has a rule.
_OF_A_PARSER = LazyPattern(r"\S{1,200}: error: ")
# What stands before the words of a log line.
_LOG_HEAD = LazyPattern(
    r"(?:\[[^\]]{1,60}\] ?){0,4}(?:[\d:.,/ +-]|(?<=\d)[TZ](?=[\d \]+-])){0,40}"
    r"(?:\[?(?:ERROR|CRITICAL|FATAL|[Ee]rror)\]?[ :|-]{1,6}){0,2}(?:[\w.]{1,60}(?: ?[:|-] |:(?=[A-Za-z])))?"
)
_HAS_LEVEL = LazyPattern(
    r"^[\d:.,/ TZ\[\]+-]{0,40}(?:ERROR|CRITICAL|FATAL)\b(?! (?:in|at|on|of|while|during)\b)"
    r"|[\[|:-] ?(?:ERROR|CRITICAL|FATAL) ?[\]|:-]|^(?:[Ff]atal )?[Ee]rror: |^[Ff]atal: "
)
# That others are lost explains what a library has reported of them; it is no other reason.
ABOUT_OTHERS = LazyPattern(
    r"\b(?:[Oo]ther|[Aa]nother|[Rr]emote|[Pp]eer) (?:rank|worker|node|host|process|task)|\b[Pp]eers?\b"
    r"|\b[Cc]ollectives?\b|\b[Aa]ll[-_ ]?(?:[Rr]educe|[Gg]ather)|\b[Bb]arrier\b|\b[Cc]ommunicat|\b[Nn]etwork\b|\bNCCL\b"
    r"|\b[Gg]loo\b|\b[Cc]onnect|\b[Dd]isconnect|\b[Ss]ockets?\b|\b[Tt]imed out\b|\b[Tt]ime-?out\b"
)
# What a script does before it exits, and what it advises or restates.
_TIDIES_UP = LazyPattern(
    r"\b(?:sav(?:e|ed|ing)|clos(?:e|ed|ing)|clean(?:ed|ing)?|upload(?:ed|ing)?|flush(?:ed|ing)?|destroy(?:ed|ing)?"
    r"|releas(?:e|ed|ing)|dump(?:ed|ing)?|writ(?:e|ing|ten)|stor(?:ed|ing)|remov(?:e|ed|ing)|delet(?:e|ed|ing)"
    r"|notif\w{0,9}|sen[dt]|sending|push(?:ed|ing)?|report(?:ed|ing)?|emergency|elapsed|took|checkpoints?|profiler"
    r"|restart(?:ed|ing)?|resum(?:e|ed|ing)|try|trying|consider|increase|reduce|decrease|please|see|peak|total"
    r"|memory|oom|vram|gpus?|cuda|devices?|disk|space|shm|ports?|address|batch(?:es)?[- _]sizes?)\b",
    re.IGNORECASE,
)
# Of the numbers and the arguments of the program: no library's error has these words.
_OF_ITS_OWN = LazyPattern(
    r"\b(?:nan|inf|non-?finite|diverge[ds]?|diverging)\b|\b(?:worse than|no improvement|unrecognized)\b",
    re.IGNORECASE,
)
_GIVES_A_REASON = LazyPattern(
    r"\b(?:because|since|invalid|missing|unexpected|unknown|unsupported|required|mismatch\w{0,3}|no such)\b"
    r"|\bno (?:data|samples?|batch\w{0,2}|files?|inputs?|valid|config\w{0,9})\b|\bcheck --\w"
    r"|\b(?:not|n't) (?:found|exist|match|fit|enough|supported|allowed|valid|set|installed|a)\b"
    r"|\b(?:below|above|more|less|fewer|greater|larger|smaller|shorter|longer) than\b|\bexceed\w{0,3}\b"
    r"|\b[A-Za-z]\w{1,60}(?:Error|Exception): ",
    re.IGNORECASE,
)
_TOKEN = LazyPattern(r"[^\W\d_]{1,40}")
ENDS = frozenset(
    """abort aborted aborting aborts bye cannot crash crashed exit exited exiting exits fail failed failing fails
    failure gave giving killed killing quit quits quitting shut shutting shutdown stop stopped stopping stops terminate
    terminated terminating""".split()
)
_WITHOUT_REASON = ENDS | frozenset(
    """a above all an and are as at batch because been below code continue could did do done down due during early epoch
    error errors exception fatal for from general get give go goes going had happened has have here in is it iteration
    its job log logs main must no not now of on our please process program rank ranks run script see since so
    something sorry status step task the there this to traceback train trainer training unexpected unknown unexpectedly
    up was we went were will with worker workers wrong""".split()
)


def has_level(line: str) -> bool:
    """Whether a line is logged as an error, or begins with ``error:``."""
    return _HAS_LEVEL.search(line[:160]) is not None


def only_ends(line: str) -> bool:
    """Whether a line says no more than that the program ends: ``training failed, exiting``."""
    head = _LOG_HEAD.match(line)
    text = line[head.end() if head is not None else 0 :]
    return _WITHOUT_REASON.issuperset(token.lower() for token in _TOKEN.findall(text))


def gives_reason(line: str) -> bool:
    """Whether a line says why the program ends: by its words, or as an error that is about the program itself."""
    return names_reason(line) or (has_level(line) and _is_of_the_program(line))


def names_reason(line: str) -> bool:
    """Whether its words alone say why."""
    return is_of_its_own(line) or (_GIVES_A_REASON.search(line) is not None and _is_of_the_program(line))


def is_of_its_own(line: str) -> bool:
    """Whether a line says that the numbers or the arguments of the program are the reason: ``loss is NaN``."""
    return is_found(_OF_ITS_OWN, line) and not _is_of_others(line)


def _is_of_the_program(line: str) -> bool:
    return not (_is_of_others(line) or _TIDIES_UP.search(line) or only_ends(line))


def _is_of_others(line: str) -> bool:
    return (
        OF_A_TOOL.match(line) is not None
        or is_found(OF_A_PROCESS, line)
        or _OF_A_PARSER.match(line) is not None
        or ABOUT_OTHERS.search(line) is not None
    )
