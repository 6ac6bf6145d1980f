"""Who has the keyboard: ranks that have terminals of their own as stdin, and ask for input at a debugger's prompt.

A rank *asks* while it waits for input from its terminal. That is checked only where it may be so: when a rank has
written a line without an end, when a key is typed, and when the watchdog takes a sample. The rank that asks first has
saferun's own terminal (``keyboard_session``), the others wait for their turn; ``saferunctl attach`` brings the terminal
of another shell (``attached_viewer``). If none asks, a rank that reads in another thread gets what is typed.
"""

from __future__ import annotations

import time
from functools import partial

import saferun.linux.syscalls  # noqa: F401 - imported now: no file may be opened once ranks run
from saferun.errors import suppress
from saferun.launch.hang_watch import KEYBOARD
from saferun.launch.keyboard_session import KeyboardSession
from saferun.launch.stdin_terminals import size_beside_prefix
from saferun.linux.helper import PartBase
from saferun.linux.keyboard import Keyboard, StdinTerminal, may_get_keyboard
from saferun.linux.procfs import descendants_of, thread_ids
from saferun.linux.terminal_owner import TerminalOwners
from saferun.supervisor.machine import State
from saferun.text.wording import ranks_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.launch.attached_viewer import AttachedViewer
    from saferun.launch.launch_context import LaunchContext
    from saferun.launch.rank import Rank
    from saferun.launch.rank_group import RankGroup

# After a rank has written a line without an end, which may be its prompt, it is checked after each of these pauses.
_CHECKS_S = (0.02, 0.1, 0.4, 1.5)
# A rank that did not ask at its last check, and has not the keyboard, is not checked again before this.
_CHECK_AGAIN_S = 0.5
# How often a rank that asks is checked: with the keyboard or a viewer, and without.
_ASKING_S = 0.1
_WAITING_S = 1.0
# A rank that has stopped asking counts as asking for this long: between two prompts, and while it handles a signal.
_SCREEN_S = 0.3
# It keeps the keyboard for this long, so that keys typed ahead of its next prompt reach it.
_KEYS_S = 5.0
# How often keys that the rank has not read yet are offered to it again.
_TYPED_S = 0.05
# If no rank reads typed keys, the keyboard is not watched for this long: at first, and at most.
_IDLE_KEYS_S, _LONGEST_IDLE_KEYS_S = 0.2, 2.0
_MOST_DESCENDANTS = 16
_MOST_THREADS = 512  # of all ranks
# Ranks that begin to ask within this time are announced together.
_ANNOUNCE_S = 0.5
# Ctrl-U erases what has been typed, Ctrl-D ends the input.
_END_OF_INPUT = b"\x15\x04"
# Ctrl-] passes the keyboard on to the next rank that asks.
_NEXT = b"\x1d"
# States in which the ranks work. In all others no rank has the keyboard, so that Ctrl-C is for saferun.
_AT_WORK = frozenset({State.STARTING, State.RUNNING, State.CAPTURING})


class RankTerminal:
    """The terminal of one rank.

    Attributes:
        asks: whether the rank waits for input.
        left_at: when it was first seen not to wait any more, in monotonic seconds; None: not since it last waited.
        check_at: when it is checked next; None: not before it writes something.
        viewer: the terminal of another shell, if one is attached.
    """

    def __init__(self, rank: Rank, stdin: StdinTerminal) -> None:
        self.rank = rank
        self.stdin = stdin
        self.asks = False
        self.left_at: float | None = None
        self.check_at: float | None = None
        self.checked_at = float("-inf")
        self.checks = 0
        self.viewer: AttachedViewer | None = None
        self.began_at = 0.0  # when it began to ask
        self.typed_at = 0.0  # when a key was last typed for it
        self.is_announced = False  # the user has been informed that it asks

    @property
    def number(self) -> int:
        """The rank's number."""
        return self.rank.assignment.rank

    def end_idle_prompt(self, now: float, limit_s: float) -> bool:
        """End the rank's input if nothing has been typed for ``limit_s``. Returns whether it did."""
        if now - max(self.began_at, self.typed_at) < limit_s:
            return False
        self.typed_at = now
        self.stdin.write(_END_OF_INPUT)
        return True

    def may_have_keyboard(self, attach: str | int) -> bool:
        """Whether saferun's own keyboard may be the rank's; ``attach``: as ``--attach`` chooses."""
        return self.viewer is None and attach in {"auto", "any", self.number}

    def has_reader(self) -> bool:
        """Whether the rank, its tool, or a program of a rank that is a script waits for input in its main thread."""
        is_asking = any(map(self.stdin.has_reader, {self.rank.pid, self.rank.child.pid}))
        return is_asking or any(map(self.stdin.has_reader, descendants_of(self.rank.pid)[:_MOST_DESCENDANTS]))


