"""The ``saferun`` command, and ``python -m saferun``.

Ctrl-C in the first tenths of a second, while Python is still reading saferun's own files, must end it as it ends any
program: by the signal, without a traceback of imports. So the signal has its default here, before anything else is
imported, until the loop handles it. Where it is ignored (a job in the background of a script), it stays so.

Until the loop begins garbage is not collected: imports make next to none, and to look for it takes a tenth of the time.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` is made of; built in, so that no file is read before this is done
import gc
import sys

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

gc.disable()

try:
    from saferun.linux.quick_imports import import_quickly
except ImportError:
    pass  # a Python that keeps these parts of its import system elsewhere
else:
    import_quickly("saferun")

# Answered without what a launch needs; behind other options it is argparse that finds them.
_HELP_FLAGS = ("-h", "--help", "--help-all")


def main() -> None:
    """The ``saferun`` command; does not return."""
    from saferun.linux.search_path import search_pythons_own_first

    search_pythons_own_first()
    if sys.argv[1:2] and sys.argv[1] in _HELP_FLAGS:
        from saferun.cli.help import show_help

        sys.exit(show_help(sys.argv[1]))
    from saferun.cli.main import main as run
    from saferun.linux.signals import see_children_end

    see_children_end()
    run()


if __name__ == "__main__":
    main()
