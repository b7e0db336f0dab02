"""What the documentation says exists: names in the map of concepts, modules in the API reference, links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import hooks
import pytest
from plain_docstrings import as_markdown
from structure import PACKAGES, module_name

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "docs" / hooks.MAP).read_text()

CONCEPTS = """
target prefill, single | target prefill, chunked | target prefill, layer-segmented | target layer selection |
feature concatenation | feature fusion | KV injection | mask / noise embeddings | non-causal block |
candidate selection, chain | candidate selection, top-K | target verify, batched | target verify, sequential |
target verify, tree | acceptance | bonus, implicit | bonus, explicit | cache rollback, crop |
cache rollback, snapshot + replay | cache rollback, per-step states | cache rollback, tree | block size, metadata |
block size, override | draft depth | position-decayed loss | random anchors | adaptive block size | feature ring |
feature mirror | CPU embedding | sampling
"""


def resolve(file: str, call: str) -> None:
    """LookupError unless `file` defines what `call` names ('f', 'Class.method', 'f(keyword=0)') with its keywords."""
    expression = ast.parse(call, mode="eval").body
    keywords = [word.arg for word in expression.keywords] if isinstance(expression, ast.Call) else []
    found = hooks.definition(file, call.partition("(")[0])[-1]
    has = set(hooks.members(found))
    if isinstance(found, ast.FunctionDef):
        has = {argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)}
    if missing := [word for word in keywords if word not in has]:
        raise LookupError(f"{call}: no {', '.join(map(str, missing))}")


def test_every_concept_has_a_line_with_a_file_and_a_name() -> None:
    rows = {row.split("|")[1].strip(): row for row in MAP.splitlines() if row.startswith("| ")}
    assert {" ".join(name.split()) for name in CONCEPTS.split("|")} < set(rows)
    for concept, row in rows.items():
        if concept not in ("concept", "dflash-robot"):
            assert any(name for _, file, name in hooks.cited(row) if file), f"'{concept}': no file and name"


def test_what_the_map_cites_exists() -> None:
    cited = [(file, span[1]) for span, file, name in hooks.cited(MAP) if name]
    assert len(cited) > 60
    for file, call in cited:
        assert file, f"`{call}` comes before any file"
        resolve(file, call)


@pytest.mark.parametrize(
    ("file", "call"),
    [
        ("dflash_jax/nowhere.py", "prefill"),
        ("dflash_jax/decode.py", "pre_fill"),
        ("dflash_jax/decode.py", "prefill(chunks=1)"),
        ("dflash_jax/config.py", "DraftConfig.tap"),
        ("dflash_jax/state.py", "Options(trees=1)"),
    ],
)
def test_what_does_not_exist_is_found(file: str, call: str) -> None:
    with pytest.raises((LookupError, FileNotFoundError)):
        resolve(file, call)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_files_and_links_of_a_page_exist(path: Path) -> None:
    """Those of code spans from the root (`tests/structure.py`), those of links from the page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(rf"`((?:{'|'.join((*PACKAGES, 'tests', 'configs'))})/[\w/.-]+)`", text)
    links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    missing = [name for name in spans if not (ROOT / name).exists()]
    missing += [name for name in links if not (path.parent / name).exists()]
    assert not missing


def test_every_public_module_is_in_the_reference_once() -> None:
    listed = re.findall(
        r"^::: (\S+)$", "\n".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")), re.M
    )
    files = [
        path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    ]
    assert sorted(listed) == sorted(module_name(file) for file in files if not file.endswith("__main__.py"))


def test_the_map_links_to_the_api_and_keeps_its_words() -> None:
    cell = "see `dflash_jax/config.py` `DraftConfig.taps`, `luce_taps(count=1)`; `infer/__init__.py` `--flag`"
    assert hooks.linked(f"`x`\n\n| taps | `z` | {cell} |\n") == (
        "`x`\n\n| taps | `z` | see [`dflash_jax/config.py`][dflash_jax.config] "
        "[`DraftConfig.taps`][dflash_jax.config.DraftConfig], [`luce_taps(count=1)`][dflash_jax.config.luce_taps]; "
        "[`infer/__init__.py`][infer] `--flag` |\n"
    )


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("tokens [B, T], S, P*D] and `[x * y]`", r"tokens \[B, T\], S, P\*D\] and `[x * y]`"),
        ("*Matching*: see Decoder.__call__.", r"*Matching*: see Decoder.\_\_call\_\_."),
        ("What:\n\n    a  b\n\nMore", "What:\n\n    a  b\n\nMore"),
        ("What:\na  [T]  b\n   more\nEnd", "What:\n\n    a  [T]  b\n       more\n\nEnd"),
        ("* One [T]\n  more\n* Two", "- One \\[T\\]\n  more\n- Two"),
    ],
)
def test_docstrings_become_markdown_that_looks_like_them(text: str, rendered: str) -> None:
    assert as_markdown(text) == rendered
