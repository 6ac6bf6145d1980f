"""Opens a rank's Python for looking at, without the script noticing.

``sitecustomize.py`` loads it at the start of a Python that can read it. With ``SAFERUN_HOOK=<prefix>`` in the
environment, the process of number P

* writes the stack of its main thread to ``<prefix>.P.stacks`` when signal 63 arrives, in the middle of C code too;
* prints the stacks of its threads if it crashes, where ``SAFERUN_FAULTHANDLER`` asks for it;
* serves torch's Flight Recorder on the Unix socket ``<prefix>.P.sock`` from its first process group on;
* writes what ends it by an exception, with what the locals are, to ``<prefix>.failure`` (``saferun_failure.py``,
  ``saferun_written.py``);
* records its last Python calls in ``<prefix>.P.calls`` if ``SAFERUN_TRACE`` asks for it (``saferun_calls.py``);
* opens a debugger at an exception that ends it if ``SAFERUN_PDB`` asks for it (``saferun_pdb.py``);
* may call ``os.fsync`` for its stdout and stderr, which are files under torchrun, and pipes here.

Only what has been imported before (``os``, ``sys``) and one builtin module may be used: a script that asks what is in
``sys.modules`` gets the same answer as without. That is also why no ``from __future__`` stands here. The syntax is that
of Python 3.6: a rank may be a shell script that starts the system's Python as well.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_STACKS_SIGNAL = 63
"""SIGRTMAX-1. The high end is unused: C libraries keep the low real-time signals, programs count from SIGRTMIN."""
_HIGH_DESCRIPTOR = 200
"""What is open here is numbered from this on, so that the script's own files have the numbers that they always had."""
_LONGEST_SOCKET_PATH = 107
"""In bytes: unix(7)."""
_SILENT = 4
"""Above torch's most severe log level."""
_LARGEST_MODULE = 1 << 20
_EINVAL = 22
_S_IFMT, _S_IFIFO = 0o170000, 0o010000
_MANY = 64
_MOST_SWEPT = 128
_SPARE_FACTOR, _SPARE_THREADS = 8, 256
"""The worker server's threads must fit into the limits so many times, and so many more: the script needs some, too."""


# -------------------------------------------------------------------------------------------------------------- stacks


