"""Record what torchrun does, for every case of the differential test, with the torch and Python that run this.

    python -m tests.torch.record               # all cases
    python -m tests.torch.record --missing     # those that have none which still holds
    python -m tests.torch.record sigterm tee   # only these; the rest are kept where they still hold

A recording from which what was seen cannot be restored is an error, and is not kept.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401 (signals and umask are as the tests have them)
from tests.ports import own_port
from tests.torch.differential import ALLOWED, Case, differences, launch
from tests.torch.differential_cases import CASES
from tests.torch.recording import Recordings, Scene, case_digest, kept, restored


def record(case: Case, folder: Path) -> dict[str, Any]:
    """Launch a case under torchrun and return its recording.

    Raises:
        RuntimeError: torchrun did not do what the case says, or the recording does not restore what was seen.
    """
    port = own_port()
    seen = launch(case, "torchrun", folder, port)
    if seen["exit codes"] != [case.exit_code] * len(case.nodes):
        raise RuntimeError(f"{case.name}: torchrun ended with {seen['exit codes']}")
    if seen["ranks that wrote a record"] != case.ranks * case.attempts:
        raise RuntimeError(f"{case.name}: {seen['ranks that wrote a record']} ranks wrote a record")
    scene = Scene.of(case, folder, port)
    recording = kept(case, seen, scene)
    if lost := differences(seen, restored(recording, scene), (*ALLOWED, *case.allowed)):
        raise RuntimeError(f"{case.name}: the recording is not what was seen: {lost}")
    return recording | {"case": case_digest(case)}


def main() -> int:
    """Record what is asked for. Returns the exit code."""
    recordings = Recordings.of_installed_torch()
    wanted = set(sys.argv[1:]) or {case.name for case in CASES}
    if wanted == {"--missing"}:
        wanted = {case.name for case in CASES if not recordings.find(case)}
    if unknown := wanted - {case.name for case in CASES}:
        print(f"no case is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    kept_on = {case.name: recordings.find(case) for case in CASES if case.name not in wanted}
    found = {name: recording for name, recording in kept_on.items() if recording is not None}
    with tempfile.TemporaryDirectory(prefix="record-") as name:
        for case in CASES:
            if case.name in wanted:
                print(case.name, flush=True)
                found[case.name] = record(case, Path(name))
                # One by one: what is recorded is kept where a later case fails.
                recordings.write(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
