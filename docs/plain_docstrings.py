"""Docstrings here are plain text: prose with shapes in brackets, columns, formulas, a few lists. To Markdown [B, T]
is a link, P*D the beginning of emphasis, and columns are one paragraph. This griffe extension makes Markdown of
them, and one listing of fields and constants, which the docstring of their class or module explains."""

from __future__ import annotations

import re
from itertools import groupby
from textwrap import dedent, indent
from typing import Any

try:
    from griffe import Docstring, Extension
except ImportError:  # the tests read the functions alone, without the extra `docs`
    Extension = object

_CODE = re.compile(r"(`+[^`]+`+)")
_COLUMNS = re.compile(r"^  |\S {2,}\S")
_EMPHASIS = re.compile(r"(?<![\w*])\*(\w[^*`\n]*\w)\*(?![\w*])")
_LONG = 80  # of a value
_ITEM = re.compile(r"(?m)^(\s*)\* ")


def as_markdown(text: str) -> str:
    """A docstring as Markdown that looks like it: columns and what is indented stay as they are."""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", text.strip("\n")))


def _paragraph(text: str) -> str:
    listed = text.startswith(("* ", "- "))
    parts = groupby(text.splitlines(), lambda line: not listed and bool(_COLUMNS.search(line)))
    texts = [(kept, "\n".join(lines)) for kept, lines in parts]
    return "\n\n".join(indent(dedent(part), " " * 4) if kept else _prose(part) for kept, part in texts)


def _prose(text: str) -> str:
    """What Markdown would take for its own, escaped outside of code."""
    parts = _CODE.split(text)
    parts[::2] = [_escaped(part) for part in parts[::2]]
    return "".join(parts)


def _escaped(text: str) -> str:
    text = _EMPHASIS.sub("\0\\1\0", _ITEM.sub(r"\1- ", text))
    return re.sub(r"([\\*_\[\]#|])", r"\\\1", text.replace("<", "&lt;")).replace("\0", "*")


def fields(values: dict[str, tuple[Any, Any]]) -> str:
    """{name: (annotation, value)} as code; a long value (a table, say) is to be looked up in the source."""
    lines = []
    for name, (annotation, value) in values.items():
        right = f" = {value}" if value is not None else ""
        right = right if len(right) < _LONG and "\n" not in right else " = ..."
        lines.append(name + (f": {annotation}" if annotation is not None else "") + right)
    return "```python\n" + "\n".join(lines) + "\n```"


class PlainDocstrings(Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if obj.kind.value not in ("module", "class"):
            return
        bare = {
            name: (member.annotation, member.value)
            for name, member in obj.members.items()
            if not (member.is_alias or name.startswith("_") or member.has_docstring)
            and member.is_attribute
            and "property" not in member.labels
        }
        for name in bare:
            del obj.members[name]
        if bare:
            said = [obj.docstring.value] if obj.docstring else []
            obj.docstring = Docstring("\n\n".join([*said, fields(bare)]), parent=obj)