def _stacks_file(prefix: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    return os.open(f"{prefix}.{os.getpid()}.stacks", flags, 0o600)


def _raised(descriptor: int) -> int:
    """The same file, under the highest free number below 256 that the limit allows."""
    for number in range(255, descriptor, -1):
        try:
            os.fstat(number)
        except OSError:
            try:
                os.dup2(descriptor, number, inheritable=False)
            except OSError:
                continue
            os.close(descriptor)
            return number
    return descriptor


def _sweep(prefix: str) -> None:
    """Remove the empty files of processes that are gone: a job may start children without number."""
    directory, _, stem = prefix.rpartition("/")
    names = os.listdir(directory)
    # Not all of very many at once, which may be of processes that live: another process looks at others.
    first = os.getpid() % len(names) if len(names) > _MOST_SWEPT else 0
    for name in names[first : first + _MOST_SWEPT]:
        path = f"{directory}/{name}"
        pid, _, kind = name.removeprefix(f"{stem}.").partition(".")
        if kind in {"stacks", "sock"} and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            try:
                if not os.stat(path).st_size:
                    os.unlink(path)
            except OSError:
                pass


def _offer_stacks(prefix: str) -> None:
    known = "faulthandler" in sys.modules
    import faulthandler

    if not known:
        del sys.modules["faulthandler"]
    wanted = os.environ.get("SAFERUN_FAULTHANDLER") and "PYTHONFAULTHANDLER" not in os.environ
    if wanted and not faulthandler.is_enabled():
        # All children would inherit PYTHONFAULTHANDLER, and signal.getsignal would answer None instead of SIG_DFL.
        try:
            faulthandler.enable()
        except Exception:  # noqa: S110 - a site may have its own kind of stderr
            pass
    descriptor = _raised(_stacks_file(prefix))
    # Of the thread that gets the signal, the main one. The frames of threads that run meanwhile cannot be followed: the
    # process may crash of that (python/cpython#116008).
    faulthandler.register(_STACKS_SIGNAL, descriptor, all_threads=False, chain=False)
    identity = os.fstat(descriptor)

    def follow_fork() -> None:
        # The child inherits descriptor and handler, but has a name of its own.
        nonlocal identity
        try:
            if not os.path.samestat(os.fstat(descriptor), identity):
                return  # the script has closed it, and uses the number for something else
            own = _stacks_file(prefix)
            os.dup2(own, descriptor, inheritable=False)
            os.close(own)
            identity = os.fstat(descriptor)
            if not os.getpid() % 16:
                _sweep(prefix)
        except Exception:  # noqa: S110 - silent
            pass

    os.register_at_fork(after_in_child=follow_fork)
    if not os.getpid() % 16:
        _sweep(prefix)


# ------------------------------------------------------------------------------------------------------- worker server


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _siblings() -> int:
    """How many children this process's parent has; a large number where the kernel does not tell."""
    parent = os.getppid()
    return len(_read(f"/proc/{parent}/task/{parent}/children").split()) or _MANY


def _has_room_for(threads: int) -> bool:
    """Whether that many more threads, in every rank of the host, take a small part of what the limits leave.

    The server's thread makes the others and cannot bear to be refused one: the rank would die of it.
    """
    for line in _read("/proc/self/limits").splitlines():
        # Each thread takes a stack of it, of many megabytes.
        if line.startswith(("Max address space", "Max data size")) and line[25:].split()[0] != "unlimited":
            return False
    if _read("/proc/sys/vm/overcommit_memory").strip() == "2":
        return False
    wanted = _SPARE_FACTOR * threads * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + _SPARE_THREADS
    limit = os.sysconf("SC_CHILD_MAX")  # RLIMIT_NPROC; a user has at most as many threads as the host
    if limit >= 0 and int(_read("/proc/loadavg").split()[3].partition("/")[2]) + wanted > limit:
        return False
    groups = {"/sys/fs/cgroup", "/sys/fs/cgroup/pids"}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup/pids" if controllers == "pids" else "/sys/fs/cgroup"
        while path.strip("/"):
            groups.add(root + path)
            path = path.rpartition("/")[0]
    for group in groups:
        most = _read(f"{group}/pids.max").strip()
        if most.isdecimal() and int(_read(f"{group}/pids.current")) + wanted > int(most):
            return False
    return True


def _serve(prefix: str, rank_pid: int) -> None:
    """Start torch's worker server, without a line of its log, for as long as the process lives."""
    ctypes = sys.modules["ctypes"]
    path = f"{prefix}.{os.getpid()}.sock"
    # It answers with as many threads as the host has processors, eight at least. The forked children of a rank may all
    # start theirs at the same moment.
    processes = 1 if os.getpid() == rank_pid else _siblings()
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        return
    if not _has_room_for(max(9, os.cpu_count() or 1) * processes):
        # A file instead of the socket: reports say why there is none.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        return
    # Looked up, never loaded. A torch that logs by other means has no such variable, and then there is no server.
    level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so", os.RTLD_NOLOAD), "FLAGS_caffe2_log_level")
    try:
        os.unlink(path)  # of a process that had the number before
    except OSError:
        pass
    occupied = [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)]
    before = level.value
    try:
        while occupied[-1] < _HIGH_DESCRIPTOR - 1:
            occupied.append(os.dup(occupied[0]))
        level.value = _SILENT
        server = sys.modules["torch._C._distributed_c10d"]._WorkerServer(path)  # noqa: SLF001 - torch has no public name
    finally:
        level.value = before
        for descriptor in occupied:
            os.close(descriptor)
    # One reference too many, so that it is never destroyed. Its end writes to stderr, and in a forked child it would
    # wait for a thread that only the parent has.
    ctypes.pythonapi["Py_IncRef"](ctypes.py_object(server))


