"""Values with placeholders: ``{rank_dir}/nccl.%h.%p.log``. Pure.

``{host} {rank} {local_rank} {world_size} {run_dir} {rank_dir}`` are replaced; ``{{rank}}`` stands for the text
``{rank}``. Other braces are kept as they are, so that JSON can be a value.

Without regular expressions: this runs at every launch, and compiling one takes longer than the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

PLACEHOLDERS = ("host", "rank", "local_rank", "world_size", "run_dir", "rank_dir")


def fields(template: str) -> list[str]:
    """The names of the placeholders in a template, known or not, in their order."""
    return [part for kind, part in _parts(template) if kind == "field"]


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with its placeholders replaced; those without a value stay as they are."""
    return "".join(
        part if kind == "text" else values.get(part, "{" + part + "}") if kind == "field" else "{" + part + "}"
        for kind, part in _parts(template)
    )


def literal(text: str) -> str:
    """A template for a literal text, with all braces escaped."""
    return "".join(
        part if kind == "text" else f"{{{{{part}}}}}" if kind == "field" else f"{{{{{{{part}}}}}}}"
        for kind, part in _parts(text)
    )


def _parts(template: str) -> Iterator[tuple[str, str]]:
    """(kind, text): ``text`` as it is, the name of a ``field``, and the name of an ``escaped`` one."""
    at = 0
    while (brace := template.find("{", at)) >= 0:
        doubled = template.startswith("{{", brace)
        begin = brace + 1 + doubled
        end = template.find("}", begin)
        if end < 0:
            break
        # isidentifier alone would accept letters of all alphabets.
        is_name = template[begin:end].isidentifier() and template[begin:end].isascii()
        if is_name and (not doubled or template.startswith("}}", end)):
            yield "text", template[at:brace]
            yield ("escaped" if doubled else "field"), template[begin:end]
            at = end + 1 + doubled
        else:
            yield "text", template[at : brace + 1]
            at = brace + 1
    yield "text", template[at:]
