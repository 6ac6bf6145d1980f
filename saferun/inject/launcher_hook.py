"""Has saferun run where this Python is about to run torch's launcher.

``saferunctl shim DIR`` writes a copy to DIR/python/sitecustomize.py, for shells that have that directory on PYTHONPATH;
Python imports a module of that name at start-up. In the Python that saferun is installed in,

* ``python -m torch.distributed.run`` and the environment's own ``torchrun`` become ``python -m saferun`` at once;
* ``python -m torch.distributed.launch``, ``accelerate launch`` and ``fabric run`` do when they call torch's launcher,
  with the options that they give it. What cannot be written as a command line is left to torch.

The process stays the same one: exec. saferun and its ranks start without this directory on PYTHONPATH. In all other
processes nothing happens but that the next ``sitecustomize`` on the path follows, as without this one. The syntax and
the modules are those of every Python 3: whatever starts in that shell reads this file.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

PREFIX = ""
"""sys.prefix of the Python that saferun is installed in. The copy has it."""

_RUN = "torch.distributed.run"
# They import torch's launcher and call it in their own process.
_CALLERS = ("accelerate", "accelerate-launch", "fabric", "lightning")
_CALLER_MODULES = (
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "lightning.fabric.cli",
    "lightning_fabric.cli",
)
_SCRIPT = ("training_script", "training_script_args")


def split_command(command: list) -> tuple:  # type: ignore[type-arg]
    """What a Python is to run.

    Args:
        command: its command line.

    Returns:
        The interpreter's own options; ``m``, ``c`` or ``script``, empty where it is neither; the module, the code or
        the path; the arguments of that.
    """
    options: list = []  # type: ignore[type-arg]
    command = list(command[1:])
    while command:
        word = command.pop(0)
        if word == "-" or not word.startswith("-"):
            return options, "script", word, command
        if word.startswith("--"):
            options.append(word)
            if word == "--check-hash-based-pycs" and command:
                options.append(command.pop(0))
            continue
        for index, letter in enumerate(word[1:], 1):
            if letter in "cm":
                if index > 1:
                    options.append(word[:index])
                return options, letter, word[index + 1 :] or (command.pop(0) if command else ""), command
            if letter in "WX":
                options.append(word)
                if index == len(word) - 1 and command:
                    options.append(command.pop(0))
                break
        else:
            options.append(word)
    return options, "", "", []


def launcher_arguments(parser, args) -> list:  # type: ignore[no-untyped-def,type-arg]  # noqa: ANN001
    """The command line that torch's parser reads as these settings.

    Raises:
        ValueError: there is none.
    """
    unknown = set(vars(args)) - {action.dest for action in parser._actions} - {"use_env"}  # noqa: SLF001
    if unknown:
        raise ValueError("settings that torch's parser does not know")
    # Tools write None for a flag that is not set.
    flags = {action.dest for action in parser._actions if action.nargs == 0}  # noqa: SLF001
    settings = {name: value or False if name in flags else value for name, value in vars(args).items()}
    found = []
    for action in parser._actions:  # noqa: SLF001
        value = settings.get(action.dest, action.default)
        if action.dest in _SCRIPT or action.dest == "help" or str(value) == str(action.default):
            continue
        if value is None:
            raise ValueError("no value where torch has one")
        if action.nargs == 0:
            found.append(action.option_strings[-1])
        else:
            found.append(f"{action.option_strings[-1]}={value}")
    command = [*found, args.training_script, *args.training_script_args]
    parser.error = _refuse
    again = vars(parser.parse_args(command))
    if any(str(settings.get(name, value)) != str(value) for name, value in again.items()):
        raise ValueError("settings that no command line has")
    if not getattr(args, "use_env", True):
        command.insert(len(found) + 1, "--local-rank=${local_rank}")  # as torch.distributed.launch has it
    return command


def _refuse(message: str) -> None:
    raise ValueError(message)


def _is_own(path: str) -> bool:
    own = os.path.dirname(os.path.abspath(__file__))
    return bool(path) and os.path.realpath(path) == os.path.realpath(own)


def _clean_environ() -> None:
    """Whatever this process starts knows nothing of the hook."""
    kept = [path for path in os.environ.pop("PYTHONPATH", "").split(":") if not _is_own(path)]
    if any(kept):
        os.environ["PYTHONPATH"] = ":".join(kept)


def _start_saferun(options: list, arguments: list) -> None:  # type: ignore[type-arg]
    """Become saferun. Returns where there is none."""
    import importlib.util

    spec = importlib.util.find_spec("saferun")
    if spec is None or spec.origin is None or not sys.executable:
        return
    _clean_environ()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # at start-up there are none yet
            stream.flush()
    os.execve(sys.executable, [sys.executable, *options, "-m", "saferun", *arguments], os.environ)


def _try(options: list, arguments: list) -> None:  # type: ignore[type-arg]
    try:
        _start_saferun(options, arguments)
    except Exception as error:
        name = type(error).__name__
        os.write(2, f"saferun: cannot run instead of torch's launcher, which runs: {name}: {error}\n".encode())


class LauncherWatcher:
    """Stands in ``sys.meta_path``, and replaces ``run`` of torch's launcher when that is imported.

    Args:
        counts_hosts: whether the caller has options of its own for the number of hosts: what it makes of them counts,
            and not what a scheduler provides.
    """

    def __init__(self, *, counts_hosts: bool) -> None:
        self._is_waiting = True
        self._counts_hosts = counts_hosts
        # Those of the caller's libraries are not saferun's to keep: open devices, for instance.
        self._inherited = set(os.listdir("/proc/self/fd"))

    def find_spec(self, name: str, _path=None, _target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """The module as all others find it; it is changed once it has run."""
        if name != _RUN or not self._is_waiting:
            return None
        self._is_waiting = False
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
                execute(module)
                self._replace_run(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _replace_run(self, module) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        original = getattr(module, "run", None)
        if original is None:
            return

        def run(args):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            try:
                arguments = launcher_arguments(module.get_args_parser(), args)
                if self._counts_hosts and "PET_NNODES" not in os.environ:
                    arguments.insert(0, f"--nnodes={args.nnodes}")
            except Exception:
                arguments = None
            if arguments is None:
                os.write(
                    2, b"saferun: what torch's launcher is called with is no command line; torch's launcher runs\n"
                )
            else:
                for fd in set(os.listdir("/proc/self/fd")) - self._inherited:
                    try:
                        os.set_inheritable(int(fd), False)
                    except OSError:
                        pass
                _try([], arguments)
            return original(args)

        module.run = run


def _act() -> None:
    command = getattr(sys, "orig_argv", None)
    if not command or sys.prefix != PREFIX:
        return
    options, kind, what, arguments = split_command(command)
    tools = os.path.realpath(os.path.join(sys.prefix, "bin"))
    is_tool = kind == "script" and os.path.realpath(os.path.dirname(os.path.abspath(what))) == tools
    tool = os.path.basename(what) if is_tool else ""
    if tool == "torchrun" or (kind, what) == ("m", _RUN):
        _try(options, arguments)
    elif tool == "saferun" or (kind, what) == ("m", "saferun"):
        _clean_environ()
    elif tool in _CALLERS or (kind == "m" and what in _CALLER_MODULES):
        sys.meta_path.insert(0, LauncherWatcher(counts_hosts=what != "torch.distributed.launch"))


def _leave() -> None:
    sys.path[:] = [path for path in sys.path if not _is_own(path)]
    sys.path_importer_cache.pop(os.path.dirname(os.path.abspath(__file__)), None)
    del sys.modules[__name__]


if __name__ == "sitecustomize":
    try:
        _act()
    except Exception:  # noqa: S110 - silent: it may not disturb a program
        pass
    _leave()
    # The next one on the path takes our place. Where there is none, the ImportError is what Python expects then.
    __import__("sitecustomize")