class RankTerminals(PartBase):
    """The terminals of the ranks of an attempt, and saferun's own. A part of the loop.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._attach = context.config.output.attach
        watch = context.config.watch
        self._idle_limit_s = watch.pdb_timeout_s if watch.pdb else 0.0
        self._terminals: dict[int, RankTerminal] = {}
        self.owners = TerminalOwners()
        self._asking: list[RankTerminal] = []  # the one that has asked first comes first
        self._keyboard: Keyboard | None = None
        self._session: KeyboardSession | None = None
        self._announced: int | None = None  # the rank whose keyboard was announced last
        self._has_explained = False
        self._watch_at: float | None = None  # when the keyboard is watched again
        self._idle_s = _IDLE_KEYS_S
        self._reading_thread = -1  # the thread beside the main ones that was last seen to wait for input
        self._announce_at: float | None = None
        self._is_held = False

    def begin(self, group: RankGroup) -> None:
        """The ranks of an attempt have been forked."""
        self.close()
        for rank in group.ranks:
            if rank.terminal is None:
                continue
            terminal = self._terminals[rank.assignment.rank] = RankTerminal(rank, rank.terminal)
            self.owners.add(rank.terminal.owner)
            for stream in rank.streams:
                stream.on_chunk = partial(self._context.guarded, "look for a prompt", self._on_chunk, terminal)
            self._context.poller.watch(terminal.stdin.fd, self._wrapped(partial(self._on_echo, terminal)))
        if (
            self._terminals
            and may_get_keyboard()
            and any(pane.target.is_terminal for pane in self._context.screen.panes)
        ):
            with suppress(OSError):
                self._keyboard = Keyboard()
                self._watch_keyboard()
        self._give_keyboard(time.monotonic())

    def close(self) -> None:
        """No rank of this attempt is left, or the launch is over."""
        for terminal in list(self._terminals.values()):
            self._remove(terminal)
        self._announce_at = None
        self._drop_keyboard()

    def rank_ended(self, rank: Rank) -> None:
        """A rank has been reaped, and its last output has been taken in."""
        terminal = self._terminals.get(rank.assignment.rank)
        if terminal is not None and terminal.rank is rank:
            self._remove(terminal)
            self._give_keyboard(time.monotonic())

    def _remove(self, terminal: RankTerminal) -> None:
        del self._terminals[terminal.number]
        for stream in terminal.rank.streams:
            stream.on_chunk = None
        if self._session is not None and self._session.rank is terminal.rank:
            self._end_session()
        if terminal in self._asking:
            self._asking.remove(terminal)
        self._context.poller.unwatch(terminal.stdin.fd)
        terminal.stdin.close()
        if terminal.viewer is not None:
            terminal.viewer.rank_ended()
            terminal.viewer = None
        self._hold_clock()

    def _wrapped(self, call: Callable[[], None]) -> Callable[[], None]:
        """Wrap a callback: an exception only disables this feature, and saferun has the keyboard again."""

        def wrapped() -> None:
            if not self._context.succeeds("give a rank the keyboard", call):
                with suppress(Exception):
                    self.close()

        return wrapped

    def resize(self) -> None:
        """The terminal, and with it those of the ranks' output, have another size."""
        for terminal in self._terminals.values():
            if terminal.viewer is None:
                terminal.stdin.resize(*size_beside_prefix(terminal.rank.streams))
        if self._session is not None:
            self._session.resize()

    # ------------------------------------------------------------------------------------------------- who asks

    def are_asking(self) -> bool:
        """Whether a rank waits for input now; if so, the hang clock stands still."""
        now = time.monotonic()
        for terminal in list(self._terminals.values()):
            if not terminal.asks:
                self._check(terminal, now)
        return bool(self._asking)

    def _on_chunk(self, terminal: RankTerminal, chunk: bytes) -> None:
        if terminal.viewer is not None:
            terminal.viewer.show(chunk)
        # Output that begins with a carriage return is a progress bar, not a prompt.
        if terminal.check_at is None and not chunk.endswith(b"\n") and not chunk.startswith(b"\r"):
            terminal.checks = 0
            has_keys = self._session is not None and self._session.rank is terminal.rank
            pause_s = _CHECKS_S[0] if has_keys else _CHECK_AGAIN_S
            terminal.check_at = max(time.monotonic() + _CHECKS_S[0], terminal.checked_at + pause_s)

    def _check(self, terminal: RankTerminal, now: float) -> None:
        """See whether a rank waits for input."""
        terminal.checked_at = now
        if terminal.has_reader():
            terminal.left_at = None
            has_screen = terminal.viewer is not None or (
                self._session is not None and self._session.rank is terminal.rank
            )
            terminal.check_at = now + (_ASKING_S if has_screen else _WAITING_S)
            if not terminal.asks:
                terminal.asks, terminal.began_at = True, now
                self._asking.append(terminal)
                self._give_keyboard(now)
                terminal.check_at = now + _ASKING_S
                self._announce_at = self._announce_at or now + _ANNOUNCE_S
            elif self._session is None:
                self._give_keyboard(now)  # the shell may have brought the launch to the foreground
            self._hold_clock()
            if self._idle_limit_s and terminal.end_idle_prompt(now, self._idle_limit_s):
                text = f"nothing was typed for {self._idle_limit_s:g} s: the debugger of rank {terminal.number} ends"
                self._context.report(text)
        elif terminal.asks:
            terminal.check_at = now + _ASKING_S
            terminal.left_at = terminal.left_at or now
            if now - terminal.left_at >= _SCREEN_S:
                terminal.asks = terminal.is_announced = False
                self._asking.remove(terminal)
                terminal.check_at = now + _CHECK_AGAIN_S
                terminal.checks = 0
                self._give_keyboard(now)
                self._hold_clock()
        else:
            terminal.checks += 1
            terminal.check_at = now + _CHECKS_S[terminal.checks] if terminal.checks < len(_CHECKS_S) else None

    def _hold_clock(self) -> None:
        """While a rank is in a debugger, ranks are not compared, as the others wait for it."""
        if self._is_held != bool(self._asking):
            self._is_held = bool(self._asking)
            self._context.investigation.hangs.hold(KEYBOARD, self._is_held)

    # ------------------------------------------------------------------------------------- whose the keyboard is

    def _give_keyboard(self, now: float) -> None:
        """Give saferun's own keyboard to the rank whose turn it is, or take it back."""
        session = self._session
        current = self._terminals.get(session.rank.assignment.rank) if session is not None else None
        if self._keyboard is None or self._context.supervisor.state not in _AT_WORK:
            self._end_session()
            return
        waiting = [one for one in self._asking if one is not current and one.may_have_keyboard(self._attach)]
        if session is not None and current is not None and current.viewer is None:
            if current.asks and not (session.is_given_up and waiting):
                session.asked_at = now
                session.hold()
                return
            if not waiting:
                session.release()
                if now - session.asked_at >= _KEYS_S and self._attach != current.number:
                    self._end_session()
                return
            self._asking.sort(key=lambda terminal: terminal is current)  # after the others
        self._end_session()
        if isinstance(self._attach, int) and (wanted := self._terminals.get(self._attach)) and wanted.viewer is None:
            waiting = [wanted]
        if waiting and self._keyboard.is_in_foreground:
            self._begin_session(waiting[0], now)

    def _begin_session(self, terminal: RankTerminal, now: float) -> None:
        if self._keyboard is None:
            return
        self._announce(terminal)
        session = self._session = KeyboardSession(self._context, terminal.rank, terminal.stdin, self._keyboard)
        session.asked_at = now
        terminal.check_at = now + _ASKING_S
        if terminal.asks:
            session.hold()
        else:
            self._keyboard.take()
        if not self._context.poller.is_watched(self._keyboard.fd):
            self._watch_keyboard()

    def _announce(self, terminal: RankTerminal) -> None:
        plan = self._context.current.plan
        if self._announced == terminal.number or plan is None or plan.placement.world_size == 1:
            return
        self._announced = terminal.number
        text = f"rank {terminal.number} has the keyboard"
        if not self._has_explained:
            self._has_explained = True
            text += "; Ctrl-C goes to it; twice within a second, or Ctrl-\\, stops the launch"
        self._context.report(text)

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _announce_waiting(self) -> None:
        """Print which ranks wait for input."""
        new = [terminal for terminal in self._asking if not terminal.is_announced and terminal.viewer is None]
        session = self._session
        if session is not None:
            new = [terminal for terminal in new if terminal.rank is not session.rank]
        for terminal in new:
            terminal.is_announced = True
        if not new:
            return
        numbers = tuple(sorted(terminal.number for terminal in new))
        verb = "waits" if len(new) == 1 else "wait"
        text = f"{ranks_text(numbers)} {verb} for input"
        if session is not None and self._attach in {"auto", "any"}:
            number = session.rank.assignment.rank
            self._context.report(f"{text}, too: after rank {number}, or with Ctrl-]")
        else:
            run = self._context.run_dir.path or self._context.run_id
            self._context.report(f"{text}: saferunctl attach {run} --rank {numbers[0]}")

    # ------------------------------------------------------------------------------------------------------ keys

    def _watch_keyboard(self) -> None:
        self._watch_at = None
        if self._keyboard is not None:
            self._context.poller.watch(self._keyboard.fd, self._wrapped(self._on_keys))

    def _pause_keyboard(self, now: float) -> None:
        """Leave what has been typed unread for a while."""
        if self._keyboard is not None:
            self._context.poller.unwatch(self._keyboard.fd)
            self._watch_at = now + self._idle_s
            self._idle_s = min(2 * self._idle_s, _LONGEST_IDLE_KEYS_S)

    def _drop_keyboard(self) -> None:
        self._end_session()
        keyboard, self._keyboard, self._watch_at = self._keyboard, None, None
        if keyboard is not None:
            self._context.poller.unwatch(keyboard.fd)
            keyboard.close()

    def _on_keys(self) -> None:
        keyboard, now = self._keyboard, time.monotonic()
        if keyboard is None or keyboard.is_gone:
            self._drop_keyboard()
            return
        # Who reads is not looked for yet: of a process whose exec waits for a file system, older kernels say nothing.
        is_too_early = self._session is None and self._context.supervisor.state is State.STARTING
        if not keyboard.is_in_foreground or is_too_early:
            self._pause_keyboard(now)
            return
        reader = self._find_reader(now) if self._session is None else None
        if self._session is None and reader is None:
            self._pause_keyboard(now)
            return
        self._idle_s = _IDLE_KEYS_S
        typed = keyboard.read()
        if typed is None:
            self._drop_keyboard()
        elif self._session is not None:
            self._terminals[self._session.rank.assignment.rank].typed_at = now
            for number, piece in enumerate(typed.split(_NEXT)):
                if number:
                    self._pass_keyboard_on(now)
                if piece and self._session is not None:
                    self._session.is_given_up = False
                    self._session.keys.take(piece)
        elif reader is not None:
            reader.stdin.write(typed)

    def _find_reader(self, now: float) -> RankTerminal | None:
        """A rank that asks gets the keyboard. Without one: the only rank, or one of which another thread reads."""
        for terminal in list(self._terminals.values()):
            self._check(terminal, now)
        if self._session is not None or self._context.supervisor.state not in _AT_WORK:
            return None
        allowed = [terminal for terminal in self._terminals.values() if terminal.may_have_keyboard(self._attach)]
        if len(self._terminals) == 1:
            return allowed[0] if allowed else None
        threads = [(tid, terminal) for terminal in allowed for tid in thread_ids(terminal.rank.pid)[1:]]
        threads.sort(key=lambda thread: thread[0] != self._reading_thread)
        for tid, terminal in threads[:_MOST_THREADS]:
            if terminal.stdin.has_reader(tid):
                self._reading_thread = tid
                return terminal
        return None

    def _pass_keyboard_on(self, now: float) -> None:
        """Give the keyboard to the next rank that asks: at once, or when one does before another key is typed."""
        session = self._session
        if session is None or session.is_given_up:
            return
        session.is_given_up = True
        self._give_keyboard(now)
        if self._session is session and len(self._terminals) > 1 and self._attach in {"auto", "any"}:
            self._context.report("no other rank waits for input; the next one that does gets the keyboard")

    def _on_echo(self, terminal: RankTerminal) -> None:
        echoed = terminal.stdin.read()
        if echoed is None:
            self._context.poller.unwatch(terminal.stdin.fd)
        elif echoed and terminal.viewer is not None:
            terminal.viewer.show(echoed)
        elif echoed and self._session is not None and self._session.rank is terminal.rank:
            self._session.echo(echoed)

    # ------------------------------------------------------------------------------------------------ other shells

    def find(self, number: int | None) -> RankTerminal | None:
        """The terminal of a rank; without a number, of the one that asks, or of the only one."""
        if number is not None:
            return self._terminals.get(number)
        if self._asking:
            return self._asking[0]
        return next(iter(self._terminals.values())) if len(self._terminals) == 1 else None

    @property
    def has_any(self) -> bool:
        """Whether a rank has a terminal."""
        return bool(self._terminals)

    def attach(self, terminal: RankTerminal, viewer: AttachedViewer) -> None:
        """The terminal of another shell is the rank's from now on."""
        terminal.viewer = viewer
        if self._session is not None and self._session.rank is terminal.rank:
            self._context.report(f"rank {terminal.number} has the keyboard of another shell (saferunctl attach)")
            self._end_session()
        now = time.monotonic()
        self._check(terminal, now)
        self._give_keyboard(now)

    def detach(self, terminal: RankTerminal) -> None:
        """The other shell has gone."""
        terminal.viewer = None
        terminal.is_announced = False
        if self._terminals.get(terminal.number) is terminal:
            terminal.stdin.resize(*size_beside_prefix(terminal.rank.streams))
            now = time.monotonic()
            self._announce_at = now + _ANNOUNCE_S
            self._give_keyboard(now)

    # ------------------------------------------------------------------------------------------------------ a part

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        if not self._terminals:
            return None
        moments = [terminal.check_at for terminal in self._terminals.values()]
        moments += [self._watch_at, self._announce_at]
        now = time.monotonic()
        if self._session is not None:
            moments.append(now + _ASKING_S)
            if self._session.keys.has_waiting:
                moments.append(now + _TYPED_S)
        if any(
            terminal.viewer is not None and terminal.viewer.keys.has_waiting for terminal in self._terminals.values()
        ):
            moments.append(now + _TYPED_S)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._terminals:
            self._wrapped(partial(self._tick, now))()

    def _tick(self, now: float) -> None:
        for terminal in list(self._terminals.values()):
            if terminal.check_at is not None and terminal.check_at <= now:
                self._check(terminal, now)
            if terminal.viewer is not None:
                terminal.viewer.keys.flush()
        if self._session is not None:
            self._session.keys.flush()
            self._give_keyboard(now)
        if self._watch_at is not None and self._watch_at <= now:
            self._watch_keyboard()
        if self._announce_at is not None and self._announce_at <= now:
            self._announce_at = None
            self._announce_waiting()
