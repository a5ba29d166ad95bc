"""Fields that a docstring describes by lines such as ``name: text`` are a list in the reference.

In the source they are lines of their own, longer ones go on with an indent; to Markdown all of them
would be one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_FIELD = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): ")


class DocstringFields(Extension):
    """Rewrites such paragraphs of every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(_listed, paragraphs))


def _listed(paragraph: str) -> str:
    if not _FIELD.match(paragraph):
        return paragraph
    return "\n".join(_FIELD.sub(_item, line) for line in paragraph.split("\n"))


def _item(match: re.Match[str]) -> str:
    names = ", ".join(f"`{name}`" for name in match[1].split(", "))
    return f"- {names}: "