class _TorchWatcher:
    """Stands in ``sys.meta_path``, finds nothing, and learns so that ``torch.distributed`` is being imported.

    It stays there: taking it out while another thread walks that list would make the thread miss a finder.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._is_waiting = True
        self.process = os.getpid()  # whose children saferun.record leaves alone

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if self._is_waiting and name.startswith("torch.distributed."):
            try:
                self._check()
            except Exception:  # noqa: S110 - silent
                pass

    def _check(self) -> None:
        module = sys.modules.get("torch.distributed.distributed_c10d")
        if not hasattr(module, "init_process_group"):
            return  # not there yet, or only half; the modules that follow it are asked for too
        self._is_waiting = False
        prefix = self._prefix
        # Not at once: many a process imports torch and never has a process group, and a fork in a process that has
        # threads is warned of. A process group starts threads anyway, and every new one is registered here.
        register = getattr(module, "_register_process_group", None)
        if register is None:
            _serve(prefix, self.process)
            return

        has_begun = False

        def register_first(*arguments: object, **named: object) -> object:
            nonlocal has_begun
            if getattr(module, "_register_process_group", None) is register_first:
                # A program may have put something of its own in its place, which calls this.
                setattr(module, "_register_process_group", register)  # noqa: B010 - mypy knows no such module
            if not has_begun:
                has_begun = True
                try:
                    _serve(prefix, self.process)
                except Exception:  # noqa: S110 - silent
                    pass
            return register(*arguments, **named)

        setattr(module, "_register_process_group", register_first)  # noqa: B010 - as above


# ------------------------------------------------------------------------------------------------------------ failures


def _held(name: str) -> "Callable[[], dict[str, Any]]":
    """What becomes the names of a module of this directory, when it is called.

    Its compiled content is held, since the file may be out of reach when it is wanted; to run it takes several times as
    long. Where it has not been compiled yet, it is imported, which does that for the next rank.
    """
    external = sys.modules["_frozen_importlib_external"]
    try:
        path = os.path.join(os.path.dirname(__file__), f"{name}.py")
        source = os.stat(path)
        folder, _, file = str(__spec__.cached).rpartition("/")
        descriptor = os.open(f"{folder}/{file.replace(__name__, name, 1)}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(descriptor, _LARGEST_MODULE)
        finally:
            os.close(descriptor)
        wanted = (0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
        numbers = tuple(int.from_bytes(content[at : at + 4], "little") for at in (4, 8, 12))
        if content[:4] == external.MAGIC_NUMBER and numbers == wanted and len(content) < _LARGEST_MODULE:

            def run() -> "dict[str, Any]":
                names: dict[str, Any] = {"__name__": name}
                code = sys.modules["marshal"].loads(memoryview(content)[16:])
                # Compiled elsewhere, it would pass for a file of the script's directory.
                sys.modules["_imp"]._fix_co_filename(code, path)  # noqa: SLF001 - as import does
                exec(code, names)  # noqa: S102 - as import does
                return names

            return run
    except (OSError, AttributeError, KeyError):
        pass
    try:
        module = __import__(name)
    finally:
        sys.modules.pop(name, None)
    return lambda: vars(module)


def _renew(path: str) -> None:
    """Note when this process ends: functions that run at exit may take long, and this is called by the last of them."""
    if path.startswith(("/dev/shm/", "/run/")):  # noqa: S108 - no file of that name; a disk might have to be waited for
        try:
            os.utime(path)
        except Exception:  # noqa: S110 - silent
            pass


def _record_failures(prefix: str) -> None:  # noqa: C901 - what is kept must not outlive this function
    """Have what ends this process recorded: when its traceback is printed, else, where others do that, at its end."""
    failure, written = _held("saferun_failure"), _held("saferun_written")
    rings = _held("saferun_rings") if os.environ.get("SAFERUN_TRACE") else None
    known = "atexit" in sys.modules
    import atexit

    # Before 3.10 Python calls the module at its end, and nothing else keeps it alive.
    if not known and sys.version_info >= (3, 10):
        del sys.modules["atexit"]
    pid = os.getpid()
    path = f"{prefix}.failure"
    recorded = [0]  # no exception: what its frames have ends when it always has
    is_of_end = [False]  # of that one

    def uncaught() -> "Any":  # noqa: ANN401 - an exception, or what the script has put there
        # Python sets it ahead of its call of the hook; a script that prints an exception which it handles does not.
        error = getattr(sys, "last_exc", None)
        # Not by its truth value, which is code of the script's.
        return getattr(sys, "last_value", None) if error is None else error

    def keep(error: object, trace: object) -> None:
        # A forked child is no rank.
        if not isinstance(error, BaseException) or os.getpid() != pid:
            return
        is_last = error is uncaught()
        # That one lives until the end; of another, a later exception may have the address, or it is raised again.
        if not (is_last and is_of_end[0] and id(error) == recorded[0]):
            recorded[0], is_of_end[0] = id(error), is_last
            try:
                calls = (lambda: rings()["last_calls"](prefix)) if rings is not None else None
                names = written()
                write, using = names["write"], {name: names[name] for name in ("is_secret", "as_json")}
                write(path, failure()["described"](error, outer=trace, uncaught=is_last, calls=calls, **using))
            except SystemExit:
                raise  # of a signal handler of the script's
            except BaseException:  # noqa: S110 - silent
                pass

    def keeping(printed: "Callable[..., Any]") -> "Callable[..., Any]":
        def excepthook(kind: object, error: object, trace: object) -> None:
            printed(kind, error, trace)
            keep(error, trace)

        # It can be pickled, as the one in its place.
        excepthook.__module__, excepthook.__qualname__ = "sys", "excepthook"
        return excepthook

    def at_exit() -> None:
        keep(uncaught(), getattr(sys, "last_traceback", None))
        if is_of_end[0] and os.getpid() == pid:
            _renew(path)

    # Whoever compares the two finds what was there: the same, or that of a site's own, which may call the other one.
    is_plain = sys.excepthook is sys.__excepthook__
    sys.__excepthook__ = keeping(sys.__excepthook__)
    sys.excepthook = sys.__excepthook__ if is_plain else keeping(sys.excepthook)
    atexit.register(at_exit)


# ------------------------------------------------------------------------------------------------------------- streams


class _Sync:
    """``os.fsync`` or ``os.fdatasync``, which succeeds for some pipes, where the kernel answers EINVAL.

    No function, because one that is the attribute of a class would become a method.
    """

    def __init__(self, original: "Callable[[Any], None]", is_accepted: "Callable[[Any], bool]") -> None:
        self._original = original
        self._is_accepted = is_accepted
        self.__name__ = self.__qualname__ = original.__name__
        self.__doc__ = original.__doc__
        self.__module__ = "os"

    def __call__(self, fd: "Any") -> None:  # noqa: ANN401 - as os.fsync takes it
        try:
            self._original(fd)
        except OSError as error:
            if error.errno != _EINVAL or not self._is_accepted(fd):
                raise

    def __reduce__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return repr(self._original)


def _accept_sync() -> None:
    """Let ``os.fsync`` and ``os.fdatasync`` of the pipes that are stdout and stderr now succeed."""

    def identity(file: "Any") -> "tuple[int, int]":  # noqa: ANN401 - as os.fsync takes it
        status = os.fstat(file if isinstance(file, int) else file.fileno())
        return (status.st_dev, status.st_ino) if status.st_mode & _S_IFMT == _S_IFIFO else (0, 0)

    pipes = set()
    for descriptor in (1, 2):
        try:
            pipes.add(identity(descriptor))
        except OSError:
            pass
    pipes.discard((0, 0))

    def is_accepted(file: "Any") -> bool:  # noqa: ANN401 - as above
        return identity(file) in pipes

    if pipes:
        for original in (os.fsync, os.fdatasync):
            setattr(os, original.__name__, _Sync(original, is_accepted))


# ------------------------------------------------------------------------------------------------------------ and gone


def _hide_file() -> None:
    """Name no file as that of the functions that stay: coverage looks for it later, when a copy in memory is gone."""

    def renamed(code: "Any") -> "Any":  # noqa: ANN401 - a code object, or one that it holds
        inner = tuple(renamed(one) if isinstance(one, type(code)) else one for one in code.co_consts)
        return code.replace(co_filename="<saferun>", co_consts=inner)

    try:
        for value in (*globals().values(), *vars(_TorchWatcher).values(), *vars(_Sync).values()):
            if isinstance(value, type(_hide_file)) and value.__globals__ is globals():
                value.__code__ = renamed(value.__code__)
    except AttributeError:  # Python 3.7
        pass


def _act() -> None:
    prefix = os.environ.get("SAFERUN_HOOK", "")
    if prefix.startswith("/"):
        _hide_file()
        try:
            _accept_sync()
        except Exception:  # noqa: S110 - silent
            pass
        try:
            _offer_stacks(prefix)
        finally:
            sys.meta_path.insert(0, _TorchWatcher(prefix))
        wanted = os.environ.get("SAFERUN_TRACE")
        if wanted:
            try:
                __import__("saferun_calls").begin(prefix, wanted)
            finally:
                sys.modules.pop("saferun_calls", None)
        _record_failures(prefix)
        if os.environ.get("SAFERUN_PDB"):
            try:
                __import__("saferun_pdb").begin(prefix)
            finally:
                sys.modules.pop("saferun_pdb", None)


if __name__ == "saferun_hook":
    _act()
