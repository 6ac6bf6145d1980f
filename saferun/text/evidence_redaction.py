"""Redaction of evidence: output of tools, and names in stacks and Flight Recorder dumps. Pure.

Names of functions and files may hold secrets. A path is redacted component by component, so that what follows a secret
stays; line numbers always do.
"""

from __future__ import annotations

from collections.abc import Iterable

from saferun.evidence.job_evidence import Capture, CoreDump, Evidence, Frame, RankCollectives, StackDump, ThreadStack
from saferun.text.redaction import redacted_json, redacted_path, redacted_text


def evidence_without_secrets(evidence: Evidence) -> Evidence:
    """A host's evidence as it may leave the host."""
    capture, cores = evidence.capture, evidence.cores
    rest: Evidence = redacted_json(evidence._replace(capture=Capture(), cores=()))
    names = _Names()
    return rest._replace(capture=_capture(capture, names), cores=tuple(_core(core, names) for core in cores))


def capture_without_secrets(capture: Capture) -> Capture:
    """A capture as it may be shown."""
    return _capture(capture, _Names())


def threads_without_secrets(threads: Iterable[ThreadStack]) -> tuple[ThreadStack, ...]:
    """Threads as they may be shown."""
    names = _Names()
    return tuple(names.thread(thread) for thread in threads)


class _Names:
    """Redacts each distinct call once: hundreds of processes share the same ones."""

    def __init__(self) -> None:
        self._calls: dict[Frame, Frame] = {}
        self._texts: dict[str, str] = {}

    def thread(self, thread: ThreadStack) -> ThreadStack:
        return thread._replace(name=self.text(thread.name), frames=tuple(map(self._call, thread.frames)))

    def _call(self, frame: Frame) -> Frame:
        known = self._calls.get(frame)
        if known is None:
            known = frame._replace(function=redacted_text(frame.function), file=redacted_path(frame.file))
            self._calls[frame] = known
        return known

    def text(self, text: str) -> str:
        known = self._texts.get(text)
        if known is None:
            known = self._texts[text] = redacted_text(text)
        return known

    def collectives(self, one: RankCollectives) -> RankCollectives:
        groups = []
        for group in one.groups:
            calls = tuple(
                call._replace(
                    op=self.text(call.op),
                    sizes=self.text(call.sizes),
                    frames=tuple(map(self._call, call.frames)),
                    output_sizes=self.text(call.output_sizes),
                    dtypes=self.text(call.dtypes),
                )
                for call in group.calls
            )
            groups.append(
                group._replace(group=self.text(group.group), description=self.text(group.description), calls=calls)
            )
        return one._replace(groups=tuple(groups), failure=self.text(one.failure), incomplete=self.text(one.incomplete))


def _capture(capture: Capture, names: _Names) -> Capture:
    rest: Capture = redacted_json(capture._replace(stacks=(), collectives=()))
    return rest._replace(
        stacks=tuple(_stack(dump, names) for dump in capture.stacks),
        collectives=tuple(map(names.collectives, capture.collectives)),
    )


def _stack(dump: StackDump, names: _Names) -> StackDump:
    return dump._replace(
        name=names.text(dump.name),
        tool=names.text(dump.tool),
        failure=names.text(dump.failure),
        threads=tuple(map(names.thread, dump.threads)),
    )


def _core(core: CoreDump, names: _Names) -> CoreDump:
    rest: CoreDump = redacted_json(core._replace(threads=()))
    return rest._replace(threads=tuple(map(names.thread, core.threads)))
