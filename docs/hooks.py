"""What mkdocs asks us while it builds the site: pages from outside docs/, links that only a checkout can follow,
and the names in the map of concepts as links to the API."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {  # of the repository, and where they are in the site
    "README.md": "repository/readme.md",
    "LOG.md": "repository/log.md",
    "CONTRIBUTING.md": "repository/contributing.md",
}
MAP = "concepts.md"

_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
_SPAN = re.compile(r"`([^`]+)`")
_FILE = re.compile(r"[\w/]+\.py")
_NAME = re.compile(r"([A-Za-z]\w*(?:\.\w+)*)(\(.*\))?")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri
    source = {place: path for path, place in PAGES.items()}.get(here, f"docs/{here}")
    if here == MAP:
        markdown = linked(markdown)
    return _LINK.sub(lambda found: _in_site(found, source, here), markdown)


def _in_site(link: re.Match[str], source: str, here: str) -> str:
    """A link (or an image) of the file `source` as one of the page `here`: to a page, to a module's API, or, to what
    the site does not have, its text. What exists nowhere stays, and mkdocs complains of it."""
    text, path, anchor = link[1], link[2], link[3] or ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    place = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
    if place is not None:
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"
    if target.endswith(".py") and not target.startswith("tests/"):
        # [`cache.commit`](../dflash_jax/cache.py) is the function
        stem, _, name = text.strip("`").partition(".")
        own = f".{name}" if stem == Path(target).stem and name != "py" else ""
        return f"[{text}][{module(target)}{own}]"
    return text if (ROOT / target).exists() else link[0]


def module(path: str) -> str:
    """'dflash_jax/targets/__init__.py' -> 'dflash_jax.targets'."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def cited(text: str) -> Iterator[tuple[re.Match[str], str, str]]:
    """(code span, file, name) of what the last column of the tables cites: a file and names in it, then another
    file... The name is '' for the file itself. Spans that are neither (flags) are left out."""
    at = 0
    for row in text.splitlines(keepends=True):
        if row.startswith("|"):
            file = ""
            for span in _SPAN.finditer(text, at + row.rstrip().rstrip("|").rindex("|"), at + len(row)):
                if _FILE.fullmatch(span[1]):
                    file = span[1]
                    yield span, file, ""
                elif name := _NAME.fullmatch(span[1]):
                    yield span, file, name[1]
        at += len(row)


def definition(file: str, name: str) -> list[ast.AST]:
    """What 'Class.method' is in a file: [module, class, method]. LookupError when it is not there."""
    nodes: list[ast.AST] = [ast.parse((ROOT / file).read_text())]
    for part in name.split("."):
        nodes.append(members(nodes[-1])[part])
    return nodes


def members(node: ast.AST) -> dict[str, ast.AST]:
    """What a module or a class defines, by name."""
    found: dict[str, ast.AST] = {}
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            found[child.name] = child
        elif isinstance(child, ast.AnnAssign | ast.Assign):
            targets = [child.target] if isinstance(child, ast.AnnAssign) else child.targets
            found |= {target.id: child for target in targets if isinstance(target, ast.Name)}
    return found


def identifier(file: str, name: str) -> str:
    """Where the API has it: fields and constants are listed with their class or module."""
    parts = [module(file), *name.split(".")] if name else [module(file)]
    if name and isinstance(definition(file, name)[-1], ast.AnnAssign | ast.Assign):
        parts.pop()
    return ".".join(parts)


def linked(text: str) -> str:
    """The map with every file and name a link to the API."""
    parts, end = [], 0
    for span, file, name in cited(text):
        parts += [text[end : span.start()], f"[{span[0]}][{identifier(file, name)}]"]
        end = span.end()
    return "".join([*parts, text[end:]])
