"""Who has the keyboard: ranks that have terminals of their own as stdin, and ask for input at a debugger's prompt.

A rank *asks* while it waits for input from its terminal. That is checked only where it may be so: when a rank has
written a line without an end, when a key is typed, and when the watchdog takes a sample. The rank that asks first has
saferun's own terminal (``keyboard_session``), the others wait for their turn; ``saferunctl attach`` brings the terminal
of another shell (``attached_viewer``).
"""

from __future__ import annotations

import time
from functools import partial

import saferun.linux.syscalls  # noqa: F401 - what a keyboard asks for, once no file may be opened any more
from saferun.errors import suppress
from saferun.launch.hang_watch import KEYBOARD
from saferun.launch.keyboard_session import KeyboardSession
from saferun.launch.stdin_terminals import size_beside_prefix
from saferun.linux.helper import PartBase
from saferun.linux.keyboard import Keyboard, StdinTerminal, may_get_keyboard
from saferun.supervisor.machine import State
from saferun.text.wording import ranks_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from saferun.launch.attached_viewer import AttachedViewer
    from saferun.launch.launch_context import LaunchContext
    from saferun.launch.rank import Rank
    from saferun.launch.rank_group import RankGroup

# After a line without an end: a rank may be on its way to its prompt.
_CHECKS_S = (0.02, 0.1, 0.4, 1.5)
_CHECK_AGAIN_S = 0.5  # at the earliest, at a rank that does not ask
_ASKING_S = 0.1
_WAITING_S = 1.0
# So long after its last prompt a rank still has the screen, and the keys.
_SCREEN_S = 0.3
_KEYS_S = 5.0
_TYPED_S = 0.05
_IDLE_KEYS_S, _LONGEST_IDLE_KEYS_S = 0.2, 2.0
_ANNOUNCE_S = 0.5
# Erases what has been typed, then Ctrl-D.
_END_OF_INPUT = b"\x15\x04"
_NEXT = b"\x1d"  # Ctrl-]
# States in which the ranks do their work; in all others Ctrl-C is for saferun.
_AT_WORK = frozenset({State.STARTING, State.RUNNING, State.CAPTURING})


