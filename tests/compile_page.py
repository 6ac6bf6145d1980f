"""Writes ``compiled_template.py`` from the template of report.html: ``python -m tests.compile_page``.

jinja2 takes longer to compile the template than saferun takes for all the rest of a page, and a launch that fails would
wait for it. A test compares the written file with the template.
"""

from __future__ import annotations

import os
import sys

from jinja2.bccache import bc_version

from saferun.report.page.rendering import make_environment, template_digest, template_source

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = os.path.join(_ROOT, "saferun/report/page/compiled_template.py")

_HEAD = '''"""The template of report.html as jinja2 compiles it.

Written by ``python -m tests.compile_page`` from ``template/page.html``: edit that.
"""

'''


def source_text() -> str:
    """The Python source of ``compiled_template.py``."""
    code = make_environment().compile(template_source(), "page.html", "page.html", raw=True, defer_init=True)
    return f'{_HEAD}{code.rstrip()}\n\nDIGEST = "{template_digest()}"\nBYTECODE_VERSION = {bc_version}\n'


if __name__ == "__main__":
    with open(TARGET, "w", encoding="utf-8") as file:
        file.write(source_text())
    sys.stdout.write(f"{os.path.relpath(TARGET)}\n")