class RankTerminal:
    """The terminal of one rank.

    Attributes:
        asks: whether the rank waits for input.
        asked_at: when it did last, in monotonic seconds.
        check_at: when that is checked; None: not before it writes something.
        viewer: the terminal of another shell, if one is attached.
    """

    def __init__(self, rank: Rank, terminal: StdinTerminal) -> None:
        self.rank = rank
        self.terminal = terminal
        self.asks = False
        self.asked_at = float("-inf")
        self.check_at: float | None = None
        self.checked_at = float("-inf")
        self.checks = 0
        self.viewer: AttachedViewer | None = None
        self.began_at = self.typed_at = 0.0  # to ask; when a key was typed last
        self.is_announced = False  # that it waits, since it began to ask

    @property
    def number(self) -> int:
        """The rank's number."""
        return self.rank.place.rank

    def end_idle_prompt(self, now: float, limit_s: float) -> bool:
        """Type the end of the input where nothing has been typed for so long. Returns whether that was so."""
        if now - max(self.began_at, self.typed_at) < limit_s:
            return False
        self.typed_at = now
        self.terminal.write(_END_OF_INPUT)
        return True

    def has_reader(self) -> bool:
        """Whether the rank, or the tool that it runs under, waits for input in its main thread."""
        return any(map(self.terminal.has_reader, {self.rank.pid, self.rank.child.pid}))


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
        self._ones: dict[int, RankTerminal] = {}
        self._asking: list[RankTerminal] = []  # the one that has asked first comes first
        self._keyboard: Keyboard | None = None
        self._session: KeyboardSession | None = None
        self._announced: int | None = None  # the rank that had the keyboard last
        self._has_explained = False
        self._watch_at: float | None = None  # when the keyboard is watched again
        self._idle_s = _IDLE_KEYS_S
        self._announce_at: float | None = None
        self._is_held = False

    def begin(self, group: RankGroup) -> None:
        """The ranks of an attempt have been forked."""
        self.close()
        for rank in group.ranks:
            if rank.terminal is None:
                continue
            one = self._ones[rank.place.rank] = RankTerminal(rank, rank.terminal)
            for stream in rank.streams:
                stream.on_chunk = partial(self._on_chunk, one)
            self._context.poller.watch(one.terminal.fd, self._guarded(partial(self._on_echo, one)))
        if self._ones and may_get_keyboard() and any(pane.target.is_terminal for pane in self._context.screen.panes):
            with suppress(OSError):
                self._keyboard = Keyboard()
                self._watch_keyboard()
        self._give_keyboard(time.monotonic())

    def close(self) -> None:
        """No rank of this attempt is left, or the launch is over."""
        for one in list(self._ones.values()):
            self._remove(one)
        self._announce_at = None
        self._drop_keyboard()

    def rank_ended(self, rank: Rank) -> None:
        """A rank has been reaped, and its last output has been taken in."""
        one = self._ones.get(rank.place.rank)
        if one is not None and one.rank is rank:
            self._remove(one)
            self._give_keyboard(time.monotonic())

    def _remove(self, one: RankTerminal) -> None:
        del self._ones[one.number]
        for stream in one.rank.streams:
            stream.on_chunk = None
        if self._session is not None and self._session.rank is one.rank:
            self._end_session()
        if one in self._asking:
            self._asking.remove(one)
        self._context.poller.unwatch(one.terminal.fd)
        one.terminal.close()
        if one.viewer is not None:
            one.viewer.rank_ended()
            one.viewer = None
        self._hold_clock()

    def _guarded(self, call: Callable[[], None]) -> Callable[[], None]:
        """A handler of the loop's that may fail: then the keyboard is saferun's own, as without this part."""

        def guarded() -> None:
            if not self._context.succeeds("give a rank the keyboard", call):
                with suppress(Exception):
                    self.close()

        return guarded

    def resize(self) -> None:
        """The terminal, and with it those of the ranks' output, have another size."""
        for one in self._ones.values():
            if one.viewer is None:
                one.terminal.resize(*size_beside_prefix(one.rank.streams))
        if self._session is not None:
            self._session.resize()

    # ------------------------------------------------------------------------------------------------- who asks

    def are_asking(self) -> bool:
        """Whether a rank waits for input now: the hang clock does not run then."""
        now = time.monotonic()
        for one in list(self._ones.values()):
            if not one.asks:
                self._check(one, now)
        return bool(self._asking)

    def _on_chunk(self, one: RankTerminal, chunk: bytes) -> None:
        if one.viewer is not None:
            one.viewer.show(chunk)
        # What begins with a carriage return is a progress bar.
        if one.check_at is None and not chunk.endswith(b"\n") and not chunk.startswith(b"\r"):
            one.checks = 0
            has_keys = self._session is not None and self._session.rank is one.rank
            pause_s = _CHECKS_S[0] if has_keys else _CHECK_AGAIN_S
            one.check_at = max(time.monotonic() + _CHECKS_S[0], one.checked_at + pause_s)

    def _check(self, one: RankTerminal, now: float) -> None:
        """See whether a rank waits for input."""
        one.checked_at = now
        if one.has_reader():
            one.asked_at = now
            has_screen = one.viewer is not None or (self._session is not None and self._session.rank is one.rank)
            one.check_at = now + (_ASKING_S if has_screen else _WAITING_S)
            if not one.asks:
                one.asks, one.began_at = True, now
                self._asking.append(one)
                self._give_keyboard(now)
                one.check_at = now + _ASKING_S
                self._announce_at = self._announce_at or now + _ANNOUNCE_S
            elif self._session is None:
                self._give_keyboard(now)  # the shell may have brought the launch to the foreground
            self._hold_clock()
            if self._idle_limit_s and one.end_idle_prompt(now, self._idle_limit_s):
                text = f"nothing was typed for {self._idle_limit_s:g} s: the debugger of rank {one.number} ends"
                self._context.report(text)
        elif one.asks:
            one.check_at = now + _ASKING_S
            if now - one.asked_at >= _SCREEN_S:
                one.asks = one.is_announced = False
                self._asking.remove(one)
                one.check_at = now + _CHECK_AGAIN_S
                one.checks = 0
                self._give_keyboard(now)
                self._hold_clock()
        else:
            one.checks += 1
            one.check_at = now + _CHECKS_S[one.checks] if one.checks < len(_CHECKS_S) else None

    def _hold_clock(self) -> None:
        """Who waits for a rank in a debugger is not compared with it."""
        if self._is_held != bool(self._asking):
            self._is_held = bool(self._asking)
            self._context.investigation.hangs.hold(KEYBOARD, self._is_held)

    # ------------------------------------------------------------------------------------- whose the keyboard is

    def _give_keyboard(self, now: float) -> None:
        """Give saferun's own keyboard to the rank whose turn it is, or take it back."""
        session = self._session
        current = self._ones.get(session.rank.place.rank) if session is not None else None
        if self._keyboard is None or self._context.supervisor.state not in _AT_WORK:
            self._end_session()
            return
        waiting = [one for one in self._asking if one.viewer is None and self._attach in {"auto", "any", one.number}]
        if session is not None and current is not None and current.viewer is None:
            if current.asks:
                session.asked_at = now
                session.hold()
                return
            if not waiting:
                session.release()
                if now - session.asked_at >= _KEYS_S and self._attach != current.number:
                    self._end_session()
                return
        self._end_session()
        if isinstance(self._attach, int) and (wanted := self._ones.get(self._attach)) and wanted.viewer is None:
            waiting = [wanted]
        if waiting and self._keyboard.is_in_foreground:
            self._begin_session(waiting[0], now)

    def _begin_session(self, one: RankTerminal, now: float) -> None:
        if self._keyboard is None:
            return
        self._announce(one)
        session = self._session = KeyboardSession(self._context, one.rank, one.terminal, self._keyboard)
        session.asked_at = now
        one.check_at = now + _ASKING_S
        if one.asks:
            session.hold()
        else:
            self._keyboard.take()
        if not self._context.poller.is_watched(self._keyboard.fd):
            self._watch_keyboard()

    def _announce(self, one: RankTerminal) -> None:
        plan = self._context.current.plan
        if self._announced == one.number or plan is None or plan.placement.world_size == 1:
            return
        self._announced = one.number
        text = f"rank {one.number} has the keyboard"
        if not self._has_explained:
            self._has_explained = True
            text += "; Ctrl-C goes to it, twice within a second it stops the launch, as does Ctrl-\\"
        self._context.report(text)

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _announce_waiting(self) -> None:
        """Say which ranks wait for a user to type."""
        new = [one for one in self._asking if not one.is_announced and one.viewer is None]
        session = self._session
        if session is not None:
            new = [one for one in new if one.rank is not session.rank]
        for one in new:
            one.is_announced = True
        if not new:
            return
        numbers = tuple(sorted(one.number for one in new))
        verb = "waits" if len(new) == 1 else "wait"
        text = f"{ranks_text(numbers)} {verb} for input"
        if session is not None and self._attach in {"auto", "any"}:
            number = session.rank.place.rank
            self._context.report(f"{text}, too: after rank {number}, or with Ctrl-]")
        else:
            run = self._context.run_dir.path or self._context.run_id
            self._context.report(f"{text}: saferunctl attach {run} --rank {numbers[0]}")

    # ------------------------------------------------------------------------------------------------------ keys

    def _watch_keyboard(self) -> None:
        self._watch_at = None
        if self._keyboard is not None:
            self._context.poller.watch(self._keyboard.fd, self._guarded(self._on_keys))

    def _pause_keyboard(self, now: float) -> None:
        """What has been typed stays where it is for a while."""
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
        if keyboard is None:
            return
        if keyboard.is_gone:
            self._drop_keyboard()
            return
        if not keyboard.is_in_foreground:
            self._pause_keyboard(now)
            return
        if self._session is None and not self._find_reader(now):
            self._pause_keyboard(now)
            return
        self._idle_s = _IDLE_KEYS_S
        typed = keyboard.read()
        if typed is None:
            self._drop_keyboard()
        elif self._session is not None:
            self._ones[self._session.rank.place.rank].typed_at = now
            before, next_one, after = typed.partition(_NEXT)
            self._session.keys.take(before)
            if next_one:
                self._turn(now)
                if after and self._session is not None:
                    self._session.keys.take(after)
        else:
            # One rank that reads without being found: in another thread, or without the permission to look.
            for one in self._ones.values():
                one.terminal.write(typed)

    def _find_reader(self, now: float) -> bool:
        """Whether what is typed is for a rank; gives it the keyboard if it asks."""
        for one in list(self._ones.values()):
            self._check(one, now)
        return self._session is not None or (len(self._ones) == 1 and self._context.supervisor.state in _AT_WORK)

    def _turn(self, now: float) -> None:
        """Give the keyboard to the next rank that asks."""
        session = self._session
        current = self._ones.get(session.rank.place.rank) if session is not None else None
        if current is not None and current in self._asking:
            self._asking.remove(current)
            self._asking.append(current)
        if any(one is not current and one.viewer is None for one in self._asking):
            self._end_session()
            self._give_keyboard(now)

    def _on_echo(self, one: RankTerminal) -> None:
        echoed = one.terminal.read()
        if echoed is None:
            self._context.poller.unwatch(one.terminal.fd)
        elif echoed and one.viewer is not None:
            one.viewer.show(echoed)
        elif echoed and self._session is not None and self._session.rank is one.rank:
            self._session.echo(echoed)

    # ------------------------------------------------------------------------------------------------ other shells

    def find(self, number: int | None) -> RankTerminal | None:
        """The terminal of a rank; without a number, of the one that asks, or of the only one."""
        if number is not None:
            return self._ones.get(number)
        if self._asking:
            return self._asking[0]
        return next(iter(self._ones.values())) if len(self._ones) == 1 else None

    @property
    def has_any(self) -> bool:
        """Whether a rank has a terminal."""
        return bool(self._ones)

    def attach(self, one: RankTerminal, viewer: AttachedViewer) -> None:
        """The terminal of another shell is the rank's from now on."""
        one.viewer = viewer
        if self._session is not None and self._session.rank is one.rank:
            self._context.report(f"rank {one.number} has the keyboard of another shell (saferunctl attach)")
            self._end_session()
        now = time.monotonic()
        self._check(one, now)
        self._give_keyboard(now)

    def detach(self, one: RankTerminal) -> None:
        """The other shell has gone."""
        one.viewer = None
        one.is_announced = False
        one.terminal.resize(*size_beside_prefix(one.rank.streams))
        if self._ones.get(one.number) is one:
            now = time.monotonic()
            self._announce_at = now + _ANNOUNCE_S
            self._give_keyboard(now)

    # ------------------------------------------------------------------------------------------------------ a part

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [one.check_at for one in self._ones.values()]
        moments += [self._watch_at, self._announce_at]
        now = time.monotonic()
        if self._session is not None:
            moments.append(now + _ASKING_S)
            if self._session.keys.has_waiting:
                moments.append(now + _TYPED_S)
        if any(one.viewer is not None and one.viewer.keys.has_waiting for one in self._ones.values()):
            moments.append(now + _TYPED_S)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if not self._ones:
            return
        self._guarded(partial(self._tick, now))()

    def _tick(self, now: float) -> None:
        for one in list(self._ones.values()):
            if one.check_at is not None and one.check_at <= now:
                self._check(one, now)
            if one.viewer is not None:
                one.viewer.keys.flush()
        if self._session is not None:
            self._session.keys.flush()
            self._give_keyboard(now)
        if self._watch_at is not None and self._watch_at <= now:
            self._watch_keyboard()
        if self._announce_at is not None and self._announce_at <= now:
            self._announce_at = None
            self._announce_waiting()
